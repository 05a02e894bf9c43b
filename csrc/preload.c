// SPDX-License-Identifier: Apache-2.0
/*
 * preload.c - the interposers: which mappings are managed, and how the job takes one back.
 *
 * Nothing here prints, allocates or changes errno. Before the constructor has run (an allocator's
 * own start) every call goes straight to the kernel; afterwards to the next library in the chain,
 * so that other LD_PRELOADs keep working. The job's descriptor table is never touched.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "job.h"
#include "sys.h"

#define EXPORT __attribute__((visibility("default")))

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 3
#endif

struct capability_header;
struct capability_data;

/* The next definition of each, or NULL until the constructor has run. */
static struct {
	void *(*mmap)(void *, size_t, int, int, int, off_t);
	int (*munmap)(void *, size_t);
	void *(*mremap)(void *, size_t, size_t, int, ...);
	int (*mprotect)(void *, size_t, int);
	int (*madvise)(void *, size_t, int);
	int (*mlock)(const void *, size_t);
	int (*mlock2)(const void *, size_t, unsigned int);
	int (*mlockall)(int);
	int (*remap_file_pages)(void *, size_t, int, size_t, int);
	int (*unshare)(int);
	int (*setns)(int, int);
	int (*setuid)(uid_t);
	int (*setgid)(gid_t);
	int (*seteuid)(uid_t);
	int (*setegid)(gid_t);
	int (*setreuid)(uid_t, uid_t);
	int (*setregid)(gid_t, gid_t);
	int (*setresuid)(uid_t, uid_t, uid_t);
	int (*setresgid)(gid_t, gid_t, gid_t);
	int (*setgroups)(size_t, const gid_t *);
	int (*capset)(struct capability_header *, const struct capability_data *);
} next;

static long fail(long ret)
{
	if (!up_failed(ret))
		return ret;
	errno = (int)-ret;
	return -1;
}

/* ------------------------------------------------------------------ asking the agent */

/* A child that no atfork handler saw (vfork, clone, _Fork): the agent is not there. */
static int in_own_process(void)
{
	return up_sys0(SYS_getpid) == up_job.pid;
}

/* Post, ring, wait: the agent's result, or -ESRCH when there is no agent any more. */
static int ask(uint32_t op, uint32_t slot, int job_fd)
{
	struct timespec ts = { .tv_nsec = 20 * 1000 * 1000 };
	struct up_request *q = NULL;
	int result = -ESRCH;

	while (!q) {
		for (int i = 0; i < UP_REQUESTS && !q; i++) {
			uint32_t is_free = UP_REQ_FREE;

			if (atomic_compare_exchange_strong(&up_job.request[i].state, &is_free,
							   UP_REQ_CLAIMED))
				q = &up_job.request[i];
		}
		if (!q)
			up_sys0(SYS_sched_yield);
	}
	q->op = op;
	q->slot = slot;
	q->job_fd = job_fd;
	atomic_store(&q->state, UP_REQ_POSTED);
	if (up_agent_alive())
		up_agent_ring_bell();
	while (atomic_load(&q->state) == UP_REQ_POSTED && up_agent_alive())
		up_sys4(SYS_futex, &q->state, FUTEX_WAIT_PRIVATE, UP_REQ_POSTED, &ts);
	if (atomic_load(&q->state) == UP_REQ_DONE)
		result = q->result;
	atomic_store(&q->state, UP_REQ_FREE);
	return result;
}

static int agent_ready(void)
{
	int none = 0;

	if (atomic_load(&up_job.disabled))
		return 0;
	if (atomic_compare_exchange_strong(&up_job.agent_start, &none, 1)) {
		if (up_agent_spawn())
			atomic_store(&up_job.disabled, 1);
		atomic_store(&up_job.agent_start, 2);
	}
	while (atomic_load(&up_job.agent_start) == 1)
		up_sys0(SYS_sched_yield);
	return up_agent_alive();
}

/* ------------------------------------------------------------------ regions */

static void forget_slot(struct up_region *r)
{
	atomic_store(&r->state, UP_FREE);
	atomic_fetch_sub(&up_job.live, 1);
}

/* Take a region back from the agent; 0 when another thread has just done so. */
static int close_region(struct up_region *r, uint32_t op)
{
	uint32_t live = UP_LIVE;

	if (!atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING)) {
		while (atomic_load(&r->state) == UP_CLOSING && up_agent_alive())
			up_sys0(SYS_sched_yield);
		return 0;
	}
	/* A dead agent has laid what it has laid: those pages hold the file's bytes. */
	if (ask(op, (uint32_t)(r - up_job.region), -1) == -ESRCH)
		forget_slot(r);
	return 1;
}

static int overlaps(const struct up_region *r, uintptr_t address, size_t length)
{
	return address < r->address + r->map_length && r->address < address + length;
}

/* Before the kernel changes [address, +length): what is managed there becomes plain. */
static void give_back(uintptr_t address, size_t length, uint32_t op)
{
	if (!atomic_load(&up_job.live) || !length || !in_own_process())
		return;
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);
		uint32_t how = op;

		if ((state != UP_LIVE && state != UP_CLOSING) || !overlaps(r, address, length))
			continue;
		if (op == UP_REQ_FORGET && (address > r->address ||
					    address + length < r->address + r->map_length))
			how = UP_REQ_DETACH; /* only a part goes: the rest stays a plain mapping */
		close_region(r, how);
	}
}

/* End the agent before the job changes who it is: its thread would keep the old identity, and a
 * new user namespace is refused to a process with two threads. */
static void end_agent(void)
{
	int tid = atomic_load(&up_job.agent_tid);

	atomic_store(&up_job.disabled, 1);
	if (!tid || !in_own_process())
		return;
	ask(UP_REQ_QUIT, 0, -1);
	while (up_agent_alive())
		up_sys0(SYS_sched_yield);
	while (up_sys3(SYS_tgkill, up_job.pid, tid, 0) == 0)
		up_sys0(SYS_sched_yield);
}

static int eligible(size_t length, int prot, int flags, int fd, off_t offset, struct stat *st)
{
	int type = flags & MAP_TYPE;
	int unfit = MAP_ANONYMOUS | MAP_HUGETLB | MAP_GROWSDOWN | MAP_LOCKED;

	if (!up_job.enabled || atomic_load(&up_job.disabled) || fd < 0 || prot != PROT_READ ||
	    (flags & unfit) || length < up_job.min_bytes || !in_own_process() ||
	    (type != MAP_SHARED && type != MAP_PRIVATE && type != MAP_SHARED_VALIDATE))
		return 0;
	if (up_failed(up_sys2(SYS_fstat, fd, st)) || !S_ISREG(st->st_mode))
		return 0;
	return offset >= 0 && st->st_size > offset &&
	       (uint64_t)(st->st_size - offset) >= up_job.min_bytes;
}

static struct up_region *claim_region(void)
{
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		uint32_t is_free = UP_FREE;

		if (!atomic_compare_exchange_strong(&up_job.region[i].state, &is_free, UP_OPENING))
			continue;
		atomic_fetch_add(&up_job.live, 1);
		up_job.region[i].id =
			i | (atomic_fetch_add(&up_job.generation, 1) + 1) % 0x3fffff << 10;
		return &up_job.region[i];
	}
	return NULL;
}

/* The mapping exists and nobody knows its address yet: hand it to the agent. */
static void adopt(void *p, size_t length, int prot, int flags, int fd, off_t offset,
		  const struct stat *st)
{
	long status = up_sys3(SYS_fcntl, fd, F_GETFL, 0);
	size_t mask = up_job.page_bytes - 1;
	uint64_t bytes = (uint64_t)(st->st_size - offset);
	struct up_region *r;

	if (up_failed(status) || (status & O_ACCMODE) == O_WRONLY || (status & O_PATH) ||
	    !agent_ready())
		return;
	r = claim_region();
	if (!r)
		return;
	r->address = (uintptr_t)p;
	r->map_length = (length + mask) & ~mask;
	r->length = bytes < length ? ((size_t)bytes + mask) & ~mask : r->map_length;
	r->offset = (uint64_t)offset;
	r->device = (uint64_t)st->st_dev;
	r->inode = (uint64_t)st->st_ino;
	r->size = (uint64_t)st->st_size;
	r->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
	r->prot = prot;
	r->map_flags = flags;
	r->advice = MADV_NORMAL;
	r->swallowed = 0;
	r->writable = (status & O_ACCMODE) == O_RDWR;
	r->inherited = 0;
	r->fd = r->checkpoint_fd = r->reopened_fd = -1;
	r->verdict = r->sent = r->overlays = 0;
	if (ask(UP_REQ_ATTACH, (uint32_t)(r - up_job.region), fd))
		forget_slot(r);
}

/* ------------------------------------------------------------------ mapping calls */

static void *map(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	int saved = errno;
	struct stat st;
	void *p;

	if (flags & MAP_FIXED)
		give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	p = next.mmap ? next.mmap(address, length, prot, flags, fd, offset)
		      : (void *)fail((long)up_mmap(address, length, prot, flags, fd,
						   (uint64_t)offset));
	if (p == MAP_FAILED)
		return p;
	saved = errno;
	if (eligible(length, prot, flags, fd, offset, &st))
		adopt(p, length, prot, flags, fd, offset, &st);
	errno = saved;
	return p;
}

EXPORT void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	return map(address, length, prot, flags, fd, offset);
}

EXPORT void *mmap64(void *address, size_t length, int prot, int flags, int fd, off64_t offset)
{
	return map(address, length, prot, flags, fd, offset);
}

EXPORT int munmap(void *address, size_t length)
{
	int saved = errno;

	give_back((uintptr_t)address, length, UP_REQ_FORGET);
	errno = saved;
	if (next.munmap)
		return next.munmap(address, length);
	return (int)fail(up_sys2(SYS_munmap, address, length));
}

EXPORT void *mremap(void *old, size_t old_length, size_t length, int flags, ...)
{
	int saved = errno;
	void *target = NULL;
	va_list ap;

	if (flags & MREMAP_FIXED) {
		va_start(ap, flags);
		target = va_arg(ap, void *);
		va_end(ap);
		give_back((uintptr_t)target, length, UP_REQ_DETACH);
	}
	/* mremap of a single page (old_length 0 duplicates a shared mapping) is no special case. */
	give_back((uintptr_t)old, old_length ? old_length : 1, UP_REQ_DETACH);
	errno = saved;
	if (next.mremap)
		return next.mremap(old, old_length, length, flags, target);
	return (void *)fail(up_sys5(SYS_mremap, old, old_length, length, flags, target));
}

EXPORT int mprotect(void *address, size_t length, int prot)
{
	int saved = errno;

	if (prot != PROT_READ)
		give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	if (next.mprotect)
		return next.mprotect(address, length, prot);
	return (int)fail(up_sys3(SYS_mprotect, address, length, prot));
}

/* What advice does to a managed region: 1 when it is swallowed. */
static int advise_region(struct up_region *r, uintptr_t address, size_t length, int advice)
{
	int whole = address <= r->address && address + length >= r->address + r->length;

	switch (advice) {
	case MADV_WILLNEED:
	case MADV_DONTNEED:
	case MADV_COLD:
	case MADV_PAGEOUT:
	case MADV_POPULATE_READ:
		return 0;
	case MADV_RANDOM:
		/* On Lustre each cold fault would become one 4 KiB RPC; elsewhere the kernel's
		 * readahead is what helps when a window was missed. Replayed on detach. */
		if (whole && !up_job.keep_advice) {
			atomic_store(&r->swallowed, 1);
			return 1;
		}
		break;
	case MADV_NORMAL:
	case MADV_SEQUENTIAL:
		break;
	default:
		whole = 0; /* changes what the mapping is: it must lie over one kind of pages */
	}
	if (!whole) {
		close_region(r, UP_REQ_DETACH);
		return 0;
	}
	atomic_store(&r->swallowed, 0);
	r->advice = advice;
	return 0;
}

EXPORT int madvise(void *address, size_t length, int advice)
{
	int saved = errno, swallowed = 0;

	if (atomic_load(&up_job.live) && length && in_own_process()) {
		for (uint32_t i = 0; i < UP_REGIONS; i++) {
			struct up_region *r = &up_job.region[i];

			if (atomic_load(&r->state) == UP_LIVE &&
			    overlaps(r, (uintptr_t)address, length))
				swallowed |= advise_region(r, (uintptr_t)address, length, advice);
		}
	}
	errno = saved;
	if (swallowed)
		return 0;
	if (next.madvise)
		return next.madvise(address, length, advice);
	return (int)fail(up_sys3(SYS_madvise, address, length, advice));
}

EXPORT int posix_madvise(void *address, size_t length, int advice)
{
	int saved = errno, ret = 0;

	/* POSIX_MADV_DONTNEED does nothing in glibc; the other numbers are madvise's. */
	if (advice != POSIX_MADV_DONTNEED && madvise(address, length, advice))
		ret = errno;
	errno = saved;
	return ret;
}

EXPORT int mlock(const void *address, size_t length)
{
	int saved = errno;

	give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	return next.mlock ? next.mlock(address, length)
			  : (int)fail(up_sys2(SYS_mlock, address, length));
}

EXPORT int mlock2(const void *address, size_t length, unsigned int flags)
{
	int saved = errno;

	give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	return next.mlock2 ? next.mlock2(address, length, flags)
			   : (int)fail(up_sys3(SYS_mlock2, address, length, flags));
}

EXPORT int mlockall(int flags)
{
	int saved = errno;

	give_back(0, UINTPTR_MAX, UP_REQ_DETACH);
	atomic_store(&up_job.disabled, 1); /* MCL_FUTURE would lock, and read, what we lay */
	errno = saved;
	return next.mlockall ? next.mlockall(flags) : (int)fail(up_sys1(SYS_mlockall, flags));
}

EXPORT int remap_file_pages(void *address, size_t length, int prot, size_t page, int flags)
{
	int saved = errno;

	give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	if (next.remap_file_pages)
		return next.remap_file_pages(address, length, prot, page, flags);
	return (int)fail(up_sys5(SYS_remap_file_pages, address, length, prot, page, flags));
}

/* ------------------------------------------------------------------ identity */

#define BEFORE_IDENTITY_CHANGES()      \
	do {                           \
		int saved_ = errno;    \
		end_agent();           \
		errno = saved_;        \
	} while (0)

#define IDENTITY(name, sysno, parameters, arguments, call)            \
	EXPORT int name parameters                                    \
	{                                                             \
		BEFORE_IDENTITY_CHANGES();                            \
		return next.name ? next.name arguments : (int)fail(call); \
	}

IDENTITY(setuid, SYS_setuid, (uid_t a), (a), up_sys1(SYS_setuid, a))
IDENTITY(setgid, SYS_setgid, (gid_t a), (a), up_sys1(SYS_setgid, a))
IDENTITY(seteuid, SYS_setresuid, (uid_t a), (a), up_sys3(SYS_setresuid, -1, a, -1))
IDENTITY(setegid, SYS_setresgid, (gid_t a), (a), up_sys3(SYS_setresgid, -1, a, -1))
IDENTITY(setreuid, SYS_setreuid, (uid_t a, uid_t b), (a, b), up_sys2(SYS_setreuid, a, b))
IDENTITY(setregid, SYS_setregid, (gid_t a, gid_t b), (a, b), up_sys2(SYS_setregid, a, b))
IDENTITY(setresuid, SYS_setresuid, (uid_t a, uid_t b, uid_t c), (a, b, c),
	 up_sys3(SYS_setresuid, a, b, c))
IDENTITY(setresgid, SYS_setresgid, (gid_t a, gid_t b, gid_t c), (a, b, c),
	 up_sys3(SYS_setresgid, a, b, c))
IDENTITY(setgroups, SYS_setgroups, (size_t n, const gid_t *list), (n, list),
	 up_sys2(SYS_setgroups, n, list))
IDENTITY(capset, SYS_capset,
	 (struct capability_header * header, const struct capability_data *data), (header, data),
	 up_sys2(SYS_capset, header, data))
IDENTITY(setns, SYS_setns, (int fd, int type), (fd, type), up_sys2(SYS_setns, fd, type))

EXPORT int unshare(int flags)
{
	/* The rest (mount, network, ...) is the calling thread's own affair. */
	if (flags & (CLONE_NEWUSER | CLONE_NEWPID | CLONE_VM | CLONE_SIGHAND | CLONE_THREAD))
		BEFORE_IDENTITY_CHANGES();
	return next.unshare ? next.unshare(flags) : (int)fail(up_sys1(SYS_unshare, flags));
}

/* ------------------------------------------------------------------ start, fork, end */

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

static long long first_number(const char *const *name)
{
	for (; *name; name++) {
		long long value = number(*name, -1);

		if (value >= 0)
			return value;
	}
	return -1;
}

/* The same names, in the same order, as uffdprefetch/identity.py. */
static void read_rank(void)
{
	static const char *const rank[] = { "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK",
					    "PMI_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK",
					    "SLURM_PROCID", NULL };
	static const char *const local[] = { "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
					     "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK",
					     "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID", NULL };
	static const char *const world[] = { "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
					     "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE",
					     "SLURM_NTASKS", NULL };

	up_job.rank = (int)first_number(rank);
	up_job.local_rank = (int)first_number(local);
	up_job.world = (int)first_number(world);
}

/* In the child only the forking thread lives. A region that was live is the agent's to take up
 * again; one that another thread was just opening or closing is left alone: its overlays, if any,
 * hold the file's bytes. */
static void after_fork_in_child(void)
{
	int saved = errno, inherited = 0;

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

		if (state == UP_LIVE) {
			r->inherited = 1;
			r->fd = r->checkpoint_fd = r->reopened_fd = -1;
			r->verdict = r->sent = r->overlays = 0;
			inherited++;
		} else if (state != UP_FREE) {
			atomic_store(&r->state, UP_FREE);
		}
	}
	atomic_store(&up_job.live, inherited);
	if (inherited)
		agent_ready();
	errno = saved;
}

static void look_up_next(void)
{
#define LOOK_UP(name) (*(void **)&next.name = dlsym(RTLD_NEXT, #name))
	LOOK_UP(munmap);
	LOOK_UP(mremap);
	LOOK_UP(mprotect);
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
	LOOK_UP(capset);
	LOOK_UP(mmap);
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

	look_up_next();
	up_job.pid = (int)up_sys0(SYS_getpid);
	up_job.page_bytes = getauxval(AT_PAGESZ);
	errno = saved;
	if (!path || !*path || strlen(path) >= UP_PATH_MAX)
		return;
	strcpy(up_job.socket_path, path);
	up_job.min_bytes = (uint64_t)number("UFFDPREFETCH_MIN_SIZE", 16 << 20);
	if (up_job.min_bytes < 2 * up_job.page_bytes)
		up_job.min_bytes = 2 * up_job.page_bytes;
	up_job.keep_advice = number("UFFDPREFETCH_KEEP_ADVICE", 0) != 0;
	up_job.service_resolves = resolve && !strcmp(resolve, "service");
	up_job.test_exit_after = (long)number("UFFDPREFETCH_TEST_AGENT_EXIT", 0);
	up_job.test_exit_log = secure_getenv("UFFDPREFETCH_TEST_AGENT_EXIT_LOG");
	if (!up_job.test_exit_log)
		up_job.test_exit_after = 0;
	read_rank();
	read_command();
	if (!pthread_atfork(NULL, NULL, after_fork_in_child))
		up_job.enabled = 1;
	errno = saved;
}

/* At exit(3) the mappings are still there: the service may count what was used. Bounded. */
__attribute__((destructor)) static void finish(void)
{
	int saved = errno;

	if (atomic_load(&up_job.live) && up_agent_alive() && in_own_process())
		ask(UP_REQ_BYE, 0, -1);
	errno = saved;
}
