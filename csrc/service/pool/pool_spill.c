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

/* With the lock: the next victims' first chunks that have no copy, pinned: 1, or 0. */
static int take(struct up_pool *p, const struct writer *w, struct spill_copy *out)
{
	if (p->stop || p->used_bytes < p->budget / 10 * NEARLY_FULL_OF_10 || pool_all_fit(p))
		return 0;
	for (int i = p->victim_at; i < p->victims; i++) {
		struct up_pool_victim *v = &p->victim[i];
		struct pool_file *f;

		if (!reserve(p, w, v, out))
			continue;
		f = &p->file[out->file];
		f->copying++;
		for (uint64_t c = out->first; c < out->first + out->count; c++)
			f->pins[c]++;
		return 1;
	}
	return 0;
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

static void *write_loop(void *arg)
{
	struct writer w = *(struct writer *)arg;
	char *buffer = spill_buffer(w.room);
	struct spill_copy c;

	free(arg);
	while (buffer && spill_enter(w.spill)) {
		int some = copy_next(&w, buffer, &c);

		if (some)
			spill_poke(w.spill); /* for the other one; and there may be more */
		spill_leave(w.spill);
		if (some)
			spill_write(w.spill, &c, buffer);
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
	if (p->spill)
		spill_fit(p->spill, bytes);
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
	return p->spill ? spill_free(p->spill, file, bytes) : 0;
}

void up_pool_spill_counts(struct up_pool *p, struct up_spill_counts *out)
{
	memset(out, 0, sizeof(*out));
	if (p->spill)
		spill_count(p->spill, out);
}
