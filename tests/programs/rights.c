// SPDX-License-Identifier: Apache-2.0
/*
 * rights.c HOW FILE - map the file, give up rights in one of the ways below, and say of each thread of
 * this process what rights it has; then unmap.
 *
 *   prctl, syscall   a seccomp filter that knows everything but tgkill(2), which kills; set by libc's
 *                    prctl() or syscall()
 *   tsync            the same, for all threads at once; how many did not take it
 *   privileges       no_new_privs
 *   landlock         a ruleset that allows no execution
 *   capabilities     none are left, by syscall(SYS_capset)
 *   refused, killed  as prctl, set past every library; tgkill(2) fails, or kills
 *   nothing          none is given up
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static void die(const char *what)
{
	perror(what);
	exit(90);
}

static void no_new_privileges(void)
{
	if (raw(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0))
		die("no_new_privs");
}

static void filter(const char *how)
{
	unsigned int answer = !strcmp(how, "refused") ? SECCOMP_RET_ERRNO | EPERM
						       : SECCOMP_RET_KILL_PROCESS;
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_tgkill, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, answer),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(rules) / sizeof(*rules), rules };
	long ret;

	no_new_privileges();
	if (!strcmp(how, "prctl"))
		ret = prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
	else if (!strcmp(how, "syscall"))
		ret = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
	else if (!strcmp(how, "tsync"))
		ret = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC,
			      &program);
	else
		ret = raw(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program);
	if (ret)
		die("seccomp");
}

static void landlock(void)
{
	struct landlock_ruleset_attr rules = { .handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE };
	int fd = (int)syscall(SYS_landlock_create_ruleset, &rules, sizeof(rules), 0);

	no_new_privileges();
	if (fd < 0 || syscall(SYS_landlock_restrict_self, fd, 0)) {
		printf("no landlock\n");
		exit(77);
	}
	close(fd);
}

static void give_up(const char *how)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { { 0 } };

	if (!strcmp(how, "landlock"))
		landlock();
	else if (!strcmp(how, "privileges"))
		prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	else if (!strcmp(how, "capabilities"))
		syscall(SYS_capset, &header, none);
	else if (strcmp(how, "nothing"))
		filter(how);
}

static void describe_threads(void)
{
	DIR *tasks = opendir("/proc/self/task");
	char path[300], line[256];

	for (struct dirent *e; (e = readdir(tasks));) {
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
		f = e->d_name[0] == '.' ? NULL : fopen(path, "r");
		if (!f)
			continue;
		printf("thread");
		while (fgets(line, sizeof(line), f))
			if (!strncmp(line, "CapEff:", 7) || !strncmp(line, "NoNewPrivs:", 11) ||
			    !strncmp(line, "Seccomp:", 8)) {
				line[strcspn(line, "\n")] = 0;
				printf(" %s", line);
			}
		printf("\n");
		fclose(f);
	}
	closedir(tasks);
}

int main(int argc, char **argv)
{
	int fd = open(argv[argc - 1], O_RDONLY);
	struct stat st;
	unsigned char *p, *q;

	if (fd < 0 || fstat(fd, &st))
		die("file");
	p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		die("mmap");
	give_up(argv[1]);
	if (strcmp(argv[1], "refused") && strcmp(argv[1], "killed"))
		describe_threads();
	q = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (q == MAP_FAILED || p[4096] != q[4096] || munmap(q, (size_t)st.st_size))
		die("another mapping");
	if (munmap(p, (size_t)st.st_size))
		die("munmap");
	printf("unmapped\n");
	fflush(stdout);
	_exit(0);
}
