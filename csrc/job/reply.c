// SPDX-License-Identifier: Apache-2.0
/*
 * reply.c - what the agent does for the job's threads: it takes up what they map, and lets go of what they
 * take back (request.c asks).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "job/agent.h"
#include "common/status.h"

#define BYE_NS (20 * NS_PER_MS)
/* In mmap() the threads of a process wait for the service at most as long together as for WAITS_AT_ONCE services that
 * do not answer, 1 s; later for one part in WAITS_SHARE of the time. A wait counts as one step at least: so 200 mappings
 * are waited for at once, and 50 more each second. What is mapped meanwhile page tables tell of. A library that maps
 * thousands of shards takes 20 us for each without us (Arrow tables, one mapping a shard; docs/limits.md). Who maps a
 * file of the pool again and again (a loader that makes a new np.memmap for each batch) would read twice what of it the
 * page cache has not: such a wait counts as it was. */
#define WAITS_AT_ONCE 20
#define WAITS_SHARE 4

static uint32_t slot_of(const struct up_region *r)
{
	return (uint32_t)(r - up_job.region);
}

/* What is mapped there and what the descriptor is: the number was the mapping thread's, and another
 * thread may have let it name another file meanwhile (dup2). Asked by a page of the descriptor, because
 * stat(2) and the maps do not always count devices alike. */
static int is_what_is_mapped(struct agent *a, struct up_region *r)
{
	struct up_vma page;
	void *p = up_mmap(NULL, up_job.page_bytes, PROT_READ,
			  MAP_SHARED | (r->map_flags & MAP_NORESERVE), r->fd, r->offset);
	int ret;

	if (up_failed((long)p))
		return (int)(long)p;
	ret = up_vma_at(a->maps_fd, (uintptr_t)p, &page);
	if (!ret)
		ret = up_vma_at(a->maps_fd, r->address, &r->mapped);
	if (!ret && (page.inode != r->mapped.inode ||
		     page.device_major != r->mapped.device_major ||
		     page.device_minor != r->mapped.device_minor))
		ret = -ESTALE;
	if (!ret && up_region_intact(a, r) != 1)
		ret = -ESTALE;
	if (!ret && up_job.pool && !r->copies)
		up_pool_keep(r, (uintptr_t)p);
	else
		up_sys2(SYS_munmap, p, up_job.page_bytes);
	return ret;
}

/* The number was looked at once more after mmap(2): by then, too, it may have been another file's. */
static int is_what_was_asked(const struct up_region *r)
{
	struct stat st;
	long ret = up_cached_stat(r->fd, &st), status = up_sys3(SYS_fcntl, r->fd, F_GETFL, 0);

	if (up_failed(ret))
		return (int)ret;
	return !up_failed(status) && (status & O_ACCMODE) != O_WRONLY && !(status & O_PATH) &&
	       (uint64_t)st.st_dev == r->device && (uint64_t)st.st_ino == r->inode &&
	       (uint64_t)st.st_size == r->size ? 0 : -ESTALE;
}

static int take_descriptor(struct agent *a, struct up_region *r, int job_fd)
{
	long fd;
	int ret;

	if (a->pidfd < 0)
		a->pidfd = (int)up_sys2(SYS_pidfd_open, up_job.pid, 0);
	if (a->pidfd < 0)
		return a->pidfd;
	fd = up_sys3(SYS_pidfd_getfd, a->pidfd, job_fd, 0);
	if (up_failed(fd))
		return (int)fd;
	r->fd = (int)fd;
	ret = is_what_was_asked(r);
	if (!ret)
		ret = is_what_is_mapped(a, r);
	if (ret || r->settled) /* the description is the job's alone: its flock(2) ends with it */
		up_close(&r->fd);
	return ret;
}

void up_let_go(struct agent *a, struct up_region *r)
{
	if (atomic_exchange(&r->pooled, 0)) {
		a->pooled--;
		/* Who waited there when it was taken back. */
		up_wake_range(a->pool_uffd, r->address, r->length);
	}
	up_release(a, r, UP_LEFT);
}

int up_is_left_lying(struct agent *a)
{
	uint32_t events[UP_SOURCES];

	return up_wait(&a->left, 0, events) && events[UP_OVERLAYS_TELL];
}

/* Not before the kernel's event of what their new owners did has been read: it is theirs by the region's
 * state (respond.c, was_announced). */
void up_let_left_go(struct agent *a)
{
	if (atomic_exchange(&up_job.left, 0))
		a->left_at_ns = up_now_ns() + UP_LEFT_NS;
	if (!a->left_at_ns || up_now_ns() < a->left_at_ns || up_is_left_lying(a) ||
	    (atomic_load(&a->reading) && atomic_load(&up_job.responder_tid)))
		return;
	a->left_at_ns = 0;
	/* One that becomes LEFT only now has its time as well. */
	for (uint32_t i = 0; i < a->slots; i++)
		if (atomic_load(&up_job.region[i].state) == UP_LEFT && !atomic_load(&up_job.left))
			up_let_go(a, &up_job.region[i]);
}

static void count_waited(struct agent *a, uint64_t waited_ns, uint64_t now)
{
	if (a->waited_until_ns < now)
		a->waited_until_ns = now;
	a->waited_until_ns += waited_ns * WAITS_SHARE;
}

/* Whether this mapping, too, may be waited for. */
static int may_wait(struct agent *a, struct up_region *r)
{
	uint64_t most_ns = (uint64_t)WAITS_AT_ONCE * (uint64_t)up_job.patience * UP_WAIT_STEP_NS, now = up_now_ns();

	if (a->waited_until_ns > now + most_ns * WAITS_SHARE)
		return 0;
	r->waits_since_ns = now;
	count_waited(a, UP_WAIT_STEP_NS, now);
	return 1;
}

/* Who has not been answered in time has gone on. `is_in_pool`: an earlier mapping of its file is. */
void up_note_waited(struct agent *a, struct up_region *r, int is_in_pool)
{
	uint64_t most_ns = (uint64_t)up_job.patience * UP_WAIT_STEP_NS, now = up_now_ns(), waited_ns;

	if (!r->waits_since_ns)
		return;
	waited_ns = now - r->waits_since_ns;
	r->waits_since_ns = 0;
	if (waited_ns > most_ns)
		waited_ns = most_ns;
	if (waited_ns > UP_WAIT_STEP_NS)
		count_waited(a, waited_ns - UP_WAIT_STEP_NS, now);
	else if (is_in_pool) /* it was counted as one */
		a->waited_until_ns -= (UP_WAIT_STEP_NS - waited_ns) * WAITS_SHARE;
}

static int on_attach(struct agent *a, struct up_region *r, int job_fd)
{
	uint32_t opening = UP_OPENING;
	int ret;

	if (slot_of(r) >= a->slots)
		a->slots = slot_of(r) + 1;
	ret = take_descriptor(a, r, job_fd);
	if (ret)
		return ret;
	/* Of a service that is known to be silent nobody waits for an answer. */
	if (atomic_load(&r->swap) == UP_SWAP_WAITING && !atomic_load(&up_job.service_silent) &&
	    !atomic_load(&up_job.service_starts) && !may_wait(a, r)) {
		r->known = r->many = 1;
		up_swap_end(r);
	}
	up_queue(a, r);
	if (!atomic_compare_exchange_strong(&r->state, &opening, UP_LIVE))
		up_let_go(a, r); /* LEFT: who asked has gone on without it */
	return 0;
}

/* What a forked child inherits has no descriptor before the service sends it. A shared mapping can be
 * had from any of its pages by who asks (request.c, duplicate_file), a private one cannot. */
static int may_prepare(struct agent *a, struct up_region *r)
{
	if (r->fd >= 0 || !r->inherited || !atomic_load(&r->laid) || a->hung_up ||
	    (r->map_flags & MAP_TYPE) != MAP_PRIVATE)
		return 1;
	if (a->socket < 0)
		a->connect_at_ns = up_now_ns(); /* not FORK_QUIET_NS from now */
	return 0;
}

void up_prepare_late(struct agent *a, struct up_region *r)
{
	struct up_request *q = r->asked;

	r->asked = NULL;
	q->result = 0;
	up_prepare_replacement(a, r);
	if (up_request_answer(q))
		up_futex_wake(&q->state);
}

static void on_request(struct agent *a, struct up_request *q)
{
	struct up_region *r = &up_job.region[q->region % UP_REGIONS];
	uint32_t op = q->op, closing = UP_CLOSING;

	q->result = 0;
	if ((op == UP_REQ_DETACH || op == UP_REQ_FORGET || op == UP_REQ_SETTLE) &&
	    (atomic_load(&r->id) != q->region || atomic_load(&r->state) != UP_CLOSING))
		op = 0; /* another thread has waited long enough, and it is let go of */
	switch (op) {
	case UP_REQ_ATTACH:
		q->result = on_attach(a, r, q->job_fd);
		break;
	case UP_REQ_DETACH:
	case UP_REQ_SETTLE:
		/* The pool's memory is put back here; else the asker does what is done by address, and
		 * then lets go of the region by UP_REQ_FORGET. */
		if (atomic_load(&r->pooled)) {
			if (up_may_act(a, r))
				up_pool_detach(a, r, op == UP_REQ_SETTLE);
			q->result = atomic_load(&r->pooled) ? -EBUSY : UP_RELEASED;
			if (q->result == UP_RELEASED)
				up_release(a, r, UP_CLOSING);
			else /* it stays as it is, and is served */
				atomic_compare_exchange_strong(&r->state, &closing, UP_LIVE);
		} else if (!may_prepare(a, r)) {
			r->asked = q; /* up_prepare_late() */
			if (!r->sent)
				up_queue(a, r);
			return;
		} else {
			up_prepare_replacement(a, r);
		}
		break;
	case UP_REQ_FORGET:
		if (q->awaited)
			up_last_look(a, r, q);
		up_unlisten(a, r);
		up_release(a, r, UP_CLOSING);
		break;
	case UP_REQ_QUIT:
		a->quit = 1;
		for (uint32_t i = 0; i < a->slots; i++)
			up_abandon(a, &up_job.region[i]);
		break;
	case UP_REQ_STATE:
		up_note_statement(a, &q->statement);
		break;
	case UP_REQ_BYE:
		if (a->welcomed && !a->bye && !up_say_bye(a)) {
			a->bye = q;
			a->bye_at_ns = up_now_ns() + BYE_NS;
			return;
		}
		break;
	}
	if (!q->awaited)
		atomic_store(&q->state, UP_REQ_FREE);
	else if (up_request_answer(q))
		up_futex_wake(&q->state);
}

void up_on_bell(struct agent *a)
{
	up_take_bell(a);
	atomic_store(&up_job.silent, 0);
	up_grant_looks(a);
	for (int i = 0; i < UP_REQUESTS; i++)
		if (up_request_take(&up_job.request[i]))
			on_request(a, &up_job.request[i]);
	up_let_left_go(a);
	up_flush(a);
	up_step(a, UP_STATE_IDLE);
}

void up_finish_bye(struct agent *a)
{
	struct up_request *q = a->bye;

	a->bye = NULL;
	if (q && up_request_answer(q))
		up_futex_wake(&q->state);
}
