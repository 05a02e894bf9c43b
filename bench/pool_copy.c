// SPDX-License-Identifier: Apache-2.0
/*
 * pool_copy.c - a user-space pager of the usual design, for bench/pool.py fill
 *
 *   pool_copy FILE PAGE_BYTES
 *
 * What LLNL's UMap does for a fault, in its barest form: anonymous memory registered MISSING, a
 * thread that takes a fault, reads the page that it lies in (PAGE_BYTES, O_DIRECT) into a buffer
 * and installs it by UFFDIO_COPY. UMap passes the fault on to another thread (a "filler") and keeps
 * books; this does neither, so it costs less for each page. Reads the file once, in order, and
 * prints a line of JSON as pool_read does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct {
	int uffd, fd;
	char *base, *buffer;
	uint64_t page_bytes, size_bytes, faults;
} pager;

static void die(const char *what)
{
	fprintf(stderr, "pool_copy: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void *pager_thread(void *arg)
{
	struct uffd_msg msg;

	(void)arg;
	while (read(pager.uffd, &msg, sizeof(msg)) == (ssize_t)sizeof(msg)) {
		uint64_t offset = msg.arg.pagefault.address - (uintptr_t)pager.base;

		offset -= offset % pager.page_bytes;
		ssize_t got = pread(pager.fd, pager.buffer, pager.page_bytes, (off_t)offset);
		if (got <= 0)
			die("pread");
		pager.faults++; /* before its reader goes on, which may end */
		struct uffdio_copy copy = {
			.dst = (uintptr_t)pager.base + offset,
			.src = (uintptr_t)pager.buffer,
			.len = pager.page_bytes,
		};
		if (ioctl(pager.uffd, UFFDIO_COPY, &copy) && errno != EEXIST)
			die("UFFDIO_COPY");
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct uffdio_api api = { .api = UFFD_API };
	uint64_t sum = 0, begin, end, mapped;
	pthread_t thread;
	struct stat st;
	void *buffer;

	if (argc != 3 || !(pager.page_bytes = strtoull(argv[2], NULL, 10)) ||
	    pager.page_bytes % 4096)
		return 2;
	pager.fd = open(argv[1], O_RDONLY | O_CLOEXEC | O_DIRECT);
	if (pager.fd < 0 || fstat(pager.fd, &st))
		die(argv[1]);
	pager.size_bytes = (uint64_t)st.st_size;
	mapped = (pager.size_bytes + pager.page_bytes - 1) / pager.page_bytes * pager.page_bytes;
	pager.base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pager.base == MAP_FAILED || posix_memalign(&buffer, 4096, pager.page_bytes))
		die("memory");
	pager.buffer = memset(buffer, 0, pager.page_bytes);
	/* 4 KiB pages, as a pager that does not ask for more */
	madvise(pager.base, mapped, MADV_NOHUGEPAGE);
	pager.uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (pager.uffd < 0 || ioctl(pager.uffd, UFFDIO_API, &api))
		die("userfaultfd");
	struct uffdio_register reg = {
		.range = { (uintptr_t)pager.base, mapped },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	if (ioctl(pager.uffd, UFFDIO_REGISTER, &reg) ||
	    pthread_create(&thread, NULL, pager_thread, NULL))
		die("register");
	begin = now_ns();
	for (uint64_t at = 0; at + 8 <= pager.size_bytes; at += 8)
		sum += *(const volatile uint64_t *)(pager.base + at) * (at | 1);
	end = now_ns();
	printf("{\"event\": \"epoch\", \"rank\": 0, \"epoch\": 0, \"begin_ns\": %" PRIu64
	       ", \"end_ns\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"sum\": %" PRIu64
	       ", \"faults\": %" PRIu64 "}\n",
	       begin, end, pager.size_bytes, sum, pager.faults);
	return 0;
}
