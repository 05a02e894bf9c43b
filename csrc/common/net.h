/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.h - what a service and its transport (uffdprefetch/cluster/transport.py) share: a memfd with two
 * queues of messages, and slots for the bytes that go from node to node.
 *
 * The service never calls MPI, and the transport owns nothing of the pool: whatever becomes of one of
 * them, the other finds a queue that nobody empties any more. The memfd belongs to one transport: it is
 * neither punched, resized nor mapped anew while that lives, since a network may write into a slot long
 * after nobody waits for it.
 *
 * What stands between the two marks is read by tools/cffi_build.py as it is: no preprocessor there.
 */
#ifndef UP_NET_H
#define UP_NET_H

#include <stdint.h>

/* cdef begin */

enum up_net_constants {
	UP_NET_MAGIC = 0x4e705531,
	UP_NET_VERSION = 5,
	UP_NET_BLOCKS = 64,   /* of one question */
	UP_NET_QUEUE = 1024,  /* messages in one direction */
	UP_NET_NODES = 1024,
	UP_NET_NONE = 0xffff, /* no node, no slot */
};

enum up_net_kind {
	/* of the service */
	UP_NET_ASK = 1,       /* `slot`: chunks of a file, from a node; its answer comes into the slot */
	UP_NET_HURRY = 2,     /* what `slot` has asked for ahead is waited for now */
	UP_NET_SEND = 3,      /* the answer to the node's request `theirs`, which lies in `slot` */
	UP_NET_REFUSE = 4,    /* the answer is `status` alone */
	UP_NET_READING = 5,   /* it will come, when storage has brought it */
	UP_NET_QUESTION = 6,  /* who has the blocks first + i, of which bit i of `mask` is set */
	UP_NET_KEPT = 7,      /* this node keeps those blocks */
	UP_NET_DROPPED = 8,   /* it does so no longer */
	/* of the transport */
	UP_NET_CAME = 65,     /* an answer has come into `slot` */
	UP_NET_WORD = 66,     /* whom `slot` has asked reads it from storage now */
	UP_NET_SENT = 67,     /* `slot`, of those for serving, is free again */
	UP_NET_REQUEST = 68,  /* a node asks, by its slot `theirs` */
	UP_NET_HURRIED = 69,  /* it waits for that now */
	UP_NET_HINTS = 70,    /* the answer to a question: word[i] of the block first + i */
	UP_NET_NODE = 71,     /* a node is there (`status` 1), or is not (0); of this one, `cpu_short` alone */
};

enum up_net_class { UP_NET_DEMAND = 0, UP_NET_AHEAD = 1 };

enum up_net_status {
	UP_NET_OK = 0,
	UP_NET_ABSENT = 1, /* it is not there, and will not be */
	UP_NET_BUSY = 2,
	UP_NET_LATE = 3,   /* nobody would have had any use for it any more */
	UP_NET_FAILED = 4, /* its storage fails, or the network does */
};

/* Of a block: the number of the node that keeps it, or, with COPY, of one that has asked for it before; with PART, the
 * keeper wanted some chunks of it, so that who is to read all of it asks again, and keeps it; or one of the others. */
enum up_net_word {
	UP_NET_COPY = 0x8000,
	UP_NET_PART = 0x4000,
	UP_NET_READ_PART = 0xfffa, /* as READ: home knows of nothing */
	UP_NET_KEEP_PART = 0xfffc, /* as KEEP: home knows of some chunks */
	UP_NET_READ = 0xfffd,    /* read it */
	UP_NET_KEEP = 0xfffe,    /* read it, and keep it: others will ask for it */
	UP_NET_UNKNOWN = 0xffff,
};

/* Whether a node may keep one more block: as much of what it has been told to keep as has come leaves room for it; or
 * all of that does. */
enum up_net_room { UP_NET_ROOM_NONE = 0, UP_NET_ROOM_STILL = 1, UP_NET_ROOM = 2 };

struct up_net_message {
	uint32_t kind, node, slot, theirs;
	uint64_t file[2];      /* cluster/identity.py */
	uint64_t first, count; /* chunks; of what is about blocks, blocks */
	uint64_t mask;
	uint32_t class_, status, useful_ms, serial;
	uint32_t missing_at;   /* QUESTION: whom it was asked in vain, or UP_NET_NONE */
	uint32_t room;         /* QUESTION: up_net_room */
	uint32_t copy;         /* ASK, REQUEST: the node does not keep it, and need not read what it has not got */
	uint32_t length;       /* SEND: bytes after the header */
	uint32_t together;     /* QUESTION: whether this node's readers come to what others keep */
	uint32_t due_ms;       /* ASK, REQUEST: somebody comes there after so long; 0: at once, or it is not known */
	uint32_t cpu_short;    /* NODE: its transport waits for processors longer than it runs on them */
	uint32_t part;         /* QUESTION: it wants some chunks of the block, and perhaps no more */
	uint16_t word[64];
};

/* Before the bytes in a slot, and sent with them. */
struct up_net_header {
	uint64_t file[2], first;
	uint32_t count, length; /* chunks; bytes that follow */
	uint32_t status, checksum, serial, reserved;
	uint64_t reserved_too[2];
};

struct up_net_layout {
	uint64_t bytes;                    /* of all of it */
	uint32_t slot_bytes, stride_bytes; /* what a slot holds; from one's header to the next one's */
	uint32_t ask_slots, serve_slots;   /* in this order */
	uint64_t data;                     /* where the first begins */
};

struct up_net_ring;

/* A memfd that holds one, mapped here; *fd is the descriptor to pass on. 0 or -errno. */
int up_net_ring_create(struct up_net_ring **out, uint32_t slot_bytes, uint32_t ask_slots,
		       uint32_t serve_slots, int *fd);
/* The same that another process has made: -EPROTO where it is none. */
int up_net_ring_open(struct up_net_ring **out, int fd);
void up_net_ring_close(struct up_net_ring *ring);
void up_net_ring_layout(const struct up_net_ring *ring, struct up_net_layout *out);
/* A slot's header, and after it its bytes. */
struct up_net_header *up_net_slot(struct up_net_ring *ring, uint32_t slot);

enum up_net_side { UP_NET_OF_SERVICE = 0, UP_NET_OF_TRANSPORT = 1 };

/* To the other side. One thread of each side at a time. 0, or -EAGAIN: its queue is full. */
int up_net_put(struct up_net_ring *ring, enum up_net_side from, const struct up_net_message *m);
/* From the other side: 1, or 0 where there is nothing. */
int up_net_take(struct up_net_ring *ring, enum up_net_side to, struct up_net_message *out);
/* Requests of the service's that have no answer yet: for who looks from outside. */
void up_net_note_out(struct up_net_ring *ring, int32_t change);
uint32_t up_net_out(const struct up_net_ring *ring);

/* CRC-32C (RFC 3720, appendix B.4). */
uint32_t up_net_checksum(const void *bytes, uint64_t length);

/* cdef end */

#endif
