// SPDX-License-Identifier: Apache-2.0
/*
 * page_size.c - preloaded: liblmdb takes its page size from sysconf(_SC_PAGESIZE), which then says
 * PAGE_SIZE (a multiple of the real one), as on a machine with larger pages.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

long sysconf(int name)
{
	long (*next)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
	const char *bytes = getenv("PAGE_SIZE");

	return name == _SC_PAGESIZE && bytes ? atol(bytes) : next(name);
}
