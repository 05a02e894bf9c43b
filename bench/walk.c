// SPDX-License-Identifier: Apache-2.0
/*
 * walk.c - N threads walk through one mapping, each from its own place, touching a byte per STEP.
 *
 *   walk FILE THREADS BYTES_PER_THREAD STEP [PAUSE_US_PER_MIB]
 *
 * Thread i starts at i/THREADS of the file and wraps round at its end. For counting mappings,
 * descriptors and memory while many checkpoints slide (bench/slides.py); prints the time that
 * mmap() took and the sum of the bytes touched.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const unsigned char *base;
static uint64_t size, threads, length, step, pause_us;

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static void *walk(void *arg)
{
	uint64_t start = size / threads * (uint64_t)(uintptr_t)arg, sum = 0;

	for (uint64_t gone = 0; gone < length; gone += step) {
		sum += *(const volatile unsigned char *)(base + (start + gone) % size);
		if (pause_us && gone % (1u << 20) < step)
			usleep((useconds_t)pause_us);
	}
	return (void *)(uintptr_t)sum;
}

int main(int argc, char **argv)
{
	static pthread_t thread[256];
	uint64_t sum = 0, t;
	struct stat st;
	int fd;

	if (argc < 5 || (fd = open(argv[1], O_RDONLY | O_CLOEXEC)) < 0 || fstat(fd, &st))
		return 2;
	size = (uint64_t)st.st_size;
	threads = strtoull(argv[2], NULL, 0);
	length = strtoull(argv[3], NULL, 0);
	step = strtoull(argv[4], NULL, 0);
	pause_us = argc > 5 ? strtoull(argv[5], NULL, 0) : 0;
	if (!threads || threads > 256 || !step)
		return 2;
	t = now_ns();
	base = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	t = now_ns() - t;
	if (base == MAP_FAILED)
		return 1;
	for (uint64_t i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, walk, (void *)(uintptr_t)i))
			return 1;
	for (uint64_t i = 0; i < threads; i++) {
		void *one;

		pthread_join(thread[i], &one);
		sum += (uint64_t)(uintptr_t)one;
	}
	printf("{\"mmap_ns\": %llu, \"sum\": %llu}\n", (unsigned long long)t,
	       (unsigned long long)sum);
	return 0;
}
