// SPDX-License-Identifier: Apache-2.0
/*
 * guardian.c - a process beside the service that holds the pool's userfaultfds, too, and answers where
 * nobody else can.
 *
 * A hole of the pool is read as zeros once the last descriptor of its userfaultfd is closed. The
 * registration belongs to the address space, which may outlive the process whose thread holds one (clone(2)
 * with CLONE_VM and without CLONE_THREAD), and the service, which holds the other, may be killed. So a
 * third is held here. A process with an agent needs nothing of this one: where the service dies, the agent
 * puts the file in the pool's place. Where there is no agent any more and the service is silent, faults are
 * answered here, as csrc/job/standin.c does it: from the file, by whole pages of the pool's memory, through
 * the registration.
 *
 * It ends when the service has, and nobody has any of the pool's memory mapped or open.
 *
 * It is forked from a process with threads, and gives back what it has inherited (guardian_start.c),
 * malloc's memory and what libc has there included: only system calls and mem*() here, and no call that the
 * linker still has to look up (tools/cffi_build.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "service/pool/guardian_inside.h"

/* The pool says every 10 ms that it is alive; silent for two looks it counts as dead, as in
 * csrc/job/pooled.c. Looks are made only while some process has no agent, or there is no service. */
#define LOOK_MS 20
/* Where there is no service, and each process has its agent as far as is known. */
#define SLOW_LOOK_MS 100
#define SILENT_LOOKS 2
/* Looks at which the same fault has waited: its agent is dead, or it would have read it. */
#define LYING_LOOKS 3
/* So many looks after the service's end are quick: by then most agents have put the file back. */
#define QUICK_LOOKS 50
#define SOCKET_EVENT UINT64_MAX
#define PIDFD_EVENT (1ull << 32)

static void drop(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void watch(int fd, uint64_t who)
{
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = who };

	epoll_ctl(g.epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

/* Closing is not enough: others have what it names open. */
static void unwatch(int fd)
{
	epoll_ctl(g.epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

/* ------------------------------------------------------------------ what the pool says */

static void forget_regions(uint32_t client, int whole, uint32_t id)
{
	for (size_t i = g.regions; i-- > 0;)
		if (g.region[i].client == client && (whole || g.region[i].id == id))
			g.region[i] = g.region[--g.regions];
}

static void forget_client(uint32_t number)
{
	struct held_client *c = &g.client[number];

	forget_regions(number, 1, 0);
	if (c->serving)
		unwatch(c->uffd);
	if (c->pidfd >= 0)
		unwatch(c->pidfd);
	drop(&c->uffd);
	drop(&c->pidfd);
	drop(&c->maps_fd);
	*c = (struct held_client){ -1, -1, -1, 0, 0, 0 };
}

static void forget_file(struct held_file *f)
{
	drop(&f->memfd);
	drop(&f->fd);
}

static void add_region(const struct guardian_note *n)
{
	if (g.regions == g.room) {
		size_t room = g.room ? 2 * g.room : 1024;
		void *p = g.region ? mremap(g.region, g.room * sizeof(*g.region), room * sizeof(*g.region),
					    MREMAP_MAYMOVE)
				   : mmap(NULL, room * sizeof(*g.region), PROT_READ | PROT_WRITE,
					  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED)
			return; /* where the kernel says what lies there it is not needed */
		g.region = p;
		g.room = room;
	}
	g.region[g.regions++] = (struct held_region){ n->client, n->region, (int)n->file, n->address, n->length,
						      n->offset };
}

static void add_file(const struct guardian_note *n, int *fd)
{
	struct held_file *f = &g.file[n->file];
	struct stat st;

	forget_file(f);
	*f = (struct held_file){ .memfd = fd[0], .fd = fd[1], .size = n->length };
	if (!fstat(f->memfd, &st))
		f->memory = (struct up_vma){ .inode = st.st_ino, .device_major = major(st.st_dev),
					     .device_minor = minor(st.st_dev) };
	fd[0] = fd[1] = -1;
}

static void add_client(const struct guardian_note *n, int *fd)
{
	struct held_client *c = &g.client[n->client];

	forget_client(n->client);
	*c = (struct held_client){ .uffd = fd[0], .pidfd = fd[1], .maps_fd = fd[2], .dead = fd[1] < 0 };
	if (c->pidfd >= 0)
		watch(c->pidfd, PIDFD_EVENT | n->client);
	fd[0] = fd[1] = fd[2] = -1;
}

static void on_note(const struct guardian_note *n, int *fd)
{
	if (n->client >= POOL_CLIENTS || n->file >= POOL_FILES)
		return;
	switch (n->kind) {
	case GUARDIAN_JOIN:
		add_client(n, fd);
		break;
	case GUARDIAN_LEAVE:
		forget_client(n->client);
		break;
	case GUARDIAN_FILE:
		add_file(n, fd);
		break;
	case GUARDIAN_FORGET:
		forget_file(&g.file[n->file]);
		break;
	case GUARDIAN_MAP:
		add_region(n);
		break;
	case GUARDIAN_UNMAP:
		forget_regions(n->client, 0, n->region);
		break;
	}
}

/* Whose touch was read, and never answered, asks again. */
static void wake(uint32_t client)
{
	for (size_t i = 0; i < g.regions; i++)
		if (g.region[i].client == client)
			pool_wake(g.client[client].uffd, g.region[i].address, g.region[i].length);
}

/* What is leased would be so as long as we have it open, and nobody is there to let a writer in. */
static void note_end(void)
{
	g.alone = 1;
	unwatch(g.socket);
	for (int i = 0; i < POOL_FILES; i++)
		if (g.file[i].fd >= 0)
			fcntl(g.file[i].fd, F_SETLEASE, F_UNLCK);
	for (uint32_t i = 0; i < POOL_CLIENTS; i++)
		if (g.client[i].uffd >= 0)
			wake(i);
}

/* Whether there was one. */
static int take_note(void)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(GUARDIAN_FDS * sizeof(int))];
	} control;
	struct guardian_note n;
	struct iovec iov = { &n, sizeof(n) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space,
			    .msg_controllen = sizeof(control.space) };
	ssize_t got = recvmsg(g.socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	int fd[GUARDIAN_FDS] = { -1, -1, -1 }, next = 0, come = 0;

	if (got < 0)
		return 0;
	if (got != sizeof(n)) {
		note_end();
		return 0;
	}
	if (m.msg_controllen >= CMSG_LEN(sizeof(int)) && control.header.cmsg_type == SCM_RIGHTS)
		come = (int)((control.header.cmsg_len - CMSG_LEN(0)) / sizeof(int));
	for (int i = 0; i < GUARDIAN_FDS; i++)
		if (n.has >> i & 1 && next < come)
			fd[i] = ((int *)CMSG_DATA(&control.header))[next++];
	on_note(&n, fd);
	for (int i = 0; i < GUARDIAN_FDS; i++)
		drop(&fd[i]);
	return 1;
}

/* ------------------------------------------------------------------ who needs it */

static void serve(uint32_t number)
{
	struct held_client *c = &g.client[number];

	c->serving = 1;
	watch(c->uffd, number);
	wake(number);
}

static void look_at(uint32_t number, int silent)
{
	struct held_client *c = &g.client[number];
	struct pollfd p = { c->uffd, POLLIN, 0 };

	if (c->serving && !silent) {
		c->serving = c->lying = 0;
		unwatch(c->uffd);
	}
	if (c->serving || !silent)
		return;
	/* A process that lives has its agent, which answers at once. */
	if (g.alone && !c->dead)
		c->lying = poll(&p, 1, 0) == 1 && p.revents & POLLIN ? c->lying + 1 : 0;
	if (c->dead || c->lying >= LYING_LOOKS)
		serve(number);
}

/* Its slot may have become another process's since the event. */
static void note_death(struct held_client *c)
{
	struct pollfd p = { c->pidfd, POLLIN, 0 };

	if (c->pidfd < 0 || poll(&p, 1, 0) != 1)
		return;
	c->dead = 1;
	unwatch(c->pidfd);
	drop(&c->pidfd);
}

/* A write lease is granted only on a file that nobody else has open, and a mapping counts as open; the
 * memfd's first description, ours, does not. */
static int is_in_use(const struct held_file *f)
{
	char path[32] = "/proc/self/fd/", digit[12];
	int fd = f->memfd, n = 0, at = 14, ret;

	do
		digit[n++] = (char)('0' + fd % 10);
	while (fd /= 10);
	while (n)
		path[at++] = digit[--n];
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return 1;
	ret = fcntl(fd, F_SETLEASE, F_WRLCK) ? errno : 0;
	close(fd);
	if (!ret || ret == EAGAIN)
		return ret;
	for (int i = 0; i < POOL_CLIENTS; i++) /* no leases here (fs.leases-enable) */
		if (g.client[i].uffd >= 0 && !pool_is_gone(g.client[i].uffd, g.page_bytes))
			return 1;
	return 0;
}

static void end_when_unused(void)
{
	int used = 0;

	for (int i = 0; i < POOL_FILES; i++) {
		if (g.file[i].memfd >= 0 && !is_in_use(&g.file[i]))
			forget_file(&g.file[i]);
		used |= g.file[i].memfd >= 0;
	}
	if (!used)
		_exit(0);
}

static void look(void)
{
	uint64_t beat = __atomic_load_n(&g.shared->beat_ns, __ATOMIC_RELAXED);
	int silent;

	g.missed = beat == g.beat_ns ? g.missed + 1 : 0;
	g.beat_ns = beat;
	silent = g.alone || g.missed >= SILENT_LOOKS;
	for (uint32_t i = 0; i < POOL_CLIENTS; i++)
		if (g.client[i].uffd >= 0)
			look_at(i, silent);
	if (g.alone) {
		g.looks++;
		end_when_unused();
	}
}

/* How soon the next look must be; -1: somebody tells us first. */
static int look_ms(void)
{
	for (int i = 0; i < POOL_CLIENTS; i++)
		if (g.client[i].uffd >= 0 && (g.client[i].dead || g.client[i].lying))
			return LOOK_MS;
	if (!g.alone)
		return -1;
	return g.looks < QUICK_LOOKS ? LOOK_MS : SLOW_LOOK_MS;
}

/* ------------------------------------------------------------------ the process */

void guardian_main(int socket, struct guardian_shared *shared, uint64_t page_bytes)
{
	struct epoll_event ready[64];
	sigset_t all;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL); /* it ends by what it sees */
	g.shared = shared;
	g.page_bytes = page_bytes;
	g.socket = dup2(socket, 0);
	syscall(SYS_close_range, 1u, ~0u, 0u); /* the service's: its log, its lock, the job's files */
	if (chdir("/"))
		_exit(1);
	guardian_shed(guardian_take_name());
	for (int i = 0; i < POOL_CLIENTS; i++)
		g.client[i] = (struct held_client){ -1, -1, -1, 0, 0, 0 };
	for (int i = 0; i < POOL_FILES; i++)
		g.file[i].memfd = g.file[i].fd = -1;
	g.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	watch(g.socket, SOCKET_EVENT);
	for (uint64_t look_ns = 0;;) {
		int n = epoll_wait(g.epoll_fd, ready, 64, look_ms());

		for (int i = 0; i < n; i++) {
			uint64_t who = ready[i].data.u64;
			struct held_client *c = &g.client[(uint32_t)who % POOL_CLIENTS];

			if (who == SOCKET_EVENT) {
				while (take_note())
					;
			} else if (who & PIDFD_EVENT) {
				note_death(c);
			} else if (c->serving) {
				guardian_on_faults((uint32_t)who);
			}
		}
		if (pool_now_ns() - look_ns >= LOOK_MS * 1000000ull) {
			look_ns = pool_now_ns();
			look();
		}
	}
}
