// SPDX-License-Identifier: Apache-2.0
/*
 * paths.c - threads that read files by name into the page cache: whole small ones, or ranges.
 *
 * A name may mean anything by the time that it is opened. It is opened with O_PATH, which calls no file system's or
 * driver's open, and what it stands for is opened for reading only if it is a regular file with bytes in it (an open of
 * a FIFO takes the writer's bytes) and, where the caller knows which, that very file. Symbolic links are followed, as
 * the job's own open follows them: data sets are often directories of links; what they lead to is looked at in the
 * same way.
 *
 * All that may wait for storage is done by the threads: opening, reading, and closing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "service/cond.h"
#include "service/helper.h"
#include "service/reading.h"

/* Requests that are queued, begun, or not reaped: results have places too. */
#define QUEUE 1024u
/* One read: the time between two looks at whether it is to go on. */
#define PIECE_BYTES (1u << 20)
/* What one FADV_WILLNEED always brings where it does anything: VM_READAHEAD_PAGES (linux/pagemap.h). */
#define ADVICE_BYTES (128u << 10)
/* A file is held for so long, for a job that is about to open it. */
#define HOLD_NS 5000000000ull
/* So long at most for threads that wait for storage which does not answer. */
#define END_MS 200
/* CONFIGFS_MAGIC (fs/configfs/mount.c), which linux/magic.h lacks. */
#define CONFIGFS 0x62656570

struct item {
	struct item *next;
	struct up_path_request request;
	struct up_path_result result;
	uint64_t data[]; /* the ranges, then the name */
};

struct list {
	struct item *first, *last;
};

struct held {
	uint64_t id, until_ns;
	int fd;
};

struct reader {
	struct up_paths *paths;
	struct item *item; /* what it is at */
	pthread_t thread;
};

struct up_paths {
	pthread_mutex_t lock;
	struct up_cond more, due;
	int threads, stop, event_fd, has_closer;
	uint32_t under_way, held_count, held_most;
	struct list queue, done;
	struct held *held;
	pthread_t closer;
	struct reader reader[];
};

/* By all of this process. */
static uint32_t held_by_all;

static void append(struct list *l, struct item *i)
{
	i->next = NULL;
	if (l->first)
		l->last->next = i;
	else
		l->first = i;
	l->last = i;
}

static struct item *take_first(struct list *l)
{
	struct item *i = l->first;

	if (i)
		l->first = i->next;
	return i;
}

/* ---- what is held ---- */

/* A place of which there are held_most for all. */
static int reserve(const struct up_paths *p)
{
	if (__atomic_fetch_add(&held_by_all, 1, __ATOMIC_RELAXED) < p->held_most)
		return 1;
	__atomic_fetch_sub(&held_by_all, 1, __ATOMIC_RELAXED);
	return 0;
}

/* The one that is closed next. */
static struct held *next_due(struct up_paths *p)
{
	struct held *found = p->held_count ? &p->held[0] : NULL;

	for (uint32_t i = 1; i < p->held_count; i++)
		if (p->held[i].until_ns < found->until_ns)
			found = &p->held[i];
	return found;
}

/* Closes what was held long enough, or is not needed any more: it may wait for a server, and no reader for it. */
static void *close_due(void *arg)
{
	struct up_paths *p = arg;

	pthread_mutex_lock(&p->lock);
	while (!p->stop || p->held_count) {
		struct held *h = next_due(p);
		int fd;

		if (!h) {
			up_cond_wait(&p->due, &p->lock);
			continue;
		}
		if (!p->stop && h->until_ns > up_now_ns()) {
			up_cond_wait_until(&p->due, &p->lock, h->until_ns);
			continue;
		}
		fd = h->fd;
		*h = p->held[--p->held_count];
		pthread_mutex_unlock(&p->lock);
		close(fd);
		__atomic_fetch_sub(&held_by_all, 1, __ATOMIC_RELAXED);
		pthread_mutex_lock(&p->lock);
	}
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

static int start_thread(pthread_t *thread, void *(*body)(void *), void *arg)
{
	sigset_t all, was;
	int err;

	/* Signals are the service's main thread's; no call here ends for one. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &was);
	err = pthread_create(thread, NULL, body, arg);
	pthread_sigmask(SIG_SETMASK, &was, NULL);
	return err;
}

/* Whether it is held from now on. *fd is then what is to be closed for it: -1, or what was held longest, as
 * a file that its job has not opened for so long is the least likely to be wanted. */
static int hold(struct up_paths *p, uint64_t id, int *fd)
{
	struct held new = { id, up_now_ns() + HOLD_NS, *fd };
	struct held *oldest;

	if (p->stop)
		return 0;
	if (!p->has_closer && start_thread(&p->closer, close_due, p))
		return 0;
	p->has_closer = 1;
	if (reserve(p)) {
		p->held[p->held_count++] = new;
		if (p->held_count == 1)
			up_cond_signal(&p->due);
		*fd = -1;
		return 1;
	}
	oldest = next_due(p);
	if (!oldest)
		return 0;
	*fd = oldest->fd;
	*oldest = new;
	return 1;
}

/* ---- which file it is ---- */

static void fail(struct up_path_result *r, int error)
{
	r->state = UP_PATH_FAILED;
	r->error = error;
}

/* Whether the kernel itself makes up the bytes when they are read, which may do something: a register of a device, a
 * line that is given once. All of these say that no block is used; few others do. */
static int is_made_up(int fd, const struct stat *st)
{
	struct statfs fs;

	if (st->st_blocks || fstatfs(fd, &fs))
		return 0;
	switch ((unsigned long)fs.f_type) {
	case PROC_SUPER_MAGIC:
	case SYSFS_MAGIC:
	case DEBUGFS_MAGIC:
	case TRACEFS_MAGIC:
	case SECURITYFS_MAGIC:
	case SELINUX_MAGIC:
	case CGROUP_SUPER_MAGIC:
	case CGROUP2_SUPER_MAGIC:
	case RDTGROUP_SUPER_MAGIC:
	case EFIVARFS_MAGIC:
	case PSTOREFS_MAGIC:
	case BPF_FS_MAGIC:
	case CONFIGFS:
		return 1;
	default:
		return 0;
	}
}

/* Notes what it is, and whether it is to be read. */
static int look_at(const struct up_path_request *q, int fd, struct up_path_result *r,
		   struct stat *st)
{
	if (fstat(fd, st)) {
		fail(r, errno);
		return 0;
	}
	r->device = st->st_dev;
	r->inode = st->st_ino;
	r->size_bytes = (uint64_t)st->st_size;
	r->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
	if (q->inode && (st->st_ino != q->inode || st->st_dev != q->device))
		r->state = UP_PATH_ANOTHER;
	else if (!S_ISREG(st->st_mode) || is_made_up(fd, st))
		r->state = UP_PATH_NOT_REGULAR;
	else if (st->st_size <= 0)
		r->state = UP_PATH_EMPTY;
	return !r->state;
}

/* The same file for reading: a descriptor or -errno. Its time of access stays where we may have that. With O_NONBLOCK
 * a lease of a writer is not waited for (-EAGAIN). */
static int open_for_reading(int path_fd, const struct stat *st)
{
	const int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY;
	uid_t me = geteuid();
	char name[32];
	int fd = -1;

	snprintf(name, sizeof(name), "/proc/self/fd/%d", path_fd);
	if (me == st->st_uid || !me)
		fd = open(name, flags | O_NOATIME);
	else
		errno = EPERM;
	if (fd < 0 && errno == EPERM)
		fd = open(name, flags);
	return fd < 0 ? -errno : fd;
}

/* ---- its bytes ---- */

static int stopped(struct up_paths *p)
{
	return __atomic_load_n(&p->stop, __ATOMIC_RELAXED);
}

/* [at, end) in pieces. Of each all is asked for before its first page is waited for. */
static int read_range(struct up_paths *p, const struct up_path_request *q, int fd, uint64_t at,
		      uint64_t end, char *scratch, struct up_path_result *r)
{
	while (at < end && !stopped(p)) {
		uint64_t stop = end - at < PIECE_BYTES ? end : at + PIECE_BYTES;
		long before = up_waits();
		ssize_t n;

		/* Where it does nothing, pread reads it all the same. */
		for (uint64_t i = at; q->method != UP_WARM_PREAD && i < stop; i += ADVICE_BYTES)
			posix_fadvise(fd, (off_t)i,
				      (off_t)(stop - i < ADVICE_BYTES ? stop - i : ADVICE_BYTES),
				      POSIX_FADV_WILLNEED);
		n = up_read_over(fd, stop - at, at, scratch);
		if (n <= 0)
			return n ? -errno : 0; /* or it has become shorter */
		r->bytes += (uint64_t)n;
		if (r->waited_bytes || up_waits() != before)
			r->waited_bytes += (uint64_t)n;
		at += (uint64_t)n;
	}
	return 0;
}

static int read_ranges(struct up_paths *p, const struct up_path_request *q, int fd, char *scratch,
		       struct up_path_result *r)
{
	const uint64_t whole[2] = { 0, r->size_bytes };
	const uint64_t *range = q->ranges ? q->range : whole;
	uint64_t left = q->most_bytes ? q->most_bytes : UINT64_MAX;
	uint32_t count = q->ranges ? q->ranges : 1;
	int err = 0;

	/* Nothing beside what was asked for: no readahead of the kernel's own. */
	if (q->ranges || left < r->size_bytes)
		posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint32_t i = 0; i < count && left && !err; i++) {
		uint64_t at = range[2 * i], length = range[2 * i + 1];

		if (at >= r->size_bytes)
			continue;
		if (length > r->size_bytes - at)
			length = r->size_bytes - at;
		if (length > left)
			length = left;
		left -= length;
		err = read_range(p, q, fd, at, at + length, scratch, r);
	}
	return err;
}

/* ---- what the page cache keeps here ---- */

static void begin_look(struct up_path_result *r, int look)
{
	r->look_waits[look] = (uint32_t)up_waits();
	r->look_ns[look] = up_now_ns();
}

static void end_look(struct up_path_result *r, int look)
{
	r->look_ns[look] = up_now_ns() - r->look_ns[look];
	r->look_waits[look] = (uint32_t)up_waits() - r->look_waits[look];
}

/* FUSE maps no file MAP_SHARED whose pages it does not cache (FOPEN_DIRECT_IO; fs/fuse/file.c), unless its daemon has
 * said that it may (FUSE_DIRECT_IO_ALLOW_MMAP). */
static int is_mappable(int fd, size_t page)
{
	void *map = mmap(NULL, page, PROT_READ, MAP_SHARED, fd, 0);

	if (map == MAP_FAILED)
		return errno != ENODEV;
	munmap(map, page);
	return 1;
}

/* Its first page, read twice by each of two opens, and its attributes: what of it waits? */
static int probe(int path_fd, const struct stat *st, char *scratch, struct up_path_result *r)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int look = UP_LOOK_COLD;

	for (int i = 0; i < 2; i++) {
		int fd = open_for_reading(path_fd, st), err = 0;
		struct stat again;

		if (fd < 0)
			return fd;
		if (!r->opened_ns)
			r->opened_ns = up_now_ns();
		posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
		for (int j = 0; j < 2 && !err; j++, look++) {
			ssize_t n;

			begin_look(r, look);
			n = up_read_over(fd, page, 0, scratch);
			end_look(r, look);
			if (n < 0)
				err = -errno;
			else
				r->bytes += (uint64_t)n;
		}
		if (!err && i) {
			begin_look(r, UP_LOOK_STATUS);
			err = fstat(fd, &again) ? -errno : 0;
			end_look(r, UP_LOOK_STATUS);
			r->mappable = (uint32_t)is_mappable(fd, page);
		}
		close(fd);
		if (err)
			return err;
	}
	return 0;
}

/* ---- the threads ---- */

/* The open file, if it is to be held; else -1. */
static int handle(struct up_paths *p, struct item *i, char *scratch)
{
	const struct up_path_request *q = &i->request;
	struct up_path_result *r = &i->result;
	int path_fd, fd = -1, err = 0;
	struct stat st;

	r->begin_ns = up_now_ns();
	path_fd = openat(q->directory_fd, q->name,
			 O_PATH | O_CLOEXEC | (q->follow ? 0 : O_NOFOLLOW));
	if (path_fd < 0) {
		fail(r, errno);
	} else {
		if (look_at(q, path_fd, r, &st)) {
			if (q->kind == UP_PATH_PROBE) {
				err = probe(path_fd, &st, scratch, r);
			} else {
				fd = open_for_reading(path_fd, &st);
				r->opened_ns = up_now_ns();
				err = fd < 0 ? fd : read_ranges(p, q, fd, scratch, r);
			}
			r->state = UP_PATH_DONE;
			if (err)
				fail(r, -err);
		}
		close(path_fd);
	}
	if (fd >= 0 && r->state != UP_PATH_DONE) {
		close(fd);
		fd = -1;
	}
	return fd;
}

/* Who reaps is told of the first that lies there. */
static void tell(const struct up_paths *p, int is_first)
{
	uint64_t one = 1;

	if (is_first && write(p->event_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so the reader is awake anyway */
}

static void *read_queued(void *arg)
{
	struct reader *self = arg;
	struct up_paths *p = self->paths;
	char *scratch = calloc(1, UP_SCRATCH_BYTES); /* touched: a fault may wait, too */

	if (!scratch)
		return NULL;
	memset(scratch, 1, UP_SCRATCH_BYTES);
	pthread_mutex_lock(&p->lock);
	while (!p->stop) {
		struct item *i = take_first(&p->queue);
		int fd, is_first;

		if (!i) {
			up_cond_wait(&p->more, &p->lock);
			continue;
		}
		self->item = i;
		pthread_mutex_unlock(&p->lock);
		fd = handle(p, i, scratch);
		pthread_mutex_lock(&p->lock);
		if (fd >= 0 && i->request.hold)
			i->result.held = (uint32_t)hold(p, i->request.id, &fd);
		pthread_mutex_unlock(&p->lock);
		if (fd >= 0)
			close(fd);
		i->result.end_ns = up_now_ns();
		pthread_mutex_lock(&p->lock);
		self->item = NULL;
		is_first = !p->done.first;
		append(&p->done, i);
		tell(p, is_first);
	}
	pthread_mutex_unlock(&p->lock);
	free(scratch);
	return NULL;
}

int up_paths_create(struct up_paths **out, int threads, uint32_t held_most, int event_fd)
{
	struct up_paths *p = calloc(1, sizeof(*p) + (size_t)threads * sizeof(p->reader[0]));
	int err = 0;

	if (!p)
		return -ENOMEM;
	p->held = calloc(held_most ? held_most : 1, sizeof(*p->held));
	if (!p->held) {
		free(p);
		return -ENOMEM;
	}
	p->held_most = held_most;
	p->event_fd = event_fd;
	pthread_mutex_init(&p->lock, NULL);
	while (p->threads < threads && !err) {
		struct reader *r = &p->reader[p->threads];

		r->paths = p;
		err = start_thread(&r->thread, read_queued, r);
		p->threads += !err;
	}
	if (!p->threads) {
		pthread_mutex_destroy(&p->lock);
		free(p->held);
		free(p);
		return -err;
	}
	*out = p;
	return p->threads;
}

static void free_all(struct list *l)
{
	for (struct item *i = take_first(l); i; i = take_first(l))
		free(i);
}

int up_paths_destroy(struct up_paths *p)
{
	struct timespec end;

	pthread_mutex_lock(&p->lock);
	__atomic_store_n(&p->stop, 1, __ATOMIC_RELAXED);
	up_cond_broadcast(&p->more);
	up_cond_broadcast(&p->due);
	pthread_mutex_unlock(&p->lock);
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_nsec += END_MS * 1000000l;
	end.tv_sec += end.tv_nsec / 1000000000;
	end.tv_nsec %= 1000000000;
	for (int i = 0; i < p->threads; i++)
		if (pthread_timedjoin_np(p->reader[i].thread, NULL, &end))
			return 1; /* storage does not answer: it all goes with the process */
	if (p->has_closer && pthread_timedjoin_np(p->closer, NULL, &end))
		return 1;
	free_all(&p->queue);
	free_all(&p->done);
	pthread_mutex_destroy(&p->lock);
	free(p->held);
	free(p);
	return 0;
}

int up_paths_submit(struct up_paths *p, const struct up_path_request *request)
{
	size_t ranges = (size_t)request->ranges * 2 * sizeof(*request->range);
	size_t name = strlen(request->name) + 1;
	struct item *i = malloc(sizeof(*i) + ranges + name);
	int ret = -EAGAIN;

	if (!i)
		return -ENOMEM;
	i->request = *request;
	i->request.range = i->data;
	i->request.name = memcpy((char *)i->data + ranges, request->name, name);
	if (ranges)
		memcpy(i->data, request->range, ranges);
	i->result = (struct up_path_result){ .id = request->id,
					     .group = request->group,
					     .directory_fd = request->directory_fd };
	pthread_mutex_lock(&p->lock);
	if (p->under_way < QUEUE) {
		p->under_way++;
		append(&p->queue, i);
		up_cond_signal(&p->more);
		ret = 0;
	}
	pthread_mutex_unlock(&p->lock);
	if (ret)
		free(i);
	return ret;
}

int up_paths_withdraw(struct up_paths *p, enum up_path_by by, uint64_t number)
{
	struct list left = { 0 };
	int n = 0;

	pthread_mutex_lock(&p->lock);
	for (struct item *i = take_first(&p->queue); i; i = take_first(&p->queue)) {
		if ((by == UP_PATH_BY_ID ? i->request.id : i->request.group) != number) {
			append(&left, i);
			continue;
		}
		i->result.state = UP_PATH_WITHDRAWN;
		tell(p, !p->done.first);
		append(&p->done, i);
		n++;
	}
	p->queue = left;
	pthread_mutex_unlock(&p->lock);
	return n;
}

void up_paths_release(struct up_paths *p, uint64_t id)
{
	pthread_mutex_lock(&p->lock);
	for (struct item *i = p->queue.first; i; i = i->next)
		if (i->request.id == id)
			i->request.hold = 0;
	for (int i = 0; i < p->threads; i++)
		if (p->reader[i].item && p->reader[i].item->request.id == id)
			p->reader[i].item->request.hold = 0;
	for (uint32_t i = 0; i < p->held_count; i++)
		if (p->held[i].id == id)
			p->held[i].until_ns = 0;
	up_cond_signal(&p->due);
	pthread_mutex_unlock(&p->lock);
}

int up_paths_reap(struct up_paths *p, struct up_path_result *out, int max)
{
	int n = 0;

	pthread_mutex_lock(&p->lock);
	while (n < max && p->done.first) {
		struct item *i = take_first(&p->done);

		out[n++] = i->result;
		free(i);
		p->under_way--;
	}
	pthread_mutex_unlock(&p->lock);
	return n;
}

int64_t up_paths_cpu_ns(struct up_paths *p)
{
	int64_t total = 0;

	for (int i = 0; i < p->threads; i++) {
		struct timespec ts;
		clockid_t clock;

		if (!pthread_getcpuclockid(p->reader[i].thread, &clock) &&
		    !clock_gettime(clock, &ts))
			total += (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
	}
	return total;
}
