// SPDX-License-Identifier: Apache-2.0
/*
 * hints.c - who has a block, as homes have said (uffdprefetch/cluster/homes.py), what is kept here for others, and whether
 * nodes read the same of a file.
 */
#define _GNU_SOURCE
#include <string.h>

#include "service/net/net.h"

/* A question that was not answered is asked again after this. */
#define ASK_AGAIN_MS 1000u
/* Of so many blocks that readers came to, more than this part kept by others, and what they keep is read ahead: where N
 * nodes read the same, (N - 1) / N of it are others'; of a part of one's own, at most the last block. */
#define LATEST_BLOCKS 16
#define ALIKE_PART 4u
/* Blocks that are asked for before their turn in a window: more than are read in a message's time, and not so many that
 * whoever asks first reads all of what all read. */
#define AHEAD_BLOCKS 4
/* The next block of a stream is no farther: what one fault maps at the most (FAR_BYTES of pool_faults.c). */
#define STEP_BLOCKS 4

static uint32_t now_ms(const struct up_net *n)
{
	return (uint32_t)((pool_now_ns() - n->began_ns) / NET_MS) + 1;
}

/* ------------------------------------------------------------------ what is asked of homes */

/* Whether home has been told of some chunks only. */
static int is_of_part(uint16_t word)
{
	return word == UP_NET_KEEP_PART || word == UP_NET_READ_PART ||
	       (word & UP_NET_PART && net_node_of(word) < UP_NET_NODES);
}

/* How much more than `bytes`, which is written meanwhile, there may be. */
static uint64_t left(const uint64_t *bytes, const uint64_t *most_bytes)
{
	uint64_t now = __atomic_load_n(bytes, __ATOMIC_RELAXED), most = __atomic_load_n(most_bytes, __ATOMIC_RELAXED);

	return most > now ? most - now : 0;
}

/* For one more block: also where all of those come that it is to keep, or as things are. *blocks: as many may be told it at
 * once. What comes has to lie in memory first, where a disk takes it from. */
static enum up_net_room has_room(const struct up_net *n, uint64_t *blocks)
{
	const struct up_pool *p = n->pool;
	uint64_t kept = __atomic_load_n(&p->kept_bytes, __ATOMIC_RELAXED);
	uint64_t room = left(&p->kept_bytes, &p->keep_most_bytes), here = left(&p->held_bytes, &p->hold_most_bytes);
	uint64_t all = (kept + room) / n->block_bytes;

	*blocks = UP_NET_BLOCKS;
	if (n->block_bytes > room || n->block_bytes > here)
		return UP_NET_ROOM_NONE;
	*blocks = all > n->claims ? all - n->claims : 0;
	if (*blocks > here / n->block_bytes)
		*blocks = here / n->block_bytes;
	if (*blocks)
		return UP_NET_ROOM;
	*blocks = 1;
	return UP_NET_ROOM_STILL;
}

/* Whether nodes read the same: readers here come to what others keep, or theirs to what is here, at more than one of
 * ALIKE_PART of the last blocks that anybody keeps, of this file or, before its second block, of the one that was read last:
 * who reads the shards of a data set reads them alike. */
static int reads_alike(const struct up_net *n, const struct net_file *f)
{
	if (!f->counted)
		f = &n->file[n->latest_file];
	return (uint32_t)__builtin_popcount(f->elsewhere & ((1u << LATEST_BLOCKS) - 1)) * ALIKE_PART > f->counted;
}

int net_is_to_read(const struct up_net *n, const struct net_file *f, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;

	return block < f->blocks && f->word[block] == UP_NET_READ &&
	       now_ms(n) - f->asked_ms[block] <= NET_PASSING_MS;
}

int net_is_asked_as_keeper(struct up_net *n, int file, uint64_t chunk, uint32_t asker)
{
	uint64_t block = chunk / n->options.chunks_per_block, most;
	const struct net_file *f = &n->file[file];
	uint16_t w = block < f->blocks ? f->word[block] : UP_NET_READ;
	int another = net_node_of(w) < UP_NET_NODES && !net_is_passing(w) && net_node_of(w) != asker;

	if (net_keeps(w) || w == NET_ASKED)
		return 1;
	if (block >= f->blocks || another || has_room(n, &most) == UP_NET_ROOM_NONE)
		return 0;
	net_question(n, file, block, block, UP_NET_NONE, 0);
	return 1;
}

/* Whether it is to be asked (again) who has a block, by who wants all of it, or some chunks (`part`). */
static int wants_word(const struct up_net *n, const struct net_file *f, uint64_t block, int part)
{
	uint16_t w = f->word[block];

	if (w == NET_ASKED)
		return now_ms(n) - f->asked_ms[block] > ASK_AGAIN_MS;
	if (!part && is_of_part(w))
		return 1;
	if (net_is_passing(w))
		return now_ms(n) - f->asked_ms[block] > NET_PASSING_MS;
	return w == UP_NET_UNKNOWN;
}

/* Ask who has `block`, and those of the next ones up to `last` of which that is not known. With the lock. */
void net_question(struct up_net *n, int file, uint64_t block, uint64_t last, uint32_t missing_at, int part)
{
	struct net_file *f = &n->file[file];
	uint64_t most;
	struct up_net_message m = {
		.kind = UP_NET_QUESTION,
		.node = UP_NET_NONE,
		.file = { f->id[0], f->id[1] },
		.first = block,
		.missing_at = missing_at,
		.room = (uint32_t)has_room(n, &most),
		.together = (uint32_t)reads_alike(n, f),
		.part = (uint32_t)part,
	};
	uint32_t now = now_ms(n);

	for (uint64_t b = block; b <= last && b < f->blocks && b < block + UP_NET_BLOCKS; b++) {
		if (b != block && !wants_word(n, f, b, 1))
			continue;
		if (!most--)
			break;
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

uint16_t net_word_of(struct up_net *n, int file, uint64_t block, uint64_t last, const uint64_t *until_ns, int part)
{
	struct net_file *f = &n->file[file];

	while (!n->stop && f->used) {
		uint16_t w = f->word[block];

		if (wants_word(n, f, block, part)) {
			net_question(n, file, block, last, UP_NET_NONE, part);
			w = f->word[block];
		}
		if (w != NET_ASKED)
			return w == UP_NET_UNKNOWN ? UP_NET_READ : w;
		if (pool_now_ns() >= *until_ns)
			break;
		up_cond_wait_until(&n->changed, &n->lock, *until_ns);
	}
	return UP_NET_READ;
}

/* ------------------------------------------------------------------ whose blocks readers come to */

static int is_known(const struct net_file *f, uint64_t block)
{
	return f->word[block] != UP_NET_UNKNOWN && f->word[block] != NET_ASKED;
}

static void note_block(struct net_file *f, int elsewhere)
{
	f->elsewhere = f->elsewhere << 1 | !!elsewhere;
	f->counted += f->counted < LATEST_BLOCKS;
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

void net_note_stream(struct up_net *n, struct net_file *f, uint64_t block)
{
	uint64_t last = NET_STREAMS - 1;

	if (!is_known(f, block)) /* it is noted when it has been asked for */
		return;
	for (uint64_t i = 0; i < NET_STREAMS; i++) {
		uint64_t at = f->stream[i] - 1;

		if (!f->stream[i] || (at > block ? at - block : block - at) > STEP_BLOCKS)
			continue;
		note_steps(f, at, block);
		if (f->counted)
			n->latest_file = (int)(f - n->file);
		last = i;
		break;
	}
	memmove(f->stream + 1, f->stream, last * sizeof(*f->stream));
	f->stream[0] = block + 1;
}

void net_touched(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	struct net_file *f = &n->file[file];

	pthread_mutex_lock(&n->lock);
	if (f->used && block < f->blocks)
		net_note_stream(n, f, block);
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
				net_question(n, file, b, last < b + AHEAD_BLOCKS ? last : b + AHEAD_BLOCKS,
					 UP_NET_NONE, 0);
			if (f->word[b] == NET_ASKED &&
			    (now_ms(n) - f->asked_ms[b]) * NET_MS < net_patience(&n->hints, PATIENCE_FIRST_NS))
				found = UP_NET_AHEAD_SOON;
			else if (!net_is_passing(f->word[b]) && net_is_here(n, net_node_of(f->word[b]), now) &&
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

/* ------------------------------------------------------------------ what is kept here */

/* The blocks of a file that have chunks which others ask for here, 64 at a time, are told to their homes: whoever came
 * before this transport, they are new. With the pool's lock and ours; how far it came. */
uint64_t net_tell_kept(struct up_net *n, int file, uint64_t block)
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
					net_set_word(n, f, b, UP_NET_KEEP);
					break;
				}
		if (m.mask && !net_tell(n, &m))
			break;
	}
	return block;
}

void net_dropped(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	struct net_file *f = &n->file[file];
	struct up_net_message m = { .kind = UP_NET_DROPPED, .first = block, .count = 1, .mask = 1,
				    .node = UP_NET_NONE };

	pthread_mutex_lock(&n->lock);
	if (f->used && block < f->blocks && net_keeps(f->word[block])) {
		m.file[0] = f->id[0];
		m.file[1] = f->id[1];
		net_set_word(n, f, block, UP_NET_UNKNOWN);
		net_tell(n, &m);
	}
	pthread_mutex_unlock(&n->lock);
}

int net_is_keeper(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	const struct net_file *f = &n->file[file];
	int keeps;

	pthread_mutex_lock(&n->lock);
	keeps = f->used && block < f->blocks && net_keeps(f->word[block]);
	pthread_mutex_unlock(&n->lock);
	return keeps;
}

int net_may_be_keeper(struct up_net *n, int file, uint64_t chunk)
{
	uint64_t block = chunk / n->options.chunks_per_block;
	const struct net_file *f = &n->file[file];
	int asked;

	pthread_mutex_lock(&n->lock);
	asked = f->used && block < f->blocks && f->word[block] == NET_ASKED;
	pthread_mutex_unlock(&n->lock);
	return asked;
}
