// SPDX-License-Identifier: Apache-2.0
/*
 * pool.c - what all of the node's page pool stands on: its clock, its lock, what it posts to the main thread.
 * It calls none of the other files. pool.h says what holds what.
 */
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* pool_wait_a_moment(): then it is looked again whether something may go. */
#define MOMENT_NS 1000000u

uint64_t pool_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

uint32_t pool_now_ms(const struct up_pool *p)
{
	return (uint32_t)((pool_now_ns() - p->began_ns) / 1000000) + 1;
}

void pool_call_main(const struct up_pool *p)
{
	uint64_t one = 1;

	if (write(p->options.event_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so the reader is awake anyway */
}

void pool_post(struct up_pool *p, const struct up_pool_event *e)
{
	/* The last places are for what must not be lost: that a file cannot be read, once for each. */
	if (p->event_head - p->event_tail >=
	    (e->kind == UP_POOL_FAILED ? POOL_EVENTS : POOL_EVENTS - POOL_FILES)) {
		p->count.lost_events++;
		return;
	}
	p->event[p->event_head++ % POOL_EVENTS] = *e;
	if (p->rung || e->kind == UP_POOL_TOUCH || e->kind == UP_POOL_EVICTED)
		return;
	p->rung = p->calls_main = 1;
}

int pool_unsaid(struct up_pool *p, int now)
{
	int unsaid;

	pthread_mutex_lock(&p->lock);
	unsaid = p->event_head != p->event_tail && !p->rung;
	if (unsaid && now) {
		p->rung = 1;
		pool_call_main(p);
		unsaid = 0;
	}
	pool_unlock(p);
	return unsaid;
}

void pool_bin(uint64_t *bin, uint64_t *sum, uint64_t *max, uint64_t ns)
{
	unsigned int length = ns ? 64 - (unsigned int)__builtin_clzll(ns) : 0;
	unsigned int octave = length > 4 ? length - 4 : 0;

	bin[octave * 8 + (ns >> octave)]++;
	*sum += ns;
	if (ns > *max)
		*max = ns;
}

void pool_unlock(struct up_pool *p)
{
	uint32_t signals = p->signals;
	int calls_main = p->calls_main;

	p->signals = 0;
	p->calls_main = 0;
	pthread_mutex_unlock(&p->lock);
	while (signals--)
		up_cond_signal(&p->work);
	if (calls_main)
		pool_call_main(p);
}

void pool_send(struct up_pool *p)
{
	for (; p->signals; p->signals--)
		up_cond_signal(&p->work);
	if (p->calls_main)
		pool_call_main(p);
	p->calls_main = 0;
}

void pool_wait(struct up_pool *p, struct up_cond *what)
{
	pool_send(p);
	up_cond_wait(what, &p->lock);
}

void pool_tell_room(struct up_pool *p)
{
	up_cond_broadcast(&p->room);
	p->signals++;
}

int pool_all_fit(const struct up_pool *p)
{
	uint64_t sum = 0;

	for (int i = 0; i < POOL_FILES; i++)
		sum += p->file[i].used ? p->file[i].size : 0;
	return sum <= p->budget;
}

void pool_await_copies(struct up_pool *p, const struct pool_file *f)
{
	while (f->copying)
		pool_wait(p, &p->idle);
}

uint64_t pool_run_most(const struct up_pool *p)
{
	uint64_t n = RUN_MAX_BYTES / pool_chunk_bytes(p);

	return n ? n : 1;
}

void pool_wait_a_moment(struct up_pool *p)
{
	pool_send(p);
	up_cond_wait_until(&p->room, &p->lock, pool_now_ns() + MOMENT_NS);
}

void pool_drop_waiter(struct up_pool *p, struct pool_waiter **at)
{
	struct pool_waiter *w = *at;

	*at = w->next;
	p->file[w->file].waiters--;
	p->count.waiters--;
	w->next = p->spare;
	p->spare = w;
}

void pool_seek_strays(struct up_pool *p)
{
	p->strays = 1;
	pool_tell_room(p);
}
