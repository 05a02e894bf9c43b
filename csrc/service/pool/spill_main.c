// SPDX-License-Identifier: Apache-2.0
/*
 * spill_main.c - the disk tier's beginning and end, and what the pool's main thread asks of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/pool/spill_inside.h"

int spill_create(struct spill **out, const struct up_spill_options *o, uint32_t chunk_bytes, uint32_t readers)
{
	struct spill *s = calloc(1, sizeof(*s));
	int ret = 0;

	if (!s)
		return -ENOMEM;
	pthread_mutex_init(&s->lock, NULL);
	s->fd = -1;
	s->holders = 1;
	s->errors.most = o->errors_most;
	s->trial.bytes = o->try_bytes;
	s->chunk_bytes = chunk_bytes;
	s->slot_bytes = (uint64_t)SPILL_SLOT_CHUNKS * (chunk_bytes < (64u << 10) ? chunk_bytes : 64u << 10);
	if (s->slot_bytes < chunk_bytes)
		s->slot_bytes = chunk_bytes;
	spill_books_begin(&s->books, (uint32_t)(s->slot_bytes / chunk_bytes));
	for (uint32_t i = 0; i < readers && !ret; i++)
		ret = spill_start(s, spill_read_loop, s);
	if (!ret)
		ret = spill_start(s, spill_try_loop, s);
	if (!ret) {
		pthread_mutex_lock(&s->lock);
		s->fd = o->fd;
		pthread_mutex_unlock(&s->lock);
		spill_fit(s, o->size_bytes);
		*out = s;
		return 0;
	}
	spill_stop(s);
	spill_end(s);
	return ret;
}

void spill_stop(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->stop = 1;
	up_cond_broadcast(&s->write);
	up_cond_broadcast(&s->read);
	up_cond_broadcast(&s->done);
	while (s->inside)
		up_cond_wait(&s->done, &s->lock);
	pthread_mutex_unlock(&s->lock);
}

void spill_disown(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	s->fd = -1;
	pthread_mutex_unlock(&s->lock);
}

void spill_end(struct spill *s)
{
	pthread_mutex_lock(&s->lock);
	spill_let_go(s);
}

uint64_t spill_slot_bytes(const struct spill *s)
{
	return s->slot_bytes;
}

/* ------------------------------------------------------------------ files */

int spill_add_file(struct spill *s, int file, uint64_t chunks)
{
	struct spill_file f;
	int ret = spill_file_make(&s->books, chunks, &f);

	if (ret)
		return ret;
	pthread_mutex_lock(&s->lock);
	spill_books_add(&s->books, file, &f);
	spill_forget_rate(s, file);
	spill_forget_writes(s, file);
	pthread_mutex_unlock(&s->lock);
	return 0;
}

void spill_drop_file(struct spill *s, int file)
{
	pthread_mutex_lock(&s->lock);
	spill_books_drop_file(&s->books, file);
	pthread_mutex_unlock(&s->lock);
}

void spill_drop_part(struct spill *s, int file, uint64_t chunk)
{
	struct spill_file *f = &s->books.file[file];
	int lost;

	pthread_mutex_lock(&s->lock);
	lost = f->lost;
	if (f->valid)
		spill_books_drop(&s->books, file, chunk / s->books.slot_chunks);
	f->lost = lost; /* who has them go knows of it */
	pthread_mutex_unlock(&s->lock);
}

int spill_has_lost(struct spill *s, int file)
{
	int lost;

	pthread_mutex_lock(&s->lock);
	lost = s->books.file[file].lost;
	s->books.file[file].lost = 0;
	pthread_mutex_unlock(&s->lock);
	return lost;
}

uint64_t spill_room(struct spill *s)
{
	uint64_t slots;

	pthread_mutex_lock(&s->lock);
	slots = !spill_is_on(s) ? 0 : s->writes.full ? s->books.used : s->books.most;
	pthread_mutex_unlock(&s->lock);
	return slots * s->slot_bytes;
}

void spill_forget_file(struct spill *s, int file)
{
	pthread_mutex_lock(&s->lock);
	spill_books_forget(&s->books, file);
	pthread_mutex_unlock(&s->lock);
}

const uint16_t *spill_copies(const struct spill *s, int file)
{
	return __atomic_load_n(&s->books.file[file].valid, __ATOMIC_ACQUIRE);
}

uint32_t spill_slot_chunks(const struct spill *s)
{
	return s->books.slot_chunks;
}

void spill_count_file(struct spill *s, int file, struct up_pool_file_counts *out)
{
	pthread_mutex_lock(&s->lock);
	out->disk_bytes = s->books.file[file].copies * s->chunk_bytes;
	out->disk_written_bytes = s->writes.file[file].bytes;
	out->disk_dropped_bytes = s->writes.file[file].dropped_bytes;
	pthread_mutex_unlock(&s->lock);
}

void spill_fit(struct spill *s, uint64_t bytes)
{
	uint64_t slots = bytes / s->slot_bytes;

	pthread_mutex_lock(&s->lock);
	spill_books_fit(&s->books, slots < NO_SLOT - 1 ? (uint32_t)slots : NO_SLOT - 1);
	spill_judge(s);
	up_cond_broadcast(&s->write);
	pthread_mutex_unlock(&s->lock);
}

void spill_count(struct spill *s, struct up_spill_counts *out)
{
	pthread_mutex_lock(&s->lock);
	*out = (struct up_spill_counts){
		.size_bytes = s->books.most * s->slot_bytes,
		.used_bytes = s->books.used * s->slot_bytes,
		.written_bytes = s->writes.bytes,
		.read_bytes = s->reads.bytes,
		.dropped_bytes = s->writes.dropped_bytes,
		.refused_bytes = s->writes.refused_bytes,
		.write_busy_ns = s->writes.busy_ns,
		.read_busy_ns = s->reads.busy_ns,
		.late_reads = s->reads.late,
		.disk_rate = s->trial.disk_rate,
		.storage_rate = s->trial.storage_rate,
		.full = s->writes.full,
		.ended = s->errors.ended,
	};
	memcpy(out->errors, s->errors.times, sizeof(out->errors));
	memcpy(out->error, s->errors.number, sizeof(out->error));
	pthread_mutex_unlock(&s->lock);
}
