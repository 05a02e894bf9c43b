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
#include <stddef.h>
#include <stdint.h>

#include "common/vma.h"
#include "common/wire.h"

#define UP_REGIONS 1024
#define UP_REQUESTS 64
#define UP_SETTLED 16 /* files: more than a program maps again and again at a time */
#define UP_SIZES 64 /* of mappings, by the binary logarithm */
#define UP_PATH_MAX 108 /* sizeof(sockaddr_un.sun_path) */
#define UP_WAIT_STEP_NS (5 * 1000 * 1000)
#define UP_START_STEPS 2000 /* of a service's start: 10 s, as long as a launcher waits for one (START_TIMEOUT_SECONDS) */

enum up_region_state {
	UP_FREE = 0,
	UP_OPENING, /* being filled in by the thread that mapped it */
	UP_LIVE,    /* the agent's */
	UP_CLOSING, /* a thread of the job takes it back */
	UP_LEAVING, /* the agent still has to tell the service that it is gone */
	UP_SEIZED,  /* one thread of the job changes what lies there itself: nobody else does */
	/* The job has the mapping, or nobody has. The agent acts on no address of it any more, and lets
	 * go of what it holds when it comes to it. */
	UP_LEFT,
};

struct up_region {
	_Atomic uint32_t state;
	/* Atomic, because any thread of the job, and the responder, look at them in any slot that they
	 * see LIVE, and the agent may free that slot and another thread take it for its own mapping
	 * just then. */
	_Atomic uint32_t id; /* slot | generation << 10: no former mapping of the slot had it */
	_Atomic uintptr_t address;
	_Atomic size_t length;     /* up to the last page of the file: past it must stay SIGBUS */
	_Atomic size_t map_length; /* as the job mapped it */
	_Atomic uint64_t offset;
	uint64_t device, inode, size;
	int64_t mtime_ns;
	_Atomic int prot;
	int map_flags;
	_Atomic int advice;   /* MADV_NORMAL, _RANDOM or _SEQUENTIAL as it now is in the kernel */
	int writable;         /* the description is O_RDWR: nothing may be laid */
	int stated; /* MAP_POPULATE: the job has said that it will need all of it */
	int copies; /* private and writable, its pages may be the job's own: nothing may be laid */
	int known; /* whoever mapped it does not wait, or a thread reads there (MAP_FIXED): nothing may be laid */
	_Atomic int unleased; /* no lease makes who opens its file for writing wait */
	_Atomic int written; /* the job has opened its file for writing since */
	int many; /* nor does this one: the process has waited enough for others (reply.c) */
	int brief; /* nor does this one: those like it go within moments */
	uint64_t waits_since_ns; /* the agent's: whoever mapped it waits for the answer since then; 0: nobody does */
	int settled; /* so the service has said of its file: no descriptor of it is kept */
	int inherited;        /* came through fork, not yet taken up by this process's agent */
	_Atomic int wanted; /* the job wants its file for itself: UP_GONE_WANTED */
	_Atomic uint32_t swap;   /* enum up_swap: who mapped it waits for the service's answer */
	_Atomic int pooled;      /* enum up_pooled */
	/* Bytes that are the pool's for all that is known, wherever they are; and those of them that lie
	 * here and stay, as they were found last. Changed with hands on, or by who has seized the region. */
	_Atomic size_t left, kept;
	_Atomic uintptr_t anchor; /* of the file, kept elsewhere (up_map_of_anchor) */
	/* As long as the region; or a page: then the file is put back where there is room only. */
	_Atomic size_t anchor_bytes;
	/* the agent's alone; descriptors are numbers in the agent's table */
	int fd, pool_fd; /* pool_fd: the pool's memory, to write what the service does not */
	uint32_t mode, sent; /* mode: 1 + enum up_serving_mode; 0: the service has not said yet */
	uint32_t queued; /* counted in the agent's ``pending`` */
	int refused;     /* errno: why the pool does not lie here, as the service must still be told */
	struct up_vma mapped; /* what the kernel said right after mmap(2) */
	struct up_vma pool_mapped; /* and when the pool had been laid over it */
	/* Checkpoints that lie here, by us or by the process we came from. They are laid before
	 * mmap() returns, all at once, and never afterwards. */
	_Atomic uint32_t laid;
	uint64_t laid_page[UP_PAGES_MAX]; /* page numbers in the file */
	/* UP_REQ_DETACH: the file mapped elsewhere, for the asking thread to move into place */
	_Atomic uintptr_t replacement;
	struct up_request *asked; /* the agent's: waits for the descriptor, in a forked child */
};

/* Of a region. Where the pool lies a child inherits nothing. */
enum up_pooled {
	UP_POOLED_NOT = 0,
	UP_POOLED,
	UP_POOLED_COPIES, /* the file is back, but for pages that are the job's own copies, which a child inherits */
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
	UP_REQ_DETACH,     /* have the file mapped for up_region.replacement; pool: put it back */
	UP_REQ_FORGET,     /* nothing of ours answers there any more: the job is about to change it */
	UP_REQ_SETTLE,     /* UP_POOLED_COPIES: the job has taken away what lay in a part of it */
	UP_REQ_BYE,        /* the process ends: let the service read its page tables first */
	UP_REQ_QUIT,       /* detach all, end the agent */
	UP_REQ_STATE,      /* the job has said something of the mapping */
};

/* The result of UP_REQ_DETACH or _SETTLE where the agent has put the file back itself, and let go of the region. */
#define UP_RELEASED 1

/* The asker takes back what nobody has TAKEN, and leaves to the agent what is: DROPPED, nobody waits
 * for its end. */
enum {
	UP_REQ_FREE = 0,
	UP_REQ_CLAIMED,
	UP_REQ_POSTED,
	UP_REQ_TAKEN,
	UP_REQ_DONE,
	UP_REQ_DROPPED,
};

struct up_request {
	_Atomic uint32_t state;
	uint32_t op;
	uint32_t region; /* up_region.id: its slot may be another mapping's by now */
	int job_fd;
	int awaited; /* else nobody waits for the result, and the agent frees the slot */
	int result;
	struct up_statement statement; /* UP_REQ_STATE */
};

struct up_job {
	/* fixed by the constructor */
	char socket_path[UP_PATH_MAX];
	size_t page_bytes;
	uint64_t min_bytes;
	uint64_t listen_bytes; /* --policy fixed: a mapping of less has no checkpoint; 0: none has */
	int enabled;
	int keep_advice;     /* MAP_POPULATE is the kernel's affair */
	long test_overlays;   /* UFFDPREFETCH_TEST_OVERLAYS: as if the kernel allowed no more */
	int no_uffd;          /* UFFDPREFETCH_RUNG=2: as an unprivileged process, on purpose */
	int pool;             /* --engine pool */
	int rank, local_rank, world;
	char command[16];
	long test_exit_after; /* fault injection: the agent ends at this step, 0 = never */
	int test_exit_state;  /* only steps of this enum up_agent_state count; -1: all */
	int test_exit_all;    /* and every step after it: the other thread ends, too */
	int test_exit_stops;  /* the process stops there (SIGSTOP) and the agent goes on later */
	const char *test_exit_log;

	int pid, parent_pid; /* parent_pid: 0, or whom this process was forked from */
	_Atomic int forker_owns; /* who called fork(2) last had these books: so has its child */
	/* A page that is empty in a child of fork(2) (MADV_WIPEONFORK); NULL: this kernel has none. */
	_Atomic uint32_t *own_page;
	int patience; /* UP_WAIT_STEP_NS that a thread of the job waits for one of ours */
	int awaits_start; /* and for a service that is just starting: with a test's patience */
	_Atomic int service_starts; /* the pool's: a mapping is the pool's from its beginning or never, so it waits */
	_Atomic int shared;   /* by another process: the pool serves no mapping any more */
	_Atomic int disabled; /* tried and failed, or given up: manage nothing more */
	_Atomic uint32_t bypassed; /* enum up_bypass_reason: nothing is done by address any more */
	_Atomic int live;     /* regions not FREE: the interposers' fast path */
	_Atomic uint32_t generation;
	_Atomic uint32_t closings; /* counted when a region has gone from LIVE to CLOSING */
	_Atomic int silent;         /* a request was not answered in time; the agent clears it */
	_Atomic int service_silent; /* nor a mapping of the pool by the service: the same */
	_Atomic int ending;         /* the agent has to end, whether it saw a request or not */
	_Atomic int left;           /* some region became LEFT since the agent looked */
	_Atomic int looks;          /* so many may be waited for now (lastlook.c) */
	_Atomic uint32_t hands;     /* 1 + slot of the region whose addresses the agent changes now */

	_Atomic int agent_tid;   /* set by the clone, cleared by the kernel when the agent is gone */
	_Atomic uint32_t agent_start; /* 0 none, 1 somebody is starting it, 2 running */
	void *agent_stack;
	_Atomic int responder_tid; /* likewise, of the second thread (respond.c) */
	void *responder_stack;

	/* Files of which an answer was settled (struct up_file), by up_file_mark(); 0: none. Written by the agent. */
	_Atomic uint64_t settled[UP_SETTLED];
	/* How mappings of about a size live, as the service has said last (enum up_brief). Written by the agent. */
	_Atomic uint32_t brief[UP_SIZES];
	_Atomic uint32_t briefs; /* mappings that need not be told of: one in some is */
	struct up_region region[UP_REGIONS];
	struct up_request request[UP_REQUESTS];
};

/* base.c */
extern struct up_job up_job __attribute__((visibility("hidden")));
/* The service's lock file (protocol/leftovers.py). */
#define UP_LOCK_SUFFIX ".lock"
#define UP_LOCK_PATH_MAX (UP_PATH_MAX + sizeof(UP_LOCK_SUFFIX))
void up_lock_path(char *path) __attribute__((visibility("hidden")));
int up_agent_alive(void) __attribute__((visibility("hidden")));
/* 0 or -errno: nobody hears it. */
long up_agent_ring_bell(void) __attribute__((visibility("hidden")));
/* It looks whether it shall end. */
void up_ring_responder(void) __attribute__((visibility("hidden")));

/* bypass.c: how the functions of a list begin, before any library can have overwritten them. The list stays where it is. */
#define UP_ENTRIES_MAX 8
void up_remember_entries(const void *const *entries, int count) __attribute__((visibility("hidden")));
int up_is_patched(void) __attribute__((visibility("hidden")));

/* The agent's: whether the request is there and now its own. */
static inline int up_request_take(struct up_request *q)
{
	uint32_t posted = UP_REQ_POSTED;

	return atomic_compare_exchange_strong(&q->state, &posted, UP_REQ_TAKEN);
}

/* The agent's: the result is written. 1: somebody waits for it, and is to be woken. */
static inline int up_request_answer(struct up_request *q)
{
	uint32_t taken = UP_REQ_TAKEN;

	if (atomic_compare_exchange_strong(&q->state, &taken, UP_REQ_DONE))
		return 1;
	atomic_store(&q->state, UP_REQ_FREE); /* DROPPED */
	return 0;
}

/* What a file is, in one word, of which the lowest bit is free (FNV-1a): another file's is the same by a
 * chance of one in 2^63, and then that one is not prefetched. */
static inline uint64_t up_file_mark(uint64_t device, uint64_t inode, uint64_t size, int64_t mtime_ns)
{
	const uint64_t word[] = { device, inode, size, (uint64_t)mtime_ns };
	uint64_t mark = 0xcbf29ce484222325;

	for (unsigned int i = 0; i < 4; i++)
		for (int shift = 0; shift < 64; shift += 8)
			mark = (mark ^ (word[i] >> shift & 0xff)) * 0x100000001b3;
	return mark & ~1ull ? mark & ~1ull : 2;
}

/* The lowest bit: no mapping of it is served. */
#define UP_SETTLED_REFUSED 1u

/* Of up_job.brief: where what is said of mappings of about this size stands. */
static inline unsigned int up_size_of(uint64_t bytes)
{
	return (unsigned int)(63 - __builtin_clzll(bytes | 1));
}

/* Of a region's state: a thread of the job takes it back just now. */
static inline int up_is_closing(uint32_t state)
{
	return state == UP_CLOSING || state == UP_SEIZED;
}

/* Of a region's state: the job's, without the agent. */
static inline int up_is_left(uint32_t state)
{
	return state == UP_SEIZED || state == UP_LEFT;
}

/* The agent's, around each change of the addresses of a region, and around nothing that may wait for
 * storage. 0: a thread of the job has taken the mapping, whose addresses may be anybody's by now. The
 * job says SEIZED and then looks at hands, the agent the other way round: one of the two sees it. */
static inline int up_hands_on(struct up_region *r)
{
	uint32_t state;

	atomic_store(&up_job.hands, 1 + (uint32_t)(r - up_job.region));
	state = atomic_load(&r->state);
	if (state == UP_LIVE || state == UP_CLOSING)
		return 1;
	atomic_store(&up_job.hands, 0);
	return 0;
}

static inline void up_hands_off(void)
{
	atomic_store(&up_job.hands, 0);
}

/* link.c: who this process is */
void up_introduce(struct up_hello *hello) __attribute__((visibility("hidden")));
/* checkpoint.c: the pages of a mapping of the file at p in place of the checkpoints; p is unmapped. By
 * the thread that may act on the region. How many could not be put there. */
uint32_t up_replace_checkpoints(struct up_region *r, uintptr_t p) __attribute__((visibility("hidden")));

/* pooled.c: the file as the region has it, mapped elsewhere: its address or -errno. Of the anchor, not by
 * mmap(2): there NFS and Lustre ask their servers, which may not answer, with the lock held that all of
 * the process's threads need. */
long up_map_of_anchor(struct up_region *r) __attribute__((visibility("hidden")));
/* The same in the place of whatever lies where the region does; where there is no room for it (RLIMIT_AS), by moving
 * the anchor there, which needs none. */
long up_map_anchor_there(struct up_region *r) __attribute__((visibility("hidden")));
/* The anchor is not needed any more. */
void up_pool_release(struct up_region *r) __attribute__((visibility("hidden")));

/* thread.c */
/* The mask that was. */
struct up_mask {
	uint64_t before;
	int blocked; /* 0: the kernel refuses it (a filter), and nothing has changed */
};
/* No handler runs until they are restored. */
struct up_mask up_block_signals(void) __attribute__((visibility("hidden")));
void up_restore_signals(struct up_mask mask) __attribute__((visibility("hidden")));

/* agent.c */
int up_agent_spawn(void) __attribute__((visibility("hidden")));

#ifdef UP_AGENT_PTHREAD
/* thread.c */
void up_thread_await_end(void) __attribute__((visibility("hidden")));
/* Around fork(2): no thread of ours begins or ends meanwhile. */
void up_thread_hold(void) __attribute__((visibility("hidden")));
void up_thread_release(void) __attribute__((visibility("hidden")));
#define UP_AGENT_STACK_BYTES (8u << 20)
#else
#define UP_AGENT_STACK_BYTES (256u << 10)
#endif

#endif
