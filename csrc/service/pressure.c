// SPDX-License-Identifier: Apache-2.0
/*
 * pressure.c - the thread that looks how much memory is left, and gives the pool's back before the kernel has to
 * kill somebody for it.
 *
 * It looks by itself, the oftener the less is left. The kernel's notices come too late for a burst: a trigger of PSI
 * (memory.pressure) is asked for in windows of 0.5 s, memory.events is told when the limit has been met, which a job
 * that reads files does all the time, and memory.high is not ours to set. Where a burst is quicker than a look, and
 * where a cgroup is not to be seen, the canaries (canary.h) tell.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "service/canary.h"
#include "service/helper.h"
#include "service/memory.h"

/* What a processor takes at the most, for the first time: 450 MiB in 0.1 s by two of them (memory.h). */
#define TAKEN_PER_CPU 2360000000ull
/* Looks within the time in which all that is left is taken: one of them is late, the pages have to be freed. */
#define LOOKS 4u
#define LOOK_LEAST_NS 1000000ull
#define LOOK_MOST_NS 50000000ull
/* Of a processor, at the most: this part. */
#define COST_PART 20u
/* A pool whose memory cannot go to swap begins with a burst, and doubles in this time, while it is not known how much
 * the job will use: its memory is taken within its first seconds. */
#define DOUBLE_NS 1000000000ull
/* The service ends where less than this part of the limit is left beside it, within these bounds: below the first the
 * kernel has no room to reclaim in, the second is what it takes itself. */
#define LEAST_PART 16u
#define LEAST_LEAST_BYTES (8ull << 20)
#define LEAST_MOST_BYTES (64ull << 20)
/* Looks of which each found so little: what is on its way between two lists of the kernel is on none. */
#define SHORT_LOOKS 3u
/* While a canary holds the kernel up: a tenth of the time that it can. */
#define GIVE_TRIES 200u

struct up_pressure {
	pthread_t thread;
	pthread_mutex_t lock; /* of `now` */
	struct up_pressure_options options;
	struct up_memory_room now;
	struct up_canary *canary;
	int stop_fd;
	uint64_t began_ns, cpus;
	unsigned int shorts;
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static uint64_t within(uint64_t value, uint64_t least, uint64_t most)
{
	return value < least ? least : value > most ? most : value;
}

/* What a pool may have of what it may hold: it begins small where it could only be freed by us. */
static uint64_t grown(const struct up_memory_room *r, uint64_t age_ns)
{
	uint64_t doublings = age_ns / DOUBLE_NS, most = r->group_limit_bytes / UP_BURST_PART;

	if (r->group_limit_bytes == UINT64_MAX || doublings >= 16)
		return r->may_hold_bytes;
	most <<= doublings;
	return most < r->may_hold_bytes ? most : r->may_hold_bytes;
}

/* Whether the job needs what we ourselves take. `left`: with nothing in the pool. */
static int is_short(const struct up_memory_room *r, uint64_t left)
{
	return r->limit_bytes != UINT64_MAX &&
	       left < within(r->limit_bytes / LEAST_PART, LEAST_LEAST_BYTES, LEAST_MOST_BYTES);
}

/* How long until the next look. */
static uint64_t look(struct up_pressure *pr)
{
	struct up_pool *pool = pr->options.pool;
	uint64_t began = now_ns(), held = pool ? up_pool_used(pool) : 0, left, cost;
	struct up_memory_room room;

	up_memory_look(pr->options.memory, held, &room);
	cost = now_ns() - began;
	left = room.left_bytes;
	room.may_hold_bytes = grown(&room, began - __atomic_load_n(&pr->began_ns, __ATOMIC_RELAXED));
	room.canaries = up_canary_deaths(pr->canary);
	pthread_mutex_lock(&pr->lock);
	pr->now = room;
	pthread_mutex_unlock(&pr->lock);
	if (pool)
		up_pool_room(pool, room.may_hold_bytes ? room.may_hold_bytes : 1);
	pr->shorts = left != UINT64_MAX && is_short(&room, left + held) ? pr->shorts + 1 : 0;
	if (pr->shorts >= SHORT_LOOKS)
		_exit(pr->options.exit_status);
	if (pr->shorts)
		return LOOK_LEAST_NS;
	if (left / pr->cpus >= TAKEN_PER_CPU / 1000)
		left = left / pr->cpus / (TAKEN_PER_CPU / 1000) * 1000000 / LOOKS;
	else
		left = 0;
	left = within(left, LOOK_LEAST_NS, LOOK_MOST_NS);
	return left > cost * COST_PART ? left : cost * COST_PART;
}

static void *look_all_the_time(void *arg)
{
	struct up_pressure *pr = arg;
	struct pollfd stop = { .fd = pr->stop_fd, .events = POLLIN };
	uint64_t wait_ns = 0;

	for (;;) {
		struct timespec ts = { .tv_sec = (time_t)(wait_ns / 1000000000u),
				       .tv_nsec = (long)(wait_ns % 1000000000u) };

		if (ppoll(&stop, 1, &ts, NULL) > 0)
			return NULL;
		wait_ns = look(pr);
	}
}

/* A canary has died: all that the pool has goes, and it begins anew beside what the job has now. What is just being
 * read or mapped goes a little later. */
static void give_all(void *arg)
{
	struct up_pressure *pr = arg;
	struct up_pool *pool = pr->options.pool;
	struct timespec moment = { .tv_nsec = (long)LOOK_LEAST_NS };

	__atomic_store_n(&pr->began_ns, now_ns(), __ATOMIC_RELAXED);
	if (up_pool_used(pool) < LEAST_LEAST_BYTES) /* it is ourselves for whom there is no room */
		_exit(pr->options.exit_status);
	for (unsigned int i = 0; i < GIVE_TRIES && up_pool_used(pool) >= LEAST_LEAST_BYTES; i++) {
		up_pool_room(pool, 0);
		nanosleep(&moment, NULL);
	}
}

int up_pressure_start(struct up_pressure **out, const struct up_pressure_options *options)
{
	struct up_pressure *pr = calloc(1, sizeof(*pr));
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	sigset_t all, before;
	int err;

	if (!pr)
		return -ENOMEM;
	pr->options = *options;
	pr->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pr->began_ns = now_ns();
	pr->cpus = cpus > 0 ? (uint64_t)cpus : 1;
	pthread_mutex_init(&pr->lock, NULL);
	if (pr->stop_fd < 0) {
		err = errno;
		goto fail;
	}
	look(pr);
	if (options->pool && options->with_canary)
		up_canary_start(&pr->canary, give_all, pr, pr->now.least_limit_bytes);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* those of the service are for its main thread */
	err = pthread_create(&pr->thread, NULL, look_all_the_time, pr);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (err)
		goto fail;
	*out = pr;
	return 0;
fail:
	up_canary_end(pr->canary);
	if (pr->stop_fd >= 0)
		close(pr->stop_fd);
	free(pr);
	return -err;
}

void up_pressure_stop(struct up_pressure *pr)
{
	uint64_t one = 1;

	if (!pr)
		return;
	if (write(pr->stop_fd, &one, sizeof(one)) == (ssize_t)sizeof(one))
		pthread_join(pr->thread, NULL);
	up_canary_end(pr->canary);
	close(pr->stop_fd);
	up_memory_close(pr->options.memory);
	free(pr);
}

void up_pressure_now(struct up_pressure *pr, struct up_memory_room *out)
{
	pthread_mutex_lock(&pr->lock);
	*out = pr->now;
	pthread_mutex_unlock(&pr->lock);
}
