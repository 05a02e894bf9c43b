// SPDX-License-Identifier: Apache-2.0
/*
 * paths.c - threads that read files by name into the page cache (pathread.c), and hold some of them open for a while.
 *
 * All that may wait for storage is done by threads: opening, reading, and closing. Who asks waits for nothing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "service/cond.h"
#include "service/helper.h"
#include "service/pathread.h"
#include "service/reading.h"

/* Requests that are queued, begun, or not reaped: results have places too. */
#define QUEUE 1024u
/* So long at most for threads that wait for storage which does not answer. */
#define END_MS 200

struct item {
	struct item *next;
	struct up_path_request request;
	struct up_path_result result;
	uint64_t data[]; /* the ranges, then the name */
};

struct list {
	struct item *first, *last;
};

struct held {
	uint64_t id, group, until_ns;
	int fd;
};

struct reader {
	struct up_paths *paths;
	struct item *item; /* what it is at */
	pthread_t thread;
};

struct up_paths {
	pthread_mutex_t lock;
	struct up_cond more, due;
	int threads, stop, event_fd, has_closer;
	uint32_t under_way, held_count, held_most;
	struct list queue, done;
	struct held *held;
	pthread_t closer;
	struct reader reader[];
};

/* By all of this process. */
static uint32_t held_by_all;

static void append(struct list *l, struct item *i)
{
	i->next = NULL;
	if (l->first)
		l->last->next = i;
	else
		l->first = i;
	l->last = i;
}

static struct item *take_first(struct list *l)
{
	struct item *i = l->first;

	if (i)
		l->first = i->next;
	return i;
}

/* ---- what is held ---- */

/* A place of which there are held_most for all. */
static int reserve(const struct up_paths *p)
{
	if (__atomic_fetch_add(&held_by_all, 1, __ATOMIC_RELAXED) < p->held_most)
		return 1;
	__atomic_fetch_sub(&held_by_all, 1, __ATOMIC_RELAXED);
	return 0;
}

/* The one that is closed next. */
static struct held *next_due(struct up_paths *p)
{
	struct held *found = p->held_count ? &p->held[0] : NULL;

	for (uint32_t i = 1; i < p->held_count; i++)
		if (p->held[i].until_ns < found->until_ns)
			found = &p->held[i];
	return found;
}

/* Closes what was held long enough, or is not needed any more: it may wait for a server, and no reader for it. */
static void *close_due(void *arg)
{
	struct up_paths *p = arg;

	pthread_mutex_lock(&p->lock);
	while (!p->stop || p->held_count) {
		struct held *h = next_due(p);
		int fd;

		if (!h) {
			up_cond_wait(&p->due, &p->lock);
			continue;
		}
		if (!p->stop && h->until_ns > up_now_ns()) {
			up_cond_wait_until(&p->due, &p->lock, h->until_ns);
			continue;
		}
		fd = h->fd;
		*h = p->held[--p->held_count];
		pthread_mutex_unlock(&p->lock);
		close(fd);
		__atomic_fetch_sub(&held_by_all, 1, __ATOMIC_RELAXED);
		pthread_mutex_lock(&p->lock);
	}
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

static int start_thread(pthread_t *thread, void *(*body)(void *), void *arg)
{
	sigset_t all, was;
	int err;

	/* Signals are the service's main thread's; no call here ends for one. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &was);
	err = pthread_create(thread, NULL, body, arg);
	pthread_sigmask(SIG_SETMASK, &was, NULL);
	return err;
}

/* Whether it is held from now on. *fd is then what is to be closed for it: -1, or what was held longest, as
 * a file that its job has not opened for so long is the least likely to be wanted. */
static int hold(struct up_paths *p, const struct up_path_request *q, int *fd)
{
	struct held new = { q->id, q->group, up_now_ns() + UP_HOLD_SECONDS * 1000000000ull, *fd };
	struct held *oldest;

	if (p->stop)
		return 0;
	if (!p->has_closer && start_thread(&p->closer, close_due, p))
		return 0;
	p->has_closer = 1;
	if (reserve(p)) {
		p->held[p->held_count++] = new;
		if (p->held_count == 1)
			up_cond_signal(&p->due);
		*fd = -1;
		return 1;
	}
	oldest = next_due(p);
	if (!oldest)
		return 0;
	*fd = oldest->fd;
	*oldest = new;
	return 1;
}

/* ---- the threads ---- */

/* Who reaps is told of the first that lies there. */
static void tell(const struct up_paths *p, int is_first)
{
	uint64_t one = 1;

	if (is_first && write(p->event_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so the reader is awake anyway */
}

static void *read_queued(void *arg)
{
	struct reader *self = arg;
	struct up_paths *p = self->paths;
	char *scratch = malloc(UP_SCRATCH_BYTES);

	if (!scratch)
		return NULL;
	memset(scratch, 1, UP_SCRATCH_BYTES); /* not 0, or it becomes calloc(3), which touches nothing: a fault may wait */
	pthread_mutex_lock(&p->lock);
	while (!p->stop) {
		struct item *i = take_first(&p->queue);
		int fd, is_first;

		if (!i) {
			up_cond_wait(&p->more, &p->lock);
			continue;
		}
		self->item = i;
		pthread_mutex_unlock(&p->lock);
		fd = up_path_read(&i->request, &i->result, scratch, &p->stop);
		pthread_mutex_lock(&p->lock);
		if (fd >= 0 && i->request.hold)
			i->result.held = (uint32_t)hold(p, &i->request, &fd);
		pthread_mutex_unlock(&p->lock);
		if (fd >= 0)
			close(fd);
		i->result.end_ns = up_now_ns();
		pthread_mutex_lock(&p->lock);
		self->item = NULL;
		is_first = !p->done.first;
		append(&p->done, i);
		tell(p, is_first);
	}
	pthread_mutex_unlock(&p->lock);
	free(scratch);
	return NULL;
}

int up_paths_create(struct up_paths **out, int threads, uint32_t held_most, int event_fd)
{
	struct up_paths *p = calloc(1, sizeof(*p) + (size_t)threads * sizeof(p->reader[0]));
	int err = 0;

	if (!p)
		return -ENOMEM;
	p->held = calloc(held_most ? held_most : 1, sizeof(*p->held));
	if (!p->held) {
		free(p);
		return -ENOMEM;
	}
	p->held_most = held_most;
	p->event_fd = event_fd;
	pthread_mutex_init(&p->lock, NULL);
	while (p->threads < threads && !err) {
		struct reader *r = &p->reader[p->threads];

		r->paths = p;
		err = start_thread(&r->thread, read_queued, r);
		p->threads += !err;
	}
	if (!p->threads) {
		pthread_mutex_destroy(&p->lock);
		free(p->held);
		free(p);
		return -err;
	}
	*out = p;
	return p->threads;
}

static void free_all(struct list *l)
{
	for (struct item *i = take_first(l); i; i = take_first(l))
		free(i);
}

int up_paths_destroy(struct up_paths *p)
{
	struct timespec end;

	pthread_mutex_lock(&p->lock);
	__atomic_store_n(&p->stop, 1, __ATOMIC_RELAXED);
	up_cond_broadcast(&p->more);
	up_cond_broadcast(&p->due);
	pthread_mutex_unlock(&p->lock);
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_nsec += END_MS * 1000000l;
	end.tv_sec += end.tv_nsec / 1000000000;
	end.tv_nsec %= 1000000000;
	for (int i = 0; i < p->threads; i++)
		if (pthread_timedjoin_np(p->reader[i].thread, NULL, &end))
			return 1; /* storage does not answer: it all goes with the process */
	if (p->has_closer && pthread_timedjoin_np(p->closer, NULL, &end))
		return 1;
	free_all(&p->queue);
	free_all(&p->done);
	pthread_mutex_destroy(&p->lock);
	free(p->held);
	free(p);
	return 0;
}

int up_paths_submit(struct up_paths *p, const struct up_path_request *request)
{
	size_t ranges = (size_t)request->ranges * 2 * sizeof(*request->range);
	size_t name = strlen(request->name) + 1;
	struct item *i = malloc(sizeof(*i) + ranges + name);
	int ret = -EAGAIN;

	if (!i)
		return -ENOMEM;
	i->request = *request;
	i->request.range = i->data;
	i->request.name = memcpy((char *)i->data + ranges, request->name, name);
	if (ranges)
		memcpy(i->data, request->range, ranges);
	i->result = (struct up_path_result){ .id = request->id,
					     .group = request->group,
					     .directory_fd = request->directory_fd };
	pthread_mutex_lock(&p->lock);
	if (p->under_way < QUEUE) {
		p->under_way++;
		append(&p->queue, i);
		up_cond_signal(&p->more);
		ret = 0;
	}
	pthread_mutex_unlock(&p->lock);
	if (ret)
		free(i);
	return ret;
}

static int is_meant(enum up_path_by by, uint64_t number, uint64_t id, uint64_t group)
{
	return (by == UP_PATH_BY_ID ? id : group) == number;
}

int up_paths_withdraw(struct up_paths *p, enum up_path_by by, uint64_t number)
{
	struct list left = { 0 };
	int n = 0;

	pthread_mutex_lock(&p->lock);
	for (struct item *i = take_first(&p->queue); i; i = take_first(&p->queue)) {
		if (!is_meant(by, number, i->request.id, i->request.group)) {
			append(&left, i);
			continue;
		}
		i->result.state = UP_PATH_WITHDRAWN;
		tell(p, !p->done.first);
		append(&p->done, i);
		n++;
	}
	p->queue = left;
	pthread_mutex_unlock(&p->lock);
	return n;
}

static void do_not_hold(struct item *i, enum up_path_by by, uint64_t number)
{
	if (i && is_meant(by, number, i->request.id, i->request.group))
		i->request.hold = 0;
}

void up_paths_release(struct up_paths *p, enum up_path_by by, uint64_t number, uint64_t after_ns)
{
	uint64_t until_ns = up_now_ns() + after_ns;

	pthread_mutex_lock(&p->lock);
	for (struct item *i = p->queue.first; i; i = i->next)
		do_not_hold(i, by, number);
	for (int i = 0; i < p->threads; i++)
		do_not_hold(p->reader[i].item, by, number);
	for (uint32_t i = 0; i < p->held_count; i++) {
		struct held *h = &p->held[i];

		if (is_meant(by, number, h->id, h->group) && h->until_ns > until_ns)
			h->until_ns = until_ns;
	}
	up_cond_signal(&p->due);
	pthread_mutex_unlock(&p->lock);
}

int up_paths_reap(struct up_paths *p, struct up_path_result *out, int max)
{
	int n = 0;

	pthread_mutex_lock(&p->lock);
	while (n < max && p->done.first) {
		struct item *i = take_first(&p->done);

		out[n++] = i->result;
		free(i);
		p->under_way--;
	}
	pthread_mutex_unlock(&p->lock);
	return n;
}

int64_t up_paths_cpu_ns(struct up_paths *p)
{
	int64_t total = 0;

	for (int i = 0; i < p->threads; i++) {
		struct timespec ts;
		clockid_t clock;

		if (!pthread_getcpuclockid(p->reader[i].thread, &clock) &&
		    !clock_gettime(clock, &ts))
			total += (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	}
	return total;
}
