// SPDX-License-Identifier: Apache-2.0
/*
 * opens_stress.c DIRECTORY - threads of forked processes open names that all of them open, names that nobody else
 * does, and relative ones, from paths that end where their page does.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROCESSES 3
#define THREADS 4
#define NAMES 400

static const char *directory;

/* Nothing lies behind the last byte of a text that is put there. */
static char *end_of_a_page(void)
{
	long page = sysconf(_SC_PAGESIZE);
	char *p = mmap(NULL, 2 * (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED || munmap(p + page, (size_t)page))
		abort();
	return p + page;
}

static void open_at_the_end(char *end, const char *text)
{
	size_t bytes = strlen(text) + 1;
	int fd = open(memcpy(end - bytes, text, bytes), O_RDONLY | O_CLOEXEC);

	if (fd >= 0)
		close(fd);
}

static void *opens(void *arg)
{
	char *end = end_of_a_page(), name[512];

	for (int i = 0; i < NAMES; i++) {
		/* of each length by which words end otherwise */
		snprintf(name, sizeof(name), "%s/%0*d", directory, 1 + i % 40, i);
		open_at_the_end(end, name);
		snprintf(name, sizeof(name), "%s/%d-%ld-%d", directory, (int)getpid(), (long)arg, i);
		open_at_the_end(end, name);
		snprintf(name, sizeof(name), "%.*d", 1 + i % 20, i);
		open_at_the_end(end, name);
		open_at_the_end(end, "/etc/passwd");
		open_at_the_end(end, "/");
		open_at_the_end(end, "");
	}
	return NULL;
}

static int work(void)
{
	pthread_t thread[THREADS];

	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&thread[i], NULL, opens, (void *)i))
			return 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	return 0;
}

int main(int argc, char **argv)
{
	int status, bad = 0;

	if (argc < 2)
		return 2;
	directory = argv[1];
	for (int i = 0; i < PROCESSES; i++) {
		pid_t pid = fork();

		if (!pid)
			exit(work());
		if (pid < 0)
			return 1;
	}
	while (wait(&status) > 0)
		bad |= status;
	puts(bad ? "a process has failed" : "all as it should be");
	return bad != 0;
}
