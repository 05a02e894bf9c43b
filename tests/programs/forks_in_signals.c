// SPDX-License-Identifier: Apache-2.0
/*
 * forks_in_signals.c - a job whose handler of a signal reads a mapping, as profilers and abort handlers do,
 * and that forks while its process group is signalled without end. Each child ends with what its
 * handler has seen: 0, or 3 where a word was not the file's.
 *
 *     forks_in_signals FILE FORKS       (FILE: the k-th word of 8 bytes is k)
 *
 * Prints {"forks": N, "signals": whether any came, "bad": wrong words of the parent, "ends": children that
 * did not end with 0}.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const uint64_t *word;
static uint64_t words, draw = 88172645463325252u;
static volatile unsigned long bad, handled;

static void read_one(int number)
{
	(void)number;
	draw ^= draw << 13;
	draw ^= draw >> 7;
	draw ^= draw << 17;
	bad += word[draw % words] != draw % words;
	handled++;
}

/* Until the parent is gone, should it be killed. */
static void signal_without_end(pid_t group)
{
	struct timespec pause = { .tv_nsec = 20000 };

	signal(SIGUSR1, SIG_IGN);
	while (getppid() == group && !kill(-group, SIGUSR1))
		nanosleep(&pause, NULL);
	_exit(0);
}

int main(int argc, char **argv)
{
	int fd = argc == 3 ? open(argv[1], O_RDONLY) : -1, forks = 0, ends = 0, status;
	struct stat st;
	pid_t other;

	if (fd < 0 || fstat(fd, &st) || setpgid(0, 0))
		return 2;
	word = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (word == MAP_FAILED)
		return 2;
	words = st.st_size / sizeof(*word);
	signal(SIGUSR1, read_one);
	other = fork();
	if (!other)
		signal_without_end(getppid());
	while (!handled) /* it has begun */
		usleep(1000);
	for (; forks < atoi(argv[2]); forks++) {
		pid_t child = fork();

		if (!child)
			_exit(bad ? 3 : 0);
		while (waitpid(child, &status, 0) < 0)
			;
		ends += status != 0;
	}
	kill(other, SIGKILL);
	waitpid(other, NULL, 0);
	printf("{\"forks\": %d, \"signals\": %s, \"bad\": %lu, \"ends\": %d}\n", forks,
	       handled ? "true" : "false", bad, ends);
	return 0;
}
