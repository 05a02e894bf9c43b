// SPDX-License-Identifier: Apache-2.0
/*
 * checker.c - the threads that compare copies of a file with the file (compare.c). They may wait for
 * storage for any time, so nobody waits for them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "service/compare.h"

/* So long at most for threads that wait for storage which does not answer. */
#define END_MS 200

static void *checker(void *arg)
{
	struct up_checker *c = arg;
	uint64_t one = 1, page = (uint64_t)sysconf(_SC_PAGESIZE);
	char *buffer = mmap(NULL, (CHECKER_BATCH + 1) * page, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (buffer == MAP_FAILED)
		return NULL;
	pthread_mutex_lock(&c->lock);
	while (!c->stop) {
		struct up_compare_result r = { 0 };
		struct up_compare_job job;
		struct compare_turn t = { c, &job, &r, page, buffer, buffer + CHECKER_BATCH * page };

		if (c->head == c->tail) {
			up_cond_wait(&c->more, &c->lock);
			continue;
		}
		job = c->job[c->tail++ % CHECKER_QUEUE];
		pthread_mutex_unlock(&c->lock);
		r.id = job.id;
		compare_round(&t);
		free(job.page);
		up_watch_put(job.watch);
		pthread_mutex_lock(&c->lock);
		c->result[c->done_head++ % CHECKER_QUEUE] = r;
		if (write(c->event_fd, &one, sizeof(one)) < 0)
			continue; /* EAGAIN: the counter is full, so the reader is awake anyway */
	}
	pthread_mutex_unlock(&c->lock);
	munmap(buffer, (CHECKER_BATCH + 1) * page);
	return NULL;
}

int up_checker_create(struct up_checker **out, int threads, int event_fd)
{
	struct up_checker *c = calloc(1, sizeof(*c) + (size_t)threads * sizeof(pthread_t));
	int err = 0;

	if (!c)
		return -ENOMEM;
	c->event_fd = event_fd;
	/* -1: no page is known to be present, so all are read */
	c->pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	pthread_mutex_init(&c->lock, NULL);
	while (c->threads < threads && !err) {
		err = pthread_create(&c->thread[c->threads], NULL, checker, c);
		c->threads += !err;
	}
	*out = c;
	return c->threads ? c->threads : -err;
}

int up_checker_destroy(struct up_checker *c)
{
	struct timespec end;

	pthread_mutex_lock(&c->lock);
	__atomic_store_n(&c->stop, 1, __ATOMIC_RELAXED);
	up_cond_broadcast(&c->more);
	pthread_mutex_unlock(&c->lock);
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_nsec += END_MS * 1000000l;
	end.tv_sec += end.tv_nsec / 1000000000;
	end.tv_nsec %= 1000000000;
	for (int i = 0; i < c->threads; i++)
		if (pthread_timedjoin_np(c->thread[i], NULL, &end))
			return 1; /* storage does not answer: it all goes with the process */
	for (; c->tail != c->head; c->tail++) {
		free(c->job[c->tail % CHECKER_QUEUE].page);
		up_watch_put(c->job[c->tail % CHECKER_QUEUE].watch);
	}
	if (c->pagemap_fd >= 0)
		close(c->pagemap_fd);
	pthread_mutex_destroy(&c->lock);
	free(c);
	return 0;
}

int up_checker_submit(struct up_checker *c, const struct up_compare_job *job)
{
	size_t bytes = (size_t)job->pages * sizeof(*job->page);
	struct up_compare_job own = *job;

	own.page = malloc(bytes ? bytes : 1);
	if (!own.page)
		return -ENOMEM;
	memcpy(own.page, job->page, bytes);
	pthread_mutex_lock(&c->lock);
	/* Results have places too. */
	if (c->under_way == CHECKER_QUEUE) {
		pthread_mutex_unlock(&c->lock);
		free(own.page);
		return -EAGAIN;
	}
	c->under_way++;
	compare_keep(own.watch);
	c->job[c->head++ % CHECKER_QUEUE] = own;
	up_cond_signal(&c->more);
	pthread_mutex_unlock(&c->lock);
	return 0;
}

int up_checker_reap(struct up_checker *c, struct up_compare_result *out, int max)
{
	int n = 0;

	pthread_mutex_lock(&c->lock);
	while (n < max && c->done_tail != c->done_head) {
		out[n++] = c->result[c->done_tail++ % CHECKER_QUEUE];
		c->under_way--;
	}
	pthread_mutex_unlock(&c->lock);
	return n;
}

int64_t up_checker_cpu_ns(struct up_checker *c)
{
	int64_t total = 0;

	for (int i = 0; i < c->threads; i++) {
		struct timespec ts;
		clockid_t clock;

		if (!pthread_getcpuclockid(c->thread[i], &clock) && !clock_gettime(clock, &ts))
			total += (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	}
	return total;
}
