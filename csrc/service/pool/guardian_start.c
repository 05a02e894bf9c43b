// SPDX-License-Identifier: Apache-2.0
/*
 * guardian_start.c - what the guardian knows, and what it does with what it has inherited from the service.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "service/pool/guardian_inside.h"

struct guardian g;

/* The number in a field of /proc/self/stat; 0: there is none. */
static uintptr_t stat_field(const char *text, ssize_t length, int field)
{
	uintptr_t number = 0;
	int at = 0;

	for (ssize_t i = 0; i < length; i++) {
		if (text[i] == ')') /* the last one ends the second field: a name may have some */
			at = 2;
		else if (text[i] == ' ')
			at++;
		else if (at == field && text[i] >= '0' && text[i] <= '9')
			number = number * 10 + (uintptr_t)(text[i] - '0');
	}
	return number;
}

uintptr_t guardian_take_name(void)
{
	static const char name[] = "uffdprefetch guardian";
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	char text[1024];
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));
	uintptr_t start = stat_field(text, n, 48), end = stat_field(text, n, 49);

	prctl(PR_SET_NAME, "uffdprefetch/g");
	if (fd >= 0)
		close(fd);
	if (start && end > start + sizeof(name)) {
		memset((void *)start, 0, end - start);
		memcpy((void *)start, name, sizeof(name));
	}
	return start;
}

void guardian_shed(uintptr_t arguments)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	(void)arguments; /* their shadow is such memory */
#else
	int maps_fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	uintptr_t at = 0, here = (uintptr_t)__builtin_frame_address(0), own = (uintptr_t)&errno;
	uintptr_t shared = (uintptr_t)g.shared;
	uint64_t file_end = 0;
	struct up_vma v;

	while (maps_fd >= 0 && !up_vma_from(maps_fd, at, &v)) {
		uint64_t length = v.end - v.start;
		int anybodys = v.shared || (!v.inode && v.writable && v.start != file_end);

		if (anybodys && here - v.start >= length && own - v.start >= length && shared - v.start >= length &&
		    arguments - v.start >= length)
			munmap((void *)(uintptr_t)v.start, v.end - v.start);
		if (v.inode)
			file_end = v.end;
		at = v.end;
	}
	if (maps_fd >= 0)
		close(maps_fd);
#endif
}
