// SPDX-License-Identifier: Apache-2.0
/*
 * agent.c - the thread inside the job that answers checkpoints, lays them and takes them away.
 *
 * It is a raw clone(2) that libc does not know of: any extra *pthread* takes glibc off its
 * single-thread fast path (stdio locks, malloc), which makes a tool like mdb_dump several times
 * slower. The price is that nothing here may use TLS, errno or a libc function with state: only
 * sys.h. Its descriptor table is its own and starts empty (close_range with
 * CLOSE_RANGE_UNSHARE; the kernel copies and closes 64 numbers at most), because closing any descriptor of a file drops the *process's* POSIX locks on
 * it, and because the job may close or reuse any number it likes. A file comes into the table by
 * pidfd_getfd(2): the same struct file, so that mappings made here merge with the job's.
 *
 * Three rules: it never reads storage on the job's behalf, it never touches a managed address, it
 * never waits for a thread of the job. When it ends, for whatever reason, the kernel closes its
 * userfaultfd; a checkpoint page that stays behind holds the file's bytes and is then an ordinary
 * page.
 */
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/sched.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <errno.h>
#ifdef UP_AGENT_PTHREAD
#include <pthread.h>
#endif

#include "agent.h"

/* Directed at the agent, blocked there and read by signalfd: what the job does with it does not
 * matter, because a blocked signal is queued even where it is ignored. But reading takes what was
 * sent to the whole process as well (kernel/signal.c, dequeue_signal), so it must be one that no
 * kernel and no program sends: the fault of a coprocessor's stack that Linux never had. */
#define BELL SIGSTKFLT

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

/* A forked child usually execs at once: do not trouble the service before this. */
#define FORK_QUIET_NS (5 * NS_PER_MS)
#define BYE_NS (20 * NS_PER_MS)
#define BEAT_CHECK_NS (100 * NS_PER_MS)

struct up_job up_job;

/* ------------------------------------------------------------------ small things */

uint64_t up_now_ns(void)
{
	struct timespec ts;

	up_sys2(SYS_clock_gettime, CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
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

/* Fault injection: the agent ends here as a crash would, or the process stands still right here
 * until somebody sends SIGCONT. */
static void test_exit(uint32_t state)
{
	char digit = (char)('0' + state);
	int fd = (int)up_sys4(SYS_openat, AT_FDCWD, up_job.test_exit_log,
			  O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

	if (fd >= 0)
		up_sys3(SYS_write, fd, &digit, 1);
	up_close(&fd);
	if (up_job.test_exit_stops) {
		up_sys3(SYS_tgkill, up_job.pid, up_sys0(SYS_gettid), SIGSTOP);
		return;
	}
#ifdef UP_AGENT_PTHREAD
	atomic_store(&up_job.agent_tid, 0); /* the kernel's part, CLONE_CHILD_CLEARTID */
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
	if (++a->steps == up_job.test_exit_after)
		test_exit(state);
}

void up_finish_bye(struct agent *a)
{
	struct up_request *q = a->bye;

	a->bye = NULL;
	if (!q)
		return;
	atomic_store(&q->state, UP_REQ_DONE);
	up_futex_wake(&q->state);
}

static uint32_t slot_of(const struct up_region *r)
{
	return (uint32_t)(r - up_job.region);
}

/* ------------------------------------------------------------------ the job's requests */

static int take_descriptor(struct agent *a, struct up_region *r, int job_fd)
{
	struct stat st;
	long fd;

	if (a->pidfd < 0)
		a->pidfd = (int)up_sys2(SYS_pidfd_open, up_job.pid, 0);
	if (a->pidfd < 0)
		return a->pidfd;
	fd = up_sys3(SYS_pidfd_getfd, a->pidfd, job_fd, 0);
	if (up_failed(fd))
		return (int)fd;
	r->fd = (int)fd;
	/* The number was the mapping thread's; is it the same file in the process's table? */
	if (up_failed(up_sys2(SYS_fstat, fd, &st)) || (uint64_t)st.st_dev != r->device ||
	    (uint64_t)st.st_ino != r->inode) {
		up_close(&r->fd);
		return -ESTALE;
	}
	return 0;
}

/* The service gets a description of its own: a seek or an FADV on the job's would change the job,
 * and a lock (flock) that the job holds through it must end when the job says so. */
static int reopen(const struct up_region *r)
{
	char path[48] = "/proc/thread-self/fd/";
	char digits[12];
	int n = 0, at = 21, fd = r->fd;

	do
		digits[n++] = (char)('0' + fd % 10);
	while (fd /= 10);
	while (n)
		path[at++] = digits[--n];
	path[at] = 0;
	/* O_NONBLOCK: somebody's write lease would hold us for fs.lease-break-time. */
	return (int)up_sys4(SYS_openat, AT_FDCWD, path,
			    O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0);
}

static int on_attach(struct agent *a, struct up_region *r, int job_fd)
{
	int ret = take_descriptor(a, r, job_fd);

	if (ret)
		return ret;
	if (slot_of(r) >= a->slots)
		a->slots = slot_of(r) + 1;
	up_queue(a, r);
	atomic_store(&r->state, UP_LIVE);
	return 0;
}

static void on_request(struct agent *a, struct up_request *q)
{
	struct up_region *r = &up_job.region[q->slot % UP_REGIONS];
	uint32_t op = q->op;

	q->result = 0;
	switch (op) {
	case UP_REQ_ATTACH:
		q->result = on_attach(a, r, q->job_fd);
		break;
	case UP_REQ_DETACH:
		up_detach(a, r);
		up_release(a, r);
		break;
	case UP_REQ_FORGET:
		up_release(a, r);
		break;
	case UP_REQ_QUIT:
		a->quit = 1;
		for (uint32_t i = 0; i < a->slots; i++)
			up_abandon(a, &up_job.region[i]);
		break;
	case UP_REQ_BYE:
		if (a->welcomed && !a->bye && !up_say_bye(a)) {
			a->bye = q;
			a->bye_at_ns = up_now_ns() + BYE_NS;
			return;
		}
		break;
	}
	atomic_store(&q->state, UP_REQ_DONE);
	up_futex_wake(&q->state);
	if (op != UP_REQ_ATTACH || atomic_load(&r->state) != UP_LIVE)
		return;
	/* After the answer: opening may ask a far metadata server. */
	r->reopened_fd = reopen(r);
	if (r->reopened_fd < 0)
		up_abandon(a, r);
}

static void on_bell(struct agent *a)
{
	struct signalfd_siginfo info;

	while (!up_failed(up_sys3(SYS_read, a->bell_fd, &info, sizeof(info))))
		;
	for (int i = 0; i < UP_REQUESTS; i++)
		if (atomic_load(&up_job.request[i].state) == UP_REQ_POSTED &&
		    a->bye != &up_job.request[i])
			on_request(a, &up_job.request[i]);
	up_flush(a);
	up_step(a, UP_STATE_IDLE);
}

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

static int agent_open(struct agent *a)
{
	uint64_t mask = 1ull << (BELL - 1);
#ifdef UP_AGENT_PTHREAD
	unsigned int first = 3; /* a sanitizer's report in this thread needs stderr */
#else
	unsigned int first = 0;
#endif
	long ret = up_sys3(SYS_close_range, first, ~0u, CLOSE_RANGE_UNSHARE);

	if (up_failed(ret))
		return (int)ret;
	ret = up_sys4(SYS_signalfd4, -1, &mask, sizeof(mask), SFD_CLOEXEC | SFD_NONBLOCK);
	if (up_failed(ret))
		return (int)ret;
	a->bell_fd = (int)ret;
	/* mmap() waits for its descriptor to be taken, and for nothing else of what follows. */
	on_bell(a);
	a->uffd = open_uffd(a, UFFD_FEATURE_MINOR_SHMEM);
	if (up_job.pool && a->uffd >= 0)
		a->pool_uffd = open_uffd(a, UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_MISSING_SHMEM);
	a->own_faults = !up_job.service_resolves || a->pool_uffd >= 0;
	a->overlays_max = overlay_limit();
	a->connect_at_ns = up_now_ns();
	/* What a fork left to us. */
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) != UP_LIVE || !r->inherited)
			continue;
		if (i >= a->slots) /* not down: on_bell() above may have attached a higher one */
			a->slots = i + 1;
		up_queue(a, r);
		if (atomic_load(&r->swap) != UP_SWAP_WAITING)
			a->connect_at_ns = up_now_ns() + FORK_QUIET_NS;
	}
	return 0;
}

static void agent_wait(struct agent *a)
{
	struct pollfd p[3] = { { a->bell_fd, POLLIN, 0 },
			       { a->own_faults ? a->uffd : -1, POLLIN, 0 },
			       { a->socket, POLLIN, 0 } };
	uint64_t at = UINT64_MAX, now;
	struct timespec ts, *timeout = NULL;

	if (a->welcomed && a->pending)
		p[2].events |= POLLOUT;
	if (a->socket < 0)
		at = a->connect_at_ns;
	if (a->bye && a->bye_at_ns < at)
		at = a->bye_at_ns;
	if (!a->own_faults && a->ring) {
		now = up_now_ns();
		if (now + BEAT_CHECK_NS < at)
			at = now + BEAT_CHECK_NS;
	}
	if (a->pooled && a->ring && a->beat_at_ns < at)
		at = a->beat_at_ns;
	if (at != UINT64_MAX) {
		now = up_now_ns();
		at = at > now ? at - now : 0;
		ts.tv_sec = (time_t)(at / 1000000000ull);
		ts.tv_nsec = (long)(at % 1000000000ull);
		timeout = &ts;
	}
	up_sys5(SYS_ppoll, p, 3, timeout, NULL, 8);
	if (p[1].revents & POLLIN)
		up_on_faults(a);
	if (p[0].revents)
		on_bell(a);
	if (p[2].revents & POLLOUT)
		up_flush(a);
	if (p[2].revents & (POLLIN | POLLHUP | POLLERR))
		up_on_socket(a);
	if (a->bye && up_now_ns() >= a->bye_at_ns)
		up_finish_bye(a);
	if (a->socket < 0 && !a->hung_up && up_now_ns() >= a->connect_at_ns)
		up_connect(a);
	up_check_beat(a);
	up_pool_check_beat(a);
}

static void agent_main(void)
{
	struct agent a = { .pidfd = -1, .bell_fd = -1, .uffd = -1, .pool_uffd = -1,
			   .socket = -1, .event_fd = -1 };
	int ret = agent_open(&a);

	up_sys2(SYS_prctl, PR_SET_NAME, "uffdprefetch");
	if (!ret)
		while (!a.quit && !a.hung_up)
			agent_wait(&a);
	/* Without a service nothing is managed: every mapping becomes the job's own again. */
	atomic_store(&up_job.disabled, 1);
	up_finish_bye(&a);
	if (a.bell_fd >= 0)
		on_bell(&a);
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		up_abandon(&a, r);
		/* A thread of the job has just taken it, and its request comes too late. It waits
		 * until we are gone: the mapping must be plain by then. */
		if (atomic_load(&r->state) == UP_CLOSING)
			up_detach(&a, r);
		if (atomic_load(&r->state) == UP_LEAVING)
			up_free_slot(r);
	}
	if (a.ring)
		up_sys2(SYS_munmap, a.ring, sizeof(struct up_ring));
}

int up_agent_alive(void)
{
	return atomic_load(&up_job.agent_tid) != 0;
}

void up_agent_ring_bell(void)
{
	up_sys3(SYS_tgkill, up_job.pid, atomic_load(&up_job.agent_tid), BELL);
}

#ifdef UP_AGENT_PTHREAD

/* For the sanitizers, whose run-times must know every thread. */
static void *agent_thread(void *started)
{
	atomic_store(&up_job.agent_tid, (int)up_sys0(SYS_gettid));
	atomic_store((_Atomic int *)started, 1); /* on the stack of who waits: gone from here on */
	agent_main();
	atomic_store(&up_job.agent_tid, 0);
	return NULL;
}

static int spawn_thread(void)
{
	_Atomic int started = 0;
	pthread_attr_t attr;
	pthread_t thread;
	int ret = pthread_attr_init(&attr);

	if (ret)
		return -ret;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstack(&attr, up_job.agent_stack, UP_AGENT_STACK_BYTES);
	ret = pthread_create(&thread, &attr, agent_thread, &started);
	pthread_attr_destroy(&attr);
	if (ret)
		return -ret;
	while (!atomic_load(&started)) /* its tid may come and go meanwhile */
		up_sys0(SYS_sched_yield);
	return 0;
}

#else

/* clone(2) with a function: returns the tid or -errno; the child runs fn on the new stack. */
long up_clone(unsigned long flags, void *stack, _Atomic int *tid, void (*fn)(void))
	__attribute__((visibility("hidden")));

#if defined(__x86_64__)
__asm__(".text\n"
	".globl up_clone\n"
	".hidden up_clone\n"
	".type up_clone,@function\n"
	"up_clone:\n"
	"	andq $-16, %rsi\n"
	"	subq $16, %rsi\n"
	"	movq %rcx, (%rsi)\n"
	"	movq %rdx, %r10\n" /* child_tid; rdx is parent_tid, the same word */
	"	xorl %r8d, %r8d\n"
	"	movl $56, %eax\n"
	"	syscall\n"
	"	testq %rax, %rax\n"
	"	jnz 1f\n"
	"	xorl %ebp, %ebp\n"
	"	movq (%rsp), %rax\n"
	"	call *%rax\n"
	"	xorl %edi, %edi\n"
	"	movl $60, %eax\n"
	"	syscall\n"
	"	hlt\n"
	"1:	ret\n"
	".size up_clone,.-up_clone\n");
#elif defined(__aarch64__)
__asm__(".text\n"
	".globl up_clone\n"
	".hidden up_clone\n"
	".type up_clone,%function\n"
	"up_clone:\n"
	"	and x1, x1, #-16\n"
	"	str x3, [x1, #-16]!\n"
	"	mov x4, x2\n"  /* child_tid; x2 is parent_tid, the same word */
	"	mov x3, xzr\n" /* tls: not set */
	"	mov x8, #220\n"
	"	svc #0\n"
	"	cbnz x0, 1f\n"
	"	mov x29, xzr\n"
	"	ldr x9, [sp]\n"
	"	blr x9\n"
	"	mov x0, xzr\n"
	"	mov x8, #93\n"
	"	svc #0\n"
	"1:	ret\n"
	".size up_clone,.-up_clone\n");
#endif

static int spawn_thread(void)
{
	/* CLONE_FILES for an instant only: agent_open() leaves the shared table with a copy of its
	 * first 64 at most, where a clone without the flag would copy (and flush and close) all. */
	unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
			      CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
	long ret = up_clone(flags, (char *)up_job.agent_stack + UP_AGENT_STACK_BYTES,
			    &up_job.agent_tid, agent_main);

	return up_failed(ret) ? (int)ret : 0;
}

#endif

/* Start the agent: 0 or -errno. The caller holds up_job.agent_start. */
int up_agent_spawn(void)
{
	uint64_t all = ~0ull, before;
	void *stack = up_job.agent_stack;
	int ret;

	if (!stack) {
		stack = up_mmap(NULL, UP_AGENT_STACK_BYTES, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (up_failed((long)stack))
			return (int)(long)stack;
#ifndef UP_AGENT_PTHREAD /* TSan goes on counting the parent's threads in a child, by their place */
		up_sys3(SYS_madvise, stack, UP_AGENT_STACK_BYTES, MADV_DONTFORK);
#endif
		up_job.agent_stack = stack;
	}
	/* The agent is born with every signal blocked and never opens one: handlers are the job's. */
	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	ret = spawn_thread();
	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
	return ret;
}
