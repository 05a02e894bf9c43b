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
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "agent.h"

/* The service says every 10 ms that it is alive (csrc/pool_faults.c, BEAT_MS). Counted in looks of our
 * own, so that a machine that stood still as a whole is no silence. A false alarm costs nothing but
 * a second read. */
#define BEAT_LOOK_NS (20 * NS_PER_MS)
#define BEAT_MISSED_MAX 2

void up_swap_end(struct up_region *r)
{
	if (atomic_exchange(&r->swap, UP_SWAP_DONE) == UP_SWAP_DONE)
		return;
	up_futex_wake(&r->swap);
}

/* The job maps a description that cannot be written. This one has no number in the job's table. */
static int reopen_to_write(int memfd)
{
	char path[48] = "/proc/thread-self/fd/", digit[12];
	int n = 0, at = 21;

	do
		digit[n++] = (char)('0' + memfd % 10);
	while (memfd /= 10);
	while (n)
		path[at++] = digit[--n];
	path[at] = 0;
	return (int)up_sys4(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
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
	r->pool_fd = reopen_to_write(memfd);
	if (r->pool_fd < 0)
		return r->pool_fd;
	if (!atomic_load(&r->anchor)) /* made when the mapping was taken up; a forked child has its parent's */
		return -EINVAL;
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
	if (!ret)
		ret = up_vma_at(a->maps_fd, r->address, &r->pool_mapped);
	if (ret)
		up_pool_detach(a, r);
	return (int)ret;
}

void up_pool_detach(struct agent *a, struct up_region *r)
{
	void *p;
	long ret;

	up_step(a, UP_STATE_DETACHING);
	if (atomic_exchange(&r->swallowed, 0))
		r->advice = MADV_RANDOM;
	p = up_map_anew(r);
	ret = (long)p;
	if (!up_failed(ret)) {
		ret = -ECANCELED;
		if (up_hands_on(r))
			ret = up_sys5(SYS_mremap, p, r->length, r->length,
				      MREMAP_MAYMOVE | MREMAP_FIXED, r->address);
		up_hands_off();
		if (up_failed(ret))
			up_sys2(SYS_munmap, p, r->length);
	}
	if (up_failed(ret)) {
		int flags = (r->map_flags & (MAP_TYPE | MAP_NORESERVE)) | MAP_FIXED;

		/* Not even a mapping to spare. Where the file cannot be had at all, its reader must
		 * fail: the pool's holes would be zeros one day. */
		if (up_hands_on(r)) {
			if (up_failed((long)up_mmap((void *)(uintptr_t)r->address, r->length,
						    r->prot, flags, r->fd, r->offset)))
				up_sys3(SYS_mprotect, r->address, r->length, PROT_NONE);
			up_hands_off();
		}
	}
	up_wake_range(a->pool_uffd, r->address, r->length);
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

int up_pool_is_silent(const struct agent *a)
{
	return a->pooled && a->beat_missed >= BEAT_MISSED_MAX;
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
		up_wake_pooled(a); /* whom it has read and not answered */
	}
}
