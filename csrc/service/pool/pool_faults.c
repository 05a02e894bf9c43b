// SPDX-License-Identifier: Apache-2.0
/*
 * pool_faults.c - the thread that takes the faults of all processes: it maps what is there, and has
 * the rest read; who waits is served when that has come.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "service/pool/pool.h"

#define FAULT_BATCH 32
/* csrc/job/pooled.c stands in where it is missing for 50 ms. */
#define BEAT_MS 10
#define MAIN_SILENT_NS 2000000000ull
#define SAY_MS 2
#define STUCK_TIMES 64
/* What a miss brings of a stream, as the kernel's readahead does: what lies further ahead is a guess, which has a price
 * (predict/storage.py). */
#define DEMAND_MAX_BYTES (128u << 10)
/* One part in so many of what a reader has come over in order is mapped ahead of it. */
#define AHEAD_PART 4
/* Half as many misses at new places tell whether their readers go on, and after so many those before count half; one
 * in so many that bring two chunks is asked again by bringing one. */
#define BEGUN 32
#define ASKED_AGAIN 8
#define FAR_BYTES (16u << 20)
#define FAR_HUGE_BYTES (128u << 20)
#define FAR_SHARE 32
#define FAR_TIMES 4

/* How many chunks a miss at a new place brings: as much as the kernel's readahead, two, where memory has room for all of
 * it: who reads on at random comes to most of it in the end. Else, or where the job has said that it jumps about, one; or
 * two where more than half of those that brought one were followed by a miss at the next, as of records that are longer
 * than a chunk. */
static uint32_t first_run(const struct up_pool *p, struct pool_file *f, uint64_t bytes)
{
	int is_told = f->begun >= BEGUN / 2 && 2 * f->went_on > f->begun;

	if (2 * bytes > DEMAND_MAX_BYTES)
		return 1;
	if ((!f->is_random && pool_all_fit(p)) || (is_told && ++f->paired % ASKED_AGAIN))
		return 2;
	if (++f->begun > BEGUN) {
		f->begun /= 2;
		f->went_on /= 2;
	}
	return 1;
}

/* A thread that waits for the same two pages, again and again, and for nothing else: one
 * instruction needs both, and there is never room for both. It would go on like that for ever. One
 * that waits for other pages of the same chunks gets on, if slowly. */
static int is_stuck(struct pool_client *c, uint32_t tid, int file, uint64_t offset)
{
	uint32_t place = tid % STUCK_PLACES;
	uint64_t *last = c->stuck[place].offset;

	if (c->stuck[place].tid != tid || c->stuck[place].file != (uint32_t)file) {
		c->stuck[place].tid = tid;
		c->stuck[place].file = (uint32_t)file;
		last[0] = last[1] = UINT64_MAX;
	}
	if (offset != last[0] && offset != last[1]) {
		last[1] = last[0];
		last[0] = offset;
		c->stuck[place].count = 0;
	}
	return ++c->stuck[place].count % STUCK_TIMES == 0;
}

/* Whether a stream goes on with this chunk, or comes back to it: another thread of it, or what has left the pool since. */
static int goes_on(const struct pool_stream *s, uint64_t chunk, uint64_t most)
{
	if (!s->passed)
		return 0;
	return chunk + 1 == s->low || (chunk > s->at ? chunk <= s->high
						     : chunk + most > s->at && chunk >= s->low);
}

/* The stream that a touch of `chunk` is part of: of several the longest. Else the one that has stood for the longest
 * begins anew there. */
static struct pool_stream *stream_of(struct pool_region *r, uint64_t chunk, uint64_t most)
{
	struct pool_stream *found = NULL, *oldest = &r->stream[0];

	for (struct pool_stream *s = r->stream; s < r->stream + POOL_STREAMS; s++) {
		if (goes_on(s, chunk, most) && (!found || s->passed > found->passed))
			found = s;
		if (r->touches - s->touched > r->touches - oldest->touched)
			oldest = s;
	}
	if (!found) {
		found = oldest;
		*found = (struct pool_stream){ .miss_next = UINT64_MAX };
	}
	found->touched = ++r->touches;
	r->now = (uint32_t)(found - r->stream);
	return found;
}

/*
 * A reader has touched `chunk`: how many chunks it has come over since its last touch, all of which were mapped
 * before; below 0: backward. Who goes on where these end gets more at once, a part of what it has come over: what is
 * mapped ahead of a reader that goes elsewhere gives no sign whether it was used.
 */
static int64_t note_order(const struct up_pool *p, struct pool_region *r, uint64_t chunk)
{
	uint64_t most = pool_map_most(p), run;
	struct pool_stream *s = stream_of(r, chunk, most);
	int64_t passed = (int64_t)(chunk - s->at);

	if (!s->passed) {
		s->passed = 1;
		s->run = 1;
		s->low = s->high = s->at = chunk;
		return 0;
	}
	if (chunk <= s->at && chunk >= s->low)
		return 0;
	s->backward = chunk + 1 == s->low;
	s->passed += (uint64_t)(passed < 0 ? -passed : passed);
	run = s->passed / AHEAD_PART;
	s->run = run < 1 ? 1 : run < most ? (uint32_t)run : (uint32_t)most;
	s->at = chunk;
	return passed;
}

/* They are being mapped: their reader gets them now. */
static void pin(const struct up_pool *p, struct pool_file *f, uint64_t first, uint64_t end)
{
	uint32_t now = pool_now_ms(p);

	f->mapped += end - first;
	for (uint64_t c = first; c < end; c++) {
		f->pins[c]++;
		f->touched_ms[c] = now;
	}
}

static void unpin(struct pool_file *f, uint64_t first, uint64_t end)
{
	for (uint64_t c = first; c < end; c++)
		f->pins[c]--;
}

static int can_pin(const struct pool_file *f, uint64_t chunk)
{
	return f->state[chunk] == UP_PRESENT && f->pins[chunk] < 255;
}

/* The chunks to map for a touch of `chunk`, which can be pinned: [first, end). */
static void run_around(const struct up_pool *p, const struct pool_region *r,
		       const struct pool_file *f, uint64_t chunk, uint64_t *first, uint64_t *end)
{
	const struct pool_stream *s = &r->stream[r->now];
	uint64_t bytes = pool_chunk_bytes(p), low = r->offset / bytes;
	uint64_t high = (r->offset + r->length + bytes - 1) / bytes;

	*first = chunk;
	*end = chunk + 1;
	if (s->backward)
		while (*end - *first < s->run && *first > low && can_pin(f, *first - 1))
			--*first;
	else {
		uint64_t run = pool_run_of(p, f, s, chunk);

		while (*end - *first < run && *end < high && can_pin(f, *end))
			++*end;
	}
}

/* Chunks of a piece that is mapped ahead: where all is there for a long way, so that nobody has to know
 * exactly what to read next, more of them, since each costs a fault, to tell of progress. */
static uint64_t piece_of(const struct up_pool *p, const struct pool_client *c,
			 const struct pool_region *r, uint64_t chunk)
{
	const struct pool_file *f = &p->file[r->file];
	uint64_t far = pool_share_of(p, FAR_SHARE, pool_maps_huge(p, c, r) ? FAR_HUGE_BYTES : FAR_BYTES);
	uint64_t end = chunk + FAR_TIMES * far;

	while (chunk < end && chunk < f->chunks && f->state[chunk] == UP_PRESENT)
		chunk++;
	if (r->stream[r->now].passed < AHEAD_PART * far)
		return pool_map_most(p);
	return chunk == end || chunk == f->chunks ? far : pool_map_most(p);
}

/*
 * The reader goes on in order: have mapped what lies ahead of it while it reads, so that it does not
 * wait for that. The first page of each piece stays unmapped: its touch says how far the reader is,
 * and the next piece is mapped. With the lock.
 */
static void plan_ahead(struct up_pool *p, uint32_t client, struct pool_region *r, uint64_t chunk)
{
	uint64_t bytes = pool_chunk_bytes(p), piece, limit, first;
	struct pool_client *c = &p->client[client];
	const struct pool_stream *s = &r->stream[r->now];
	struct pool_ahead *a = NULL;

	if (pool_map_most(p) < 2 || s->run < pool_map_most(p) || s->backward)
		return;
	piece = piece_of(p, c, r, chunk);
	limit = (r->offset + r->length + bytes - 1) / bytes;
	if (limit > (chunk / piece + 2) * piece)
		limit = (chunk / piece + 2) * piece;
	for (uint32_t i = 0; i < p->aheads && !a; i++)
		if (p->ahead[i].client == client && p->ahead[i].region == r->id &&
		    p->ahead[i].stream == r->now)
			a = &p->ahead[i];
	first = s->high > chunk && !a ? s->high : chunk + 1;
	if (first >= limit)
		return;
	if (!a && p->aheads < POOL_AHEADS)
		a = &p->ahead[p->aheads++];
	if (!a)
		return; /* then it is mapped when it is touched */
	*a = (struct pool_ahead){ .client = client, .generation = c->generation, .region = r->id,
				  .stream = r->now, .piece = piece, .chunk = first, .end = limit };
}

/* Some of what is planned, so that who comes meanwhile waits no longer than that. */
static void map_ahead(struct up_pool *p)
{
	uint64_t bytes = pool_chunk_bytes(p), first, end, most, from;
	struct pool_mapped done = { 0 };
	struct pool_region *found, r;
	struct pool_stream *s;
	struct pool_ahead a;
	struct pool_client *c;
	struct pool_file *f;
	uint32_t turn;

	pthread_mutex_lock(&p->lock);
	a = p->ahead[0];
	c = &p->client[a.client];
	found = c->uffd < 0 || c->leaving || c->generation != a.generation
			? NULL
			: pool_region_by_id(c, a.region);
	f = found ? &p->file[found->file] : NULL;
	first = end = a.chunk;
	most = found && pool_maps_huge(p, c, found) ? a.piece : pool_map_most(p);
	while (f && end < a.end && end < first + most && (end == first || end % a.piece) &&
	       can_pin(f, end))
		end++;
	/* the next one's turn, or the next region's */
	memmove(p->ahead, p->ahead + 1, --p->aheads * sizeof(a));
	if (first < end) {
		if (end < a.end) {
			p->ahead[p->aheads] = a;
			p->ahead[p->aheads++].chunk = end;
		}
		s = &found->stream[a.stream];
		if (s->low <= first && s->high >= first && s->high < end) /* else it is another by now */
			s->high = end;
		r = *found;
		pin(p, f, first, end);
		pool_use(c);
		turn = pool_begin_mapping(c);
		pool_unlock(p);
		from = first * bytes;
		if (first % a.piece == 0)
			from += p->options.huge ? bytes : p->page_bytes;
		if (from < end * bytes)
			pool_map_pages(p, c, &r, from, end * bytes - from, 0, &done);
		pthread_mutex_lock(&p->lock);
		pool_count_mapped(p, &done);
		pool_end_mapping(p, c, turn);
		unpin(f, first, end);
		pool_leave_off(p, c);
	}
	pool_unlock(p);
}

/* Its stream has come to where others began: they are one. */
static void join(struct pool_region *r)
{
	struct pool_stream *s = &r->stream[r->now];

	for (struct pool_stream *o = r->stream; o < r->stream + POOL_STREAMS; o++) {
		if (o == s || !o->passed || o->low > s->high || o->high < s->low)
			continue;
		s->low = o->low < s->low ? o->low : s->low;
		s->high = o->high > s->high ? o->high : s->high;
		s->passed += o->passed;
		o->passed = 0;
	}
}

/* On a chunk that is there. With the lock, which it leaves and takes again. */
static void answer(struct up_pool *p, uint32_t client, struct pool_region *r, uint64_t chunk,
		   uint64_t address)
{
	struct pool_client *c = &p->client[client];
	struct pool_file *f = &p->file[r->file];
	uint64_t bytes = pool_chunk_bytes(p), first, end;
	struct pool_mapped done = { 0 };
	struct pool_stream *s = &r->stream[r->now];
	struct pool_region at;
	uint32_t turn;

	run_around(p, r, f, chunk, &first, &end);
	if (s->low > first)
		s->low = first;
	if (s->high < end)
		s->high = end;
	join(r);
	plan_ahead(p, client, r, end - 1);
	pin(p, f, first, end);
	at = *r;
	turn = pool_begin_mapping(c);
	pool_unlock(p);
	pool_map_pages(p, c, &at, first * bytes, (end - first) * bytes, address, &done);
	pthread_mutex_lock(&p->lock);
	pool_count_mapped(p, &done);
	pool_end_mapping(p, c, turn);
	unpin(f, first, end);
}

static void on_fault(struct up_pool *p, uint32_t client, const struct uffd_msg *m)
{
	uint64_t address = m->arg.pagefault.address & ~(p->page_bytes - 1), chunk;
	uint64_t bytes = pool_chunk_bytes(p);
	struct pool_client *c = &p->client[client];
	struct up_pool_event e = { .time_ns = pool_now_ns(), .client = client,
				   .tid = m->arg.pagefault.feat.ptid, .length = p->page_bytes };
	struct pool_region *r;
	struct pool_stream *s;
	struct pool_file *f;

	pthread_mutex_lock(&p->lock);
	p->count.faults++;
	r = c->leaving || c->moved ? NULL : pool_region_at(c, address);
	if (!r && !c->leaving) /* a part of one in whose place another was mapped, too (pooled.c, UP_POOLED_COPIES) */
		r = pool_find_region(p, c, address);
	if (!r) {
		pool_unlock(p);
		pool_wake(c->uffd, address, p->page_bytes);
		return;
	}
	f = &p->file[r->file];
	e.region = r->id;
	e.file = (uint32_t)r->file;
	e.offset = r->offset + (address - r->address);
	chunk = e.offset / bytes;
	e.passed = note_order(p, r, chunk) * (int64_t)bytes;
	f->touched_ms[chunk] = pool_now_ms(p);
	if (p->net)
		net_touched(p->net, r->file, chunk);
	if (f->state[chunk] == UP_PRESENT && f->pins[chunk] == 255) {
		pool_unlock(p);
		pool_wake(c->uffd, address, p->page_bytes); /* it comes again */
		return;
	}
	if (f->state[chunk] == UP_PRESENT) {
		p->count.present_faults++;
		answer(p, client, r, chunk, address);
		e.kind = UP_POOL_TOUCH;
		pool_post(p, &e);
		pool_unlock(p);
		return;
	}
	p->count.missing_faults++;
	if (f->state[chunk] == UP_ABSENT && f->left[chunk]) /* the first of those that ask for it */
		e.refault = p->evictions - f->left[chunk] + 1;
	/* who goes on where the last demand ended gets more */
	s = &r->stream[r->now];
	if (chunk != s->miss_next) {
		s->miss_run = first_run(p, f, bytes);
	} else {
		f->went_on += s->miss_run == 1;
		if (s->miss_run * 2 * bytes <= DEMAND_MAX_BYTES)
			s->miss_run *= 2;
	}
	s->miss_next = chunk + s->miss_run;
	if (pool_add_waiter(p, client, r->file, chunk, m, address)) {
		pool_unlock(p);
		pool_wake(c->uffd, address, p->page_bytes); /* it comes again */
		return;
	}
	pool_want(p, r->file, chunk, s->miss_run);
	if (is_stuck(c, e.tid, r->file, e.offset)) {
		e.kind = UP_POOL_STUCK;
		pool_post(p, &e);
	}
	e.kind = UP_POOL_MISS;
	pool_post(p, &e);
	pool_unlock(p);
}

static void take_faults(struct up_pool *p, uint32_t client, uint32_t generation, uint32_t events)
{
	struct pool_client *c = &p->client[client];
	struct uffd_msg m[FAULT_BATCH];
	ssize_t n;

	pthread_mutex_lock(&p->lock);
	if (c->uffd < 0 || c->leaving || c->generation != generation) {
		pool_unlock(p);
		return;
	}
	if (!(events & EPOLLIN)) /* one that nobody initialized has only an error to tell */
		epoll_ctl(p->epoll_fd, EPOLL_CTL_DEL, c->uffd, NULL);
	pool_use(c);
	pool_unlock(p);
	n = read(c->uffd, m, sizeof(m));
	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		if (m[i].event == UFFD_EVENT_REMAP)
			pool_move_region(p, client, m[i].arg.remap.from, m[i].arg.remap.to,
					 m[i].arg.remap.len);
	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		if (m[i].event == UFFD_EVENT_PAGEFAULT)
			on_fault(p, client, &m[i]);
	pthread_mutex_lock(&p->lock);
	pool_leave_off(p, c);
	pool_unlock(p);
}

/* An agent that found us silent has read for itself: some thread looks for what it has read. */
static void note_stand_ins(struct up_pool *p, struct pool_client *c)
{
	uint64_t n = __atomic_load_n(&c->ring->stand_ins, __ATOMIC_SEQ_CST);

	if (n == c->stand_ins || n % 2) /* odd: when it has ended */
		return;
	pool_count_stand_ins(p, c);
	c->stand_ins = n;
	pool_seek_strays(p);
}

/* The agents see from it that this thread answers, and that the service's main thread has not been
 * silent for so long that it is no use. */
static void beat(struct up_pool *p)
{
	uint64_t main_ns = __atomic_load_n(&p->alive_ns, __ATOMIC_RELAXED), now = pool_now_ns();
	uint64_t alive_ns = now - main_ns < MAIN_SILENT_NS ? now : main_ns;

	pthread_mutex_lock(&p->lock);
	for (uint32_t i = 0; i < POOL_CLIENTS; i++)
		if (p->client[i].uffd >= 0 && p->client[i].ring) {
			__atomic_store_n(&p->client[i].ring->beat_ns, alive_ns, __ATOMIC_RELAXED);
			note_stand_ins(p, &p->client[i]);
		}
	pool_look_for_stalls(p);
	guardian_beat(p, alive_ns);
	pool_unlock(p);
}

void *pool_fault_loop(void *arg)
{
	struct up_pool *p = arg;
	struct epoll_event ready[64];
	uint64_t beat_ns = 0, said_ns = 0, count;
	int unsaid = 0;

	while (!__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
		int n = epoll_wait(p->epoll_fd, ready, 64, p->aheads ? 0 : unsaid ? SAY_MS : BEAT_MS);

		for (int i = 0; i < n; i++) {
			uint64_t who = ready[i].data.u64;

			if (who == POOL_WAKE) {
				if (read(p->wake_fd, &count, sizeof(count)) < 0)
					continue;
			} else {
				take_faults(p, (uint32_t)who, (uint32_t)(who >> 32), ready[i].events);
			}
		}
		if (p->aheads)
			map_ahead(p);
		/* progress is told a few at a time: each time wakes the main thread */
		unsaid = pool_unsaid(p, pool_now_ns() - said_ns >= SAY_MS * 1000000ull);
		if (!unsaid)
			said_ns = pool_now_ns();
		if (pool_now_ns() - beat_ns >= BEAT_MS * 1000000ull) {
			beat_ns = pool_now_ns();
			beat(p);
		}
	}
	return NULL;
}
