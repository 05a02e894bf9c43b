// SPDX-License-Identifier: Apache-2.0
/* vfork.c - map a file, vfork children that call into the memory functions, read all again. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int fd = argc > 1 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1, right = 0;
	struct stat st;
	char *map, *copy;

	if (fd < 0 || fstat(fd, &st))
		return 2;
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	copy = malloc((size_t)st.st_size);
	if (map == MAP_FAILED || !copy || pread(fd, copy, (size_t)st.st_size, 0) != st.st_size)
		return 3;
	for (int i = 0; i < 40; i++) {
		pid_t pid = vfork();
		int status;

		if (pid == 0) {
			/* on the parent's memory and stack: as little as POSIX allows, and a madvise,
			 * which an allocator may well do here */
			madvise(map, (size_t)st.st_size, MADV_DONTNEED);
			if (i % 2)
				execl("/bin/true", "true", (char *)NULL);
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
			return 4;
		right += !memcmp(map, copy, (size_t)st.st_size);
	}
	printf("%d right\n", right);
	return 0;
}
