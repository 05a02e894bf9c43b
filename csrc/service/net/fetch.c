// SPDX-License-Identifier: Apache-2.0
/*
 * fetch.c - chunks from other nodes: what is asked of whom, and how long that may take.
 *
 * A fill thread of the pool asks here before it reads storage. It waits for an answer only as long as an answer
 * takes; whatever goes wrong, it reads storage. A slot whose answer was not waited for to the end is lost
 * until the answer comes: a network may write into it, and does so at no other time.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "service/net/net.h"

/* What others do is waited for so long at the least. */
#define PATIENCE_LEAST_NS (20 * NET_MS)
/* After so many requests in vain, one after the other, a node is passed over: for a second, then for two ... */
#define FAILURES 3u
#define PASS_OVER_NS (1000 * NET_MS)
#define PASS_OVER_DOUBLINGS 6u
/* Requests that one fetch has under way, and one node of all. */
#define WINDOW 4u
#define PER_NODE_PART 2u
/* Who waits for an answer longer than answers took lately has storage read instead: so much of what came at the most, over
 * the number of other nodes, so that where all read the same all of them together read no more of it again. */
#define HEDGED_PART 50u
/* Storage must be so much quicker (5 : 4): it is everybody's. */
#define FAVOUR 5 / 4
/* One request in so many goes to the slower source, to see whether it still is. */
#define TRY_AGAIN 64u

/* The least that anybody is waited for. */
static uint64_t least_ns(const struct up_net *n)
{
	return n->options.patience_ms ? n->options.patience_ms * NET_MS : PATIENCE_LEAST_NS;
}

int net_is_short_of_cpu(const struct up_net *n, uint32_t node)
{
	return n->node[n->options.me].cpu_short || n->node[node].cpu_short;
}

/* ------------------------------------------------------------------ what is asked of a node */

static void failed(struct up_net *n, uint32_t node, uint64_t now_ns)
{
	struct net_node *d = &n->node[node];
	uint32_t times;

	/* What was asked before it was passed over says nothing new. */
	if (d->until_ns > now_ns || ++d->failures < FAILURES)
		return;
	times = d->failures - FAILURES;
	d->until_ns = now_ns +
		      (PASS_OVER_NS << (times < PASS_OVER_DOUBLINGS ? times : PASS_OVER_DOUBLINGS));
	n->count.passed_over++;
}

/* How long an answer of a node may take that has the bytes. */
static uint64_t patience_ns(const struct up_net *n, uint32_t node)
{
	return net_patience(&n->node[node].answers, least_ns(n));
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

static int ask(struct up_net *n, int file, uint16_t word, struct piece *p, int demand, uint64_t due_ns)
{
	uint32_t node = net_node_of(word);
	const struct net_file *f = &n->file[file];
	struct up_net_message m = {
		.kind = UP_NET_ASK,
		.node = node,
		.file = { f->id[0], f->id[1] },
		.first = p->first,
		.count = p->count,
		.class_ = demand ? UP_NET_DEMAND : UP_NET_AHEAD,
		.copy = !!(word & UP_NET_COPY),
	};
	uint64_t now = pool_now_ns();
	int slot = free_slot(n);

	if (slot < 0 || n->node[node].out >= n->layout.ask_slots / PER_NODE_PART)
		return 0;
	m.slot = (uint32_t)slot;
	m.serial = ++n->serial;
	m.due_ms = due_ns > now ? (uint32_t)((due_ns - now) / NET_MS) : 0;
	m.useful_ms = (uint32_t)((PATIENCE_MOST_NS + net_longest(&n->storage_times)) / NET_MS);
	if (!net_tell(n, &m))
		return 0;
	n->slot[slot] = (struct net_slot){ .state = SLOT_ASKED, .serial = m.serial, .node = node,
					   .asked_ns = now, .file = file, .demand = demand,
					   .id = { f->id[0], f->id[1] },
					   .waits_ns = demand ? now : 0,
					   .first = p->first, .count = p->count };
	n->node[node].out++;
	up_net_note_out(n->ring, 1);
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
	}
}

/* Whether a reader has waited long enough for a slot's answer, which its node could give at once, for `length` bytes to
 * be read from storage instead: its own, and what was to come after it. */
static int is_hedged(const struct up_net *n, const struct net_slot *s, uint64_t length)
{
	uint64_t longest = net_longest(&n->node[s->node].answers);

	return s->demand && !s->word_ns && longest && pool_now_ns() >= s->waits_ns + longest &&
	       (n->count.hedged_bytes + length) * HEDGED_PART * n->others <= n->count.from_bytes;
}

enum awaited { AWAITED_CAME, AWAITED_HEDGED, AWAITED_IN_VAIN };

/* Until when a slot's answer is waited for. What nobody waits for may rather come late than be read twice. */
static uint64_t waited_until(const struct up_net *n, const struct net_slot *s)
{
	uint64_t since = s->waits_ns > s->asked_ns ? s->waits_ns : s->asked_ns;
	uint64_t longest = net_longest(&n->storage_times), storage_ns = longest + PATIENCE_MOST_NS, until;

	if (longest && PATIENCE_TIMES * longest < storage_ns)
		storage_ns = PATIENCE_TIMES * longest;
	if (s->word_ns)
		until = (s->word_ns > since ? s->word_ns : since) + storage_ns + least_ns(n);
	else
		until = since + patience_ns(n, s->node);
	if (!s->demand && until < s->asked_ns + PATIENCE_MOST_NS)
		until = s->asked_ns + PATIENCE_MOST_NS;
	return until;
}

/* The slot has an answer, or was waited for as long as it may be. With the lock, which it leaves while it waits. */
static enum awaited await(struct up_net *n, int slot, uint64_t length)
{
	struct net_slot *s = &n->slot[slot];

	while (s->state == SLOT_ASKED && !n->stop) {
		uint64_t until = waited_until(n, s), longest;

		if (is_hedged(n, s, length)) {
			n->count.hedged_bytes += length;
			return AWAITED_HEDGED;
		}
		/* Nor is anybody made to wait for a node that others have waited for in vain. */
		if (!n->node[s->node].here ||
		    (s->demand && !s->word_ns && n->node[s->node].until_ns > pool_now_ns()))
			return AWAITED_IN_VAIN;
		if (pool_now_ns() >= until) {
			n->count.late++;
			/* else it is there, and its storage is slow, or it has too much to do */
			if (!s->word_ns && n->node[s->node].heard_ns < s->asked_ns)
				failed(n, s->node, pool_now_ns());
			return AWAITED_IN_VAIN;
		}
		longest = s->demand && !s->word_ns ? net_longest(&n->node[s->node].answers) : 0;
		if (longest && pool_now_ns() < s->waits_ns + longest && s->waits_ns + longest < until)
			until = s->waits_ns + longest;
		up_cond_wait_until(&n->changed, &n->lock, until);
	}
	return s->state == SLOT_CAME ? AWAITED_CAME : AWAITED_IN_VAIN;
}

/* The answer's bytes into the pool's memory, or why there are none; -EBADMSG: it is no answer to what was asked, or the
 * copy is not what was sent. Without the lock. */
static int take_bytes(struct up_net *n, const struct net_slot *s, const struct piece *p, char *into)
{
	struct up_net_header h = *up_net_slot(n->ring, (uint32_t)p->slot);

	if (h.serial != s->serial || h.file[0] != s->id[0] || h.file[1] != s->id[1] ||
	    h.first != p->first || h.count != p->count || h.status > UP_NET_FAILED)
		return -EBADMSG;
	if (h.status != UP_NET_OK)
		return (int)h.status;
	if (h.length != p->length)
		return -EBADMSG;
	memcpy(into + p->at, up_net_slot(n->ring, (uint32_t)p->slot) + 1, p->length);
	return up_net_checksum(into + p->at, p->length) == h.checksum ? UP_NET_OK : -EBADMSG;
}

/* Whether the file is still what a slot has asked for. With the lock. */
static int is_of(const struct net_file *f, const struct net_slot *s)
{
	return f->used && !f->changed && f->id[0] == s->id[0] && f->id[1] == s->id[1];
}

/* What becomes of the piece, of `rest` bytes that are read from storage if it does not come. With the lock, which it
 * leaves. */
static enum up_net_status finish(struct up_net *n, const struct net_file *f, struct piece *p, uint64_t rest,
				 char *into, int *had_it)
{
	struct net_slot *s = &n->slot[p->slot];
	struct net_node *d = &n->node[s->node];
	enum up_net_status status = UP_NET_FAILED;
	enum awaited awaited = await(n, p->slot, rest);
	uint64_t took;
	int taken;

	if (awaited == AWAITED_CAME) {
		took = pool_now_ns() - s->asked_ns;
		*had_it &= !s->word_ns;
		pthread_mutex_unlock(&n->lock);
		taken = take_bytes(n, s, p, into);
		pthread_mutex_lock(&n->lock);
		status = taken < 0 ? UP_NET_FAILED : (enum up_net_status)taken;
		if (status == UP_NET_OK && !is_of(f, s)) {
			status = UP_NET_LATE; /* the file has changed meanwhile: these are old bytes */
		} else if (status == UP_NET_OK) {
			d->failures = 0;
			d->from_bytes += p->length;
			n->count.from_bytes += p->length;
			if (!s->word_ns)
				net_note_time(&d->answers, took);
		} else if (status != UP_NET_FAILED) {
			d->failures = 0; /* it answers */
			n->count.refused++;
		} else {
			n->count.corrupt += taken < 0;
			d->corrupt += taken < 0;
			n->count.refused += taken >= 0; /* its storage fails, or the way there */
			failed(n, s->node, pool_now_ns());
		}
	} else if (awaited == AWAITED_IN_VAIN) {
		n->count.unanswered_bytes += rest;
		d->late++;
	}
	leave_slot(n, p->slot);
	return status;
}

/* [first, +count) from a node, and how many bytes of it came before one piece did not. With the lock, which it
 * leaves. */
static enum up_net_status fetch_from(struct up_net *n, int file, uint16_t word, const struct up_net_range *r,
				     const int *demand, char *into, uint64_t *came)
{
	const struct net_file *f = &n->file[file];
	uint64_t chunk = pool_chunk_bytes(n->pool), each = n->layout.slot_bytes / chunk;
	struct piece piece[WINDOW];
	uint64_t asked = 0, done = 0, pieces = (r->count + each - 1) / each;
	enum up_net_status status = UP_NET_OK;
	uint64_t began = pool_now_ns(), until = began + patience_ns(n, net_node_of(word));
	int had_it = 1;

	while (done < pieces && status == UP_NET_OK) {
		while (asked < pieces && asked < done + WINDOW) {
			struct piece *p = &piece[asked % WINDOW];
			uint64_t at = asked * each, left = r->count - at;

			*p = (struct piece){ .slot = -1, .first = r->first + at,
					     .count = left < each ? left : each, .at = at * chunk };
			p->length = p->count * chunk < r->length - p->at ? p->count * chunk
									 : r->length - p->at;
			if (!ask(n, file, word, p, *demand, r->due_ns))
				break;
			asked++;
		}
		if (asked == done) { /* no slot is free */
			if (n->stop || pool_now_ns() >= until) {
				status = UP_NET_BUSY;
				break;
			}
			up_cond_wait_until(&n->changed, &n->lock, until);
			continue;
		}
		status = finish(n, f, &piece[done % WINDOW], r->length - *came, into, &had_it);
		if (status == UP_NET_OK)
			*came += piece[done % WINDOW].length;
		done++;
		up_cond_broadcast(&n->changed); /* a slot is free */
	}
	for (; done < asked; done++)
		leave_slot(n, piece[done % WINDOW].slot);
	if (status == UP_NET_OK && had_it && !net_is_short_of_cpu(n, net_node_of(word)))
		net_note_rate(&n->network, r->length, pool_now_ns() - began);
	return status;
}

/* Whether storage would be quicker than the network. Where processors are short it is not asked: what a node reads again for
 * want of them, all of them read again, from the storage that they share. */
static int storage_is_quicker(struct up_net *n, uint32_t node, uint64_t length)
{
	uint64_t network = net_expected_ns(&n->network, length);
	uint64_t storage = net_expected_ns(&n->storage, length);

	if (!network || !storage || storage * FAVOUR >= network || net_is_short_of_cpu(n, node))
		return 0;
	return ++n->passed % TRY_AGAIN != 0;
}

/* What did not come is read from storage: why. */
static void count_read(struct up_net *n, const struct net_file *f, uint64_t block, uint16_t word,
		       enum up_net_status status, uint64_t bytes)
{
	if (f->used && f->word[block] == NET_ASKED)
		n->count.unknown_bytes += bytes;
	else if (net_node_of(word) < UP_NET_NODES && !net_is_here(n, net_node_of(word), pool_now_ns()))
		n->count.away_bytes += bytes;
	else if (status == UP_NET_ABSENT || status == UP_NET_BUSY || status == UP_NET_LATE)
		n->count.refused_bytes += bytes;
}

uint64_t net_fetch(struct up_net *n, int file, const struct up_net_range *range, char *into)
{
	uint64_t block = range->first / n->options.chunks_per_block;
	uint64_t last = range->expected / n->options.chunks_per_block;
	struct net_fetching this = { .file = file, .first = range->first, .count = range->count,
				     .demand = range->demand };
	uint64_t came = 0;
	enum up_net_status status = UP_NET_OK;
	struct net_file *f = &n->file[file];
	int part = range->demand && range->count == 1; /* who goes on from there gets more at once */
	struct net_fetching **at;
	uint16_t w;

	pthread_mutex_lock(&n->lock);
	this.until_ns = pool_now_ns() + net_patience(&n->hints, least_ns(n));
	/* what nobody waits for yet may rather come late than twice */
	if (!range->demand && this.until_ns < pool_now_ns() + PATIENCE_FIRST_NS)
		this.until_ns = pool_now_ns() + PATIENCE_FIRST_NS;
	this.next = n->fetching;
	n->fetching = &this;
	while (!f->used && !this.demand && !n->stop && pool_now_ns() < f->pending_ns)
		up_cond_wait_until(&n->changed, &n->lock, f->pending_ns);
	if (f->used && !f->changed) {
		w = net_word_of(n, file, block, last, &this.until_ns, part);
		if (range->demand && f->used)
			net_note_stream(n, f, block);
		for (int tries = 0; tries < 2 && net_is_here(n, net_node_of(w), pool_now_ns()); tries++) {
			struct up_net_range rest = *range;
			uint64_t until;

			if (storage_is_quicker(n, net_node_of(w), rest.length - came)) {
				n->count.quicker_bytes += rest.length - came;
				w = UP_NET_READ;
				break;
			}
			rest.first += came / pool_chunk_bytes(n->pool);
			rest.count -= came / pool_chunk_bytes(n->pool);
			rest.length -= came;
			status = fetch_from(n, file, w, &rest, &this.demand, into + came, &came);
			if (status != UP_NET_ABSENT || !f->used)
				break;
			/* Unless another thread has asked meanwhile: home may have said by now who keeps it. */
			if (f->word[block] == w)
				net_question(n, file, block, block, net_node_of(w), part);
			until = pool_now_ns() + net_patience(&n->hints, least_ns(n));
			w = net_word_of(n, file, block, block, &until, part);
		}
		if (came < range->length)
			count_read(n, f, block, w, status, range->length - came);
	}
	for (at = &n->fetching; *at != &this; at = &(*at)->next)
		;
	*at = this.next;
	pthread_mutex_unlock(&n->lock);
	return came;
}

void net_hurry(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t soon;

	pthread_mutex_lock(&n->lock);
	soon = pool_now_ns() + net_patience(&n->hints, least_ns(n));
	for (struct net_fetching *f = n->fetching; f; f = f->next) {
		if (f->file != file || f->demand || chunk < f->first || chunk >= f->first + f->count)
			continue;
		f->demand = 1;
		f->until_ns = f->until_ns < soon ? f->until_ns : soon;
		up_cond_broadcast(&n->changed);
	}
	for (uint32_t i = 0; i < n->layout.ask_slots; i++) {
		struct net_slot *s = &n->slot[i];
		struct up_net_message m = { .kind = UP_NET_HURRY, .node = s->node, .slot = i };

		if (s->state != SLOT_ASKED || s->file != file || s->demand || chunk < s->first ||
		    chunk >= s->first + s->count)
			continue;
		s->demand = 1;
		s->waits_ns = pool_now_ns();
		n->count.hurries += (uint64_t)net_tell(n, &m);
		up_cond_broadcast(&n->changed); /* who waits for it may have waited long enough */
	}
	pthread_mutex_unlock(&n->lock);
}

static int is_stamp(const struct stat *st, const struct up_net_stamp *stamp)
{
	return (uint64_t)st->st_size == stamp->size &&
	       st->st_mtim.tv_sec * 1000000000ll + st->st_mtim.tv_nsec == stamp->mtime_ns &&
	       st->st_ctim.tv_sec * 1000000000ll + st->st_ctim.tv_nsec == stamp->ctime_ns;
}

void net_was_read(struct up_net *n, int file, int fd, uint64_t bytes, uint64_t took_ns)
{
	struct net_file *f = &n->file[file];
	struct up_net_stamp stamp;
	uint64_t id[2];
	struct stat st;
	int ask;

	pthread_mutex_lock(&n->lock);
	if (bytes) {
		net_note_rate(&n->storage, bytes, took_ns);
		net_note_time(&n->storage_times, took_ns);
	}
	ask = f->used && !f->changed;
	stamp = f->stamp;
	memcpy(id, f->id, sizeof(id));
	pthread_mutex_unlock(&n->lock);
	/* It had the stamp when it became the pool's: where it has it now, it had it while it was read. */
	if (!ask || (!fstat(fd, &st) && is_stamp(&st, &stamp)))
		return;
	pthread_mutex_lock(&n->lock);
	if (f->used && f->id[0] == id[0] && f->id[1] == id[1]) /* it is the same one still */
		f->changed = 1;
	pthread_mutex_unlock(&n->lock);
}
