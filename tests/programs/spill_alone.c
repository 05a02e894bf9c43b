// SPDX-License-Identifier: Apache-2.0
/*
 * spill_alone - the disk tier (csrc/service/pool/spill.h) without a pool and with a clock of its own, which goes on
 * with each read, and where it is said with each look at it. Prints a line for each number of its own that can be seen so.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/pool/spill_inside.h"

#define CHUNK (64u << 10)
#define SLOT (1u << 20)
#define PARTS 200u
#define MS 1000000ull

static uint64_t now_ns = 1000 * MS, look_takes_ns;
static uint64_t taken_bytes, times_taken, times_read;
static int writes_nothing;

uint64_t pool_now_ns(void)
{
	return __atomic_add_fetch(&now_ns, look_takes_ns, __ATOMIC_RELAXED);
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset)
{
	__atomic_add_fetch(&now_ns, 5 * MS, __ATOMIC_RELAXED);
	__atomic_add_fetch(&times_read, 1, __ATOMIC_RELAXED);
	return syscall(SYS_pread64, fd, buffer, length, offset);
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
	(void)fd, (void)offset;
	if (!mode) {
		times_taken++;
		taken_bytes += (uint64_t)length;
	}
	return 0;
}

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset)
{
	if (writes_nothing)
		return (ssize_t)length;
	return syscall(SYS_pwrite64, fd, buffer, length, offset);
}

static void must(int holds, const char *what)
{
	if (holds)
		return;
	printf("not so: %s (errno %d)\n", what, errno);
	exit(1);
}

static struct spill *begin_with(struct up_spill_options o, int *fd)
{
	struct spill *s;

	*fd = o.fd = memfd_create("disk", MFD_CLOEXEC);
	must(o.fd >= 0, "there is a disk");
	must(!spill_create(&s, &o, CHUNK, 1), "a tier begins");
	must(!spill_add_file(s, 0, PARTS * SPILL_SLOT_CHUNKS), "it has a file");
	return s;
}

static struct spill *begin(uint32_t errors_most, int *fd)
{
	return begin_with((struct up_spill_options){ .size_bytes = 1ull << 30, .errors_most = errors_most }, fd);
}

static void end(struct spill *s)
{
	spill_stop(s);
	spill_end(s);
}

static void write_part(struct spill *s, uint64_t part, const char *bytes)
{
	struct spill_copy c;

	must(spill_reserve(s, 0, 0, part * SPILL_SLOT_CHUNKS, SPILL_SLOT_CHUNKS, &c) == SPILL_SLOT_CHUNKS, "room");
	spill_write(s, &c, bytes);
}

static int read_part(struct spill *s, uint64_t part, char **buffer)
{
	return spill_read(s, 0, part * SPILL_SLOT_CHUNKS, SPILL_SLOT_CHUNKS, 1, buffer, SLOT);
}

static int has_ended(struct spill *s)
{
	struct up_spill_counts counts;

	spill_count(s, &counts);
	return counts.ended != 0;
}

/* After how many errors, `apart_ms` from each other, it ends; 0: never. */
static int errors_until_end(uint32_t errors_most, uint64_t apart_ms, char **buffer)
{
	int fd, found = 0;
	struct spill *s = begin(errors_most, &fd);

	for (uint64_t part = 0; part < 40 && !found; part++) {
		write_part(s, part, *buffer);
		must(!ftruncate(fd, 0), "what was written is gone");
		now_ns += apart_ms * MS;
		must(!read_part(s, part, buffer), "it is found out");
		found = has_ended(s) ? (int)part + 1 : 0;
	}
	end(s);
	return found;
}

/* How many of 6400 reads are to come from the disk, which takes 5 ms, where storage takes so long. */
static int reads_of_the_disk(uint64_t storage_ns, char **buffer)
{
	int fd, here, found = 0;
	struct spill *s = begin(1u << 30, &fd);

	write_part(s, 0, *buffer);
	for (int i = 0; i < 10; i++) {
		must(read_part(s, 0, buffer), "it comes back");
		spill_was_read(s, 0, SLOT, storage_ns);
	}
	for (int i = 0; i < 6400; i++) {
		spill_run(s, 0, 0, SPILL_SLOT_CHUNKS, &here);
		found += here;
	}
	end(s);
	return found;
}

static int is_tried(struct spill *s)
{
	int found;

	pthread_mutex_lock(&s->lock);
	found = s->trial.state >= TRIAL_DONE;
	pthread_mutex_unlock(&s->lock);
	return found;
}

/* How many slots a trial with more than there are reads, of a disk of so many. */
static int slots_tried(uint64_t slots, const char *bytes)
{
	int fd;
	struct up_spill_options o = { .size_bytes = slots * SLOT, .errors_most = 3, .try_bytes = 1ull << 40 };
	struct spill *s = begin_with(o, &fd);

	times_read = 0;
	write_part(s, 0, bytes);
	while (!is_tried(s))
		usleep(1000);
	end(s);
	return (int)times_read;
}

int main(void)
{
	char *buffer = spill_buffer(SLOT);
	struct spill_copy other;
	uint64_t read_ns;
	struct spill *s;
	int fd;

	must(buffer != NULL, "there is memory");
	memset(buffer, 7, SLOT);
	printf("errors that end it: %d, %d, %d\n", errors_until_end(3, 0, &buffer),
	       errors_until_end(8, 0, &buffer), errors_until_end(9, 0, &buffer));
	printf("three errors in 40 s: %d\n", errors_until_end(3, 19000, &buffer));
	printf("three errors in 80 s: %d\n", errors_until_end(3, 40000, &buffer));

	printf("of 6400 reads: %d, %d\n", reads_of_the_disk(39 * MS / 10, &buffer),
	       reads_of_the_disk(41 * MS / 10, &buffer));

	s = begin(1u << 30, &fd);
	write_part(s, 0, buffer);
	must(spill_reserve(s, 0, 0, SPILL_SLOT_CHUNKS, 1, &other) == 1, "somebody writes");
	must(read_part(s, 0, &buffer), "it comes back");
	read_ns = now_ns;
	look_takes_ns = MS;
	spill_poke(s);
	must(spill_wait(s), "it goes on");
	printf("written after: %d ms\n", (int)((now_ns - read_ns) / MS));
	spill_leave(s);
	spill_give_up(s, &other);
	look_takes_ns = 0;
	end(s);

	s = begin(1u << 30, &fd);
	writes_nothing = 1;
	times_taken = taken_bytes = 0;
	for (uint64_t part = 0; part < 130; part++)
		write_part(s, part, buffer);
	printf("taken: %d times %d MiB\n", (int)times_taken, (int)(taken_bytes / times_taken >> 20));
	end(s);
	printf("tried: %d of 1000, %d of 101\n", slots_tried(1000, buffer), slots_tried(101, buffer));
	return 0;
}
