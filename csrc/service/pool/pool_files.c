// SPDX-License-Identifier: Apache-2.0
/*
 * pool_files.c - the files of the pool: their memory and their books.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "service/pool/pool.h"

static void free_books(const struct pool_file *f)
{
	free(f->state);
	free(f->pins);
	free(f->ever);
	free(f->stale);
	free(f->kept);
	free(f->rest);
	free(f->refaults);
	free(f->touched_ms);
	free(f->left);
}

int up_pool_file(struct up_pool *p, int fd, uint64_t size_bytes, uint64_t unit_bytes,
		 const struct up_file_status *was, int *memfd_ro)
{
	uint64_t bytes = pool_chunk_bytes(p);
	uint64_t unit = (unit_bytes < RUN_MAX_BYTES ? unit_bytes : RUN_MAX_BYTES) / bytes;
	struct pool_file f = { .used = 1, .size = size_bytes, .unit = unit,
			       .source = UP_NO_SOURCE };
	int number = -ENFILE, ret;
	struct stat st;

	/* as for the checkpoints: of fixed size, and the jobs get a description that cannot write */
	ret = up_checkpoint_memfd(size_bytes, &f.memfd, memfd_ro);
	if (ret)
		return ret;
	if (!fstat(f.memfd, &st))
		f.memory = (struct up_vma){ .inode = st.st_ino, .device_major = major(st.st_dev),
					    .device_minor = minor(st.st_dev) };
	f.chunks = (size_bytes + bytes - 1) / bytes;
	f.state = calloc(f.chunks, 1);
	f.pins = calloc(f.chunks, 1);
	f.ever = calloc(f.chunks, 1);
	f.stale = calloc(f.chunks, 1);
	f.kept = calloc(f.chunks, 1);
	f.rest = calloc(f.chunks, 1);
	f.refaults = calloc(f.chunks, 1);
	f.touched_ms = calloc(f.chunks, sizeof(*f.touched_ms));
	f.left = calloc(f.chunks, sizeof(*f.left));
	ret = f.state && f.pins && f.ever && f.stale && f.kept && f.rest && f.refaults && f.touched_ms && f.left
		      ? 0
		      : -ENOMEM;
	if (!ret)
		ret = up_source_open(&f.source, fd, size_bytes, was);
	if (!ret && p->options.huge) {
		f.map = mmap(NULL, f.chunks * bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f.memfd, 0);
		ret = f.map == MAP_FAILED ? -errno : 0;
		if (!ret)
			madvise(f.map, f.chunks * bytes, MADV_HUGEPAGE);
		else
			f.map = NULL;
	}
	pthread_mutex_lock(&p->lock);
	for (int i = 0; i < POOL_FILES && !ret && number < 0; i++)
		if (!p->file[i].used) {
			p->file[i] = f;
			p->files++;
			number = i;
			guardian_has_file(p, (uint32_t)i);
		}
	pool_unlock(p);
	if (number >= 0 && p->spill) /* without books nothing of it goes to the disk */
		spill_add_file(p->spill, number, f.chunks);
	if (number >= 0)
		return number;
	up_source_close(&f.source);
	if (f.map)
		munmap(f.map, f.chunks * bytes);
	free_books(&f);
	close(f.memfd);
	close(*memfd_ro);
	return ret ? ret : number;
}

/* Nobody maps the file: what was to be read of it is not. */
static void drop_queued(struct up_pool *p, int file)
{
	for (uint32_t i = p->queue_tail; i != p->queue_head; i++) {
		struct pool_job *j = &p->job[p->queue[i % POOL_JOBS]];

		if (j->job.fd == file)
			j->chunk = j->end; /* its turn finds nothing to do */
	}
	for (struct pool_waiter **at = &p->waiting; *at;)
		if ((*at)->file == file)
			pool_drop_waiter(p, at);
		else
			at = &(*at)->next;
	for (uint32_t i = p->demand_tail; i != p->demand_head; i++)
		if (p->demand[i % p->demand_room].file == file)
			p->demand[i % p->demand_room].file = -1;
}

int up_pool_forget(struct up_pool *p, int file)
{
	struct pool_file *f = &p->file[file], gone;

	pthread_mutex_lock(&p->lock);
	pool_await_copies(p, f);
	if (!f->used || f->regions || f->busy) {
		pool_unlock(p);
		return -EBUSY;
	}
	drop_queued(p, file);
	guardian_lost_file(p, (uint32_t)file);
	gone = *f;
	pool_keep_none(p, f);
	p->used_bytes -= f->count.resident_bytes;
	p->count.resident_bytes -= f->count.resident_bytes;
	memset(f, 0, sizeof(*f));
	if (p->spill)
		spill_forget_file(p->spill, file);
	p->files--;
	pool_tell_room(p);
	pool_unlock(p);
	up_source_close(&gone.source);
	if (gone.map)
		munmap(gone.map, gone.chunks * pool_chunk_bytes(p));
	close(gone.memfd);
	free_books(&gone);
	return 0;
}

void up_pool_hush(struct up_pool *p, int file)
{
	pthread_mutex_lock(&p->lock);
	if (p->file[file].used && !p->file[file].regions) {
		drop_queued(p, file);
		pool_tell_room(p);
	}
	pool_unlock(p);
}

int up_pool_park(struct up_pool *p, int file)
{
	struct pool_file *f = &p->file[file];
	struct up_source gone;

	pthread_mutex_lock(&p->lock);
	pool_await_copies(p, f);
	if (!f->used || f->regions || f->busy) {
		pool_unlock(p);
		return -EBUSY;
	}
	drop_queued(p, file);
	gone = f->source;
	f->source = (struct up_source)UP_NO_SOURCE;
	guardian_has_file(p, (uint32_t)file);
	pool_unlock(p);
	up_source_close(&gone);
	return 0;
}

int up_pool_unpark(struct up_pool *p, int file, int fd, const struct up_file_status *was)
{
	struct pool_file *f = &p->file[file];
	struct up_source source = UP_NO_SOURCE;
	int ret = up_source_open(&source, fd, f->size, was);

	if (ret)
		return ret;
	pthread_mutex_lock(&p->lock);
	f->source = source;
	guardian_has_file(p, (uint32_t)file);
	pool_unlock(p);
	return 0;
}

void up_pool_drop(struct up_pool *p, int file)
{
	struct pool_file *f = &p->file[file];

	pthread_mutex_lock(&p->lock);
	for (uint64_t c = 0; f->used && c < f->chunks; c++)
		if (f->state[c] == UP_PRESENT || f->state[c] == UP_FILLING)
			f->stale[c] = f->dropping = p->dropping = 1;
	if (p->spill)
		spill_drop_file(p->spill, file);
	pool_keep_what_is_left(p);
	p->signals++;
	pool_tell_room(p);
	pool_unlock(p);
}

int up_pool_read(struct up_pool *p, int file, uint64_t offset, uint64_t length, char *out)
{
	struct pool_file *f = &p->file[file];
	enum up_source_way way;
	int ret;

	pthread_mutex_lock(&p->lock);
	if (!f->used) {
		pool_unlock(p);
		return -ENOENT;
	}
	f->busy++;
	pool_unlock(p);
	ret = up_source_read(&f->source, out, length, offset, &way);
	pthread_mutex_lock(&p->lock);
	f->busy--;
	up_cond_broadcast(&p->idle);
	pool_unlock(p);
	return ret;
}

/* As up_pool_copy(), from the disk tier. */
static int copy_spilled(struct up_pool *p, int file, uint64_t offset, uint64_t length, char *out)
{
	uint64_t bytes = pool_chunk_bytes(p);
	char *buffer = spill_buffer(bytes);
	int there = buffer && spill_read(p->spill, file, offset / bytes, 1, 0, &buffer, bytes);

	if (there)
		memcpy(out, buffer + offset % bytes, length);
	if (buffer)
		munmap(buffer, bytes);
	return there;
}

int up_pool_copy(struct up_pool *p, int file, uint64_t offset, uint64_t length, char *out)
{
	struct pool_file *f = &p->file[file];
	uint64_t chunk = offset / pool_chunk_bytes(p);
	int there, spilled;

	pthread_mutex_lock(&p->lock);
	there = f->used && chunk < f->chunks && f->state[chunk] == UP_PRESENT &&
		!f->stale[chunk] && f->pins[chunk] < 255;
	spilled = !there && f->used && chunk < f->chunks && p->spill && spill_run(p->spill, file, chunk, 1, &there) && there;
	if (!there) {
		pool_unlock(p);
		return 0;
	}
	f->busy++;
	if (spilled) {
		pool_unlock(p);
		there = copy_spilled(p, file, offset, length, out);
		pthread_mutex_lock(&p->lock);
		f->busy--;
		up_cond_broadcast(&p->idle);
		pool_unlock(p);
		return there;
	}
	f->pins[chunk]++; /* it is not punched meanwhile */
	pool_unlock(p);
	there = pread(f->memfd, out, length, (off_t)offset) == (ssize_t)length;
	pthread_mutex_lock(&p->lock);
	f->pins[chunk]--;
	f->busy--;
	up_cond_broadcast(&p->idle);
	pool_tell_room(p);
	pool_unlock(p);
	return there;
}

uint64_t up_pool_books(struct up_pool *p, int file, struct up_pool_books *out)
{
	const struct pool_file *f = &p->file[file];

	*out = (struct up_pool_books){
		.state = f->state,
		.kept = f->kept,
		.spilled = p->spill ? spill_copies(p->spill, file) : NULL,
		.spilled_chunks = p->spill ? spill_slot_chunks(p->spill) : 0,
		.refaults = f->refaults,
		.touched_ms = f->touched_ms,
		.left = f->left,
	};
	return f->chunks;
}

void up_pool_file_counts(struct up_pool *p, int file, struct up_pool_file_counts *out)
{
	pthread_mutex_lock(&p->lock);
	*out = p->file[file].count;
	if (p->spill)
		spill_count_file(p->spill, file, out);
	pool_unlock(p);
}
