// SPDX-License-Identifier: Apache-2.0
/*
 * residency.c - which pages are in the page cache, and which ones a process has in its page table.
 *
 * Kernel differences are decided by trying, newest first:
 *   cachestat(2)        6.5   (commit cf264e1329fb)  counts pages that nobody touched yet
 *   mincore(2)          always; for a file that the caller neither owns nor may write it says
 *                       "resident" for every page (commit 134fca9063ad)
 *   PAGEMAP_SCAN        6.7   (commit 52526ca7fdb9)
 *   /proc/PID/pagemap   always
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/helper.h"
#include "common/pagemap.h"
#include "common/status.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
/* statx(2) of Linux 6.8 (commit 98d2b43081972abeb5bb5a087bc3e3197531c46e), which libc's header may not know. */
#define MNT_ID_UNIQUE 0x4000u
#define MNT_ID_AT 144

struct cachestat_range_ {
	uint64_t offset, length;
};

struct cachestat_ {
	uint64_t cache, dirty, writeback, evicted, recently_evicted;
};

static int64_t by_cachestat(int fd, uint64_t offset, uint64_t length, uint64_t page)
{
	struct cachestat_range_ range = { offset, length };
	struct cachestat_ stat;

	if (syscall(SYS_cachestat, fd, &range, &stat, 0))
		return -errno;
	return (int64_t)(stat.cache * page);
}

int up_file_status(int fd, int asked, struct up_file_status *out)
{
	struct stat st;
	long ret = up_stat_as(fd, asked ? AT_STATX_FORCE_SYNC : AT_STATX_DONT_SYNC, &st);

	if (!ret)
		*out = (struct up_file_status){ .links = st.st_nlink, .inode = st.st_ino,
			.size_bytes = (uint64_t)st.st_size,
			.mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec,
			.ctime_ns = (int64_t)st.st_ctim.tv_sec * 1000000000 + st.st_ctim.tv_nsec };
	return (int)ret;
}

int up_file_deleted(int fd)
{
	char path[32], name[PATH_MAX];
	struct stat st;
	long ret = up_cached_stat(fd, &st);
	ssize_t length;

	if (ret)
		return (int)ret;
	if (!st.st_nlink)
		return 1;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	length = readlink(path, name, sizeof(name) - 1);
	if (length < 0)
		return -errno;
	name[length] = '\0';
	const char *last = strrchr(name, '/');
	return last && (!strncmp(last, "/.nfs", 5) || !strncmp(last, "/.fuse_hidden", 13));
}

uint64_t up_mount_of(int fd)
{
	union {
		struct statx x;
		char room[256];
	} status = { .room = { 0 } };
	uint64_t number = 0;

	if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, MNT_ID_UNIQUE, &status))
		return 0;
	if (status.x.stx_mask & MNT_ID_UNIQUE)
		memcpy(&number, status.room + MNT_ID_AT, sizeof(number));
	return number;
}

/* mincore's own rule (mm/mincore.c, can_do_mincore): the owner, or who may write. */
static int may_ask(int fd)
{
	char path[32];
	struct stat st;

	if (!up_cached_stat(fd, &st) && st.st_uid == geteuid())
		return 1;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return !faccessat(AT_FDCWD, path, W_OK, AT_EACCESS);
}

static int64_t by_mincore(int fd, uint64_t offset, uint64_t length, uint64_t page)
{
	uint64_t start = offset & ~(page - 1), end = offset + length;
	size_t pages = (size_t)((end - start + page - 1) / page);
	unsigned char *bit = malloc(pages);
	int64_t resident = 0;
	void *p;

	if (!bit)
		return -ENOMEM;
	p = mmap(NULL, pages * page, PROT_READ, MAP_SHARED, fd, (off_t)start);
	if (p == MAP_FAILED) {
		resident = -errno;
		free(bit);
		return resident;
	}
	if (mincore(p, pages * page, bit))
		resident = -errno;
	for (size_t i = 0; resident >= 0 && i < pages; i++)
		resident += (bit[i] & 1) * (int64_t)page;
	munmap(p, pages * page);
	free(bit);
	return resident;
}

int64_t up_resident_bytes(int fd, uint64_t offset, uint64_t length, int *sensor)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	int64_t bytes;

	*sensor = UP_CACHESTAT;
	if (!length)
		return 0;
	bytes = by_cachestat(fd, offset, length, page);
	if (bytes < 0 && bytes != -EPERM && !may_ask(fd))
		bytes = -EPERM;
	if (bytes < 0 && bytes != -EPERM) {
		*sensor = UP_MINCORE;
		bytes = by_mincore(fd, offset, length, page);
	}
	return bytes > (int64_t)length ? (int64_t)length : bytes;
}

/* What the kernel has counted as read from storage by this thread (Linux: task I/O accounting):
 * bytes, or -1. Anybody may ask for his own. */
int64_t up_thread_storage_bytes(void)
{
	int fd = open("/proc/thread-self/io", O_RDONLY | O_CLOEXEC);
	char text[512], *at;
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (fd >= 0)
		close(fd);
	if (n <= 0)
		return -1;
	text[n] = 0;
	at = strstr(text, "\nread_bytes: ");
	return at ? strtoll(at + strlen("\nread_bytes: "), NULL, 10) : -1;
}

/* ------------------------------------------------------------------ page tables */

#define SCAN_REGIONS 512

static int by_scan(int fd, uint64_t address, uint64_t length, uint64_t *run, int max_runs,
		   uint64_t *next)
{
	struct up_scanned vec[SCAN_REGIONS];
	struct up_scan arg = {
		.size = sizeof(arg),
		.start = address,
		.end = address + length,
		.vec = (uintptr_t)vec,
		.vec_len = max_runs < SCAN_REGIONS ? (uint64_t)max_runs : SCAN_REGIONS,
		.category_mask = UP_IS_PRESENT,
		.return_mask = UP_IS_PRESENT,
	};
	int n = ioctl(fd, UP_PAGEMAP_SCAN, &arg);

	if (n < 0)
		return -errno;
	for (int i = 0; i < n; i++) {
		run[2 * i] = vec[i].start;
		run[2 * i + 1] = vec[i].end - vec[i].start;
	}
	*next = arg.walk_end;
	return n;
}

static int by_pagemap(int fd, uint64_t address, uint64_t length, uint64_t *run, int max_runs,
		      uint64_t *next)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t entry[1024];
	uint64_t at = address, end = address + length;
	int n = 0;

	while (at < end) {
		size_t want = (size_t)((end - at + page - 1) / page);
		ssize_t got;

		if (want > 1024)
			want = 1024;
		got = pread(fd, entry, want * 8, (off_t)(at / page * 8));
		if (got < 0)
			return -errno;
		if (got < 8)
			return -ESRCH; /* the address space is gone */
		for (ssize_t i = 0; i < got / 8; i++, at += page) {
			if (!(entry[i] & UP_ENTRY_PRESENT))
				continue;
			if (n && run[2 * n - 2] + run[2 * n - 1] == at) {
				run[2 * n - 1] += page;
				continue;
			}
			if (n == max_runs) {
				*next = at;
				return n;
			}
			run[2 * n] = at;
			run[2 * n + 1] = page;
			n++;
		}
	}
	*next = end;
	return n;
}

int up_touched_runs(int pagemap_fd, uint64_t address, uint64_t length, uint64_t *run, int max_runs,
		    uint64_t *next)
{
	static int no_scan = -1;
	int n;

	if (__atomic_load_n(&no_scan, __ATOMIC_RELAXED) < 0) /* as on a kernel before 6.7, for tests */
		__atomic_store_n(&no_scan, getenv("UFFDPREFETCH_TEST_NO_PAGEMAP_SCAN") != NULL, __ATOMIC_RELAXED);
	if (!__atomic_load_n(&no_scan, __ATOMIC_RELAXED)) {
		n = by_scan(pagemap_fd, address, length, run, max_runs, next);
		if (n >= 0 || !up_has_no_scan(-n))
			return n;
		__atomic_store_n(&no_scan, 1, __ATOMIC_RELAXED);
	}
	return by_pagemap(pagemap_fd, address, length, run, max_runs, next);
}
