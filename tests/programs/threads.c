// SPDX-License-Identifier: Apache-2.0
/*
 * threads.c - several threads map, read, fork and unmap at the same time, and check every byte.
 *
 *     threads FILE SEED THREADS ROUNDS
 *
 * Each thread works on mappings of its own and compares what it reads with a copy of the file that
 * read(2) gave. One mapping is shared by all and is read all the time. Prints the number of wrong
 * pages (0) and of rounds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul

static char *copy, *common;
static size_t bytes, pages;
static int fd;
static unsigned long rounds;
static atomic_ulong wrong, done;

static uint64_t draw(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state * 0x2545f4914f6cdd1dull >> 16;
}

static void check(const char *map, size_t first, size_t count, size_t offset)
{
	for (size_t i = first; i < first + count; i++)
		if (memcmp(map + i * PAGE, copy + (offset + i) * PAGE, PAGE))
			atomic_fetch_add(&wrong, 1);
}

static void one_round(uint64_t *state)
{
	size_t offset = draw(state) % (pages / 2), count = 64 + draw(state) % (pages / 2 - 64);
	char *map = mmap(NULL, count * PAGE, PROT_READ, draw(state) % 2 ? MAP_SHARED : MAP_PRIVATE,
			 fd, (off_t)(offset * PAGE));
	size_t half = count / 2;
	int status;
	pid_t pid;

	if (map == MAP_FAILED)
		abort();
	check(map, 0, count, offset);
	for (int i = 0; i < 8; i++) {
		madvise(map, count * PAGE, MADV_DONTNEED);
		check(map, draw(state) % half, half, offset);
		madvise(common, bytes, MADV_DONTNEED);
		check(common, draw(state) % (pages / 2), pages / 2, 0);
	}
	switch (draw(state) % 6) {
	case 0:
		munmap(map + half * PAGE, (count - half) * PAGE);
		check(map, 0, half, offset);
		count = half;
		break;
	case 1:
		if (mprotect(map, half * PAGE, PROT_NONE))
			abort();
		check(map, half, count - half, offset);
		break;
	case 2:
		map = mremap(map, count * PAGE, 2 * count * PAGE, MREMAP_MAYMOVE);
		if (map == MAP_FAILED)
			abort();
		check(map, 0, count, offset);
		count *= 2;
		break;
	case 3:
		pid = fork();
		if (pid == 0) {
			atomic_store(&wrong, 0);
			/* long enough to be taken up by an agent of its own */
			for (int i = 0; i < 16; i++) {
				madvise(common, bytes, MADV_DONTNEED);
				check(map, 0, count, offset);
				check(common, 0, pages, 0);
			}
			munmap(map, half * PAGE);
			check(map, half, count - half, offset);
			_exit(atomic_load(&wrong) ? 1 : 0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
			atomic_fetch_add(&wrong, 1);
		break;
	default:
		break;
	}
	munmap(map, count * PAGE);
}

static void *work(void *arg)
{
	uint64_t state = (uintptr_t)arg * 0x9e3779b97f4a7c15ull | 1;

	while (atomic_fetch_add(&done, 1) < rounds)
		one_round(&state);
	return NULL;
}

int main(int argc, char **argv)
{
	unsigned long seed, threads;
	pthread_t thread[64];
	struct stat st;

	if (argc < 5)
		return 2;
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	seed = strtoul(argv[2], NULL, 10);
	threads = strtoul(argv[3], NULL, 10);
	rounds = strtoul(argv[4], NULL, 10);
	if (fd < 0 || fstat(fd, &st) || threads > 64)
		return 3;
	bytes = (size_t)st.st_size & ~(PAGE - 1);
	pages = bytes / PAGE;
	copy = malloc(bytes);
	if (!copy || pread(fd, copy, bytes, 0) != (ssize_t)bytes)
		return 3;
	common = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (common == MAP_FAILED)
		return 3;
	for (unsigned long i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, work, (void *)(seed * 64 + i + 1)))
			return 4;
	for (unsigned long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	printf("{\"wrong\": %lu, \"rounds\": %lu}\n", atomic_load(&wrong), rounds);
	return 0;
}
