// SPDX-License-Identifier: Apache-2.0
/*
 * closing.c - descriptors of files, closed by threads that nobody waits for: a file system may be told of
 * each close(2), and the call waits for its answer (FUSE, where the server asks for it; NFS).
 *
 * One thread for each device of which there is something to close: a server that does not answer holds
 * the descriptors of its own files.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/status.h"
#include "service/helper.h"

struct closing {
	struct closing *next;
	dev_t device;
	int *fd; /* to close */
	size_t count, room;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct closing *begun; /* each has a thread */

static void *close_all(void *arg)
{
	struct closing *c = arg, **at = &begun;

	pthread_mutex_lock(&lock);
	while (c->count) {
		int fd = c->fd[--c->count];

		pthread_mutex_unlock(&lock);
		close(fd);
		pthread_mutex_lock(&lock);
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
static struct closing *begin(dev_t device)
{
	struct closing *c = calloc(1, sizeof(*c));
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

static int add(struct closing *c, int fd)
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
	return 1;
}

void up_close_later(int fd)
{
	struct stat st = { 0 };
	struct closing *c;
	int taken;

	if (fd < 0)
		return;
	up_cached_stat(fd, &st);
	pthread_mutex_lock(&lock);
	for (c = begun; c && c->device != st.st_dev; c = c->next)
		;
	if (!c)
		c = begin(st.st_dev);
	taken = c && add(c, fd);
	pthread_mutex_unlock(&lock);
	if (!taken) /* no memory, or no thread to be had */
		close(fd);
}
