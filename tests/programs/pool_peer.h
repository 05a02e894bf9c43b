/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_peer.h - pool_model.c's processes of the job: each is born of a process that knows nothing of
 * the pool, has two threads that obey commands, and checks every word that it reads.
 */
#ifndef POOL_PEER_H
#define POOL_PEER_H

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "pool_client.h"

#define REGIONS 4
#define THREADS 2

enum op { MAP, TOUCH, REARM, DETACH, UNMAP, FORK, JOIN, DONE };

/* The address of a region is its number's: what comes later lies where the last one lay. */
struct command {
	enum op op;
	uint32_t region;
	int join;                            /* FORK: the child takes part, too */
	uint64_t length, offset, size, salt; /* MAP */
	uint64_t first, pages, step;         /* TOUCH, REARM: pages of the region */
};

struct reply {
	enum op op;
	int pid;
	uint64_t wrong, words;
	uint32_t pooled; /* JOIN: bit i: region i */
};

struct mapping {
	struct command c;
	int fd, memfd, mapped, pooled;
};

static inline char *address_of(uint32_t region)
{
	return (char *)0x200000000000 + ((uint64_t)region << 28);
}

static inline void send_with(int socket, const void *data, size_t bytes, const int *fd, int fds)
{
	char space[CMSG_SPACE(4 * sizeof(int))] __attribute__((aligned(8))) = { 0 };
	struct iovec iov = { .iov_base = (void *)data, .iov_len = bytes };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (fds) {
		m.msg_control = space;
		m.msg_controllen = CMSG_SPACE((size_t)fds * sizeof(int));
		CMSG_FIRSTHDR(&m)->cmsg_len = CMSG_LEN((size_t)fds * sizeof(int));
		CMSG_FIRSTHDR(&m)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&m)->cmsg_type = SCM_RIGHTS;
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), fd, (size_t)fds * sizeof(int));
	}
	CHECK(sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)bytes);
}

/* 0: the other side is gone. */
static inline int receive_with(int socket, void *data, size_t bytes, int *fd, int fds)
{
	char space[CMSG_SPACE(4 * sizeof(int))] __attribute__((aligned(8)));
	struct iovec iov = { .iov_base = data, .iov_len = bytes };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space,
			    .msg_controllen = sizeof(space) };
	ssize_t n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);

	if (n <= 0)
		return 0;
	CHECK(n == (ssize_t)bytes);
	if (fds && CMSG_FIRSTHDR(&m))
		memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), (size_t)fds * sizeof(int));
	return 1;
}

/* ------------------------------------------------------------------ one process */

static struct mapping mapping[REGIONS];
static int own_uffd;
static int own_socket[THREADS];

static inline uint64_t look_at_page(const struct mapping *m, uint64_t page, uint64_t *words)
{
	const volatile uint64_t *word = (uint64_t *)(address_of(m->c.region) + page * PAGE);
	uint64_t offset = m->c.offset + page * PAGE, wrong = 0;

	for (uint64_t i = 0; i < PAGE / 8; i++, offset += 8)
		if (offset + 8 <= m->c.size) { /* the last page ends with zeros */
			uint64_t found = word[i];

			++*words;
			if (found != word_at(offset, m->c.salt) && !wrong++)
				fprintf(stderr, "pid %d region %u offset %llx: %llx, not %llx\n",
					getpid(), m->c.region, (unsigned long long)offset,
					(unsigned long long)found,
					(unsigned long long)word_at(offset, m->c.salt));
		}
	return wrong;
}

/* A child: what the pool served lies in no page table of it, and is not mapped at all; the agent
 * puts the file there before anybody looks. */
static void be_child(int socket, int join)
{
	struct reply reply = { .op = DONE, .pid = getpid() };
	struct command go;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (uint32_t i = 0; i < REGIONS; i++) {
		unsigned char bits[1];

		if (!mapping[i].mapped)
			continue;
		if (mapping[i].pooled)
			CHECK(mincore(address_of(i), PAGE, bits) && errno == ENOMEM);
		reply.pooled |= (uint32_t)mapping[i].pooled << i;
		CHECK(raw_mmap(address_of(i), mapping[i].c.length, MAP_SHARED | MAP_FIXED,
			       mapping[i].fd, mapping[i].c.offset) == address_of(i));
	}
	if (join) {
		own_uffd = open_pool_uffd();
		reply.op = JOIN;
		send_with(socket, &reply, sizeof(reply), &own_uffd, 1);
		CHECK(receive_with(socket, &go, sizeof(go), NULL, 0));
		for (uint32_t i = 0; i < REGIONS; i++)
			if (reply.pooled >> i & 1)
				enter(own_uffd, mapping[i].memfd, address_of(i),
				      mapping[i].c.length, mapping[i].c.offset);
	}
	for (uint32_t i = 0; i < REGIONS; i++)
		for (uint64_t page = 0; mapping[i].mapped && page < mapping[i].c.length / PAGE;
		     page += 1 + (page + (uint64_t)reply.pid) % 30)
			reply.wrong += look_at_page(&mapping[i], page, &reply.words);
	reply.op = DONE;
	send_with(socket, &reply, sizeof(reply), NULL, 0);
	_exit(0);
}

static void obey(int socket, const struct command *c, int *fd)
{
	struct mapping *m = &mapping[c->region % REGIONS];
	struct reply reply = { .op = DONE, .pid = getpid() };
	char *at = address_of(c->region);
	pid_t pid;

	switch (c->op) {
	case MAP:
		*m = (struct mapping){ .c = *c, .fd = fd[0], .memfd = fd[1], .mapped = 1, .pooled = 1 };
		CHECK(raw_mmap(at, c->length, MAP_SHARED | MAP_FIXED, m->fd, c->offset) == at);
		enter(own_uffd, m->memfd, at, c->length, c->offset);
		break;
	case TOUCH:
		for (uint64_t i = 0; i < c->pages; i++)
			reply.wrong += look_at_page(
				m, (c->first + i * c->step) % (m->c.length / PAGE), &reply.words);
		break;
	case REARM:
		CHECK(!madvise(at + c->first * PAGE, c->pages * PAGE, MADV_DONTNEED));
		break;
	case DETACH:
		detach(own_uffd, m->fd, at, m->c.length, m->c.offset);
		m->pooled = 0;
		break;
	case UNMAP:
		if (m->pooled)
			detach(own_uffd, m->fd, at, m->c.length, m->c.offset);
		CHECK(!munmap(at, m->c.length));
		close(m->fd);
		close(m->memfd);
		m->mapped = 0;
		break;
	case FORK:
		pid = fork();
		CHECK(pid >= 0);
		if (!pid)
			be_child(socket, c->join);
		CHECK(waitpid(pid, NULL, 0) == pid);
		return; /* it has answered */
	default:
		CHECK(!"a command");
	}
	send_with(socket, &reply, sizeof(reply), NULL, 0);
}

static void *serve_socket(void *cookie)
{
	int socket = *(int *)cookie, fd[2];
	struct command c;

	while (receive_with(socket, &c, sizeof(c), fd, 2))
		obey(socket, &c, fd);
	_exit(0);
}

static void be_peer(void)
{
	struct reply hello = { .op = DONE, .pid = getpid() };
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	own_uffd = open_pool_uffd();
	send_with(own_socket[0], &hello, sizeof(hello), &own_uffd, 1);
	CHECK(!pthread_create(&thread, NULL, serve_socket, &own_socket[1]));
	serve_socket(&own_socket[0]);
}

/* The process that all others come from: it has no thread, no memory and no descriptor of the
 * pool, and neither have they. */
static inline void be_nursery(int socket)
{
	char word;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGCHLD, SIG_IGN);
	while (receive_with(socket, &word, 1, own_socket, THREADS)) {
		if (!fork()) {
			close(socket);
			signal(SIGCHLD, SIG_DFL);
			be_peer();
		}
		for (int i = 0; i < THREADS; i++)
			close(own_socket[i]);
	}
	_exit(0);
}

#endif
