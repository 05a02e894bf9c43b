// SPDX-License-Identifier: Apache-2.0
/*
 * spill_books.c - the disk tier's slots, and which chunks of which file lie in them, with their checksums.
 *
 * It does no I/O and knows no thread but by its number: whoever calls has the lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/pool/spill_inside.h"

static void free_slot(struct spill_books *b, uint32_t slot)
{
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (b->writer[i].slot == slot) { /* what it writes would land in another's */
			b->writer[i].lost = 1;
			return;
		}
	b->used--;
	if (slot < b->most && slot < b->trim_to)
		b->free[b->frees++] = slot;
}

static uint32_t take_slot(struct spill_books *b)
{
	uint32_t most = b->most < b->trim_to ? b->most : b->trim_to, slot = NO_SLOT;

	if (b->frees)
		slot = b->free[--b->frees];
	else if (b->high < most)
		slot = b->high++;
	b->used += slot != NO_SLOT;
	return slot;
}

static uint64_t parts_of(const struct spill_books *b, const struct spill_file *f)
{
	return f->valid ? (f->chunks + b->slot_chunks - 1) / b->slot_chunks : 0;
}

void spill_books_drop(struct spill_books *b, int file, uint64_t part)
{
	struct spill_file *f = &b->file[file];

	if (!f->slot[part])
		return;
	f->copies -= (uint64_t)__builtin_popcount(f->valid[part]);
	f->lost |= f->valid[part] != 0;
	__atomic_store_n(&f->valid[part], 0, __ATOMIC_RELAXED);
	free_slot(b, f->slot[part] - 1);
	f->slot[part] = 0;
}

void spill_books_drop_file(struct spill_books *b, int file)
{
	for (uint64_t part = 0; part < parts_of(b, &b->file[file]); part++)
		spill_books_drop(b, file, part);
}

void spill_books_drop_all(struct spill_books *b)
{
	for (int i = 0; i < POOL_FILES; i++)
		spill_books_drop_file(b, i);
}

/* ------------------------------------------------------------------ files */

static void free_file(struct spill_file *f)
{
	free(f->valid);
	free(f->sum);
	free(f->slot);
	__atomic_store_n(&f->valid, NULL, __ATOMIC_RELEASE);
	f->sum = f->slot = NULL;
	f->chunks = f->copies = 0;
	f->serial++;
}

void spill_books_begin(struct spill_books *b, uint32_t slot_chunks)
{
	b->slot_chunks = slot_chunks;
	b->trim_to = NO_SLOT;
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		b->writer[i].slot = NO_SLOT;
}

void spill_books_end(struct spill_books *b)
{
	for (int i = 0; i < POOL_FILES; i++)
		free_file(&b->file[i]);
	free(b->free);
}

int spill_file_make(const struct spill_books *b, uint64_t chunks, struct spill_file *out)
{
	uint64_t parts = (chunks + b->slot_chunks - 1) / b->slot_chunks;

	*out = (struct spill_file){ .chunks = chunks };
	out->valid = calloc(parts, sizeof(*out->valid));
	out->sum = calloc(chunks, sizeof(*out->sum));
	out->slot = calloc(parts, sizeof(*out->slot));
	if (out->valid && out->sum && out->slot)
		return 0;
	free_file(out);
	return -ENOMEM;
}

void spill_books_add(struct spill_books *b, int file, const struct spill_file *f)
{
	struct spill_file *at = &b->file[file];

	at->chunks = f->chunks;
	at->sum = f->sum;
	at->slot = f->slot;
	at->serial++;
	at->copies = 0;
	at->lost = 0;
	__atomic_store_n(&at->valid, f->valid, __ATOMIC_RELEASE);
}

void spill_books_forget(struct spill_books *b, int file)
{
	spill_books_drop_file(b, file);
	free_file(&b->file[file]);
}

/* ------------------------------------------------------------------ how many there may be */

void spill_books_fit(struct spill_books *b, uint32_t most)
{
	uint32_t n = 0, *more;

	if (most > b->room) { /* for all of them, if all are free */
		more = realloc(b->free, most * sizeof(*more));
		b->free = more ? more : b->free;
		b->room = more ? most : b->room;
		most = more ? most : b->most;
	}
	b->most = most;
	if (most >= b->high || most >= b->trim_to)
		return;
	b->trim_to = most;
	for (uint32_t i = 0; i < b->frees; i++)
		if (b->free[i] < most)
			b->free[n++] = b->free[i];
	b->frees = n;
	for (int i = 0; i < POOL_FILES; i++)
		for (uint64_t part = 0; part < parts_of(b, &b->file[i]); part++)
			if (b->file[i].slot[part] > most)
				spill_books_drop(b, i, part);
}

int spill_books_may_trim(const struct spill_books *b, uint32_t *from, uint32_t *end)
{
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (b->writer[i].slot != NO_SLOT && b->writer[i].slot >= b->trim_to)
			return 0; /* who comes by when it is written */
	*from = b->trim_to;
	*end = b->high;
	return b->trim_to != NO_SLOT;
}

int spill_books_trimmed(struct spill_books *b, uint32_t from)
{
	if (b->trim_to < from) /* more is to go */
		return 0;
	b->trim_to = NO_SLOT;
	b->high = from;
	return 1;
}

/* ------------------------------------------------------------------ copies that are made */

uint64_t spill_books_reserve(struct spill_books *b, uint32_t writer, int file, uint64_t first, uint64_t count,
			     struct spill_copy *out)
{
	struct spill_file *f = &b->file[file];
	uint64_t part = first / b->slot_chunks, n = 0;
	uint32_t slot;

	if (!f->valid)
		return 0;
	for (uint32_t i = 0; i < SPILL_WRITERS; i++)
		if (f->slot[part] && b->writer[i].slot == f->slot[part] - 1)
			return 0; /* one at a time in a slot */
	while (n < count && n < b->slot_chunks - first % b->slot_chunks && !spill_has_copy(b, f, first + n))
		n++;
	if (!n)
		return 0;
	slot = f->slot[part] ? f->slot[part] - 1 : take_slot(b);
	if (slot == NO_SLOT)
		return 0;
	f->slot[part] = slot + 1;
	b->writer[writer].slot = slot;
	b->writer[writer].lost = 0;
	*out = (struct spill_copy){ .file = file, .first = first, .count = (uint32_t)n, .slot = slot,
				    .serial = f->serial, .writer = writer };
	return n;
}

int spill_books_know(const struct spill_books *b, const struct spill_copy *c)
{
	return b->file[c->file].valid && b->file[c->file].serial == c->serial;
}

void spill_books_settle(struct spill_books *b, const struct spill_copy *c, const uint32_t *sum)
{
	struct spill_file *f = &b->file[c->file];
	uint64_t part = c->first / b->slot_chunks;
	uint32_t bits = ((1u << c->count) - 1) << c->first % b->slot_chunks;
	int lost = b->writer[c->writer].lost;

	b->writer[c->writer].slot = NO_SLOT;
	if (lost || !spill_books_know(b, c) || f->slot[part] != c->slot + 1) {
		free_slot(b, c->slot);
		return;
	}
	if (sum) {
		memcpy(f->sum + c->first, sum, c->count * sizeof(*sum));
		f->copies += c->count;
		__atomic_store_n(&f->valid[part], (uint16_t)(f->valid[part] | bits), __ATOMIC_RELAXED);
	}
	if (!f->valid[part]) {
		free_slot(b, c->slot);
		f->slot[part] = 0;
	}
}

uint32_t spill_books_borrow(struct spill_books *b, uint32_t *slot, uint32_t most, uint32_t part)
{
	uint32_t room = b->most > b->used ? (b->most - b->used) / part : 0, n = 0;

	while (n < most && n < room && (slot[n] = take_slot(b)) != NO_SLOT)
		n++;
	return n;
}

void spill_books_return(struct spill_books *b, const uint32_t *slot, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		free_slot(b, slot[i]);
}

int spill_books_has_room(const struct spill_books *b, int file, uint64_t chunk)
{
	return b->file[file].slot[chunk / b->slot_chunks] || b->frees || b->high < b->most;
}

/* ------------------------------------------------------------------ copies that are there */

uint64_t spill_books_run(const struct spill_books *b, int file, uint64_t first, uint64_t count, int *there)
{
	const struct spill_file *f = &b->file[file];
	uint64_t n = 1;

	*there = 0;
	if (!f->copies)
		return count;
	*there = spill_has_copy(b, f, first);
	if (*there && count > b->slot_chunks - first % b->slot_chunks)
		count = b->slot_chunks - first % b->slot_chunks;
	while (n < count && spill_has_copy(b, f, first + n) == *there)
		n++;
	return n;
}

int spill_books_find(const struct spill_books *b, int file, uint64_t first, uint64_t count, struct spill_place *out)
{
	const struct spill_file *f = &b->file[file];
	uint64_t part = first / b->slot_chunks;

	if (!f->valid || !count || !f->slot[part] || count > b->slot_chunks - first % b->slot_chunks)
		return 0;
	*out = (struct spill_place){ .file = file, .first = first, .count = (uint32_t)count,
				     .slot = f->slot[part] - 1, .serial = f->serial };
	for (uint64_t i = 0; i < count; i++)
		out->sum[i] = f->sum[first + i];
	return spill_books_has(b, out);
}

int spill_books_has(const struct spill_books *b, const struct spill_place *at)
{
	const struct spill_file *f = &b->file[at->file];

	if (!f->valid || f->serial != at->serial || f->slot[at->first / b->slot_chunks] != at->slot + 1)
		return 0;
	for (uint32_t i = 0; i < at->count; i++)
		if (!spill_has_copy(b, f, at->first + i) || f->sum[at->first + i] != at->sum[i])
			return 0;
	return 1;
}
