// SPDX-License-Identifier: Apache-2.0
/*
 * spill.c - see spill.h.
 *
 * Writes may be torn, lost or misplaced, and reads may bring anything: what does not have the checksum that lies in
 * memory is no copy. A read is another thread's, so that who waits for it can go elsewhere; its buffer then belongs to
 * that thread until it ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "common/net.h"
#include "service/cond.h"
#include "service/net/net.h"
#include "service/pool/spill.h"

/* A read is waited for so long at the least. */
#define PATIENCE_LEAST_NS (50 * NET_MS)
/* Errors of the disk in so long, of which there may be few. */
#define ERRORS_NS (60000 * NET_MS)
#define ERRORS_KEPT 8u
/* While somebody has read within so long, writes take half of the time of one thread. */
#define READ_LATELY_NS (100 * NET_MS)
/* Its blocks are taken so many at a time: writes that need none do not lock out reads. */
#define GROW_BYTES (64u << 20)
/* Storage must be so much quicker (5 : 4): it is everybody's. One read in so many tries the disk all the same. */
#define FAVOUR 5 / 4
#define TRY_AGAIN 64u
/* As the number of a slot. */
#define NO_SLOT UINT32_MAX

struct spill_file {
	uint64_t chunks;
	uint8_t *state;  /* up_spill_state of each chunk; NULL: no such file */
	uint32_t *sum;   /* of each chunk */
	uint32_t *slot;  /* 1 + that of each part; 0: none */
	uint32_t serial; /* of its books: what was begun by others is void */
	uint64_t copies; /* chunks */
	struct net_rate storage;
};

enum read_state { READ_QUEUED, READ_BEGUN, READ_DONE, READ_LOST };

struct spill_read {
	struct spill_read *next;
	enum read_state state;
	char *buffer;
	size_t room;
	int file, result;
	uint32_t count, slot, serial, sum[SPILL_SLOT_CHUNKS];
	uint64_t first, asked_ns;
};

struct spill {
	pthread_mutex_t lock;
	struct up_cond write, read, done; /* for writers; for readers; for all others */
	int fd, stop;
	uint32_t holders, threads, inside; /* the pool and its threads; these; writers that use the pool */
	uint32_t chunk_bytes, slot_chunks, errors_most;
	uint64_t slot_bytes;

	uint32_t most, high, frees; /* slots: there may be; that were used so far; of these free */
	uint32_t *free, room;       /* for so many */
	uint32_t trim_to;           /* blocks from this slot on are to be given back; NO_SLOT: none */
	uint64_t grown_bytes;
	struct spill_file file[POOL_FILES];

	uint32_t poked, writing, trimming;
	uint64_t pause_ns; /* until then nothing is written while somebody reads */
	struct {
		uint32_t slot; /* being written, or NO_SLOT */
		int lost;      /* it is nobody's: free it then */
	} writer[SPILL_WRITERS];

	struct spill_read *queue;
	uint32_t reading, lost; /* under way; of these, not waited for any more */
	uint64_t read_ns;       /* when the last one ended */
	struct net_times times;
	struct net_rate disk;
	uint32_t passed;
	uint64_t error_ns[ERRORS_KEPT];
	uint32_t errors;
	int64_t cpu_ns;
	struct up_spill_counts count;
};

static __thread int64_t counted_ns; /* of this thread's time */

static void count_cpu(struct spill *s)
{
	struct timespec ts;
	int64_t now;

	if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts))
		return;
	now = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	__atomic_fetch_add(&s->cpu_ns, now - counted_ns, __ATOMIC_RELAXED);
	counted_ns = now;
}

int64_t spill_cpu_ns(struct spill *s)
{
	return __atomic_load_n(&s->cpu_ns, __ATOMIC_RELAXED);
}

char *spill_buffer(size_t room)
{
	char *b = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (b == MAP_FAILED)
		return NULL;
	madvise(b, room, MADV_HUGEPAGE);
	return b;
}

/* ------------------------------------------------------------------ slots, with the lock */

static int is_on(const struct spill *s)
{
	return !s->stop && !s->count.ended;
}

static void free_slot(struct spill *s, uint32_t slot)
{
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (s->writer[i].slot == slot) { /* what it writes would land in another's */
			s->writer[i].lost = 1;
			return;
		}
	s->count.used_bytes -= s->slot_bytes;
	if (slot < s->most && slot < s->trim_to)
		s->free[s->frees++] = slot;
}

static uint32_t take_slot(struct spill *s)
{
	uint32_t most = s->most < s->trim_to ? s->most : s->trim_to, slot = NO_SLOT;

	if (s->frees)
		slot = s->free[--s->frees];
	else if (s->high < most)
		slot = s->high++;
	if (slot != NO_SLOT)
		s->count.used_bytes += s->slot_bytes;
	return slot;
}

/* The copies of one part of a file go. */
static void drop_part(struct spill *s, struct spill_file *f, uint64_t part)
{
	uint64_t first = part * s->slot_chunks, end = first + s->slot_chunks;

	if (!f->slot[part])
		return;
	for (uint64_t c = first; c < end && c < f->chunks; c++) {
		f->copies -= f->state[c] == UP_SPILL_THERE;
		__atomic_store_n(&f->state[c], UP_SPILL_NONE, __ATOMIC_RELAXED);
	}
	free_slot(s, f->slot[part] - 1);
	f->slot[part] = 0;
}

static uint64_t parts_of(const struct spill *s, const struct spill_file *f)
{
	return f->state ? (f->chunks + s->slot_chunks - 1) / s->slot_chunks : 0;
}

static void drop_all(struct spill *s, struct spill_file *f)
{
	for (uint64_t part = 0; part < parts_of(s, f); part++)
		drop_part(s, f, part);
}

static void note_errno(struct spill *s, int error)
{
	uint32_t i = 0;

	while (i < UP_SPILL_ERRORS - 1 && s->count.errors[i] && s->count.error[i] != error)
		i++;
	s->count.error[i] = error;
	s->count.errors[i]++;
}

/* The disk has failed, or has brought what was not written. */
static void note_failure(struct spill *s, int error)
{
	uint64_t now = pool_now_ns(), *first;

	note_errno(s, error);
	s->error_ns[s->errors++ % ERRORS_KEPT] = now;
	if (s->errors < s->errors_most || s->errors_most > ERRORS_KEPT)
		return;
	first = &s->error_ns[(s->errors - s->errors_most) % ERRORS_KEPT];
	if (now - *first > ERRORS_NS)
		return;
	s->count.ended = error;
	for (int i = 0; i < POOL_FILES; i++)
		drop_all(s, &s->file[i]);
	up_cond_broadcast(&s->write);
	up_cond_broadcast(&s->read);
	up_cond_broadcast(&s->done);
}

/* ------------------------------------------------------------------ beginning and end */

static void free_books(struct spill_file *f)
{
	free(f->state);
	free(f->sum);
	free(f->slot);
	f->state = NULL;
	f->sum = f->slot = NULL;
	f->chunks = f->copies = 0;
	f->serial++;
}

/* With the lock, which it gives back. */
static void let_go(struct spill *s)
{
	int last = !--s->holders;

	pthread_mutex_unlock(&s->lock);
	if (!last)
		return;
	if (s->fd >= 0)
		close(s->fd);
	for (int i = 0; i < POOL_FILES; i++)
		free_books(&s->file[i]);
	while (s->queue) { /* nobody waits for it */
		struct spill_read *next = s->queue->next;

		free(s->queue);
		s->queue = next;
	}
	pthread_mutex_destroy(&s->lock);
	free(s->free);
	free(s);
}

void spill_thread_ends(struct spill *s)
{
	int fd = -1;

	count_cpu(s);
	pthread_mutex_lock(&s->lock);
	if (!--s->threads) { /* the disk has its blocks again */
		fd = s->fd;
		s->fd = -1;
		pthread_mutex_unlock(&s->lock);
		if (fd >= 0)
			close(fd);
		pthread_mutex_lock(&s->lock);
	}
	let_go(s);
}

int spill_start(struct spill *s, void *(*loop)(void *), void *argument)
{
	pthread_attr_t attr;
	pthread_t thread;
	int err;

	pthread_mutex_lock(&s->lock);
	s->holders++;
	s->threads++;
	pthread_mutex_unlock(&s->lock);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	err = pthread_create(&thread, &attr, loop, argument);
	pthread_attr_destroy(&attr);
	if (!err)
		return 0;
	pthread_mutex_lock(&s->lock);
	s->threads--;
	let_go(s);
	return -err;
}

static void *read_loop(void *spill);

int spill_create(struct spill **out, const struct up_spill_options *o, uint32_t chunk_bytes, uint32_t readers)
{
	struct spill *s = calloc(1, sizeof(*s));
	int ret = 0;

	if (!s)
		return -ENOMEM;
	pthread_mutex_init(&s->lock, NULL);
	s->fd = -1;
	s->holders = 1;
	s->errors_most = o->errors_most;
	s->chunk_bytes = chunk_bytes;
	s->slot_bytes = (uint64_t)SPILL_SLOT_CHUNKS * (64u << 10);
	if (s->slot_bytes < chunk_bytes)
		s->slot_bytes = chunk_bytes;
	s->slot_chunks = (uint32_t)(s->slot_bytes / chunk_bytes);
	s->trim_to = NO_SLOT;
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		s->writer[i].slot = NO_SLOT;
	for (uint32_t i = 0; i < readers && !ret; i++)
		ret = spill_start(s, read_loop, s);
	if (!ret) {
		pthread_mutex_lock(&s->lock);
		s->fd = o->fd;
		pthread_mutex_unlock(&s->lock);
		spill_fit(s, o->size_bytes);
		*out = s;
		return 0;
	}
	spill_stop(s);
	spill_end(s);
	return ret;
}

void spill_stop(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->stop = 1;
	up_cond_broadcast(&s->write);
	up_cond_broadcast(&s->read);
	up_cond_broadcast(&s->done);
	while (s->inside)
		up_cond_wait(&s->done, &s->lock);
	pthread_mutex_unlock(&s->lock);
}

uint64_t spill_slot_bytes(const struct spill *s)
{
	return s->slot_bytes;
}

void spill_disown(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->fd = -1;
	pthread_mutex_unlock(&s->lock);
}

void spill_end(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	let_go(s);
}

/* ------------------------------------------------------------------ files */

int spill_add_file(struct spill *s, int file, uint64_t chunks)
{
	struct spill_file f = { .chunks = chunks };
	uint64_t parts = (chunks + s->slot_chunks - 1) / s->slot_chunks;

	f.state = calloc(chunks, sizeof(*f.state));
	f.sum = calloc(chunks, sizeof(*f.sum));
	f.slot = calloc(parts, sizeof(*f.slot));
	if (!f.state || !f.sum || !f.slot) {
		free_books(&f);
		return -ENOMEM;
	}
	pthread_mutex_lock(&s->lock);
	f.serial = s->file[file].serial + 1;
	s->file[file] = f;
	pthread_mutex_unlock(&s->lock);
	return 0;
}

void spill_drop_file(struct spill *s, int file)
{
	pthread_mutex_lock(&s->lock);
	drop_all(s, &s->file[file]);
	pthread_mutex_unlock(&s->lock);
}

void spill_forget_file(struct spill *s, int file)
{
	pthread_mutex_lock(&s->lock);
	drop_all(s, &s->file[file]);
	free_books(&s->file[file]);
	pthread_mutex_unlock(&s->lock);
}

const uint8_t *spill_books(struct spill *s, int file)
{
	return s->file[file].state;
}

uint64_t spill_file_bytes(struct spill *s, int file)
{
	uint64_t copies;

	pthread_mutex_lock(&s->lock);
	copies = s->file[file].copies;
	pthread_mutex_unlock(&s->lock);
	return copies * s->chunk_bytes;
}

void spill_fit(struct spill *s, uint64_t bytes)
{
	uint64_t slots = bytes / s->slot_bytes;
	uint32_t most = slots < NO_SLOT - 1 ? (uint32_t)slots : NO_SLOT - 1, n = 0, *more;

	pthread_mutex_lock(&s->lock);
	if (most > s->room) { /* for all of them, if all are free */
		more = realloc(s->free, most * sizeof(*more));
		s->free = more ? more : s->free;
		s->room = more ? most : s->room;
		most = more ? most : s->most;
	}
	s->most = most;
	if (most < s->high && most < s->trim_to) {
		s->trim_to = most;
		for (uint32_t i = 0; i < s->frees; i++)
			if (s->free[i] < most)
				s->free[n++] = s->free[i];
		s->frees = n;
		for (int i = 0; i < POOL_FILES; i++)
			for (uint64_t part = 0; part < parts_of(s, &s->file[i]); part++)
				if (s->file[i].slot[part] > most)
					drop_part(s, &s->file[i], part);
	}
	up_cond_broadcast(&s->write);
	pthread_mutex_unlock(&s->lock);
}

void spill_count(struct spill *s, struct up_spill_counts *out)
{
	pthread_mutex_lock(&s->lock);
	*out = s->count;
	out->size_bytes = s->most * s->slot_bytes;
	pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ reading */

/* Whether the file's own storage would be quicker. */
static int storage_is_quicker(const struct spill *s, const struct spill_file *f, uint64_t bytes)
{
	uint64_t disk = net_expected_ns(&s->disk, bytes), storage = net_expected_ns(&f->storage, bytes);

	return disk && storage && storage * FAVOUR < disk;
}

uint64_t spill_run(struct spill *s, int file, uint64_t first, uint64_t count, int *here)
{
	struct spill_file *f = &s->file[file];
	uint64_t n = 1;
	int there;

	*here = 0;
	if (!count)
		return 0;
	pthread_mutex_lock(&s->lock);
	if (f->copies && is_on(s)) {
		there = f->state[first] == UP_SPILL_THERE;
		if (there && count > s->slot_chunks - first % s->slot_chunks)
			count = s->slot_chunks - first % s->slot_chunks;
		while (n < count && (f->state[first + n] == UP_SPILL_THERE) == there)
			n++;
		/* one that does not answer is left alone until it does */
		*here = there && !s->lost;
		if (*here && storage_is_quicker(s, f, n * s->chunk_bytes))
			*here = ++s->passed % TRY_AGAIN == 0;
	} else {
		n = count;
	}
	pthread_mutex_unlock(&s->lock);
	return n;
}

/* Whether what a read was asked for is still there. */
static int is_still_there(const struct spill *s, const struct spill_read *r)
{
	const struct spill_file *f = &s->file[r->file];

	if (!f->state || f->serial != r->serial || f->slot[r->first / s->slot_chunks] != r->slot + 1)
		return 0;
	for (uint32_t i = 0; i < r->count; i++)
		if (f->state[r->first + i] != UP_SPILL_THERE || f->sum[r->first + i] != r->sum[i])
			return 0;
	return 1;
}

/* 0 or -errno; -EBADMSG: these are not the bytes that were written. */
static int read_slot(const struct spill *s, int fd, const struct spill_read *r)
{
	uint64_t length = (uint64_t)r->count * s->chunk_bytes, at = 0;
	uint64_t offset = r->slot * s->slot_bytes + r->first % s->slot_chunks * s->chunk_bytes;

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
	for (uint32_t i = 0; i < r->count; i++)
		if (up_net_checksum(r->buffer + (uint64_t)i * s->chunk_bytes, s->chunk_bytes) != r->sum[i])
			return -EBADMSG;
	return 0;
}

/* With the lock, which it leaves and takes again. */
static void do_read(struct spill *s, struct spill_read *r)
{
	int fd = s->fd, ret;
	uint64_t began = pool_now_ns(), took, length = (uint64_t)r->count * s->chunk_bytes;

	r->state = READ_BEGUN;
	s->reading++;
	pthread_mutex_unlock(&s->lock);
	ret = read_slot(s, fd, r);
	count_cpu(s);
	pthread_mutex_lock(&s->lock);
	s->reading--;
	s->read_ns = pool_now_ns();
	took = s->read_ns - r->asked_ns;
	net_note_time(&s->times, took);
	net_note_rate(&s->disk, length, took);
	s->count.read_busy_ns += s->read_ns - began;
	if (!is_still_there(s, r)) {
		ret = -ESTALE; /* whatever came */
	} else if (ret) {
		drop_part(s, &s->file[r->file], r->first / s->slot_chunks);
		note_failure(s, -ret);
	} else if (r->state != READ_LOST) {
		s->count.read_bytes += length;
	}
	r->result = ret;
	if (r->state == READ_LOST) {
		s->lost--;
		munmap(r->buffer, r->room);
		free(r);
		return;
	}
	r->state = READ_DONE;
	up_cond_broadcast(&s->done);
}

static void *read_loop(void *spill)
{
	struct spill *s = spill;

	pthread_mutex_lock(&s->lock);
	while (is_on(s)) {
		struct spill_read *r = s->queue;

		if (!r) {
			up_cond_wait(&s->read, &s->lock);
			continue;
		}
		s->queue = r->next;
		do_read(s, r);
	}
	pthread_mutex_unlock(&s->lock);
	spill_thread_ends(s);
	return NULL;
}

static void leave_queue(struct spill *s, struct spill_read *r)
{
	struct spill_read **at = &s->queue;

	while (*at && *at != r)
		at = &(*at)->next;
	if (*at)
		*at = r->next;
}

/* Wait for it, as long as that pays: 1, or 0. With the lock. */
static int await(struct spill *s, struct spill_read *r, char **buffer)
{
	uint64_t until = r->asked_ns + net_patience(&s->times, PATIENCE_LEAST_NS);
	char *other;

	while (r->state != READ_DONE) {
		if (is_on(s) && pool_now_ns() < until) {
			up_cond_wait_until(&s->done, &s->lock, until);
			continue;
		}
		s->count.late_reads += is_on(s);
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
		s->lost++;
		*buffer = other;
		return 0;
	}
	return r->state == READ_DONE && !r->result;
}

int spill_read(struct spill *s, int file, uint64_t first, uint64_t count, int demand, char **buffer, size_t room)
{
	struct spill_read *r = calloc(1, sizeof(*r)), **at = &s->queue;
	struct spill_file *f = &s->file[file];
	int came = 0, lost = 0;

	if (!r)
		return 0;
	pthread_mutex_lock(&s->lock);
	if (is_on(s) && !s->lost && f->state && f->slot[first / s->slot_chunks] && count &&
	    count <= s->slot_chunks - first % s->slot_chunks) {
		*r = (struct spill_read){ .buffer = *buffer, .room = room, .file = file, .first = first,
					  .count = (uint32_t)count, .serial = f->serial,
					  .slot = f->slot[first / s->slot_chunks] - 1,
					  .asked_ns = pool_now_ns() };
		for (uint32_t i = 0; i < count; i++)
			r->sum[i] = f->sum[first + i];
		if (is_still_there(s, r)) {
			while (!demand && *at) /* what somebody waits for goes before the others */
				at = &(*at)->next;
			r->next = *at;
			*at = r;
			up_cond_signal(&s->read);
			came = await(s, r, buffer);
			lost = r->state == READ_LOST;
		}
	}
	pthread_mutex_unlock(&s->lock);
	if (!lost)
		free(r);
	return came;
}

void spill_was_read(struct spill *s, int file, uint64_t bytes, uint64_t took_ns)
{
	pthread_mutex_lock(&s->lock);
	net_note_rate(&s->file[file].storage, bytes, took_ns);
	pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ writing */

void spill_poke(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->poked = 1;
	up_cond_signal(&s->write);
	pthread_mutex_unlock(&s->lock);
}

static int was_read_lately(const struct spill *s)
{
	return s->reading || (s->read_ns && pool_now_ns() - s->read_ns < READ_LATELY_NS);
}

/* Blocks beyond what the file may hold are the disk's again. With the lock, which it leaves and takes again. */
static void trim(struct spill *s)
{
	uint32_t from = s->trim_to, end = s->high;
	int fd = s->fd;

	s->trimming = 1;
	pthread_mutex_unlock(&s->lock);
	fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(from * s->slot_bytes),
		  (off_t)((end - from) * s->slot_bytes + GROW_BYTES));
	pthread_mutex_lock(&s->lock);
	s->trimming = 0;
	if (s->trim_to < from) /* more is to go */
		return;
	s->trim_to = NO_SLOT;
	s->high = from;
	if (s->grown_bytes > from * s->slot_bytes)
		__atomic_store_n(&s->grown_bytes, from * s->slot_bytes, __ATOMIC_RELAXED);
}

static int may_trim(const struct spill *s)
{
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (s->writer[i].slot != NO_SLOT && s->writer[i].slot >= s->trim_to)
			return 0; /* who comes by when it is written */
	return s->trim_to != NO_SLOT && !s->trimming;
}

int spill_enter(struct spill *s)
{
	int on;

	pthread_mutex_lock(&s->lock);
	while (is_on(s)) {
		uint64_t now = pool_now_ns(), until = UINT64_MAX;

		if (may_trim(s)) {
			trim(s);
			continue;
		}
		if (s->poked && !was_read_lately(s))
			break;
		if (s->poked && !s->writing && now >= s->pause_ns)
			break;
		if (s->poked)
			until = s->pause_ns > now ? s->pause_ns : now + READ_LATELY_NS;
		up_cond_wait_until(&s->write, &s->lock, until);
	}
	on = is_on(s);
	s->poked = 0;
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
	struct spill_file *f = &s->file[file];
	uint64_t part = first / s->slot_chunks, n = 0;
	uint32_t slot;

	pthread_mutex_lock(&s->lock);
	if (!is_on(s) || !f->state || s->count.full || storage_is_quicker(s, f, s->slot_bytes))
		goto out;
	while (n < count && n < s->slot_chunks - first % s->slot_chunks && f->state[first + n] == UP_SPILL_NONE)
		n++;
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (f->slot[part] && s->writer[i].slot == f->slot[part] - 1)
			n = 0; /* one at a time in a slot */
	if (!n)
		goto out;
	slot = f->slot[part] ? f->slot[part] - 1 : take_slot(s);
	if (slot == NO_SLOT) {
		n = 0;
		goto out;
	}
	f->slot[part] = slot + 1;
	for (uint64_t c = first; c < first + n; c++)
		__atomic_store_n(&f->state[c], UP_SPILL_COMES, __ATOMIC_RELAXED);
	s->writer[writer].slot = slot;
	s->writer[writer].lost = 0;
	s->writing++;
	*out = (struct spill_copy){ .file = file, .first = first, .count = (uint32_t)n, .slot = slot,
				    .serial = f->serial, .writer = writer };
out:
	pthread_mutex_unlock(&s->lock);
	return n;
}

/* A write has ended: `sum` of each chunk, or NULL. With the lock. */
static void settle(struct spill *s, const struct spill_copy *c, const uint32_t *sum)
{
	struct spill_file *f = &s->file[c->file];
	uint64_t part = c->first / s->slot_chunks, any = 0;
	int lost = s->writer[c->writer].lost;

	s->writer[c->writer].slot = NO_SLOT;
	s->writing--;
	s->poked |= !!sum; /* the rest of the slot, which nobody else may write meanwhile */
	up_cond_broadcast(&s->write);
	if (lost || f->serial != c->serial || !f->state || f->slot[part] != c->slot + 1) {
		free_slot(s, c->slot);
		return;
	}
	for (uint32_t i = 0; i < c->count; i++) {
		f->sum[c->first + i] = sum ? sum[i] : 0;
		f->copies += !!sum;
		__atomic_store_n(&f->state[c->first + i], sum ? UP_SPILL_THERE : UP_SPILL_NONE, __ATOMIC_RELAXED);
	}
	for (uint64_t i = part * s->slot_chunks; i < (part + 1) * s->slot_chunks && i < f->chunks; i++)
		any |= f->state[i];
	if (!any) {
		free_slot(s, c->slot);
		f->slot[part] = 0;
	}
}

void spill_give_up(struct spill *s, const struct spill_copy *c)
{
	pthread_mutex_lock(&s->lock);
	settle(s, c, NULL);
	pthread_mutex_unlock(&s->lock);
}

static int write_slot(struct spill *s, int fd, uint64_t most_bytes, const struct spill_copy *c, const char *buffer)
{
	uint64_t length = (uint64_t)c->count * s->chunk_bytes, at = 0;
	uint64_t offset = c->slot * s->slot_bytes + c->first % s->slot_chunks * s->chunk_bytes;
	uint64_t grown = __atomic_load_n(&s->grown_bytes, __ATOMIC_RELAXED);

	if (offset + length > grown) { /* where it cannot be done, the write does it */
		uint64_t end = most_bytes < grown + GROW_BYTES ? most_bytes : grown + GROW_BYTES;

		end = end > offset + length ? end : offset + length;
		if (!fallocate(fd, 0, (off_t)grown, (off_t)(end - grown)))
			__atomic_store_n(&s->grown_bytes, end, __ATOMIC_RELAXED);
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
	most_bytes = s->most * s->slot_bytes;
	pthread_mutex_unlock(&s->lock);
	ret = write_slot(s, fd, most_bytes, c, buffer);
	count_cpu(s);
	pthread_mutex_lock(&s->lock);
	took = pool_now_ns() - began;
	s->count.write_busy_ns += took;
	if (!ret)
		s->count.written_bytes += (uint64_t)c->count * s->chunk_bytes;
	settle(s, c, ret ? NULL : sum);
	if (ret == -ENOSPC || ret == -EDQUOT || ret == -EFBIG) {
		note_errno(s, -ret);
		s->count.full = -ret;
	} else if (ret) {
		drop_part(s, &s->file[c->file], c->first / s->slot_chunks);
		note_failure(s, -ret);
	}
	s->pause_ns = pool_now_ns() + took;
	pthread_mutex_unlock(&s->lock);
}

void spill_chunks_left(struct spill *s, int file, uint64_t first, uint64_t count)
{
	struct spill_file *f = &s->file[file];

	pthread_mutex_lock(&s->lock);
	for (uint64_t c = first; is_on(s) && !s->count.full && f->state && c < first + count; c++) {
		int room = f->slot[c / s->slot_chunks] || s->frees || s->high < s->most;

		if (f->state[c] != UP_SPILL_THERE)
			*(room ? &s->count.dropped_bytes : &s->count.refused_bytes) += s->chunk_bytes;
	}
	pthread_mutex_unlock(&s->lock);
}
