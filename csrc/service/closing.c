// SPDX-License-Identifier: Apache-2.0
/*
 * closing.c - close(2) of descriptors of files, whose file system may be told of each, and then the call waits for a
 * server (FUSE; NFS and SMB of what can be written). That a server does not answer must hold nobody up.
 *
 * One thread for each device of which there is something to close. Who asks waits for it a little: a job's description
 * that is open here keeps the job's flock(2).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "common/status.h"
#include "service/cond.h"
#include "service/helper.h"

/* A server that answers has done so by then. */
#define ANSWER_NS (5 * 1000 * 1000)
/* A thread without work ends: a job opens its files by dozens, and hours apart. */
#define IDLE_NS (1000 * 1000 * 1000)

struct closer {
	struct closer *next;
	dev_t device;
	struct up_cond more, done;
	int *fd; /* to close */
	size_t count, room;
	uint64_t taken, closed; /* since it began */
	int waiting; /* for ``done`` */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct closer *begun; /* each has a thread */

static uint64_t from_now(uint64_t ns)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec + ns;
}

/* Whether it goes on: there is something to close, soon, or somebody has still to see what was. */
static int wait_for_more(struct closer *c)
{
	uint64_t until = from_now(IDLE_NS);

	while (!c->count) {
		if (up_cond_wait_until(&c->more, &lock, until) && !c->count && !c->waiting)
			return 0;
		until = from_now(IDLE_NS);
	}
	return 1;
}

static void *close_all(void *arg)
{
	struct closer *c = arg, **at = &begun;

	pthread_mutex_lock(&lock);
	while (wait_for_more(c)) {
		int fd = c->fd[--c->count];

		pthread_mutex_unlock(&lock);
		close(fd);
		pthread_mutex_lock(&lock);
		c->closed++;
		up_cond_broadcast(&c->done);
	}
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	pthread_mutex_unlock(&lock);
	free(c->fd);
	free(c);
	return NULL;
}

/* Its thread waits for the lock, which we have. */
static struct closer *begin(dev_t device)
{
	struct closer *c = calloc(1, sizeof(*c));
	pthread_t thread;

	if (!c)
		return NULL;
	c->device = device;
	if (pthread_create(&thread, NULL, close_all, c)) {
		free(c);
		return NULL;
	}
	pthread_detach(thread);
	c->next = begun;
	begun = c;
	return c;
}

static int add(struct closer *c, int fd)
{
	if (c->count == c->room) {
		size_t room = c->room ? 2 * c->room : 16;
		int *more = realloc(c->fd, room * sizeof(*more));

		if (!more)
			return 0;
		c->fd = more;
		c->room = room;
	}
	c->fd[c->count++] = fd;
	c->taken++;
	up_cond_signal(&c->more);
	return 1;
}

/* Unless its thread is at another already. */
static void wait_for_answer(struct closer *c)
{
	uint64_t until = from_now(ANSWER_NS);
	uint64_t number = c->taken;

	if (c->closed + 1 != number)
		return;
	c->waiting++;
	while (c->closed < number)
		if (up_cond_wait_until(&c->done, &lock, until))
			break;
	c->waiting--;
}

void up_close_file(int fd)
{
	struct stat st = { 0 };
	struct closer *c;
	long flags;
	int taken;

	if (fd < 0)
		return;
	flags = fcntl(fd, F_GETFL);
	up_cached_stat(fd, &st);
	if (major(st.st_dev) && (flags & O_ACCMODE) == O_RDONLY) { /* a disk: nobody is told */
		close(fd);
		return;
	}
	pthread_mutex_lock(&lock);
	for (c = begun; c && c->device != st.st_dev; c = c->next)
		;
	if (!c)
		c = begin(st.st_dev);
	taken = c && add(c, fd);
	if (taken)
		wait_for_answer(c);
	pthread_mutex_unlock(&lock);
	if (!taken) /* no memory, or no thread to be had */
		close(fd);
}
