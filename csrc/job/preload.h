/* SPDX-License-Identifier: Apache-2.0 */
/*
 * preload.h - what the interposers' files share: preload.c (start, fork, end), mapping.c (mmap and
 * its kin), syscall.c (the same by libc's syscall()), before.c (what both do before), identity.c (calls after
 * which the process is somebody else), lock.c (open), fcntl.c (leases), request.c (asking the agent).
 *
 * Nothing in them prints, allocates or changes errno, and the job's descriptor table is never
 * touched.
 */
#ifndef UP_PRELOAD_H
#define UP_PRELOAD_H

#include <errno.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "job/job.h"
#include "common/sys.h"

/* Behind errno. Weak, as all that we take from a C library: see preload.c. */
#pragma weak __errno_location

#define UP_EXPORT __attribute__((visibility("default")))
/* A sanitizer's run-time calls it before it is ready itself. */
#define UP_EARLY __attribute__((no_sanitize("address", "thread", "undefined")))

struct capability_header;
struct capability_data;

#pragma GCC visibility push(hidden)

/* loader.c */
/* The next definition of each call in the chain of libraries, or NULL until the constructor has run:
 * an allocator that starts before us goes straight to the kernel. */
struct rlimit64;

struct up_next {
	void *(*mmap)(void *, size_t, int, int, int, off_t);
	int (*munmap)(void *, size_t);
	void *(*mremap)(void *, size_t, size_t, int, ...);
	int (*mprotect)(void *, size_t, int);
	int (*pkey_mprotect)(void *, size_t, int, int);
	int (*madvise)(void *, size_t, int);
	ssize_t (*process_madvise)(int, const struct iovec *, size_t, int, unsigned int);
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
	int (*initgroups)(const char *, gid_t);
	int (*capset)(struct capability_header *, const struct capability_data *);
	int (*setrlimit)(int, const struct rlimit *);
	int (*setrlimit64)(int, const struct rlimit64 *);
	int (*prlimit)(pid_t, int, const struct rlimit *, struct rlimit *);
	int (*prlimit64)(pid_t, int, const struct rlimit64 *, struct rlimit64 *);
	int (*open)(const char *, int, ...);
	int (*open64)(const char *, int, ...);
	int (*openat)(int, const char *, int, ...);
	int (*openat64)(int, const char *, int, ...);
	int (*fcntl)(int, int, ...);
	int (*fcntl64)(int, int, ...);
	int (*prctl)(int, ...);
	void *(*shmat)(int, const void *, int);
	int (*clone)(int (*)(void *), void *, int, void *, ...);
	pid_t (*fork_only)(void); /* _Fork, glibc 2.34 */
};

extern struct up_next up_next;

struct up_next_name {
	const char *name;
	void **call;
};
/* The next definition after ours of each, where there is one; what is not NULL stays. */
void up_load_next(const struct up_next_name *name, int count);
/* What this program runs under that threads and mappings of ours would break. */
enum up_left_alone up_run_time(void);

/* mapping.c: the interposers that memory hooks overwrite */
extern const void *const up_entry[UP_ENTRIES_MAX];
extern const int up_entry_count;

/* text.c */
int up_same_text(const char *a, const char *b);
size_t up_text_bytes(const char *text, size_t most);

/* alone.c */
extern enum up_left_alone up_alone; /* 0, or why this program is left alone */
/* Tell the service, the first time. */
void up_say_alone(void);

/* ptracer.c */
/* As a program begins. scope_path: of kernel.yama.ptrace_scope. */
void up_name_ptracer(const char *scope_path);
/* In a forked child. */
void up_name_ptracer_again(void);

/* syscall.c */
extern void *up_next_syscall;

/* request.c */
int up_in_own_process(void);
/* Post, ring, wait: the agent's result; -ESRCH when there is no agent any more; when the time is over
 * -ETIMEDOUT (it has not seen the request and never will) or -EINPROGRESS (it has; its region is
 * the caller's, SEIZED, or LEFT). */
int up_ask(uint32_t op, uint32_t region, int job_fd);
/* A thread of the job waits so often UP_WAIT_STEP_NS for one of ours: 50 ms. */
#define UP_WAIT_STEPS 10
/* UP_REQ_ATTACH of a region that the caller has filled in: 0 when it is LIVE. */
int up_attach(struct up_region *r, int job_fd);
/* What the job has said (enum up_stated) of [start, end) of the region's file: a hint, which is lost where the
 * agent has too much to do. */
void up_state(uint32_t region, uint32_t what, uint64_t start, uint64_t end);
/* Start the agent when it is not there; whether there is one. */
int up_agent_ready(void);
/* --engine pool: until the service has said how it serves the mapping, while *looks (steps, from
 * up_job.patience on) lasts, and without waiting while it is known to be silent; while it is only
 * starting UP_START_STEPS, unless a signal comes that the job has not `blocked` itself: that waits no longer
 * than for anything else of ours. The caller is the only one who knows the address. 0, or -ESRCH when
 * the agent died over it. */
int up_await_swap(struct up_region *r, int *looks, uint64_t blocked);
/* The file in the pool's place, in all of it, without the agent: 0 or -errno. */
int up_map_from_anchor(struct up_region *r);
/* Take a region back from the agent, because [address, +length) changes; 0 when another thread has
 * just done so. */
int up_close_region(struct up_region *r, uint32_t op, uintptr_t address, size_t length);
/* Until another thread, or the agent, has given it back. */
void up_await_closed(struct up_region *r);
int up_overlaps(const struct up_region *r, uintptr_t address, size_t length);
/* Before the kernel changes [address, +length): what is managed there becomes plain. Whether pages have stayed the
 * pool's (UP_POOLED_COPIES): then up_settle() comes after what takes them away. */
int up_give_back(uintptr_t address, size_t length, uint32_t op);
/* After the kernel has taken away what lay in [address, +length). */
void up_settle(uintptr_t address, size_t length);
/* Before a child that no atfork handler sees: it would find holes where the pool lies. */
void up_give_back_pool(void);
/* End the agent before the job changes who it is: its thread would keep the old identity, and a
 * new user namespace is refused to a process with two threads. */
void up_end_agent(void);
/* Whether another library has overwritten our functions: the service is told. */
void up_look_for_hooks(void);

/* before.c */
/* The kernel is to lock, and so to read, all that is mapped, and perhaps what will be. */
void up_all_is_locked(void);
/* A limit is to be set, of this process or of another one. */
void up_before_limit(int resource, int is_set);
/* process_madvise(2) of these ranges is to be called. */
void up_before_process_madvise(const struct iovec *ranges, size_t count, int advice);
/* Whether madvise(2) with it does something to what is mapped there. */
int up_changes_a_mapping(int advice);

/* apart.c */
/* The file in the pool's place, of a region that is SEIZED: wherever the kernel says that the pool lies, and but for
 * copies of the process's own. 0; -EBUSY: a part is the pool's still; another -errno: the kernel cannot be asked.
 * ``settles``: see up_pool_detach(). ``alone``: see struct up_hands. */
int up_put_back_apart(struct up_region *r, int settles, int alone);
/* The act itself: how many bytes are the pool's still, or -errno. It opens descriptors. */
long up_put_back_here(struct up_region *r, int settles, int alone);
/* Whether nothing lies in [start, end); -errno: the kernel cannot be asked. It opens a descriptor. */
int up_is_empty_here(uintptr_t start, uintptr_t end);
/* In a forked child, where no such thread is. */
void up_forget_apart(void);

/* identity.c: whether this prctl(2) takes rights from who calls it. */
int up_prctl_gives_up_rights(long option, long value);

/* writer.c: the job has opened a file for writing. */
void up_opened_to_write(int fd);

/* startlog.c */
struct up_start_log;
extern struct up_start_log *up_start_log; /* NULL: nobody wants to know (wrap --learn) */
/* ... and what lies at this path does. */
void up_start_log_open(const char *path);
/* open(2) has returned: it has read the path. ``error``: 0, or its errno. */
void up_note_opened(int directory, const char *path, int flags, int error);

/* lock.c */
extern int up_own_locks; /* --ownlock: fixed by up_lock_start() */
/* Lock files of the rank, which is known, go to this directory; NULL: nothing of the kind. */
void up_lock_start(const char *directory);
/* This thread maps something. */
void up_lock_mapped(void);

#pragma GCC visibility pop

/* The kernel's value as libc's: -1 and errno. */
UP_EARLY static inline long up_fail(long ret)
{
	if (!up_failed(ret))
		return ret;
	errno = (int)-ret;
	return -1;
}

#endif
