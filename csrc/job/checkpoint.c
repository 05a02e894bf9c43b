// SPDX-License-Identifier: Apache-2.0
/*
 * checkpoint.c - the agent's hands on the mapping: checkpoints laid over the file, armed again; and the
 * file in their place.
 *
 * A checkpoint page was written whole with the file's bytes before it came here, is never reused, and
 * is rewritten with the present bytes of the same file page only. So at every instant, between any
 * two calls, a managed mapping shows the file's bytes, and the agent may die anywhere here.
 *
 * What is done by address: laying, while mmap(2) has not returned and nobody knows the address;
 * MADV_PAGEOUT, which changes no byte of anybody's; and putting the file back, by the thread of the
 * job that is about to change that mapping itself. Two acts are the agent's own: putting the file back
 * when the service has gone or the file has changed, and arming a page of the pool (MADV_DONTNEED). It
 * asks the kernel before each page, or each part of a mapping of the pool, what lies there;
 * docs/safety.md says what that leaves open.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "job/agent.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

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

/* Only between mmap(2) and its return to the job. */
int up_lay(struct agent *a, struct up_region *r, uint64_t page, int checkpoint_fd)
{
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MINOR };
	uint32_t laid = atomic_load(&r->laid);
	int uffd = atomic_load(&a->uffd);
	uintptr_t address;
	long ret = page_address(r, page, &address);
	void *p;

	if (ret)
		return (int)ret;
	if (r->writable || r->copies || checkpoint_fd < 0 || uffd < 0)
		return -EINVAL;
	if (a->overlays >= a->overlays_max || laid >= UP_PAGES_MAX)
		return -ENOSPC;
	up_step(a, UP_STATE_LAYING);
	r->laid_page[laid] = page;
	atomic_store(&r->laid, laid + 1); /* before it is: a fork between the two must know */
	p = up_mmap((void *)address, up_job.page_bytes, r->prot, MAP_PRIVATE | MAP_FIXED,
		    checkpoint_fd, page * up_job.page_bytes);
	if (up_failed((long)p))
		return (int)(long)p; /* what was there may be gone: the caller puts the file back */
	up_step(a, UP_STATE_LAYING);
	reg.range.start = address;
	reg.range.len = up_job.page_bytes;
	ret = up_sys3(SYS_ioctl, uffd, UFFDIO_REGISTER, &reg);
	up_step(a, UP_STATE_LAYING);
	a->overlays++;
	return up_failed(ret) ? (int)ret : 0;
}

/*
 * The page leaves the page table; the next touch of it is an event again. A checkpoint by
 * MADV_PAGEOUT: where another process maps the page, too, that does nothing, and progress is seen in
 * the page tables alone. A page of the pool by MADV_DONTNEED, which is why the kernel is asked what
 * lies there.
 */
int up_rearm(struct agent *a, struct up_region *r, uint64_t page)
{
	int pooled = atomic_load(&r->pooled);
	struct up_copies copies;
	uintptr_t address;
	int ret = page_address(r, page, &address);

	if (ret)
		return ret;
	if (pooled == UP_POOLED_COPIES)
		return -ENOENT;
	/* What was written past us stays, and tells nothing of its reader. */
	if (pooled && (r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		ret = up_next_copies(a->pagemap_fd, address, address + up_job.page_bytes, &copies);
	if (ret)
		return ret < 0 ? ret : 0;
	for (uint32_t i = 0; !pooled; i++) {
		if (i >= atomic_load(&r->laid))
			return -ENOENT;
		if (r->laid_page[i] == page)
			break;
	}
	up_step(a, UP_STATE_REARMING);
	return (int)up_sys3(SYS_madvise, address, up_job.page_bytes,
			    pooled ? MADV_DONTNEED : MADV_PAGEOUT);
}

static void hands_off(struct agent *a)
{
	up_hands_off();
	atomic_store(&a->acting, 0);
}

/* Hands on a region's checkpoints: not once a bypass has been found, and not while the responder reads
 * what tells of one. Who unmaps a registered page waits in the kernel until that has been read, which
 * waits for the hands: so what they do is over before the job can map anything else there. */
static int hands_on(struct agent *a, struct up_region *r)
{
	uint64_t until = up_now_ns() + UP_TAKE_OVER_NS;
	int late = 0;

	atomic_store(&a->acting, 1);
	while (up_hands_on(r) && !atomic_load(&up_job.bypassed)) {
		if (late || !atomic_load(&a->reading) || !atomic_load(&up_job.responder_tid))
			return 1;
		hands_off(a);
		late = up_now_ns() > until;
		if (late) /* the responder is stopped: what it would have read is read here */
			up_respond(a);
		else
			up_sys0(SYS_sched_yield);
		atomic_store(&a->acting, 1);
	}
	hands_off(a);
	return 0;
}

/* In MINOR mode the kernel wakes nobody here (fs/userfaultfd.c, userfaultfd_unregister): whose touch a
 * thread of ours has read that died with it would wait for ever. */
static void unlisten_page(int uffd, uintptr_t address)
{
	struct uffdio_range range = { .start = address, .len = up_job.page_bytes };

	up_sys3(SYS_ioctl, uffd, UFFDIO_UNREGISTER, &range);
	up_wake_range(uffd, address, up_job.page_bytes);
}

void up_unlisten(struct agent *a, struct up_region *r)
{
	uint32_t laid = atomic_load(&r->laid);
	int uffd = atomic_load(&a->uffd);

	/* Kernels before 6.17 would take away another userfaultfd's registration: libfabric and others
	 * have their own. */
	if (!laid || uffd < 0 || !up_may_act(a, r) || !hands_on(a, r))
		return;
	for (uint32_t i = 0; i < laid; i++) {
		uintptr_t address;

		if (!page_address(r, r->laid_page[i], &address))
			unlisten_page(uffd, address);
	}
	hands_off(a);
}

/* Elsewhere, and moved into place later: a network file system may refuse to map at this moment (Lustre
 * and NFS ask their servers), and MAP_FIXED would by then have taken away what was there. */
void *up_map_anew(struct up_region *r)
{
	int flags = r->map_flags & (MAP_TYPE | MAP_NORESERVE);
	void *p = up_mmap(NULL, r->length, r->prot, flags, r->fd, r->offset);

	if (!up_failed((long)p) && r->advice != MADV_NORMAL)
		up_sys3(SYS_madvise, p, r->length, r->advice);
	return p;
}

/* A page of a mapping of the file elsewhere to its place. What it leaves stays mapped (Linux 5.13 for a file's):
 * another thread of the job could be given a hole there, and the mapping is unmapped as a whole. */
static int move_page(uintptr_t from, uintptr_t address)
{
	int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;

	return up_failed(up_sys5(SYS_mremap, from, up_job.page_bytes, up_job.page_bytes, flags,
				 address))
		       ? -1
		       : 0;
}

uint32_t up_replace_checkpoints(struct up_region *r, uintptr_t p)
{
	uint32_t laid = atomic_load(&r->laid), failed = 0;
	uintptr_t address;

	for (uint32_t i = 0; i < laid; i++)
		if (page_address(r, r->laid_page[i], &address) ||
		    move_page(p + (address - r->address), address))
			failed++;
	up_sys2(SYS_munmap, p, r->length);
	return failed;
}

/* Whether a checkpoint still lies where it was laid: a page of another file than the mapping's, at its own
 * place in it. Or the file's own page: a fork between the two steps of up_lay(). */
static int checkpoint_intact(const struct agent *a, const struct up_region *r, uint32_t number)
{
	struct up_vma vma;
	uintptr_t address;

	if (page_address(r, r->laid_page[number], &address) || up_vma_at(a->maps_fd, address, &vma) ||
	    vma.offset + (address - vma.start) != r->laid_page[number] * up_job.page_bytes)
		return 0;
	return up_vma_alike(&vma, &r->mapped) ||
	       (vma.inode && !vma.shared && vma.inode != r->mapped.inode &&
		vma.readable == r->mapped.readable && vma.writable == r->mapped.writable &&
		vma.executable == r->mapped.executable);
}

static int checkpoints_intact(const struct agent *a, const struct up_region *r)
{
	for (uint32_t i = 0; i < atomic_load(&r->laid); i++)
		if (!checkpoint_intact(a, r, i))
			return 0;
	return 1;
}

/* Such a page is the job's own from now on: the file must not take its place. */
static void leave_copies(const struct agent *a, struct up_region *r)
{
	uint32_t laid = atomic_load(&r->laid), left = 0;
	size_t page = up_job.page_bytes;
	struct up_copies copies;
	uintptr_t address;

	for (uint32_t i = 0; i < laid; i++)
		if (!page_address(r, r->laid_page[i], &address) &&
		    !up_next_copies(a->pagemap_fd, address, address + page, &copies))
			r->laid_page[left++] = r->laid_page[i];
	atomic_store(&r->laid, left);
}

/* Whether a mapping that nobody else knows is one of the region's file, from this offset on. */
static int is_of_file(const struct agent *a, const struct up_region *r, uintptr_t p, uint64_t offset)
{
	struct up_vma vma;

	return !up_vma_at(a->maps_fd, p, &vma) && up_vma_alike(&vma, &r->mapped) &&
	       vma.offset + (p - vma.start) == offset;
}

/* The file, mapped elsewhere: 0 and *p, NULL where none is needed; or -errno. */
static int map_elsewhere(struct agent *a, struct up_region *r, void **p)
{
	*p = NULL;
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		leave_copies(a, r);
	if (!atomic_load(&r->laid))
		return 0;
	if (!up_may_act(a, r) || !checkpoints_intact(a, r)) {
		if (up_is_left(atomic_load(&r->state))) /* what lies there now is its new owner's */
			return -ENOENT;
		up_note_bypass(a, UP_BYPASS_REPLACED);
		atomic_store(&r->laid, 0); /* nobody puts anything in their place */
		return -ENOENT;
	}
	if (r->fd < 0 && (r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		return -ENOENT;
	up_step(a, UP_STATE_DETACHING);
	/* A shared mapping can be had from its first page, with its own advice and description: the kernel
	 * merges only mappings of one description, and what a forked child's agent has is the service's. */
	*p = (r->map_flags & MAP_TYPE) == MAP_PRIVATE
		     ? up_map_anew(r)
		     : (void *)up_sys4(SYS_mremap, r->address, 0, r->length, MREMAP_MAYMOVE);
	return up_failed((long)*p) ? (int)(long)*p : 0;
}

/* One page of the file where there is no room for all of it (RLIMIT_AS): its address, in a mapping of two pages of
 * which it is the second; 0: it cannot be had. A shared one of the page before it, which is never a checkpoint;
 * and looked at where it is then, for what lies in the mapping may have changed. */
static uintptr_t map_page(const struct agent *a, const struct up_region *r, uintptr_t address)
{
	size_t page = up_job.page_bytes;
	uint64_t offset = r->offset + (address - r->address) - page;
	int flags = r->map_flags & (MAP_TYPE | MAP_NORESERVE);
	long p;

	if ((r->map_flags & MAP_TYPE) != MAP_PRIVATE)
		p = up_sys4(SYS_mremap, address - page, 0, 2 * page, MREMAP_MAYMOVE);
	else
		p = (long)up_mmap(NULL, 2 * page, r->prot, flags, r->fd, offset);
	if (up_failed(p))
		return 0;
	if (is_of_file(a, r, (uintptr_t)p, offset)) {
		if (r->advice != MADV_NORMAL)
			up_sys3(SYS_madvise, p, 2 * page, r->advice);
		return (uintptr_t)p + page;
	}
	up_sys2(SYS_munmap, p, 2 * page);
	return 0;
}

/* Each page is unregistered, asked for and replaced before the next: what is left of the checkpoints keeps
 * waiting who unmaps the mapping. Asked for last: what a raw mmap(2) puts there between the question and
 * the act is hit. ``p``: the file, mapped elsewhere; 0: page by page. */
static void replace_alone(struct agent *a, struct up_region *r, uintptr_t p)
{
	uint32_t laid = atomic_load(&r->laid), i = 0;
	int uffd = atomic_load(&a->uffd), placed = 1;

	if (!up_may_act(a, r))
		return;
	for (; placed && i < laid; i += placed) {
		uintptr_t address, from;

		if (page_address(r, r->laid_page[i], &address))
			return;
		from = p ? p + (address - r->address) : map_page(a, r, address);
		placed = 0; /* then what is laid stays, and holds the file's bytes */
		if (from && hands_on(a, r)) {
			if (uffd >= 0)
				unlisten_page(uffd, address);
			up_step(a, UP_STATE_DETACHING);
			placed = checkpoint_intact(a, r, i) && !move_page(from, address);
			hands_off(a);
		}
		if (from && !p)
			up_sys2(SYS_munmap, from - up_job.page_bytes, 2 * up_job.page_bytes);
	}
	if (i == laid)
		atomic_store(&r->laid, 0);
}

int up_prepare_replacement(struct agent *a, struct up_region *r)
{
	void *p;
	int ret = map_elsewhere(a, r, &p);

	if (ret == -ENOMEM)
		replace_alone(a, r, 0);
	if (ret || !p)
		return ret;
	up_unlisten(a, r);
	atomic_store(&r->replacement, (uintptr_t)p);
	return 0;
}

void up_detach(struct agent *a, struct up_region *r)
{
	void *p;
	int ret;

	if (atomic_load(&r->pooled)) {
		up_may_act(a, r); /* notes what has gone round us */
		/* In a process that bypasses, too: who waits there for a page that cannot be read would
		 * wait for ever. */
		up_pool_detach(a, r, 0);
		return;
	}
	if (!atomic_load(&r->laid))
		return;
	ret = map_elsewhere(a, r, &p);
	if ((ret && ret != -ENOMEM) || (!ret && !p))
		return; /* what is laid stays, and holds the file's bytes */
	replace_alone(a, r, ret ? 0 : (uintptr_t)p);
	if (!ret)
		up_sys2(SYS_munmap, p, r->length);
	up_step(a, UP_STATE_DETACHING);
}
