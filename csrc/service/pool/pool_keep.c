// SPDX-License-Identifier: Apache-2.0
/*
 * pool_keep.c - what is kept for other nodes, in memory or on the disk tier: it is so in pool_file.kept, and homes know it
 * block by block.
 *
 * All but up_pool_kept() with the pool's lock.
 */
#define _GNU_SOURCE
#include "service/pool/pool.h"

int pool_is_copied(const struct up_pool *p, int file, uint64_t chunk)
{
	const uint16_t *copies = p->spill ? spill_copies(p->spill, file) : NULL;
	uint32_t per;

	if (!copies)
		return 0;
	per = spill_slot_chunks(p->spill);
	return __atomic_load_n(&copies[chunk / per], __ATOMIC_RELAXED) >> chunk % per & 1;
}

int pool_keeps_any(const struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	const struct pool_file *f = &p->file[file];

	for (uint64_t c = first; c < first + count && c < f->chunks; c++)
		if (f->kept[c])
			return 1;
	return 0;
}

/* hints.c reads the sums without the lock. */
static void count_kept(struct up_pool *p, uint8_t was, uint8_t kept)
{
	uint64_t bytes = pool_chunk_bytes(p), more = (uint64_t)!!kept - (uint64_t)!!was;
	uint64_t held = (uint64_t)(kept == UP_KEPT_HELD) - (uint64_t)(was == UP_KEPT_HELD);

	__atomic_store_n(&p->kept_bytes, p->kept_bytes + more * bytes, __ATOMIC_RELAXED);
	__atomic_store_n(&p->held_bytes, p->held_bytes + held * bytes, __ATOMIC_RELAXED);
}

static void set(struct up_pool *p, int file, uint64_t chunk, uint8_t kept)
{
	struct pool_file *f = &p->file[file];
	uint8_t was = f->kept[chunk];
	uint64_t each;

	count_kept(p, was, kept);
	f->kept[chunk] = kept;
	if (kept || !was || !p->net)
		return;
	each = net_block_chunks(p->net);
	if (!pool_keeps_any(p, file, chunk - chunk % each, each))
		net_dropped(p->net, file, chunk);
}

/* Whether memory may hold one more that is nowhere else. */
static int has_room(const struct up_pool *p)
{
	return p->held_bytes + pool_chunk_bytes(p) <= p->hold_most_bytes;
}

void pool_keep(struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	const struct pool_file *f = &p->file[file];

	for (uint64_t c = first; c < first + count; c++) {
		int copied = pool_is_copied(p, file, c);

		if (!f->kept[c] && p->kept_bytes + pool_chunk_bytes(p) <= p->keep_most_bytes && (copied || has_room(p)))
			set(p, file, c, copied ? UP_KEPT_COPIED : UP_KEPT_HELD);
	}
	pool_keep_where_it_is(p, file, first, count);
	if (p->spill && pool_holds_much(p))
		spill_poke(p->spill);
}

void pool_keep_where_it_is(struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	const struct pool_file *f = &p->file[file];

	for (uint64_t c = first; c < first + count; c++) {
		int there = f->state[c] != UP_ABSENT && f->state[c] != UP_WANTED;

		if (!f->kept[c])
			continue;
		if (pool_is_copied(p, file, c))
			set(p, file, c, UP_KEPT_COPIED);
		else if (!there || (f->kept[c] != UP_KEPT_HELD && !has_room(p)))
			set(p, file, c, 0);
		else
			set(p, file, c, UP_KEPT_HELD);
	}
}

void pool_keep_what_is_left(struct up_pool *p)
{
	for (int i = 0; p->spill && i < POOL_FILES; i++)
		if (spill_has_lost(p->spill, i) && p->file[i].used)
			pool_keep_where_it_is(p, i, 0, p->file[i].chunks);
}

/* Its copies stay as long as nothing else needs their place. */
static void keep_no_longer(struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	struct pool_file *f = &p->file[file];

	for (uint64_t c = first; c < first + count && c < f->chunks; c++) {
		count_kept(p, f->kept[c], 0);
		f->kept[c] = 0;
	}
	net_dropped(p->net, file, first);
}

void pool_keep_whole_or_not(struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	const struct pool_file *f = &p->file[file];
	uint64_t each = p->net ? net_block_chunks(p->net) : 1, next;

	for (uint64_t c = first; p->net && c < first + count; c = next) {
		next = c + 1;
		if (f->kept[c] || p->kept_bytes + pool_chunk_bytes(p) <= p->keep_most_bytes)
			continue;
		next += each - 1 - c % each;
		if (net_is_keeper(p->net, file, c))
			keep_no_longer(p, file, c - c % each, each);
	}
}

/* The rest is for what comes, until it is written. */
static uint64_t stays_bytes(const struct up_pool *p)
{
	return p->hold_most_bytes / 2;
}

int pool_holds_much(const struct up_pool *p)
{
	return p->held_bytes > stays_bytes(p);
}

void pool_keep_none(struct up_pool *p, const struct pool_file *gone)
{
	for (uint64_t c = 0; c < gone->chunks; c++)
		count_kept(p, gone->kept[c], 0);
}

void pool_keep_most(struct up_pool *p)
{
	uint64_t hold = p->hold_most_bytes, both = hold && p->spill ? stays_bytes(p) + spill_room(p->spill) : 0;
	uint64_t most = hold > both ? hold : both;

	__atomic_store_n(&p->keep_most_bytes, most, __ATOMIC_RELAXED);
	for (int i = 0; i < POOL_FILES; i++) {
		const struct pool_file *f = &p->file[i];

		for (uint64_t c = 0; f->used && c < f->chunks && (p->kept_bytes > most || p->held_bytes > hold); c++)
			if (f->kept[c] == UP_KEPT_HELD || (f->kept[c] && p->kept_bytes > most))
				set(p, i, c, 0);
	}
}

uint64_t up_pool_kept(struct up_pool *p)
{
	return __atomic_load_n(&p->held_bytes, __ATOMIC_RELAXED);
}
