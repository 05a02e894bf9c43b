// SPDX-License-Identifier: Apache-2.0
/*
 * syscall.c - system calls that the program makes through libc's syscall(2).
 *
 * libseccomp and libcap give up rights by it, and memory hooks (Open MPI's UCX, libfabric) unmap by it,
 * past the functions that we interpose. What we do before those, we do before these. The call itself
 * is handed on by a jump, with all registers and the stack as they came: syscall(2) may make a child
 * that returns on another stack.
 *
 * Calls made by an instruction of the program's own do not come by here, so nothing may rest on it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>

#include "job/preload.h"

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_mseal
#define SYS_mseal 462
#endif
#ifndef SYS_landlock_restrict_self
#define SYS_landlock_restrict_self 446
#endif

static size_t page_multiple(size_t length)
{
	return (length + up_job.page_bytes - 1) & ~(up_job.page_bytes - 1);
}

/* Of its own: beside it there is only the agent's. A directory's links are its entries and two. */
static int is_last_thread(void)
{
	struct stat tasks;

	return up_agent_alive() &&
	       !up_failed(up_sys4(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &tasks, 0)) &&
	       tasks.st_nlink <= 2 + 2;
}

/* One with memory of its own finds holes where the pool lies. One that shares ours may go on when this
 * process has ended, and our threads with it. A thread ends with them; who waits in vfork(2) is there,
 * as a rule, until its child runs another program (what is killed meanwhile:
 * csrc/service/pool/guardian.c). */
static void before_clone(unsigned long flags)
{
	if (flags & CLONE_VM && flags & (CLONE_THREAD | CLONE_VFORK))
		return;
	if (flags & CLONE_VM && up_job.pool && up_in_own_process())
		atomic_store(&up_job.shared, 1);
	up_give_back_pool();
}

/* Called by syscall() below. errno stays. */
__attribute__((visibility("hidden"), used)) void up_before_syscall(long number, long a, long b,
								   long c, long d, long e)
{
	int saved = errno;

	switch (number) {
	case SYS_munmap:
		if (!((size_t)a & (up_job.page_bytes - 1)))
			up_give_back((uintptr_t)a, page_multiple((size_t)b), UP_REQ_FORGET);
		break;
	case SYS_mmap:
		if (d & MAP_FIXED)
			up_give_back((uintptr_t)a, (size_t)b, UP_REQ_DETACH);
		break;
	case SYS_mremap:
		if (d & MREMAP_FIXED)
			up_give_back((uintptr_t)e, (size_t)c, UP_REQ_DETACH);
		up_give_back((uintptr_t)a, b ? (size_t)b : 1, UP_REQ_DETACH);
		break;
	case SYS_mprotect:
		if (c == PROT_READ)
			break;
		/* fallthrough */
	case SYS_pkey_mprotect:
	case SYS_mlock:
	case SYS_mlock2:
	case SYS_remap_file_pages:
	case SYS_mseal:
		up_give_back((uintptr_t)a, (size_t)b, UP_REQ_DETACH);
		break;
	case SYS_mlockall:
		up_all_is_locked();
		break;
	case SYS_madvise:
		if (up_changes_a_mapping((int)c))
			up_give_back((uintptr_t)a, (size_t)b, UP_REQ_DETACH);
		break;
	case SYS_process_madvise:
		up_before_process_madvise((const struct iovec *)b, (size_t)c, (int)d);
		break;
	case SYS_setrlimit:
		up_before_limit((int)a, b != 0);
		break;
	case SYS_prlimit64:
		up_before_limit((int)b, c != 0);
		break;
	case SYS_prctl:
		if (up_prctl_gives_up_rights(a, b))
			up_end_agent();
		break;
	case SYS_unshare:
		if (a & (CLONE_NEWUSER | CLONE_NEWPID | CLONE_VM | CLONE_SIGHAND | CLONE_THREAD))
			up_end_agent();
		break;
	case SYS_seccomp:
		if (a <= 1) /* SECCOMP_SET_MODE_STRICT, SECCOMP_SET_MODE_FILTER; the others ask */
			up_end_agent();
		break;
	case SYS_clone:
		before_clone((unsigned long)a);
		break;
	case SYS_clone3: /* with what flags is not looked at: programs probe for it with no memory there */
		up_give_back_pool();
		break;
#ifdef SYS_fork
	case SYS_fork:
		up_give_back_pool();
		break;
#endif
	case SYS_exit:
		if (is_last_thread())
			up_end_agent(); /* which would keep the process */
		break;
	case SYS_landlock_restrict_self:
	case SYS_capset:
	case SYS_setns:
	case SYS_setuid:
	case SYS_setgid:
	case SYS_setreuid:
	case SYS_setregid:
	case SYS_setresuid:
	case SYS_setresgid:
	case SYS_setfsuid:
	case SYS_setfsgid:
	case SYS_setgroups:
		up_end_agent();
		break;
	}
	errno = saved;
}

/* A child by clone(3) is one that no atfork handler sees. */
UP_EXPORT int clone(int (*fn)(void *), void *stack, int flags, void *argument, ...)
{
	int saved = errno;
	void *rest[3]; /* parent_tid, tls, child_tid, if flags say so */
	va_list ap;

	before_clone((unsigned int)flags);
	errno = saved;
	va_start(ap, argument);
	for (int i = 0; i < 3; i++)
		rest[i] = va_arg(ap, void *);
	va_end(ap);
	if (!up_next.clone)
		return (int)up_fail(-ENOSYS);
	return up_next.clone(fn, stack, flags, argument, rest[0], rest[1], rest[2]);
}

/* shmat(2) takes away what lies there only with SHM_REMAP. */
UP_EXPORT void *shmat(int id, const void *address, int flags)
{
	int saved = errno, stays = 0;
	struct shmid_ds info;
	void *p;

	if (flags & SHM_REMAP && atomic_load(&up_job.live) &&
	    !up_failed(up_sys3(SYS_shmctl, id, IPC_STAT, &info)))
		stays = up_give_back((uintptr_t)address, page_multiple(info.shm_segsz), UP_REQ_DETACH);
	errno = saved;
	p = up_next.shmat ? up_next.shmat(id, address, flags)
			  : (void *)up_fail(up_sys3(SYS_shmat, id, address, flags));
	if (stays && p != (void *)-1)
		up_settle((uintptr_t)address, page_multiple(info.shm_segsz));
	return p;
}

/* Before the constructor has found libc's. */
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	return up_fail(up_sys6(number, a, b, c, d, e, f));
}

void *up_next_syscall = (void *)raw;

#if defined(__x86_64__)
__asm__(".text\n"
	".globl syscall\n"
	".type syscall,@function\n"
	"syscall:\n"
	"	.cfi_startproc\n"
	"	endbr64\n"
	"	pushq %rdi\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	pushq %rsi\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	pushq %rdx\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	pushq %rcx\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	pushq %r8\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	pushq %r9\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	subq $8, %rsp\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	call up_before_syscall\n"
	"	addq $8, %rsp\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %r9\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %r8\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %rcx\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %rdx\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %rsi\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	popq %rdi\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	jmpq *up_next_syscall(%rip)\n"
	"	.cfi_endproc\n"
	".size syscall,.-syscall\n");
#elif defined(__aarch64__)
__asm__(".text\n"
	".globl syscall\n"
	".type syscall,%function\n"
	"syscall:\n"
	"	.cfi_startproc\n"
	"	hint #34\n" /* bti c */
	"	stp x29, x30, [sp, #-80]!\n"
	"	.cfi_def_cfa_offset 80\n"
	"	.cfi_offset 29, -80\n"
	"	.cfi_offset 30, -72\n"
	"	stp x0, x1, [sp, #16]\n"
	"	stp x2, x3, [sp, #32]\n"
	"	stp x4, x5, [sp, #48]\n"
	"	str x6, [sp, #64]\n"
	"	bl up_before_syscall\n"
	"	ldp x0, x1, [sp, #16]\n"
	"	ldp x2, x3, [sp, #32]\n"
	"	ldp x4, x5, [sp, #48]\n"
	"	ldr x6, [sp, #64]\n"
	"	ldp x29, x30, [sp], #80\n"
	"	.cfi_restore 29\n"
	"	.cfi_restore 30\n"
	"	.cfi_def_cfa_offset 0\n"
	"	adrp x16, up_next_syscall\n"
	"	ldr x16, [x16, #:lo12:up_next_syscall]\n"
	"	br x16\n"
	"	.cfi_endproc\n"
	".size syscall,.-syscall\n");
#endif
