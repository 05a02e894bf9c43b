/* SPDX-License-Identifier: Apache-2.0 */
/*
 * helper.h - the service's C side, as Python sees it (uffdprefetch/native/uffd.py through cffi).
 *
 * Every function returns >= 0 or -errno; uffd.py turns that into OSError in one place. What stands
 * between the two marks is read by tools/cffi_build.py as it is: no preprocessor there.
 */
#ifndef UP_HELPER_H
#define UP_HELPER_H

#include <stddef.h>
#include <stdint.h>

#include "common/net.h"
#include "common/wire.h"

/* cdef begin */

/* --- rings (uffd_helper.c) --- */
struct up_ring;

struct up_ring_counts {
	uint64_t head, tail, dropped, faults, laid, rearmed, failed;
	uint32_t overlays, state;
};

/* A sealed memfd that holds one ring, mapped here: *fd is the descriptor to pass on. */
int up_ring_create(struct up_ring **out, int *fd);
void up_ring_destroy(struct up_ring *ring);
/* Copies at most max events of 32 bytes each into out; returns how many. */
int up_ring_drain(struct up_ring *ring, void *out, int max);
void up_ring_counts(const struct up_ring *ring, struct up_ring_counts *out);

/* --- checkpoint memfds (uffd_helper.c) --- */
/* *rw is for the service alone; *ro goes to the jobs, which map it MAP_PRIVATE. */
int up_checkpoint_memfd(uint64_t size_bytes, int *rw, int *ro);

/* --- BPF ring buffers (bpf_ring.c) --- */
struct up_bpf_ring;
/* The ring behind a map's descriptor; size: of its data, a power of two. */
int up_bpf_ring_open(struct up_bpf_ring **out, int fd, uint64_t size);
void up_bpf_ring_close(struct up_bpf_ring *ring);
/* Copies at most max records of record_bytes each into out, oldest first; returns how many. */
int up_bpf_ring_drain(struct up_bpf_ring *ring, void *out, uint32_t record_bytes, int max);

/* --- residency and page tables (residency.c) --- */
enum up_residency_sensor { UP_CACHESTAT = 1, UP_MINCORE = 2 };

/* Bytes of [offset, +length) that lie in the page cache; *sensor says who was asked. -EPERM: the
 * caller neither owns nor may write the file, and the kernel tells only those. */
int64_t up_resident_bytes(int fd, uint64_t offset, uint64_t length, int *sensor);

/* --- descriptors of files (closing.c) --- */
/* close(2), as a rule. Where it may wait for a server another thread does it, and the caller waits 5 ms at most; the
 * number stays taken until then. */
void up_close_file(int fd);

/* Of a file, 0 or -errno: as far as the kernel knows it without asking storage, or ``asked`` of it now. */
struct up_file_status {
	uint64_t links, inode, size_bytes;
	int64_t mtime_ns, ctime_ns;
};
int up_file_status(int fd, int asked, struct up_file_status *out);
/* Whether it has no name any more, storage not asked: 1, 0 or -errno. (NFS clients and FUSE rename an open file.) */
int up_file_deleted(int fd);
/* The number of the mount that a description is of, which no other one has or will have; 0: the kernel does not tell
 * (before 6.8). */
uint64_t up_mount_of(int fd);

/* What the kernel has counted as read from storage by this thread: bytes, or -1. */
int64_t up_thread_storage_bytes(void);

/* Page-table entries present in [address, +length) of the process behind pagemap_fd
 * (/proc/PID/pagemap), as runs: run[2i] = address, run[2i+1] = length, both in bytes. Returns the
 * number of runs; *next is where to go on (address + length when done). */
int up_touched_runs(int pagemap_fd, uint64_t address, uint64_t length, uint64_t *run, int max_runs,
		    uint64_t *next);

/* --- names that are opened in marked directories (names.c) --- */
enum up_names_kind {
	UP_NAMES_FILE = 0,
	UP_NAMES_DIRECTORY = 1,
	UP_NAMES_GONE = 2, /* a watch of inotify */
	UP_NAMES_LOST = 3, /* the queue was full */
};

struct up_name_event {
	uint64_t directory;  /* fanotify: up_fanotify_identify(); inotify: the watch */
	int32_t pid;         /* whose open it is; 0: it is not told */
	uint32_t kind, name_bytes;
	char name[256];      /* none: of the marked directory itself */
};

/* A group of each, without waiting, closed by close(2): its descriptor or -errno. */
int up_fanotify_open(void);
int up_inotify_open(void);
/* `directory` is a descriptor, O_PATH suffices. Its identity in events; it may ask the file system's server. */
int up_fanotify_identify(int directory, uint64_t *out);
int up_fanotify_mark(int fd, int directory);
int up_fanotify_unmark(int fd, int directory);
/* The watch or -errno. */
int up_inotify_mark(int fd, int directory);
int up_inotify_unmark(int fd, int watch);
/* What one read(2) brings, into UP_NAMES_AT_ONCE of `out`: how many; 0: nothing is there. */
#define UP_NAMES_AT_ONCE 1024
int up_fanotify_read(int fd, struct up_name_event *out);
int up_inotify_read(int fd, struct up_name_event *out);

/* --- what lies in a directory (listing.c) --- */
/* Names in the order of readdir(3). Of an order, the entries' indices and the place of each. */
struct up_names {
	uint32_t count;
	uint32_t *offset; /* of each name in `text`, which ends it by a zero */
	char *text;
	uint64_t *inode;
	uint32_t *by_name, *name_place; /* by their bytes */
	uint32_t *by_inode, *inode_place;
};

struct up_listing {
	struct up_names *files, *directories;
};

/* Of a directory, whose descriptor may be O_PATH: -E2BIG where it has more than `most` names. Links and whatever is
 * neither a file nor a directory are left out. */
int up_listing_read(struct up_listing **out, int directory, uint64_t most);
void up_listing_free(struct up_listing *listing);
/* The index of a name, or -1. */
int64_t up_names_find(const struct up_names *names, const char *name);

/* --- copies of a file's pages, compared with the file (compare.c, checker.c) --- */
enum up_compare_how {
	UP_COMPARE_READ = 1,   /* the file's page by pread: where the page cache is the file */
	UP_COMPARE_MAPPED = 2, /* by a mapping, which shows what a network file system took away */
	UP_COMPARE_POOL = 3,   /* the copies are the pool's; nothing is written */
};

/* A file and the memfd with copies of its pages, at the same offsets (-1: none, or the pool has them).
 * Descriptors and mappings of its own, which last until up_watch_put() and the end of its jobs. */
struct up_watch;
int up_watch_create(struct up_watch **out, int fd, int memfd, uint64_t size_bytes);
void up_watch_put(struct up_watch *watch);

struct up_pool;
struct up_compare_job {
	uint64_t id;
	struct up_watch *watch;
	struct up_pool *pool; /* UP_COMPARE_POOL: its file is pool_file */
	int32_t pool_file;
	uint32_t how, pages;
	uint32_t start;     /* pages that must be read again: from this one of the list on, cyclically */
	uint32_t reads_max; /* requests to the storage, at the most */
	uint64_t limit_ns;  /* nothing is read any more after so long */
	uint64_t *page;     /* ascending; copied. A page that is not in the memfd must not be here */
};

struct up_compare_result {
	uint64_t id, start_ns, done_ns, cpu_ns; /* CLOCK_MONOTONIC; of this thread */
	uint64_t size_bytes, first_differing;
	int64_t mtime_ns, ctime_ns;
	uint32_t compared, differing, rewritten, reads;
	uint32_t unread, stopped_at; /* left out for reads_max or limit_ns, and the first of them */
	int32_t error;               /* of fstat(2): size and times are not known */
};

struct up_checker;
int up_checker_create(struct up_checker **out, int threads, int event_fd);
/* Does not wait for threads that wait for storage: then it all stays until the process ends, and the
 * pool must, too. Returns whether that is so. */
int up_checker_destroy(struct up_checker *checker);
/* 0, -EAGAIN: queue full, or -ENOMEM. */
int up_checker_submit(struct up_checker *checker, const struct up_compare_job *job);
int up_checker_reap(struct up_checker *checker, struct up_compare_result *out, int max);
int64_t up_checker_cpu_ns(struct up_checker *checker);

/* --- warmers (warm.c) --- */
enum up_warm_method {
	UP_WARM_PROBE = 0,     /* find out which of the others works on this file */
	UP_WARM_READAHEAD = 1, /* readahead(2) in calls of chunk_bytes, then wait for each */
	UP_WARM_PREAD = 2,     /* FADV_RANDOM on our description and pread of chunk_bytes */
};

struct up_warm_job {
	uint64_t id, offset, length;
	int fd, checkpoint_fd; /* checkpoint_fd -1: no pages to copy */
	uint32_t method, chunk_bytes;
	uint32_t pages, window_bytes; /* of readahead(2) no more is under way; 0: all of it */
	uint64_t page[16]; /* file page numbers to copy into the checkpoint memfd */
	uint64_t due_ns;   /* its reader comes there after so long; 0: not known. Of a pool that asks other nodes */
	uint32_t record;   /* of a pool: who comes to it takes all of it */
};

struct up_warm_result {
	uint64_t id;
	uint64_t submit_ns, start_ns, done_ns; /* CLOCK_MONOTONIC */
	uint64_t idle_start_ns, idle_done_ns;  /* of a pool: until then, for so long in all nothing was being read */
	uint64_t resident_bytes;               /* already there before */
	uint64_t bytes;                        /* asked for and there after */
	uint64_t asked_bytes, came_bytes;      /* of the method's calls, where a sensor tells */
	int64_t storage_bytes;                 /* as the kernel counted them for us; -1: not asked */
	uint64_t waited_bytes;                 /* from the first of our reads on that had to wait */
	uint64_t copied;                       /* bit i: page[i] is in the memfd */
	uint32_t method, chunk_bytes;          /* as used; what a probe found */
	int32_t error, sensor; /* sensor: who told what is resident; -errno: nobody */
};

/* malloc(3) of a process with many threads of ours, which allocate seldom: one arena for all of them, and what is freed
 * in large pieces goes back to the kernel. Before the first thread. */
void up_settle_malloc(void);

struct up_workers;
/* threads workers; each finished job adds 1 to event_fd. */
int up_workers_create(struct up_workers **out, int threads, int event_fd);
/* Waits for jobs under way; those not begun are dropped. */
void up_workers_destroy(struct up_workers *workers);
/* Queue a job (-EAGAIN: full), and begin with what is queued: short jobs that lie there together are
 * read together. */
int up_workers_submit(struct up_workers *workers, const struct up_warm_job *job);
void up_workers_start(struct up_workers *workers);
int up_workers_reap(struct up_workers *workers, struct up_warm_result *out, int max);
/* CPU time of all workers, ns: user + system, the copy of the reads included. */
int64_t up_workers_cpu_ns(struct up_workers *workers);

/* --- files that are read by name (paths.c) --- */
enum up_path_kind {
	UP_PATH_READ = 1,  /* into the page cache: all of it, or ranges */
	UP_PATH_PROBE = 2, /* what does the page cache keep here? Its first page, by two opens; the looks say it */
	UP_PATH_LIST = 3,  /* the names in a directory */
	UP_PATH_LOOK_UP = 4, /* the name, and the attributes of what it stands for, which is not opened */
};

/* How a file was when it was seen before: it is read only if it still is. */
struct up_path_expected {
	uint64_t size_bytes;
	int64_t mtime_ns;
	uint32_t f_type;   /* of statfs(2) */
	uint32_t is_given; /* 0: nothing is expected */
};

/* Shared by requests: all of them together read no more a second. */
struct up_path_pace {
	uint64_t bytes_per_second, next_ns; /* next_ns: 0 before the first */
};

struct up_path_request {
	uint64_t id, group;          /* the group: whatever is withdrawn at one time */
	uint64_t device, inode;      /* which file it must be; inode 0: any */
	uint64_t most_bytes;         /* no more of it is read; 0: no limit */
	int32_t directory_fd;        /* of a name that is relative; stays open until the result was reaped */
	uint32_t kind, method;       /* up_warm_method; UP_WARM_PREAD: nothing but pread */
	uint32_t hold, follow; /* stays open after that, for 5 s at most; a name may be a symbolic link */
	uint32_t cached_waits;       /* so often a read sleeps here though all is there (for the attributes) */
	uint32_t ranges;             /* 0: the whole file */
	const char *name;            /* copied, as are the ranges: offset, length, offset, length ... */
	const uint64_t *range;
	struct up_path_expected expected;
	struct up_path_pace *pace;   /* NULL: none is kept. It stays until the last result was reaped */
	uint32_t piece_bytes;        /* of one read(2), 4 MiB at most; 0: 1 MiB */
};

enum up_path_state {
	UP_PATH_DONE = 1,
	UP_PATH_FAILED = 2,      /* error says why */
	UP_PATH_ANOTHER = 3,     /* than was expected; device and inode say which */
	UP_PATH_NOT_REGULAR = 4, /* (of LIST: no directory), or of a file system whose bytes the kernel makes up */
	UP_PATH_EMPTY = 5,
	UP_PATH_WITHDRAWN = 6,
};

/* The first two by one open, the next two by another. */
enum up_path_look {
	UP_LOOK_COLD = 0,
	UP_LOOK_COLD_AGAIN = 1,
	UP_LOOK_REOPENED = 2,
	UP_LOOK_REOPENED_AGAIN = 3,
	UP_LOOK_STATUS = 4, /* fstat(2) */
	UP_LOOKS = 5,
};

struct up_path_result {
	uint64_t id, group;
	uint64_t device, inode, size_bytes; /* before it was read */
	int64_t mtime_ns;
	uint64_t bytes, waited_bytes;          /* read; from the first of our reads on that had to wait */
	uint64_t begin_ns, opened_ns, end_ns;  /* CLOCK_MONOTONIC; 0: it did not come so far */
	uint64_t look_ns[5];                   /* of a probe: each took so long ... */
	uint32_t look_waits[5];                /* ... and slept so often */
	uint32_t mappable;                     /* of a probe: 0: FUSE keeps no pages of it */
	uint32_t file_system;                  /* of a probe: f_type of statfs(2), 0: not known */
	uint32_t state, held;
	int32_t error, directory_fd;
};

/* A file is held open for so long, for a job that is about to open it. */
#define UP_HOLD_SECONDS 5
struct up_paths;
/* At most 2 * threads descriptors, and held_most of all that this process has created. event_fd (non-blocking) gets 1
 * when there is something to reap where nothing was. Returns how many threads there are. */
int up_paths_create(struct up_paths **out, int threads, uint32_t held_most, int event_fd);
/* Does not wait for threads that wait for storage: then it all stays until the process ends, and event_fd
 * must, too. Returns whether that is so. */
int up_paths_destroy(struct up_paths *paths);
/* 0, -EAGAIN: queue full, or -ENOMEM. */
int up_paths_submit(struct up_paths *paths, const struct up_path_request *request);
enum up_path_by { UP_PATH_BY_ID = 1, UP_PATH_BY_GROUP = 2 };
/* Those that nobody has begun, which are reaped as withdrawn: how many. */
int up_paths_withdraw(struct up_paths *paths, enum up_path_by by, uint64_t number);
/* Held for after_ns more, and no longer than they would have been; what has not been read yet not at all. */
void up_paths_release(struct up_paths *paths, enum up_path_by by, uint64_t number, uint64_t after_ns);
int up_paths_reap(struct up_paths *paths, struct up_path_result *out, int max);
int64_t up_paths_cpu_ns(struct up_paths *paths);

/* What a name stands for, as far as the kernel knows it. */
struct up_path_status {
	uint64_t device, inode, size_bytes;
	int64_t mtime_ns;
	uint32_t mode;
};

/* Of what somebody has just opened: the name is looked up, and no file system is asked for attributes that it may have
 * changed since (pathtype.c). 0 or -errno. */
int up_path_known_status(const char *path, struct up_path_status *out);

/* --- start profiles (profile.c) --- */
enum up_profile_flaw {
	UP_PROFILE_SOUND = 0,
	UP_PROFILE_NONE_SUCH = 1,     /* another file */
	UP_PROFILE_OTHER_VERSION = 2,
	UP_PROFILE_DAMAGED = 3,
	UP_PROFILE_TOO_LARGE = 4,
};

enum up_profile_limits {
	UP_PROFILE_BYTES_MAX = 16777216,
	UP_PROFILE_ENTRIES_MAX = 65536,
	UP_PROFILE_RANGES_MAX = 65536, /* of one entry. A start is 4 GiB at most: so many blocks */
	/* Of all entries: what is made of a small file takes no more memory than of a start. */
	UP_PROFILE_ALL_RANGES_MAX = 262144,
	UP_PROFILE_ALL_PATHS_MAX = 33554432, /* bytes, each path whole */
};

enum up_profile_kind {
	UP_PROFILE_FILE = 1,
	UP_PROFILE_DIRECTORY = 2, /* to be listed */
	UP_PROFILE_STAT = 3,      /* a name that is asked for, and no more */
};

struct up_profile_header {
	uint64_t total_bytes;    /* of what is to be read, as its writer says */
	uint32_t version, entries, runs, flaw;
};

/* Valid until the next one is asked for. */
struct up_profile_entry {
	const char *path;        /* absolute */
	const uint64_t *range;   /* offset, length, offset, length ... in bytes, rising, within the size */
	uint64_t size_bytes;
	int64_t mtime_ns;
	uint32_t kind;
	uint32_t seen;           /* bit n: by the n-th last run */
	uint32_t f_type;         /* of statfs(2) */
	uint32_t ranges;         /* 0: the whole file */
};

struct up_profile;
/* Of a whole file, which stays until up_profile_close(). 0, -ENOMEM, or -EINVAL: the header says why. */
int up_profile_open(struct up_profile **out, const void *file, uint64_t bytes, struct up_profile_header *header);
void up_profile_close(struct up_profile *profile);
/* 1; 0: there are no more; -EINVAL: what comes is none. */
int up_profile_next(struct up_profile *profile, struct up_profile_entry *out);

/* --- the node's page pool (pool/) --- */
enum up_chunk_state {
	UP_ABSENT = 0,
	UP_WANTED = 1, /* somebody waits; not being read yet */
	UP_FILLING = 2,
	UP_PRESENT = 3,
	UP_EVICTING = 4,
};

/* Whether other nodes ask for a chunk here. */
enum up_kept {
	UP_KEPT_NOT = 0,
	UP_KEPT_HELD = 1,   /* it lies in memory alone, and goes last */
	UP_KEPT_COPIED = 2, /* it lies on the disk tier, and may leave memory as any other */
};

enum up_pool_event_kind {
	UP_POOL_TOUCH = 1,   /* a fault on a chunk that was there */
	UP_POOL_MISS = 2,    /* a fault on one that was not */
	UP_POOL_EVICTED = 3, /* [offset, +length) was punched */
	UP_POOL_FAILED = 4,  /* [offset, +length) cannot be filled: error says why; readers wait */
	UP_POOL_STUCK = 5,   /* the same page again and again: the budget is too small for this reader */
};

struct up_pool_event {
	uint64_t time_ns, offset, length;
	uint32_t kind, file, client, region, tid;
	int32_t error;
	uint32_t refault; /* UP_POOL_MISS: chunks evicted since this one was, itself included; 0: it never was */
	int64_t passed;   /* of both faults: bytes that the reader has come over since its last one, mapped before; below
			   * 0: backward */
};

struct up_pool_options {
	uint64_t budget_bytes;
	uint64_t free_bytes; /* read beyond what readers were given, by requests that cost the same whatever they bring */
	uint32_t chunk_bytes; /* the unit of the books: 64 KiB, or the size of a huge page */
	uint32_t threads, huge;
	int32_t event_fd;
	uint32_t guardian; /* a second process holds the userfaultfds (guardian.c) */
};

#define UP_HISTOGRAM_BINS 512

/* Times in bins, 8 an octave, as state/ledger.py counts. */
struct up_pool_counts {
	uint64_t resident_bytes, peak_bytes, pinned_bytes, budget_bytes;
	uint64_t read_bytes, demand_read_bytes, unique_bytes, evicted_bytes;
	uint64_t faults, present_faults, missing_faults, lost_events;
	uint64_t waiters, waiters_peak, fills, failed_fills, rescues;
	uint64_t stand_in_bytes; /* read by agents that found us silent */
	uint64_t continued_bytes, collapsed_bytes; /* mapped: in pages, in huge pages */
	uint64_t direct_bytes, buffered_bytes, cached_bytes; /* how read_bytes came */
	uint64_t others_bytes; /* came from other nodes */
	uint64_t wait_bin[UP_HISTOGRAM_BINS], wait_sum_ns, wait_max_ns;
	uint64_t fill_bin[UP_HISTOGRAM_BINS], fill_sum_ns, fill_max_ns;
};

struct up_pool_file_counts {
	uint64_t resident_bytes, read_bytes, unique_bytes, evicted_bytes, others_bytes, given_bytes;
	uint64_t disk_bytes, disk_read_bytes; /* copies of it lie in the disk tier; came from there */
	uint64_t disk_written_bytes, disk_dropped_bytes; /* went there; left memory before they could */
};

struct up_spill_options {
	uint64_t size_bytes;
	uint64_t try_bytes; /* with so many it is tried once how quick it is; 0: never */
	int32_t fd; /* without a name, open past the page cache; the pool's own if it takes it */
	uint32_t errors_most; /* in a minute: with so many it ends */
};

#define UP_SPILL_ERRORS 8

struct up_spill_counts {
	uint64_t size_bytes, used_bytes, written_bytes, read_bytes;
	uint64_t dropped_bytes; /* left memory before it was written */
	uint64_t refused_bytes; /* left memory while there was no room */
	uint64_t write_busy_ns, read_busy_ns;
	uint64_t late_reads; /* not waited for to their end */
	uint64_t disk_rate, storage_rate; /* bytes a second; as it ended since it is the slower one (ETIME) */
	uint64_t errors[UP_SPILL_ERRORS]; /* so many of each */
	int32_t error[UP_SPILL_ERRORS];
	int32_t full, ended; /* errno after which nothing was written any more; after which it ended */
};

/* Blocks to punch when room is needed, best first. */
struct up_pool_victim {
	uint32_t file, chunks;
	uint64_t chunk; /* the first */
};

struct up_warm_job;
struct up_warm_result;
struct up_pool;
int up_pool_create(struct up_pool **out, const struct up_pool_options *options);
void up_pool_destroy(struct up_pool *pool);
/* The service's main thread is alive: said again at least every second. */
void up_pool_alive(struct up_pool *pool);
/* keep_bytes: of it, at the most, for what other nodes may ask for; a disk tier has as much as it has room for. */
void up_pool_budget(struct up_pool *pool, uint64_t budget_bytes, uint64_t keep_bytes);
/* What is kept for them in memory alone, bytes. */
uint64_t up_pool_kept(struct up_pool *pool);

/* A file joins: its number; *memfd_ro is what the jobs map. fd stays the caller's. unit_bytes: what
 * one request to its storage brings, which is then what one fill reads, on its own grid (0: nothing
 * to round to). was: what every description of it that is opened later must be, NULL where its pages go by inode. */
int up_pool_file(struct up_pool *pool, int fd, uint64_t size_bytes, uint64_t unit_bytes,
		 const struct up_file_status *was, int *memfd_ro);
/* Nobody maps it any more: its memory is free again. -EBUSY while somebody does. */
int up_pool_forget(struct up_pool *pool, int file);
/* Close the descriptors of a file that nobody maps and keep what is there of it (0, or -EBUSY); open
 * it again before it is mapped again (fd stays the caller's). */
int up_pool_park(struct up_pool *pool, int file);
/* Before either: end what is still to be read of a file that nobody maps (it may wait for room). */
void up_pool_hush(struct up_pool *pool, int file);
int up_pool_unpark(struct up_pool *pool, int file, int fd, const struct up_file_status *was);
/* One entry a chunk; the pool's own arrays, valid until up_pool_forget(). */
struct up_pool_books {
	uint8_t *state; /* up_chunk_state */
	uint8_t *kept;  /* up_kept */
	/* A bit a chunk, from bit 0 of the first word on, so many in each: it has a copy in the disk tier. NULL: there is none */
	const uint16_t *spilled;
	uint32_t spilled_chunks;
	/* Written by the main thread (pool/workingset.py): from UP_ACTIVE on, it goes after all others. */
	uint8_t *refaults;
	uint32_t *touched_ms; /* since the pool began, never 0; 0: not touched since it was read */
	uint32_t *left;       /* up_pool_evictions() when it was evicted last; 0: never */
};
#define UP_ACTIVE 2
/* Their length. */
uint64_t up_pool_books(struct up_pool *pool, int file, struct up_pool_books *out);
/* Chunks that have been evicted, of all files. It wraps round, past 0. */
uint32_t up_pool_evictions(struct up_pool *pool);
void up_pool_file_counts(struct up_pool *pool, int file, struct up_pool_file_counts *out);

/* All that is there, or being read now, goes, as soon as nobody is just being served from it: who
 * touches it waits until it has been read again. */
void up_pool_drop(struct up_pool *pool, int file);
/* The bytes of the file itself, fresh: 0 or -errno. May wait for storage. */
int up_pool_read(struct up_pool *pool, int file, uint64_t offset, uint64_t length, char *out);
/* A copy of [offset, +length) of one chunk: 1, or 0 where it is not there. */
int up_pool_copy(struct up_pool *pool, int file, uint64_t offset, uint64_t length, char *out);

/* A process joins: its slot. The pool owns uffd; *ring gets the sign of life. What it had under the
 * same number before (exec) is over. pid 0: not known; then its page table gets no huge pages. */
int up_pool_join(struct up_pool *pool, int uffd, int pid, struct up_ring *ring);
void up_pool_leave(struct up_pool *pool, int client);
/* The process is without an agent now: it or the agent died. Its ring is not ours to write any more. */
void up_pool_orphan(struct up_pool *pool, int client);
/* Whether nobody has its address space any more, other processes included: no touch can come. */
int up_pool_is_gone(struct up_pool *pool, int client);
/* Whether the kernel says that no memory of the pool is mapped there. */
int up_pool_has_nothing(struct up_pool *pool, int client);
int up_pool_map(struct up_pool *pool, int client, uint32_t region, int file, uint64_t address,
		uint64_t length, uint64_t offset);
void up_pool_unmap(struct up_pool *pool, int client, uint32_t region);

/* Prefetch: job.fd is the file's number, the rest as for the workers. -EAGAIN: queue full. */
/* A job has said that it reads the file here and there (MADV_RANDOM), or does no longer. */
void up_pool_random(struct up_pool *pool, int file, int is_random);
int up_pool_submit(struct up_pool *pool, const struct up_warm_job *job);
int up_pool_reap(struct up_pool *pool, struct up_warm_result *out, int max);
void up_pool_victims(struct up_pool *pool, const struct up_pool_victim *victim, int count);
/* How many of the last list are left; -1: a reader waits for another. */
int up_pool_victims_left(struct up_pool *pool);
/* Bytes of the budget that are taken. */
uint64_t up_pool_used(struct up_pool *pool);
int up_pool_drain(struct up_pool *pool, struct up_pool_event *out, int max);
void up_pool_counts(struct up_pool *pool, struct up_pool_counts *out);
int64_t up_pool_cpu_ns(struct up_pool *pool);
/* A disk tier, before the first file: 0 or -errno. */
int up_pool_spill(struct up_pool *pool, const struct up_spill_options *options);
/* It may be so large. */
void up_pool_spill_fit(struct up_pool *pool, uint64_t bytes);
/* Nothing of a file goes there; the pool's books have no `spilled` of it then. */
void up_pool_spill_not(struct up_pool *pool, int file);
/* Copies of so much of a file that are not kept for other nodes go, the last first, for others to have room: bytes that are
 * free. */
uint64_t up_pool_spill_free(struct up_pool *pool, int file, uint64_t bytes);
void up_pool_spill_counts(struct up_pool *pool, struct up_spill_counts *out);

/* --- memory that is left (memory.c, pressure.c, canary.c) --- */
struct up_memory;

struct up_memory_room {
	uint64_t may_hold_bytes;    /* a pool may have so much, beside what the others have had and a burst of them */
	uint64_t left_bytes;        /* may be taken where least is left, until the kernel kills somebody; of a limit */
	uint64_t limit_bytes;       /* of so much. A pool's memory is taken */
	uint64_t least_limit_bytes; /* of all levels; of the cgroups whose shared memory the kernel cannot move to swap */
	uint64_t group_limit_bytes;
	uint32_t is_cgroup;         /* may_hold_bytes is for a cgroup, not for the machine */
	uint32_t canaries;          /* that the kernel has killed */
};

/* root: where cgroups are mounted; groups, meminfo: the text of /proc/PID/cgroup, the path of /proc/meminfo. */
int up_memory_open(struct up_memory **out, const char *root, const char *groups, const char *meminfo);
void up_memory_close(struct up_memory *memory);
/* With held_bytes in a pool. Numbers are UINT64_MAX where nothing is limited. */
void up_memory_look(struct up_memory *memory, uint64_t held_bytes, struct up_memory_room *out);

struct up_pressure;
struct up_pressure_options {
	struct up_memory *memory; /* its own from now on, if it starts */
	struct up_pool *pool;     /* or NULL; outlives it */
	int32_t exit_status;
	uint32_t with_canary;
};

/* A thread that looks all the time, says to the pool what it may hold, and ends this process with exit_status
 * where there is no room for it. */
int up_pressure_start(struct up_pressure **out, const struct up_pressure_options *options);
void up_pressure_stop(struct up_pressure *pressure);
/* At its last look. */
void up_pressure_now(struct up_pressure *pressure, struct up_memory_room *out);
/* The pool holds no more than so much: what is above it leaves at once, whatever its budget. 0: all of it, and what is
 * being read into it comes to nothing, until there is another word. */
void up_pool_room(struct up_pool *pool, uint64_t bytes);

/* --- other nodes (net/) --- */
struct up_net;

struct up_net_options {
	uint32_t me;                /* this node's number */
	uint32_t chunks_per_block;
	uint32_t serve_threads;
	int32_t to_fd, from_fd;     /* eventfds: the transport is told of messages, and tells of its own */
	uint32_t patience_ms;       /* the least that an answer is waited for; 0: as long as usual */
	uint32_t serve_percent;     /* of a core, for the threads that answer; 0: no limit */
};

struct up_net_counts {
	uint64_t from_bytes, to_bytes;    /* came from other nodes, went to them */
	uint64_t questions, asks, hurries, refused, late, corrupt, passed_over;
	/* What other nodes have and was read from storage: since that was quicker; since it was not known in time who has
	 * it; since that node had failed before; since its answer did not come in time, or was none. */
	uint64_t quicker_bytes, unknown_bytes, away_bytes, unanswered_bytes, refused_bytes;
	uint64_t served_reads, lost_slots;
	uint64_t hedged_bytes;            /* read from storage since a reader had waited long enough */
	uint64_t serve_cpu_ns, declined;  /* of the threads that answer; requests beyond their share */
	int32_t failed;                   /* a new transport is needed */
};

struct up_net_node_counts {
	uint64_t from_bytes, to_bytes, answer_ns; /* the longest of its last answers */
	uint64_t late, corrupt;      /* answers of it that did not come in time, or were not what it has */
	uint32_t here, failures, out;
	uint32_t cpu_short;          /* its transport waits for processors longer than it runs on them */
};

/* Fetch and serve by a transport: the ring is closed by up_net_stop(), the descriptors stay the
 * caller's. One at a time for a pool. 0 or -errno. */
int up_net_start(struct up_net **out, struct up_pool *pool, struct up_net_ring *ring,
		 const struct up_net_options *options);
void up_net_stop(struct up_net *net);
/* What fstat(2) says of a file's content. */
struct up_net_stamp {
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
};
/* A file of the pool is the one of which other nodes have this identity; no longer. `stamp`: that with which it
 * became the pool's. */
int up_net_share(struct up_net *net, int file, const uint64_t *id, const struct up_net_stamp *stamp);
void up_net_unshare(struct up_net *net, int file);
/* It is not known yet whether other nodes have this file: what nobody waits for waits so long for that. */
void up_net_pending(struct up_net *net, int file, uint32_t patience_ms);
/* Whether `count` chunks, which a reader may come to, are to be read ahead. What other nodes keep is one message away, so
 * that it costs little to wait with it until readers here come to what others keep; and who reads only its own part of
 * a file moves nothing. `expected`: the last chunk that will be asked for. Nothing is waited for. */
enum up_net_ahead {
	UP_NET_AHEAD_NOW = 0,
	UP_NET_AHEAD_SOON = 1, /* it is being asked who has them */
	UP_NET_AHEAD_HELD = 2, /* when readers come to what others keep */
};
enum up_net_ahead up_net_ahead(struct up_net *net, int file, uint64_t first, uint64_t count,
			       uint64_t expected);
/* Whether other nodes read the same of a file as readers here do. */
int up_net_reads_alike(struct up_net *net, int file);
void up_net_counts(struct up_net *net, struct up_net_counts *out);
void up_net_node_counts(struct up_net *net, uint32_t node, struct up_net_node_counts *out);
/* What large requests brought in a second lately, beside whatever else was under way; 0: not known. */
void up_net_rates(struct up_net *net, uint64_t *network, uint64_t *storage);
/* For each of so many equal parts of a file, a node that keeps some of it, as far as is known here; else
 * UP_NET_UNKNOWN. */
void up_net_map(struct up_net *net, int file, uint32_t cells, uint16_t *out);

/* --- who reads by system calls (reads.c) --- */
struct up_reads;

enum up_read_call {
	UP_READ_GOES_ON = 0, /* no call: a thread, or a descriptor, has come so far since it was told of last */
	UP_READ_READ = 1,
	UP_READ_PREAD = 2,
	UP_READ_READV = 3,
	UP_READ_PREADV = 4,
	UP_READ_SENDFILE = 5,
	UP_READ_COPY = 6, /* copy_file_range */
};

/* By what a process is seen. */
enum up_read_sensor {
	UP_READ_UNSEEN = 0,     /* no look yet */
	UP_READ_BY_SYSCALL = 1, /* /proc/PID/task/TID/syscall */
	UP_READ_BY_FDINFO = 2,  /* that is refused: the positions of its descriptors */
	UP_READ_REFUSED = 3,    /* both are */
	UP_READ_ENDED = 4,
};

/* A thread that waits in a call which reads, or how far one has come that did. */
struct up_read_sighting {
	uint64_t at_ns;         /* CLOCK_MONOTONIC */
	int64_t offset;         /* where the call reads; of UP_READ_GOES_ON the position; -1: not known */
	uint64_t asked_bytes;   /* 0: not known */
	uint64_t rchar;         /* of the thread (tid 0: of the process), which belongs to this offset */
	uint64_t inode;         /* of its file, as fdinfo says; with the mount: whether the number names another one by now */
	int32_t pid, tid, fd;
	uint32_t mount, flags;  /* of open(2) */
	uint16_t call, state;   /* up_read_call; the letter of proc(5): D, I and S wait */
};

/* Sums over all looks; of threads: the time for which each was last seen so. */
struct up_read_process {
	uint64_t looks, waiting_ns, running_ns; /* waiting: for a file system */
	uint64_t rchar;         /* when it was asked for last: not while a thread is seen reading */
	uint32_t threads, sensor;
	int32_t error;          /* of the better sensor: -errno, or 0 */
	uint32_t left_out;      /* by fdinfo: descriptors beyond those that are followed */
};

struct up_reads_counts {
	uint64_t looks, sightings, lost, cpu_ns, period_ns;
	uint32_t processes, threads, descriptors;
};

/* event_fd: incremented after a look that has found something. descriptors: so many may be kept open. 0 or -errno. */
int up_reads_create(struct up_reads **out, int event_fd, uint32_t descriptors);
void up_reads_destroy(struct up_reads *reads);
/* 0, -ESRCH, -EEXIST, -ENOSPC: too many, -ENOMEM, or what open(2) says. */
int up_reads_add(struct up_reads *reads, int pid);
/* 0 or -ESRCH. What was seen of it before may still come. */
int up_reads_remove(struct up_reads *reads, int pid);
int up_reads_drain(struct up_reads *reads, struct up_read_sighting *out, int max);
/* As of the last look: 0 or -ESRCH. */
int up_reads_process(struct up_reads *reads, int pid, struct up_read_process *out);
void up_reads_counts(struct up_reads *reads, struct up_reads_counts *out);

/* The file behind a descriptor of a process, as far as the kernel knows it without asking storage. It is not opened
 * (O_PATH only). 0 or -errno. */
struct up_read_file {
	uint64_t device, inode, size_bytes;
	uint32_t mode;
};
int up_read_file(int pid, int fd, struct up_read_file *out);

/* cdef end */

#endif
