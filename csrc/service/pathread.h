/* SPDX-License-Identifier: Apache-2.0 */
/* pathread.h - what paths.c has of pathread.c, and that of pathtype.c, pathlist.c and pathdevice.c. */
#ifndef UP_PATHREAD_H
#define UP_PATHREAD_H

#include <stdatomic.h>

#include "service/helper.h"

/* Does what a request says, but for holding, and notes what came of it. Where it has read the file, the descriptor by
 * which it has, which is the caller's to close; else -1. `scratch`: UP_SCRATCH_BYTES. No further piece is read once
 * *stop is not 0. */
int up_path_read(const struct up_path_request *request, struct up_path_result *result, char *scratch,
		 const int *stop);

/* What is known of a device: f_type of statfs(2), 0: not yet; and whether it keeps names (pathlist.c). */
struct up_device {
	struct up_device *next;
	uint64_t number; /* st_dev */
	uint32_t f_type;
	atomic_int keeping;
};

/* That of a number; NULL: there is no memory. */
struct up_device *up_device_of(uint64_t number);

/* f_type of statfs(2) of the file system behind a descriptor (O_PATH suffices) of a file of this device: 0 or -errno.
 * A device is known after the first of its files; a file system has several where it says so (btrfs). */
int up_path_type(int fd, uint64_t device, uint32_t *f_type);
/* Whether the kernel itself makes up the bytes when they are read there, which may do something: a register of
 * a device, a line that is given once. */
int up_path_is_made_up(uint32_t f_type);

/* Has the names of a directory read, which `path_fd` (O_PATH) stands for, as far as *stop is 0. Its state and
 * its error are the result's. */
void up_path_list(int path_fd, struct up_path_result *result, char *scratch, const int *stop);

#endif
