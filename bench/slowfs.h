/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slowfs.h - what the files of slowfs share
 */
#ifndef SLOWFS_H
#define SLOWFS_H

#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "slowfs_queue.h"

#define MAX_BACKGROUND	64	/* requests that the kernel lets be in flight */

struct counters {
	uint64_t requests, bytes, largest_request_bytes, most_in_flight, errors;
	uint64_t lookups, getattrs, opens, opendirs, readdirs;
};

/* The link, what passed it, and how the kernel is to cache. */
extern struct bed {
	pthread_mutex_t lock;
	struct due_queue reads;		/* of struct pending: the link */
	struct due_queue answers;	/* about names and attributes */
	struct due_queue going;		/* of struct invalidation */
	uint64_t in_flight;
	uint64_t pipe_free_ns;	/* when the last queued transfer ends */
	uint64_t bandwidth;	/* bytes/s, 0: no limit */
	uint64_t latency_us;
	uint64_t lookup_us;	/* of a request for names or attributes */
	struct counters count;
	double entry_seconds;	/* names and attributes are cached for so long */
	double missing_seconds;	/* and that there is no such name */
	bool no_keep_cache;	/* each open takes the file's pages away */
	bool direct_io;		/* no page is kept at all */
	bool writers_behind;	/* the source may change: attributes are not cached */
	bool told_of_closes;
	bool times_frozen;
	struct fuse_session *session;
} bed;

/* ---- slowfs_link.c: reads, and replies about names, when their time has come ---- */

struct pending {
	struct due due;
	fuse_req_t req;
	int fd;
	off_t offset;
	size_t size_bytes;
};

/* A reply about names or attributes, on its way for one latency of such requests. */
struct answer {
	struct due due;
	fuse_req_t req;
	enum answer_kind { ANSWER_ERROR, ANSWER_ENTRY, ANSWER_ATTRIBUTES, ANSWER_OPEN,
			   ANSWER_LISTING } kind;
	int err;
	struct fuse_entry_param entry;
	struct stat st;
	struct fuse_file_info fi;
	void (*close)(struct fuse_file_info *fi); /* where nobody takes what was opened */
	char *data;		/* freed with it */
	size_t data_bytes;
};

/* Queue a read: its reply comes when the link has brought it. */
void link_queue(struct pending *p);
void read_give(struct due *one);

/* At once. */
void answer_send(struct answer *a);
/* Give the answer when its time has come, from another thread; at once where nothing delays it. */
void answer(struct answer a);
void answer_error(fuse_req_t req, int err);
void answer_give(struct due *one);
void count_one(uint64_t *counter);

/* ---- slowfs_control.c: the control file's text, and its lines; 0 or -errno ---- */

int control_render(char **text);
int control_line(const char *line);
int parse_u64(const char *text, uint64_t *value);
int parse_seconds(const char *text, double *value);

#endif
