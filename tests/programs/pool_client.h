/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_client.h - what the programs that drive csrc/service/pool/ themselves share: a file of which
 * every word is known, and the part of an agent (csrc/job/pooled.c) in the process that includes this.
 */
#ifndef POOL_CLIENT_H
#define POOL_CLIENT_H

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/helper.h"

#define CHECK(condition)                                                                     \
	do {                                                                                 \
		if (!(condition)) {                                                          \
			fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, \
				#condition, errno);                                          \
			_exit(1);                                                            \
		}                                                                            \
	} while (0)

#define PAGE 4096u

/* The word at an offset that 8 divides: never 0. */
static inline uint64_t word_at(uint64_t offset, uint64_t salt)
{
	return (offset / 8 + 1 + salt * 0x10000000000ull) * 0x9E3779B97F4A7C15ull;
}

static inline uint64_t draw(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state * 0x2545F4914F6CDD1Dull >> 16;
}

static inline uint64_t below(uint64_t *state, uint64_t n)
{
	return draw(state) % n;
}

static inline int make_words(const char *path, uint64_t bytes, uint64_t salt)
{
	static __thread uint64_t word[8192];
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	for (uint64_t at = 0; at < bytes; at += sizeof(word)) {
		size_t n = bytes - at < sizeof(word) ? (size_t)(bytes - at) : sizeof(word);

		for (size_t i = 0; i < sizeof(word) / 8; i++)
			word[i] = word_at(at + 8 * i, salt);
		CHECK(pwrite(fd, word, n, (off_t)at) == (ssize_t)n);
	}
	CHECK(!fsync(fd)); /* else its pages cannot leave the cache */
	return fd;
}

/* ------------------------------------------------------------------ the agent's part */

static inline int open_pool_uffd(void)
{
	struct uffdio_api api = { .api = UFFD_API,
				  .features = UFFD_FEATURE_MINOR_SHMEM |
					      UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_THREAD_ID };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	CHECK(fd >= 0 && !ioctl(fd, UFFDIO_API, &api));
	return fd;
}

/* Behind the sanitizers' backs: to them, to map something over what another thread reads is a race. */
static inline char *raw_mmap(char *at, uint64_t length, int flags, int fd, uint64_t offset)
{
	return (char *)syscall(SYS_mmap, at, length, PROT_READ, flags, fd, offset);
}

/* As up_pool_enter() and up_pool_detach() of csrc/job/pooled.c. */
static inline char *enter(int uffd, int memfd, char *at, uint64_t length, uint64_t offset)
{
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING |
					       UFFDIO_REGISTER_MODE_MINOR };
	char *p = raw_mmap(at, length, MAP_PRIVATE | MAP_NORESERVE | (at ? MAP_FIXED : 0), memfd,
			   offset);

	CHECK(p != MAP_FAILED && !madvise(p, length, MADV_DONTFORK));
	reg.range.start = (uintptr_t)p;
	reg.range.len = length;
	CHECK(!ioctl(uffd, UFFDIO_REGISTER, &reg));
	return p;
}

static inline void detach(int uffd, int fd, char *at, uint64_t length, uint64_t offset)
{
	struct uffdio_range range = { .start = (uintptr_t)at, .len = length };

	CHECK(raw_mmap(at, length, MAP_SHARED | MAP_FIXED, fd, offset) == at);
	CHECK(!ioctl(uffd, UFFDIO_WAKE, &range));
}

static inline uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
}

/* Bytes of memory that a memfd really has. */
static inline uint64_t real_bytes(int memfd)
{
	struct stat st;

	CHECK(!fstat(memfd, &st));
	return (uint64_t)st.st_blocks * 512;
}

#endif
