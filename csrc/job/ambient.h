/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ambient.h - what a thread of ours must not take over from the thread that happened to make it
 * (ambient.c). Each works on the calling thread alone, and is 0 or -errno.
 */
#ifndef UP_AMBIENT_H
#define UP_AMBIENT_H

/* SCHED_OTHER, as nice as the process is, on every CPU that its cpuset allows. -EPERM: an ordinary
 * user's thread may not leave SCHED_IDLE, and readers would wait for it behind everybody. */
int up_settle_scheduling(void) __attribute__((visibility("hidden")));
/* No capability is left, and none can come: after what needs one has been opened. */
int up_drop_rights(void) __attribute__((visibility("hidden")));

#endif
