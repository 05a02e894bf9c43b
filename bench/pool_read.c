// SPDX-License-Identifier: Apache-2.0
/*
 * pool_read.c - one rank of a job that reads a file through a mapping, for bench/pool.py
 *
 *   pool_read [options] FILE
 *
 *   --how=mmap|direct|read   a mapping, O_DIRECT reads, or reads through the page cache
 *   --pattern=contiguous     rank r of n reads the r-th n-th of the file
 *            |skipping       units r, r + n, r + 2n, ...
 *            |whole          all of the file, as all the other ranks do
 *            |apart          all of the file, from the r-th n-th on and round the end
 *   --unit=BYTES             what is read at a time, a multiple of 4096
 *   --step=8|64              every word, or one word of every cache line
 *   --epochs=N               how often
 *   --remap                  a new mapping for each epoch, read twice: with empty page tables and
 *                            with full ones; the first one is held to the end
 *   --compute-us=N           a sleep for every MiB
 *   --gate=DIR               say in the FIFO DIR/up when the mapping is there and after each epoch,
 *                            and wait each time for a byte from the FIFO DIR/down.RANK
 *
 * Rank and ranks are mpirun's (OMPI_COMM_WORLD_RANK, _SIZE). A line of JSON for each event; `sum` is
 * the sum over all words that were read of word * (offset | 1), so that no byte and no place can be
 * wrong unseen. Faults are this thread's, context switches the process's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES	4096u
#define MIB		(1u << 20)

enum how { HOW_MMAP, HOW_DIRECT, HOW_READ };
enum pattern { CONTIGUOUS, SKIPPING, WHOLE, APART };
static const char *const how_names[] = { "mmap", "direct", "read", NULL };
static const char *const pattern_names[] = { "contiguous", "skipping", "whole", "apart", NULL };

struct job {
	enum how how;
	enum pattern pattern;
	uint64_t unit, step, epochs, compute_us, rank, ranks, size_bytes;
	bool remap;
	int fd, up, down;
	const char *base;	/* the mapping, or the buffer of reads */
};

struct result {
	uint64_t sum, bytes, uncomputed_bytes;
};

static void die(const char *what)
{
	fprintf(stderr, "pool_read: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- reading ----------------------------------------------------------------------------------- */

/* volatile: every word is read, whatever the compiler thinks of it */
static uint64_t sum_words(const char *bytes, uint64_t length, uint64_t offset, uint64_t step)
{
	uint64_t sum = 0;

	for (uint64_t at = 0; at + 8 <= length; at += step)
		sum += *(const volatile uint64_t *)(bytes + at) * ((offset + at) | 1);
	return sum;
}

static void read_unit(const struct job *j, uint64_t number, struct result *r)
{
	uint64_t offset = number * j->unit;
	uint64_t length = offset + j->unit > j->size_bytes ? j->size_bytes - offset : j->unit;
	const char *bytes = j->base + offset;

	if (j->how != HOW_MMAP) {
		ssize_t got = pread(j->fd, (void *)j->base, j->unit, (off_t)offset);

		if (got < 0 || (uint64_t)got < length)
			die("pread");
		bytes = j->base;
	}
	r->sum += sum_words(bytes, length, offset, j->step);
	r->bytes += length;
	r->uncomputed_bytes += length;
	if (j->compute_us && r->uncomputed_bytes >= MIB) {
		uint64_t us = j->compute_us * r->uncomputed_bytes / MIB;
		struct timespec ts = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };

		r->uncomputed_bytes = 0;
		nanosleep(&ts, NULL);
	}
}

static void read_part(const struct job *j, struct result *r)
{
	uint64_t units = (j->size_bytes + j->unit - 1) / j->unit;
	uint64_t first = units * j->rank / j->ranks, end = units * (j->rank + 1) / j->ranks;

	switch (j->pattern) {
	case CONTIGUOUS:
		for (uint64_t u = first; u < end; u++)
			read_unit(j, u, r);
		break;
	case SKIPPING:
		for (uint64_t u = j->rank; u < units; u += j->ranks)
			read_unit(j, u, r);
		break;
	case WHOLE:
	case APART:
		if (j->pattern == WHOLE)
			first = 0;
		for (uint64_t u = 0; u < units; u++)
			read_unit(j, (first + u) % units, r);
		break;
	}
}

static const char *map_file(const struct job *j)
{
	const char *base = mmap(NULL, j->size_bytes, PROT_READ, MAP_SHARED, j->fd, 0);

	if (base == MAP_FAILED)
		die("mmap");
	return base;
}

/* ---- what is said ------------------------------------------------------------------------------ */

/* One write(2) of less than PIPE_BUF: lines of several ranks do not mix. */
static void say(const struct job *j, const char *line)
{
	size_t length = strlen(line);
	char go;

	if (write(j->up, line, length) != (ssize_t)length)
		die("the gate");
	if (j->down >= 0 && read(j->down, &go, 1) != 1) {
		fprintf(stderr, "pool_read: the bench is gone\n");
		exit(1);
	}
}

static void run_epoch(struct job *j, uint64_t epoch)
{
	struct result r = { 0 }, again = { 0 };
	struct rusage was, is, thread_was, thread_is;
	uint64_t again_ns = 0, begin, end;
	const char *held = j->base;
	char line[1024];

	getrusage(RUSAGE_SELF, &was);
	getrusage(RUSAGE_THREAD, &thread_was);
	if (j->remap && epoch && j->how == HOW_MMAP)
		j->base = map_file(j);
	begin = now_ns();
	read_part(j, &r);
	end = now_ns();
	getrusage(RUSAGE_THREAD, &thread_is);
	getrusage(RUSAGE_SELF, &is);
	if (j->remap) {
		again_ns = now_ns();
		read_part(j, &again);
		again_ns = now_ns() - again_ns;
	}
	if (j->base != held) {
		munmap((void *)j->base, j->size_bytes);
		j->base = held;
	}
	snprintf(line, sizeof(line),
		 "{\"event\": \"epoch\", \"rank\": %" PRIu64 ", \"epoch\": %" PRIu64
		 ", \"begin_ns\": %" PRIu64 ", \"end_ns\": %" PRIu64 ", \"again_ns\": %" PRIu64
		 ", \"bytes\": %" PRIu64 ", \"sum\": %" PRIu64 ", \"again_sum\": %" PRIu64
		 ", \"minflt\": %ld, \"majflt\": %ld, \"nvcsw\": %ld, \"nivcsw\": %ld"
		 ", \"user_us\": %ld, \"system_us\": %ld}\n",
		 j->rank, epoch, begin, end, again_ns, r.bytes, r.sum, again.sum,
		 thread_is.ru_minflt - thread_was.ru_minflt,
		 thread_is.ru_majflt - thread_was.ru_majflt, is.ru_nvcsw - was.ru_nvcsw,
		 is.ru_nivcsw - was.ru_nivcsw,
		 (is.ru_utime.tv_sec - was.ru_utime.tv_sec) * 1000000 + is.ru_utime.tv_usec -
			 was.ru_utime.tv_usec,
		 (is.ru_stime.tv_sec - was.ru_stime.tv_sec) * 1000000 + is.ru_stime.tv_usec -
			 was.ru_stime.tv_usec);
	say(j, line);
}

/* ---- the command line -------------------------------------------------------------------------- */

static uint64_t number_of(const char *text)
{
	char *end;
	uint64_t value = strtoull(text, &end, 10);

	if (end == text || *end) {
		fprintf(stderr, "pool_read: not a number: %s\n", text);
		exit(2);
	}
	return value;
}

static unsigned int one_of(const char *const names[], const char *text)
{
	for (unsigned int i = 0; names[i]; i++)
		if (!strcmp(names[i], text))
			return i;
	fprintf(stderr, "pool_read: what is %s?\n", text);
	exit(2);
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text && *text ? number_of(text) : otherwise;
}

static int open_fifo(const char *directory, const char *name, int flags)
{
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, flags | O_CLOEXEC);
	if (fd < 0)
		die(path);
	return fd;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "how", required_argument, NULL, 'h' },
		{ "pattern", required_argument, NULL, 'p' },
		{ "unit", required_argument, NULL, 'u' },
		{ "step", required_argument, NULL, 's' },
		{ "epochs", required_argument, NULL, 'e' },
		{ "remap", no_argument, NULL, 'r' },
		{ "compute-us", required_argument, NULL, 'c' },
		{ "gate", required_argument, NULL, 'g' },
		{ 0 },
	};
	struct job j = { .unit = MIB, .step = 8, .epochs = 1, .up = STDOUT_FILENO, .down = -1 };
	const char *gate = NULL;
	char line[128];
	struct stat st;
	int opt;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'h': j.how = one_of(how_names, optarg); break;
		case 'p': j.pattern = one_of(pattern_names, optarg); break;
		case 'u': j.unit = number_of(optarg); break;
		case 's': j.step = number_of(optarg); break;
		case 'e': j.epochs = number_of(optarg); break;
		case 'r': j.remap = true; break;
		case 'c': j.compute_us = number_of(optarg); break;
		case 'g': gate = optarg; break;
		default: return 2;
		}
	}
	if (optind != argc - 1 || !j.unit || j.unit % PAGE_BYTES || j.step < 8 || j.step % 8)
		return 2;
	j.rank = from_environment("OMPI_COMM_WORLD_RANK", 0);
	j.ranks = from_environment("OMPI_COMM_WORLD_SIZE", 1);
	j.fd = open(argv[optind], O_RDONLY | O_CLOEXEC | (j.how == HOW_DIRECT ? O_DIRECT : 0));
	if (j.fd < 0 || fstat(j.fd, &st))
		die(argv[optind]);
	j.size_bytes = (uint64_t)st.st_size;
	if (j.how == HOW_MMAP) {
		j.base = map_file(&j);
	} else {
		void *buffer;

		if (posix_memalign(&buffer, PAGE_BYTES, j.unit))
			die("memory");
		memset(buffer, 1, j.unit);
		j.base = buffer;
	}
	if (gate) {
		j.up = open_fifo(gate, "up", O_WRONLY);
		snprintf(line, sizeof(line), "down.%" PRIu64, j.rank);
		j.down = open_fifo(gate, line, O_RDONLY);
		snprintf(line, sizeof(line), "{\"event\": \"ready\", \"rank\": %" PRIu64 "}\n",
			 j.rank);
		say(&j, line);
	}
	for (uint64_t epoch = 0; epoch < j.epochs; epoch++)
		run_epoch(&j, epoch);
	return 0;
}
