/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pagemap.h - /proc/PID/pagemap: PAGEMAP_SCAN (Linux 6.7, commit 52526ca7fdb9), which follows the page tables that
 * there are, as older headers lack it; and the bits of its entries, 8 bytes for each page, mapped or not
 * (Documentation/admin-guide/mm/pagemap.rst).
 */
#ifndef UP_PAGEMAP_H
#define UP_PAGEMAP_H

#include <errno.h>
#include <stdint.h>
#include <sys/ioctl.h>

#define UP_ENTRY_PRESENT (1ull << 63)
#define UP_ENTRY_SWAPPED (1ull << 62)
#define UP_ENTRY_FILE (1ull << 61) /* a page of a file, or shared */

/* include/uapi/linux/fs.h */
struct up_scanned {
	uint64_t start, end, categories;
};
struct up_scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define UP_PAGEMAP_SCAN _IOWR('f', 16, struct up_scan)
#define UP_IS_FILE (1ull << 2)
#define UP_IS_PRESENT (1ull << 3)
#define UP_IS_SWAPPED (1ull << 4)

/* Of an errno: the kernel has no such request. EINVAL where a filter or an emulation knows none. */
static inline int up_has_no_scan(int error)
{
	return error == ENOTTY || error == EINVAL || error == ENOSYS;
}

#endif
