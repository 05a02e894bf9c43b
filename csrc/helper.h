/* SPDX-License-Identifier: Apache-2.0 */
/*
 * helper.h - the service's C side, as Python sees it (uffdprefetch/uffd.py through cffi).
 *
 * Every function returns >= 0 or -errno; uffd.py turns that into OSError in one place. What stands
 * between the two marks is read by tools/cffi_build.py as it is: no preprocessor there.
 */
#ifndef UP_HELPER_H
#define UP_HELPER_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

/* cdef begin */

/* --- rings (uffd_helper.c) --- */
struct up_ring;

struct up_ring_counts {
	uint64_t head, tail, dropped, faults, laid, taken, rearmed, failed;
	uint32_t overlays, state;
};

/* A sealed memfd that holds one ring, mapped here: *fd is the descriptor to pass on. */
int up_ring_create(struct up_ring **out, int *fd);
void up_ring_destroy(struct up_ring *ring);
/* Copies at most max events of 32 bytes each into out; returns how many. */
int up_ring_drain(struct up_ring *ring, void *out, int max);
void up_ring_counts(const struct up_ring *ring, struct up_ring_counts *out);

/* --- checkpoint memfds (uffd_helper.c) --- */
/* *rw is for the service alone; *ro goes to the jobs, which map it MAP_PRIVATE. */
int up_checkpoint_memfd(uint64_t size_bytes, int *rw, int *ro);

/* --- --resolve service (uffd_helper.c) --- */
struct up_resolver;
int up_resolver_create(struct up_resolver **out, int event_fd);
void up_resolver_destroy(struct up_resolver *resolver);
/* Answer this process's faults from now on. The resolver owns uffd. Returns a slot. */
int up_resolver_add(struct up_resolver *resolver, int uffd, struct up_ring *ring);
void up_resolver_remove(struct up_resolver *resolver, int slot);
int up_resolver_map(struct up_resolver *resolver, int slot, uint32_t region, uint64_t address,
		    uint64_t length, uint64_t offset);
void up_resolver_unmap(struct up_resolver *resolver, int slot, uint32_t region);

/* --- BPF ring buffers (bpf_ring.c) --- */
struct up_bpf_ring;
/* The ring behind a map's descriptor; size: of its data, a power of two. */
int up_bpf_ring_open(struct up_bpf_ring **out, int fd, uint64_t size);
void up_bpf_ring_close(struct up_bpf_ring *ring);
/* Copies at most max records of record_bytes each into out, oldest first; returns how many. */
int up_bpf_ring_drain(struct up_bpf_ring *ring, void *out, uint32_t record_bytes, int max);

/* --- residency and page tables (residency.c) --- */
enum up_residency_sensor { UP_CACHESTAT = 1, UP_MINCORE = 2 };

/* Bytes of [offset, +length) that lie in the page cache; *sensor says who was asked. -EPERM: the
 * caller neither owns nor may write the file, and the kernel tells only those. */
int64_t up_resident_bytes(int fd, uint64_t offset, uint64_t length, int *sensor);

/* Page-table entries present in [address, +length) of the process behind pagemap_fd
 * (/proc/PID/pagemap), as runs: run[2i] = address, run[2i+1] = length, both in bytes. Returns the
 * number of runs; *next is where to go on (address + length when done). */
int up_touched_runs(int pagemap_fd, uint64_t address, uint64_t length, uint64_t *run, int max_runs,
		    uint64_t *next);

/* --- warmers (warm.c) --- */
enum up_warm_method {
	UP_WARM_PROBE = 0,     /* find out which of the others works on this file */
	UP_WARM_READAHEAD = 1, /* readahead(2) in calls of chunk_bytes, then wait for each */
	UP_WARM_PREAD = 2,     /* FADV_RANDOM on our description and pread of chunk_bytes */
};

struct up_warm_job {
	uint64_t id, offset, length;
	int fd, checkpoint_fd; /* checkpoint_fd -1: no pages to copy */
	uint32_t method, chunk_bytes;
	uint32_t pages, reserved;
	uint64_t page[16]; /* file page numbers to copy into the checkpoint memfd */
};

struct up_warm_result {
	uint64_t id;
	uint64_t submit_ns, start_ns, done_ns; /* CLOCK_MONOTONIC */
	uint64_t resident_bytes;               /* already there before */
	uint64_t bytes;                        /* asked for and there after */
	uint64_t copied;                       /* bit i: page[i] is in the memfd */
	uint32_t method, chunk_bytes;          /* as used; what a probe found */
	int32_t error, sensor;
};

struct up_workers;
/* threads workers; each finished job adds 1 to event_fd. */
int up_workers_create(struct up_workers **out, int threads, int event_fd);
/* Waits for jobs under way; those not begun are dropped. */
void up_workers_destroy(struct up_workers *workers);
int up_workers_submit(struct up_workers *workers, const struct up_warm_job *job);
int up_workers_reap(struct up_workers *workers, struct up_warm_result *out, int max);
/* CPU time of all workers, ns: user + system, the copy of the reads included. */
int64_t up_workers_cpu_ns(struct up_workers *workers);

/* cdef end */

#endif
