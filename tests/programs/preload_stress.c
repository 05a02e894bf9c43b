// SPDX-License-Identifier: Apache-2.0
/*
 * preload_stress - a job that does to its mappings whatever a job may do, from many threads, and
 * checks every byte that it reads. `make asan tsan` builds it with a sanitizer; tests run it under
 * `wrap` with the preload object that was built with the same one.
 *
 *   preload_stress FILE make MIB              fill FILE
 *   preload_stress FILE storm THREADS STEPS [unwatched]
 *                                             everything at once; says "half" in the middle, and
 *                                             goes on there until its stdin ends;
 *                                             unwatched: the agent may be dead
 *   preload_stress FILE many THREADS ROUNDS   map, read, unmap; and more mappings than are managed
 *   preload_stress FILE ends                  every way to end a process, each in a child
 *   preload_stress FILE end HOW               one of them
 *
 * Under wrap it first waits until checkpoints lie over a mapping, unless it shall not. Status 1 and
 * one line: a wrong byte, or a call that did what it does not do to a plain mapping.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                             \
	do {                                                                         \
		if (!(condition)) {                                                  \
			dprintf(2, "preload_stress:%d: not so: %s (errno %d)\n",     \
				__LINE__, #condition, errno);                        \
			_exit(1);                                                    \
		}                                                                    \
	} while (0)

#define CHECKPOINTS "uffdprefetch-checkpoints" /* in /proc/self/maps */
#define RING "uffdprefetch-ring"
#define PIECES 12
#define MIB (1ul << 20)
/* a mapping that is worth managing with the tests' --min-size of 1 MiB */
#define MIN_BYTES (2 * MIB)

struct piece {
	unsigned char *at;
	size_t bytes;
	uint64_t offset;
};

struct worker {
	pthread_t thread;
	unsigned int seed;
	unsigned int steps;
	void (*body)(struct worker *w);
	struct piece piece[PIECES];
	int pieces;
};

/* LeakSanitizer asks. In a forked child it looks for the parent's threads, which are not there. */
static int forked;

int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
	return forked;
}

static const char *path;
static uint64_t file_bytes;
static size_t page_bytes;
static _Atomic unsigned int steps_done;
static unsigned int steps_half;
static _Atomic int stop, readers;

static unsigned int pick(struct worker *w, uint64_t n)
{
	return (unsigned int)((unsigned int)rand_r(&w->seed) % n);
}

static uint64_t word_at(uint64_t offset)
{
	return (offset / 8 + 1) * 0x9E3779B97F4A7C15u;
}

static void check_word(const struct piece *p, uint64_t at)
{
	uint64_t word;

	memcpy(&word, p->at + at, sizeof(word));
	if (word == word_at(p->offset + at))
		return;
	dprintf(2, "preload_stress: wrong word %016llx at %llu of the file\n",
		(unsigned long long)word, (unsigned long long)(p->offset + at));
	_exit(1);
}

/* Every page of [from, from + bytes), in order: as a reader that streams. */
static void read_part(const struct piece *p, uint64_t from, uint64_t bytes, unsigned int salt)
{
	uint64_t end = from + bytes < p->bytes ? from + bytes : p->bytes;

	for (uint64_t at = from & ~(uint64_t)(page_bytes - 1); at < end; at += page_bytes)
		check_word(p, at + (at / page_bytes * 72 + salt * 8) % page_bytes);
}

/* ------------------------------------------------------------------ what a thread may do */

static struct piece *any(struct worker *w)
{
	return &w->piece[pick(w, (uint64_t)w->pieces)];
}

static size_t some_pages(struct worker *w, size_t bytes)
{
	return pick(w, bytes / page_bytes) * page_bytes;
}

static void drop(struct worker *w, struct piece *p)
{
	*p = w->piece[--w->pieces];
}

static struct piece map_piece(struct worker *w)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct piece p = { .offset = pick(w, 2) ? 0 : some_pages(w, file_bytes - MIN_BYTES) };

	CHECK(fd >= 0);
	p.bytes = file_bytes - p.offset;
	if (pick(w, 3) == 0)
		p.bytes = MIN_BYTES;
	p.at = mmap(NULL, p.bytes, PROT_READ, pick(w, 3) ? MAP_SHARED : MAP_PRIVATE, fd,
		    (off_t)p.offset);
	CHECK(p.at != MAP_FAILED);
	CHECK(!close(fd)); /* the number is anybody's from now on */
	return p;
}

static void do_map(struct worker *w)
{
	if (w->pieces < PIECES)
		w->piece[w->pieces++] = map_piece(w);
}

static void do_read(struct worker *w)
{
	struct piece *p = any(w);

	read_part(p, pick(w, p->bytes), 4 * MIB, pick(w, 1000));
}

static void do_unmap(struct worker *w)
{
	struct piece *p = any(w);

	CHECK(!munmap(p->at, p->bytes));
	drop(w, p);
}

/* Take [from, from + bytes) out of a piece: what is left are at most two. */
static void cut(struct worker *w, struct piece *p, size_t from, size_t bytes)
{
	struct piece tail = { p->at + from + bytes, p->bytes - from - bytes,
			      p->offset + from + bytes };

	p->bytes = from;
	if (!p->bytes)
		drop(w, p);
	if (tail.bytes)
		w->piece[w->pieces++] = tail;
}

static void do_unmap_part(struct worker *w)
{
	struct piece *p = any(w);
	size_t from = some_pages(w, p->bytes), bytes;

	if (p->bytes < 4 * page_bytes || w->pieces == PIECES)
		return;
	bytes = page_bytes + some_pages(w, p->bytes - from);
	if (bytes > p->bytes - from)
		bytes = p->bytes - from;
	CHECK(!munmap(p->at + from, bytes));
	cut(w, p, from, bytes);
}

static void do_map_over(struct worker *w)
{
	struct piece *p = any(w);
	size_t from = some_pages(w, p->bytes);
	unsigned char *over;

	if (p->bytes < 4 * page_bytes || w->pieces == PIECES)
		return;
	over = mmap(p->at + from, page_bytes, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(over == p->at + from);
	memset(over, 0x5a, page_bytes);
	cut(w, p, from, page_bytes);
	for (size_t i = 0; i < page_bytes; i++)
		CHECK(over[i] == 0x5a); /* nobody lays a checkpoint there any more */
	CHECK(!munmap(over, page_bytes));
}

/* With its agent dead, what lies over a mapping stays; the kernel remaps one mapping at a time. */
static int unwatched;

static int refused(const void *target)
{
	return unwatched && target == MAP_FAILED && errno == EFAULT;
}

static void do_remap(struct worker *w)
{
	struct piece *p = any(w);
	size_t bytes = p->bytes;
	void *target;

	switch (pick(w, 3)) {
	case 0: /* to a place of our choice */
		target = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(target != MAP_FAILED);
		void *moved = mremap(p->at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target);

		if (refused(moved))
			return;
		CHECK(moved == target);
		p->at = target;
		break;
	case 1: /* shorter */
		bytes = page_bytes + some_pages(w, bytes);
		if (bytes > p->bytes)
			return;
		CHECK(mremap(p->at, p->bytes, bytes, 0) == p->at);
		p->bytes = bytes;
		break;
	default: /* longer, wherever there is room */
		if (p->offset + bytes + 16 * page_bytes > file_bytes)
			return;
		target = mremap(p->at, bytes, bytes + 16 * page_bytes, MREMAP_MAYMOVE);
		if (refused(target))
			return;
		CHECK(target != MAP_FAILED);
		p->at = target;
		p->bytes = bytes + 16 * page_bytes;
	}
}

static void do_advise(struct worker *w)
{
	static const int whole[] = { MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED,
				     MADV_DONTNEED };
	struct piece *p = any(w);
	size_t from = some_pages(w, p->bytes);

	CHECK(!madvise(p->at, p->bytes, whole[pick(w, 5)]));
	CHECK(!madvise(p->at + from, page_bytes, MADV_DONTNEED));
	CHECK(!posix_madvise(p->at, p->bytes, POSIX_MADV_NORMAL)); /* and of one kind again */
}

static void do_protect(struct worker *w)
{
	struct piece *p = any(w);
	size_t from = some_pages(w, p->bytes);

	CHECK(!mprotect(p->at + from, page_bytes, PROT_NONE));
	CHECK(!mprotect(p->at + from, page_bytes, PROT_READ));
	check_word(p, from);
}

static void do_lock(struct worker *w)
{
	struct piece *p = any(w);
	size_t from = some_pages(w, p->bytes);

	if (mlock(p->at + from, page_bytes)) {
		CHECK(errno == ENOMEM || errno == EPERM); /* RLIMIT_MEMLOCK */
		return;
	}
	check_word(p, from);
	CHECK(!munlock(p->at + from, page_bytes));
}

/* The kernel reads the mapping: a touch that no thread of ours makes. */
static void do_kernel_read(struct worker *w)
{
	/* No malloc here: gcc 12's ASan does not free its allocator's lock in a forked child. */
	unsigned char buffer[65536];
	const struct piece *p = any(w);
	struct piece copy = { buffer, page_bytes, p->offset + some_pages(w, p->bytes) };
	int fd[2];

	CHECK(page_bytes <= sizeof(buffer) && !pipe2(fd, O_CLOEXEC));
	CHECK(write(fd[1], p->at + (copy.offset - p->offset), page_bytes) == (ssize_t)page_bytes);
	CHECK(read(fd[0], copy.at, page_bytes) == (ssize_t)page_bytes);
	read_part(&copy, 0, page_bytes, pick(w, 1000));
	close(fd[0]);
	close(fd[1]);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Whether an agent of this process has been answered. No malloc here, either. */
static int is_known(void)
{
	static char text[65536];
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), known = 0;
	ssize_t n;

	CHECK(fd >= 0);
	while (!known && (n = read(fd, text, sizeof(text))) > 0) /* whole lines */
		known = memmem(text, (size_t)n, RING, sizeof(RING) - 1) != NULL;
	close(fd);
	return known;
}

static void read_some(struct worker *w, unsigned int how)
{
	for (int i = 0; i < w->pieces; i++)
		read_part(&w->piece[i], pick(w, w->piece[i].bytes), MIB, how);
}

/* Everything ends with it: the mapping of a forked child is inherited, then its own. */
static void in_child(struct worker *w, unsigned int how)
{
	if (how & 1) /* at once, while the agent is only starting */
		do_map(w);
	read_some(w, how);
	if (how & 8) { /* its agent says nothing for 5 ms; and there may be none */
		uint64_t most = now_ns() + 1000000000, end;

		while (!unwatched && now_ns() < most && !is_known())
			read_some(w, how);
		for (end = now_ns() + 20000000; now_ns() < end;)
			read_some(w, how);
	}
	if (how & 2)
		CHECK(!seteuid(geteuid())); /* no agent after this */
	if (how & 4)
		do_unmap(w);
	if (w->pieces)
		do_read(w);
}

/* gcc 12's ASan does not free its allocator's locks in a forked child, which starts an agent (there
 * a pthread) at once: no other thread may be inside the allocator at a fork. */
#ifdef __SANITIZE_ADDRESS__
static pthread_rwlock_t steps =
	PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

static void step_begins(void)
{
	pthread_rwlock_rdlock(&steps);
}

static void step_ends(void)
{
	pthread_rwlock_unlock(&steps);
}

static pid_t fork_alone(void)
{
	pid_t pid;

	step_ends();
	pthread_rwlock_wrlock(&steps);
	pid = fork();
	if (pid) { /* the child has no steps, and nobody to free the lock for */
		step_ends();
		step_begins();
	}
	return pid;
}
#else
static void step_begins(void)
{
}

static void step_ends(void)
{
}

static pid_t fork_alone(void)
{
	return fork();
}
#endif

static void do_fork(struct worker *w)
{
	unsigned int how = pick(w, 16);
	int status;
	pid_t pid = fork_alone();

	CHECK(pid >= 0);
	if (!pid) {
		forked = 1;
		in_child(w, how);
		if (how == 15)
			exit(0); /* with everything that exit does */
		_exit(0);
	}
	do_read(w);
	CHECK(waitpid(pid, &status, 0) == pid && !status);
}

static void one_step(struct worker *w)
{
	static void (*const rare[])(struct worker *) = {
		do_unmap_part, do_map_over, do_remap, do_protect, do_lock, do_fork,
	};
	static void (*const common[])(struct worker *) = {
		do_read, do_read, do_read, do_read, do_map, do_map, do_unmap, do_advise,
		do_kernel_read,
	};
	unsigned int n = pick(w, 100);

	step_begins();
	if (!w->pieces)
		do_map(w);
	else if (n < 12)
		rare[n / 2](w);
	else
		common[n % (sizeof(common) / sizeof(common[0]))](w);
	if (++steps_done == steps_half) { /* not dprintf: a child's exit(3) would say it again */
		static const char half[] = "{\"at\": \"half\"}\n";

		CHECK(write(1, half, sizeof(half) - 1) == sizeof(half) - 1);
	}
	step_ends();
}

/* Whether somebody holds it at half until then (tests/support/harness.py: Job). */
static int stdin_has_ended(void)
{
	struct pollfd end = { .fd = 0, .events = POLLIN };

	return poll(&end, 1, 0) > 0;
}

static void storm(struct worker *w)
{
	for (unsigned int i = 0; i < w->steps; i++) {
		one_step(w);
		while (i == w->steps / 2 && !stdin_has_ended())
			one_step(w);
	}
	while (w->pieces)
		do_unmap(w);
}

/* ------------------------------------------------------------------ the other modes */

static void map_often(struct worker *w)
{
	for (unsigned int i = 0; i < w->steps; i++) {
		struct piece p = map_piece(w);

		check_word(&p, some_pages(w, p.bytes));
		CHECK(!munmap(p.at, p.bytes));
	}
}

#define MANY 1100 /* UP_REGIONS (job.h) is 1024 */
#define MANY_MANAGED 100

/* How many of them have a checkpoint. */
static int managed_of(const struct piece *many)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512], has[MANY] = { 0 };
	unsigned char *at;
	int found = 0;

	CHECK(maps);
	while (fgets(line, sizeof(line), maps)) {
		if (!strstr(line, CHECKPOINTS))
			continue;
		at = (unsigned char *)strtoul(line, NULL, 16);
		for (int i = 0; i < MANY; i++)
			has[i] |= at >= many[i].at && at < many[i].at + many[i].bytes;
	}
	fclose(maps);
	for (int i = 0; i < MANY; i++)
		found += has[i];
	return found;
}

static void many_at_once(struct worker *w)
{
	static struct piece many[MANY];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	time_t end;

	CHECK(fd >= 0);
	for (int i = 0; i < MANY; i++) {
		many[i].bytes = MIN_BYTES;
		many[i].at = mmap(NULL, MIN_BYTES, PROT_READ, MAP_SHARED, fd, 0);
		CHECK(many[i].at != MAP_FAILED);
		check_word(&many[i], some_pages(w, MIN_BYTES));
	}
	close(fd);
	end = time(NULL) + 60;
	/* the service knows of them when it pleases; a mapping that is gone by then was none for it */
	while (getenv("UFFDPREFETCH_SOCKET") && managed_of(many) < MANY_MANAGED)
		CHECK(time(NULL) < end);
	for (int i = 0; i < MANY; i++)
		CHECK(!munmap(many[i].at, many[i].bytes));
}

/* A thread that begins or ends is inside the sanitizer's allocator too (see fork_alone()): the first
 * step waits until all have begun, and none ends before the last step. */
static pthread_barrier_t begun, done;

static void *work(void *cookie)
{
	struct worker *w = cookie;

	pthread_barrier_wait(&begun);
	w->body(w);
	pthread_barrier_wait(&done);
	return NULL;
}

static void run_threads(void (*body)(struct worker *), int threads, unsigned int steps)
{
	struct worker *w = calloc((size_t)threads, sizeof(*w));

	CHECK(w);
	steps_half = (unsigned int)threads * steps / 2;
	CHECK(!pthread_barrier_init(&begun, NULL, (unsigned int)threads + 1));
	CHECK(!pthread_barrier_init(&done, NULL, (unsigned int)threads));
	for (int i = 0; i < threads; i++) {
		w[i].seed = (unsigned int)i + 1;
		w[i].steps = steps;
		w[i].body = body;
		CHECK(!pthread_create(&w[i].thread, NULL, work, &w[i]));
	}
	pthread_barrier_wait(&begun);
	for (int i = 0; i < threads; i++)
		pthread_join(w[i].thread, NULL);
	free(w);
}

static int checkpoints_laid(void)
{
	char line[512];
	int laid = 0;
	FILE *maps = fopen("/proc/self/maps", "r");

	CHECK(maps);
	while (fgets(line, sizeof(line), maps))
		laid += strstr(line, CHECKPOINTS) != NULL;
	fclose(maps);
	return laid;
}

static struct piece map_all(void)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct piece p = { .bytes = file_bytes };

	CHECK(fd >= 0);
	p.at = mmap(NULL, p.bytes, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(p.at != MAP_FAILED && !close(fd));
	return p;
}

/* A mapping with checkpoints over it: nothing here is worth anything without them. */
static struct piece managed(void)
{
	struct piece p = map_all();
	time_t end = time(NULL) + 60;

	for (int i = 1; getenv("UFFDPREFETCH_SOCKET") && !checkpoints_laid(); i++) {
		CHECK(time(NULL) < end);
		if (i % 32) {
			CHECK(!madvise(p.at, p.bytes, MADV_DONTNEED));
		} else { /* the service may have given it back for good */
			CHECK(!munmap(p.at, p.bytes));
			p = map_all();
		}
		read_part(&p, 0, p.bytes, 1);
	}
	return p;
}

static void *read_on(void *cookie)
{
	struct piece *p = cookie;

	for (unsigned int i = 0; !stop; i++) {
		read_part(p, 0, p->bytes, i);
		readers += !i;
	}
	return NULL;
}

static void *exit_there(void *cookie)
{
	(void)cookie;
	exit(0);
}

static int end(const char *how, char **argv)
{
	static struct piece p; /* lives as long as the readers */
	pthread_t thread[2];

	p = managed();
	for (int i = 0; i < 2; i++)
		CHECK(!pthread_create(&thread[i], NULL, read_on, &p));
	while (readers < 2) /* so that they are past the allocator, too: see fork_alone() */
		sched_yield();
	if (!strcmp(how, "signal"))
		CHECK(!raise(SIGTERM));
	if (!strcmp(how, "_exit"))
		_exit(0);
	if (!strcmp(how, "exec")) {
		execl("/proc/self/exe", argv[0], path, "end", "return", NULL);
		CHECK(!"exec");
	}
	if (!strcmp(how, "fork")) /* the child ends in the middle of what the parent does */
		for (int i = 0; i < 4; i++) {
			pid_t pid = fork();
			int status;

			if (!pid) {
				forked = 1;
				exit(0);
			}
			CHECK(waitpid(pid, &status, 0) == pid && !status);
		}
	if (!strcmp(how, "thread")) {
		pthread_t last;

		CHECK(!pthread_create(&last, NULL, exit_there, NULL));
		pthread_join(last, NULL);
	}
	if (!strcmp(how, "unmap")) { /* nothing is left when it ends */
		stop = 1;
		for (int i = 0; i < 2; i++)
			pthread_join(thread[i], NULL);
		CHECK(!munmap(p.at, p.bytes));
		return 0;
	}
	if (!strcmp(how, "main")) { /* the last thread's end is the process's */
		stop = 1;
		for (int i = 0; i < 2; i++)
			pthread_detach(thread[i]);
		pthread_exit(NULL);
	}
	return 0; /* the readers read on */
}

static void all_ends(char **argv)
{
	static const char *const how[] = {
		"return", "_exit", "exec", "fork", "thread", "unmap", "signal",
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
		"main", /* there the agent is a thread that libc counts: it would be the last */
#endif
	};

	for (size_t i = 0; i < sizeof(how) / sizeof(how[0]); i++) {
		int status, expected = strcmp(how[i], "signal") ? 0 : SIGTERM;
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (!pid) {
			execl("/proc/self/exe", argv[0], path, "end", how[i], NULL);
			_exit(127);
		}
		CHECK(waitpid(pid, &status, 0) == pid);
		if (status != expected) {
			dprintf(2, "preload_stress: end %s: wait status %#x\n", how[i],
				(unsigned int)status);
			_exit(1);
		}
	}
}

static void make_file(long mib)
{
	static uint64_t word[MIB / 8];
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	for (long i = 0; i < mib; i++) {
		for (size_t j = 0; j < MIB / 8; j++)
			word[j] = word_at((uint64_t)i * MIB + 8 * j);
		CHECK(write(fd, word, sizeof(word)) == (ssize_t)sizeof(word));
	}
	CHECK(!close(fd));
}

int main(int argc, char **argv)
{
	const char *mode = argc > 2 ? argv[2] : "";
	int a = argc > 3 ? atoi(argv[3]) : 0, b = argc > 4 ? atoi(argv[4]) : 0;
	struct stat st;

	if (argc < 3) {
		dprintf(2, "usage: preload_stress FILE make|storm|many|ends|end ...\n");
		return 2;
	}
	path = argv[1];
	page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	if (!strcmp(mode, "make")) {
		make_file(a);
		return 0;
	}
	CHECK(!stat(path, &st));
	file_bytes = (uint64_t)st.st_size;
	if (!strcmp(mode, "end"))
		return end(argc > 3 ? argv[3] : "", argv);
	if (!strcmp(mode, "ends")) {
		all_ends(argv);
		return 0;
	}
	unwatched = argc > 5;
	struct piece p = unwatched ? map_all() : managed();

	if (!strcmp(mode, "storm")) {
		run_threads(storm, a, (unsigned int)b);
	} else if (!strcmp(mode, "many")) {
		struct worker w = { .seed = 1 };

		run_threads(map_often, a, (unsigned int)b);
		many_at_once(&w);
	}
	read_part(&p, 0, p.bytes, 3);
	CHECK(!munmap(p.at, p.bytes));
	dprintf(1, "{\"at\": \"end\"}\n");
	return 0;
}
