// SPDX-License-Identifier: Apache-2.0
/*
 * base.c - what all files of ours in the job stand on: its books, the clock, how our threads are woken, the
 * campaign's steps, and the userfaultfd of the checkpoints, closed for good. It calls none of the others.
 */
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <time.h>

#include "job/agent.h"

struct up_job up_job;
struct agent up_agent;

uint64_t up_now_ns(void)
{
	struct timespec ts;

	up_sys2(SYS_clock_gettime, CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

void up_lock_path(char *path)
{
	const char *from = up_job.socket_path;

	while (*from)
		*path++ = *from++;
	for (from = UP_LOCK_SUFFIX; *from;)
		*path++ = *from++;
	*path = 0;
}

void up_futex_wake(_Atomic uint32_t *word)
{
	up_sys3(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff);
}

void up_close(int *fd)
{
	if (*fd >= 0)
		up_sys1(SYS_close, *fd);
	*fd = -1;
}

int up_open_again(int fd, int flags)
{
	char path[48] = "/proc/thread-self/fd/", digit[12];
	int n = 0, at = 21;

	do
		digit[n++] = (char)('0' + fd % 10);
	while (fd /= 10);
	while (n)
		path[at++] = digit[--n];
	path[at] = 0;
	return (int)up_sys4(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0);
}

/* Fault injection: the agent ends here as a crash would, or the process stands still right here
 * until somebody sends SIGCONT. */
static void test_exit(uint32_t state)
{
	char digit = (char)('0' + state);
	int fd = (int)up_sys4(SYS_openat, AT_FDCWD, up_job.test_exit_log,
			  O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	int tid = (int)up_sys0(SYS_gettid);

	if (fd >= 0)
		up_sys3(SYS_write, fd, &digit, 1);
	up_close(&fd);
	if (up_job.test_exit_stops) {
		up_sys3(SYS_tgkill, up_job.pid, tid, SIGSTOP);
		return;
	}
#ifdef UP_AGENT_PTHREAD
	_Atomic int *own = tid == atomic_load(&up_job.agent_tid) ? &up_job.agent_tid
								 : &up_job.responder_tid;
#ifdef __SANITIZE_THREAD__ /* which does not see what the kernel writes */
	atomic_store(own, 0);
#else /* as by CLONE_CHILD_CLEARTID: cleared when the thread is gone, and not before */
	up_sys1(SYS_set_tid_address, own);
#endif
#else
	(void)tid;
#endif
	up_sys1(SYS_exit, 0);
}

/* Says what the agent is about to do; the campaign kills it, or the service, right there. */
void up_step(struct agent *a, uint32_t state)
{
	if (a->ring)
		__atomic_store_n(&a->ring->state, state, __ATOMIC_RELAXED);
	if (!up_job.test_exit_after ||
	    (up_job.test_exit_state >= 0 && (uint32_t)up_job.test_exit_state != state))
		return;
	/* Once, or both threads one after the other. */
	long step = atomic_fetch_add(&a->steps, 1) + 1;

	if (step == up_job.test_exit_after ||
	    (up_job.test_exit_all && step > up_job.test_exit_after))
		test_exit(state);
}

int up_agent_alive(void)
{
	return atomic_load(&up_job.agent_tid) != 0;
}

long up_agent_ring_bell(void)
{
	return up_sys3(SYS_tgkill, up_job.pid, atomic_load(&up_job.agent_tid), UP_BELL);
}

void up_ring_responder(void)
{
	int tid = atomic_load(&up_job.responder_tid);

	if (tid)
		up_sys3(SYS_tgkill, up_job.pid, tid, UP_BELL);
}

void up_wake_range(int uffd, uintptr_t address, size_t length)
{
	struct uffdio_range range = { .start = address, .len = length };

	if (uffd >= 0)
		up_sys3(SYS_ioctl, uffd, UFFDIO_WAKE, &range);
}

void up_close_overlays(struct agent *a)
{
	int fd = atomic_exchange(&a->uffd, -1), tid;

	if (fd < 0)
		return;
	up_close(&fd);
	/* Nobody is told of it by epoll(7): both look. */
	up_ring_responder();
	if ((tid = atomic_load(&up_job.agent_tid)))
		up_sys3(SYS_tgkill, up_job.pid, tid, UP_BELL);
}
