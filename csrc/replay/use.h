/* SPDX-License-Identifier: Apache-2.0 */
/* use.h - how much of what a replay has read its job has opened by now (use.c). */
#ifndef UP_REPLAY_USE_H
#define UP_REPLAY_USE_H

#include <stdint.h>

#include "common/startlog.h"

/* Processes whose directory is known: of more than that of late the older ones' is not. */
#define USE_DIRECTORIES 4096u

struct use {
	const struct up_start_log *log; /* NULL: not found yet */
	uint64_t *known;                /* hashes of paths, in the lowest bits what is known of each */
	uint32_t paths, slots_seen;     /* in `known`; of the log */
	uint32_t read, used;            /* files; of them, opened by the job */
	uint32_t began_in[USE_DIRECTORIES]; /* by pid: 1 + the slot that says where a process was loaded */
};

/* 0 or -ENOMEM. */
int use_create(struct use *use);
void use_destroy(struct use *use);
/* A file is read, which the job is to open by this path. */
void use_read(struct use *use, const char *path);
/* Whether the job's start log is found, at a path that lies in a file from an offset on as soon as somebody knows it. */
int use_find(struct use *use, int fd, uint64_t at);
/* What the job has opened since. */
void use_look(struct use *use);

#endif
