// SPDX-License-Identifier: Apache-2.0
/*
 * listing.c - the names in a directory, in the orders in which programs go over them.
 *
 * The names of a million files take a second to read and to sort. All of that is done here, in whatever thread asks,
 * so that Python's lock is held for none of it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/helper.h"

/* What is sorted: an entry, by its name or its inode. */
struct key {
	const char *name;
	uint64_t inode;
	uint32_t index;
};

/* struct up_names, as it grows. */
struct growing {
	struct up_names names;
	uint32_t room;
	size_t text_bytes, text_room;
};

struct listing {
	struct up_listing seen;
	struct growing kind[2]; /* files, directories */
};

static int grow(struct growing *g, size_t length)
{
	struct up_names *n = &g->names;

	if (n->count == g->room) {
		uint32_t room = g->room ? 2 * g->room : 64;
		void *offset = realloc(n->offset, room * sizeof(*n->offset));
		void *inode;

		if (!offset)
			return -ENOMEM;
		n->offset = offset;
		inode = realloc(n->inode, room * sizeof(*n->inode));
		if (!inode)
			return -ENOMEM;
		n->inode = inode;
		g->room = room;
	}
	while (g->text_bytes + length > g->text_room) {
		size_t room = g->text_room ? 2 * g->text_room : 4096;
		char *text = realloc(n->text, room);

		if (!text)
			return -ENOMEM;
		n->text = text;
		g->text_room = room;
	}
	return 0;
}

static int add(struct growing *g, const char *name, uint64_t inode)
{
	size_t length = strlen(name) + 1;
	struct up_names *n = &g->names;
	int ret;

	if (g->text_bytes + length > UINT32_MAX)
		return -E2BIG;
	ret = grow(g, length);
	if (ret)
		return ret;
	n->offset[n->count] = (uint32_t)g->text_bytes;
	n->inode[n->count++] = inode;
	memcpy(n->text + g->text_bytes, name, length);
	g->text_bytes += length;
	return 0;
}

static int by_name(const void *a, const void *b)
{
	const struct key *x = a, *y = b;

	return strcmp(x->name, y->name);
}

static int by_inode(const void *a, const void *b)
{
	const struct key *x = a, *y = b;

	if (x->inode != y->inode)
		return x->inode < y->inode ? -1 : 1;
	return x->index < y->index ? -1 : x->index > y->index; /* two names of one file */
}

static int sort(const struct up_names *n, struct key *keys, int (*compare)(const void *, const void *),
		uint32_t **order, uint32_t **place)
{
	uint32_t *o = malloc((n->count + 1) * sizeof(*o)), *p = malloc((n->count + 1) * sizeof(*p));

	*order = o;
	*place = p;
	if (!o || !p)
		return -ENOMEM;
	for (uint32_t i = 0; i < n->count; i++)
		keys[i] = (struct key){ n->text + n->offset[i], n->inode[i], i };
	qsort(keys, n->count, sizeof(*keys), compare);
	for (uint32_t i = 0; i < n->count; i++) {
		o[i] = keys[i].index;
		p[keys[i].index] = i;
	}
	return 0;
}

static int sort_all(struct up_names *n)
{
	struct key *keys = malloc((n->count + 1) * sizeof(*keys));
	int ret = keys ? 0 : -ENOMEM;

	if (!ret)
		ret = sort(n, keys, by_name, &n->by_name, &n->name_place);
	if (!ret)
		ret = sort(n, keys, by_inode, &n->by_inode, &n->inode_place);
	free(keys);
	return ret;
}

/* 0: a file, 1: a directory, -1: neither (a link is opened by the name that it leads to). */
static int kind_of(int fd, const struct dirent *entry)
{
	struct stat st;

	if (entry->d_type == DT_UNKNOWN && !fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW))
		return S_ISREG(st.st_mode) ? 0 : S_ISDIR(st.st_mode) ? 1 : -1;
	return entry->d_type == DT_REG ? 0 : entry->d_type == DT_DIR ? 1 : -1;
}

static int read_all(struct listing *l, DIR *dir, uint64_t most)
{
	uint64_t count = 0;
	struct dirent *entry;

	for (;;) {
		int kind, ret;

		errno = 0;
		entry = readdir(dir);
		if (!entry)
			return -errno;
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (++count > most)
			return -E2BIG;
		kind = kind_of(dirfd(dir), entry);
		ret = kind < 0 ? 0 : add(&l->kind[kind], entry->d_name, entry->d_ino);
		if (ret)
			return ret;
	}
}

static int open_to_read(int directory)
{
	int flags = O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC;
	int fd = openat(directory, ".", flags | O_NOATIME);

	if (fd < 0 && errno == EPERM) /* somebody else's */
		fd = openat(directory, ".", flags);
	return fd < 0 ? -errno : fd;
}

int up_listing_read(struct up_listing **out, int directory, uint64_t most)
{
	struct listing *l = calloc(1, sizeof(*l));
	int fd, ret;
	DIR *dir;

	if (!l)
		return -ENOMEM;
	fd = open_to_read(directory);
	dir = fd < 0 ? NULL : fdopendir(fd);
	ret = fd < 0 ? fd : dir ? read_all(l, dir, most) : -errno;
	if (dir)
		closedir(dir);
	else if (fd >= 0)
		close(fd);
	for (int i = 0; i < 2 && !ret; i++)
		ret = sort_all(&l->kind[i].names);
	l->seen.files = &l->kind[0].names;
	l->seen.directories = &l->kind[1].names;
	*out = &l->seen;
	if (ret)
		up_listing_free(&l->seen);
	return ret;
}

void up_listing_free(struct up_listing *listing)
{
	struct listing *l = (struct listing *)listing;

	for (int i = 0; i < 2; i++) {
		struct up_names *n = &l->kind[i].names;

		free(n->offset);
		free(n->text);
		free(n->inode);
		free(n->by_name);
		free(n->name_place);
		free(n->by_inode);
		free(n->inode_place);
	}
	free(l);
}

int64_t up_names_find(const struct up_names *names, const char *name)
{
	uint32_t low = 0, high = names->count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2, index = names->by_name[middle];
		int order = strcmp(names->text + names->offset[index], name);

		if (!order)
			return index;
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return -1;
}
