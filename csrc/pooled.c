// SPDX-License-Identifier: Apache-2.0
/*
 * pooled.c - the agent's part in the pool: the service's memory in place of a mapping, and the file
 * in its place again.
 *
 * The memory may hold nothing yet where it is mapped, and a touch there must never find a zero page.
 * So it is mapped only while nobody knows the address (in mmap() before it returns, in fork() before
 * the child's code runs), the range is registered before that ends, this process keeps a
 * description of its userfaultfd as long as it is mapped (the kernel fills holes with zeros when the
 * last one is closed), and no child inherits it.
 */
#include <errno.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "agent.h"

/* The service says every 100 ms that it is alive. Counted in looks of our own, so that a machine
 * that stood still as a whole is no silence. */
#define BEAT_LOOK_NS (250 * NS_PER_MS)
#define BEAT_MISSED_MAX 6

void up_swap_end(struct up_region *r)
{
	if (atomic_exchange(&r->swap, UP_SWAP_DONE) == UP_SWAP_DONE)
		return;
	up_futex_wake(&r->swap);
}

int up_pool_enter(struct agent *a, struct up_region *r, int memfd)
{
	struct uffdio_register reg = {
		.range = { .start = r->address, .len = r->length },
		.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR,
	};
	void *p;
	long ret;

	if (a->pool_uffd < 0 || memfd < 0 || r->fd < 0)
		return -EINVAL;
	if (!r->anchor) {
		p = up_mmap(NULL, up_job.page_bytes, PROT_READ, MAP_SHARED, r->fd, r->offset);
		if (up_failed((long)p))
			return (int)(long)p;
		atomic_store(&r->anchor, (uintptr_t)p);
	}
	up_step(a, UP_STATE_LAYING);
	atomic_store(&r->pooled, 1); /* before it is: a fork between the two must know */
	a->pooled++;
	/* Not readable until a touch of it is waited for: should somebody touch it all the same (a
	 * raw mlockall(MCL_FUTURE) reads whatever is mapped), a fault is better than a zero. */
	p = up_mmap((void *)(uintptr_t)r->address, r->length, PROT_NONE,
		    MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, memfd, r->offset);
	ret = up_failed((long)p) ? (long)p : 0;
	if (!ret)
		ret = up_sys3(SYS_madvise, r->address, r->length, MADV_DONTFORK);
	up_step(a, UP_STATE_LAYING);
	if (!ret)
		ret = up_sys3(SYS_ioctl, a->pool_uffd, UFFDIO_REGISTER, &reg);
	up_step(a, UP_STATE_LAYING);
	if (!ret)
		ret = up_sys3(SYS_mprotect, r->address, r->length, PROT_READ);
	if (ret)
		up_pool_detach(a, r);
	return (int)ret;
}

void up_pool_detach(struct agent *a, struct up_region *r)
{
	up_step(a, UP_STATE_DETACHING);
	if (up_map_file(a, r, r->address, r->length)) {
		int flags = (r->map_flags & (MAP_TYPE | MAP_NORESERVE)) | MAP_FIXED;

		/* Not even a mapping to spare. Where the file cannot be had at all, its reader must
		 * fail: the pool's holes would be zeros one day. */
		if (up_failed((long)up_mmap((void *)(uintptr_t)r->address, r->length, r->prot, flags,
					    r->fd, r->offset)))
			up_sys3(SYS_mprotect, r->address, r->length, PROT_NONE);
		up_wake_range(a, r->address, r->length);
	}
	up_step(a, UP_STATE_DETACHING);
	atomic_store(&r->pooled, 0);
	a->pooled--;
}

void up_pool_release(struct up_region *r)
{
	uintptr_t anchor = atomic_exchange(&r->anchor, 0);

	if (anchor)
		up_sys2(SYS_munmap, anchor, up_job.page_bytes);
}

void up_pool_check_beat(struct agent *a)
{
	uint64_t now = up_now_ns(), beat;

	if (!a->pooled || !a->ring || now < a->beat_at_ns)
		return;
	a->beat_at_ns = now + BEAT_LOOK_NS;
	beat = __atomic_load_n(&a->ring->beat_ns, __ATOMIC_RELAXED);
	if (beat != a->beat_ns) {
		a->beat_ns = beat;
		a->beat_missed = 0;
	} else if (++a->beat_missed >= BEAT_MISSED_MAX) {
		a->hung_up = 1; /* as if it had died: every mapping becomes the job's own */
	}
}
