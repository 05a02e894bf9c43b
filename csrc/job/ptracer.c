// SPDX-License-Identifier: Apache-2.0
/*
 * ptracer.c - where Yama lets a process be looked at by its ancestors alone (kernel.yama.ptrace_scope is 1), the
 * service is named as one more that may: it reads /proc/PID/syscall and io (docs/reads.md).
 *
 * Each program says so as it begins, and each forked child: the kernel keeps it over execve(2), not over fork(2)
 * (security/yama/yama_lsm.c). What the job says itself from then on takes its place.
 */
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "job/preload.h"

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

/* 0: nobody is named. */
static int service_pid;

/* Scope 0 needs it not, and 2 and 3 do not heed it. */
static int is_needed(const char *path)
{
	char scope = 0;
	long fd = up_sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);

	if (up_failed(fd)) /* no Yama, as a rule */
		return 0;
	up_sys3(SYS_read, fd, &scope, 1);
	up_sys1(SYS_close, fd);
	return scope == '1';
}

/* The service has a lock on its lock file (launch/service.py), of whose holder the kernel tells the pid as it is in our
 * namespace: 0, if it is in none that we can see. */
static int holder(void)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	char path[UP_LOCK_PATH_MAX];
	long fd, ret;

	up_lock_path(path);
	fd = up_sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (up_failed(fd))
		return 0;
	ret = up_sys3(SYS_fcntl, fd, F_GETLK, &lock);
	up_sys1(SYS_close, fd);
	return up_failed(ret) || lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

void up_name_ptracer_again(void)
{
	if (service_pid > 0)
		up_sys2(SYS_prctl, PR_SET_PTRACER, service_pid);
}

void up_name_ptracer(const char *scope_path)
{
	if (is_needed(scope_path))
		service_pid = holder();
	up_name_ptracer_again();
}
