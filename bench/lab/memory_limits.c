// SPDX-License-Identifier: Apache-2.0
/* The job of bench/lab/memory_limits.py: memory_limits FILE GROW_MIB STEP_MIB PAUSE_MS
 *
 * Reads FILE by a mapping, page by page; takes GROW_MIB of memory of its own, STEP_MIB at once, with a
 * pause after each; reads FILE again. Each word of 8 bytes must be its offset. "read", "grown" and "read
 * again" are lines on stdout. Exit status 1: a wrong word; 2: a call failed.
 */
#include <err.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { PAGE = 4096 };

static void read_all(const char *file, size_t bytes, const char *done)
{
	for (size_t at = 0; at < bytes; at += PAGE) {
		uint64_t word = *(const volatile uint64_t *)(file + at);
		if (word != at)
			errx(1, "the word at %zu is %#jx", at, (uintmax_t)word);
	}
	puts(done);
}

int main(int argc, char **argv)
{
	if (argc != 5)
		errx(2, "usage: memory_limits FILE GROW_MIB STEP_MIB PAUSE_MS");
	int fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	struct stat status;
	if (fd < 0 || fstat(fd, &status))
		err(2, "%s", argv[1]);
	size_t bytes = (size_t)status.st_size, grow = strtoull(argv[2], NULL, 10) << 20;
	size_t step = strtoull(argv[3], NULL, 10) << 20;
	long pause = strtol(argv[4], NULL, 10);
	const char *file = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	char *own = mmap(NULL, grow, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (file == MAP_FAILED || own == MAP_FAILED || !step)
		err(2, "mmap");
	setlinebuf(stdout);
	read_all(file, bytes, "read");
	for (size_t at = 0; at < grow; at += step) {
		memset(own + at, 1, grow - at < step ? grow - at : step);
		nanosleep(&(struct timespec){pause / 1000, pause % 1000 * 1000000}, NULL);
	}
	puts("grown");
	read_all(file, bytes, "read again");
	return 0;
}
