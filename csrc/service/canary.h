/* SPDX-License-Identifier: Apache-2.0 */
/*
 * canary.h - the first process that the kernel's OOM killer takes, and that holds it up.
 *
 * The killer takes who has the highest score, and nobody else as long as a victim has not ended (mm/oom_kill.c,
 * oom_evaluate_task()), for 2 s at the most (OOM_REAPER_DELAY). The canary is a process of some pages with the
 * highest score. It is traced, so it stops in its exit, until its tracer has freed memory and lets it go. Whoever
 * waits for memory meanwhile gets it, and nobody else is killed.
 *
 * Where processes cannot be traced there is none. Where memory.oom.group is set the kernel kills all at once.
 */
#ifndef UP_CANARY_H
#define UP_CANARY_H

#include <stdint.h>

struct up_canary;

/* What tells one thread from another is left to the caller: `free_memory` is called by the canary's own, which never
 * allocates. Until up_canary_end(). 0 or -errno. */
int up_canary_start(struct up_canary **out, void (*free_memory)(void *context), void *context,
		    uint64_t least_limit_bytes);
void up_canary_end(struct up_canary *canary);
/* How many the kernel has killed. */
uint32_t up_canary_deaths(const struct up_canary *canary);

#endif
