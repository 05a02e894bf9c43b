/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - what a replay is to do: the entries of a start profile, as requests (plan.c). */
#ifndef UP_REPLAY_PLAN_H
#define UP_REPLAY_PLAN_H

#include "service/helper.h"

/* Why an entry is not replayed; how each is told says replay.c. */
enum skip {
	SKIP_CHANGED = 0, /* another file lies there by now */
	SKIP_GONE = 1,
	SKIP_REFUSED = 2, /* for want of rights */
	SKIP_NO_FILE = 3, /* no regular file (no directory), or one whose bytes the kernel makes up */
	SKIP_FAILED = 4,
	SKIP_BUDGET = 5,
	SKIP_TIME = 6,
	SKIPS = 7,
};

struct plan {
	struct up_profile_header header; /* of the profile; of one that is none, its flaw */
	struct up_profile_entry entry;   /* the next one */
	struct up_profile *profile;
	uint64_t *range;                 /* of the next one, with what lies in small gaps */
	uint32_t ranges;
	uint64_t lustre_bytes, bytes;    /* to be read: from Lustre; in all */
	char *file;                      /* the profile, as it was read */
	uint64_t file_bytes;
	int number;                      /* of the profile in the list; -1: none */
};

/* The first of the paths that is a profile, all of which was looked through: 0, or -ENOENT. The list ends with NULL. */
int plan_open(struct plan *plan, char **paths);
void plan_close(struct plan *plan);
/* Goes on to the next entry; 0: there are no more. */
int plan_next(struct plan *plan);
/* Whether the entry's name alone says that nothing may be done with it. */
int plan_is_refused(const struct plan *plan);
/* To be read of the next entry. */
uint64_t plan_bytes(const struct plan *plan);
/* As a request; its number, and what bounds it, are the caller's. */
void plan_request(const struct plan *plan, struct up_path_request *out);
/* Requests at a time. */
int plan_depth(const struct plan *plan);
/* The part of a budget for which there is memory now. */
uint64_t plan_budget(uint64_t bytes);

#endif
