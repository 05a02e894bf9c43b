// SPDX-License-Identifier: Apache-2.0
/*
 * fetch.c - chunks from other nodes: who has a block, what was asked of whom, and how long that may take.
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
/* Who waits for an answer longer than answers took lately has storage read instead: so much of what came at the most, over
 * the number of other nodes, so that where all read the same all of them together read no more of it again. */
#define HEDGED_PART 50u
/* Storage must be so much quicker (5 : 4): it is everybody's. */
#define FAVOUR 5 / 4
/* One request in so many goes to the slower source, to see whether it still is. */
#define TRY_AGAIN 64u
/* Of so many blocks that readers came to, more than this part kept by others, and what they keep is read ahead: where N
 * nodes read the same, (N - 1) / N of it are others'; of a part of one's own, at most the last block. */
#define WALK_BLOCKS 16
/* Blocks that are asked for before their turn in a window: more than are read in a message's time, and not so many that
 * whoever asks first reads all of what all read. */
#define AHEAD_BLOCKS 4
/* The next block of a walk is no farther: what one fault maps at the most (FAR_BYTES of pool_faults.c). */
#define STEP_BLOCKS 4
#define WALK_PART 4u

static uint32_t now_ms(const struct up_net *n)
{
	return (uint32_t)((pool_now_ns() - n->began_ns) / NET_MS) + 1;
}

/* The least that anybody is waited for. */
static uint64_t least_ns(const struct up_net *n)
{
	return n->options.patience_ms ? n->options.patience_ms * NET_MS : PATIENCE_LEAST_NS;
}

/* ------------------------------------------------------------------ who has a block */

/* Whether home has been told of some chunks only. */
static int is_of_part(uint16_t word)
{
	return word == UP_NET_KEEP_PART || word == UP_NET_READ_PART ||
	       (word & UP_NET_PART && net_node_of(word) < UP_NET_NODES);
}

/* For one more block: also where all of those come that it is to keep, or as things are. */
static enum up_net_room has_room(const struct up_net *n)
{
	uint64_t kept = __atomic_load_n(&n->pool->kept_bytes, __ATOMIC_RELAXED);

	if (kept + n->block_bytes > n->options.keep_bytes)
		return UP_NET_ROOM_NONE;
	return (n->claims + 1) * n->block_bytes <= n->options.keep_bytes ? UP_NET_ROOM : UP_NET_ROOM_STILL;
}

/* Whether nodes read the same: readers here come to what others keep, or theirs to what is here, at more than one of
 * WALK_PART of the last blocks that anybody keeps, of this file or, before its second block, of the one that was read last:
 * who reads the shards of a data set reads them alike. */
static int reads_alike(const struct up_net *n, const struct net_file *f)
{
	if (!f->walked)
		f = &n->file[n->walked_file];
	return (uint32_t)__builtin_popcount(f->elsewhere & ((1u << WALK_BLOCKS) - 1)) * WALK_PART > f->walked;
}

/* Whether nobody is known to keep it. */
static int is_passing(uint16_t word)
{
	return word == UP_NET_READ || word == UP_NET_READ_PART ||
	       (word & UP_NET_COPY && net_node_of(word) < UP_NET_NODES);
}

int net_is_to_read(const struct up_net *n, const struct net_file *f, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;

	return block < f->blocks && f->word[block] == UP_NET_READ &&
	       now_ms(n) - f->asked_ms[block] <= NET_PASSING_MS;
}

/* Whether it is to be asked (again) who has a block, by who wants all of it, or some chunks (`part`). */
static int wants_word(const struct up_net *n, const struct net_file *f, uint64_t block, int part)
{
	uint16_t w = f->word[block];

	if (w == NET_ASKED)
		return now_ms(n) - f->asked_ms[block] > ASK_AGAIN_MS;
	if (!part && is_of_part(w))
		return 1;
	if (is_passing(w))
		return now_ms(n) - f->asked_ms[block] > NET_PASSING_MS;
	return w == UP_NET_UNKNOWN;
}

/* Ask who has `block`, and those of the next ones up to `last` of which that is not known. With the lock. */
static void question(struct up_net *n, int file, uint64_t block, uint64_t last, uint32_t missing_at, int part)
{
	struct net_file *f = &n->file[file];
	struct up_net_message m = {
		.kind = UP_NET_QUESTION,
		.node = UP_NET_NONE,
		.file = { f->id[0], f->id[1] },
		.first = block,
		.missing_at = missing_at,
		.room = (uint32_t)has_room(n),
		.together = (uint32_t)reads_alike(n, f),
		.part = (uint32_t)part,
	};
	uint32_t now = now_ms(n);

	for (uint64_t b = block; b <= last && b < f->blocks && b < block + UP_NET_BLOCKS; b++) {
		if (b != block && !wants_word(n, f, b, 1))
			continue;
		m.mask |= 1ull << (b - block);
		m.count = b - block + 1;
	}
	if (!net_tell(n, &m))
		return;
	n->count.questions++;
	for (uint64_t b = block; b < block + m.count; b++)
		if (m.mask & 1ull << (b - block)) {
			net_set_word(n, f, b, NET_ASKED);
			f->asked_ms[b] = now;
		}
}

/* What is known of a block by `until_ns`, when nothing was heard: that it must be read. */
static uint16_t word_of(struct up_net *n, int file, uint64_t block, uint64_t last, uint64_t until_ns, int part)
{
	struct net_file *f = &n->file[file];

	while (!n->stop && f->used) {
		uint16_t w = f->word[block];

		if (wants_word(n, f, block, part)) {
			question(n, file, block, last, UP_NET_NONE, part);
			w = f->word[block];
		}
		if (w != NET_ASKED)
			return w == UP_NET_UNKNOWN ? UP_NET_READ : w;
		if (pool_now_ns() >= until_ns)
			break;
		up_cond_wait_until(&n->changed, &n->lock, until_ns);
	}
	return UP_NET_READ;
}

static int is_here(const struct up_net *n, uint32_t node, uint64_t now_ns)
{
	return node < UP_NET_NODES && n->node[node].here && n->node[node].until_ns <= now_ns;
}

/* ------------------------------------------------------------------ whose blocks readers come to */

static int is_known(const struct net_file *f, uint64_t block)
{
	return f->word[block] != UP_NET_UNKNOWN && f->word[block] != NET_ASKED;
}

static void note_block(struct net_file *f, int elsewhere)
{
	f->elsewhere = f->elsewhere << 1 | !!elsewhere;
	f->walked += f->walked < WALK_BLOCKS;
}

void net_note_given(struct net_file *f, uint64_t block)
{
	if (f->given != block + 1)
		note_block(f, 1);
	f->given = block + 1;
}

/* It was at `from` before: one fault may map several blocks, and who goes on in order came to those between as well. */
static void note_steps(struct net_file *f, uint64_t from, uint64_t to)
{
	uint64_t step = from < to ? 1 : (uint64_t)-1;

	while (from != to) {
		from += step;
		if (!is_known(f, from) || f->word[from] == UP_NET_READ ||
		    f->word[from] == UP_NET_READ_PART) /* which nobody keeps */
			continue;
		note_block(f, net_node_of(f->word[from]) < UP_NET_NODES);
	}
}

void net_note_walk(struct up_net *n, struct net_file *f, uint64_t block)
{
	uint64_t last = NET_WALKERS - 1;

	if (!is_known(f, block)) /* it is noted when it has been asked for */
		return;
	for (uint64_t i = 0; i < NET_WALKERS; i++) {
		uint64_t at = f->walker[i] - 1;

		if (!f->walker[i] || (at > block ? at - block : block - at) > STEP_BLOCKS)
			continue;
		note_steps(f, at, block);
		if (f->walked)
			n->walked_file = (int)(f - n->file);
		last = i;
		break;
	}
	memmove(f->walker + 1, f->walker, last * sizeof(*f->walker));
	f->walker[0] = block + 1;
}

void net_touched(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	struct net_file *f = &n->file[file];

	pthread_mutex_lock(&n->lock);
	if (f->used && block < f->blocks)
		net_note_walk(n, f, block);
	pthread_mutex_unlock(&n->lock);
}

enum up_net_ahead up_net_ahead(struct up_net *n, int file, uint64_t first, uint64_t count, uint64_t expected)
{
	uint64_t each = n->options.chunks_per_block, now = pool_now_ns(), last = expected / each;
	enum up_net_ahead found = UP_NET_AHEAD_NOW;
	struct net_file *f = &n->file[file];

	pthread_mutex_lock(&n->lock);
	if (!f->used)
		found = now < f->pending_ns ? UP_NET_AHEAD_SOON : UP_NET_AHEAD_NOW;
	else if (!f->changed && !reads_alike(n, f))
		for (uint64_t b = first / each; b <= (first + count - 1) / each && b < f->blocks; b++) {
			if (wants_word(n, f, b, 0))
				question(n, file, b, last < b + AHEAD_BLOCKS ? last : b + AHEAD_BLOCKS,
					 UP_NET_NONE, 0);
			if (f->word[b] == NET_ASKED &&
			    (now_ms(n) - f->asked_ms[b]) * NET_MS < PATIENCE_FIRST_NS)
				found = UP_NET_AHEAD_SOON;
			else if (!is_passing(f->word[b]) && is_here(n, net_node_of(f->word[b]), now) &&
				 found == UP_NET_AHEAD_NOW)
				found = UP_NET_AHEAD_HELD;
		}
	pthread_mutex_unlock(&n->lock);
	return found;
}

int up_net_reads_alike(struct up_net *n, int file)
{
	const struct net_file *f = &n->file[file];
	int alike;

	pthread_mutex_lock(&n->lock);
	alike = f->used && reads_alike(n, f);
	pthread_mutex_unlock(&n->lock);
	return alike;
}

/* ------------------------------------------------------------------ what is asked of a node */

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

/* Whether a reader has waited long enough for a slot's answer, which its node could give at once. */
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
		if (pool_now_ns() >= until) {
			n->count.late++;
			if (!s->word_ns) /* else it is there, and its storage is slow */
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
	enum awaited awaited = await(n, p->slot, p->length);
	uint64_t took;

	if (awaited == AWAITED_CAME) {
		struct net_file own = *f;

		took = pool_now_ns() - s->asked_ns;
		*had_it &= !s->word_ns;
		pthread_mutex_unlock(&n->lock);
		status = take_bytes(n, &own, p, s->serial, into);
		pthread_mutex_lock(&n->lock);
		if (status == UP_NET_OK) {
			d->failures = 0;
			d->from_bytes += p->length;
			n->count.from_bytes += p->length;
			if (!s->word_ns)
				net_note_time(&d->answers, took);
		} else if (status != UP_NET_FAILED) {
			d->failures = 0; /* it answers */
			n->count.refused++;
		} else {
			n->count.corrupt++;
			d->corrupt++;
			failed(n, s->node, pool_now_ns());
		}
	} else if (awaited == AWAITED_IN_VAIN) {
		n->count.unanswered_bytes += p->length;
		d->late++;
	}
	leave_slot(n, p->slot);
	return status;
}

/* [first, +count) from a node, and how many bytes of it came before one piece did not. With the lock, which it
 * leaves. */
static enum up_net_status fetch_from(struct up_net *n, int file, uint16_t word, const struct up_net_range *r,
				     char *into, uint64_t *came)
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
			if (!ask(n, file, word, p, r->demand, r->due_ns))
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
		status = finish(n, f, &piece[done % WINDOW], into, &had_it);
		if (status == UP_NET_OK)
			*came += piece[done % WINDOW].length;
		done++;
		up_cond_broadcast(&n->changed); /* a slot is free */
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

/* What did not come is read from storage: why. */
static void count_read(struct up_net *n, const struct net_file *f, uint64_t block, uint16_t word,
		       enum up_net_status status, uint64_t bytes)
{
	if (f->used && f->word[block] == NET_ASKED)
		n->count.unknown_bytes += bytes;
	else if (net_node_of(word) < UP_NET_NODES && !is_here(n, net_node_of(word), pool_now_ns()))
		n->count.away_bytes += bytes;
	else if (status == UP_NET_ABSENT || status == UP_NET_BUSY || status == UP_NET_LATE)
		n->count.refused_bytes += bytes;
}

uint64_t net_fetch(struct up_net *n, int file, const struct up_net_range *range, char *into, int *keep)
{
	uint64_t block = range->first / n->options.chunks_per_block;
	uint64_t last = range->expected / n->options.chunks_per_block;
	uint64_t patience = least_ns(n), came = 0, until;
	enum up_net_status status = UP_NET_OK;
	struct net_file *f = &n->file[file];
	int part = range->demand && range->count == 1; /* who goes on from there gets more at once */
	uint16_t w;

	/* what nobody waits for yet may rather come late than twice */
	if (!range->demand && patience < PATIENCE_FIRST_NS)
		patience = PATIENCE_FIRST_NS;
	until = pool_now_ns() + patience;
	*keep = 0;
	pthread_mutex_lock(&n->lock);
	while (!f->used && !range->demand && !n->stop && pool_now_ns() < f->pending_ns)
		up_cond_wait_until(&n->changed, &n->lock, f->pending_ns);
	if (f->used && !f->changed) {
		w = word_of(n, file, block, last, until, part);
		if (range->demand && f->used)
			net_note_walk(n, f, block);
		for (int tries = 0; tries < 2 && is_here(n, net_node_of(w), pool_now_ns()); tries++) {
			struct up_net_range rest = *range;

			if (storage_is_quicker(n, rest.length - came)) {
				n->count.quicker_bytes += rest.length - came;
				w = UP_NET_READ;
				break;
			}
			rest.first += came / pool_chunk_bytes(n->pool);
			rest.count -= came / pool_chunk_bytes(n->pool);
			rest.length -= came;
			status = fetch_from(n, file, w, &rest, into + came, &came);
			if (status != UP_NET_ABSENT || !f->used)
				break;
			question(n, file, block, block, net_node_of(w), part);
			w = word_of(n, file, block, block, pool_now_ns() + least_ns(n), part);
		}
		*keep = net_keeps(w);
		if (came < range->length)
			count_read(n, f, block, w, status, range->length - came);
	}
	pthread_mutex_unlock(&n->lock);
	return came;
}

void net_hurry(struct up_net *n, int file, uint64_t chunk)
{
	pthread_mutex_lock(&n->lock);
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
