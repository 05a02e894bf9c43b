// SPDX-License-Identifier: Apache-2.0
/*
 * spill_read.c - what comes back from the disk tier, and when it had better come from elsewhere.
 *
 * Writes may be torn, lost or misplaced, and reads may bring anything: what does not have the checksum that lies in
 * memory is no copy. A read is another thread's, so that who waits for it can go elsewhere; its buffer then belongs to
 * that thread until it ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/net.h"
#include "service/pool/spill_inside.h"

/* A read is waited for so long at the least. */
#define PATIENCE_LEAST_NS (50 * NET_MS)
/* Somebody reads, if one has ended within so long. */
#define READ_LATELY_NS (100 * NET_MS)
/* Storage must be so much quicker (5 : 4): it is everybody's. One read in so many tries the disk all the same. */
#define FAVOUR 5 / 4
#define TRY_AGAIN 64u
/* Rates are told, and compared, of so many. */
#define RATED_BYTES (1u << 20)

enum read_state { READ_QUEUED, READ_BEGUN, READ_DONE, READ_LOST };

struct spill_read {
	struct spill_read *next;
	enum read_state state;
	char *buffer;
	size_t room;
	int result;
	uint64_t asked_ns;
	struct spill_place at;
};

char *spill_buffer(size_t room)
{
	char *b = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (b == MAP_FAILED)
		return NULL;
	madvise(b, room, MADV_HUGEPAGE);
	return b;
}

/* ------------------------------------------------------------------ from where */

int spill_storage_is_quicker(const struct spill *s, int file, uint64_t bytes)
{
	uint64_t disk = net_expected_ns(&s->reads.disk, bytes);
	uint64_t storage = net_expected_ns(&s->reads.storage[file], bytes);

	return disk && storage && storage * FAVOUR < disk;
}

int spill_is_slower(const struct spill *s, uint64_t *disk_rate, uint64_t *storage_rate)
{
	uint64_t disk_ns = net_expected_ns(&s->reads.disk, RATED_BYTES), least_ns = 0;

	for (int i = 0; i < POOL_FILES && disk_ns; i++) {
		uint64_t ns = net_expected_ns(&s->reads.storage[i], RATED_BYTES);

		if (ns && !spill_storage_is_quicker(s, i, RATED_BYTES))
			return 0;
		if (ns && (!least_ns || ns < least_ns))
			least_ns = ns;
	}
	if (!least_ns)
		return -1;
	*disk_rate = RATED_BYTES * 1000000000ull / disk_ns;
	*storage_rate = RATED_BYTES * 1000000000ull / least_ns;
	return 1;
}

int spill_was_read_lately(const struct spill *s)
{
	const struct spill_reads *r = &s->reads;

	return r->under_way || (r->ended_ns && pool_now_ns() - r->ended_ns < READ_LATELY_NS);
}

uint64_t spill_longest_ns(struct spill *s)
{
	uint64_t ns;

	pthread_mutex_lock(&s->lock);
	ns = net_longest(&s->reads.times);
	pthread_mutex_unlock(&s->lock);
	return ns ? ns : UINT64_MAX;
}

void spill_forget_rate(struct spill *s, int file)
{
	s->reads.storage[file] = (struct net_rate){ 0 };
}

void spill_disk_was_read(struct spill *s, uint64_t bytes, uint64_t took_ns)
{
	net_note_rate(&s->reads.disk, bytes, took_ns);
}

void spill_was_read(struct spill *s, int file, uint64_t bytes, uint64_t took_ns)
{
	pthread_mutex_lock(&s->lock);
	net_note_rate(&s->reads.storage[file], bytes, took_ns);
	pthread_mutex_unlock(&s->lock);
}

uint64_t spill_run(struct spill *s, int file, uint64_t first, uint64_t count, int *here)
{
	uint64_t n = count;

	*here = 0;
	if (!count)
		return 0;
	pthread_mutex_lock(&s->lock);
	if (spill_is_on(s)) {
		n = spill_books_run(&s->books, file, first, count, here);
		/* one that does not answer is left alone until it does */
		*here = *here && !s->reads.lost;
		if (*here && spill_storage_is_quicker(s, file, n * s->chunk_bytes))
			*here = ++s->reads.passed % TRY_AGAIN == 0;
	}
	pthread_mutex_unlock(&s->lock);
	return n;
}

/* ------------------------------------------------------------------ who reads */

/* 0 or -errno; -EBADMSG: these are not the bytes that were written. */
static int read_slot(const struct spill *s, int fd, const struct spill_read *r)
{
	uint64_t length = (uint64_t)r->at.count * s->chunk_bytes, at = 0;
	uint64_t offset = spill_offset(s, r->at.slot, r->at.first);

	while (at < length) {
		ssize_t n = pread(fd, r->buffer + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (!n || n % 4096)
			return -EBADMSG; /* the file has become shorter */
		at += (uint64_t)n;
	}
	for (uint32_t i = 0; i < r->at.count; i++)
		if (up_net_checksum(r->buffer + (uint64_t)i * s->chunk_bytes, s->chunk_bytes) != r->at.sum[i])
			return -EBADMSG;
	return 0;
}

/* With the lock, which it leaves and takes again. */
static void do_read(struct spill *s, struct spill_read *r)
{
	struct spill_reads *all = &s->reads;
	int fd = s->fd, ret;
	uint64_t began = pool_now_ns(), took, length = (uint64_t)r->at.count * s->chunk_bytes;

	r->state = READ_BEGUN;
	all->under_way++;
	pthread_mutex_unlock(&s->lock);
	ret = read_slot(s, fd, r);
	spill_count_cpu(s);
	pthread_mutex_lock(&s->lock);
	all->under_way--;
	all->ended_ns = pool_now_ns();
	took = all->ended_ns - r->asked_ns;
	net_note_time(&all->times, took);
	net_note_rate(&all->disk, length, took);
	all->busy_ns += all->ended_ns - began;
	if (!spill_books_has(&s->books, &r->at)) {
		ret = -ESTALE; /* whatever came */
	} else if (ret) {
		spill_books_drop(&s->books, r->at.file, r->at.first / s->books.slot_chunks);
		spill_note_failure(s, -ret);
	} else if (r->state != READ_LOST) {
		all->bytes += length;
	}
	r->result = ret;
	if (r->state == READ_LOST) {
		all->lost--;
		munmap(r->buffer, r->room);
		free(r);
		return;
	}
	r->state = READ_DONE;
	up_cond_broadcast(&s->done);
}

void *spill_read_loop(void *spill)
{
	struct spill *s = spill;

	pthread_mutex_lock(&s->lock);
	while (spill_is_on(s)) {
		struct spill_read *r = s->reads.queue;

		if (!r) {
			up_cond_wait(&s->read, &s->lock);
			continue;
		}
		s->reads.queue = r->next;
		do_read(s, r);
	}
	pthread_mutex_unlock(&s->lock);
	spill_thread_ends(s);
	return NULL;
}

/* ------------------------------------------------------------------ who waits for it */

/* What somebody waits for goes before the others. */
static void join_queue(struct spill *s, struct spill_read *r, int demand)
{
	struct spill_read **at = &s->reads.queue;

	while (!demand && *at)
		at = &(*at)->next;
	r->next = *at;
	*at = r;
	up_cond_signal(&s->read);
}

static void leave_queue(struct spill *s, struct spill_read *r)
{
	struct spill_read **at = &s->reads.queue;

	while (*at && *at != r)
		at = &(*at)->next;
	if (*at)
		*at = r->next;
}

/* Wait for it, as long as that pays: 1, or 0. With the lock. */
static int await(struct spill *s, struct spill_read *r, char **buffer)
{
	uint64_t until = r->asked_ns + net_patience(&s->reads.times, PATIENCE_LEAST_NS);
	char *other;

	while (r->state != READ_DONE) {
		if (spill_is_on(s) && pool_now_ns() < until) {
			up_cond_wait_until(&s->done, &s->lock, until);
			continue;
		}
		s->reads.late += spill_is_on(s);
		if (r->state == READ_QUEUED) {
			leave_queue(s, r);
			break;
		}
		other = spill_buffer(r->room);
		if (!other) { /* there is no way but to wait */
			up_cond_wait(&s->done, &s->lock);
			continue;
		}
		r->state = READ_LOST;
		s->reads.lost++;
		*buffer = other;
		return 0;
	}
	return r->state == READ_DONE && !r->result;
}

int spill_read(struct spill *s, int file, uint64_t first, uint64_t count, int demand, char **buffer, size_t room)
{
	struct spill_read *r = calloc(1, sizeof(*r));
	int came = 0, lost = 0;

	if (!r)
		return 0;
	pthread_mutex_lock(&s->lock);
	if (spill_is_on(s) && !s->reads.lost && spill_books_find(&s->books, file, first, count, &r->at)) {
		r->buffer = *buffer;
		r->room = room;
		r->asked_ns = pool_now_ns();
		join_queue(s, r, demand);
		came = await(s, r, buffer);
		lost = r->state == READ_LOST;
	}
	pthread_mutex_unlock(&s->lock);
	if (!lost)
		free(r);
	return came;
}
