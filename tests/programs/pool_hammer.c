// SPDX-License-Identifier: Apache-2.0
/*
 * pool_hammer FILE make BYTES - a file of which every word is a function of its place, and not 0
 * pool_hammer FILE read PROCESSES THREADS MWORDS SEED - verify so many million words of it
 * pool_hammer FILE follow PROCESSES THREADS EPOCHS DIRECTORY - verify it in known orders
 *
 * Each process maps the whole file; each thread reads pieces of it forwards, backwards, with a
 * stride, page by page and word by word in random places. The answer is a line of JSON. A word that
 * is wrong is counted, a 0 once more, and the first one of each thread is told on stderr.
 *
 * What is followed are DIRECTORY/EPOCH-RANK.npy: [start, end) bytes, int64. Each process is a
 * program of its own with its RANK; its threads take an order's items in turn. A process that is at
 * the end of an epoch adds a dot to DIRECTORY/epochs. The one in the middle is read again as long as
 * DIRECTORY/held is there.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE_WORDS 512u
#define PIECE_PAGES 2048u /* 8 MiB: over the 4 MiB that the pool maps at once */
#define RANDOM_PAGES 512u

struct tally {
	uint64_t words, wrong, zeros;
};

struct reader {
	const uint64_t *word;
	uint64_t pages, wanted, state;
	struct order *order;
	struct tally tally;
};

struct order {
	uint64_t (*item)[2]; /* bytes */
	uint64_t items, next;
};

static uint64_t word_at(uint64_t index)
{
	return (index + 1) * 0x9E3779B97F4A7C15ull;
}

static uint64_t below(uint64_t *state, uint64_t n)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (*state * 0x2545F4914F6CDD1Dull >> 16) % n;
}

static void look(struct reader *r, uint64_t first, uint64_t words)
{
	uint64_t wrong = 0;

	for (uint64_t i = first; i < first + words; i++)
		wrong += r->word[i] != word_at(i);
	r->tally.words += words;
	__asm__ volatile("" ::: "memory"); /* the next look reads again */
	if (!wrong)
		return;
	for (uint64_t i = first; i < first + words; i++) {
		uint64_t word = ((const volatile uint64_t *)r->word)[i];

		r->tally.zeros += word == 0;
		if (!r->tally.wrong && word != word_at(i))
			fprintf(stderr, "pid %d: word %llu is %llx\n", getpid(),
				(unsigned long long)i, (unsigned long long)word);
	}
	r->tally.wrong += wrong;
}

static void page(struct reader *r, uint64_t number)
{
	look(r, number * PAGE_WORDS, PAGE_WORDS);
}

static void one_piece(struct reader *r)
{
	uint64_t most = r->pages < PIECE_PAGES ? r->pages : PIECE_PAGES;
	uint64_t pages = 1 + below(&r->state, most), first = below(&r->state, r->pages - pages + 1);
	uint64_t stride = 2 + below(&r->state, 40);

	switch (below(&r->state, 6)) {
	case 0 ... 1:
		for (uint64_t i = 0; i < pages; i++)
			page(r, first + i);
		break;
	case 2:
		for (uint64_t i = pages; i-- > 0;)
			page(r, first + i);
		break;
	case 3:
		for (uint64_t i = 0; i < pages; i += stride)
			page(r, first + i);
		break;
	case 4:
		for (uint64_t i = 0; i < RANDOM_PAGES; i++)
			page(r, below(&r->state, r->pages));
		break;
	case 5:
		for (uint64_t i = 0; i < RANDOM_PAGES; i++)
			look(r, below(&r->state, r->pages * PAGE_WORDS), 1);
		break;
	}
}

static void *read_words(void *cookie)
{
	struct reader *r = cookie;

	while (r->tally.words < r->wanted)
		one_piece(r);
	return NULL;
}

static void process(const char *path, unsigned int threads, uint64_t wanted, uint64_t seed, int out)
{
	struct reader *reader = calloc(threads, sizeof(*reader));
	pthread_t *thread = calloc(threads, sizeof(*thread));
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct tally sum = { 0 };
	struct stat st;
	void *map;

	if (!reader || !thread || fd < 0 || fstat(fd, &st))
		_exit(3);
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		_exit(3);
	for (unsigned int i = 0; i < threads; i++) {
		reader[i] = (struct reader){ .word = map, .pages = (uint64_t)st.st_size / 4096,
					     .wanted = wanted,
					     .state = (seed * 1000 + i) * 0x9E3779B97F4A7C15ull | 1 };
		if (pthread_create(&thread[i], NULL, read_words, &reader[i]))
			_exit(3);
	}
	for (unsigned int i = 0; i < threads; i++) {
		pthread_join(thread[i], NULL);
		sum.words += reader[i].tally.words;
		sum.wrong += reader[i].tally.wrong;
		sum.zeros += reader[i].tally.zeros;
	}
	if (write(out, &sum, sizeof(sum)) != (ssize_t)sizeof(sum))
		_exit(3);
	_exit(0);
}

static void *follow(void *cookie)
{
	struct reader *r = cookie;
	uint64_t i;

	while ((i = __atomic_fetch_add(&r->order->next, 1, __ATOMIC_RELAXED)) < r->order->items) {
		const uint64_t *item = r->order->item[i];

		look(r, item[0] / 8, (item[1] - item[0]) / 8);
	}
	return NULL;
}

static struct order load(const char *directory, unsigned int epoch, const char *rank)
{
	struct order order = { 0 };
	unsigned char head[10];
	char path[4096];
	struct stat st;
	long begin;
	FILE *file;

	snprintf(path, sizeof(path), "%s/%u-%s.npy", directory, epoch, rank);
	file = fopen(path, "rbe");
	if (!file || fstat(fileno(file), &st) || fread(head, sizeof(head), 1, file) != 1)
		_exit(3);
	begin = (long)sizeof(head) + head[8] + 256L * head[9]; /* format 1.0 */
	order.items = (uint64_t)(st.st_size - begin) / sizeof(*order.item);
	order.item = calloc(order.items, sizeof(*order.item));
	if (!order.item || fseek(file, begin, SEEK_SET) ||
	    fread(order.item, sizeof(*order.item), order.items, file) != order.items)
		_exit(3);
	fclose(file);
	return order;
}

static int rank(char **argv)
{
	unsigned int threads = (unsigned int)strtoul(argv[3], NULL, 10);
	unsigned int epochs = (unsigned int)strtoul(argv[4], NULL, 10);
	struct reader *reader = calloc(threads, sizeof(*reader));
	pthread_t *thread = calloc(threads, sizeof(*thread));
	int fd = open(argv[1], O_RDONLY | O_CLOEXEC), log;
	struct tally sum = { 0 };
	char path[4096], held[4096];
	struct stat st;
	void *map;

	snprintf(path, sizeof(path), "%s/epochs", argv[5]);
	snprintf(held, sizeof(held), "%s/held", argv[5]);
	log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (!reader || !thread || log < 0 || fd < 0 || fstat(fd, &st))
		return 3;
	map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return 3;
	for (unsigned int epoch = 0; epoch < epochs; epoch++) {
		struct order order = load(argv[5], epoch, getenv("RANK"));

		do {
			order.next = 0;
			for (unsigned int i = 0; i < threads; i++) {
				reader[i].word = map;
				reader[i].order = &order;
				if (pthread_create(&thread[i], NULL, follow, &reader[i]))
					return 3;
			}
			for (unsigned int i = 0; i < threads; i++)
				pthread_join(thread[i], NULL);
		} while (epoch == epochs / 2 && !access(held, F_OK));
		free(order.item);
		if (write(log, ".", 1) != 1)
			return 3;
	}
	for (unsigned int i = 0; i < threads; i++) {
		sum.words += reader[i].tally.words;
		sum.wrong += reader[i].tally.wrong;
		sum.zeros += reader[i].tally.zeros;
	}
	return write(atoi(argv[6]), &sum, sizeof(sum)) == (ssize_t)sizeof(sum) ? 0 : 3;
}

static void become_rank(char **argv, unsigned int number, int out)
{
	char name[16], descriptor[16];
	char *words[] = { argv[0], argv[1], "rank", argv[4], argv[5], argv[6], descriptor, NULL };

	snprintf(name, sizeof(name), "%u", number);
	snprintf(descriptor, sizeof(descriptor), "%d", out);
	if (setenv("RANK", name, 1) == 0 && setenv("WORLD_SIZE", argv[3], 1) == 0)
		execv(argv[0], words);
	_exit(3);
}

static int make(const char *path, uint64_t bytes)
{
	static uint64_t word[1 << 16];
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	for (uint64_t at = 0; fd >= 0 && at < bytes; at += sizeof(word)) {
		for (uint64_t i = 0; i < 1 << 16; i++)
			word[i] = word_at(at / 8 + i);
		if (write(fd, word, sizeof(word)) != (ssize_t)sizeof(word))
			return 3;
	}
	return fd < 0 || fsync(fd) ? 3 : 0;
}

int main(int argc, char **argv)
{
	unsigned int processes, threads;
	struct tally sum = { 0 }, one;
	int out[2], status, bad = 0;
	uint64_t wanted, seed;

	if (argc == 4 && !strcmp(argv[2], "make"))
		return make(argv[1], strtoull(argv[3], NULL, 10));
	if (argc != 7)
		return 2;
	if (!strcmp(argv[2], "rank"))
		return rank(argv);
	processes = (unsigned int)strtoul(argv[3], NULL, 10);
	threads = (unsigned int)strtoul(argv[4], NULL, 10);
	wanted = strtoull(argv[5], NULL, 10) * 1000000 / processes / threads;
	seed = strtoull(argv[6], NULL, 10);
	if (pipe(out))
		return 3;
	for (unsigned int i = 0; i < processes; i++) {
		if (fork())
			continue;
		if (!strcmp(argv[2], "follow"))
			become_rank(argv, i, out[1]);
		process(argv[1], threads, wanted, seed * 100 + i, out[1]);
	}
	close(out[1]);
	while (read(out[0], &one, sizeof(one)) == (ssize_t)sizeof(one)) {
		sum.words += one.words;
		sum.wrong += one.wrong;
		sum.zeros += one.zeros;
	}
	for (unsigned int i = 0; i < processes; i++)
		bad |= wait(&status) < 0 || status;
	printf("{\"words\": %llu, \"wrong\": %llu, \"zeros\": %llu}\n",
	       (unsigned long long)sum.words, (unsigned long long)sum.wrong,
	       (unsigned long long)sum.zeros);
	return bad ? 3 : 0;
}
