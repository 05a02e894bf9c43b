/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - where the bytes of a chunk come from (source.c).
 */
#ifndef UP_SOURCE_H
#define UP_SOURCE_H

#include <stdint.h>

#include "service/helper.h"

/* UP_SPILLED: from the disk tier. */
enum up_source_way { UP_DIRECT = 1, UP_BUFFERED, UP_CACHED, UP_SPILLED };

struct up_source {
	int given; /* a duplicate of the caller's: not read, its flags and advice are his */
	/* Descriptions of our own, opened by whoever reads first: open(2) may wait as long as a read.
	 * direct_fd UP_BUFFERED_ONLY: the file system cannot; -1: not opened yet. */
	int fd, direct_fd;
	uint64_t size;
	/* Of a file system whose pages go by path a new description reads what lies at the path now. */
	int by_path;
	struct up_file_status was;
};

#define UP_NO_SOURCE { .given = -1, .fd = -1, .direct_fd = -1 }
#define UP_BUFFERED_ONLY (-2)

/* Waits for nothing. 0 or -errno. fd stays the caller's. was: NULL, or what the file must still be when it is opened
 * for reading; else reads fail with -ESTALE. */
int up_source_open(struct up_source *source, int fd, uint64_t size_bytes, const struct up_file_status *was);
void up_source_close(struct up_source *source);
/* The bytes [offset, +length) of the file, whole, or -errno: -ENODATA when it is shorter than it
 * was. buffer is aligned to a page and has room up to the next page. */
int up_source_read(struct up_source *source, char *buffer, uint64_t length, uint64_t offset,
		   enum up_source_way *way);
/* [offset, +length) of the file of fd into the memfd, by a mapping, which takes no inode's lock: 0 or -errno (-EFAULT:
 * the file is shorter, or cannot be read). What was not cached before is not afterwards. */
int up_source_bring_by_mapping(int memfd, int fd, uint64_t offset, uint64_t length);

#endif
