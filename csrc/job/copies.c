// SPDX-License-Identifier: Apache-2.0
/*
 * copies.c - which pages of a private mapping are copies of the process's own, asked of the kernel.
 *
 * By PAGEMAP_SCAN a mapping of 1 TiB of which little is mapped is asked in microseconds. Before Linux 6.7
 * /proc/self/pagemap is read entry by entry.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "common/pagemap.h"
#include "job/agent.h"

static int by_entries(int pagemap_fd, uintptr_t start, uintptr_t end, struct up_copies *out)
{
	uint64_t entry[512];
	size_t page = up_job.page_bytes;

	*out = (struct up_copies){ end, end };
	for (uintptr_t at = start; at < end;) {
		size_t want = (end - at) / page;
		long n;

		if (want > sizeof(entry) / sizeof(entry[0]))
			want = sizeof(entry) / sizeof(entry[0]);
		n = up_sys4(SYS_pread64, pagemap_fd, entry, want * sizeof(entry[0]),
			    at / page * sizeof(entry[0]));
		if (up_failed(n))
			return (int)n;
		if (n < (long)sizeof(entry[0]))
			return -EIO;
		for (long i = 0; i < n / (long)sizeof(entry[0]); i++, at += page) {
			int copy = entry[i] & (UP_ENTRY_PRESENT | UP_ENTRY_SWAPPED) && !(entry[i] & UP_ENTRY_FILE);

			if (copy && out->start == end)
				out->start = at;
			if (!copy && out->start != end) {
				out->end = at;
				return 1;
			}
		}
	}
	return out->start != end;
}

int up_next_copies(int pagemap_fd, uintptr_t start, uintptr_t end, struct up_copies *out)
{
	struct up_scanned run;
	struct up_scan scan = {
		.size = sizeof(scan),
		.start = start,
		.end = end,
		.vec = (uintptr_t)&run,
		.vec_len = 1,
		.category_inverted = UP_IS_FILE,
		.category_mask = UP_IS_FILE,
		.category_anyof_mask = UP_IS_PRESENT | UP_IS_SWAPPED,
		.return_mask = UP_IS_FILE, /* none has it: so one run is all that lie together */
	};
	long n = up_sys3(SYS_ioctl, pagemap_fd, UP_PAGEMAP_SCAN, &scan);

	if (up_failed(n) && up_has_no_scan((int)-n))
		return by_entries(pagemap_fd, start, end, out);
	if (n == 1)
		*out = (struct up_copies){ run.start, run.end };
	return (int)n;
}
