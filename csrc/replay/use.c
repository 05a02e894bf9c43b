// SPDX-License-Identifier: Apache-2.0
/*
 * use.c - how much of what a replay has read its job has opened, by the log in which the job's processes note that
 * (csrc/job/startlog.c). The log is the job's: each word of it is bounded before it is used.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "replay/use.h"
#include "service/helper.h"

/* Twice as many as a profile and a log have. */
#define PLACES (2u * (UP_PROFILE_ENTRIES_MAX + UP_START_SLOTS))
#define IS_READ 1u
#define IS_OPENED 2u
#define STATES (IS_READ | IS_OPENED)

int use_create(struct use *u)
{
	*u = (struct use){ .known = calloc(PLACES, sizeof(*u->known)) }; /* its pages come as they are used */
	return u->known ? 0 : -ENOMEM;
}

void use_destroy(struct use *u)
{
	if (u->log)
		munmap((void *)u->log, UP_START_LOG_BYTES);
	free(u->known);
}

/* FNV-1a, without the bits that are taken; never 0. */
static uint64_t hash_of(const char *path, size_t bytes)
{
	uint64_t hash = 0xcbf29ce484222325;

	while (bytes--)
		hash = (hash ^ (unsigned char)*path++) * 0x100000001b3;
	return hash << 2 ? hash << 2 : 4;
}

static void note(struct use *u, const char *path, size_t bytes, uint64_t state)
{
	uint64_t hash = hash_of(path, bytes), at = hash >> 2;
	uint64_t *place;

	while (*(place = &u->known[at % PLACES]) && (*place & ~(uint64_t)STATES) != hash)
		at++;
	if (!*place && u->paths == PLACES / 2)
		return;
	u->paths += !*place;
	if (*place & state)
		return;
	*place = hash | (*place & STATES) | state;
	u->read += state == IS_READ;
	u->used += (*place & STATES) == STATES;
}

void use_read(struct use *u, const char *path)
{
	note(u, path, strlen(path), IS_READ);
}

int use_find(struct use *u, int fd, uint64_t at)
{
	char path[PATH_MAX];
	ssize_t n = u->log ? 0 : pread(fd, path, sizeof(path) - 1, (off_t)at);
	int seals, log;
	void *map;

	if (n <= 0)
		return u->log != NULL;
	path[n] = 0;
	log = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (log < 0)
		return 0;
	/* Nobody can make it shorter, or what reads it could die of that. */
	seals = fcntl(log, F_GET_SEALS);
	if (seals >= 0 && seals & F_SEAL_SHRINK && lseek(log, 0, SEEK_END) == UP_START_LOG_BYTES) {
		map = mmap(NULL, UP_START_LOG_BYTES, PROT_READ, MAP_SHARED, log, 0);
		u->log = map == MAP_FAILED ? NULL : map;
	}
	close(log);
	return u->log != NULL;
}

/* What a slot says, and its path; NULL: it is not filled, or what it says is beyond the text. */
static const char *entry_of(const struct use *u, uint32_t slot, struct up_start_entry *out)
{
	uint32_t words = __atomic_load_n(&u->log->slot[slot], __ATOMIC_ACQUIRE);
	uint64_t at = ((uint64_t)words - 1) * sizeof(uint64_t);

	if (!words || at > UP_START_TEXT_BYTES - sizeof(*out))
		return NULL;
	memcpy(out, u->log->text + at, sizeof(*out));
	if (out->bytes > UP_START_TEXT_BYTES - sizeof(*out) - at)
		return NULL;
	return (const char *)u->log->text + at + sizeof(*out);
}

/* Where a process was loaded, as it has noted: bytes of `out`, or -1. */
static ssize_t loaded_in(const struct use *u, int32_t pid, char out[PATH_MAX])
{
	uint32_t slot = u->began_in[(uint32_t)pid % USE_DIRECTORIES];
	const char *path = NULL;
	struct up_start_entry e;

	if (slot)
		path = entry_of(u, slot - 1, &e);
	if (!path || e.kind != UP_START_DIRECTORY || e.pid != pid || e.bytes >= PATH_MAX)
		return -1;
	memcpy(out, path, e.bytes);
	return e.bytes;
}

/* Where a path that is not absolute begins, as /proc tells, or has told: bytes of `out`, 0 for the root; -1: nobody
 * knows any more. */
static ssize_t directory_of(const struct use *u, const struct up_start_entry *e, char out[PATH_MAX])
{
	char link[64];
	ssize_t n;

	if (e->directory == AT_FDCWD)
		snprintf(link, sizeof(link), "/proc/%d/cwd", (int)e->pid);
	else
		snprintf(link, sizeof(link), "/proc/%d/fd/%d", (int)e->pid, (int)e->directory);
	n = readlink(link, out, PATH_MAX);
	if (n < 0 && e->directory == AT_FDCWD) /* it has ended */
		n = loaded_in(u, e->pid, out);
	if (n <= 0 || n >= PATH_MAX || *out != '/')
		return -1;
	return n > 1 ? n : 0;
}

/* As a profile has it, which was recorded in the same way: bytes of `out`, -1: it cannot be told. Links stay. */
static ssize_t absolute(const struct use *u, const struct up_start_entry *e, const char *path, char out[PATH_MAX])
{
	const char *end = path + e->bytes;
	ssize_t n = directory_of(u, e, out);

	while (n >= 0 && path < end) {
		const char *slash = memchr(path, '/', (size_t)(end - path));
		size_t bytes = (size_t)((slash ? slash : end) - path);
		char name[NAME_MAX];

		if (bytes > sizeof(name) || (size_t)n + 1 + bytes > PATH_MAX)
			return -1;
		memcpy(name, path, bytes); /* the job may write there meanwhile */
		path += bytes + 1;
		if (!bytes || (bytes == 1 && *name == '.'))
			continue;
		if (bytes == 2 && !memcmp(name, "..", 2)) {
			while (n && out[--n] != '/')
				;
			continue;
		}
		out[n++] = '/';
		memcpy(out + n, name, bytes);
		n += (ssize_t)bytes;
	}
	return n;
}

static void note_opened(struct use *u, const struct up_start_entry *e, const char *path)
{
	char whole[PATH_MAX];
	ssize_t bytes = e->bytes;

	if (*path != '/') {
		bytes = absolute(u, e, path, whole);
		path = whole;
	}
	if (bytes > 0)
		note(u, path, (size_t)bytes, IS_OPENED);
}

/* Whether the slot was filled. */
static int look_at(struct use *u, uint32_t slot)
{
	struct up_start_entry e;
	const char *path;

	if (!__atomic_load_n(&u->log->slot[slot], __ATOMIC_ACQUIRE))
		return 0;
	path = entry_of(u, slot, &e);
	if (path && e.kind == UP_START_DIRECTORY)
		u->began_in[(uint32_t)e.pid % USE_DIRECTORIES] = slot + 1;
	else if (path && e.kind == UP_START_OPEN && !e.missing)
		note_opened(u, &e, path);
	return 1;
}

void use_look(struct use *u)
{
	uint64_t taken = u->log ? __atomic_load_n(&u->log->taken, __ATOMIC_RELAXED) >> 32 : 0;

	/* Who was stopped over a slot holds those behind it up, for which the job waits no more than for a plain start. */
	while (u->slots_seen < taken && u->slots_seen < UP_START_SLOTS && look_at(u, u->slots_seen))
		u->slots_seen++;
}
