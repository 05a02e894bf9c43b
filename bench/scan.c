// SPDX-License-Identifier: Apache-2.0
/*
 * scan.c - maps a cached file and reads it, PASSES times, a new mapping each time; or reads it by pread(2).
 *
 *   scan FILE PASSES STEP [pread]
 *
 * One 64-bit word per STEP bytes is read: 8 is a scan of all bytes, 65536 one fault after the other
 * and nothing else. With pread, STEP bytes are read at a time, a call for each. Prints the seconds of all passes
 * and the sum. For bench/tracecost.py.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static int by_mapping(int fd, uint64_t size, uint64_t step, uint64_t *sum)
{
	const char *base = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0);

	if (base == MAP_FAILED)
		return 1;
	for (uint64_t at = 0; at + 8 <= size; at += step)
		*sum += *(const volatile uint64_t *)(base + at);
	munmap((void *)base, (size_t)size);
	return 0;
}

static int by_pread(int fd, uint64_t size, uint64_t step, uint64_t *sum)
{
	static uint64_t piece[8192];

	for (uint64_t at = 0; at + step <= size; at += step) {
		if (pread(fd, piece, (size_t)step, (off_t)at) != (ssize_t)step)
			return 1;
		*sum += piece[0];
	}
	return 0;
}

int main(int argc, char **argv)
{
	int reads = argc == 5 && !strcmp(argv[4], "pread");
	uint64_t sum = 0, step, passes;
	struct stat st;
	double start;
	int fd;

	if (argc != 4 + reads || (fd = open(argv[1], O_RDONLY | O_CLOEXEC)) < 0 || fstat(fd, &st))
		return 2;
	passes = strtoull(argv[2], NULL, 0);
	step = strtoull(argv[3], NULL, 0);
	if (step < 8 || (reads && step > 65536))
		return 2;
	start = now();
	for (uint64_t pass = 0; pass < passes; pass++)
		if ((reads ? by_pread : by_mapping)(fd, (uint64_t)st.st_size, step, &sum))
			return 1;
	printf("%.6f %llu\n", now() - start, (unsigned long long)sum);
	return 0;
}
