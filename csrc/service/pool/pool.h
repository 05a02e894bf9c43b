/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.h - the inside of the node's page pool: pool.c (clock, lock, events), pool_main.c (what the main
 * thread asks; start and end), pool_files.c (files), pool_clients.c (processes), pool_faults.c (the thread
 * that answers), pool_map.c (page tables), pool_waiters.c (who is blocked), pool_fill.c (the threads that
 * read), pool_others.c (what is done for other nodes), pool_room.c (what goes when room is needed),
 * pool_yield.c (what it may hold beside the job), pool_rescue.c (who cannot be read for in the usual way), pool_spill.c
 * (what goes to the disk, spill.h), pool_keep.c (what is kept for other nodes).
 *
 * One lock. It is never held over a system call that can wait: not over a read, a write, a punch
 * or an ioctl on somebody's userfaultfd. What such a call works on is held by the chunk's state
 * (FILLING, EVICTING), by a pin (a chunk that is being mapped is not punched) and by a user count
 * (a userfaultfd that is being used is not closed).
 *
 * The one rule: a page is mapped (UFFDIO_CONTINUE, MADV_COLLAPSE) only while its chunk is PRESENT
 * and pinned. Ranges are registered MISSING and MINOR, so whatever else the memfd holds at that
 * moment, a touch of an unmapped page waits and never reads it.
 */
#ifndef UP_POOL_H
#define UP_POOL_H

#include <linux/userfaultfd.h>
#include <pthread.h>

#include "service/cond.h"
#include "service/helper.h"
#include "service/pool/guardian.h"
#include "service/pool/source.h"
#include "service/pool/spill.h"
#include "common/vma.h"

#define POOL_FILES 256
#define POOL_CLIENTS 2048
#define POOL_JOBS 1024u
#define POOL_EVENTS 4096u
#define POOL_AHEADS 64
/* Of a mapping: two of a copy, or so many threads'. */
#define POOL_STREAMS 4
#define RUN_MAX_BYTES (4u << 20)
#define HUGE_ALIGN (2u << 20)
/* A chunk that somebody has just got stays this long: the instruction that touched it has to end,
 * also one that reads from two chunks. */
#define HOLD_MS 2

struct pool_file {
	int used, memfd;
	struct up_vma memory; /* its number and device */
	struct up_source source;
	uint64_t size, chunks, unit; /* unit: chunks that one request to its storage brings, or 0 */
	uint8_t *state, *pins, *ever; /* one a chunk; ever: was here before */
	uint8_t *stale; /* one a chunk: it holds what the file held before, and goes */
	uint8_t *kept;  /* one a chunk: up_kept (pool_keep.c) */
	uint8_t *rest;  /* one a chunk: so many with it to the end of the record that it was last read for; 0: of none */
	uint32_t begun, went_on, paired; /* misses at a new place: see first_run() */
	int is_random; /* MADV_RANDOM: the kernel reads single pages of it */
	uint64_t by_unit, mapped; /* chunks: read by whole requests for misses; that readers were given */
	uint64_t stale_at;
	int dropping; /* some are */
	uint8_t *refaults; /* see struct up_pool_books */
	uint32_t *touched_ms, *left;
	char *map; /* huge pages: the pool's own mapping, else NULL */
	uint32_t regions, waiters;
	uint32_t busy; /* calls that work on it without the lock */
	uint32_t filling; /* threads that read it now */
	uint32_t copying; /* that copy some of it for the disk tier: for a moment, by memory alone */
	int failed; /* the main thread has been told */
	struct up_pool_file_counts count;
};

/* Where a reader goes on, or one of its threads; a large copy touches the last page of what it takes before those
 * in the middle, too. `passed` 0: free. */
struct pool_stream {
	uint64_t low, high; /* chunks mapped of it: who goes on there gets more at once */
	uint64_t at;        /* the chunk that was touched last */
	uint64_t passed;    /* chunks that were come over */
	uint64_t miss_next; /* the same for what is read on demand */
	uint32_t run, miss_run;
	uint32_t touched; /* the region's number of touches then */
	int backward;
};

struct pool_region {
	uint32_t id;
	int file;
	uint64_t address, length, offset;
	struct pool_stream stream[POOL_STREAMS];
	uint32_t now, touches; /* the stream that was touched last */
};

/* guardian_link.c: the process that holds what is held here, too. */
struct pool_guardian {
	int fd, pid; /* fd -1: none; pid: until it has been waited for */
	struct guardian_shared *shared;
	uint64_t begun_ns, again_ns;        /* again: when another one is started */
	uint64_t stand_ins, stand_in_bytes; /* as known */
};

/* Chunks that a hand, which goes round over all files, looks at before it gives up for now. */
#define HAND_STEPS 65536u

#define STUCK_PLACES 64

struct pool_client {
	int uffd; /* -1: free */
	int pid, pidfd; /* pidfd -1: it gets no huge pages in its page table */
	int maps_fd;    /* -1: what lies in it cannot be asked */
	int moved;      /* it has moved pages of ours: who asks where a touch is asks the kernel */
	uint32_t slow; /* of them that took too long, less those that did not */
	uint32_t small_until_ms; /* no more of them before that */
	uint32_t users, generation;
	/* Pages being mapped now, begun in an even and in an odd turn: a range that has gone may be
	 * another mapping's only after those that were begun before. */
	uint32_t turn, mapping[2];
	int leaving;
	int former; /* its process runs another program now: it gets no huge pages */
	struct up_ring *ring;
	uint64_t stand_ins, stand_in_bytes; /* of its ring, as known */
	struct pool_region *region;
	uint32_t regions, room;
	struct {
		uint64_t offset[2]; /* of the last two pages that this thread had to wait for */
		uint32_t file, tid, count;
	} stuck[STUCK_PLACES];
};

/* A thread that is blocked on a page. */
struct pool_waiter {
	uint32_t client, generation, tid;
	int file;
	uint64_t chunk, address, time_ns;
	uint64_t looked_ns; /* whether it waits in a call: pool_rescue.c */
	struct pool_waiter *next;
};

/* Chunks to be mapped before their reader touches them: the fault thread's own. */
struct pool_ahead {
	uint32_t client, generation, region, stream;
	uint64_t piece, chunk, end; /* of each piece, the first page stays unmapped */
};

struct pool_demand {
	int file;
	uint32_t run;
	uint64_t chunk;
};

struct pool_job {
	struct up_warm_job job;
	struct up_warm_result result;
	uint64_t chunk, end; /* what is not begun yet */
	uint64_t chunks, last; /* of it, as asked for; the last one of them */
	uint32_t running;
	int queued; /* it is finished by who takes it out of the queue, or after that */
	int taken; /* between submit and reap */
};

enum pool_has { POOL_HAS_NOT = 0, POOL_HAS, POOL_HAS_ON_DISK, POOL_HAS_SOON, POOL_HAD };

/* What a network asks of its pool for other nodes: callbacks, handed to it at its start, since the pool's threads call
 * the network. Each takes the pool's lock. The order of the two locks is the pool's, then the net's: none of these is
 * called with the net's held; who holds the pool's may take the net's. */
struct pool_calls {
	/* Whether the chunks [first, +count) are there; what is not has a copy on the disk tier; is on its way; or it has gone
	 * again since a reader came to it, not longer than `had_ms` ago. */
	enum pool_has (*has)(struct up_pool *p, int file, uint64_t first, uint64_t count, uint32_t had_ms);
	/* Have them there and pinned: 0; -ENOENT: the file has none; -EBUSY: there is no room, or it took longer than until
	 * `until_ns`; -EIO: they cannot be read. What is neither there nor on its way is read from the disk tier or from
	 * storage, into *buffer of pool_buffer_room(), which may be another one then. */
	int (*pin)(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer, uint64_t until_ns);
	/* The bytes of such chunks, up to the file's end; how many, or -errno. */
	int64_t (*copy)(struct up_pool *p, int file, uint64_t first, uint64_t count, char *out);
	/* `given_bytes`: what of them another node was given. */
	void (*unpin)(struct up_pool *p, int file, uint64_t first, uint64_t count, uint64_t given_bytes);
	/* The longest that a read of the disk tier has taken lately; UINT64_MAX: none is known. */
	uint64_t (*disk_ns)(struct up_pool *p);
};

/* A place in the books where the last look has ended. */
struct pool_hand {
	int file;
	uint64_t at;
};

struct up_pool {
	pthread_mutex_t lock;
	/* work: for a thread that has nothing to do, signalled once for each piece of work, and whoever
	 * takes a piece of several signals for the next. room: memory has become free, or may be.
	 * idle: a call has ended. stall: somebody has waited long. */
	struct up_cond work, room, idle, stall;
	uint32_t signals; /* of `work`, for when the lock is free: who is woken needs it */
	struct up_pool_options options;
	uint64_t page_bytes, began_ns, alive_ns;
	int stop, epoll_fd, wake_fd;
	int dropping; /* of some file */
	int strays; /* pages may lie in memfds that no chunk of the books accounts for */
	int retry; /* no memory to note a demand: see pool_want_again() */
	int rescuing; /* pages are mapped whose chunk is not PRESENT yet */
	uint64_t rescued_ns; /* when that was last so */
	/* budget: what was asked for, or less where memory is short (pool_yield.c). used: PRESENT, FILLING and EVICTING */
	uint64_t budget, asked_bytes, room_bytes, used_bytes, leaving_bytes;
	const struct pool_calls *calls; /* for a network: fixed from the start */
	struct up_net *net; /* other nodes, or NULL */
	uint32_t nets;      /* that are not freed yet */
	struct spill *spill; /* the disk tier, or NULL; fixed before the first file */
	uint32_t spilling;   /* fills from there, under way */
	/* Kept for other nodes, and at the most; of that in memory alone. */
	uint64_t kept_bytes, keep_most_bytes, held_bytes, hold_most_bytes;
	struct pool_hand held, unkept; /* chunks that are held; copies that nobody else asks for */
	int take_any; /* also what is kept, or active: nothing else may go */
	uint32_t evictions; /* see up_pool_evictions() */

	struct pool_file file[POOL_FILES];
	uint32_t files;
	/* Who writes into the memfd of each. The kernel takes one writer of an inode at a time, and the others' threads would
	 * turn on their cores until it is theirs. */
	pthread_mutex_t writing[POOL_FILES];
	struct pool_client client[POOL_CLIENTS];
	struct pool_waiter *waiting, *spare;

	struct pool_ahead ahead[POOL_AHEADS];
	uint32_t aheads;

	struct pool_demand *demand;
	uint32_t demand_head, demand_tail, demand_room;
	struct pool_job job[POOL_JOBS];
	uint32_t queue[POOL_JOBS], queue_head, queue_tail; /* numbers of jobs, first come */
	uint32_t done[POOL_JOBS], done_head, done_tail;
	uint32_t prefetching, run_chunks;
	uint64_t expected; /* chunks of all jobs */
	uint32_t fills;    /* under way */
	uint64_t idle_ns, idle_since_ns; /* none was for so long in all; and since then, if none is */

	struct up_pool_victim *victim;
	int victims, victim_at, asked; /* asked: for another list, at asked_ns */
	uint64_t asked_ns, answered_ns;
	int hand_spared; /* the hand has come past what is active */
	uint32_t hand_file;
	uint64_t hand_chunk;

	struct up_pool_event event[POOL_EVENTS];
	uint32_t event_head, event_tail;
	int rung; /* the main thread has been called for the events that wait */
	int calls_main; /* or is to be, when the lock is free */
	struct up_pool_counts count;

	struct pool_guardian guardian;
	pthread_t fault_thread, rescue_thread;
	uint32_t threads;
	pthread_t thread[];
};

static inline uint64_t pool_chunk_bytes(const struct up_pool *p)
{
	return p->options.chunk_bytes;
}

/* Of the buffer of a thread that reads: a run, and to have it aligned. */
static inline size_t pool_buffer_room(const struct up_pool *p)
{
	return (RUN_MAX_BYTES > pool_chunk_bytes(p) ? RUN_MAX_BYTES : pool_chunk_bytes(p)) + HUGE_ALIGN;
}

/* pool.c */
uint64_t pool_now_ns(void);
uint32_t pool_now_ms(const struct up_pool *p);
/* Wake the main thread. */
void pool_call_main(const struct up_pool *p);
void pool_post(struct up_pool *p, const struct up_pool_event *e);
/* Whether the main thread has still to hear of events that were not urgent; with `now` it does. */
int pool_unsaid(struct up_pool *p, int now);
void pool_bin(uint64_t *bin, uint64_t *sum, uint64_t *max, uint64_t ns);
/* Send the signals, and call the main thread if something was posted for it: with the lock, which the others leave. */
void pool_send(struct up_pool *p);
void pool_unlock(struct up_pool *p);
void pool_wait(struct up_pool *p, struct up_cond *what);
/* Until there is room, or for a moment. */
void pool_wait_a_moment(struct up_pool *p);
/* Whoever waits for room looks again. */
void pool_tell_room(struct up_pool *p);
/* Whether all files fit: then what is read too early is not read twice, and nothing leaves. */
int pool_all_fit(const struct up_pool *p);
/* Nobody copies any of a file. With the lock, which it leaves and takes again. */
void pool_await_copies(struct up_pool *p, const struct pool_file *f);
/* Chunks of one fill at the most: 64 KiB to 4 MiB, as it goes. */
uint64_t pool_run_most(const struct up_pool *p);
/* *at leaves the list of those who wait. */
void pool_drop_waiter(struct up_pool *p, struct pool_waiter **at);
/* Have some thread look for what agents have read in our stead: pool_drop_strays(). */
void pool_seek_strays(struct up_pool *p);

/* pool_waiters.c */
/* Somebody waits for a chunk that is ABSENT: read it before all that is only expected. */
void pool_want(struct up_pool *p, int file, uint64_t chunk, uint32_t run);
/* The same for all that is waited for and neither WANTED nor on its way. */
void pool_want_again(struct up_pool *p);
/* A thread waits in one place at a time. 0 or -ENOMEM. */
int pool_add_waiter(struct up_pool *p, uint32_t client, int file, uint64_t chunk,
		    const struct uffd_msg *m, uint64_t address);
/* The chunks [first, first + count) are there now, pinned by the caller: serve who waits for them.
 * Called with the lock, which it leaves and takes again. */
void pool_serve(struct up_pool *p, int file, uint64_t first, uint64_t count);

/* pool_map.c */
struct pool_mapped {
	uint64_t pages_bytes, huge_bytes;
};
/* Chunks: one part in `share` of the pool, `most_bytes` at the most, and at least one; those that are mapped at once, at the
 * most, since in a small pool they are gone before all are read; and those that are mapped for a touch of one, with it, as
 * its stream (NULL: none) or its record has earned. */
uint64_t pool_share_of(const struct up_pool *p, uint32_t share, uint64_t most_bytes);
uint64_t pool_map_most(const struct up_pool *p);
uint64_t pool_run_of(const struct up_pool *p, const struct pool_file *f, const struct pool_stream *s, uint64_t chunk);
/* Map [offset, +length) of the region, all of it PRESENT and pinned, around `address` (0: nobody
 * waits), and wake who waits there. Called without the lock; what was mapped is counted in *into. */
void pool_map_pages(struct up_pool *p, struct pool_client *c, const struct pool_region *r,
		    uint64_t offset, uint64_t length, uint64_t address, struct pool_mapped *into);
/* Whether whole huge pages of the region become one entry each. */
int pool_maps_huge(const struct up_pool *p, const struct pool_client *c,
		   const struct pool_region *r);
/* With the lock. */
void pool_count_mapped(struct up_pool *p, const struct pool_mapped *m);
void pool_wake(int uffd, uint64_t address, uint64_t length);
/* A touch there is SIGBUS, as of storage that fails. 0 or -errno (before Linux 6.6). */
int pool_poison(int uffd, uint64_t address, uint64_t length);
/* Whether nobody has the address space any more. */
int pool_is_gone(int uffd, uint64_t page_bytes);

/* pool_clients.c */
/* The job has moved [from, +length) past its interposers (UFFD_EVENT_REMAP). */
void pool_move_region(struct up_pool *p, uint32_t client, uint64_t from, uint64_t to, uint64_t length);
/* The region of an address, or of a number; NULL. */
struct pool_region *pool_region_at(struct pool_client *c, uint64_t address);
/* The same by what the kernel says lies there. The fault thread's alone. */
struct pool_region *pool_find_region(struct up_pool *p, struct pool_client *c, uint64_t address);
struct pool_region *pool_region_by_id(struct pool_client *c, uint32_t id);
/* The userfaultfd is used without the lock: it is not closed before pool_leave_off(). */
void pool_use(struct pool_client *c);
void pool_leave_off(struct up_pool *p, struct pool_client *c);
/* Pages of a region, which was found under the same lock, are going to be mapped: what
 * pool_end_mapping() takes. */
uint32_t pool_begin_mapping(struct pool_client *c);
void pool_end_mapping(struct up_pool *p, struct pool_client *c, uint32_t turn);
/* Wait until nothing is mapped any more into ranges of the process that were found before: a
 * UFFDIO_CONTINUE that is late would map, without a look at its state, a page of what lies there by
 * then. The main thread's alone, with the lock, which it leaves and takes again. */
void pool_await_mappings(struct up_pool *p, struct pool_client *c);
void pool_count_stand_ins(struct up_pool *p, struct pool_client *c);
/* Whether an agent may be reading for itself, between its write into the memfd and its UFFDIO_CONTINUE.
 * With the lock. */
int pool_is_stood_in_for(const struct up_pool *p);

/* pool_faults.c */
void *pool_fault_loop(void *pool);
/* Its epoll's word for: stop. */
#define POOL_WAKE UINT64_MAX

/* pool_rescue.c */
void *pool_rescue_loop(void *pool);
/* With the lock: whether somebody has waited too long, which its thread is told. */
void pool_look_for_stalls(struct up_pool *p);

/* pool_room.c: with the lock, which they may leave and take again. */
/* 1: something has changed, look again; 0: there is room for `bytes`; -1: nothing can go now; -2: the main
 * thread is thinking. */
int pool_make_room(struct up_pool *p, uint64_t bytes, int demand);
/* Some goes at once, as the policy has it or by the hand: 1, or 0 where none may go now. */
int pool_give(struct up_pool *p);
/* What up_pool_drop() has marked goes. 1: some went, look again; 0: none is left; -1: what is left
 * is in use just now. */
int pool_drop_some(struct up_pool *p);
/* What agents have read in our stead, and the books do not know, goes: whoever touches it has it
 * read again. */
void pool_drop_strays(struct up_pool *p);

/* pool_keep.c, with the lock */
/* Whether the disk tier has a copy of a chunk. */
int pool_is_copied(const struct up_pool *p, int file, uint64_t chunk);
/* Whether any of [first, +count) is kept for other nodes. */
int pool_keeps_any(const struct up_pool *p, int file, uint64_t first, uint64_t count);
/* They are kept from now on, as far as there is room. */
void pool_keep(struct up_pool *p, int file, uint64_t first, uint64_t count);
/* They have left memory, come there, or to the disk: what is kept of them is so where it is now, or no longer. */
void pool_keep_where_it_is(struct up_pool *p, int file, uint64_t first, uint64_t count);
/* The same for all that the disk has lost. */
void pool_keep_what_is_left(struct up_pool *p);
/* They have left memory: of a block that others ask for here, and for some of which there is no room, nothing is kept any
 * more, so that another node keeps all of it. */
void pool_keep_whole_or_not(struct up_pool *p, int file, uint64_t first, uint64_t count);
/* Whether what is held is to go to the disk, lest there be no room for more. */
int pool_holds_much(const struct up_pool *p);
/* A file that has gone. */
void pool_keep_none(struct up_pool *p, const struct pool_file *gone);
/* No more than memory may hold, and the disk: what goes over it is kept no longer. */
void pool_keep_most(struct up_pool *p);

/* pool_yield.c: the budget is what was asked for, or what there is room for. */
void pool_fit(struct up_pool *p);

/* pool_fill.c */
void *pool_fill_loop(void *pool);
/* One chunk of those that another node waits for is not there: whether to look again (1), or -errno. With the lock,
 * which it leaves and takes again. */
int pool_bring_for_others(struct up_pool *p, int file, uint64_t chunk, uint64_t count, char **buffer);

/* pool_others.c: struct pool_calls says what each does */
enum pool_has pool_has(struct up_pool *p, int file, uint64_t first, uint64_t count, uint32_t had_ms);
int pool_pin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer,
			uint64_t until_ns);
int64_t pool_copy_pinned(struct up_pool *p, int file, uint64_t first, uint64_t count, char *out);
void pool_unpin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, uint64_t given_bytes);
uint64_t pool_disk_ns(struct up_pool *p);

/* guardian_link.c, with the lock. 0 or -errno: without one the next guardian_beat() tries again. */
int guardian_begin(struct up_pool *p);
/* `used`: processes may still have the pool mapped. */
void guardian_end(struct up_pool *p, int used);
void guardian_beat(struct up_pool *p, uint64_t alive_ns);
/* As pool_is_stood_in_for(). */
int guardian_stands_in(const struct up_pool *p);
void guardian_joined(struct up_pool *p, uint32_t client);
void guardian_left(struct up_pool *p, uint32_t client);
void guardian_has_file(struct up_pool *p, uint32_t file);
void guardian_lost_file(struct up_pool *p, uint32_t file);
void guardian_mapped(struct up_pool *p, uint32_t client, const struct pool_region *r);
void guardian_unmapped(struct up_pool *p, uint32_t client, uint32_t region);

/* net/net.c */
/* It is not freed while it is held; taken with the pool's lock, given back without one. */
void net_hold(struct up_net *n);
void net_put(struct up_net *n);
/* Chunks of one block. */
uint64_t net_block_chunks(const struct up_net *n);

/* net/fetch.c */
/* The bytes of a range from another node, as far as one has them and they come. Ended by up_net_stop(). Without a
 * lock. */
struct up_net_range {
	uint64_t first, count, length; /* chunks, within one block; bytes */
	uint64_t expected;             /* the last chunk that is to be asked for soon */
	uint64_t due_ns;               /* when a reader comes there; 0: not known, or one waits */
	int demand;
};
/* How many, whole chunks from its beginning on, are in `into`; the rest is to be read from storage. */
uint64_t net_fetch(struct up_net *n, int file, const struct up_net_range *r, char *into);
/* Somebody waits for a chunk that is on its way. With the pool's lock. */
void net_hurry(struct up_net *n, int file, uint64_t chunk);
/* Some of a file was read: so much of it from storage, in so long. Asks `fd` whether it is still what other nodes call
 * so. */
void net_was_read(struct up_net *n, int file, int fd, uint64_t bytes, uint64_t took_ns);

/* net/hints.c */
/* A reader has come to a chunk. With the pool's lock. */
void net_touched(struct up_net *n, int file, uint64_t chunk);
/* A chunk that others ask for here is so no longer. With the pool's lock. */
void net_dropped(struct up_net *n, int file, uint64_t chunk);
/* Whether this node is to keep a chunk; or may be, as another one says, and home has yet to. */
int net_is_keeper(struct up_net *n, int file, uint64_t chunk);
int net_may_be_keeper(struct up_net *n, int file, uint64_t chunk);

#endif
