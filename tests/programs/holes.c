// SPDX-License-Identifier: Apache-2.0
/*
 * holes.c FILE ROUNDS - one thread maps a file and unmaps it in two parts, another maps single pages and
 * keeps them all: they must stay as it wrote them, wherever the kernel finds room for them.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define KEPT_MAX 20000

static const size_t page = 4096;
static uint32_t *kept[KEPT_MAX];
static _Atomic int ended;

static void fail(const char *what)
{
	perror(what);
	exit(90);
}

static void check_and_free(uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		if (*kept[i] != i) {
			printf("page %u of %u is not as it was written\n", i, count);
			exit(1);
		}
		if (munmap(kept[i], page))
			fail("munmap of a page");
	}
}

static void *keep(void *unused)
{
	uint32_t count = 0;

	while (!atomic_load(&ended)) {
		uint32_t *p = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED)
			fail("a page");
		*p = count;
		kept[count++] = p;
		if (count == KEPT_MAX) {
			check_and_free(count);
			count = 0;
		}
	}
	check_and_free(count);
	return unused;
}

int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDONLY), rounds = atoi(argv[argc - 1]);
	pthread_t thread;
	struct stat st;
	size_t half;

	if (fd < 0 || fstat(fd, &st))
		fail("file");
	half = (size_t)st.st_size / 2 & ~(page - 1);
	if (pthread_create(&thread, NULL, keep, NULL))
		fail("thread");
	for (int i = 0; i < rounds; i++) {
		int type = i % 4 == 3 ? MAP_PRIVATE : MAP_SHARED;
		char *p = mmap(NULL, (size_t)st.st_size, PROT_READ, type, fd, 0);

		if (p == MAP_FAILED)
			fail("mmap");
		if (munmap(p + half, (size_t)st.st_size - half) || munmap(p, half))
			fail("munmap");
	}
	atomic_store(&ended, 1);
	pthread_join(thread, NULL);
	printf("ok\n");
	return 0;
}
