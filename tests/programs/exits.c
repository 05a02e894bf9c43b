// SPDX-License-Identifier: Apache-2.0
/*
 * exits.c - a reader that goes on until its agent has ended, and then does it all once more.
 *
 *     exits FILE LOG
 *
 * The agent ends at a step of its own (UFFDPREFETCH_TEST_AGENT_EXIT) and writes LOG. Until then this
 * program drives it through every state: touches, mappings given back in part, mappings that come
 * and go. All bytes are compared with what read(2) gave; at last the mapping itself goes to stdout,
 * by write(2). Status 0: all was right; 5: the agent did not end in PATIENCE_SECONDS.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Less than who runs it waits: what did not come is told. */
#define PATIENCE_SECONDS 40

static char *copy;
static size_t bytes;
static int fd;

static char *map_all(void)
{
	char *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

	if (map == MAP_FAILED)
		exit(10);
	return map;
}

static void check(const char *map, size_t from, size_t to, int status)
{
	if (memcmp(map + from, copy + from, to - from))
		exit(status);
}

static void come_and_go(void)
{
	size_t half = bytes / 2 & ~4095ul;
	char *map = map_all();

	check(map, 0, bytes, 11);
	if (munmap(map + half, bytes - half))
		exit(12);
	check(map, 0, half, 13);
	if (munmap(map, half))
		exit(14);
}

int main(int argc, char **argv)
{
	struct stat st;
	char *map;
	int status, ended = 0;
	time_t end = time(NULL) + PATIENCE_SECONDS;
	pid_t pid;

	if (argc < 3)
		return 2;
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st))
		return 3;
	bytes = (size_t)st.st_size;
	copy = malloc(bytes);
	if (!copy || pread(fd, copy, bytes, 0) != (ssize_t)bytes)
		return 3;
	map = map_all();
	for (int i = 0; !ended && time(NULL) < end; i++) {
		madvise(map, bytes, MADV_DONTNEED);
		check(map, 0, bytes, 20);
		if (i % 2 == 0)
			come_and_go();
		if (i % 32 == 31) { /* it may have been given back: offer it anew */
			if (munmap(map, bytes))
				return 25;
			map = map_all();
		}
		ended = !stat(argv[2], &st) && st.st_size > 0;
	}
	if (!ended)
		return 5;
	for (int i = 0; i < 2; i++) {
		come_and_go();
		madvise(map, bytes, MADV_DONTNEED);
		check(map, 0, bytes, 21);
	}
	pid = fork();
	if (pid == 0) {
		check(map, 0, bytes, 1);
		come_and_go();
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status)
		return 22;
	madvise(map, bytes, MADV_DONTNEED);
	for (size_t at = 0; at < bytes;) {
		ssize_t n = write(1, map + at, bytes - at);

		if (n <= 0)
			return 23;
		at += (size_t)n;
	}
	return munmap(map, bytes) ? 24 : 0;
}
