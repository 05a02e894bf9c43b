// SPDX-License-Identifier: Apache-2.0
/*
 * lock_order.c - opens data and lock files in the orders that are, and are not, a read-only LMDB's.
 *
 * argv: a directory with data.mdb, other.mdb and named in it. One line a case on stdout: its name
 * and the path of the lock file that it got, or what it got instead.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOCK_FLAGS (O_RDWR | O_CREAT | O_CLOEXEC)

static const char *directory;

static const char *at(const char *name)
{
	static char path[2][4096];
	static int turn;

	turn = !turn;
	snprintf(path[turn], sizeof(path[turn]), "%s/%s", directory, name);
	return path[turn];
}

/* As mdb_fopen(): the one call that opens whatever an environment opens. */
__attribute__((noinline)) static int env_open(const char *path, int flags)
{
	int fd = open(path, flags, 0644);

	__asm__ volatile("" : "+r"(fd)); /* no tail call */
	return fd;
}

/* Opens the lock file, says which one it is. */
static void lock_beside(const char *name, const char *file, int flags)
{
	char link[64], path[4096];
	int fd, error;
	ssize_t n;

	errno = 42;
	fd = env_open(at(file), flags);
	error = errno;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof(path) - 1);
	path[n < 0 ? 0 : n] = 0;
	printf("%s\t%s\n", name, fd >= 0 && error == 42 ? path : strerror(error));
	fflush(stdout);
}

/* The same, and closes what is open. */
static void lock(const char *name, const char *file, int flags)
{
	lock_beside(name, file, flags);
	close_range(3, ~0U, 0);
}

static void *other_thread(void *path)
{
	int fd = env_open(path, O_RDONLY);

	return (void *)(long)fd;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int fd;

	if (argc != 2)
		return 2;
	directory = argv[1];

	env_open(at("data.mdb"), O_RDONLY | O_CLOEXEC);
	lock("reader", "lock.mdb", LOCK_FLAGS);

	env_open(at("named"), O_RDONLY);
	lock("reader of a file", "named-lock", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	pthread_create(&thread, NULL, other_thread, (void *)at("other.mdb"));
	pthread_join(thread, NULL);
	lock("reader beside another thread", "lock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	fflush(stdout);
	if (!fork()) {
		lock("reader that forked", "lock.mdb", LOCK_FLAGS);
		_exit(0);
	}
	wait(NULL);
	close_range(3, ~0U, 0);

	lock("writer", "lock.mdb", LOCK_FLAGS);
	env_open(at("data.mdb"), O_RDWR);
	lock("writer again", "lock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	lock("reader once", "lock.mdb", LOCK_FLAGS);
	lock("writer after a reader", "lock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	lock_beside("reader that stays", "lock.mdb", LOCK_FLAGS);
	lock("writer beside a reader", "lock.mdb", LOCK_FLAGS);

	fd = open(at("data.mdb"), O_RDONLY); /* not by the call of env_open() */
	lock("writer after somebody looked", "lock.mdb", LOCK_FLAGS);

	fd = env_open(at("data.mdb"), O_RDONLY);
	if (mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED)
		return 1;
	lock("writer after a mapping without locks", "lock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	env_open(at("other.mdb"), O_RDONLY);
	lock("another file between", "lock.mdb", LOCK_FLAGS);

	env_open(at("other.mdb"), O_RDONLY);
	lock("of another data file", "lock.mdb", LOCK_FLAGS);

	close(env_open(at("data.mdb"), O_RDONLY));
	lock("after a close", "lock.mdb", LOCK_FLAGS);

	fd = env_open(at("data.mdb"), O_RDONLY);
	dup2((int)syscall(SYS_openat, AT_FDCWD, at("data.mdb"), O_RDWR), fd);
	lock("writable in its place", "lock.mdb", LOCK_FLAGS);

	fd = env_open(at("data.mdb"), O_RDONLY);
	lseek(fd, 1, SEEK_SET);
	lock("after a read", "lock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	lock("exclusive", "lock.mdb", LOCK_FLAGS | O_EXCL);

	env_open(at("data.mdb"), O_RDONLY);
	lock("truncating", "lock.mdb", LOCK_FLAGS | O_TRUNC);

	env_open(at("data.mdb"), O_RDONLY);
	lock("another name", "clock.mdb", LOCK_FLAGS);

	env_open(at("data.mdb"), O_RDONLY);
	fd = openat(AT_FDCWD, at("."), O_RDONLY | O_DIRECTORY);
	lock("a directory between", "lock.mdb", LOCK_FLAGS);
	return 0;
}
