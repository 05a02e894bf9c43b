// SPDX-License-Identifier: Apache-2.0
/*
 * pathread.c - reads a file by name into the page cache: all of it, or ranges; or finds out what the page cache keeps;
 * or has the kernel look a name up, or a directory's names.
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
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "service/helper.h"
#include "service/pathread.h"
#include "service/reading.h"

/* One read: the time between two looks at whether it is to go on. */
#define PIECE_BYTES (1u << 20)
/* What one FADV_WILLNEED always brings where it does anything: VM_READAHEAD_PAGES (linux/pagemap.h). */
#define ADVICE_BYTES (128u << 10)
/* Nobody who keeps a pace sleeps for longer without a look whether it is to go on. */
#define NAP_NS 50000000ull

/* ---- which file it is ---- */

static void fail(struct up_path_result *r, int error)
{
	r->state = UP_PATH_FAILED;
	r->error = error;
}

/* All that are made up say that no block is used; few others do. It is asked each time: a service outlives mounts,
 * whose devices' numbers are given to others. */
static int is_made_up(int fd, const struct stat *st)
{
	struct statfs fs;

	return !st->st_blocks && !fstatfs(fd, &fs) && up_path_is_made_up((uint32_t)fs.f_type);
}

/* Whether it is as it was when the caller saw it. */
static int is_expected(const struct up_path_request *q, int fd, const struct up_path_result *r)
{
	const struct up_path_expected *e = &q->expected;
	uint32_t f_type;

	if (!e->is_given)
		return 1;
	return r->size_bytes == e->size_bytes && r->mtime_ns == e->mtime_ns &&
	       !up_path_type(fd, r->device, &f_type) && f_type == e->f_type;
}

static void note(struct up_path_result *r, const struct stat *st)
{
	r->device = st->st_dev;
	r->inode = st->st_ino;
	r->size_bytes = (uint64_t)st->st_size;
	r->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

/* Notes what it is, and whether it is to be read. */
static int look_at(const struct up_path_request *q, int fd, struct up_path_result *r,
		   struct stat *st)
{
	if (fstat(fd, st)) {
		fail(r, errno);
		return 0;
	}
	note(r, st);
	if (q->inode && (r->inode != q->inode || r->device != q->device))
		r->state = UP_PATH_ANOTHER;
	else if (!S_ISREG(st->st_mode))
		r->state = UP_PATH_NOT_REGULAR;
	else if (!is_expected(q, fd, r))
		r->state = UP_PATH_ANOTHER;
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

/* The turn of so many bytes among all that keep it. */
static void keep_pace(struct up_path_pace *p, uint64_t bytes, const int *stop)
{
	uint64_t takes_ns = (uint64_t)((double)bytes * 1e9 / (double)p->bytes_per_second);
	uint64_t next = __atomic_load_n(&p->next_ns, __ATOMIC_RELAXED), begin, now = up_now_ns();

	do
		begin = next > now ? next : now;
	while (!__atomic_compare_exchange_n(&p->next_ns, &next, begin + takes_ns, 0, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED));
	for (; now < begin && !__atomic_load_n(stop, __ATOMIC_RELAXED); now = up_now_ns()) {
		uint64_t until = begin - now < NAP_NS ? begin : now + NAP_NS;
		struct timespec ts = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };

		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
	}
}

/* [at, end) in pieces. Of each all is asked for before its first page is waited for. */
static int read_range(const struct up_path_request *q, int fd, uint64_t at, uint64_t end,
		      struct up_path_result *r, char *scratch, const int *stop)
{
	uint64_t most = q->piece_bytes ? q->piece_bytes : PIECE_BYTES;

	if (most > UP_READ_BYTES)
		most = UP_READ_BYTES;
	while (at < end && !__atomic_load_n(stop, __ATOMIC_RELAXED)) {
		uint64_t piece = end - at < most ? end - at : most;
		long before;
		ssize_t n;

		if (q->pace)
			keep_pace(q->pace, piece, stop);
		before = up_waits();
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

	/* A request is twice as large as the file system's readahead then (mm/fadvise.c); with FADV_RANDOM, too. */
	posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
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

/* Its first page, read twice by each of two opens, and its attributes: what of it waits? */
static int probe(int path_fd, const struct stat *st, struct up_path_result *r, char *scratch)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int look = UP_LOOK_COLD;

	for (int i = 0; i < 2; i++) {
		int fd = open_for_reading(path_fd, st), err = 0;
		struct statfs fs;
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
			r->file_system = fstatfs(fd, &fs) ? 0 : (uint32_t)fs.f_type;
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

/* The name is looked up, as by the job's own stat(2), and the attributes. */
static void look_up(const struct up_path_request *q, struct up_path_result *r)
{
	struct stat st;

	if (fstatat(q->directory_fd, q->name, &st,
		    AT_NO_AUTOMOUNT | (q->follow ? 0 : AT_SYMLINK_NOFOLLOW))) {
		fail(r, errno);
		return;
	}
	note(r, &st);
	r->state = UP_PATH_DONE;
}

int up_path_read(const struct up_path_request *q, struct up_path_result *r, char *scratch,
		 const int *stop)
{
	int path_fd, fd = -1;

	r->begin_ns = up_now_ns();
	if (q->kind == UP_PATH_LOOK_UP) {
		look_up(q, r);
		return -1;
	}
	path_fd = openat(q->directory_fd, q->name, O_PATH | O_CLOEXEC | (q->follow ? 0 : O_NOFOLLOW));
	if (path_fd < 0) {
		fail(r, errno);
		return -1;
	}
	if (q->kind == UP_PATH_LIST)
		up_path_list(path_fd, r, scratch, stop);
	else
		fd = read_found(q, path_fd, r, scratch, stop);
	close(path_fd);
	return fd;
}
