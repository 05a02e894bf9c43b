/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cond.h - a condition variable, as POSIX has it, whose signals are not lost.
 *
 * Not pthread_cond_t: in the C library of most sites (glibc 2.25 to 2.40) a signal may wake nobody while
 * several threads wait (sourceware.org/bugzilla, 25847). What a job's thread waits for would lie in a queue
 * beside threads that sleep.
 *
 * A waiter has read `sequence` while it had the mutex, under which the condition changes: a signal after
 * that changes the number, and futex(2) does not sleep on another one. That it comes by the same number,
 * 2^32 signals later, it cannot in the time between the two calls.
 */
#ifndef UP_COND_H
#define UP_COND_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* All zeros: ready for use. */
struct up_cond {
	uint32_t sequence, waiters;
};

/* With the mutex, until there is a signal or CLOCK_MONOTONIC is past `until_ns`: then ETIMEDOUT, else 0. May
 * return sooner, as pthread_cond_timedwait(3). */
static inline int up_cond_wait_until(struct up_cond *c, pthread_mutex_t *mutex, uint64_t until_ns)
{
	struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000u),
				  .tv_nsec = (long)(until_ns % 1000000000u) };
	uint32_t sequence = __atomic_load_n(&c->sequence, __ATOMIC_RELAXED);
	long ret;
	int error;

	__atomic_fetch_add(&c->waiters, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(mutex);
	ret = syscall(SYS_futex, &c->sequence, FUTEX_WAIT_BITSET_PRIVATE, sequence,
		      until_ns == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
	error = errno;
	pthread_mutex_lock(mutex);
	__atomic_fetch_sub(&c->waiters, 1, __ATOMIC_RELAXED);
	return ret && error == ETIMEDOUT ? ETIMEDOUT : 0;
}

static inline void up_cond_wait(struct up_cond *c, pthread_mutex_t *mutex)
{
	up_cond_wait_until(c, mutex, UINT64_MAX);
}

static inline void up_cond_wake(struct up_cond *c, int most)
{
	__atomic_fetch_add(&c->sequence, 1, __ATOMIC_RELAXED);
	/* who began to wait before the condition has changed counted itself under the same mutex */
	if (__atomic_load_n(&c->waiters, __ATOMIC_RELAXED))
		syscall(SYS_futex, &c->sequence, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
}

/* With or without the mutex, after the condition was changed with it. */
static inline void up_cond_signal(struct up_cond *c)
{
	up_cond_wake(c, 1);
}

static inline void up_cond_broadcast(struct up_cond *c)
{
	up_cond_wake(c, INT_MAX);
}

#endif
