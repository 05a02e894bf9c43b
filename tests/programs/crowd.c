// SPDX-License-Identifier: Apache-2.0
/*
 * crowd.c - how many mappings does this process have at most, and does it still work?
 *
 *     crowd FILE MAX_MAP_COUNT
 *
 * Maps FILE and counts its own mappings until they grow no more. Then it starts threads, maps and
 * allocates. Prints the count before and the highest.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static long count(void)
{
	static char text[1 << 16];
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	long n = 0, got;

	while ((got = read(fd, text, sizeof(text))) > 0)
		for (long i = 0; i < got; i++)
			n += text[i] == '\n';
	close(fd);
	return n;
}

static void *nothing(void *arg)
{
	return arg;
}

int main(int argc, char **argv)
{
	int fd = argc > 2 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1, same = 0;
	long before, now, highest = 0, last = 0;
	pthread_t thread[16];
	struct stat st;
	char *map;

	if (fd < 0 || fstat(fd, &st))
		return 2;
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return 3;
	before = count();
	for (int i = 0; i < 4000 && (same < 10 || highest < before + 1000); i++) {
		now = count();
		highest = now > highest ? now : highest;
		same = now == last ? same + 1 : 0;
		last = now;
		usleep(5000);
	}
	for (int i = 0; i < 16; i++)
		if (pthread_create(&thread[i], NULL, nothing, NULL))
			return 4;
	for (int i = 0; i < 16; i++)
		pthread_join(thread[i], NULL);
	for (int i = 0; i < 1000; i++)
		if (mmap(NULL, 4096, i % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			 0) == MAP_FAILED)
			return 5;
	for (off_t at = 0; at < st.st_size; at += 4096)
		if (map[at])
			return 6;
	printf("%ld %ld\n", before, highest);
	return 0;
}
