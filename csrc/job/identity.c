// SPDX-License-Identifier: Apache-2.0
/*
 * identity.c - calls after which the process is somebody else, or may do less than before.
 *
 * libc changes the identity of all threads that it knows of; the agent is none of those, and would
 * go on with the old one. A filter (seccomp, Landlock) that a thread takes for itself does not hold
 * for the agent either, in whose memory that thread may write. So the agent ends first, and the
 * process is not managed any more.
 */
#define _GNU_SOURCE
#include <grp.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "job/preload.h"

#define BEFORE_IDENTITY_CHANGES()      \
	do {                           \
		int saved_ = errno;    \
		up_end_agent();           \
		errno = saved_;        \
	} while (0)

#define IDENTITY(name, sysno, parameters, arguments, call)            \
	UP_EXPORT int name parameters                                    \
	{                                                             \
		BEFORE_IDENTITY_CHANGES();                            \
		return up_next.name ? up_next.name arguments : (int)up_fail(call); \
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
/* libc's own calls setgroups() within libc, past the one above. */
UP_EXPORT int initgroups(const char *user, gid_t group)
{
	BEFORE_IDENTITY_CHANGES();
	if (up_next.initgroups)
		return up_next.initgroups(user, group);
	return (int)up_fail(-ENOSYS);
}

IDENTITY(capset, SYS_capset,
	 (struct capability_header * header, const struct capability_data *data), (header, data),
	 up_sys2(SYS_capset, header, data))
IDENTITY(setns, SYS_setns, (int fd, int type), (fd, type), up_sys2(SYS_setns, fd, type))

UP_EXPORT int unshare(int flags)
{
	/* The rest (mount, network, ...) is the calling thread's own affair. */
	if (flags & (CLONE_NEWUSER | CLONE_NEWPID | CLONE_VM | CLONE_SIGHAND | CLONE_THREAD))
		BEFORE_IDENTITY_CHANGES();
	return up_next.unshare ? up_next.unshare(flags) : (int)up_fail(up_sys1(SYS_unshare, flags));
}

int up_prctl_gives_up_rights(long option, long value)
{
	return option == PR_SET_SECCOMP || option == PR_CAPBSET_DROP || option == PR_SET_SECUREBITS ||
	       (option == PR_SET_NO_NEW_PRIVS && value) ||
	       (option == PR_CAP_AMBIENT && value != PR_CAP_AMBIENT_IS_SET);
}

/* As many arguments as there may be: who gave fewer gets whatever lies there passed on, as in libc. */
UP_EXPORT int prctl(int option, ...)
{
	unsigned long a[4];
	va_list ap;

	va_start(ap, option);
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(ap, unsigned long);
	va_end(ap);
	if (up_prctl_gives_up_rights(option, (long)a[0]))
		BEFORE_IDENTITY_CHANGES();
	if (up_next.prctl)
		return up_next.prctl(option, a[0], a[1], a[2], a[3]);
	return (int)up_fail(up_sys5(SYS_prctl, option, a[0], a[1], a[2], a[3]));
}
