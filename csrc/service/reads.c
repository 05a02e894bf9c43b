// SPDX-License-Identifier: Apache-2.0
/*
 * reads.c - the thread that looks who reads files by system calls, where, and how far each has come.
 *
 * It opens nothing but /proc, and never a file of the job. A look takes its time of a core, and is followed by a pause
 * of COST_PART times of that, at least LOOK_NS; where nobody has read lately, QUIET_NS.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "service/helper.h"
#include "service/reads.h"

/* A file of 30 MB at 300 MB/s is read in 0.11 s with a look each 5 ms, in 0.12 with one each 10; oftener brings
 * nothing more. */
#define LOOK_NS 5000000ull
#define QUIET_NS 50000000ull
/* Of a core, at the most: this part. */
#define COST_PART 100u
/* Processes that have not read lately are looked at in turns, so many at a time, of 4 to 8 us each: where nobody reads,
 * what half a millisecond is enough for, which is a hundredth of QUIET_NS; ... */
#define QUIET_AT_ONCE 64u
/* ... else so few that those who read are looked at as often as can be. */
#define BESIDE_AT_ONCE 8u
#define PROCESSES_MAX 1024u
/* Of the descriptors, at the most: this part, for processes themselves. */
#define PROCESSES_PART 4u
/* More than 1024 threads can find in the time in which the service comes to it. */
#define RING 4096u

struct up_reads {
	pthread_t thread;
	pthread_mutex_t lock; /* of the list, `told` of each of them, `counts` and the ring */
	int event_fd, wake_fd, stop;
	struct reads_process *first;
	struct up_reads_counts counts;
	uint64_t spent_ns; /* by the thread, when it had looked last */
	uint32_t turn; /* whose it is of the quiet processes */
	uint32_t head, tail;
	struct up_read_sighting ring[RING];
	struct reads_look look; /* the thread's own */
};

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* Those that were removed leave the list. The first one, or NULL: others are added before it only. */
static struct reads_process *take_list(struct up_reads *r)
{
	struct reads_process *gone = NULL, *first, **at;

	pthread_mutex_lock(&r->lock);
	for (at = &r->first; *at;) {
		struct reads_process *p = *at;

		if (!p->is_removed) {
			at = &p->next;
			continue;
		}
		*at = p->next;
		p->next = gone;
		gone = p;
	}
	first = r->first;
	pthread_mutex_unlock(&r->lock);
	while (gone) {
		struct reads_process *p = gone;

		gone = p->next;
		reads_end(p, &r->look);
		free(p);
	}
	return first;
}

static int is_hot(const struct reads_process *p, uint64_t now)
{
	return p->now.sensor == UP_READ_UNSEEN || (p->hot_ns && now - p->hot_ns < READS_LATELY_NS);
}

/* Of those whom nobody has looked at yet. Whether one of them reads. */
static int look_at_new(struct up_reads *r, struct reads_process *first)
{
	int any = 0;

	for (struct reads_process *p = first; p; p = p->next)
		if (p->now.sensor == UP_READ_UNSEEN)
			any |= reads_look_at(p, &r->look);
	return any;
}

/* Who has read lately, and some of the others. Whether anybody has. */
static int look_at_all(struct up_reads *r, struct reads_process *first)
{
	uint32_t quiet = 0, place = 0, most;
	int any = 0;

	for (struct reads_process *p = first; p; p = p->next) {
		if (p->now.sensor == UP_READ_ENDED)
			continue;
		if (is_hot(p, r->look.now_ns))
			any |= reads_look_at(p, &r->look);
		else
			quiet++;
	}
	if (!quiet)
		return any;
	r->turn = r->turn < quiet ? r->turn : 0;
	most = r->turn + (any ? BESIDE_AT_ONCE : QUIET_AT_ONCE);
	for (struct reads_process *p = first; p && place < most; p = p->next) {
		if (p->now.sensor == UP_READ_ENDED || is_hot(p, r->look.now_ns))
			continue;
		if (place++ >= r->turn)
			any |= reads_look_at(p, &r->look);
	}
	r->turn = most;
	return any;
}

/* What was found goes to the service. */
static void tell(struct up_reads *r, struct reads_process *first, uint64_t period_ns)
{
	struct up_reads_counts *counts = &r->counts;
	uint64_t one = 1;
	int news = r->look.found > 0;

	pthread_mutex_lock(&r->lock);
	counts->looks++;
	counts->sightings += r->look.found;
	counts->cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
	counts->period_ns = period_ns;
	counts->descriptors = r->look.budget.kept;
	counts->processes = counts->threads = 0;
	for (struct reads_process *p = first; p; p = p->next) {
		news |= p->told.sensor != p->now.sensor;
		p->told = p->now;
		counts->processes++;
		counts->threads += p->now.threads;
	}
	for (uint32_t i = 0; i < r->look.found; i++) {
		if (r->head - r->tail == RING)
			counts->lost++;
		else
			r->ring[r->head++ % RING] = r->look.sighting[i];
	}
	pthread_mutex_unlock(&r->lock);
	if (news && write(r->event_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: the counter is full, so the reader is awake anyway */
}

/* When the next one is due. A new process is looked at before that, the others are not. */
static uint64_t look(struct up_reads *r, uint64_t due_ns)
{
	struct reads_process *first = take_list(r);
	uint64_t spent_ns, rest, next_ns;
	int is_due, any;

	r->look.now_ns = clock_ns(CLOCK_MONOTONIC);
	r->look.found = 0;
	is_due = r->look.now_ns >= due_ns;
	any = is_due ? look_at_all(r, first) : look_at_new(r, first);
	spent_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
	rest = (spent_ns - r->spent_ns) * COST_PART; /* what came after the last look is this one's */
	r->spent_ns = spent_ns;
	next_ns = r->look.now_ns + (any ? LOOK_NS : QUIET_NS);
	if (is_due)
		due_ns = next_ns > r->look.now_ns + rest ? next_ns : r->look.now_ns + rest;
	else
		due_ns = (any && next_ns < due_ns ? next_ns : due_ns) + rest;
	tell(r, first, due_ns - r->look.now_ns);
	return due_ns;
}

static void *look_all_the_time(void *arg)
{
	struct up_reads *r = arg;
	struct pollfd wake = { .fd = r->wake_fd, .events = POLLIN };
	uint64_t due_ns = 0, now_ns, count;

	while (!__atomic_load_n(&r->stop, __ATOMIC_ACQUIRE)) {
		struct timespec ts = { 0 };

		now_ns = clock_ns(CLOCK_MONOTONIC);
		if (now_ns < due_ns) {
			ts.tv_sec = (time_t)((due_ns - now_ns) / 1000000000u);
			ts.tv_nsec = (long)((due_ns - now_ns) % 1000000000u);
		}
		if (ppoll(&wake, 1, &ts, NULL) > 0 && read(r->wake_fd, &count, sizeof(count)) < 0)
			continue;
		due_ns = look(r, due_ns);
	}
	return NULL;
}

static void wake(struct up_reads *r)
{
	uint64_t one = 1;

	if (write(r->wake_fd, &one, sizeof(one)) < 0)
		return; /* EAGAIN: it is awake */
}

int up_reads_create(struct up_reads **out, int event_fd, uint32_t descriptors)
{
	struct up_reads *r = calloc(1, sizeof(*r));
	sigset_t all, before;
	int err;

	if (!r)
		return -ENOMEM;
	r->event_fd = event_fd;
	r->look.budget.most = descriptors;
	r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (r->wake_fd < 0) {
		err = -errno;
		free(r);
		return err;
	}
	pthread_mutex_init(&r->lock, NULL);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	err = -pthread_create(&r->thread, NULL, look_all_the_time, r);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (err) {
		close(r->wake_fd);
		pthread_mutex_destroy(&r->lock);
		free(r);
		return err;
	}
	*out = r;
	return 0;
}

void up_reads_destroy(struct up_reads *r)
{
	if (!r)
		return;
	__atomic_store_n(&r->stop, 1, __ATOMIC_RELEASE);
	wake(r);
	pthread_join(r->thread, NULL);
	for (struct reads_process *p = r->first; p; p = p->next)
		p->is_removed = 1;
	take_list(r);
	close(r->wake_fd);
	pthread_mutex_destroy(&r->lock);
	free(r);
}

/* Under the lock. */
static struct reads_process *find(struct up_reads *r, int pid, uint32_t *count)
{
	struct reads_process *found = NULL;

	*count = 0;
	for (struct reads_process *p = r->first; p; p = p->next) {
		*count += 1;
		if (p->pid == pid && !p->is_removed)
			found = p;
	}
	return found;
}

int up_reads_add(struct up_reads *r, int pid)
{
	struct reads_process *p = calloc(1, sizeof(*p));
	uint32_t count;
	int err;

	if (!p)
		return -ENOMEM;
	err = reads_begin(p, pid);
	if (err) {
		free(p);
		return err;
	}
	pthread_mutex_lock(&r->lock);
	if (find(r, pid, &count))
		err = -EEXIST;
	else if (count >= PROCESSES_MAX || count >= r->look.budget.most / PROCESSES_PART)
		err = -ENOSPC;
	if (!err) {
		p->next = r->first;
		r->first = p;
	}
	pthread_mutex_unlock(&r->lock);
	if (err) {
		close(p->task_fd);
		free(p);
		return err;
	}
	wake(r);
	return 0;
}

int up_reads_remove(struct up_reads *r, int pid)
{
	struct reads_process *p;
	uint32_t count;

	pthread_mutex_lock(&r->lock);
	p = find(r, pid, &count);
	if (p)
		p->is_removed = 1;
	pthread_mutex_unlock(&r->lock);
	return p ? 0 : -ESRCH;
}

int up_reads_drain(struct up_reads *r, struct up_read_sighting *out, int max)
{
	int n = 0;

	pthread_mutex_lock(&r->lock);
	while (n < max && r->tail != r->head)
		out[n++] = r->ring[r->tail++ % RING];
	pthread_mutex_unlock(&r->lock);
	return n;
}

int up_reads_process(struct up_reads *r, int pid, struct up_read_process *out)
{
	struct reads_process *p;
	uint32_t count;

	pthread_mutex_lock(&r->lock);
	p = find(r, pid, &count);
	if (p)
		*out = p->told;
	pthread_mutex_unlock(&r->lock);
	return p ? 0 : -ESRCH;
}

void up_reads_counts(struct up_reads *r, struct up_reads_counts *out)
{
	pthread_mutex_lock(&r->lock);
	*out = r->counts;
	pthread_mutex_unlock(&r->lock);
}
