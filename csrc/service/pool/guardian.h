/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guardian.h - between the pool (guardian_link.c) and the process that outlives it (guardian.c).
 */
#ifndef UP_GUARDIAN_H
#define UP_GUARDIAN_H

#include <stdint.h>

/* Memory that both share. */
struct guardian_shared {
	uint64_t beat_ns; /* the pool's: its last sign of life */
	/* The guardian's, as in struct up_ring: 2 a fill, odd while one is under way; and the bytes. */
	uint64_t stand_ins, stand_in_bytes;
};

/* What the pool says, one message each, with the descriptors in this order; -1 for one that it lacks. */
enum guardian_note_kind {
	GUARDIAN_JOIN = 1, /* userfaultfd, pidfd, /proc/PID/maps */
	GUARDIAN_LEAVE,    /* what was the process's is nobody's any more */
	GUARDIAN_FILE,     /* the pool's memory to write, the file */
	GUARDIAN_FORGET,   /* a file */
	GUARDIAN_MAP,
	GUARDIAN_UNMAP,
};

#define GUARDIAN_FDS 3

struct guardian_note {
	uint32_t kind, has; /* has: a bit for each descriptor that is there */
	uint32_t client, file, region;
	uint64_t address, length, offset; /* GUARDIAN_FILE: length is the file's */
};

/* Never returns. `socket`: the pool's other end; all other descriptors are closed. */
void guardian_main(int socket, struct guardian_shared *shared, uint64_t page_bytes) __attribute__((noreturn));

#endif
