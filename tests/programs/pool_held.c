// SPDX-License-Identifier: Apache-2.0
/*
 * pool_held DIRECTORY CHUNK_BYTES - the worst moments of the pool, one by one, by gates and not by
 * chance: a UFFDIO_CONTINUE (of 2 MiB: a MADV_COLLAPSE) stands still while the page that it is about to map would leave the pool, or while
 * the process, or what lies at its address, becomes another. The file's memory holds zeros at that
 * moment (it is filled in place, as with huge pages): whoever breaks the rule reads them.
 */
#define _GNU_SOURCE
#include "pool_model.h"

#define PATIENCE 3000 /* yields, in which what must not happen would */

static struct peer *const a = &peer[0];

static void map_file(struct peer *p, int f)
{
	struct region *r = &p->region[0];
	int fds[2] = { file[f].fd, file[f].memfd };

	*r = (struct region){ .used = 1, .pooled = 1, .told = 1, .file = f, .id = (uint32_t)ids++ };
	r->c = (struct command){ .op = MAP, .length = whole_pages(file[f].bytes),
				 .size = file[f].bytes, .salt = file[f].salt };
	send_command(p, 1, &r->c, fds, 2);
	await(p, 1);
}

static void tell_pool(struct peer *p, int f)
{
	CHECK(!up_pool_map(pool, p->slot, (uint32_t)ids, file[f].number, (uintptr_t)address_of(0),
			   whole_pages(file[f].bytes), 0));
}

static void command(struct peer *p, int thread, enum op op)
{
	struct command c = { .op = op, .pages = 1, .step = 1 };

	send_command(p, thread, &c, NULL, 0);
}

static void do_now(struct peer *p, enum op op)
{
	command(p, 1, op);
	await(p, 1);
}

/* Page 0 of file 0 is in the pool, and thread 0 of `a` touches it; the page is not mapped yet. */
static void hold_in_continue(void)
{
	set_gates(0);
	tell_pool(a, 0);
	map_file(a, 0);
	do_now(a, TOUCH);
	do_now(a, REARM);
	set_gates(1 << CONTINUE);
	command(a, 0, TOUCH);
	while (!is_held(CONTINUE))
		sched_yield();
}

/* Page 0 of a file is being filled: its memory is there, and holds zeros. */
static void hold_in_read(int f, unsigned int others)
{
	struct up_warm_job job = { .id = 1, .fd = file[f].number, .length = PAGE };
	struct up_warm_result result;
	int there = 0;

	set_gates(1 << READ | others);
	CHECK(!up_pool_submit(pool, &job));
	while (!there && !is_held(READ))
		there = up_pool_reap(pool, &result, 1);
}

/* What stands in CONTINUE goes on, and has done it: it wakes who touches, or ends. */
static void let_continue(void)
{
	set_gates(1 << READ);
	while (is_held(CONTINUE))
		sched_yield();
	yield(PATIENCE);
}

static int sleeps(int tid)
{
	char path[64], state = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	f = fopen(path, "re");
	if (!f)
		return 0;
	if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
		state = 0;
	fclose(f);
	return state == 'S';
}

/* A call that must wait for what stands in CONTINUE, and does not wait for READ. */
static void call_under_gates(void (*call)(struct up_pool *, int, uint32_t), int client, uint32_t n)
{
	struct waiting_call w = { call, client, n, 0 };
	int asleep = 0, left;
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, call_it, &w));
	yield(PATIENCE);
	/* until it has come back, or waits: asleep however often one looks */
	while ((left = pthread_tryjoin_np(thread, NULL)) && asleep < 200) {
		asleep = sleeps(atomic_load(&w.tid)) ? asleep + 1 : 0;
		yield(10);
	}
	if (left) {
		set_gates(1 << READ);
		CHECK(!pthread_join(thread, NULL));
	}
}

static void finish(void)
{
	await_all(a);
	do_now(a, UNMAP);
	for (uint32_t id = 1; id <= ids; id++)
		up_pool_unmap(pool, a->slot, id);
	up_pool_budget(pool, most, 0);
	for (int i = 0; i < FILES; i++) { /* nothing of them is there the next time */
		while (up_pool_forget(pool, file[i].number))
			look_after_pool();
		close(file[i].fd);
		close(file[i].memfd);
		open_file(i);
	}
}

/* ------------------------------------------------------------------ the moments */

static void a_chunk_that_is_being_mapped_stays(void)
{
	struct up_pool_victim victim = { .file = (uint32_t)file[0].number, .chunks = 1 };
	struct up_warm_job job = { .id = 1, .fd = file[1].number, .length = PAGE };
	struct up_warm_result result;

	set_gates(0);
	CHECK(!up_pool_submit(pool, &job)); /* another one, which may go */
	while (!up_pool_reap(pool, &result, 1))
		sched_yield();
	hold_in_continue();
	usleep(10000); /* the touch is older than HOLD_MS now, and only the pin is left */
	up_pool_victims(pool, &victim, 1);
	up_pool_budget(pool, 0, 0);
	while (up_pool_used(pool) > chunk)
		sched_yield();
	up_pool_budget(pool, most, 0);
	hold_in_read(0, 1 << CONTINUE);
	let_continue();
	await(a, 0);
	finish();
}

static void a_chunk_that_is_being_filled_is_not_mapped(void)
{
	set_gates(0);
	tell_pool(a, 2);
	map_file(a, 2);
	hold_in_read(2, 0);
	command(a, 0, TOUCH);
	yield(PATIENCE);
	finish();
}

static void unmap_in_pool(struct up_pool *p, int client, uint32_t id)
{
	up_pool_unmap(p, client, id);
}

static void map_in_pool(struct up_pool *p, int client, uint32_t unused)
{
	(void)p, (void)client, (void)unused;
	tell_pool(a, 1);
}

/* What is mapped late does not go into the mapping that has come in its place: `late`: before the
 * pool has been told that the first one is gone. */
static void another_mapping_comes_in_its_place(int late)
{
	uint32_t old;

	hold_in_continue();
	old = a->region[0].id;
	do_now(a, DETACH); /* which wakes the thread that waits there */
	await(a, 0);
	do_now(a, UNMAP);
	hold_in_read(1, 1 << CONTINUE);
	if (!late)
		call_under_gates(unmap_in_pool, a->slot, old);
	call_under_gates(map_in_pool, 0, 0);
	map_file(a, 1);
	let_continue();
	command(a, 0, TOUCH);
	yield(PATIENCE);
	finish();
}

/* Nor into another process, whose userfaultfd has got the number of the first one's. */
static void another_process_comes_in_its_place(void)
{
	struct reply reply;

	hold_in_continue();
	/* First: the pool opens the file now, and takes numbers that are free. */
	hold_in_read(1, 1 << CONTINUE);
	CHECK(!kill(a->pid, SIGKILL));
	for (int i = 0; i < THREADS; i++) {
		while (receive_with(a->socket[i], &reply, sizeof(reply), NULL, 0))
			;
		close(a->socket[i]);
	}
	call_under_gates(leave, a->slot, 0);
	be_born(a);
	tell_pool(a, 1);
	map_file(a, 1);
	let_continue();
	command(a, 0, TOUCH);
	yield(PATIENCE);
	finish();
}

static void join_pool(struct up_pool *p, int client, uint32_t unused)
{
	(void)client, (void)unused;
	a->slot = up_pool_join(p, dup(a->uffd), a->pid, ring);
	CHECK(a->slot >= 0);
}

/* Nor into the same process, when that runs another program (here: has a new place in the pool) and
 * the old connection has not been seen to end. */
static void another_program_comes_in_its_place(void)
{
	int old = a->slot;

	hold_in_continue();
	do_now(a, DETACH);
	await(a, 0);
	do_now(a, UNMAP);
	hold_in_read(1, 1 << CONTINUE);
	call_under_gates(join_pool, 0, 0);
	tell_pool(a, 1);
	map_file(a, 1);
	let_continue();
	command(a, 0, TOUCH);
	yield(PATIENCE);
	set_gates(0);
	up_pool_leave(pool, old);
	finish();
}

/* An agent that found the service silent has written page 0 and is late to map it: meanwhile the page
 * was filled, evicted, and is about to be filled again. */
static void an_agent_maps_late_what_it_has_read(void)
{
	struct up_pool_victim victim = { .file = (uint32_t)file[0].number, .chunks = 1 };
	struct up_warm_job job = { .id = 1, .length = PAGE };
	struct uffdio_continue late = { .range = { (uintptr_t)address_of(0), PAGE } };
	struct up_warm_result result;

	set_gates(0);
	tell_pool(a, 0);
	map_file(a, 0);
	__atomic_fetch_add(&ring->stand_ins, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < 2; i++) { /* the other one is the one that a budget keeps */
		job.fd = file[i].number;
		CHECK(!up_pool_submit(pool, &job));
		while (!up_pool_reap(pool, &result, 1))
			sched_yield();
	}
	up_pool_victims(pool, &victim, 1);
	up_pool_budget(pool, 0, 0);
	while (up_pool_used(pool) > chunk)
		sched_yield();
	up_pool_budget(pool, most, 0);
	hold_in_read(0, 0);
	ioctl(a->uffd, UFFDIO_CONTINUE, &late); /* or nothing is there to be mapped */
	command(a, 0, TOUCH);
	yield(PATIENCE);
	__atomic_fetch_add(&ring->stand_ins, 1, __ATOMIC_SEQ_CST);
	finish();
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	begin_model(argv[1], 1, (uint32_t)strtoul(argv[2], NULL, 10), 1);
	a_chunk_that_is_being_filled_is_not_mapped();
	a_chunk_that_is_being_mapped_stays();
	an_agent_maps_late_what_it_has_read();
	another_process_comes_in_its_place();
	another_program_comes_in_its_place();
	another_mapping_comes_in_its_place(0);
	another_mapping_comes_in_its_place(1);
	end_model();
	puts("all as it should be");
	return 0;
}
