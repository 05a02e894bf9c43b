// SPDX-License-Identifier: Apache-2.0
/*
 * source.c - where the bytes of a chunk come from: here, the file itself.
 *
 * Past the page cache where the file system can (O_DIRECT), so that no second copy lies there;
 * else through it, and then out of it again. What another program has in the page cache already is
 * taken from there and stays. Another source (an SSD, a peer) is another struct up_source.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/madvise.h"
#include "service/helper.h"
#include "service/pool/source.h"

/* A multiple of every block device's logical block and of the page. */
#define ALIGN 4096u

static int reopen(int fd, int flags)
{
	char path[32];
	int again;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
	return again < 0 ? -errno : again;
}

int up_source_open(struct up_source *s, int fd, uint64_t size_bytes, const struct up_file_status *was)
{
	int given = fcntl(fd, F_DUPFD_CLOEXEC, 0);

	if (given < 0)
		return -errno;
	*s = (struct up_source)UP_NO_SOURCE;
	s->given = given;
	s->size = size_bytes;
	if (was) {
		s->by_path = 1;
		s->was = *was;
	}
	return 0;
}

/* Of several that open at the same time, one's is kept. */
static void keep(int *where, int fd)
{
	int none = -1;

	if (!__atomic_compare_exchange_n(where, &none, fd, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) &&
	    fd >= 0)
		close(fd);
}

/* After the opens: whoever replaces the file later leaves these descriptions what they are. */
static int still_is(int fd, const struct up_file_status *was)
{
	struct up_file_status now;
	int ret = up_file_status(fd, 1, &now);

	if (ret)
		return ret;
	return now.inode == was->inode && now.size_bytes == was->size_bytes && now.mtime_ns == was->mtime_ns &&
	       now.ctime_ns == was->ctime_ns ? 0 : -ESTALE;
}

static int open_both(struct up_source *s)
{
	int own, direct, ret;

	if (__atomic_load_n(&s->fd, __ATOMIC_ACQUIRE) >= 0)
		return 0;
	own = reopen(s->given, 0);
	if (own < 0)
		return own;
	direct = reopen(s->given, O_DIRECT);
	ret = s->by_path ? still_is(own, &s->was) : 0;
	if (ret) {
		close(own);
		if (direct >= 0)
			close(direct);
		return ret;
	}
	/* Our reads are the whole of what we want: readahead would fill the page cache with more. */
	posix_fadvise(own, 0, 0, POSIX_FADV_RANDOM);
	keep(&s->direct_fd, direct < 0 ? UP_BUFFERED_ONLY : direct);
	keep(&s->fd, own);
	return 0;
}

void up_source_close(struct up_source *s)
{
	up_close_file(s->given);
	up_close_file(s->fd);
	up_close_file(s->direct_fd);
	*s = (struct up_source)UP_NO_SOURCE;
}

/* All of it, or -errno; at the file's end `length` may reach up to the next multiple of ALIGN. */
static int read_all(int fd, char *buffer, uint64_t length, uint64_t offset, uint64_t size)
{
	uint64_t need = offset + length > size ? size - offset : length, at = 0;

	while (at < need) {
		ssize_t n = pread(fd, buffer + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -ENODATA; /* the file has become shorter */
		if (at + (uint64_t)n < need && n < (ssize_t)ALIGN)
			return -EIO;
		at += (uint64_t)n;
		if (at < need)
			at -= at % ALIGN; /* O_DIRECT goes on at a block only */
	}
	return 0;
}

int up_source_read(struct up_source *s, char *buffer, uint64_t length, uint64_t offset,
		   enum up_source_way *way)
{
	uint64_t whole = (length + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
	int sensor, ret = open_both(s);
	int fd = __atomic_load_n(&s->fd, __ATOMIC_ACQUIRE);
	int direct_fd = __atomic_load_n(&s->direct_fd, __ATOMIC_ACQUIRE);
	int64_t cached;

	if (ret)
		return ret;
	cached = up_resident_bytes(fd, offset, length, &sensor);
	*way = UP_CACHED;
	if (cached == (int64_t)length)
		return read_all(fd, buffer, length, offset, s->size);
	*way = UP_DIRECT;
	if (direct_fd >= 0) { /* some file systems open so and refuse to read so */
		ret = read_all(direct_fd, buffer, whole, offset, s->size);
		if (ret != -EINVAL && ret != -EOPNOTSUPP)
			return ret;
	}
	*way = UP_BUFFERED;
	ret = read_all(fd, buffer, length, offset, s->size);
	if (!ret && cached <= 0)
		posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
	return ret;
}

int up_source_bring_by_mapping(int memfd, int fd, uint64_t offset, uint64_t length)
{
	char *m = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, (off_t)offset);
	int sensor, ret = 0;
	uint64_t at = 0;
	int64_t cached;

	if (m == MAP_FAILED)
		return -errno;
	cached = up_resident_bytes(fd, offset, length, &sensor);
	madvise(m, length, MADV_POPULATE_READ); /* else the memfd is locked while storage is read */
	while (!ret && at < length) {
		ssize_t n = pwrite(memfd, m + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno != EINTR)
			ret = -errno; /* EFAULT: the file is shorter by now */
		else if (n > 0)
			at += (uint64_t)n;
	}
	munmap(m, length);
	if (cached <= 0)
		posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
	return ret;
}
