// SPDX-License-Identifier: Apache-2.0
/*
 * stopped_disk.so - preloaded: what is open past the page cache, for reading and writing, is not read as long as there
 * is a file of the name in STOPPED, nor written while there is one of that in STOPPED_WRITES. What is open with the flags
 * in SLOW (a number) is read by 10 MB/s.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static void wait_for(int fd, const char *name)
{
	if ((fcntl(fd, F_GETFL) & (O_ACCMODE | O_DIRECT)) == (O_RDWR | O_DIRECT))
		while (name && !access(name, F_OK))
			usleep(1000);
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset)
{
	static ssize_t (*next)(int, void *, size_t, off_t);

	if (!next)
		next = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
	if (getenv("SLOW") && (fcntl(fd, F_GETFL) & (O_ACCMODE | O_DIRECT)) == atoi(getenv("SLOW")))
		usleep((useconds_t)(length / 10));
	wait_for(fd, getenv("STOPPED"));
	return next(fd, buffer, length, offset);
}

ssize_t pread64(int fd, void *buffer, size_t length, off_t offset)
{
	return pread(fd, buffer, length, offset);
}

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset)
{
	static ssize_t (*next)(int, const void *, size_t, off_t);

	if (!next)
		next = (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
	wait_for(fd, getenv("STOPPED_WRITES"));
	return next(fd, buffer, length, offset);
}

ssize_t pwrite64(int fd, const void *buffer, size_t length, off_t offset)
{
	return pwrite(fd, buffer, length, offset);
}
