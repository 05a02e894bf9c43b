// SPDX-License-Identifier: Apache-2.0
/*
 * preload.c - the object that LD_PRELOAD names: its start in a process, its forks, its end.
 *
 * It goes into every program of a job, in containers with C libraries of other years and of other
 * make. So it is linked against none, and what it takes from one is a weak reference without a
 * version to what glibc has had since 2.17 (tests/kernel/test_preload_loads.py).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/utsname.h>
#include <signal.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "job/preload.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

#pragma weak getauxval
#pragma weak environ
extern const char *gnu_get_libc_version(void) __attribute__((weak));
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *)
	__attribute__((weak));

static char **environment;

static const char *variable(const char *name)
{
	size_t bytes = up_text_bytes(name, SIZE_MAX);

	for (char **entry = environment; entry && *entry; entry++) {
		size_t same = 0;

		while (same < bytes && (*entry)[same] == name[same])
			same++;
		if (same == bytes && (*entry)[same] == '=')
			return *entry + bytes + 1;
	}
	return NULL;
}

static int is_set_to(const char *name, const char *value)
{
	const char *text = variable(name);

	return text && up_same_text(text, value);
}

/* A whole number, as the launchers write it; 18 digits at most. */
static long long number(const char *name, long long missing)
{
	const char *text = variable(name);
	long long value = 0;
	int negative, digits = 0;

	if (!text)
		return missing;
	negative = *text == '-';
	for (text += negative || *text == '+'; *text >= '0' && *text <= '9' && digits < 18; digits++)
		value = 10 * value + (*text++ - '0');
	if (*text || !digits)
		return missing;
	return negative ? -value : value;
}

/* The same launchers, in the same order, as uffdprefetch/base/identity.py: the innermost first. */
static void read_rank(void)
{
	static const struct {
		const char *rank, *local, *world;
	} family[] = {
		{ "RANK", "LOCAL_RANK", "WORLD_SIZE" },
		{ "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE" },
		{ "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE" },
		{ "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE" },
		{ "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE" },
		{ "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE" },
		{ "PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE" },
		{ "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE" },
		{ "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS" },
	};

	up_job.rank = up_job.local_rank = up_job.world = -1;
	for (unsigned int i = 0; i < sizeof(family) / sizeof(family[0]); i++) {
		int rank = (int)number(family[i].rank, -1);
		int local = (int)number(family[i].local, -1);
		int world = (int)number(family[i].world, -1);

		if (rank < 0)
			continue;
		if (up_job.rank < 0) {
			up_job.rank = rank;
			up_job.local_rank = local;
			up_job.world = world;
		} else if (rank == up_job.rank && (up_job.world < 0 || world == up_job.world)) {
			/* PMIx has no local rank: Slurm's plugin leaves Slurm's */
			if (up_job.local_rank < 0)
				up_job.local_rank = local;
			if (up_job.world < 0)
				up_job.world = world;
		}
	}
}

/* 1: nothing at all lay there; what lies there then cannot be read. 0: something does. -ENOMEM: there is no
 * room to find out (RLIMIT_AS). */
static int take_hole(uintptr_t start, size_t length)
{
	void *p = up_mmap((void *)start, length, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

	return p == (void *)start ? 1 : (long)p == -ENOMEM ? -ENOMEM : 0;
}

/* Whether nothing at all lies where the region was. */
static int is_empty(const struct up_region *r)
{
	int ret = take_hole(r->address, r->length);

	if (ret == 1)
		up_sys2(SYS_munmap, r->address, r->length);
	/* Where the kernel cannot be asked, by our books. */
	return ret == -ENOMEM ? up_is_empty_here(r->address, r->address + r->length) != 0 : ret;
}

/* The file, mapped at p as a whole, wherever nothing lies in a part of the region. Half by half, until each is a
 * hole or has none: msync(2) fails where there is one, and MS_ASYNC writes nothing. */
static void fill_holes(const struct up_region *r, long p, uintptr_t start, size_t length)
{
	int keep = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
	size_t half = length / 2 & ~(up_job.page_bytes - 1);

	if (take_hole(start, length) == 1) {
		up_sys5(SYS_mremap, p + (start - r->address), length, length, keep, start);
	} else if (half && up_sys3(SYS_msync, start, length, MS_ASYNC) == -ENOMEM) {
		fill_holes(r, p, start, half);
		fill_holes(r, p, start + half, length - half);
	}
}

/* The pool is not inherited: the file takes its place before anybody can look. What lies there all the same was
 * put there, or was put back, or stayed as the process's own copy, and is looked at by the only thread that there is.
 * Whether there was nothing. */
static int fill_place(struct up_region *r, int pooled)
{
	long p;

	if (pooled == UP_POOLED && is_empty(r)) {
		/* There may be no room for two (RLIMIT_AS). If the file cannot be had, nothing else is to
		 * come there. */
		if (up_failed(up_map_anchor_there(r)))
			take_hole(r->address, r->length);
		return 1;
	}
	if (up_failed(up_put_back_here(r, 0, 1))) /* no descriptor is free: elsewhere one is */
		up_put_back_apart(r, 0, 1);
	if (pooled == UP_POOLED_COPIES) /* where nothing is the job has taken it away */
		return 0;
	p = up_map_of_anchor(r);
	if (up_failed(p))
		return 0;
	fill_holes(r, p, r->address, r->length);
	up_sys2(SYS_munmap, p, r->length);
	return 0;
}

/* In the child nothing lies where the pool did until its handler has run, and libc lets signals in again before
 * that: so none comes from here on. Of the thread that forks, in its child, too. */
static __thread struct {
	int blocked;
	struct up_mask mask;
} forking __attribute__((tls_model("initial-exec")));

/* What the parent had from the pool, the child gets from there, too; no handler of a signal may look
 * before that. */
static void await_swaps(void)
{
	int looks = up_job.patience; /* for all of them together */

	for (int i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) == UP_LIVE &&
		    atomic_load(&r->swap) != UP_SWAP_NONE && up_await_swap(r, &looks, forking.mask.before)) {
			up_map_from_anchor(r);
			atomic_store(&r->pooled, 0);
		}
	}
}

static void before_fork(void)
{
	if (!up_job.enabled)
		return;
#ifdef UP_AGENT_PTHREAD
	up_thread_hold();
#endif
	atomic_store(&up_job.forker_owns, up_in_own_process());
	forking.blocked = up_job.pool && atomic_load(&up_job.live);
	if (forking.blocked)
		forking.mask = up_block_signals();
}

static void let_signals_in(void)
{
	if (!forking.blocked)
		return;
	forking.blocked = 0;
	up_restore_signals(forking.mask);
}

static void after_fork(void)
{
#ifdef UP_AGENT_PTHREAD
	up_thread_release();
#endif
	let_signals_in();
}

/* In the child only the forking thread lives. A region that was live is the agent's to take up
 * again; one that another thread was just opening or closing is left alone: its overlays, if any,
 * hold the file's bytes. */
static void after_fork_in_child(void)
{
	int saved = errno, inherited = 0;
	/* Else who forked is itself a child that we did not see made (clone): what it has mapped
	 * where our books say is not known. */
	int known = atomic_load(&up_job.forker_owns);

#ifdef UP_AGENT_PTHREAD
	up_thread_release();
#endif
	if (!forking.blocked)
		forking.mask = up_block_signals();
	forking.blocked = 1;
	up_job.parent_pid = up_job.pid;
	up_job.pid = (int)up_sys0(SYS_getpid);
	atomic_store(&up_job.agent_tid, 0);
	atomic_store(&up_job.agent_start, 0);
	atomic_store(&up_job.silent, 0);
	atomic_store(&up_job.left, 0);
	atomic_store(&up_job.hands, 0);
	atomic_store(&up_job.ending, 0);
	atomic_store(&up_job.shared, 0);
	if (up_job.own_page)
		atomic_store(up_job.own_page, 1);
	atomic_store(&up_job.responder_tid, 0);
	up_job.agent_stack = up_job.responder_stack = NULL; /* MADV_DONTFORK */
	up_forget_apart();
	for (int i = 0; i < UP_REQUESTS; i++)
		atomic_store(&up_job.request[i].state, UP_REQ_FREE);
	for (int i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);
		int pooled = atomic_exchange(&r->pooled, UP_POOLED_NOT), gone = 0;

		/* Where something lay, our books may know nothing of it. */
		if (pooled && (state == UP_LIVE || up_is_closing(state)))
			gone = !fill_place(r, pooled);
		if (gone)
			up_pool_release(r);
		atomic_store(&r->swap,
			     pooled && !gone && state == UP_LIVE ? UP_SWAP_WAITING : UP_SWAP_NONE);
		if (state == UP_LIVE && known && !gone) {
			r->inherited = 1;
			r->fd = r->pool_fd = -1;
			r->mode = r->sent = r->queued = 0;
			r->stated = r->settled = r->many = r->refused = 0; /* who made it has told */
			r->waits_since_ns = 0;
			atomic_store(&r->replacement, 0);
			inherited++;
		} else if (state != UP_FREE) {
			atomic_store(&r->state, UP_FREE);
		}
	}
	atomic_store(&up_job.live, inherited);
	/* A filter that it has put on itself (identity.c) may not know the call. */
	if (!atomic_load(&up_job.disabled))
		up_name_ptracer_again();
	/* Nothing of it comes by us, so now is when the service can be told. */
	if ((inherited || atomic_load(&up_job.bypassed)) && up_agent_ready())
		await_swaps();
	let_signals_in();
	errno = saved;
}

/* fork(2) as a handler of a signal may call it: no handler of ours runs for it. */
UP_EXPORT pid_t _Fork(void)
{
	pid_t pid;

	if (!up_next.fork_only) {
		errno = ENOSYS;
		return -1;
	}
	before_fork();
	pid = up_next.fork_only();
	if (pid)
		after_fork();
	else if (up_job.enabled)
		after_fork_in_child();
	return pid;
}

/* mmap last: what an allocator maps until then goes straight to the kernel. */
static void look_up_next(void)
{
#define NEXT(name) { #name, (void **)&up_next.name }
	void *syscall = NULL;
	const struct up_next_name next[] = {
		NEXT(munmap),
		NEXT(mremap),
		NEXT(mprotect),
		NEXT(pkey_mprotect),
		NEXT(madvise),
		NEXT(process_madvise),
		NEXT(mlock),
		NEXT(mlock2),
		NEXT(mlockall),
		NEXT(remap_file_pages),
		NEXT(unshare),
		NEXT(setns),
		NEXT(setuid),
		NEXT(setgid),
		NEXT(seteuid),
		NEXT(setegid),
		NEXT(setreuid),
		NEXT(setregid),
		NEXT(setresuid),
		NEXT(setresgid),
		NEXT(setgroups),
		NEXT(initgroups),
		NEXT(capset),
		NEXT(setrlimit),
		NEXT(setrlimit64),
		NEXT(prlimit),
		NEXT(prlimit64),
		NEXT(open),
		NEXT(open64),
		NEXT(openat),
		NEXT(openat64),
		NEXT(fcntl),
		NEXT(fcntl64),
		NEXT(prctl),
		NEXT(shmat),
		NEXT(clone),
		NEXT(mmap),
		{ "_Fork", (void **)&up_next.fork_only },
		{ "syscall", &syscall },
	};
#undef NEXT

	up_load_next(next, sizeof(next) / sizeof(next[0]));
	if (syscall)
		up_next_syscall = syscall;
	if (!up_next.open64) /* musl */
		up_next.open64 = up_next.open;
	if (!up_next.openat64)
		up_next.openat64 = up_next.openat;
	if (!up_next.fcntl64)
		up_next.fcntl64 = up_next.fcntl;
}

static void read_command(void)
{
	long fd = up_sys4(SYS_openat, AT_FDCWD, "/proc/self/comm", O_RDONLY | O_CLOEXEC, 0);

	if (up_failed(fd))
		return;
	long n = up_sys3(SYS_read, fd, up_job.command, sizeof(up_job.command) - 1);

	up_sys1(SYS_close, fd);
	if (n > 0 && up_job.command[n - 1] == '\n')
		up_job.command[n - 1] = 0;
}

/* Empty in a child that no handler of ours has seen made. Before Linux 4.14 there is no such page. */
static _Atomic uint32_t *make_own_page(void)
{
	void *p = up_mmap(NULL, up_job.page_bytes, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (up_failed((long)p))
		return NULL;
	if (up_failed(up_sys3(SYS_madvise, p, up_job.page_bytes, MADV_WIPEONFORK))) {
		up_sys2(SYS_munmap, p, up_job.page_bytes);
		return NULL;
	}
	*(_Atomic uint32_t *)p = 1;
	return p;
}

static void read_options(void)
{
	up_job.min_bytes = (uint64_t)number("UFFDPREFETCH_MIN_SIZE", 16 << 20);
	if (up_job.min_bytes < 2 * up_job.page_bytes)
		up_job.min_bytes = 2 * up_job.page_bytes;
	up_job.keep_advice = number("UFFDPREFETCH_KEEP_ADVICE", 0) != 0;
	up_job.listen_bytes = (uint64_t)number("UFFDPREFETCH_LISTEN", 0);
	up_job.pool = is_set_to("UFFDPREFETCH_ENGINE", "pool");
	up_job.no_uffd = number("UFFDPREFETCH_RUNG", 1) == 2;
	up_job.patience = (int)number("UFFDPREFETCH_TEST_PATIENCE", UP_WAIT_STEPS);
	up_job.awaits_start = up_job.patience > UP_WAIT_STEPS;
	up_job.test_overlays = (long)number("UFFDPREFETCH_TEST_OVERLAYS", 0);
	up_job.test_exit_after = (long)number("UFFDPREFETCH_TEST_AGENT_EXIT", 0);
	up_job.test_exit_state = (int)number("UFFDPREFETCH_TEST_AGENT_EXIT_STATE", -1);
	up_job.test_exit_all = number("UFFDPREFETCH_TEST_AGENT_EXIT_ALL", 0) != 0;
	up_job.test_exit_stops = number("UFFDPREFETCH_TEST_AGENT_STOP", 0) != 0;
	up_job.test_exit_log = variable("UFFDPREFETCH_TEST_AGENT_EXIT_LOG");
	if (!up_job.test_exit_log)
		up_job.test_exit_after = 0;
}

/* Of a program that is left alone, too: what it reads is seen from outside. */
static void let_service_look(void)
{
	const char *path = variable("UFFDPREFETCH_TEST_PTRACE_SCOPE");

	if (!is_set_to("UFFDPREFETCH_READS", "off"))
		up_name_ptracer(path ? path : "/proc/sys/kernel/yama/ptrace_scope");
}

static enum up_left_alone why_alone(void)
{
	if (!gnu_get_libc_version || !__register_atfork)
		return UP_ALONE_LIBC;
#ifdef UP_AGENT_PTHREAD /* built to run beside one */
	return UP_ALONE_NO;
#else
	return up_run_time();
#endif
}

/* A path in which %h stands for the node's name: the same variable for a job on many nodes. Whether it fits. */
static int set_path(char *out, size_t most, const char *path)
{
	struct new_utsname node;
	size_t at = 0;

	if (up_sys1(SYS_uname, (long)&node))
		return 0;
	for (; *path && at < most; path++) {
		size_t bytes = 1;
		const char *from = path;

		if (path[0] == '%' && path[1] == 'h') {
			from = node.nodename;
			bytes = up_text_bytes(from, sizeof(node.nodename));
			path++;
		}
		if (at + bytes >= most)
			return 0;
		memcpy(out + at, from, bytes);
		at += bytes;
	}
	out[at] = 0;
	return at > 0;
}

/* glibc hands every constructor what main() gets; its own environ may not be ready, because nothing
 * says that we need it. */
__attribute__((constructor)) static void start(int argc, char **argv, char **envp)
{
	static void *this_object; /* to glibc: whose handlers these are */
	char start_log[UP_PATH_MAX + 16]; /* a suffix longer than a socket's */
	const char *path;

	(void)argc;
	(void)argv;
	look_up_next();
	up_remember_entries(up_entry, up_entry_count);
	if (!getauxval || getauxval(AT_SECURE))
		return;
	environment = gnu_get_libc_version ? envp : &environ ? environ : NULL;
	up_job.pid = (int)up_sys0(SYS_getpid);
	up_job.page_bytes = getauxval(AT_PAGESZ);
	read_rank();
	up_lock_start(variable("UFFDPREFETCH_LOCKDIR"));
	path = variable("UFFDPREFETCH_START_LOG");
	if (path && set_path(start_log, sizeof(start_log), path))
		up_start_log_open(start_log);
	path = variable("UFFDPREFETCH_SOCKET");
	if (!path || !set_path(up_job.socket_path, sizeof(up_job.socket_path), path))
		return;
	read_options();
	read_command();
	let_service_look();
	up_alone = why_alone();
	if (up_alone)
		return;
	up_job.own_page = make_own_page();
	if (!__register_atfork(before_fork, after_fork, after_fork_in_child, &this_object))
		up_job.enabled = 1;
}

/* At exit(3) the process, and a mapping that nobody took away, are still there: the service may
 * count what was used. Bounded. */
__attribute__((destructor)) static void finish(void)
{
	if (up_agent_alive() && up_in_own_process())
		up_ask(UP_REQ_BYE, 0, -1);
}
