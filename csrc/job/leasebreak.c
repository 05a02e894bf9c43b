// SPDX-License-Identifier: Apache-2.0
/*
 * leasebreak.c - somebody waits for a file's lease, and the service does not give it back: the agent does.
 *
 * Who opens the file for writing waits in open(2) until the lease is given back (or, with O_NONBLOCK,
 * fails): after some ms where the service runs, which has all mappings of the file given back first; where
 * it stands still, until the kernel takes the lease away (fs.lease-break-time, 45 s). A lease is its
 * description's (fs/locks.c, generic_delete_lease), so whoever has a descriptor of that can give it back;
 * each agent of a process that maps the file has one. All of them look, each gives its own mappings back,
 * and then the lease, once the others have had the time to do so, and the service the time that it takes
 * where one of them stands still.
 */
#define _GNU_SOURCE
#include <fcntl.h>

#include "job/agent.h"

/* How often it is asked whether somebody waits. */
#define LOOK_NS (100 * NS_PER_MS)
/* What the service does about it has come by then, unless the machine is busy. Sooner or later is the same. */
#define GIVE_BACK_NS (200 * NS_PER_MS)
/* The service waits a second for agents (DETACH_NS, uffdprefetch/service/serve.py). */
#define LET_IN_NS (1050 * NS_PER_MS)

static void give_mappings_back(struct agent *a, const struct up_lease *l)
{
	for (uint32_t i = 0; i < atomic_load(&a->slots); i++) {
		struct up_region *r = &up_job.region[i];

		/* Copies stay, so what has them is as far back as it comes. */
		if (atomic_load(&r->state) == UP_LIVE && up_lease_is_of(l, r) &&
		    atomic_load(&r->pooled) != UP_POOLED_COPIES)
			up_abandon(a, r);
	}
	up_step(a, UP_STATE_IDLE);
}

/* Whether it stays. */
static int look(struct agent *a, struct up_lease *l, uint64_t now)
{
	long type = up_sys3(SYS_fcntl, l->fd, F_GETLEASE, 0);

	if (up_failed(type))
		return 0;
	if (type == F_RDLCK) {
		l->breaking_ns = 0;
		return 1;
	}
	if (!l->breaking_ns)
		l->breaking_ns = now;
	if (now - l->breaking_ns >= GIVE_BACK_NS)
		give_mappings_back(a, l);
	if (now - l->breaking_ns < LET_IN_NS)
		return 1;
	up_sys3(SYS_fcntl, l->fd, F_SETLEASE, F_UNLCK); /* fails where the service has done it */
	return 0;
}

void up_leases_look(struct agent *a)
{
	uint64_t now = up_now_ns();

	if (!a->leases || now < a->lease_at_ns)
		return;
	a->lease_at_ns = now + LOOK_NS;
	for (uint32_t i = a->leases; i-- > 0;)
		if (!look(a, &a->lease[i], now))
			up_lease_drop(a, &a->lease[i]);
}
