// SPDX-License-Identifier: Apache-2.0
/*
 * handlers.c jump|map|pid1 FILE ROUNDS - a timer's handler that leaves munmap(2) by siglongjmp, as
 * time-outs do; one that maps the file while the thread it interrupts may be mapping it for the first
 * time; a child that has its parent's process number, in a namespace of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t size;
static int fd;
static sigjmp_buf away;
static volatile sig_atomic_t armed;
static unsigned int seed = 1;

static unsigned char *map(void)
{
	return mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
}

static void set_timer(int microseconds)
{
	struct itimerval timer = { .it_value = { 0, microseconds } };

	setitimer(ITIMER_REAL, &timer, NULL);
}

static void on_alarm(int number)
{
	int saved = errno;
	unsigned char *p;

	(void)number;
	if (armed) {
		armed = 0;
		siglongjmp(away, 1);
	}
	p = map();
	if (p != MAP_FAILED)
		munmap(p, size);
	errno = saved;
}

static int jump(int rounds)
{
	for (volatile int i = 0; i < rounds; i++) {
		static unsigned char *volatile p;

		p = map();
		if (p == MAP_FAILED)
			return 1;
		if (!sigsetjmp(away, 1)) {
			armed = 1;
			set_timer(1 + rand_r(&seed) % 40);
			munmap(p, size);
			armed = 0;
			set_timer(0);
		} else {
			munmap(p, size); /* it may have been done or not */
		}
	}
	return 0;
}

static int map_in_handler(int rounds)
{
	int status;

	for (int i = 0; i < rounds; i++) {
		int microseconds = 1 + rand_r(&seed) % 60;
		pid_t child = fork();

		if (!child) {
			unsigned char *p;

			set_timer(microseconds);
			p = map();
			if (p != MAP_FAILED)
				munmap(p, size);
			_exit(p == MAP_FAILED);
		}
		if (waitpid(child, &status, 0) != child || status)
			return 1;
	}
	return 0;
}

static int child_of_the_same_number(int rounds)
{
	int status;

	for (int i = 0; i < rounds; i++) {
		unsigned char *p = map();
		int wanted = p[0];
		pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD | CLONE_NEWPID, 0, 0, 0, 0);

		if (!child) {
			int ended = (p[0] != wanted) | (getpid() != 1) << 1;

			ended |= (munmap(p, size) != 0) << 2;
			syscall(SYS_exit_group, ended);
		}
		if (child < 0 || waitpid(child, &status, 0) != child || status) {
			printf("child: %x\n", status);
			return 1;
		}
		munmap(p, size);
	}
	return 0;
}

/* Under wrap: until our mapping has brought the preload object's thread. */
static int await_thread(void)
{
	struct stat tasks = { 0 };

	while (getenv("UFFDPREFETCH_SOCKET") && !stat("/proc/self/task", &tasks) && tasks.st_nlink < 4)
		usleep(1000);
	return 1;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_alarm };
	int rounds = atoi(argv[3]), failed = 1;
	struct stat st;

	fd = open(argv[2], O_RDONLY);
	if (argc != 4 || fd < 0 || fstat(fd, &st))
		return 90;
	size = (size_t)st.st_size;
	sigaction(SIGALRM, &action, NULL);
	if (!strcmp(argv[1], "jump"))
		failed = jump(rounds);
	else if (!strcmp(argv[1], "map"))
		failed = map_in_handler(rounds);
	else if (map() != MAP_FAILED && await_thread())
		failed = child_of_the_same_number(rounds);
	printf("%s\n", failed ? "failed" : "ok");
	return failed;
}
