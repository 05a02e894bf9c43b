// SPDX-License-Identifier: Apache-2.0
/*
 * rates.c - which source brings bytes soonest, by what large requests have taken lately. A small one tells a latency
 * and nothing of a rate; one for which another node had to read tells of storage.
 */
#include "service/net/net.h"

#define LARGE_BYTES (256u << 10)
/* Requests after which a rate is believed; each newer one counts for so much. */
#define BELIEVED 8u
#define NEWER (1.0 / 8)

uint64_t net_longest(const struct net_times *t)
{
	uint64_t most = 0;

	for (uint32_t i = 0; i < NET_TIMES && i < t->count; i++)
		if (t->ns[i] > most)
			most = t->ns[i];
	return most;
}

uint64_t net_patience(const struct net_times *t, uint64_t least_ns)
{
	uint64_t longest = net_longest(t), patience = longest ? PATIENCE_TIMES * longest : PATIENCE_FIRST_NS;

	patience = patience < PATIENCE_MOST_NS ? patience : PATIENCE_MOST_NS;
	return patience > least_ns ? patience : least_ns;
}

void net_note_time(struct net_times *t, uint64_t ns)
{
	t->ns[t->count++ % NET_TIMES] = ns;
	if (t->count >= 2 * NET_TIMES)
		t->count -= NET_TIMES;
}

void net_note_rate(struct net_rate *r, uint64_t bytes, uint64_t ns)
{
	double one;

	if (bytes < LARGE_BYTES)
		return;
	one = (double)ns / (double)bytes;
	r->ns_per_byte += (one - r->ns_per_byte) * (r->count ? NEWER : 1);
	r->count += r->count < BELIEVED;
}

uint64_t net_expected_ns(const struct net_rate *r, uint64_t bytes)
{
	return r->count < BELIEVED ? 0 : (uint64_t)(r->ns_per_byte * (double)bytes);
}
