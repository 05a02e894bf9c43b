// SPDX-License-Identifier: Apache-2.0
/*
 * agent.c - the thread inside the job that speaks with the service and with the job's threads, lays
 * checkpoints and arms them again.
 *
 * It is a raw clone(2) that libc does not know of: any extra *pthread* takes glibc off its
 * single-thread fast path (stdio locks, malloc), which makes a tool like mdb_dump several times
 * slower. The price is that nothing here may use TLS, errno or a libc function with state: only
 * sys.h. Its descriptor table is its own and starts empty (close_range with CLOSE_RANGE_UNSHARE; the
 * kernel copies and closes 64 numbers at most), because closing any descriptor of a file drops the
 * *process's* POSIX locks on it, and because the job may close or reuse any number it likes. A file
 * comes into the table by pidfd_getfd(2): the same struct file, so that mappings made here merge with
 * the job's.
 *
 * Four rules: it never reads storage on the job's behalf, it never touches a managed address, it
 * never waits for a thread of the job, and it opens no path of the job's (a far server may not answer,
 * and a thread that sleeps there keeps the process from ending). When it and the responder
 * (respond.c) have ended, for whatever reason, the kernel closes their userfaultfd; a checkpoint page
 * that stays behind holds the file's bytes and is then an ordinary page.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <errno.h>

#include "job/agent.h"
#include "job/ambient.h"

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

/* A forked child usually execs at once: do not trouble the service before this. */
#define FORK_QUIET_NS (5 * NS_PER_MS)

/* ------------------------------------------------------------------ start and end */

static int open_uffd(struct agent *a, uint64_t features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features | UFFD_FEATURE_THREAD_ID };
	long fd = up_job.no_uffd ? -EOPNOTSUPP
				 : up_sys1(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	long ret;

	/* Never UFFD_USER_MODE_ONLY: a write(2) from a checkpoint would fail with EFAULT. */
	if (fd == -EPERM || fd == -ENOSYS) {
		long dev = up_sys4(SYS_openat, AT_FDCWD, "/dev/userfaultfd", O_RDWR | O_CLOEXEC, 0);

		if (!up_failed(dev)) {
			fd = up_sys3(SYS_ioctl, dev, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
			up_sys1(SYS_close, dev);
		}
	}
	if (up_failed(fd)) {
		a->uffd_error = (int)-fd;
		return -1;
	}
	ret = up_sys3(SYS_ioctl, fd, UFFDIO_API, &api);
	if (up_failed(ret)) {
		a->uffd_error = (int)-ret;
		up_sys1(SYS_close, fd);
		return -1;
	}
	return (int)fd;
}

/* A quarter of the process's mappings at most, two to a checkpoint: past the limit the job's own
 * malloc and pthread_create would fail. */
static uint32_t overlay_limit(void)
{
	char text[24] = { 0 };
	uint32_t maps = 0;
	long fd = up_sys4(SYS_openat, AT_FDCWD, "/proc/sys/vm/max_map_count",
			  O_RDONLY | O_CLOEXEC, 0);

	if (!up_failed(fd)) {
		up_sys3(SYS_read, fd, text, sizeof(text) - 1);
		up_sys1(SYS_close, fd);
	}
	for (int i = 0; text[i] >= '0' && text[i] <= '9' && maps < 100000000; i++)
		maps = maps * 10 + (uint32_t)(text[i] - '0');
	if (up_job.test_overlays)
		return (uint32_t)up_job.test_overlays;
	return (maps ? maps : 65530) / 8;
}

/* Room for as many descriptors as there may be regions, while the table is this thread's alone. Once the responder
 * shares it the kernel waits for an RCU grace period (fs/file.c, expand_fdtable), 10 to 70 ms, whenever it grows: and
 * who maps for the agent. */
static void reserve_numbers(int fd)
{
	struct rlimit limit = { 0 };
	uint64_t highest = UP_REGIONS + UP_REGIONS / 2;
	long reserved;

	if (up_failed(up_sys4(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &limit)) || !limit.rlim_cur)
		return;
	if (highest >= limit.rlim_cur)
		highest = limit.rlim_cur - 1;
	reserved = up_sys3(SYS_fcntl, fd, F_DUPFD_CLOEXEC, highest);
	if (!up_failed(reserved))
		up_sys1(SYS_close, reserved);
}

static int agent_open(struct agent *a)
{
	uint64_t mask = 1ull << (UP_BELL - 1);
#ifdef UP_AGENT_PTHREAD
	unsigned int first = 3; /* a sanitizer's report in this thread needs stderr */
#else
	unsigned int first = 0;
#endif
	int uffd = -1;
	long ret = up_sys3(SYS_close_range, first, ~0u, CLOSE_RANGE_UNSHARE);

	if (up_failed(ret))
		return (int)ret;
	ret = up_sys4(SYS_signalfd4, -1, &mask, sizeof(mask), SFD_CLOEXEC | SFD_NONBLOCK);
	if (up_failed(ret))
		return (int)ret;
	a->bell_fd = (int)ret;
	reserve_numbers(a->bell_fd);
	a->maps_fd = (int)up_sys4(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
	ret = up_wait_open(&a->wait);
	if (!ret)
		ret = up_wait_open(&a->listen);
	if (!ret)
		ret = up_wait_open(&a->left);
	if (ret)
		return (int)ret;
	up_wait_also(&a->wait, UP_BELL_RINGS, a->bell_fd, EPOLLIN);
	up_wait_also(&a->listen, UP_BELL_RINGS, a->bell_fd, EPOLLIN);
	/* mmap() waits for its descriptor to be taken, and for nothing else of what follows. */
	up_on_bell(a);
	if (up_job.listen_bytes)
		uffd = open_uffd(a, UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_EVENT_UNMAP |
				    UFFD_FEATURE_EVENT_REMAP);
	atomic_store(&a->uffd, uffd);
	up_wait_also(&a->listen, UP_OVERLAYS_TELL, uffd, EPOLLIN);
	up_wait_also(&a->left, UP_OVERLAYS_TELL, uffd, EPOLLIN);
	if (up_job.pool)
		/* Without EVENT_REMAP a mapping that is moved past us would lose its registration: its
		 * holes would be zeros. */
		a->pool_uffd = open_uffd(a, UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_MISSING_SHMEM |
					    UFFD_FEATURE_EVENT_REMAP);
	a->overlays_max = overlay_limit();
	/* How many threads the process has, without a look-up: st_nlink less two. */
	a->task_fd = (int)up_sys4(SYS_openat, AT_FDCWD, "/proc/self/task",
				  O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	a->pagemap_fd = (int)up_sys4(SYS_openat, AT_FDCWD, "/proc/self/pagemap",
				     O_RDONLY | O_CLOEXEC, 0);
	a->stat_fd = (int)up_sys4(SYS_openat, AT_FDCWD, "/proc/self/stat", O_RDONLY | O_CLOEXEC, 0);
	/* Nothing after this needs any: a job that gives up its own later must find none in it. */
	up_drop_rights();
	a->connect_at_ns = up_now_ns();
	/* What a fork left to us. */
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if (state == UP_FREE || state == UP_OPENING || !r->inherited)
			continue;
		if (i >= a->slots) /* not down: up_on_bell() above may have attached a higher one */
			a->slots = i + 1;
		if (state != UP_LIVE) /* a thread of the job has begun to take it back */
			continue;
		up_queue(a, r);
		if (atomic_load(&r->swap) != UP_SWAP_WAITING)
			a->connect_at_ns = up_now_ns() + FORK_QUIET_NS;
	}
	return 0;
}

/* The process's first thread is a zombie: (COMMAND) Z in its stat file. */
static int leader_has_ended(const struct agent *a)
{
	char text[64];
	long n = up_sys4(SYS_pread64, a->stat_fd, text, sizeof(text), 0);

	for (n = up_failed(n) ? 0 : n; n-- > 3;)
		if (text[n - 2] == ')')
			return text[n] == 'Z';
	return 0;
}

/* Whether the threads of the job have all ended, by exit(2) one by one: then the process ends with us. */
static int is_alone(const struct agent *a)
{
	struct stat st;
	unsigned long ours = 1 + (atomic_load(&up_job.responder_tid) != 0);

	/* The leader stays, as a zombie, and is counted. */
	return a->task_fd >= 0 && !up_failed(up_sys2(SYS_fstat, a->task_fd, &st)) &&
	       st.st_nlink <= 2 + ours + 1 && leader_has_ended(a);
}

/* What follows from a bypass (bypass.c). */
static void leave_bypassed(struct agent *a)
{
	if (!atomic_load(&up_job.bypassed) || a->bypass_told)
		return;
	up_close_overlays(a);
	for (uint32_t i = 0; i < atomic_load(&a->slots); i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t live = UP_LIVE;

		if (atomic_load(&r->pooled) ||
		    !atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING))
			continue; /* a thread of the job has it: its request will come */
		atomic_store(&r->laid, 0);
		up_release(a, r, UP_CLOSING);
	}
	a->bypass_told = a->welcomed && !up_say_bypass(a);
}

static void agent_wait(struct agent *a)
{
	int spare = a->responds && atomic_load(&up_job.responder_tid);
	uint32_t talk = a->welcomed && (a->pending || a->stated || a->touches) ? EPOLLIN | EPOLLOUT : EPOLLIN;
	uint64_t at = up_now_ns() + (spare ? UP_TAKE_OVER_NS : UP_ALONE_LOOK_NS), now;
	uint32_t events[UP_SOURCES];

	up_wait_also(&a->wait, UP_OVERLAYS_TELL, atomic_load(&a->uffd), spare ? 0 : EPOLLIN);
	up_wait_also(&a->wait, UP_SERVICE_SAYS, a->socket, talk);
	up_wait_also(&a->wait, UP_POOL_TELLS, a->pool_uffd, up_pool_is_silent(a) ? EPOLLIN : 0);
	if (a->socket < 0)
		at = a->connect_at_ns;
	if (a->bye && a->bye_at_ns < at)
		at = a->bye_at_ns;
	if (a->pooled && a->ring && a->beat_at_ns < at)
		at = a->beat_at_ns;
	if (a->leases && a->lease_at_ns < at)
		at = a->lease_at_ns;
	now = up_now_ns();
	if (!up_wait(&a->wait, at > now ? at - now : 0, events) && up_now_ns() >= a->alone_at_ns) {
		a->alone_at_ns = up_now_ns() + UP_ALONE_LOOK_NS;
		if (is_alone(a))
			a->quit = 1;
	}
	up_notice_responder_end(a);
	if (events[UP_OVERLAYS_TELL] || (spare && up_is_left_lying(a)))
		up_respond(a);
	if (events[UP_BELL_RINGS])
		up_on_bell(a);
	if (events[UP_POOL_TELLS])
		up_stand_in(a);
	if (events[UP_SERVICE_SAYS] & EPOLLOUT)
		up_flush(a);
	if (events[UP_SERVICE_SAYS] & (EPOLLIN | EPOLLHUP | EPOLLERR))
		up_on_socket(a);
	if (a->bye && up_now_ns() >= a->bye_at_ns)
		up_finish_bye(a);
	if (a->socket < 0 && !a->hung_up && up_now_ns() >= a->connect_at_ns)
		up_connect(a);
	leave_bypassed(a);
	up_pool_check_beat(a);
	up_leases_look(a);
	up_let_left_go(a);
}

/* The service has died. What cannot be given back by address is answered for as long as it is there. */
static void serve_alone(struct agent *a)
{
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (!atomic_load(&r->pooled) || up_may_act(a, r))
			up_abandon(a, r);
		else
			up_pool_empty(r);
	}
	up_wake_pooled(a); /* whom the service has read and not answered */
	up_wait_also(&a->wait, UP_SERVICE_SAYS, a->socket, 0);
	up_wait_also(&a->wait, UP_POOL_TELLS, a->pool_uffd, EPOLLIN);
	while (a->pooled && !a->quit && !atomic_load(&up_job.ending)) {
		uint32_t events[UP_SOURCES];

		up_wait_also(&a->wait, UP_OVERLAYS_TELL, atomic_load(&a->uffd), EPOLLIN);
		up_wait(&a->wait, UINT64_MAX, events);
		if (events[UP_OVERLAYS_TELL])
			up_respond(a);
		if (events[UP_POOL_TELLS])
			up_stand_in(a);
		if (events[UP_BELL_RINGS])
			up_on_bell(a);
	}
}

/* A thread of the job that puts the file back in the pool's place needs the pool's userfaultfd until it is there:
 * some system calls that wait for no storage. Whether there was one. */
static int await_seized(struct up_region *r)
{
	int waited = 0;

	for (; atomic_load(&r->pooled) && atomic_load(&r->state) == UP_SEIZED; waited = 1)
		up_pause(NS_PER_MS);
	return waited;
}

static void agent_main(void)
{
	struct agent *a = &up_agent;
	int ret;

	*a = (struct agent){ .pidfd = -1, .bell_fd = -1, .uffd = -1, .pool_uffd = -1,
			     .socket = -1, .event_fd = -1, .maps_fd = -1,
			     .task_fd = -1, .stat_fd = -1, .pagemap_fd = -1,
			     .wait.fd = -1, .listen.fd = -1, .left.fd = -1 };
	up_sys2(SYS_prctl, PR_SET_NAME, "uffdprefetch");
	ret = up_settle_scheduling();
	if (!ret)
		ret = agent_open(a);
	if (!ret)
		while (!a->quit && !a->hung_up && !atomic_load(&up_job.ending))
			agent_wait(a);
	up_leases_close(a); /* a dead service's: ours would be the last descriptor */
	/* Without a service nothing is managed: every mapping becomes the job's own again. */
	atomic_store(&up_job.disabled, 1);
	up_finish_bye(a);
	if (a->bell_fd >= 0)
		up_on_bell(a);
	if (a->hung_up)
		serve_alone(a);
	a->ends = 1;
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		/* A thread of the job may have taken it just now, and its request comes too late: it waits
		 * until we are gone, or acts itself and may find that it must not. */
		for (int again = 1, tries = 0; again && tries < 2; tries++) {
			up_abandon(a, r);
			if (atomic_load(&r->state) == UP_CLOSING)
				up_detach(a, r);
			again = await_seized(r) ||
				(atomic_load(&r->pooled) && atomic_load(&r->state) == UP_LIVE);
		}
		if (atomic_load(&r->state) == UP_LEFT)
			up_let_go(a, r);
		if (atomic_load(&r->state) == UP_LEAVING)
			up_free_slot(r);
	}
	up_close_overlays(a);
	up_responder_end(a);
	if (a->ring)
		up_sys2(SYS_munmap, a->ring, sizeof(struct up_ring));
}

/* Start the agent: 0 or -errno. The caller holds up_job.agent_start. */
int up_agent_spawn(void)
{
	return up_thread_spawn(agent_main, &up_job.agent_stack, &up_job.agent_tid);
}
