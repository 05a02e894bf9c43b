// SPDX-License-Identifier: Apache-2.0
/*
 * helper_stress DIRECTORY - the service's C (uffd_helper.c, residency.c, warm.c, bpf_ring.c) under
 * load, alone and without Python, so that a sanitizer sees nothing else. `make asan tsan` builds it
 * with them.
 *
 * Everything that it finds wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "service/helper.h"

#define CHECK(condition)                                                            \
	do {                                                                        \
		if (!(condition)) {                                                 \
			fprintf(stderr, "helper_stress:%d: not so: %s (errno %d)\n", \
				__LINE__, #condition, errno);                       \
			exit(1);                                                    \
		}                                                                   \
	} while (0)

static uint64_t page_bytes;
static const char *directory;

static void *start_cookie(pthread_t *thread, void *(*body)(void *), void *cookie)
{
	CHECK(!pthread_create(thread, NULL, body, cookie));
	return cookie;
}

/* ------------------------------------------------------------------ rings */

#define EVENTS 400000u

struct writer {
	struct up_ring *ring;
	int done;
};

/* As the agent does it (checkpoint.c, post). */
static void *write_events(void *cookie)
{
	struct writer *w = cookie;
	struct up_ring *ring = w->ring;

	for (uint64_t i = 0; i < EVENTS; i++) {
		uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_RELAXED);

		__atomic_fetch_add(&ring->faults, 1, __ATOMIC_RELAXED);
		if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) >= UP_RING_EVENTS) {
			__atomic_fetch_add(&ring->dropped, 1, __ATOMIC_RELAXED);
			continue;
		}
		ring->event[head % UP_RING_EVENTS] = (struct up_event){ .time_ns = i, .page = ~i };
		__atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
	}
	__atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void test_ring(void)
{
	struct up_event *event = malloc(UP_RING_EVENTS * sizeof(*event));
	struct up_ring_counts counts;
	struct writer w = { 0 };
	uint64_t taken = 0, next = 0;
	pthread_t thread;
	int fd, last = 0;

	CHECK(event && !up_ring_create(&w.ring, &fd));
	CHECK(ftruncate(fd, 4096) && errno == EPERM);
	start_cookie(&thread, write_events, &w);
	for (int round = 0; !last; round++) {
		/* the last look comes after the writer's last word */
		last = __atomic_load_n(&w.done, __ATOMIC_ACQUIRE);
		do {
			int max = round % 3 ? 1 + round % 700 : (int)UP_RING_EVENTS;
			int n = up_ring_drain(w.ring, event, max);

			CHECK(n >= 0 && n <= max);
			for (int i = 0; i < n; i++) {
				CHECK(event[i].time_ns >= next && event[i].page == ~event[i].time_ns);
				next = event[i].time_ns + 1;
			}
			taken += (uint64_t)n;
			if (!n)
				break;
		} while (last);
		up_ring_counts(w.ring, &counts);
	}
	pthread_join(thread, NULL);
	up_ring_counts(w.ring, &counts);
	CHECK(counts.faults == EVENTS && taken + counts.dropped == EVENTS);
	/* A client may write there what it likes. */
	for (uint64_t i = 0; i < 100; i++) {
		__atomic_store_n(&w.ring->head, counts.head + i * 0x9E3779B97F4A7C15u,
				 __ATOMIC_RELEASE);
		CHECK(up_ring_drain(w.ring, event, UP_RING_EVENTS) <= (int)UP_RING_EVENTS);
		__atomic_store_n(&w.ring->tail, i * 0xC2B2AE3D27D4EB4Fu, __ATOMIC_RELEASE);
		CHECK(up_ring_drain(w.ring, event, 17) <= 17);
	}
	up_ring_destroy(w.ring);
	up_ring_destroy(NULL);
	close(fd);
	free(event);
}

/* ------------------------------------------------------------------ a BPF ring buffer */

#define RECORDS 200000u
#define HEADER_BYTES 8
#define BUSY (1u << 31)
#define DISCARD (1u << 30)

struct record {
	uint64_t number, check[4]; /* 48 bytes with the header: no divisor of the ring's size */
};

/* The kernel's side (kernel/bpf/ringbuf.c) of a ring whose pages are a memfd's. Where the kernel has
 * the data mapped a second time, the memfd has other pages: what wraps around must lie there. */
struct kernel {
	uint64_t size, at; /* at: the producer's position */
	uint64_t *consumer, *producer;
	char *data;
	unsigned int seed;
	uint64_t whole; /* records of the right size that nobody discarded */
	int done;
};

/* Where a part of the memfd is mapped: the sanitizers must see both sides at the same addresses. */
static char *mapped(const char *memfd, uint64_t offset)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, at;
	char line[512], *found = NULL;

	CHECK(maps);
	while (fgets(line, sizeof(line), maps))
		if (strstr(line, memfd) && sscanf(line, "%lx-%*x %*s %lx", &start, &at) == 2 &&
		    at == offset)
			found = (char *)start;
	fclose(maps);
	return found;
}

/* Make room, as busy: other records may follow it before it is written. */
static char *reserve(struct kernel *k, uint32_t bytes)
{
	uint64_t end = k->at + ((HEADER_BYTES + bytes + 7) & ~7ull);
	char *record = k->data + (k->at & (k->size - 1));

	while (end - __atomic_load_n(k->consumer, __ATOMIC_ACQUIRE) > k->size)
		sched_yield();
	__atomic_store_n((uint32_t *)record, bytes | BUSY, __ATOMIC_RELAXED);
	k->at = end;
	__atomic_store_n(k->producer, end, __ATOMIC_RELEASE);
	return record;
}

/* Fill it and give it away. What is discarded or has another size, nobody wants. */
static void commit(struct kernel *k, char *record, uint32_t bytes, int discard)
{
	struct record r = { .number = k->whole };

	for (int i = 0; i < 4; i++)
		r.check[i] = (r.number + 1) * (0x9E3779B97F4A7C15u + (unsigned int)i);
	memset(record + HEADER_BYTES, 0x5a, bytes);
	if (bytes == sizeof(r)) {
		memcpy(record + HEADER_BYTES, &r, sizeof(r));
		k->whole += !discard;
	}
	__atomic_exchange_n((uint32_t *)record, discard ? bytes | DISCARD : bytes, __ATOMIC_ACQ_REL);
}

static uint32_t some_size(struct kernel *k)
{
	return rand_r(&k->seed) % 6 ? sizeof(struct record) : 1 + (uint32_t)rand_r(&k->seed) % 200;
}

static void *produce(void *cookie)
{
	struct kernel *k = cookie;

	while (k->whole < RECORDS) {
		uint32_t bytes = some_size(k), behind = 1 + (uint32_t)rand_r(&k->seed) % 30;
		char *record = reserve(k, bytes), *next = NULL;

		if (behind % 4 == 0) { /* ready before the one in front of it, and of no interest */
			next = reserve(k, behind);
			commit(k, next, behind, rand_r(&k->seed) % 2);
		}
		commit(k, record, bytes, rand_r(&k->seed) % 6 == 0);
	}
	__atomic_store_n(&k->done, 1, __ATOMIC_RELEASE);
	return NULL;
}

static uint64_t take_records(struct up_bpf_ring *ring, int max, uint64_t next)
{
	struct record *out = malloc((size_t)max * sizeof(*out)); /* no room for one more */
	int n;

	CHECK(out);
	n = up_bpf_ring_drain(ring, out, sizeof(*out), max);
	CHECK(n >= 0 && n <= max);
	for (int i = 0; i < n; i++, next++) {
		CHECK(out[i].number == next);
		for (int j = 0; j < 4; j++)
			CHECK(out[i].check[j] ==
			      (next + 1) * (0x9E3779B97F4A7C15u + (unsigned int)j));
	}
	free(out);
	return next;
}

static void test_bpf_ring(void)
{
	struct kernel k = { .size = page_bytes, .seed = 5 };
	int fd = memfd_create("fake-bpf-ring", MFD_CLOEXEC), last = 0;
	struct up_bpf_ring *ring;
	uint64_t next = 0, before;
	pthread_t thread;
	char *record;

	CHECK(fd >= 0 && !ftruncate(fd, (off_t)(2 * page_bytes + 2 * k.size)));
	CHECK(up_bpf_ring_open(&ring, -1, k.size) == -EBADF);
	CHECK(!up_bpf_ring_open(&ring, fd, k.size));
	k.consumer = (uint64_t *)mapped("fake-bpf-ring", 0);
	k.producer = (uint64_t *)mapped("fake-bpf-ring", page_bytes);
	CHECK(k.consumer && k.producer);
	k.data = (char *)k.producer + page_bytes;
	CHECK(!mprotect(k.producer, page_bytes + 2 * k.size, PROT_READ | PROT_WRITE));

	CHECK(take_records(ring, 7, 0) == 0); /* nothing was ever written */
	record = reserve(&k, sizeof(struct record));
	commit(&k, reserve(&k, 9), 9, 0);
	commit(&k, reserve(&k, sizeof(struct record)), sizeof(struct record), 1);
	CHECK(take_records(ring, 7, 0) == 0 && *k.consumer == 0); /* busy: it and all behind it */
	commit(&k, record, sizeof(struct record), 0);
	next = take_records(ring, 7, 0);
	CHECK(next == 1 && *k.consumer == k.at);

	start_cookie(&thread, produce, &k);
	for (int round = 0; !last; round++) {
		last = __atomic_load_n(&k.done, __ATOMIC_ACQUIRE);
		do {
			before = next;
			next = take_records(ring, 1 + round % 40, next);
		} while (last && next != before);
	}
	pthread_join(thread, NULL);
	CHECK(next == k.whole && next == RECORDS && *k.consumer == k.at);
	up_bpf_ring_close(ring);
	up_bpf_ring_close(NULL);
	for (uint64_t i = 0; i < 4; i++) /* nothing of it is left */
		CHECK(!mapped("fake-bpf-ring", i * page_bytes));
	close(fd);
}

/* ------------------------------------------------------------------ the file of the pool */

#define FILE_BYTES ((24ull << 20) + 1234)

static uint64_t word_at(uint64_t offset)
{
	return (offset / 8 + 1) * 0x9E3779B97F4A7C15u;
}

static int make_file(const char *name)
{
	uint64_t word[8192];
	char path[512];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	for (uint64_t at = 0; at < FILE_BYTES; at += sizeof(word)) {
		uint64_t left = FILE_BYTES - at;
		size_t n = left < sizeof(word) ? (size_t)left : sizeof(word);

		for (size_t i = 0; i < sizeof(word) / 8; i++)
			word[i] = word_at(at + 8 * i);
		CHECK(pwrite(fd, word, n, (off_t)at) == (ssize_t)n);
	}
	CHECK(!fsync(fd)); /* else its pages cannot leave the cache */
	return fd;
}

static void check_page(int fd, uint64_t page)
{
	uint64_t word[8192];

	CHECK(page_bytes <= sizeof(word));
	CHECK(pread(fd, word, page_bytes, (off_t)(page * page_bytes)) == (ssize_t)page_bytes);
	for (size_t i = 0; i < page_bytes / 8; i++)
		CHECK(word[i] == word_at(page * page_bytes + 8 * i));
}

/* ------------------------------------------------------------------ the pool */

#define JOBS 3000u

enum kind { GOOD, PAGES_ONLY, PAST_END, OVER_END, NO_FILE, NOT_A_FILE, FULL_MEMFD, KINDS };

struct counting {
	struct up_workers *pool;
	int stop;
};

static void *count_cpu(void *cookie)
{
	struct counting *c = cookie;

	while (!__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE))
		CHECK(up_workers_cpu_ns(c->pool) >= 0);
	return NULL;
}

/* What a finished job must say. */
static void check_result(const struct up_warm_job *job, const struct up_warm_result *r, int memfd)
{
	enum kind kind = (enum kind)(job->id % KINDS);

	CHECK(r->start_ns >= r->submit_ns && r->done_ns >= r->start_ns);
	CHECK(r->resident_bytes <= job->length && r->bytes <= job->length);
	if (kind == NO_FILE)
		CHECK(r->error == -EBADF && !r->copied);
	else if (kind == NOT_A_FILE)
		CHECK(r->error && !r->copied);
	else
		CHECK(!r->error);
	if (kind == GOOD)
		CHECK(r->bytes + r->resident_bytes == job->length && r->method <= UP_WARM_PREAD);
	for (uint32_t i = 0; i < job->pages; i++) {
		int whole = (job->page[i] + 1) * page_bytes <= FILE_BYTES;

		if (kind == GOOD || kind == PAGES_ONLY)
			CHECK((int)(r->copied >> i & 1) == whole);
		if (r->copied >> i & 1)
			check_page(memfd, job->page[i]);
	}
}

static void fill_job(struct up_warm_job *job, uint64_t id, int fd, int pipe_fd, int memfd,
		     unsigned int *seed)
{
	uint64_t mib = (uint64_t)(rand_r(seed) % 24);

	*job = (struct up_warm_job){ .id = id, .fd = fd, .checkpoint_fd = -1 };
	job->method = (uint32_t)(rand_r(seed) % 3);
	job->chunk_bytes = 65536u << rand_r(seed) % 7;
	job->offset = mib << 20;
	job->length = FILE_BYTES - job->offset < (2u << 20) ? FILE_BYTES - job->offset : 2u << 20;
	job->offset += (uint64_t)(rand_r(seed) % 3) * 512;
	job->length -= 1024;
	switch ((enum kind)(id % KINDS)) {
	case PAGES_ONLY:
		job->length = 0;
		break;
	case PAST_END:
		job->offset = FILE_BYTES + (mib << 20);
		break;
	case OVER_END:
		job->offset = FILE_BYTES - 777;
		break;
	case NO_FILE:
		job->fd = -1;
		break;
	case NOT_A_FILE:
		job->fd = pipe_fd;
		break;
	default:
		break;
	}
	if (id % KINDS == FULL_MEMFD || !memfd)
		return;
	job->checkpoint_fd = memfd;
	job->pages = (uint32_t)(rand_r(seed) % 17);
	for (uint32_t i = 0; i < job->pages; i++) /* sometimes the broken last one */
		job->page[i] = (uint64_t)rand_r(seed) % (FILE_BYTES / page_bytes + 1);
}

static void test_workers(int threads)
{
	struct up_warm_job *job = calloc(JOBS, sizeof(*job));
	struct up_warm_result result[64];
	int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), fd = make_file("pool");
	int pipe_fd[2], rw, ro, refused = 0;
	struct counting counting = { 0 };
	unsigned int seed = (unsigned int)threads;
	uint32_t sent = 0, seen = 0;
	uint64_t told = 0, more;
	pthread_t thread;

	CHECK(job && event_fd >= 0 && !pipe(pipe_fd));
	CHECK(!up_checkpoint_memfd((FILE_BYTES + page_bytes - 1) & ~(page_bytes - 1), &rw, &ro));
	CHECK(ftruncate(rw, 0) && errno == EPERM);
	CHECK(write(ro, "x", 1) < 0 && errno == EBADF);
	CHECK(up_workers_create(&counting.pool, threads, event_fd) == threads);
	start_cookie(&thread, count_cpu, &counting);
	while (seen < JOBS) {
		int n;

		while (sent < JOBS) {
			fill_job(&job[sent], sent, fd, pipe_fd[0], rw, &seed);
			if (up_workers_submit(counting.pool, &job[sent]) == -EAGAIN) {
				refused++;
				break;
			}
			sent++;
		}
		up_workers_start(counting.pool);
		if (seen % 500 == 0)
			posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		n = up_workers_reap(counting.pool, result, 1 + (int)(seen % 64));
		for (int i = 0; i < n; i++) {
			CHECK(result[i].id < sent);
			check_result(&job[result[i].id], &result[i], rw);
			job[result[i].id].id = UINT64_MAX; /* no job is told twice */
			job[result[i].id].pages = 99;
		}
		seen += (uint32_t)n;
		if (!n)
			sched_yield();
	}
	CHECK(refused); /* the queue was full once */
	/* A worker tells the eventfd after its result can be taken. */
	while (told < JOBS)
		if (read(event_fd, &more, sizeof(more)) == sizeof(more))
			told += more;
	CHECK(told == JOBS);
	__atomic_store_n(&counting.stop, 1, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
	/* Ended with jobs in the queue, under way, and done but not taken. */
	for (uint32_t i = 0; i < 200; i++) {
		fill_job(&job[i], i, fd, pipe_fd[0], rw, &seed);
		CHECK(!up_workers_submit(counting.pool, &job[i]));
	}
	up_workers_start(counting.pool);
	up_workers_destroy(counting.pool);
	up_workers_destroy(NULL);
	close(event_fd);
	close(fd);
	close(pipe_fd[0]);
	close(pipe_fd[1]);
	close(rw);
	close(ro);
	free(job);
}

/* ------------------------------------------------------------------ residency, page tables */

/* What is told of a range once it has been read. The kernel may take a page away again at any time: then
 * it is read once more. */
static int64_t told_of(int fd, uint64_t offset, uint64_t length)
{
	static char bytes[FILE_BYTES];
	int64_t told = 0;
	int sensor;

	for (int i = 0; i < 100 && told != (int64_t)length; i++) {
		CHECK(pread(fd, bytes, length, (off_t)offset) == (ssize_t)length);
		told = up_resident_bytes(fd, offset, length, &sensor);
	}
	return told;
}

static void test_residency(void)
{
	int sensor, fd = make_file("residency");

	CHECK(told_of(fd, 0, FILE_BYTES) == (int64_t)FILE_BYTES);
	CHECK(told_of(fd, 100, 1) == 1);
	CHECK(told_of(fd, 4095, 2) == 2);
	CHECK(up_resident_bytes(fd, 0, 0, &sensor) == 0);
	CHECK(up_resident_bytes(fd, FILE_BYTES + (1 << 20), 4096, &sensor) == 0);
	CHECK(up_resident_bytes(-1, 0, 4096, &sensor) < 0);
	CHECK(!posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
	CHECK(told_of(fd, 8 << 20, page_bytes) == (int64_t)page_bytes);
	check_page(fd, (8 << 20) / page_bytes);
	close(fd);
}

struct scanner {
	unsigned char *p;
	uint64_t pages;
};

static void *scan(void *cookie)
{
	struct scanner *s = cookie;
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	uint64_t start = (uintptr_t)s->p, end = start + s->pages * page_bytes;

	CHECK(fd >= 0);
	for (int round = 0; round < 200; round++) {
		int max = 1 + round % 40;
		uint64_t *run = malloc((size_t)max * 2 * sizeof(*run)); /* no room for one more */
		uint64_t at = start, next, found = 0;

		CHECK(run);
		while (at < end) {
			int n = up_touched_runs(fd, at, end - at, run, max, &next);

			CHECK(n >= 0 && n <= max && next > at && next <= end);
			for (int i = 0; i < n; i++) {
				/* every third page was touched */
				CHECK(run[2 * i + 1] == page_bytes);
				CHECK((run[2 * i] - start) / page_bytes % 3 == 0);
				found++;
			}
			at = next;
		}
		CHECK(found == (s->pages + 2) / 3);
		free(run);
	}
	close(fd);
	return NULL;
}

static void test_page_tables(void)
{
	uint64_t run[2], next, pages = 4000;
	unsigned char *p = mmap(NULL, pages * page_bytes, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct scanner s = { p, pages };
	pthread_t thread[3];

	CHECK(p != MAP_FAILED && !madvise(p, pages * page_bytes, MADV_NOHUGEPAGE));
	for (uint64_t i = 0; i < pages; i += 3)
		p[i * page_bytes] = 1;
	CHECK(up_touched_runs(-1, (uintptr_t)p, page_bytes, run, 1, &next) < 0);
	for (int i = 0; i < 3; i++)
		start_cookie(&thread[i], scan, &s);
	for (int i = 0; i < 3; i++)
		pthread_join(thread[i], NULL);
	munmap(p, pages * page_bytes);
}

/* ------------------------------------------------------------------ names in directories */

#define NAMES 3000

static int make_directory(const char *name)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	CHECK(!mkdir(path, 0700));
	fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

static void open_name(int at, const char *name, int flags)
{
	int fd = openat(at, name, flags | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	close(fd);
}

static void test_listing(void)
{
	int fd = make_directory("listing");
	struct up_listing *listing;
	char name[256];

	CHECK(!up_listing_read(&listing, fd, 10));
	CHECK(!listing->files->count && up_names_find(listing->files, "a") == -1);
	up_listing_free(listing);
	for (int i = 0; i < NAMES; i++) {
		snprintf(name, sizeof(name), "%d%.*s", i * 7919 % NAMES, i % 200, /* of any length */
			 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
			 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
		if (i % 10)
			open_name(fd, name, O_CREAT | O_WRONLY);
		else
			CHECK(!mkdirat(fd, name, 0700));
	}
	CHECK(up_listing_read(&listing, fd, NAMES - 1) == -E2BIG);
	CHECK(!up_listing_read(&listing, fd, NAMES));
	CHECK(listing->files->count == NAMES - NAMES / 10 && listing->directories->count == NAMES / 10);
	for (uint32_t i = 0; i < listing->files->count; i++) {
		const struct up_names *n = listing->files;

		CHECK(up_names_find(n, n->text + n->offset[i]) == i);
		CHECK(n->by_name[n->name_place[i]] == i && n->by_inode[n->inode_place[i]] == i);
		CHECK(!i || n->inode[n->by_inode[i - 1]] <= n->inode[n->by_inode[i]]);
	}
	CHECK(up_names_find(listing->files, "") == -1 && up_names_find(listing->files, "z") == -1);
	up_listing_free(listing);
	close(fd);
	CHECK(up_listing_read(&listing, fd, NAMES) == -EBADF);
}

/* What is told of the names that are opened in a directory, more than come with one read. */
static void check_opens(int group, int (*read_all)(int, struct up_name_event *), int at)
{
	static struct up_name_event event[UP_NAMES_AT_ONCE];
	int seen = 0, n;
	char name[32];

	CHECK(!read_all(group, event));
	for (int i = 0; i < NAMES; i++) {
		snprintf(name, sizeof(name), "%d", i);
		open_name(at, name, O_CREAT | O_RDONLY);
	}
	while ((n = read_all(group, event)) > 0)
		for (int i = 0; i < n; i++, seen++) {
			snprintf(name, sizeof(name), "%d", seen);
			CHECK(event[i].kind == UP_NAMES_FILE && !strcmp(event[i].name, name));
			CHECK(event[i].name_bytes == strlen(name));
		}
	CHECK(!n && seen == NAMES);
	open_name(at, ".", O_RDONLY | O_DIRECTORY);
	CHECK(read_all(group, event) == 1 && event[0].kind == UP_NAMES_DIRECTORY && !event[0].name_bytes);
	for (int i = 0; i < 20000; i++) { /* of one name they may be told as one */
		snprintf(name, sizeof(name), "%d", i % NAMES);
		open_name(at, name, O_RDONLY);
	}
	while ((n = read_all(group, event)) > 0)
		seen = event[n - 1].kind;
	CHECK(!n && (seen == UP_NAMES_FILE || seen == UP_NAMES_LOST));
}

static void test_names(void)
{
	int fd = make_directory("inotify"), group = up_inotify_open(), watch;
	static struct up_name_event event[UP_NAMES_AT_ONCE];
	uint64_t identity;

	CHECK(group >= 0);
	watch = up_inotify_mark(group, fd);
	CHECK(watch > 0);
	check_opens(group, up_inotify_read, fd);
	CHECK(!up_inotify_unmark(group, watch) && up_inotify_unmark(group, watch) == -EINVAL);
	CHECK(up_inotify_read(group, event) == 1 && event[0].kind == UP_NAMES_GONE);
	CHECK(up_inotify_mark(group, -1) < 0);
	close(group);
	close(fd);
	CHECK(up_inotify_read(-1, event) == -EBADF && up_fanotify_read(-1, event) == -EBADF);

	group = up_fanotify_open();
	fd = make_directory("fanotify");
	if (group >= 0 && !up_fanotify_identify(fd, &identity) && !up_fanotify_mark(group, fd)) {
		check_opens(group, up_fanotify_read, fd);
		CHECK(!up_fanotify_unmark(group, fd) && up_fanotify_unmark(group, fd) == -ENOENT);
	}
	CHECK(up_fanotify_identify(-1, &identity) == -EBADF);
	if (group >= 0)
		close(group);
	close(fd);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: helper_stress DIRECTORY\n");
		return 2;
	}
	directory = argv[1];
	page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
	test_ring();
	test_bpf_ring();
	test_residency();
	test_page_tables();
	test_listing();
	test_names();
	test_workers(1);
	test_workers(8);
	puts("all as it should be");
	return 0;
}
