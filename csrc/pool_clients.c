// SPDX-License-Identifier: Apache-2.0
/*
 * pool_clients.c - the processes that map the pool: who they are, what they map, and which calls are
 * under way on their userfaultfds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

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
		pthread_cond_broadcast(&p->idle);
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
		pthread_cond_broadcast(&p->idle);
}

void pool_await_mappings(struct up_pool *p, struct pool_client *c)
{
	uint32_t turn = c->turn++ & 1;

	while (c->mapping[turn])
		pool_wait(p, &p->idle);
}

/* ------------------------------------------------------------------ they come and go */

/* It runs another program now (exec) and has said so before the old connection's end was seen.
 * UFFDIO_CONTINUE would fail for what it had, but MADV_COLLAPSE acts on whatever is there. */
static void end_former(struct up_pool *p, int pid)
{
	for (int i = 0; i < POOL_CLIENTS; i++) {
		struct pool_client *c = &p->client[i];

		if (c->uffd < 0 || c->pid != pid || c->leaving)
			continue;
		c->leaving = 1;
		pool_await_mappings(p, c);
	}
}

int up_pool_join(struct up_pool *p, int uffd, int pid, struct up_ring *ring)
{
	int slot = -ENOSPC, flags = fcntl(uffd, F_GETFL);

	/* the kernel polls no userfaultfd that blocks */
	if (flags < 0 || fcntl(uffd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
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
			.pidfd = p->options.huge ? (int)syscall(SYS_pidfd_open, pid, 0) : -1,
		};
		ring->beat_ns = __atomic_load_n(&p->alive_ns, __ATOMIC_RELAXED);
		e.data.u64 = (uint64_t)generation << 32 | (uint32_t)slot;
		if (epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, uffd, &e)) {
			slot = -errno;
			c->uffd = -1;
			if (c->pidfd >= 0)
				close(c->pidfd);
		}
	}
	pool_unlock(p);
	return slot;
}

void up_pool_leave(struct up_pool *p, int client)
{
	struct pool_client *c = &p->client[client];
	int uffd, pidfd;

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
	uffd = c->uffd;
	pidfd = c->pidfd;
	free(c->region);
	c->region = NULL;
	c->regions = c->room = 0;
	c->uffd = -1;
	c->ring = NULL;
	pool_unlock(p);
	close(uffd);
	if (pidfd >= 0)
		close(pidfd);
}

void up_pool_orphan(struct up_pool *p, int client)
{
	pthread_mutex_lock(&p->lock);
	p->client[client].ring = NULL;
	pool_unlock(p);
}

/* Nothing of the region is mapped or waited for any more when it returns. */
static void forget_region(struct up_pool *p, uint32_t client, uint32_t number)
{
	struct pool_client *c = &p->client[client];
	struct pool_region r = c->region[number];

	memmove(&c->region[number], &c->region[number + 1], (--c->regions - number) * sizeof(r));
	p->file[r.file].regions--;
	for (struct pool_waiter **at = &p->waiting; *at;)
		if ((*at)->client == client && (*at)->address - r.address < r.length)
			pool_drop_waiter(p, at);
		else
			at = &(*at)->next;
	pool_await_mappings(p, c);
}

int up_pool_map(struct up_pool *p, int client, uint32_t region, int file, uint64_t address,
		uint64_t length, uint64_t offset)
{
	struct pool_client *c = &p->client[client];
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
	if (c->regions == c->room) {
		uint32_t room = c->room ? c->room * 2 : 4;
		struct pool_region *more = realloc(c->region, room * sizeof(*more));

		if (more) {
			c->region = more;
			c->room = room;
		} else {
			ret = -ENOMEM;
		}
	}
	if (!ret) {
		c->region[c->regions++] = (struct pool_region){
			.id = region, .file = file, .address = address, .length = length,
			.offset = offset, .run = 1,
			.miss_next = UINT64_MAX, .miss_run = 1,
		};
		p->file[file].regions++;
	}
	pool_unlock(p);
	return ret;
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
