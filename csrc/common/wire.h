/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - what the job's side (preload.c, agent.c) and the service say to each other.
 *
 * One SOCK_SEQPACKET connection per process. Every message is UP_MSG_BYTES long, little-endian,
 * and starts with the same header, so that a reader can refuse anything else by its length and its
 * first eight bytes. uffdprefetch/protocol/wire.py takes layouts and numbers from here: what stands
 * between the two marks is read by tools/cffi_build.py as it is, with no preprocessor. Only
 * uffdprefetch/job/messages.py repeats some, for processes that load no C.
 */
#ifndef UP_WIRE_H
#define UP_WIRE_H

#include <stdint.h>

/* cdef begin */

#define UP_MAGIC 0x50444655u /* "UFDP" */
#define UP_VERSION 10
#define UP_MSG_BYTES 256
#define UP_PAGES_MAX 28 /* page numbers in one command */
#define UP_RUNS_MAX 15  /* runs of pages in one message */

enum up_type {
	/* launcher and agent to service, and back */
	UP_HELLO = 1,
	UP_WELCOME = 2,
	UP_JOB = 3,
	UP_FINISH = 4,
	UP_SUMMARY = 5,
	UP_SNAPSHOT = 7, /* a watcher's question; the answer is UP_SUMMARY with another JSON */
	/* agent to service */
	UP_ATTACH = 16,
	UP_GONE = 17,
	UP_ACK = 18,
	UP_BYE = 19,
	UP_BYPASS = 21, /* the process changes its address space without asking us */
	UP_STATED = 22, /* the job has said something of a mapping, by madvise(2) */
	UP_TOUCHED = 23, /* what has been touched of a mapping that goes: before its UP_GONE */
	/* code in the job (uffdprefetch/job/channel.py) to service: an order has been announced */
	UP_PLAN = 20,
	/* service to agent */
	UP_FILE = 32,
	UP_REARM = 35,
	UP_DETACH = 37,
	UP_BYE_OK = 38,
	UP_QUIT = 40, /* the process has given up rights that the agent still has: give all back, end */

	/* service -> recorder (UP_RECORDER): the header, then as much as the message is long */
	UP_EVENTS = 48,
	UP_TABLES = 49,
};

/* a watcher asks how it goes (UP_SNAPSHOT), and is nobody otherwise: it keeps nothing alive */
enum up_role {
	UP_LAUNCHER = 1,
	UP_AGENT = 2,
	UP_WATCHER = 3,
	UP_RECORDER = 4,
	UP_PLANNER = 5,
	UP_TRANSPORT = 6,
};

enum up_hello_flag {
	UP_HELLO_UFFD = 1 << 0,       /* it has a userfaultfd with kernel faults, for checkpoints or the pool */
	UP_HELLO_FORKED = 1 << 1,     /* a forked child; parent_pid is the process it came from */
	UP_HELLO_SENDS_POOL = 1 << 3, /* the uffd of the pool comes with this message */
	/* This process is not managed: uffd_error is enum up_left_alone, and it says nothing more. */
	UP_HELLO_LEFT_ALONE = 1 << 4,
};

/* Why a process is left alone. */
enum up_left_alone {
	UP_ALONE_NO = 0,
	UP_ALONE_ASAN = 1,
	UP_ALONE_TSAN = 2,
	UP_ALONE_MSAN = 3,
	UP_ALONE_LSAN = 4,
	UP_ALONE_LINKED = 5, /* a sanitizer linked into the program */
	UP_ALONE_VALGRIND = 6,
	UP_ALONE_RR = 7,
	UP_ALONE_LIBC = 8, /* not glibc */
	UP_ALONE_IDLE = 9, /* our thread may not leave SCHED_IDLE */
};

enum up_attach_flag {
	UP_ATTACH_INHERITED = 1 << 0, /* mapped before the fork; no descriptor comes with it */
	UP_ATTACH_WRITABLE = 1 << 1,  /* the job's description is O_RDWR: lay nothing */
	/* Its address is known before an answer can come (MAP_FIXED, or an answer of another mapping of the file was
	 * settled): lay nothing. */
	UP_ATTACH_KNOWN = 1 << 2,
	UP_ATTACH_COPIES = 1 << 3, /* private and writable: its pages may be the job's own, lay nothing */
	UP_ATTACH_STATED = 1 << 4, /* MAP_POPULATE: the job has said that it will need all of it */
	UP_ATTACH_MANY = 1 << 5,   /* KNOWN, as many mappings were made at once: nobody waits for the answer */
	UP_ATTACH_BRIEF = 1 << 6,  /* KNOWN, as those like it are mapped for moments (enum up_brief) */
};

/* Files like this one are mapped for moments. */
enum up_brief {
	UP_BRIEF_NO = 0,
	UP_BRIEF_KNOWN = 1,  /* nothing of ours takes their place: nobody waits for the answer */
	UP_BRIEF_UNTOLD = 2, /* and nothing is gained: most need not be told of */
};

/* up_file.mode */
/* UP_POOL: the service's memory takes the mapping's place; its faults go to the service */
enum up_serving_mode {
	UP_REFUSE = 0,
	UP_CHECKPOINTS = 1,
	UP_PAGE_TABLES = 2,
	UP_POOL = 3,
	UP_READS = 4, /* of a file that is read by calls: no agent has told of it, and none hears this */
};

struct up_header {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
};

struct up_hello {
	uint32_t role;
	int32_t pid, ppid, rank, local_rank, world, job_pid;
	uint32_t flags;
	int32_t uffd_error; /* errno where one was wanted and UP_HELLO_UFFD is not set */
	uint32_t overlays_max;
	int32_t parent_pid;
	uint32_t page_bytes;
	char command[16];
};

struct up_welcome {
	uint32_t options; /* a launcher's: fingerprint of the service's options */
};

/* UP_JOB */
struct up_started {
	int32_t pid;
};

#define UP_REPLAY_BYTES 224

/* UP_FINISH, a launcher's */
struct up_finish {
	int32_t wait_status, reserved;
	int64_t read_call_bytes; /* what the job has read by read(2) and its kind; -1: not known */
	int64_t storage_bytes; /* what it has had read from block devices; -1: not known */
	char replay[UP_REPLAY_BYTES]; /* what came of the replay of its start (protocol/replayed.py); empty: none */
};

/* The JSON is in the memfd that comes with the message. */
struct up_summary {
	uint32_t length_bytes, last; /* last: no other launcher of the job is left here */
};

struct up_attach {
	uint32_t region, flags;
	uint64_t address, length_bytes, offset_bytes;
	uint64_t device, inode, size_bytes;
	int64_t mtime_ns;
	uint32_t map_flags;
	uint32_t advice; /* MADV_NORMAL, _RANDOM or _SEQUENTIAL, as the job has given it to all of it */
	uint64_t anchor; /* where the agent has mapped the file beside it (docs/pool.md); 0: nowhere */
};

/* UP_GONE_WANTED: the mapping stays, and its process wants its file for itself (csrc/job/fcntl.c). UP_GONE_WRITTEN: it
 * stays, and its process has opened the file for writing (csrc/job/writer.c). */
enum up_gone_reason { UP_GONE_CHANGED = 0, UP_GONE_WANTED = 1, UP_GONE_WRITTEN = 2 };

struct up_gone {
	uint32_t region, reason; /* enum up_gone_reason */
};

/* What the job has said of [start, end) of a mapping's file (docs/advice.md). */
enum up_stated {
	UP_STATED_NEEDED = 1,   /* it will need it: MADV_WILLNEED, _POPULATE_READ */
	UP_STATED_UNNEEDED = 2, /* it has no use for it now: MADV_DONTNEED, _COLD, _PAGEOUT */
	/* how it reads, of all of the mapping, until the next of these */
	UP_STATED_NORMAL = 3,
	UP_STATED_SEQUENTIAL = 4,
	UP_STATED_RANDOM = 5,
};

struct up_statement {
	uint32_t region, what; /* enum up_stated */
	uint64_t start_bytes, end_bytes; /* in the file */
};

/* What was in the process's page table right before the mapping went: more of these may come of one. */
struct up_touched {
	uint32_t region, count;
	uint64_t run[2 * UP_RUNS_MAX]; /* start and end of each in the file, bytes */
};

/* How the mapping is served. UP_CHECKPOINTS: these pages of the checkpoint memfd, which comes with the
 * message, are laid over it before mmap() returns, and no other ever. settled: so it is with each mapping of this
 * file, until another answer says otherwise: nothing will be laid over it, and nobody need wait. One that is refused
 * need not even be told of; of the others no descriptor need come. leased: the last descriptor that comes
 * with the message is of the description that has the file's lease (csrc/job/lease.c). brief: of mappings of about
 * the same size, until another answer says otherwise. */
struct up_file {
	uint32_t region, mode, count, settled, leased, brief; /* brief: enum up_brief */
	uint64_t page[UP_PAGES_MAX]; /* page numbers in the file */
};

/* How it was seen that the process bypasses the interposers. */
enum up_bypass_reason {
	UP_BYPASS_UNMAPPED = 1, /* the kernel tells that a checkpoint was unmapped or replaced */
	UP_BYPASS_MOVED = 2,    /* ... moved */
	UP_BYPASS_REPLACED = 3, /* something else lies where a managed mapping was */
	UP_BYPASS_PATCHED = 4,  /* another library has overwritten the first bytes of an interposer */
};

struct up_bypass {
	uint32_t reason;
};

/* UP_REARM, UP_DETACH */
struct up_command {
	uint32_t sequence, region, count, reserved;
	uint64_t page[UP_PAGES_MAX]; /* page numbers in the file */
};

/* Of an UP_FILE (sequence 0): how many of its checkpoints are laid. Of a command: what failed. */
struct up_ack {
	uint32_t sequence, region, done;
	int32_t error; /* errno of the first failure, 0 */
	uint32_t overlays;
};

/* the file is named by the pid as the job sees it, which may be another one than ours */
struct up_plan {
	uint32_t reserved;
	int32_t pid;
	uint32_t number;
};

/* --- the event ring: one writer (the agent), one reader (the service), in a sealed memfd --- */

#define UP_RING_EVENTS 2048u /* a power of two */

struct up_event {
	uint64_t time_ns; /* CLOCK_MONOTONIC when the agent had read the fault */
	uint64_t page;    /* page number in the file */
	uint32_t region;
	uint32_t tid;       /* the thread that touched it */
	uint32_t handle_ns; /* from reading the fault to the end of UFFDIO_CONTINUE */
	uint32_t flags;
};

/* What the agent is doing: read by the fault-injection campaign and by nobody else. */
enum up_agent_state {
	UP_STATE_IDLE = 0,
	UP_STATE_RESOLVING = 1,
	UP_STATE_LAYING = 2,
	UP_STATE_REARMING = 3,
	UP_STATE_DETACHING = 4,
};

/* cdef end */

struct up_message {
	struct up_header header;
	union {
		struct up_hello hello;
		struct up_welcome welcome;
		struct up_attach attach;
		struct up_gone gone;
		struct up_file file;
		struct up_bypass bypass;
		struct up_statement statement;
		struct up_touched touched;
		struct up_command command;
		struct up_ack ack;
		struct up_plan plan;
		unsigned char bytes[UP_MSG_BYTES - sizeof(struct up_header)];
	};
};

struct up_ring {
	/* written by the agent */
	uint64_t head;
	uint64_t dropped;
	uint64_t faults, laid, rearmed, failed;
	uint32_t overlays, state;
	/* What the agent has put into the pool in the service's stead: 2 a fill, odd while one is under
	 * way; and the bytes. Its books know nothing of them. */
	uint64_t stand_ins, stand_in_bytes;
	/* written by the service; a cache line of its own */
	uint64_t tail __attribute__((aligned(64)));
	uint64_t beat_ns; /* who answers for the service was alive then (pool) */
	struct up_event event[UP_RING_EVENTS] __attribute__((aligned(64)));
};

#endif
