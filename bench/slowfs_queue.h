/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slowfs_queue.h - what slowfs.c does later, from threads of its own
 *
 * A FIFO of things that are due at a time each. Threads sleep for the time of
 * its head, so what is put in is due no earlier than what was put in before.
 */
#ifndef SLOWFS_QUEUE_H
#define SLOWFS_QUEUE_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

#define NS_PER_SECOND	1000000000ull
#define QUEUE_THREADS	2	/* at the most, of one queue */

/* The first member of what is queued. */
struct due {
	struct due *next;
	uint64_t at_ns;		/* 0: at once */
};

struct due_queue {
	pthread_mutex_t lock;
	pthread_cond_t come;
	struct due *head, **tail;
	uint64_t last_ns;
	bool stopping;		/* what is left is due at once */
	void (*give)(struct due *one);
	pthread_t thread[QUEUE_THREADS];
	int threads;
};

#define DUE_QUEUE(q) {				\
	.lock = PTHREAD_MUTEX_INITIALIZER,	\
	.come = PTHREAD_COND_INITIALIZER,	\
	.tail = &(q).head,			\
}

static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * NS_PER_SECOND + ts.tv_nsec;
}

static inline void sleep_until(uint64_t at_ns)
{
	struct timespec at = {
		.tv_sec = at_ns / NS_PER_SECOND,
		.tv_nsec = at_ns % NS_PER_SECOND,
	};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
		;
}

static inline void queue_put(struct due_queue *q, struct due *one, uint64_t at_ns)
{
	pthread_mutex_lock(&q->lock);
	/* A latency lowered live must not let it overtake. */
	if (at_ns < q->last_ns)
		at_ns = q->last_ns;
	q->last_ns = one->at_ns = at_ns;
	one->next = NULL;
	*q->tail = one;
	q->tail = &one->next;
	pthread_cond_signal(&q->come);
	pthread_mutex_unlock(&q->lock);
}

static inline void *queue_thread(void *arg)
{
	struct due_queue *q = arg;

	/* The default slack of 50 us would be 5 % of the default latency. */
	prctl(PR_SET_TIMERSLACK, 1ul);
	for (;;) {
		pthread_mutex_lock(&q->lock);
		while (!q->head && !q->stopping)
			pthread_cond_wait(&q->come, &q->lock);
		struct due *one = q->head;
		bool stopping = q->stopping;
		if (one) {
			q->head = one->next;
			if (!q->head)
				q->tail = &q->head;
		}
		pthread_mutex_unlock(&q->lock);
		if (!one)
			return NULL;
		if (!stopping)
			sleep_until(one->at_ns);
		q->give(one);
	}
}

/* Have so many threads give what is due; 0 or -errno. */
static inline int queue_start(struct due_queue *q, void (*give)(struct due *one), int threads)
{
	q->give = give;
	while (q->threads < threads) {
		int err = pthread_create(&q->thread[q->threads], NULL, queue_thread, q);

		if (err)
			return -err;
		q->threads++;
	}
	return 0;
}

/* Nothing more is put in; what is left is given without delay. */
static inline void queue_end(struct due_queue *q)
{
	pthread_mutex_lock(&q->lock);
	q->stopping = true;
	pthread_cond_broadcast(&q->come);
	pthread_mutex_unlock(&q->lock);
}

static inline void queue_join(struct due_queue *q)
{
	while (q->threads)
		pthread_join(q->thread[--q->threads], NULL);
}

#endif
