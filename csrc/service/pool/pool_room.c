// SPDX-License-Identifier: Apache-2.0
/*
 * pool_room.c - room in the pool: which chunks are punched out of it, and when not.
 *
 * The policy is not here: uffdprefetch/pool/eviction.py gives a list of blocks in advance, best
 * first. When that has run out, another is asked for; when that does not come and somebody waits, a
 * clock hand goes over all files. Never a chunk that is being mapped, nor one that somebody got just
 * now.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* Of a list's victims so many are looked at for one with a copy: they are written in its order, and with known orders it is
 * thousands long. */
#define COPIES_LOOKED_AT 256
/* A reader that waits does so much longer for a better choice than the hand's. */
#define PATIENCE_NS 20000000ull

static int may_go(struct up_pool *p, const struct pool_file *f, uint64_t chunk)
{
	return f->state[chunk] == UP_PRESENT && !f->pins[chunk] &&
	       (f->kept[chunk] != UP_KEPT_HELD || f->stale[chunk] || p->take_any) &&
	       (!f->touched_ms[chunk] || pool_now_ms(p) - f->touched_ms[chunk] >= HOLD_MS);
}

/* The same for the clock hand, which spares what is active while there is anything else. */
static int hand_may_take(struct up_pool *p, const struct pool_file *f, uint64_t chunk)
{
	int active = __atomic_load_n(&f->refaults[chunk], __ATOMIC_RELAXED) >= UP_ACTIVE;

	if (!may_go(p, f, chunk))
		return 0;
	p->hand_spared |= active;
	return !active || p->take_any;
}

/* It has been punched now. */
static void note_left(struct up_pool *p, struct pool_file *f, uint64_t chunk)
{
	uint32_t evictions = p->evictions + 1;

	__atomic_store_n(&p->evictions, evictions ? evictions : 1, __ATOMIC_RELAXED);
	__atomic_store_n(&f->left[chunk], p->evictions, __ATOMIC_RELAXED);
}

/* Punch a run of chunks that are `was` (PRESENT or ABSENT); whoever touches one meanwhile waits, and it
 * is read again. */
static void punch(struct up_pool *p, int number, uint64_t first, uint64_t count, uint8_t was)
{
	struct pool_file *f = &p->file[number];
	uint64_t bytes = pool_chunk_bytes(p), at = first * bytes;
	struct up_pool_event e = { .kind = UP_POOL_EVICTED, .file = (uint32_t)number,
				   .offset = at, .length = count * bytes };
	int ret, known = was == UP_PRESENT, changed = f->stale[first];

	for (uint64_t c = first; c < first + count; c++)
		f->state[c] = UP_EVICTING;
	f->busy++;
	p->leaving_bytes += known ? count * bytes : 0;
	pool_unlock(p);
	do
		ret = fallocate(f->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
				(off_t)(count * bytes));
	while (ret && errno == EINTR);
	pthread_mutex_lock(&p->lock);
	p->leaving_bytes -= known ? count * bytes : 0;
	/* A punch that failed has freed nothing, or not all: they stay in the books as they are. */
	for (uint64_t c = first; c < first + count; c++) {
		f->state[c] = ret ? was : UP_ABSENT;
		f->stale[c] &= !!ret;
	}
	pool_keep_where_it_is(p, number, first, count);
	if (!ret)
		pool_keep_whole_or_not(p, number, first, count);
	for (uint64_t c = first; !ret && known && c < first + count; c++)
		note_left(p, f, c);
	for (uint64_t c = first; !ret && c < first + count; c++)
		f->rest[c] = 0;
	if (!ret && known) {
		p->used_bytes -= count * bytes;
		f->count.resident_bytes -= count * bytes;
		p->count.resident_bytes -= count * bytes;
		f->count.evicted_bytes += count * bytes;
		if (p->spill && !changed)
			spill_chunks_left(p->spill, number, first, count);
		p->count.evicted_bytes += count * bytes;
		e.time_ns = pool_now_ns();
		pool_post(p, &e);
	}
	for (struct pool_waiter *w = p->waiting; w; w = w->next)
		if (w->file == number && w->chunk >= first && w->chunk < first + count &&
		    f->state[w->chunk] == UP_ABSENT)
			pool_want(p, number, w->chunk, 1);
	if (ret && known && f->waiters) {
		/* some came while it was on its way out: it is there after all */
		for (uint64_t c = first; c < first + count; c++)
			f->pins[c]++;
		pool_serve(p, number, first, count);
		for (uint64_t c = first; c < first + count; c++)
			f->pins[c]--;
	}
	f->busy--;
	up_cond_broadcast(&p->idle);
	pool_tell_room(p);
}

static void evict(struct up_pool *p, int number, uint64_t first, uint64_t count)
{
	punch(p, number, first, count, UP_PRESENT);
}

/* The next chunk from `first` on that is ABSENT in the books and holds something; f->chunks: none. With
 * the lock, which it leaves and takes again. */
static uint64_t next_stray(struct up_pool *p, struct pool_file *f, uint64_t first)
{
	uint64_t bytes = pool_chunk_bytes(p);

	for (;;) {
		off_t at;

		while (first < f->chunks && f->state[first] != UP_ABSENT)
			first++;
		if (first >= f->chunks)
			return f->chunks;
		pool_unlock(p);
		at = lseek(f->memfd, (off_t)(first * bytes), SEEK_DATA);
		pthread_mutex_lock(&p->lock);
		if (at < 0) /* ENXIO: holes to the end */
			return f->chunks;
		if ((uint64_t)at / bytes == first && f->state[first] == UP_ABSENT)
			return first;
		if ((uint64_t)at / bytes > first)
			first = (uint64_t)at / bytes;
	}
}

void pool_drop_strays(struct up_pool *p)
{
	uint64_t most = RUN_MAX_BYTES > pool_chunk_bytes(p) ? RUN_MAX_BYTES / pool_chunk_bytes(p) : 1;

	p->strays = 0;
	for (int i = 0; i < POOL_FILES && !p->stop; i++) {
		struct pool_file *f = &p->file[i];

		if (!f->used)
			continue;
		f->busy++;
		for (uint64_t c = next_stray(p, f, 0), n; c < f->chunks && !p->stop;
		     c = next_stray(p, f, c + n)) {
			for (n = 1; n < most && c + n < f->chunks && f->state[c + n] == UP_ABSENT;)
				n++;
			punch(p, i, c, n, UP_ABSENT);
		}
		f->busy--;
		up_cond_broadcast(&p->idle);
	}
}

typedef int may_take(struct up_pool *p, const struct pool_file *f, uint64_t chunk);

/* The first run of chunks in [first, first + count) that may be taken; 0: none. */
static uint64_t find_run(struct up_pool *p, const struct pool_file *f, uint64_t *first,
			 uint64_t count, may_take *may)
{
	uint64_t end = *first + count, n = 0;

	if (end > f->chunks)
		end = f->chunks;
	while (*first < end && !may(p, f, *first))
		++*first;
	while (*first + n < end && may(p, f, *first + n))
		n++;
	return n;
}

/* Whether all that is there of a victim has a copy in the disk tier. */
static int is_copied(const struct up_pool *p, const struct up_pool_victim *v)
{
	const struct pool_file *f = v->file < POOL_FILES ? &p->file[v->file] : NULL;
	const uint16_t *copies = f && f->used ? spill_copies(p->spill, (int)v->file) : NULL;
	uint64_t end = v->chunk + v->chunks, c = v->chunk;
	uint32_t per = spill_slot_chunks(p->spill);

	if (!copies || !v->chunks)
		return 0;
	while (c < end && c < f->chunks &&
	       (f->state[c] != UP_PRESENT || __atomic_load_n(&copies[c / per], __ATOMIC_RELAXED) >> c % per & 1))
		c++;
	return c == end || c == f->chunks;
}

/* What may go of a victim first, if any: 1, or 0. */
static int evict_first(struct up_pool *p, struct up_pool_victim *v)
{
	struct pool_file *f = v->file < POOL_FILES ? &p->file[v->file] : NULL;
	uint64_t first = v->chunk, n = f && f->used ? find_run(p, f, &first, v->chunks, may_go) : 0;

	if (!n) {
		v->chunks = 0;
		return 0;
	}
	/* the rest of the block stays on the list: not all of it may be there */
	v->chunks -= (uint32_t)(first + n - v->chunk);
	v->chunk = first + n;
	evict(p, (int)(f - p->file), first, n);
	return 1;
}

/* The list's first; of those that go by it, the ones first that need not be read from storage again: the others are being
 * written meanwhile. */
static int evict_listed(struct up_pool *p)
{
	int end = p->victims - p->victim_at < COPIES_LOOKED_AT ? p->victims : p->victim_at + COPIES_LOOKED_AT;

	for (int i = p->victim_at; p->spill && i < end; i++)
		if (is_copied(p, &p->victim[i]) && evict_first(p, &p->victim[i]))
			return 1;
	for (; p->victim_at < p->victims; p->victim_at++)
		if (evict_first(p, &p->victim[p->victim_at]))
			return 1;
	return 0;
}

/* The first run of chunks from `first` on that must go and may; 0: none. */
static uint64_t stale_run(struct up_pool *p, struct pool_file *f, uint64_t *first)
{
	uint64_t most = RUN_MAX_BYTES > pool_chunk_bytes(p) ? RUN_MAX_BYTES / pool_chunk_bytes(p) : 1;
	uint64_t n = 0;

	while (*first < f->chunks && !(f->stale[*first] && may_go(p, f, *first)))
		++*first;
	while (n < most && *first + n < f->chunks && f->stale[*first + n] && may_go(p, f, *first + n))
		n++;
	return n;
}

int pool_drop_some(struct up_pool *p)
{
	int left = 0;

	for (int i = 0; i < POOL_FILES; i++) {
		struct pool_file *f = &p->file[i];
		uint64_t first = f->stale_at, n;

		if (!f->used || !f->dropping)
			continue;
		n = stale_run(p, f, &first);
		f->stale_at = first + n;
		if (n) {
			evict(p, i, first, n);
			return 1;
		}
		/* once through: is there any left, and what has failed to come is none */
		f->stale_at = 0;
		f->dropping = 0;
		for (uint64_t c = 0; c < f->chunks; c++) {
			if (f->state[c] == UP_ABSENT || f->state[c] == UP_WANTED)
				f->stale[c] = 0;
			f->dropping |= f->stale[c];
		}
		left |= f->dropping;
	}
	p->dropping = left;
	return left ? -1 : 0;
}

static int evict_by_hand(struct up_pool *p)
{
	uint64_t steps = 0, unit = (1u << 20) / pool_chunk_bytes(p);

	p->hand_spared = 0;
	if (!unit)
		unit = 1;
	for (int files = 0; files <= POOL_FILES && steps < HAND_STEPS; files++) {
		struct pool_file *f = &p->file[p->hand_file];

		while (f->used && p->hand_chunk < f->chunks && steps < HAND_STEPS) {
			uint64_t first = p->hand_chunk, left = f->chunks - first;
			uint64_t look = left < unit ? left : unit;
			uint64_t n = find_run(p, f, &first, look, hand_may_take);

			p->hand_chunk += look;
			steps += look;
			if (n) {
				evict(p, (int)p->hand_file, first, n);
				return 1;
			}
		}
		if (steps < HAND_STEPS) {
			p->hand_file = (p->hand_file + 1) % POOL_FILES;
			p->hand_chunk = 0;
		}
	}
	return 0;
}

/* The list has run out: have the main thread make another. Whether it is about to. */
static int ask(struct up_pool *p)
{
	if (p->asked)
		return 1;
	if (!p->victims && pool_now_ns() - p->answered_ns < PATIENCE_NS)
		return 0; /* it has just said that nothing may go */
	p->asked = 1;
	p->asked_ns = pool_now_ns();
	pool_call_main(p);
	return 1;
}

int pool_give(struct up_pool *p)
{
	int some = evict_listed(p) || evict_by_hand(p);

	if (!some && (p->held_bytes || p->hand_spared)) { /* all else is being read, or was just got */
		p->take_any = 1;
		some = evict_by_hand(p);
		p->take_any = 0;
	}
	return some;
}

int pool_make_room(struct up_pool *p, uint64_t bytes, int demand)
{
	if (p->used_bytes + bytes <= p->budget)
		return 0;
	if (p->used_bytes - p->leaving_bytes + bytes <= p->budget) {
		pool_wait(p, &p->room); /* another thread makes it just now */
		return 1;
	}
	if (evict_listed(p))
		return 1;
	if (ask(p) && (!demand || pool_now_ns() - p->asked_ns < PATIENCE_NS))
		return demand ? -1 : -2;
	return demand && pool_give(p) ? 1 : -1;
}
