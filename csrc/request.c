// SPDX-License-Identifier: Apache-2.0
/*
 * request.c - the job's threads ask the agent, and take regions back from it.
 *
 * The job waits for the agent, which answers in microseconds or is seen to be gone; the agent
 * never waits for the job.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/mman.h>
#include <time.h>

#include "preload.h"

/* A child that no atfork handler saw (vfork, clone, _Fork): the agent is not there. */
int up_in_own_process(void)
{
#ifdef UP_AGENT_PTHREAD
	/* A sanitizer's report maps files. In the agent's thread it must not ask the agent. */
	if (up_sys0(SYS_gettid) == atomic_load(&up_job.agent_tid))
		return 0;
#endif
	return up_sys0(SYS_getpid) == up_job.pid;
}

/* Post, ring, wait: the agent's result, or -ESRCH when there is no agent any more. */
int up_ask(uint32_t op, uint32_t slot, int job_fd)
{
	struct timespec ts = { .tv_nsec = 20 * 1000 * 1000 };
	struct up_request *q = NULL;
	int result = -ESRCH, waits = 0;

	while (!q) {
		for (int i = 0; i < UP_REQUESTS && !q; i++) {
			uint32_t is_free = UP_REQ_FREE;

			if (atomic_compare_exchange_strong(&up_job.request[i].state, &is_free,
							   UP_REQ_CLAIMED))
				q = &up_job.request[i];
		}
		if (!q)
			up_sys0(SYS_sched_yield);
	}
	q->op = op;
	q->slot = slot;
	q->job_fd = job_fd;
	atomic_store(&q->state, UP_REQ_POSTED);
	if (up_agent_alive())
		up_agent_ring_bell();
	while (atomic_load(&q->state) == UP_REQ_POSTED && up_agent_alive()) {
		/* The agent may be waiting for a metadata server: exit(3) does not wait with it. The
		 * slot stays the agent's. */
		if (op == UP_REQ_BYE && waits++ == 5)
			return -ETIMEDOUT;
		up_sys4(SYS_futex, &q->state, FUTEX_WAIT_PRIVATE, UP_REQ_POSTED, &ts);
	}
	if (atomic_load(&q->state) == UP_REQ_DONE)
		result = q->result;
	atomic_store(&q->state, UP_REQ_FREE);
	return result;
}

int up_agent_ready(void)
{
	int none = 0;

	if (atomic_load(&up_job.disabled))
		return 0;
	if (atomic_compare_exchange_strong(&up_job.agent_start, &none, 1)) {
		if (atomic_load(&up_job.disabled) || up_agent_spawn())
			atomic_store(&up_job.disabled, 1);
		atomic_store(&up_job.agent_start, 2);
	}
	while (atomic_load(&up_job.agent_start) == 1)
		up_sys0(SYS_sched_yield);
	return up_agent_alive();
}

void up_forget_slot(struct up_region *r)
{
	atomic_store(&r->state, UP_FREE);
	atomic_fetch_sub(&up_job.live, 1);
}

int up_await_swap(struct up_region *r, int *looks)
{
	struct timespec ts = { .tv_nsec = 20 * 1000 * 1000 };
	uint32_t state;

	while ((state = atomic_load(&r->swap)) != UP_SWAP_DONE) {
		uint32_t waiting = UP_SWAP_WAITING;

		if (!up_agent_alive() && atomic_load(&r->swap) != UP_SWAP_DONE)
			return -ESRCH;
		if (*looks <= 0 &&
		    atomic_compare_exchange_strong(&r->swap, &waiting, UP_SWAP_NONE))
			return 0;
		up_sys4(SYS_futex, &r->swap, FUTEX_WAIT_PRIVATE, state, &ts);
		--*looks;
	}
	return 0;
}

void up_map_from_anchor(struct up_region *r)
{
	uintptr_t anchor = atomic_load(&r->anchor);

	if (anchor)
		up_sys5(SYS_mremap, anchor, 0, r->length, MREMAP_MAYMOVE | MREMAP_FIXED,
			r->address);
}

int up_close_region(struct up_region *r, uint32_t op, uintptr_t address, size_t length)
{
	uint32_t live = UP_LIVE;

	if (!atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING)) {
		while (atomic_load(&r->state) == UP_CLOSING &&
		       (up_agent_alive() || atomic_load(&r->pooled)))
			up_sys0(SYS_sched_yield);
		return 0;
	}
	/* Only now does it stand still. If just a part of it goes (or the slot is another mapping's
	 * meanwhile), the rest stays a plain mapping. */
	if (op == UP_REQ_FORGET &&
	    (atomic_load(&r->pooled) || /* who touches it just now must not wait for ever */
	     address > r->address || address + length < r->address + r->map_length))
		op = UP_REQ_DETACH;
	/* A dead agent has laid what it has laid: those pages hold the file's bytes. Not so the pool:
	 * the service goes on serving it, but what the job is about to do is meant for the file. Who
	 * waits there is woken when the service has read what it wanted. */
	if (up_ask(op, (uint32_t)(r - up_job.region), -1) == -ESRCH) {
		if (atomic_load(&r->pooled))
			up_map_from_anchor(r);
		atomic_store(&r->pooled, 0);
		up_forget_slot(r);
	}
	return 1;
}

int up_overlaps(const struct up_region *r, uintptr_t address, size_t length)
{
	return address < r->address + r->map_length && r->address < address + length;
}

/* Before the kernel changes [address, +length): what is managed there becomes plain. */
void up_give_back(uintptr_t address, size_t length, uint32_t op)
{
	if (!atomic_load(&up_job.live) || !length || !up_in_own_process())
		return;
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || state == UP_CLOSING) && up_overlaps(r, address, length))
			up_close_region(r, op, address, length);
	}
}

/* End the agent before the job changes who it is: its thread would keep the old identity, and a
 * new user namespace is refused to a process with two threads. */
void up_end_agent(void)
{
	int tid;

	if (!up_in_own_process()) /* a vfork child's change of itself is not ours */
		return;
	atomic_store(&up_job.disabled, 1);
	while (atomic_load(&up_job.agent_start) == 1) /* another thread is starting it */
		up_sys0(SYS_sched_yield);
	tid = atomic_load(&up_job.agent_tid);
	if (!tid)
		return;
	up_ask(UP_REQ_QUIT, 0, -1);
	while (up_agent_alive())
		up_sys0(SYS_sched_yield);
	while (up_sys3(SYS_tgkill, up_job.pid, tid, 0) == 0)
		up_sys0(SYS_sched_yield);
}
