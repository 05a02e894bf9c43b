// SPDX-License-Identifier: Apache-2.0
/*
 * agent.c - the thread inside the job that answers checkpoints, lays them and takes them away.
 *
 * It is a raw clone(2) that libc does not know of: any extra *pthread* takes glibc off its
 * single-thread fast path (stdio locks, malloc), which makes a tool like mdb_dump several times
 * slower. The price is that nothing here may use TLS, errno or a libc function with state: only
 * sys.h. Its descriptor table is its own and starts empty (close_range with CLOSE_RANGE_UNSHARE
 * copies nothing), because closing any descriptor of a file drops the *process's* POSIX locks on
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
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <errno.h>
#ifdef UP_AGENT_PTHREAD
#include <pthread.h>
#endif

#include "job.h"
#include "sys.h"

/* Directed at the agent, blocked there and read by signalfd: whatever the job does with SIGURG,
 * its disposition does not matter, because a blocked signal is queued even where it is ignored. */
#define BELL SIGURG

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

#define NS_PER_MS 1000000ull
/* A forked child usually execs at once: do not trouble the service before this. */
#define FORK_QUIET_NS (5 * NS_PER_MS)
#define CONNECT_RETRY_NS (10 * NS_PER_MS)
#define CONNECT_TRIES 200
#define BYE_NS (20 * NS_PER_MS)
/* --resolve service only: how stale its heartbeat may be before the agent answers itself. */
#define BEAT_STALE_NS (500 * NS_PER_MS)
#define BEAT_CHECK_NS (100 * NS_PER_MS)
#define FAULT_BATCH 16

struct agent {
	int pidfd, bell_fd, uffd, uffd_error, socket, event_fd;
	int welcomed, hung_up, quit;
	int own_faults; /* this thread reads the uffd; else the service does */
	struct up_ring *ring;
	struct up_request *bye;
	uint32_t pending; /* regions that still have something to tell the service */
	uint32_t slots;   /* one past the highest slot ever used */
	uint32_t overlays, overlays_max;
	uint32_t connect_tries;
	uint64_t connect_at_ns, bye_at_ns;
	long steps;
};

struct up_job up_job;

/* ------------------------------------------------------------------ small things */

static uint64_t now_ns(void)
{
	struct timespec ts;

	up_sys2(SYS_clock_gettime, CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static void futex_wake(_Atomic uint32_t *word)
{
	up_sys3(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff);
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		up_sys1(SYS_close, *fd);
	*fd = -1;
}

static void test_exit(struct agent *a, uint32_t state)
{
	char digit = (char)('0' + state);
	long fd = up_sys4(SYS_openat, AT_FDCWD, up_job.test_exit_log,
			  O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

	if (!up_failed(fd))
		up_sys3(SYS_write, fd, &digit, 1);
	(void)a;
	up_sys1(SYS_exit, 0);
}

/* Says what the agent is about to do; the campaign kills it, or the service, right there. */
static void step(struct agent *a, uint32_t state)
{
	if (a->ring)
		__atomic_store_n(&a->ring->state, state, __ATOMIC_RELAXED);
	if (up_job.test_exit_after && ++a->steps == up_job.test_exit_after)
		test_exit(a, state);
}

static uint32_t slot_of(const struct up_region *r)
{
	return (uint32_t)(r - up_job.region);
}

static struct up_region *region_by_id(uint32_t id)
{
	struct up_region *r = &up_job.region[id % UP_REGIONS];

	return atomic_load(&r->state) == UP_LIVE && r->id == id ? r : NULL;
}

static struct up_region *region_at(struct agent *a, uintptr_t address)
{
	for (uint32_t i = 0; i < a->slots; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || state == UP_CLOSING) && address - r->address < r->length)
			return r;
	}
	return NULL;
}

/* 0 and the address of a page of the file inside the region, or -ERANGE. */
static int page_address(const struct up_region *r, uint64_t page, uintptr_t *address)
{
	uint64_t at = page * up_job.page_bytes;

	if (page > UINT64_MAX / up_job.page_bytes || at < r->offset ||
	    at + up_job.page_bytes > r->offset + r->length ||
	    at + up_job.page_bytes > r->size)
		return -ERANGE;
	*address = r->address + (uintptr_t)(at - r->offset);
	return 0;
}

/* ------------------------------------------------------------------ the mapping */

static void wake_range(struct agent *a, uintptr_t address, size_t length)
{
	struct uffdio_range range = { .start = address, .len = length };

	if (a->uffd >= 0)
		up_sys3(SYS_ioctl, a->uffd, UFFDIO_WAKE, &range);
}

/* Map the file itself over [address, +length): one step for anybody who reads there. */
static int map_file(struct agent *a, struct up_region *r, uintptr_t address, size_t length)
{
	int flags = (r->map_flags & (MAP_TYPE | MAP_NORESERVE)) | MAP_FIXED;
	void *p = up_mmap((void *)address, length, r->prot, flags, r->fd,
			  r->offset + (address - r->address));

	if (up_failed((long)p))
		return (int)(long)p;
	if (r->advice != MADV_NORMAL)
		up_sys3(SYS_madvise, address, length, r->advice);
	/* A thread that waits for the checkpoint retries and finds the file. */
	wake_range(a, address, length);
	return 0;
}

static int lay(struct agent *a, struct up_region *r, uint64_t page)
{
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MINOR };
	uintptr_t address;
	long ret = page_address(r, page, &address);
	void *p;

	if (ret)
		return (int)ret;
	if (r->writable || r->checkpoint_fd < 0 || a->uffd < 0)
		return -EINVAL;
	if (a->overlays >= a->overlays_max)
		return -ENOSPC;
	step(a, UP_STATE_LAYING);
	p = up_mmap((void *)address, up_job.page_bytes, r->prot, MAP_PRIVATE | MAP_FIXED,
		    r->checkpoint_fd, page * up_job.page_bytes);
	if (up_failed((long)p))
		return (int)(long)p;
	step(a, UP_STATE_LAYING);
	reg.range.start = address;
	reg.range.len = up_job.page_bytes;
	ret = up_sys3(SYS_ioctl, a->uffd, UFFDIO_REGISTER, &reg);
	if (up_failed(ret)) {
		map_file(a, r, address, up_job.page_bytes);
		return (int)ret;
	}
	step(a, UP_STATE_LAYING);
	a->overlays++;
	r->overlays++;
	return 0;
}

static int take(struct agent *a, struct up_region *r, uint64_t page)
{
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	step(a, UP_STATE_TAKING);
	ret = map_file(a, r, address, up_job.page_bytes);
	step(a, UP_STATE_TAKING);
	if (!ret && r->overlays) {
		r->overlays--;
		a->overlays--;
	}
	return ret;
}

/* The page leaves the page table; the next touch of it is an event again. */
static int rearm(struct agent *a, struct up_region *r, uint64_t page)
{
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	step(a, UP_STATE_REARMING);
	return (int)up_sys3(SYS_madvise, address, up_job.page_bytes, MADV_DONTNEED);
}

/* Page-table sensor: forget that 64 KiB were mapped, so that the next epoch shows there. */
static int drop(struct up_region *r, uint64_t page)
{
	size_t bytes = 65536 > up_job.page_bytes ? 65536 : up_job.page_bytes;
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		return -EINVAL;
	if (bytes > r->address + r->length - address)
		bytes = r->address + r->length - address;
	return (int)up_sys3(SYS_madvise, address, bytes, MADV_DONTNEED);
}

/* The whole region becomes what the job asked for: its file, with its own advice. */
static void detach(struct agent *a, struct up_region *r)
{
	if (atomic_load(&r->swallowed)) {
		r->advice = MADV_RANDOM;
		atomic_store(&r->swallowed, 0);
		up_sys3(SYS_madvise, r->address, r->length, MADV_RANDOM);
	}
	if (r->overlays == 0 && !r->inherited)
		return;
	step(a, UP_STATE_DETACHING);
	if (r->fd >= 0)
		map_file(a, r, r->address, r->length);
	step(a, UP_STATE_DETACHING);
	a->overlays -= r->overlays;
	r->overlays = 0;
}

/* ------------------------------------------------------------------ talking */

static int send_message(struct agent *a, uint16_t type, struct up_message *m, int fd)
{
	struct iovec iov = { .iov_base = m, .iov_len = sizeof(*m) };
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	long ret;

	m->header.magic = UP_MAGIC;
	m->header.version = UP_VERSION;
	m->header.type = type;
	if (fd >= 0) {
		msg.msg_control = control.space;
		msg.msg_controllen = sizeof(control.space);
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		*(int *)CMSG_DATA(&control.header) = fd;
	}
	ret = up_sys3(SYS_sendmsg, a->socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (ret == -EAGAIN)
		return -EAGAIN;
	if (up_failed(ret))
		a->hung_up = 1;
	return up_failed(ret) ? (int)ret : 0;
}

static void free_slot(struct up_region *r)
{
	atomic_store(&r->state, UP_FREE);
	atomic_fetch_sub(&up_job.live, 1);
}

/* The mapping is the job's own again. The caller owns the region (LIVE taken, or CLOSING). */
static void release(struct agent *a, struct up_region *r)
{
	a->overlays -= r->overlays;
	r->overlays = 0;
	close_fd(&r->fd);
	close_fd(&r->checkpoint_fd);
	close_fd(&r->reopened_fd);
	if (r->sent) {
		atomic_store(&r->state, UP_LEAVING);
		a->pending++;
		return;
	}
	if (a->pending)
		a->pending--; /* its UP_ATTACH */
	free_slot(r);
}

static void abandon(struct agent *a, struct up_region *r)
{
	uint32_t live = UP_LIVE;

	if (!atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING))
		return; /* a thread of the job has it: its request will come */
	detach(a, r);
	release(a, r);
}

static int send_attach(struct agent *a, struct up_region *r)
{
	struct up_message m = { 0 };
	int ret;

	m.attach.region = r->id;
	m.attach.flags = (r->inherited ? UP_ATTACH_INHERITED : 0) |
			 (r->writable ? UP_ATTACH_WRITABLE : 0);
	m.attach.address = r->address;
	m.attach.length_bytes = r->length;
	m.attach.offset_bytes = r->offset;
	m.attach.device = r->device;
	m.attach.inode = r->inode;
	m.attach.size_bytes = r->size;
	m.attach.mtime_ns = r->mtime_ns;
	m.attach.map_flags = (uint32_t)r->map_flags;
	m.attach.advice_swallowed = (uint32_t)atomic_load(&r->swallowed);
	ret = send_message(a, UP_ATTACH, &m, r->reopened_fd);
	if (ret)
		return ret;
	r->sent = 1;
	a->pending--;
	close_fd(&r->reopened_fd);
	return 0;
}

static int send_gone(struct agent *a, struct up_region *r)
{
	struct up_message m = { 0 };
	int ret;

	m.gone.region = r->id;
	ret = send_message(a, UP_GONE, &m, -1);
	if (ret)
		return ret;
	a->pending--;
	free_slot(r);
	return 0;
}

static void flush(struct agent *a)
{
	if (!a->welcomed)
		return;
	for (uint32_t i = 0; i < a->slots && a->pending && !a->hung_up; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if (state == UP_LIVE && !r->sent && send_attach(a, r))
			return;
		if (state == UP_LEAVING && send_gone(a, r))
			return;
	}
}

static void acknowledge(struct agent *a, const struct up_command *c, uint32_t done, int error)
{
	struct up_message m = { 0 };

	m.ack.sequence = c->sequence;
	m.ack.region = c->region;
	m.ack.done = done;
	m.ack.error = -error;
	m.ack.overlays = a->overlays;
	/* A full socket loses it: the service then learns from its own clock. */
	send_message(a, UP_ACK, &m, -1);
}

static void say_hello(struct agent *a)
{
	struct up_message m = { 0 };

	m.hello.role = UP_AGENT;
	m.hello.pid = up_job.pid;
	m.hello.ppid = (int32_t)up_sys0(SYS_getppid);
	m.hello.rank = up_job.rank;
	m.hello.local_rank = up_job.local_rank;
	m.hello.world = up_job.world;
	m.hello.flags = (a->uffd >= 0 ? UP_HELLO_UFFD : 0) |
			(up_job.parent_pid ? UP_HELLO_FORKED : 0) |
			(a->own_faults || a->uffd < 0 ? 0 : UP_HELLO_SENDS_UFFD);
	m.hello.uffd_error = a->uffd_error;
	m.hello.overlays_max = a->overlays_max;
	m.hello.parent_pid = up_job.parent_pid;
	m.hello.page_bytes = (uint32_t)up_job.page_bytes;
	for (unsigned int i = 0; i < sizeof(m.hello.command) - 1; i++)
		m.hello.command[i] = up_job.command[i];
	send_message(a, UP_HELLO, &m, a->own_faults ? -1 : a->uffd);
}

static void connect_service(struct agent *a)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	long fd, ret;

	for (unsigned int i = 0; i < sizeof(sun.sun_path); i++)
		sun.sun_path[i] = up_job.socket_path[i];
	fd = up_sys3(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	ret = up_failed(fd) ? fd : up_sys3(SYS_connect, fd, &sun, sizeof(sun));
	if (!up_failed(ret)) {
		a->socket = (int)fd;
		say_hello(a);
		return;
	}
	if (!up_failed(fd))
		up_sys1(SYS_close, fd);
	if (ret == -EAGAIN && ++a->connect_tries < CONNECT_TRIES)
		a->connect_at_ns = now_ns() + CONNECT_RETRY_NS;
	else
		a->hung_up = 1;
}

/* ------------------------------------------------------------------ the service's commands */

static void on_welcome(struct agent *a, int *fd)
{
	void *p;

	if (a->welcomed || fd[0] < 0 || fd[1] < 0)
		return;
	p = up_mmap(NULL, sizeof(struct up_ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd[0], 0);
	if (up_failed((long)p)) {
		a->hung_up = 1;
		return;
	}
	/* A forked child makes its own; the parent's must not be written by two. */
	up_sys3(SYS_madvise, p, sizeof(struct up_ring), MADV_DONTFORK);
	a->ring = p;
	a->event_fd = fd[1];
	fd[1] = -1;
	a->welcomed = 1;
	flush(a);
}

static void on_file(struct agent *a, const struct up_file *f, int *fd)
{
	struct up_region *r = region_by_id(f->region);

	if (!r || r->verdict)
		return;
	r->verdict = f->verdict + 1;
	if (r->inherited) {
		/* One struct file under all of it again, so that what is taken away merges. */
		if (fd[1] < 0) {
			r->inherited = 0;
			abandon(a, r);
			return;
		}
		r->fd = fd[1];
		fd[1] = -1;
		map_file(a, r, r->address, r->length);
		r->inherited = 0;
	}
	if (f->verdict == UP_REFUSE) {
		abandon(a, r);
		return;
	}
	if (f->verdict == UP_CHECKPOINTS) {
		r->checkpoint_fd = fd[0];
		fd[0] = -1;
	}
}

static void on_command(struct agent *a, uint16_t type, const struct up_command *c)
{
	struct up_region *r = region_by_id(c->region);
	uint32_t done = 0;
	int error = 0;

	for (uint32_t i = 0; r && i < c->count && i < UP_PAGES_MAX; i++) {
		int ret = -EINVAL;

		if (type == UP_LAY)
			ret = lay(a, r, c->page[i]);
		else if (type == UP_TAKE)
			ret = take(a, r, c->page[i]);
		else if (type == UP_REARM)
			ret = rearm(a, r, c->page[i]);
		else if (type == UP_DROP)
			ret = drop(r, c->page[i]);
		if (!ret)
			done++;
		else if (!error)
			error = ret;
	}
	if (a->ring) {
		if (type == UP_LAY)
			a->ring->laid += done;
		else if (type == UP_TAKE)
			a->ring->taken += done;
		else if (type == UP_REARM)
			a->ring->rearmed += done;
		a->ring->failed += error != 0;
		a->ring->overlays = a->overlays;
	}
	if (type == UP_DETACH && r)
		abandon(a, r);
	step(a, UP_STATE_IDLE);
	if (error || type == UP_DETACH)
		acknowledge(a, c, done, error);
}

static void finish_bye(struct agent *a)
{
	struct up_request *q = a->bye;

	a->bye = NULL;
	if (!q)
		return;
	atomic_store(&q->state, UP_REQ_DONE);
	futex_wake(&q->state);
}

static void on_socket(struct agent *a)
{
	for (int n = 0; n < 64 && !a->hung_up; n++) {
		struct up_message m;
		struct iovec iov = { .iov_base = &m, .iov_len = sizeof(m) };
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(2 * sizeof(int))];
		} control = { 0 };
		struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1,
				      .msg_control = control.space,
				      .msg_controllen = sizeof(control.space) };
		int fd[2] = { -1, -1 };
		long ret = up_sys3(SYS_recvmsg, a->socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

		if (ret == -EAGAIN || ret == -EINTR)
			return;
		if (ret != sizeof(m) || m.header.magic != UP_MAGIC ||
		    m.header.version != UP_VERSION) {
			a->hung_up = 1;
			return;
		}
		if (msg.msg_controllen >= CMSG_LEN(sizeof(int)) &&
		    control.header.cmsg_type == SCM_RIGHTS) {
			size_t count = (control.header.cmsg_len - CMSG_LEN(0)) / sizeof(int);

			for (size_t i = 0; i < count && i < 2; i++)
				fd[i] = ((int *)CMSG_DATA(&control.header))[i];
		}
		switch (m.header.type) {
		case UP_WELCOME:
			on_welcome(a, fd);
			break;
		case UP_FILE:
			on_file(a, &m.file, fd);
			break;
		case UP_LAY:
		case UP_TAKE:
		case UP_REARM:
		case UP_DROP:
		case UP_DETACH:
			on_command(a, m.header.type, &m.command);
			break;
		case UP_BYE_OK:
			finish_bye(a);
			break;
		default:
			a->hung_up = 1;
		}
		close_fd(&fd[0]);
		close_fd(&fd[1]);
	}
}

/* ------------------------------------------------------------------ faults */

static void post(struct agent *a, const struct up_event *e)
{
	struct up_ring *ring = a->ring;
	uint64_t head, one = 1;

	if (!ring)
		return;
	head = ring->head;
	ring->faults++;
	if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) >= UP_RING_EVENTS) {
		ring->dropped++;
		return;
	}
	ring->event[head % UP_RING_EVENTS] = *e;
	__atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
	up_sys3(SYS_write, a->event_fd, &one, sizeof(one));
}

static void resolve(struct agent *a, const struct uffd_msg *fault)
{
	uintptr_t address = (uintptr_t)fault->arg.pagefault.address & ~(up_job.page_bytes - 1);
	struct uffdio_continue cont = { .range = { address, up_job.page_bytes } };
	struct up_event e = { .time_ns = now_ns(), .tid = fault->arg.pagefault.feat.ptid };
	struct up_region *r;
	long ret;

	step(a, UP_STATE_RESOLVING);
	do
		ret = up_sys3(SYS_ioctl, a->uffd, UFFDIO_CONTINUE, &cont);
	while (ret == -EAGAIN);
	e.handle_ns = (uint32_t)(now_ns() - e.time_ns);
	r = region_at(a, address);
	/* EEXIST: somebody else's touch mapped it. Anything else: the page is no longer ours to
	 * continue (ENOENT), or its memfd page is not there (EFAULT, against the rule that a page
	 * is written before it is announced): the file itself goes there. */
	if (up_failed(ret) && ret != -EEXIST && ret != -ENOENT && r)
		map_file(a, r, address, up_job.page_bytes);
	if (up_failed(ret))
		wake_range(a, address, up_job.page_bytes);
	step(a, UP_STATE_IDLE);
	if (!r)
		return;
	e.region = r->id;
	e.page = (r->offset + (address - r->address)) / up_job.page_bytes;
	post(a, &e);
}

static void on_faults(struct agent *a)
{
	struct uffd_msg fault[FAULT_BATCH];
	long ret = up_sys3(SYS_read, a->uffd, fault, sizeof(fault));

	for (long i = 0; !up_failed(ret) && i < ret / (long)sizeof(fault[0]); i++)
		if (fault[i].event == UFFD_EVENT_PAGEFAULT)
			resolve(a, &fault[i]);
}

/* --resolve service: when its heartbeat stops, this thread takes the faults back. Messages that
 * the service has read and not answered come again, because waking makes the threads retry. */
static void check_beat(struct agent *a)
{
	if (a->own_faults || !a->ring ||
	    now_ns() - __atomic_load_n(&a->ring->beat_ns, __ATOMIC_RELAXED) < BEAT_STALE_NS)
		return;
	a->own_faults = 1;
	for (uint32_t i = 0; i < a->slots; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) == UP_LIVE)
			wake_range(a, r->address, r->length);
	}
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
		close_fd(&r->fd);
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
	return (int)up_sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOCTTY, 0);
}

static int on_attach(struct agent *a, struct up_region *r, int job_fd)
{
	int ret = take_descriptor(a, r, job_fd);

	if (ret)
		return ret;
	if (slot_of(r) >= a->slots)
		a->slots = slot_of(r) + 1;
	a->pending++;
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
		detach(a, r);
		release(a, r);
		break;
	case UP_REQ_FORGET:
		release(a, r);
		break;
	case UP_REQ_QUIT:
		a->quit = 1;
		for (uint32_t i = 0; i < a->slots; i++)
			abandon(a, &up_job.region[i]);
		break;
	case UP_REQ_BYE: {
		struct up_message m = { 0 };

		if (a->welcomed && !a->bye && !send_message(a, UP_BYE, &m, -1)) {
			a->bye = q;
			a->bye_at_ns = now_ns() + BYE_NS;
			return;
		}
		break;
	}
	}
	atomic_store(&q->state, UP_REQ_DONE);
	futex_wake(&q->state);
	if (op != UP_REQ_ATTACH || atomic_load(&r->state) != UP_LIVE)
		return;
	/* After the answer: opening may ask a far metadata server. */
	r->reopened_fd = reopen(r);
	if (r->reopened_fd < 0)
		abandon(a, r);
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
	flush(a);
}

/* ------------------------------------------------------------------ start and end */

static int open_uffd(struct agent *a)
{
	struct uffdio_api api = { .api = UFFD_API,
				  .features = UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_THREAD_ID };
	long fd = up_sys1(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
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
	return (maps ? maps : 65530) / 8;
}

static int agent_open(struct agent *a)
{
	uint64_t mask = 1ull << (BELL - 1);
	long ret = up_sys3(SYS_close_range, 0, ~0u, CLOSE_RANGE_UNSHARE);

	if (up_failed(ret))
		return (int)ret;
	ret = up_sys4(SYS_signalfd4, -1, &mask, sizeof(mask), SFD_CLOEXEC | SFD_NONBLOCK);
	if (up_failed(ret))
		return (int)ret;
	a->bell_fd = (int)ret;
	a->uffd = open_uffd(a);
	a->own_faults = !up_job.service_resolves;
	a->overlays_max = overlay_limit();
	a->connect_at_ns = now_ns();
	/* What a fork left to us. */
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) != UP_LIVE || !r->inherited)
			continue;
		a->slots = i + 1;
		a->pending++;
		a->connect_at_ns = now_ns() + FORK_QUIET_NS;
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
		now = now_ns();
		if (now + BEAT_CHECK_NS < at)
			at = now + BEAT_CHECK_NS;
	}
	if (at != UINT64_MAX) {
		now = now_ns();
		at = at > now ? at - now : 0;
		ts.tv_sec = (time_t)(at / 1000000000ull);
		ts.tv_nsec = (long)(at % 1000000000ull);
		timeout = &ts;
	}
	up_sys5(SYS_ppoll, p, 3, timeout, NULL, 8);
	if (p[1].revents & POLLIN)
		on_faults(a);
	if (p[0].revents)
		on_bell(a);
	if (p[2].revents & POLLOUT)
		flush(a);
	if (p[2].revents & (POLLIN | POLLHUP | POLLERR))
		on_socket(a);
	if (a->bye && now_ns() >= a->bye_at_ns)
		finish_bye(a);
	if (a->socket < 0 && !a->hung_up && now_ns() >= a->connect_at_ns)
		connect_service(a);
	check_beat(a);
}

static void agent_main(void)
{
	struct agent a = { .pidfd = -1, .bell_fd = -1, .uffd = -1, .socket = -1, .event_fd = -1 };
	int ret = agent_open(&a);

	up_sys2(SYS_prctl, PR_SET_NAME, "uffdprefetch");
	if (!ret)
		while (!a.quit && !a.hung_up)
			agent_wait(&a);
	/* Without a service nothing is managed: every mapping becomes the job's own again. */
	atomic_store(&up_job.disabled, 1);
	finish_bye(&a);
	if (a.bell_fd >= 0)
		on_bell(&a);
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		abandon(&a, r);
		if (atomic_load(&r->state) == UP_LEAVING)
			free_slot(r);
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

/* For the sanitizers, whose runtimes must know every thread. */
static void *agent_thread(void *unused)
{
	atomic_store(&up_job.agent_tid, (int)up_sys0(SYS_gettid));
	futex_wake((_Atomic uint32_t *)&up_job.agent_tid);
	agent_main();
	atomic_store(&up_job.agent_tid, 0);
	futex_wake((_Atomic uint32_t *)&up_job.agent_tid);
	return unused;
}

static int spawn_thread(void)
{
	pthread_t thread;
	int ret = pthread_create(&thread, NULL, agent_thread, NULL);

	if (ret)
		return -ret;
	pthread_detach(thread);
	while (!up_agent_alive())
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
	/* CLONE_FILES for an instant only: agent_open() leaves the shared table without copying
	 * any of it, where a clone without the flag would copy (and later flush and close) all. */
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
		up_sys3(SYS_madvise, stack, UP_AGENT_STACK_BYTES, MADV_DONTFORK);
		up_job.agent_stack = stack;
	}
	/* The agent is born with every signal blocked and never opens one: handlers are the job's. */
	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	ret = spawn_thread();
	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
	return ret;
}
