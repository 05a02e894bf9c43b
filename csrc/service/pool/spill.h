/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill.h - the pool's disk tier (spill_main.c): copies of chunks in one file that has no name.
 *
 * Slots: so many bytes of the file hold chunks of one aligned part of one of the pool's files. What is where, and the
 * checksum of each chunk, lies in memory alone: the file is this service's and dies with it.
 *
 * One lock, which is never held over I/O. Who holds the pool's may take it; never the other way about.
 */
#ifndef UP_SPILL_H
#define UP_SPILL_H

#include <stddef.h>
#include <stdint.h>

#include "service/helper.h"

/* 64 KiB of 1 MiB. Of huge pages one. */
#define SPILL_SLOT_CHUNKS 16u
/* Threads that write; at most so many that read. */
#define SPILL_WRITERS 2u

struct spill;

/* A copy that is being made: what of which file, and where to. */
struct spill_copy {
	int file;
	uint32_t count, slot, serial, writer;
	uint64_t first;
};

/* `fd`: open for reading and writing past the page cache, empty; the tier's own from now on, if it begins. `readers`:
 * threads. 0 or -errno. */
int spill_create(struct spill **out, const struct up_spill_options *options, uint32_t chunk_bytes, uint32_t readers);
/* A thread more that writes, which runs `loop(argument)`, and says spill_thread_ends() as its last word. */
int spill_start(struct spill *s, void *(*loop)(void *), void *argument);
void spill_thread_ends(struct spill *s);
/* Nothing more is read or written. Who waits for a read goes on without. */
void spill_stop(struct spill *s);
/* Of one slot: a copy is no larger. */
uint64_t spill_slot_bytes(const struct spill *s);
/* Its file is the caller's again, before anything was asked of it. */
void spill_disown(struct spill *s);
/* After spill_stop(), when nobody reads any more: it goes with the last of its threads, none of which is waited for
 * while it waits for the disk. */
void spill_end(struct spill *s);

/* Books of a file of the pool. 0 or -ENOMEM. */
int spill_add_file(struct spill *s, int file, uint64_t chunks);
void spill_forget_file(struct spill *s, int file);
/* Its copies go: they are not what the file holds. */
void spill_drop_file(struct spill *s, int file);
/* Those of the part go in which the chunk lies. */
void spill_drop_part(struct spill *s, int file, uint64_t chunk);
/* Whether some have gone by themselves since it was asked last, by an error or with the file's end. */
int spill_has_lost(struct spill *s, int file);
/* What it can hold: its size, what is there where nothing more is written, or nothing. */
uint64_t spill_room(struct spill *s);
/* Which chunks have a copy, as struct up_pool_books says; until spill_forget_file(). */
const uint16_t *spill_copies(const struct spill *s, int file);
uint32_t spill_slot_chunks(const struct spill *s);
/* Its figures there. */
void spill_count_file(struct spill *s, int file, struct up_pool_file_counts *out);
/* The file may be so large; what lies beyond goes. */
void spill_fit(struct spill *s, uint64_t bytes);
void spill_count(struct spill *s, struct up_spill_counts *out);
int64_t spill_cpu_ns(struct spill *s);

/* How many of the chunks [first, +count) come from the same source as the first one, which is this disk if *here: one
 * read's worth then. */
uint64_t spill_run(struct spill *s, int file, uint64_t first, uint64_t count, int *here);
/* Such chunks, whole, into *buffer, which has `room` bytes of mmap(2): 1, or 0 where they are to come from elsewhere.
 * A read that takes too long keeps the buffer: another one is there then. Without a lock. */
int spill_read(struct spill *s, int file, uint64_t first, uint64_t count, int demand, char **buffer, size_t room);
/* The longest of the last reads; UINT64_MAX: none is known. */
uint64_t spill_longest_ns(struct spill *s);
/* The file's own storage has brought so much in so long. */
void spill_was_read(struct spill *s, int file, uint64_t bytes, uint64_t took_ns);
/* A buffer for it, or NULL. */
char *spill_buffer(size_t room);

/* Chunks may be on their way out: writers look. */
void spill_poke(struct spill *s);
/* A writer: wait until there may be something to copy, or not: 1, after which spill_leave() must follow before it writes;
 * 0: it is over. Between the two the pool is there. */
int spill_wait(struct spill *s);
int spill_enter(struct spill *s);
void spill_leave(struct spill *s);
/* The first of [first, +count) that have no copy, up to a slot's end, and for which there is room: how many are
 * reserved. They are written, or given up. */
uint64_t spill_reserve(struct spill *s, uint32_t writer, int file, uint64_t first, uint64_t count,
		       struct spill_copy *out);
void spill_give_up(struct spill *s, const struct spill_copy *c);
/* Whether it would be written if only a slot were free. */
int spill_lacks_slot(struct spill *s, int file, uint64_t chunk);
/* Of a page-aligned buffer with whole chunks. */
void spill_write(struct spill *s, const struct spill_copy *c, const char *buffer);
/* Chunks leave memory: those that have no copy, and might have had one, are counted. */
void spill_chunks_left(struct spill *s, int file, uint64_t first, uint64_t count);

#endif
