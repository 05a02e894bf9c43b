/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keeper.h - between the pool (keeper_link.c) and the process that outlives it (keeper.c).
 */
#ifndef UP_KEEPER_H
#define UP_KEEPER_H

#include <stdint.h>

/* Memory that both share. */
struct keeper_shared {
	uint64_t beat_ns; /* the pool's: its last sign of life */
	/* The keeper's, as in struct up_ring: 2 a fill, odd while one is under way; and the bytes. */
	uint64_t stand_ins, stand_in_bytes;
};

/* What the pool says, one message each, with the descriptors in this order; -1 for one that it lacks. */
enum keeper_note_kind {
	KEEPER_JOIN = 1, /* userfaultfd, pidfd, /proc/PID/maps */
	KEEPER_LEAVE,    /* what was the process's is nobody's any more */
	KEEPER_FILE,     /* the pool's memory to write, the file */
	KEEPER_FORGET,   /* a file */
	KEEPER_MAP,
	KEEPER_UNMAP,
};

#define KEEPER_FDS 3

struct keeper_note {
	uint32_t kind, has; /* has: a bit for each descriptor that is there */
	uint32_t client, file, region;
	uint64_t address, length, offset; /* KEEPER_FILE: length is the file's */
};

/* Never returns. `socket`: the pool's other end; all other descriptors are closed. */
void keeper_main(int socket, struct keeper_shared *shared, uint64_t page_bytes) __attribute__((noreturn));

#endif
