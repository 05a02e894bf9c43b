// SPDX-License-Identifier: Apache-2.0
/*
 * paths_stress DIRECTORY - files that are read by name (paths.c, pathread.c) while they are replaced, cut and removed,
 * and requests that are withdrawn and released meanwhile, alone and without Python, so that a sanitizer sees nothing
 * else.
 *
 * Everything that it finds wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/helper.h"

#define CHECK(condition)                                                           \
	do {                                                                       \
		if (!(condition)) {                                                \
			fprintf(stderr, "paths_stress:%d: not so: %s (errno %d)\n", \
				__LINE__, #condition, errno);                      \
			exit(1);                                                   \
		}                                                                  \
	} while (0)

#define FILES 40
#define REQUESTS 20000u
#define GROUPS 7
#define THREADS 8
#define HELD 10u

static int directory_fd, stop;

/* A file of any length, a FIFO, a link to a device, a directory, or nothing. */
static void *replace(void *arg)
{
	char name[16], data[5000];

	memset(data, 'x', sizeof(data));
	for (unsigned n = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); n++) {
		int fd;

		snprintf(name, sizeof(name), "f%u", n % FILES);
		unlinkat(directory_fd, name, 0);
		unlinkat(directory_fd, name, AT_REMOVEDIR);
		switch (n % 11) {
		case 0:
			CHECK(!mkfifoat(directory_fd, name, 0600));
			break;
		case 1:
			CHECK(!symlinkat("/dev/zero", directory_fd, name));
			break;
		case 2:
			CHECK(!mkdirat(directory_fd, name, 0700));
			break;
		case 3:
			break;
		default:
			fd = openat(directory_fd, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
			CHECK(fd >= 0);
			CHECK(write(fd, data, n * 97 % sizeof(data)) >= 0);
			CHECK(!ftruncate(fd, (off_t)(n % 5) * 300000));
			close(fd);
		}
	}
	return arg;
}

static int open_descriptors(void)
{
	DIR *listing = opendir("/proc/self/fd");
	int n = 0;

	CHECK(listing);
	while (readdir(listing))
		n++;
	closedir(listing);
	return n;
}

static int submit(struct up_paths *paths, uint64_t id)
{
	uint64_t range[6] = { 0, 1, 4096, 100000, 300000, UINT64_MAX };
	struct up_path_request q = { .id = id, .group = id % GROUPS, .directory_fd = directory_fd,
				     .kind = id % 13 ? UP_PATH_READ : UP_PATH_PROBE,
				     .method = id % 2 ? UP_WARM_PREAD : UP_WARM_READAHEAD,
				     .hold = id % 3 == 0, .follow = id % 5 != 0,
				     .ranges = id % 4 == 0 ? 3 : 0, .range = range,
				     .most_bytes = id % 6 ? 0 : 70000 };
	char name[16];

	snprintf(name, sizeof(name), "f%u", (unsigned)(id % FILES));
	q.name = name;
	return up_paths_submit(paths, &q);
}

static uint32_t reap(struct up_paths *paths, uint64_t *by_state)
{
	struct up_path_result r[64];
	int n = up_paths_reap(paths, r, 64);

	for (int i = 0; i < n; i++) {
		CHECK(r[i].state >= UP_PATH_DONE && r[i].state <= UP_PATH_WITHDRAWN);
		CHECK(r[i].group == r[i].id % GROUPS && r[i].directory_fd == directory_fd);
		CHECK(!r[i].held || (r[i].state == UP_PATH_DONE && r[i].id % 3 == 0));
		CHECK(r[i].waited_bytes <= r[i].bytes && r[i].begin_ns <= r[i].end_ns);
		CHECK((r[i].state == UP_PATH_FAILED) == (r[i].error != 0));
		by_state[r[i].state]++;
	}
	return (uint32_t)n;
}

/* On a busy machine whoever replaces files may have done little by the last of REQUESTS. */
static int is_more_wanted(uint32_t submitted, const uint64_t *by_state)
{
	for (int state = UP_PATH_DONE; state <= UP_PATH_WITHDRAWN; state++)
		if (!by_state[state] && state != UP_PATH_ANOTHER)
			return 1;
	return submitted < REQUESTS;
}

int main(int argc, char **argv)
{
	int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), before;
	uint64_t by_state[UP_PATH_WITHDRAWN + 1] = { 0 };
	uint32_t submitted = 0, reaped = 0;
	struct up_paths *paths;
	pthread_t writer;

	if (argc != 2) {
		fprintf(stderr, "usage: paths_stress DIRECTORY\n");
		return 2;
	}
	directory_fd = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK(directory_fd >= 0 && event_fd >= 0);
	before = open_descriptors();
	CHECK(up_paths_create(&paths, THREADS, HELD, event_fd) == THREADS);
	CHECK(!pthread_create(&writer, NULL, replace, NULL));
	while (reaped < submitted || is_more_wanted(submitted, by_state)) {
		struct pollfd p = { .fd = event_fd, .events = POLLIN };
		uint64_t count;

		while (is_more_wanted(submitted, by_state) && !submit(paths, submitted)) {
			submitted++;
			if (submitted % 50 == 0)
				up_paths_withdraw(paths, UP_PATH_BY_GROUP, submitted % GROUPS);
			if (submitted % 3 == 0)
				up_paths_withdraw(paths, UP_PATH_BY_ID, submitted - 7);
			if (submitted % 2)
				up_paths_release(paths, UP_PATH_BY_ID, submitted - 30, submitted % 4 * 1000000);
			if (submitted % 100 == 0)
				up_paths_release(paths, UP_PATH_BY_GROUP, submitted % GROUPS, 0);
		}
		CHECK(open_descriptors() <= before + 2 * THREADS + (int)HELD + 1);
		CHECK(poll(&p, 1, 60000) == 1);
		CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count));
		for (uint32_t n = 1; n; reaped += n)
			n = reap(paths, by_state);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	pthread_join(writer, NULL);
	CHECK(up_paths_cpu_ns(paths) > 0);
	/* Destroyed with some held, and requests that nobody began. */
	for (uint64_t id = 0; !submit(paths, id); id++)
		;
	CHECK(!up_paths_destroy(paths));
	CHECK(open_descriptors() == before);
	puts("all as it should be");
	return 0;
}
