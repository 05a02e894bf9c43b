// SPDX-License-Identifier: Apache-2.0
/*
 * net.c - what all of what lies between nodes stands on: what is told to the transport, the files that are shared, queues,
 * and who holds the whole. It calls none of the other files but ring.c.
 */
#include <stdlib.h>
#include <unistd.h>

#include "service/net/net.h"

int net_tell(struct up_net *n, struct up_net_message *m)
{
	uint64_t one = 1;

	if (n->stop || up_net_put(n->ring, UP_NET_OF_SERVICE, m))
		return 0;
	if (write(n->options.to_fd, &one, sizeof(one)) < 0)
		return 1; /* EAGAIN: the counter is full, so the reader is awake anyway */
	return 1;
}

uint64_t net_block_chunks(const struct up_net *n)
{
	return n->options.chunks_per_block;
}

int net_find_file(const struct up_net *n, const uint64_t id[2])
{
	for (int i = 0; i < POOL_FILES; i++)
		if (n->file[i].used && !n->file[i].changed && n->file[i].id[0] == id[0] &&
		    n->file[i].id[1] == id[1])
			return i;
	return -1;
}

int net_queue(struct net_queue *q, const struct net_request *r)
{
	if (q->head - q->tail >= NET_REQUESTS)
		return 0;
	q->request[q->head++ % NET_REQUESTS] = *r;
	return 1;
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
	if (n->owns_ring)
		up_net_ring_close(n->ring);
	free(n->slot);
	free(n->serving);
	free(n->serving_ns);
	free(n);
	pthread_mutex_lock(&p->lock);
	p->nets--;
	up_cond_broadcast(&p->idle);
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
