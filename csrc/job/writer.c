// SPDX-License-Identifier: Apache-2.0
/*
 * writer.c - the job opens for writing what is served to it.
 *
 * What it writes must show in its mapping at once, and copies of ours would not show it. And a thread that writes a
 * file from a mapping of the same file faults with the inode's lock held, and whoever fills the pool's page wants that
 * lock (O_DIRECT on ext4, each read on XFS and NFS): both would wait for each other.
 *
 * Where the service has a read lease open(2) waits until the mapping has been given back. Where no lease can be had
 * (another's file, overlayfs, NFS) it is given back here, and the service is told why. What is opened past libc the
 * service finds: copies that differ (service/freshness.py), fills that wait (csrc/service/pool/pool_rescue.c).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>

#include "common/status.h"
#include "job/preload.h"

/* Of a region: what is written to its file would not show in it, or wait for it. */
static int is_ours(const struct up_region *r)
{
	return atomic_load(&r->unleased) && (atomic_load(&r->pooled) || atomic_load(&r->laid));
}

/* Nothing is asked of the kernel where no region is concerned: a filter of the job's may kill it for a call that is
 * not its own. */
static int is_any(void)
{
	for (uint32_t i = 0; i < UP_REGIONS && atomic_load(&up_job.live); i++)
		if (is_ours(&up_job.region[i]))
			return 1;
	return 0;
}

void up_opened_to_write(int fd)
{
	struct stat st;

	if (!is_any() || up_failed(up_cached_stat(fd, &st)) || !S_ISREG(st.st_mode))
		return;
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (!is_ours(r) || r->inode != (uint64_t)st.st_ino || r->device != (uint64_t)st.st_dev)
			continue;
		atomic_store(&r->written, 1);
		up_give_back(r->address, r->map_length, UP_REQ_DETACH);
	}
}
