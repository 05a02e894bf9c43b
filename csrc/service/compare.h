/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.h - between the threads (checker.c) and what they do (compare.c).
 */
#ifndef UP_COMPARE_H
#define UP_COMPARE_H

#include <pthread.h>

#include "service/cond.h"
#include "service/helper.h"

#define CHECKER_QUEUE 256u
#define CHECKER_BATCH 64

struct up_checker {
	pthread_mutex_t lock;
	struct up_cond more;
	int threads, stop, event_fd, pagemap_fd;
	uint32_t head, tail, done_head, done_tail, under_way;
	struct up_compare_job job[CHECKER_QUEUE];
	struct up_compare_result result[CHECKER_QUEUE];
	pthread_t thread[];
};

/* What a thread works with. */
struct compare_turn {
	struct up_checker *checker;
	struct up_compare_job *job;
	struct up_compare_result *r;
	uint64_t page_bytes;
	char *buffer; /* CHECKER_BATCH pages, aligned */
	char *spare;  /* one more */
};

uint64_t compare_clock_ns(clockid_t clock);
/* One user more, who calls up_watch_put(). */
void compare_keep(struct up_watch *w);
/* One job, which may wait for storage. */
void compare_round(struct compare_turn *t);

#endif
