// SPDX-License-Identifier: Apache-2.0
/*
 * lease.c - descriptors of the service's read leases, one a file that is mapped here (leasebreak.c: what for).
 */
#include "job/agent.h"

int up_lease_is_of(const struct up_lease *l, const struct up_region *r)
{
	return l->device == r->device && l->inode == r->inode;
}

void up_lease_drop(struct agent *a, struct up_lease *l)
{
	up_close(&l->fd);
	*l = a->lease[--a->leases];
}

void up_lease_take(struct agent *a, const struct up_region *r, int *fd)
{
	uint32_t i = 0;

	while (i < a->leases && !up_lease_is_of(&a->lease[i], r))
		i++;
	if (i == UP_LEASES) /* then the kernel bounds how long a writer waits */
		return;
	if (i == a->leases)
		a->leases++;
	else
		up_close(&a->lease[i].fd); /* of a description that the service has closed since */
	a->lease[i] = (struct up_lease){ .device = r->device, .inode = r->inode, .fd = *fd };
	*fd = -1;
}

static int is_mapped(const struct agent *a, const struct up_lease *l)
{
	for (uint32_t i = 0; i < atomic_load(&a->slots); i++) {
		const struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if (state != UP_FREE && state != UP_OPENING && state != UP_LEAVING && up_lease_is_of(l, r))
			return 1;
	}
	return 0;
}

void up_lease_leave(struct agent *a, const struct up_region *r)
{
	for (uint32_t i = 0; i < a->leases; i++)
		/* one that somebody waits for is given back first */
		if (up_lease_is_of(&a->lease[i], r) && !a->lease[i].breaking_ns && !is_mapped(a, &a->lease[i])) {
			up_lease_drop(a, &a->lease[i]);
			return;
		}
}

void up_leases_close(struct agent *a)
{
	while (a->leases)
		up_lease_drop(a, &a->lease[0]);
}
