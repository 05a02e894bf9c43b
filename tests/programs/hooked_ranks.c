// SPDX-License-Identifier: Apache-2.0
/*
 * hooked_ranks - ranks of an MPI whose memory hooks overwrite the beginnings of munmap, mmap ... (UCX).
 *
 *   hooked_ranks FILE       FILE holds o ^ KEY at each multiple o of 8
 *
 * Each rank maps FILE, reads half of it, calls MPI_Init, says whether munmap was overwritten, unmaps
 * FILE, takes anonymous memory of the same size (mostly at the same addresses) and fills it, maps FILE
 * again and reads all of it. Rank 0 says "walking" after the first half and then reads a line of its
 * standard input, so that a test can break something there. In the end each rank checks its own
 * memory. The last line, of rank 0: overwritten N wrong N own N ranks N
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KEY 0x5555555555555555ull
#define MINE 0xa5a5a5a5a5a5a5a5ull
#define PIECE ((size_t)1 << 20)

static long walk(const char *p, size_t from, size_t to)
{
	struct timespec pause = { .tv_nsec = 2000000 }; /* a step of computation */
	long wrong = 0;

	for (size_t o = from; o < to; o += 8) {
		if (o % PIECE == 0)
			nanosleep(&pause, NULL);
		wrong += *(const volatile uint64_t *)(p + o) != (o ^ KEY);
	}
	return wrong;
}

static char *map(const char *path, size_t bytes)
{
	int fd = open(path, O_RDONLY);
	char *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

	if (fd < 0 || p == MAP_FAILED) {
		perror(path);
		exit(2);
	}
	close(fd);
	return p;
}

int main(int argc, char **argv)
{
	unsigned char before[8], line[16];
	long count[3] = { 0 }, sum[3]; /* overwritten, wrong, own */
	int rank, ranks;
	struct stat st;
	uint64_t *own;
	size_t bytes;
	void *code;
	char *p;

	if (argc != 2 || stat(argv[1], &st))
		return 2;
	bytes = (size_t)st.st_size;
	code = dlsym(RTLD_DEFAULT, "munmap");
	memcpy(before, code, sizeof(before));
	p = map(argv[1], bytes);
	count[1] += walk(p, 0, bytes / 2);
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	count[0] = memcmp(before, code, sizeof(before)) != 0;
	munmap(p, bytes);
	own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED)
		return 2;
	for (size_t i = 0; i < bytes / 8; i++)
		own[i] = MINE;
	p = map(argv[1], bytes);
	count[1] += walk(p, 0, bytes / 2);
	MPI_Barrier(MPI_COMM_WORLD);
	if (!rank) {
		puts("walking");
		fflush(stdout);
		if (!fgets((char *)line, sizeof(line), stdin))
			return 2;
	}
	MPI_Barrier(MPI_COMM_WORLD);
	count[1] += walk(p, bytes / 2, bytes);
	for (size_t i = 0; i < bytes / 8; i++)
		count[2] += own[i] != MINE;
	MPI_Reduce(count, sum, 3, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (!rank)
		printf("overwritten %ld wrong %ld own %ld ranks %d\n", sum[0], sum[1], sum[2], ranks);
	MPI_Finalize();
	return 0;
}
