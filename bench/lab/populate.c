// SPDX-License-Identifier: Apache-2.0
/*
 * populate.c - what it gains to have a second thread map cached pages ahead of the one that reads them.
 *
 *   cc -O2 -pthread -o populate bench/lab/populate.c
 *   ./populate FILE MIB [ROUNDS]         FILE is made, and read once by read(2): all of it is cached
 *
 * Touches each page of a fresh mapping (and copies each page), in turn: alone; with a thread that does
 * MADV_POPULATE_READ in ranges of 2 MiB ahead of it; after that has been done for all of it. Once as the
 * file system maps (fault-around, where it has it), and once page by page, as one without fault-around
 * does: a mapping registered for asynchronous write-protection has none (mm/memory.c,
 * uffd_disable_fault_around), Linux 6.7.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define RANGE (2ul << 20)
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static char *base, sink[PAGE];
static size_t length;
static _Atomic size_t at; /* the reader is there */
static int failed;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static double cpu(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* What the reader has passed is not populated any more. */
static void *populate(void *unused)
{
	size_t done = 0;

	while (done < length) {
		size_t here = atomic_load(&at) / RANGE * RANGE;

		if (here > done)
			done = here;
		if (madvise(base + done, length - done < RANGE ? length - done : RANGE, MADV_POPULATE_READ))
			failed = 1;
		done += RANGE;
	}
	return unused;
}

static int page_by_page(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_WP_ASYNC };
	struct uffdio_register reg = { .range = { (unsigned long)base, length },
				       .mode = UFFDIO_REGISTER_MODE_WP };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &reg))
		return -1;
	return fd;
}

enum how { ALONE, AHEAD, BEFORE };

static void run(int fd, enum how how, int copies, int around)
{
	struct rusage before, after;
	pthread_t thread;
	double start, cpu_start, end;
	int uffd = -1;

	base = mmap(NULL, length, PROT_READ, MAP_PRIVATE, fd, 0);
	if (base == MAP_FAILED)
		exit(1);
	if (!around && (uffd = page_by_page()) < 0) {
		printf("page by page: not here\n");
		munmap(base, length);
		return;
	}
	atomic_store(&at, 0);
	getrusage(RUSAGE_SELF, &before);
	start = now();
	cpu_start = cpu();
	if (how == AHEAD)
		pthread_create(&thread, NULL, populate, NULL);
	if (how == BEFORE)
		populate(NULL);
	for (size_t i = 0; i < length; i += PAGE) {
		if (copies) {
			memcpy(sink, base + i, PAGE);
			__asm__ volatile("" : : "r"(sink) : "memory");
		} else
			((volatile char *)sink)[0] = *(volatile char *)(base + i);
		if (!(i % (64 << 10)))
			atomic_store_explicit(&at, i, memory_order_relaxed);
	}
	end = now();
	if (how == AHEAD)
		pthread_join(thread, NULL);
	getrusage(RUSAGE_SELF, &after);
	printf("%-6s %-7s %-8s %8.4f s  %8.4f s CPU  %8ld minor %6ld major%s\n",
	       copies ? "copy" : "touch", around ? "around" : "single",
	       how == ALONE ? "alone" : how == AHEAD ? "ahead" : "before", end - start, cpu() - cpu_start,
	       after.ru_minflt - before.ru_minflt, after.ru_majflt - before.ru_majflt,
	       failed ? " (populate failed)" : "");
	fflush(stdout);
	munmap(base, length);
	if (uffd >= 0)
		close(uffd);
}

int main(int argc, char **argv)
{
	size_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
	int rounds = argc > 3 ? atoi(argv[3]) : 3, fd;
	char *piece = malloc(1 << 20);

	if (!mib || !piece)
		return 2;
	length = mib << 20;
	fd = open(argv[1], O_RDWR | O_CREAT, 0600);
	for (size_t i = 0; i < mib; i++) {
		memset(piece, (int)i, 1 << 20);
		if (write(fd, piece, 1 << 20) != 1 << 20)
			return 1;
	}
	close(fd);
	fd = open(argv[1], O_RDONLY);
	while (read(fd, piece, 1 << 20) > 0)
		;
	for (int round = 0; round < rounds; round++)
		for (int copies = 0; copies < 2; copies++)
			for (int around = 1; around >= 0; around--)
				for (int how = ALONE; how <= BEFORE; how++)
					run(fd, how, copies, around);
	unlink(argv[1]);
	return 0;
}
