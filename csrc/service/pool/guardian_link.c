// SPDX-License-Identifier: Apache-2.0
/*
 * guardian_link.c - the pool's side of the guardian (guardian.c): it is started, told of what there is, and
 * started again where it has died.
 *
 * What is told is held by the kernel from sendmsg(2) on, before the guardian has read it. With the pool's
 * lock; nothing here waits for longer than 20 ms.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* One that cannot be started, or does not take what it is told: another is tried then. Nor is one
 * started more often. */
#define AGAIN_NS 1000000000ull

/* Some hundred notes fit. One that has not taken any for so long, less than the agents wait for us, does not run. */
#define WAITS 4
#define WAIT_MS 5
/* How long its end is waited for: it may be in a far server's close(2). */
#define END_LOOKS 50

/* Whether it has been waited for, so that its number may be another's. It sends no signal when it ends:
 * whoever looks for children, or has SIGCHLD ignored, does not take it for his. */
static int reap(struct pool_guardian *k)
{
	if (k->pid > 0 && waitpid(k->pid, NULL, WNOHANG | __WALL))
		k->pid = 0;
	return !k->pid;
}

static void end_guardian(struct up_pool *p)
{
	struct pool_guardian *k = &p->guardian;

	if (k->fd >= 0)
		close(k->fd);
	k->fd = -1;
	if (k->pid > 0)
		kill(k->pid, SIGKILL);
	k->again_ns = pool_now_ns() + AGAIN_NS;
}

/* Whether it was taken. */
static int send_note(int fd, const struct msghdr *m)
{
	struct pollfd p = { fd, POLLOUT, 0 };

	for (int waits = 0;; waits++) {
		if (sendmsg(fd, m, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
			return 1;
		/* ETOOMANYREFS: too many descriptors of this user are on their way */
		if ((errno != EAGAIN && errno != ETOOMANYREFS) || waits == WAITS)
			return 0;
		poll(&p, 1, WAIT_MS);
	}
}

static void tell(struct up_pool *p, struct guardian_note *n, const int *fd)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(GUARDIAN_FDS * sizeof(int))];
	} control = { 0 };
	struct iovec iov = { n, sizeof(*n) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	size_t fds = 0;

	if (p->guardian.fd < 0)
		return;
	for (int i = 0; fd && i < GUARDIAN_FDS; i++)
		if (fd[i] >= 0) {
			n->has |= 1u << i;
			((int *)CMSG_DATA(&control.header))[fds++] = fd[i];
		}
	if (fds) {
		m.msg_control = control.space;
		m.msg_controllen = CMSG_SPACE(fds * sizeof(int));
		control.header.cmsg_len = CMSG_LEN(fds * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
	}
	if (!send_note(p->guardian.fd, &m))
		end_guardian(p); /* another one is told everything */
}

void guardian_joined(struct up_pool *p, uint32_t client)
{
	struct guardian_note n = { .kind = GUARDIAN_JOIN, .client = client };
	struct pool_client *c = &p->client[client];
	int fd[GUARDIAN_FDS] = { c->uffd, c->pidfd, c->maps_fd };

	if (p->guardian.fd < 0)
		return;
	if (fd[1] < 0 && c->pid > 0)
		fd[1] = (int)syscall(SYS_pidfd_open, c->pid, 0);
	tell(p, &n, fd);
	if (fd[1] >= 0 && fd[1] != c->pidfd)
		close(fd[1]);
}

void guardian_left(struct up_pool *p, uint32_t client)
{
	tell(p, &(struct guardian_note){ .kind = GUARDIAN_LEAVE, .client = client }, NULL);
}

void guardian_has_file(struct up_pool *p, uint32_t file)
{
	const struct pool_file *f = &p->file[file];

	tell(p, &(struct guardian_note){ .kind = GUARDIAN_FILE, .file = file, .length = f->size },
	     (const int[GUARDIAN_FDS]){ f->memfd, f->source.given, -1 });
}

void guardian_lost_file(struct up_pool *p, uint32_t file)
{
	tell(p, &(struct guardian_note){ .kind = GUARDIAN_FORGET, .file = file }, NULL);
}

void guardian_mapped(struct up_pool *p, uint32_t client, const struct pool_region *r)
{
	struct guardian_note n = { .kind = GUARDIAN_MAP, .client = client, .file = (uint32_t)r->file, .region = r->id,
				   .address = r->address, .length = r->length, .offset = r->offset };

	tell(p, &n, NULL);
}

void guardian_unmapped(struct up_pool *p, uint32_t client, uint32_t region)
{
	tell(p, &(struct guardian_note){ .kind = GUARDIAN_UNMAP, .client = client, .region = region }, NULL);
}

/* ------------------------------------------------------------------ start and end */

static void tell_all(struct up_pool *p)
{
	for (uint32_t i = 0; i < POOL_FILES; i++)
		if (p->file[i].used)
			guardian_has_file(p, i);
	for (uint32_t i = 0; i < POOL_CLIENTS; i++) {
		if (p->client[i].uffd < 0)
			continue;
		guardian_joined(p, i);
		for (uint32_t j = 0; j < p->client[i].regions; j++)
			guardian_mapped(p, i, &p->client[i].region[j]);
	}
}

int guardian_begin(struct up_pool *p)
{
	struct pool_guardian *k = &p->guardian;
	int pair[2], err, bytes = 1 << 20; /* as many notes as may be before they are read */
	pid_t pid;

	if (!k->shared) {
		void *at = mmap(NULL, sizeof(*k->shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED)
			return -errno;
		k->shared = at;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return -errno;
	setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	k->shared->stand_ins &= ~1ull; /* one that died within a fill does nothing any more */
	/* No fork(3): other threads may hold the locks that its handlers want, and the child calls nothing that needs
	 * them. */
	pid = (pid_t)syscall(SYS_clone, 0ul, 0ul, 0ul, 0ul, 0ul);
	if (!pid)
		guardian_main(pair[1], k->shared, p->page_bytes);
	err = errno;
	close(pair[1]);
	if (pid < 0) {
		close(pair[0]);
		return -err;
	}
	k->begun_ns = pool_now_ns();
	k->fd = pair[0];
	k->pid = pid;
	tell_all(p);
	return 0;
}

void guardian_beat(struct up_pool *p, uint64_t alive_ns)
{
	struct pool_guardian *k = &p->guardian;
	uint64_t n, now;
	char byte;

	if (!p->options.guardian)
		return;
	if (k->fd >= 0 && !recv(k->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK)) {
		end_guardian(p);
		k->again_ns = k->begun_ns + AGAIN_NS;
	}
	now = pool_now_ns();
	/* One that does not end, in a far server's close(2), is not waited for. */
	if (k->fd < 0 && now >= k->again_ns && (reap(k) || now >= k->again_ns + AGAIN_NS) && guardian_begin(p))
		k->again_ns = now + AGAIN_NS;
	if (!k->shared)
		return;
	__atomic_store_n(&k->shared->beat_ns, alive_ns, __ATOMIC_RELAXED);
	n = __atomic_load_n(&k->shared->stand_ins, __ATOMIC_SEQ_CST);
	if (n == k->stand_ins || n % 2)
		return;
	k->stand_ins = n;
	n = __atomic_load_n(&k->shared->stand_in_bytes, __ATOMIC_RELAXED);
	p->count.stand_in_bytes += n - k->stand_in_bytes;
	k->stand_in_bytes = n;
	pool_seek_strays(p);
}

int guardian_stands_in(const struct up_pool *p)
{
	return p->guardian.shared && __atomic_load_n(&p->guardian.shared->stand_ins, __ATOMIC_SEQ_CST) % 2;
}

void guardian_end(struct up_pool *p, int used)
{
	if (!used && p->guardian.pid > 0)
		kill(p->guardian.pid, SIGKILL);
	for (int i = 0; !used && !reap(&p->guardian) && i < END_LOOKS; i++)
		usleep(1000);
	if (p->guardian.fd >= 0)
		close(p->guardian.fd);
	p->guardian.fd = -1;
	if (p->guardian.shared)
		munmap(p->guardian.shared, sizeof(*p->guardian.shared));
	p->guardian.shared = NULL;
}
