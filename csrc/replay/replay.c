// SPDX-License-Identifier: Apache-2.0
/*
 * _replay PARENT SECONDS DEPTH BUDGET RATE RESULT LOCK FOLLOWS PROGRAM PROFILE... - reads what a start profile says, beside the
 * program that is starting (launch/replay.py starts this one, docs/learn.md has the profile's format).
 *
 * The first profile that is one, and names PROGRAM (the path of what starts; "": any), is replayed: DEPTH requests at a
 * time (0: as its file system likes), BUDGET bytes at the most, RATE bytes a second (0: no limit), for so many SECONDS,
 * and no longer than PARENT lives. RESULT is the descriptor of a file that says how far this program is, a name and a
 * value a line; behind that, once it is known, there is written to it where the job notes what it opens. FOLLOWS is 1
 * where there is a job: no more is read than it opens (may_go_on()); else 0. LOCK is a file that is locked meanwhile, and removed in the end. Nobody waits for this program, and
 * nothing that it finds is an error: exit status 0; 2 wrong usage; 3 somebody else has LOCK; 4 nobody can.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "replay/entries.h"
#include "replay/use.h"
#include "service/helper.h"
#include "service/reading.h"

#define NS_PER_SECOND 1000000000ull
/* The job's threads come first. */
#define NICE 10
/* After so long beyond its time this program ends, whatever it waits for. */
#define GRACE_SECONDS 2u
/* The first after the standard streams. */
#define RESULT_FD 3
/* Where they cannot be closed in one call, descriptors below this one are. */
#define FDS_MOST 65536u
/* RESULT is written so often while there is news. */
#define TELL_NS 100000000ull
/* So often it is looked what the job has opened, while that is waited for. */
#define LOOK_NS 5000000ull
/* Files that may be read ahead of the job's opens. Measured: a start of 1,000 files takes 1.1 of what it takes when all is
 * in memory, and one of 100 reads 1.1 of its bytes beside the profile of the other (docs/learn.md). */
#define AHEAD_FILES 24u
/* All of RESULT, blanks at the end: one write(2) of less than a page, so that who reads it sees one text. */
#define RESULT_BYTES 1024

enum { EXIT_DONE = 0, EXIT_USAGE = 2, EXIT_BUSY = 3, EXIT_NO_LOCK = 4 };

struct replay {
	struct entries entries;
	struct up_paths *paths;
	struct up_path_pace pace;
	uint64_t began_ns, deadline_ns, told_ns, budget_left;
	uint64_t bytes, waited_bytes, done[UP_PROFILE_STAT + 1], skipped[SKIPS];
	uint32_t under_way;
	struct use use;
	int event_fd, depth, follows, is_cut; /* is_cut: a part of a file was beyond the budget */
};

/* ---- RESULT ---- */

static double seconds_of(struct timeval t)
{
	return (double)t.tv_sec + (double)t.tv_usec / 1e6;
}

static void tell(struct replay *r, const char *state)
{
	static const char *const names[SKIPS] = { "changed", "gone", "refused", "no_file", "failed", "budget", "time" };
	char text[RESULT_BYTES + 1];
	struct rusage usage = { 0 };
	int n;

	r->told_ns = up_now_ns();
	getrusage(RUSAGE_SELF, &usage);
	n = snprintf(text, sizeof(text),
		     "state %s\nprofile %d\nflaw %u\nruns %u\nentries %u\nfiles %llu\ndirectories %llu\n"
		     "names %llu\nbytes %llu\nwaited_bytes %llu\nseconds %.3f\ncpu_seconds %.3f\n",
		     state, r->entries.number, r->entries.header.flaw, r->entries.header.runs,
		     r->entries.header.entries, (unsigned long long)r->done[UP_PROFILE_FILE],
		     (unsigned long long)r->done[UP_PROFILE_DIRECTORY],
		     (unsigned long long)r->done[UP_PROFILE_STAT], (unsigned long long)r->bytes,
		     (unsigned long long)r->waited_bytes, (double)(r->told_ns - r->began_ns) / 1e9,
		     seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime));
	for (int i = 0; i < SKIPS; i++)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "skipped %s %llu\n", names[i],
			      (unsigned long long)r->skipped[i]);
	memset(text + n, ' ', RESULT_BYTES - (size_t)n);
	text[RESULT_BYTES - 1] = '\n';
	if (pwrite(RESULT_FD, text, RESULT_BYTES, 0) < 0)
		return; /* nobody learns of it, and nothing depends on it */
}

/* ---- LOCK ---- */

/* 0 or -errno; -EWOULDBLOCK: somebody else has it. It is held until this process ends. */
static int hold(const char *path)
{
	for (;;) {
		int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
		struct stat there, ours;

		if (fd < 0)
			return -errno;
		if (flock(fd, LOCK_EX | LOCK_NB)) {
			int err = -errno;

			close(fd);
			return err;
		}
		if (!lstat(path, &there) && !fstat(fd, &ours) && there.st_dev == ours.st_dev &&
		    there.st_ino == ours.st_ino)
			return 0;
		close(fd); /* the last holder has just removed it */
	}
}

/* ---- what this process is ---- */

/* All but one, which then is RESULT_FD, and the standard streams, which lead nowhere. */
static int keep_only(int result)
{
	struct rlimit most;
	int fd = fcntl(result, F_DUPFD_CLOEXEC, RESULT_FD + 1);

	if (fd < 0 || dup2(fd, RESULT_FD) < 0)
		return -errno;
	/* Some containers refuse what they do not know. */
	if (syscall(SYS_close_range, RESULT_FD + 1u, ~0u, 0u) && !getrlimit(RLIMIT_NOFILE, &most))
		for (rlim_t i = RESULT_FD + 1; i < most.rlim_cur && i < FDS_MOST; i++)
			close((int)i);
	fd = open("/dev/null", O_RDWR);
	for (int i = 0; i < RESULT_FD && fd >= 0; i++)
		if (fd != i)
			dup2(fd, i);
	if (fd > RESULT_FD)
		close(fd);
	return fd < 0 ? -errno : 0;
}

/* Nothing of the job's stays open here, and nothing of this process is in the job's way. */
static int stand_aside(pid_t parent, unsigned seconds, int result)
{
	cpu_set_t all;
	sigset_t none;
	int fd;

	signal(SIGALRM, SIG_DFL);
	signal(SIGTERM, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent) /* it may have ended before */
		return -ESRCH;
	alarm(seconds + GRACE_SECONDS);
	setsid(); /* what the terminal sends is for the job */
	if (keep_only(result) || chdir("/"))
		return -EBADF;
	if (sched_getscheduler(0) == SCHED_FIFO || sched_getscheduler(0) == SCHED_RR) /* they know no nice */
		sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){ 0 });
	setpriority(PRIO_PROCESS, 0, NICE);
	/* A launcher binds a rank, and so us, to a core; the kernel leaves out what is not the group's. */
	memset(&all, 0xff, sizeof(all));
	sched_setaffinity(0, sizeof(all), &all);
	fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd >= 0 && write(fd, "1000", 4) < 0)
		errno = 0; /* then the kernel chooses by size whom it kills */
	if (fd >= 0)
		close(fd);
	return 0;
}

/* ---- the replay ---- */

/* Of an entry, and how much of the budget it takes until it is reaped: in the result they are known by these. */
static uint64_t ticket(uint32_t kind, uint64_t bytes)
{
	return bytes << 2 | kind;
}

static void count(struct replay *r, const struct up_path_result *done)
{
	uint64_t taken = done->id >> 2;
	uint32_t kind = done->id & 3;
	enum skip why = SKIP_FAILED;

	r->under_way--;
	r->bytes += done->bytes;
	r->waited_bytes += done->waited_bytes;
	r->budget_left += taken > done->bytes ? taken - done->bytes : 0;
	switch (done->state) {
	case UP_PATH_DONE:
		r->done[kind]++;
		return;
	case UP_PATH_ANOTHER:
	case UP_PATH_EMPTY:
		why = SKIP_CHANGED;
		break;
	case UP_PATH_NOT_REGULAR:
		why = SKIP_NO_FILE;
		break;
	case UP_PATH_WITHDRAWN:
		why = SKIP_TIME;
		break;
	default:
		if (done->error == ENOENT || done->error == ENOTDIR)
			why = SKIP_GONE;
		else if (done->error == EACCES || done->error == EPERM)
			why = SKIP_REFUSED;
		if (kind == UP_PROFILE_STAT && why == SKIP_GONE) { /* that was to be found out */
			r->done[kind]++;
			return;
		}
	}
	r->skipped[why]++;
}

/* Whether there is nothing (more) to be done for the entry that is next; else it waits for those under way. */
static int submit(struct replay *r)
{
	struct entries *p = &r->entries;
	struct up_path_request q;
	uint64_t bytes = entries_bytes(p);

	if (entries_is_refused(p)) {
		r->skipped[SKIP_NO_FILE]++;
		return 1;
	}
	if (bytes > r->budget_left && r->under_way)
		return 0; /* some may take less than they were to */
	if (bytes && !r->budget_left) {
		r->skipped[SKIP_BUDGET]++;
		return 1;
	}
	if (bytes > r->budget_left) {
		bytes = r->budget_left;
		r->is_cut = 1;
	}
	entries_request(p, &q);
	q.id = ticket(p->entry.kind, bytes);
	q.most_bytes = bytes;
	q.pace = r->pace.bytes_per_second ? &r->pace : NULL;
	if (up_paths_submit(r->paths, &q))
		return 0;
	r->budget_left -= bytes;
	r->under_way++;
	return 1;
}

static void reap(struct replay *r)
{
	struct up_path_result done[64];
	uint64_t news;
	int n;

	n = (int)read(r->event_fd, &news, sizeof(news)); /* EAGAIN: only the time has passed */
	while ((n = up_paths_reap(r->paths, done, 64)) > 0)
		for (int i = 0; i < n; i++)
			count(r, &done[i]);
}

/* Files that are wanted whole were opened when it was recorded, so that the job notes them; what is wanted in parts, as
 * it was mapped, comes in between. */
static int may_go_on(const struct replay *r)
{
	return !r->follows || r->use.read < r->use.used + AHEAD_FILES;
}

static void go_on(struct replay *r, int *more)
{
	if (r->follows && use_find(&r->use, RESULT_FD, RESULT_BYTES))
		use_look(&r->use);
	while (*more && may_go_on(r)) {
		const struct up_profile_entry *e = &r->entries.entry;

		if (!submit(r))
			return;
		if (r->follows && e->kind == UP_PROFILE_FILE && !e->ranges)
			use_read(&r->use, e->path);
		*more = entries_next(&r->entries) > 0;
	}
}

/* How it ended. */
static const char *replay(struct replay *r)
{
	int more = entries_next(&r->entries) > 0, left = 0;

	while (more || r->under_way) {
		struct pollfd p = { .fd = r->event_fd, .events = POLLIN };
		uint64_t now = up_now_ns(), most_ns = TELL_NS;

		if (now >= r->deadline_ns)
			break;
		go_on(r, &more);
		if (!more && !r->under_way)
			break;
		if (now - r->told_ns >= TELL_NS)
			tell(r, "running");
		if (more && !may_go_on(r))
			most_ns = LOOK_NS;
		poll(&p, 1, (int)((most_ns < r->deadline_ns - now ? most_ns : r->deadline_ns - now) / 1000000) + 1);
		reap(r);
	}
	for (; more; more = entries_next(&r->entries) > 0)
		left++;
	r->skipped[SKIP_TIME] += (uint64_t)left + r->under_way;
	return left || r->under_way ? "time" : r->skipped[SKIP_BUDGET] || r->is_cut ? "budget" : "done";
}

static uint64_t number(const char *text)
{
	return strtoull(text, NULL, 10);
}

int main(int argc, char **argv)
{
	struct replay r = { .entries.number = -1 };
	const char *state;
	unsigned seconds;
	int err;

	if (argc < 11) {
		fprintf(stderr, "usage: _replay PARENT SECONDS DEPTH BUDGET RATE RESULT LOCK FOLLOWS PROGRAM "
				"PROFILE...\n");
		return EXIT_USAGE;
	}
	seconds = (unsigned)number(argv[2]);
	r.began_ns = up_now_ns();
	r.deadline_ns = r.began_ns + seconds * NS_PER_SECOND;
	if (stand_aside((pid_t)number(argv[1]), seconds, (int)number(argv[6])))
		return EXIT_DONE;
	err = hold(argv[7]);
	if (err)
		return err == -EWOULDBLOCK ? EXIT_BUSY : EXIT_NO_LOCK;
	tell(&r, "running");
	err = entries_open(&r.entries, &argv[10], argv[9]);
	state = err == -ENOENT ? "first run" : err == -ESRCH ? "another program" : "no profile";
	if (!err) {
		r.depth = entries_depth(&r.entries, (int)number(argv[3]));
		r.budget_left = entries_budget(number(argv[4]));
		r.pace.bytes_per_second = number(argv[5]);
		r.follows = number(argv[8]) && !use_create(&r.use);
		r.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (r.event_fd < 0 || !r.depth || up_paths_create(&r.paths, r.depth, 0, r.event_fd) < 0)
			state = "no threads";
		else
			state = replay(&r);
	}
	tell(&r, state);
	if (r.paths && !r.under_way)
		up_paths_destroy(r.paths);
	use_destroy(&r.use);
	entries_close(&r.entries);
	unlink(argv[7]);
	_exit(EXIT_DONE); /* whoever waits for storage does not keep it */
}
