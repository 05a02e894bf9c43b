// SPDX-License-Identifier: Apache-2.0
/*
 * before.c - what is done before the kernel is asked for changes that name no address of ours, whether by
 * libc's functions (mapping.c) or by its syscall(2) (syscall.c).
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "common/madvise.h"
#include "job/preload.h"

int up_changes_a_mapping(int advice)
{
	return advice > MADV_DONTNEED && advice != MADV_COLD && advice != MADV_PAGEOUT && advice != MADV_POPULATE_READ;
}

/* Whose memory it is about is not looked at: of another process the kernel takes only advice that changes no mapping
 * (mm/madvise.c, process_madvise_remote_valid), or what is given back would have stayed. */
void up_before_process_madvise(const struct iovec *ranges, size_t count, int advice)
{
	struct iovec found[16], here = { found, sizeof(found) }, there;
	long n;

	if (!up_changes_a_mapping(advice) || !atomic_load(&up_job.live) || count > IOV_MAX)
		return;
	for (size_t at = 0; at < count; at += (size_t)n / sizeof(found[0])) {
		size_t bytes = (count - at) * sizeof(found[0]);

		there = (struct iovec){ (void *)(ranges + at), bytes < sizeof(found) ? bytes : sizeof(found) };
		n = up_sys6(SYS_process_vm_readv, up_sys0(SYS_getpid), (long)&here, 1, (long)&there, 1, 0);
		if (n == -EFAULT || n == 0) /* so will the call be */
			return;
		if (n < (long)sizeof(found[0])) { /* refused, by a filter */
			up_give_back(0, UINTPTR_MAX, UP_REQ_DETACH);
			return;
		}
		for (size_t i = 0; i < (size_t)n / sizeof(found[0]); i++)
			up_give_back((uintptr_t)found[i].iov_base, found[i].iov_len, UP_REQ_DETACH);
	}
}

void up_all_is_locked(void)
{
	up_give_back(0, UINTPTR_MAX, UP_REQ_DETACH);
	if (up_job.enabled && up_in_own_process())
		atomic_store(&up_job.disabled, 1); /* MCL_FUTURE would lock, and read, what we lay */
}

/* The pool's anchor takes address space as long as the mapping (pooled.c), which a job that limits its own would miss
 * later. What is mapped afterwards has a page of it. */
UP_EARLY void up_before_limit(int resource, int is_set)
{
	if (resource == RLIMIT_AS && is_set && up_job.pool)
		up_give_back_pool();
}
