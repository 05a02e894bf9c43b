// SPDX-License-Identifier: Apache-2.0
/*
 * net_main.c - a network's beginning and end, the thread that hears what its transport says, and what the main thread asks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/net/net.h"

/* An answer that has not come by then is not on its way: nodes that are overloaded give theirs late. */
#define LOST_NS (3000 * NET_MS)
/* An answer that is later than this tells of a node that stood still, not of how long answers take; where processors are
 * short it may be theirs. */
#define LATE_MOST_NS (100 * NET_MS)
#define LATE_SHORT_NS (PATIENCE_MOST_NS / PATIENCE_TIMES)

static void tell_all_kept(struct up_net *n)
{
	pthread_mutex_lock(&n->pool->lock);
	pthread_mutex_lock(&n->lock);
	for (int i = 0; i < POOL_FILES; i++)
		if (n->file[i].used && n->file[i].told < n->file[i].blocks)
			n->file[i].told = net_tell_kept(n, i, n->file[i].told);
	pthread_mutex_unlock(&n->lock);
	pool_unlock(n->pool);
}

/* ------------------------------------------------------------------ what the transport says */

static void came(struct up_net *n, const struct up_net_message *m)
{
	struct net_slot *s;
	struct net_node *d;

	if (m->slot >= n->layout.ask_slots)
		return;
	s = &n->slot[m->slot];
	d = &n->node[s->node];
	if (s->state == SLOT_ASKED || s->state == SLOT_LOST) {
		d->out--;
		d->heard_ns = pool_now_ns();
		up_net_note_out(n->ring, -1);
	}
	if (s->state == SLOT_ASKED) {
		s->state = SLOT_CAME;
	} else if (s->state == SLOT_LOST) {
		/* so long do answers take now, or nobody answered for a while */
		if (!s->word_ns) {
			uint64_t took = pool_now_ns() - s->asked_ns;
			uint64_t most = net_is_short_of_cpu(n, s->node) ? LATE_SHORT_NS : LATE_MOST_NS;

			net_note_time(&d->answers, took < most ? took : most);
		}
		s->state = SLOT_FREE;
		n->lost--;
	}
}

static void hints(struct up_net *n, const struct up_net_message *m)
{
	int file = net_find_file(n, m->file);
	uint64_t asked_ns = 0, now;

	for (uint64_t i = 0; file >= 0 && i < UP_NET_BLOCKS; i++) {
		struct net_file *f = &n->file[file];
		uint64_t b = m->first + i;

		if (!(m->mask & 1ull << i) || b >= f->blocks || f->word[b] != NET_ASKED)
			continue;
		asked_ns = n->began_ns + (uint64_t)f->asked_ms[b] * NET_MS;
		net_set_word(n, f, b, m->word[i] == NET_ASKED ? UP_NET_UNKNOWN : m->word[i]);
	}
	now = pool_now_ns();
	if (asked_ns)
		net_note_time(&n->hints, now > asked_ns ? now - asked_ns : NET_MS);
}

static void request(struct up_net *n, const struct up_net_message *m)
{
	struct net_request r = { .m = *m, .came_ns = pool_now_ns() };
	struct up_net_message no = *m;

	r.m.class_ = m->class_ == UP_NET_DEMAND ? UP_NET_DEMAND : UP_NET_AHEAD;
	if (net_queue(&n->queue[r.m.class_], &r)) {
		up_cond_signal(&n->asked);
		return;
	}
	no.kind = UP_NET_REFUSE;
	no.status = UP_NET_BUSY;
	net_tell(n, &no); /* where that queue is full as well it is one more slot that is lost there */
}

/* A request of a queue's, which goes into the other one. Whether it was there. */
static int move_up(struct net_queue *from, struct net_queue *to, const struct up_net_message *m)
{
	for (uint32_t i = from->tail; i != from->head; i++) {
		struct net_request *r = &from->request[i % NET_REQUESTS];

		if (r->m.kind != UP_NET_REQUEST || r->m.node != m->node || r->m.theirs != m->theirs)
			continue;
		r->m.class_ = UP_NET_DEMAND;
		r->m.due_ms = 0;
		if (net_queue(to, r))
			r->m.kind = 0; /* its place says nothing any more */
		return 1;
	}
	return 0;
}

/* What was asked ahead for `node`'s slot is waited for there now. */
static void hurried(struct up_net *n, const struct up_net_message *m)
{
	if (!move_up(&n->queue[UP_NET_AHEAD], &n->queue[UP_NET_DEMAND], m))
		move_up(&n->wants[UP_NET_AHEAD], &n->wants[UP_NET_DEMAND], m);
}

/* An answer has gone, and its slot is free. */
static void sent(struct up_net *n, uint32_t slot)
{
	if (n->serving[slot])
		net_note_time(&n->sends, pool_now_ns() - n->serving_ns[slot]);
	n->serving[slot] = 0;
}

static void node_said(struct up_net *n, const struct up_net_message *m)
{
	struct net_node *d = &n->node[m->node];

	d->cpu_short = !!m->cpu_short;
	if (m->node == n->options.me)
		return;
	n->others += (uint32_t)(m->status == 1) - (uint32_t)d->here;
	d->here = m->status == 1;
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
			n->slot[m->slot].word_ns = n->node[n->slot[m->slot].node].heard_ns = pool_now_ns();
		break;
	case UP_NET_SENT:
		if (m->slot >= n->layout.ask_slots &&
		    m->slot < n->layout.ask_slots + n->layout.serve_slots)
			sent(n, m->slot - n->layout.ask_slots);
		up_cond_broadcast(&n->sent);
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
			node_said(n, m);
		break;
	default:
		break; /* of a later transport */
	}
}

static void *listen_loop(void *arg)
{
	struct up_net *n = arg;
	struct pollfd p = { .fd = n->options.from_fd, .events = POLLIN };
	struct timespec pause = { .tv_nsec = 1000000 };
	struct up_net_message m;
	uint64_t count;

	pthread_mutex_lock(&n->lock);
	while (!n->stop) {
		int any = 0, ready;

		while (up_net_take(n->ring, UP_NET_OF_SERVICE, &m)) {
			heard(n, &m);
			any = 1;
		}
		if (any)
			up_cond_broadcast(&n->changed);
		pthread_mutex_unlock(&n->lock);
		tell_all_kept(n);
		ready = poll(&p, 1, 100);
		if (ready > 0 && read(p.fd, &count, sizeof(count)) < 0)
			count = 0; /* somebody else has read it */
		if (ready < 0 && errno != EINTR) /* RLIMIT_NOFILE is 0 by now: the ring is looked at all the same */
			nanosleep(&pause, NULL);
		pthread_mutex_lock(&n->lock);
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

/* ------------------------------------------------------------------ the main thread's calls */

int up_net_share(struct up_net *n, int file, const uint64_t *id, const struct up_net_stamp *stamp)
{
	struct net_file f = { .used = 1, .id = { id[0], id[1] }, .stamp = *stamp };
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
	up_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
	return 0;
}

void up_net_pending(struct up_net *n, int file, uint32_t patience_ms)
{
	pthread_mutex_lock(&n->lock);
	n->file[file].pending_ns = patience_ms ? pool_now_ns() + patience_ms * NET_MS : 0;
	up_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
}

void up_net_unshare(struct up_net *n, int file)
{
	struct net_file gone;

	pthread_mutex_lock(&n->lock);
	gone = n->file[file];
	n->claims -= gone.claims;
	n->file[file] = (struct net_file){ 0 };
	up_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
	free(gone.word);
	free(gone.asked_ms);
}

/* Whether half of the slots, for asking or for answers, have been lost for so long that it is not for want of time. */
static int has_failed(const struct up_net *n)
{
	uint64_t now = pool_now_ns();
	uint32_t lost = 0, unsent = 0;

	for (uint32_t i = 0; i < n->layout.ask_slots; i++)
		lost += n->slot[i].state == SLOT_LOST && now - n->slot[i].asked_ns > LOST_NS;
	for (uint32_t i = 0; i < n->layout.serve_slots; i++)
		unsent += n->serving[i] && now - n->serving_ns[i] > LOST_NS;
	return 2 * lost >= n->layout.ask_slots || 2 * unsent >= n->layout.serve_slots;
}

void up_net_counts(struct up_net *n, struct up_net_counts *out)
{
	pthread_mutex_lock(&n->lock);
	*out = n->count;
	out->lost_slots = n->lost;
	out->failed = has_failed(n);
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
		.cpu_short = (uint32_t)n->node[node].cpu_short,
		.late = n->node[node].late,
		.corrupt = n->node[node].corrupt,
	};
	pthread_mutex_unlock(&n->lock);
}

void up_net_rates(struct up_net *n, uint64_t *network, uint64_t *storage)
{
	pthread_mutex_lock(&n->lock);
	*network = n->network.ns_per_byte > 0 ? (uint64_t)(1e9 / n->network.ns_per_byte) : 0;
	*storage = n->storage.ns_per_byte > 0 ? (uint64_t)(1e9 / n->storage.ns_per_byte) : 0;
	pthread_mutex_unlock(&n->lock);
}

void up_net_map(struct up_net *n, int file, uint32_t cells, uint16_t *out)
{
	const struct net_file *f = &n->file[file];

	pthread_mutex_lock(&n->lock);
	for (uint32_t i = 0; i < cells; i++) {
		uint64_t end = f->blocks * (i + 1) / cells, b = f->blocks * i / cells;
		uint16_t w = UP_NET_UNKNOWN;

		end = end > b ? end : b + 1; /* fewer blocks than parts */

		for (; f->used && b < end && w >= UP_NET_NODES; b++) {
			w = f->word[b];
			if (net_keeps(w))
				w = (uint16_t)n->options.me;
			else if (w & UP_NET_COPY) /* who has asked before keeps nothing */
				w = UP_NET_UNKNOWN;
			else if (net_node_of(w) < UP_NET_NODES)
				w = (uint16_t)net_node_of(w);
		}
		out[i] = w < UP_NET_NODES ? w : UP_NET_UNKNOWN;
	}
	pthread_mutex_unlock(&n->lock);
}

/* ------------------------------------------------------------------ start and end */

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
	int err;

	if (!n)
		return -ENOMEM;
	n->pool = pool;
	n->calls = pool->calls;
	n->ring = ring;
	n->options = *options;
	n->holders = 1;
	n->began_ns = pool_now_ns();
	n->block_bytes = pool_chunk_bytes(pool) * options->chunks_per_block;
	up_net_ring_layout(ring, &n->layout);
	n->slot = calloc(n->layout.ask_slots, sizeof(*n->slot));
	n->serving = calloc(n->layout.serve_slots, 1);
	n->serving_ns = calloc(n->layout.serve_slots, sizeof(*n->serving_ns));
	pthread_mutex_init(&n->lock, NULL);
	pthread_mutex_lock(&pool->lock);
	pool->nets++;
	err = pool->net ? EBUSY : 0;
	pool_unlock(pool);
	if (!err && (!n->slot || !n->serving || !n->serving_ns))
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
	if (!err)
		pool->net = n;
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
	up_cond_broadcast(&n->changed);
	up_cond_broadcast(&n->asked);
	up_cond_broadcast(&n->sent);
	pthread_mutex_unlock(&n->lock);
	if (write(n->options.from_fd, &one, sizeof(one)) < 0)
		errno = 0; /* EAGAIN: the counter is full, so the listener is awake anyway */
	pthread_join(n->listener, NULL); /* it waits for nothing; the others may be reading storage */
	net_put(n);
}
