// SPDX-License-Identifier: Apache-2.0
/*
 * pool_fill.c - the threads that read chunks into the pool: first what somebody waits for, then
 * what is expected.
 *
 * How much at once: a run of chunks that doubles, up to 4 MiB, while nobody waits, and falls back to
 * one chunk when somebody does (as CRIU's lazy pages do, criu/uffd.c).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* Threads that prefetching never takes. */
#define DEMAND_THREADS 2u
/* While there are several files, one of them leaves this part of the threads to the others: its
 * storage may not answer. */
#define SPARE_PART 4u
/* Requests that storage has at once of what is expected (bench/pool.py fill). */
#define PIECES 8u
/* A run grows no further while somebody waits for a chunk in order. */
#define WAITED_MAX_BYTES (512u << 10)
/* A thread that has had nothing to read for so long gives back its buffer's memory: 6 MiB each are the job's. */
#define IDLE_NS 200000000u
/* The memfd's inode is locked while it is written, and whoever waits for memory there waits with the lock, which a
 * punch needs: it is let go of after so much. */
#define WRITE_BYTES (64u << 10)
/* Of bring(): up_pool_room(0) was called meanwhile. */
#define GIVES_ALL 1

struct fill {
	int file;
	uint64_t first, count;
	struct pool_job *job; /* NULL: on demand */
	int for_others;       /* another node waits for it: it comes from this one's disk or from storage */
	int in_place;         /* read into the memfd's pages, which are zeros before */
	int spilled;          /* it comes from the disk tier */
};

/* Absent chunks from `first` on, `most` at the most. */
static uint64_t absent_run(const struct pool_file *f, uint64_t first, uint64_t most)
{
	uint64_t n = 0;

	while (n < most && first + n < f->chunks &&
	       (f->state[first + n] == UP_ABSENT || f->state[first + n] == UP_WANTED))
		n++;
	return n;
}

/* Whether the file has as many threads as it may. */
static int has_its_threads(const struct up_pool *p, const struct pool_file *f)
{
	return p->files > 1 && p->threads >= SPARE_PART &&
	       f->filling >= p->threads - p->threads / SPARE_PART;
}

/* For so long in all nothing was being read. */
static uint64_t idle_ns(const struct up_pool *p, uint64_t now_ns)
{
	return p->idle_ns + (p->fills ? 0 : now_ns - p->idle_since_ns);
}

/* Mark a run as being filled, if there is room: 1, else 0. */
static int begin(struct up_pool *p, struct fill *out)
{
	struct pool_file *f = &p->file[out->file];
	uint64_t bytes = out->count * pool_chunk_bytes(p);

	if (p->used_bytes + bytes > p->budget)
		return 0;
	for (uint64_t c = out->first; c < out->first + out->count; c++)
		f->state[c] = UP_FILLING;
	if (out->spilled) {
		p->spilling++;
	} else { /* the clock of `idle_ns` is storage's */
		p->idle_ns = idle_ns(p, pool_now_ns());
		p->fills++;
	}
	f->busy++;
	f->filling++;
	/* An agent's UFFDIO_CONTINUE that is late would map the zeros. One that begins from now on writes
	 * the pages before: nobody punches them while they are FILLING. */
	out->in_place = f->map && !pool_is_stood_in_for(p);
	p->used_bytes += bytes;
	if (p->used_bytes > p->count.peak_bytes)
		p->count.peak_bytes = p->used_bytes;
	return 1;
}

/* Not more at once than a quarter of what is not held for other nodes, but one chunk; nor more than to the end of what
 * one node keeps as a whole. */
static uint64_t bounded(const struct up_pool *p, uint64_t first, uint64_t chunks)
{
	uint64_t room = p->budget > p->held_bytes ? p->budget - p->held_bytes : 0;
	uint64_t most = room / 4 / pool_chunk_bytes(p);

	if (p->net && chunks > net_block_chunks(p->net) - first % net_block_chunks(p->net))
		chunks = net_block_chunks(p->net) - first % net_block_chunks(p->net);
	return chunks <= most ? chunks : most ? most : 1;
}

/* Of a run, what comes from one source. */
static void from_one_source(const struct up_pool *p, struct fill *o)
{
	if (p->spill)
		o->count = spill_run(p->spill, o->file, o->first, o->count, &o->spilled);
}

/* What is passed over is moved up: it is no more than its file's waiting threads. */
static void leave_demand(struct up_pool *p, uint32_t place)
{
	for (; place != p->demand_tail; place--)
		p->demand[place % p->demand_room] = p->demand[(place - 1) % p->demand_room];
	p->demand_tail++;
}

/* 1: `out` is to be filled; 0: nothing to do on demand; -1: look again. */
static int take_demand(struct up_pool *p, struct fill *out)
{
	for (uint32_t i = p->demand_tail; i != p->demand_head; i++) {
		struct pool_demand *d = &p->demand[i % p->demand_room];
		struct pool_file *f = d->file < 0 ? NULL : &p->file[d->file];
		uint64_t most = d->run, first = d->chunk, low = first;
		int whole;

		if (!f || !f->used || f->state[d->chunk] != UP_WANTED) {
			leave_demand(p, i);
			continue;
		}
		if (has_its_threads(p, f))
			continue; /* which look here again when they have read */
		/* Where a request costs the same whatever it brings, a miss brings all of that, as long as no more than
		 * free_bytes beyond what readers were given was read so: who reads here and there uses little of it. */
		whole = f->unit && pool_all_fit(p) && f->by_unit <= f->mapped + p->options.free_bytes / pool_chunk_bytes(p);
		if (whole) { /* on its own grid */
			most = f->unit;
			low -= low % most;
			while (first > low && absent_run(f, first - 1, 1))
				first--;
		}
		most = bounded(p, first, low + most - first);
		if (first + most <= d->chunk)
			first = d->chunk;
		*out = (struct fill){ .file = d->file, .first = first,
				      .count = absent_run(f, first, most) };
		from_one_source(p, out);
		if (first + out->count <= d->chunk) { /* what lies before it comes from elsewhere */
			*out = (struct fill){ .file = d->file, .first = d->chunk, .count = 1 };
			from_one_source(p, out);
		}
		if (begin(p, out)) {
			f->by_unit += whole ? out->count : 0;
			leave_demand(p, i);
			return 1;
		}
		if (pool_make_room(p, out->count * pool_chunk_bytes(p), 1) < 0)
			pool_wait_a_moment(p);
		return -1;
	}
	return 0;
}

static void finish_job(struct up_pool *p, struct pool_job *j)
{
	uint64_t one = 1;

	if (j->running || j->queued || j->chunk < j->end)
		return;
	p->expected -= j->chunks;
	j->result.done_ns = pool_now_ns();
	j->result.idle_done_ns = idle_ns(p, j->result.done_ns);
	/* whole chunks were read and found */
	if (j->result.bytes > j->job.length)
		j->result.bytes = j->job.length;
	if (j->result.resident_bytes + j->result.bytes > j->job.length)
		j->result.resident_bytes = j->job.length - j->result.bytes;
	p->done[p->done_head++ % POOL_JOBS] = (uint32_t)(j - p->job);
	if (write(p->options.event_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so the reader is awake anyway */
}

/* Chunks of one piece of what is expected, from `first` on: so that PIECES requests are under way;
 * or just what one request brings. */
static uint64_t pieces(const struct up_pool *p, const struct pool_file *f, uint64_t first)
{
	uint64_t n = p->expected / PIECES;

	if (f->unit)
		return f->unit - first % f->unit;
	n = n > 1 ? n : 1;
	return n < p->run_chunks ? n : p->run_chunks;
}

static void leave_queue(struct up_pool *p, uint32_t place)
{
	p->job[p->queue[place % POOL_JOBS]].queued = 0;
	for (; place != p->queue_tail; place--)
		p->queue[place % POOL_JOBS] = p->queue[(place - 1) % POOL_JOBS];
	p->queue_tail++;
}

/* Of the threads, how many prefetch from the disk at the most: the others have other sources. */
static uint32_t spill_threads(const struct up_pool *p)
{
	return p->threads / 2;
}

/* The next piece of the first job that has one. As take_demand(). */
static int take_prefetch(struct up_pool *p, struct fill *out)
{
	uint32_t at = p->queue_tail;

	while (at != p->queue_head && p->prefetching + DEMAND_THREADS <= p->threads) {
		struct pool_job *j = &p->job[p->queue[at % POOL_JOBS]];
		struct pool_file *f = &p->file[j->job.fd];
		uint64_t bytes = pool_chunk_bytes(p), left;
		int room;

		while (j->chunk < j->end && !absent_run(f, j->chunk, 1)) {
			j->result.resident_bytes += bytes;
			j->chunk++;
		}
		left = bounded(p, j->chunk, j->end - j->chunk);
		if (left > pieces(p, f, j->chunk))
			left = pieces(p, f, j->chunk);
		if (j->chunk == j->end) {
			leave_queue(p, at++);
			finish_job(p, j);
			continue;
		}
		if (has_its_threads(p, f)) {
			at++;
			continue;
		}
		if (!j->result.start_ns) {
			j->result.start_ns = pool_now_ns();
			j->result.idle_start_ns = idle_ns(p, j->result.start_ns);
		}
		*out = (struct fill){
			.file = j->job.fd,
			.first = j->chunk,
			.count = absent_run(f, j->chunk, left),
			.job = j,
		};
		from_one_source(p, out);
		if (out->spilled && p->spilling >= spill_threads(p)) {
			at++;
			continue;
		}
		if (begin(p, out)) {
			j->chunk += out->count;
			j->running++;
			p->prefetching++;
			if (j->chunk == j->end)
				leave_queue(p, at);
			if (p->queue_tail != p->queue_head)
				p->signals++; /* for the next piece */
			return 1;
		}
		room = pool_make_room(p, out->count * bytes, 0);
		if (room >= 0)
			return -1;
		if (room == -2)
			return 0; /* up_pool_victims() wakes us */
		/* Nothing may go for what is only expected: leave the rest. */
		j->chunk = j->end;
	}
	return 0;
}

/* What came of it: how, and how much of it from other nodes. */
struct brought {
	enum up_source_way way;
	uint64_t others_bytes;
};

static uint64_t from_others(struct up_net *net, const struct fill *o, char *into, uint64_t length)
{
	struct up_net_range r = {
		.first = o->first,
		.count = o->count,
		.length = length,
		.expected = o->job ? o->job->last : o->first,
		.demand = !o->job,
		.due_ns = o->job && o->job->job.due_ns ? o->job->result.submit_ns + o->job->job.due_ns : 0,
	};

	return net_fetch(net, o->file, &r, into);
}

/* The bytes from another node or from storage: 0 or -errno. */
static int fetch(struct up_pool *p, struct up_net *net, struct pool_file *f, const struct fill *o, char *into,
		 uint64_t length, struct brought *b)
{
	uint64_t offset = o->first * pool_chunk_bytes(p), began_ns;
	int ret;

	if (net && !o->for_others)
		b->others_bytes = from_others(net, o, into, length);
	if (b->others_bytes == length)
		return 0;
	began_ns = pool_now_ns();
	ret = up_source_read(&f->source, into + b->others_bytes, length - b->others_bytes, offset + b->others_bytes,
			     &b->way);
	if (net && !ret)
		net_was_read(net, o->file, f->source.given, b->way == UP_CACHED ? 0 : length - b->others_bytes,
			     pool_now_ns() - began_ns);
	if (p->spill && !ret && b->way != UP_CACHED)
		spill_was_read(p->spill, o->file, length - b->others_bytes, pool_now_ns() - began_ns);
	return ret;
}

/* At most WRITE_BYTES into the memfd, in turns: 0, -errno, or GIVES_ALL. */
static int write_part(struct up_pool *p, int file, const char *bytes, uint64_t length, uint64_t offset)
{
	uint64_t at = 0;
	int ret = 0;

	pthread_mutex_lock(&p->writing[file]);
	while (!ret && at < length) {
		ssize_t n;

		if (!__atomic_load_n(&p->room_bytes, __ATOMIC_RELAXED)) {
			ret = GIVES_ALL;
			break;
		}
		n = pwrite(p->file[file].memfd, bytes + at, length - at, (off_t)(offset + at));
		if (n < 0 && errno != EINTR)
			ret = -errno;
		else if (n > 0)
			at += (uint64_t)n;
	}
	pthread_mutex_unlock(&p->writing[file]);
	return ret;
}

/* The bytes into the memfd: 0, -errno, or GIVES_ALL. *buffer may be another one then. */
static int bring(struct up_pool *p, struct up_net *net, struct pool_file *f, const struct fill *o,
		 char **own, struct brought *b)
{
	uint64_t bytes = pool_chunk_bytes(p), offset = o->first * bytes, length = o->count * bytes, at = 0;
	char *into, *buffer;
	int ret = 0, came = o->spilled && spill_read(p->spill, o->file, o->first, o->count, !o->job, own,
						     pool_buffer_room(p));

	buffer = into = *own;
	if (offset + length > f->size)
		length = f->size - offset;
	/* Huge pages come by a fault in a mapping that asks for them (shmem_enabled=advise). The
	 * last one may reach beyond the file's end, where a mapping has nothing. */
	if (o->in_place && length == o->count * bytes &&
	    !madvise(f->map + offset, length, MADV_POPULATE_WRITE))
		into = f->map + offset;
	if (!came)
		ret = fetch(p, net, f, o, into, length, b);
	else if (into != buffer)
		memcpy(into, buffer, length);
	if (came)
		b->way = UP_SPILLED;
	if (into != buffer) {
		/* our own page tables need not know them */
		madvise(f->map + offset, length, MADV_DONTNEED);
		return ret;
	}
	for (; !ret && at < length; at += WRITE_BYTES)
		ret = write_part(p, o->file, buffer + at, length - at < WRITE_BYTES ? length - at : WRITE_BYTES, offset + at);
	return ret;
}

/* No agent puts the file in the place of what they wait for. */
static void refuse_orphans(struct up_pool *p, const struct fill *o)
{
	for (struct pool_waiter **at = &p->waiting; *at;) {
		struct pool_waiter w = **at;
		struct pool_client *c = &p->client[w.client];

		if (w.file != o->file || w.chunk < o->first || w.chunk >= o->first + o->count || c->ring || c->leaving ||
		    c->generation != w.generation) {
			at = &(*at)->next;
			continue;
		}
		pool_drop_waiter(p, at);
		pool_use(c);
		pool_unlock(p);
		pool_poison(c->uffd, w.address, p->page_bytes);
		pool_wake(c->uffd, w.address, p->page_bytes);
		pthread_mutex_lock(&p->lock);
		pool_leave_off(p, c);
		at = &p->waiting; /* it may be another by now */
	}
}

/* It could not be brought: what is there of it goes, and who waits is told by the main thread. */
static void fail(struct up_pool *p, const struct fill *o, int error)
{
	struct pool_file *f = &p->file[o->file];
	uint64_t bytes = pool_chunk_bytes(p);
	struct up_pool_event e = { .kind = UP_POOL_FAILED, .file = (uint32_t)o->file,
				   .offset = o->first * bytes, .length = o->count * bytes,
				   .error = error };

	pool_unlock(p);
	fallocate(f->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)e.offset,
		  (off_t)e.length);
	pthread_mutex_lock(&p->lock);
	for (uint64_t c = o->first; c < o->first + o->count; c++)
		f->state[c] = UP_ABSENT;
	pool_keep_where_it_is(p, o->file, o->first, o->count);
	p->used_bytes -= e.length;
	p->count.failed_fills++;
	e.time_ns = pool_now_ns();
	/* Out of memory: live with less from now on; those who wait are served after that. */
	if (error == GIVES_ALL || ((error == -ENOMEM || error == -ENOSPC) && p->used_bytes >= e.length)) {
		if (error != GIVES_ALL)
			p->budget = p->used_bytes;
		for (struct pool_waiter *w = p->waiting; w; w = w->next)
			if (w->file == o->file)
				pool_want(p, w->file, w->chunk, 1);
		return;
	}
	if (!f->failed)
		pool_post(p, &e);
	f->failed = 1; /* all of the file is given back for it */
	refuse_orphans(p, o);
}

/* `real` bytes have come. */
static void count_source(struct up_pool *p, struct pool_file *f, const struct fill *o, const struct brought *b,
			 uint64_t real)
{
	if (b->way == UP_SPILLED) {
		f->count.disk_read_bytes += real;
		return;
	}
	f->count.others_bytes += b->others_bytes;
	p->count.others_bytes += b->others_bytes;
	f->count.read_bytes += real - b->others_bytes;
	p->count.read_bytes += real - b->others_bytes;
	p->count.demand_read_bytes += o->job || o->for_others ? 0 : real - b->others_bytes;
	*(b->way == UP_DIRECT   ? &p->count.direct_bytes
	  : b->way == UP_CACHED ? &p->count.cached_bytes
				: &p->count.buffered_bytes) += real - b->others_bytes;
}

static void fill(struct up_pool *p, const struct fill *o, char **buffer)
{
	struct pool_file *f = &p->file[o->file];
	uint64_t bytes = pool_chunk_bytes(p), length = o->count * bytes, began = pool_now_ns();
	struct brought b = { .way = UP_BUFFERED };
	struct up_net *net;
	uint64_t most;
	int ret;

	pthread_mutex_lock(&p->lock);
	net = p->net;
	if (net)
		net_hold(net);
	pool_unlock(p);
	ret = bring(p, net, f, o, buffer, &b);
	if (net)
		net_put(net);
	pthread_mutex_lock(&p->lock);
	if (ret) {
		fail(p, o, ret);
	} else {
		uint64_t real = o->first * bytes + length > f->size ? f->size - o->first * bytes : length;

		for (uint64_t c = o->first; c < o->first + o->count; c++) {
			uint64_t one = (c + 1) * bytes > f->size ? f->size - c * bytes : bytes;

			f->state[c] = UP_PRESENT;
			f->touched_ms[c] = 0;
			f->pins[c]++;
			if (!f->ever[c]) {
				f->count.unique_bytes += one;
				p->count.unique_bytes += one;
			}
			f->ever[c] = 1;
		}
		if (p->net && (net_is_keeper(p->net, o->file, o->first) ||
			       (o->for_others && net_may_be_keeper(p->net, o->file, o->first))))
			pool_keep(p, o->file, o->first, o->count);
		else
			pool_keep_where_it_is(p, o->file, o->first, o->count);
		f->count.resident_bytes += length;
		p->count.resident_bytes += length;
		count_source(p, f, o, &b, real);
		p->count.fills++;
		if (b.way != UP_SPILLED) /* storage's times: what a miss takes is told by them */
			pool_bin(p->count.fill_bin, &p->count.fill_sum_ns, &p->count.fill_max_ns,
				 pool_now_ns() - began);
		if (f->waiters)
			pool_serve(p, o->file, o->first, o->count);
		for (uint64_t c = o->first; c < o->first + o->count; c++)
			f->pins[c]--;
		most = pool_run_most(p);
		if (f->waiters && most > WAITED_MAX_BYTES / bytes)
			most = WAITED_MAX_BYTES / bytes;
		if (o->job && p->run_chunks < most)
			p->run_chunks = p->run_chunks * 2 < most ? p->run_chunks * 2 : (uint32_t)most;
	}
	f->busy--;
	f->filling--;
	if (o->spilled)
		p->spilling--;
	else if (!--p->fills)
		p->idle_since_ns = pool_now_ns();
	if (o->job) {
		o->job->running--;
		p->prefetching--;
		if (ret)
			o->job->result.error = ret == GIVES_ALL ? -ENOMEM : ret;
		else if ((b.way == UP_CACHED && !b.others_bytes) || b.way == UP_SPILLED)
			/* in memory before, and prefetched if that was our doing; or on the disk, which tells nothing of storage */
			o->job->result.resident_bytes += length;
		else
			o->job->result.bytes += length;
		finish_job(p, o->job);
	}
	up_cond_broadcast(&p->idle);
}

int pool_bring_for_others(struct up_pool *p, int file, uint64_t chunk, uint64_t count, char **buffer)
{
	struct pool_file *f = &p->file[file];
	struct fill o = { .file = file, .first = chunk, .for_others = 1 };
	uint64_t failed = p->count.failed_fills;

	if (f->state[chunk] != UP_ABSENT && f->state[chunk] != UP_WANTED) {
		pool_wait_a_moment(p); /* on its way, here or away */
		return 1;
	}
	o.count = absent_run(f, chunk, bounded(p, chunk, count));
	from_one_source(p, &o);
	if (!begin(p, &o)) {
		if (pool_make_room(p, o.count * pool_chunk_bytes(p), 1) < 0)
			pool_wait_a_moment(p);
		return 1;
	}
	pool_unlock(p);
	fill(p, &o, buffer); /* comes back with the lock */
	return p->count.failed_fills == failed || f->state[chunk] != UP_ABSENT ? 1 : -EIO;
}

/* Wait for work. *dirty: the buffer has memory. */
static void wait_for_work(struct up_pool *p, char *buffer, size_t bytes, int *dirty)
{
	if (!*dirty) {
		pool_wait(p, &p->work);
		return;
	}
	pool_send(p);
	if (up_cond_wait_until(&p->work, &p->lock, pool_now_ns() + IDLE_NS) != ETIMEDOUT)
		return;
	pool_unlock(p);
	*dirty = madvise(buffer, bytes, MADV_DONTNEED) != 0;
	pthread_mutex_lock(&p->lock);
}

void *pool_fill_loop(void *arg)
{
	struct up_pool *p = arg;
	size_t room = pool_buffer_room(p);
	struct fill o;
	int dirty = 0;
	char *buffer;

	/* Not one thread less: when it is the last, readers wait for ever. */
	while (!(buffer = spill_buffer(room))) {
		if (__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE))
			return NULL;
		usleep(1000);
	}
	pthread_mutex_lock(&p->lock);
	while (!p->stop) {
		int what;

		if (p->strays)
			pool_drop_strays(p);
		/* what the file does not hold any more */
		if (p->dropping && pool_drop_some(p) > 0)
			continue;
		/* a budget that has become smaller */
		if (p->used_bytes > p->budget && pool_make_room(p, 0, 1) > 0)
			continue;
		what = take_demand(p, &o);
		if (!what)
			what = take_prefetch(p, &o);
		if (what < 0)
			continue;
		if (!what) {
			/* what must go was touched just now, or memory was short: look again */
			if (p->used_bytes > p->budget || p->retry || p->dropping)
				pool_wait_a_moment(p);
			else
				wait_for_work(p, buffer, room, &dirty);
			if (p->retry)
				pool_want_again(p);
			continue;
		}
		pool_unlock(p);
		dirty = 1;
		fill(p, &o, &buffer); /* comes back with the lock */
	}
	pool_unlock(p);
	munmap(buffer, room);
	return NULL;
}
