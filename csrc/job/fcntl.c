// SPDX-License-Identifier: Apache-2.0
/*
 * fcntl.c - a process of the job that wants a write lease of its file (F_SETLEASE, F_WRLCK).
 *
 * The kernel gives one of a file that nobody else has open. Without us that is the job alone; so it gets
 * its mapping back, of which the service hears why (UP_GONE_WANTED), and tries again for as long as that
 * takes to close the file.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>

#include "job/preload.h"
#include "common/status.h"

/* Of UP_WAIT_STEP_NS, 2 s: the service closes what nobody maps once nothing of it is being read, and has a
 * busy machine to do so on. Then the error is what it was. */
#define CLOSE_STEPS 400

static void give_back_file(const struct stat *st)
{
	for (uint32_t i = 0; i < UP_REGIONS && atomic_load(&up_job.live); i++) {
		struct up_region *r = &up_job.region[i];

		if (atomic_load(&r->state) != UP_LIVE || r->device != (uint64_t)st->st_dev ||
		    r->inode != (uint64_t)st->st_ino)
			continue;
		atomic_store(&r->wanted, 1);
		up_give_back(r->address, r->map_length, UP_REQ_DETACH);
	}
}

/* The call has failed with EAGAIN: whether to make it again. */
static int is_held_by_us(int fd, int tries)
{
	struct timespec step = { .tv_nsec = UP_WAIT_STEP_NS };
	struct stat st;
	long ret;

	if (tries >= CLOSE_STEPS || !up_job.enabled || !up_in_own_process())
		return 0;
	if (!tries && (up_cached_stat(fd, &st) || !S_ISREG(st.st_mode)))
		return 0;
	if (!tries)
		give_back_file(&st);
	do
		ret = up_sys4(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &step, &step);
	while (ret == -EINTR); /* what was left */
	return !up_failed(ret);
}

#define FCNTL(name)                                                                                    \
	va_list ap;                                                                                    \
	long argument;                                                                                 \
	int ret;                                                                                       \
                                                                                                       \
	va_start(ap, command);                                                                         \
	argument = va_arg(ap, long);                                                                   \
	va_end(ap);                                                                                    \
	if (!up_next.name)                                                                             \
		return (int)up_fail(up_sys3(SYS_fcntl, fd, command, argument));                        \
	ret = up_next.name(fd, command, argument);                                                     \
	if (__builtin_expect(command == F_SETLEASE, 0) && (int)argument == F_WRLCK)                    \
		for (int tries = 0; ret < 0 && errno == EAGAIN && is_held_by_us(fd, tries); tries++)   \
			ret = up_next.name(fd, command, argument);                                     \
	return ret

UP_EXPORT int fcntl(int fd, int command, ...)
{
	FCNTL(fcntl);
}

UP_EXPORT int fcntl64(int fd, int command, ...)
{
	FCNTL(fcntl64);
}
