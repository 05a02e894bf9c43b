// SPDX-License-Identifier: Apache-2.0
/*
 * pool_main.c - what the service's main thread asks of the node's page pool; its start and its end.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "service/pool/pool.h"

void up_pool_alive(struct up_pool *p)
{
	__atomic_store_n(&p->alive_ns, pool_now_ns(), __ATOMIC_RELAXED);
}

void up_pool_budget(struct up_pool *p, uint64_t budget_bytes, uint64_t keep_bytes)
{
	pthread_mutex_lock(&p->lock);
	p->asked_bytes = budget_bytes;
	pool_fit(p);
	__atomic_store_n(&p->hold_most_bytes, keep_bytes, __ATOMIC_RELAXED);
	pool_keep_most(p);
	pool_unlock(p);
}

void up_pool_random(struct up_pool *p, int file, int is_random)
{
	pthread_mutex_lock(&p->lock);
	p->file[file].is_random = is_random;
	pool_unlock(p);
}

/* Chunks of one record that are mapped at once, at the most: its reader's progress is told by the next fault. */
#define RECORD_MOST_BYTES (1u << 20)

/* Who touches one of these chunks takes those behind it, too. What another record has said of one that both have stays:
 * its own reader comes to it by that one's touch. */
static void note_record(const struct up_pool *p, struct pool_file *f, uint64_t first, uint64_t end)
{
	uint64_t most = RECORD_MOST_BYTES / pool_chunk_bytes(p);

	for (uint64_t c = first; c < end; c++) {
		uint8_t rest = (uint8_t)(end - c < most ? end - c : most);

		if (f->rest[c] < rest)
			f->rest[c] = rest;
	}
}

int up_pool_submit(struct up_pool *p, const struct up_warm_job *job)
{
	uint64_t bytes = pool_chunk_bytes(p);
	int ret = -EAGAIN;

	pthread_mutex_lock(&p->lock);
	for (uint32_t i = 0; i < POOL_JOBS && ret; i++) {
		struct pool_job *j = &p->job[i];

		if (j->taken)
			continue;
		*j = (struct pool_job){ .job = *job, .queued = 1, .taken = 1 };
		j->result.id = job->id;
		j->result.submit_ns = pool_now_ns();
		j->result.method = job->method;
		j->result.chunk_bytes = job->chunk_bytes;
		j->chunk = job->offset / bytes;
		j->end = (job->offset + job->length + bytes - 1) / bytes;
		if (j->end > p->file[job->fd].chunks)
			j->end = p->file[job->fd].chunks;
		if (j->chunk > j->end)
			j->chunk = j->end;
		j->chunks = j->end - j->chunk;
		if (job->record)
			note_record(p, &p->file[job->fd], j->chunk, j->end);
		j->last = j->chunks ? j->end - 1 : j->chunk;
		p->expected += j->chunks;
		p->queue[p->queue_head++ % POOL_JOBS] = i;
		p->signals++;
		ret = 0;
	}
	pool_unlock(p);
	return ret;
}

/* The caller's memory is there: nobody waits for a page with the lock, which who frees memory needs. */
static void touch(void *memory, size_t bytes)
{
	for (size_t at = 0; at < bytes; at += 4096)
		*((volatile char *)memory + at) = 0;
	*((volatile char *)memory + bytes - 1) = 0;
}

int up_pool_reap(struct up_pool *p, struct up_warm_result *out, int max)
{
	int n = 0;

	touch(out, (size_t)max * sizeof(*out));
	pthread_mutex_lock(&p->lock);
	while (n < max && p->done_tail != p->done_head) {
		struct pool_job *j = &p->job[p->done[p->done_tail++ % POOL_JOBS]];

		out[n++] = j->result;
		j->taken = 0;
	}
	pool_unlock(p);
	return n;
}

void up_pool_victims(struct up_pool *p, const struct up_pool_victim *victim, int count)
{
	struct up_pool_victim *list = malloc((size_t)(count ? count : 1) * sizeof(*list)), *old;

	if (!list)
		return;
	memcpy(list, victim, (size_t)count * sizeof(*list));
	pthread_mutex_lock(&p->lock);
	old = p->victim;
	p->victim = list;
	p->victims = count;
	p->victim_at = 0;
	p->asked = 0;
	p->answered_ns = pool_now_ns();
	pool_tell_room(p);
	pool_unlock(p);
	if (p->spill)
		spill_poke(p->spill);
	free(old);
}

int up_pool_victims_left(struct up_pool *p)
{
	int left = 0;

	pthread_mutex_lock(&p->lock);
	for (int i = p->victim_at; i < p->victims; i++)
		left += p->victim[i].chunks > 0;
	left = p->asked ? -1 : left;
	pool_unlock(p);
	return left;
}

uint32_t up_pool_evictions(struct up_pool *p)
{
	return __atomic_load_n(&p->evictions, __ATOMIC_RELAXED);
}

uint64_t up_pool_used(struct up_pool *p)
{
	uint64_t used;

	pthread_mutex_lock(&p->lock);
	used = p->used_bytes;
	pool_unlock(p);
	return used;
}

int up_pool_drain(struct up_pool *p, struct up_pool_event *out, int max)
{
	int n = 0;

	touch(out, (size_t)max * sizeof(*out));
	pthread_mutex_lock(&p->lock);
	while (n < max && p->event_tail != p->event_head)
		out[n++] = p->event[p->event_tail++ % POOL_EVENTS];
	p->rung = p->event_tail != p->event_head;
	if (p->rung)
		pool_call_main(p); /* there are more */
	pool_unlock(p);
	return n;
}

void up_pool_counts(struct up_pool *p, struct up_pool_counts *out)
{
	uint64_t pinned = 0;

	touch(out, sizeof(*out));
	pthread_mutex_lock(&p->lock);
	for (struct pool_waiter *w = p->waiting; w; w = w->next)
		pinned += pool_chunk_bytes(p);
	*out = p->count;
	out->pinned_bytes = pinned;
	out->budget_bytes = p->budget;
	pool_unlock(p);
}

int64_t up_pool_cpu_ns(struct up_pool *p)
{
	int64_t total = 0;

	for (uint32_t i = 0; i <= p->threads; i++) {
		pthread_t thread = i == p->threads ? p->fault_thread : p->thread[i];
		struct timespec ts;
		clockid_t clock;

		if (!pthread_getcpuclockid(thread, &clock) && !clock_gettime(clock, &ts))
			total += (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	}
	return total + (p->spill ? spill_cpu_ns(p->spill) : 0);
}

/* ------------------------------------------------------------------ start and end */

static void end_threads(struct up_pool *p, int with_faults)
{
	uint64_t one = 1;

	pthread_mutex_lock(&p->lock);
	__atomic_store_n(&p->stop, 1, __ATOMIC_RELEASE);
	up_cond_broadcast(&p->work);
	up_cond_broadcast(&p->room);
	up_cond_broadcast(&p->stall);
	pool_unlock(p);
	for (uint32_t i = 0; i < p->threads; i++)
		pthread_join(p->thread[i], NULL);
	if (p->rescue_thread)
		pthread_join(p->rescue_thread, NULL);
	if (with_faults && write(p->wake_fd, &one, sizeof(one)) == (ssize_t)sizeof(one))
		pthread_join(p->fault_thread, NULL);
}

static void free_pool(struct up_pool *p)
{
	close(p->epoll_fd);
	close(p->wake_fd);
	pthread_mutex_destroy(&p->lock);
	while (p->waiting) {
		struct pool_waiter *next = p->waiting->next;

		free(p->waiting);
		p->waiting = next;
	}
	while (p->spare) {
		struct pool_waiter *next = p->spare->next;

		free(p->spare);
		p->spare = next;
	}
	free(p->demand);
	free(p->victim);
	free(p);
}

/* pool_others.c */
static const struct pool_calls calls = {
	.has = pool_has,
	.pin = pool_pin_for_others,
	.copy = pool_copy_pinned,
	.unpin = pool_unpin_for_others,
	.disk_ns = pool_disk_ns,
};

int up_pool_create(struct up_pool **out, const struct up_pool_options *o)
{
	struct up_pool *p = calloc(1, sizeof(*p) + o->threads * sizeof(pthread_t));
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = POOL_WAKE };
	int err;

	if (!p)
		return -ENOMEM;
	touch(p->event, sizeof(p->event)); /* the first evictions are where memory is short */
	p->options = *o;
	p->calls = &calls;
	p->asked_bytes = o->budget_bytes;
	p->room_bytes = UINT64_MAX;
	pool_fit(p);
	p->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
	p->began_ns = p->alive_ns = p->idle_since_ns = pool_now_ns();
	p->run_chunks = 1;
	for (int i = 0; i < POOL_CLIENTS; i++)
		p->client[i].uffd = -1;
	p->guardian.fd = -1;
	pthread_mutex_init(&p->lock, NULL);
	for (int i = 0; i < POOL_FILES; i++)
		pthread_mutex_init(&p->writing[i], NULL);
	p->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	err = p->epoll_fd < 0 || p->wake_fd < 0 ||
			      epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, p->wake_fd, &e)
		      ? errno
		      : 0;
	if (!err && o->guardian) /* before there are threads; where it fails guardian_beat() tries again */
		guardian_begin(p);
	while (!err && p->threads < o->threads) {
		err = pthread_create(&p->thread[p->threads], NULL, pool_fill_loop, p);
		p->threads += !err;
	}
	if (!err)
		err = pthread_create(&p->rescue_thread, NULL, pool_rescue_loop, p);
	if (!err)
		err = pthread_create(&p->fault_thread, NULL, pool_fault_loop, p);
	if (err) {
		end_threads(p, 0);
		guardian_end(p, 0);
		free_pool(p);
		return -err;
	}
	*out = p;
	return 0;
}

void up_pool_destroy(struct up_pool *p)
{
	int used = 0;

	if (!p)
		return;
	if (p->spill)
		spill_stop(p->spill);
	end_threads(p, 1);
	pthread_mutex_lock(&p->lock);
	while (p->nets) /* a thread that serves another node, and reads */
		pool_wait(p, &p->idle);
	pool_unlock(p);
	for (int i = 0; i < POOL_CLIENTS; i++)
		used |= p->client[i].uffd >= 0 && !up_pool_is_gone(p, i);
	/* The guardian holds it on for them. */
	guardian_end(p, used);
	for (int i = 0; i < POOL_CLIENTS; i++)
		if (p->client[i].uffd >= 0)
			up_pool_leave(p, i);
	for (int i = 0; i < POOL_FILES; i++)
		if (p->file[i].used)
			up_pool_forget(p, i);
	if (p->spill)
		spill_end(p->spill);
	free_pool(p);
}
