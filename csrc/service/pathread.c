// SPDX-License-Identifier: Apache-2.0
/*
 * pathread.c - reads a file by name into the page cache: all of it, or ranges; or finds out what the page cache keeps.
 *
 * A name may mean anything by the time that it is opened. It is opened with O_PATH, which calls no file system's or
 * driver's open, and what it stands for is opened for reading only if it is a regular file with bytes in it (an open of
 * a FIFO takes the writer's bytes) and, where the caller knows which, that very file. Symbolic links are followed, as
 * the job's own open follows them: data sets are often directories of links; what they lead to is looked at in the
 * same way.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "service/helper.h"
#include "service/pathread.h"
#include "service/reading.h"

/* One read: the time between two looks at whether it is to go on. */
#define PIECE_BYTES (1u << 20)
/* What one FADV_WILLNEED always brings where it does anything: VM_READAHEAD_PAGES (linux/pagemap.h). */
#define ADVICE_BYTES (128u << 10)
/* CONFIGFS_MAGIC (fs/configfs/mount.c), which linux/magic.h lacks. */
#define CONFIGFS 0x62656570

/* ---- which file it is ---- */

static void fail(struct up_path_result *r, int error)
{
	r->state = UP_PATH_FAILED;
	r->error = error;
}

/* Whether the kernel itself makes up the bytes when they are read, which may do something: a register of a device, a
 * line that is given once. All of these say that no block is used; few others do. */
static int is_made_up(int fd, const struct stat *st)
{
	struct statfs fs;

	if (st->st_blocks || fstatfs(fd, &fs))
		return 0;
	switch ((unsigned long)fs.f_type) {
	case PROC_SUPER_MAGIC:
	case SYSFS_MAGIC:
	case DEBUGFS_MAGIC:
	case TRACEFS_MAGIC:
	case SECURITYFS_MAGIC:
	case SELINUX_MAGIC:
	case CGROUP_SUPER_MAGIC:
	case CGROUP2_SUPER_MAGIC:
	case RDTGROUP_SUPER_MAGIC:
	case EFIVARFS_MAGIC:
	case PSTOREFS_MAGIC:
	case BPF_FS_MAGIC:
	case CONFIGFS:
		return 1;
	default:
		return 0;
	}
}

/* Notes what it is, and whether it is to be read. */
static int look_at(const struct up_path_request *q, int fd, struct up_path_result *r,
		   struct stat *st)
{
	if (fstat(fd, st)) {
		fail(r, errno);
		return 0;
	}
	r->device = st->st_dev;
	r->inode = st->st_ino;
	r->size_bytes = (uint64_t)st->st_size;
	r->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
	if (q->inode && (st->st_ino != q->inode || st->st_dev != q->device))
		r->state = UP_PATH_ANOTHER;
	else if (!S_ISREG(st->st_mode))
		r->state = UP_PATH_NOT_REGULAR;
	else if (st->st_size <= 0)
		r->state = UP_PATH_EMPTY;
	else if (is_made_up(fd, st))
		r->state = UP_PATH_NOT_REGULAR;
	return !r->state;
}

/* The same file for reading: a descriptor or -errno. Its time of access stays where we may have that. With O_NONBLOCK
 * a lease of a writer is not waited for (-EAGAIN). */
static int open_for_reading(int path_fd, const struct stat *st)
{
	const int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY;
	uid_t me = geteuid();
	char name[32];
	int fd = -1;

	snprintf(name, sizeof(name), "/proc/self/fd/%d", path_fd);
	if (me == st->st_uid || !me)
		fd = open(name, flags | O_NOATIME);
	else
		errno = EPERM;
	if (fd < 0 && errno == EPERM)
		fd = open(name, flags);
	return fd < 0 ? -errno : fd;
}

/* ---- its bytes ---- */

static void ask_for(int fd, uint64_t at, uint64_t length)
{
	for (uint64_t i = 0; i < length; i += ADVICE_BYTES)
		posix_fadvise(fd, (off_t)(at + i),
			      (off_t)(length - i < ADVICE_BYTES ? length - i : ADVICE_BYTES),
			      POSIX_FADV_WILLNEED);
}

/* [at, end) in pieces. Of each all is asked for before its first page is waited for. */
static int read_range(const struct up_path_request *q, int fd, uint64_t at, uint64_t end,
		      struct up_path_result *r, char *scratch, const int *stop)
{
	while (at < end && !__atomic_load_n(stop, __ATOMIC_RELAXED)) {
		uint64_t piece = end - at < PIECE_BYTES ? end - at : PIECE_BYTES;
		long before = up_waits();
		ssize_t n;

		/* Where it does nothing, pread reads it all the same. */
		if (q->method != UP_WARM_PREAD)
			ask_for(fd, at, piece);
		n = up_read_over(fd, piece, at, scratch);
		if (n <= 0)
			return n ? -errno : 0; /* or it has become shorter */
		r->bytes += (uint64_t)n;
		if (r->waited_bytes || up_waits() - before > (long)q->cached_waits)
			r->waited_bytes += (uint64_t)n;
		at += (uint64_t)n;
	}
	return 0;
}

static int read_ranges(const struct up_path_request *q, int fd, struct up_path_result *r,
		       char *scratch, const int *stop)
{
	const uint64_t whole[2] = { 0, r->size_bytes };
	const uint64_t *range = q->ranges ? q->range : whole;
	uint64_t left = q->most_bytes ? q->most_bytes : UINT64_MAX;
	uint32_t count = q->ranges ? q->ranges : 1;
	int err = 0;

	/* Nothing beside what was asked for: no readahead of the kernel's own. */
	if (q->ranges || left < r->size_bytes)
		posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint32_t i = 0; i < count && left && !err; i++) {
		uint64_t at = range[2 * i], length = range[2 * i + 1];

		if (at >= r->size_bytes)
			continue;
		if (length > r->size_bytes - at)
			length = r->size_bytes - at;
		if (length > left)
			length = left;
		left -= length;
		err = read_range(q, fd, at, at + length, r, scratch, stop);
	}
	return err;
}

/* ---- what the page cache keeps here ---- */

static void begin_look(struct up_path_result *r, int look)
{
	r->look_waits[look] = (uint32_t)up_waits();
	r->look_ns[look] = up_now_ns();
}

static void end_look(struct up_path_result *r, int look)
{
	r->look_ns[look] = up_now_ns() - r->look_ns[look];
	r->look_waits[look] = (uint32_t)up_waits() - r->look_waits[look];
}

/* FUSE maps no file MAP_SHARED whose pages it does not cache (FOPEN_DIRECT_IO; fs/fuse/file.c), unless its daemon has
 * said that it may (FUSE_DIRECT_IO_ALLOW_MMAP). */
static int is_mappable(int fd, size_t page)
{
	void *map = mmap(NULL, page, PROT_READ, MAP_SHARED, fd, 0);

	if (map == MAP_FAILED)
		return errno != ENODEV;
	munmap(map, page);
	return 1;
}

/* 0: it cannot be told. */
static uint32_t file_system_of(int fd)
{
	struct statfs fs;

	return fstatfs(fd, &fs) ? 0 : (uint32_t)fs.f_type;
}

/* Its first page, read twice by each of two opens, and its attributes: what of it waits? */
static int probe(int path_fd, const struct stat *st, struct up_path_result *r, char *scratch)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int look = UP_LOOK_COLD;

	for (int i = 0; i < 2; i++) {
		int fd = open_for_reading(path_fd, st), err = 0;
		struct stat again;

		if (fd < 0)
			return fd;
		if (!r->opened_ns)
			r->opened_ns = up_now_ns();
		posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
		for (int j = 0; j < 2 && !err; j++, look++) {
			ssize_t n;

			begin_look(r, look);
			n = up_read_over(fd, page, 0, scratch);
			end_look(r, look);
			if (n < 0)
				err = -errno;
			else
				r->bytes += (uint64_t)n;
		}
		if (!err && i) {
			begin_look(r, UP_LOOK_STATUS);
			err = fstat(fd, &again) ? -errno : 0;
			end_look(r, UP_LOOK_STATUS);
			r->mappable = (uint32_t)is_mappable(fd, page);
			r->file_system = file_system_of(fd);
		}
		close(fd);
		if (err)
			return err;
	}
	return 0;
}

/* ---- one request ---- */

/* Of the file that the name stands for: the descriptor by which it is read, if all went well. */
static int read_found(const struct up_path_request *q, int path_fd, struct up_path_result *r,
		      char *scratch, const int *stop)
{
	struct stat st;
	int fd, err;

	if (!look_at(q, path_fd, r, &st))
		return -1;
	if (q->kind == UP_PATH_PROBE) {
		fd = -1;
		err = probe(path_fd, &st, r, scratch);
	} else {
		fd = open_for_reading(path_fd, &st);
		r->opened_ns = up_now_ns();
		err = fd < 0 ? fd : read_ranges(q, fd, r, scratch, stop);
		/* FUSE has forgotten the time of access, for which the job's own fstat(2) would ask the server. */
		if (!err && r->waited_bytes)
			err = fstat(fd, &st) ? -errno : 0;
	}
	r->state = UP_PATH_DONE;
	if (!err)
		return fd;
	fail(r, -err);
	if (fd >= 0)
		close(fd);
	return -1;
}

int up_path_read(const struct up_path_request *q, struct up_path_result *r, char *scratch,
		 const int *stop)
{
	int path_fd, fd = -1;

	r->begin_ns = up_now_ns();
	path_fd = openat(q->directory_fd, q->name, O_PATH | O_CLOEXEC | (q->follow ? 0 : O_NOFOLLOW));
	if (path_fd < 0) {
		fail(r, errno);
		return -1;
	}
	fd = read_found(q, path_fd, r, scratch, stop);
	close(path_fd);
	return fd;
}
