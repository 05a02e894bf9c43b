// SPDX-License-Identifier: Apache-2.0
/*
 * slowfs_link.c - the link that reads pass, and the delay of replies about names
 */
#define FUSE_USE_VERSION 35
#include <stdlib.h>

#include "slowfs.h"

/* Put a read of size_bytes on the link: it leaves the pipe after everything
 * that was queued before it, and is due one latency later. */
void link_queue(struct pending *p)
{
	uint64_t start = now_ns();

	pthread_mutex_lock(&bed.lock);
	if (start < bed.pipe_free_ns)
		start = bed.pipe_free_ns;
	bed.pipe_free_ns = start;
	if (bed.bandwidth)
		bed.pipe_free_ns += p->size_bytes * NS_PER_SECOND / bed.bandwidth;
	uint64_t due_ns = bed.pipe_free_ns + bed.latency_us * 1000;

	bed.count.requests++;
	bed.count.bytes += p->size_bytes;
	if (p->size_bytes > bed.count.largest_request_bytes)
		bed.count.largest_request_bytes = p->size_bytes;
	if (++bed.in_flight > bed.count.most_in_flight)
		bed.count.most_in_flight = bed.in_flight;
	pthread_mutex_unlock(&bed.lock);
	queue_put(&bed.reads, &p->due, due_ns);
}

void read_give(struct due *one)
{
	struct pending *p = (struct pending *)one;
	struct fuse_bufvec buf = FUSE_BUFVEC_INIT(p->size_bytes);
	int err;

	/* Before the reply: who has it must not find it counted any more. */
	pthread_mutex_lock(&bed.lock);
	bed.in_flight--;
	pthread_mutex_unlock(&bed.lock);

	/* fd -> pipe -> /dev/fuse: one copy, made by the kernel */
	buf.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK | FUSE_BUF_FD_RETRY;
	buf.buf[0].fd = p->fd;
	buf.buf[0].pos = p->offset;
	err = fuse_reply_data(p->req, &buf, FUSE_BUF_SPLICE_MOVE);
	if (err) {
		pthread_mutex_lock(&bed.lock);
		bed.count.errors++;
		pthread_mutex_unlock(&bed.lock);
	}
	free(p);
}

void answer_send(struct answer *a)
{
	switch (a->kind) {
	case ANSWER_ERROR:
		fuse_reply_err(a->req, a->err);
		break;
	case ANSWER_ENTRY:
		fuse_reply_entry(a->req, &a->entry);
		break;
	case ANSWER_ATTRIBUTES:
		fuse_reply_attr(a->req, &a->st, a->entry.attr_timeout);
		break;
	case ANSWER_OPEN:
		if (fuse_reply_open(a->req, &a->fi))
			a->close(&a->fi);
		break;
	case ANSWER_LISTING:
		fuse_reply_buf(a->req, a->data, a->data_bytes);
		break;
	}
	free(a->data);
}

void answer_give(struct due *one)
{
	answer_send((struct answer *)one);
	free(one);
}

void answer(struct answer a)
{
	struct answer *queued = bed.lookup_us ? malloc(sizeof(*queued)) : NULL;

	if (!queued) {
		answer_send(&a);
		return;
	}
	*queued = a;
	queue_put(&bed.answers, &queued->due, now_ns() + bed.lookup_us * 1000);
}

void answer_error(fuse_req_t req, int err)
{
	answer((struct answer){ .req = req, .kind = ANSWER_ERROR, .err = err });
}

void count_one(uint64_t *counter)
{
	pthread_mutex_lock(&bed.lock);
	(*counter)++;
	pthread_mutex_unlock(&bed.lock);
}
