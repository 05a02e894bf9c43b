/* SPDX-License-Identifier: Apache-2.0 */
/* entries.h - what a replay is to do: the entries of a start profile, as requests (entries.c). */
#ifndef UP_REPLAY_ENTRIES_H
#define UP_REPLAY_ENTRIES_H

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

struct entries {
	struct up_profile_header header; /* of the profile; of one that is none, its flaw */
	struct up_profile_entry entry;   /* the next one */
	struct up_profile *profile;
	uint64_t *range;                 /* of the next one, with what lies in small gaps */
	uint32_t ranges;
	uint64_t lustre_bytes, bytes;    /* to be read: from Lustre; in all */
	char *file;                      /* the profile, as it was read */
	uint64_t file_bytes;
	int number;                      /* of the profile in the list; -1: none */
	int has_program, is_others;      /* whether one names what starts; whether a sound one does not */
};

/* The first of the paths that is a profile, all of which was looked through, and has the path of what starts, `program`
 * ("": nobody knows), among its own: 0; -ESRCH: those that are profiles have not; -EINVAL: none of those that are there
 * is one, and the header has the first one's flaw; -ENOENT: none is there. The list ends with NULL. */
int entries_open(struct entries *entries, char **paths, const char *program);
void entries_close(struct entries *entries);
/* Goes on to the next entry; 0: there are no more. */
int entries_next(struct entries *entries);
/* Whether the entry's name alone says that nothing may be done with it. */
int entries_is_refused(const struct entries *entries);
/* To be read of the next entry. */
uint64_t entries_bytes(const struct entries *entries);
/* As a request; its number, and what bounds it, are the caller's. */
void entries_request(const struct entries *entries, struct up_path_request *out);
/* Requests at a time, each of which takes a thread: so many as are asked for, or (0) as the file system likes, as far as
 * the job is left its own; 0: none may be had. */
int entries_depth(const struct entries *entries, int asked);
/* The part of a budget for which there is memory now. */
uint64_t entries_budget(uint64_t bytes);

#endif
