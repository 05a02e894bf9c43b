// SPDX-License-Identifier: Apache-2.0
/*
 * serve.c - the threads that answer other nodes: from the pool, or from storage where the pool has not got it.
 *
 * Every request has one answer: the bytes, or a refusal. A slot is taken only when the bytes are there. What
 * is not there is read by these threads, so that other nodes' reads never take more of storage than they.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "service/net/net.h"

/* One node has no more of the slots than this part. */
#define PER_NODE_PART 4u
/* Threads that read storage for others; the rest answers what is there meanwhile. */
#define READ_THREADS 2u
/* What may be served at once after a while in which nothing was: so much of a core's time. */
#define BURST_NS (50 * (int64_t)NET_MS)

/* The one whose reader comes first: those that wait now in the order in which they came. */
static int take(struct net_queue *q, struct net_request *out)
{
	uint64_t due, first = UINT64_MAX;
	uint32_t at = 0;

	while (q->tail != q->head && q->request[q->tail % NET_REQUESTS].m.kind != UP_NET_REQUEST)
		q->tail++;
	for (uint32_t i = q->tail; i != q->head; i++) {
		const struct net_request *r = &q->request[i % NET_REQUESTS];

		due = r->came_ns + (uint64_t)r->m.due_ms * NET_MS;
		if (r->m.kind == UP_NET_REQUEST && due < first) {
			first = due;
			at = i;
		}
	}
	if (first == UINT64_MAX)
		return 0;
	*out = q->request[at % NET_REQUESTS];
	q->request[at % NET_REQUESTS].m.kind = 0; /* its place says nothing any more */
	return 1;
}

/* The next one that this thread may answer; *reads: it has to be read first. */
static int next_request(struct up_net *n, struct net_request *out, int *reads)
{
	*reads = n->reading < READ_THREADS &&
		 (take(&n->wants[UP_NET_DEMAND], out) || take(&n->wants[UP_NET_AHEAD], out));
	n->reading += (uint32_t)*reads;
	return *reads || take(&n->queue[UP_NET_DEMAND], out) || take(&n->queue[UP_NET_AHEAD], out);
}

static void refuse(struct up_net *n, const struct up_net_message *m, enum up_net_status status)
{
	struct up_net_message no = *m;

	no.kind = UP_NET_REFUSE;
	no.status = status;
	pthread_mutex_lock(&n->lock);
	/* A transport that takes nothing now has no use for more answers either. */
	while (!n->stop && !net_tell(n, &no))
		up_cond_wait_until(&n->sent, &n->lock, pool_now_ns() + NET_MS);
	pthread_mutex_unlock(&n->lock);
}

static int take_slot(struct up_net *n, uint32_t node)
{
	uint32_t most = n->layout.serve_slots / PER_NODE_PART, mine = 0;
	int found = -1;

	for (uint32_t i = 0; i < n->layout.serve_slots; i++) {
		mine += n->serving[i] == node % 255 + 1;
		if (!n->serving[i] && found < 0)
			found = (int)i;
	}
	if (found < 0 || mine >= (most ? most : 1))
		return -1;
	n->serving[found] = (uint8_t)(node % 255 + 1);
	n->serving_ns[found] = pool_now_ns();
	return (int)(found + (int)n->layout.ask_slots);
}

/* A slot for an answer, or -1: none became free in time. */
static int wait_for_slot(struct up_net *n, uint32_t node)
{
	uint64_t until;
	int slot;

	pthread_mutex_lock(&n->lock);
	until = pool_now_ns() + net_patience(&n->sends, PATIENCE_FIRST_NS);
	while ((slot = take_slot(n, node)) < 0 && !n->stop && pool_now_ns() < until)
		up_cond_wait_until(&n->sent, &n->lock, until);
	pthread_mutex_unlock(&n->lock);
	return slot;
}

/* It is not there, or not yet: who has asked hears at once that it will take as long as storage does. */
static void say_reading(struct up_net *n, const struct up_net_message *m)
{
	struct up_net_message word = *m;

	word.kind = UP_NET_READING;
	net_tell(n, &word);
	n->count.served_reads++;
}

/* The chunks, pinned, into a slot. */
static enum up_net_status fill_slot(struct up_net *n, int slot, int file, const struct up_net_message *m)
{
	struct up_net_header *h = up_net_slot(n->ring, (uint32_t)slot);
	int64_t length = n->calls->copy(n->pool, file, m->first, m->count, (char *)(h + 1));

	if (length < 0)
		return UP_NET_FAILED;
	*h = (struct up_net_header){
		.file = { m->file[0], m->file[1] },
		.first = m->first,
		.count = (uint32_t)m->count,
		.length = (uint32_t)length,
		.status = UP_NET_OK,
		.serial = m->serial,
		.checksum = up_net_checksum(h + 1, (uint64_t)length),
	};
	return UP_NET_OK;
}

enum whether { NOT_THERE = 0, THERE, COMES, IS_TO_COME };

/* Whether the bytes are to be had without a wait, or come anyway, or are to be read for who asks: what this node keeps, or
 * has just been told to read and not read yet: who comes when that has gone again reads it as well as this node would. What is
 * no request of ours is refused without a wait. */
static enum whether is_there(struct up_net *n, const struct up_net_message *m)
{
	uint64_t send_ns;
	int file, keeps = 0, reads = 0;

	pthread_mutex_lock(&n->lock);
	file = net_find_file(n, m->file);
	if (file >= 0 && (m->count > 1 || m->class_ == UP_NET_AHEAD))
		net_note_given(&n->file[file], m->first / n->options.chunks_per_block);
	if (file >= 0) {
		keeps = !m->copy && net_is_asked_as_keeper(n, file, m->first, m->node);
		reads = keeps || net_is_to_read(n, &n->file[file], m->first);
	}
	send_ns = net_longest(&n->sends);
	pthread_mutex_unlock(&n->lock);
	if (file < 0)
		return THERE;
	switch (n->calls->has(n->pool, file, m->first, m->count, NET_PASSING_MS)) {
	case POOL_HAS:
		return THERE;
	case POOL_HAS_ON_DISK: /* a word to who asks, unless it takes no longer than answers do anyway */
		return n->calls->disk_ns(n->pool) <= send_ns ? THERE : COMES;
	case POOL_HAS_SOON:
		return COMES;
	case POOL_HAD:
		return keeps ? IS_TO_COME : NOT_THERE;
	default:
		return reads ? IS_TO_COME : NOT_THERE;
	}
}

static enum up_net_status serve(struct up_net *n, const struct net_request *r, char **buffer)
{
	const struct up_net_message *m = &r->m;
	uint64_t until = r->came_ns + (uint64_t)m->useful_ms * NET_MS, chunk = pool_chunk_bytes(n->pool);
	struct up_net_message sends = *m;
	enum up_net_status status;
	int file, slot, ret, is_it, looked_at;

	if (pool_now_ns() >= until)
		return UP_NET_LATE;
	if (!m->count || m->count > n->layout.slot_bytes / chunk)
		return UP_NET_ABSENT;
	pthread_mutex_lock(&n->lock);
	file = net_find_file(n, m->file);
	pthread_mutex_unlock(&n->lock);
	if (file < 0)
		return UP_NET_ABSENT;
	ret = n->calls->pin(n->pool, file, m->first, m->count, buffer, until);
	if (ret)
		return ret == -ENOENT ? UP_NET_ABSENT : ret == -EBUSY ? UP_NET_BUSY : UP_NET_FAILED;
	/* What is pinned keeps its number; before, that may have become another file's. */
	pthread_mutex_lock(&n->lock);
	is_it = net_find_file(n, m->file) == file;
	looked_at = n->file[file].looked_at;
	pthread_mutex_unlock(&n->lock);
	if (is_it && !looked_at) { /* what was read while no transport was there nobody has compared */
		net_was_read(n, file, n->pool->file[file].source.given, 0, 0);
		pthread_mutex_lock(&n->lock);
		is_it = net_find_file(n, m->file) == file;
		n->file[file].looked_at |= is_it;
		pthread_mutex_unlock(&n->lock);
	}
	slot = is_it ? wait_for_slot(n, m->node) : -1;
	status = !is_it ? UP_NET_ABSENT : slot < 0 ? UP_NET_BUSY : fill_slot(n, slot, file, m);
	sends.length = status == UP_NET_OK ? up_net_slot(n->ring, (uint32_t)slot)->length : 0;
	n->calls->unpin(n->pool, file, m->first, m->count, sends.length);
	if (status != UP_NET_OK && slot < 0)
		return status;
	sends.kind = UP_NET_SEND;
	sends.slot = (uint32_t)slot;
	sends.status = status;
	pthread_mutex_lock(&n->lock);
	if (status != UP_NET_OK || !net_tell(n, &sends)) {
		n->serving[slot - (int)n->layout.ask_slots] = 0;
		up_cond_broadcast(&n->sent);
		status = status == UP_NET_OK ? UP_NET_BUSY : status;
	} else {
		n->node[m->node].to_bytes += sends.length;
		n->count.to_bytes += sends.length;
	}
	pthread_mutex_unlock(&n->lock);
	return status;
}

static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* Whether these threads have used what they may of the CPUs, which are the job's. With the lock. */
static int has_used_its_share(struct up_net *n)
{
	uint64_t now = pool_now_ns();
	int64_t more = (int64_t)((now - n->credited_ns) * n->options.serve_percent / 100);

	if (!n->options.serve_percent)
		return 0;
	n->serve_credit_ns = more >= BURST_NS - n->serve_credit_ns ? BURST_NS : n->serve_credit_ns + more;
	n->credited_ns = now;
	return n->serve_credit_ns < 0;
}

void *net_serve_loop(void *arg)
{
	struct up_net *n = arg;
	struct net_request r;
	size_t room = pool_buffer_room(n->pool);
	char *buffer = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	pthread_mutex_lock(&n->lock);
	while (!n->stop) {
		enum up_net_status status = UP_NET_BUSY;
		uint64_t began_ns = cpu_ns();
		enum whether there;
		int reads;

		if (!next_request(n, &r, &reads)) {
			up_cond_wait(&n->asked, &n->lock);
			continue;
		}
		if (has_used_its_share(n)) {
			n->count.declined++;
			n->reading -= (uint32_t)reads;
			pthread_mutex_unlock(&n->lock);
			refuse(n, &r.m, UP_NET_BUSY);
			pthread_mutex_lock(&n->lock);
			continue;
		}
		pthread_mutex_unlock(&n->lock);
		there = reads ? THERE : is_there(n, &r.m);
		if (there == COMES || there == IS_TO_COME) {
			pthread_mutex_lock(&n->lock);
			say_reading(n, &r.m);
			if (net_queue(&n->wants[r.m.class_], &r))
				continue;
			pthread_mutex_unlock(&n->lock);
		} else if (there == NOT_THERE) {
			status = UP_NET_ABSENT;
		}
		if (there == THERE && buffer != MAP_FAILED)
			status = serve(n, &r, &buffer);
		if (status != UP_NET_OK)
			refuse(n, &r.m, status);
		pthread_mutex_lock(&n->lock);
		n->count.serve_cpu_ns += cpu_ns() - began_ns;
		n->serve_credit_ns -= (int64_t)(cpu_ns() - began_ns);
		if (reads) {
			n->reading--;
			up_cond_signal(&n->asked);
		}
	}
	pthread_mutex_unlock(&n->lock);
	if (buffer != MAP_FAILED)
		munmap(buffer, room);
	net_put(n);
	return NULL;
}
