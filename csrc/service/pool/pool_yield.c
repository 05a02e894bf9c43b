// SPDX-License-Identifier: Apache-2.0
/*
 * pool_yield.c - the pool gives way to the job: it holds no more than there is room for, at once and whatever the
 * policy would keep. service/pressure.c says how much that is.
 */
#include "service/pool/pool.h"

#define LEAST_BYTES (1u << 20)

/* With less, a reader would wait for ever. */
static uint64_t at_least_a_chunk(const struct up_pool *p, uint64_t bytes)
{
	return bytes > pool_chunk_bytes(p) ? bytes : pool_chunk_bytes(p);
}

/* Where there is no room at all: two chunks, which one instruction may need, or 1 MiB. */
static uint64_t room(const struct up_pool *p)
{
	uint64_t least = 2 * pool_chunk_bytes(p) > LEAST_BYTES ? 2 * pool_chunk_bytes(p) : LEAST_BYTES;

	return p->room_bytes > least ? p->room_bytes : least;
}

void pool_fit(struct up_pool *p)
{
	uint64_t bytes = at_least_a_chunk(p, p->asked_bytes < room(p) ? p->asked_bytes : room(p));

	if (bytes != p->budget)
		pool_tell_room(p);
	p->budget = bytes;
}

void up_pool_room(struct up_pool *p, uint64_t bytes)
{
	__atomic_store_n(&p->room_bytes, bytes, __ATOMIC_RELAXED); /* threads that fill look without the lock */
	pthread_mutex_lock(&p->lock);
	pool_fit(p);
	/* What is left then is being read, mapped, or was touched within HOLD_MS: it goes by the next look. */
	while (p->used_bytes - p->leaving_bytes > p->budget && !p->stop && pool_give(p))
		;
	pool_unlock(p);
}
