// SPDX-License-Identifier: Apache-2.0
/*
 * cond_stress [SEED] - threads that sleep on one condition variable (csrc/service/cond.h), and others
 * that put something into a queue and signal it once for each: all of it must be taken, or the signal was
 * lost. With -DOF_THE_C_LIBRARY the same by pthread_cond_t.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "service/cond.h"

#ifdef OF_THE_C_LIBRARY
#define COND pthread_cond_t
#define WAIT pthread_cond_wait
#define SIGNAL pthread_cond_signal
#else
#define COND struct up_cond
#define WAIT up_cond_wait
#define SIGNAL up_cond_signal
#endif

/* One at a time misses what another of several may get. */
static const int takers[] = { 1, 2, 6 };
#define TAKERS 6
#define GIVERS 3
#define ROUNDS 5000
/* Of a queue that nobody empties; on a machine with much else to do. */
#define LOST_SECONDS 10

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static COND more;
static uint64_t queue, taken;
static int stop;

static uint64_t draw(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	return *state ^= *state << 17;
}

static void work(uint64_t turns)
{
	for (volatile uint64_t i = 0; i < turns;)
		i++;
}

static void *taker(void *seed)
{
	uint64_t state = (uintptr_t)seed;

	pthread_mutex_lock(&lock);
	for (;;) {
		while (!queue && !stop)
			WAIT(&more, &lock);
		if (!queue)
			break;
		queue--;
		pthread_mutex_unlock(&lock);
		work(draw(&state) % 300);
		pthread_mutex_lock(&lock);
		taken++;
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

/* Puts, and waits until all is taken, so that a lost signal has no other behind it. */
static void *giver(void *seed)
{
	uint64_t state = (uintptr_t)seed;

	for (uint64_t i = 0; i < ROUNDS; i++) {
		uint64_t some = 1 + draw(&state) % 3;
		time_t end;
		int left;

		pthread_mutex_lock(&lock);
		queue += some;
		pthread_mutex_unlock(&lock);
		for (uint64_t n = 0; n < some; n++)
			SIGNAL(&more);
		end = time(NULL) + LOST_SECONDS;
		do {
			work(draw(&state) % 300);
			pthread_mutex_lock(&lock);
			left = queue > 0;
			pthread_mutex_unlock(&lock);
			if (left && time(NULL) > end) {
				fprintf(stderr, "a signal was lost in round %llu\n",
					(unsigned long long)i);
				exit(1);
			}
		} while (left);
	}
	return NULL;
}

static void all(int takers_now, uint64_t seed)
{
	pthread_t take[TAKERS], give[GIVERS];

	stop = 0;
	for (int i = 0; i < takers_now; i++)
		pthread_create(&take[i], NULL, taker, (void *)(uintptr_t)(seed * 100 + (uint64_t)i + 1));
	for (int i = 0; i < GIVERS; i++)
		pthread_create(&give[i], NULL, giver, (void *)(uintptr_t)(seed * 100 + (uint64_t)i + 50));
	for (int i = 0; i < GIVERS; i++)
		pthread_join(give[i], NULL);
	pthread_mutex_lock(&lock);
	stop = 1;
	pthread_mutex_unlock(&lock);
	for (int i = 0; i < takers_now; i++)
		SIGNAL(&more);
	for (int i = 0; i < takers_now; i++)
		pthread_join(take[i], NULL);
}

#ifndef OF_THE_C_LIBRARY
static void wait_until_the_time_is_up(void)
{
	struct timespec now;
	uint64_t until_ns;

	clock_gettime(CLOCK_MONOTONIC, &now);
	until_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + 1000000;
	pthread_mutex_lock(&lock);
	while (up_cond_wait_until(&more, &lock, until_ns) != ETIMEDOUT)
		;
	pthread_mutex_unlock(&lock);
}
#endif

int main(int argc, char **argv)
{
	uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;

	for (size_t i = 0; i < sizeof(takers) / sizeof(takers[0]); i++)
		all(takers[i], seed);
#ifndef OF_THE_C_LIBRARY
	wait_until_the_time_is_up();
#endif
	printf("%llu taken\n", (unsigned long long)taken);
	return 0;
}
