/* SPDX-License-Identifier: Apache-2.0 */
/* vma.h - what lies at an address of a process, asked of the kernel. */
#ifndef UP_VMA_H
#define UP_VMA_H

#include <stdint.h>

/* A mapping as the kernel tells of it. The device is the one of /proc/PID/maps, which on btrfs and on
 * overlayfs may be another than stat(2)'s: compare it with its like only. */
struct up_vma {
	uint64_t start, end, offset, inode;
	uint32_t device_major, device_minor;
	int readable, writable, executable, shared;
};

/* maps_fd: /proc/PID/maps, for one thread at a time. 0 or -errno; -ENOENT: nothing is mapped there. */
int up_vma_at(int maps_fd, uintptr_t address, struct up_vma *out);
/* The same, or the next one above. */
int up_vma_from(int maps_fd, uintptr_t address, struct up_vma *out);
/* Whether they are of one file. */
int up_vma_of_one_file(const struct up_vma *one, const struct up_vma *other);
/* ... with the same rights. */
int up_vma_alike(const struct up_vma *one, const struct up_vma *other);

#endif
