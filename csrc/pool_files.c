// SPDX-License-Identifier: Apache-2.0
/*
 * pool_files.c - the files of the pool: their memory and their books.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pool.h"

int up_pool_file(struct up_pool *p, int fd, uint64_t size_bytes, int *memfd_ro)
{
	uint64_t bytes = pool_chunk_bytes(p);
	struct pool_file f = { .used = 1, .size = size_bytes, .source = { .fd = -1, .direct_fd = -1 } };
	int number = -ENOSPC, ret;

	/* as for the checkpoints: of fixed size, and the jobs get a description that cannot write */
	ret = up_checkpoint_memfd(size_bytes, &f.memfd, memfd_ro);
	if (ret)
		return ret;
	f.chunks = (size_bytes + bytes - 1) / bytes;
	f.state = calloc(f.chunks, 1);
	f.pins = calloc(f.chunks, 1);
	f.ever = calloc(f.chunks, 1);
	f.touched_ms = calloc(f.chunks, sizeof(*f.touched_ms));
	ret = f.state && f.pins && f.ever && f.touched_ms ? 0 : -ENOMEM;
	if (!ret)
		ret = up_source_open(&f.source, fd, size_bytes);
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
			number = i;
		}
	pool_unlock(p);
	if (number >= 0)
		return number;
	up_source_close(&f.source);
	if (f.map)
		munmap(f.map, f.chunks * bytes);
	free(f.state);
	free(f.pins);
	free(f.ever);
	free(f.touched_ms);
	close(f.memfd);
	close(*memfd_ro);
	return ret ? ret : number;
}

int up_pool_forget(struct up_pool *p, int file)
{
	struct pool_file *f = &p->file[file], gone;

	pthread_mutex_lock(&p->lock);
	if (!f->used || f->regions || f->busy) {
		pool_unlock(p);
		return -EBUSY;
	}
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
	gone = *f;
	p->used_bytes -= f->count.resident_bytes;
	p->count.resident_bytes -= f->count.resident_bytes;
	memset(f, 0, sizeof(*f));
	pool_tell_room(p);
	pool_unlock(p);
	up_source_close(&gone.source);
	if (gone.map)
		munmap(gone.map, gone.chunks * pool_chunk_bytes(p));
	close(gone.memfd);
	free(gone.state);
	free(gone.pins);
	free(gone.ever);
	free(gone.touched_ms);
	return 0;
}

uint64_t up_pool_books(struct up_pool *p, int file, uint8_t **state, uint32_t **touched_ms)
{
	*state = p->file[file].state;
	*touched_ms = p->file[file].touched_ms;
	return p->file[file].chunks;
}

void up_pool_file_counts(struct up_pool *p, int file, struct up_pool_file_counts *out)
{
	pthread_mutex_lock(&p->lock);
	*out = p->file[file].count;
	pool_unlock(p);
}
