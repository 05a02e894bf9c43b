// SPDX-License-Identifier: Apache-2.0
/*
 * One extent through the workers (csrc/service/warm.c), with a readahead(2) of the test's:
 *
 *     probe FILE OFFSET LENGTH METHOD works|nothing|rival
 *
 * works: the kernel's. nothing: it answers 0 and does nothing, as on a Lustre client. rival: the
 * same, but meanwhile somebody else reads on through the extent. Prints the result's method, chunk,
 * asked and came bytes, and how much of the extent is resident then.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/helper.h"

#define RIVAL_BYTES (512u << 10)

static const char *how;
static int rival_fd;
static off_t rival_at, rival_end;

ssize_t readahead(int fd, off64_t offset, size_t count)
{
	static char buffer[RIVAL_BYTES];

	if (!strcmp(how, "works"))
		return syscall(SYS_readahead, fd, offset, count);
	if (!strcmp(how, "rival") && rival_at < rival_end)
		rival_at += pread(rival_fd, buffer, sizeof(buffer), rival_at);
	return 0;
}

int main(int argc, char **argv)
{
	struct up_warm_job job = { .id = 1, .checkpoint_fd = -1 };
	struct up_warm_result r;
	struct up_workers *workers;
	int sensor, event = eventfd(0, EFD_CLOEXEC);
	struct pollfd wait = { .fd = event, .events = POLLIN };

	if (argc != 6)
		return 2;
	how = argv[5];
	job.fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	rival_fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	posix_fadvise(rival_fd, 0, 0, POSIX_FADV_RANDOM);
	job.offset = strtoull(argv[2], NULL, 10);
	job.length = strtoull(argv[3], NULL, 10);
	job.method = (uint32_t)atoi(argv[4]);
	rival_at = (off_t)job.offset;
	rival_end = rival_at + (off_t)job.length;
	if (job.fd < 0 || rival_fd < 0 || event < 0 || up_workers_create(&workers, 1, event) < 0)
		return 3;
	if (up_workers_submit(workers, &job))
		return 4;
	up_workers_start(workers);
	if (poll(&wait, 1, 60000) != 1 || up_workers_reap(workers, &r, 1) != 1)
		return 4;
	printf("{\"method\": %u, \"chunk\": %u, \"asked\": %llu, \"came\": %llu, \"error\": %d, "
	       "\"resident\": %lld}\n", r.method, r.chunk_bytes, (unsigned long long)r.asked_bytes,
	       (unsigned long long)r.came_bytes, r.error,
	       (long long)up_resident_bytes(job.fd, job.offset, job.length, &sensor));
	up_workers_destroy(workers);
	return 0;
}
