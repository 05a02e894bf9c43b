// SPDX-License-Identifier: Apache-2.0
/*
 * guardian.c - a process beside the service that holds the pool's userfaultfds, too, and answers where nobody else can.
 *
 * A hole of the pool is read as zeros once the last descriptor of its userfaultfd is closed. The registration belongs to
 * the address space, which may outlive the process whose thread holds one (clone(2) with CLONE_VM and without
 * CLONE_THREAD), and the service, which holds the other, may be killed. So a third is held here. A process with an
 * agent needs nothing of this one: where the service dies, the agent puts the file in the pool's place. Where there is
 * no agent any more and the service is silent, faults are answered here, as csrc/job/standin.c does it: from the file,
 * by whole pages of the pool's memory, through the registration.
 *
 * It ends when the service has, and nobody has any of the pool's memory mapped or open.
 *
 * It is forked from a process with threads, and gives back what it has inherited (shed()), malloc's memory and what libc
 * has there included: only system calls and mem*() here, and no call that the linker still has to look up
 * (tools/cffi_build.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sched.h>
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

#include "service/pool/guardian.h"
#include "service/pool/pool.h"

/* The pool says every 10 ms that it is alive; silent for two looks it counts as dead, as in csrc/job/pooled.c. Looks
 * are made only while some process has no agent, or there is no service. */
#define LOOK_MS 20
/* Where there is no service, and each process has its agent as far as is known. */
#define SLOW_LOOK_MS 100
#define SILENT_LOOKS 2
/* Looks at which the same fault has waited: its agent is dead, or it would have read it. */
#define LYING_LOOKS 3
/* One of so many looks asks whether the pool's memory is still mapped: two system calls for each file. */
#define USE_LOOKS 5
/* As in csrc/job/standin.c: what is read for one touch, and how much of that stays once the service is dead. */
#define FILL_BYTES (64u << 10)
#define FILLS_KEPT 256
#define TRIES 1000

struct held_client {
	int uffd, pidfd, maps_fd;
	int dead;    /* the process has ended: so has its agent */
	int lying;   /* looks at which a fault waited */
	int serving; /* its faults are answered here */
};

struct held_file {
	int memfd, fd;
	uint64_t size;
	struct up_vma memory; /* its number and device */
};

struct held_region {
	uint32_t client, id;
	int file;
	uint64_t address, length, offset;
};

static struct {
	int socket, epoll_fd;
	struct guardian_shared *shared;
	uint64_t page_bytes, beat_ns;
	int missed, alone; /* looks without a beat; there is no service any more */
	uint32_t looks;
	struct held_client client[POOL_CLIENTS];
	struct held_file file[POOL_FILES];
	struct held_region *region;
	size_t regions, room;
	struct {
		int file;
		uint64_t offset, length;
	} filled[FILLS_KEPT];
	uint32_t fills;
} g;

static _Alignas(4096) char buffer[FILL_BYTES];

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

/* ------------------------------------------------------------------ answering */

struct place {
	struct held_file *file;
	uint64_t start, offset, length; /* of the pages that lie together there */
};

/* By the kernel: they may have been moved. Before Linux 6.11 it does not tell of an address space whose process has
 * ended; then as it was mapped. */
static int find_place(uint32_t client, uint64_t address, struct place *at)
{
	struct up_vma v;

	if (g.client[client].maps_fd >= 0 && !up_vma_at(g.client[client].maps_fd, address, &v))
		for (int i = 0; i < POOL_FILES; i++)
			if (g.file[i].memfd >= 0 && up_vma_of_one_file(&g.file[i].memory, &v)) {
				*at = (struct place){ &g.file[i], v.start, v.offset, v.end - v.start };
				return 1;
			}
	for (size_t i = 0; i < g.regions; i++) {
		const struct held_region *r = &g.region[i];

		if (r->client != client || address - r->address >= r->length || g.file[r->file].memfd < 0)
			continue;
		*at = (struct place){ &g.file[r->file], r->address, r->offset, r->length };
		return 1;
	}
	return 0;
}

static int read_file(const struct held_file *f, uint64_t offset, uint64_t length)
{
	for (uint64_t done = 0; done < length;) {
		ssize_t n = f->fd < 0 ? -1 : pread(f->fd, buffer + done, length - done, (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -EIO;
		done += (uint64_t)n;
	}
	return 0;
}

static int write_memory(const struct held_file *f, uint64_t offset, uint64_t length)
{
	for (uint64_t done = 0; done < length;) {
		ssize_t n = pwrite(f->memfd, buffer + done, length - done, (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -EIO;
		done += (uint64_t)n;
	}
	return 0;
}

/* Not while the service lives: its books must be true. */
static void make_room(const struct held_file *f, uint64_t offset, uint64_t length)
{
	uint32_t oldest = g.fills % FILLS_KEPT;
	int file = g.filled[oldest].file;

	if (!g.alone)
		return;
	if (g.fills >= FILLS_KEPT && g.file[file].memfd >= 0)
		fallocate(g.file[file].memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			  (off_t)g.filled[oldest].offset, (off_t)g.filled[oldest].length);
	g.filled[oldest].file = (int)(f - g.file);
	g.filled[oldest].offset = offset;
	g.filled[oldest].length = length;
	g.fills++;
}

static int continue_page(int uffd, uint64_t address)
{
	struct uffdio_continue cont;

	for (int i = 0; i < TRIES; i++) {
		cont = (struct uffdio_continue){ .range = { address, g.page_bytes } };
		if (!ioctl(uffd, UFFDIO_CONTINUE, &cont))
			return 0;
		if (errno != EAGAIN) /* it changes its address space just now */
			break;
		sched_yield();
	}
	return -errno;
}

static void answer(uint32_t client, uint64_t address)
{
	int uffd = g.client[client].uffd;
	uint64_t first, end, limit;
	struct place at;
	int ret;

	if (!find_place(client, address, &at)) {
		pool_wake(uffd, address, g.page_bytes);
		return;
	}
	limit = at.offset + at.length < at.file->size ? at.offset + at.length : at.file->size;
	first = (at.offset + (address - at.start)) & ~(uint64_t)(FILL_BYTES - 1);
	end = first + FILL_BYTES < limit ? first + FILL_BYTES : limit;
	if (first < at.offset)
		first = at.offset;
	make_room(at.file, first, end - first);
	__atomic_fetch_add(&g.shared->stand_ins, 1, __ATOMIC_SEQ_CST);
	ret = read_file(at.file, first, end - first);
	if (!ret)
		ret = write_memory(at.file, first, end - first);
	if (!ret) /* the page that is waited for first */
		ret = continue_page(uffd, address);
	else if (!pool_poison(uffd, address, g.page_bytes))
		end = first;
	if (ret)
		pool_wake(uffd, address, g.page_bytes);
	for (uint64_t next = first; !ret && next < end; next += g.page_bytes)
		continue_page(uffd, at.start + (next - at.offset));
	__atomic_fetch_add(&g.shared->stand_in_bytes, end - first, __ATOMIC_RELAXED);
	__atomic_fetch_add(&g.shared->stand_ins, 1, __ATOMIC_SEQ_CST);
}

static void on_faults(uint32_t client)
{
	struct uffd_msg m[16];
	ssize_t n = read(g.client[client].uffd, m, sizeof(m));

	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		for (size_t j = 0; m[i].event == UFFD_EVENT_REMAP && j < g.regions; j++)
			if (g.region[j].client == client && g.region[j].address == m[i].arg.remap.from)
				g.region[j].address = m[i].arg.remap.to;
	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		if (m[i].event == UFFD_EVENT_PAGEFAULT)
			answer(client, m[i].arg.pagefault.address & ~(g.page_bytes - 1));
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

/* A write lease is granted only on a file that nobody else has open, and a mapping counts as open; the memfd's first
 * description, ours, does not. */
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
	if (g.alone && g.looks++ % USE_LOOKS == 0)
		end_when_unused();
}

/* How soon the next look must be; -1: somebody tells us first. */
static int look_ms(void)
{
	for (int i = 0; i < POOL_CLIENTS; i++)
		if (g.client[i].uffd >= 0 && (g.client[i].dead || g.client[i].lying))
			return LOOK_MS;
	return g.alone ? SLOW_LOOK_MS : -1;
}

/* ------------------------------------------------------------------ its start */

/* The number in a field of /proc/self/stat; 0: there is none. */
static uintptr_t stat_field(const char *text, ssize_t length, int field)
{
	uintptr_t number = 0;
	int at = 0;

	for (ssize_t i = 0; i < length; i++) {
		if (text[i] == ')') /* the last one ends the second field: a name may have some */
			at = 2;
		else if (text[i] == ' ')
			at++;
		else if (at == field && text[i] >= '0' && text[i] <= '9')
			number = number * 10 + (uintptr_t)(text[i] - '0');
	}
	return number;
}

/* So that ps(1) tells the two apart: over the arguments, which are this process's own copy. Where they lie. */
static uintptr_t take_name(void)
{
	static const char name[] = "uffdprefetch guardian";
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	char text[1024];
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));
	uintptr_t start = stat_field(text, n, 48), end = stat_field(text, n, 49);

	prctl(PR_SET_NAME, "uffdprefetch/g");
	if (fd >= 0)
		close(fd);
	if (start && end > start + sizeof(name)) {
		memset((void *)start, 0, end - start);
		memcpy((void *)start, name, sizeof(name));
	}
	return start;
}

/* What a process that never returns from here has no use for: the interpreter's memory, which would be copied page by
 * page as the service writes its own. Kept are this stack, this thread's block (errno), the arguments, and what
 * follows an object's pages of a file, its .bss. */
static void shed(uintptr_t arguments)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	int maps_fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	uintptr_t at = 0, here = (uintptr_t)__builtin_frame_address(0), own = (uintptr_t)&errno;
	uint64_t file_end = 0;
	struct up_vma v;

	while (maps_fd >= 0 && !up_vma_from(maps_fd, at, &v)) {
		int kept = v.inode || v.shared || !v.writable || v.start == file_end ||
			   here - v.start < v.end - v.start || own - v.start < v.end - v.start ||
			   arguments - v.start < v.end - v.start;

		if (!kept)
			munmap((void *)(uintptr_t)v.start, v.end - v.start);
		if (v.inode)
			file_end = v.end;
		at = v.end;
	}
	if (maps_fd >= 0)
		close(maps_fd);
#endif
}

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
	shed(take_name());
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
				c->dead = 1;
				unwatch(c->pidfd);
				drop(&c->pidfd);
			} else if (c->serving) {
				on_faults((uint32_t)who);
			}
		}
		if (pool_now_ns() - look_ns >= LOOK_MS * 1000000ull) {
			look_ns = pool_now_ns();
			look();
		}
	}
}
