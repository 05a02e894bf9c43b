// SPDX-License-Identifier: Apache-2.0
/*
 * thread.c - threads of ours that libc does not know of.
 *
 * A raw clone(2): any extra *pthread* takes glibc off its single-thread fast path (stdio locks, malloc),
 * which makes a tool like mdb_dump several times slower. The price is that nothing in such a thread
 * may use TLS, errno or a libc function with state.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/mman.h>
#ifdef UP_AGENT_PTHREAD
#include <pthread.h>
#endif

#include "job/agent.h"

struct up_mask up_block_signals(void)
{
	struct up_mask mask = { 0 };
	uint64_t all = ~0ull;

	mask.blocked = !up_failed(up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &mask.before, sizeof(all)));
	return mask;
}

void up_restore_signals(struct up_mask mask)
{
	if (mask.blocked)
		up_sys4(SYS_rt_sigprocmask, SIG_SETMASK, &mask.before, NULL, sizeof(mask.before));
}

#ifdef UP_AGENT_PTHREAD

struct start {
	void (*main)(void);
	_Atomic int *tid;
	_Atomic int started;
};

static _Atomic int last_tid[2]; /* of the agent and the responder that began last */

/* libc's seteuid(3) and its like wait for an answer of each thread that the kernel still knows. Ours
 * give none (their signals are blocked), also after they have cleared their word. */
void up_thread_await_end(void)
{
	for (int i = 0; i < 2; i++)
		while (last_tid[i] && !up_failed(up_sys3(SYS_tgkill, up_sys0(SYS_getpid), last_tid[i], 0)))
			up_sys0(SYS_sched_yield);
}

/* A thread that begins or ends is inside the sanitizer's allocator, whose locks a child of fork(2) inherits
 * as they are just then. */
static _Atomic int starting, ending[2];

void up_thread_hold(void)
{
	while (atomic_exchange(&starting, 1))
		up_sys0(SYS_sched_yield);
	for (int i = 0; i < 2; i++)
		while (atomic_load(&ending[i]) &&
		       !up_failed(up_sys3(SYS_tgkill, up_sys0(SYS_getpid), atomic_load(&ending[i]), 0)))
			up_sys0(SYS_sched_yield);
}

void up_thread_release(void)
{
	atomic_store(&starting, 0);
}

/* For the sanitizers, whose run-times must know every thread. */
static void *run(void *arg)
{
	struct start *start = arg;
	_Atomic int *tid = start->tid;
	void (*main)(void) = start->main;

	atomic_store(tid, (int)up_sys0(SYS_gettid));
	last_tid[tid == &up_job.responder_tid] = (int)up_sys0(SYS_gettid);
	atomic_store(&start->started, 1); /* on the stack of who waits: gone from here on */
	main();
	while (atomic_exchange(&starting, 1)) /* not in the middle of a fork(2) */
		up_sys0(SYS_sched_yield);
	atomic_store(&ending[tid == &up_job.responder_tid], (int)up_sys0(SYS_gettid));
	up_thread_release();
	atomic_store(tid, 0);
	return NULL;
}

static int spawn(void (*main)(void), void *stack, _Atomic int *tid)
{
	struct start start = { main, tid, 0 };
	pthread_attr_t attr;
	pthread_t thread;
	int ret = pthread_attr_init(&attr);

	if (ret)
		return -ret;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstack(&attr, stack, UP_AGENT_STACK_BYTES);
	while (atomic_exchange(&starting, 1))
		up_sys0(SYS_sched_yield);
	ret = pthread_create(&thread, &attr, run, &start);
	pthread_attr_destroy(&attr);
	while (!ret && !atomic_load(&start.started)) /* its tid may come and go meanwhile */
		up_sys0(SYS_sched_yield);
	up_thread_release();
	return -ret;
}

#else

/* clone(2) with a function: returns the tid or -errno; the child runs fn on the new stack. */
long up_clone(unsigned long flags, void *stack, _Atomic int *tid, void (*fn)(void))
	__attribute__((visibility("hidden")));

#if defined(__x86_64__)
__asm__(".text\n"
	".globl up_clone\n"
	".hidden up_clone\n"
	".type up_clone,@function\n"
	"up_clone:\n"
	"	andq $-16, %rsi\n"
	"	subq $16, %rsi\n"
	"	movq %rcx, (%rsi)\n"
	"	movq %rdx, %r10\n" /* child_tid; rdx is parent_tid, the same word */
	"	xorl %r8d, %r8d\n"
	"	movl $56, %eax\n"
	"	syscall\n"
	"	testq %rax, %rax\n"
	"	jnz 1f\n"
	"	xorl %ebp, %ebp\n"
	"	movq (%rsp), %rax\n"
	"	call *%rax\n"
	"	xorl %edi, %edi\n"
	"	movl $60, %eax\n"
	"	syscall\n"
	"	hlt\n"
	"1:	ret\n"
	".size up_clone,.-up_clone\n");
#elif defined(__aarch64__)
__asm__(".text\n"
	".globl up_clone\n"
	".hidden up_clone\n"
	".type up_clone,%function\n"
	"up_clone:\n"
	"	and x1, x1, #-16\n"
	"	str x3, [x1, #-16]!\n"
	"	mov x4, x2\n"  /* child_tid; x2 is parent_tid, the same word */
	"	mov x3, xzr\n" /* tls: not set */
	"	mov x8, #220\n"
	"	svc #0\n"
	"	cbnz x0, 1f\n"
	"	mov x29, xzr\n"
	"	ldr x9, [sp]\n"
	"	blr x9\n"
	"	mov x0, xzr\n"
	"	mov x8, #93\n"
	"	svc #0\n"
	"1:	ret\n"
	".size up_clone,.-up_clone\n");
#endif

static int spawn(void (*main)(void), void *stack, _Atomic int *tid)
{
	/* CLONE_FILES: the responder shares the agent's descriptors. The agent shares the job's for an
	 * instant only: it leaves with a copy of its first 64 at most (agent_open), where a clone without
	 * the flag would copy (and flush and close) all. */
	unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
			      CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID |
			      CLONE_UNTRACED; /* strace -f follows the program, not us */
	long ret = up_clone(flags, (char *)stack + UP_AGENT_STACK_BYTES, tid, main);

	return up_failed(ret) ? (int)ret : 0;
}

#endif

/* By the kernel: a filter may refuse to block them, or make believe that they are. */
static int are_blocked(void)
{
	uint64_t never = 1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1), now = 0;

	return !up_failed(up_sys4(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &now, sizeof(now))) && !~(now | never);
}

/* The stack is kept in *stack for the next one that is started. */
int up_thread_spawn(void (*main)(void), void **stack, _Atomic int *tid)
{
	struct up_mask mask;
	void *p = *stack;
	int ret;

	if (!p) {
		p = up_mmap(NULL, UP_AGENT_STACK_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (up_failed((long)p))
			return (int)(long)p;
#ifndef UP_AGENT_PTHREAD /* TSan goes on counting the parent's threads in a child, by their place */
		up_sys3(SYS_madvise, p, UP_AGENT_STACK_BYTES, MADV_DONTFORK);
#endif
		*stack = p;
	}
	/* It is born with every signal blocked and never opens one: handlers are the job's, and UP_BELL that is not
	 * blocked ends the process. */
	mask = up_block_signals();
	ret = are_blocked() ? spawn(main, p, tid) : -EPERM;
	up_restore_signals(mask);
	return ret;
}
