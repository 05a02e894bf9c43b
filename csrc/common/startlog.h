/* SPDX-License-Identifier: Apache-2.0 */
/*
 * startlog.h - what the processes of a job open while it starts: a memfd that all of them write (csrc/job/startlog.c)
 * and the service reads (uffdprefetch/native/start_log.py).
 *
 * Nothing in it is used twice: who is stopped, or killed, between taking a place and filling it spoils that place alone.
 * A place is filled once its slot says where its text lies. Whoever reads it bounds every word: any process of the job
 * may write anything there.
 *
 * What stands between the two marks is read by tools/cffi_build.py as it is: no preprocessor there.
 */
#ifndef UP_STARTLOG_H
#define UP_STARTLOG_H

#include <stdint.h>

/* cdef begin */

#define UP_START_LOG_BYTES 4194304
#define UP_START_SLOTS 65536
#define UP_START_MARKS 131072 /* a power of two: twice as many as there may be paths */
#define UP_START_TEXT_BYTES 3403776 /* what is left */
/* Of it, for paths that are not absolute, each of which is written as often as it is opened. */
#define UP_START_RELATIVE_BYTES 851968

enum up_start_kind {
	UP_START_OPEN = 1,
	UP_START_DIRECTORY = 2, /* the working directory of a process when it was loaded */
};

/* Followed by the path, which has no NUL; from a multiple of 8 on. */
struct up_start_entry {
	int32_t pid;       /* of the process, or of one that it was forked from */
	int32_t directory; /* of openat(2) */
	uint32_t flags;    /* of open(2) */
	uint16_t bytes;    /* of the path */
	uint8_t kind;
	uint8_t missing; /* ENOENT, or ENOTDIR */
};

struct up_start_log {
	uint64_t taken;          /* slots << 32 | bytes of text */
	uint64_t relative_bytes; /* of them */
	uint64_t lost;           /* what was opened when there was no place any more */
	uint64_t unused[5];
	uint32_t over; /* written by the service: nothing more is wanted. On a line that is never written else */
	uint32_t more[1007];
	uint32_t slot[UP_START_SLOTS]; /* 1 + where its text lies, in words of 8 bytes; 0: not filled */
	uint32_t mark[UP_START_MARKS]; /* of absolute paths that are known */
	unsigned char text[UP_START_TEXT_BYTES];
};

/* cdef end */

_Static_assert(sizeof(struct up_start_log) == UP_START_LOG_BYTES, "as long as the memfd");

#endif
