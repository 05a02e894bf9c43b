// SPDX-License-Identifier: Apache-2.0
/*
 * uffd_helper.c - the service's side of the event rings, the checkpoint memfds, and the thread
 * that answers faults in the service where the user asks for that (--resolve service).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "helper.h"

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
	/* Others write meanwhile: the agent, and the thread below. */
#define COUNT(name) (out->name = __atomic_load_n(&ring->name, __ATOMIC_RELAXED))
	COUNT(head);
	COUNT(tail);
	COUNT(dropped);
	COUNT(faults);
	COUNT(laid);
	COUNT(taken);
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

/* ------------------------------------------------------------------ --resolve service */

#define RESOLVER_SLOTS 128
#define RESOLVER_REGIONS 64
#define BEAT_MS 50
#define TRIES 100

struct resolver_region {
	uint32_t id;
	uint64_t address, length, offset;
};

struct resolver_slot {
	int uffd;
	int deaf; /* poll(2) has only an error to tell: one that nobody initialized */
	struct up_ring *ring;
	struct resolver_region region[RESOLVER_REGIONS];
};

struct up_resolver {
	pthread_t thread;
	pthread_mutex_t lock; /* slot[] */
	int event_fd, wake_fd, stop;
	uint64_t page_bytes;
	struct resolver_slot slot[RESOLVER_SLOTS];
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static void resolver_post(struct up_resolver *v, struct resolver_slot *s, struct up_event *e,
			  uint64_t address)
{
	struct up_ring *ring = s->ring;
	uint64_t head = ring->head, one = 1;

	for (int i = 0; i < RESOLVER_REGIONS; i++) {
		struct resolver_region *r = &s->region[i];

		if (!r->id || address - r->address >= r->length)
			continue;
		e->region = r->id;
		e->page = (r->offset + (address - r->address)) / v->page_bytes;
		__atomic_fetch_add(&ring->faults, 1, __ATOMIC_RELAXED);
		if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) >= UP_RING_EVENTS) {
			__atomic_fetch_add(&ring->dropped, 1, __ATOMIC_RELAXED);
			return;
		}
		ring->event[head % UP_RING_EVENTS] = *e;
		__atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
		if (write(v->event_fd, &one, sizeof(one)) < 0)
			return; /* EAGAIN: the counter is full, so the reader is awake anyway */
		return;
	}
}

static void resolver_answer(struct up_resolver *v, struct resolver_slot *s)
{
	struct uffd_msg fault[16];
	ssize_t n = read(s->uffd, fault, sizeof(fault));

	for (ssize_t i = 0; i < n / (ssize_t)sizeof(fault[0]); i++) {
		uint64_t address = fault[i].arg.pagefault.address & ~(v->page_bytes - 1);
		struct uffdio_continue cont = { .range = { address, v->page_bytes } };
		struct up_event e = { .time_ns = now_ns(),
				      .tid = fault[i].arg.pagefault.feat.ptid };

		int ret, tries = 0;

		if (fault[i].event != UFFD_EVENT_PAGEFAULT)
			continue;
		/* EAGAIN: the process changes its mappings just now. To insist would let one that
		 * never ends with that keep all the others waiting; woken, its thread comes back. */
		do
			ret = ioctl(s->uffd, UFFDIO_CONTINUE, &cont);
		while (ret && errno == EAGAIN && ++tries < TRIES);
		if (ret) {
			struct uffdio_range range = { address, v->page_bytes };

			/* EEXIST, ENOENT, ESRCH are normal; for what is not, the agent's own
			 * take-away follows. Waking is right in every case. */
			ioctl(s->uffd, UFFDIO_WAKE, &range);
			if (tries == TRIES)
				continue;
		}
		e.handle_ns = (uint32_t)(now_ns() - e.time_ns);
		resolver_post(v, s, &e, address);
	}
}

static void *resolver_loop(void *arg)
{
	struct up_resolver *v = arg;
	struct pollfd p[RESOLVER_SLOTS + 1];

	while (!__atomic_load_n(&v->stop, __ATOMIC_ACQUIRE)) {
		uint64_t count;

		pthread_mutex_lock(&v->lock);
		for (int i = 0; i < RESOLVER_SLOTS; i++) {
			int fd = v->slot[i].deaf ? -1 : v->slot[i].uffd;

			p[i] = (struct pollfd){ fd, POLLIN, 0 };
			if (fd >= 0)
				__atomic_store_n(&v->slot[i].ring->beat_ns, now_ns(),
						 __ATOMIC_RELAXED);
		}
		pthread_mutex_unlock(&v->lock);
		p[RESOLVER_SLOTS] = (struct pollfd){ v->wake_fd, POLLIN, 0 };
		if (poll(p, RESOLVER_SLOTS + 1, BEAT_MS) <= 0)
			continue;
		if (p[RESOLVER_SLOTS].revents && read(v->wake_fd, &count, sizeof(count)) < 0)
			continue;
		pthread_mutex_lock(&v->lock);
		for (int i = 0; i < RESOLVER_SLOTS; i++) {
			if (p[i].fd < 0 || v->slot[i].uffd != p[i].fd)
				continue;
			if (p[i].revents & POLLIN)
				resolver_answer(v, &v->slot[i]);
			else if (p[i].revents) /* asked again: the number may be another's by now */
				v->slot[i].deaf = poll(&p[i], 1, 0) && !(p[i].revents & POLLIN);
		}
		pthread_mutex_unlock(&v->lock);
	}
	return NULL;
}

static void resolver_wake(struct up_resolver *v)
{
	uint64_t one = 1;

	if (write(v->wake_fd, &one, sizeof(one)) < 0)
		return; /* it is awake already */
}

int up_resolver_create(struct up_resolver **out, int event_fd)
{
	struct up_resolver *v = calloc(1, sizeof(*v));
	int err;

	if (!v)
		return -ENOMEM;
	v->event_fd = event_fd;
	v->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
	for (int i = 0; i < RESOLVER_SLOTS; i++)
		v->slot[i].uffd = -1;
	pthread_mutex_init(&v->lock, NULL);
	v->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	err = v->wake_fd < 0 ? errno : pthread_create(&v->thread, NULL, resolver_loop, v);
	if (err) {
		if (v->wake_fd >= 0)
			close(v->wake_fd);
		free(v);
		return -err;
	}
	*out = v;
	return 0;
}

void up_resolver_destroy(struct up_resolver *v)
{
	if (!v)
		return;
	__atomic_store_n(&v->stop, 1, __ATOMIC_RELEASE);
	resolver_wake(v);
	pthread_join(v->thread, NULL);
	for (int i = 0; i < RESOLVER_SLOTS; i++)
		if (v->slot[i].uffd >= 0)
			close(v->slot[i].uffd);
	close(v->wake_fd);
	pthread_mutex_destroy(&v->lock);
	free(v);
}

int up_resolver_add(struct up_resolver *v, int uffd, struct up_ring *ring)
{
	int slot = -ENOSPC, flags = fcntl(uffd, F_GETFL);

	/* A read that waits would hold the lock; and the kernel polls no such uffd. */
	if (flags < 0 || fcntl(uffd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
	pthread_mutex_lock(&v->lock);
	for (int i = 0; i < RESOLVER_SLOTS && slot < 0; i++)
		if (v->slot[i].uffd < 0)
			slot = i;
	if (slot >= 0) {
		memset(&v->slot[slot], 0, sizeof(v->slot[slot]));
		v->slot[slot].uffd = uffd;
		v->slot[slot].ring = ring;
		ring->beat_ns = now_ns();
	}
	pthread_mutex_unlock(&v->lock);
	resolver_wake(v);
	return slot;
}

void up_resolver_remove(struct up_resolver *v, int slot)
{
	pthread_mutex_lock(&v->lock);
	if (v->slot[slot].uffd >= 0)
		close(v->slot[slot].uffd);
	v->slot[slot].uffd = -1;
	pthread_mutex_unlock(&v->lock);
	resolver_wake(v);
}

int up_resolver_map(struct up_resolver *v, int slot, uint32_t region, uint64_t address,
		    uint64_t length, uint64_t offset)
{
	int ret = -ENOSPC;

	pthread_mutex_lock(&v->lock);
	for (int i = 0; i < RESOLVER_REGIONS; i++) {
		struct resolver_region *r = &v->slot[slot].region[i];

		if (r->id)
			continue;
		*r = (struct resolver_region){ region, address, length, offset };
		ret = 0;
		break;
	}
	pthread_mutex_unlock(&v->lock);
	return ret;
}

void up_resolver_unmap(struct up_resolver *v, int slot, uint32_t region)
{
	pthread_mutex_lock(&v->lock);
	for (int i = 0; i < RESOLVER_REGIONS; i++)
		if (v->slot[slot].region[i].id == region)
			v->slot[slot].region[i].id = 0;
	pthread_mutex_unlock(&v->lock);
}
