/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guardian_inside.h - the guardian's own state: guardian.c (what it is told, and who needs it),
 * guardian_answer.c (faults), guardian_start.c (what it has inherited).
 */
#ifndef UP_GUARDIAN_INSIDE_H
#define UP_GUARDIAN_INSIDE_H

#include "service/pool/guardian.h"
#include "service/pool/pool.h"

struct held_client {
	int uffd, pidfd, maps_fd;
	int dead;    /* the process has ended: so has its agent */
	int lying;   /* looks at which a fault waited */
	int serving; /* its faults are answered here */
};

struct held_file {
	int memfd, fd;
	uint64_t size;
	struct up_vma memory; /* its number and device */
};

struct held_region {
	uint32_t client, id;
	int file;
	uint64_t address, length, offset;
};

struct guardian {
	int socket, epoll_fd;
	struct guardian_shared *shared;
	uint64_t page_bytes, beat_ns;
	int missed, alone; /* looks without a beat; there is no service any more */
	uint32_t looks;
	struct held_client client[POOL_CLIENTS];
	struct held_file file[POOL_FILES];
	struct held_region *region;
	size_t regions, room;
};

/* guardian_answer.c: what waits in a process's userfaultfd. */
void guardian_on_faults(uint32_t client);
/* guardian_start.c */
extern struct guardian g __attribute__((visibility("hidden")));
/* So that ps(1) tells it from the service: over the arguments, which are this process's own copy. Where
 * they lie. */
uintptr_t guardian_take_name(void);
/* Give back what a process that never returns has no use for: the interpreter's memory, which would be
 * copied page by page as the service writes its own, and what is mapped of the pool and of files. Kept are
 * this stack, this thread's block (errno), the arguments, and what follows an object's pages of a file, its
 * .bss. */
void guardian_shed(uintptr_t arguments);

#endif
