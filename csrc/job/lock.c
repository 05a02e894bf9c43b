// SPDX-License-Identifier: Apache-2.0
/*
 * lock.c - open(2) of the job, for three reasons: leases (below), wrap --learn (startlog.c), and wrap --ownlock: each rank has a lock file
 * of its own for the LMDB data files that it only reads ([Stanovnik] section 4.2), in a directory of the
 * launcher's, with no word to the program.
 *
 * A lock file that is not shared gives up that there is one writer at a time. So only a read-only
 * environment is sent to one, and it is known by what liblmdb does (mdb_env_open in 0.9 and 1.0,
 * looked at with strace): it opens the data file O_RDONLY and then, with nothing but an fcntl in
 * between, the lock file, both by the one call of open() in mdb_fopen; it maps them later. A writing
 * one opens its lock file first. Hence, for the lock file of a data file to be another one, the
 * thread's open() before this one must
 *   - have come from the same instruction: py-lmdb looks into the data file first, whoever opens it
 *   - have been O_RDONLY, of that data file (device and inode), which is still open at offset 0
 *   - not have been followed by an mmap(): an environment without locks is past its lock file then.
 * Whatever else opens a lock file gets the real one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <limits.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "job/preload.h"

int up_own_locks;

/* "/" and ": two numbers of 16 digits, a rank, what is between them */
#define NAME_MAX_BYTES 64
/* liblmdb asks for 8 KiB with its default of 126 readers; 64 bytes a reader */
#define LOCK_BYTES (128 << 10)

static char lock_directory[PATH_MAX];
static char lock_rank[12];

/* Static TLS: ready with the thread, and a copy goes to the child of a fork. */
static __thread struct {
	const void *caller; /* NULL: no data file was opened just now */
	int fd;
} opened __attribute__((tls_model("initial-exec")));

void up_lock_mapped(void)
{
	opened.caller = NULL;
}

static char *append(char *out, const char *text)
{
	while (*text)
		*out++ = *text++;
	*out = 0;
	return out;
}

static char *append_hex(char *out, uint64_t value)
{
	char digits[17];
	int n = 16;

	digits[n] = 0;
	do {
		digits[--n] = "0123456789abcdef"[value & 15];
		value >>= 4;
	} while (value);
	return append(out, digits + n);
}

void up_lock_start(const char *directory)
{
	unsigned int rank = (unsigned int)up_job.rank;
	char *out = lock_rank + sizeof(lock_rank) - 1;

	if (!directory || *directory != '/' ||
	    up_text_bytes(directory, PATH_MAX) >= PATH_MAX - NAME_MAX_BYTES)
		return;
	append(lock_directory, directory);
	if (up_job.rank < 0) {
		append(lock_rank, "none");
	} else {
		*out = 0;
		do
			*--out = (char)('0' + rank % 10);
		while (rank /= 10);
		memmove(lock_rank, out, (size_t)(lock_rank + sizeof(lock_rank) - out));
	}
	up_own_locks = 1;
}

/* The data file that a lock file is of: data.mdb beside lock.mdb, FILE of FILE-lock. 0: it is none. */
static int data_file_of(const char *path, char out[PATH_MAX])
{
	static const char subdir[] = "lock.mdb", data[] = "data.mdb", file[] = "-lock";
	size_t length = up_text_bytes(path, PATH_MAX);

	if (length >= PATH_MAX)
		return 0;
	memcpy(out, path, length + 1);
	if (length >= sizeof(subdir) - 1) {
		size_t at = length - (sizeof(subdir) - 1);

		if (up_same_text(path + at, subdir) && (!at || path[at - 1] == '/')) {
			memcpy(out + at, data, sizeof(data));
			return 1;
		}
	}
	if (length < sizeof(file) || !up_same_text(path + length - (sizeof(file) - 1), file))
		return 0;
	out[length - (sizeof(file) - 1)] = 0;
	return 1;
}

/* Whether the data file that was opened just now is the one at this path, and only to be read. */
static int opened_to_be_read(const char *path, struct stat *st)
{
	struct stat named;
	long status = up_sys3(SYS_fcntl, opened.fd, F_GETFL, 0);

	return !up_failed(status) && (status & (O_ACCMODE | O_PATH)) == O_RDONLY &&
	       !up_failed(up_sys2(SYS_fstat, opened.fd, st)) && S_ISREG(st->st_mode) &&
	       !up_failed(up_sys4(SYS_newfstatat, AT_FDCWD, path, &named, 0)) &&
	       named.st_dev == st->st_dev && named.st_ino == st->st_ino &&
	       !up_sys3(SYS_lseek, opened.fd, 0, SEEK_CUR);
}

/* The rank's own lock file of the data file: its descriptor, or -1 when it is not to be had. */
static int open_own(const struct stat *data, int flags, char path[PATH_MAX])
{
	struct stat st;
	char *out = append(path, lock_directory);
	long fd;

	out = append_hex(append(out, "/"), (uint64_t)data->st_dev);
	out = append_hex(append(out, "-"), (uint64_t)data->st_ino);
	append(append(out, ".rank"), lock_rank);
	fd = up_sys4(SYS_openat, AT_FDCWD, path, flags | O_NOFOLLOW, 0600);
	if (up_failed(fd))
		return -1;
	/* It will be mapped and written: on a full tmpfs that would be a SIGBUS. Its length stays 0,
	 * by which liblmdb knows that it is new. */
	if (!up_failed(up_sys2(SYS_fstat, fd, &st)) && !st.st_size) {
		long full = up_sys4(SYS_fallocate, fd, FALLOC_FL_KEEP_SIZE, 0, LOCK_BYTES);

		if (full == -ENOSPC || full == -EDQUOT) {
			up_sys1(SYS_close, fd);
			return -1;
		}
	}
	return (int)fd;
}

/* The rank's own lock file in the place of this one, or -1: this one is to be opened. */
static int instead(int directory, const char *path, int flags, const void *caller)
{
	char other[PATH_MAX];
	struct stat data;
	int fd = -1;

	if ((flags & ~(O_CLOEXEC | O_LARGEFILE)) == (O_RDWR | O_CREAT) &&
	    opened.caller == caller && (directory == AT_FDCWD || *path == '/') &&
	    data_file_of(path, other) && opened_to_be_read(other, &data))
		fd = open_own(&data, flags, other);
	opened.caller = NULL;
	return fd;
}

static int remember(int fd, int flags, const void *caller)
{
	int plain = (flags & (O_ACCMODE | O_CREAT | O_DIRECTORY | O_PATH)) == O_RDONLY;

	opened.caller = fd >= 0 && plain ? caller : NULL;
	opened.fd = fd;
	return fd;
}

/* Of UP_WAIT_STEP_NS, 2 s in all: on a busy machine the service takes up to a second to give the lease back
 * (DETACH_NS, service/serve.py). Where it does not run, agents do (leasebreak.c). */
#define LEASE_STEPS 400

/*
 * The service holds a read lease on what is managed. open(2) of such a file for writing waits until it is
 * given back; with O_NONBLOCK it fails at once, though the lease is being given back then. Without us it
 * would not have failed, so we wait for that. Of a regular file there is no other reason for EAGAIN than
 * somebody's lease, and whose it was is not known once it has been given back: where it is not the
 * service's, the same error comes later. Whether to open again; errno is that of the last try.
 */
static int is_leased(int directory, const char *path, int flags, int tries)
{
	struct timespec step = { .tv_nsec = UP_WAIT_STEP_NS };
	struct stat st;
	long ret;

	if (errno != EAGAIN || !(flags & O_NONBLOCK) || tries >= LEASE_STEPS || !up_job.enabled ||
	    ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_TRUNC)))
		return 0;
	if (!tries && (up_failed(up_sys4(SYS_newfstatat, directory, path, &st, 0)) || !S_ISREG(st.st_mode)))
		return 0;
	do
		ret = up_sys4(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &step, &step);
	while (ret == -EINTR); /* what was left */
	return !up_failed(ret);
}

static int takes_mode(int flags)
{
	return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
}

/*
 * One body for all four: ``at`` names the directory for the kernel, ``call`` is the next definition
 * in the chain. The address to return to tells which call in the program it is.
 */
#define OPEN(at, name, call)                                                                   \
	const void *caller = __builtin_return_address(0);                                      \
	mode_t mode = 0;                                                                       \
	int fd;                                                                                \
                                                                                               \
	if (takes_mode(flags)) {                                                               \
		va_list ap;                                                                    \
                                                                                               \
		va_start(ap, flags);                                                           \
		mode = va_arg(ap, mode_t);                                                     \
		va_end(ap);                                                                    \
	}                                                                                      \
	if (!up_next.name) /* before our constructor */                                        \
		return (int)up_fail(up_sys4(SYS_openat, at, path, flags, mode));               \
	fd = __builtin_expect(up_own_locks, 0) ? instead(at, path, flags, caller) : -1;        \
	if (fd >= 0)                                                                           \
		return fd;                                                                     \
	up_look_for_hooks();                                                                   \
	fd = up_next.call;                                                                     \
	for (int tries = 0; fd < 0 && is_leased(at, path, flags, tries); tries++)           \
		fd = up_next.call;                                                             \
	if (fd >= 0 && (flags & O_ACCMODE) != O_RDONLY)                                        \
		up_opened_to_write(fd);                                                        \
	if (__builtin_expect(up_start_log != NULL, 0))                                         \
		up_note_opened(at, path, flags, fd < 0 ? errno : 0);                           \
	return __builtin_expect(up_own_locks, 0) ? remember(fd, flags, caller) : fd

UP_EXPORT int open(const char *path, int flags, ...)
{
	OPEN(AT_FDCWD, open, open(path, flags, mode));
}

UP_EXPORT int open64(const char *path, int flags, ...)
{
	OPEN(AT_FDCWD, open64, open64(path, flags, mode));
}

UP_EXPORT int openat(int directory, const char *path, int flags, ...)
{
	OPEN(directory, openat, openat(directory, path, flags, mode));
}

UP_EXPORT int openat64(int directory, const char *path, int flags, ...)
{
	OPEN(directory, openat64, openat64(directory, path, flags, mode));
}
