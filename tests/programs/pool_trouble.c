// SPDX-License-Identifier: Apache-2.0
/*
 * pool_trouble DIRECTORY - what the node's page pool does when it cannot serve: the file cannot be
 * read, its memory cannot be written, the budget is too small, nobody takes its events. The reader
 * waits and sees nothing wrong, and the main thread is told. Built and run as pool_stress is.
 */
#define _GNU_SOURCE
#include "pool_service.h"

#define THREADS 5

struct stranded {
	const char *at;
	uint64_t word;
	int done;
};

static void *touch_once(void *cookie)
{
	struct stranded *t = cookie;

	memcpy(&t->word, t->at, sizeof(t->word));
	__atomic_store_n(&t->done, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void check_bytes(const struct view *v, uint64_t at, uint64_t found)
{
	uint64_t word[2] = { word_at(at & ~7ull, v->salt), word_at((at & ~7ull) + 8, v->salt) };

	CHECK(!memcmp((char *)word + (at & 7), &found, sizeof(found)));
}

/* Threads wait in places `apart` from each other until the main thread is told that it is in vain
 * (`told`); `mend` gives the file its bytes again, then the agent puts it there. */
static void strand(struct service *s, const uint32_t *told, uint64_t at, uint64_t apart,
		   void (*mend)(struct service *s))
{
	struct client c = join(s);
	struct stranded t[THREADS];
	pthread_t thread[THREADS];
	struct view v;

	run(s);
	pthread_mutex_lock(&s->lock);
	v = map(s, &c, &s->file[0], 0, whole_pages(s->file[0].bytes));
	pthread_mutex_unlock(&s->lock);
	for (uint64_t i = 0; i < THREADS; i++) {
		t[i] = (struct stranded){ .at = v.at + at + i * apart };
		CHECK(!pthread_create(&thread[i], NULL, touch_once, &t[i]));
	}
	while (!seen(told))
		sched_yield();
	for (int i = 0; i < THREADS && mend; i++)
		CHECK(!__atomic_load_n(&t[i].done, __ATOMIC_ACQUIRE));
	if (mend)
		mend(s);
	detach(c.uffd, v.file->fd, v.at, v.length, v.offset);
	for (uint64_t i = 0; i < THREADS; i++) {
		pthread_join(thread[i], NULL);
		check_bytes(&v, at + i * apart, t[i].word);
	}
	pthread_mutex_lock(&s->lock);
	unmap(s, &c, &v, 1);
	while (!close_file(s, 0)) /* a fill may be under way */
		sched_yield();
	CHECK(up_pool_used(s->pool) == 0);
	pthread_mutex_unlock(&s->lock);
	leave(s, &c);
	halt(s);
	end(s);
}

static void write_again(struct service *s)
{
	char path[512];

	CHECK(s->last_failed.error == -ENODATA || s->last_failed.error == -EIO);
	snprintf(path, sizeof(path), "%s/file0", directory);
	close(make_words(path, s->file[0].bytes, s->file[0].salt));
}

static void test_a_file_that_became_shorter(void)
{
	struct service s;

	begin(&s, 8 * CHUNK, CHUNK, 0, 0);
	open_file(&s, 0, 16 * CHUNK);
	CHECK(!ftruncate(s.file[0].fd, 7 * CHUNK + 100));
	strand(&s, &s.failed, 8 * CHUNK, CHUNK, write_again);
}

static void limit_files(rlim_t bytes)
{
	struct rlimit limit;

	CHECK(!getrlimit(RLIMIT_FSIZE, &limit));
	limit.rlim_cur = bytes;
	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
}

static void lift_limit(struct service *s)
{
	CHECK(s->last_failed.error == -EFBIG);
	limit_files(RLIM_INFINITY);
}

static void test_memory_that_cannot_be_written(void)
{
	struct service s;
	int memfd;

	signal(SIGXFSZ, SIG_IGN);
	begin(&s, 8 * CHUNK, CHUNK, 0, 0);
	open_file(&s, 0, 16 * CHUNK);
	limit_files(7 * CHUNK + 100);
	CHECK(up_pool_file(s.pool, s.file[0].fd, 8 * CHUNK, 0, NULL, &memfd) == -EFBIG);
	strand(&s, &s.failed, 8 * CHUNK, CHUNK, lift_limit);
}

/* One word lies in two chunks, and there is room for one: up_pool_budget() makes it that many. */
static void test_a_budget_of_one_chunk(void)
{
	struct service s;

	begin(&s, 0, CHUNK, 0, 0);
	open_file(&s, 0, 16 * CHUNK);
	strand(&s, &s.stuck, 2 * CHUNK - 4, CHUNK, NULL);
}

/* Nobody takes the events: they are lost, but not the one that matters, and it is said that some
 * are there as long as some are. */
static void test_events_that_nobody_takes(void)
{
	struct up_pool_event event[1000];
	struct up_pool_counts counts;
	struct stranded t = { 0 };
	uint32_t failed = 0;
	pthread_t thread;
	struct service s;
	struct client c;
	struct view v;
	uint64_t bell;
	int n, all = 0;

	begin(&s, 8 * CHUNK, CHUNK, 0, 0);
	open_file(&s, 0, 16 * CHUNK);
	CHECK(!ftruncate(s.file[0].fd, 7 * CHUNK));
	c = join(&s);
	v = map(&s, &c, &s.file[0], 0, 16 * CHUNK);
	for (int i = 0; i < 5000; i++) {
		check_word(&v, (uint64_t)i % 2 * 4 * CHUNK); /* no readahead over the cut */
		CHECK(!madvise(v.at, v.length, MADV_DONTNEED));
	}
	t.at = v.at + 9 * CHUNK;
	CHECK(!pthread_create(&thread, NULL, touch_once, &t));
	do
		up_pool_counts(s.pool, &counts);
	while (!counts.failed_fills);
	CHECK(counts.lost_events && !__atomic_load_n(&t.done, __ATOMIC_ACQUIRE));
	do {
		CHECK(read(s.event_fd, &bell, sizeof(bell)) == sizeof(bell));
		n = up_pool_drain(s.pool, event, 1000);
		CHECK(n > 0);
		all += n;
		for (int i = 0; i < n; i++)
			failed += event[i].kind == UP_POOL_FAILED;
	} while (n == 1000);
	CHECK(failed == 1 && all > 3000 && read(s.event_fd, &bell, sizeof(bell)) < 0);
	s.last_failed.error = -EIO;
	write_again(&s);
	detach(c.uffd, s.file[0].fd, v.at, v.length, 0);
	pthread_join(thread, NULL);
	CHECK(t.word == word_at(9 * CHUNK, v.salt));
	unmap(&s, &c, &v, 1);
	leave(&s, &c);
	end(&s);
}

/* Nobody says what may leave: what is active goes when nothing else is left, and of each miss it is
 * told how many chunks have left since that one did. */
static void test_what_goes_when_nobody_says(void)
{
	struct up_pool_event event[100];
	struct up_pool_books books;
	struct up_pool_counts counts;
	uint32_t expected, told = 0;
	struct service s;
	struct client c;
	struct view v;
	uint64_t gone = 0;
	int n;

	begin(&s, 4 * CHUNK, CHUNK, 0, 0);
	open_file(&s, 0, 16 * CHUNK);
	CHECK(up_pool_books(s.pool, s.file[0].number, &books) == 16);
	c = join(&s);
	v = map(&s, &c, &s.file[0], 0, 16 * CHUNK);
	check_word(&v, 0);
	__atomic_store_n(&books.refaults[0], UP_ACTIVE, __ATOMIC_RELAXED); /* as Python stores a byte */
	for (uint64_t i = 2; i < 16; i += 2) { /* in no order that is read ahead of */
		usleep(5000); /* what was just got may not go: pool_room.c, HOLD_MS */
		check_word(&v, i * CHUNK);
	}
	up_pool_counts(s.pool, &counts); /* its lock orders what was written before the reads of the books */
	CHECK(books.state[0] == UP_PRESENT && !books.left[0] && up_pool_evictions(s.pool) == 4);
	n = up_pool_drain(s.pool, event, 100);
	for (int i = 0; i < n; i++)
		CHECK(!event[i].refault);
	while (!books.left[gone])
		gone++;
	expected = up_pool_evictions(s.pool) - books.left[gone] + 1;
	check_word(&v, gone * CHUNK);
	n = up_pool_drain(s.pool, event, 100);
	for (int i = 0; i < n; i++)
		if (event[i].kind == UP_POOL_MISS)
			told = event[i].refault;
	CHECK(told == expected);
	for (int i = 0; i < 16; i++)
		__atomic_store_n(&books.refaults[i], UP_ACTIVE, __ATOMIC_RELAXED);
	check_word(&v, 15 * CHUNK);
	up_pool_counts(s.pool, &counts);
	CHECK(books.state[15] == UP_PRESENT);
	unmap(&s, &c, &v, 0);
	leave(&s, &c);
	end(&s);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: pool_trouble DIRECTORY\n");
		return 2;
	}
	directory = argv[1];
	seed = 1;
	test_a_file_that_became_shorter();
	test_memory_that_cannot_be_written();
	test_a_budget_of_one_chunk();
	test_events_that_nobody_takes();
	test_what_goes_when_nobody_says();
	puts("all as it should be");
	return 0;
}
