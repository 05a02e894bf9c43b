// SPDX-License-Identifier: Apache-2.0
/*
 * waits.c FILE CHILDREN [hold] - how long a job's own calls take, in microseconds, one JSON line a call.
 *
 * CHILDREN processes map FILE and read some of it; "ready" is printed, and a line is waited for: the
 * driver stops the service or the storage there. With "hold" each child has a tracer hold every other
 * thread in it meanwhile, a second at most. Then each in turn, ROUNDS times: mmap and munmap of the file,
 * munmap of the mapping that was there before (once), fork; and at last exec (of this program) or _exit,
 * each from its beginning to its end as others see it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 4
#define READ_BYTES (8u << 20)
#define THREADS_MAX 8

static int fd;
static size_t size;

static int64_t now_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
}

static void die(const char *what)
{
	perror(what);
	exit(90);
}

static void report(const char *what, int64_t began_us)
{
	dprintf(1, "{\"what\": \"%s\", \"us\": %lld}\n", what, (long long)(now_us() - began_us));
}

static char *map(void)
{
	char *p = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		die("mmap");
	return p;
}

/* Holds all threads of `pid` but its first; a byte to `out` when it does; to the end of `in`. */
static void hold(int pid, int in, int out)
{
	struct pollfd end = { in, POLLIN, 0 };
	char path[32];
	int tid[THREADS_MAX], n = 0, status;
	DIR *tasks;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	tasks = opendir(path);
	for (struct dirent *e; tasks && (e = readdir(tasks)) && n < THREADS_MAX;) {
		int one = atoi(e->d_name);

		if (one > 0 && one != pid && !ptrace(PTRACE_SEIZE, one, 0, 0) &&
		    !ptrace(PTRACE_INTERRUPT, one, 0, 0) && waitpid(one, &status, __WALL) == one)
			tid[n++] = one;
	}
	if (write(out, &(char){ (char)n }, 1) != 1)
		_exit(1);
	poll(&end, 1, 1000);
	for (int i = 0; i < n; i++)
		ptrace(PTRACE_DETACH, tid[i], 0, 0);
	_exit(0);
}

/* Returns the number of threads that stand still now. */
static int have_held(int *tracer)
{
	int in[2], out[2], me = getpid();
	char n = 0;

	if (pipe(in) || pipe(out))
		die("pipe");
	*tracer = fork();
	if (!*tracer) {
		close(in[1]);
		hold(me, in[0], out[1]);
	}
	prctl(PR_SET_PTRACER, *tracer, 0, 0, 0);
	close(in[0]);
	fcntl(in[1], F_SETFD, FD_CLOEXEC);
	if (read(out[0], &n, 1) != 1)
		n = 0;
	return n;
}

static void child(char *before, int holds, int64_t *ended_us, int number, const char *self)
{
	int held = 0, tracer = -1;
	int64_t began;

	if (holds)
		held = have_held(&tracer);
	dprintf(1, "{\"what\": \"held\", \"us\": %d}\n", held);
	for (int i = 0; i < ROUNDS; i++) {
		char *p;
		pid_t pid;

		began = now_us();
		p = map();
		report("mmap", began);
		began = now_us();
		munmap(p, size);
		report("munmap, new", began);
		began = now_us();
		pid = fork();
		if (!pid)
			_exit(0);
		report("fork", began);
		waitpid(pid, NULL, 0);
	}
	if (number % 3 == 0) {
		began = now_us();
		munmap(before, size);
		report("munmap", began);
	}
	*ended_us = now_us();
	if (number % 3 == 1) {
		char since[32];

		snprintf(since, sizeof(since), "%lld", (long long)*ended_us);
		execl(self, self, "after", since, (char *)NULL);
		die("exec");
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	int children = argc > 2 ? atoi(argv[2]) : 0, ready[2], go[64][2];
	char byte, line[16];
	int64_t *ended_us;
	pid_t pid[64];
	struct stat st;

	if (argc == 3 && !strcmp(argv[1], "after")) {
		report("exec", atoll(argv[2]));
		return 0;
	}
	fd = open(argv[1], O_RDONLY);
	if (fd < 0 || fstat(fd, &st) || children < 1 || children > 64 || pipe(ready))
		die(argv[1]);
	size = (size_t)st.st_size;
	ended_us = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < children; i++) {
		if (pipe(go[i]))
			die("pipe");
		pid[i] = fork();
		if (!pid[i]) {
			char *p = map();
			unsigned sum = 0;

			for (size_t at = 0; at < READ_BYTES && at < size; at += 4096)
				sum += (unsigned char)p[at];
			if (write(ready[1], &sum, 1) != 1 || read(go[i][0], &byte, 1) != 1)
				_exit(91);
			child(p, argc > 3, &ended_us[i], i, argv[0]);
		}
		if (read(ready[0], &byte, 1) != 1)
			die("ready");
	}
	dprintf(1, "{\"what\": \"ready\", \"us\": 0}\n");
	if (read(0, line, sizeof(line)) < 1)
		return 92;
	for (int i = 0; i < children; i++) {
		int status;

		if (write(go[i][1], "", 1) != 1 || waitpid(pid[i], &status, 0) != pid[i] || status)
			die("a child");
		if (i % 3 != 1)
			report("_exit", ended_us[i]);
	}
	return 0;
}
