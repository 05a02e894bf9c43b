// SPDX-License-Identifier: Apache-2.0
/*
 * compare_stress DIRECTORY - copies of a file's pages compared with the file (compare.c, checker.c)
 * while it is written and cut, alone and without Python, so that a sanitizer sees nothing else.
 *
 * Everything that it finds wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "service/helper.h"

#define CHECK(condition)                                                             \
	do {                                                                         \
		if (!(condition)) {                                                  \
			fprintf(stderr, "compare_stress:%d: not so: %s (errno %d)\n", \
				__LINE__, #condition, errno);                        \
			exit(1);                                                     \
		}                                                                    \
	} while (0)

#define PAGES 300
#define FILES 4
#define ROUNDS 60

static uint64_t page_bytes;

struct copy {
	int fd, page_fd, memfd, memfd_ro, stop;
	struct up_watch *watch;
	pthread_t writer;
};

static void open_copy(struct copy *c, const char *directory, int number)
{
	char path[4096], bytes[65536];

	snprintf(path, sizeof(path), "%s/compared%d", directory, number);
	c->fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	c->page_fd = open(path, O_RDONLY);
	CHECK(c->fd >= 0 && c->page_fd >= 0);
	CHECK(!up_checkpoint_memfd(PAGES * page_bytes, &c->memfd, &c->memfd_ro));
	for (int i = 0; i < PAGES; i++) {
		memset(bytes, i, page_bytes);
		CHECK(pwrite(c->fd, bytes, page_bytes, (off_t)(i * page_bytes)) == (ssize_t)page_bytes);
		CHECK(pwrite(c->memfd, bytes, page_bytes, (off_t)(i * page_bytes)) ==
		      (ssize_t)page_bytes);
	}
	CHECK(!up_watch_create(&c->watch, c->page_fd, c->memfd, PAGES * page_bytes));
}

/* Whole pages, one after the other, each time other bytes; now and then the end goes and comes. */
static void *write_on(void *arg)
{
	struct copy *c = arg;
	char bytes[65536];

	for (unsigned n = 0; !__atomic_load_n(&c->stop, __ATOMIC_RELAXED); n++) {
		memset(bytes, (int)(n * 7), page_bytes);
		CHECK(pwrite(c->fd, bytes, page_bytes, (off_t)(n % PAGES * page_bytes)) ==
		      (ssize_t)page_bytes);
		if (n % 1000 == 0)
			CHECK(!ftruncate(c->fd, PAGES / 2 * (off_t)page_bytes + 5) &&
			      !ftruncate(c->fd, PAGES * (off_t)page_bytes));
	}
	return NULL;
}

static void submit(struct up_checker *checker, struct copy *c, uint64_t id, uint32_t reads_max)
{
	uint64_t page[PAGES];
	struct up_compare_job job = { .id = id, .watch = c->watch, .pool_file = -1, .pages = PAGES,
				      .how = id % 2 ? UP_COMPARE_READ : UP_COMPARE_MAPPED,
				      .start = (uint32_t)(id * 37 % PAGES), .page = page,
				      .reads_max = reads_max, .limit_ns = 10000000000ull };

	for (int i = 0; i < PAGES; i++)
		page[i] = (uint64_t)i;
	CHECK(!up_checker_submit(checker, &job));
}

static struct up_compare_result wait_for(struct up_checker *checker, int event_fd)
{
	struct up_compare_result r;
	uint64_t count;

	while (!up_checker_reap(checker, &r, 1)) {
		struct pollfd p = { .fd = event_fd, .events = POLLIN };

		CHECK(poll(&p, 1, 60000) == 1);
		CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count));
	}
	CHECK(!r.error && r.compared + r.unread <= PAGES && r.rewritten == r.differing);
	return r;
}

static int equal(const struct copy *c)
{
	char a[65536], b[65536];

	for (int i = 0; i < PAGES; i++) {
		CHECK(pread(c->fd, a, page_bytes, (off_t)(i * page_bytes)) == (ssize_t)page_bytes);
		CHECK(pread(c->memfd_ro, b, page_bytes, (off_t)(i * page_bytes)) ==
		      (ssize_t)page_bytes);
		if (memcmp(a, b, page_bytes))
			return 0;
	}
	return 1;
}

int main(int argc, char **argv)
{
	int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct copy copy[FILES] = { 0 };
	struct up_checker *checker;
	uint64_t id = 0;

	if (argc != 2) {
		fprintf(stderr, "usage: compare_stress DIRECTORY\n");
		return 2;
	}
	page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
	CHECK(page_bytes <= 65536 && up_checker_create(&checker, 3, event_fd) == 3);
	for (int i = 0; i < FILES; i++) {
		open_copy(&copy[i], argv[1], i);
		CHECK(!pthread_create(&copy[i].writer, NULL, write_on, &copy[i]));
	}
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < FILES; i++)
			submit(checker, &copy[i], id++, round % 3 ? PAGES : 1);
		for (int i = 0; i < FILES; i++)
			wait_for(checker, event_fd);
	}
	for (int i = 0; i < FILES; i++) {
		__atomic_store_n(&copy[i].stop, 1, __ATOMIC_RELAXED);
		pthread_join(copy[i].writer, NULL);
	}
	/* Once more when all is quiet, in either way: whatever was torn is mended. */
	for (int i = 0; i < FILES; i++) {
		submit(checker, &copy[i], (uint64_t)i, PAGES);
		CHECK(wait_for(checker, event_fd).compared == PAGES);
		CHECK(equal(&copy[i]));
		up_watch_put(copy[i].watch);
	}
	CHECK(!up_checker_destroy(checker));
	/* Put while its round waits, and destroyed with rounds that nobody began. */
	CHECK(!up_watch_create(&copy[0].watch, copy[0].page_fd, copy[0].memfd, PAGES * page_bytes));
	CHECK(up_checker_create(&checker, 1, event_fd) == 1);
	for (int i = 0; i < 200; i++)
		submit(checker, &copy[0], (uint64_t)i, PAGES);
	up_watch_put(copy[0].watch);
	CHECK(!up_checker_destroy(checker));
	puts("all as it should be");
	return 0;
}
