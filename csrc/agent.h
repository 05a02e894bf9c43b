/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent.h - what the agent's own files share: agent.c (life and the job's requests), checkpoint.c
 * (the mapping and its faults), link.c (the service). Only the agent's thread runs any of it.
 *
 * Nothing there may use TLS, errno or a libc function with state: only sys.h.
 */
#ifndef UP_AGENT_H
#define UP_AGENT_H

#include "job.h"
#include "sys.h"

#define NS_PER_MS 1000000ull

struct agent {
	int pidfd, bell_fd, uffd, uffd_error, pool_uffd, socket, event_fd;
	int welcomed, hung_up, quit;
	int own_faults; /* this thread reads the uffd; else the service does */
	struct up_ring *ring;
	struct up_request *bye;
	uint32_t pending; /* regions that still have something to tell the service */
	uint32_t slots;   /* one past the highest slot ever used */
	uint32_t overlays, overlays_max;
	uint32_t pooled; /* regions that the pool serves */
	uint32_t connect_tries;
	uint64_t connect_at_ns, bye_at_ns;
	uint64_t beat_ns, beat_at_ns; /* the service's last sign of life, and when to look again */
	int beat_missed;
	long steps;
};


#pragma GCC visibility push(hidden)

/* agent.c */
uint64_t up_now_ns(void);
void up_futex_wake(_Atomic uint32_t *word);
void up_close(int *fd);
/* Says what the agent is about to do; the campaign kills it, or the service, right there. */
void up_step(struct agent *a, uint32_t state);
void up_finish_bye(struct agent *a);

/* checkpoint.c: 0 or -errno */
int up_lay(struct agent *a, struct up_region *r, uint64_t page);
int up_take(struct agent *a, struct up_region *r, uint64_t page);
int up_rearm(struct agent *a, struct up_region *r, uint64_t page);
int up_drop(struct up_region *r, uint64_t page);
int up_map_file(struct agent *a, struct up_region *r, uintptr_t address, size_t length);
int up_renew(struct agent *a, struct up_region *r);
void up_detach(struct agent *a, struct up_region *r);
void up_on_faults(struct agent *a);
void up_check_beat(struct agent *a);

void up_wake_range(struct agent *a, uintptr_t address, size_t length);

/* pooled.c */
/* The pool's memory in place of a mapping whose address nobody knows yet: 0 or -errno. */
int up_pool_enter(struct agent *a, struct up_region *r, int memfd);
/* The file again; nothing of the pool stays behind. */
void up_pool_detach(struct agent *a, struct up_region *r);
void up_pool_release(struct up_region *r);
/* Whether the service has been silent for too long. */
void up_pool_check_beat(struct agent *a);
/* Who waits in mmap() or fork() may go on. */
void up_swap_end(struct up_region *r);

/* link.c */
void up_connect(struct agent *a);
void up_on_socket(struct agent *a);
void up_flush(struct agent *a);
int up_say_bye(struct agent *a);
void up_free_slot(struct up_region *r);
void up_queue(struct agent *a, struct up_region *r);
/* The mapping is the job's own again. The caller owns the region (it is CLOSING). */
void up_release(struct agent *a, struct up_region *r);
/* Detach and release, unless a thread of the job has taken the region already. */
void up_abandon(struct agent *a, struct up_region *r);

#pragma GCC visibility pop

#endif
