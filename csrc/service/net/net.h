/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.h - the inside of what fetches chunks from other nodes and serves them: hints.c (who has a block), fetch.c (asking
 * for it), serve.c (the threads that answer), net_main.c (beginning and end; the thread that listens to the transport), rates.c
 * (which source is quickest), net.c (on which these stand), checksum.c, ring.c.
 *
 * One lock, which is never held while the pool's is taken; the other way about it may be. What is asked of the pool's
 * files is asked by struct pool_calls (pool.h).
 */
#ifndef UP_SERVICE_NET_H
#define UP_SERVICE_NET_H

#include <pthread.h>
#include <stdint.h>

#include "common/net.h"
#include "service/cond.h"
#include "service/helper.h"
#include "service/pool/pool.h"

#define NET_MS 1000000ull
/* As a block's word: a question about it is on its way. */
#define NET_ASKED 0xfffbu
/* How long is waited for what others do: so many times as long as it took lately, and no longer than this, beside what
 * storage takes, but where none has come yet, this. */
#define PATIENCE_TIMES 4u
#define PATIENCE_MOST_NS (1500 * NET_MS)
#define PATIENCE_FIRST_NS (200 * NET_MS)
/* What nobody keeps another node may be reading, or have read, just now (SENT_NS of cluster/homes.py): that is known so long. */
#define NET_PASSING_MS 1000u
/* Times of which the longest stands for p99. */
#define NET_TIMES 64

struct net_times {
	uint64_t ns[NET_TIMES];
	uint32_t count;
};

/* What a source takes for a byte of a large request, as things are: with whatever else is under way there. */
struct net_rate {
	double ns_per_byte;
	uint32_t count;
};

/* Readers of one file whose places are known. */
#define NET_STREAMS 16

enum net_slot_state { SLOT_FREE = 0, SLOT_ASKED, SLOT_CAME, SLOT_LOST };

struct net_slot {
	enum net_slot_state state;
	uint32_t serial, node;
	uint64_t asked_ns, word_ns; /* word: when it was heard that storage is read; 0: it was not */
	int file, demand; /* demand: somebody waits for it ... */
	uint64_t id[2];   /* what it was asked for: the file may have become another one's number */
	uint64_t waits_ns; /* ... since then */
	uint64_t first, count;
};

struct net_node {
	int here;
	int cpu_short;            /* its transport waits for processors longer than it runs on them */
	uint32_t failures;        /* one after the other */
	uint64_t until_ns;        /* passed over until then */
	uint32_t out;             /* requests */
	struct net_times answers; /* of what was there */
	uint64_t heard_ns;        /* when it last answered anything */
	uint64_t from_bytes, to_bytes, late, corrupt;
};

/* One that a fill thread has under way: what of it changes while it is. */
struct net_fetching {
	int file;
	uint64_t first, count;
	int demand;        /* somebody waits for it */
	uint64_t until_ns; /* until when it waits to hear who has the block */
	struct net_fetching *next;
};

/* What the pool's file of the same number is to other nodes. */
struct net_file {
	int used;
	uint64_t pending_ns; /* whether it is shared will be known by then */
	uint64_t id[2], blocks;
	struct up_net_stamp stamp; /* all that is here was read when, or after, the file had it */
	int changed;               /* it has another one now: no longer what other nodes call so */
	int looked_at;             /* ... as of a look since it is shared */
	uint16_t *word;     /* up_net_word of each block, or NET_ASKED; written by net_set_word() */
	uint64_t claims;    /* blocks that this node is to keep all of, or may be told to: it has asked */
	uint32_t *asked_ms; /* ... since when */
	uint64_t told;      /* homes know what is kept of it up to this block */
	/* Blocks that readers here came to from their neighbours, or those of other nodes to here, the newest in bit 0:
	 * whether another node than the reader's keeps it; how many; 1 + the blocks where readers were last, the latest
	 * first; and 1 + the block that another node asked for last. */
	uint32_t elsewhere, counted;
	uint64_t stream[NET_STREAMS], given;
};

struct net_request {
	struct up_net_message m;
	uint64_t came_ns;
};

#define NET_REQUESTS 4096u
struct net_queue {
	struct net_request request[NET_REQUESTS];
	uint32_t head, tail;
};

struct up_net {
	pthread_mutex_t lock;
	struct up_cond changed, asked, sent; /* a slot or a hint; a request; a slot for an answer is free */
	struct up_pool *pool;
	const struct pool_calls *calls; /* the pool's */
	struct up_net_ring *ring;
	struct up_net_layout layout;
	struct up_net_options options;
	int owns_ring, stop;
	uint32_t holders; /* its threads, fills, and who has started it: the last one frees it */
	uint64_t began_ns;
	uint32_t serial;
	struct net_slot *slot; /* of those for asking */
	uint8_t *serving;      /* of those for serving: taken ... */
	uint64_t *serving_ns;  /* ... since when */
	struct net_fetching *fetching;
	uint32_t lost;
	struct net_file file[POOL_FILES];
	struct net_node node[UP_NET_NODES];
	uint32_t others; /* that are here */
	int latest_file; /* of which readers came to another block last */
	struct net_queue queue[2]; /* by class */
	struct net_queue wants[2]; /* of those, what has to be read first */
	uint32_t reading;          /* threads that do so */
	int64_t serve_credit_ns;   /* CPU that serving may use at once; below 0: it has used more */
	uint64_t credited_ns;      /* when that was reckoned */
	struct net_rate network, storage;
	struct net_times storage_times;
	struct net_times hints, sends; /* from a question to its answer; of a slot for an answer, until it is free again */
	uint32_t passed; /* requests that went to storage since it is quicker: some try again */
	uint64_t block_bytes, claims;
	struct up_net_counts count;
	pthread_t listener;
};

/* Whom a word names; UP_NET_NODES and more: nobody. */
static inline uint32_t net_node_of(uint16_t word)
{
	return word & ~(uint32_t)(UP_NET_COPY | UP_NET_PART);
}

/* Whether a word says that this node keeps the block. */
static inline int net_keeps(uint16_t word)
{
	return word == UP_NET_KEEP || word == UP_NET_KEEP_PART;
}

/* Whether nobody is known to keep it. */
static inline int net_is_passing(uint16_t word)
{
	return word == UP_NET_READ || word == UP_NET_READ_PART ||
	       (word & UP_NET_COPY && net_node_of(word) < UP_NET_NODES);
}

static inline int net_is_here(const struct up_net *n, uint32_t node, uint64_t now_ns)
{
	return node < UP_NET_NODES && n->node[node].here && n->node[node].until_ns <= now_ns;
}

static inline int net_is_claim(uint16_t word)
{
	return word == UP_NET_KEEP || word == NET_ASKED;
}

/* With the lock. */
static inline void net_set_word(struct up_net *n, struct net_file *f, uint64_t block, uint16_t word)
{
	uint64_t more = (uint64_t)net_is_claim(word) - (uint64_t)net_is_claim(f->word[block]);

	f->claims += more;
	n->claims += more;
	f->word[block] = word;
}

/* net.c, with the lock */
/* To the transport. Whether it is on its way. */
int net_tell(struct up_net *n, struct up_net_message *m);
/* The number of a shared file, or -1. */
int net_find_file(const struct up_net *n, const uint64_t id[2]);
/* Into a queue. Whether it had room. */
int net_queue(struct net_queue *q, const struct net_request *r);

/* rates.c, with the lock */
uint64_t net_longest(const struct net_times *t);
/* PATIENCE_TIMES the longest, PATIENCE_MOST_NS at the most; where there is none yet PATIENCE_FIRST_NS; but never less than
 * `least_ns`. */
uint64_t net_patience(const struct net_times *t, uint64_t least_ns);
void net_note_time(struct net_times *t, uint64_t ns);
/* So many bytes took so long. */
void net_note_rate(struct net_rate *r, uint64_t bytes, uint64_t ns);
/* How long so many would take, in ns; 0: not known. */
uint64_t net_expected_ns(const struct net_rate *r, uint64_t bytes);

/* hints.c, with the lock */
/* Ask who has `block`, and those of the next ones up to `last` of which that is not known; `missing_at`: whom it was
 * asked in vain; `part`: some chunks are wanted. */
void net_question(struct up_net *n, int file, uint64_t block, uint64_t last, uint32_t missing_at, int part);
/* What is known of a block by *until_ns, which may change meanwhile; when nothing was heard: that it must be read. Leaves
 * the lock. */
uint16_t net_word_of(struct up_net *n, int file, uint64_t block, uint64_t last, const uint64_t *until_ns, int part);
/* Have homes know what is kept of a file from `block` on; with the pool's lock. How far it came. */
uint64_t net_tell_kept(struct up_net *n, int file, uint64_t block);
/* Another node asks for a chunk here, as of its keeper, which home may have said though this one has not asked: it does now,
 * if it has room. Whether it is to read it. */
int net_is_asked_as_keeper(struct up_net *n, int file, uint64_t chunk, uint32_t asker);
/* Whether home has told this node to read the chunk, lately. */
int net_is_to_read(const struct up_net *n, const struct net_file *f, uint64_t chunk);
/* A reader here has come to a block. */
void net_note_stream(struct up_net *n, struct net_file *f, uint64_t block);
/* Another node asks for chunks of a block, of which readers there come to more than one. */
void net_note_given(struct net_file *f, uint64_t block);

/* fetch.c: whether what comes from a node is slow for want of processors, here or there: that says nothing of the network. */
int net_is_short_of_cpu(const struct up_net *n, uint32_t node);

/* serve.c */
void *net_serve_loop(void *net);

#endif
