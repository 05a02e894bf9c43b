// SPDX-License-Identifier: Apache-2.0
/*
 * pool_stress DIRECTORY [SEED] - the node's page pool (csrc/service/pool/) under load, alone and
 * without Python, so that a sanitizer sees nothing else. `make asan tsan` builds it with them.
 *
 * Everything that is found wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include "pool_service.h"

#define CLIENTS 5
#define READERS 2

/* ------------------------------------------------------------------ everything at once */

static void one_life(struct service *s, uint64_t *state)
{
	struct client c = join(s);
	int views = 1 + (int)below(state, 6), orphan = below(state, 4) == 0;

	for (int n = 0; n < views; n++) {
		pthread_t reader[READERS];
		struct view v = { 0 };
		int detached;

		while (!v.at) {
			struct file *f = &s->file[below(state, FILES)];

			pthread_mutex_lock(&s->lock);
			if (f->number >= 0) {
				uint64_t pages = whole_pages(f->bytes) / PAGE, first = below(state, pages);

				v = map(s, &c, f, first * PAGE, (1 + below(state, pages - first)) * PAGE);
			}
			pthread_mutex_unlock(&s->lock);
		}
		for (int i = 0; i < READERS; i++)
			CHECK(!pthread_create(&reader[i], NULL, read_it, &v));
		for (uint64_t i = 0, most = 1 + below(state, 40); i < most; i++)
			check_word(&v, below(state, v.length) & ~7ull);
		if (orphan && n == views / 2) {
			pthread_mutex_lock(&s->lock);
			up_pool_orphan(s->pool, c.slot);
			pthread_mutex_unlock(&s->lock);
			up_ring_destroy(c.ring); /* nobody may write there from now on */
			c.ring = NULL;
		}
		detached = below(state, 2) != 0;
		if (detached) /* under its readers, as when the service dies */
			detach(c.uffd, v.file->fd, v.at, v.length, v.offset);
		for (uint64_t i = 0; detached && i < 20; i++)
			check_word(&v, below(state, v.length) & ~7ull);
		__atomic_store_n(&v.stop, 1, __ATOMIC_RELEASE);
		for (int i = 0; i < READERS; i++)
			pthread_join(reader[i], NULL);
		pthread_mutex_lock(&s->lock);
		unmap(s, &c, &v, detached);
		pthread_mutex_unlock(&s->lock);
	}
	leave(s, &c);
}

struct living {
	struct service *service;
	uint64_t state;
	int lives;
};

static void *live_often(void *cookie)
{
	struct living *l = cookie;

	for (int i = 0; i < l->lives; i++)
		one_life(l->service, &l->state);
	return NULL;
}

/* To the disk tier, and from there: of all lives, one may be too short. */
static uint64_t spilled_bytes, unspilled_bytes;

static void test_lives(uint32_t chunk, int huge, int lives, int spills)
{
	struct living living[CLIENTS];
	pthread_t thread[CLIENTS];
	uint64_t real, used;
	struct service s;

	begin(&s, 7 * chunk, chunk, huge, 1);
	if (spills)
		spill(&s);
	for (int i = 0; i < FILES; i++)
		open_file(&s, i, some_size(&s));
	run(&s);
	for (int i = 0; i < CLIENTS; i++) {
		living[i] = (struct living){ &s, draw(&seed) | 1, lives };
		CHECK(!pthread_create(&thread[i], NULL, live_often, &living[i]));
	}
	for (int i = 0; i < CLIENTS; i++)
		pthread_join(thread[i], NULL);
	halt(&s);
	while (seen(&s.told) < seen(&s.jobs)) { /* every job is told */
		choose_victims(&s); /* some wait for that */
		take_results(&s);
	}
	do { /* of one moment: something may still be evicted */
		used = up_pool_used(s.pool);
		real = 0;
		for (int i = 0; i < FILES; i++)
			real += real_bytes(s.file[i].memfd);
	} while (used != up_pool_used(s.pool));
	CHECK(real <= used); /* what the kernel has is in the books */
	CHECK(seen(&s.forgotten) && seen(&s.evicted) && !seen(&s.failed));
	for (int i = 0; i < FILES; i++)
		while (!close_file(&s, i)) /* a fill or a punch may be under way */
			sched_yield();
	CHECK(up_pool_used(s.pool) == 0);
	if (s.spill_fd >= 0) {
		struct up_spill_counts counts;

		up_pool_spill_counts(s.pool, &counts);
		spilled_bytes += counts.written_bytes;
		unspilled_bytes += counts.read_bytes;
	}
	end(&s);
}

/* ------------------------------------------------------------------ the end, and the limits */

static void test_destroy_with_work_under_way(void)
{
	pthread_t reader[READERS];
	struct service s;
	struct client c;
	struct view v;
	int jobs = 0;

	begin(&s, 8 * CHUNK, CHUNK, 0, 0);
	for (int i = 0; i < FILES; i++)
		open_file(&s, i, 40 * CHUNK + 77);
	c = join(&s);
	v = map(&s, &c, &s.file[1], 3 * PAGE, 39 * CHUNK);
	for (int i = 0; i < READERS; i++)
		CHECK(!pthread_create(&reader[i], NULL, read_it, &v));
	for (int full = 0; !full; jobs++) {
		struct up_warm_job job = { .id = 1, .fd = s.file[jobs % FILES].number,
					   .length = 40 * CHUNK };

		full = up_pool_submit(s.pool, &job) == -EAGAIN;
	}
	CHECK(jobs == 1025);
	check_word(&v, 20 * CHUNK);
	up_pool_destroy(s.pool);
	detach(c.uffd, s.file[1].fd, v.at, v.length, v.offset);
	for (int i = 0; i < 50; i++)
		check_word(&v, below(&seed, v.length) & ~7ull);
	__atomic_store_n(&v.stop, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < READERS; i++)
		pthread_join(reader[i], NULL);
	munmap(v.at, v.length);
	up_ring_destroy(c.ring);
	close(c.ring_fd);
	close(c.uffd);
	s.pool = NULL;
	end(&s);
}

/* More files, and more processes, than there are places for. */
static void test_full(void)
{
	enum { NUMBERS = 5000, FILES_MAX = 256, CLIENTS_MAX = 2048 };
	int memfd[FILES_MAX], file[FILES_MAX], none, ring_fd, uffd = -1, slot = 0, first = -1;
	struct rlimit limit;
	struct up_ring *ring;
	struct service s;

	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = limit.rlim_max < NUMBERS ? limit.rlim_max : NUMBERS;
	CHECK(limit.rlim_cur == NUMBERS && !setrlimit(RLIMIT_NOFILE, &limit));
	begin(&s, 8 * CHUNK, CHUNK, 0, 0);
	open_file(&s, 0, 2 * CHUNK);
	for (int i = 1; i < FILES_MAX; i++) {
		file[i] = up_pool_file(s.pool, s.file[0].fd, 2 * CHUNK, 0, NULL, &memfd[i]);
		CHECK(file[i] > 0);
	}
	CHECK(up_pool_file(s.pool, s.file[0].fd, 2 * CHUNK, 0, NULL, &none) == -ENFILE);
	for (int i = 1; i < FILES_MAX; i++) {
		CHECK(!up_pool_forget(s.pool, file[i]));
		close(memfd[i]);
	}
	CHECK(up_pool_forget(s.pool, file[1]) == -EBUSY);
	CHECK(!up_ring_create(&ring, &ring_fd));
	CHECK(up_pool_join(s.pool, -1, 0, ring) == -EBADF);
	CHECK(up_pool_join(s.pool, s.file[0].fd, 0, ring) == -EPERM); /* nothing to poll */
	for (int i = 0; i <= CLIENTS_MAX; i++) {
		uffd = open_pool_uffd();
		slot = up_pool_join(s.pool, uffd, 0, ring);
		CHECK((slot < 0) == (i == CLIENTS_MAX));
		first = first < 0 ? slot : first;
	}
	CHECK(slot == -ENOSPC);
	up_pool_leave(s.pool, first);
	CHECK(up_pool_join(s.pool, uffd, 0, ring) == first);
	up_pool_leave(s.pool, first);
	/* one that nobody initialized has only an error to tell */
	CHECK(up_pool_join(s.pool, (int)syscall(SYS_userfaultfd, O_CLOEXEC), 0, ring) >= 0);
	end(&s); /* with clients */
	up_pool_destroy(NULL);
	up_ring_destroy(ring);
	close(ring_fd);
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		fprintf(stderr, "usage: pool_stress DIRECTORY [SEED]\n");
		return 2;
	}
	directory = argv[1];
	seed = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1) * 0x9E3779B97F4A7C15ull | 1;
	test_lives(CHUNK, 0, 8, 0);
	test_lives(CHUNK, 0, 8, 1);
	test_lives(CHUNK, 1, 4, 0); /* in place, as huge pages are filled */
	test_lives(CHUNK, 1, 4, 1);
	test_lives(2u << 20, 1, 1, 0);
	test_lives(2u << 20, 1, 1, 1);
	CHECK(spilled_bytes && unspilled_bytes);
	test_destroy_with_work_under_way();
	test_full();
	puts("all as it should be");
	return 0;
}
