// SPDX-License-Identifier: Apache-2.0
/*
 * spill_forgotten - the disk tier (csrc/service/pool/spill.h) without a pool: while a copy is written its file is
 * forgotten, and with an argument another one, which is shorter, gets the number. The first write fails, the second does not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "service/pool/spill.h"

#define CHUNK (64u << 10)
#define SLOT (1u << 20)
#define PARTS 4000u
#define LAST ((PARTS - 1) * SPILL_SLOT_CHUNKS)

static struct spill *tier;
static int comes_another, fails;

uint64_t pool_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset)
{
	(void)fd, (void)buffer, (void)offset;
	spill_forget_file(tier, 0);
	if (comes_another && spill_add_file(tier, 0, SPILL_SLOT_CHUNKS))
		return 0;
	errno = EIO;
	return fails ? -1 : (ssize_t)length;
}

static int write_last(const char *buffer)
{
	struct spill_copy c;

	spill_forget_file(tier, 0);
	if (spill_add_file(tier, 0, PARTS * SPILL_SLOT_CHUNKS))
		return 1;
	if (spill_reserve(tier, 0, 0, LAST, SPILL_SLOT_CHUNKS, &c) != SPILL_SLOT_CHUNKS)
		return 1;
	spill_write(tier, &c, buffer);
	return 0;
}

int main(int argc, char **argv)
{
	struct up_spill_options o = { .size_bytes = 1ull << 30, .errors_most = 3 };
	struct up_pool_file_counts one = { 0 };
	struct up_spill_counts all;
	char *buffer = spill_buffer(SLOT);

	(void)argv;
	comes_another = argc > 1;
	o.fd = memfd_create("disk", MFD_CLOEXEC);
	if (!buffer || o.fd < 0 || spill_create(&tier, &o, CHUNK, 1))
		return 1;
	fails = 1;
	if (write_last(buffer))
		return 1;
	fails = 0;
	if (write_last(buffer))
		return 1;
	spill_count(tier, &all);
	spill_count_file(tier, 0, &one);
	printf("errors %d, used %d, of the file %d\n", (int)all.errors[0], (int)all.used_bytes,
	       (int)one.disk_written_bytes);
	spill_stop(tier);
	spill_end(tier);
	return 0;
}
