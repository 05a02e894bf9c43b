// SPDX-License-Identifier: Apache-2.0
/*
 * pathlist.c - has the kernel read the names in a directory, as a program does that is about to ask for some of them.
 *
 * Nobody looks at the names here (listing.c does): FUSE and NFS keep them and, with them, the attributes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/pathread.h"
#include "service/reading.h"

static int open_to_list(int path_fd)
{
	const int flags = O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC;
	int fd = openat(path_fd, ".", flags | O_NOATIME);

	if (fd < 0 && errno == EPERM) /* somebody else's */
		fd = openat(path_fd, ".", flags);
	return fd < 0 ? -errno : fd;
}

static int list(int fd, char *scratch, const int *stop)
{
	long n = 1;

	while (n > 0 && !__atomic_load_n(stop, __ATOMIC_RELAXED))
		n = syscall(SYS_getdents64, fd, scratch, UP_SCRATCH_BYTES);
	return n < 0 ? -errno : 0;
}

void up_path_list(int path_fd, struct up_path_result *r, char *scratch, const int *stop)
{
	struct stat st;
	uint32_t f_type;
	int fd, err;

	r->state = UP_PATH_FAILED;
	if (fstat(path_fd, &st)) {
		r->error = errno;
		return;
	}
	r->device = st.st_dev;
	r->inode = st.st_ino;
	err = S_ISDIR(st.st_mode) ? up_path_type(path_fd, st.st_dev, &f_type) : 0;
	if (!S_ISDIR(st.st_mode) || (!err && up_path_is_made_up(f_type))) {
		r->state = UP_PATH_NOT_REGULAR;
		return;
	}
	fd = err ? err : open_to_list(path_fd);
	if (fd >= 0) {
		r->opened_ns = up_now_ns();
		err = list(fd, scratch, stop);
		close(fd);
	} else {
		err = fd;
	}
	if (err)
		r->error = -err;
	else
		r->state = UP_PATH_DONE;
}
