/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent.h - what the files of our own threads in the job share. There are two, in one descriptor table
 * that is not the job's:
 *   the agent (agent.c)       speaks with the service and with the job's threads, and does what may
 *                             sleep: it maps, advises, asks the kernel
 *   the responder (respond.c) reads the userfaultfd and continues what it tells of, nothing else
 * The agent reads the userfaultfd, too: one of them may sleep, or be dead, and nobody waits.
 *
 * Nothing here may use TLS, errno or a libc function with state: only sys.h.
 */
#ifndef UP_AGENT_H
#define UP_AGENT_H

#include "job/job.h"
#include "common/sys.h"

#define NS_PER_MS 1000000ull
/* One of our two threads notices so late that the other has ended, or that all of the job's have. */
#define UP_ALONE_LOOK_NS (250 * NS_PER_MS)
/* The responder answers touches. Were the agent to poll for them as well, each touch would wake both, and
 * take twice as long; so it looks this often whether one is left lying. */
#define UP_TAKE_OVER_NS (50 * NS_PER_MS)
/* Who has left a region changes it right after: what the kernel then tells of it is theirs for so long. */
#define UP_LEFT_NS (1000 * NS_PER_MS)

/* Directed at one of ours, blocked there and read by signalfd: what the job does with it does not
 * matter, because a blocked signal is queued even where it is ignored. But reading takes what was
 * sent to the whole process as well (kernel/signal.c, dequeue_signal), so it must be one that no
 * kernel and no program sends: the fault of a coprocessor's stack that Linux never had. */
#define UP_BELL SIGSTKFLT

/* What may wait to be told: as much as the job's threads can say at once. */
#define UP_STATEMENTS UP_REQUESTS
/* The same of what has been touched: a message for each mapping that goes. */
#define UP_TOUCHES UP_REQUESTS

/* What a thread of ours waits for. */
enum up_source { UP_BELL_RINGS, UP_OVERLAYS_TELL, UP_SERVICE_SAYS, UP_POOL_TELLS, UP_SOURCES };

struct up_wait {
	int fd;
	int refused;                 /* something could not be added: all is looked at */
	uint32_t events[UP_SOURCES]; /* of epoll(7), that are waited for */
};

/* Files of which an agent can give the lease back: more than a job maps at a time, few descriptors. */
#define UP_LEASES 64

/* A descriptor of the service's description of a file, which has a read lease. */
struct up_lease {
	uint64_t device, inode;
	uint64_t breaking_ns; /* when it was first seen that somebody waits for it; 0: nobody does */
	int fd;
};

struct agent {
	/* the agent's; the responder's; what only looks whether something waits in the userfaultfd */
	struct up_wait wait, listen, left;
	int pidfd, bell_fd, uffd_error, pool_uffd, socket, event_fd, maps_fd, task_fd, stat_fd, pagemap_fd;
	_Atomic int uffd; /* -1: none, or closed for good (up_close_overlays) */
	int welcomed, hung_up, quit, ends;
	_Atomic int stop; /* the responder shall end */
	_Atomic int posting; /* one of the two writes the event ring */
	_Atomic int acting;  /* the agent takes checkpoints away by address; events are not read meanwhile */
	_Atomic int reading; /* the responder reads the userfaultfd, as soon as the agent does not act */
	uint64_t left_at_ns; /* when regions that a thread of the job has left may be let go of */
	uint64_t waited_until_ns; /* the longer from now, the more has been waited in mmap(); see may_wait() */
	struct up_ring *ring;
	struct up_request *bye;
	uint32_t pending; /* regions that still have something to tell the service */
	uint32_t stated;  /* what the job has said and the service has not heard */
	struct up_statement statement[UP_STATEMENTS];
	uint32_t touches; /* what was seen of mappings that go, and the service has not heard */
	struct up_touched touched[UP_TOUCHES];
	int no_scan; /* the kernel has no PAGEMAP_SCAN */
	uint64_t looks_at_ns; /* when up_job.looks was raised last */
	_Atomic uint32_t slots; /* one past the highest slot ever used */
	uint32_t overlays, overlays_max;
	uint32_t pooled; /* regions that the pool serves */
	uint32_t connect_tries;
	uint32_t settled_next; /* of up_job.settled: the oldest, overwritten next */
	/* Files of which a mapping got the pool's memory, by up_file_mark(); 0: none. */
	uint64_t in_pool[UP_SETTLED];
	uint32_t in_pool_next;
	int bypass_told;
	int responds; /* the responder has been started */
	uint64_t alone_at_ns; /* look for the job's end then */
	uint64_t connect_at_ns, bye_at_ns;
	uint64_t beat_ns, beat_at_ns; /* the service's last sign of life, and when to look again */
	int beat_missed; /* looks without one */
	struct up_lease lease[UP_LEASES];
	uint32_t leases;
	uint64_t lease_at_ns; /* when to look at them again */
	_Atomic long steps;
};

/* Who puts the file back in the pool's place, and what it asks the kernel by. */
struct up_hands {
	int maps_fd, pagemap_fd; /* numbers in its own table */
	int seized; /* not the agent: it has no descriptor of the file, and the region is SEIZED for it */
	int ends;   /* the agent ends: nobody will serve what stays the pool's */
	int alone;  /* no other thread is there that could write meanwhile: of a child of fork(2) */
};

#pragma GCC visibility push(hidden)

/* base.c */
extern struct agent up_agent;
uint64_t up_now_ns(void);
void up_futex_wake(_Atomic uint32_t *word);
void up_close(int *fd);
/* The same file by another description, in our table; -errno. */
int up_open_again(int fd, int flags);
/* Says what is about to be done; the campaign kills a thread, or the service, right there. */
void up_step(struct agent *a, uint32_t state);
/* Threads that wait there ask the kernel again. */
void up_wake_range(int uffd, uintptr_t address, size_t length);
/* Nothing of ours answers for checkpoints any more. What lies there holds the file's bytes, and who
 * waits goes on: closing the userfaultfd unregisters by object, wherever the pages are now. */
void up_close_overlays(struct agent *a);

/* reply.c */
/* What the job's threads ask for. */
void up_on_bell(struct agent *a);
/* The region's descriptor has come, and somebody waits for its replacement. */
void up_prepare_late(struct agent *a, struct up_region *r);
/* The service's answer of a region has come: how long was it waited for? */
void up_note_waited(struct agent *a, struct up_region *r, int is_in_pool);
/* The job has the mapping: nothing at its addresses is ours any more. */
void up_let_go(struct agent *a, struct up_region *r);
/* The same for what threads of the job have left, once its time has come. */
void up_let_left_go(struct agent *a);
/* Whether nobody has read what waits in the checkpoints' userfaultfd. */
int up_is_left_lying(struct agent *a);
/* Who waits for the answer to UP_REQ_BYE goes on. */
void up_finish_bye(struct agent *a);

/* lastlook.c */
/* Of a region that the asker of q takes away when it is answered: what has been touched of it is told before that. */
void up_last_look(struct agent *a, struct up_region *r, struct up_request *q);
/* As time goes by, some more looks may be made. */
void up_grant_looks(struct agent *a);

/* lease.c */
/* Of a region's file; *fd is the table's then, and -1. */
void up_lease_take(struct agent *a, const struct up_region *r, int *fd);
/* The region is gone: so is its file's lease with the last one. */
void up_lease_leave(struct agent *a, const struct up_region *r);
void up_leases_close(struct agent *a);
int up_lease_is_of(const struct up_lease *l, const struct up_region *r);
/* Its place is the last one's then. */
void up_lease_drop(struct agent *a, struct up_lease *l);

/* leasebreak.c: whether somebody waits for one, every 100 ms. */
void up_leases_look(struct agent *a);

/* wait.c */
/* An instance that waits for nothing yet: 0 or -errno, where it could never wait. */
int up_wait_open(struct up_wait *w);
/* Wait from now on for these events of the source; 0: for none. */
void up_wait_also(struct up_wait *w, enum up_source source, int fd, uint32_t events);
/* Until one of them is there, or so long, rounded up to a millisecond; UINT64_MAX: for ever. Which are there, by
 * source; all that were waited for, where the kernel does not say. 0: the time is over. */
int up_wait(struct up_wait *w, uint64_t ns, uint32_t events[UP_SOURCES]);
/* Sleep so long, or not at all where the kernel refuses. */
void up_pause(uint64_t ns);
/* What was sent to this thread, by which it was only woken. */
void up_take_bell(struct agent *a);

/* thread.c */
int up_thread_spawn(void (*main)(void), void **stack, _Atomic int *tid);

/* respond.c */
/* Read and answer all that waits in the userfaultfd. */
void up_respond(struct agent *a);
int up_responder_spawn(struct agent *a);
/* What it has read and not answered comes again. */
void up_notice_responder_end(struct agent *a);
/* Threads that wait at a checkpoint ask again. */
void up_wake_laid(struct agent *a);
void up_responder_end(struct agent *a);

/* checkpoint.c: 0 or -errno */
int up_lay(struct agent *a, struct up_region *r, uint64_t page, int checkpoint_fd);
int up_rearm(struct agent *a, struct up_region *r, uint64_t page);
/* Checkpoints of the region become ordinary pages that hold the file's bytes. */
void up_unlisten(struct agent *a, struct up_region *r);
/* Its file, mapped elsewhere as the region was: up_region.replacement. 0: none is needed, or it is
 * there; else -errno. */
int up_prepare_replacement(struct agent *a, struct up_region *r);
/* The whole region becomes what the job asked for: its file, with its own advice. By the agent of
 * its own accord, so not in a process that bypasses. */
void up_detach(struct agent *a, struct up_region *r);
void *up_map_anew(struct up_region *r);

/* copies.c */
/* Pages of a private mapping that are copies of the process's own: a debugger, or the job through
 * /proc/self/mem, has written them, or a device has pinned them. */
struct up_copies {
	uintptr_t start, end;
};
/* The first that lie together in [start, end): 1 and *out; 0: there are none; -errno: the kernel does not say.
 * pagemap_fd: /proc/self/pagemap. */
int up_next_copies(int pagemap_fd, uintptr_t start, uintptr_t end, struct up_copies *out);

/* bypass.c */
/* From now on nothing is done by address in this process. */
void up_note_bypass(struct agent *a, uint32_t reason);
/* Before anything is done at addresses of the region: 1 it is still there. */
int up_may_act(struct agent *a, struct up_region *r);
/* 1: the region is what it was right after mmap(2); 0: something else lies there; -errno: the kernel
 * does not say. */
int up_region_intact(const struct agent *a, struct up_region *r);

/* pooled.c */
/* What the file is put back from, also in a forked child: up_region.anchor, all of the mapping once more:
 * to move it needs no address space, should RLIMIT_AS be lowered below what is mapped. Where that is
 * limited now, the room is the job's own: of a shared mapping one page is kept (`page`), from which it can
 * be had, as long as is wanted, by mremap(2) of no bytes; of a private one none. Without an anchor the pool
 * does not serve. */
void up_pool_keep(struct up_region *r, uintptr_t page);
/* The pool's memory in place of a mapping whose address nobody knows yet: 0 or -errno. */
int up_pool_enter(struct agent *a, struct up_region *r, int memfd);
/* The file again, wherever the kernel says that the pool still lies in the mapping's place. Where that is
 * not all of it, the region stays the pool's: the rest is copies, or may have been moved.
 * ``settles``: the job has just taken away what lay in a part of it (UP_REQ_SETTLE). */
void up_pool_detach(struct agent *a, struct up_region *r, int settles);
/* The act itself: how many bytes of the region are the pool's still, or -errno, with nothing done. */
long up_pool_put_back(const struct up_hands *h, struct up_region *r, int settles);
/* Whether the service shows signs of life; where it does not, the agent stands in. */
void up_pool_check_beat(struct agent *a);
int up_pool_is_silent(const struct agent *a);
/* Who waits in mmap() or fork() may go on. */
void up_swap_end(struct up_region *r);
/* Whose touch was read by a service that does not answer asks again. */
void up_wake_pooled(struct agent *a);

/* standin.c */
/* Answer what waits in the pool's userfaultfd. */
void up_stand_in(struct agent *a);
/* The service is dead: what it has left in the memory of the pool is free again, and read anew when it is touched. */
void up_pool_empty(const struct up_region *r);

/* link.c */
void up_connect(struct agent *a);
void up_flush(struct agent *a);
int up_say_bye(struct agent *a);
int up_say_bypass(struct agent *a);
/* What has come of a command, or of a region (sequence 0): 0 or -errno. */
int up_acknowledge(struct agent *a, uint32_t sequence, uint32_t region, uint32_t done, int error);
/* The job has said something of a region: the next up_flush() tells it. */
void up_note_statement(struct agent *a, const struct up_statement *said);

/* heard.c: what waits in the socket. */
void up_on_socket(struct agent *a);

/* region.c */
/* One that is LIVE, or NULL. */
struct up_region *up_region_by_id(uint32_t id);
void up_free_slot(struct up_region *r);
/* Something is to be told of the region: its UP_ATTACH, or its UP_GONE; or nothing is any more. */
void up_queue(struct agent *a, struct up_region *r);
void up_unqueue(struct agent *a, struct up_region *r);
/* The mapping is the job's own again. Only from this state, CLOSING or LEFT: a thread of the job may have
 * seized the region. */
void up_release(struct agent *a, struct up_region *r, uint32_t state);
/* Detach and release, unless a thread of the job has taken the region already. */
void up_abandon(struct agent *a, struct up_region *r);

#pragma GCC visibility pop

#endif
