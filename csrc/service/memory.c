// SPDX-License-Identifier: Apache-2.0
/*
 * memory.c - reads what memory.h calls levels. A limit anywhere above a cgroup holds for it, so all are asked
 * and the least is what counts.
 *
 * Nothing here allocates after up_memory_open(): it is asked where there is no memory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/helper.h"
#include "service/memory.h"

#define GROUPS 32
#define TEXT_BYTES 8192
#define KIB 1024u
/* The kernel's word for no limit, in version 1 (PAGE_COUNTER_MAX), is above this. */
#define NO_LIMIT (1ull << 60)
/* memory.stat costs 30 us, up to ten times of that on a large machine; what is used alone 3 us. So the first
 * is read where this part of the limit, or less, is not used, and else in every so many looks. */
#define NEAR_PART 4u
#define LOOKS_PER_STAT 4u

struct group {
	int limit_fd, high_fd, used_fd, stat_fd, swap_fd; /* -1: there is none */
	int is_v1;
	int counts; /* `level` holds */
	struct up_level level;
};

struct up_memory {
	struct group group[GROUPS];
	int groups, meminfo_fd;
	unsigned int looks;
	struct up_level machine;
	uint64_t swap_free;
	char text[TEXT_BYTES];
};

/* The whole of a file that the kernel makes as it is read; 0: it cannot be. */
static int text_of(struct up_memory *m, int fd)
{
	ssize_t n = fd < 0 ? -1 : pread(fd, m->text, TEXT_BYTES - 1, 0);

	m->text[n > 0 ? n : 0] = 0;
	return n > 0;
}

static uint64_t number(const char *p)
{
	uint64_t value = 0;

	while (*p == ' ' || *p == '\t')
		p++;
	for (; *p >= '0' && *p <= '9'; p++)
		value = value * 10 + (uint64_t)(*p - '0');
	return value;
}

/* The number in the line that begins with a word; 0: there is none. */
static uint64_t row(const char *text, const char *word)
{
	size_t n = strlen(word);

	for (const char *p = text; p; p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL)
		if (!strncmp(p, word, n) && (p[n] == ' ' || p[n] == ':'))
			return number(p + n + 1);
	return 0;
}

static uint64_t limit_of(struct up_memory *m, int fd)
{
	uint64_t limit;

	if (!text_of(m, fd) || m->text[0] == 'm') /* max */
		return UINT64_MAX;
	limit = number(m->text);
	return limit >= NO_LIMIT ? UINT64_MAX : limit;
}

static void read_stat(struct up_memory *m, struct group *g)
{
	const char *text = m->text;

	g->level.cache = g->level.shmem = 0;
	if (!text_of(m, g->stat_fd))
		return;
	if (g->is_v1) {
		g->level.cache = row(text, "total_active_file") + row(text, "total_inactive_file");
		g->level.shmem = row(text, "total_shmem");
		return;
	}
	g->level.cache = row(text, "active_file") + row(text, "inactive_file") + row(text, "slab_reclaimable");
	g->level.shmem = row(text, "shmem");
}

static void read_group(struct up_memory *m, struct group *g, uint64_t held, int thorough)
{
	uint64_t limit = limit_of(m, g->limit_fd), high = limit_of(m, g->high_fd);

	g->level.limit = high < limit ? high : limit; /* above memory.high each allocation waits for reclaim */
	g->counts = g->level.limit != UINT64_MAX && text_of(m, g->used_fd);
	if (!g->counts)
		return;
	g->level.used = number(m->text);
	if (!thorough && g->level.used + g->level.limit / NEAR_PART < g->level.limit)
		return;
	read_stat(m, g);
	up_level_note(&g->level, held);
}

static void read_machine(struct up_memory *m, uint64_t held)
{
	uint64_t available;

	if (!text_of(m, m->meminfo_fd))
		return;
	available = row(m->text, "MemAvailable") * KIB;
	m->machine.limit = available ? row(m->text, "MemTotal") * KIB : 0;
	m->machine.used = m->machine.limit > available ? m->machine.limit - available : 0;
	m->machine.shmem = row(m->text, "Shmem") * KIB;
	m->swap_free = row(m->text, "SwapFree") * KIB;
	up_level_note(&m->machine, held);
}

/* Whether the kernel may move shared memory of the group to swap. */
static int swaps(struct up_memory *m, const struct group *g)
{
	uint64_t limit = limit_of(m, g->swap_fd);

	return g->is_v1 ? limit > g->level.limit : limit > 0; /* memory.memsw: both together */
}

static void note_level(struct up_memory_room *out, const struct up_level *l, uint64_t others, uint64_t held,
		       int is_cgroup)
{
	uint64_t may_hold = up_level_may_hold(l, others), left = up_level_left(l, held);

	if (may_hold < out->may_hold_bytes) {
		out->may_hold_bytes = may_hold;
		out->is_cgroup = is_cgroup;
	}
	if (left < out->left_bytes) {
		out->left_bytes = left;
		out->limit_bytes = l->limit;
	}
	if (l->limit < out->least_limit_bytes)
		out->least_limit_bytes = l->limit;
}

void up_memory_look(struct up_memory *m, uint64_t held, struct up_memory_room *out)
{
	int thorough = m->looks++ % LOOKS_PER_STAT == 0, can_swap;

	*out = (struct up_memory_room){ .may_hold_bytes = UINT64_MAX, .left_bytes = UINT64_MAX,
					.limit_bytes = UINT64_MAX, .least_limit_bytes = UINT64_MAX,
					.group_limit_bytes = UINT64_MAX };
	if (thorough || up_level_left(&m->machine, held) < m->machine.limit / NEAR_PART)
		read_machine(m, held);
	can_swap = m->swap_free > held;
	if (m->machine.limit)
		note_level(out, &m->machine, m->machine.others, held, 0);
	for (int i = 0; i < m->groups; i++) {
		struct group *g = &m->group[i];
		uint64_t others;

		read_group(m, g, held, thorough);
		if (!g->counts)
			continue;
		others = g->level.others;
		/* what it has had it will have again, and the pool would have to be read again each time */
		if (!can_swap || !swaps(m, g)) {
			others = g->level.peak;
			if (g->level.limit < out->group_limit_bytes)
				out->group_limit_bytes = g->level.limit;
		}
		note_level(out, &g->level, others, held, 1);
	}
}

static int open_in(const char *directory, const char *name)
{
	char path[4096];

	if (snprintf(path, sizeof(path), "%s/%s", directory, name) >= (int)sizeof(path))
		return -1;
	return open(path, O_RDONLY | O_CLOEXEC);
}

static void add_group(struct up_memory *m, const char *directory, int is_v1)
{
	struct group *g = &m->group[m->groups];

	if (m->groups == GROUPS)
		return;
	*g = (struct group){ .is_v1 = is_v1 };
	g->limit_fd = open_in(directory, is_v1 ? "memory.limit_in_bytes" : "memory.max");
	g->high_fd = is_v1 ? -1 : open_in(directory, "memory.high");
	g->used_fd = open_in(directory, is_v1 ? "memory.usage_in_bytes" : "memory.current");
	g->stat_fd = open_in(directory, "memory.stat");
	g->swap_fd = open_in(directory, is_v1 ? "memory.memsw.limit_in_bytes" : "memory.swap.max");
	if ((g->limit_fd >= 0 || g->high_fd >= 0) && g->used_fd >= 0)
		m->groups++;
	else
		for (int i = 0; i < 5; i++)
			close((int[]){ g->limit_fd, g->high_fd, g->used_fd, g->stat_fd, g->swap_fd }[i]);
}

/* The group of a line of /proc/PID/cgroup, and all above it. A container often sees its own group mounted as the
 * root: what is not there is passed over. */
static void add_groups(struct up_memory *m, const char *root, const char *path, int is_v1)
{
	char directory[4096];
	size_t base = (size_t)snprintf(directory, sizeof(directory), "%s%s", root, is_v1 ? "/memory" : "");

	if (strstr(path, "/..")) /* outside of the namespace's root */
		path = "";
	if (base + strlen(path) + 1 >= sizeof(directory))
		return;
	strcpy(directory + base, path);
	for (size_t n = strlen(directory);; n--) {
		if (n > base && directory[n - 1] == '/')
			continue;
		directory[n] = 0;
		add_group(m, directory, is_v1);
		if (n <= base)
			return;
		while (n > base && directory[n - 1] != '/')
			n--;
	}
}

static void add_line(struct up_memory *m, const char *root, char *line)
{
	char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;

	if (!path)
		return;
	*path++ = 0;
	names++;
	if (!*names)
		add_groups(m, root, path, 0);
	for (char *rest, *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
		if (!strcmp(name, "memory"))
			add_groups(m, root, path, 1);
}

int up_memory_open(struct up_memory **out, const char *root, const char *groups, const char *meminfo)
{
	struct up_memory *m = calloc(1, sizeof(*m));
	char *text = strdup(groups);

	if (!m || !text) {
		free(m);
		free(text);
		return -ENOMEM;
	}
	m->meminfo_fd = open(meminfo, O_RDONLY | O_CLOEXEC);
	for (char *rest, *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
		add_line(m, root, line);
	free(text);
	*out = m;
	return 0;
}

void up_memory_close(struct up_memory *m)
{
	if (!m)
		return;
	for (int i = 0; i < m->groups; i++) {
		struct group *g = &m->group[i];

		for (int k = 0; k < 5; k++)
			close((int[]){ g->limit_fd, g->high_fd, g->used_fd, g->stat_fd, g->swap_fd }[k]);
	}
	close(m->meminfo_fd);
	free(m);
}
