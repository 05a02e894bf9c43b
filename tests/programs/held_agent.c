// SPDX-License-Identifier: Apache-2.0
/*
 * held_agent.c FILE ROUNDS [LOW_US HIGH_US] - does everything with mappings while one of the preload
 * object's threads stands still, held by a tracer wherever it happens to be; its own memory, mapped where
 * the file was, must stay as it wrote it. "ok", or what went wrong. The tracer holds the agent and the
 * responder in turn, until it is told, a second at most; or the agent, for a random time within bounds.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
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

/* Each way of use() comes to each of them. */
#define ROUNDS_EACH 8

static size_t size, page = 4096;
static int fd, low_us, high_us;

static void die(const char *what)
{
	perror(what);
	exit(90);
}

/* The thread of this process that has this name, or 0. */
static int thread_called(const char *wanted)
{
	char path[300], name[32] = "";
	DIR *tasks = opendir("/proc/self/task");
	int found = 0;

	for (struct dirent *e; (e = readdir(tasks));) {
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
		f = e->d_name[0] == '.' ? NULL : fopen(path, "r");
		if (f && fgets(name, sizeof(name), f) && !strcmp(name, wanted))
			found = atoi(e->d_name);
		if (f)
			fclose(f);
	}
	closedir(tasks);
	return found;
}

/* A second at most: where it is just changing the mapping, the job has to wait for it. */
static void hold(int in)
{
	struct pollfd end = { in, POLLIN, 0 };
	struct timespec now, time;

	if (!high_us) {
		poll(&end, 1, 1000);
		return;
	}
	clock_gettime(CLOCK_MONOTONIC, &now);
	time.tv_sec = 0;
	time.tv_nsec = 1000 * (low_us + now.tv_nsec / 1000 % (high_us - low_us));
	nanosleep(&time, NULL);
}

/* Holds a thread from one byte on `in` to the next, each for ROUNDS_EACH. */
static void tracer(const int *ours, int in, int out)
{
	int status, count = (ours[0] != 0) + (ours[1] != 0), tid = 0;
	char byte;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 0; i < count; i++)
		if (ptrace(PTRACE_SEIZE, ours[i], 0, 0))
			_exit(91);
	for (int round = 0; read(in, &byte, 1) == 1; round++) {
		tid = count ? ours[round / ROUNDS_EACH % count] : 0;
		if (tid && (ptrace(PTRACE_INTERRUPT, tid, 0, 0) || waitpid(tid, &status, __WALL) != tid))
			_exit(92);
		if (write(out, "h", 1) != 1)
			break;
		hold(in);
		if (tid && ptrace(PTRACE_CONT, tid, 0, 0))
			_exit(93);
		if (read(in, &byte, 1) != 1)
			break;
		if (write(out, "g", 1) != 1)
			break;
	}
	_exit(0);
}

static unsigned char *map(void)
{
	unsigned char *p = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		die("mmap");
	return p;
}

static void tell(int out, int in)
{
	char byte;

	if (write(out, "x", 1) != 1 || read(in, &byte, 1) != 1) {
		printf("the tracer ended\n");
		exit(1);
	}
}

/* What a job may do with it while nobody of ours answers. It touches no page that may be armed. */
static void use(unsigned char *p, int round)
{
	unsigned char *own;
	pid_t child;
	int status;

	if (round % 4 == 1 && mprotect(p, size, PROT_NONE))
		die("mprotect");
	if (round % 4 == 2)
		madvise(p, size, MADV_NORMAL);
	if (round % 8 == 3) {
		child = fork();
		if (!child)
			_exit(munmap(p, size) ? 94 : 0);
		if (waitpid(child, &status, 0) != child || status)
			die("child");
	}
	/* The job's own memory in its place, at once or after it has been unmapped. */
	if (round % 2 && munmap(p, size))
		die("munmap");
	own = mmap(p, size, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	if (own != p)
		die("own memory");
	for (size_t at = 0; at < size; at += page)
		own[at] = (unsigned char)(round + at / page);
}

static void check(unsigned char *own, int round)
{
	for (size_t at = 0; at < size; at += page)
		if (own[at] != (unsigned char)(round + at / page)) {
			printf("round %d: page %zu is not as it was written\n", round, at / page);
			exit(1);
		}
	munmap(own, size);
}

int main(int argc, char **argv)
{
	int to[2], from[2], rounds = atoi(argv[2]), ours[2] = { 0, 0 };
	unsigned char *first, *p, *q;
	struct stat st;
	pid_t child;

	fd = open(argv[1], O_RDONLY);
	low_us = argc > 4 ? atoi(argv[3]) : 0;
	high_us = argc > 4 ? atoi(argv[4]) : 0;
	if (fd < 0 || fstat(fd, &st) || pipe(to) || pipe(from))
		die("file");
	size = (size_t)st.st_size;
	first = map();
	for (int i = 0; i < 200 && !ours[1] && getenv("UFFDPREFETCH_SOCKET"); i++) {
		ours[1] = thread_called("uffdprefetch/r\n"); /* it starts when the agent has its name */
		ours[0] = thread_called("uffdprefetch\n");
		usleep(10000);
	}
	if (high_us)
		ours[1] = 0;
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	child = fork();
	if (!child)
		tracer(ours, to[0], from[1]);
	close(to[0]);
	close(from[1]);
	for (int round = 0; round < rounds; round++) {
		p = map();
		/* The service lays its checkpoints meanwhile. */
		for (size_t at = 0; at < size / 8; at += page)
			(void)*(volatile unsigned char *)(p + at);
		tell(to[1], from[0]);
		use(p, round);
		q = map();
		if (munmap(q, size))
			die("munmap of what was mapped meanwhile");
		tell(to[1], from[0]);
		/* Whatever it was about to do, it does now. */
		for (int i = 0; i < 20; i++)
			sched_yield();
		check(p, round);
	}
	if (memcmp(first, first, size) || munmap(first, size))
		die("the first");
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	printf("ok, %s\n", ours[0] ? "held" : "nobody to hold");
	return 0;
}
