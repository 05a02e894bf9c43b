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
#include <sys/resource.h>

#include "job/agent.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

/* The service says every 10 ms that it is alive (csrc/service/pool/pool_faults.c, BEAT_MS). Counted in
 * looks of our own, so that a machine that stood still as a whole is no silence. A false alarm costs
 * nothing but a second read. */
#define BEAT_LOOK_NS (20 * NS_PER_MS)
#define BEAT_MISSED_MAX 2

void up_swap_end(struct up_region *r)
{
	if (atomic_exchange(&r->swap, UP_SWAP_DONE) == UP_SWAP_DONE)
		return;
	up_futex_wake(&r->swap);
}

/* What the file is put back from. */
struct source {
	long p; /* it, mapped elsewhere as a whole; -errno: there is no room for that */
	/* Then its anchor is used up, from the start to the end of the region: what is left of it, and
	 * where that begins in the region. 0: it is whole. */
	uintptr_t rest;
	size_t at;
};

static struct source open_source(struct up_region *r)
{
	return (struct source){ .p = up_map_of_anchor(r) };
}

static void close_source(const struct up_region *r, const struct source *s)
{
	if (!up_failed(s->p))
		up_sys2(SYS_munmap, s->p, r->length);
	if (s->rest && s->at < r->length)
		up_sys2(SYS_munmap, s->rest, r->length - s->at);
}

/* A part of the anchor itself. What it leaves another thread may be given: that is no part of the anchor any more. */
static long move_part(struct up_region *r, struct source *s, uintptr_t start, size_t length, int prot)
{
	size_t before = start - r->address;
	long ret;

	if (!s->rest && atomic_load(&r->anchor_bytes) >= r->length)
		s->rest = atomic_exchange(&r->anchor, 0);
	if (!s->rest || before < s->at)
		return -ENOENT;
	ret = up_sys5(SYS_mremap, s->rest + (before - s->at), length, length, MREMAP_MAYMOVE | MREMAP_FIXED, start);
	if (up_failed(ret))
		return ret;
	if (before > s->at)
		up_sys2(SYS_munmap, s->rest, before - s->at);
	s->rest += before + length - s->at;
	s->at = before + length;
	if (r->advice != MADV_NORMAL)
		up_sys3(SYS_madvise, start, length, r->advice);
	return prot == PROT_READ ? 0 : up_sys3(SYS_mprotect, start, length, prot);
}

/* The file in the place of a part of the mapping. Whether the pool lies there no more. */
static int put_back(const struct up_hands *h, struct up_region *r, struct source *s, uintptr_t start, size_t length,
		    int prot)
{
	int keep = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP; /* checkpoint.c, move_page */
	int anew = (r->map_flags & (MAP_TYPE | MAP_NORESERVE)) | MAP_FIXED;
	size_t before = start - r->address;
	long ret = s->p;

	if (!up_failed(ret) && prot != r->prot)
		ret = up_sys3(SYS_mprotect, s->p + before, length, prot);
	if (!up_failed(ret))
		ret = up_sys5(SYS_mremap, s->p + before, length, length, keep, start);
	if (up_failed(ret) && !h->seized)
		ret = (long)up_mmap((void *)start, length, prot, anew, r->fd, r->offset + before);
	if (up_failed(ret))
		ret = move_part(r, s, start, length, prot);
	if (!up_failed(ret))
		return 1;
	/* It is served on. */
	if (h->seized || (up_failed(s->p) && !h->ends))
		return 0;
	/* Not even a mapping to spare. Where the file cannot be had at all, its reader must fail: the
	 * pool's holes would be zeros one day. */
	ret = up_sys3(SYS_mprotect, start, length, PROT_NONE);
	return !up_failed(ret) || ret == -ENOMEM; /* mremap(2) has taken it away, and brought nothing */
}

static int prot_of(const struct up_vma *v)
{
	return (v->readable ? PROT_READ : 0) | (v->writable ? PROT_WRITE : 0) | (v->executable ? PROT_EXEC : 0);
}

/* Whether the pool lies at an address of the region. A private one may have other rights, which the job has given
 * it. */
static int is_pools(const struct up_region *r, const struct up_vma *v, uintptr_t address)
{
	int alike = (r->map_flags & MAP_TYPE) == MAP_PRIVATE
			    ? up_vma_of_one_file(v, &r->pool_mapped) && !v->shared
			    : up_vma_alike(v, &r->pool_mapped);

	return alike && v->offset + (address - v->start) == r->offset + (address - r->address);
}

/* Whether another mapping has been made there since, by the job, where it had taken this one away. */
static int is_anothers(const struct up_region *r, uintptr_t address)
{
	for (uint32_t i = 0; i < UP_REGIONS && atomic_load(&r->pooled) == UP_POOLED_COPIES; i++) {
		const struct up_region *other = &up_job.region[i];

		if (atomic_load(&other->pooled) == UP_POOLED && address - other->address < other->length)
			return 1;
	}
	return 0;
}

/* A look at a region, from its start to its end. */
struct look {
	uintptr_t at; /* where it goes on */
	size_t done, kept; /* bytes that are the file's now; that are the pool's, and stay */
};

/* The next part that the kernel says is the pool's, with hands on from the question to the act. */
static void put_back_part(const struct up_hands *h, struct up_region *r, struct source *s, struct look *l)
{
	uintptr_t start = l->at, end = r->address + r->length;
	struct up_copies copies;
	struct up_vma v;
	int ret = 0;

	l->at = end;
	if (up_vma_from(h->maps_fd, start, &v) || v.start >= end)
		return;
	if (v.start > start)
		start = v.start;
	if (v.end < end)
		l->at = v.end;
	if (!is_pools(r, &v, start) || is_anothers(r, start))
		return;
	/* What is written after the question which pages are copies would be lost. (In a child there is nobody to fill
	 * the pool's holes: what the parent has dropped would be zeros.) */
	if (v.writable && !h->alone) {
		l->kept += l->at - start;
		return;
	}
	/* Copies are the job's own, and stay: so does the region, as the pool's. A child has them, too. */
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE)
		ret = up_next_copies(h->pagemap_fd, start, l->at, &copies);
	if (ret < 0) /* any of them may be one */
		return;
	if (ret && copies.start == start) {
		l->at = copies.end;
		l->kept += copies.end - start;
		up_sys3(SYS_madvise, start, copies.end - start, MADV_DOFORK);
		return;
	}
	if (ret)
		l->at = copies.start;
	if (put_back(h, r, s, start, l->at - start, prot_of(&v))) {
		l->done += l->at - start;
		r->left -= l->at - start;
	}
}

/* All of it has been looked at. What the job has taken away since the last look is what was kept then, and was not
 * put back now. What is left then may be more than what was found: it lies elsewhere. */
static void settle(struct up_region *r, const struct look *l, int settles)
{
	size_t was = r->kept;

	if (settles && was > l->done + l->kept)
		r->left -= was - l->done - l->kept;
	r->kept = l->kept;
	if (r->left && r->left == l->kept)
		atomic_store(&r->pooled, UP_POOLED_COPIES);
}

static void put_back_parts(const struct up_hands *h, struct up_region *r, struct source *s, int settles)
{
	uintptr_t end = r->address + r->length;
	struct look l = { .at = r->address };
	int over = 0;

	while (!over && (h->seized || up_hands_on(r))) {
		over = l.at >= end;
		if (over)
			settle(r, &l, settles);
		else
			put_back_part(h, r, s, &l);
		if (h->seized)
			continue;
		up_step(&up_agent, UP_STATE_DETACHING);
		up_hands_off();
	}
}

long up_pool_put_back(const struct up_hands *h, struct up_region *r, int settles)
{
	struct source s;

	/* A thread of the job that has seized the region unmaps its anchor, and may map something else there. */
	if (!h->seized && !up_hands_on(r))
		return (long)r->left;
	s = open_source(r);
	if (!h->seized)
		up_hands_off();
	if (!h->seized)
		up_step(&up_agent, UP_STATE_DETACHING);
	put_back_parts(h, r, &s, settles);
	close_source(r, &s);
	return (long)r->left;
}

static int is_address_space_limited(void)
{
	struct rlimit limit;

	return up_failed(up_sys4(SYS_prlimit64, 0, RLIMIT_AS, NULL, &limit)) || limit.rlim_cur != RLIM_INFINITY;
}

/* All of a shared mapping, from a page of it. */
static long extend(struct up_region *r, uintptr_t page)
{
	long whole = up_sys4(SYS_mremap, page, 0, r->length, MREMAP_MAYMOVE);

	if (up_failed(whole))
		return (long)page;
	up_sys2(SYS_munmap, page, up_job.page_bytes);
	atomic_store(&r->anchor_bytes, r->length);
	return whole;
}

void up_pool_keep(struct up_region *r, uintptr_t page)
{
	int is_limited = is_address_space_limited();
	long p = (long)page;

	atomic_store(&r->anchor_bytes, up_job.page_bytes);
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE) {
		up_sys2(SYS_munmap, page, up_job.page_bytes);
		if (is_limited)
			return;
		/* a program that looks for its file in /proc/self/maps finds this one, and may read it */
		p = (long)up_mmap(NULL, r->length, PROT_READ,
				  MAP_PRIVATE | (r->map_flags & MAP_NORESERVE), r->fd, r->offset);
		atomic_store(&r->anchor_bytes, r->length);
	} else if (!is_limited) {
		p = extend(r, page);
	}
	if (!up_failed(p))
		atomic_store(&r->anchor, (uintptr_t)p);
}

/* ``at``: where, in the place of what lies there; 0: anywhere. */
static long map_of_anchor(struct up_region *r, uintptr_t at)
{
	uintptr_t anchor = atomic_load(&r->anchor);
	int is_private = (r->map_flags & MAP_TYPE) == MAP_PRIVATE;
	long p, ret;

	if (!anchor)
		return -ENOENT;
	/* What is kept of a private one stays where it is; pages of it that somebody has read go over (Linux 5.13
	 * for a file's). */
	p = up_sys5(SYS_mremap, anchor, is_private ? r->length : 0, r->length,
		    MREMAP_MAYMOVE | (is_private ? MREMAP_DONTUNMAP : 0) | (at ? MREMAP_FIXED : 0), at);
	if (up_failed(p))
		return p;
	ret = is_private ? up_sys3(SYS_mprotect, p, r->length, r->prot) : 0;
	if (up_failed(ret)) {
		if (!at)
			up_sys2(SYS_munmap, p, r->length);
		return ret;
	}
	if (r->advice != MADV_NORMAL)
		up_sys3(SYS_madvise, p, r->length, r->advice);
	return p;
}

long up_map_of_anchor(struct up_region *r)
{
	return map_of_anchor(r, 0);
}

long up_map_anchor_there(struct up_region *r)
{
	struct source s = { .p = map_of_anchor(r, r->address) };
	long ret = s.p;

	if (up_failed(ret))
		ret = move_part(r, &s, r->address, r->length, r->prot);
	return up_failed(ret) ? ret : 0;
}

static void left_pool(struct agent *a, struct up_region *r, long left)
{
	up_wake_range(a->pool_uffd, r->address, r->length);
	up_step(a, UP_STATE_DETACHING);
	if (!left) {
		atomic_store(&r->pooled, UP_POOLED_NOT);
		a->pooled--;
	}
}

void up_pool_detach(struct agent *a, struct up_region *r, int settles)
{
	struct up_hands h = { .maps_fd = a->maps_fd, .pagemap_fd = a->pagemap_fd, .ends = a->ends };

	up_step(a, UP_STATE_DETACHING);
	left_pool(a, r, up_pool_put_back(&h, r, settles));
}

/* Nobody knows the address yet. */
static void leave_pool_unseen(struct agent *a, struct up_region *r)
{
	struct up_hands h = { .maps_fd = -1, .pagemap_fd = -1, .ends = 1 };
	struct source s;

	up_step(a, UP_STATE_DETACHING);
	if (up_hands_on(r)) {
		s = open_source(r);
		if (put_back(&h, r, &s, r->address, r->length, r->prot))
			r->left = 0;
		close_source(r, &s);
		up_hands_off();
	}
	left_pool(a, r, (long)r->left);
}

int up_pool_enter(struct agent *a, struct up_region *r, int memfd)
{
	struct uffdio_register reg = {
		.range = { .start = r->address, .len = r->length },
		.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR,
	};
	struct up_copies copies;
	void *p;
	long ret;

	if (a->pool_uffd < 0 || memfd < 0 || r->fd < 0 || r->copies)
		return -EINVAL;
	/* Which of its pages are copies must be known when the file takes its place again. */
	if ((r->map_flags & MAP_TYPE) == MAP_PRIVATE &&
	    up_next_copies(a->pagemap_fd, r->address, r->address + up_job.page_bytes, &copies) < 0)
		return -EOPNOTSUPP;
	r->pool_fd = up_open_again(memfd, O_RDWR); /* the job maps a description that cannot be written */
	if (r->pool_fd < 0)
		return r->pool_fd;
	if (!atomic_load(&r->anchor)) /* made when the mapping was taken up; a forked child has its parent's */
		return -EINVAL;
	up_step(a, UP_STATE_LAYING);
	if (!up_hands_on(r)) /* taken back already, mlockall() for one takes all */
		return -ECANCELED;
	r->left = r->length;
	r->kept = 0;
	atomic_store(&r->pooled, UP_POOLED); /* before it is: a fork between the two must know */
	if (atomic_load(&up_job.shared)) { /* since then; who says so looks at ``pooled`` next */
		atomic_store(&r->pooled, UP_POOLED_NOT);
		up_hands_off();
		return -ECANCELED;
	}
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
	up_hands_off();
	if (ret)
		leave_pool_unseen(a, r);
	return (int)ret;
}

void up_pool_release(struct up_region *r)
{
	uintptr_t anchor = atomic_exchange(&r->anchor, 0);

	if (anchor)
		up_sys2(SYS_munmap, anchor, atomic_load(&r->anchor_bytes));
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

void up_wake_pooled(struct agent *a)
{
	for (uint32_t i = 0; i < atomic_load(&a->slots); i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->pooled))
			up_wake_range(a->pool_uffd, r->address, r->length);
	}
}
