// SPDX-License-Identifier: Apache-2.0
/*
 * pool_waiters.c - threads that are blocked on a page: what they wait for is wanted, and when it has
 * come they are served.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>

#include "service/pool/pool.h"

void pool_want(struct up_pool *p, int file, uint64_t chunk, uint32_t run)
{
	struct pool_file *f = &p->file[file];

	if (f->state[chunk] == UP_FILLING && p->net)
		net_hurry(p->net, file, chunk);
	if (f->state[chunk] != UP_ABSENT)
		return; /* it is on its way */
	if (run <= 1) /* who goes on in order waits less for long reads than for many */
		p->run_chunks = 1;
	if (p->demand_head - p->demand_tail == p->demand_room) {
		uint32_t room = p->demand_room ? p->demand_room * 2 : 256, n = 0;
		struct pool_demand *more = malloc(room * sizeof(*more));

		if (!more) {
			p->retry = 1;
			return;
		}
		for (uint32_t i = p->demand_tail; i != p->demand_head; i++)
			more[n++] = p->demand[i % p->demand_room];
		free(p->demand);
		p->demand = more;
		p->demand_room = room;
		p->demand_tail = 0;
		p->demand_head = n;
	}
	f->state[chunk] = UP_WANTED;
	p->demand[p->demand_head++ % p->demand_room] =
		(struct pool_demand){ .file = file, .chunk = chunk, .run = run };
	p->signals++;
}

void pool_want_again(struct up_pool *p)
{
	p->retry = 0;
	for (struct pool_waiter *w = p->waiting; w; w = w->next)
		pool_want(p, w->file, w->chunk, 1);
}

/* A thread waits in one place at a time: what it waited for before, it does no more. (Woken all the
 * same: one that reads this process's memory from another PID namespace may have the same number.) */
int pool_add_waiter(struct up_pool *p, uint32_t client, int file, uint64_t chunk,
		      const struct uffd_msg *m, uint64_t address)
{
	uint32_t tid = m->arg.pagefault.feat.ptid;
	struct pool_waiter *w;

	for (struct pool_waiter **at = &p->waiting; *at; at = &(*at)->next)
		if ((*at)->client == client && (*at)->tid == tid && tid) {
			pool_wake(p->client[client].uffd, (*at)->address, p->page_bytes);
			pool_drop_waiter(p, at);
			break;
		}
	w = p->spare;
	if (w)
		p->spare = w->next;
	else
		w = malloc(sizeof(*w));
	if (!w)
		return -ENOMEM;
	*w = (struct pool_waiter){
		.client = client,
		.generation = p->client[client].generation,
		.tid = tid,
		.file = file,
		.chunk = chunk,
		.address = address,
		.time_ns = pool_now_ns(),
		.next = p->waiting,
	};
	p->waiting = w;
	p->file[file].waiters++;
	if (++p->count.waiters > p->count.waiters_peak)
		p->count.waiters_peak = p->count.waiters;
	return 0;
}

/* The stream that stands at a chunk; NULL: its reader has gone on. */
static struct pool_stream *stream_at(struct pool_region *r, uint64_t chunk)
{
	for (struct pool_stream *w = r->stream; w < r->stream + POOL_STREAMS; w++)
		if (w->passed && w->at == chunk)
			return w;
	return NULL;
}

void pool_serve(struct up_pool *p, int file, uint64_t first, uint64_t count)
{
	uint64_t bytes = pool_chunk_bytes(p), now = pool_now_ns();
	struct pool_waiter **at = &p->waiting;

	while (*at) {
		struct pool_waiter w = **at;
		struct pool_client *c = &p->client[w.client];
		struct pool_region *found, r;
		struct pool_stream *stream;
		struct pool_mapped done = { 0 };
		uint64_t end;
		uint32_t turn;

		if (w.file != file || w.chunk < first || w.chunk >= first + count) {
			at = &(*at)->next;
			continue;
		}
		pool_drop_waiter(p, at);
		if (c->uffd < 0 || c->leaving || c->generation != w.generation)
			continue;
		pool_bin(p->count.wait_bin, &p->count.wait_sum_ns, &p->count.wait_max_ns,
			 now - w.time_ns);
		for (uint64_t i = first; i < first + count; i++)
			p->file[file].touched_ms[i] = pool_now_ms(p);
		found = pool_region_at(c, w.address);
		if (!found || found->file != file) {
			/* it was unmapped: who did that has woken the thread, or does */
			pool_wake(c->uffd, w.address, p->page_bytes);
			continue;
		}
		/* no more of what was expected than of what was there already (pool_faults.c, run_around) */
		stream = stream_at(found, w.chunk);
		end = w.chunk + pool_run_of(p, &p->file[file], stream, w.chunk);
		end = end < first + count ? end : first + count;
		if (stream && stream->high < end)
			stream->high = end;
		p->file[file].mapped += end - w.chunk;
		r = *found;
		pool_use(c);
		turn = pool_begin_mapping(c);
		pool_unlock(p);
		pool_map_pages(p, c, &r, w.chunk * bytes, (end - w.chunk) * bytes, w.address, &done);
		pthread_mutex_lock(&p->lock);
		pool_count_mapped(p, &done);
		pool_end_mapping(p, c, turn);
		pool_leave_off(p, c);
		/* The others of this process there were woken by the same call. The list may be
		 * another by now: from its start. */
		for (at = &p->waiting; *at;) {
			struct pool_waiter *o = *at;

			if (o->client == w.client && o->generation == w.generation &&
			    o->file == file && o->chunk >= w.chunk && o->chunk < end &&
			    o->address - r.address < r.length) {
				pool_bin(p->count.wait_bin, &p->count.wait_sum_ns,
					 &p->count.wait_max_ns, now - o->time_ns);
				pool_wake(c->uffd, o->address, p->page_bytes);
				pool_drop_waiter(p, at);
			} else {
				at = &o->next;
			}
		}
		at = &p->waiting;
	}
}
