// SPDX-License-Identifier: Apache-2.0
/*
 * wait.c - how our threads wait, and what they do where the kernel refuses to let them.
 *
 * By epoll(7): ppoll(2) fails with EINVAL as soon as RLIMIT_NOFILE is below the number of descriptors that
 * it is given, and the job, or prlimit(2) from outside, may lower it at any time. Instances are made, and
 * what is known is added to them, when a thread starts: no descriptor is needed later. Should the kernel
 * refuse all the same (a filter), a wait ends after a millisecond, and all that was waited for is looked
 * at: nothing that our threads read blocks them.
 */
#include <errno.h>
#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <time.h>

#include "job/agent.h"

#define LOOK_NS NS_PER_MS

void up_pause(uint64_t ns)
{
	struct timespec span = { (time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull) };
	long ret = up_sys4(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &span, NULL);
	uint32_t nobody = 0;

	if (up_failed(ret) && ret != -EINTR)
		ret = up_sys4(SYS_futex, &nobody, FUTEX_WAIT_PRIVATE, 0, &span);
	if (up_failed(ret) && ret != -EINTR && ret != -ETIMEDOUT)
		up_sys0(SYS_sched_yield);
}

int up_wait_open(struct up_wait *w)
{
	struct epoll_event none;
	long ret = up_sys1(SYS_epoll_create1, EPOLL_CLOEXEC);

	*w = (struct up_wait){ .fd = up_failed(ret) ? -1 : (int)ret };
	if (!up_failed(ret))
		ret = up_sys5(SYS_epoll_pwait, w->fd, &none, 1, 0, NULL);
	if (up_failed(ret))
		up_close(&w->fd);
	return up_failed(ret) ? (int)ret : 0;
}

void up_wait_also(struct up_wait *w, enum up_source source, int fd, uint32_t events)
{
	struct epoll_event e = { .events = events, .data.u64 = source };
	uint32_t before = w->events[source];
	long ret;

	if (fd < 0) /* closed: the kernel has taken it out */
		events = before = 0;
	w->events[source] = events;
	if (events == before)
		return;
	ret = up_sys4(SYS_epoll_ctl, w->fd,
		      !before ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL, fd, &e);
	/* EBADF, ENOENT: our other thread has closed it just now. */
	if (up_failed(ret) && ret != -EBADF && ret != -ENOENT)
		w->refused = 1;
}

int up_wait(struct up_wait *w, uint64_t ns, uint32_t events[UP_SOURCES])
{
	struct epoll_event ready[UP_SOURCES];
	int ms = ns / NS_PER_MS >= INT32_MAX ? -1 : (int)((ns + NS_PER_MS - 1) / NS_PER_MS);
	long n = -EPERM;

	for (int i = 0; i < UP_SOURCES; i++)
		events[i] = 0;
	if (!w->refused)
		n = up_sys6(SYS_epoll_pwait, w->fd, (long)ready, UP_SOURCES, ms, 0, sizeof(uint64_t));
	if (n == -EINTR) /* a stop, or a tracer */
		return 1;
	if (up_failed(n)) {
		up_pause(ns < LOOK_NS ? ns : LOOK_NS);
		for (int i = 0; i < UP_SOURCES; i++)
			events[i] = w->events[i];
		return 0;
	}
	for (long i = 0; i < n; i++)
		events[ready[i].data.u64] = ready[i].events;
	return n > 0;
}

void up_take_bell(struct agent *a)
{
	struct signalfd_siginfo info;
	long ret;

	do
		ret = up_sys3(SYS_read, a->bell_fd, &info, sizeof(info));
	while (!up_failed(ret));
	if (ret != -EAGAIN && ret != -EINTR) /* refused (a filter): it rings on */
		up_pause(NS_PER_MS);
}
