/* SPDX-License-Identifier: Apache-2.0 */
/*
 * raw.h - system calls that pass no library: what rustix, Go and memory hooks do. syscall(2) would not
 * do, since it is interposed, too.
 */
#ifndef RAW_H
#define RAW_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>

static inline long raw6(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;

	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory");
	return x0;
#else
#error "no system calls for this processor"
#endif
}

#define RAW(number, a, b, c, d, e, f) \
	raw6(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* As libc tells of it: -1 and errno. */
static inline long raw_result(long ret)
{
	if (ret < 0 && ret > -4096) {
		errno = (int)-ret;
		return -1;
	}
	return ret;
}

#define raw_mmap(at, bytes, prot, flags, fd, offset) \
	((void *)raw_result(RAW(SYS_mmap, at, bytes, prot, flags, fd, offset)))
#define raw_munmap(at, bytes) ((int)raw_result(RAW(SYS_munmap, at, bytes, 0, 0, 0, 0)))
#define raw_mremap(at, bytes, to_bytes, flags, to) \
	((void *)raw_result(RAW(SYS_mremap, at, bytes, to_bytes, flags, to, 0)))
#define raw_mprotect(at, bytes, prot) \
	((int)raw_result(RAW(SYS_mprotect, at, bytes, prot, 0, 0, 0)))
#define raw_madvise(at, bytes, advice) \
	((int)raw_result(RAW(SYS_madvise, at, bytes, advice, 0, 0, 0)))
#define raw_shmat(id, at, flags) ((void *)raw_result(RAW(SYS_shmat, id, at, flags, 0, 0, 0)))
/* No handler of pthread_atfork runs. */
#define raw_fork() ((pid_t)raw_result(RAW(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0)))

#endif
