// SPDX-License-Identifier: Apache-2.0
/*
 * spill_try.c - what the disk of the tier brings is tried once, when the first chunks are about to go there: one that is
 * slower than what the files are read from helps nobody, and would be written for nothing.
 *
 * By a thread of its own, in slots that are free, while others write.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/pool/spill_inside.h"

/* Of the free slots no more than this part. */
#define TRIED_PART 4u

void spill_ask_trial(struct spill *s)
{
	if (s->trial.state != TRIAL_NONE || !s->trial.bytes)
		return;
	s->trial.state = TRIAL_ASKED;
	up_cond_broadcast(&s->done);
}

void spill_judge(struct spill *s)
{
	struct spill_trial *t = &s->trial;
	int slower;

	if (t->state != TRIAL_DONE)
		return;
	slower = spill_is_slower(s, &t->disk_rate, &t->storage_rate);
	if (slower < 0)
		return; /* nothing is known of storage yet */
	t->state = TRIAL_JUDGED;
	if (slower)
		spill_give_up_all(s, ETIME);
}

/* Write and read each of these slots: what a read took, or 0 of those that failed. */
static void try(const struct spill *s, int fd, const uint32_t *slot, uint32_t count, char *buffer, uint64_t *took_ns)
{
	for (uint32_t i = 0; i < count; i++)
		took_ns[i] = pwrite(fd, buffer, s->slot_bytes, (off_t)spill_offset(s, slot[i], 0)) == (ssize_t)s->slot_bytes;
	for (uint32_t i = 0; i < count; i++) {
		uint64_t began = pool_now_ns();
		ssize_t n = took_ns[i] ? pread(fd, buffer, s->slot_bytes, (off_t)spill_offset(s, slot[i], 0)) : 0;

		took_ns[i] = n == (ssize_t)s->slot_bytes ? pool_now_ns() - began : 0;
	}
}

/* With the lock, which it leaves and takes again. */
static void run(struct spill *s)
{
	uint32_t slot[SPILL_TRIED_MOST], want = (uint32_t)(s->trial.bytes / s->slot_bytes), count;
	uint64_t took_ns[SPILL_TRIED_MOST];
	char *buffer = spill_buffer(s->slot_bytes);
	int fd = s->fd;

	want = want < SPILL_TRIED_MOST ? want : SPILL_TRIED_MOST;
	count = buffer ? spill_books_borrow(&s->books, slot, want, TRIED_PART) : 0;
	s->trial.state = TRIAL_RUNS;
	pthread_mutex_unlock(&s->lock);
	try(s, fd, slot, count, buffer, took_ns);
	spill_count_cpu(s);
	if (buffer)
		munmap(buffer, s->slot_bytes);
	pthread_mutex_lock(&s->lock);
	spill_books_return(&s->books, slot, count);
	for (uint32_t i = 0; i < count; i++)
		if (took_ns[i])
			spill_disk_was_read(s, s->slot_bytes, took_ns[i]);
	s->trial.state = TRIAL_DONE;
	up_cond_broadcast(&s->write); /* who gives back blocks has waited */
	spill_judge(s);
}

void *spill_try_loop(void *spill)
{
	struct spill *s = spill;

	pthread_mutex_lock(&s->lock);
	while (spill_is_on(s) && s->trial.state < TRIAL_ASKED)
		up_cond_wait(&s->done, &s->lock);
	if (spill_is_on(s))
		run(s);
	pthread_mutex_unlock(&s->lock);
	spill_thread_ends(s);
	return NULL;
}
