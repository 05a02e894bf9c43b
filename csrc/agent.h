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
	int pidfd, bell_fd, uffd, uffd_error, socket, event_fd;
	int welcomed, hung_up, quit;
	int own_faults; /* this thread reads the uffd; else the service does */
	struct up_ring *ring;
	struct up_request *bye;
	uint32_t pending; /* regions that still have something to tell the service */
	uint32_t slots;   /* one past the highest slot ever used */
	uint32_t overlays, overlays_max;
	uint32_t connect_tries;
	uint64_t connect_at_ns, bye_at_ns;
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
