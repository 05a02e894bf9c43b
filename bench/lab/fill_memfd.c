// SPDX-License-Identifier: Apache-2.0
/*
 * fill_memfd.c - what the kernel takes for bytes from a file into a memfd, by 16 threads, as the pool has it.
 *
 *   cc -O2 -pthread -o fill_memfd bench/lab/fill_memfd.c
 *   ./fill_memfd FILE [KIB] [THREADS]    FILE: read past the page cache (O_DIRECT), KIB at a time
 *
 * In turn: read into a buffer, and no further; written from there into the memfd by all threads at once, 64 KiB a
 * call; the same, one thread at a time; and read into a mapping of the memfd, whose pages are made first
 * (MADV_POPULATE_WRITE). Prints seconds, and CPU seconds for a GB.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)64 << 10)
#define THREADS_MAX 64
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum way { READ, WRITE, IN_TURNS, IN_PLACE };
static const char *const names[] = { "read", "written at once", "written in turns", "read in place" };

static int file, memory;
static enum way way;
static char *map;
static size_t size, run, next;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void must(int holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static void write_out(const char *buffer, size_t at)
{
	for (size_t done = 0; done < run; done += PIECE) {
		size_t length = run - done < PIECE ? run - done : PIECE;

		if (way == IN_TURNS)
			pthread_mutex_lock(&turn);
		must(pwrite(memory, buffer + done, length, (off_t)(at + done)) == (ssize_t)length, "pwrite");
		if (way == IN_TURNS)
			pthread_mutex_unlock(&turn);
	}
}

static void *fill(void *unused)
{
	char *buffer = mmap(NULL, run, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t at;

	(void)unused;
	must(buffer != MAP_FAILED, "mmap");
	while ((at = __atomic_fetch_add(&next, run, __ATOMIC_RELAXED)) + run <= size) {
		char *into = way == IN_PLACE ? map + at : buffer;

		if (way == IN_PLACE)
			must(!madvise(into, run, MADV_POPULATE_WRITE), "MADV_POPULATE_WRITE");
		must(pread(file, into, run, (off_t)at) == (ssize_t)run, "pread");
		if (way == IN_PLACE)
			madvise(into, run, MADV_DONTNEED);
		else if (way != READ)
			write_out(buffer, at);
	}
	munmap(buffer, run);
	return NULL;
}

static double seconds(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static double cpu_seconds(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
	       (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv)
{
	int threads = argc > 3 ? atoi(argv[3]) : 16;
	pthread_t thread[THREADS_MAX];
	struct stat st;

	run = (size_t)(argc > 2 ? atoi(argv[2]) : 1024) << 10;
	must(argc > 1 && run && threads > 0 && threads <= THREADS_MAX, "usage");
	file = open(argv[1], O_RDONLY | O_DIRECT);
	must(file >= 0 && !fstat(file, &st), argv[1]);
	size = (size_t)st.st_size;
	for (way = READ; way <= IN_PLACE; way++) {
		double began, cpu = cpu_seconds();

		memory = memfd_create("pool", MFD_CLOEXEC);
		must(memory >= 0 && !ftruncate(memory, (off_t)size), "memfd");
		map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
		must(map != MAP_FAILED, "mmap");
		next = 0;
		began = seconds();
		for (int i = 0; i < threads; i++)
			must(!pthread_create(&thread[i], NULL, fill, NULL), "pthread_create");
		for (int i = 0; i < threads; i++)
			pthread_join(thread[i], NULL);
		printf("%-17s %5.2f s %6.3f CPU s a GB\n", names[way], seconds() - began,
		       (cpu_seconds() - cpu) / ((double)size / 1e9));
		munmap(map, size);
		close(memory);
	}
	return 0;
}
