// SPDX-License-Identifier: Apache-2.0
/*
 * bypass.c - a process that changes its address space without the interposers.
 *
 * Open MPI's UCX and libfabric overwrite the first bytes of whatever munmap, mmap, madvise ... a
 * process resolves; rustix, Go and syscall(2) never ask libc. What our books say of such a process is
 * not known to be true, and no check makes an act at an address safe: the job may change what lies
 * there between the check and the act. So once it is seen that a process bypasses, nothing is done by
 * address in it any more, for good: the userfaultfd of the checkpoints is closed, which unregisters them
 * wherever they are now, the books are dropped, and the service follows the process by its page
 * tables. A mapping that the pool serves stays in its books: the pool acts on its memory alone.
 *
 * How it is seen: by the kernel's events at the checkpoints (respond.c), by what lies where a region
 * was (vma.c), and, before any damage, by the first bytes of our functions.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "job/agent.h"
#include "common/status.h"

#define ENTRY_BYTES 16

/* Of mapping.c's; and their first bytes, as they were. */
static const void *const *entries;
static int entry_count;
static unsigned char entry[UP_ENTRIES_MAX][ENTRY_BYTES];

/* Hooks that were there before our constructor ran: a function that is built for branch protection
 * (setup.py) begins with the instruction that marks it as a branch's target. */
static int is_hook(const unsigned char *code)
{
#if defined(__CET__)
	static const unsigned char mark[] = { 0xf3, 0x0f, 0x1e, 0xfa }; /* endbr64 */
#elif defined(__ARM_FEATURE_BTI_DEFAULT)
	static const unsigned char mark[] = { 0x5f, 0x24, 0x03, 0xd5 }; /* bti c */
#else
	static const unsigned char mark[] = { 0 };

	return (void)code, 0;
#endif
	for (unsigned int i = 0; i < sizeof(mark); i++)
		if (code[i] != mark[i])
			return 1;
	return 0;
}

void up_remember_entries(const void *const *list, int count)
{
	entries = list;
	entry_count = count;
	for (int i = 0; i < count; i++)
		for (int k = 0; k < ENTRY_BYTES; k++)
			entry[i][k] = ((const unsigned char *)list[i])[k];
}

int up_is_patched(void)
{
	for (int i = 0; i < entry_count; i++) {
		const volatile unsigned char *code = entries[i];

		if (is_hook(entry[i]))
			return 1;
		for (int k = 0; k < ENTRY_BYTES; k++)
			if (code[k] != entry[i][k])
				return 1;
	}
	return 0;
}

void up_note_bypass(struct agent *a, uint32_t reason)
{
	uint32_t none = 0;

	if (!atomic_compare_exchange_strong(&up_job.bypassed, &none, reason))
		return;
	up_close_overlays(a); /* and the agent wakes, which tells the service */
}

/* A file system whose pages go by path changes the number of an inode when another file takes its path: the mapping is
 * the same, and the descriptor that it was made by tells the number that it has now. */
static void follow_number(struct up_region *r, const struct up_vma *seen)
{
	struct up_vma renumbered = r->mapped;
	struct stat st;

	if (r->fd < 0 || seen->inode == r->mapped.inode || up_failed(up_cached_stat(r->fd, &st)))
		return;
	renumbered.inode = st.st_ino;
	if (up_vma_alike(seen, &renumbered))
		r->mapped.inode = st.st_ino;
}

/* The first and the last page: between them lie our own checkpoints, and whoever maps something into
 * the middle unmaps no page of ours, or the kernel tells (respond.c). */
int up_region_intact(const struct agent *a, struct up_region *r)
{
	int pooled = atomic_load(&r->pooled);
	const struct up_vma *mapped = pooled ? &r->pool_mapped : &r->mapped;
	uintptr_t last = r->address + (pooled ? r->length : r->map_length) - up_job.page_bytes;
	struct up_vma first, end;
	int ret = up_vma_at(a->maps_fd, r->address, &first);

	if (!ret && pooled && first.end < r->address + r->length)
		return 0; /* no event tells what was mapped into the middle of the pool's */
	if (!ret)
		ret = up_vma_at(a->maps_fd, last, &end);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	if (!pooled)
		follow_number(r, &first);
	return up_vma_alike(&first, mapped) && up_vma_alike(&end, mapped) &&
	       first.offset + (r->address - first.start) == r->offset &&
	       end.offset + (last - end.start) == r->offset + (last - r->address);
}

int up_may_act(struct agent *a, struct up_region *r)
{
	int intact;

	if (atomic_load(&up_job.bypassed))
		return 0;
	if (up_is_patched()) {
		up_note_bypass(a, UP_BYPASS_PATCHED);
		return 0;
	}
	/* Where the file is back, but for copies, what the job does there is its own affair. */
	intact = atomic_load(&r->pooled) == UP_POOLED_COPIES ? 1 : up_region_intact(a, r);
	if (!intact && !up_is_left(atomic_load(&r->state))) /* what lies there then is its new owner's */
		up_note_bypass(a, UP_BYPASS_REPLACED);
	return intact > 0;
}
