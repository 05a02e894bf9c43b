// SPDX-License-Identifier: Apache-2.0
/*
 * vma.c - what lies at an address, asked of the kernel: no other answer counts, because a process
 * changes its address space without our interposers whenever it likes (a raw system call, a
 * library's memory hooks).
 *
 * PROCMAP_QUERY (Linux 6.11) answers in 1.3 us. Before it /proc/self/maps is read, up to the line that
 * is wanted: 5 ms where there are 4000 mappings.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>

#include "common/sys.h"
#include "common/vma.h"

/* include/uapi/linux/fs.h */
struct procmap_query {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};
#define PROCMAP_QUERY _IOWR('f', 17, struct procmap_query)
#define COVERING_OR_NEXT_VMA 0x10u
#define VMA_READABLE 1u
#define VMA_WRITABLE 2u
#define VMA_EXECUTABLE 4u
#define VMA_SHARED 8u

/* One read(2) of the maps file; the kernel gives whole lines, a page at most. */
#define MAPS_BYTES 4096

static int query(int maps_fd, uintptr_t address, struct up_vma *out)
{
	struct procmap_query q = { .size = sizeof(q), .query_addr = address,
				   .query_flags = COVERING_OR_NEXT_VMA };
	long ret = up_sys3(SYS_ioctl, maps_fd, PROCMAP_QUERY, &q);

	if (up_failed(ret))
		return (int)ret;
	*out = (struct up_vma){
		.start = q.vma_start,
		.end = q.vma_end,
		.offset = q.vma_offset,
		.inode = q.inode,
		.device_major = q.dev_major,
		.device_minor = q.dev_minor,
		.readable = !!(q.vma_flags & VMA_READABLE),
		.writable = !!(q.vma_flags & VMA_WRITABLE),
		.executable = !!(q.vma_flags & VMA_EXECUTABLE),
		.shared = !!(q.vma_flags & VMA_SHARED),
	};
	return 0;
}

/* A number and the character behind it. */
static const char *digits(const char *text, unsigned int base, uint64_t *value)
{
	*value = 0;
	for (;; text++) {
		unsigned int digit;

		if (*text >= '0' && *text <= '9')
			digit = (unsigned int)(*text - '0');
		else if (base == 16 && *text >= 'a' && *text <= 'f')
			digit = (unsigned int)(*text - 'a') + 10;
		else
			break;
		*value = *value * base + digit;
	}
	return *text ? text + 1 : text;
}

static void parse(const char *line, struct up_vma *out)
{
	uint64_t major, minor;

	line = digits(line, 16, &out->start);
	line = digits(line, 16, &out->end);
	out->readable = line[0] == 'r';
	out->writable = line[1] == 'w';
	out->executable = line[2] == 'x';
	out->shared = line[3] == 's';
	line = digits(line + 5, 16, &out->offset);
	line = digits(line, 16, &major);
	line = digits(line, 16, &minor);
	digits(line, 10, &out->inode);
	out->device_major = (uint32_t)major;
	out->device_minor = (uint32_t)minor;
}

static int search(int maps_fd, uintptr_t address, struct up_vma *out)
{
	char text[MAPS_BYTES + 1];
	long kept = 0, n = up_sys3(SYS_lseek, maps_fd, 0, SEEK_SET);

	while (!up_failed(n)) {
		long line = 0;

		n = up_sys3(SYS_read, maps_fd, text + kept, MAPS_BYTES - kept);
		if (up_failed(n))
			break;
		if (!n)
			return -ENOENT;
		kept += n;
		for (long i = 0; i < kept; i++) {
			if (text[i] != '\n')
				continue;
			text[i] = 0;
			parse(text + line, out);
			line = i + 1;
			if (address < out->end)
				return 0;
		}
		if (!line && kept == MAPS_BYTES) /* a longer path than there can be */
			return -EIO;
		kept -= line;
		for (long i = 0; i < kept; i++)
			text[i] = text[line + i];
	}
	return (int)n;
}

int up_vma_from(int maps_fd, uintptr_t address, struct up_vma *out)
{
	int ret;

	if (maps_fd < 0)
		return maps_fd;
	ret = query(maps_fd, address, out);
	/* ENOTTY before 6.11; EINVAL where a filter or an emulation knows no such request */
	return ret == -ENOTTY || ret == -EINVAL ? search(maps_fd, address, out) : ret;
}

int up_vma_at(int maps_fd, uintptr_t address, struct up_vma *out)
{
	int ret = up_vma_from(maps_fd, address, out);

	return !ret && out->start > address ? -ENOENT : ret;
}

int up_vma_of_one_file(const struct up_vma *one, const struct up_vma *other)
{
	return one->inode == other->inode && one->device_major == other->device_major &&
	       one->device_minor == other->device_minor;
}

int up_vma_alike(const struct up_vma *one, const struct up_vma *other)
{
	return up_vma_of_one_file(one, other) && one->shared == other->shared &&
	       one->readable == other->readable && one->writable == other->writable &&
	       one->executable == other->executable;
}
