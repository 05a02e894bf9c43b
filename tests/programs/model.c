// SPDX-License-Identifier: Apache-2.0
/*
 * model.c - thousands of random memory calls over a small arena, and what they did.
 *
 *     model FILE SEED OPERATIONS [VERBOSE_OPERATION]
 *     model FILE SEED OPERATIONS raw
 *
 * The arena lies at the same address in every run, so the same seed makes the same calls. Each call
 * is one line on stdout: its number, its name, its result, errno, and a hash over what every page
 * of the arena (or of the range, most of the time) then shows: its bytes, SIGSEGV, SIGBUS. A plain
 * run and a managed one must print the same. stderr gets counts that may differ.
 *
 * raw, raw-pool: three of four changes pass no library (raw.h). A process that has made one is not
 * managed any more, so each ROUND operations are a forked child's, which first maps through libc. Two
 * calls are known to answer otherwise over what we have laid: mremap(2) of more than one kind of pages,
 * which is EFAULT, and mprotect(2) for writing of a shared mapping, which would be EACCES. A guard page
 * is gone when the file is put back in the place of the checkpoint that it was set on; in the pool it
 * may be filled by a touch of its neighbours. Over the pool one more: a child has nothing, or the file,
 * where a raw call has changed the pool's mapping, or made the child. A round in which one has met it
 * says "known" and ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw.h"

#define PAGE 4096ul
#define ARENA ((char *)0x100000000000ul)
#define ARENA_PAGES 1536ul
#define FLOATING 4
#define ROUND 20
#define SEGMENT_PAGES 16ul
#define KNOWN 77 /* the status of a process that has met a known difference */

static uint64_t state;
static int file_fd, pipe_fd[2];
static size_t file_bytes;
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

static unsigned long number, verbose, over_checkpoints, waits;
static struct {
	char *base;
	size_t pages;
	int private, writable;
} floating[FLOATING];
static int is_child; /* of fork(2) */

static int raw_mode, pool, segment; /* pool: the raw mode with --engine pool */
static int raw; /* this operation passes no library */

static uint64_t draw(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1dull;
}

static uint64_t below(uint64_t n)
{
	return (draw() >> 11) % n;
}

/* ------------------------------------------------------------------ what a page shows */

static sigjmp_buf back;
static volatile sig_atomic_t expecting;

static void on_signal(int number_)
{
	if (!expecting) {
		static const char text[] = "model: a signal outside of a probe\n";

		if (write(2, text, sizeof(text) - 1) < 0)
			_exit(98);
		_exit(98);
	}
	siglongjmp(back, number_);
}

static uint64_t hash_bytes(const uint64_t *p, size_t words)
{
	uint64_t h = 0x9e3779b97f4a7c15ull;

	for (size_t i = 0; i < words; i++)
		h = (h ^ p[i]) * 0xff51afd7ed558ccdull, h ^= h >> 29;
	return h;
}

/* The hash of a page's bytes, or the number of the signal that reading it raises. */
static uint64_t look(const char *page)
{
	volatile uint64_t h;
	int sig = sigsetjmp(back, 1);

	if (sig)
		h = (uint64_t)sig;
	else {
		expecting = 1;
		h = hash_bytes((const uint64_t *)page, PAGE / 8);
	}
	expecting = 0;
	return h;
}

static uint64_t look_at(const char *from, size_t pages)
{
	uint64_t h = 0;

	for (size_t i = 0; i < pages; i++) {
		uint64_t one = look(from + i * PAGE);

		if (verbose && verbose == number)
			fprintf(stderr, "%lu page %zu %016lx\n", number, i, (unsigned long)one);
		h = (h ^ one) * 0xc4ceb9fe1a85ec53ull;
		h ^= h >> 32;
	}
	return h;
}

/* The same through the kernel: write(2) of a page to a pipe, and process_vm_readv of a few. */
static uint64_t look_from_kernel(const char *page, size_t pages)
{
	static uint64_t buffer[16 * PAGE / 8];
	ssize_t n = write(pipe_fd[1], page, PAGE);
	int error = n < 0 ? errno : 0;
	struct iovec to = { buffer, 16 * PAGE }, from = { (void *)page, pages * PAGE };
	uint64_t h;

	if (n > 0 && read(pipe_fd[0], buffer, (size_t)n) != n)
		abort();
	h = n > 0 ? hash_bytes(buffer, (size_t)n / 8) : (uint64_t)error;
	to.iov_len = pages * PAGE;
	n = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
	if (verbose)
		fprintf(stderr, "%lu by write %016lx by process_vm_readv %zd %016lx of %zu pages\n",
			number, (unsigned long)h, n,
			n > 0 ? (unsigned long)hash_bytes(buffer, (size_t)n / 8) : 0, pages);
	return h * 31 + (n > 0 ? hash_bytes(buffer, (size_t)n / 8) : (uint64_t)errno);
}

/* ------------------------------------------------------------------ saying */

static void line(const char *what, long result, uint64_t shown, const char *format, ...)
{
	int error = errno;
	char text[256], arguments[128];
	va_list ap;
	int n;

	va_start(ap, format);
	vsnprintf(arguments, sizeof(arguments), format, ap);
	va_end(ap);
	n = snprintf(text, sizeof(text), "%lu %s(%s) = %ld %s %016lx\n", number, what, arguments,
		     result, result < 0 ? strerrorname_np(error) : "-", (unsigned long)shown);
	if (write(1, text, (size_t)n) != n)
		_exit(97);
}

/* Where a result lies: in the arena its page, elsewhere 1; < 0: failed. */
static long where(const void *p)
{
	const char *c = p;

	if (p == MAP_FAILED)
		return -1;
	if (c >= ARENA && c < ARENA + ARENA_PAGES * PAGE)
		return (c - ARENA) / (long)PAGE;
	return 100000;
}

/* Mappings of ours in a range. */
static long ours(const char *from, size_t length)
{
	char text[512];
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long start, end;
	long n = 0;

	while (maps && fgets(text, sizeof(text), maps))
		n += strstr(text, "uffdprefetch-checkpoints") &&
		     sscanf(text, "%lx-%lx", &start, &end) == 2 &&
		     start < (unsigned long)from + length && (unsigned long)from < end;
	if (maps)
		fclose(maps);
	return n;
}

static long checkpoints(void)
{
	return ours(0, SIZE_MAX);
}

static void known(const char *call)
{
	dprintf(1, "known %s\n", call);
	_exit(KNOWN);
}

/* ------------------------------------------------------------------ two hands */

static void *by_mmap(void *at, size_t length, int prot, int flags, int fd, off_t offset)
{
	return raw ? raw_mmap(at, length, prot, flags, fd, offset) :
		     mmap(at, length, prot, flags, fd, offset);
}

static int by_munmap(void *at, size_t length)
{
	return raw ? raw_munmap(at, length) : munmap(at, length);
}

static int by_mprotect(void *at, size_t length, int prot, int pkey)
{
	if (raw_mode && prot & PROT_WRITE && ours(at, length))
		known("mprotect");
	if (pkey)
		return pkey_mprotect(at, length, prot, -1);
	return raw ? raw_mprotect(at, length, prot) : mprotect(at, length, prot);
}

static int by_madvise(void *at, size_t length, int advice)
{
	if ((pool || (raw_mode && raw)) && advice == MADV_GUARD_INSTALL && ours(at, length))
		known("guard");
	return raw ? raw_madvise(at, length, advice) : madvise(at, length, advice);
}

static void *by_mremap(void *at, size_t length, size_t to_length, int flags, void *to)
{
	int met = raw_mode && ours(at, length ? length : 1);
	void *p = raw ? raw_mremap(at, length, to_length, flags, to) :
			mremap(at, length, to_length, flags, to);

	if (met && (p == MAP_FAILED || to_length > length))
		known("mremap");
	return p;
}

/* ------------------------------------------------------------------ the calls */

static const int advices[] = { MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED,
			       MADV_DONTNEED, MADV_FREE, MADV_REMOVE, MADV_DONTFORK, MADV_DOFORK,
			       MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DODUMP, 20, 21,
			       22, 23, 102, 103, 77 };
static const int prots[] = { PROT_READ, PROT_READ, PROT_NONE, PROT_READ | PROT_WRITE, PROT_WRITE,
			     PROT_READ | PROT_EXEC };

struct range {
	char *at;
	size_t pages, length;
};

/* Mostly whole pages; now and then an address or a length that is none. */
static struct range some_range(void)
{
	struct range r;
	size_t page = below(ARENA_PAGES);

	r.pages = below(4) ? 1 + below(64) : 1 + below(ARENA_PAGES);
	if (r.pages > ARENA_PAGES - page)
		r.pages = ARENA_PAGES - page;
	r.at = ARENA + page * PAGE;
	r.length = r.pages * PAGE;
	switch (below(40)) {
	case 0:
		r.at += 1 + below(PAGE - 1);
		break;
	case 1:
		r.length -= below(PAGE);
		break;
	case 2:
		r.length = 0;
		break;
	}
	return r;
}

static void map_file(int how)
{
	size_t file_pages = (file_bytes + PAGE - 1) / PAGE;
	int whole = !below(3);
	size_t offset = whole ? 0 : below(file_pages + 2);
	size_t pages = whole ? file_pages : 1 + below(file_pages);
	size_t page = below(ARENA_PAGES);
	int private = !below(4);
	int prot = below(6) ? PROT_READ : prots[below(6)];
	int flags = (private ? MAP_PRIVATE : MAP_SHARED) | (below(8) ? 0 : MAP_POPULATE);
	void *p;

	if (pages > ARENA_PAGES - page)
		pages = ARENA_PAGES - page;
	flags |= how == 0 ? MAP_FIXED : MAP_FIXED_NOREPLACE;
	errno = 0;
	p = by_mmap(ARENA + page * PAGE, pages * PAGE, prot, flags, file_fd, (off_t)(offset * PAGE));
	line("mmap", where(p), p == MAP_FAILED ? 0 : look_at(p, pages < 48 ? pages : 48),
	     "%zu,%zu,%d,%x,%zu", page, pages, prot, flags, offset);
}

static void map_floating(void)
{
	size_t i = below(FLOATING), pages = (file_bytes + PAGE - 1) / PAGE;
	int private = !below(3), writable = private && below(2);
	int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
	int flags = (private ? MAP_PRIVATE : MAP_SHARED) | (below(4) ? 0 : MAP_POPULATE);
	void *p;

	if (floating[i].base)
		return;
	errno = 0;
	p = by_mmap(NULL, file_bytes, prot, flags, file_fd, 0);
	line("mmap-anywhere", where(p), p == MAP_FAILED ? 0 : look_at(p, pages), "%zu,%d,%x", i,
	     prot, flags);
	if (p == MAP_FAILED)
		return;
	floating[i].base = p;
	floating[i].pages = pages;
	floating[i].private = private;
	floating[i].writable = writable;
}

/* A write where the page lets us: a private page of our own stays our own. */
static void write_to(const char *what, char *at, long place)
{
	char value = (char)draw();
	volatile long ret = 0;
	int sig = sigsetjmp(back, 1);

	if (sig)
		ret = sig;
	else {
		expecting = 1;
		*(volatile char *)at = value;
	}
	expecting = 0;
	line(what, ret, 0, "%ld", place);
}

static void work_floating(void)
{
	size_t i = below(FLOATING), pages;
	int prot;
	long ret;
	void *p;

	if (!floating[i].base) {
		map_floating();
		return;
	}
	errno = 0;
	switch (below(8)) {
	case 0: /* a part of it */
		pages = 1 + below(floating[i].pages);
		floating[i].pages -= pages;
		ret = by_munmap(floating[i].base + floating[i].pages * PAGE, pages * PAGE);
		line("munmap-tail", ret, look_at(floating[i].base, floating[i].pages), "%zu,%zu", i,
		     pages);
		if (!floating[i].pages)
			floating[i].base = NULL;
		break;
	case 1:
		pages = 1 + below(2 * floating[i].pages);
		if (is_child && floating[i].private) /* a known difference: docs/safety.md */
			break;
		p = by_mremap(floating[i].base, floating[i].pages * PAGE, pages * PAGE,
			      MREMAP_MAYMOVE, NULL);
		if (p != MAP_FAILED) {
			floating[i].base = p;
			floating[i].pages = pages;
		}
		line("mremap-anywhere", where(p), look_at(floating[i].base, floating[i].pages),
		     "%zu,%zu", i, pages);
		break;
	case 2:
		ret = by_madvise(floating[i].base, floating[i].pages * PAGE,
			      advices[below(4)]); /* normal, random, sequential, willneed */
		line("madvise-floating", ret, 0, "%zu", i);
		break;
	case 3:
		line("read-floating", 0, look_at(floating[i].base, floating[i].pages), "%zu", i);
		break;
	case 4:
		ret = by_munmap(floating[i].base, floating[i].pages * PAGE);
		line("munmap-floating", ret, 0, "%zu", i);
		floating[i].base = NULL;
		break;
	case 5 ... 6:
		pages = below(floating[i].pages) * PAGE + below(PAGE);
		write_to("write-floating", floating[i].base + pages, (long)pages);
		break;
	case 7:
		floating[i].writable = floating[i].private && !floating[i].writable;
		prot = floating[i].writable ? PROT_READ | PROT_WRITE : PROT_READ;
		ret = by_mprotect(floating[i].base, floating[i].pages * PAGE, prot, 0);
		line("mprotect-floating", ret, look_at(floating[i].base, floating[i].pages), "%zu,%d",
		     i, prot);
		break;
	}
}

static void map_anonymous(void)
{
	struct range r = some_range();
	void *p;

	errno = 0;
	p = by_mmap(r.at, r.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
		 0);
	line("mmap-anonymous", where(p), 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
}

static void unmap(void)
{
	struct range r = some_range();
	long ret;

	errno = 0;
	ret = by_munmap(r.at, r.length);
	line("munmap", ret, 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
}

static void protect(void)
{
	struct range r = some_range();
	int prot = prots[below(6)];
	long ret;

	errno = 0;
	ret = by_mprotect(r.at, r.length, prot, 0);
	line("mprotect", ret, 0, "%ld,%zu,%d", (long)(r.at - ARENA), r.length, prot);
}

static void advise(void)
{
	struct range r = some_range();
	int advice = advices[below(sizeof(advices) / sizeof(advices[0]))];
	long ret;

	errno = 0;
	ret = by_madvise(r.at, r.length, advice);
	line("madvise", ret, 0, "%ld,%zu,%d", (long)(r.at - ARENA), r.length, advice);
}

static void move(void)
{
	struct range r = some_range(), to = some_range();
	size_t length = below(3) ? r.length : to.length;
	int flags = (int)below(8), shared_only = !below(12);
	void *p;

	if (!(flags & MREMAP_FIXED)) /* where the kernel puts it would differ */
		flags &= ~(MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
	errno = 0;
	p = by_mremap(r.at, shared_only ? 0 : r.length, length, flags, to.at);
	line("mremap", where(p), 0, "%ld,%zu,%zu,%d,%ld", (long)(r.at - ARENA), r.length, length,
	     flags, (long)(to.at - ARENA));
}

static void lock(void)
{
	struct range r = some_range();
	long ret;
	int which = (int)below(4);

	errno = 0;
	ret = which == 0 ? mlock(r.at, r.length) :
	      which == 1 ? mlock2(r.at, r.length, MLOCK_ONFAULT) :
			   munlock(r.at, r.length);
	line("mlock", ret, 0, "%d,%ld,%zu", which, (long)(r.at - ARENA), r.length);
	if (!ret && which < 2)
		munlock(r.at, r.length);
}

static void other(void)
{
	static unsigned char bits[ARENA_PAGES];
	struct range r = some_range();
	long ret;
	int prot;

	errno = 0;
	switch (below(4)) {
	case 0:
		ret = msync(r.at, r.length, below(2) ? MS_ASYNC : MS_SYNC | MS_INVALIDATE);
		line("msync", ret, 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
		break;
	case 1:
		ret = mincore(r.at, r.length, bits);
		line("mincore", ret, 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
		break;
	case 2:
		ret = remap_file_pages(r.at, r.length, 0, below(64), 0);
		line("remap_file_pages", ret, 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
		break;
	case 3:
		prot = prots[below(6)];
		ret = by_mprotect(r.at, r.length, prot, 1);
		line("pkey_mprotect", ret, 0, "%ld,%zu", (long)(r.at - ARENA), r.length);
		break;
	}
}

/* System V memory in place of whatever is there. */
static void attach_segment(void)
{
	size_t page = below(ARENA_PAGES - SEGMENT_PAGES);
	void *p;

	errno = 0;
	p = raw_shmat(segment, ARENA + page * PAGE, SHM_REMAP | (below(2) ? SHM_RDONLY : 0));
	line("shmat", where(p), p == (void *)-1 ? 0 : look_at(p, SEGMENT_PAGES), "%zu", page);
}

static void scribble(void)
{
	char *at = ARENA + below(ARENA_PAGES) * PAGE + below(PAGE);

	write_to("write", at, (long)(at - ARENA));
}

/* Until the other side has laid something, or a moment has gone by: no state of the model. */
static void wait_for_checkpoints(void)
{
	look_at(ARENA, ARENA_PAGES);
	if (!getenv("LD_PRELOAD"))
		return;
	for (int i = 0; i < 60 && !checkpoints(); i++)
		usleep(500);
	waits++;
}

static void operate(unsigned long operations, int child);

static void fork_one(void)
{
	uint64_t seed = draw();
	int status;
	pid_t pid;

	if (pool)
		known("fork");
	pid = raw ? raw_fork() : fork();
	if (pid == 0) {
		state = seed | 1;
		is_child = 1;
		operate(raw_mode ? 6 : 12, 1);
		line("child", 0, look_at(ARENA, ARENA_PAGES), "");
		_exit(0);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		abort();
	if (WIFEXITED(status) && WEXITSTATUS(status) == KNOWN)
		_exit(KNOWN);
	line("fork", status, look_at(ARENA, ARENA_PAGES), "");
}

static void one(int child)
{
	raw = raw_mode && below(4);
	if (raw && !below(30)) {
		attach_segment();
		return;
	}
	switch (below(child ? 37 : 38)) {
	case 0 ... 5:
		map_file(0);
		break;
	case 6 ... 7:
		map_file(1);
		break;
	case 8 ... 9:
		map_floating();
		break;
	case 10 ... 13:
		work_floating();
		break;
	case 14:
		map_anonymous();
		break;
	case 15 ... 18:
		unmap();
		break;
	case 19 ... 21:
		protect();
		break;
	case 22 ... 26:
		advise();
		break;
	case 27 ... 30:
		move();
		break;
	case 31:
		lock();
		break;
	case 32 ... 33:
		other();
		break;
	case 34 ... 36:
		scribble();
		break;
	case 37:
		if (!below(3))
			fork_one();
		break;
	}
}

static void operate(unsigned long operations, int child)
{
	for (unsigned long i = 0; i < operations; i++) {
		size_t page = below(ARENA_PAGES - 16), pages = 1 + below(16);
		uint64_t shown;

		number++;
		if (!child && !raw_mode && i % 8 == 0) {
			long n = checkpoints();

			over_checkpoints += n ? 8 : 0;
			if (!n && i % 64 == 0)
				wait_for_checkpoints();
		}
		one(child);
		shown = below(10) ? look_at(ARENA + page * PAGE, pages) :
				    look_at(ARENA, ARENA_PAGES);
		if (verbose)
			fprintf(stderr, "%lu by load %016lx\n", number, (unsigned long)shown);
		shown ^= look_from_kernel(ARENA + page * PAGE, pages);
		errno = 0;
		line("shows", 0, shown, "%zu,%zu", page, pages);
	}
}

/* A process that is managed, and then changes what it likes. */
static void one_round(void)
{
	raw = 0;
	map_floating();
	map_floating();
	map_file(1);
	map_file(1);
	if (checkpoints())
		dprintf(2, "met\n");
	operate(ROUND, 0);
	raw = 0;
	line("end", 0, look_at(ARENA, ARENA_PAGES), "");
	_exit(0);
}

static void rounds(unsigned long operations)
{
	segment = shmget(IPC_PRIVATE, SEGMENT_PAGES * PAGE, 0600 | IPC_CREAT);
	char *p = shmat(segment, NULL, 0); /* the segment lives until we end, and no longer */

	if (segment < 0 || p == (char *)-1 || shmctl(segment, IPC_RMID, NULL))
		abort();
	for (unsigned long i = 0; i < operations; i += ROUND) {
		uint64_t seed = draw();
		int status;
		pid_t pid;

		for (size_t at = 0; at < SEGMENT_PAGES * PAGE; at++) /* a round may have written it */
			p[at] = (char)draw();
		dprintf(1, "round %lu\n", i / ROUND);
		pid = fork();
		if (pid == 0) {
			state = seed | 1;
			one_round();
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid)
			abort();
		if (!WIFEXITED(status) || (WEXITSTATUS(status) && WEXITSTATUS(status) != KNOWN))
			dprintf(1, "status %d\n", status);
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_signal };
	unsigned long operations;
	struct stat st;

	if (argc < 4)
		return 2;
	file_fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	state = strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15ull | 1;
	operations = strtoul(argv[3], NULL, 10);
	pool = argc > 4 && !strcmp(argv[4], "raw-pool");
	raw_mode = pool || (argc > 4 && !strcmp(argv[4], "raw"));
	verbose = argc > 4 ? strtoul(argv[4], NULL, 10) : 0;
	if (file_fd < 0 || fstat(file_fd, &st) || pipe2(pipe_fd, O_CLOEXEC))
		return 3;
	file_bytes = (size_t)st.st_size;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	if (raw_mode)
		rounds(operations);
	else
		operate(operations, 0);
	fprintf(stderr, "{\"over_checkpoints\": %lu, \"waits\": %lu}\n", over_checkpoints, waits);
	return 0;
}
