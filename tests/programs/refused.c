// SPDX-License-Identifier: Apache-2.0
/*
 * refused.c - a program where one system call is refused (EPERM), as a container's filter does: refused CALL CMD...
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CALL(name) { #name, SYS_##name }
static const struct {
	const char *name;
	unsigned int number;
} calls[] = {
	CALL(clock_nanosleep), CALL(epoll_create1), CALL(epoll_ctl), CALL(epoll_pwait),
	CALL(ppoll),           CALL(rt_sigprocmask), CALL(signalfd4),
};

int main(int argc, char **argv)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };

	for (unsigned int i = 0; argc > 2 && i < sizeof(calls) / sizeof(calls[0]); i++) {
		if (strcmp(argv[1], calls[i].name))
			continue;
		code[1].k = calls[i].number;
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
		    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
			break;
		execvp(argv[2], argv + 2);
	}
	fprintf(stderr, "refused CALL CMD...: %s\n", strerror(errno));
	return 1;
}
