// SPDX-License-Identifier: Apache-2.0
/*
 * frugal.c [FILE] - with FILE mapped meanwhile or without, this thread allows itself nothing but the
 * system calls that the lines below make, each by name, and is killed for any other.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "raw.h"

/* By an instruction, so that no library is told. */
static long raw(long number, long a, long b, long c)
{
	return raw6(number, a, b, c, 0, 0, 0);
}

#define ALLOW(name)                                                                                \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1),                                     \
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void allow_little(void)
{
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(mmap), ALLOW(munmap), ALLOW(mremap), ALLOW(mprotect), ALLOW(madvise),
		ALLOW(mlock), ALLOW(openat), ALLOW(close), ALLOW(write), ALLOW(exit_group),
#ifdef SYS_open
		ALLOW(open),
#endif
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof(rules) / sizeof(*rules), rules };

	if (raw(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0) ||
	    raw(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program))
		_exit(91);
}

int main(int argc, char **argv)
{
	int small = open(argv[0], O_RDONLY), fd = argc > 1 ? open(argv[1], O_RDONLY) : -1, again;
	size_t bytes = 1 << 20;
	char *large = NULL, *a, *b;
	struct stat st;

	if (fd >= 0 && !fstat(fd, &st))
		large = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	allow_little();
	a = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	b = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, small, 0);
	if (a == MAP_FAILED || b == MAP_FAILED || b[1] != 'E' || large == MAP_FAILED)
		_exit(92);
	a[0] = 1;
	if (madvise(a, bytes, MADV_DONTNEED) || mprotect(a, 4096, PROT_READ) || mlock(b, 4096) ||
	    mremap(a + 65536, 65536, 4096, 0) != a + 65536)
		_exit(93);
	again = open("/dev/null", O_WRONLY | O_NONBLOCK);
	if (again < 0 || close(again) || munmap(a, 65536) || munmap(b, 4096) ||
	    open("/nonexistent/file", O_RDWR | O_NONBLOCK) != -1 ||
	    syscall(SYS_madvise, a + 65536 + 4096, 4096, MADV_DONTNEED) != -1 ||
	    syscall(SYS_munmap, a + 131072, 4096))
		_exit(94);
	if (write(1, "ok\n", 3) != 3)
		_exit(95);
	_exit(0);
}
