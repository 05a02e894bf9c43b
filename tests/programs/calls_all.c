// SPDX-License-Identifier: Apache-2.0
/*
 * calls_all.c - calls mmap, munmap, open64, setuid and syscall once each, all arguments meant.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	char *p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = open64("/dev/zero", O_RDONLY);

	if (p == MAP_FAILED || fd < 0)
		return 1;
	/* The sixth argument counts, too: a file's second page. */
	if ((void *)syscall(SYS_mmap, p, 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 4096L) != p)
		return 2;
	errno = 0;
	if (syscall(SYS_close, -1) != -1 || errno != EBADF)
		return 3;
	if (munmap(p, 8192) || setuid(getuid()))
		return 4;
	return write(1, "done\n", 5) != 5;
}
