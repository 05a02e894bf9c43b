// SPDX-License-Identifier: Apache-2.0
/*
 * alone.c FILE - map it read-only, as a reader of a data set does, and say what was found there and how
 * many threads this process has. For builds under sanitizers, for valgrind, for other C libraries.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int threads(void)
{
	DIR *tasks = opendir("/proc/self/task");
	int count = 0;

	for (struct dirent *e; tasks && (e = readdir(tasks));)
		count += e->d_name[0] != '.';
	if (tasks)
		closedir(tasks);
	return count;
}

static uint64_t sum(const unsigned char *p, size_t bytes)
{
	uint64_t found = 0;

	for (size_t at = 0; at < bytes; at += 512)
		found = found * 31 + p[at];
	return found;
}

int main(int argc, char **argv)
{
	int fd = open(argv[argc - 1], O_RDONLY), status;
	int *heap = malloc(64 * sizeof(*heap));
	unsigned char *p;
	struct stat st;
	pid_t child;

	if (fd < 0 || fstat(fd, &st))
		return 90;
	p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return 91;
	heap[5] = threads();
	printf("sum %llx, threads %d\n", (unsigned long long)sum(p, (size_t)st.st_size), heap[5]);
	fflush(stdout);
	child = fork();
	if (!child)
		_exit(sum(p, (size_t)st.st_size) % 64);
	if (waitpid(child, &status, 0) != child || !WIFEXITED(status))
		return 92;
	printf("child %d\n", WEXITSTATUS(status));
	if (munmap(p, (size_t)st.st_size) || close(fd))
		return 93;
	free(heap);
	return 0;
}
