// SPDX-License-Identifier: Apache-2.0
/*
 * slowfs - a directory, seen as if it lay on slow storage
 *
 * A read-only FUSE passthrough with the kernel's page cache in front and a
 * model of a storage link behind: every read reply passes one serial pipe of
 * B bytes/s that all requests share, and arrives a latency L after its last
 * byte. Transfers queue, latencies overlap. It is test equipment: it makes
 * cold reads slow in a repeatable way, and it counts them.
 *
 * Requests for names and attributes (lookup, getattr, open, opendir, readdir)
 * are answered at once, or after --lookup-us each, as those of a metadata
 * server are: they overlap, and do not wait for the link.
 *
 * The file `.slowfs` in the root of the mount (not listed) reads as JSON and
 * takes lines `bandwidth=BYTES_PER_SECOND` (0: no limit), `latency_us=N`,
 * `lookup_us=N` and `reset`. The source must not change while it is mounted: attributes are
 * cached; a changed file is noticed when it is opened, and loses its pages.
 *
 * With --writers-behind it may change: whoever writes the source is another
 * client of the same storage. Nothing but the pages is cached then, and the
 * control file takes two lines more. `invalidate=OFFSET LENGTH PATH` takes the
 * pages of a range away, as a distributed lock manager does when another
 * client writes; who asked has the answer when they are gone. `times=frozen`
 * shows every file's times as at its first look-up (`times=live`: as they
 * are), for storage whose times do not tell of each write. A writer that
 * sends no line is one that NFS knows: a look at the attributes tells.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <search.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "slowfs.h"

#define REPLY_THREADS	QUEUE_THREADS /* they copy; all waiting is done in the queue */
#define CONTROL_NAME	".slowfs"
#define CACHE_SECONDS	86400.0

/* One file or directory that was looked up. Never freed: the kernel's page
 * cache hangs on the inode, so a path keeps its number for the whole run. */
struct node {
	char *path;		/* relative to the source; "." is the root */
	struct timespec mtime;	/* as of the last open */
	off_t size;
	struct timespec first_atime, first_mtime, first_ctime; /* for times=frozen */
};

/* A line of the control file that waits for the kernel: pages that are to go
 * may be under way, so the thread that receives requests must not wait. */
struct invalidation {
	struct due due;
	fuse_req_t req;		/* answered when the pages are gone */
	size_t line_bytes;
	fuse_ino_t ino;
	off_t offset, length;
};

struct bed bed = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.reads = DUE_QUEUE(bed.reads),
	.answers = DUE_QUEUE(bed.answers),
	.going = DUE_QUEUE(bed.going),
	.entry_seconds = CACHE_SECONDS,
	.bandwidth = 300000000,
	.latency_us = 1000,
};

static int source_fd;
static void *nodes;			/* tsearch(3) tree by path */
static struct node root = { .path = "." };
static struct node control = { .path = CONTROL_NAME };

/* ---- pages that are taken away ----------------------------------------- */

static void invalidation_give(struct due *due)
{
	struct invalidation *one = (struct invalidation *)due;
	/* ENOENT: the kernel has no such inode, so no page of it either */
	int err = fuse_lowlevel_notify_inval_inode(bed.session, one->ino, one->offset,
						   one->length);

	if (err && err != -ENOENT)
		fuse_reply_err(one->req, -err);
	else
		fuse_reply_write(one->req, one->line_bytes);
	free(one);
}

/* ---- nodes ------------------------------------------------------------- */

static int compare_nodes(const void *a, const void *b)
{
	return strcmp(((const struct node *)a)->path, ((const struct node *)b)->path);
}

static struct node *node_of(fuse_ino_t ino)
{
	return ino == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)ino;
}

static int node_stat(struct node *n, struct stat *st)
{
	if (n == &control) {
		*st = (struct stat){ .st_mode = S_IFREG | 0644, .st_nlink = 1,
				     .st_uid = getuid(), .st_gid = getgid() };
		return 0;
	}
	return fstatat(source_fd, n->path, st, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

/* The times that the client is to see. */
static void node_times(const struct node *n, struct stat *st)
{
	pthread_mutex_lock(&bed.lock);
	if (bed.times_frozen && n != &control && n != &root) {
		st->st_atim = n->first_atime;
		st->st_mtim = n->first_mtime;
		st->st_ctim = n->first_ctime;
	}
	pthread_mutex_unlock(&bed.lock);
}

/* Only what exists gets a node: names that are merely asked for cost nothing. */
static int node_find(struct node *parent, const char *name, struct stat *st,
		     struct node **out)
{
	struct node *n = calloc(1, sizeof(*n)), **found = NULL;
	int err = -ENOMEM;

	if (!n)
		return err;
	if ((parent == &root ? asprintf(&n->path, "%s", name) :
			       asprintf(&n->path, "%s/%s", parent->path, name)) < 0) {
		free(n);
		return err;
	}
	err = node_stat(n, st);
	if (!err) {
		n->first_atime = st->st_atim;
		n->first_mtime = st->st_mtim;
		n->first_ctime = st->st_ctim;
		found = tsearch(n, &nodes, compare_nodes);
		err = found ? 0 : -ENOMEM;
	}
	if (!found || *found != n) {
		free(n->path);
		free(n);
	}
	if (found) {
		*out = *found;
		node_times(*out, st);
	}
	return err;
}

/* `invalidate=OFFSET LENGTH PATH`, queued; answers the request itself. */
static void invalidate_line(fuse_req_t req, const char *line, size_t line_bytes)
{
	struct invalidation *one = calloc(1, sizeof(*one));
	struct node key = { 0 }, **found = NULL;
	uint64_t offset, length;
	int at = 0, err = EINVAL;

	if (one && sscanf(line, "%" SCNu64 " %" SCNu64 " %n", &offset, &length, &at) == 2 && at &&
	    line[at]) {
		key.path = (char *)line + at;
		found = tfind(&key, &nodes, compare_nodes);
		err = ENOENT;
	}
	if (!found) {
		fuse_reply_err(req, one ? err : ENOMEM);
		free(one);
		return;
	}
	*one = (struct invalidation){ .req = req, .line_bytes = line_bytes,
				      .ino = (uintptr_t)*found, .offset = offset,
				      .length = length };
	queue_put(&bed.going, &one->due, 0);
}

/* ---- the session ------------------------------------------------------- */

/* libfuse's own call comes here. libfuse 3.14 knows FUSE_CAP_PARALLEL_DIROPS and
 * does not pass it on in its reply to FUSE_INIT, the first of a session: the
 * kernel would ask for the names of a directory one by one. */
ssize_t writev(int fd, const struct iovec *iov, int count)
{
	static bool begun;
	struct iovec copy[2];
	struct fuse_init_out init = { 0 };

	if (begun || !bed.session || fd != fuse_session_fd(bed.session))
		return syscall(SYS_writev, fd, iov, count);
	begun = true;
	if (count != 2 || iov[1].iov_len > sizeof(init))
		return syscall(SYS_writev, fd, iov, count);
	memcpy(copy, iov, sizeof(copy));
	memcpy(&init, iov[1].iov_base, iov[1].iov_len);
	init.flags |= FUSE_PARALLEL_DIROPS;
	copy[1].iov_base = &init;
	return syscall(SYS_writev, fd, copy, count);
}

/* ---- FUSE operations --------------------------------------------------- */

static void op_init(void *data, struct fuse_conn_info *conn)
{
	(void)data;
	conn->max_background = MAX_BACKGROUND;
	conn->want |= conn->capable & (FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param e = { .attr_timeout = bed.entry_seconds,
				      .entry_timeout = bed.entry_seconds };
	struct node *n = &control;
	int err;

	if (parent == FUSE_ROOT_ID && !strcmp(name, CONTROL_NAME)) {
		node_stat(n, &e.attr);
		e.ino = (uintptr_t)n;
		fuse_reply_entry(req, &e);
		return;
	}
	count_one(&bed.count.lookups);
	err = node_find(node_of(parent), name, &e.attr, &n);
	if (err == -ENOENT && bed.missing_seconds > 0)
		/* number 0: the kernel remembers that there is no such name */
		e = (struct fuse_entry_param){ .entry_timeout = bed.missing_seconds };
	else if (err) {
		answer_error(req, -err);
		return;
	} else
		e.ino = (uintptr_t)n;
	answer((struct answer){ .req = req, .kind = ANSWER_ENTRY, .entry = e });
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct answer a = { .req = req, .kind = ANSWER_ATTRIBUTES,
			    .entry.attr_timeout = bed.entry_seconds };
	int err = node_stat(node_of(ino), &a.st);

	(void)fi;
	if (node_of(ino) == &control) {
		answer_send(&a);
		return;
	}
	count_one(&bed.count.getattrs);
	if (err) {
		answer_error(req, -err);
		return;
	}
	node_times(node_of(ino), &a.st);
	answer(a);
}

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *st, int which,
		       struct fuse_file_info *fi)
{
	(void)st, (void)which;
	/* a shell's `> .slowfs` truncates first */
	if (node_of(ino) == &control)
		op_getattr(req, ino, fi);
	else
		fuse_reply_err(req, EROFS);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
	char target[PATH_MAX + 1];
	ssize_t n = readlinkat(source_fd, node_of(ino)->path, target, PATH_MAX);

	if (n < 0) {
		fuse_reply_err(req, errno);
		return;
	}
	target[n] = 0;
	fuse_reply_readlink(req, target);
}

static void close_file(struct fuse_file_info *fi)
{
	close(fi->fh);
}

static void close_directory(struct fuse_file_info *fi)
{
	closedir((DIR *)(uintptr_t)fi->fh);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct node *n = node_of(ino);
	struct stat st;
	int fd = -1;

	if (n == &control) {
		char *text;
		int err = control_render(&text);

		if (err) {
			fuse_reply_err(req, -err);
			return;
		}
		fi->fh = (uintptr_t)text;
		fi->direct_io = 1;
		if (fuse_reply_open(req, fi))
			free(text);
		return;
	}
	count_one(&bed.count.opens);
	if ((fi->flags & O_ACCMODE) != O_RDONLY) {
		answer_error(req, EROFS);
		return;
	}
	fd = openat(source_fd, n->path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st)) {
		answer_error(req, errno);
		if (fd >= 0)
			close(fd);
		return;
	}
	fi->fh = fd;
	node_times(n, &st);
	fi->direct_io = bed.direct_io;
	fi->keep_cache = !bed.no_keep_cache && n->size == st.st_size &&
			 n->mtime.tv_sec == st.st_mtim.tv_sec &&
			 n->mtime.tv_nsec == st.st_mtim.tv_nsec;
	n->size = st.st_size;
	n->mtime = st.st_mtim;
	answer((struct answer){ .req = req, .kind = ANSWER_OPEN, .fi = *fi, .close = close_file });
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
		    struct fuse_file_info *fi)
{
	struct pending *p;
	struct stat st;

	if (node_of(ino) == &control) {
		const char *text = (const char *)(uintptr_t)fi->fh;
		size_t len = strlen(text);
		size_t at = (size_t)offset < len ? (size_t)offset : len;

		fuse_reply_buf(req, text + at, size < len - at ? size : len - at);
		return;
	}
	/* The kernel rounds up to pages at the end of a file: the link
	 * carries, and the counters count, the file's own bytes. */
	if (fstat(fi->fh, &st)) {
		fuse_reply_err(req, errno);
		return;
	}
	if (offset >= st.st_size)
		size = 0;
	else if (size > (uint64_t)(st.st_size - offset))
		size = st.st_size - offset;
	p = malloc(sizeof(*p));
	if (!p) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	*p = (struct pending){ .req = req, .fd = fi->fh, .offset = offset,
			       .size_bytes = size };
	link_queue(p);
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t size,
		     off_t offset, struct fuse_file_info *fi)
{
	char text[256], *save = NULL;
	int err = 0;

	(void)offset, (void)fi;
	if (node_of(ino) != &control || size >= sizeof(text)) {
		fuse_reply_err(req, node_of(ino) != &control ? EROFS : EFBIG);
		return;
	}
	memcpy(text, data, size);
	text[size] = 0;
	if (bed.writers_behind && !strncmp(text, "invalidate=", 11)) {
		text[strcspn(text, "\n")] = 0;
		invalidate_line(req, text + 11, size);
		return;
	}
	for (char *line = strtok_r(text, "\n", &save); line && !err;
	     line = strtok_r(NULL, "\n", &save))
		err = control_line(line);
	if (err)
		fuse_reply_err(req, -err);
	else
		fuse_reply_write(req, size);
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	if (node_of(ino) == &control)
		free((char *)(uintptr_t)fi->fh);
	else
		close_file(fi);
	fuse_reply_err(req, 0);
}

/* As most file systems in user space are, where close(2) waits for them. ENOSYS: never again. */
static void op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino, (void)fi;
	fuse_reply_err(req, bed.told_of_closes ? 0 : ENOSYS);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	int fd = openat(source_fd, node_of(ino)->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	count_one(&bed.count.opendirs);
	if (!dir) {
		answer_error(req, errno);
		if (fd >= 0)
			close(fd);
		return;
	}
	fi->fh = (uintptr_t)dir;
	answer((struct answer){ .req = req, .kind = ANSWER_OPEN, .fi = *fi,
				.close = close_directory });
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
		       struct fuse_file_info *fi)
{
	DIR *dir = (DIR *)(uintptr_t)fi->fh;
	char *data = malloc(size);
	size_t used = 0;

	(void)ino;
	count_one(&bed.count.readdirs);
	if (!data) {
		answer_error(req, ENOMEM);
		return;
	}
	seekdir(dir, offset);
	for (struct dirent *d; (d = readdir(dir));) {
		struct stat st = { .st_ino = d->d_ino, .st_mode = DTTOIF(d->d_type) };
		size_t len = fuse_add_direntry(req, data + used, size - used, d->d_name,
					       &st, telldir(dir));

		if (len > size - used)	/* did not fit: the next call begins here */
			break;
		used += len;
	}
	answer((struct answer){ .req = req, .kind = ANSWER_LISTING, .data = data,
				.data_bytes = used });
}

static void op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	close_directory(fi);
	fuse_reply_err(req, 0);
}

/* Without these the library says ENOSYS, where LMDB (and others) look for
 * EROFS to go on without a lock file. */
static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
		     dev_t dev)
{
	(void)parent, (void)name, (void)mode, (void)dev;
	fuse_reply_err(req, EROFS);
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
		      struct fuse_file_info *fi)
{
	(void)parent, (void)name, (void)mode, (void)fi;
	fuse_reply_err(req, EROFS);
}

static const struct fuse_lowlevel_ops ops = {
	.init = op_init, .lookup = op_lookup, .getattr = op_getattr, .setattr = op_setattr,
	.readlink = op_readlink, .open = op_open, .read = op_read, .write = op_write,
	.flush = op_flush, .release = op_release, .opendir = op_opendir, .readdir = op_readdir,
	.releasedir = op_releasedir, .mknod = op_mknod, .create = op_create,
};

/* ---- the process ------------------------------------------------------- */

/* Ends us when whoever started us is gone (the other end of our stdin is
 * closed), however it went: a mount must not outlive its bench. */
static void *parent_thread(void *arg)
{
	struct pollfd in = { .fd = STDIN_FILENO };	/* hang-up only */

	(void)arg;
	while (poll(&in, 1, -1) < 0 && errno == EINTR)
		;
	kill(getpid(), SIGTERM);
	return NULL;
}

static int serve(struct fuse_session *session, const char *mountpoint, bool with_parent)
{
	struct due_queue *queues[] = { &bed.reads, &bed.answers, &bed.going };
	const size_t count = sizeof(queues) / sizeof(*queues);
	sigset_t all, old;
	pthread_t parent;
	int err;

	/* Signals belong to the main thread, which sits in read(/dev/fuse). */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = queue_start(&bed.reads, read_give, REPLY_THREADS);
	if (!err)
		err = queue_start(&bed.answers, answer_give, 1);
	if (!err && bed.writers_behind)
		err = queue_start(&bed.going, invalidation_give, 1);
	if (!err && with_parent)
		err = -pthread_create(&parent, NULL, parent_thread, NULL);
	if (!err && with_parent)
		pthread_detach(parent);	/* ends with the process */
	pthread_sigmask(SIG_SETMASK, &old, NULL);

	if (!err) {
		printf("slowfs: ready %s\n", mountpoint);
		fflush(stdout);
		/* One receiver: no operation waits, reads and answers are only queued. */
		err = fuse_session_loop(session);
		err = err < 0 ? err : 0;	/* > 0: ended by a signal */
	}
	for (size_t i = 0; i < count; i++)
		queue_end(queues[i]);
	for (size_t i = 0; i < count; i++)
		queue_join(queues[i]);
	return err;
}

static int usage(FILE *to)
{
	fprintf(to,
		"usage: slowfs [--bandwidth B/S] [--latency-us N] [--lookup-us N] "
		"[--entry-seconds S] [--missing-seconds S] [--no-keep-cache] [--direct-io] "
		"[--exit-with-stdin] [--writers-behind] [--told-of-closes] SOURCE MOUNTPOINT\n"
		"Shows the directory SOURCE, read-only, behind a link of B bytes per second\n"
		"(default 300000000, 0: no limit) and N microseconds (default 1000).\n"
		"--lookup-us: of each lookup, getattr, open, opendir and readdir (default 0).\n"
		"--entry-seconds: names and attributes are cached for so long (default 86400).\n"
		"--missing-seconds: that a name does not exist is cached for so long (default 0).\n"
		"--no-keep-cache: each open takes the file's pages from the page cache.\n"
		"--direct-io: no page is kept in the page cache.\n"
		"--writers-behind: SOURCE may be written; attributes are not cached.\n"
		"--told-of-closes: close(2) of a file waits for an answer.\n"
		"Stays in the foreground; `cat MOUNTPOINT/" CONTROL_NAME "` for counters.\n");
	return to == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "bandwidth", required_argument, NULL, 'b' },
		{ "latency-us", required_argument, NULL, 'l' },
		{ "lookup-us", required_argument, NULL, 'L' },
		{ "entry-seconds", required_argument, NULL, 'E' },
		{ "missing-seconds", required_argument, NULL, 'M' },
		{ "no-keep-cache", no_argument, NULL, 'k' },
		{ "direct-io", no_argument, NULL, 'd' },
		{ "exit-with-stdin", no_argument, NULL, 'e' },
		{ "writers-behind", no_argument, NULL, 'w' },
		{ "told-of-closes", no_argument, NULL, 'c' },
		{ "help", no_argument, NULL, 'h' },
		{ 0 },
	};
	bool with_parent = false;
	int opt, err = 0;

	while ((opt = getopt_long(argc, argv, "fh", options, NULL)) != -1) {
		if (opt == 'b')
			err = err ? err : parse_u64(optarg, &bed.bandwidth);
		else if (opt == 'l')
			err = err ? err : parse_u64(optarg, &bed.latency_us);
		else if (opt == 'L')
			err = err ? err : parse_u64(optarg, &bed.lookup_us);
		else if (opt == 'E')
			err = err ? err : parse_seconds(optarg, &bed.entry_seconds);
		else if (opt == 'M')
			err = err ? err : parse_seconds(optarg, &bed.missing_seconds);
		else if (opt == 'k')
			bed.no_keep_cache = true;
		else if (opt == 'd')
			bed.direct_io = true;
		else if (opt == 'e')
			with_parent = true;
		else if (opt == 'w')
			bed.writers_behind = true;
		else if (opt == 'c')
			bed.told_of_closes = true;
		else if (opt != 'f')	/* -f: taken, and always so */
			return usage(opt == 'h' ? stdout : stderr);
	}
	if (err || argc - optind != 2)
		return usage(stderr);
	if (bed.writers_behind)
		bed.entry_seconds = 0;
	const char *source = argv[optind], *mountpoint = argv[optind + 1];

	/* Held open, so that SOURCE may lie under MOUNTPOINT or be it. */
	source_fd = open(source, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (source_fd < 0) {
		fprintf(stderr, "slowfs: cannot open %s: %s\n", source, strerror(errno));
		return 1;
	}
	/* Only root may let others in without a line in /etc/fuse.conf. */
	char *fuse_argv[] = { "slowfs", "-o", geteuid() ?
		"fsname=slowfs,subtype=slowfs" :
		"fsname=slowfs,subtype=slowfs,allow_other,default_permissions", NULL };
	struct fuse_args args = FUSE_ARGS_INIT(3, fuse_argv);
	struct fuse_session *session = fuse_session_new(&args, &ops, sizeof(ops), NULL);

	if (!session)
		return 1;
	bed.session = session;
	err = 1;
	if (!fuse_set_signal_handlers(session)) {
		if (!fuse_session_mount(session, mountpoint)) {
			err = -serve(session, mountpoint, with_parent);
			if (err)
				fprintf(stderr, "slowfs: %s\n", strerror(err));
			fuse_session_unmount(session);
		}
		fuse_remove_signal_handlers(session);
	}
	fuse_session_destroy(session);
	fuse_opt_free_args(&args);
	close(source_fd);
	return err ? 1 : 0;
}
