// SPDX-License-Identifier: Apache-2.0
/*
 * ring.c - the memory that a service and its transport share (common/net.h), as both sides use it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/net.h"

/* A slot's header and bytes lie in pages of their own: a network that registers memory does so by pages. */
#define PAGE 4096u
/* What a ring's file may say of itself at the most: products of these fit 64 bits, and a slot's bytes MPI's count. */
#define MAX_SLOT_BYTES (16u << 20)
#define MAX_SLOTS 4096u

struct queue {
	_Alignas(64) uint64_t head; /* written by who puts */
	_Alignas(64) uint64_t tail; /* written by who takes */
	struct up_net_message message[UP_NET_QUEUE];
};

struct up_net_ring {
	uint32_t magic, version;
	struct up_net_layout layout;
	uint32_t out;
	struct queue queue[2];
};

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* What follows from the three numbers; 0 where no ring has them. */
static int lay_out(struct up_net_layout *l, uint32_t slot_bytes, uint32_t ask, uint32_t serve)
{
	if (!slot_bytes || slot_bytes > MAX_SLOT_BYTES || !ask || ask > MAX_SLOTS || !serve ||
	    serve > MAX_SLOTS)
		return 0;
	memset(l, 0, sizeof(*l));
	l->slot_bytes = slot_bytes;
	l->stride_bytes = (uint32_t)(whole_pages(slot_bytes) + PAGE);
	l->ask_slots = ask;
	l->serve_slots = serve;
	l->data = whole_pages(sizeof(struct up_net_ring));
	l->bytes = l->data + (uint64_t)l->stride_bytes * (ask + serve);
	return 1;
}

int up_net_ring_create(struct up_net_ring **out, uint32_t slot_bytes, uint32_t ask_slots,
		       uint32_t serve_slots, int *fd)
{
	struct up_net_layout l;
	struct up_net_ring *ring;
	int ret;

	if (!lay_out(&l, slot_bytes, ask_slots, serve_slots))
		return -EINVAL;
	*fd = memfd_create("uffdprefetch-net", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (*fd < 0)
		return -errno;
	ring = MAP_FAILED;
	if (!ftruncate(*fd, (off_t)l.bytes) &&
	    !fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		ring = mmap(NULL, l.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	if (ring == MAP_FAILED) {
		ret = -errno;
		close(*fd);
		return ret;
	}
	ring->layout = l;
	ring->version = UP_NET_VERSION;
	__atomic_store_n(&ring->magic, UP_NET_MAGIC, __ATOMIC_RELEASE);
	*out = ring;
	return 0;
}

int up_net_ring_open(struct up_net_ring **out, int fd)
{
	struct up_net_layout said, l;
	struct up_net_ring *ring;
	struct stat st;
	int seals;

	if (fstat(fd, &st))
		return -errno;
	seals = fcntl(fd, F_GET_SEALS);
	if ((uint64_t)st.st_size < sizeof(*ring) || seals < 0 || !(seals & F_SEAL_SHRINK))
		return -EPROTO;
	ring = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (ring == MAP_FAILED)
		return -errno;
	said = ring->layout;
	if (__atomic_load_n(&ring->magic, __ATOMIC_ACQUIRE) != UP_NET_MAGIC ||
	    ring->version != UP_NET_VERSION ||
	    !lay_out(&l, said.slot_bytes, said.ask_slots, said.serve_slots) ||
	    memcmp(&l, &said, sizeof(l)) || l.bytes != (uint64_t)st.st_size) {
		munmap(ring, (size_t)st.st_size);
		return -EPROTO;
	}
	*out = ring;
	return 0;
}

void up_net_ring_close(struct up_net_ring *ring)
{
	if (ring)
		munmap(ring, ring->layout.bytes);
}

void up_net_ring_layout(const struct up_net_ring *ring, struct up_net_layout *out)
{
	*out = ring->layout;
}

struct up_net_header *up_net_slot(struct up_net_ring *ring, uint32_t slot)
{
	/* header and bytes are one run, which begins so that the bytes begin with a page */
	uint64_t at = ring->layout.data + (uint64_t)ring->layout.stride_bytes * slot + PAGE;

	return (struct up_net_header *)((char *)ring + at) - 1;
}

int up_net_put(struct up_net_ring *ring, enum up_net_side from, const struct up_net_message *m)
{
	struct queue *q = &ring->queue[from];
	uint64_t head = q->head;

	if (head - __atomic_load_n(&q->tail, __ATOMIC_ACQUIRE) >= UP_NET_QUEUE) /* full, or lost */
		return -EAGAIN;
	q->message[head % UP_NET_QUEUE] = *m;
	__atomic_store_n(&q->head, head + 1, __ATOMIC_RELEASE);
	return 0;
}

int up_net_take(struct up_net_ring *ring, enum up_net_side to, struct up_net_message *out)
{
	struct queue *q = &ring->queue[!to];
	uint64_t tail = q->tail, waiting = __atomic_load_n(&q->head, __ATOMIC_ACQUIRE) - tail;

	/* More than fit: the other side has lost its memory, and says nothing that could be heard. */
	if (!waiting || waiting > UP_NET_QUEUE)
		return 0;
	*out = q->message[tail % UP_NET_QUEUE];
	__atomic_store_n(&q->tail, tail + 1, __ATOMIC_RELEASE);
	return 1;
}

void up_net_note_out(struct up_net_ring *ring, int32_t change)
{
	__atomic_fetch_add(&ring->out, (uint32_t)change, __ATOMIC_RELAXED);
}

uint32_t up_net_out(const struct up_net_ring *ring)
{
	return __atomic_load_n(&ring->out, __ATOMIC_RELAXED);
}
