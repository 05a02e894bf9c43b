/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reads.h - between the thread that looks who reads (reads.c), a look at one process (reads_look.c), and the texts of
 * /proc (reads_text.c).
 */
#ifndef UP_READS_H
#define UP_READS_H

#include "service/helper.h"

/* Longer than any text that is read: /proc/PID/task/TID/stat is the longest. */
#define READS_TEXT_BYTES 1024
/* Of a process; those beyond are not looked at. */
#define READS_THREADS_MAX 4096
/* Of what one look finds: each thread once. */
#define READS_FOUND_MAX 4096
/* Descriptors of a process whose fdinfo is kept open, or, where nothing else can be seen, followed. */
#define READS_FILES_MAX 64
/* For so long a thread or a process is looked at as often as can be after it was seen reading: as LATELY_NS of
 * predict/bounds.py. */
#define READS_LATELY_NS 1000000000ull

/* Of descriptors, of all processes together. */
struct reads_budget {
	uint32_t kept, most;
};

struct reads_thread {
	int tid;
	int syscall_fd, io_fd, stat_fd; /* -1: not kept open */
	uint64_t looked_ns, active_ns;  /* 0: never */
	int by_position;                /* the call that was told of last reads at its descriptor's position */
	char wait_state;                /* D or I, in which the thread waits there; 0: it does not wait for storage */
	struct up_read_sighting last;   /* what was told of it last; at_ns 0: nothing yet */
};

/* A descriptor of the job's whose fdinfo is looked at. */
struct reads_file {
	int fd, info_fd;    /* -1: free; not kept open */
	int is_file;        /* by fdinfo: a regular file, opened to be read only */
	uint64_t used_ns;
	struct up_read_sighting last; /* by fdinfo: what was told of it last */
};

struct reads_process {
	struct reads_process *next;
	int pid, task_fd, io_fd; /* task_fd: of /proc/PID/task; what is opened by it is of no later process */
	int is_removed;          /* by the service's thread, under the lock */
	int is_stale, files_stale;
	uint64_t links, fds, listed_ns, hot_ns, probed_ns;
	uint32_t n_threads, capacity, turn; /* turn: whose it is of the threads that are looked at in turns */
	struct reads_thread *thread;
	struct reads_file file[READS_FILES_MAX];
	struct up_read_process now, told; /* told: under the lock */
};

/* One look: at whom, with what, and what was found. */
struct reads_look {
	struct reads_budget budget;
	uint64_t now_ns;
	uint32_t found;
	char text[READS_TEXT_BYTES];
	struct up_read_sighting sighting[READS_FOUND_MAX];
};

/* --- reads_text.c --- */
/* The text of /proc/PID/task/`name` in look->text, by the descriptor *kept, or, where that is -1, by one that is kept
 * open if there is room for it. Its length or -errno. */
int reads_text(struct reads_look *look, int task_fd, int *kept, const char *name);
void reads_drop(struct reads_look *look, int *kept);
/* What stands behind `word` in look->text, or 0. */
uint64_t reads_number(const struct reads_look *look, const char *word, int base);
/* A text of `syscall`. nr -1: in no call, as in a page fault. Whether it waits at all. */
struct reads_call {
	long nr;
	uint64_t arg[6];
};
int reads_parse_call(const char *text, struct reads_call *out);
/* The call as one that reads, with what it asks for; offset -1: it reads at its descriptor's position. Whether it is
 * one; those that read where only the job's memory says are none. */
int reads_is_read(const struct reads_call *call, struct up_read_sighting *out);
/* Whether a thread in state `state` waits for a file system: by the call where that alone says so. */
int reads_waits(const struct reads_call *call, char state);
/* Whether the state has to be asked for. */
int reads_may_wait(const struct reads_call *call);
/* Of a text of `stat`. */
char reads_state(const char *text);

/* --- reads_look.c --- */
/* 0 or -errno. */
int reads_begin(struct reads_process *p, int pid);
void reads_end(struct reads_process *p, struct reads_look *look);
/* Whether it is to be looked at again as soon as can be. */
int reads_look_at(struct reads_process *p, struct reads_look *look);

#endif
