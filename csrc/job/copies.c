// SPDX-License-Identifier: Apache-2.0
/*
 * copies.c - which pages of a private mapping are copies of the process's own, asked of the kernel.
 *
 * PAGEMAP_SCAN (Linux 6.7) follows the page tables that there are: a mapping of 1 TiB of which little is mapped
 * is asked in microseconds. Before it /proc/self/pagemap is read, 8 bytes for each page, mapped or not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/ioctl.h>

#include "job/agent.h"

/* Documentation/admin-guide/mm/pagemap.rst: present or swapped; a page of a file, or shared */
#define PAGEMAP_THERE (3ull << 62)
#define PAGEMAP_FILE (1ull << 61)

/* include/uapi/linux/fs.h */
struct scanned_run {
	uint64_t start, end, categories;
};
struct scan_argument {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define SCAN _IOWR('f', 16, struct scan_argument)
#define IS_FILE (1ull << 2)
#define IS_PRESENT (1ull << 3)
#define IS_SWAPPED (1ull << 4)

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
			int copy = entry[i] & PAGEMAP_THERE && !(entry[i] & PAGEMAP_FILE);

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
	struct scanned_run run;
	struct scan_argument scan = {
		.size = sizeof(scan),
		.start = start,
		.end = end,
		.vec = (uintptr_t)&run,
		.vec_len = 1,
		.category_inverted = IS_FILE,
		.category_mask = IS_FILE,
		.category_anyof_mask = IS_PRESENT | IS_SWAPPED,
		.return_mask = IS_FILE, /* none has it: so one run is all that lie together */
	};
	long n = up_sys3(SYS_ioctl, pagemap_fd, SCAN, &scan);

	/* ENOTTY before 6.7; EINVAL where a filter or an emulation knows no such request */
	if (n == -ENOTTY || n == -EINVAL)
		return by_entries(pagemap_fd, start, end, out);
	if (n == 1)
		*out = (struct up_copies){ run.start, run.end };
	return (int)n;
}
