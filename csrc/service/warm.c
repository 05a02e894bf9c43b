// SPDX-License-Identifier: Apache-2.0
/*
 * warm.c - threads that make a range of a file be in the page cache, whatever call does that here.
 *
 * The planner hands over extents of a few MiB; a worker says when an extent is there (not merely
 * asked for), what of it was there before, and copies the checkpoint pages of the extent into the
 * checkpoint memfd while they are at hand. How many bytes are under way is the planner's affair.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "service/cond.h"
#include "service/helper.h"
#include "service/reading.h"

#define QUEUE 1024u
/* glibc's own beginning: less is not worth a system call. */
#define KEPT_BYTES (128 << 10)
#define CHUNK_MIN_BYTES (64u << 10)
#define PROBE_PIECE_BYTES CHUNK_MIN_BYTES
#define PROBE_LEAST 8 /* pieces: of fewer, chance could make the pattern */
/* Short jobs are taken together: waking a worker for each, and the service for its result, costs as
 * much as 64 KiB take at 300 MB/s, and a worker that waits for a busy core holds up more than one. */
#define SHORT_BYTES (256u << 10)
#define TOGETHER 16u
#define TOGETHER_BYTES (512u << 10)
/* Of these no more are under way (to one device: each has workers of its own), or a FUSE daemon's
 * queue is congested (at 48 where it has set max_background to 64), and the kernel drops what is
 * asked for: it would be read one by one. */
#define SHORT_UNDER_WAY 32u

struct up_workers {
	pthread_mutex_t issue; /* held while a job is taken and its reads are started */
	pthread_mutex_t lock;
	struct up_cond more;
	int threads, stop, event_fd;
	uint32_t head, tail;           /* jobs */
	uint32_t done_head, done_tail; /* results */
	uint32_t under_way, short_under_way;
	struct up_warm_job job[QUEUE];
	uint64_t submit_ns[QUEUE];
	struct up_warm_result result[QUEUE];
	pthread_t thread[];
};

/* Before the first read that waits all was there. What comes behind that may have arrived meanwhile, and is taken as
 * read by us. */
static void note_wait(const struct up_warm_job *job, struct up_warm_result *r, uint64_t at, long before)
{
	if (!r->waited_bytes && up_waits() != before)
		r->waited_bytes = job->offset + job->length - at;
}

/* readahead(2) only starts the reads. A file system may drop some of them (FUSE does when its
 * background queue is congested, fs/fuse/file.c), so finish_readahead() looks. */
static int start_chunk(const struct up_warm_job *job, uint64_t at, uint32_t chunk)
{
	uint64_t end = job->offset + job->length;

	return readahead(job->fd, (off64_t)at, end - at < chunk ? end - at : chunk) ? -errno : 0;
}

/* Where the chunks end that are started before any is waited for. */
static uint64_t started_at_first(const struct up_warm_job *job, uint32_t chunk)
{
	uint64_t window = job->window_bytes < chunk ? chunk : job->window_bytes / chunk * chunk;

	return job->offset + (job->window_bytes && window < job->length ? window : job->length);
}

static int start_readahead(const struct up_warm_job *job, uint32_t chunk)
{
	uint64_t end = started_at_first(job, chunk);
	int err = 0;

	for (uint64_t at = job->offset; at < end && !err; at += chunk)
		err = start_chunk(job, at, chunk);
	return err;
}

/* A one-byte pread of each call's last page waits for it; then the window goes on by a chunk. */
static int wait_readahead(const struct up_warm_job *job, uint32_t chunk, struct up_warm_result *r)
{
	uint64_t end = job->offset + job->length, next = started_at_first(job, chunk);
	char byte;

	for (uint64_t at = job->offset; at < end; at += chunk) {
		uint64_t last = (at + chunk < end ? at + chunk : end) - 1;
		long before = up_waits();

		if (pread(job->fd, &byte, 1, (off_t)last) < 0)
			return -errno;
		note_wait(job, r, at, before);
		if (next < end) {
			int err = start_chunk(job, next, chunk);

			if (err)
				return err;
			next += chunk;
		}
	}
	return 0;
}

static int by_pread(const struct up_warm_job *job, uint32_t chunk, char *scratch,
		    struct up_warm_result *r)
{
	uint64_t at = job->offset, end = job->offset + job->length;

	while (at < end) {
		/* Aligned pieces: a stripe boundary in the middle would make two RPCs of one. */
		uint32_t most = chunk < UP_READ_BYTES ? chunk : UP_READ_BYTES;
		uint64_t stop = (at / most + 1) * most;
		long before = up_waits();
		ssize_t n = up_read_over(job->fd, (stop < end ? stop : end) - at, at, scratch);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return 0; /* the file has become shorter: its watcher sees that */
		note_wait(job, r, at, before);
		at += (uint64_t)n;
	}
	return 0;
}

/* Pieces of the extent, from its end on, that were cold; one in two or so is asked for, in an order
 * that no reader has: what fills the ones and leaves the others is our call and nobody's reading. */
struct pattern {
	uint64_t asked[UP_READ_BYTES / PROBE_PIECE_BYTES], left[UP_READ_BYTES / PROBE_PIECE_BYTES];
	int n_asked, n_left;
};

static int64_t resident_of(int fd, const uint64_t *piece, int n, int *sensor)
{
	int64_t sum = 0;

	for (int i = 0; i < n; i++) {
		int64_t one = up_resident_bytes(fd, piece[i], PROBE_PIECE_BYTES, sensor);

		if (one < 0)
			return one;
		sum += one;
	}
	return sum;
}

static void choose_pattern(const struct up_warm_job *job, struct pattern *pattern)
{
	const uint32_t bits = 0xb2d4c69au; /* 16 of 32, in runs of one and two */
	uint64_t first = (job->offset + PROBE_PIECE_BYTES - 1) / PROBE_PIECE_BYTES;
	uint64_t last = (job->offset + job->length) / PROBE_PIECE_BYTES;
	int sensor, n = (int)(sizeof(pattern->asked) / sizeof(pattern->asked[0]));

	pattern->n_asked = pattern->n_left = 0;
	for (uint64_t i = last; i > first && n > 0; i--, n--) {
		uint64_t at = (i - 1) * PROBE_PIECE_BYTES;

		if (up_resident_bytes(job->fd, at, PROBE_PIECE_BYTES, &sensor) != 0)
			continue;
		if (bits >> (i % 32) & 1)
			pattern->asked[pattern->n_asked++] = at;
		else
			pattern->left[pattern->n_left++] = at;
	}
}

/* Which call fills the cache of this file? By doing: readahead(2) of some pieces, then asking
 * whether just those arrived. Who else reads here (the job itself, the kernel's readahead behind
 * it) fills whole ranges: then nothing is decided, and the next extent is tried. At last one large
 * call tells how much one brings (mm/readahead.c cuts it at max(io_pages, ra_pages);
 * FADV_SEQUENTIAL doubles ra_pages for our own description). */
static void probe(const struct up_warm_job *job, struct up_warm_result *r)
{
	struct pattern pattern;
	int64_t asked, left, want;
	int sensor = UP_CACHESTAT;
	uint64_t chunk = 0;

	choose_pattern(job, &pattern);
	if (pattern.n_asked < PROBE_LEAST || pattern.n_left < PROBE_LEAST)
		return;
	posix_fadvise(job->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
	for (int i = 0; i < pattern.n_asked; i++)
		readahead(job->fd, (off64_t)pattern.asked[i], PROBE_PIECE_BYTES);
	want = (int64_t)pattern.n_asked * PROBE_PIECE_BYTES;
	asked = resident_of(job->fd, pattern.asked, pattern.n_asked, &sensor);
	/* mincore counts a page only when its read has ended */
	for (int i = 0; sensor == UP_MINCORE && asked >= 0 && asked < want && i < 40; i++) {
		struct timespec ts = { .tv_nsec = 5 * 1000 * 1000 };

		nanosleep(&ts, NULL);
		asked = resident_of(job->fd, pattern.asked, pattern.n_asked, &sensor);
	}
	left = resident_of(job->fd, pattern.left, pattern.n_left, &sensor);
	if (asked < 0 || left < 0)
		return;
	if (asked * 4 <= want) {
		posix_fadvise(job->fd, 0, 0, POSIX_FADV_RANDOM);
		r->method = UP_WARM_PREAD;
		r->chunk_bytes = UP_READ_BYTES;
		return;
	}
	if (asked * 4 < want * 3 || left * 4 > (int64_t)pattern.n_left * PROBE_PIECE_BYTES)
		return; /* somebody else reads here */
	readahead(job->fd, (off64_t)job->offset, job->length);
	while (chunk < job->length &&
	       up_resident_bytes(job->fd, job->offset + chunk, CHUNK_MIN_BYTES, &sensor) > 0)
		chunk += CHUNK_MIN_BYTES;
	r->method = UP_WARM_READAHEAD;
	r->chunk_bytes = (uint32_t)(chunk < CHUNK_MIN_BYTES ? CHUNK_MIN_BYTES : chunk);
}

/* A checkpoint page is written once, whole, from the file, before anybody maps it. */
static int copy_page(const struct up_warm_job *job, uint64_t page, size_t bytes, char *scratch)
{
	off_t at = (off_t)(page * bytes);

	return pread(job->fd, scratch, bytes, at) == (ssize_t)bytes &&
	       pwrite(job->checkpoint_fd, scratch, bytes, at) == (ssize_t)bytes;
}

/* Of what was missing, how much has come by our calls; `waited`: not counting pages of which the
 * waiting for them may have been the reading. */
static void note_came(const struct up_warm_job *job, struct up_warm_result *r, uint64_t waited)
{
	int sensor;
	int64_t now;

	if (r->sensor <= 0 || r->error || r->resident_bytes >= job->length || job->window_bytes)
		return; /* of a window it cannot be told any more */
	now = up_resident_bytes(job->fd, job->offset, job->length, &sensor);
	if (now < 0)
		return;
	r->asked_bytes = job->length - r->resident_bytes;
	r->came_bytes = (uint64_t)now > r->resident_bytes + waited ?
				(uint64_t)now - r->resident_bytes - waited : 0;
}

/* First half, in the order of the queue: what is there, and start reading what is not. */
static void begin(const struct up_warm_job *job, struct up_warm_result *r)
{
	int64_t resident = 0;

	r->method = job->method;
	r->chunk_bytes = job->chunk_bytes;
	r->storage_bytes = -1;
	if (job->length) {
		resident = up_resident_bytes(job->fd, job->offset, job->length, &r->sensor);
		if (resident < 0) {
			r->sensor = (int)resident; /* nobody may say: warm it all */
			r->storage_bytes = up_thread_storage_bytes();
			resident = 0;
		}
		r->resident_bytes = (uint64_t)resident;
	}
	if ((uint64_t)resident < job->length && r->method == UP_WARM_PROBE)
		probe(job, r);
	if (r->method == UP_WARM_READAHEAD && r->chunk_bytes < CHUNK_MIN_BYTES)
		r->chunk_bytes = CHUNK_MIN_BYTES; /* 0 would never come to the end */
	if ((uint64_t)resident < job->length && r->method == UP_WARM_READAHEAD)
		r->error = start_readahead(job, r->chunk_bytes);
	/* At once: what others bring in the meantime is not the call's doing. */
	if (r->method == UP_WARM_READAHEAD && r->sensor == UP_CACHESTAT)
		note_came(job, r, 0);
}

/* Second half: wait, make sure, copy the checkpoint pages. */
static void finish(const struct up_warm_job *job, struct up_warm_result *r, char *scratch)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int sensor, by_readahead = r->method == UP_WARM_READAHEAD;

	if (r->resident_bytes < job->length && !r->error) {
		if (by_readahead)
			r->error = wait_readahead(job, r->chunk_bytes, r);
		if (by_readahead && r->sensor == UP_MINCORE)
			note_came(job, r, (job->length / r->chunk_bytes + 1) * page);
		if (!by_readahead || (uint64_t)up_resident_bytes(job->fd, job->offset, job->length,
								 &sensor) < job->length)
			r->error = by_pread(job, r->chunk_bytes ? r->chunk_bytes : UP_READ_BYTES,
					    scratch, r);
		if (!by_readahead)
			note_came(job, r, 0);
		if (!r->error)
			r->bytes = job->length - r->resident_bytes;
		if (r->storage_bytes >= 0)
			r->storage_bytes = up_thread_storage_bytes() - r->storage_bytes;
	}
	for (uint32_t i = 0; job->checkpoint_fd >= 0 && i < job->pages && i < 16; i++)
		if (copy_page(job, job->page[i], page, scratch))
			r->copied |= 1ull << i;
	r->done_ns = up_now_ns();
}

/* Whether a job may go with others: its read is only started, and nobody waits for its pages. */
static int is_short(const struct up_warm_job *job)
{
	return job->method == UP_WARM_READAHEAD && !job->pages && job->length &&
	       job->length <= SHORT_BYTES;
}

/* Whether the next job may be begun now. */
static int ready(const struct up_workers *p)
{
	if (p->head == p->tail)
		return 0;
	return p->short_under_way < SHORT_UNDER_WAY || !is_short(&p->job[p->tail % QUEUE]);
}

/* Take the next job, and those behind it that may go with it. */
static unsigned int take(struct up_workers *p, struct up_warm_job *job, struct up_warm_result *r)
{
	uint64_t bytes = 0;
	unsigned int n = 0;

	do {
		job[n] = p->job[p->tail % QUEUE];
		r[n] = (struct up_warm_result){ .id = job[n].id,
						.submit_ns = p->submit_ns[p->tail % QUEUE] };
		bytes += job[n].length;
		p->tail++;
		p->short_under_way += (uint32_t)is_short(&job[n]);
		n++;
	} while (n < TOGETHER && ready(p) && is_short(&job[n - 1]) &&
		 is_short(&p->job[p->tail % QUEUE]) &&
		 bytes + p->job[p->tail % QUEUE].length <= TOGETHER_BYTES);
	return n;
}

void up_settle_malloc(void)
{
#ifdef __GLIBC__ /* else 8 arenas for each CPU; and thresholds that grow to 32 MiB with what was freed */
	mallopt(M_ARENA_MAX, 1);
	mallopt(M_MMAP_THRESHOLD, KEPT_BYTES);
	mallopt(M_TRIM_THRESHOLD, KEPT_BYTES);
#endif
}

static void *worker(void *arg)
{
	struct up_workers *p = arg;
	char *scratch = malloc(UP_SCRATCH_BYTES);

	if (!scratch)
		return NULL;
	for (;;) {
		struct up_warm_result r[TOGETHER];
		struct up_warm_job job[TOGETHER];
		uint64_t n;

		/* One worker at a time takes jobs and starts their reads: storage then sees them in
		 * the order in which the reader will want them, not interleaved. */
		pthread_mutex_lock(&p->issue);
		pthread_mutex_lock(&p->lock);
		while (!ready(p) && !p->stop)
			up_cond_wait(&p->more, &p->lock);
		if (p->stop)
			break;
		n = take(p, job, r);
		pthread_mutex_unlock(&p->lock);
		for (uint64_t i = 0; i < n; i++) {
			r[i].start_ns = up_now_ns();
			begin(&job[i], &r[i]);
		}
		pthread_mutex_unlock(&p->issue);
		for (uint64_t i = 0; i < n; i++)
			finish(&job[i], &r[i], scratch);
		pthread_mutex_lock(&p->lock);
		for (uint64_t i = 0; i < n; i++)
			p->result[p->done_head++ % QUEUE] = r[i];
		if (is_short(&job[0])) {
			p->short_under_way -= (uint32_t)n;
			up_cond_signal(&p->more);
		}
		pthread_mutex_unlock(&p->lock);
		if (write(p->event_fd, &n, sizeof(n)) < 0)
			continue; /* EAGAIN: the counter is full, so the reader is awake anyway */
	}
	pthread_mutex_unlock(&p->lock);
	pthread_mutex_unlock(&p->issue);
	free(scratch);
	return NULL;
}

int up_workers_create(struct up_workers **out, int threads, int event_fd)
{
	struct up_workers *p = calloc(1, sizeof(*p) + (size_t)threads * sizeof(pthread_t));
	int err = 0;

	if (!p)
		return -ENOMEM;
	p->event_fd = event_fd;
	pthread_mutex_init(&p->issue, NULL);
	pthread_mutex_init(&p->lock, NULL);
	while (p->threads < threads && !err) {
		err = pthread_create(&p->thread[p->threads], NULL, worker, p);
		p->threads += !err;
	}
	if (!p->threads) {
		free(p);
		return -err;
	}
	*out = p;
	return p->threads;
}

void up_workers_destroy(struct up_workers *p)
{
	if (!p)
		return;
	pthread_mutex_lock(&p->lock);
	p->stop = 1;
	up_cond_broadcast(&p->more);
	pthread_mutex_unlock(&p->lock);
	for (int i = 0; i < p->threads; i++)
		pthread_join(p->thread[i], NULL);
	pthread_mutex_destroy(&p->lock);
	pthread_mutex_destroy(&p->issue);
	free(p);
}

int up_workers_submit(struct up_workers *p, const struct up_warm_job *job)
{
	int ret = -EAGAIN;

	pthread_mutex_lock(&p->lock);
	/* Results have places too: nothing is taken that could not be reported. */
	if (p->under_way < QUEUE) {
		p->under_way++;
		p->job[p->head % QUEUE] = *job;
		p->submit_ns[p->head % QUEUE] = up_now_ns();
		p->head++;
		ret = 0;
	}
	pthread_mutex_unlock(&p->lock);
	return ret;
}

void up_workers_start(struct up_workers *p)
{
	pthread_mutex_lock(&p->lock);
	if (p->head != p->tail)
		up_cond_signal(&p->more);
	pthread_mutex_unlock(&p->lock);
}

int up_workers_reap(struct up_workers *p, struct up_warm_result *out, int max)
{
	int n = 0;

	pthread_mutex_lock(&p->lock);
	while (n < max && p->done_tail != p->done_head) {
		out[n++] = p->result[p->done_tail++ % QUEUE];
		p->under_way--;
	}
	pthread_mutex_unlock(&p->lock);
	return n;
}

int64_t up_workers_cpu_ns(struct up_workers *p)
{
	int64_t total = 0;

	for (int i = 0; i < p->threads; i++) {
		struct timespec ts;
		clockid_t clock;

		if (!pthread_getcpuclockid(p->thread[i], &clock) && !clock_gettime(clock, &ts))
			total += (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	}
	return total;
}
