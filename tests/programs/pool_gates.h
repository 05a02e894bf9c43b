/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_gates.h - gates in the pool's own calls: a program that is linked with --wrap=pread,
 * --wrap=fallocate, --wrap=ioctl and --wrap=syscall stops the pool's threads in the middle of a read,
 * of a punch, of a UFFDIO_CONTINUE or MADV_COLLAPSE, and lets them go on when it likes.
 */
#ifndef POOL_GATES_H
#define POOL_GATES_H

#include <pthread.h>
#include <sched.h>
#include <stdarg.h>

#include "pool_client.h"

enum { READ, PUNCH, CONTINUE, GATES };

static struct {
	pthread_mutex_t lock;
	pthread_cond_t open;
	int closed[GATES], held[GATES];
	uint64_t met[GATES]; /* times that somebody stood there */
} gate = { .lock = PTHREAD_MUTEX_INITIALIZER, .open = PTHREAD_COND_INITIALIZER };

static __thread int opens_them; /* the main thread must not stand there itself */

static void pass(int which)
{
	if (opens_them)
		return;
	pthread_mutex_lock(&gate.lock);
	gate.met[which] += gate.closed[which] != 0;
	gate.held[which]++;
	while (gate.closed[which])
		pthread_cond_wait(&gate.open, &gate.lock);
	gate.held[which]--;
	pthread_mutex_unlock(&gate.lock);
}

static inline void set_gates(unsigned int closed)
{
	pthread_mutex_lock(&gate.lock);
	for (int i = 0; i < GATES; i++)
		gate.closed[i] = closed >> i & 1;
	pthread_cond_broadcast(&gate.open);
	pthread_mutex_unlock(&gate.lock);
}

static inline int somebody_is_held(void)
{
	int held = 0;

	pthread_mutex_lock(&gate.lock);
	for (int i = 0; i < GATES; i++)
		held += gate.closed[i] && gate.held[i];
	pthread_mutex_unlock(&gate.lock);
	return held;
}

static inline void yield(int times)
{
	while (times-- > 0)
		sched_yield();
}

static inline int is_held(int which)
{
	int held;

	pthread_mutex_lock(&gate.lock);
	held = gate.held[which];
	pthread_mutex_unlock(&gate.lock);
	return held;
}

static void *open_gates(void *cookie)
{
	yield(*(int *)cookie);
	set_gates(0);
	return NULL;
}

ssize_t __real_pread(int fd, void *buffer, size_t count, off_t offset);
ssize_t __wrap_pread(int fd, void *buffer, size_t count, off_t offset);
ssize_t __wrap_pread(int fd, void *buffer, size_t count, off_t offset)
{
	pass(READ);
	return __real_pread(fd, buffer, count, offset);
}

int __real_fallocate(int fd, int mode, off_t offset, off_t length);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t length);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t length)
{
	pass(PUNCH);
	return __real_fallocate(fd, mode, offset, length);
}

int __real_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	void *argument;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	if (request == UFFDIO_CONTINUE)
		pass(CONTINUE);
	return __real_ioctl(fd, request, argument);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
	long a[6];
	va_list list;

	va_start(list, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (number == SYS_process_madvise)
		pass(CONTINUE);
	return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#endif
