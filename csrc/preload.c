// SPDX-License-Identifier: Apache-2.0
/*
 * preload.c - the object that LD_PRELOAD names: its start in a process, its forks, its end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "preload.h"

struct up_next up_next;

static long long number(const char *name, long long missing)
{
	const char *text = secure_getenv(name);
	char *end;
	long long value;

	if (!text || !*text)
		return missing;
	value = strtoll(text, &end, 10);
	return *end ? missing : value;
}

/* The same launchers, in the same order, as uffdprefetch/identity.py: the innermost first. */
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

/* Whether nothing lies where the pool did: it is not inherited. */
static int is_hole(const struct up_region *r)
{
	void *p = up_mmap((void *)(uintptr_t)r->address, r->length, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

	return p == (void *)(uintptr_t)r->address;
}

/* What the parent had from the pool, the child gets from there, too; no handler of a signal may look
 * before that. */
static void await_swaps(void)
{
	int looks = UP_SWAP_LOOKS; /* for all of them together */

	for (int i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) == UP_LIVE &&
		    atomic_load(&r->swap) != UP_SWAP_NONE && up_await_swap(r, &looks)) {
			up_map_from_anchor(r);
			atomic_store(&r->pooled, 0);
		}
	}
}

static void before_fork(void)
{
	atomic_store(&up_job.forker_pid, (int)up_sys0(SYS_getpid));
}

/* In the child only the forking thread lives. A region that was live is the agent's to take up
 * again; one that another thread was just opening or closing is left alone: its overlays, if any,
 * hold the file's bytes. */
static void after_fork_in_child(void)
{
	int saved = errno, inherited = 0;
	uint64_t all = ~0ull, before;
	/* Else who forked is itself a child that we did not see made (clone): what it has mapped
	 * where our books say is not known. */
	int known = atomic_load(&up_job.forker_pid) == up_job.pid;

	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	up_job.parent_pid = up_job.pid;
	up_job.pid = (int)up_sys0(SYS_getpid);
	atomic_store(&up_job.agent_tid, 0);
	atomic_store(&up_job.agent_start, 0);
	up_job.agent_stack = NULL; /* MADV_DONTFORK */
	for (int i = 0; i < UP_REQUESTS; i++)
		atomic_store(&up_job.request[i].state, UP_REQ_FREE);
	for (int i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);
		int pooled = atomic_exchange(&r->pooled, 0);

		/* The pool is not inherited: the file takes its place before anybody can look. */
		if (pooled && (state == UP_LIVE || state == UP_CLOSING) && is_hole(r))
			up_map_from_anchor(r);
		atomic_store(&r->swap, pooled && state == UP_LIVE ? UP_SWAP_WAITING : UP_SWAP_NONE);
		if (state == UP_LIVE && known) {
			r->inherited = 1;
			r->fd = r->checkpoint_fd = r->reopened_fd = -1;
			r->verdict = r->sent = r->queued = r->overlays = 0;
			inherited++;
		} else if (state != UP_FREE) {
			atomic_store(&r->state, UP_FREE);
		}
	}
	atomic_store(&up_job.live, inherited);
	if (inherited && up_agent_ready())
		await_swaps();
	up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
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
	if (pid == 0 && up_job.enabled)
		after_fork_in_child();
	return pid;
}

static void look_up_next(void)
{
#define LOOK_UP(name) (*(void **)&up_next.name = dlsym(RTLD_NEXT, #name))
	LOOK_UP(munmap);
	LOOK_UP(mremap);
	LOOK_UP(mprotect);
	LOOK_UP(pkey_mprotect);
	LOOK_UP(madvise);
	LOOK_UP(mlock);
	LOOK_UP(mlock2);
	LOOK_UP(mlockall);
	LOOK_UP(remap_file_pages);
	LOOK_UP(unshare);
	LOOK_UP(setns);
	LOOK_UP(setuid);
	LOOK_UP(setgid);
	LOOK_UP(seteuid);
	LOOK_UP(setegid);
	LOOK_UP(setreuid);
	LOOK_UP(setregid);
	LOOK_UP(setresuid);
	LOOK_UP(setresgid);
	LOOK_UP(setgroups);
	LOOK_UP(initgroups);
	LOOK_UP(capset);
	LOOK_UP(open);
	LOOK_UP(open64);
	LOOK_UP(openat);
	LOOK_UP(openat64);
	LOOK_UP(mmap);
	*(void **)&up_next.fork_only = dlsym(RTLD_NEXT, "_Fork");
#undef LOOK_UP
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

__attribute__((constructor)) static void start(void)
{
	int saved = errno;
	const char *path = secure_getenv("UFFDPREFETCH_SOCKET");
	const char *resolve = secure_getenv("UFFDPREFETCH_RESOLVE");
	const char *engine = secure_getenv("UFFDPREFETCH_ENGINE");

	look_up_next();
	up_job.pid = (int)up_sys0(SYS_getpid);
	up_job.page_bytes = getauxval(AT_PAGESZ);
	read_rank();
	up_lock_start(secure_getenv("UFFDPREFETCH_LOCKDIR"));
	errno = saved;
	if (!path || !*path || strlen(path) >= UP_PATH_MAX)
		return;
	strcpy(up_job.socket_path, path);
	up_job.min_bytes = (uint64_t)number("UFFDPREFETCH_MIN_SIZE", 16 << 20);
	if (up_job.min_bytes < 2 * up_job.page_bytes)
		up_job.min_bytes = 2 * up_job.page_bytes;
	up_job.keep_advice = number("UFFDPREFETCH_KEEP_ADVICE", 0) != 0;
	up_job.service_resolves = resolve && !strcmp(resolve, "service");
	up_job.pool = engine && !strcmp(engine, "pool");
	up_job.no_uffd = number("UFFDPREFETCH_RUNG", 1) == 2;
	up_job.test_overlays = (long)number("UFFDPREFETCH_TEST_OVERLAYS", 0);
	up_job.test_exit_after = (long)number("UFFDPREFETCH_TEST_AGENT_EXIT", 0);
	up_job.test_exit_state = (int)number("UFFDPREFETCH_TEST_AGENT_EXIT_STATE", -1);
	up_job.test_exit_stops = number("UFFDPREFETCH_TEST_AGENT_STOP", 0) != 0;
	up_job.test_exit_log = secure_getenv("UFFDPREFETCH_TEST_AGENT_EXIT_LOG");
	if (!up_job.test_exit_log)
		up_job.test_exit_after = 0;
	read_command();
	if (!pthread_atfork(before_fork, NULL, after_fork_in_child))
		up_job.enabled = 1;
	errno = saved;
}

/* At exit(3) the process, and a mapping that nobody took away, are still there: the service may
 * count what was used. Bounded. */
__attribute__((destructor)) static void finish(void)
{
	int saved = errno;

	if (up_agent_alive() && up_in_own_process())
		up_ask(UP_REQ_BYE, 0, -1);
	errno = saved;
}
