// SPDX-License-Identifier: Apache-2.0
/*
 * ambient.c - scheduling and rights of a thread of ours, in its first moments.
 *
 * It is born with those of whoever mapped first: a loader of low priority, a thread that is bound to
 * one CPU, a process of root's. No libc: only sys.h.
 */
#include <errno.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "job/ambient.h"
#include "common/sys.h"

/* 8192 CPUs, more than any kernel is built for (NR_CPUS); it takes as many as it knows. */
#define CPU_WORDS 128

#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

/* What the thread that leads the process has. Nice values are the threads' own on Linux. */
static int settle_nice(void)
{
	long process = up_sys0(SYS_getpid);
	/* The system call, unlike libc's function, gives 20 - nice: 1 to 40. */
	long wanted = up_sys2(SYS_getpriority, PRIO_PROCESS, process);
	long mine = up_sys2(SYS_getpriority, PRIO_PROCESS, 0);

	if (up_failed(wanted) || up_failed(mine) || wanted == mine)
		return 0;
	/* To be nicer than the leader is no harm that a fault's reader would feel for long. */
	up_sys3(SYS_setpriority, PRIO_PROCESS, 0, 20 - wanted);
	return 0;
}

int up_settle_scheduling(void)
{
	unsigned long all[CPU_WORDS];
	int parameters = 0; /* sched_priority, the whole of struct sched_param */
	long policy = up_sys1(SYS_sched_getscheduler, 0), ret;

	for (int i = 0; i < CPU_WORDS; i++)
		all[i] = ~0ul;
	/* The kernel cuts it to the cpuset. Refused (a filter): one CPU is slow, not wrong. */
	up_sys3(SYS_sched_setaffinity, 0, sizeof(all), all);
	if (up_failed(policy))
		return (int)policy;
	if ((policy & ~0x40000000 /* SCHED_RESET_ON_FORK */) != SCHED_NORMAL) {
		ret = up_sys3(SYS_sched_setscheduler, 0, SCHED_NORMAL, &parameters);
		if (up_failed(ret))
			return (int)ret;
	}
	return settle_nice();
}

int up_drop_rights(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { { 0 } };
	long ret;

	/* Ambient ones go with the permitted; asked for by name, should that ever change. */
	up_sys5(SYS_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	ret = up_sys2(SYS_capset, &header, none);
	return up_failed(ret) ? (int)ret : 0;
}
