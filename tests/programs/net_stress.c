// SPDX-License-Identifier: Apache-2.0
/*
 * net_stress DIRECTORY [SEED] - pools that fetch from each other (csrc/service/net/) by a network that
 * loses, delays and spoils what it carries, answers questions with whatever comes to mind, and goes away
 * and comes back, while files are shared and not, and dropped, threads touch their mappings, and numbers of
 * files become other files'. What leaves memory goes to disks that change what lies there, and their size. `make asan tsan`
 * builds it with sanitizers.
 *
 * Everything that is found wrong is one line on stderr and status 1.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/eventfd.h>
#include <time.h>

#include "pool_client.h"
#include "service/pool/pool.h"

#define NODES 3
#define CHUNK (16u << 10)
#define CHUNKS 300u
#define BYTES ((uint64_t)CHUNK * CHUNKS - 1000)
#define BLOCK_CHUNKS 8u
#define SLOTS 8u
#define SLOT_BYTES (4 * CHUNK)
/* Of each node's pool; of it, for what others may ask for. */
#define BUDGET_BYTES (BYTES * 2 / 3)
#define KEEP_BYTES (BYTES / 2)
#define DISK_BYTES (2 * BYTES)
#define JOBS 300

/* Small files, of which each node has one at a time, under the number that the last one had. */
#define SHARDS 3u
#define SHARD_CHUNKS 16u
#define SHARD_BYTES ((uint64_t)CHUNK * SHARD_CHUNKS)

static const uint64_t id[2] = { 0x1111, 0x2222 };

struct node {
	uint64_t kept; /* jobs after which the pool kept something for others */
	struct up_pool *pool;
	struct up_net *net;
	struct up_net_ring *ring; /* the transport's side */
	int wake, to, from, file, memfd, uffd, slot, spill_fd; /* spill_fd: of its disk tier, or -1 */
	struct up_ring *events;
	char *map;
	uint64_t state;
	pthread_mutex_t lock; /* of net and ring: the carrier, and who replaces them */
};

static const char *directory;
static struct node node[NODES];
static struct up_net_stamp stamp; /* of the file that all of them read */
static int stop;
static int shard_fd[SHARDS];
static struct up_net_stamp shard_stamp[SHARDS];
static uint64_t shards_came; /* bytes of them, from other nodes */
static uint64_t hurries, hedged_bytes; /* of all that have stopped */
static uint64_t ahead[3]; /* what was said of windows */

static void tell(struct node *n, struct up_net_message m)
{
	uint64_t one = 1;

	if (up_net_put(n->ring, UP_NET_OF_TRANSPORT, &m)) /* full: as if it were lost */
		return;
	CHECK(write(n->from, &one, sizeof(one)) == sizeof(one));
}

static void start_net(int i)
{
	struct node *n = &node[i];
	struct up_net_options o = { .me = (uint32_t)i, .chunks_per_block = BLOCK_CHUNKS,
				    .serve_threads = 3, .to_fd = n->to, .from_fd = n->from,
				    .patience_ms = 5 };
	struct up_net_ring *service;
	int fd;

	CHECK(!up_net_ring_create(&service, SLOT_BYTES, SLOTS, SLOTS, &fd));
	CHECK(!up_net_ring_open(&n->ring, fd));
	close(fd);
	CHECK(!up_net_start(&n->net, n->pool, service, &o));
	CHECK(!up_net_share(n->net, n->file, id, &stamp));
	for (uint32_t j = 0; j < NODES; j++)
		if ((int)j != i)
			tell(n, (struct up_net_message){ .kind = UP_NET_NODE, .node = j, .status = 1 });
}

static void stop_net(struct node *n)
{
	struct up_net_counts counts;

	up_net_counts(n->net, &counts);
	hurries += counts.hurries;
	hedged_bytes += counts.hedged_bytes;
	up_net_stop(n->net);
	up_net_ring_close(n->ring);
	n->net = NULL;
}

/* ------------------------------------------------------------------ the network */

/* An answer into the asker's slot, whole, spoiled, or not at all. */
static void answer(struct node *from, const struct up_net_message *m, uint64_t *state)
{
	struct node *to = &node[m->node % NODES];
	struct up_net_header *into, refusal = {
		.file = { m->file[0], m->file[1] }, .first = m->first, .count = (uint32_t)m->count,
		.status = m->status, .serial = m->serial,
	};

	if (to == from || !below(state, 12) || m->theirs >= SLOTS)
		return;
	into = up_net_slot(to->ring, m->theirs);
	if (m->kind == UP_NET_SEND)
		memcpy(into, up_net_slot(from->ring, m->slot), sizeof(*into) + m->length);
	else
		*into = refusal;
	if (!below(state, 12))
		((char *)into)[below(state, sizeof(*into) + CHUNK)] ^= 4;
	tell(to, (struct up_net_message){ .kind = UP_NET_CAME, .slot = m->theirs });
}

static void hints(struct node *n, const struct up_net_message *m, uint64_t *state)
{
	struct up_net_message h = *m;

	h.kind = UP_NET_HINTS;
	for (int i = 0; i < UP_NET_BLOCKS; i++)
		h.word[i] = below(state, 3)   ? (uint16_t)(below(state, NODES + 1) |
							 (below(state, 2) ? UP_NET_COPY : 0) |
							 (below(state, 2) ? UP_NET_PART : 0))
			    : below(state, 2) ? UP_NET_KEEP
			    : below(state, 2) ? UP_NET_KEEP_PART
			    : below(state, 2) ? UP_NET_READ_PART
					      : UP_NET_READ;
	if (below(state, 20))
		tell(n, h);
}

static void carry(int i, struct up_net_message *m, uint64_t *state)
{
	struct node *n = &node[i];
	uint32_t to = m->node % NODES;

	if (!below(state, 50)) /* it may be broken, too */
		tell(n, (struct up_net_message){ .kind = UP_NET_CAME + (uint32_t)below(state, 7),
						 .slot = (uint32_t)draw(state), .node = (uint32_t)i,
						 .first = draw(state), .mask = draw(state) });
	switch (m->kind) {
	case UP_NET_ASK:
		m->kind = UP_NET_REQUEST;
		m->theirs = m->slot;
		m->node = (uint32_t)i;
		if (below(state, 12) && (int)to != i)
			tell(&node[to], *m);
		break;
	case UP_NET_SEND:
		answer(n, m, state);
		tell(n, (struct up_net_message){ .kind = UP_NET_SENT, .slot = m->slot });
		break;
	case UP_NET_REFUSE:
		answer(n, m, state);
		break;
	case UP_NET_HURRY:
		if ((int)to != i)
			tell(&node[to], (struct up_net_message){ .kind = UP_NET_HURRIED,
								 .node = (uint32_t)i,
								 .theirs = m->slot });
		break;
	case UP_NET_READING:
		if ((int)to != i)
			tell(&node[to], (struct up_net_message){ .kind = UP_NET_WORD,
								 .slot = m->theirs });
		break;
	case UP_NET_QUESTION:
		hints(n, m, state);
		break;
	default:
		break;
	}
}

static void lock_all(void)
{
	for (int i = 0; i < NODES; i++)
		pthread_mutex_lock(&node[i].lock);
}

static void unlock_all(void)
{
	for (int i = NODES; i-- > 0;)
		pthread_mutex_unlock(&node[i].lock);
}

static void *carrier(void *seed)
{
	uint64_t state = *(uint64_t *)seed;

	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		struct up_net_message m;
		int any = 0;

		lock_all();
		for (int i = 0; i < NODES; i++)
			for (int n = 0; n < 20 && up_net_take(node[i].ring, UP_NET_OF_TRANSPORT, &m); n++) {
				carry(i, &m, &state);
				any = 1;
			}
		unlock_all();
		if (!any)
			usleep(200);
	}
	return NULL;
}

/* ------------------------------------------------------------------ readers */

static void check_chunk(struct node *n, uint64_t chunk)
{
	uint64_t offset = chunk * CHUNK, length = offset + CHUNK > BYTES ? BYTES - offset : CHUNK;
	uint64_t word[CHUNK / 8];

	if (!up_pool_copy(n->pool, n->file, offset, length, (char *)word))
		return;
	for (uint64_t i = 0; i < length / 8; i++)
		CHECK(word[i] == word_at(offset + 8 * i, 1));
}

/* A job's thread: what it touches is waited for. */
static void *toucher(void *cookie)
{
	struct node *n = cookie;
	uint64_t state = (uint64_t)(n - node) + 77;

	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		uint64_t offset = below(&state, BYTES / 8) * 8;

		CHECK(*(volatile uint64_t *)(n->map + offset) == word_at(offset, 1));
		usleep(200);
	}
	return NULL;
}

static struct up_net_stamp stamp_of(int fd)
{
	struct stat st;

	CHECK(!fstat(fd, &st));
	return (struct up_net_stamp){
		.size = (uint64_t)st.st_size,
		.mtime_ns = st.st_mtim.tv_sec * 1000000000ll + st.st_mtim.tv_nsec,
		.ctime_ns = st.st_ctim.tv_sec * 1000000000ll + st.st_ctim.tv_nsec,
	};
}

static void map_it(struct node *n)
{
	int ring_fd;

	CHECK(!up_ring_create(&n->events, &ring_fd));
	close(ring_fd);
	n->uffd = open_pool_uffd();
	n->slot = up_pool_join(n->pool, dup(n->uffd), 0, n->events);
	CHECK(n->slot >= 0);
	n->map = enter(n->uffd, n->memfd, NULL, whole_pages(BYTES), 0);
	CHECK(!up_pool_map(n->pool, n->slot, 1, n->file, (uintptr_t)n->map, whole_pages(BYTES), 0));
}

static void unmap_it(struct node *n)
{
	up_pool_unmap(n->pool, n->slot, 1);
	munmap(n->map, whole_pages(BYTES));
	up_pool_leave(n->pool, n->slot);
	up_ring_destroy(n->events);
	close(n->uffd);
}

static void await(struct node *n, uint64_t job)
{
	struct up_pool_victim all = { .file = (uint32_t)n->file, .chunks = CHUNKS };
	struct up_warm_result r;

	for (;;) {
		if (up_pool_victims_left(n->pool) < 0)
			up_pool_victims(n->pool, &all, 1);
		int got = up_pool_reap(n->pool, &r, 1);

		CHECK(got >= 0);
		if (got && r.id == job)
			return;
		if (!got)
			usleep(100);
	}
}

/* As the service defers a window: it looks again until homes have answered, or it has waited enough. */
static void look_ahead(struct node *n, uint64_t first, uint64_t count)
{
	for (int i = 0; i < 20; i++) {
		enum up_net_ahead found = up_net_ahead(n->net, n->file, first, count, first + count - 1);

		__atomic_fetch_add(&ahead[found], 1, __ATOMIC_RELAXED);
		if (found != UP_NET_AHEAD_SOON)
			return;
		usleep(200);
	}
}

/* Where there is a disk past the page cache. */
static void begin_tier(struct node *n)
{
	struct up_spill_options o = { .size_bytes = DISK_BYTES, .errors_most = UINT32_MAX };

	o.fd = open(directory, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
	n->spill_fd = o.fd < 0 ? -1 : dup(o.fd);
	CHECK(n->spill_fd < 0 || !up_pool_spill(n->pool, &o));
}

/* What lies there is not what was written, or goes. */
static void spoil_tier(struct node *n)
{
	static const char garbage[4096] __attribute__((aligned(4096))) = "garbage";
	struct stat st;

	if (n->spill_fd < 0 || fstat(n->spill_fd, &st) || st.st_size < (off_t)sizeof(garbage))
		return;
	CHECK(pwrite(n->spill_fd, garbage, sizeof(garbage),
		     (off_t)(below(&n->state, (uint64_t)st.st_size / sizeof(garbage)) * sizeof(garbage))) ==
	      (ssize_t)sizeof(garbage));
	if (!below(&n->state, 4))
		up_pool_spill_free(n->pool, n->file, below(&n->state, BYTES));
	up_pool_spill_fit(n->pool, below(&n->state, 3) ? DISK_BYTES : below(&n->state, DISK_BYTES));
}

static void *reader(void *cookie)
{
	struct node *n = cookie;
	int i = (int)(n - node);

	for (uint64_t job = 1; job <= JOBS; job++) {
		uint64_t first = below(&n->state, CHUNKS), count = 1 + below(&n->state, 40);
		struct up_warm_job w = { .id = job, .fd = n->file, .offset = first * CHUNK,
					 .checkpoint_fd = -1 };

		if (first + count > CHUNKS)
			count = CHUNKS - first;
		w.length = first + count == CHUNKS ? BYTES - w.offset : count * CHUNK;
		up_pool_alive(n->pool);
		look_ahead(n, first, count);
		CHECK(!up_pool_submit(n->pool, &w));
		await(n, job);
		for (uint64_t c = first; c < first + count; c++)
			check_chunk(n, c);
		if (!below(&n->state, 8))
			up_pool_drop(n->pool, n->file);
		if (up_pool_kept(n->pool))
			n->kept++;
		if (!below(&n->state, 5))
			spoil_tier(n);
		if (!below(&n->state, 10)) /* what is kept goes down to that, while others are served from it */
			up_pool_budget(n->pool, BUDGET_BYTES, below(&n->state, 2) ? KEEP_BYTES : below(&n->state, KEEP_BYTES));
		if (!below(&n->state, 30)) {
			lock_all(); /* the carrier writes into rings of other nodes, too */
			up_net_unshare(n->net, n->file);
			CHECK(!up_net_share(n->net, n->file, id, &stamp));
			unlock_all();
		}
		if (!below(&n->state, 40)) {
			lock_all();
			stop_net(n);
			start_net(i);
			unlock_all();
		}
	}
	return NULL;
}

/* Between what the number of a requested file is and its pin (csrc/service/net/serve.c) that may become another file's:
 * the linker puts this in the place of the real one. */
int __real_pool_pin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer,
			       uint64_t until_ns);
int __wrap_pool_pin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer,
			       uint64_t until_ns);

int __wrap_pool_pin_for_others(struct up_pool *p, int file, uint64_t first, uint64_t count, char **buffer,
			       uint64_t until_ns)
{
	usleep((unsigned)(first % 4) * 1000);
	return __real_pool_pin_for_others(p, file, first, count, buffer, until_ns);
}

/* What is there of a shard is its own bytes, wherever it came from. Returns how many chunks are. */
static uint64_t check_shard(struct node *n, int file, unsigned shard)
{
	uint64_t word[CHUNK / 8], there = 0;

	for (uint64_t c = 0; c < SHARD_CHUNKS; c++) {
		if (!up_pool_copy(n->pool, file, c * CHUNK, CHUNK, (char *)word))
			continue;
		for (uint64_t i = 0; i < CHUNK / 8; i++)
			CHECK(word[i] == word_at(c * CHUNK + 8 * i, 2 + shard));
		there++;
	}
	return there;
}

static void *shards(void *cookie)
{
	struct node *n = cookie;
	uint64_t state = (uint64_t)(n - node) + 555, job = 1ull << 40;

	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		unsigned shard = (unsigned)below(&state, SHARDS);
		struct up_warm_job w = { .offset = 0, .length = SHARD_BYTES, .checkpoint_fd = -1 };
		uint64_t shard_id[2] = { 0x3333, shard };
		struct up_pool_file_counts c;
		int memfd, file;

		pthread_mutex_lock(&n->lock);
		file = up_pool_file(n->pool, shard_fd[shard], SHARD_BYTES, 0, NULL, &memfd);
		CHECK(file >= 0 && !up_net_share(n->net, file, shard_id, &shard_stamp[shard]));
		pthread_mutex_unlock(&n->lock);
		w.fd = file;
		w.id = job++;
		CHECK(!up_pool_submit(n->pool, &w));
		for (int i = 0; i < 40 && check_shard(n, file, shard) < SHARD_CHUNKS; i++)
			usleep(500);
		up_pool_file_counts(n->pool, file, &c);
		__atomic_fetch_add(&shards_came, c.others_bytes, __ATOMIC_RELAXED);
		while (up_pool_forget(n->pool, file) == -EBUSY)
			usleep(50);
		pthread_mutex_lock(&n->lock);
		up_net_unshare(n->net, file);
		pthread_mutex_unlock(&n->lock);
		close(memfd);
	}
	return NULL;
}

/* What is read ahead waits to hear whether a file is shared; who touches it meanwhile does not. */
static void touch_what_waits(struct node *n)
{
	struct up_warm_job job = { .id = UINT64_MAX, .fd = n->file, .length = BLOCK_CHUNKS * CHUNK };
	struct up_pool_file_counts c;
	uint64_t began;
	uint8_t state;

	up_net_unshare(n->net, n->file);
	up_pool_drop(n->pool, n->file);
	do
		up_pool_file_counts(n->pool, n->file, &c);
	while (c.resident_bytes);
	up_net_pending(n->net, n->file, 60000);
	CHECK(!up_pool_submit(n->pool, &job));
	do {
		usleep(20000); /* in which it most likely begins to wait */
		pthread_mutex_lock(&n->pool->lock);
		state = n->pool->file[n->file].state[0];
		pthread_mutex_unlock(&n->pool->lock);
	} while (state != UP_FILLING);
	began = pool_now_ns();
	CHECK(*(volatile uint64_t *)n->map == word_at(0, 1));
	CHECK(pool_now_ns() - began < 30000000000ull); /* half of what it would be */
	await(n, job.id);
}

int main(int argc, char **argv)
{
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, carried;
	pthread_t thread[NODES], touching[NODES], sharding[NODES], by;
	uint64_t came = 0, kept = 0, spilled = 0;
	char path[4096];
	int fd;

	CHECK(argc > 1);
	directory = argv[1];
	snprintf(path, sizeof(path), "%s/words", argv[1]);
	fd = make_words(path, BYTES, 1);
	stamp = stamp_of(fd);
	for (unsigned i = 0; i < SHARDS; i++) {
		snprintf(path, sizeof(path), "%s/shard%u", argv[1], i);
		shard_fd[i] = make_words(path, SHARD_BYTES, 2 + i);
		shard_stamp[i] = stamp_of(shard_fd[i]);
	}
	for (int i = 0; i < NODES; i++) {
		struct node *n = &node[i];
		struct up_pool_options o = { .budget_bytes = BUDGET_BYTES, .chunk_bytes = CHUNK,
					     .threads = 6 };

		*n = (struct node){ .state = seed * NODES + (uint64_t)i + 1 };
		n->wake = o.event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		n->to = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		n->from = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		pthread_mutex_init(&n->lock, NULL);
		CHECK(!up_pool_create(&n->pool, &o));
		begin_tier(n);
		up_pool_budget(n->pool, BUDGET_BYTES, KEEP_BYTES);
		n->file = up_pool_file(n->pool, fd, BYTES, 0, NULL, &n->memfd);
		CHECK(n->file >= 0);
		map_it(n);
		start_net(i);
	}
	carried = seed + 99;
	CHECK(!pthread_create(&by, NULL, carrier, &carried));
	for (int i = 0; i < NODES; i++)
		CHECK(!pthread_create(&thread[i], NULL, reader, &node[i]) &&
		      !pthread_create(&touching[i], NULL, toucher, &node[i]) &&
		      !pthread_create(&sharding[i], NULL, shards, &node[i]));
	for (int i = 0; i < NODES; i++)
		pthread_join(thread[i], NULL);
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < NODES; i++)
		pthread_join(touching[i], NULL);
	for (int i = 0; i < NODES; i++)
		pthread_join(sharding[i], NULL);
	pthread_join(by, NULL);
	touch_what_waits(&node[0]);
	for (int i = 0; i < NODES; i++) {
		struct up_pool_file_counts c;

		up_pool_file_counts(node[i].pool, node[i].file, &c);
		came += c.others_bytes;
		spilled += c.disk_read_bytes;
		kept += node[i].kept;
		unmap_it(&node[i]);
		stop_net(&node[i]);
		up_pool_destroy(node[i].pool);
		close(node[i].memfd);
		close(node[i].wake);
		close(node[i].to);
		close(node[i].from);
		if (node[i].spill_fd >= 0)
			close(node[i].spill_fd);
	}
	for (int i = 0; i < 3; i++)
		CHECK(ahead[i] > 0);
	CHECK(came > 0 && hurries > 0 && shards_came > 0 && kept > 0 && (spilled > 0 || node[0].spill_fd < 0)); /* else nothing of all this was looked at */
	close(fd);
	printf("%llu MiB from other nodes, %llu KiB of small files, %llu hurries, %llu KiB read instead\n",
	       (unsigned long long)(came >> 20), (unsigned long long)(shards_came >> 10),
	       (unsigned long long)hurries,
	       (unsigned long long)(hedged_bytes >> 10));
	return 0;
}
