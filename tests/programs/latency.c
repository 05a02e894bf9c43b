// SPDX-License-Identifier: Apache-2.0
/*
 * latency.c - a reader that times every first touch of a page.
 *
 *     latency FILE
 *
 * Reads FILE page by page, pass after pass (the page table is emptied between them), until a line
 * comes on stdin; for each pass it compares all bytes with what read(2) gave. Says its pid
 * after the first one, and a dot on stderr after each. At the end, as JSON: touches, and how long the slow ones took (ns): those above the
 * cost of a mapped page are faults, of the kernel's own and of checkpoints.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define KEPT 262144u

static uint64_t kept[KEPT];

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	int fd = argc > 1 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
	struct pollfd input = { 0, POLLIN, 0 };
	uint64_t passes = 0, touches = 0, slow = 0, most = 0;
	volatile char byte;
	size_t bytes, n;
	struct stat st;
	char *map, *copy;

	if (fd < 0 || fstat(fd, &st))
		return 2;
	bytes = (size_t)st.st_size;
	map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	copy = malloc(bytes);
	if (map == MAP_FAILED || !copy || pread(fd, copy, bytes, 0) != (ssize_t)bytes)
		return 3;
	while (poll(&input, 1, 0) == 0) {
		madvise(map, bytes, MADV_DONTNEED);
		for (size_t at = 0; at < bytes; at += PAGE) {
			uint64_t start = now_ns(), took;

			byte = map[at];
			took = now_ns() - start;
			touches++;
			most = took > most ? took : most;
			if (took > 1000)
				kept[slow++ % KEPT] = took;
		}
		if (memcmp(map, copy, bytes))
			return 4;
		if (!passes++)
			printf("{\"pid\": %d}\n", (int)getpid());
		fflush(stdout);
		fputc('.', stderr);
	}
	(void)byte;
	n = slow < KEPT ? slow : KEPT;
	qsort(kept, n, sizeof(kept[0]), ascending);
	printf("{\"passes\": %lu, \"touches\": %lu, \"slow\": %lu, \"p50_ns\": %lu, "
	       "\"p99_ns\": %lu, \"max_ns\": %lu}\n",
	       passes, touches, slow, n ? kept[n / 2] : 0, n ? kept[n * 99 / 100] : 0, most);
	return 0;
}
