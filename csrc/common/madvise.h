/* SPDX-License-Identifier: Apache-2.0 */
/* madvise.h - what sys/mman.h lacks on machines that are older than the kernel (Linux 5.14). */
#ifndef UP_MADVISE_H
#define UP_MADVISE_H

#include <sys/mman.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* the kernel's, mman-common.h */
#endif

#endif
