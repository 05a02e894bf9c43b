// SPDX-License-Identifier: Apache-2.0
/*
 * spill.c - the disk tier's threads and errors, on which the others stand.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "service/pool/spill_inside.h"

/* Errors of the disk in so long, of which there may be few. */
#define ERRORS_NS (60000 * NET_MS)

static __thread int64_t counted_ns; /* of this thread's time */

void spill_count_cpu(struct spill *s)
{
	struct timespec ts;
	int64_t now;

	if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts))
		return;
	now = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	__atomic_fetch_add(&s->cpu_ns, now - counted_ns, __ATOMIC_RELAXED);
	counted_ns = now;
}

int64_t spill_cpu_ns(struct spill *s)
{
	return __atomic_load_n(&s->cpu_ns, __ATOMIC_RELAXED);
}

/* ------------------------------------------------------------------ threads */

void spill_let_go(struct spill *s)
{
	int last = !--s->holders;

	pthread_mutex_unlock(&s->lock);
	if (!last)
		return;
	if (s->fd >= 0)
		close(s->fd);
	spill_books_end(&s->books);
	pthread_mutex_destroy(&s->lock);
	free(s);
}

void spill_thread_ends(struct spill *s)
{
	int fd = -1, error = 0;

	spill_count_cpu(s);
	pthread_mutex_lock(&s->lock);
	if (!--s->threads) { /* the disk has its blocks again, though others have the file open still */
		fd = s->fd;
		s->fd = -1;
		pthread_mutex_unlock(&s->lock);
		if (fd >= 0) {
			error = ftruncate(fd, 0) ? errno : 0;
			close(fd);
		}
		pthread_mutex_lock(&s->lock);
		if (error)
			spill_note_errno(s, error);
	}
	spill_let_go(s);
}

int spill_start(struct spill *s, void *(*loop)(void *), void *argument)
{
	pthread_attr_t attr;
	pthread_t thread;
	int err;

	pthread_mutex_lock(&s->lock);
	s->holders++;
	s->threads++;
	pthread_mutex_unlock(&s->lock);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	err = pthread_create(&thread, &attr, loop, argument);
	pthread_attr_destroy(&attr);
	if (!err)
		return 0;
	pthread_mutex_lock(&s->lock);
	s->threads--;
	spill_let_go(s);
	return -err;
}

/* ------------------------------------------------------------------ errors, with the lock */

void spill_note_errno(struct spill *s, int error)
{
	struct spill_errors *e = &s->errors;
	uint32_t i = 0;

	while (i < UP_SPILL_ERRORS - 1 && e->times[i] && e->number[i] != error)
		i++;
	e->number[i] = error;
	e->times[i]++;
}

void spill_note_failure(struct spill *s, int error)
{
	struct spill_errors *e = &s->errors;
	uint64_t now = pool_now_ns();

	spill_note_errno(s, error);
	e->at_ns[e->count++ % ERRORS_KEPT] = now;
	if (e->count < e->most || e->most > ERRORS_KEPT)
		return;
	if (now - e->at_ns[(e->count - e->most) % ERRORS_KEPT] > ERRORS_NS)
		return;
	spill_give_up_all(s, error);
}

void spill_give_up_all(struct spill *s, int error)
{
	s->errors.ended = error;
	spill_books_drop_all(&s->books);
	up_cond_broadcast(&s->write);
	up_cond_broadcast(&s->read);
	up_cond_broadcast(&s->done);
}
