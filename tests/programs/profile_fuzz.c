// SPDX-License-Identifier: Apache-2.0
/*
 * profile_fuzz [SEED] - start profiles that are cut, that have bits flipped, and that are nonsense under good checksums
 * (service/profile.c, replay/entries.c), so that a sanitizer sees what a stranger's file does.
 *
 * Everything that it finds wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "replay/entries.h"
#include "service/helper.h"

#define CHECK(condition)                                                         \
	do {                                                                     \
		if (!(condition)) {                                              \
			fprintf(stderr, "profile_fuzz:%d: not so: %s (seed %u)\n", \
				__LINE__, #condition, seed);                     \
			exit(1);                                                 \
		}                                                                \
	} while (0)

#define CUTS 2000u
#define FLIPS 100000u
#define ENTRIES 300u
#define HEADER_BYTES 64u
#define BLOCK_BYTES 65536u

static unsigned seed = 46;
static uint64_t state;

static uint64_t drawn(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

/* ---- a profile ---- */

struct text {
	uint8_t *at;
	size_t bytes, room;
};

static void put(struct text *t, const void *from, size_t bytes)
{
	if (t->bytes + bytes > t->room) {
		t->room = 2 * (t->room + bytes);
		t->at = realloc(t->at, t->room);
		CHECK(t->at);
	}
	memcpy(t->at + t->bytes, from, bytes);
	t->bytes += bytes;
}

static void put_number(struct text *t, uint64_t value)
{
	uint8_t part;

	for (; value > 127; value >>= 7) {
		part = (uint8_t)(value | 128);
		put(t, &part, 1);
	}
	part = (uint8_t)value;
	put(t, &part, 1);
}

/* A number that the format allows there, or, now and then, any. */
static void put_some(struct text *t, uint64_t allowed, int is_wild)
{
	static const uint64_t wild[] = { 0, 1, 127, 128, 65535, 65536, 65537, UINT32_MAX, UINT64_C(1) << 62,
					 (UINT64_C(1) << 62) + 1, UINT64_C(1) << 63, UINT64_MAX };

	put_number(t, is_wild && !drawn(8) ? wild[drawn(sizeof(wild) / sizeof(wild[0]))] : allowed);
}

static void put_entry(struct text *t, unsigned n, int is_wild)
{
	uint8_t head[2] = { (uint8_t)(1 + n % 3), (uint8_t)(1 + drawn(255)) }, fixed[12] = { 0 };
	uint64_t size = 1 + drawn(100 * BLOCK_BYTES), blocks = (size + BLOCK_BYTES - 1) / BLOCK_BYTES, at = 0;
	uint64_t ranges = drawn(4);
	char path[64];
	int length = snprintf(path, sizeof(path), "/a/directory/with/file%u", n);

	if (is_wild && !drawn(50))
		head[0] = (uint8_t)drawn(256);
	put(t, head, 2);
	put_some(t, n ? 3 : 0, is_wild);
	put_some(t, (uint64_t)length - (n ? 3 : 0), is_wild);
	put(t, path + (n ? 3 : 0), (size_t)length - (n ? 3 : 0));
	if (head[0] != UP_PROFILE_FILE)
		return;
	put(t, fixed, sizeof(fixed));
	put_some(t, size, is_wild);
	while (ranges > blocks / 2)
		ranges--;
	put_some(t, ranges, is_wild);
	for (uint64_t i = 0; i < ranges; i++) {
		uint64_t gap = i ? 1 : 0, count = 1;

		put_some(t, gap, is_wild);
		put_some(t, count, is_wild);
		at += gap + count;
	}
	CHECK(at <= blocks);
}

static void put_word(uint8_t *at, uint32_t value)
{
	for (int i = 0; i < 4; i++)
		at[i] = (uint8_t)(value >> 8 * i);
}

/* Its checksums and its length say that all of it is well. */
static void seal(struct text *t)
{
	put_word(t->at + 16, (uint32_t)(t->bytes - HEADER_BYTES));
	put_word(t->at + 20, 0);
	put_word(t->at + 36, up_net_checksum(t->at + HEADER_BYTES, t->bytes - HEADER_BYTES));
	put_word(t->at + 60, up_net_checksum(t->at, 60));
}

static void make(struct text *t, unsigned entries, int is_wild)
{
	uint8_t header[HEADER_BYTES] = "UPLEARN1";

	t->bytes = 0;
	put_word(header + 8, 1);
	put_word(header + 12, entries);
	put_word(header + 32, 1);
	put(t, header, sizeof(header));
	for (unsigned n = 0; n < entries; n++)
		put_entry(t, n, is_wild);
	seal(t);
}

/* ---- read ---- */

/* Each field that is handed out is within what is said of it: how many entries there were, or -1. The copy ends where
 * the file does, so that a sanitizer sees a byte more. */
static int look_through(const struct text *t, size_t bytes)
{
	struct up_profile_header header;
	struct up_profile_entry e;
	struct up_profile *p;
	uint8_t *copy = malloc(bytes ? bytes : 1);
	int more = -1, n = 0;

	CHECK(copy);
	memcpy(copy, t->at, bytes);
	if (!up_profile_open(&p, copy, bytes, &header)) {
		while ((more = up_profile_next(p, &e)) > 0) {
			uint64_t end = 0;

			CHECK(e.path[0] == '/' && strlen(e.path) <= 4095);
			CHECK(e.kind >= UP_PROFILE_FILE && e.kind <= UP_PROFILE_STAT && e.seen);
			CHECK(e.ranges <= UP_PROFILE_RANGES_MAX);
			for (uint32_t i = 0; i < e.ranges; i++) {
				CHECK(e.range[2 * i] >= end && e.range[2 * i + 1]);
				end = e.range[2 * i] + e.range[2 * i + 1];
				CHECK(end <= e.size_bytes);
			}
			n++;
		}
		up_profile_close(p);
	} else {
		CHECK(header.flaw);
	}
	free(copy);
	return more < 0 ? -1 : n;
}

/* The same by the replay's part: of what it asks for, all lies within the file, in rising order. */
static int replay(const struct text *t)
{
	char path[64];
	char *paths[2] = { path, NULL };
	struct up_path_request q;
	struct entries found = { 0 };
	int fd = memfd_create("profile", MFD_CLOEXEC), n = 0;

	CHECK(fd >= 0 && write(fd, t->at, t->bytes) == (ssize_t)t->bytes);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (!entries_open(&found, paths, "")) {
		for (; entries_next(&found) > 0; n++) {
			uint64_t end = 0, sum = 0;

			entries_request(&found, &q);
			for (uint32_t i = 0; i < q.ranges; i++) {
				CHECK(q.range[2 * i] >= end && q.range[2 * i + 1]);
				end = q.range[2 * i] + q.range[2 * i + 1];
				sum += q.range[2 * i + 1];
				CHECK(end <= found.entry.size_bytes);
			}
			CHECK(!q.ranges || sum == entries_bytes(&found));
		}
		CHECK(entries_depth(&found, 0) >= 0);
	} else {
		CHECK(found.header.flaw);
		n = -1;
	}
	entries_close(&found);
	close(fd);
	return n;
}

int main(int argc, char **argv)
{
	struct text sound = { 0 }, other = { 0 };
	unsigned long wild = 0;

	seed = argc > 1 ? (unsigned)atoi(argv[1]) : seed;
	state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
	make(&sound, ENTRIES, 0);
	CHECK(look_through(&sound, sound.bytes) == (int)ENTRIES && replay(&sound) == (int)ENTRIES);
	for (unsigned n = 0; n < CUTS; n++)
		CHECK(look_through(&sound, drawn(sound.bytes)) < 0);
	for (unsigned n = 0; n < FLIPS; n++) {
		size_t at = drawn(sound.bytes);
		uint8_t bit = (uint8_t)(1u << drawn(8)), before = sound.at[at];

		sound.at[at] ^= bit;
		CHECK(look_through(&sound, sound.bytes) < 0);
		if (n % 10 == 0 && at >= HEADER_BYTES) { /* as who has made it so */
			other.bytes = 0;
			put(&other, sound.at, sound.bytes);
			seal(&other);
			look_through(&other, other.bytes);
		}
		sound.at[at] = before;
	}
	for (unsigned n = 0; n < CUTS; n++) {
		make(&other, (unsigned)drawn(20), 1);
		if (!drawn(4)) {
			other.bytes = HEADER_BYTES + drawn(other.bytes - HEADER_BYTES + 1);
			seal(&other);
		}
		wild += (look_through(&other, other.bytes) < 0) == (replay(&other) < 0);
	}
	CHECK(wild == CUTS); /* both say the same of it */
	free(sound.at);
	free(other.at);
	puts("all as it should be");
	return 0;
}
