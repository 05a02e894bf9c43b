// SPDX-License-Identifier: Apache-2.0
/*
 * race.c FILE ROUNDS SEED - changes made past every library, against a service that gives mappings back
 * at any moment (tests/support/hammer.py).
 *
 * Each round is a process of its own. It maps FILE, waits a random moment, puts memory of its own in the
 * mapping's place by raw system calls (munmap and mmap; every other round mmap alone, over it), and looks
 * whether that memory stays what it writes: at first,
 * when our thread may be in the midst of putting the file back ("hits": rounds of each kind; "wrong_pages"), and
 * again when the kernel has long told it of the change ("after": pages that must never be wrong). One
 * line of JSON.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

#define PAGE 4096ul
/* Up to this long after mmap(2): some blows of the hammer. */
#define MOMENT_US 600
#define AGAIN 4

struct outcome {
	int met;
	long wrong, after;
};

static uint64_t state;

static uint64_t draw(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1dull;
}

static void spin_us(long us)
{
	struct timespec from, now;

	clock_gettime(CLOCK_MONOTONIC, &from);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while ((now.tv_sec - from.tv_sec) * 1000000 + (now.tv_nsec - from.tv_nsec) / 1000 < us);
}

static int has_checkpoints(void)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "re");
	int found = 0;

	while (maps && fgets(line, sizeof(line), maps))
		found |= strstr(line, "uffdprefetch-checkpoints") != NULL;
	if (maps)
		fclose(maps);
	return found;
}

/* Memory of our own at [p, +length): pages that are not what was written. */
static long wrong_pages(char *p, size_t length, int over)
{
	long wrong = 0;
	uint64_t word = draw();

	if ((!over && raw_munmap(p, length)) ||
	    raw_mmap(p, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
		     0) != p)
		_exit(3);
	for (size_t at = 0; at < length; at += PAGE)
		*(volatile uint64_t *)(p + at) = word + at;
	spin_us(200);
	for (size_t at = 0; at < length; at += PAGE)
		wrong += *(volatile uint64_t *)(p + at) != word + at;
	return wrong;
}

static struct outcome one_round(int fd, size_t length, int over, volatile int *told)
{
	struct outcome out = { 0 };
	char *p = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		_exit(2);
	out.met = has_checkpoints();
	spin_us((long)(draw() % MOMENT_US));
	out.wrong = wrong_pages(p, length, over);
	usleep(2000);
	*told = 1;
	for (int i = 0; i < AGAIN; i++)
		out.after += wrong_pages(p, length, over);
	return out;
}

int main(int argc, char **argv)
{
	long rounds, met = 0, hits[2] = { 0 }, wrong = 0, after = 0;
	struct stat st;
	int fd, channel[2];
	volatile int *told;

	if (argc < 4)
		return 2;
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	rounds = strtol(argv[2], NULL, 10);
	state = strtoull(argv[3], NULL, 10) * 0x9e3779b97f4a7c15ull | 1;
	if (fd < 0 || fstat(fd, &st) || pipe2(channel, O_CLOEXEC))
		return 2;
	told = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (told == MAP_FAILED)
		return 2;
	for (long i = 0; i < rounds; i++) {
		uint64_t seed = draw() | 1;
		struct outcome out;
		pid_t pid;

		*told = 0;
		pid = fork();
		if (pid == 0) {
			state = seed;
			out = one_round(fd, (size_t)st.st_size & ~(PAGE - 1), i % 2, told);
			_exit(write(channel[1], &out, sizeof(out)) != sizeof(out));
		}
		int status;

		if (pid < 0 || waitpid(pid, &status, 0) != pid)
			return 1;
		if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV)
			/* the file's page, which cannot be written */
			out = (struct outcome){ 1, !*told, *told };
		else if (status || read(channel[0], &out, sizeof(out)) != sizeof(out)) {
			fprintf(stderr, "race: round %ld ended with status %#x\n", i, status);
			return 1;
		}
		met += out.met;
		hits[i % 2] += out.wrong > 0;
		wrong += out.wrong;
		after += out.after;
	}
	printf("{\"rounds\": %ld, \"met\": %ld, \"hits\": [%ld, %ld], \"wrong_pages\": %ld, "
	       "\"after\": %ld}\n",
	       rounds, met, hits[0], hits[1], wrong, after);
	return 0;
}
