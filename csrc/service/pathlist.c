// SPDX-License-Identifier: Apache-2.0
/*
 * pathlist.c - has the kernel read the names in a directory, as a program does that is about to ask for some of them.
 *
 * Nobody looks at the names here (listing.c does): NFS and Lustre keep them. FUSE does where its daemon has said so
 * (FOPEN_CACHE_DIR) and else asks it each time; so the first directory of a device is listed twice, and where the names
 * are asked for again no other one is: that would be three requests for nothing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/pathread.h"
#include "service/reading.h"

/* Whether a device's names are kept. */
enum keeping { IS_UNKNOWN = 0, IS_LISTED = 1, IS_KEPT = 2, IS_NOT_KEPT = 3 };

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

/* Twice, if nobody has listed another directory of this device before. */
static int list_and_learn(int fd, atomic_int *keeping, char *scratch, const int *stop)
{
	int was = IS_UNKNOWN, is_first = keeping && atomic_compare_exchange_strong(keeping, &was, IS_LISTED), err;
	long before = up_waits(), waits;

	err = list(fd, scratch, stop);
	if (!is_first)
		return err;
	waits = up_waits() - before;
	before = up_waits();
	if (!err && waits && !lseek(fd, 0, SEEK_SET))
		err = list(fd, scratch, stop);
	if (err || __atomic_load_n(stop, __ATOMIC_RELAXED))
		was = IS_UNKNOWN;
	else
		was = waits && up_waits() - before >= waits ? IS_NOT_KEPT : IS_KEPT;
	atomic_store(keeping, was);
	return err;
}

void up_path_list(int path_fd, struct up_path_result *r, char *scratch, const int *stop)
{
	struct up_device *device;
	atomic_int *keeping;
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
	device = up_device_of(st.st_dev);
	keeping = device ? &device->keeping : NULL;
	if (!err && keeping && atomic_load(keeping) == IS_NOT_KEPT) {
		r->state = UP_PATH_DONE; /* it was looked up */
		return;
	}
	fd = err ? err : open_to_list(path_fd);
	if (fd >= 0) {
		r->opened_ns = up_now_ns();
		err = list_and_learn(fd, keeping, scratch, stop);
		close(fd);
	} else {
		err = fd;
	}
	if (err)
		r->error = -err;
	else
		r->state = UP_PATH_DONE;
}
