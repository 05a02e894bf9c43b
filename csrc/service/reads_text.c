// SPDX-License-Identifier: Apache-2.0
/*
 * reads_text.c - the texts of /proc that tell of reads, and the calls in them.
 *
 * A text by a descriptor that is kept open costs 0.9 (fdinfo) to 2.8 us (stat), by one that is opened anew 5 to 6.
 * All is opened by the descriptor of /proc/PID/task: of a process that has ended nothing is found there, whoever has
 * its number by then. The kernel checks the rights at each read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/status.h"
#include "service/reads.h"

void reads_drop(struct reads_look *look, int *kept)
{
	if (*kept < 0)
		return;
	close(*kept);
	*kept = -1;
	look->budget.kept--;
}

int reads_text(struct reads_look *look, int task_fd, int *kept, const char *name)
{
	int fd = *kept, err;
	ssize_t n;

	look->text[0] = 0;
	if (fd < 0)
		fd = openat(task_fd, name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	n = pread(fd, look->text, sizeof(look->text) - 1, 0);
	err = errno;
	if (n >= 0)
		look->text[n] = 0;
	if (*kept < 0 && n > 0 && look->budget.kept < look->budget.most) {
		*kept = fd;
		look->budget.kept++;
	} else if (*kept < 0) {
		close(fd);
	} else if (n <= 0) {
		reads_drop(look, kept);
	}
	return n > 0 ? (int)n : n < 0 ? -err : -ESRCH;
}

uint64_t reads_number(const struct reads_look *look, const char *word, int base)
{
	const char *at = strstr(look->text, word);

	return at ? strtoull(at + strlen(word), NULL, base) : 0;
}

int reads_parse_call(const char *text, struct reads_call *out)
{
	char *at;

	if (*text == 'r') /* running */
		return 0;
	memset(out, 0, sizeof(*out));
	out->nr = strtol(text, &at, 10);
	if (at == text)
		return 0;
	for (int i = 0; out->nr >= 0 && i < 6; i++)
		out->arg[i] = strtoull(at, &at, 16);
	return 1;
}

int reads_is_read(const struct reads_call *call, struct up_read_sighting *out)
{
	const uint64_t *arg = call->arg;

	out->fd = (int)arg[0];
	out->offset = -1;
	out->asked_bytes = 0; /* of iovecs the job's memory says */
	switch (call->nr) {
	case SYS_read:
		out->call = UP_READ_READ;
		out->asked_bytes = arg[2];
		return 1;
	case SYS_pread64:
		out->call = UP_READ_PREAD;
		out->asked_bytes = arg[2];
		out->offset = (int64_t)arg[3];
		return out->offset >= 0;
	case SYS_readv:
		out->call = UP_READ_READV;
		return 1;
	case SYS_preadv:
		out->call = UP_READ_PREADV;
		out->offset = (int64_t)arg[3];
		return out->offset >= 0;
	case SYS_preadv2: /* at -1: at the position */
		out->offset = (int64_t)arg[3] >= 0 ? (int64_t)arg[3] : -1;
		out->call = out->offset >= 0 ? UP_READ_PREADV : UP_READ_READV;
		return 1;
	case SYS_sendfile: /* (to, from, &offset or NULL, count) */
		out->call = UP_READ_SENDFILE;
		out->fd = (int)arg[1];
		out->asked_bytes = arg[3];
		return !arg[2];
	case SYS_copy_file_range: /* (from, &offset or NULL, to, ..., count, 0) */
		out->call = UP_READ_COPY;
		out->asked_bytes = arg[4];
		return !arg[1];
	}
	return 0;
}

/* Calls that ask a file system for a name, or what it knows of one. FUSE waits for such an answer interruptibly, in
 * state S (fs/fuse/dev.c, request_wait_answer), as for nothing else that these calls do. */
static int asks_file_system(long nr)
{
	switch (nr) {
#ifdef SYS_open /* not on AArch64 */
	case SYS_open:
	case SYS_stat:
	case SYS_lstat:
	case SYS_access:
#endif
	case SYS_openat:
#ifdef SYS_openat2 /* not in headers of before 5.6 */
	case SYS_openat2:
#endif
	case SYS_newfstatat:
	case SYS_fstat:
	case SYS_statx:
	case SYS_faccessat:
	case SYS_getdents64:
		return 1;
	}
	return 0;
}

int reads_waits(const struct reads_call *call, char state)
{
	return state == 'D' || state == 'I' || (state == 'S' && asks_file_system(call->nr));
}

int reads_may_wait(const struct reads_call *call)
{
	switch (call->nr) {
#ifdef SYS_poll
	case SYS_poll:
	case SYS_select:
	case SYS_pause:
	case SYS_epoll_wait:
#endif
	case SYS_futex:
	case SYS_ppoll:
	case SYS_pselect6:
	case SYS_epoll_pwait:
	case SYS_nanosleep:
	case SYS_clock_nanosleep:
	case SYS_wait4:
	case SYS_waitid:
	case SYS_accept4:
	case SYS_recvfrom:
	case SYS_recvmsg:
	case SYS_rt_sigtimedwait:
	case SYS_rt_sigsuspend:
		return 0;
	}
	return 1;
}

char reads_state(const char *text)
{
	const char *at = strrchr(text, ')'); /* the name before it may have some of its own */

	return at && at[1] == ' ' ? at[2] : 0;
}

int up_read_file(int pid, int fd, struct up_read_file *out)
{
	struct stat st;
	char path[64];
	long err;
	int own;

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
	own = open(path, O_PATH | O_CLOEXEC);
	if (own < 0)
		return -errno;
	err = up_cached_stat(own, &st);
	close(own);
	if (err)
		return (int)err;
	*out = (struct up_read_file){
		.device = st.st_dev,
		.inode = st.st_ino,
		.size_bytes = (uint64_t)st.st_size,
		.mode = st.st_mode,
	};
	return 0;
}
