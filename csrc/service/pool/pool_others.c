// SPDX-License-Identifier: Apache-2.0
/*
 * pool_others.c - what the pool does for other nodes: it says whether chunks are there, has them there and pinned,
 * and copies them (struct pool_calls).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>

#include "service/pool/pool.h"

enum pool_has pool_has(struct up_pool *p, int file, uint64_t first, uint64_t count, uint32_t had_ms)
{
	const struct pool_file *f = &p->file[file];
	enum pool_has has = POOL_HAS;
	uint32_t now;

	pthread_mutex_lock(&p->lock);
	now = pool_now_ms(p);
	if (!f->used || first >= f->chunks || count > f->chunks - first)
		has = POOL_HAS_NOT;
	for (uint64_t c = first; has != POOL_HAS_NOT && has != POOL_HAD && c < first + count; c++) {
		if (f->state[c] == UP_PRESENT && !f->stale[c])
			continue;
		if (f->state[c] == UP_FILLING && !f->stale[c])
			has = POOL_HAS_SOON;
		else if (pool_is_copied(p, file, c))
			has = has == POOL_HAS ? POOL_HAS_ON_DISK : has;
		else
			has = f->touched_ms[c] && now - f->touched_ms[c] <= had_ms ? POOL_HAD :
										     POOL_HAS_NOT;
	}
	pool_unlock(p);
	return has;
}

int pool_pin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer,
			uint64_t until_ns)
{
	struct pool_file *f = &p->file[file];
	uint64_t c = first;
	int ret = 1;

	pthread_mutex_lock(&p->lock);
	if (!f->used || first + count > f->chunks || first + count < first ||
	    __atomic_load_n(&f->source.given, __ATOMIC_RELAXED) < 0) {
		pool_unlock(p);
		return -ENOENT;
	}
	f->busy++;
	while (c < first + count && ret > 0 && !p->stop) {
		if (f->state[c] == UP_PRESENT && !f->stale[c] && f->pins[c] < 255) {
			f->pins[c++]++;
			continue;
		}
		if (pool_now_ns() >= until_ns)
			ret = -EBUSY;
		else if (f->state[c] == UP_PRESENT)
			pool_wait_a_moment(p);
		else
			ret = pool_bring_for_others(p, file, c, first + count - c, buffer);
	}
	if (c < first + count) {
		ret = ret > 0 ? -EBUSY : ret;
		while (c > first)
			f->pins[--c]--;
		f->busy--;
	} else {
		ret = 0; /* busy until they are unpinned */
	}
	up_cond_broadcast(&p->idle);
	pool_unlock(p);
	return ret;
}

uint64_t pool_disk_ns(struct up_pool *p)
{
	return p->spill ? spill_longest_ns(p->spill) : UINT64_MAX;
}

int64_t pool_copy_pinned(struct up_pool *p, int file, uint64_t first, uint64_t count, char *out)
{
	struct pool_file *f = &p->file[file];
	uint64_t bytes = pool_chunk_bytes(p), offset = first * bytes, length = count * bytes, at = 0;

	if (offset + length > f->size)
		length = f->size - offset;
	while (at < length) {
		ssize_t n = pread(f->memfd, out + at, length - at, (off_t)(offset + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n ? -errno : -EIO;
		at += (uint64_t)n;
	}
	return (int64_t)length;
}

void pool_unpin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, uint64_t given_bytes)
{
	pthread_mutex_lock(&p->lock);
	p->file[file].count.given_bytes += given_bytes;
	for (uint64_t c = first; c < first + count; c++)
		p->file[file].pins[c]--;
	p->file[file].busy--;
	up_cond_broadcast(&p->idle);
	pool_tell_room(p);
	pool_unlock(p);
}
