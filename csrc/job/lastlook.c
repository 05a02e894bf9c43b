// SPDX-License-Identifier: Apache-2.0
/*
 * lastlook.c - what a mapping has touched, seen by the agent before the job takes the mapping away.
 *
 * The service looks at page tables every few milliseconds (uffdprefetch/sense/pagetables.py): of a mapping that
 * lives for less it would learn nothing. Whoever unmaps waits for the agent to let go of the region as it is, and the
 * look is made meanwhile. It is one of the agent's, not of the job's threads: those make no call that a filter of
 * the job's may not expect.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "common/pagemap.h"
#include "job/agent.h"

/* Somebody waits in munmap(): so long at most, beside the last call, which is of LOOK_BYTES. */
#define LOOK_NS 50000
/* In one call to the kernel: 4096 entries take 5 us (docs/facts.md), a hole less than one. */
#define LOOK_BYTES ((size_t)16 << 20)
/* The service's books are of blocks of so much (uffdprefetch/state/files.py, BLOCK_BYTES): runs that lie in one, or in
 * two that adjoin, say no more than one run. */
#define BLOCK_BYTES ((uint64_t)64 << 10)
#define RUNS_AT_ONCE 64
/* A look takes up to 100 us of the node: two switches of threads where the job would not have waited else, and the
 * service, which books it before it answers for the next mapping. One in so long takes a 20th of a core at most: who
 * unmaps more often does not wait for storage, and needs us the less. The first files are seen all the same. */
#define LOOK_EVERY_NS (2 * NS_PER_MS)
#define LOOKS_AT_ONCE 32

void up_grant_looks(struct agent *a)
{
	uint64_t now = up_now_ns(), more = (now - a->looks_at_ns) / LOOK_EVERY_NS;
	int has = atomic_load(&up_job.looks);

	if (!more || a->pagemap_fd < 0)
		return;
	a->looks_at_ns += more * LOOK_EVERY_NS;
	atomic_store(&up_job.looks, more < (uint64_t)(LOOKS_AT_ONCE - has) ? has + (int)more : LOOKS_AT_ONCE);
}

/* Behind what is there of the same region. What does not fit is lost: it is read by the service's own looks, or never
 * known. */
static void note_run(struct agent *a, const struct up_region *r, uint64_t start, uint64_t end)
{
	struct up_touched *last = a->touches ? &a->touched[a->touches - 1] : NULL;

	if (last && last->region == r->id && last->count) {
		uint64_t *before = &last->run[2 * last->count - 1];

		if (start >= *before && start / BLOCK_BYTES <= (*before - 1) / BLOCK_BYTES + 1) {
			*before = end;
			return;
		}
	}
	if (!last || last->region != r->id || last->count == UP_RUNS_MAX) {
		if (a->touches == UP_TOUCHES)
			return;
		last = &a->touched[a->touches++];
		last->region = r->id;
		last->count = 0;
	}
	last->run[2 * last->count] = start;
	last->run[2 * last->count + 1] = end;
	last->count++;
}

/* From [start, end) on: where to go on, or -errno. */
static long by_scan(struct agent *a, const struct up_region *r, uintptr_t start, uintptr_t end)
{
	struct up_scanned run[RUNS_AT_ONCE];
	struct up_scan scan = {
		.size = sizeof(scan),
		.start = start,
		.end = end,
		.vec = (uintptr_t)run,
		.vec_len = RUNS_AT_ONCE,
		.category_mask = UP_IS_PRESENT,
		.return_mask = UP_IS_PRESENT,
	};
	uint64_t offset = atomic_load(&r->offset) - atomic_load(&r->address);
	long n = up_sys3(SYS_ioctl, a->pagemap_fd, UP_PAGEMAP_SCAN, &scan);

	for (long i = 0; i < n; i++)
		note_run(a, r, run[i].start + offset, run[i].end + offset);
	return up_failed(n) ? n : scan.walk_end > start ? (long)scan.walk_end : -EIO;
}

static long by_entries(struct agent *a, const struct up_region *r, uintptr_t start, uintptr_t end)
{
	uint64_t entry[512], offset = atomic_load(&r->offset) - atomic_load(&r->address);
	size_t page = up_job.page_bytes, want = (end - start) / page;
	long n;

	if (want > sizeof(entry) / sizeof(entry[0]))
		want = sizeof(entry) / sizeof(entry[0]);
	n = up_sys4(SYS_pread64, a->pagemap_fd, entry, want * sizeof(entry[0]), start / page * sizeof(entry[0]));
	if (up_failed(n))
		return n;
	n /= (long)sizeof(entry[0]);
	for (long i = 0; i < n; i++)
		if (entry[i] & UP_ENTRY_PRESENT)
			note_run(a, r, start + (size_t)i * page + offset, start + (size_t)(i + 1) * page + offset);
	return n ? (long)(start + (size_t)n * page) : -EIO;
}

void up_last_look(struct agent *a, struct up_region *r, struct up_request *q)
{
	uintptr_t at = atomic_load(&r->address), end = at + atomic_load(&r->length);
	uint32_t touches = a->touches;
	uint64_t until = up_now_ns() + LOOK_NS;

	if (!r->sent || a->hung_up || a->pagemap_fd < 0 || atomic_load(&up_job.bypassed))
		return;
	while (at < end) {
		uintptr_t stop = end - at > LOOK_BYTES ? at + LOOK_BYTES : end;
		long next = a->no_scan ? -ENOTTY : by_scan(a, r, at, stop);

		if (up_failed(next) && up_has_no_scan((int)-next)) {
			a->no_scan = 1;
			next = by_entries(a, r, at, stop);
		}
		if (up_failed(next))
			break;
		at = (uintptr_t)next;
		if (up_now_ns() >= until)
			break;
	}
	/* Whoever asked may have gone on, and something else may have lain there. */
	if (atomic_load(&q->state) != UP_REQ_TAKEN || atomic_load(&r->state) != UP_CLOSING)
		a->touches = touches;
}
