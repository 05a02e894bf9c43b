// SPDX-License-Identifier: Apache-2.0
/*
 * pool_map.c - chunks that are there, into a process's page table.
 *
 * UFFDIO_CONTINUE makes an entry for each page, of a huge page too: 155 us for 2 MiB, half of what a
 * reader needs for them. MADV_COLLAPSE of a range that is one huge page already makes the one entry
 * for it: 2 us. It is for who has CAP_SYS_NICE (mm/madvise.c, process_madvise(); Linux 6.1).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "common/uffd.h"
#include "service/pool/pool.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define HUGE_BYTES ((uint64_t)2 << 20)
/* EAGAIN of an ioctl: the process changes its mappings just now. */
#define TRIES 100
/* CPU time of one; then it was no huge page, and was copied into one: the kernel had none to give when
 * it was filled. When that happens often, or it fails, the next second goes without. */
#define SLOW_NS 300000ull
#define SLOW_TIMES 8
#define SMALL_MS 1000
/* One part in so many of the pool is mapped at once, at the most. */
#define MAP_SHARE 64

uint64_t pool_share_of(const struct up_pool *p, uint32_t share, uint64_t most_bytes)
{
	uint64_t bytes = p->budget / share < most_bytes ? p->budget / share : most_bytes;

	return bytes > pool_chunk_bytes(p) ? bytes / pool_chunk_bytes(p) : 1;
}

uint64_t pool_map_most(const struct up_pool *p)
{
	return pool_share_of(p, MAP_SHARE, RUN_MAX_BYTES);
}

uint64_t pool_run_of(const struct up_pool *p, const struct pool_file *f, const struct pool_stream *s, uint64_t chunk)
{
	uint64_t run = s ? s->run : 1, most = pool_map_most(p), record = f->rest[chunk];

	record = record < most ? record : most;
	return record > run ? record : run;
}

void pool_wake(int uffd, uint64_t address, uint64_t length)
{
	struct uffdio_range range = { .start = address, .len = length };

	ioctl(uffd, UFFDIO_WAKE, &range);
}

int pool_poison(int uffd, uint64_t address, uint64_t length)
{
	struct uffdio_poison poison = { .range = { .start = address, .len = length } };

	return ioctl(uffd, UFFDIO_POISON, &poison) ? -errno : 0;
}

int pool_is_gone(int uffd, uint64_t page_bytes)
{
	/* Write protection is registered for nowhere: this does nothing, whatever lies there. EINVAL: a userfaultfd that
	 * nobody initialized, so that nothing is registered. */
	struct uffdio_writeprotect nothing = { .range = { .start = 1u << 20, .len = page_bytes } };

	return ioctl(uffd, UFFDIO_WRITEPROTECT, &nothing) && (errno == ESRCH || errno == EINVAL);
}

void pool_count_mapped(struct up_pool *p, const struct pool_mapped *m)
{
	p->count.continued_bytes += m->pages_bytes;
	p->count.collapsed_bytes += m->huge_bytes;
}

/* Bytes from `address` on that have been mapped now; 0 and *error when there were none. */
static uint64_t continue_from(int uffd, uint64_t address, uint64_t length, int *error)
{
	struct uffdio_continue c = { .range = { address, length } };
	uint64_t done = 0;

	*error = 0;
	for (int tries = 0; length && tries < TRIES; tries++) {
		c.range.start = address + done;
		c.range.len = length - done;
		c.mapped = 0;
		if (!ioctl(uffd, UFFDIO_CONTINUE, &c))
			return length;
		*error = errno;
		/* part of it, then EAGAIN or EEXIST at the page where it stopped */
		if (c.mapped > 0) {
			done += (uint64_t)c.mapped;
			tries = 0;
			continue;
		}
		if (errno != EAGAIN)
			break;
	}
	return done;
}

/* [address, +length) page by page; `touched`, where somebody waits, or 0. */
static uint64_t map_small(struct up_pool *p, int uffd, uint64_t address, uint64_t length,
			  uint64_t touched)
{
	uint64_t end = address + length, done, more;
	int error;

	if (touched - address >= length)
		touched = 0;
	done = continue_from(uffd, address, length, &error);
	/* Part of it was mapped before (EEXIST): then what matters is the page that was touched, and
	 * what follows it. */
	if (error && touched && address + done <= touched) {
		more = continue_from(uffd, touched, end - touched, &error);
		/* The mapping ends within: a part of it has gone past the interposers. */
		if (error == ENOENT && !more)
			more = continue_from(uffd, touched, p->page_bytes, &error);
		done += more;
	}
	/* mapped by another thread's touch, or gone: let it look again */
	if (error && touched)
		pool_wake(uffd, touched, p->page_bytes);
	return done;
}

static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* [address, +length), whole huge pages: 1, or 0 when not all are mapped. */
static int map_huge(const struct up_pool *p, struct pool_client *c, uint64_t address,
		    uint64_t length)
{
	struct iovec range = { (void *)(uintptr_t)address, length };
	uint32_t slow = __atomic_load_n(&c->slow, __ATOMIC_RELAXED);
	uint64_t began = cpu_ns();
	long n = syscall(SYS_process_madvise, c->pidfd, &range, 1ul, MADV_COLLAPSE, 0ul);

	if (n < 0 && (errno == EPERM || errno == ENOSYS || errno == ESRCH)) {
		/* not for us, or not here, or its process has ended and another one shares its memory */
		__atomic_store_n(&c->small_until_ms, UINT32_MAX, __ATOMIC_RELAXED);
		return 0;
	}
	if (n >= 0 && cpu_ns() - began <= SLOW_NS * (length / HUGE_BYTES))
		slow -= slow > 0;
	else if (++slow == SLOW_TIMES) {
		slow = 0;
		__atomic_store_n(&c->small_until_ms, pool_now_ms(p) + SMALL_MS, __ATOMIC_RELAXED);
	}
	__atomic_store_n(&c->slow, slow, __ATOMIC_RELAXED);
	return n == (long)length;
}

int pool_maps_huge(const struct up_pool *p, const struct pool_client *c, const struct pool_region *r)
{
	return c->pidfd >= 0 && !__atomic_load_n(&c->former, __ATOMIC_RELAXED) &&
	       (r->address - r->offset) % HUGE_BYTES == 0 &&
	       pool_now_ms(p) >= __atomic_load_n(&c->small_until_ms, __ATOMIC_RELAXED);
}

void pool_map_pages(struct up_pool *p, struct pool_client *c, const struct pool_region *r,
		    uint64_t offset, uint64_t length, uint64_t address, struct pool_mapped *into)
{
	uint64_t low = r->offset > offset ? r->offset : offset;
	uint64_t high = r->offset + r->length, first, last;

	if (high > offset + length)
		high = offset + length;
	if (low >= high)
		return;
	low = r->address + (low - r->offset);
	high = r->address + (high - r->offset);
	first = (low + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
	last = high & ~(HUGE_BYTES - 1);
	if (first >= last || !pool_maps_huge(p, c, r)) {
		into->pages_bytes += map_small(p, c->uffd, low, high - low, address);
		return;
	}
	if (low < first)
		into->pages_bytes += map_small(p, c->uffd, low, first - low, address);
	if (map_huge(p, c, first, last - first)) {
		into->huge_bytes += last - first;
		pool_wake(c->uffd, first, last - first);
	} else {
		/* each by itself: some of them may be mapped */
		for (uint64_t at = first; at < last; at += HUGE_BYTES)
			into->pages_bytes += map_small(p, c->uffd, at, HUGE_BYTES, address);
		pool_wake(c->uffd, first, last - first);
	}
	if (last < high)
		into->pages_bytes += map_small(p, c->uffd, last, high - last, address);
}
