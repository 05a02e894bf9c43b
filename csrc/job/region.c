// SPDX-License-Identifier: Apache-2.0
/*
 * region.c - the agent's books of a region: what is still to be told of it, and its end.
 */
#include <sys/mman.h>

#include "job/agent.h"

struct up_region *up_region_by_id(uint32_t id)
{
	struct up_region *r = &up_job.region[id % UP_REGIONS];

	return atomic_load(&r->state) == UP_LIVE && r->id == id ? r : NULL;
}

void up_free_slot(struct up_region *r)
{
	atomic_store(&r->state, UP_FREE);
	atomic_fetch_sub(&up_job.live, 1);
}

void up_queue(struct agent *a, struct up_region *r)
{
	a->pending += !r->queued;
	r->queued = 1;
}

void up_unqueue(struct agent *a, struct up_region *r)
{
	a->pending -= r->queued;
	r->queued = 0;
}

void up_release(struct agent *a, struct up_region *r, uint32_t state)
{
	uint32_t laid;
	uintptr_t unused;

	if (!atomic_compare_exchange_strong(&r->state, &state, UP_LEAVING))
		return;
	laid = atomic_exchange(&r->laid, 0);
	unused = atomic_exchange(&r->replacement, 0);
	if (r->asked) { /* who asked does not wait any more: nothing is left to wake */
		up_request_answer(r->asked);
		r->asked = NULL;
	}
	a->overlays -= laid < a->overlays ? laid : a->overlays; /* a fork's were not counted */
	if (unused) /* who asked for it has gone on */
		up_sys2(SYS_munmap, unused, r->length);
	up_unqueue(a, r);
	up_close(&r->fd);
	up_close(&r->pool_fd);
	up_pool_release(r);
	up_swap_end(r);
	up_lease_leave(a, r);
	if (r->sent)
		up_queue(a, r);
	else
		up_free_slot(r);
}

void up_abandon(struct agent *a, struct up_region *r)
{
	uint32_t live = UP_LIVE, closing = UP_CLOSING;

	if (!atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING))
		return; /* a thread of the job has it: its request will come */
	atomic_fetch_add(&up_job.closings, 1); /* before its advice is looked at */
	up_detach(a, r);
	if (atomic_load(&r->pooled)) /* it must not be given back by address: it is served on */
		atomic_compare_exchange_strong(&r->state, &closing, UP_LIVE);
	else
		up_release(a, r, UP_CLOSING);
}
