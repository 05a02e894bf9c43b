// SPDX-License-Identifier: Apache-2.0
/*
 * faultcost.c - what one touch of an armed checkpoint costs the job, beside a bare wake-up.
 *
 * Run under `uffdprefetch wrap --policy none`: maps FILE, waits until checkpoints are laid (they
 * are the mappings of our memfd in /proc/self/maps), touches each once and times it; then again
 * with a fresh mapping, ROUNDS times. The same number of times it touches ordinary cached pages
 * (a minor fault), and bounces a word to a second thread and back, through two futexes and through
 * two eventfds (two wake-ups: what the touch needs at least; an eventfd's are "sync", which lets
 * the scheduler keep both threads on one CPU, a futex's are not, nor are a userfaultfd's). One JSON line per kind: nanoseconds, sorted quantiles.
 *
 * GATE, if given, is a file that must exist before a round's touches begin and is waited for after
 * the checkpoints are laid: the driver stops or kills the service there.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SAMPLES_MAX 200000
#define CHECKPOINTS_MAX 4096

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static void pause_us(long us)
{
	struct timespec ts = { us / 1000000, us % 1000000 * 1000 };

	if (us)
		nanosleep(&ts, NULL);
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void report(const char *what, uint64_t *ns, size_t n)
{
	qsort(ns, n, sizeof(*ns), by_value);
	if (!n)
		printf("{\"what\": \"%s\", \"count\": 0}\n", what);
	else
		printf("{\"what\": \"%s\", \"count\": %zu, \"p50_ns\": %llu, \"p90_ns\": %llu, "
		       "\"p99_ns\": %llu, \"max_ns\": %llu}\n",
		       what, n, (unsigned long long)ns[n / 2], (unsigned long long)ns[n * 9 / 10],
		       (unsigned long long)ns[n * 99 / 100], (unsigned long long)ns[n - 1]);
	fflush(stdout);
}

/* The checkpoints that now lie over [base, +size). */
static size_t find_checkpoints(const char *base, size_t size, uintptr_t *at)
{
	char line[512];
	size_t n = 0;
	FILE *f = fopen("/proc/self/maps", "re");

	while (f && fgets(line, sizeof(line), f) && n < CHECKPOINTS_MAX) {
		uintptr_t start = (uintptr_t)strtoull(line, NULL, 16);

		if (strstr(line, "uffdprefetch-checkpoints") && start - (uintptr_t)base < size)
			at[n++] = start;
	}
	if (f)
		fclose(f);
	return n;
}

struct pair {
	int there, back;
};

static void *echo(void *arg)
{
	struct pair *p = arg;
	uint64_t one;

	while (read(p->there, &one, sizeof(one)) == sizeof(one) && one < 1000)
		if (write(p->back, &one, sizeof(one)) != sizeof(one))
			break;
	return NULL;
}

static size_t bounce(uint64_t *ns, size_t n, long pause)
{
	struct pair p = { eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC) };
	uint64_t one = 1, end = 1000, got;
	pthread_t thread;

	if (pthread_create(&thread, NULL, echo, &p))
		return 0;
	for (size_t i = 0; i < n; i++) {
		uint64_t t;

		pause_us(pause);
		t = now_ns();
		if (write(p.there, &one, 8) != 8 || read(p.back, &got, 8) != 8)
			return i;
		ns[i] = now_ns() - t;
	}
	if (write(p.there, &end, 8) == 8)
		pthread_join(thread, NULL);
	return n;
}

static uint32_t there, back;

static void wait_while(uint32_t *word, uint32_t value)
{
	while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value)
		syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void set(uint32_t *word, uint32_t value)
{
	__atomic_store_n(word, value, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *futex_echo(void *arg)
{
	for (uint32_t i = 0;; i++) {
		wait_while(&there, i);
		if (__atomic_load_n(&there, __ATOMIC_SEQ_CST) == UINT32_MAX)
			break;
		set(&back, i + 1);
	}
	return arg;
}

static size_t futex_bounce(uint64_t *ns, size_t n, long pause)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, futex_echo, NULL))
		return 0;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t t;

		pause_us(pause);
		t = now_ns();
		set(&there, i + 1);
		wait_while(&back, i);
		ns[i] = now_ns() - t;
	}
	set(&there, UINT32_MAX);
	pthread_join(thread, NULL);
	return n;
}

int main(int argc, char **argv)
{
	static uint64_t touch[SAMPLES_MAX], plain[SAMPLES_MAX], wake[SAMPLES_MAX], map[SAMPLES_MAX];
	static uintptr_t at[CHECKPOINTS_MAX];
	long rounds = argc > 2 ? atol(argv[2]) : 10, pause = argc > 3 ? atol(argv[3]) : 1000;
	long want = argc > 4 ? atol(argv[4]) : 100;
	const char *gate = argc > 5 ? argv[5] : NULL;
	size_t n = 0, m = 0, maps = 0;
	volatile char sink;
	struct stat st;
	int fd;

	if (argc < 2 || (fd = open(argv[1], O_RDONLY | O_CLOEXEC)) < 0 || fstat(fd, &st)) {
		fprintf(stderr, "usage: faultcost FILE [ROUNDS [PAUSE_US [CHECKPOINTS [GATE]]]]\n");
		return 2;
	}
	for (long round = 0; round < rounds; round++) {
		uint64_t t = now_ns(), deadline = t + 5000000000ull;
		char *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
		size_t found = 0;

		map[maps++] = now_ns() - t;
		if (p == MAP_FAILED)
			return 1;
		while ((found = find_checkpoints(p, (size_t)st.st_size, at)) < (size_t)want &&
		       now_ns() < deadline)
			pause_us(2000);
		if (gate) {
			printf("{\"what\": \"ready\", \"checkpoints\": %zu}\n", found);
			fflush(stdout);
			while (access(gate, F_OK))
				pause_us(2000);
		}
		for (size_t i = 0; i < found && n < SAMPLES_MAX; i++) {
			pause_us(pause);
			t = now_ns();
			sink = *(volatile char *)at[i];
			touch[n++] = now_ns() - t;
			pause_us(pause);
			t = now_ns();
			sink = *(volatile char *)(at[i] + (2u << 20) - 65536);
			plain[m++] = now_ns() - t;
		}
		munmap(p, (size_t)st.st_size);
	}
	(void)sink;
	report("touch to continue", touch, n);
	report("minor fault", plain, m);
	report("mmap", map, maps);
	n = n ? n : 1000;
	report("futex, there and back", wake, futex_bounce(wake, n, pause));
	report("eventfd, there and back", wake, bounce(wake, n, pause));
	return 0;
}
