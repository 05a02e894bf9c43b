// SPDX-License-Identifier: Apache-2.0
/*
 * reads_stress DIRECTORY - the thread that looks who reads (reads.c, reads_look.c, reads_text.c), alone and without
 * Python, so that a sanitizer sees nothing else: at processes that begin, end, and have threads that come and go.
 *
 * Everything that it finds wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "service/helper.h"

#define CHECK(condition)                                                            \
	do {                                                                        \
		if (!(condition)) {                                                 \
			fprintf(stderr, "reads_stress:%d: not so: %s (errno %d)\n", \
				__LINE__, #condition, errno);                       \
			exit(1);                                                    \
		}                                                                   \
	} while (0)

#define FILE_BYTES (4 << 20)
#define PIECE_BYTES 4096
#define READERS 6
#define ROUNDS 300
#define DESCRIPTORS 64 /* not enough for all: some are opened anew each time */
#define PATIENCE_MS 20000

static char path[4096];
static int quiet[2]; /* a pipe in which nothing comes */

static void *read_on(void *cookie)
{
	void *memory;
	int fd = open(path, O_RDONLY | (cookie ? O_DIRECT : 0));

	if (fd < 0)
		fd = open(path, O_RDONLY);
	if (fd < 0 || posix_memalign(&memory, PIECE_BYTES, PIECE_BYTES))
		_exit(1);
	for (int i = 0; i < FILE_BYTES / PIECE_BYTES; i++)
		if (pread(fd, memory, PIECE_BYTES, (off_t)i * PIECE_BYTES) < 0)
			_exit(1);
	lseek(fd, 0, SEEK_SET);
	while (read(fd, memory, PIECE_BYTES) > 0)
		;
	free(memory);
	close(fd);
	return NULL;
}

static void *wait_for_nothing(void *cookie)
{
	char byte[77];

	(void)cookie;
	if (read(quiet[0], byte, sizeof(byte)) < 0)
		_exit(1);
	return NULL;
}

/* Threads without end, or some, one of which waits in the pipe. */
static int read_with_threads(int rounds)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int round = 0; !rounds || round < rounds; round++) {
		pthread_t thread[8];

		for (int i = 0; i < 8; i++)
			CHECK(!pthread_create(&thread[i], NULL, i ? read_on : wait_for_nothing, i & 1 ? path : NULL));
		for (int i = 1; i < 8; i++)
			pthread_join(thread[i], NULL);
		pthread_cancel(thread[0]);
		pthread_join(thread[0], NULL);
	}
	return 0;
}

/* A program of its own: a sanitizer wants no threads after a fork. */
static pid_t start_reader(const char *directory, int number)
{
	char pipe_fd[16];
	pid_t pid;

	snprintf(pipe_fd, sizeof(pipe_fd), "%d", quiet[0]);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		execl("/proc/self/exe", "reads_stress", directory, pipe_fd, number % 3 == 2 ? "1" : "0", NULL);
		_exit(1);
	}
	return pid;
}

static int found_in_pipe(const struct up_read_sighting *seen, int n)
{
	for (int i = 0; i < n; i++) {
		CHECK(seen[i].pid > 0 && seen[i].at_ns && seen[i].call <= UP_READ_COPY);
		if (seen[i].call == UP_READ_READ && seen[i].asked_bytes == 77 && seen[i].state == 'S')
			return seen[i].fd == quiet[0];
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct up_read_sighting *seen = calloc(4096, sizeof(*seen));
	struct up_read_process process;
	struct up_reads_counts counts;
	struct up_read_file file;
	struct stat st;
	struct up_reads *reads;
	pid_t pid[READERS];
	int event_fd, fd, piped = 0;

	CHECK(argc >= 2 && seen);
	snprintf(path, sizeof(path), "%s/read", argv[1]);
	if (argc == 4) {
		free(seen);
		quiet[0] = atoi(argv[2]);
		return read_with_threads(atoi(argv[3]));
	}
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0 && !ftruncate(fd, FILE_BYTES) && !pipe(quiet));
	CHECK(!up_read_file(getpid(), fd, &file) && !fstat(fd, &st));
	CHECK(file.device == st.st_dev && file.inode == st.st_ino && file.size_bytes == FILE_BYTES);
	CHECK(up_read_file(getpid(), 9999, &file) == -ENOENT);

	for (int i = 0; i < READERS; i++)
		pid[i] = start_reader(argv[1], i);
	event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	CHECK(event_fd >= 0 && !up_reads_create(&reads, event_fd, DESCRIPTORS));
	for (int round = 0; round < ROUNDS; round++) {
		struct pollfd ready = { .fd = event_fd, .events = POLLIN };
		int i = round % READERS, n;
		uint64_t count;

		if (waitpid(pid[i], NULL, WNOHANG) == pid[i]) {
			up_reads_remove(reads, pid[i]);
			pid[i] = start_reader(argv[1], i);
		} else if (round % 7 == 6) {
			up_reads_remove(reads, pid[i]);
			CHECK(up_reads_process(reads, pid[i], &process) == -ESRCH);
		}
		n = up_reads_add(reads, pid[i]);
		CHECK(!n || n == -EEXIST || n == -ESRCH);
		if (poll(&ready, 1, 10) > 0)
			CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count));
		piped |= found_in_pipe(seen, up_reads_drain(reads, seen, 4096));
		if (!up_reads_process(reads, pid[i], &process))
			CHECK(process.sensor <= UP_READ_ENDED);
		up_reads_counts(reads, &counts);
		CHECK(counts.descriptors <= DESCRIPTORS && counts.processes <= 2 * READERS);
	}
	CHECK(piped && counts.looks > 10 && counts.sightings);
	for (int i = 0; i < READERS; i++) {
		kill(pid[i], SIGKILL);
		waitpid(pid[i], NULL, 0);
		up_reads_remove(reads, pid[i]);
	}
	for (int i = 0; i < PATIENCE_MS && (counts.processes || counts.descriptors); i++) {
		poll(NULL, 0, 1);
		up_reads_counts(reads, &counts);
	}
	CHECK(!counts.processes && !counts.descriptors);
	CHECK(!up_reads_add(reads, getpid())); /* and is left behind */
	up_reads_destroy(reads);
	free(seen);
	puts("all as it should be");
	return 0;
}
