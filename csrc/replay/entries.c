// SPDX-License-Identifier: Apache-2.0
/*
 * entries.c - reads a start profile for a replay, and says how each of its entries is asked for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "replay/entries.h"

/* LL_SUPER_MAGIC of Lustre (base/file_systems.py has what follows of it: reads of an RPC, no readahead call). */
#define LUSTRE 0x0BD00BD0u
#define LUSTRE_PIECE_BYTES (4u << 20)
#define PIECE_BYTES (1u << 20)
/* Measured with 0.5 and 1 ms a request: more bring nothing (docs/learn.md); a Lustre client has 8 RPCs under way to a
 * server (max_rpcs_in_flight). */
#define DEPTH 32
#define LUSTRE_DEPTH 16
/* What lies between two ranges is read, too, where it costs less than a request. */
#define GAP_BYTES (128u << 10)
/* The shares of native/memory_limits.py: of what is available, and of what memory groups leave. */
#define MEMORY_PART 2u
#define GROUP_PART 8u
#define GROUP_ROOT "/sys/fs/cgroup"
/* Of the threads that the user may have (ulimit -u), and of those that process groups leave: they are the job's
 * before. */
#define USER_THREADS_PART 32u
#define GROUP_THREADS_PART 8u
/* No budget is more, so that nothing overflows that is added to it. */
#define BUDGET_MOST (UINT64_C(1) << 60)

/* ---- the profile ---- */

/* All of a regular file; it may be anything, and grow. */
static int read_whole(struct entries *p, const char *path)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
	struct stat st;
	ssize_t n = 1;

	p->file_bytes = 0;
	p->header = (struct up_profile_header){ 0 };
	if (fd < 0)
		return -errno;
	p->file = fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size > UP_PROFILE_BYTES_MAX ?
			  NULL : malloc((size_t)st.st_size + 1);
	while (p->file && n > 0 && p->file_bytes < (uint64_t)st.st_size) {
		n = read(fd, p->file + p->file_bytes, (size_t)st.st_size - p->file_bytes);
		p->file_bytes += n > 0 ? (uint64_t)n : 0;
	}
	close(fd);
	return p->file && n >= 0 ? 0 : -EIO;
}

static int open_at_start(struct entries *p)
{
	if (p->profile)
		up_profile_close(p->profile);
	p->profile = NULL;
	return up_profile_open(&p->profile, p->file, p->file_bytes, &p->header);
}

/* Before anything is read no entry may be wrong. */
static int look_through(struct entries *p, const char *program)
{
	int more;

	p->bytes = p->lustre_bytes = 0;
	p->has_program = !*program;
	while ((more = entries_next(p)) > 0) {
		p->has_program |= !strcmp(p->entry.path, program);
		p->bytes += entries_bytes(p);
		p->lustre_bytes += p->entry.f_type == LUSTRE ? entries_bytes(p) : 0;
	}
	return more;
}

/* Whether it is a profile, that has been looked through. */
static int open_one(struct entries *p, const char *path, const char *program)
{
	return !read_whole(p, path) && !open_at_start(p) && !look_through(p, program) && !open_at_start(p);
}

int entries_open(struct entries *p, char **paths, const char *program)
{
	struct up_profile_header flawed = { 0 };

	p->range = malloc(2 * UP_PROFILE_RANGES_MAX * sizeof(*p->range)); /* its pages come as they are used */
	if (!p->range)
		return -ENOMEM;
	for (int i = 0; paths[i]; i++) {
		int is_sound = open_one(p, paths[i], program);

		if (is_sound && p->has_program) {
			p->number = i;
			return 0;
		}
		p->is_others |= is_sound;
		if (!is_sound && !flawed.flaw && !access(paths[i], F_OK)) { /* else nobody has written it yet */
			flawed = p->header;
			if (!flawed.flaw)
				flawed.flaw = p->file ? UP_PROFILE_DAMAGED : UP_PROFILE_NONE_SUCH;
		}
		free(p->file);
		p->file = NULL;
	}
	p->header = flawed;
	if (p->is_others)
		return -ESRCH;
	return flawed.flaw ? -EINVAL : -ENOENT;
}

void entries_close(struct entries *p)
{
	if (p->profile)
		up_profile_close(p->profile);
	free(p->file);
	free(p->range);
}

/* ---- its entries ---- */

/* The entry's ranges, those with a small gap between them as one. */
static void take_ranges(struct entries *p)
{
	const struct up_profile_entry *e = &p->entry;

	p->ranges = 0;
	for (uint32_t i = 0; i < e->ranges; i++) {
		uint64_t at = e->range[2 * i], end = at + e->range[2 * i + 1];
		uint64_t *last = p->ranges ? &p->range[2 * p->ranges - 2] : NULL;

		if (last && at - (last[0] + last[1]) <= GAP_BYTES) {
			last[1] = end - last[0];
			continue;
		}
		p->range[2 * p->ranges] = at;
		p->range[2 * p->ranges++ + 1] = end - at;
	}
}

int entries_next(struct entries *p)
{
	int more = up_profile_next(p->profile, &p->entry);

	if (more > 0)
		take_ranges(p);
	return more;
}

int entries_is_refused(const struct entries *p)
{
	static const char *const made_up[] = { "/proc", "/sys", "/dev" };

	for (size_t i = 0; i < sizeof(made_up) / sizeof(made_up[0]); i++) {
		size_t n = strlen(made_up[i]);

		if (!strncmp(p->entry.path, made_up[i], n) && (!p->entry.path[n] || p->entry.path[n] == '/'))
			return 1;
	}
	return 0;
}

uint64_t entries_bytes(const struct entries *p)
{
	uint64_t sum = 0;

	if (p->entry.kind != UP_PROFILE_FILE)
		return 0;
	for (uint32_t i = 0; i < p->ranges; i++)
		sum += p->range[2 * i + 1];
	return p->ranges ? sum : p->entry.size_bytes;
}

void entries_request(const struct entries *p, struct up_path_request *q)
{
	static const uint32_t kind_of[] = { [UP_PROFILE_FILE] = UP_PATH_READ,
					    [UP_PROFILE_DIRECTORY] = UP_PATH_LIST,
					    [UP_PROFILE_STAT] = UP_PATH_LOOK_UP };
	const struct up_profile_entry *e = &p->entry;

	*q = (struct up_path_request){ .directory_fd = AT_FDCWD, .name = e->path, .follow = 1,
				       .kind = kind_of[e->kind], .method = UP_WARM_PREAD };
	if (e->kind != UP_PROFILE_FILE)
		return;
	q->expected = (struct up_path_expected){ .size_bytes = e->size_bytes, .mtime_ns = e->mtime_ns,
						 .f_type = e->f_type, .is_given = 1 };
	q->piece_bytes = e->f_type == LUSTRE ? LUSTRE_PIECE_BYTES : PIECE_BYTES;
	q->ranges = p->ranges;
	q->range = p->range;
}

/* ---- how much at a time, and in all ---- */

/* A small file, with a NUL; empty: there is none. */
static void read_text(const char *path, char *text, size_t room)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, text, room - 1);

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = 0;
}

/* UINT64_MAX: none is said. */
static uint64_t number_in(const char *directory, const char *name)
{
	char path[PATH_MAX], text[32];

	if (snprintf(path, sizeof(path), "%s/%s", directory, name) >= (int)sizeof(path))
		return UINT64_MAX;
	read_text(path, text, sizeof(text));
	return *text >= '0' && *text <= '9' ? strtoull(text, NULL, 10) : UINT64_MAX;
}

/* Threads that a process group, and those above it, leave; UINT64_MAX: none limits them. */
static uint64_t threads_left(const char *root, const char *group)
{
	char directory[PATH_MAX];
	uint64_t least = UINT64_MAX;

	if (snprintf(directory, sizeof(directory), "%s%s", root, group) >= (int)sizeof(directory))
		return least;
	for (char *end = directory; end; end = strrchr(directory, '/')) {
		uint64_t most, now;

		if (end != directory)
			*end = 0;
		if (strlen(directory) < strlen(root))
			break;
		most = number_in(directory, "pids.max");
		now = most == UINT64_MAX ? 0 : number_in(directory, "pids.current");
		if (most != UINT64_MAX && (most < now ? 0 : most - now) < least)
			least = most < now ? 0 : most - now;
	}
	return least;
}

static uint64_t threads(void)
{
	char groups[8192], *next = groups;
	uint64_t most = UINT64_MAX;
	struct rlimit limit;

	if (!getrlimit(RLIMIT_NPROC, &limit) && limit.rlim_cur != RLIM_INFINITY)
		most = limit.rlim_cur / USER_THREADS_PART;
	read_text("/proc/self/cgroup", groups, sizeof(groups));
	for (char *line = strsep(&next, "\n"); line; line = strsep(&next, "\n")) {
		char *kind = strchr(line, ':'), *group = kind ? strchr(kind + 1, ':') : NULL;
		uint64_t left = UINT64_MAX;

		if (!group)
			continue;
		*group++ = 0;
		if (!kind[1]) /* cgroup v2 */
			left = threads_left(GROUP_ROOT, group);
		else if (!strcmp(kind + 1, "pids"))
			left = threads_left(GROUP_ROOT "/pids", group);
		if (left != UINT64_MAX && left / GROUP_THREADS_PART < most)
			most = left / GROUP_THREADS_PART;
	}
	return most;
}

int entries_depth(const struct entries *p, int asked)
{
	int depth = asked ? asked : p->lustre_bytes > p->bytes / 2 ? LUSTRE_DEPTH : DEPTH;
	uint64_t most = threads();

	if ((uint32_t)depth > p->header.entries)
		depth = p->header.entries ? (int)p->header.entries : 1;
	return most < (uint64_t)depth ? (int)most : depth;
}

/* What is left to these memory groups, or to the machine; UINT64_MAX: nobody says. */
static uint64_t left(const char *groups, const char *meminfo)
{
	struct up_memory_room room;
	struct up_memory *m;

	if (up_memory_open(&m, GROUP_ROOT, groups, meminfo))
		return UINT64_MAX;
	up_memory_look(m, 0, &room);
	up_memory_close(m);
	return room.left_bytes;
}

uint64_t entries_budget(uint64_t bytes)
{
	char groups[8192];
	uint64_t machine, group;

	read_text("/proc/self/cgroup", groups, sizeof(groups));
	machine = left("", "/proc/meminfo");
	group = left(groups, "/dev/null");
	if (machine != UINT64_MAX && machine / MEMORY_PART < bytes)
		bytes = machine / MEMORY_PART;
	if (group != UINT64_MAX && group / GROUP_PART < bytes)
		bytes = group / GROUP_PART;
	return bytes < BUDGET_MOST ? bytes : BUDGET_MOST;
}
