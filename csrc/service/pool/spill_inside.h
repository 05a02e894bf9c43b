/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill_inside.h - the inside of the disk tier: spill_main.c (beginning and end, and what the pool's main thread asks),
 * spill_write.c, spill_try.c, spill_read.c, spill.c (its threads and its errors, on which these stand), spill_books.c (slots, and
 * what lies in them). Each owns the part of struct spill that is named like it: others ask.
 */
#ifndef UP_SPILL_INSIDE_H
#define UP_SPILL_INSIDE_H

#include <pthread.h>
#include <stdint.h>

#include "service/cond.h"
#include "service/net/net.h"
#include "service/pool/spill.h"

/* As the number of a slot. */
#define NO_SLOT UINT32_MAX
/* Errors of the disk whose times are known. */
#define ERRORS_KEPT 8u

struct spill_file {
	uint64_t chunks;
	uint16_t *valid; /* of each part: a bit for each chunk that has a copy; NULL: no such file */
	uint32_t *slot;  /* 1 + that of each part; 0: none */
	uint32_t *sum;   /* of each chunk */
	uint32_t serial; /* of its books: what was begun by others is void */
	uint64_t copies; /* chunks */
	int lost;        /* some have gone since spill_has_lost() was asked */
};

struct spill_books {
	uint32_t slot_chunks;
	uint32_t most, high, frees, used; /* slots: there may be; that were used so far; of these free; taken */
	uint32_t *free, room;             /* for so many */
	uint32_t trim_to;                 /* blocks from this slot on are to be given back; NO_SLOT: none */
	struct {
		uint32_t slot; /* being written, or NO_SLOT */
		int lost;      /* it is nobody's: free it then */
	} writer[SPILL_WRITERS];
	struct spill_file file[POOL_FILES];
};

/* Copies in one slot, as they are now. */
struct spill_place {
	int file;
	uint32_t count, slot, serial, sum[SPILL_SLOT_CHUNKS];
	uint64_t first;
};

struct spill_read;

struct spill_reads {
	struct spill_read *queue;
	uint32_t under_way, lost; /* of these, not waited for any more */
	uint64_t ended_ns;        /* when the last one did */
	struct net_times times;
	struct net_rate disk, storage[POOL_FILES]; /* of each file's own */
	uint32_t passed;
	uint64_t bytes, busy_ns, late;
};

struct spill_writes {
	uint32_t poked, under_way, trimming;
	int full;           /* errno after which nothing is written any more */
	uint64_t pause_ns;  /* until then nothing is written while somebody reads */
	uint64_t has_bytes; /* of the disk's blocks */
	uint64_t bytes, busy_ns, dropped_bytes, refused_bytes;
	struct {
		uint64_t bytes, dropped_bytes;
	} file[POOL_FILES];
};

struct spill_errors {
	int ended; /* errno after which it ended */
	uint32_t most, count;
	uint64_t at_ns[ERRORS_KEPT];
	uint64_t times[UP_SPILL_ERRORS];
	int32_t number[UP_SPILL_ERRORS];
};

/* Slots at the most. */
#define SPILL_TRIED_MOST 64u

struct spill_trial {
	enum { TRIAL_NONE, TRIAL_ASKED, TRIAL_RUNS, TRIAL_DONE, TRIAL_JUDGED } state;
	uint64_t bytes;                   /* with so many; 0: never */
	uint64_t disk_rate, storage_rate; /* bytes a second, when it was judged */
};

struct spill {
	pthread_mutex_t lock;
	struct up_cond write, read, done; /* for writers; for readers; for all others */
	int fd, stop;
	uint32_t holders, threads, inside; /* the pool and its threads; these; writers that use the pool */
	uint32_t chunk_bytes;
	uint64_t slot_bytes;
	int64_t cpu_ns;
	struct spill_books books;
	struct spill_reads reads;
	struct spill_writes writes;
	struct spill_trial trial;
	struct spill_errors errors;
};

static inline int spill_has_copy(const struct spill_books *b, const struct spill_file *f, uint64_t chunk)
{
	return f->valid[chunk / b->slot_chunks] >> chunk % b->slot_chunks & 1;
}

/* --- spill_books.c: all but spill_file_make() with the lock --- */
void spill_books_begin(struct spill_books *b, uint32_t slot_chunks);
void spill_books_end(struct spill_books *b);
int spill_file_make(const struct spill_books *b, uint64_t chunks, struct spill_file *out); /* 0 or -ENOMEM */
void spill_books_add(struct spill_books *b, int file, const struct spill_file *f);
void spill_books_forget(struct spill_books *b, int file);
/* The copies of one part of a file go, of one file, of all. */
void spill_books_drop(struct spill_books *b, int file, uint64_t part);
void spill_books_drop_file(struct spill_books *b, int file);
void spill_books_drop_all(struct spill_books *b);
/* There may be so many slots; what lies in others goes. */
void spill_books_fit(struct spill_books *b, uint32_t most);
/* Where blocks that are to be given back begin, if nobody writes there: 1, or 0. They have been given back. */
int spill_books_may_trim(const struct spill_books *b, uint32_t *from, uint32_t *end);
int spill_books_trimmed(struct spill_books *b, uint32_t from);
/* The first of [first, +count) that have no copy, in a slot that nobody writes to: how many of them are reserved. */
uint64_t spill_books_reserve(struct spill_books *b, uint32_t writer, int file, uint64_t first, uint64_t count,
			     struct spill_copy *out);
/* Whether its file is still the one with that number. */
int spill_books_know(const struct spill_books *b, const struct spill_copy *c);
/* They are written, with these checksums; NULL: they are not. */
void spill_books_settle(struct spill_books *b, const struct spill_copy *c, const uint32_t *sum);
/* Of so many free slots no more than one in `part`, which nobody else has until they are returned: how many. */
uint32_t spill_books_borrow(struct spill_books *b, uint32_t *slot, uint32_t most, uint32_t part);
void spill_books_return(struct spill_books *b, const uint32_t *slot, uint32_t count);
/* Whether a chunk that has no copy might have one. */
int spill_books_has_room(const struct spill_books *b, int file, uint64_t chunk);
/* How many of [first, +count) are alike in whether they have a copy, which *there is; of copies those in one slot. */
uint64_t spill_books_run(const struct spill_books *b, int file, uint64_t first, uint64_t count, int *there);
/* Where copies of all of them lie: 1, or 0. Whether they lie there still. */
int spill_books_find(const struct spill_books *b, int file, uint64_t first, uint64_t count, struct spill_place *out);
int spill_books_has(const struct spill_books *b, const struct spill_place *at);

/* --- spill.c --- */
static inline int spill_is_on(const struct spill *s)
{
	return !s->stop && !s->errors.ended;
}
static inline uint64_t spill_offset(const struct spill *s, uint32_t slot, uint64_t chunk)
{
	return slot * s->slot_bytes + chunk % s->books.slot_chunks * s->chunk_bytes;
}
/* With the lock, which it gives back: one holder less. */
void spill_let_go(struct spill *s);
/* Of the calling thread, since it was asked last. */
void spill_count_cpu(struct spill *s);
/* With the lock. The disk has failed, or has brought what was not written: one more, and it may be the end. */
void spill_note_errno(struct spill *s, int error);
void spill_note_failure(struct spill *s, int error);
/* With the lock. It ends for this errno. */
void spill_give_up_all(struct spill *s, int error);

/* --- spill_read.c, with the lock but for the loop, which is a thread's --- */
void *spill_read_loop(void *spill);
/* Whether the file's own storage would be quicker. */
int spill_storage_is_quicker(const struct spill *s, int file, uint64_t bytes);
int spill_was_read_lately(const struct spill *s);
/* Whether all storage of which something is known would be quicker, and the rates; -1: nothing is known yet. */
int spill_is_slower(const struct spill *s, uint64_t *disk_rate, uint64_t *storage_rate);
void spill_disk_was_read(struct spill *s, uint64_t bytes, uint64_t took_ns);
/* The number is another file's. */
void spill_forget_rate(struct spill *s, int file);

/* --- spill_write.c, with the lock: the number is another file's --- */
void spill_forget_writes(struct spill *s, int file);

/* --- spill_try.c, with the lock but for the loop, which is a thread's --- */
void *spill_try_loop(void *spill);
/* Something is about to be written: the disk is tried once. */
void spill_ask_trial(struct spill *s);
/* Once it was tried, and storage is known, too: a disk that is slower is the end. */
void spill_judge(struct spill *s);

#endif
