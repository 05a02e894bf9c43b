// SPDX-License-Identifier: Apache-2.0
/*
 * scan.c - maps a cached file and reads it, PASSES times, a new mapping each time.
 *
 *   scan FILE PASSES STEP
 *
 * One 64-bit word per STEP bytes is read: 8 is a scan of all bytes, 65536 one fault after the other
 * and nothing else. Prints the seconds of all passes and the sum. For bench/tracecost.py.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

int main(int argc, char **argv)
{
	uint64_t sum = 0, step, passes;
	struct stat st;
	double start;
	int fd;

	if (argc != 4 || (fd = open(argv[1], O_RDONLY | O_CLOEXEC)) < 0 || fstat(fd, &st))
		return 2;
	passes = strtoull(argv[2], NULL, 0);
	step = strtoull(argv[3], NULL, 0);
	if (step < 8)
		return 2;
	start = now();
	for (uint64_t pass = 0; pass < passes; pass++) {
		const char *base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);

		if (base == MAP_FAILED)
			return 1;
		for (uint64_t at = 0; at + 8 <= (uint64_t)st.st_size; at += step)
			sum += *(const volatile uint64_t *)(base + at);
		munmap((void *)base, (size_t)st.st_size);
	}
	printf("%.6f %llu\n", now() - start, (unsigned long long)sum);
	return 0;
}
