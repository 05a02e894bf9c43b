// SPDX-License-Identifier: Apache-2.0
/*
 * compare.c - copies of a file's pages, compared with the file: those of the checkpoint memfd, which
 * are mended where they differ, and samples of the pool's.
 *
 * What a plain mapping would show is asked of a mapping of our own. A page that is present in our
 * page table is in the cache and valid: a network file system that loses its right to a page takes it
 * out of all page tables (pagemap tells; mincore and cachestat lie or refuse for others' files). One
 * that is not present is read again, and faulted in for the next time.
 *
 * The mapping is only ever read by process_vm_readv(2): what would be SIGBUS is EFAULT there.
 * Everything here may wait for storage; so these are threads that nobody waits for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "service/compare.h"

/* A pread that took longer than this was a request to the storage, not a look into the cache. */
#define CACHED_NS 100000u

struct up_watch {
	int fd, memfd; /* of its own; memfd -1: none */
	uint64_t size;
	char *map;        /* of the file; NULL: it cannot be had */
	const char *copy; /* of the memfd; NULL: there is no room for it */
	int users;
};

uint64_t compare_clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* ------------------------------------------------------------------ what is watched */

int up_watch_create(struct up_watch **out, int fd, int memfd, uint64_t size_bytes)
{
	struct up_watch *w = calloc(1, sizeof(*w));

	if (!w)
		return -ENOMEM;
	*w = (struct up_watch){ .memfd = -1, .size = size_bytes, .users = 1 };
	w->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (w->fd >= 0 && memfd >= 0)
		w->memfd = fcntl(memfd, F_DUPFD_CLOEXEC, 0);
	if (w->fd < 0 || (memfd >= 0 && w->memfd < 0)) {
		int err = errno;

		up_watch_put(w);
		return -err;
	}
	*out = w;
	return 0;
}

/* Mapped by the first round and not before: network file systems ask their servers for it. */
static void prepare(struct up_watch *w, int mapped)
{
	void *p;

	if (!w->copy) {
		p = mmap(NULL, w->size, PROT_READ, MAP_SHARED, w->memfd, 0);
		w->copy = p == MAP_FAILED ? NULL : p;
	}
	if (mapped && !w->map) {
		p = mmap(NULL, w->size, PROT_READ, MAP_SHARED, w->fd, 0);
		if (p != MAP_FAILED) {
			madvise(p, w->size, MADV_RANDOM); /* one page a fault */
			w->map = p;
		}
	}
}

void compare_keep(struct up_watch *w)
{
	__atomic_add_fetch(&w->users, 1, __ATOMIC_RELAXED);
}

void up_watch_put(struct up_watch *w)
{
	if (__atomic_sub_fetch(&w->users, 1, __ATOMIC_ACQ_REL))
		return;
	if (w->map)
		munmap(w->map, w->size);
	if (w->copy)
		munmap((void *)w->copy, w->size);
	up_close_file(w->fd);
	if (w->memfd >= 0)
		close(w->memfd);
	free(w);
}

/* ------------------------------------------------------------------ one page */

/* The file's bytes against the copy, which is written whole where it differs: a reader may see it
 * half old and half new inside one page, as it may in a plain mapping that is being written. */
static void compare(struct compare_turn *t, uint64_t page, const char *bytes)
{
	struct up_watch *w = t->job->watch;
	uint64_t at = page * t->page_bytes;
	const char *copy = w->copy + at;

	if (!w->copy) {
		copy = t->spare;
		if (pread(w->memfd, t->spare, t->page_bytes, (off_t)at) != (ssize_t)t->page_bytes)
			return;
	}
	t->r->compared++;
	if (!memcmp(bytes, copy, t->page_bytes))
		return;
	if (!t->r->differing++)
		t->r->first_differing = page;
	if (pwrite(w->memfd, bytes, t->page_bytes, (off_t)at) == (ssize_t)t->page_bytes)
		t->r->rewritten++;
}

static int inside(const struct compare_turn *t, uint64_t page)
{
	return page < t->job->watch->size / t->page_bytes;
}

/* The file's page by a read: 1 when it came. Whether storage was asked shows in the time it took. */
static int read_page(struct compare_turn *t, uint64_t page)
{
	struct up_watch *w = t->job->watch;
	uint64_t began = compare_clock_ns(CLOCK_MONOTONIC);
	ssize_t n = pread(w->fd, t->buffer, t->page_bytes, (off_t)(page * t->page_bytes));

	t->r->reads += compare_clock_ns(CLOCK_MONOTONIC) - began > CACHED_NS;
	return n == (ssize_t)t->page_bytes;
}

static int enough(const struct compare_turn *t)
{
	return t->r->reads >= t->job->reads_max ||
	       compare_clock_ns(CLOCK_MONOTONIC) - t->r->start_ns > t->job->limit_ns ||
	       __atomic_load_n(&t->checker->stop, __ATOMIC_RELAXED);
}

/* ------------------------------------------------------------------ by our own mapping */

static int present(const struct compare_turn *t, const char *address)
{
	uint64_t entry;
	off_t at = (off_t)((uintptr_t)address / t->page_bytes * sizeof(entry));

	return pread(t->checker->pagemap_fd, &entry, sizeof(entry), at) == sizeof(entry) &&
	       entry >> 63;
}

/* Of the n pages of list, which were present just now, those that could be read are compared and
 * marked; what has gone meanwhile is read by the caller. */
static void compare_mapped(struct compare_turn *t, const uint32_t *list, int n, uint8_t *done)
{
	const char *map = t->job->watch->map;
	struct iovec from[CHECKER_BATCH], to = { t->buffer, (size_t)n * t->page_bytes };
	ssize_t got;

	for (int i = 0; i < n; i++)
		from[i] = (struct iovec){ (void *)(map + t->job->page[list[i]] * t->page_bytes),
					  t->page_bytes };
	got = process_vm_readv(getpid(), &to, 1, from, (unsigned long)n, 0);
	for (int i = 0; i < n && got >= (ssize_t)((i + 1) * t->page_bytes); i++) {
		compare(t, t->job->page[list[i]], t->buffer + (uint64_t)i * t->page_bytes);
		done[list[i]] = 1;
	}
}

static void by_mapping(struct compare_turn *t, uint8_t *done)
{
	const char *map = t->job->watch->map;
	uint32_t list[CHECKER_BATCH];
	int n = 0;

	for (uint32_t i = 0; i < t->job->pages && map; i++) {
		uint64_t page = t->job->page[i];

		if (!inside(t, page) || !present(t, map + page * t->page_bytes))
			continue;
		list[n++] = i;
		if (n == CHECKER_BATCH) {
			compare_mapped(t, list, n, done);
			n = 0;
		}
	}
	if (n)
		compare_mapped(t, list, n, done);
}

/* Into our page table: from now on it tells by itself. The bytes have just come to the cache, so
 * this does not wait for storage with our address space locked. */
static void fault_in(struct compare_turn *t, uint64_t page)
{
	const char *map = t->job->watch->map;
	char byte;
	struct iovec to = { &byte, 1 }, from = { (void *)(map + page * t->page_bytes), 1 };

	if (map)
		process_vm_readv(getpid(), &to, 1, &from, 1, 0);
}

/* ------------------------------------------------------------------ a round */

static void round_of_checkpoints(struct compare_turn *t)
{
	struct up_compare_job *job = t->job;
	uint8_t *done = calloc(job->pages, 1);

	if (!done) {
		t->r->unread = job->pages;
		return;
	}
	prepare(job->watch, job->how == UP_COMPARE_MAPPED);
	if (job->how == UP_COMPARE_MAPPED)
		by_mapping(t, done);
	for (uint32_t n = 0; n < job->pages; n++) {
		uint32_t i = (job->start + n) % job->pages;

		if (done[i] || !inside(t, job->page[i]))
			continue;
		if (enough(t)) {
			if (!t->r->unread++)
				t->r->stopped_at = i;
			continue;
		}
		if (read_page(t, job->page[i])) {
			compare(t, job->page[i], t->buffer);
			if (job->how == UP_COMPARE_MAPPED)
				fault_in(t, job->page[i]);
		}
	}
	free(done);
}

static void round_of_samples(struct compare_turn *t)
{
	struct up_compare_job *job = t->job;

	for (uint32_t i = 0; i < job->pages; i++) {
		uint64_t at = job->page[i] * t->page_bytes, began = compare_clock_ns(CLOCK_MONOTONIC);

		if (!inside(t, job->page[i]))
			continue;
		if (enough(t)) {
			t->r->unread++;
			continue;
		}
		if (up_pool_read(job->pool, job->pool_file, at, t->page_bytes, t->buffer))
			continue;
		t->r->reads += compare_clock_ns(CLOCK_MONOTONIC) - began > CACHED_NS;
		/* it may leave at any moment, and does not count then */
		if (!up_pool_copy(job->pool, job->pool_file, at, t->page_bytes, t->spare))
			continue;
		t->r->compared++;
		if (memcmp(t->buffer, t->spare, t->page_bytes) && !t->r->differing++)
			t->r->first_differing = job->page[i];
	}
}

void compare_round(struct compare_turn *t)
{
	uint64_t cpu = compare_clock_ns(CLOCK_THREAD_CPUTIME_ID);
	struct stat st;

	t->r->start_ns = compare_clock_ns(CLOCK_MONOTONIC);
	if (t->job->pages && t->job->how == UP_COMPARE_POOL)
		round_of_samples(t);
	else if (t->job->pages)
		round_of_checkpoints(t);
	/* behind the pages: who wrote has moved the times by the time that we compared */
	if (fstat(t->job->watch->fd, &st)) {
		t->r->error = errno;
	} else {
		t->r->size_bytes = (uint64_t)st.st_size;
		t->r->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
		t->r->ctime_ns = (int64_t)st.st_ctim.tv_sec * 1000000000 + st.st_ctim.tv_nsec;
	}
	t->r->cpu_ns = compare_clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
	t->r->done_ns = compare_clock_ns(CLOCK_MONOTONIC);
}
