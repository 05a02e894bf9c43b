/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.h - fstat(2) that does not wait for storage: what the kernel knows already. fstat asks the
 * server of a network file system, or the FUSE daemon, as soon as the attributes are a second old.
 */
#ifndef UP_STATUS_H
#define UP_STATUS_H

#ifndef _GNU_SOURCE
#error "struct statx needs _GNU_SOURCE"
#endif
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "common/sys.h"

/* As the kernel's new_encode_dev(), which fstat answers by; makedev(3) is a function of libc's. */
static inline dev_t up_device(uint32_t major, uint32_t minor)
{
	return (dev_t)((minor & 0xff) | major << 8 | (uint64_t)(minor & ~0xffu) << 12);
}

/* Type, device, number, size, links, owner and times; 0 or -errno. ``sync``: AT_STATX_DONT_SYNC or _FORCE_SYNC.
 * Where a filter knows no statx(2) (containers of before 2018), by fstat. */
static inline long up_stat_as(int fd, int sync, struct stat *st)
{
	struct statx x;
	long ret = up_sys5(SYS_statx, fd, "", AT_EMPTY_PATH | sync, STATX_BASIC_STATS, &x);

	if (ret)
		return up_sys2(SYS_fstat, fd, st);
	*st = (struct stat){
		.st_mode = x.stx_mode,
		.st_dev = up_device(x.stx_dev_major, x.stx_dev_minor),
		.st_ino = x.stx_ino,
		.st_size = (off_t)x.stx_size,
		.st_nlink = x.stx_nlink,
		.st_uid = x.stx_uid,
		.st_mtim = { .tv_sec = x.stx_mtime.tv_sec, .tv_nsec = x.stx_mtime.tv_nsec },
		.st_ctim = { .tv_sec = x.stx_ctime.tv_sec, .tv_nsec = x.stx_ctime.tv_nsec },
	};
	return 0;
}

static inline long up_cached_stat(int fd, struct stat *st)
{
	return up_stat_as(fd, AT_STATX_DONT_SYNC, st);
}

#endif
