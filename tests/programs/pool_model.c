// SPDX-License-Identifier: Apache-2.0
/*
 * pool_model DIRECTORY SEED ROUNDS CHUNK_BYTES HUGE - random calls of the pool and of processes that
 * use it, with its threads stopped in the middle of theirs, against a model: what is mapped where,
 * and the file's words. Every word that anybody reads is checked.
 *
 * The seed decides what is called (how far the threads have come by then, the machine). The last
 * line is JSON: what has happened how often.
 */
#define _GNU_SOURCE
#include "pool_model.h"

static void forget_region(struct region *r)
{
	file[r->file].regions--;
	r->used = r->pooled = 0;
}

static void map_one(struct peer *p, int thread)
{
	uint32_t n = (uint32_t)below(&state, REGIONS), old = 0;
	struct region *r = &p->region[n];
	struct command c = { .op = UNMAP, .region = n };
	int f = (int)below(&state, FILES), fds[2] = { file[f].fd, file[f].memfd };
	uint64_t pages = whole_pages(file[f].bytes) / PAGE, first = below(&state, pages);
	uint64_t huge = (2u << 20) / PAGE;

	if (below(&state, 2))
		first -= first % huge; /* as huge pages can be mapped */
	await_all(p);
	if (r->used) {
		send_command(p, thread, &c, NULL, 0);
		await(p, thread);
		old = r->told ? r->id : 0;
		if (old && below(&state, 2)) { /* or the pool hears of it after what follows */
			wait_in(up_pool_unmap, p->slot, old);
			old = 0;
		}
		forget_region(r);
		met.unmaps++;
	}
	*r = (struct region){ .used = 1, .pooled = 1, .told = 1, .file = f, .id = (uint32_t)ids++ };
	r->c = (struct command){ .op = MAP, .region = n, .offset = first * PAGE,
				 .length = (1 + below(&state, pages - first)) * PAGE,
				 .size = file[f].bytes, .salt = file[f].salt };
	file[f].regions++;
	CHECK(!up_pool_map(pool, p->slot, r->id, file[f].number, (uintptr_t)address_of(n),
			   r->c.length, r->c.offset));
	send_command(p, thread, &r->c, fds, 2);
	await(p, thread);
	if (old) {
		wait_in(up_pool_unmap, p->slot, old);
		met.late++;
	}
	met.maps++;
}

static struct region *some_region(struct peer *p)
{
	struct region *r = &p->region[below(&state, REGIONS)];

	return r->used ? r : NULL;
}

static void touch_or_rearm(struct peer *p, int thread, enum op op)
{
	struct region *r = some_region(p);
	struct command c = { .op = op };
	uint64_t pages;

	if (!r || p->busy[thread])
		return;
	pages = r->c.length / PAGE;
	c.region = r->c.region;
	c.first = below(&state, pages);
	c.pages = 1 + below(&state, pages - c.first);
	c.step = below(&state, 2) ? 1 : 1 + below(&state, 90);
	if (below(&state, 3) == 0)
		c.pages = 1;
	send_command(p, thread, &c, NULL, 0);
	met.touches++;
}

/* Under the other thread's touches; the gates stay as they are until the pool is told. */
static void detach_one(struct peer *p, int thread)
{
	struct region *r = some_region(p);
	struct command c = { .op = DETACH };
	struct reply reply;

	if (!r || !r->pooled || p->busy[thread])
		return;
	c.region = r->c.region;
	send_command(p, thread, &c, NULL, 0);
	CHECK(receive_with(p->socket[thread], &reply, sizeof(reply), NULL, 0));
	p->busy[thread] = 0;
	r->pooled = r->told = 0;
	wait_in(up_pool_unmap, p->slot, r->id);
	met.detaches++;
}

static void fork_one(struct peer *p, int thread)
{
	struct command c = { .op = FORK, .join = below(&state, 3) != 0 };

	if (p->busy[thread])
		return;
	send_command(p, thread, &c, NULL, 0);
	met.forks++;
}

/* Whatever its threads are doing. */
static void kill_one(struct peer *p)
{
	struct reply reply;

	/* a child of its own would go on with its commands */
	await_all(p);
	touch_or_rearm(p, 0, TOUCH);
	set_gates((unsigned int)below(&state, 1 << GATES));
	touch_or_rearm(p, 1, TOUCH);
	CHECK(!kill(p->pid, SIGKILL));
	for (int i = 0; i < THREADS; i++) {
		while (receive_with(p->socket[i], &reply, sizeof(reply), NULL, 0))
			CHECK(!reply.wrong);
		close(p->socket[i]);
	}
	wait_in(leave, p->slot, 0);
	for (int i = 0; i < REGIONS; i++)
		if (p->region[i].used)
			forget_region(&p->region[i]);
	be_born(p);
	met.kills++;
}

static void change_pool(void)
{
	int f = (int)below(&state, FILES);
	struct up_warm_job job = { .id = 1, .fd = file[f].number, .offset = below(&state, file[f].bytes),
				   .length = 1 + below(&state, 6 * chunk), .record = (uint32_t)below(&state, 2) };

	look_after_pool();
	switch (below(&state, 5)) {
	case 0 ... 2:
		met.fills += !up_pool_submit(pool, &job);
		break;
	case 3:
		up_pool_budget(pool, below(&state, most + 1), 0);
		break;
	case 4:
		if (file[f].regions || up_pool_forget(pool, file[f].number))
			break; /* -EBUSY: a thread stands in the middle of it */
		close(file[f].fd);
		close(file[f].memfd);
		open_file(f); /* other words in the same place */
		met.forgets++;
		break;
	}
}

/* Of all files at one moment: while a fill goes on, one that was evicted after it was asked and one
 * that was filled before would count together. Nothing changed between two rounds that agree. */
static uint64_t all_real_bytes(void)
{
	uint64_t before[FILES] = { 0 }, now[FILES], sum;

	for (;;) {
		sum = 0;
		for (int i = 0; i < FILES; i++)
			sum += now[i] = real_bytes(file[i].memfd);
		if (!memcmp(before, now, sizeof(now)))
			return sum;
		memcpy(before, now, sizeof(now));
	}
}

static void one_round(void)
{
	int touching = 0;

	set_gates((unsigned int)(below(&state, 1 << GATES) & below(&state, 1 << GATES)));
	for (int i = 0; i < PEERS; i++)
		if (below(&state, 3)) {
			touch_or_rearm(&peer[i], (int)below(&state, THREADS),
				       below(&state, 4) ? TOUCH : REARM);
			touching = 1;
		}
	/* the gate: until somebody stands there, or nobody is going to */
	while (touching && !somebody_is_held()) {
		touching = 0;
		for (int i = 0; i < PEERS * THREADS; i++)
			touching |= peer[i / THREADS].busy[i % THREADS] &&
				    !is_readable(peer[i / THREADS].socket[i % THREADS]);
		look_after_pool();
		sched_yield();
	}
	for (uint64_t i = 1 + below(&state, 4); i > 0; i--) {
		struct peer *p = &peer[below(&state, PEERS)];
		int thread = (int)below(&state, THREADS);

		switch (below(&state, 16)) {
		case 0 ... 2:
			map_one(p, thread);
			break;
		case 3 ... 5:
			detach_one(p, thread);
			break;
		case 6:
			fork_one(p, thread);
			break;
		case 7:
			if (below(&state, 2))
				kill_one(p);
			break;
		case 8 ... 10:
			touch_or_rearm(p, thread, TOUCH);
			break;
		default:
			change_pool();
		}
	}
	for (int i = 0; i < PEERS; i++)
		await_all(&peer[i]);
	CHECK(all_real_bytes() <= most);
}

int main(int argc, char **argv)
{
	struct up_pool_counts counts;

	if (argc != 6)
		return 2;
	begin_model(argv[1], strtoull(argv[2], NULL, 10), (uint32_t)strtoul(argv[4], NULL, 10),
		    (uint32_t)strtoul(argv[5], NULL, 10));
	for (uint64_t i = strtoull(argv[3], NULL, 10); i > 0; i--)
		one_round();
	counts = end_model();
	printf("{\"words\": %llu, \"touches\": %llu, \"maps\": %llu, \"unmaps\": %llu, "
	       "\"told_late\": %llu, \"detaches\": %llu, \"forks\": %llu, \"children_joined\": %llu, "
	       "\"kills\": %llu, \"fills\": %llu, \"files_forgotten\": %llu, \"evicted_bytes\": %llu, "
	       "\"held_in_read\": %llu, \"held_in_punch\": %llu, \"held_in_continue\": %llu}\n",
	       (unsigned long long)words, (unsigned long long)met.touches,
	       (unsigned long long)met.maps, (unsigned long long)met.unmaps,
	       (unsigned long long)met.late, (unsigned long long)met.detaches,
	       (unsigned long long)met.forks, (unsigned long long)met.joins,
	       (unsigned long long)met.kills, (unsigned long long)met.fills,
	       (unsigned long long)met.forgets, (unsigned long long)counts.evicted_bytes,
	       (unsigned long long)gate.met[READ], (unsigned long long)gate.met[PUNCH],
	       (unsigned long long)gate.met[CONTINUE]);
	return 0;
}
