// SPDX-License-Identifier: Apache-2.0
/*
 * rates.c - which source brings bytes soonest: how fast each has been while it had enough to do.
 *
 * A small request by itself tells a latency and nothing of a rate: only the time counts during which
 * BUSY_BYTES or more were under way, and what came in it.
 */
#include "service/net/net.h"

#define BUSY_BYTES (1u << 20)
/* A rate is believed when so much has come so; and older bytes count half whenever that has doubled. */
#define BELIEVED_BYTES (16.0 * (1 << 20))

uint64_t net_longest(const struct net_times *t)
{
	uint64_t most = 0;

	for (uint32_t i = 0; i < NET_TIMES && i < t->count; i++)
		if (t->ns[i] > most)
			most = t->ns[i];
	return most;
}

void net_note_time(struct net_times *t, uint64_t ns)
{
	t->ns[t->count++ % NET_TIMES] = ns;
	if (t->count >= 2 * NET_TIMES)
		t->count -= NET_TIMES;
}

static void account(struct net_rate *r, uint64_t now_ns)
{
	if (r->since_ns)
		r->busy_ns += (double)(now_ns - r->since_ns);
	r->since_ns = r->under_way >= BUSY_BYTES ? now_ns : 0;
}

void net_begin(struct net_rate *r, uint64_t bytes, uint64_t now_ns)
{
	r->under_way += bytes;
	account(r, now_ns);
}

void net_end(struct net_rate *r, uint64_t bytes, uint64_t now_ns, int good)
{
	if (r->since_ns && good)
		r->bytes += (double)bytes;
	r->under_way -= bytes;
	account(r, now_ns);
	if (r->bytes >= 2 * BELIEVED_BYTES) {
		r->bytes /= 2;
		r->busy_ns /= 2;
	}
}

uint64_t net_expected_ns(const struct net_rate *r, uint64_t bytes)
{
	if (r->bytes < BELIEVED_BYTES)
		return 0;
	return (uint64_t)((double)(r->under_way + bytes) * r->busy_ns / r->bytes);
}
