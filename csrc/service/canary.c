// SPDX-License-Identifier: Apache-2.0
/*
 * canary.c - see canary.h.
 *
 * When it is needed there is no page to be had in its cgroup: a thread that takes one waits as long as the killer
 * does. So the canary shares no memory with us that would have to be copied when it is written, and what its thread
 * needs (its stack, the text of this object and of libc) is there and stays.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/madvise.h"
#include "common/sys.h"
#include "service/canary.h"

#define CANARIES 3 /* each for one time that the pool was surprised */
/* Freed at each death before all else. A thread of ours that waits for a page may hold what free_memory() needs, the
 * lock of a memfd's inode for one: it gets its page from here. */
#define SPARE_BYTES (2u << 20)
#define STACK_BYTES (64u << 10)
/* The largest page of any kernel. */
#define PAGE (64u << 10)
/* Of be_canary() and what is inlined there, which may lie across two. */
#define TEXT_BYTES (2 * PAGE)
#define SCORE_MOST 1000
/* The service grows to so much, with the buffers of its threads: by as much its score is below the canaries', or the
 * killer, which adds up score and size, would take the service first. */
#define SERVICE_BYTES (128ull << 20)
#define SCORE_LESS_MOST 900
struct up_canary {
	pthread_t thread;
	void (*free_memory)(void *context);
	void *context;
	char *stack, *spare;
	int pidfd[CANARIES], canaries, alive, stop;
	int ready[2]; /* closed once they are there */
	uint32_t deaths;
	int score; /* of the service while there is one */
};

static void set_score(int score)
{
	char text[8];
	int n = snprintf(text, sizeof(text), "%d", score);
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (write(fd, text, (size_t)n) < 0) /* it stays as it is: then the service goes before the canary */
		errno = 0;
	close(fd);
}

/* The canary's whole life. Nothing is left of the service's memory but this text and a stack. */
static void __attribute__((noinline, noreturn)) be_canary(uintptr_t text, uintptr_t stack, int fd)
{
	uintptr_t low = text < stack ? text : stack, high = text < stack ? stack : text;
	uintptr_t low_end = low + (low == text ? TEXT_BYTES : STACK_BYTES);
	uintptr_t high_end = high + (high == text ? TEXT_BYTES : STACK_BYTES);
	/* the most that an address space may have, in bits: x86-64, AArch64 by its kernel's configuration */
	static const unsigned char most[] = { 48, 47, 42, 39, 36 };
	uintptr_t end = 0;

	for (unsigned int i = 0; i < sizeof(most) && !end; i++) {
		uintptr_t top = ((uintptr_t)1 << most[i]) - (most[i] == 47 ? 4096 : 0);

		if (!up_sys2(SYS_munmap, top - PAGE, PAGE))
			end = top;
	}
	up_sys3(SYS_close_range, 0, (unsigned int)fd - 1, 0);
	up_sys3(SYS_close_range, (unsigned int)fd + 1, ~0u, 0);
	up_sys2(SYS_munmap, 0, low);
	up_sys2(SYS_munmap, low_end, high - low_end);
	up_sys2(SYS_munmap, high_end, end - high_end);
	up_sys1(SYS_close, fd); /* it is done */
	for (;;)
		up_sys4(SYS_ppoll, 0, 0, 0, 0);
}

/* Forks, as long as nothing is read into our memory past the page cache: before Linux 6.3 what is being read then may
 * go to the child's page. A pidfd of the canary, or -errno. */
static int hatch(struct up_canary *c)
{
	uintptr_t text = (uintptr_t)be_canary & ~(uintptr_t)(PAGE - 1);
	int done[2], pid, pidfd;
	char byte;

	if (pipe2(done, O_CLOEXEC))
		return -errno;
	pid = (int)syscall(SYS_clone, 0, NULL, NULL, NULL, 0);
	if (!pid) {
		prctl(PR_SET_NAME, "uffd-canary");
		be_canary(text, (uintptr_t)c->stack, done[1]);
	}
	close(done[1]);
	if (pid > 0 && read(done[0], &byte, 1) < 0)
		errno = 0;
	close(done[0]);
	if (pid < 0)
		return -errno;
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd >= 0 && !ptrace(PTRACE_SEIZE, pid, NULL, PTRACE_O_TRACEEXIT | PTRACE_O_EXITKILL))
		return pidfd;
	kill(pid, SIGKILL); /* not reaped yet: it is ours */
	waitpid(pid, NULL, __WALL);
	if (pidfd >= 0)
		close(pidfd);
	return -EPERM;
}

static void hatch_all(struct up_canary *c)
{
	set_score(SCORE_MOST); /* they inherit that */
	for (int i = 0; i < CANARIES; i++) {
		int pidfd = hatch(c);

		if (pidfd < 0)
			break;
		c->pidfd[c->canaries++] = pidfd;
	}
	c->alive = c->canaries;
	/* What they share with us is this stack: a page that is written for the first time is copied. */
	for (char *p = c->stack; p < c->stack + STACK_BYTES; p += 4096)
		__atomic_fetch_or(p, 0, __ATOMIC_RELAXED);
	if (c->alive)
		set_score(c->score);
	close(c->ready[1]);
}

static void *keep_canaries(void *arg)
{
	struct up_canary *c = arg;
	uint32_t deaths = 0;
	int status, pid;

	hatch_all(c);
	while (c->alive) {
		pid = waitpid(-1, &status, __WALL | __WNOTHREAD); /* all that this thread has */
		if (pid < 0 && errno != EINTR)
			break;
		if (pid <= 0)
			continue;
		if (!WIFSTOPPED(status)) {
			if (!--c->alive)
				set_score(SCORE_MOST);
			continue;
		}
		if (status >> 16 == PTRACE_EVENT_EXIT && !__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE)) {
			madvise(c->spare + deaths++ * SPARE_BYTES, SPARE_BYTES, MADV_DONTNEED);
			c->free_memory(c->context);
			__atomic_store_n(&c->deaths, deaths, __ATOMIC_RELAXED);
		}
		ptrace(PTRACE_CONT, pid, NULL, NULL); /* what has stopped it else was for the job */
	}
	return NULL;
}

/* The text of the objects in which two functions lie stays where it is. */
static int lock_text(struct dl_phdr_info *info, size_t size, void *arg)
{
	uintptr_t ours = (uintptr_t)be_canary, libc = (uintptr_t)pthread_mutex_lock;

	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *h = &info->dlpi_phdr[i];
		uintptr_t start = info->dlpi_addr + h->p_vaddr, end = start + h->p_memsz;

		start -= start % (uintptr_t)sysconf(_SC_PAGESIZE);

		if (h->p_type != PT_LOAD || !(h->p_flags & PF_X))
			continue;
		if (ours >= start && ours < end)
			madvise((void *)start, end - start, MADV_POPULATE_READ);
		if ((ours >= start && ours < end) || (libc >= start && libc < end))
			mlock2((void *)start, end - start, MLOCK_ONFAULT);
	}
	return 0;
}

int up_canary_start(struct up_canary **out, void (*free_memory)(void *context), void *context,
		    uint64_t least_limit_bytes)
{
	struct up_canary *c = calloc(1, sizeof(*c));
	uint64_t less = SERVICE_BYTES * SCORE_MOST / (least_limit_bytes ? least_limit_bytes : 1) + 1;
	pthread_attr_t attributes;
	sigset_t all, before;
	char byte;
	int err;

	if (!c)
		return -ENOMEM;
	c->free_memory = free_memory;
	c->context = context;
	c->score = SCORE_MOST - (int)(less < SCORE_LESS_MOST ? less : SCORE_LESS_MOST);
	c->stack = mmap(NULL, STACK_BYTES + CANARIES * SPARE_BYTES, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (c->stack == MAP_FAILED) {
		free(c);
		return -ENOMEM;
	}
	c->spare = c->stack + STACK_BYTES;
	dl_iterate_phdr(lock_text, NULL);
	pthread_attr_init(&attributes);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* those of the service are for its main thread */
	err = pipe2(c->ready, O_CLOEXEC) ? errno : pthread_attr_setstack(&attributes, c->stack, STACK_BYTES);
	if (!err)
		err = pthread_create(&c->thread, &attributes, keep_canaries, c);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (err) {
		munmap(c->stack, STACK_BYTES + CANARIES * SPARE_BYTES);
		free(c);
		return -err;
	}
	while (read(c->ready[0], &byte, 1) < 0 && errno == EINTR)
		;
	close(c->ready[0]);
	*out = c;
	return 0;
}

void up_canary_end(struct up_canary *c)
{
	if (!c)
		return;
	__atomic_store_n(&c->stop, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < c->canaries; i++) {
		syscall(SYS_pidfd_send_signal, c->pidfd[i], SIGKILL, NULL, 0);
		close(c->pidfd[i]);
	}
	pthread_join(c->thread, NULL);
	munmap(c->stack, STACK_BYTES + CANARIES * SPARE_BYTES);
	free(c);
}

uint32_t up_canary_deaths(const struct up_canary *c)
{
	return c ? __atomic_load_n(&c->deaths, __ATOMIC_RELAXED) : 0;
}
