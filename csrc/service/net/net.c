// SPDX-License-Identifier: Apache-2.0
/*
 * net.c - chunks from other nodes: who has a block, what was asked of whom, and how long that may take.
 *
 * A fill thread of the pool asks here before it reads storage. It waits for an answer only as long as an answer
 * takes; whatever goes wrong, it reads storage. A slot whose answer was not waited for to the end is lost
 * until the answer comes: a network may write into it, and does so at no other time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "service/net/net.h"

/* A question about the block is on its way. */
#define ASKED 0xfffbu
/* An answer is waited for so long at the least, and so many times as long as answers took lately. */
#define PATIENCE_LEAST_NS (20 * NET_MS)
#define PATIENCE_TIMES 4u
/* Where none has come yet. */
#define PATIENCE_FIRST_NS (200 * NET_MS)
/* Bytes that a node has to read first are waited for no longer than this, beyond what storage takes. */
#define PATIENCE_MOST_NS (1500 * NET_MS)
/* A question that was not answered is asked again after this. */
#define ASK_AGAIN_MS 1000u
/* After so many requests in vain, one after the other, a node is passed over: for a second, then for two ... */
#define FAILURES 3u
#define PASS_OVER_NS (1000 * NET_MS)
#define PASS_OVER_DOUBLINGS 6u
/* Requests that one fetch has under way, and one node of all. */
#define WINDOW 4u
#define PER_NODE_PART 2u
/* Storage must be so much quicker (5 : 4): it is everybody's. */
#define FAVOUR 5 / 4
/* One request in so many goes to the slower source, to see whether it still is. */
#define TRY_AGAIN 64u

static uint32_t now_ms(const struct up_net *n)
{
	return (uint32_t)((pool_now_ns() - n->began_ns) / NET_MS) + 1;
}

static void wait_until(struct up_net *n, uint64_t until_ns)
{
	struct timespec ts = { .tv_sec = (time_t)(until_ns / 1000000000u),
			       .tv_nsec = (long)(until_ns % 1000000000u) };

	pthread_cond_timedwait(&n->changed, &n->lock, &ts);
}

int net_tell(struct up_net *n, struct up_net_message *m)
{
	uint64_t one = 1;

	if (n->stop || up_net_put(n->ring, UP_NET_OF_SERVICE, m))
		return 0;
	if (write(n->options.to_fd, &one, sizeof(one)) < 0)
		return 1; /* EAGAIN: the counter is full, so the reader is awake anyway */
	return 1;
}

/* The least that anybody is waited for. */
static uint64_t least_ns(const struct up_net *n)
{
	return n->options.patience_ms ? n->options.patience_ms * NET_MS : PATIENCE_LEAST_NS;
}

/* ------------------------------------------------------------------ who has a block */

static int has_room(const struct up_net *n)
{
	return __atomic_load_n(&n->pool->kept_bytes, __ATOMIC_RELAXED) + n->block_bytes <=
	       n->options.keep_bytes;
}

/* Ask who has `block`, and those of the next ones up to `last` of which nobody has asked. With the lock. */
static void question(struct up_net *n, int file, uint64_t block, uint64_t last, uint32_t missing_at)
{
	struct net_file *f = &n->file[file];
	struct up_net_message m = {
		.kind = UP_NET_QUESTION,
		.node = UP_NET_NONE,
		.file = { f->id[0], f->id[1] },
		.first = block,
		.missing_at = missing_at,
		.room = (uint32_t)has_room(n),
	};
	uint32_t now = now_ms(n);

	for (uint64_t b = block; b <= last && b < f->blocks && b < block + UP_NET_BLOCKS; b++) {
		if (b != block && f->word[b] != UP_NET_UNKNOWN)
			continue;
		m.mask |= 1ull << (b - block);
		m.count = b - block + 1;
	}
	if (!net_tell(n, &m))
		return;
	n->count.questions++;
	for (uint64_t b = block; b < block + m.count; b++)
		if (m.mask & 1ull << (b - block)) {
			f->word[b] = ASKED;
			f->asked_ms[b] = now;
		}
}

/* What is known of a block by `until_ns`, when nothing was heard: that it must be read. */
static uint16_t word_of(struct up_net *n, int file, uint64_t block, uint64_t last, uint64_t until_ns)
{
	struct net_file *f = &n->file[file];

	while (!n->stop && f->used) {
		uint16_t w = f->word[block];

		if (w == UP_NET_UNKNOWN || (w == ASKED && now_ms(n) - f->asked_ms[block] > ASK_AGAIN_MS)) {
			question(n, file, block, last, UP_NET_NONE);
			w = f->word[block];
		}
		if (w != ASKED)
			return w == UP_NET_UNKNOWN ? UP_NET_READ : w;
		if (pool_now_ns() >= until_ns)
			break;
		wait_until(n, until_ns);
	}
	return UP_NET_READ;
}

/* ------------------------------------------------------------------ what is asked of a node */

static int is_here(const struct up_net *n, uint32_t node, uint64_t now_ns)
{
	return node < UP_NET_NODES && n->node[node].here && n->node[node].until_ns <= now_ns;
}

static void failed(struct up_net *n, uint32_t node, uint64_t now_ns)
{
	struct net_node *d = &n->node[node];
	uint32_t times;

	if (++d->failures < FAILURES)
		return;
	times = d->failures - FAILURES;
	d->until_ns = now_ns +
		      (PASS_OVER_NS << (times < PASS_OVER_DOUBLINGS ? times : PASS_OVER_DOUBLINGS));
	n->count.passed_over++;
}

/* How long an answer of a node may take that has the bytes. */
static uint64_t patience_ns(const struct up_net *n, uint32_t node)
{
	uint64_t longest = net_longest(&n->node[node].answers);

	if (!longest)
		return PATIENCE_FIRST_NS > least_ns(n) ? PATIENCE_FIRST_NS : least_ns(n);
	longest *= PATIENCE_TIMES;
	longest = longest > least_ns(n) ? longest : least_ns(n);
	return longest < PATIENCE_MOST_NS ? longest : PATIENCE_MOST_NS;
}

static int free_slot(const struct up_net *n)
{
	for (uint32_t i = 0; i < n->layout.ask_slots; i++)
		if (n->slot[i].state == SLOT_FREE)
			return (int)i;
	return -1;
}

struct piece {
	int slot; /* -1: it was not asked for */
	uint64_t first, count, at, length;
};

static int ask(struct up_net *n, const struct net_file *f, uint32_t node, struct piece *p, int demand)
{
	struct up_net_message m = {
		.kind = UP_NET_ASK,
		.node = node,
		.file = { f->id[0], f->id[1] },
		.first = p->first,
		.count = p->count,
		.class_ = demand ? UP_NET_DEMAND : UP_NET_AHEAD,
	};
	uint64_t now = pool_now_ns();
	int slot = free_slot(n);

	if (slot < 0 || n->node[node].out >= n->layout.ask_slots / PER_NODE_PART)
		return 0;
	m.slot = (uint32_t)slot;
	m.serial = ++n->serial;
	m.useful_ms = (uint32_t)((PATIENCE_MOST_NS + net_longest(&n->storage_times)) / NET_MS);
	if (!net_tell(n, &m))
		return 0;
	n->slot[slot] = (struct net_slot){ .state = SLOT_ASKED, .serial = m.serial, .node = node,
					   .asked_ns = now, .hurried = demand };
	n->node[node].out++;
	n->count.asks++;
	p->slot = slot;
	return 1;
}

/* Nobody waits for it any more: it is free when its answer has come. */
static void leave_slot(struct up_net *n, int slot)
{
	struct net_slot *s = &n->slot[slot];

	if (s->state == SLOT_CAME) {
		s->state = SLOT_FREE;
	} else if (s->state == SLOT_ASKED) {
		s->state = SLOT_LOST;
		n->lost++;
		n->failed |= 2 * n->lost >= n->layout.ask_slots;
	}
}

/* The slot has an answer, or was waited for as long as it may be. Whether it has one. With the lock, which it leaves
 * while it waits. */
static int await(struct up_net *n, int slot)
{
	struct net_slot *s = &n->slot[slot];
	uint64_t longest = net_longest(&n->storage_times);
	uint64_t storage_ns = longest + PATIENCE_MOST_NS;

	if (longest && PATIENCE_TIMES * longest < storage_ns)
		storage_ns = PATIENCE_TIMES * longest;
	while (s->state == SLOT_ASKED && !n->stop) {
		uint64_t until = s->word_ns ? s->word_ns + storage_ns + least_ns(n)
					    : s->asked_ns + patience_ns(n, s->node);

		if (pool_now_ns() >= until)
			break;
		wait_until(n, until);
	}
	return s->state == SLOT_CAME;
}

/* The answer's bytes into the pool's memory, and whether the copy is what was sent. Without the lock. */
static enum up_net_status take_bytes(struct up_net *n, const struct net_file *f, const struct piece *p,
				     uint32_t serial, char *into)
{
	struct up_net_header h = *up_net_slot(n->ring, (uint32_t)p->slot);

	if (h.serial != serial || h.file[0] != f->id[0] || h.file[1] != f->id[1] ||
	    h.first != p->first || h.count != p->count)
		return UP_NET_FAILED;
	if (h.status != UP_NET_OK)
		return h.status <= UP_NET_FAILED ? (enum up_net_status)h.status : UP_NET_FAILED;
	if (h.length != p->length)
		return UP_NET_FAILED;
	memcpy(into + p->at, up_net_slot(n->ring, (uint32_t)p->slot) + 1, p->length);
	return up_net_checksum(into + p->at, p->length) == h.checksum ? UP_NET_OK : UP_NET_FAILED;
}

/* What becomes of the piece. With the lock, which it leaves. */
static enum up_net_status finish(struct up_net *n, const struct net_file *f, struct piece *p, char *into,
				 int *had_it)
{
	struct net_slot *s = &n->slot[p->slot];
	struct net_node *d = &n->node[s->node];
	enum up_net_status status = UP_NET_FAILED;
	uint64_t took;

	if (await(n, p->slot)) {
		struct net_file own = *f;

		took = pool_now_ns() - s->asked_ns;
		*had_it &= !s->word_ns;
		pthread_mutex_unlock(&n->lock);
		status = take_bytes(n, &own, p, s->serial, into);
		pthread_mutex_lock(&n->lock);
		n->count.corrupt += status == UP_NET_FAILED;
		if (status == UP_NET_OK) {
			d->failures = 0;
			d->from_bytes += p->length;
			n->count.from_bytes += p->length;
			if (!s->word_ns)
				net_note_time(&d->answers, took);
		} else if (status != UP_NET_FAILED) {
			d->failures = 0; /* it answers */
			n->count.refused++;
		}
	} else {
		n->count.late++;
	}
	if (status == UP_NET_FAILED && !s->word_ns) /* else it is there, and its storage is slow */
		failed(n, s->node, pool_now_ns());
	leave_slot(n, p->slot);
	return status;
}

/* All of [first, +count) from a node. With the lock, which it leaves. */
static enum up_net_status fetch_from(struct up_net *n, int file, uint32_t node, const struct up_net_range *r,
				     char *into)
{
	const struct net_file *f = &n->file[file];
	uint64_t chunk = pool_chunk_bytes(n->pool), each = n->layout.slot_bytes / chunk;
	struct piece piece[WINDOW];
	uint64_t asked = 0, done = 0, pieces = (r->count + each - 1) / each;
	enum up_net_status status = UP_NET_OK;
	uint64_t began = pool_now_ns(), until = began + least_ns(n);
	int had_it = 1;

	while (done < pieces && status == UP_NET_OK) {
		while (asked < pieces && asked < done + WINDOW) {
			struct piece *p = &piece[asked % WINDOW];
			uint64_t at = asked * each, left = r->count - at;

			*p = (struct piece){ .slot = -1, .first = r->first + at,
					     .count = left < each ? left : each, .at = at * chunk };
			p->length = p->count * chunk < r->length - p->at ? p->count * chunk
									 : r->length - p->at;
			if (!ask(n, f, node, p, r->demand))
				break;
			asked++;
		}
		if (asked == done) { /* no slot is free */
			if (n->stop || pool_now_ns() >= until) {
				status = UP_NET_BUSY;
				break;
			}
			wait_until(n, until);
			continue;
		}
		status = finish(n, f, &piece[done++ % WINDOW], into, &had_it);
		pthread_cond_broadcast(&n->changed); /* a slot is free */
	}
	for (; done < asked; done++)
		leave_slot(n, piece[done % WINDOW].slot);
	if (status == UP_NET_OK && had_it)
		net_note_rate(&n->network, r->length, pool_now_ns() - began);
	return status;
}

/* Whether storage would be quicker. */
static int storage_is_quicker(struct up_net *n, uint64_t length)
{
	uint64_t network = net_expected_ns(&n->network, length);
	uint64_t storage = net_expected_ns(&n->storage, length);

	if (!network || !storage || storage * FAVOUR >= network)
		return 0;
	return ++n->passed % TRY_AGAIN != 0;
}

int net_fetch(struct up_net *n, int file, const struct up_net_range *r, char *into, int *keep)
{
	uint64_t block = r->first / n->options.chunks_per_block;
	uint64_t last = r->expected / n->options.chunks_per_block;
	uint64_t patience = least_ns(n), until;
	enum up_net_status status = UP_NET_FAILED;
	struct net_file *f = &n->file[file];
	uint16_t w;

	/* what nobody waits for yet may rather come late than twice */
	if (!r->demand && patience < PATIENCE_FIRST_NS)
		patience = PATIENCE_FIRST_NS;
	until = pool_now_ns() + patience;
	*keep = 0;
	pthread_mutex_lock(&n->lock);
	while (!f->used && !r->demand && !n->stop && pool_now_ns() < f->pending_ns)
		wait_until(n, f->pending_ns);
	if (f->used && !n->failed) {
		w = word_of(n, file, block, last, until);
		for (int tries = 0; tries < 2 && is_here(n, w, pool_now_ns()); tries++) {
			if (storage_is_quicker(n, r->length)) {
				n->count.quicker_bytes += r->length;
				w = UP_NET_READ;
				break;
			}
			status = fetch_from(n, file, w, r, into);
			if (status != UP_NET_ABSENT || !f->used)
				break;
			question(n, file, block, block, w);
			w = word_of(n, file, block, block, pool_now_ns() + least_ns(n));
		}
		*keep = w == UP_NET_KEEP;
	}
	pthread_mutex_unlock(&n->lock);
	return status == UP_NET_OK;
}

void net_hurry(struct up_net *n, int file, uint64_t chunk)
{
	/* Which slot it is, is not known here: what was asked ahead of this file's chunk. */
	struct up_net_message m = { .kind = UP_NET_HURRY, .node = UP_NET_NONE };
	struct net_file *f = &n->file[file];

	pthread_mutex_lock(&n->lock);
	if (f->used && !n->stop) {
		m.file[0] = f->id[0];
		m.file[1] = f->id[1];
		m.first = chunk;
		m.count = 1;
		n->count.hurries += (uint64_t)net_tell(n, &m);
	}
	pthread_mutex_unlock(&n->lock);
}

void net_storage(struct up_net *n, uint64_t bytes, uint64_t took_ns)
{
	pthread_mutex_lock(&n->lock);
	net_note_rate(&n->storage, bytes, took_ns);
	net_note_time(&n->storage_times, took_ns);
	pthread_mutex_unlock(&n->lock);
}

/* The blocks of a file that have chunks which others ask for here, 64 at a time, are told to their homes: whoever came
 * before this transport, they are new. With the pool's lock and ours; how far it came. */
static uint64_t tell_kept(struct up_net *n, int file, uint64_t block)
{
	const struct pool_file *pf = &n->pool->file[file];
	struct net_file *f = &n->file[file];
	uint64_t each = n->options.chunks_per_block;

	for (; f->used && pf->used && block < f->blocks; block += UP_NET_BLOCKS) {
		struct up_net_message m = { .kind = UP_NET_KEPT, .first = block, .node = UP_NET_NONE,
					    .file = { f->id[0], f->id[1] } };

		for (uint64_t b = block; b < block + UP_NET_BLOCKS && b < f->blocks; b++)
			for (uint64_t c = b * each; c < (b + 1) * each && c < pf->chunks; c++)
				if (pf->kept[c]) {
					m.mask |= 1ull << (b - block);
					m.count = b - block + 1;
					f->word[b] = UP_NET_KEEP;
					break;
				}
		if (m.mask && !net_tell(n, &m))
			break;
	}
	return block;
}

static void tell_all_kept(struct up_net *n)
{
	pthread_mutex_lock(&n->pool->lock);
	pthread_mutex_lock(&n->lock);
	for (int i = 0; i < POOL_FILES; i++)
		if (n->file[i].used && n->file[i].told < n->file[i].blocks)
			n->file[i].told = tell_kept(n, i, n->file[i].told);
	pthread_mutex_unlock(&n->lock);
	pool_unlock(n->pool);
}

void net_dropped(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	struct net_file *f = &n->file[file];
	struct up_net_message m = { .kind = UP_NET_DROPPED, .first = block, .count = 1, .mask = 1,
				    .node = UP_NET_NONE };

	pthread_mutex_lock(&n->lock);
	if (f->used && block < f->blocks && f->word[block] == UP_NET_KEEP) {
		m.file[0] = f->id[0];
		m.file[1] = f->id[1];
		f->word[block] = UP_NET_UNKNOWN;
		net_tell(n, &m);
	}
	pthread_mutex_unlock(&n->lock);
}

uint64_t net_block_chunks(const struct up_net *n)
{
	return n->options.chunks_per_block;
}

/* ------------------------------------------------------------------ what the transport says */

int net_find_file(const struct up_net *n, const uint64_t id[2])
{
	for (int i = 0; i < POOL_FILES; i++)
		if (n->file[i].used && n->file[i].id[0] == id[0] && n->file[i].id[1] == id[1])
			return i;
	return -1;
}

static void came(struct up_net *n, const struct up_net_message *m)
{
	struct net_slot *s;

	if (m->slot >= n->layout.ask_slots)
		return;
	s = &n->slot[m->slot];
	if (s->state == SLOT_ASKED || s->state == SLOT_LOST)
		n->node[s->node].out--;
	if (s->state == SLOT_ASKED) {
		s->state = SLOT_CAME;
	} else if (s->state == SLOT_LOST) {
		s->state = SLOT_FREE;
		n->lost--;
	}
}

static void hints(struct up_net *n, const struct up_net_message *m)
{
	int file = net_find_file(n, m->file);

	for (uint64_t i = 0; file >= 0 && i < UP_NET_BLOCKS; i++) {
		struct net_file *f = &n->file[file];
		uint64_t b = m->first + i;

		if (!(m->mask & 1ull << i) || b >= f->blocks || f->word[b] != ASKED)
			continue;
		f->word[b] = m->word[i] == ASKED ? UP_NET_UNKNOWN : m->word[i];
	}
}

static void request(struct up_net *n, const struct up_net_message *m)
{
	struct net_queue *q = &n->queue[m->class_ == UP_NET_DEMAND ? UP_NET_DEMAND : UP_NET_AHEAD];
	struct up_net_message no = { .kind = UP_NET_REFUSE, .node = m->node, .theirs = m->theirs,
				     .file = { m->file[0], m->file[1] }, .first = m->first,
				     .count = m->count, .serial = m->serial,
				     .status = UP_NET_BUSY };

	if (q->head - q->tail >= NET_REQUESTS) {
		net_tell(n, &no);
		return;
	}
	q->request[q->head++ % NET_REQUESTS] = (struct net_request){ .m = *m,
								     .came_ns = pool_now_ns() };
	pthread_cond_signal(&n->asked);
}

/* What was asked ahead of `node`'s slot is waited for there now. */
static void hurried(struct up_net *n, const struct up_net_message *m)
{
	struct net_queue *q = &n->queue[UP_NET_AHEAD];

	for (uint32_t i = q->tail; i != q->head; i++) {
		struct net_request *r = &q->request[i % NET_REQUESTS];

		if (r->m.node != m->node || r->m.theirs != m->theirs || r->m.kind != UP_NET_REQUEST)
			continue;
		r->m.class_ = UP_NET_DEMAND;
		request(n, &r->m);
		r->m.kind = 0; /* its place says nothing any more */
		return;
	}
}

static void heard(struct up_net *n, const struct up_net_message *m)
{
	switch (m->kind) {
	case UP_NET_CAME:
		came(n, m);
		break;
	case UP_NET_WORD:
		if (m->slot < n->layout.ask_slots && n->slot[m->slot].state == SLOT_ASKED &&
		    !n->slot[m->slot].word_ns)
			n->slot[m->slot].word_ns = pool_now_ns();
		break;
	case UP_NET_SENT:
		if (m->slot >= n->layout.ask_slots &&
		    m->slot < n->layout.ask_slots + n->layout.serve_slots)
			n->serving[m->slot - n->layout.ask_slots] = 0;
		pthread_cond_broadcast(&n->asked);
		break;
	case UP_NET_REQUEST:
		if (m->node < UP_NET_NODES)
			request(n, m);
		break;
	case UP_NET_HURRIED:
		hurried(n, m);
		break;
	case UP_NET_HINTS:
		hints(n, m);
		break;
	case UP_NET_NODE:
		if (m->node < UP_NET_NODES)
			n->node[m->node].here = m->status == 1;
		break;
	default:
		break; /* of a later transport */
	}
}

static void *listen_loop(void *arg)
{
	struct up_net *n = arg;
	struct pollfd p = { .fd = n->options.from_fd, .events = POLLIN };
	struct up_net_message m;
	uint64_t count;

	pthread_mutex_lock(&n->lock);
	while (!n->stop) {
		int any = 0;

		while (up_net_take(n->ring, UP_NET_OF_SERVICE, &m)) {
			heard(n, &m);
			any = 1;
		}
		if (any)
			pthread_cond_broadcast(&n->changed);
		pthread_mutex_unlock(&n->lock);
		tell_all_kept(n);
		up_net_beat(n->ring, UP_NET_OF_SERVICE);
		if (poll(&p, 1, 100) > 0 && read(p.fd, &count, sizeof(count)) < 0)
			count = 0; /* somebody else has read it */
		pthread_mutex_lock(&n->lock);
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

/* ------------------------------------------------------------------ the main thread's calls */

int up_net_share(struct up_net *n, int file, const uint64_t *id)
{
	struct net_file f = { .used = 1, .id = { id[0], id[1] } };
	uint64_t chunks;

	pthread_mutex_lock(&n->pool->lock);
	chunks = n->pool->file[file].used ? n->pool->file[file].chunks : 0;
	pthread_mutex_unlock(&n->pool->lock);
	f.blocks = (chunks + n->options.chunks_per_block - 1) / n->options.chunks_per_block;
	if (!f.blocks)
		return -ENOENT;
	f.word = malloc(f.blocks * sizeof(*f.word));
	f.asked_ms = calloc(f.blocks, sizeof(*f.asked_ms));
	if (!f.word || !f.asked_ms) {
		free(f.word);
		free(f.asked_ms);
		return -ENOMEM;
	}
	memset(f.word, 0xff, f.blocks * sizeof(*f.word));
	up_net_unshare(n, file);
	pthread_mutex_lock(&n->lock);
	n->file[file] = f;
	pthread_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
	return 0;
}

void up_net_pending(struct up_net *n, int file, uint32_t patience_ms)
{
	pthread_mutex_lock(&n->lock);
	n->file[file].pending_ns = patience_ms ? pool_now_ns() + patience_ms * NET_MS : 0;
	pthread_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
}

void up_net_unshare(struct up_net *n, int file)
{
	struct net_file gone;

	pthread_mutex_lock(&n->lock);
	gone = n->file[file];
	n->file[file] = (struct net_file){ 0 };
	pthread_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
	free(gone.word);
	free(gone.asked_ms);
}

void up_net_counts(struct up_net *n, struct up_net_counts *out)
{
	pthread_mutex_lock(&n->lock);
	*out = n->count;
	out->kept_bytes = __atomic_load_n(&n->pool->kept_bytes, __ATOMIC_RELAXED);
	out->lost_slots = n->lost;
	out->failed = n->failed;
	pthread_mutex_unlock(&n->lock);
}

void up_net_node_counts(struct up_net *n, uint32_t node, struct up_net_node_counts *out)
{
	*out = (struct up_net_node_counts){ 0 };
	if (node >= UP_NET_NODES)
		return;
	pthread_mutex_lock(&n->lock);
	*out = (struct up_net_node_counts){
		.from_bytes = n->node[node].from_bytes,
		.to_bytes = n->node[node].to_bytes,
		.answer_ns = net_longest(&n->node[node].answers),
		.here = (uint32_t)n->node[node].here,
		.failures = n->node[node].failures,
		.out = n->node[node].out,
	};
	pthread_mutex_unlock(&n->lock);
}

/* Nobody holds it any more. */
static void free_net(struct up_net *n)
{
	struct up_pool *p = n->pool;

	for (int i = 0; i < POOL_FILES; i++) {
		free(n->file[i].word);
		free(n->file[i].asked_ms);
	}
	pthread_mutex_destroy(&n->lock);
	pthread_cond_destroy(&n->changed);
	pthread_cond_destroy(&n->asked);
	if (n->owns_ring)
		up_net_ring_close(n->ring);
	free(n->slot);
	free(n->serving);
	free(n);
	pthread_mutex_lock(&p->lock);
	p->nets--;
	pthread_cond_broadcast(&p->idle);
	pool_unlock(p);
}

void net_hold(struct up_net *n)
{
	pthread_mutex_lock(&n->lock);
	n->holders++;
	pthread_mutex_unlock(&n->lock);
}

void net_put(struct up_net *n)
{
	uint32_t left;

	pthread_mutex_lock(&n->lock);
	left = --n->holders;
	pthread_mutex_unlock(&n->lock);
	if (!left)
		free_net(n);
}

static int start_servers(struct up_net *n)
{
	pthread_attr_t attr;
	int err = 0;

	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED); /* one may be reading when all is over */
	for (uint32_t i = 0; i < n->options.serve_threads && !err; i++) {
		pthread_t thread;

		net_hold(n);
		err = pthread_create(&thread, &attr, net_serve_loop, n);
		if (err)
			net_put(n);
	}
	pthread_attr_destroy(&attr);
	return err;
}

int up_net_start(struct up_net **out, struct up_pool *pool, struct up_net_ring *ring,
		 const struct up_net_options *options)
{
	struct up_net *n = calloc(1, sizeof(*n));
	pthread_condattr_t attr;
	int err;

	if (!n)
		return -ENOMEM;
	n->pool = pool;
	n->ring = ring;
	n->options = *options;
	n->holders = 1;
	n->began_ns = pool_now_ns();
	n->block_bytes = pool_chunk_bytes(pool) * options->chunks_per_block;
	up_net_ring_layout(ring, &n->layout);
	n->slot = calloc(n->layout.ask_slots, sizeof(*n->slot));
	n->serving = calloc(n->layout.serve_slots, 1);
	pthread_mutex_init(&n->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&n->changed, &attr);
	pthread_cond_init(&n->asked, &attr);
	pthread_condattr_destroy(&attr);
	pthread_mutex_lock(&pool->lock);
	pool->nets++;
	err = pool->net ? EBUSY : 0;
	pool_unlock(pool);
	if (!err && (!n->slot || !n->serving))
		err = ENOMEM;
	if (!err && n->layout.slot_bytes < pool_chunk_bytes(pool))
		err = EINVAL;
	if (!err)
		err = pthread_create(&n->listener, NULL, listen_loop, n);
	if (err) {
		net_put(n);
		return -err;
	}
	n->owns_ring = 1;
	err = start_servers(n);
	pthread_mutex_lock(&pool->lock);
	if (!err) {
		pool->keep_most_bytes = options->keep_bytes;
		pool->net = n;
	}
	pool_unlock(pool);
	if (err) {
		n->owns_ring = 0;
		up_net_stop(n);
		return -err;
	}
	*out = n;
	return 0;
}

void up_net_stop(struct up_net *n)
{
	struct up_pool *p = n->pool;
	uint64_t one = 1;

	pthread_mutex_lock(&p->lock);
	if (p->net == n)
		p->net = NULL;
	pool_unlock(p);
	pthread_mutex_lock(&n->lock);
	n->stop = 1;
	pthread_cond_broadcast(&n->changed);
	pthread_cond_broadcast(&n->asked);
	pthread_mutex_unlock(&n->lock);
	if (write(n->options.from_fd, &one, sizeof(one)) < 0)
		errno = 0; /* EAGAIN: the counter is full, so the listener is awake anyway */
	pthread_join(n->listener, NULL); /* it waits for nothing; the others may be reading storage */
	net_put(n);
}
