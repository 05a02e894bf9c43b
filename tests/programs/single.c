// SPDX-License-Identifier: Apache-2.0
/*
 * single.c - is this process still single-threaded in libc's eyes while its mapping is managed?
 *
 *     single FILE WAIT
 *
 * WAIT 1: until a checkpoint lies over the mapping. Prints __libc_single_threaded before and after,
 * and the process's threads as the kernel counts them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/single_threaded.h>
#include <sys/stat.h>
#include <unistd.h>

static int checkpoints(void)
{
	char text[512];
	FILE *maps = fopen("/proc/self/maps", "re");
	int n = 0;

	while (maps && fgets(text, sizeof(text), maps))
		n += strstr(text, "uffdprefetch-checkpoints") != NULL;
	if (maps)
		fclose(maps);
	return n;
}

static int threads(void)
{
	DIR *d = opendir("/proc/self/task");
	int n = 0;

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n - 2;
}

int main(int argc, char **argv)
{
	int fd = argc > 2 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
	int before = __libc_single_threaded;
	unsigned long sum = 0;
	struct stat st;
	char *map;

	if (fd < 0 || fstat(fd, &st))
		return 2;
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return 3;
	for (int i = 0; atoi(argv[2]) && !checkpoints(); i++) {
		if (i > 1000)
			return 4;
		usleep(50000);
		/* they come in mmap(2) or not at all: the service was not up in time */
		if (munmap(map, (size_t)st.st_size))
			return 3;
		map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
		if (map == MAP_FAILED)
			return 3;
	}
	for (off_t at = 0; at < st.st_size; at++)
		sum = sum * 31 + (unsigned char)map[at];
	printf("{\"before\": %d, \"after\": %d, \"sum\": %lu, \"threads\": %d}\n", before,
	       __libc_single_threaded, sum, threads());
	return 0;
}
