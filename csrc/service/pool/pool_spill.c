// SPDX-License-Identifier: Apache-2.0
/*
 * pool_spill.c - chunks that are to leave memory next are copied to the disk tier (spill.h) while they are there.
 *
 * They are pinned only while they are copied into a buffer: nobody who needs room waits for the disk, and what is not
 * written by then is read from storage again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* Nothing leaves a pool that is emptier (NEARLY_FULL of pool/size.py). */
#define NEARLY_FULL_OF_10 9

struct writer {
	struct up_pool *pool;
	struct spill *spill; /* it may outlive the pool */
	uint32_t number;
	size_t room; /* of its buffer */
};

static int may_copy(const struct pool_file *f, uint64_t chunk)
{
	return f->state[chunk] == UP_PRESENT && !f->stale[chunk] && f->pins[chunk] < 255;
}

/* Of a victim: what of it is reserved in *out. */
static uint64_t reserve(struct up_pool *p, const struct writer *w, const struct up_pool_victim *v,
			struct spill_copy *out)
{
	const struct pool_file *f = v->file < POOL_FILES ? &p->file[v->file] : NULL;
	uint64_t end = v->chunk + v->chunks, n;

	if (!f || !f->used)
		return 0;
	end = end < f->chunks ? end : f->chunks;
	for (uint64_t c = v->chunk; c < end; c++) {
		for (n = 0; c + n < end && may_copy(f, c + n);)
			n++;
		n = n ? spill_reserve(w->spill, w->number, (int)v->file, c, n, out) : 0;
		if (n)
			return n;
	}
	return 0;
}

/* The file at a hand, and the next one's beginning where that has gone by its end. */
static const struct pool_file *at_hand(const struct up_pool *p, struct pool_hand *h)
{
	if (!p->file[h->file].used || h->at >= p->file[h->file].chunks)
		*h = (struct pool_hand){ .file = (h->file + 1) % POOL_FILES };
	return &p->file[h->file];
}

/* The copies of one part of a file of which nobody else asks for any: 1, or 0. */
static int free_slot(struct up_pool *p, const struct writer *w)
{
	uint64_t per = spill_slot_chunks(w->spill);

	for (uint32_t steps = 0; steps < HAND_STEPS; steps++) {
		const struct pool_file *f = at_hand(p, &p->unkept);
		const uint16_t *copies = f->used ? spill_copies(w->spill, p->unkept.file) : NULL;
		uint64_t first = p->unkept.at;

		p->unkept.at += per;
		if (!copies || !__atomic_load_n(&copies[first / per], __ATOMIC_RELAXED) ||
		    pool_keeps_any(p, p->unkept.file, first, per))
			continue;
		spill_drop_part(w->spill, p->unkept.file, first);
		return 1;
	}
	return 0;
}

/* What is held for other nodes, in the place of what is not kept for them: what of it is reserved in *out. */
static uint64_t reserve_held(struct up_pool *p, const struct writer *w, struct spill_copy *out)
{
	uint64_t per = spill_slot_chunks(w->spill), n;

	for (uint32_t steps = 0; steps < HAND_STEPS; steps++) {
		const struct pool_file *f = at_hand(p, &p->held);
		uint64_t first = p->held.at++, most = per - first % per;
		int file = p->held.file;

		for (n = 0; n < most && f->used && first + n < f->chunks && f->kept[first + n] == UP_KEPT_HELD &&
			    may_copy(f, first + n);)
			n++;
		if (!n)
			continue;
		if (spill_lacks_slot(w->spill, file, first) && !free_slot(p, w))
			return 0;
		n = spill_reserve(w->spill, w->number, file, first, n, out);
		if (n)
			return n;
	}
	return 0;
}

/* Of the next victims, the first that have no copy. */
static uint64_t reserve_victims(struct up_pool *p, const struct writer *w, struct spill_copy *out)
{
	uint64_t n = 0;

	if (p->used_bytes < p->budget / 10 * NEARLY_FULL_OF_10)
		return 0;
	for (int i = p->victim_at; i < p->victims && !n; i++)
		n = reserve(p, w, &p->victim[i], out);
	return n;
}

/* With the lock: what is to go to the disk next, pinned: 1, or 0. */
static int take(struct up_pool *p, const struct writer *w, struct spill_copy *out)
{
	struct pool_file *f;

	if (p->stop || pool_all_fit(p))
		return 0;
	if (!(pool_holds_much(p) && reserve_held(p, w, out)) && !reserve_victims(p, w, out))
		return 0;
	f = &p->file[out->file];
	f->copying++;
	for (uint64_t c = out->first; c < out->first + out->count; c++)
		f->pins[c]++;
	return 1;
}

/* Without the lock: whole chunks, with zeros beyond the file's end. 0 or -errno. */
static int copy(const struct up_pool *p, const struct spill_copy *c, char *buffer)
{
	const struct pool_file *f = &p->file[c->file];
	uint64_t bytes = pool_chunk_bytes(p), offset = c->first * bytes, whole = c->count * bytes, at = 0;
	uint64_t length = offset + whole > f->size ? f->size - offset : whole;

	while (at < length) {
		ssize_t n = pread(f->memfd, buffer + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n ? -errno : -EIO;
		at += (uint64_t)n;
	}
	memset(buffer + length, 0, whole - length);
	return 0;
}

/* Some that go next, into the buffer: 1, or 0. */
static int copy_next(const struct writer *w, char *buffer, struct spill_copy *out)
{
	struct up_pool *p = w->pool;
	struct pool_file *f;
	int ret;

	pthread_mutex_lock(&p->lock);
	if (!take(p, w, out)) {
		pool_unlock(p);
		return 0;
	}
	pool_unlock(p);
	ret = copy(p, out, buffer);
	pthread_mutex_lock(&p->lock);
	f = &p->file[out->file];
	for (uint64_t c = out->first; c < out->first + out->count; c++)
		f->pins[c]--;
	f->copying--;
	up_cond_broadcast(&p->idle);
	pool_tell_room(p);
	pool_unlock(p);
	if (ret)
		spill_give_up(w->spill, out);
	return !ret;
}

/* They are written, or not; what others ask for here may have come when there was no room for it. */
static void note_copies(const struct writer *w, const struct spill_copy *c)
{
	struct up_pool *p = w->pool;
	uint64_t end = c->first + c->count;

	pthread_mutex_lock(&p->lock);
	for (uint64_t at = c->first; p->file[c->file].used && end <= p->file[c->file].chunks && at < end; at++)
		if (p->net && pool_is_copied(p, c->file, at) && net_is_keeper(p->net, c->file, at))
			pool_keep(p, c->file, at, 1);
		else
			pool_keep_where_it_is(p, c->file, at, 1);
	pool_unlock(p);
}

static void *write_loop(void *arg)
{
	struct writer w = *(struct writer *)arg;
	char *buffer = spill_buffer(w.room);
	struct spill_copy c;

	free(arg);
	while (buffer && spill_wait(w.spill)) {
		int some = copy_next(&w, buffer, &c);

		if (some)
			spill_poke(w.spill); /* for the other one; and there may be more */
		spill_leave(w.spill);
		if (!some)
			continue;
		spill_write(w.spill, &c, buffer);
		if (spill_enter(w.spill)) { /* else the pool may have gone */
			note_copies(&w, &c);
			spill_leave(w.spill);
		}
	}
	if (buffer)
		munmap(buffer, w.room);
	spill_thread_ends(w.spill);
	return NULL;
}

int up_pool_spill(struct up_pool *p, const struct up_spill_options *o)
{
	uint32_t readers = p->threads / 2 > 2 ? p->threads / 2 : 2;
	struct spill *s = NULL;
	int ret = spill_create(&s, o, p->options.chunk_bytes, readers);

	for (uint32_t i = 0; i < SPILL_WRITERS && !ret; i++) {
		struct writer *w = malloc(sizeof(*w));

		ret = w ? 0 : -ENOMEM;
		if (!ret) {
			*w = (struct writer){ .pool = p, .spill = s, .number = i, .room = spill_slot_bytes(s) };
			ret = spill_start(s, write_loop, w);
		}
		if (ret)
			free(w);
		if (ret && i)
			ret = 0; /* one will do */
	}
	if (ret && s) { /* its file stays the caller's: nothing has been written */
		spill_disown(s); /* before its last thread closes it */
		spill_stop(s);
		spill_end(s);
	}
	if (ret)
		return ret;
	pthread_mutex_lock(&p->lock);
	p->spill = s;
	pool_unlock(p);
	return 0;
}

void up_pool_spill_fit(struct up_pool *p, uint64_t bytes)
{
	if (!p->spill)
		return;
	spill_fit(p->spill, bytes);
	pthread_mutex_lock(&p->lock);
	pool_keep_what_is_left(p);
	pool_keep_most(p);
	pool_unlock(p);
}

void up_pool_spill_not(struct up_pool *p, int file)
{
	pthread_mutex_lock(&p->lock); /* who looks for copies has it */
	if (p->spill)
		spill_forget_file(p->spill, file);
	pool_unlock(p);
}

uint64_t up_pool_spill_free(struct up_pool *p, int file, uint64_t bytes)
{
	const uint16_t *copies = p->spill ? spill_copies(p->spill, file) : NULL;
	uint64_t per = copies ? spill_slot_chunks(p->spill) : 1, freed = 0;

	pthread_mutex_lock(&p->lock);
	for (uint64_t part = (p->file[file].chunks + per - 1) / per; copies && part-- && freed < bytes;) {
		if (!__atomic_load_n(&copies[part], __ATOMIC_RELAXED) || pool_keeps_any(p, file, part * per, per))
			continue;
		spill_drop_part(p->spill, file, part * per);
		freed += spill_slot_bytes(p->spill);
	}
	pool_unlock(p);
	return freed;
}

void up_pool_spill_counts(struct up_pool *p, struct up_spill_counts *out)
{
	memset(out, 0, sizeof(*out));
	if (p->spill)
		spill_count(p->spill, out);
}
