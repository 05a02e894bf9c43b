// SPDX-License-Identifier: Apache-2.0
/*
 * standin.c - the agent answers for the pool where the service does not: it has died, and this process
 * bypasses the interposers, so that the file cannot be put back by address; or it stands still.
 *
 * A hole of the pool must never be read as zeros, so somebody has to hold its userfaultfd and to read
 * the bytes. They go where the service would put them, into the memfd, by whole pages, and are then
 * continued through the registration: an act on an object, which the kernel refuses for an address
 * that has become somebody else's. Both may do so at the same time: they write the same bytes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "common/madvise.h"
#include "common/uffd.h"
#include "job/agent.h"

/* What is read for one touch. */
#define FILL_BYTES ((uint64_t)64 << 10)
/* Of what was filled here, the oldest leaves the memfd again: nobody else gives memory back any more.
 * 16 MiB for a process. Only once the service is dead: its books must be true while it lives. */
#define FILLS_KEPT 256
#define MESSAGES_AT_ONCE 16
/* Tries of UFFDIO_CONTINUE while the process changes its address space, before its thread asks anew. */
#define TRIES 1000

struct fill {
	uint32_t region;
	uint64_t offset, length;
};

/* Aligned, for the job's description may be one of O_DIRECT. */
static _Alignas(4096) unsigned char buffer[FILL_BYTES];
static struct fill filled[FILLS_KEPT];
static uint32_t fills;

/* Which part of which file lies around an address. */
struct place {
	struct up_region *region;
	uintptr_t address;
	uint64_t offset, length;
};

static int is_served(const struct up_region *r)
{
	uint32_t state = atomic_load(&r->state);

	return (state == UP_LIVE || state == UP_CLOSING) && atomic_load(&r->pooled);
}

/* By the kernel: the job may have moved a part, or have mapped something else in its place. */
static int find_place(struct agent *a, uintptr_t address, struct place *at)
{
	struct up_vma v;

	if (up_vma_at(a->maps_fd, address, &v))
		return 0;
	for (uint32_t i = 0; i < atomic_load(&a->slots); i++) {
		struct up_region *r = &up_job.region[i];

		if (!is_served(r) || !up_vma_of_one_file(&v, &r->pool_mapped))
			continue;
		*at = (struct place){ r, v.start, v.offset, v.end - v.start };
		return 1;
	}
	return 0;
}

/* [offset, +length) of the file into the memfd, by read(2): bytes, whole pages of them where the file ends before, or
 * -errno. */
static long fill_by_read(const struct up_region *r, uint64_t offset, uint64_t length)
{
	uint64_t have = 0, page = up_job.page_bytes, done = 0;

	while (have < length) {
		long n = up_sys4(SYS_pread64, r->fd, buffer + have, length - have, offset + have);

		if (n == -EINTR)
			continue;
		if (up_failed(n))
			return n;
		if (!n) /* it is shorter now */
			break;
		have += (uint64_t)n;
	}
	if ((have + page - 1) / page * page < length)
		length = (have + page - 1) / page * page;
	for (; have < length; have++)
		buffer[have] = 0;
	while (done < length) {
		long n = up_sys4(SYS_pwrite64, r->pool_fd, buffer + done, length - done, offset + done);

		if (up_failed(n))
			return n;
		done += (uint64_t)n;
	}
	return (long)done;
}

/* The same by a mapping of the file, which takes no inode's lock: on XFS and NFS read(2) does, and whoever waits
 * for this page may be writing the file. -EFAULT: it cannot be read; else no mapping is to be had (RLIMIT_AS). */
static long fill_by_mapping(const struct up_region *r, uint64_t offset, uint64_t length)
{
	long m = up_sys6(SYS_mmap, 0, length, PROT_READ, MAP_SHARED, r->fd, offset), ret = 0;
	uint64_t done = 0;

	if (up_failed(m))
		return m;
	up_sys3(SYS_madvise, m, length, MADV_POPULATE_READ); /* else the memfd is locked while storage is read */
	while (done < length) {
		ret = up_sys4(SYS_pwrite64, r->pool_fd, m + done, length - done, offset + done);
		if (ret <= 0) /* -EFAULT: the file is shorter now, or cannot be read */
			break;
		done += (uint64_t)ret;
	}
	up_sys2(SYS_munmap, m, length);
	return done ? (long)done : ret;
}

/* [offset, +length) of the file into the memfd: 0 or -errno, -ENODATA where what could be read ends before the page
 * at `needed`. */
static int fill(const struct up_region *r, uint64_t offset, uint64_t length, uint64_t needed)
{
	long n = fill_by_mapping(r, offset, length);

	if (up_failed(n) && n != -EFAULT)
		n = fill_by_read(r, offset, length);
	if (up_failed(n))
		return (int)n;
	return offset + (uint64_t)n <= needed ? -ENODATA : 0;
}

void up_pool_empty(const struct up_region *r)
{
	if (r->pool_fd >= 0)
		up_sys4(SYS_fallocate, r->pool_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
			(r->size + FILL_BYTES - 1) & ~(FILL_BYTES - 1));
}

static void make_room(struct agent *a, const struct up_region *r, uint64_t offset, uint64_t length)
{
	struct fill *oldest = &filled[fills % FILLS_KEPT];
	struct up_region *of = &up_job.region[oldest->region % UP_REGIONS];

	if (fills >= FILLS_KEPT && a->hung_up && of->id == oldest->region && of->pool_fd >= 0)
		up_sys4(SYS_fallocate, of->pool_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			oldest->offset, oldest->length);
	*oldest = (struct fill){ r->id, offset, length };
	fills++;
}

/* A fill begins, or has ended and is mapped (0): the service, should it live, then looks for what its
 * books do not know. Not before: a page that is punched, and made anew, must not be mapped meanwhile. */
static void count(struct agent *a, uint64_t bytes)
{
	if (!a->ring)
		return;
	__atomic_fetch_add(&a->ring->stand_in_bytes, bytes, __ATOMIC_RELAXED);
	__atomic_fetch_add(&a->ring->stand_ins, 1, __ATOMIC_SEQ_CST);
}

/* Its reader gets what plain readers get from storage that fails. */
static void cannot_be_read(struct agent *a, struct up_region *r, uintptr_t address)
{
	struct uffdio_poison poison = { .range = { address, up_job.page_bytes } };

	if (up_may_act(a, r)) {
		up_pool_detach(a, r, 0);
		if (!atomic_load(&r->pooled))
			return;
	}
	if (up_failed(up_sys3(SYS_ioctl, a->pool_uffd, UFFDIO_POISON, &poison))) /* Linux 6.6 */
		up_wake_range(a->pool_uffd, address, up_job.page_bytes);
}

static void answer(struct agent *a, uintptr_t address)
{
	uint64_t page = up_job.page_bytes, first, end, limit;
	struct uffdio_continue cont;
	struct up_region *r;
	struct place at;
	long ret;

	if (!find_place(a, address, &at) || at.region->fd < 0 || at.region->pool_fd < 0) {
		up_wake_range(a->pool_uffd, address, page);
		return;
	}
	r = at.region;
	up_step(a, UP_STATE_RESOLVING);
	first = (at.offset + (address - at.address)) & ~(FILL_BYTES - 1);
	if (first < at.offset)
		first = at.offset;
	limit = at.offset + at.length;
	if (limit > r->size) /* of the last page, the memfd has what the file has */
		limit = r->size;
	end = (first & ~(FILL_BYTES - 1)) + FILL_BYTES;
	if (end > limit)
		end = limit;
	make_room(a, r, first, end - first);
	count(a, end - first);
	if (fill(r, first, end - first, at.offset + (address - at.address))) {
		count(a, 0);
		cannot_be_read(a, r, address);
		return;
	}
	/* The page that is waited for first; its neighbours save their own touches. */
	ret = -EAGAIN;
	for (int i = 0; ret == -EAGAIN && i < TRIES; i++) {
		cont = (struct uffdio_continue){ .range = { address, page } };
		ret = up_sys3(SYS_ioctl, a->pool_uffd, UFFDIO_CONTINUE, &cont);
		if (ret == -EAGAIN)
			up_sys0(SYS_sched_yield);
	}
	if (up_failed(ret))
		up_wake_range(a->pool_uffd, address, page);
	for (uint64_t next = first; !up_failed(ret) && next < end; next += page) {
		cont = (struct uffdio_continue){
			.range = { at.address + (next - at.offset), page } };
		up_sys3(SYS_ioctl, a->pool_uffd, UFFDIO_CONTINUE, &cont);
	}
	count(a, 0);
	up_step(a, UP_STATE_IDLE);
}

void up_stand_in(struct agent *a)
{
	struct uffd_msg message[MESSAGES_AT_ONCE];
	long n = up_sys3(SYS_read, a->pool_uffd, message, sizeof(message));

	if (up_failed(n) && n != -EAGAIN && n != -EINTR) /* refused (a filter): it waits on */
		up_pause(NS_PER_MS);
	if (up_failed(n))
		return;
	n /= (long)sizeof(message[0]);
	for (long i = 0; i < n; i++)
		if (message[i].event == UFFD_EVENT_REMAP)
			up_note_bypass(a, UP_BYPASS_MOVED);
	for (long i = 0; i < n; i++)
		if (message[i].event == UFFD_EVENT_PAGEFAULT)
			answer(a, (uintptr_t)message[i].arg.pagefault.address &
					  ~(up_job.page_bytes - 1));
}
