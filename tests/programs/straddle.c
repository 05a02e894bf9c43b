// SPDX-License-Identifier: Apache-2.0
/*
 * straddle.c - threads whose single reads need the end of one chunk and the start of the next.
 *
 *     straddle FILE THREADS READS
 *
 * Each thread loads READS words that lie half in one 64 KiB chunk and half in the next, all over the
 * file, and compares them with what read(2) gave; with READS 0 it does so until stdin ends. Prints how
 * many were wrong.
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
#include <unistd.h>

#define CHUNK 65536ul

static char *copy, *map;
static size_t chunks;
static unsigned long reads;
static atomic_ulong wrong;
static atomic_int over;

/* One instruction, on both machines that we know. */
static uint64_t load(const char *at)
{
	uint64_t value;

#if defined(__x86_64__)
	__asm__ volatile("movq (%1), %0" : "=r"(value) : "r"(at) : "memory");
#elif defined(__aarch64__)
	__asm__ volatile("ldr %0, [%1]" : "=r"(value) : "r"(at) : "memory");
#else
	memcpy(&value, at, sizeof(value));
#endif
	return value;
}

static void *body(void *cookie)
{
	uint64_t state = (uintptr_t)cookie * 0x9e3779b97f4a7c15ull + 1, expected;

	for (unsigned long i = 0; reads ? i < reads : !atomic_load(&over); i++) {
		size_t at;

		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		at = (1 + state % (chunks - 1)) * CHUNK - 4;
		memcpy(&expected, copy + at, sizeof(expected));
		if (load(map + at) != expected)
			wrong++;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct stat st;
	int fd, threads;
	pthread_t thread[64];
	char byte;

	if (argc < 4)
		return 2;
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	threads = atoi(argv[2]);
	reads = strtoul(argv[3], NULL, 10);
	if (fd < 0 || fstat(fd, &st) || threads < 1 || threads > 64)
		return 3;
	chunks = (size_t)st.st_size / CHUNK;
	copy = malloc((size_t)st.st_size);
	if (!copy || pread(fd, copy, (size_t)st.st_size, 0) != st.st_size)
		return 3;
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return 4;
	for (int i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, body, (void *)(uintptr_t)(i + 1)))
			return 5;
	while (!reads && read(0, &byte, 1) > 0)
		;
	atomic_store(&over, 1);
	for (int i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	printf("{\"wrong\": %lu}\n", (unsigned long)wrong);
	return 0;
}
