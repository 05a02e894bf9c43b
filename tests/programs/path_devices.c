// SPDX-License-Identifier: Apache-2.0
/*
 * path_devices - how often the server of a file system is asked for its type, of many devices whose files are met by
 * several threads (csrc/service/pathtype.c): prints that, and how many devices there are.
 */
#define _GNU_SOURCE
#include <stdio.h>

#include "service/pathdevice.c"
#include "service/pathtype.c"

#define DEVICES 1000u
#define THREADS 4

static atomic_int asked;

int fstatfs(int fd, struct statfs *fs)
{
	(void)fd;
	atomic_fetch_add(&asked, 1);
	fs->f_type = 1;
	return 0;
}

static void *meet(void *argument)
{
	uint32_t f_type;

	for (int times = 0; times < 2; times++)
		for (uint64_t device = 0; device < DEVICES; device++)
			if (up_path_type(0, device, &f_type) || f_type != 1 || !up_device_of(device))
				return argument;
	return NULL;
}

int main(void)
{
	pthread_t thread[THREADS];
	uint32_t there = 0;
	void *failed;

	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&thread[i], NULL, meet, thread))
			return 2;
	for (int i = 0; i < THREADS; i++)
		if (pthread_join(thread[i], &failed) || failed)
			return 1;
	for (struct up_device *d = devices; d; d = d->next)
		there++;
	printf("%d %u\n", asked, there);
	return 0;
}
