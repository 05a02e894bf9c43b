// SPDX-License-Identifier: Apache-2.0
/*
 * settle.c idle|batch|fifo|nice - a thread with such scheduling, bound to one CPU, settles
 * (csrc/job/ambient.c) and then drops its rights: what came back each time, and what it then is. The
 * thread that leads the process stays as it was.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "job/ambient.h"

static const char *how;

static void status(const char *field, char *value)
{
	char path[64], line[256];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/task/%d/status", gettid());
	f = fopen(path, "r");
	while (fgets(line, sizeof(line), f))
		if (!strncmp(line, field, strlen(field)))
			sscanf(line + strlen(field), "%*[ \t]%s", value);
	fclose(f);
}

static void *thread(void *unused)
{
	struct sched_param first = { .sched_priority = !strcmp(how, "fifo") }, none = { 0 };
	char permitted[32] = "", effective[32] = "", inheritable[32] = "";
	int policy = !strcmp(how, "idle") ? SCHED_IDLE : !strcmp(how, "batch") ? SCHED_BATCH
			: !strcmp(how, "fifo") ? SCHED_FIFO : SCHED_OTHER;
	cpu_set_t cpus;
	int settled, dropped;

	(void)unused;
	if (policy != SCHED_OTHER && sched_setscheduler(0, policy, policy == SCHED_FIFO ? &first : &none))
		printf("cannot\n");
	if (!strcmp(how, "nice"))
		setpriority(PRIO_PROCESS, gettid(), 19);
	CPU_ZERO(&cpus);
	CPU_SET(sched_getcpu(), &cpus);
	sched_setaffinity(0, sizeof(cpus), &cpus);
	settled = up_settle_scheduling();
	sched_getaffinity(0, sizeof(cpus), &cpus);
	printf("settled %d policy %d nice %d cpus %d\n", settled, sched_getscheduler(0),
	       getpriority(PRIO_PROCESS, gettid()), CPU_COUNT(&cpus));
	dropped = up_drop_rights();
	status("CapPrm:", permitted);
	status("CapEff:", effective);
	status("CapInh:", inheritable);
	printf("dropped %d to %s %s %s\n", dropped, permitted, effective, inheritable);
	return NULL;
}

int main(int argc, char **argv)
{
	char before[32] = "", after[32] = "";
	pthread_t other;

	how = argv[argc - 1];
	status("CapEff:", before);
	if (pthread_create(&other, NULL, thread, NULL) || pthread_join(other, NULL))
		return 1;
	status("CapEff:", after);
	printf("leader %s policy %d\n", strcmp(before, after) ? "changed" : "as before",
	       sched_getscheduler(0));
	return 0;
}
