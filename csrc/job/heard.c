// SPDX-License-Identifier: Apache-2.0
/*
 * heard.c - what the service says, and what the agent does about it.
 *
 * No call here blocks. A command for a mapping that is gone meanwhile finds no region of its
 * number and does nothing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "job/agent.h"

/* One that a thread is closing, and which lacks its descriptor for it. */
static struct up_region *asked_by_id(uint32_t id)
{
	struct up_region *r = &up_job.region[id % UP_REGIONS];

	return atomic_load(&r->state) == UP_CLOSING && r->asked && r->id == id ? r : NULL;
}

static void on_welcome(struct agent *a, int *fd)
{
	void *p;

	if (a->welcomed)
		return;
	atomic_store(&up_job.service_starts, 0);
	if (fd[0] < 0 || fd[1] < 0) { /* this process may not have so many */
		a->hung_up = 1;
		return;
	}
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
	up_flush(a);
}

/* Only while its reader waits in mmap() or fork(), and so cannot touch it. */
static void on_pool(struct agent *a, struct up_region *r, int *fd)
{
	uint32_t waiting = UP_SWAP_WAITING;
	int ret = -ETIMEDOUT;

	if (r->inherited && r->fd < 0) {
		r->fd = fd[1];
		fd[1] = -1;
	}
	r->inherited = 0;
	if (atomic_compare_exchange_strong(&r->swap, &waiting, UP_SWAP_BUSY))
		ret = up_pool_enter(a, r, fd[0]);
	up_swap_end(r);
	if (ret) { /* too late, or no memory: the file is mapped there */
		r->refused = -ret;
		up_queue(a, r);
		up_flush(a);
	}
}

/* Only while its reader waits in mmap(), and so cannot touch it. */
static void on_checkpoints(struct agent *a, struct up_region *r, const struct up_file *f, int fd)
{
	uint32_t waiting = UP_SWAP_WAITING, done = 0;
	int ret = f->count ? -ETIMEDOUT : 0;

	if (f->count && atomic_compare_exchange_strong(&r->swap, &waiting, UP_SWAP_BUSY)) {
		ret = up_responder_spawn(a);
		while (!ret && done < f->count && done < UP_PAGES_MAX) {
			ret = up_hands_on(r) ? up_lay(a, r, f->page[done], fd) : -ECANCELED;
			up_hands_off();
			done += !ret;
		}
		if (ret && atomic_load(&r->laid)) { /* half of one may lie there */
			up_detach(a, r);
			done = 0;
		}
	}
	up_swap_end(r);
	if (f->count) /* a full socket loses it: the service then learns from its own clock */
		up_acknowledge(a, 0, r->id, done, ret);
	if (a->ring) {
		a->ring->laid += done;
		a->ring->failed += ret != 0;
		a->ring->overlays = a->overlays;
	}
	up_step(a, UP_STATE_IDLE);
}

static void note_settled(struct agent *a, const struct up_region *r, const struct up_file *f)
{
	uint64_t mark = up_file_mark(r->device, r->inode, r->size, r->mtime_ns), now = 0;

	if (f->settled)
		now = mark | (f->mode == UP_REFUSE ? UP_SETTLED_REFUSED : 0);
	for (int i = 0; i < UP_SETTLED; i++)
		if ((atomic_load(&up_job.settled[i]) & ~1ull) == mark) {
			atomic_store(&up_job.settled[i], now);
			return;
		}
	if (!now)
		return;
	atomic_store(&up_job.settled[a->settled_next], now);
	a->settled_next = (a->settled_next + 1) % UP_SETTLED;
}

/* Whether an earlier mapping of a file got the pool's memory; this one does. */
static int note_in_pool(struct agent *a, const struct up_region *r)
{
	uint64_t mark = up_file_mark(r->device, r->inode, r->size, r->mtime_ns);

	for (int i = 0; i < UP_SETTLED; i++)
		if (a->in_pool[i] == mark)
			return 1;
	a->in_pool[a->in_pool_next] = mark;
	a->in_pool_next = (a->in_pool_next + 1) % UP_SETTLED;
	return 0;
}

static void on_file(struct agent *a, const struct up_file *f, int *fd, int *lease)
{
	struct up_region *r = up_region_by_id(f->region);

	atomic_store(&up_job.service_silent, 0);
	if (r)
		atomic_store(&r->unleased, !f->leased);
	if (r && *lease >= 0)
		up_lease_take(a, r, lease);
	if (!r && (r = asked_by_id(f->region))) {
		if (r->fd < 0 && f->mode != UP_REFUSE) {
			r->fd = fd[1];
			fd[1] = -1;
		}
		up_prepare_late(a, r);
		return;
	}
	if (!r || r->mode)
		return;
	r->mode = f->mode + 1;
	up_note_waited(a, r, f->mode == UP_POOL && note_in_pool(a, r));
	note_settled(a, r, f);
	atomic_store(&up_job.brief[up_size_of(atomic_load(&r->length))], f->brief);
	if (f->mode == UP_POOL) {
		on_pool(a, r, fd);
		return;
	}
	if (r->inherited && fd[1] >= 0) { /* what was laid before the fork can be taken away by it */
		r->fd = fd[1];
		fd[1] = -1;
	}
	r->inherited = 0;
	if (f->mode == UP_CHECKPOINTS) {
		on_checkpoints(a, r, f, fd[0]);
		return;
	}
	up_swap_end(r);
	if (f->mode == UP_REFUSE)
		up_abandon(a, r);
}

static void on_command(struct agent *a, uint16_t type, const struct up_command *c)
{
	struct up_region *r = up_region_by_id(c->region);
	uint32_t done = 0;
	int error = 0;

	for (uint32_t i = 0; r && !error && type == UP_REARM && i < c->count && i < UP_PAGES_MAX; i++) {
		int ret = up_hands_on(r) && up_may_act(a, r) ? up_rearm(a, r, c->page[i]) : -ECANCELED;

		up_hands_off();
		if (!ret)
			done++;
		else
			error = ret;
	}
	if (a->ring) {
		a->ring->rearmed += done;
		a->ring->failed += error != 0;
		a->ring->overlays = a->overlays;
	}
	if (type == UP_DETACH && r)
		up_abandon(a, r);
	up_step(a, UP_STATE_IDLE);
	if (error || type == UP_DETACH)
		up_acknowledge(a, c->sequence, c->region, done, error);
}

void up_on_socket(struct agent *a)
{
	for (int n = 0; n < 64 && !a->hung_up; n++) {
		struct up_message m;
		struct iovec iov = { .iov_base = &m, .iov_len = sizeof(m) };
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(3 * sizeof(int))];
		} control = { 0 };
		struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1,
				      .msg_control = control.space,
				      .msg_controllen = sizeof(control.space) };
		int fd[3] = { -1, -1, -1 }, lease = -1;
		size_t count = 0;
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
			count = (control.header.cmsg_len - CMSG_LEN(0)) / sizeof(int);
			for (size_t i = 0; i < count && i < 3; i++)
				fd[i] = ((int *)CMSG_DATA(&control.header))[i];
		}
		/* All or none: where this process may not have so many, the others are as good as lost, too. */
		if (m.header.type == UP_FILE && m.file.leased && count && !(msg.msg_flags & MSG_CTRUNC)) {
			lease = fd[count - 1];
			fd[count - 1] = -1;
		}
		switch (m.header.type) {
		case UP_WELCOME:
			on_welcome(a, fd);
			break;
		case UP_FILE:
			on_file(a, &m.file, fd, &lease);
			break;
		case UP_REARM:
		case UP_DETACH:
			on_command(a, m.header.type, &m.command);
			break;
		case UP_BYE_OK:
			up_finish_bye(a);
			break;
		case UP_QUIT:
			atomic_store(&up_job.disabled, 1);
			a->quit = 1; /* what is managed is given back on the way out */
			break;
		default:
			a->hung_up = 1;
		}
		for (int i = 0; i < 3; i++)
			up_close(&fd[i]);
		up_close(&lease);
	}
}
