// SPDX-License-Identifier: Apache-2.0
/*
 * uffd_helper.c - the service's side of the event rings, and the checkpoint memfds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/helper.h"

/* ------------------------------------------------------------------ rings */

int up_ring_create(struct up_ring **out, int *fd)
{
	int err, memfd = memfd_create("uffdprefetch-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	void *p;

	if (memfd < 0)
		return -errno;
	/* Sealed: a client that shrinks it would kill the service with SIGBUS. Filled: where memory is
	 * not overcommitted, a first store into a hole may be one, too, and kill the job. */
	if (ftruncate(memfd, sizeof(struct up_ring)) ||
	    fallocate(memfd, 0, 0, sizeof(struct up_ring)) ||
	    fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		goto fail;
	p = mmap(NULL, sizeof(struct up_ring), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	if (p == MAP_FAILED)
		goto fail;
	*out = p;
	*fd = memfd;
	return 0;
fail:
	err = -errno;
	close(memfd);
	return err;
}

void up_ring_destroy(struct up_ring *ring)
{
	if (ring)
		munmap(ring, sizeof(*ring));
}

int up_ring_drain(struct up_ring *ring, void *out, int max)
{
	uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);
	uint64_t tail = ring->tail;
	struct up_event *event = out;
	int n = 0;

	/* head is the client's word: a value that cannot be is brought back to what can. */
	if (head - tail > UP_RING_EVENTS)
		tail = head - UP_RING_EVENTS;
	while (n < max && tail != head)
		event[n++] = ring->event[tail++ % UP_RING_EVENTS];
	__atomic_store_n(&ring->tail, tail, __ATOMIC_RELEASE);
	return n;
}

void up_ring_counts(const struct up_ring *ring, struct up_ring_counts *out)
{
	/* The job's side writes meanwhile. */
#define COUNT(name) (out->name = __atomic_load_n(&ring->name, __ATOMIC_RELAXED))
	COUNT(head);
	COUNT(tail);
	COUNT(dropped);
	COUNT(faults);
	COUNT(laid);
	COUNT(rearmed);
	COUNT(failed);
	COUNT(overlays);
	COUNT(state);
#undef COUNT
}

/* ------------------------------------------------------------------ checkpoint memfds */

int up_checkpoint_memfd(uint64_t size_bytes, int *rw, int *ro)
{
	char path[32];
	int err, memfd = memfd_create("uffdprefetch-checkpoints", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (memfd < 0)
		return -errno;
	if (ftruncate(memfd, (off_t)size_bytes) ||
	    fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		goto fail;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", memfd);
	*ro = open(path, O_RDONLY | O_CLOEXEC);
	if (*ro < 0)
		goto fail;
	*rw = memfd;
	return 0;
fail:
	err = -errno;
	close(memfd);
	return err;
}
