// SPDX-License-Identifier: Apache-2.0
/*
 * text.c - the few functions on memory and text that a C library would give.
 *
 * The preload object is linked against no C library, so that it loads beside any. The compiler may
 * put calls of those on memory anywhere.
 */
#include <sys/auxv.h>

#include "job/preload.h"

#ifndef UP_AGENT_PTHREAD /* a sanitizer's run-time has its own */
__attribute__((visibility("hidden"))) void *memcpy(void *to, const void *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
	return to;
}

__attribute__((visibility("hidden"))) void *memmove(void *to, const void *from, size_t bytes)
{
	if ((uintptr_t)to - (uintptr_t)from >= bytes)
		return memcpy(to, from, bytes);
	while (bytes--)
		((unsigned char *)to)[bytes] = ((const unsigned char *)from)[bytes];
	return to;
}

__attribute__((visibility("hidden"))) void *memset(void *to, int value, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		((unsigned char *)to)[i] = (unsigned char)value;
	return to;
}

__attribute__((visibility("hidden"))) int memcmp(const void *a, const void *b, size_t bytes)
{
	const unsigned char *x = a, *y = b;

	for (size_t i = 0; i < bytes; i++)
		if (x[i] != y[i])
			return x[i] - y[i];
	return 0;
}

#ifdef __aarch64__
#pragma weak getauxval
/* What libgcc's atomics ask, once, before any constructor of ours. */
__attribute__((visibility("hidden"))) unsigned long __getauxval(unsigned long type)
{
	return getauxval ? getauxval(type) : 0;
}
#endif
#endif

int up_same_text(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

size_t up_text_bytes(const char *text, size_t most)
{
	size_t n = 0;

	while (n < most && text[n])
		n++;
	return n;
}
