/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - how much memory is left: to this process's memory cgroup, each of its ancestors, and the
 * machine. Each of them is a level.
 */
#ifndef UP_MEMORY_H
#define UP_MEMORY_H

#include <stdint.h>

/* What is kept free at each level is this part of its limit: a job takes so much before we have given way.
 * Of the jobs that were measured the quickest took 450 MiB in 0.1 s, at two processors; an eighth of 300 MiB
 * is taken in 8 ms at that rate, and pressure.c looks four times within that. */
#define UP_BURST_PART 8u

struct up_level {
	uint64_t limit, used, cache, shmem; /* bytes; cache: of files, which the kernel gives up first */
	uint64_t others, peak; /* see up_level_note(); peak: the most that it has been */
};

/* What is neither page cache nor the pool's: the job's own memory, and ours. Shared memory is no page cache:
 * without swap nobody but its owner can free it. */
static inline void up_level_note(struct up_level *l, uint64_t held)
{
	uint64_t ours = held < l->shmem ? held : l->shmem; /* what is being filled is not there yet */

	l->others = l->used > l->cache + ours ? l->used - l->cache - ours : 0;
	if (l->others > l->peak)
		l->peak = l->others;
}

/* What may still be taken there before the kernel kills somebody. */
static inline uint64_t up_level_left(const struct up_level *l, uint64_t held)
{
	return l->limit > l->others + held ? l->limit - l->others - held : 0;
}

/* The most that a pool may hold there beside `others` and a burst of them. */
static inline uint64_t up_level_may_hold(const struct up_level *l, uint64_t others)
{
	uint64_t taken = others + l->limit / UP_BURST_PART;

	return l->limit > taken ? l->limit - taken : 0;
}

#endif
