// SPDX-License-Identifier: Apache-2.0
/*
 * checkpoint.c - the agent's hands on the mapping: checkpoints laid over the file, touched, armed
 * again, taken away; and the whole given back.
 *
 * At every instant, between any two calls, a page of a managed mapping shows the file's bytes: a
 * checkpoint page was written whole before it was announced, and one mmap(MAP_FIXED) is the step
 * from one to the other. So the agent may die anywhere here.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "agent.h"

/* --resolve service only: how stale its heartbeat may be before the agent answers itself. */
#define BEAT_STALE_NS (500 * NS_PER_MS)
#define FAULT_BATCH 16

static struct up_region *region_at(struct agent *a, uintptr_t address)
{
	for (uint32_t i = 0; i < a->slots; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || state == UP_CLOSING) && address - r->address < r->length)
			return r;
	}
	return NULL;
}

/* 0 and the address of a page of the file inside the region, or -ERANGE. */
static int page_address(const struct up_region *r, uint64_t page, uintptr_t *address)
{
	uint64_t at = page * up_job.page_bytes;

	if (page >= r->size / up_job.page_bytes || at < r->offset ||
	    at + up_job.page_bytes > r->offset + r->length)
		return -ERANGE;
	*address = r->address + (uintptr_t)(at - r->offset);
	return 0;
}

void up_wake_range(struct agent *a, uintptr_t address, size_t length)
{
	struct uffdio_range range = { .start = address, .len = length };

	if (a->uffd >= 0)
		up_sys3(SYS_ioctl, a->uffd, UFFDIO_WAKE, &range);
	if (a->pool_uffd >= 0)
		up_sys3(SYS_ioctl, a->pool_uffd, UFFDIO_WAKE, &range);
}

/*
 * Map the file itself over [address, +length): one step for anybody who reads there. Made elsewhere
 * and moved, because a network file system may refuse to map at this moment (Lustre and NFS ask
 * their servers), and by then MAP_FIXED has taken away what was there: a hole in the job's memory.
 */
int up_map_file(struct agent *a, struct up_region *r, uintptr_t address, size_t length)
{
	int flags = r->map_flags & (MAP_TYPE | MAP_NORESERVE);
	uint64_t offset = r->offset + (address - r->address);
	void *p = up_mmap(NULL, length, r->prot, flags, r->fd, offset);
	int in_place = (long)p == -ENOMEM; /* RLIMIT_AS has no room for two */
	long ret;

	if (in_place)
		p = up_mmap((void *)address, length, r->prot, flags | MAP_FIXED, r->fd, offset);
	if (up_failed((long)p))
		return (int)(long)p;
	if (r->advice != MADV_NORMAL)
		up_sys3(SYS_madvise, p, length, r->advice);
	ret = in_place ? 0 : up_sys5(
		SYS_mremap, p, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address);
	if (up_failed(ret)) {
		up_sys2(SYS_munmap, p, length);
		return (int)ret;
	}
	/* A thread that waits for the checkpoint retries and finds the file. */
	up_wake_range(a, address, length);
	return 0;
}

int up_lay(struct agent *a, struct up_region *r, uint64_t page)
{
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MINOR };
	uintptr_t address;
	long ret = page_address(r, page, &address);
	void *p;

	if (ret)
		return (int)ret;
	if (r->writable || r->checkpoint_fd < 0 || a->uffd < 0)
		return -EINVAL;
	if (a->overlays >= a->overlays_max)
		return -ENOSPC;
	up_step(a, UP_STATE_LAYING);
	r->laid_once = 1; /* before it is: a fork between the two must know */
	p = up_mmap((void *)address, up_job.page_bytes, r->prot, MAP_PRIVATE | MAP_FIXED,
		    r->checkpoint_fd, page * up_job.page_bytes);
	if (up_failed((long)p)) {
		up_map_file(a, r, address, up_job.page_bytes); /* what was there is gone */
		return (int)(long)p;
	}
	up_step(a, UP_STATE_LAYING);
	reg.range.start = address;
	reg.range.len = up_job.page_bytes;
	ret = up_sys3(SYS_ioctl, a->uffd, UFFDIO_REGISTER, &reg);
	if (up_failed(ret)) {
		up_map_file(a, r, address, up_job.page_bytes);
		return (int)ret;
	}
	up_step(a, UP_STATE_LAYING);
	a->overlays++;
	r->overlays++;
	return 0;
}

int up_take(struct agent *a, struct up_region *r, uint64_t page)
{
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	up_step(a, UP_STATE_TAKING);
	ret = up_map_file(a, r, address, up_job.page_bytes);
	up_step(a, UP_STATE_TAKING);
	if (!ret && r->overlays) {
		r->overlays--;
		a->overlays--;
	}
	return ret;
}

/* The page leaves the page table; the next touch of it is an event again. */
int up_rearm(struct agent *a, struct up_region *r, uint64_t page)
{
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	up_step(a, UP_STATE_REARMING);
	return (int)up_sys3(SYS_madvise, address, up_job.page_bytes, MADV_DONTNEED);
}

/* Page-table sensor: forget that 64 KiB were mapped, so that the next epoch shows there. */
int up_drop(struct up_region *r, uint64_t page)
{
	size_t bytes = 65536 > up_job.page_bytes ? 65536 : up_job.page_bytes;
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		return -EINVAL;
	if (bytes > r->address + r->length - address)
		bytes = r->address + r->length - address;
	return (int)up_sys3(SYS_madvise, address, bytes, MADV_DONTNEED);
}

/* A forked child that the service has not answered yet has no descriptor of the file. But
 * mremap(2) of no bytes duplicates a shared mapping, from any page of it that is no checkpoint. */
static void map_duplicate(struct agent *a, struct up_region *r)
{
	uintptr_t start = r->address, end = r->address + r->length;
	struct uffdio_range page = { .len = up_job.page_bytes };
	void *copy;

	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE || a->uffd < 0)
		return;
	/* A file's mapping cannot be registered, hence not be released either. */
	for (page.start = start; start < end; page.start = start += up_job.page_bytes)
		if (up_sys3(SYS_ioctl, a->uffd, UFFDIO_UNREGISTER, &page) == -EINVAL)
			break;
	if (start >= end)
		return;
	copy = (void *)up_sys4(SYS_mremap, start, 0, end - start, MREMAP_MAYMOVE);
	if (up_failed((long)copy))
		return;
	if (up_failed(up_sys5(SYS_mremap, copy, end - start, end - start,
			      MREMAP_MAYMOVE | MREMAP_FIXED, start)))
		up_sys2(SYS_munmap, copy, end - start);
}

/* All of it in one piece again: where mappings have a close operation (FUSE, Lustre), what was taken
 * away does not merge with its neighbours, and a process has a limited number of mappings. */
int up_renew(struct agent *a, struct up_region *r)
{
	int ret;

	up_step(a, UP_STATE_TAKING);
	ret = up_map_file(a, r, r->address, r->length);
	up_step(a, UP_STATE_TAKING);
	if (ret)
		return ret;
	a->overlays -= r->overlays;
	r->overlays = 0;
	return 0;
}

/* The whole region becomes what the job asked for: its file, with its own advice. */
void up_detach(struct agent *a, struct up_region *r)
{
	if (atomic_load(&r->swallowed)) {
		r->advice = MADV_RANDOM;
		atomic_store(&r->swallowed, 0);
		up_sys3(SYS_madvise, r->address, r->length, MADV_RANDOM);
	}
	if (atomic_load(&r->pooled)) {
		up_pool_detach(a, r);
		return;
	}
	if (!r->laid_once)
		return;
	up_step(a, UP_STATE_DETACHING);
	if (r->fd >= 0)
		up_map_file(a, r, r->address, r->length);
	else
		map_duplicate(a, r);
	up_step(a, UP_STATE_DETACHING);
	a->overlays -= r->overlays;
	r->overlays = 0;
}


/* ------------------------------------------------------------------ faults */

static void post(struct agent *a, const struct up_event *e)
{
	struct up_ring *ring = a->ring;
	uint64_t head, one = 1;

	if (!ring)
		return;
	head = ring->head;
	ring->faults++;
	if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) >= UP_RING_EVENTS) {
		ring->dropped++;
		return;
	}
	ring->event[head % UP_RING_EVENTS] = *e;
	__atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
	up_sys3(SYS_write, a->event_fd, &one, sizeof(one));
}

static void resolve(struct agent *a, const struct uffd_msg *fault)
{
	uintptr_t address = (uintptr_t)fault->arg.pagefault.address & ~(up_job.page_bytes - 1);
	struct uffdio_continue cont = { .range = { address, up_job.page_bytes } };
	struct up_event e = { .time_ns = up_now_ns(), .tid = fault->arg.pagefault.feat.ptid };
	struct up_region *r;
	long ret;

	r = region_at(a, address);
	if (r && atomic_load(&r->pooled)) {
		/* The mapping that was touched is gone, and the pool is there now. The kernel would
		 * continue it for this userfaultfd, too, whether its bytes are there or not. */
		up_wake_range(a, address, up_job.page_bytes);
		return;
	}
	up_step(a, UP_STATE_RESOLVING);
	do
		ret = up_sys3(SYS_ioctl, a->uffd, UFFDIO_CONTINUE, &cont);
	while (ret == -EAGAIN);
	e.handle_ns = (uint32_t)(up_now_ns() - e.time_ns);
	/* EEXIST: somebody else's touch mapped it. Anything else: the page is no longer ours to
	 * continue (ENOENT), or its memfd page is not there (EFAULT, against the rule that a page
	 * is written before it is announced): the file itself goes there. */
	if (up_failed(ret) && ret != -EEXIST && ret != -ENOENT && r)
		up_map_file(a, r, address, up_job.page_bytes);
	if (up_failed(ret))
		up_wake_range(a, address, up_job.page_bytes);
	up_step(a, UP_STATE_IDLE);
	if (!r)
		return;
	e.region = r->id;
	e.page = (r->offset + (address - r->address)) / up_job.page_bytes;
	post(a, &e);
}

void up_on_faults(struct agent *a)
{
	struct uffd_msg fault[FAULT_BATCH];
	long ret = up_sys3(SYS_read, a->uffd, fault, sizeof(fault));

	for (long i = 0; !up_failed(ret) && i < ret / (long)sizeof(fault[0]); i++)
		if (fault[i].event == UFFD_EVENT_PAGEFAULT)
			resolve(a, &fault[i]);
}

/* --resolve service: when its heartbeat stops, this thread takes the faults back. Messages that
 * the service has read and not answered come again, because waking makes the threads retry. */
void up_check_beat(struct agent *a)
{
	if (a->own_faults || !a->ring ||
	    up_now_ns() - __atomic_load_n(&a->ring->beat_ns, __ATOMIC_RELAXED) < BEAT_STALE_NS)
		return;
	a->own_faults = 1;
	for (uint32_t i = 0; i < a->slots; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) == UP_LIVE)
			up_wake_range(a, r->address, r->length);
	}
}
