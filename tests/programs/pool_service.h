/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_service.h - what pool_stress.c and pool_trouble.c share: the service's main thread around a
 * pool, and processes of the job, which are threads here, each with a userfaultfd of its own.
 */
#ifndef POOL_SERVICE_H
#define POOL_SERVICE_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>

#include "pool_client.h"

#define CHUNK (64u << 10)
#define FILES 4

static const char *directory;
static uint64_t seed;

/* ------------------------------------------------------------------ the service's main thread */

struct file {
	int fd, memfd, number, views; /* number -1: not in the pool just now */
	uint64_t bytes, salt;
};

struct service {
	struct up_pool *pool;
	int event_fd, stop, fast; /* fast: events are taken */
	int spill_fd;             /* of its disk tier, or -1 */
	uint64_t chunk, most, state;
	uint32_t failed, stuck, evicted, forgotten, jobs, told; /* what has been seen */
	struct up_pool_event last_failed, last_stuck;
	pthread_mutex_t lock; /* only one thread calls up_pool_*() at a time, as in the service */
	struct file file[FILES];
	pthread_t thread;
};

static inline uint32_t seen(const uint32_t *count)
{
	return __atomic_load_n(count, __ATOMIC_ACQUIRE);
}

static inline void saw(uint32_t *count)
{
	__atomic_fetch_add(count, 1, __ATOMIC_RELEASE);
}

static inline void open_file(struct service *s, int i, uint64_t bytes)
{
	struct file *f = &s->file[i];
	char path[512];

	snprintf(path, sizeof(path), "%s/file%d", directory, i);
	f->bytes = bytes;
	f->salt++;
	f->fd = make_words(path, bytes, f->salt);
	f->number = up_pool_file(s->pool, f->fd, bytes, 0, NULL, &f->memfd);
	CHECK(f->number >= 0);
}

/* 1: it is out of the pool, and closed. */
static inline int close_file(struct service *s, int i)
{
	struct file *f = &s->file[i];

	if (f->views || f->number < 0 || up_pool_forget(s->pool, f->number))
		return 0;
	f->number = -1;
	close(f->memfd);
	close(f->fd);
	return 1;
}

static inline uint64_t some_size(struct service *s)
{
	return s->chunk * (2 + below(&s->state, 24)) / 2 + below(&s->state, 2 * PAGE);
}

static inline void take_events(struct service *s)
{
	struct up_pool_event event[300];
	int n;

	while ((n = up_pool_drain(s->pool, event, 300)) > 0)
		for (int i = 0; i < n; i++) {
			const struct up_pool_event *e = &event[i];

			if (e->kind == UP_POOL_FAILED) {
				s->last_failed = *e;
				saw(&s->failed);
			} else if (e->kind == UP_POOL_STUCK) {
				s->last_stuck = *e;
				saw(&s->stuck);
			} else if (e->kind == UP_POOL_EVICTED) {
				saw(&s->evicted);
			}
			CHECK(e->file < 256 && e->offset % PAGE == 0 && e->time_ns);
		}
}

static inline void take_results(struct service *s)
{
	struct up_warm_result result[16];
	int n = up_pool_reap(s->pool, result, 16);

	for (int i = 0; i < n; i++) {
		CHECK(result[i].done_ns >= result[i].submit_ns && result[i].id);
		CHECK(result[i].bytes + result[i].resident_bytes <= result[i].id);
		saw(&s->told);
	}
}

static inline void submit(struct service *s, const struct file *f)
{
	struct up_warm_job job = { .fd = f->number, .checkpoint_fd = -1 };

	job.offset = below(&s->state, f->bytes);
	job.length = 1 + below(&s->state, 3 * s->chunk);
	job.id = job.length; /* so that its result can be looked at */
	if (!up_pool_submit(s->pool, &job))
		saw(&s->jobs);
}

/* Some blocks, existing or not. */
static inline void choose_victims(struct service *s)
{
	struct up_pool_victim victim[40];
	int n = (int)below(&s->state, 41);

	for (int i = 0; i < n; i++)
		victim[i] = (struct up_pool_victim){ .file = (uint32_t)below(&s->state, 6),
						     .chunks = (uint32_t)below(&s->state, 5),
						     .chunk = below(&s->state, 30) };
	if (n)
		victim[0].file = below(&s->state, 2) ? 255 : UINT32_MAX;
	up_pool_victims(s->pool, victim, n);
	CHECK(up_pool_victims_left(s->pool) <= n);
}

/* The disk has room, or less of it; and what lies there is not what was written. */
static inline void spoil_disk(struct service *s)
{
	static char garbage[4096] __attribute__((aligned(4096)));
	struct up_spill_counts counts;
	struct stat st;

	if (s->spill_fd < 0)
		return;
	up_pool_spill_counts(s->pool, &counts);
	CHECK(counts.used_bytes <= 64u << 20 && !counts.ended && !counts.full);
	up_pool_spill_fit(s->pool, below(&s->state, 3) ? 32u << 20 : below(&s->state, 8u << 20));
	if (below(&s->state, 4) || fstat(s->spill_fd, &st) || st.st_size < PAGE)
		return;
	garbage[below(&s->state, sizeof(garbage))]++;
	CHECK(pwrite(s->spill_fd, garbage, PAGE, (off_t)(below(&s->state, (uint64_t)st.st_size / PAGE) * PAGE)) == PAGE);
}

static inline void one_turn(struct service *s)
{
	int i = (int)below(&s->state, FILES);
	struct up_pool_counts counts;
	struct up_pool_file_counts file_counts;

	up_pool_alive(s->pool);
	take_events(s);
	take_results(s);
	switch (below(&s->state, 8)) {
	case 0 ... 2:
		if (s->file[i].number >= 0)
			submit(s, &s->file[i]);
		break;
	case 3 ... 4:
		choose_victims(s);
		break;
	case 5:
		up_pool_budget(s->pool, 1 + below(&s->state, s->most), 0);
		break;
	case 6:
		if (s->file[i].number >= 0 && !s->file[i].views)
			submit(s, &s->file[i]); /* forgotten with a job in the queue */
		if (close_file(s, i)) {
			saw(&s->forgotten);
			open_file(s, i, some_size(s));
		}
		break;
	case 7:
		spoil_disk(s);
		up_pool_counts(s->pool, &counts);
		CHECK(counts.peak_bytes <= s->most && up_pool_cpu_ns(s->pool) > 0);
		CHECK(counts.unique_bytes <= counts.read_bytes);
		CHECK(up_pool_used(s->pool) <= s->most);
		if (s->file[i].number >= 0) {
			up_pool_file_counts(s->pool, s->file[i].number, &file_counts);
			CHECK(file_counts.unique_bytes <= s->file[i].bytes);
			CHECK(real_bytes(s->file[i].memfd) <= s->most);
		}
		break;
	}
}

static inline void *serve(void *cookie)
{
	struct service *s = cookie;

	while (!__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE)) {
		pthread_mutex_lock(&s->lock);
		if (s->fast)
			one_turn(s);
		else if (s->event_fd >= 0) {
			up_pool_alive(s->pool);
			take_events(s);
		}
		pthread_mutex_unlock(&s->lock);
		sched_yield();
	}
	return NULL;
}

static inline void begin(struct service *s, uint64_t budget, uint32_t chunk, int huge, int fast)
{
	struct up_pool_options o = { .budget_bytes = budget, .chunk_bytes = chunk, .threads = 6,
				     .huge = (uint32_t)huge };

	*s = (struct service){ .chunk = chunk, .most = budget, .state = draw(&seed) | 1,
			       .fast = fast, .spill_fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER };
	s->event_fd = o.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	CHECK(s->event_fd >= 0 && !up_pool_create(&s->pool, &o));
	for (int i = 0; i < FILES; i++)
		s->file[i].number = -1;
}

/* What leaves memory goes to the disk, where there is one past the page cache. */
static inline void spill(struct service *s)
{
	struct up_spill_options o = { .size_bytes = 32u << 20, .errors_most = UINT32_MAX, .try_bytes = 2u << 20 };

	o.fd = open(directory, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
	if (o.fd < 0)
		return;
	s->spill_fd = dup(o.fd);
	CHECK(s->spill_fd >= 0 && !up_pool_spill(s->pool, &o));
}

static inline void run(struct service *s)
{
	CHECK(!pthread_create(&s->thread, NULL, serve, s));
}

static inline void halt(struct service *s)
{
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
	pthread_join(s->thread, NULL);
}

static inline void end(struct service *s)
{
	up_pool_destroy(s->pool);
	for (int i = 0; i < FILES; i++)
		if (s->file[i].number >= 0) {
			close(s->file[i].memfd);
			close(s->file[i].fd);
		}
	close(s->event_fd);
	if (s->spill_fd >= 0)
		close(s->spill_fd);
}

/* ------------------------------------------------------------------ processes that read */

struct client {
	int uffd, slot, ring_fd; /* uffd: the agent's own description of it */
	struct up_ring *ring;
};

/* A mapping of theirs. */
struct view {
	struct file *file;
	char *at;
	uint64_t length, offset, salt, size, state;
	uint32_t id;
	int stop;
};

static inline struct client join(struct service *s)
{
	struct client c = { .uffd = open_pool_uffd() };

	CHECK(!up_ring_create(&c.ring, &c.ring_fd));
	pthread_mutex_lock(&s->lock);
	c.slot = up_pool_join(s->pool, dup(c.uffd), 0, c.ring);
	pthread_mutex_unlock(&s->lock);
	CHECK(c.slot >= 0);
	return c;
}

static inline void leave(struct service *s, struct client *c)
{
	pthread_mutex_lock(&s->lock);
	up_pool_leave(s->pool, c->slot);
	pthread_mutex_unlock(&s->lock);
	if (c->ring)
		up_ring_destroy(c->ring);
	close(c->ring_fd);
	close(c->uffd);
}

/* A mapping of a part of a file. As in the service, the pool knows of it before it is there. */
static inline struct view map(struct service *s, struct client *c, struct file *f, uint64_t offset,
		       uint64_t length)
{
	static uint32_t ids;
	struct view v = { .file = f, .offset = offset, .length = length, .salt = f->salt,
			  .size = f->bytes, .id = ++ids, .state = draw(&s->state) | 1 };

	v.at = mmap(NULL, length, PROT_READ, MAP_SHARED, f->fd, (off_t)offset);
	CHECK(v.at != MAP_FAILED);
	CHECK(up_pool_map(s->pool, c->slot, v.id, f->number, (uintptr_t)v.at, 1ull << 40, offset) ==
	      -EINVAL);
	CHECK(!up_pool_map(s->pool, c->slot, v.id, f->number, (uintptr_t)v.at, length, offset));
	CHECK(enter(c->uffd, f->memfd, v.at, length, offset) == v.at);
	f->views++;
	return v;
}

static inline void unmap(struct service *s, struct client *c, struct view *v, int detached)
{
	if (!detached)
		detach(c->uffd, v->file->fd, v->at, v->length, v->offset);
	up_pool_unmap(s->pool, c->slot, v->id);
	up_pool_unmap(s->pool, c->slot, 0); /* nobody's */
	v->file->views--;
	CHECK(!munmap(v->at, v->length));
}

static inline void check_word(const struct view *v, uint64_t at)
{
	uint64_t offset = v->offset + at, word;

	if (offset + 8 > v->size)
		return;
	word = *(const volatile uint64_t *)(v->at + at);
	if (word != word_at(offset, v->salt)) {
		fprintf(stderr, "wrong word at %llx: %llx\n", (unsigned long long)offset,
			(unsigned long long)word);
		_exit(1);
	}
}

static inline void *read_it(void *cookie)
{
	struct view *v = cookie;
	uint64_t state = (uint64_t)(uintptr_t)&v ^ v->state, page = 0;

	for (int i = 0; !__atomic_load_n(&v->stop, __ATOMIC_ACQUIRE); i++) {
		if (i % 64 == 0)
			page = below(&state, v->length / PAGE);
		else if (i % 64 < 40)
			page = (page + (i & 128 ? 1 : v->length / PAGE - 1)) % (v->length / PAGE);
		else
			page = below(&state, v->length / PAGE);
		for (uint64_t at = page * PAGE; at < (page + 1) * PAGE; at += 8 * 61)
			check_word(v, at);
		if (below(&state, 40) == 0) /* its page table forgets it, as by an agent's command */
			madvise(v->at + page * PAGE, PAGE, MADV_DONTNEED);
	}
	return NULL;
}

#endif
