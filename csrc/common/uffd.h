/* SPDX-License-Identifier: Apache-2.0 */
/* uffd.h - what linux/userfaultfd.h lacks on machines that are older than the kernel (Linux 6.6). */
#ifndef UP_UFFD_H
#define UP_UFFD_H

#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/ioctl.h>

#ifndef UFFDIO_POISON
struct uffdio_poison {
	struct uffdio_range range;
	uint64_t mode;
	int64_t updated;
};
#define UFFDIO_POISON _IOWR(UFFDIO, 0x08, struct uffdio_poison)
#endif

#endif
