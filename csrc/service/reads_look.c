// SPDX-License-Identifier: Apache-2.0
/*
 * reads_look.c - one look at a process: which of its threads wait in a call that reads, where, and how far those have
 * come that did so lately.
 *
 * An offset and the bytes that a thread has read by then (rchar) belong together if neither has changed between two
 * looks at the other. What does not hold still is told by a later look: who waits for storage does.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/reads.h"

/* Threads of a process that are looked at in turns, of 2 us each: while one of it is seen reading, ... */
#define BESIDE_AT_ONCE 2u
/* ... while none is, ... */
#define TURNS_AT_ONCE 8u
/* ... and while it reads and none is known to: that one is searched for. */
#define SEARCH_AT_ONCE 64u
/* At least so long lies between two lists of a process's descriptors, of which each takes 6 to 330 us. */
#define LIST_NS 50000000ull
/* A thread that was not looked at for longer was seen too rarely to say what it did. */
#define SEEN_MOST_NS 100000000ull
/* Tries to have an offset and a count that belong together. */
#define TRIES 3

/* ------------------------------------------------------------------ lists */

static void close_thread(struct reads_look *look, struct reads_thread *t)
{
	reads_drop(look, &t->syscall_fd);
	reads_drop(look, &t->io_fd);
	reads_drop(look, &t->stat_fd);
}

static int by_tid(const void *a, const void *b)
{
	return ((const struct reads_thread *)a)->tid - ((const struct reads_thread *)b)->tid;
}

/* The numbers in a directory of /proc: the next one that is at least `least`, or -1 at the end. */
struct numbers {
	char part[4096] __attribute__((aligned(8)));
	long length, at;
	int dir;
};

static int next_number(struct numbers *list)
{
	for (;;) {
		struct dirent64 *entry = (void *)(list->part + list->at);

		if (list->at >= list->length) {
			list->length = syscall(SYS_getdents64, list->dir, list->part, sizeof(list->part));
			list->at = 0;
			if (list->length <= 0)
				return list->length ? -errno : -ENOENT;
			continue;
		}
		list->at += entry->d_reclen;
		if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9')
			return atoi(entry->d_name);
	}
}

/* Who is new gets a place, who has ended loses it. -errno where the process has ended. */
static int list_threads(struct reads_process *p, struct reads_look *look)
{
	struct numbers list = { .dir = p->task_fd };
	uint32_t was = p->n_threads, n = was;
	int tid;

	if (lseek(p->task_fd, 0, SEEK_SET) < 0)
		return -errno;
	for (uint32_t i = 0; i < was; i++)
		p->thread[i].last.state = 'X'; /* until it is found */
	while ((tid = next_number(&list)) > 0 && n < READS_THREADS_MAX) {
		struct reads_thread key = { .tid = tid };
		struct reads_thread *t = was ? bsearch(&key, p->thread, was, sizeof(key), by_tid) : NULL;

		if (t) {
			t->last.state = 0;
			continue;
		}
		if (n == p->capacity) {
			uint32_t more = n ? n * 2 : 4;
			struct reads_thread *grown = realloc(p->thread, more * sizeof(*grown));

			if (!grown)
				break; /* those are looked at that are known */
			p->thread = grown;
			p->capacity = more;
		}
		p->thread[n++] = (struct reads_thread){ .tid = tid, .syscall_fd = -1, .io_fd = -1, .stat_fd = -1 };
	}
	was = n;
	n = 0;
	for (uint32_t i = 0; i < was; i++) {
		if (p->thread[i].last.state == 'X')
			close_thread(look, &p->thread[i]);
		else
			p->thread[n++] = p->thread[i];
	}
	p->n_threads = n;
	qsort(p->thread, n, sizeof(*p->thread), by_tid);
	return n ? 0 : -ESRCH;
}

/* ------------------------------------------------------------------ what is found */

static void found(struct reads_look *look, struct reads_process *p, struct up_read_sighting *last,
		  const struct up_read_sighting *now)
{
	if (look->found == READS_FOUND_MAX)
		return; /* it is told by the next look, since `last` is as it was */
	*last = *now;
	last->at_ns = look->now_ns;
	last->pid = p->pid;
	look->sighting[look->found++] = *last;
}

static int thread_text(struct reads_process *p, struct reads_look *look, struct reads_thread *t, int *kept,
		       const char *what)
{
	char name[32];

	snprintf(name, sizeof(name), "%d/%s", t->tid, what);
	return reads_text(look, p->task_fd, kept, name);
}

/* Bytes that it has read so far by system calls; whether that can be said. */
static int thread_rchar(struct reads_process *p, struct reads_look *look, struct reads_thread *t, uint64_t *rchar)
{
	int n = thread_text(p, look, t, &t->io_fd, "io");

	*rchar = reads_number(look, "rchar: ", 10);
	return n > 0;
}

static char thread_state(struct reads_process *p, struct reads_look *look, struct reads_thread *t)
{
	return thread_text(p, look, t, &t->stat_fd, "stat") > 0 ? reads_state(look->text) : 0;
}

/* A place for the fdinfo of a descriptor; the one that was used longest ago goes. */
static struct reads_file *place_of(struct reads_process *p, struct reads_look *look, int fd)
{
	struct reads_file *oldest = &p->file[0];

	for (int i = 0; i < READS_FILES_MAX; i++) {
		struct reads_file *f = &p->file[i];

		if (f->fd == fd) {
			f->used_ns = look->now_ns;
			return f;
		}
		if (f->fd < 0 || (oldest->fd >= 0 && f->used_ns < oldest->used_ns))
			oldest = f;
	}
	reads_drop(look, &oldest->info_fd);
	*oldest = (struct reads_file){ .fd = fd, .info_fd = -1, .used_ns = look->now_ns };
	return oldest;
}

/* What fdinfo says: the position in *position, flags, mount and inode in *out. 0 or -errno. By a thread's own table:
 * the first thread, by whose number the process goes, may have ended. */
static int read_fdinfo(struct reads_process *p, struct reads_look *look, int tid, struct reads_file *f,
		       struct up_read_sighting *out, int64_t *position)
{
	char name[48];
	int n;

	snprintf(name, sizeof(name), "%d/fdinfo/%d", tid, f->fd);
	n = reads_text(look, p->task_fd, &f->info_fd, name);
	if (n == -ENOENT && f->info_fd < 0) /* by a thread that has ended, perhaps, or closed and opened again */
		n = reads_text(look, p->task_fd, &f->info_fd, name);
	if (n < 0)
		return n;
	*position = (int64_t)reads_number(look, "pos:", 10);
	out->flags = (uint32_t)reads_number(look, "flags:", 8);
	out->mount = (uint32_t)reads_number(look, "mnt_id:", 10);
	out->inode = reads_number(look, "ino:", 10);
	return 0;
}

static int same_file(const struct up_read_sighting *a, const struct up_read_sighting *b)
{
	return a->inode == b->inode && a->mount == b->mount && a->flags == b->flags;
}

/* The position of a descriptor and the thread's rchar that belong together. */
static int steady_position(struct reads_process *p, struct reads_look *look, struct reads_thread *t,
			   struct up_read_sighting *out)
{
	struct reads_file *f = place_of(p, look, out->fd);
	uint64_t before;
	int err;

	if (!thread_rchar(p, look, t, &out->rchar))
		return -ESRCH;
	for (int i = 0; i < TRIES; i++) {
		before = out->rchar;
		err = read_fdinfo(p, look, t->tid, f, out, &out->offset);
		if (err)
			return err;
		if (!thread_rchar(p, look, t, &out->rchar))
			return -ESRCH;
		if (before == out->rchar)
			return 0;
	}
	return -EAGAIN;
}

/* A call that names its offset: it is still the same one after rchar was asked for. */
static int steady_call(struct reads_process *p, struct reads_look *look, struct reads_thread *t, const char *text,
		       struct up_read_sighting *out)
{
	int64_t position;
	int err;

	if (!thread_rchar(p, look, t, &out->rchar))
		return -ESRCH;
	err = read_fdinfo(p, look, t->tid, place_of(p, look, out->fd), out, &position);
	if (err)
		return err;
	if (thread_text(p, look, t, &t->syscall_fd, "syscall") < 0)
		return -ESRCH;
	return strcmp(text, look->text) ? -EAGAIN : 0;
}

/* A thread that waits in a call that reads. */
static void sight(struct reads_process *p, struct reads_look *look, struct reads_thread *t, const char *text,
		  struct up_read_sighting *now)
{
	const struct up_read_sighting *last = &t->last;
	int by_position = now->offset < 0;
	int err;

	if (now->state == 'S' && last->at_ns && last->call == now->call && last->fd == now->fd &&
	    last->asked_bytes == now->asked_bytes)
		return; /* a pipe or a socket, as a rule: told once */
	now->tid = t->tid;
	err = by_position ? steady_position(p, look, t, now) : steady_call(p, look, t, text, now);
	if (err)
		return;
	if (t->wait_state && !same_file(last, now))
		now->state = (uint16_t)thread_state(p, look, t);
	t->wait_state = now->state == 'S' ? 0 : (char)now->state;
	if (t->wait_state)
		t->active_ns = p->hot_ns = look->now_ns;
	t->by_position = by_position;
	if (last->at_ns && last->call == now->call && last->fd == now->fd && last->offset == now->offset &&
	    last->rchar == now->rchar && same_file(last, now))
		return; /* the same call as before */
	found(look, p, &t->last, now);
}

/* How far a thread has come that was seen waiting and does not wait now. */
static void follow(struct reads_process *p, struct reads_look *look, struct reads_thread *t)
{
	struct up_read_sighting now = t->last;
	int64_t position;
	int err;

	if (t->last.fd < 0 || t->last.state == 'S' || !thread_rchar(p, look, t, &now.rchar) ||
	    now.rchar == t->last.rchar)
		return;
	t->active_ns = p->hot_ns = look->now_ns;
	now.offset = -1;
	if (t->by_position)
		err = steady_position(p, look, t, &now);
	else
		err = read_fdinfo(p, look, t->tid, place_of(p, look, now.fd), &now, &position);
	if (err == -EAGAIN || err == -ESRCH)
		return;
	if (err || !same_file(&now, &t->last)) {
		t->last.fd = -1; /* it was closed: where the thread is now shows when it waits again */
		return;
	}
	now.call = UP_READ_GOES_ON;
	now.asked_bytes = 0;
	now.state = 'R';
	found(look, p, &t->last, &now);
}

/* ------------------------------------------------------------------ threads */

static void note(struct reads_look *look, struct reads_process *p, struct reads_thread *t, int waits, int runs)
{
	uint64_t since = t->looked_ns ? look->now_ns - t->looked_ns : 0;

	if (since > SEEN_MOST_NS)
		since = SEEN_MOST_NS;
	t->looked_ns = look->now_ns;
	if (waits)
		p->now.waiting_ns += since;
	else if (runs)
		p->now.running_ns += since;
}

/* 0, or -errno where its system call is not shown. */
static int look_at_thread(struct reads_process *p, struct reads_look *look, struct reads_thread *t)
{
	struct up_read_sighting now = { .fd = -1 };
	struct reads_call call;
	char text[256];
	int n = thread_text(p, look, t, &t->syscall_fd, "syscall"), waits, reads;

	if (n == -ESRCH || n == -ENOENT) {
		p->is_stale = 1;
		return 0;
	}
	if (n < 0)
		return n;
	snprintf(text, sizeof(text), "%.255s", look->text);
	waits = reads_parse_call(text, &call);
	if (!waits) {
		note(look, p, t, 0, 1);
		if (look->now_ns - t->active_ns < READS_LATELY_NS)
			follow(p, look, t);
		return 0;
	}
	reads = reads_is_read(&call, &now);
	if (reads && t->wait_state && now.fd == t->last.fd)
		now.state = (uint16_t)t->wait_state; /* as before: it is the same file, or sight() asks */
	else
		now.state = reads || reads_may_wait(&call) ? (uint16_t)thread_state(p, look, t) : 'S';
	waits = reads_waits(&call, (char)now.state);
	note(look, p, t, waits, now.state == 'R');
	if (waits && call.nr >= 0) /* a page fault is no read */
		p->hot_ns = look->now_ns;
	if (reads && (now.state == 'D' || now.state == 'I' || now.state == 'S'))
		sight(p, look, t, text, &now);
	else if (look->now_ns - t->active_ns < READS_LATELY_NS)
		follow(p, look, t);
	return 0;
}

/* Where the call is not shown: its state alone. */
static int look_at_state(struct reads_process *p, struct reads_look *look, struct reads_thread *t)
{
	char state = thread_state(p, look, t);

	if (!state)
		p->is_stale = 1;
	note(look, p, t, state == 'D' || state == 'I', state == 'R');
	return 0;
}

typedef int look_at_one(struct reads_process *, struct reads_look *, struct reads_thread *);

/* Those that were seen reading lately. How many are, or -errno. */
static int look_at_active(struct reads_process *p, struct reads_look *look, look_at_one *one)
{
	int reading = 0, err;

	for (uint32_t i = 0; i < p->n_threads; i++) {
		struct reads_thread *t = &p->thread[i];

		if (!t->active_ns || look->now_ns - t->active_ns >= READS_LATELY_NS)
			continue;
		err = one(p, look, t);
		if (err)
			return err;
		reading += t->active_ns == look->now_ns;
	}
	return reading;
}

/* So many of the others, in turns. 0 or -errno. */
static int look_at_others(struct reads_process *p, struct reads_look *look, uint32_t most, look_at_one *one)
{
	int err = 0;

	for (uint32_t i = 0, turns = 0; i < p->n_threads && turns < most && !err; i++) {
		struct reads_thread *t = &p->thread[p->turn++ % p->n_threads];

		if (t->looked_ns == look->now_ns)
			continue;
		turns++;
		err = one(p, look, t);
	}
	return err;
}

/* ------------------------------------------------------------------ by fdinfo */

/* Whether it has read anything by system calls since the last look. */
static int has_read(struct reads_process *p, struct reads_look *look)
{
	uint64_t before = p->now.rchar;
	int n = reads_text(look, p->task_fd, &p->io_fd, "../io");

	if (n > 0)
		p->now.rchar = reads_number(look, "rchar: ", 10);
	return p->now.rchar != before;
}

/* Whether its file is regular, as the kernel knows it, and opened to be read only. */
static int is_read_only_file(const struct reads_process *p, const struct reads_file *f, uint32_t flags)
{
	struct up_read_file what;

	return (flags & O_ACCMODE) == O_RDONLY && !(flags & (O_DIRECTORY | O_PATH)) &&
	       !up_read_file(p->pid, f->fd, &what) && S_ISREG(what.mode);
}

/* Its position and what the process has read by then; of several threads that read all the time they may not belong
 * together. */
static int steady_descriptor(struct reads_process *p, struct reads_look *look, struct reads_file *f,
			     struct up_read_sighting *out)
{
	int err = read_fdinfo(p, look, p->pid, f, out, &out->offset);

	for (int i = 0; i < TRIES && !err && out->offset != f->last.offset && has_read(p, look); i++)
		err = read_fdinfo(p, look, p->pid, f, out, &out->offset);
	out->rchar = p->now.rchar;
	return err;
}

static void look_at_descriptor(struct reads_process *p, struct reads_look *look, struct reads_file *f)
{
	struct up_read_sighting now = { .fd = f->fd, .state = 'R' };
	int err = steady_descriptor(p, look, f, &now);

	if (err == -ENOENT || err == -ESRCH) {
		reads_drop(look, &f->info_fd);
		f->fd = -1;
		p->files_stale = 1;
	} else if (!err && (!f->last.state || !same_file(&f->last, &now))) {
		f->is_file = is_read_only_file(p, f, now.flags);
		f->last = now; /* where it begins */
		if (f->is_file && now.offset)
			found(look, p, &f->last, &now);
	} else if (!err && f->is_file && now.offset != f->last.offset) {
		found(look, p, &f->last, &now);
	}
}

/* Whether a descriptor has a path: no socket, no pipe. */
static int has_path(int dir, int fd)
{
	char name[16], link[2];

	snprintf(name, sizeof(name), "%d", fd);
	return readlinkat(dir, name, link, sizeof(link)) > 0 && link[0] == '/';
}

/* A place for one that is new: a free one, or, for one with a path, that of another that is no file to be followed.
 * Those are kept as long as there is room, since a number may come to name a file. */
static void follow_descriptor(struct reads_process *p, struct reads_look *look, int dir, int fd)
{
	struct reads_file *free_one = NULL, *other = NULL;

	for (int i = 0; i < READS_FILES_MAX; i++) {
		struct reads_file *f = &p->file[i];

		if (f->fd == fd)
			return;
		if (f->fd < 0)
			free_one = f;
		else if (f->last.state && !f->is_file)
			other = f;
	}
	if (!free_one && (!other || !has_path(dir, fd))) {
		p->now.left_out++;
		return;
	}
	if (!free_one) {
		reads_drop(look, &other->info_fd);
		free_one = other;
	}
	*free_one = (struct reads_file){ .fd = fd, .info_fd = -1 };
}

static void list_descriptors(struct reads_process *p, struct reads_look *look)
{
	struct numbers list = { .dir = openat(p->task_fd, "../fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC) };
	int fd;

	p->listed_ns = look->now_ns;
	if (list.dir < 0)
		return;
	p->now.left_out = 0;
	while ((fd = next_number(&list)) >= 0)
		follow_descriptor(p, look, list.dir, fd);
	close(list.dir);
	p->files_stale = 0;
}

/* The size of /proc/PID/fd is the number of descriptors (since 6.2; before, 0, and they are listed again and again). */
static void look_at_descriptors(struct reads_process *p, struct reads_look *look)
{
	struct stat st = { 0 };

	if (look->now_ns - p->listed_ns >= LIST_NS && !fstatat(p->task_fd, "../fd", &st, 0) &&
	    (!p->listed_ns || !st.st_size || (uint64_t)st.st_size != p->fds || p->files_stale)) {
		p->fds = (uint64_t)st.st_size;
		list_descriptors(p, look);
	}
	for (int i = 0; i < READS_FILES_MAX; i++)
		if (p->file[i].fd >= 0)
			look_at_descriptor(p, look, &p->file[i]);
}

static int may_see_descriptors(const struct reads_process *p)
{
	int dir = openat(p->task_fd, "../fdinfo", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (dir < 0)
		return 0;
	close(dir);
	return 1;
}

/* ------------------------------------------------------------------ a process */

int reads_begin(struct reads_process *p, int pid)
{
	char path[32];

	p->pid = pid;
	p->io_fd = -1;
	p->is_stale = 1;
	for (int i = 0; i < READS_FILES_MAX; i++)
		p->file[i] = (struct reads_file){ .fd = -1, .info_fd = -1 };
	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	p->task_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (p->task_fd < 0)
		return errno == ENOENT ? -ESRCH : -errno;
	return 0;
}

void reads_end(struct reads_process *p, struct reads_look *look)
{
	for (uint32_t i = 0; i < p->n_threads; i++)
		close_thread(look, &p->thread[i]);
	for (int i = 0; i < READS_FILES_MAX; i++)
		reads_drop(look, &p->file[i].info_fd);
	reads_drop(look, &p->io_fd);
	free(p->thread);
	p->thread = NULL;
	p->n_threads = p->capacity = 0;
	if (p->task_fd >= 0)
		close(p->task_fd);
	p->task_fd = -1;
}

/* The better sensor is tried at first, and again and again: the job may say whom it allows to look, and run another
 * program. */
static int choose_sensor(struct reads_process *p, struct reads_look *look, int shown)
{
	uint32_t was = p->now.sensor;

	p->probed_ns = look->now_ns;
	p->now.error = shown;
	if (!shown)
		p->now.sensor = UP_READ_BY_SYSCALL;
	else
		p->now.sensor = may_see_descriptors(p) ? UP_READ_BY_FDINFO : UP_READ_REFUSED;
	if (p->now.sensor != was) {
		for (int i = 0; i < READS_FILES_MAX; i++) {
			reads_drop(look, &p->file[i].info_fd);
			p->file[i].fd = -1;
		}
		p->listed_ns = 0;
	}
	return p->now.sensor == UP_READ_BY_SYSCALL;
}

static int is_hot(const struct reads_process *p, const struct reads_look *look)
{
	return p->hot_ns && look->now_ns - p->hot_ns < READS_LATELY_NS;
}

/* By their calls. Of a process that has not read lately, it is looked at whether it has, and at one thread, since it
 * may wait in its first large read. */
static int look_at_calls(struct reads_process *p, struct reads_look *look)
{
	int reading = is_hot(p, look) ? look_at_active(p, look, look_at_thread) : 0, grown;

	if (reading < 0)
		return reading;
	if (reading)
		return look_at_others(p, look, BESIDE_AT_ONCE, look_at_thread);
	grown = has_read(p, look);
	if (grown)
		p->hot_ns = look->now_ns;
	return look_at_others(p, look, grown ? SEARCH_AT_ONCE : is_hot(p, look) ? TURNS_AT_ONCE : 1, look_at_thread);
}

static void look_at_positions(struct reads_process *p, struct reads_look *look)
{
	int grown = has_read(p, look);

	if (grown)
		p->hot_ns = look->now_ns;
	look_at_others(p, look, is_hot(p, look) ? TURNS_AT_ONCE : 1, look_at_state);
	if (grown)
		look_at_descriptors(p, look);
}

int reads_look_at(struct reads_process *p, struct reads_look *look)
{
	struct stat st = { 0 };
	int err;

	p->now.looks++;
	/* its links are its threads (fs/proc/base.c, proc_task_getattr) */
	if ((is_hot(p, look) || p->is_stale) && !fstat(p->task_fd, &st) && (uint64_t)st.st_nlink != p->links) {
		p->is_stale = 1;
		p->links = st.st_nlink;
	}
	if (p->is_stale) {
		p->is_stale = 0;
		err = list_threads(p, look);
		if (err) {
			reads_end(p, look);
			p->now.sensor = UP_READ_ENDED;
			p->now.threads = 0;
			return 0;
		}
		p->now.threads = p->n_threads;
	}
	if (p->now.sensor != UP_READ_BY_SYSCALL &&
	    (p->now.sensor == UP_READ_UNSEEN || look->now_ns - p->probed_ns >= READS_LATELY_NS))
		choose_sensor(p, look, look_at_thread(p, look, &p->thread[0]));
	if (p->now.sensor == UP_READ_BY_SYSCALL) {
		err = look_at_calls(p, look);
		if (err)
			choose_sensor(p, look, err);
	}
	if (p->now.sensor == UP_READ_BY_FDINFO)
		look_at_positions(p, look);
	return is_hot(p, look);
}
