/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bpf_ring.c - takes the records of a BPF ring buffer in batches (kernel/bpf/ringbuf.c).
 *
 * A library calls back for each record; with a hundred thousand a second that alone is a core of
 * Python. Here a batch is one copy, and Python sees an array.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/helper.h"

#define HEADER_BYTES 8
#define BUSY (1u << 31)
#define DISCARD (1u << 30)

struct up_bpf_ring {
	uint64_t size;
	uint64_t *consumer;       /* ours, the kernel reads it */
	const uint64_t *producer; /* the kernel's */
	const char *data;         /* mapped twice, one behind the other: records do not wrap */
	size_t page;
};

int up_bpf_ring_open(struct up_bpf_ring **out, int fd, uint64_t size)
{
	struct up_bpf_ring *ring = calloc(1, sizeof(*ring));
	void *at;

	if (!ring)
		return -ENOMEM;
	ring->page = sysconf(_SC_PAGESIZE);
	ring->size = size;
	at = mmap(NULL, ring->page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		goto fail;
	ring->consumer = at;
	at = mmap(NULL, ring->page + 2 * size, PROT_READ, MAP_SHARED, fd, ring->page);
	if (at == MAP_FAILED) {
		munmap(ring->consumer, ring->page);
		goto fail;
	}
	ring->producer = at;
	ring->data = (const char *)at + ring->page;
	*out = ring;
	return 0;
fail:
	free(ring);
	return -errno;
}

void up_bpf_ring_close(struct up_bpf_ring *ring)
{
	if (!ring)
		return;
	munmap(ring->consumer, ring->page);
	munmap((void *)ring->producer, ring->page + 2 * ring->size);
	free(ring);
}

int up_bpf_ring_drain(struct up_bpf_ring *ring, void *out, uint32_t record_bytes, int max)
{
	uint64_t at = __atomic_load_n(ring->consumer, __ATOMIC_RELAXED);
	uint64_t end = __atomic_load_n(ring->producer, __ATOMIC_ACQUIRE);
	int n = 0;

	while (at < end && n < max) {
		const char *record = ring->data + (at & (ring->size - 1));
		uint32_t head = __atomic_load_n((const uint32_t *)record, __ATOMIC_ACQUIRE);
		uint32_t length = head & ~(BUSY | DISCARD);

		if (head & BUSY) /* being written, and all behind it waits for it */
			break;
		if (!(head & DISCARD) && length == record_bytes)
			memcpy((char *)out + (size_t)n++ * record_bytes, record + HEADER_BYTES, length);
		at += (HEADER_BYTES + (uint64_t)length + 7) & ~(uint64_t)7;
	}
	__atomic_store_n(ring->consumer, at, __ATOMIC_RELEASE);
	return n;
}
