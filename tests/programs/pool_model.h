/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_model.h - a pool with gates, files of known words, processes that read them, and the model:
 * what is mapped where. For pool_model.c (at random) and pool_held.c (the worst moments, one by one).
 */
#ifndef POOL_MODEL_H
#define POOL_MODEL_H

#include <poll.h>
#include <stdatomic.h>
#include <sys/eventfd.h>

#include "pool_gates.h"
#include "pool_peer.h"

#define PEERS 4
#define FILES 3
#define VICTIMS 16

struct file {
	int fd, memfd, number;
	uint64_t bytes, salt, regions;
};

struct region {
	struct command c;
	int used, pooled, file, told; /* told: the pool has been told what it is */
	uint32_t id;
};

struct peer {
	int pid, slot, socket[THREADS], busy[THREADS];
	int uffd; /* a duplicate */
	struct region region[REGIONS];
};

static struct up_pool *pool;
static struct up_ring *ring;
static struct file file[FILES];
static struct peer peer[PEERS];
static const char *directory;
static uint64_t state, chunk, most, words, ids = 1;
static uint64_t chance = 1; /* for what happens as often as it takes: another run's may differ */
static int nursery;
static struct {
	uint64_t touches, maps, unmaps, detaches, forks, joins, kills, fills, forgets, late, failed;
} met;

/* Calls that wait for a mapping that is under way must not wait for a gate for ever. */
static inline void open_later(void)
{
	int yields = (int)below(&state, 300);
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, open_gates, &yields));
	pthread_join(thread, NULL);
}

struct waiting_call {
	void (*call)(struct up_pool *, int, uint32_t);
	int client;
	uint32_t region;
	_Atomic int tid; /* of the thread that makes it */
};

static void *call_it(void *cookie)
{
	struct waiting_call *w = cookie;

	atomic_store(&w->tid, (int)syscall(SYS_gettid));
	w->call(pool, w->client, w->region);
	return NULL;
}

/* One of the main thread's calls that may wait; the gates open while it does. */
static inline void wait_in(void (*call)(struct up_pool *, int, uint32_t), int client, uint32_t region)
{
	struct waiting_call w = { call, client, region, 0 };
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, call_it, &w));
	open_later();
	pthread_join(thread, NULL);
}

static inline void leave(struct up_pool *p, int client, uint32_t unused)
{
	(void)unused;
	up_pool_leave(p, client);
}

static inline void look_after_pool(void)
{
	struct up_pool_event event[256];
	struct up_warm_result result[64];
	struct up_pool_victim victim[VICTIMS];
	int n;

	up_pool_alive(pool);
	while ((n = up_pool_drain(pool, event, 256)) > 0)
		for (int i = 0; i < n; i++)
			met.failed += event[i].kind == UP_POOL_FAILED;
	while (up_pool_reap(pool, result, 64) > 0)
		;
	for (int i = 0; i < VICTIMS; i++) {
		uint64_t f = below(&chance, FILES);

		victim[i] = (struct up_pool_victim){
			.file = (uint32_t)file[f].number,
			.chunks = 1 + (uint32_t)below(&chance, 3),
			.chunk = below(&chance, file[f].bytes / chunk + 1),
		};
	}
	up_pool_victims(pool, victim, VICTIMS);
}

static inline void send_command(struct peer *p, int thread, const struct command *c, const int *fd, int fds)
{
	send_with(p->socket[thread], c, sizeof(*c), fd, fds);
	p->busy[thread] = 1;
}

static inline int is_readable(int socket)
{
	struct pollfd ready = { .fd = socket, .events = POLLIN };

	return poll(&ready, 1, 0) > 0;
}

/* A child joins, with all that its parent had of the pool when it forked. */
static inline int let_join(const struct peer *p, int pid, uint32_t pooled, int uffd, int socket)
{
	int slot = up_pool_join(pool, uffd, pid, ring);
	struct command go = { .op = JOIN };

	CHECK(slot >= 0);
	for (uint32_t i = 0; i < REGIONS; i++)
		if (pooled >> i & 1)
			CHECK(!up_pool_map(pool, slot, 1000 + i, file[p->region[i].file].number,
					   (uintptr_t)address_of(i), p->region[i].c.length,
					   p->region[i].c.offset));
	send_with(socket, &go, sizeof(go), NULL, 0);
	met.joins++;
	return slot;
}

static inline void await(struct peer *p, int thread)
{
	int slot = -1, uffd = -1;
	struct reply reply = { .op = JOIN };

	while (p->busy[thread] && reply.op != DONE) {
		while (!is_readable(p->socket[thread])) {
			look_after_pool();
			sched_yield();
		}
		CHECK(receive_with(p->socket[thread], &reply, sizeof(reply), &uffd, 1));
		if (reply.op == JOIN)
			slot = let_join(p, reply.pid, reply.pooled, uffd, p->socket[thread]);
	}
	p->busy[thread] = 0;
	words += reply.words;
	if (reply.wrong)
		exit(1);
	if (slot >= 0)
		wait_in(leave, slot, 0);
}

static inline void await_all(struct peer *p)
{
	set_gates(0);
	for (int i = 0; i < THREADS; i++)
		if (p->busy[i])
			await(p, i);
}

static inline void open_file(int i)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/file%d", directory, i);
	file[i].bytes = chunk * (3 + below(&chance, 12)) + below(&chance, chunk);
	file[i].salt++;
	file[i].fd = make_words(path, file[i].bytes, file[i].salt);
	file[i].number = up_pool_file(pool, file[i].fd, file[i].bytes, 0, NULL, &file[i].memfd);
	CHECK(file[i].number >= 0);
}

static inline void be_born(struct peer *p)
{
	int pair[THREADS][2], theirs[THREADS], uffd = -1;
	struct reply hello;

	*p = (struct peer){ 0 };
	for (int i = 0; i < THREADS; i++) {
		CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair[i]));
		p->socket[i] = pair[i][0];
		theirs[i] = pair[i][1];
	}
	send_with(nursery, "b", 1, theirs, THREADS);
	for (int i = 0; i < THREADS; i++)
		close(theirs[i]);
	CHECK(receive_with(p->socket[0], &hello, sizeof(hello), &uffd, 1));
	p->pid = hello.pid;
	if (p->uffd)
		close(p->uffd);
	p->uffd = dup(uffd);
	p->slot = up_pool_join(pool, uffd, p->pid, ring);
	CHECK(p->slot >= 0);
}

/* All of it begins: the nursery first, which must know nothing. */
static inline void begin_model(const char *where, uint64_t seed, uint32_t chunk_bytes, uint32_t huge)
{
	struct up_pool_options o = { .threads = 6, .chunk_bytes = chunk_bytes, .huge = huge };
	int pair[2], ring_fd;

	directory = where;
	opens_them = 1;
	state = seed * 0x9E3779B97F4A7C15ull | 1;
	chunk = chunk_bytes;
	most = o.budget_bytes = 12 * chunk;
	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	if (!fork()) {
		close(pair[0]);
		be_nursery(pair[1]);
	}
	close(pair[1]);
	nursery = pair[0];
	o.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	CHECK(!up_pool_create(&pool, &o) && !up_ring_create(&ring, &ring_fd));
	for (int i = 0; i < FILES; i++)
		open_file(i);
	for (int i = 0; i < PEERS; i++)
		be_born(&peer[i]);
}

/* Nothing of it is left, and nothing went wrong. */
static inline struct up_pool_counts end_model(void)
{
	struct up_pool_counts counts;

	up_pool_counts(pool, &counts);
	for (int i = 0; i < PEERS; i++)
		up_pool_leave(pool, peer[i].slot);
	for (int i = 0; i < FILES; i++)
		while (up_pool_forget(pool, file[i].number))
			look_after_pool();
	CHECK(up_pool_used(pool) == 0 && counts.peak_bytes <= most && !met.failed);
	up_pool_destroy(pool);
	return counts;
}

#endif
