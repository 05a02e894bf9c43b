// SPDX-License-Identifier: Apache-2.0
/*
 * startlog.c - what this process opens is noted for the service (wrap --learn), without a system call, a lock or an
 * allocation: in a handler of a signal, in a child of vfork(2), in a thread that is killed over it alike.
 *
 * The memory is a memfd of the service's that is sealed: nobody can make it shorter, so no access is SIGBUS, and all
 * of its pages are there from the beginning. A file of the run directory would be neither: whoever truncates it would
 * kill the job. So the name is a link to /proc/PID/fd/N, of which a container or another node may have another process,
 * and what is opened is believed by its seals alone.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "common/startlog.h"
#include "job/preload.h"

#ifndef MADV_DONTDUMP
#define MADV_DONTDUMP 16
#endif

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)
/* Where the mark of a path may be: from the place on that its hash says. */
#define MARKS_LOOKED_AT 8
#define SLOT_ONE ((uint64_t)1 << 32)

struct up_start_log *up_start_log;

static struct up_start_entry *entry_at(uint64_t at)
{
	return (struct up_start_entry *)(up_start_log->text + at);
}

/* Of 8 bytes, the lowest of those that are 0, as its highest bit; 0: none is. */
static uint64_t zero_of(uint64_t word)
{
	return (word - 0x0101010101010101) & ~word & 0x8080808080808080;
}

/* As it is done for each open: by aligned words, which do not leave the page of a byte in them that is there. */
UP_EARLY static size_t bytes_of(const char *path)
{
	size_t before = (uintptr_t)path % sizeof(uint64_t);
	const char *at = path - before;
	uint64_t word, zero;

	__builtin_memcpy(&word, __builtin_assume_aligned(at, sizeof(word)), sizeof(word));
	zero = zero_of(word | ((1ull << 8 * before) - 1)); /* what lies before the path is not 0 */
	while (!zero && at - path < PATH_MAX) {
		at += sizeof(word);
		__builtin_memcpy(&word, __builtin_assume_aligned(at, sizeof(word)), sizeof(word));
		zero = zero_of(word);
	}
	return zero ? (size_t)(at - path) + (size_t)__builtin_ctzll(zero) / 8 : PATH_MAX;
}

static uint64_t word_at(const char *from)
{
	uint64_t word;

	__builtin_memcpy(&word, from, sizeof(word));
	return word;
}

static uint64_t mixed(uint64_t hash, uint64_t word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15; /* 2^64 by the golden ratio */
	return hash ^ hash >> 32;
}

/* Of a path, and of whether it was there. Two words at a time, for neither waits for the other; the last ones may be
 * counted twice. */
static uint64_t hash_of(const char *path, size_t bytes, int missing)
{
	const size_t both = 2 * sizeof(uint64_t);
	uint64_t even = bytes << 1 | (uint64_t)missing, odd = 0;
	const char *end = path + bytes;

	for (; path + both <= end; path += both) {
		even = mixed(even, word_at(path));
		odd = mixed(odd, word_at(path + sizeof(uint64_t)));
	}
	if (bytes >= both) {
		even = mixed(even, word_at(end - both));
		odd = mixed(odd, word_at(end - sizeof(uint64_t)));
	} else {
		for (; path < end; path++)
			even = mixed(even, (unsigned char)*path);
	}
	return mixed(even, odd);
}

static void copy(unsigned char *to, const char *from, size_t bytes)
{
	for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t)) {
		__builtin_memcpy(to, from, sizeof(uint64_t));
		to += sizeof(uint64_t);
		from += sizeof(uint64_t);
	}
	while (bytes--)
		*to++ = (unsigned char)*from++;
}

/* Whether somebody has noted it before; else it is known from now on. Where too many marks lie around its own it is
 * noted each time. */
static int is_known(uint64_t hash)
{
	uint32_t own = (uint32_t)(hash >> 32) | 1;

	for (unsigned int i = 0; i < MARKS_LOOKED_AT; i++) {
		uint32_t *mark = &up_start_log->mark[(hash + i) & (UP_START_MARKS - 1)];
		uint32_t found = __atomic_load_n(mark, __ATOMIC_RELAXED);

		if (!found &&
		    __atomic_compare_exchange_n(mark, &found, own, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return 0;
		if (found == own)
			return 1;
	}
	return 0;
}

static void lose(void)
{
	__atomic_fetch_add(&up_start_log->lost, 1, __ATOMIC_RELAXED);
}

static void note(const struct up_start_entry *entry, const char *path)
{
	struct up_start_log *log = up_start_log;
	uint64_t taken = __atomic_load_n(&log->taken, __ATOMIC_RELAXED), at;
	uint64_t bytes = (sizeof(*entry) + entry->bytes + 7) & ~7ull;

	/* It is looked at first, or what is taken would grow with each open. */
	if (taken / SLOT_ONE >= UP_START_SLOTS || taken % SLOT_ONE + bytes > UP_START_TEXT_BYTES)
		return lose();
	taken = __atomic_fetch_add(&log->taken, SLOT_ONE + bytes, __ATOMIC_RELAXED);
	at = taken % SLOT_ONE;
	if (taken / SLOT_ONE >= UP_START_SLOTS || at + bytes > UP_START_TEXT_BYTES)
		return lose();
	*entry_at(at) = *entry;
	copy(log->text + at + sizeof(*entry), path, entry->bytes);
	__atomic_store_n(&log->slot[taken / SLOT_ONE], (uint32_t)(at / 8 + 1), __ATOMIC_RELEASE);
}

static int begins_with(const char *path, const char *start)
{
	while (*start && *path == *start)
		path++, start++;
	return !*start;
}

static int is_on_no_storage(const char *path)
{
	switch (path[1]) {
	case 'p':
		return begins_with(path, "/proc/");
	case 's':
		return begins_with(path, "/sys/");
	case 'd':
		return begins_with(path, "/dev/");
	}
	return 0;
}

static void note_relative(const struct up_start_entry *entry, const char *path)
{
	uint64_t *bytes = &up_start_log->relative_bytes;

	if (__atomic_load_n(bytes, __ATOMIC_RELAXED) >= UP_START_RELATIVE_BYTES)
		return lose();
	__atomic_fetch_add(bytes, (sizeof(*entry) + entry->bytes + 7) & ~7ull, __ATOMIC_RELAXED);
	note(entry, path);
}

void up_note_opened(int directory, const char *path, int flags, int error)
{
	int missing = error == ENOENT || error == ENOTDIR;
	struct up_start_entry entry = {
		.pid = up_job.pid,
		.directory = directory,
		.flags = (uint32_t)flags,
		.kind = UP_START_OPEN,
		.missing = (uint8_t)missing,
	};
	size_t bytes;

	if (__atomic_load_n(&up_start_log->over, __ATOMIC_RELAXED))
		return;
	/* What is written is no part of a start. Of other errors the kernel need not have looked at the path. */
	if ((flags & O_ACCMODE) == O_WRONLY || flags & (O_CREAT | O_TRUNC) || (error && !missing))
		return;
	bytes = bytes_of(path);
	if (!bytes || bytes >= PATH_MAX)
		return;
	entry.bytes = (uint16_t)bytes;
	if (*path != '/')
		return note_relative(&entry, path);
	if (is_on_no_storage(path))
		return;
	if (!is_known(hash_of(path, bytes, missing)))
		note(&entry, path);
}

/* The one that is meant: a memfd of this user's that can be made neither shorter nor longer; a descriptor or -errno. */
static long open_log(const char *path)
{
	char again[sizeof("/proc/self/fd/") + 10] = "/proc/self/fd/", digits[10];
	size_t at = sizeof("/proc/self/fd/") - 1, n = 0;
	/* Not yet opened: whatever else lies there, a FIFO or a device, hears nothing of this. */
	long found = up_sys4(SYS_openat, AT_FDCWD, path, O_PATH | O_CLOEXEC, 0), fd = -EINVAL;
	struct stat status;

	if (up_failed(found))
		return found;
	if (!up_failed(up_sys2(SYS_fstat, found, &status)) && S_ISREG(status.st_mode) && !status.st_nlink &&
	    status.st_size == UP_START_LOG_BYTES) {
		for (long left = found; left || !n; left /= 10)
			digits[n++] = (char)('0' + left % 10);
		while (n)
			again[at++] = digits[--n];
		fd = up_sys4(SYS_openat, AT_FDCWD, again, O_RDWR | O_CLOEXEC, 0);
	}
	up_sys1(SYS_close, found);
	if (!up_failed(fd)) {
		long seals = up_sys3(SYS_fcntl, fd, F_GET_SEALS, 0);

		if (!up_failed(seals) && (seals & SEALS) == SEALS)
			return fd;
		up_sys1(SYS_close, fd);
		fd = -EINVAL;
	}
	return fd;
}

static void note_directory(void)
{
	char path[PATH_MAX];
	long bytes = up_sys2(SYS_getcwd, path, sizeof(path)); /* with the NUL */
	struct up_start_entry entry = { .pid = up_job.pid, .kind = UP_START_DIRECTORY };

	if (up_failed(bytes) || bytes < 2 || *path != '/') /* "(unreachable)" */
		return;
	entry.bytes = (uint16_t)(bytes - 1);
	note_relative(&entry, path);
}

void up_start_log_open(const char *path)
{
	long fd = open_log(path);
	void *p;

	if (up_failed(fd))
		return;
	p = up_mmap(NULL, UP_START_LOG_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
	up_sys1(SYS_close, fd);
	if (up_failed((long)p))
		return;
	up_sys3(SYS_madvise, p, UP_START_LOG_BYTES, MADV_DONTDUMP);
	up_start_log = p;
	if (!__atomic_load_n(&up_start_log->over, __ATOMIC_RELAXED))
		note_directory();
}
