// SPDX-License-Identifier: Apache-2.0
/*
 * spill_write.c - what is written to the disk tier, and when: by threads that nobody waits for, who give way to reads.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "common/net.h"
#include "service/pool/spill_inside.h"

/* A look so long after, whether somebody reads still. */
#define LOOK_NS (100 * NET_MS)
/* Blocks of the disk are taken so many at a time: writes that need none do not lock out reads. */
#define GROW_BYTES (64u << 20)

void spill_poke(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->writes.poked = 1;
	up_cond_signal(&s->write);
	pthread_mutex_unlock(&s->lock);
}

/* Blocks beyond what the file may hold are the disk's again. With the lock, which it leaves and takes again. */
static void trim(struct spill *s, uint32_t from, uint32_t end)
{
	struct spill_writes *w = &s->writes;
	int fd = s->fd;

	w->trimming = 1;
	pthread_mutex_unlock(&s->lock);
	fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(from * s->slot_bytes),
		  (off_t)((end - from) * s->slot_bytes + GROW_BYTES));
	pthread_mutex_lock(&s->lock);
	w->trimming = 0;
	if (spill_books_trimmed(&s->books, from) && w->has_bytes > from * s->slot_bytes)
		__atomic_store_n(&w->has_bytes, from * s->slot_bytes, __ATOMIC_RELAXED);
}

int spill_enter(struct spill *s)
{
	int on;

	pthread_mutex_lock(&s->lock);
	on = spill_is_on(s);
	s->inside += (uint32_t)on;
	pthread_mutex_unlock(&s->lock);
	return on;
}

int spill_wait(struct spill *s)
{
	struct spill_writes *w = &s->writes;
	uint32_t from, end;
	int on;

	pthread_mutex_lock(&s->lock);
	while (spill_is_on(s)) {
		uint64_t now = pool_now_ns(), until = UINT64_MAX;

		if (!w->trimming && s->trial.state != TRIAL_RUNS && spill_books_may_trim(&s->books, &from, &end)) {
			trim(s, from, end);
			continue;
		}
		if (w->poked && !spill_was_read_lately(s))
			break;
		if (w->poked && !w->under_way && now >= w->pause_ns)
			break;
		if (w->poked)
			until = w->pause_ns > now ? w->pause_ns : now + LOOK_NS;
		up_cond_wait_until(&s->write, &s->lock, until);
	}
	on = spill_is_on(s);
	w->poked = 0;
	s->inside += (uint32_t)on;
	pthread_mutex_unlock(&s->lock);
	return on;
}

void spill_leave(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->inside--;
	up_cond_broadcast(&s->done);
	pthread_mutex_unlock(&s->lock);
}

uint64_t spill_reserve(struct spill *s, uint32_t writer, int file, uint64_t first, uint64_t count,
		       struct spill_copy *out)
{
	uint64_t n = 0;

	pthread_mutex_lock(&s->lock);
	if (spill_is_on(s) && !s->writes.full && !spill_storage_is_quicker(s, file, s->slot_bytes))
		n = spill_books_reserve(&s->books, writer, file, first, count, out);
	s->writes.under_way += !!n;
	if (n)
		spill_ask_trial(s);
	pthread_mutex_unlock(&s->lock);
	return n;
}

int spill_lacks_slot(struct spill *s, int file, uint64_t chunk)
{
	int lacks;

	pthread_mutex_lock(&s->lock);
	lacks = spill_is_on(s) && !s->writes.full && s->books.file[file].valid &&
		!spill_books_has_room(&s->books, file, chunk) && !spill_storage_is_quicker(s, file, s->slot_bytes);
	pthread_mutex_unlock(&s->lock);
	return lacks;
}

/* A write has ended: `sum` of each chunk, or NULL. With the lock. */
static void settle(struct spill *s, const struct spill_copy *c, const uint32_t *sum)
{
	s->writes.under_way--;
	s->writes.poked |= !!sum; /* the rest of the slot, which nobody else may write meanwhile */
	spill_books_settle(&s->books, c, sum);
	up_cond_broadcast(&s->write);
}

void spill_give_up(struct spill *s, const struct spill_copy *c)
{
	pthread_mutex_lock(&s->lock);
	settle(s, c, NULL);
	pthread_mutex_unlock(&s->lock);
}

static int write_slot(struct spill *s, int fd, uint64_t most_bytes, const struct spill_copy *c, const char *buffer)
{
	uint64_t length = (uint64_t)c->count * s->chunk_bytes, at = 0, offset = spill_offset(s, c->slot, c->first);
	uint64_t has = __atomic_load_n(&s->writes.has_bytes, __ATOMIC_RELAXED);

	if (offset + length > has) { /* where it cannot be done, the write does it */
		uint64_t end = most_bytes < has + GROW_BYTES ? most_bytes : has + GROW_BYTES;

		end = end > offset + length ? end : offset + length;
		if (!fallocate(fd, 0, (off_t)has, (off_t)(end - has)))
			__atomic_store_n(&s->writes.has_bytes, end, __ATOMIC_RELAXED);
	}
	while (at < length) {
		ssize_t n = pwrite(fd, buffer + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (!n || n % 4096)
			return -EIO;
		at += (uint64_t)n;
	}
	return 0;
}

static void count_written(struct spill *s, const struct spill_copy *c)
{
	uint64_t bytes = (uint64_t)c->count * s->chunk_bytes;

	s->writes.bytes += bytes;
	if (spill_books_know(&s->books, c))
		s->writes.file[c->file].bytes += bytes;
}

void spill_forget_writes(struct spill *s, int file)
{
	s->writes.file[file].bytes = s->writes.file[file].dropped_bytes = 0;
}

void spill_write(struct spill *s, const struct spill_copy *c, const char *buffer)
{
	uint64_t began = pool_now_ns(), took;
	uint32_t sum[SPILL_SLOT_CHUNKS];
	uint64_t most_bytes;
	int fd, ret;

	for (uint32_t i = 0; i < c->count; i++)
		sum[i] = up_net_checksum(buffer + (uint64_t)i * s->chunk_bytes, s->chunk_bytes);
	pthread_mutex_lock(&s->lock);
	fd = s->fd; /* it stays: this thread has not ended */
	most_bytes = s->books.most * s->slot_bytes;
	pthread_mutex_unlock(&s->lock);
	ret = write_slot(s, fd, most_bytes, c, buffer);
	spill_count_cpu(s);
	pthread_mutex_lock(&s->lock);
	took = pool_now_ns() - began;
	s->writes.busy_ns += took;
	if (!ret)
		count_written(s, c);
	settle(s, c, ret ? NULL : sum);
	if (ret == -ENOSPC || ret == -EDQUOT || ret == -EFBIG) {
		spill_note_errno(s, -ret);
		s->writes.full = -ret;
	} else if (ret) {
		if (spill_books_know(&s->books, c))
			spill_books_drop(&s->books, c->file, c->first / s->books.slot_chunks);
		spill_note_failure(s, -ret);
	}
	s->writes.pause_ns = pool_now_ns() + took;
	pthread_mutex_unlock(&s->lock);
}

void spill_chunks_left(struct spill *s, int file, uint64_t first, uint64_t count)
{
	struct spill_writes *w = &s->writes;
	const struct spill_file *f = &s->books.file[file];

	pthread_mutex_lock(&s->lock);
	for (uint64_t c = first; spill_is_on(s) && !w->full && f->valid && c < first + count; c++) {
		int room = spill_books_has_room(&s->books, file, c);

		if (spill_has_copy(&s->books, f, c))
			continue;
		*(room ? &w->dropped_bytes : &w->refused_bytes) += s->chunk_bytes;
		w->file[file].dropped_bytes += room ? s->chunk_bytes : 0;
	}
	pthread_mutex_unlock(&s->lock);
}
