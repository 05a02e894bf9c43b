/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sys.h - system calls without libc: no errno, no cancellation point, no TLS.
 *
 * The agent is a thread that libc does not know of (agent.c says why) and the interposers run
 * before libc is ready, inside malloc and inside signal handlers. So both use these and nothing
 * else. Every function returns the kernel's value: >= 0, or -errno.
 */
#ifndef UP_SYS_H
#define UP_SYS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
static inline long up_sys6(long n, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;

	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
}
#elif defined(__aarch64__)
static inline long up_sys6(long n, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory", "cc");
	return x0;
}
#else
#error "uffdprefetch: the preload is written for x86-64 and AArch64"
#endif

#define UP_ARG(x) ((long)(x))
#define up_sys0(n) up_sys6(n, 0, 0, 0, 0, 0, 0)
#define up_sys1(n, a) up_sys6(n, UP_ARG(a), 0, 0, 0, 0, 0)
#define up_sys2(n, a, b) up_sys6(n, UP_ARG(a), UP_ARG(b), 0, 0, 0, 0)
#define up_sys3(n, a, b, c) up_sys6(n, UP_ARG(a), UP_ARG(b), UP_ARG(c), 0, 0, 0)
#define up_sys4(n, a, b, c, d) up_sys6(n, UP_ARG(a), UP_ARG(b), UP_ARG(c), UP_ARG(d), 0, 0)
#define up_sys5(n, a, b, c, d, e) \
	up_sys6(n, UP_ARG(a), UP_ARG(b), UP_ARG(c), UP_ARG(d), UP_ARG(e), 0)

/* Numbers that older headers lack; the same on every architecture. */
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE (1U << 1)
#endif

static inline int up_failed(long ret)
{
	return (unsigned long)ret > -4096UL;
}

static inline void *up_mmap(void *addr, size_t len, int prot, int flags, int fd, uint64_t off)
{
	return (void *)up_sys6(SYS_mmap, UP_ARG(addr), UP_ARG(len), prot, flags, fd, UP_ARG(off));
}

#endif
