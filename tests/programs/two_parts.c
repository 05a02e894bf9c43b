// SPDX-License-Identifier: Apache-2.0
/*
 * two_parts.c FILE MAPPINGS - two threads change two parts of one mapping at a time, by libc, and one of them
 * maps memory of its own where its part was: that must stay as it wrote it. All mappings are made first; the
 * first call that changes one may cost the preload object its thread. The last mapping is unmapped as a whole, and
 * a child of fork(2), whose thread lives, maps the file once more.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAPPINGS_MAX 1000
/* So far apart, at most, the two begin: about what putting a file back takes. */
#define SPINS_MAX 20000

static const size_t page = 4096;
static unsigned char *mapping[MAPPINGS_MAX];
static _Atomic int arrived;
static size_t size;
static int count;

static void fail(const char *what)
{
	perror(what);
	exit(90);
}

static void spin(unsigned int times)
{
	for (unsigned int i = 0; i < times; i++)
		__asm__ volatile("" ::: "memory");
}

/* Both are here, and neither sleeps: who is woken would come much later. */
static void meet(int number)
{
	atomic_fetch_add(&arrived, 1);
	while (atomic_load(&arrived) < 2 * number)
		;
}

/* The last page of each. */
static void *trim(void *unused)
{
	unsigned int seed = 1;

	for (int i = 1; i < count - 1; i++) {
		meet(i);
		spin((unsigned int)rand_r(&seed) % SPINS_MAX);
		if (munmap(mapping[i] + size - page, page))
			fail("munmap of the last page");
	}
	return unused;
}

/* All but the first and the last. */
static int replace(int number)
{
	size_t length = size - 2 * page;
	unsigned char *own = mapping[number] + page;

	if (munmap(own, length))
		fail("munmap");
	/* Another thread may have got some of it. */
	if (mmap(own, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
		 -1, 0) != own)
		return 0;
	for (size_t at = 0; at < length; at += page)
		own[at] = (unsigned char)(at / page + 1);
	return 1;
}

static void check(int number)
{
	const unsigned char *own = mapping[number] + page;

	for (size_t at = 0; at < size - 2 * page; at += page)
		if (own[at] != (unsigned char)(at / page + 1)) {
			printf("mapping %d: page %zu is not as it was written\n", number, at / page);
			exit(1);
		}
}

static void fork_one(int fd)
{
	pid_t child = fork();
	int status;

	if (!child) {
		if (mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED)
			fail("mmap in the child");
		usleep(100000); /* what its thread knows of its parent is told */
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		fail("child");
}

int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDONLY), replaced = 0, is_own[MAPPINGS_MAX] = { 0 };
	unsigned int seed = 2;
	pthread_t thread;
	struct stat st;

	count = atoi(argv[argc - 1]);
	if (fd < 0 || fstat(fd, &st) || count > MAPPINGS_MAX)
		fail("file");
	size = (size_t)st.st_size & ~(page - 1);
	for (int i = 0; i < count; i++) {
		mapping[i] = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
		if (mapping[i] == MAP_FAILED)
			fail("mmap");
	}
	if (munmap(mapping[0] + size - page, page))
		fail("munmap of the first one's last page");
	if (pthread_create(&thread, NULL, trim, NULL))
		fail("thread");
	for (int i = 1; i < count - 1; i++) {
		meet(i);
		spin((unsigned int)rand_r(&seed) % SPINS_MAX);
		is_own[i] = replace(i);
		replaced += is_own[i];
	}
	pthread_join(thread, NULL);
	for (int i = 1; i < count - 1; i++)
		if (is_own[i])
			check(i);
	if (munmap(mapping[count - 1], size))
		fail("munmap of the last one");
	fork_one(fd);
	printf("%s\n", replaced > count / 2 ? "ok" : "seldom given the place again");
	return 0;
}
