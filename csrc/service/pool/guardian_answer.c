// SPDX-License-Identifier: Apache-2.0
/*
 * guardian_answer.c - the guardian answers a fault: the bytes go from the file into the pool's memory, by
 * whole pages, and are then continued. The service may do so at the same time: both write the same bytes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "service/pool/guardian_inside.h"

/* As in csrc/job/standin.c: what is read for one touch, and how much of that stays once the service is
 * dead. */
#define FILL_BYTES (64u << 10)
#define FILLS_KEPT 256
#define TRIES 1000

static struct {
	int file;
	uint64_t offset, length;
} filled[FILLS_KEPT];
static uint32_t fills;

struct place {
	struct held_file *file;
	uint64_t start, offset, length; /* of the pages that lie together there */
};

/* By the kernel: they may have been moved. Before Linux 6.11 it does not tell of an address space whose
 * process has ended; then as it was mapped. */
static int find_place(uint32_t client, uint64_t address, struct place *at)
{
	struct up_vma v;

	if (g.client[client].maps_fd >= 0 && !up_vma_at(g.client[client].maps_fd, address, &v))
		for (int i = 0; i < POOL_FILES; i++)
			if (g.file[i].memfd >= 0 && up_vma_of_one_file(&g.file[i].memory, &v)) {
				*at = (struct place){ &g.file[i], v.start, v.offset, v.end - v.start };
				return 1;
			}
	for (size_t i = 0; i < g.regions; i++) {
		const struct held_region *r = &g.region[i];

		if (r->client != client || address - r->address >= r->length || g.file[r->file].memfd < 0)
			continue;
		*at = (struct place){ &g.file[r->file], r->address, r->offset, r->length };
		return 1;
	}
	return 0;
}

/* Not while the service lives: its books must be true. */
static void make_room(const struct held_file *f, uint64_t offset, uint64_t length)
{
	uint32_t oldest = fills % FILLS_KEPT;
	int file = filled[oldest].file;

	if (!g.alone)
		return;
	if (fills >= FILLS_KEPT && g.file[file].memfd >= 0)
		fallocate(g.file[file].memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			  (off_t)filled[oldest].offset, (off_t)filled[oldest].length);
	filled[oldest].file = (int)(f - g.file);
	filled[oldest].offset = offset;
	filled[oldest].length = length;
	fills++;
}

static int continue_page(int uffd, uint64_t address)
{
	struct uffdio_continue cont;

	for (int i = 0; i < TRIES; i++) {
		cont = (struct uffdio_continue){ .range = { address, g.page_bytes } };
		if (!ioctl(uffd, UFFDIO_CONTINUE, &cont))
			return 0;
		if (errno != EAGAIN) /* it changes its address space just now */
			break;
		sched_yield();
	}
	return -errno;
}

static void answer(uint32_t client, uint64_t address)
{
	int uffd = g.client[client].uffd;
	uint64_t first, end, limit;
	struct place at;
	int ret;

	if (!find_place(client, address, &at)) {
		pool_wake(uffd, address, g.page_bytes);
		return;
	}
	limit = at.offset + at.length < at.file->size ? at.offset + at.length : at.file->size;
	first = (at.offset + (address - at.start)) & ~(uint64_t)(FILL_BYTES - 1);
	end = first + FILL_BYTES < limit ? first + FILL_BYTES : limit;
	if (first < at.offset)
		first = at.offset;
	make_room(at.file, first, end - first);
	__atomic_fetch_add(&g.shared->stand_ins, 1, __ATOMIC_SEQ_CST);
	ret = at.file->fd < 0 ? -EBADF : up_source_bring_by_mapping(at.file->memfd, at.file->fd, first, end - first);
	if (!ret) /* the page that is waited for first */
		ret = continue_page(uffd, address);
	else if (!pool_poison(uffd, address, g.page_bytes))
		end = first;
	if (ret)
		pool_wake(uffd, address, g.page_bytes);
	for (uint64_t next = first; !ret && next < end; next += g.page_bytes)
		continue_page(uffd, at.start + (next - at.offset));
	__atomic_fetch_add(&g.shared->stand_in_bytes, end - first, __ATOMIC_RELAXED);
	__atomic_fetch_add(&g.shared->stand_ins, 1, __ATOMIC_SEQ_CST);
}

void guardian_on_faults(uint32_t client)
{
	struct uffd_msg m[16];
	ssize_t n = read(g.client[client].uffd, m, sizeof(m));

	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		for (size_t j = 0; m[i].event == UFFD_EVENT_REMAP && j < g.regions; j++)
			if (g.region[j].client == client && g.region[j].address == m[i].arg.remap.from)
				g.region[j].address = m[i].arg.remap.to;
	for (ssize_t i = 0; i < n / (ssize_t)sizeof(m[0]); i++)
		if (m[i].event == UFFD_EVENT_PAGEFAULT)
			answer(client, m[i].arg.pagefault.address & ~(g.page_bytes - 1));
}
