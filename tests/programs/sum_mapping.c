// SPDX-License-Identifier: Apache-2.0
/*
 * sum_mapping FILE shared|private THREADS [ahead|held] - maps a file read-only and reads all of it twice,
 * each thread its own part, from the part's beginning. Prints a hash of each part, and whether libc
 * still knows of one thread only (its fast path, which a tool of one thread must keep under wrap).
 *
 * With THREADS 1 no thread is made. ahead: from a quarter of its part on a thread waits at each step
 * until somebody has read the next, which lies beyond what the kernel reads, or for a tenth of a
 * second: a walk that stands while others go on is given up, until it goes on. held: it ends when its
 * stdin does.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/single_threaded.h>
#include <sys/stat.h>
#include <unistd.h>

#define THREADS_MAX 16
#define AWAIT_MS 100
/* Less than is read ahead of one that has come a quarter of the way, beside three others. */
#define STEP (256 << 10)

static int ahead;

struct part {
	const unsigned char *start;
	size_t length;
	uint64_t hash;
};

static void await(const unsigned char *at)
{
	uintptr_t page = (uintptr_t)at & -(uintptr_t)sysconf(_SC_PAGESIZE);
	unsigned char there = 0;

	for (int i = 0; i < AWAIT_MS / 2 && !(there & 1); i++) {
		if (mincore((void *)page, 1, &there))
			err(1, "mincore");
		usleep(2000);
	}
}

static void *read_part(void *arg)
{
	struct part *part = arg;
	size_t held = part->length / 4 & -sizeof(uint64_t);
	uint64_t hash = 14695981039346656037u, word;

	for (int epoch = 0; epoch < 2; epoch++)
		for (size_t i = 0; i + sizeof(word) <= part->length; i += sizeof(word)) {
			if (ahead && !epoch && i >= held && i % STEP == 0 && i + 2 * STEP < part->length)
				await(part->start + i + 2 * STEP);
			memcpy(&word, part->start + i, sizeof(word));
			hash = (hash ^ word) * 1099511628211u;
		}
	part->hash = hash;
	return NULL;
}

int main(int argc, char **argv)
{
	struct part part[THREADS_MAX];
	pthread_t thread[THREADS_MAX];
	struct stat st;
	unsigned char *p;
	int threads, fd;
	char byte;

	if (argc < 4 || (threads = atoi(argv[3])) < 1 || threads > THREADS_MAX)
		errx(2, "usage: sum_mapping FILE shared|private THREADS [ahead|held]");
	ahead = argc > 4 && !strcmp(argv[4], "ahead");
	fd = open(argv[1], O_RDONLY);
	if (fd < 0 || fstat(fd, &st))
		err(1, "%s", argv[1]);
	p = mmap(NULL, st.st_size, PROT_READ,
		 strcmp(argv[2], "private") ? MAP_SHARED : MAP_PRIVATE, fd, 0);
	if (p == MAP_FAILED)
		err(1, "mmap");
	for (int i = 0; i < threads; i++) {
		part[i].start = p + st.st_size / threads * i;
		part[i].length = st.st_size / threads;
		if (threads == 1)
			read_part(&part[i]);
		else if (pthread_create(&thread[i], NULL, read_part, &part[i]))
			errx(1, "pthread_create");
	}
	for (int i = 0; i < threads; i++) {
		if (threads > 1)
			pthread_join(thread[i], NULL);
		printf("%d %016llx\n", i, (unsigned long long)part[i].hash);
	}
	while (argc > 4 && !ahead && read(0, &byte, 1) > 0)
		;
	printf("single-threaded %d\n", __libc_single_threaded);
	return 0;
}
