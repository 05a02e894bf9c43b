// SPDX-License-Identifier: Apache-2.0
/*
 * pool_clients.c - the processes that map the pool: who they are, what they map, and which calls are
 * under way on their userfaultfds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/pool/pool.h"

/* ------------------------------------------------------------------ calls that are under way */

struct pool_region *pool_region_at(struct pool_client *c, uint64_t address)
{
	for (uint32_t i = c->regions; i-- > 0;)
		if (address - c->region[i].address < c->region[i].length)
			return &c->region[i];
	return NULL;
}

struct pool_region *pool_region_by_id(struct pool_client *c, uint32_t id)
{
	for (uint32_t i = 0; i < c->regions; i++)
		if (c->region[i].id == id)
			return &c->region[i];
	return NULL;
}

void pool_use(struct pool_client *c)
{
	c->users++;
}

void pool_leave_off(struct up_pool *p, struct pool_client *c)
{
	if (!--c->users && c->leaving)
		up_cond_broadcast(&p->idle);
}

uint32_t pool_begin_mapping(struct pool_client *c)
{
	uint32_t turn = c->turn & 1;

	c->mapping[turn]++;
	return turn;
}

void pool_end_mapping(struct up_pool *p, struct pool_client *c, uint32_t turn)
{
	if (!--c->mapping[turn] && turn != (c->turn & 1))
		up_cond_broadcast(&p->idle);
}

void pool_await_mappings(struct up_pool *p, struct pool_client *c)
{
	uint32_t turn = c->turn++ & 1;

	while (c->mapping[turn])
		pool_wait(p, &p->idle);
}

/* ------------------------------------------------------------------ they come and go */

/* It runs another program now (exec) and has said so before the old connection's end was seen. What it
 * had may be another process's still, that shares it: UFFDIO_CONTINUE is for that, but MADV_COLLAPSE
 * acts on what the process has now. */
static void end_former(struct up_pool *p, int pid)
{
	for (int i = 0; i < POOL_CLIENTS; i++) {
		struct pool_client *c = &p->client[i];

		if (c->uffd < 0 || c->pid != pid || c->former)
			continue;
		__atomic_store_n(&c->former, 1, __ATOMIC_RELAXED);
		pool_await_mappings(p, c);
	}
}

int up_pool_join(struct up_pool *p, int uffd, int pid, struct up_ring *ring)
{
	int slot = -ENOSPC, flags = fcntl(uffd, F_GETFL), maps_fd;
	char path[32];

	/* the kernel polls no userfaultfd that blocks */
	if (flags < 0 || fcntl(uffd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps_fd = open(path, O_RDONLY | O_CLOEXEC);
	pthread_mutex_lock(&p->lock);
	if (pid > 0)
		end_former(p, pid);
	for (int i = 0; i < POOL_CLIENTS && slot < 0; i++)
		if (p->client[i].uffd < 0)
			slot = i;
	if (slot >= 0) {
		struct pool_client *c = &p->client[slot];
		struct epoll_event e = { .events = EPOLLIN };
		uint32_t generation = c->generation + 1;

		memset(c, 0, sizeof(*c));
		*c = (struct pool_client){
			.uffd = uffd,
			.generation = generation,
			.ring = ring,
			.pid = pid,
			.maps_fd = maps_fd,
			.pidfd = p->options.huge ? (int)syscall(SYS_pidfd_open, pid, 0) : -1,
		};
		ring->beat_ns = __atomic_load_n(&p->alive_ns, __ATOMIC_RELAXED);
		e.data.u64 = (uint64_t)generation << 32 | (uint32_t)slot;
		if (epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, uffd, &e)) {
			slot = -errno;
			c->uffd = -1;
			if (c->pidfd >= 0)
				close(c->pidfd);
		} else {
			guardian_joined(p, (uint32_t)slot);
		}
	}
	pool_unlock(p);
	if (slot < 0 && maps_fd >= 0)
		close(maps_fd);
	return slot;
}

/* With the lock. */
void pool_count_stand_ins(struct up_pool *p, struct pool_client *c)
{
	uint64_t bytes;

	if (!c->ring)
		return;
	bytes = __atomic_load_n(&c->ring->stand_in_bytes, __ATOMIC_RELAXED);
	p->count.stand_in_bytes += bytes - c->stand_in_bytes;
	c->stand_in_bytes = bytes;
}

void up_pool_leave(struct up_pool *p, int client)
{
	struct pool_client *c = &p->client[client];
	int uffd, pidfd, maps_fd;

	pthread_mutex_lock(&p->lock);
	c->leaving = 1;
	epoll_ctl(p->epoll_fd, EPOLL_CTL_DEL, c->uffd, NULL);
	for (struct pool_waiter **at = &p->waiting; *at;)
		if ((*at)->client == (uint32_t)client)
			pool_drop_waiter(p, at);
		else
			at = &(*at)->next;
	while (c->users)
		pool_wait(p, &p->idle);
	for (uint32_t i = 0; i < c->regions; i++)
		p->file[c->region[i].file].regions--;
	/* also one that we lost sight of before: it may have stood in for us to its end */
	if (!c->ring || __atomic_load_n(&c->ring->stand_ins, __ATOMIC_SEQ_CST) != c->stand_ins)
		pool_seek_strays(p);
	pool_count_stand_ins(p, c);
	guardian_left(p, (uint32_t)client);
	uffd = c->uffd;
	pidfd = c->pidfd;
	maps_fd = c->maps_fd;
	free(c->region);
	c->region = NULL;
	c->regions = c->room = 0;
	c->uffd = -1;
	c->ring = NULL;
	pool_unlock(p);
	close(uffd);
	if (pidfd >= 0)
		close(pidfd);
	if (maps_fd >= 0)
		close(maps_fd);
}

int pool_is_stood_in_for(const struct up_pool *p)
{
	if (p->rescuing)
		return 1;
	for (uint32_t i = 0; i < POOL_CLIENTS; i++) {
		const struct pool_client *c = &p->client[i];

		if (c->uffd >= 0 &&
		    (!c->ring || __atomic_load_n(&c->ring->stand_ins, __ATOMIC_SEQ_CST) % 2))
			return 1;
	}
	return guardian_stands_in(p);
}

int up_pool_is_gone(struct up_pool *p, int client)
{
	return pool_is_gone(p->client[client].uffd, p->page_bytes);
}

static int is_of_pool(const struct up_pool *p, const struct up_vma *v)
{
	for (int i = 0; i < POOL_FILES; i++)
		if (p->file[i].used && up_vma_of_one_file(&p->file[i].memory, v))
			return 1;
	return 0;
}

int up_pool_has_nothing(struct up_pool *p, int client)
{
	struct up_vma v = { 0 };
	int ret, found = 0;

	pthread_mutex_lock(&p->lock);
	while (!found && !(ret = up_vma_from(p->client[client].maps_fd, v.end, &v)))
		found = is_of_pool(p, &v);
	pool_unlock(p);
	return !found && ret == -ENOENT;
}

void up_pool_orphan(struct up_pool *p, int client)
{
	struct pool_client *c = &p->client[client];

	pthread_mutex_lock(&p->lock);
	pool_count_stand_ins(p, c);
	c->ring = NULL;
	/* Whose touch the agent has read, standing in for us, and not answered asks again. */
	for (uint32_t i = 0; i < c->regions; i++)
		pool_wake(c->uffd, c->region[i].address, c->region[i].length);
	pool_unlock(p);
}

/* Nothing of the region is mapped or waited for any more when it returns. */
static void forget_region(struct up_pool *p, uint32_t client, uint32_t number)
{
	struct pool_client *c = &p->client[client];
	struct pool_region r = c->region[number];

	memmove(&c->region[number], &c->region[number + 1], (--c->regions - number) * sizeof(r));
	p->file[r.file].regions--;
	guardian_unmapped(p, client, r.id);
	for (struct pool_waiter **at = &p->waiting; *at;)
		if ((*at)->client == client && (*at)->address - r.address < r.length)
			pool_drop_waiter(p, at);
		else
			at = &(*at)->next;
	pool_await_mappings(p, c);
}

/* NULL: no memory. With the lock. */
static struct pool_region *new_region(struct pool_client *c)
{
	if (c->regions == c->room) {
		uint32_t room = c->room ? c->room * 2 : 4;
		struct pool_region *more = realloc(c->region, room * sizeof(*more));

		if (!more)
			return NULL;
		c->region = more;
		c->room = room;
	}
	return &c->region[c->regions++];
}

static void set_region(struct up_pool *p, struct pool_region *r, uint32_t id, int file,
		       uint64_t address, uint64_t length, uint64_t offset)
{
	*r = (struct pool_region){
		.id = id, .file = file, .address = address, .length = length, .offset = offset,
	};
	p->file[file].regions++;
}

int up_pool_map(struct up_pool *p, int client, uint32_t region, int file, uint64_t address,
		uint64_t length, uint64_t offset)
{
	struct pool_client *c = &p->client[client];
	struct pool_region *r;
	uint64_t end;
	int ret = 0;

	if (__builtin_add_overflow(offset, length, &end) ||
	    end > p->file[file].chunks * pool_chunk_bytes(p))
		return -EINVAL; /* the books of the file end before it */
	pthread_mutex_lock(&p->lock);
	/* What lay there before is gone, also when we have not been told yet; it must not take the
	 * waiters of this one with it when we are. */
	for (uint32_t i = c->regions; i-- > 0;)
		if (c->region[i].address < address + length &&
		    address < c->region[i].address + c->region[i].length)
			forget_region(p, (uint32_t)client, i);
	r = new_region(c);
	if (r) {
		set_region(p, r, region, file, address, length, offset);
		guardian_mapped(p, (uint32_t)client, r);
	} else {
		ret = -ENOMEM;
	}
	pool_unlock(p);
	return ret;
}

static int overlap(const struct pool_region *r, uint64_t address, uint64_t length)
{
	return r->address < address + length && address < r->address + r->length;
}

void pool_move_region(struct up_pool *p, uint32_t client, uint64_t from, uint64_t to, uint64_t length)
{
	struct pool_client *c = &p->client[client];

	pthread_mutex_lock(&p->lock);
	c->moved = c->maps_fd >= 0;
	for (uint32_t i = 0; i < c->regions; i++) {
		struct pool_region *r = &c->region[i];

		if (!c->moved && r->address == from)
			r->address = to; /* the best guess */
		else if (c->moved && (overlap(r, from, length) || overlap(r, to, length)))
			r->length = 0; /* found anew where it is touched */
	}
	pool_unlock(p);
}

struct pool_region *pool_find_region(struct up_pool *p, struct pool_client *c, uint64_t address)
{
	struct pool_region *found = NULL;
	uint64_t limit, length;
	uint32_t id = 0;
	struct up_vma v;
	int file = 0;

	if (up_vma_at(c->maps_fd, address, &v))
		return NULL;
	while (file < POOL_FILES &&
	       !(p->file[file].used && up_vma_of_one_file(&p->file[file].memory, &v)))
		file++;
	if (file == POOL_FILES)
		return NULL;
	limit = p->file[file].chunks * pool_chunk_bytes(p);
	length = v.offset < limit ? limit - v.offset : 0;
	if (length > v.end - v.start)
		length = v.end - v.start;
	if (address - v.start >= length)
		return NULL; /* behind the file's end */
	for (uint32_t i = 0; i < c->regions; i++) {
		struct pool_region *r = &c->region[i];

		if (r->file == file)
			id = r->id; /* it is forgotten with the mapping that it was a part of */
		if (r->file == file && r->length && r->address == v.start && r->offset == v.offset) {
			r->length = length;
			return r;
		}
	}
	for (uint32_t i = 0; i < c->regions; i++) {
		struct pool_region *r = &c->region[i];

		if (overlap(r, v.start, v.end - v.start))
			r->length = 0;
		if (!r->length)
			found = r;
	}
	if (found)
		p->file[found->file].regions--;
	else
		found = new_region(c);
	if (found)
		set_region(p, found, id, file, v.start, length, v.offset);
	return found;
}

void up_pool_unmap(struct up_pool *p, int client, uint32_t region)
{
	struct pool_client *c = &p->client[client];

	pthread_mutex_lock(&p->lock);
	for (uint32_t i = c->regions; i-- > 0;)
		if (c->region[i].id == region)
			forget_region(p, (uint32_t)client, i);
	pool_unlock(p);
}
