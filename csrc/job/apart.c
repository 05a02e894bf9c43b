// SPDX-License-Identifier: Apache-2.0
/*
 * apart.c - a thread that lives for one act: the file put back in the pool's place where the agent is dead, or
 * silent, for the thread of the job that is about to change that mapping.
 *
 * The kernel has to be asked what lies there, and which pages are copies. The job's own thread opens nothing: its
 * table of descriptors is the job's, where another thread may count on the number that is free next. So a thread with
 * a table of its own asks, and acts; nothing that it does until then waits for storage, or closes a file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/stat.h>
#include <time.h>

#include "job/agent.h"
#include "job/ambient.h"
#include "common/status.h"

/* The kernel copies a table in words of as many numbers; what is not copied need not be closed. */
#define TABLE_LEAST 64
/* How often the thread that waited looks whether the other has gone: its end takes some us, unless a file that is
 * closed with its table waits for a server (FUSE). */
#define LOOKS 1000

enum { ACTING, OVER };

static struct {
	_Atomic uint32_t taken; /* one thread of the job at a time */
	_Atomic uint32_t state;
	_Atomic int tid; /* cleared by the kernel, before it closes the table: its stack is free */
	void *stack;
	struct up_region *region;
	int settles, alone;
	long result;
} apart;

/* Or a millisecond: not every change wakes. Not by yielding, which lets nobody of a lower priority run. */
static void wait_while(void *word, uint32_t value)
{
	struct timespec step = { .tv_nsec = NS_PER_MS };

	up_sys4(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &step);
}

static int open_own(const char *path)
{
	return (int)up_sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
}

long up_put_back_here(struct up_region *r, int settles, int alone)
{
	/* Not /proc/self: that is the leader of the threads, which may have ended. */
	struct up_hands h = { .maps_fd = open_own("/proc/thread-self/maps"),
			      .pagemap_fd = open_own("/proc/thread-self/pagemap"), .seized = 1, .alone = alone };
	long ret = h.maps_fd < 0 ? h.maps_fd : h.pagemap_fd < 0 ? h.pagemap_fd : 0;

	if (!ret)
		ret = up_pool_put_back(&h, r, settles);
	up_close(&h.maps_fd);
	up_close(&h.pagemap_fd);
	return ret;
}

int up_is_empty_here(uintptr_t start, uintptr_t end)
{
	int maps_fd = open_own("/proc/thread-self/maps"), ret = maps_fd;
	struct up_vma v;

	if (maps_fd >= 0)
		ret = up_vma_from(maps_fd, start, &v);
	up_close(&maps_fd);
	return ret == -ENOENT ? 1 : ret < 0 ? ret : v.start >= end;
}

#ifndef UP_AGENT_PTHREAD
/* In a table that is a copy: what is closed of a pipe or a socket stays open elsewhere, and nothing happens. Closing
 * a file asks its server (FUSE, NFS), which may be the very thread that waits for this one. */
static void free_numbers(int wanted)
{
	struct stat st;

	for (int fd = 0; fd < TABLE_LEAST && wanted; fd++)
		if (!up_failed(up_cached_stat(fd, &st)) && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)) &&
		    !up_failed(up_sys1(SYS_close, fd)))
			wanted--;
}

static void act(void)
{
	long shared = up_sys3(SYS_close_range, TABLE_LEAST, ~0u, CLOSE_RANGE_UNSHARE), ret = shared;

	up_drop_rights();
	if (!shared)
		ret = up_put_back_here(apart.region, apart.settles, apart.alone);
	if (!shared && ret == -EMFILE) { /* all numbers that this process may have are copies */
		free_numbers(2);
		ret = up_put_back_here(apart.region, apart.settles, apart.alone);
	}
	apart.result = ret;
	atomic_store(&apart.state, OVER);
	up_futex_wake(&apart.state);
}

static long put_back_apart(struct up_region *r, int settles, int alone)
{
	int tid, ret;

	while ((tid = atomic_load(&apart.tid))) /* the one before this is ending */
		wait_while(&apart.tid, tid);
	apart.region = r;
	apart.settles = settles;
	apart.alone = alone;
	atomic_store(&apart.state, ACTING);
	ret = up_thread_spawn(act, &apart.stack, &apart.tid);
	if (ret)
		return ret;
	tid = atomic_load(&apart.tid);
	/* No tid: a filter of the job's may end it at any call. */
	while (atomic_load(&apart.state) == ACTING && atomic_load(&apart.tid))
		wait_while(&apart.state, ACTING);
	if (atomic_load(&apart.state) == ACTING)
		return -ESRCH;
	/* The job may be about to do what the kernel refuses to a process of several threads. */
	for (int i = 0; tid && i < LOOKS && !up_sys3(SYS_tgkill, up_job.pid, tid, 0); i++)
		up_sys0(SYS_sched_yield);
	return apart.result;
}
#else
/* Sanitizers must know every thread, and those that begin within munmap(2) they do not. */
static long put_back_apart(struct up_region *r, int settles, int alone)
{
	return up_put_back_here(r, settles, alone);
}
#endif

int up_put_back_apart(struct up_region *r, int settles, int alone)
{
	uint32_t is_free = 0;
	long ret;

	while (!atomic_compare_exchange_strong(&apart.taken, &is_free, 1)) {
		wait_while(&apart.taken, 1);
		is_free = 0;
	}
	ret = put_back_apart(r, settles, alone);
	atomic_store(&apart.taken, 0);
	if (up_failed(ret))
		return (int)ret;
	return ret ? -EBUSY : 0;
}

void up_forget_apart(void)
{
	atomic_store(&apart.taken, 0);
	atomic_store(&apart.tid, 0);
	apart.stack = NULL;
}
