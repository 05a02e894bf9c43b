// SPDX-License-Identifier: Apache-2.0
/*
 * pool_rescue.c - who waits for a page that cannot be read before he goes on.
 *
 * A thread that writes a file from the pool's mapping of the same file, or of another one that is written so at the
 * same time, faults with an inode's lock held, which our read of that page wants. Where a lease tells of the
 * writer, or libc's open(2) does (csrc/job/writer.c), nothing is served by then; a raw open(2) nobody tells of.
 * So a page that has been waited for long, by a thread in a system call, comes by a mapping of the file as well:
 * a page fault takes no inode's lock, since write(2) may fault in any file with one held.
 *
 * The chunk stays FILLING, or WANTED, and whoever reads it then writes the same bytes. What lies in the memfd
 * where no chunk of the books is, goes as what agents have read does (pool_drop_strays).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* Storage that answers has done so by then, most of the time: a second read of the page is what an error costs. */
#define STALL_NS 200000000ull
/* A writer goes through its pages: after one was waited for, the next are not waited for as long. */
#define AGAIN_NS 1000000000ull
#define SOON_NS 5000000ull
/* What comes at once: as much as an agent reads (csrc/job/standin.c). */
#define PIECE_BYTES ((uint64_t)64 << 10)

/* Whether the thread waits within a system call, where it may hold a lock. The kernel tells those who may trace it. */
static int is_in_a_call(uint32_t tid)
{
	char path[32], text[8] = { 0 };
	int fd, n;

	snprintf(path, sizeof(path), "/proc/%u/syscall", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 1;
	n = (int)read(fd, text, sizeof(text) - 1);
	close(fd);
	return n <= 0 || (text[0] >= '0' && text[0] <= '9');
}

static int is_stalled(const struct up_pool *p, const struct pool_waiter *w, uint64_t now)
{
	const struct pool_file *f = &p->file[w->file];
	uint64_t since = w->looked_ns ? w->looked_ns : w->time_ns;
	uint64_t patience = now - p->rescued_ns < AGAIN_NS ? SOON_NS : STALL_NS;

	return now - since >= patience && (f->state[w->chunk] == UP_FILLING || f->state[w->chunk] == UP_WANTED);
}

void pool_look_for_stalls(struct up_pool *p)
{
	uint64_t now = pool_now_ns();

	for (struct pool_waiter *w = p->waiting; w; w = w->next)
		if (is_stalled(p, w, now)) {
			up_cond_signal(&p->stall);
			return;
		}
}

/* The first that has waited too long; copied. With the lock. */
static struct pool_waiter *first_stalled(struct up_pool *p)
{
	uint64_t now = pool_now_ns();

	for (struct pool_waiter *w = p->waiting; w; w = w->next)
		if (is_stalled(p, w, now))
			return w;
	return NULL;
}

/* Whether it was served. With the lock, which it leaves and takes again. */
static int rescue(struct up_pool *p, const struct pool_waiter *w)
{
	struct pool_client *c = &p->client[w->client];
	struct pool_file *f = &p->file[w->file];
	int fd = __atomic_load_n(&f->source.fd, __ATOMIC_ACQUIRE), ret;
	struct pool_region *found = NULL, r;
	struct pool_mapped done = { 0 };
	uint64_t offset, length;
	uint32_t turn;

	if (c->uffd >= 0 && !c->leaving && c->generation == w->generation)
		found = pool_region_at(c, w->address);
	if (fd < 0 || !found || found->file != w->file)
		return 0;
	r = *found;
	offset = (r.offset + (w->address - r.address)) & ~(PIECE_BYTES - 1);
	length = f->size - offset < PIECE_BYTES ? f->size - offset : PIECE_BYTES;
	p->rescuing = 1; /* pool_is_stood_in_for() */
	f->busy++;
	pool_use(c);
	turn = pool_begin_mapping(c);
	pool_unlock(p);
	ret = is_in_a_call(w->tid) ? up_source_bring_by_mapping(f->memfd, fd, offset, length) : -EAGAIN;
	if (!ret)
		pool_map_pages(p, c, &r, offset, PIECE_BYTES, w->address, &done);
	pthread_mutex_lock(&p->lock);
	pool_count_mapped(p, &done);
	pool_end_mapping(p, c, turn);
	pool_leave_off(p, c);
	f->busy--;
	p->rescuing = 0;
	if (!ret) {
		p->rescued_ns = pool_now_ns();
		p->count.rescues++;
		pool_seek_strays(p); /* where nobody reads the chunk any more */
	}
	up_cond_broadcast(&p->idle);
	return !ret;
}

void *pool_rescue_loop(void *arg)
{
	struct up_pool *p = arg;

	pthread_mutex_lock(&p->lock);
	while (!p->stop) {
		struct pool_waiter *w = first_stalled(p), copy;

		if (!w) {
			pool_wait(p, &p->stall);
			continue;
		}
		w->looked_ns = pool_now_ns();
		copy = *w;
		if (!rescue(p, &copy))
			continue;
		for (struct pool_waiter **at = &p->waiting; *at; at = &(*at)->next)
			if ((*at)->client == copy.client && (*at)->generation == copy.generation &&
			    (*at)->tid == copy.tid && (*at)->address == copy.address) {
				pool_drop_waiter(p, at);
				break;
			}
	}
	pool_unlock(p);
	return NULL;
}
