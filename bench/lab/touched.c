// SPDX-License-Identifier: Apache-2.0
/* Which pages of a mapping a program touches: the mapping is protected, and each first touch is a
 * SIGSEGV that is noted and let through ([LMDBIO-DM] section VI-C). Page tables would also show what
 * the kernel maps around a fault. For bench/lab/speculate.py, by ctypes; one mapping, one thread. */
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { PAGE = 4096 };

static uint8_t *base, *seen;
static size_t length;
static struct sigaction before;

static void touched(int sig, siginfo_t *info, void *context)
{
	(void)sig;
	(void)context;
	uint8_t *at = info->si_addr;
	if (at >= base && at < base + length) {
		size_t page = (size_t)(at - base) / PAGE;
		seen[page] = 1;
		if (!mprotect(base + page * PAGE, PAGE, PROT_READ))
			return;
	}
	/* not ours: let it happen again without us */
	sigaction(SIGSEGV, &before, NULL);
}

/* Note in pages[] (a byte a page, zeroed by the caller) what is touched of [address, +bytes). */
int touched_watch(void *address, size_t bytes, uint8_t *pages)
{
	base = address;
	length = bytes;
	seen = pages;
	struct sigaction action = { .sa_sigaction = touched, .sa_flags = SA_SIGINFO };
	if (sigaction(SIGSEGV, &action, &before) || mprotect(base, length, PROT_NONE))
		return -1;
	return 0;
}
