/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.h - the books that the interposers (preload.c) and the agent (agent.c) share in one process.
 *
 * Who may write what: a region's slot is claimed and filled by the thread that mapped it, then
 * belongs to the agent until a thread of the job sets it to CLOSING. The job waits for the agent,
 * never the other way round, and no lock is taken, so a fork at any instant finds readable books.
 */
#ifndef UP_JOB_H
#define UP_JOB_H

#include <stdatomic.h>
#include <stdint.h>

#include "wire.h"

#define UP_REGIONS 1024
#define UP_REQUESTS 64
#define UP_PATH_MAX 108 /* sizeof(sockaddr_un.sun_path) */

enum up_region_state {
	UP_FREE = 0,
	UP_OPENING, /* being filled in by the thread that mapped it */
	UP_LIVE,    /* the agent's: it may lay and take away checkpoints */
	UP_CLOSING, /* a thread of the job takes it back; nothing may be laid any more */
	UP_LEAVING, /* the agent still has to tell the service that it is gone */
};

struct up_region {
	_Atomic uint32_t state;
	uint32_t id; /* slot | generation << 10: a late command for a former mapping finds nothing */
	/* Atomic, because any thread of the job looks at them in any slot that it sees LIVE, and the
	 * agent may free that slot and another thread take it for its own mapping just then. */
	_Atomic uintptr_t address;
	_Atomic size_t length;     /* up to the last page of the file: past it must stay SIGBUS */
	_Atomic size_t map_length; /* as the job mapped it */
	uint64_t offset, device, inode, size;
	int64_t mtime_ns;
	int prot, map_flags;
	_Atomic int advice;   /* MADV_NORMAL, _RANDOM or _SEQUENTIAL as it now is in the kernel */
	_Atomic int swallowed; /* the job asked for MADV_RANDOM and did not get it */
	int writable;         /* the description is O_RDWR: nothing may be laid */
	int inherited;        /* came through fork, not yet taken up by this process's agent */
	int laid_once;        /* checkpoints were laid here, by us or by a process we came from */
	_Atomic uint32_t swap;   /* enum up_swap: who mapped it waits for the service's verdict */
	_Atomic int pooled;      /* the pool lies here, and is not inherited by a child */
	_Atomic uintptr_t anchor; /* one page of the file: what a forked child makes its mapping of */
	/* the agent's alone; descriptors are numbers in the agent's table */
	int fd, checkpoint_fd, reopened_fd;
	uint32_t verdict, sent;
	uint32_t queued; /* counted in the agent's ``pending`` */
	uint32_t overlays;
};

/* Between the thread that waits in mmap() or fork() and the agent. */
enum up_swap {
	UP_SWAP_NONE = 0, /* nobody waits: the pool must not be mapped any more */
	UP_SWAP_WAITING,
	UP_SWAP_BUSY, /* the agent maps it now */
	UP_SWAP_DONE, /* pool or not: it stays as it is */
};

enum up_request_op {
	UP_REQ_ATTACH = 1, /* take a descriptor of job_fd into the agent's table; go LIVE */
	UP_REQ_DETACH,     /* map the file back over the region, forget it */
	UP_REQ_FORGET,     /* the whole mapping is about to be unmapped */
	UP_REQ_BYE,        /* the process ends: let the service read its page tables first */
	UP_REQ_QUIT,       /* detach all, end the agent */
};

enum { UP_REQ_FREE = 0, UP_REQ_CLAIMED, UP_REQ_POSTED, UP_REQ_DONE };

struct up_request {
	_Atomic uint32_t state;
	uint32_t op;
	uint32_t slot;
	int job_fd;
	int result;
};

struct up_job {
	/* fixed by the constructor */
	char socket_path[UP_PATH_MAX];
	size_t page_bytes;
	uint64_t min_bytes;
	int enabled;
	int keep_advice;     /* do not swallow MADV_RANDOM */
	int service_resolves; /* --resolve service */
	long test_overlays;   /* UFFDPREFETCH_TEST_OVERLAYS: as if the kernel allowed no more */
	int no_uffd;          /* UFFDPREFETCH_RUNG=2: as an unprivileged process, on purpose */
	int pool;             /* --engine pool */
	int rank, local_rank, world;
	char command[16];
	long test_exit_after; /* fault injection: the agent ends at this step, 0 = never */
	int test_exit_state;  /* only steps of this enum up_agent_state count; -1: all */
	int test_exit_stops;  /* the process stops there (SIGSTOP) and the agent goes on later */
	const char *test_exit_log;

	int pid, parent_pid; /* parent_pid: 0, or whom this process was forked from */
	_Atomic int forker_pid; /* who called fork(2) last: the child sees from it whose books it has */
	_Atomic int disabled; /* tried and failed, or given up: manage nothing more */
	_Atomic int live;     /* regions not FREE: the interposers' fast path */
	_Atomic uint32_t generation;

	_Atomic int agent_tid;   /* set by the clone, cleared by the kernel when the agent is gone */
	_Atomic int agent_start; /* 0 none, 1 somebody is starting it, 2 running */
	void *agent_stack;

	struct up_region region[UP_REGIONS];
	struct up_request request[UP_REQUESTS];
};

extern struct up_job up_job __attribute__((visibility("hidden")));

/* agent.c */
int up_agent_spawn(void) __attribute__((visibility("hidden")));
int up_agent_alive(void) __attribute__((visibility("hidden")));
void up_agent_ring_bell(void) __attribute__((visibility("hidden")));

#ifdef UP_AGENT_PTHREAD
#define UP_AGENT_STACK_BYTES (8u << 20)
#else
#define UP_AGENT_STACK_BYTES (256u << 10)
#endif

#endif
