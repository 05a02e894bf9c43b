// SPDX-License-Identifier: Apache-2.0
/*
 * profile.c - reads a start profile: which files a program opens when it starts, and which parts of them it needs.
 *
 * A profile may be a stranger's: whatever it says is bounded before it is used. docs/learn.md has the format.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/helper.h"

#define HEADER_BYTES 64u
#define VERSION 1u
/* Within the header. */
#define AT_VERSION 8
#define AT_ENTRIES 12
#define AT_BODY_BYTES 16
#define AT_TOTAL_BYTES 24
#define AT_RUNS 32
#define AT_BODY_CRC 36
#define AT_RESERVED 40
#define AT_HEADER_CRC 60
/* The unit of ranges: what one fault maps of the page cache. */
#define BLOCK_BYTES (64u << 10)
/* A file that is larger does not exist (MAX_LFS_FILESIZE). */
#define SIZE_MAX_BYTES (UINT64_C(1) << 62)
#define PATH_BYTES_MAX 4095u /* PATH_MAX without its NUL */

struct up_profile {
	const uint8_t *at, *end;
	uint32_t left; /* entries */
	uint32_t path_bytes;
	uint64_t all_ranges, all_paths; /* of the entries so far; bytes */
	char path[PATH_BYTES_MAX + 1];
	uint64_t range[2 * UP_PROFILE_RANGES_MAX];
};

static uint32_t word(const uint8_t *at)
{
	return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t quad(const uint8_t *at)
{
	return (uint64_t)word(at) | (uint64_t)word(at + 4) << 32;
}

/* ---- the header ---- */

static int is_zero(const uint8_t *at, size_t bytes)
{
	while (bytes--)
		if (*at++)
			return 0;
	return 1;
}

static enum up_profile_flaw flaw_of(const uint8_t *file, uint64_t bytes,
				    struct up_profile_header *header)
{
	if (bytes < HEADER_BYTES || memcmp(file, "UPLEARN1", 8))
		return UP_PROFILE_NONE_SUCH;
	if (up_net_checksum(file, AT_HEADER_CRC) != word(file + AT_HEADER_CRC))
		return UP_PROFILE_DAMAGED;
	header->version = word(file + AT_VERSION);
	header->entries = word(file + AT_ENTRIES);
	header->total_bytes = quad(file + AT_TOTAL_BYTES);
	header->runs = word(file + AT_RUNS);
	if (header->version != VERSION || !is_zero(file + AT_RESERVED, AT_HEADER_CRC - AT_RESERVED))
		return UP_PROFILE_OTHER_VERSION;
	if (bytes > UP_PROFILE_BYTES_MAX || header->entries > UP_PROFILE_ENTRIES_MAX)
		return UP_PROFILE_TOO_LARGE;
	if (quad(file + AT_BODY_BYTES) != bytes - HEADER_BYTES ||
	    up_net_checksum(file + HEADER_BYTES, bytes - HEADER_BYTES) != word(file + AT_BODY_CRC))
		return UP_PROFILE_DAMAGED;
	return UP_PROFILE_SOUND;
}

int up_profile_open(struct up_profile **out, const void *file, uint64_t bytes,
		    struct up_profile_header *header)
{
	const uint8_t *at = file;
	struct up_profile *p;

	memset(header, 0, sizeof(*header));
	header->flaw = flaw_of(at, bytes, header);
	if (header->flaw != UP_PROFILE_SOUND)
		return -EINVAL;
	p = malloc(sizeof(*p)); /* its pages come as they are used */
	if (!p)
		return -ENOMEM;
	p->at = at + HEADER_BYTES;
	p->end = at + bytes;
	p->left = header->entries;
	p->path_bytes = 0;
	p->all_ranges = p->all_paths = 0;
	*out = p;
	return 0;
}

void up_profile_close(struct up_profile *p)
{
	free(p);
}

/* ---- entries ---- */

/* Each takes what it returns off the body; 0 if that does not have it. */
static int take(struct up_profile *p, uint64_t bytes, const uint8_t **out)
{
	if (bytes > (uint64_t)(p->end - p->at))
		return 0;
	*out = p->at;
	p->at += bytes;
	return 1;
}

/* LEB128, of 64 bits at most. */
static int take_number(struct up_profile *p, uint64_t *out)
{
	uint64_t found = 0;

	for (unsigned shift = 0; shift < 64 && p->at < p->end; shift += 7) {
		uint8_t part = *p->at++;

		if (shift == 63 && part > 1)
			return 0;
		found |= (uint64_t)(part & 127) << shift;
		if (!(part & 128)) {
			*out = found;
			return 1;
		}
	}
	return 0;
}

/* Front-coded: so many bytes of the path before it, and the rest. */
static int take_path(struct up_profile *p)
{
	uint64_t shared, more;
	const uint8_t *rest;

	if (!take_number(p, &shared) || !take_number(p, &more) || shared > p->path_bytes ||
	    more > PATH_BYTES_MAX - shared || !take(p, more, &rest) || memchr(rest, 0, more))
		return 0;
	memcpy(p->path + shared, rest, more);
	p->path_bytes = (uint32_t)(shared + more);
	p->path[p->path_bytes] = 0;
	p->all_paths += p->path_bytes;
	return p->path[0] == '/' && p->all_paths <= UP_PROFILE_ALL_PATHS_MAX;
}

/* Blocks, in rising order, as gaps and lengths; [offset, length) in bytes, the last one cut at the file's end. */
static int take_ranges(struct up_profile *p, struct up_profile_entry *e)
{
	uint64_t blocks = (e->size_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES, at = 0, count;

	if (!take_number(p, &count) || count > UP_PROFILE_RANGES_MAX ||
	    count > UP_PROFILE_ALL_RANGES_MAX - p->all_ranges)
		return 0;
	p->all_ranges += count;
	for (uint64_t i = 0; i < count; i++) {
		uint64_t gap, length, end;

		if (!take_number(p, &gap) || !take_number(p, &length) || (i && !gap) || !length ||
		    gap > blocks - at || length > blocks - at - gap)
			return 0;
		at += gap;
		end = (at + length) * BLOCK_BYTES;
		p->range[2 * i] = at * BLOCK_BYTES;
		p->range[2 * i + 1] = (end < e->size_bytes ? end : e->size_bytes) - at * BLOCK_BYTES;
		at += length;
	}
	e->ranges = (uint32_t)count;
	return 1;
}

static int take_file(struct up_profile *p, struct up_profile_entry *e)
{
	const uint8_t *fixed;

	if (!take(p, 12, &fixed) || !take_number(p, &e->size_bytes) || !e->size_bytes ||
	    e->size_bytes > SIZE_MAX_BYTES)
		return 0;
	e->f_type = word(fixed);
	e->mtime_ns = (int64_t)quad(fixed + 4);
	return take_ranges(p, e);
}

int up_profile_next(struct up_profile *p, struct up_profile_entry *e)
{
	const uint8_t *fixed;

	memset(e, 0, sizeof(*e));
	if (!p->left)
		return p->at == p->end ? 0 : -EINVAL;
	if (!take(p, 2, &fixed) || fixed[0] < UP_PROFILE_FILE || fixed[0] > UP_PROFILE_STAT ||
	    !fixed[1] || !take_path(p))
		return -EINVAL;
	e->kind = fixed[0];
	e->seen = fixed[1];
	if (e->kind == UP_PROFILE_FILE && !take_file(p, e))
		return -EINVAL;
	e->path = p->path;
	e->range = p->range;
	p->left--;
	return 1;
}
