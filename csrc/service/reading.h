/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reading.h - how a thread of the service reads a file into the page cache, when nobody looks at the bytes (warm.c,
 * paths.c).
 */
#ifndef UP_READING_H
#define UP_READING_H

#include <stdint.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>

/* The most that up_read_over() reads: on Lustre one RPC; 8 MiB and more bypass the cache there. */
#define UP_READ_BYTES (4u << 20)
/* Where a thread reads to: nobody looks at the bytes, but at those of a page that is copied, which are no more. */
#define UP_SCRATCH_BYTES (64u << 10)

/* How often this thread has slept for something: a read of what is in the page cache does not. Unlike what is resident
 * anybody may ask for it, whosever the file is. */
static inline long up_waits(void)
{
	struct rusage usage = { 0 };

	getrusage(RUSAGE_THREAD, &usage);
	return usage.ru_nvcsw;
}

static inline uint64_t up_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* pread(2) of up to UP_READ_BYTES in one call, all to the same place: what a buffer of that size would take of memory
 * for each thread is the job's. */
static inline ssize_t up_read_over(int fd, size_t length, uint64_t at, char *scratch)
{
	struct iovec part[UP_READ_BYTES / UP_SCRATCH_BYTES];
	int n = 0;

	for (size_t left = length; left; left -= part[n++].iov_len)
		part[n] = (struct iovec){ scratch, left < UP_SCRATCH_BYTES ? left : UP_SCRATCH_BYTES };
	return preadv(fd, part, n, (off_t)at);
}

#endif
