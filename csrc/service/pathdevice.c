// SPDX-License-Identifier: Apache-2.0
/*
 * pathdevice.c - what is known of the devices that files were found on, for good: the kernel gives a number again when
 * its mount has gone, so there are as many as were mounted at one time.
 */
#include <stdlib.h>

#include "service/pathread.h"

static struct up_device *_Atomic devices; /* the latest first */

struct up_device *up_device_of(uint64_t number)
{
	struct up_device *first = atomic_load(&devices), *upto = NULL, *mine = NULL;

	for (;;) {
		for (struct up_device *d = first; d != upto; d = d->next)
			if (d->number == number) {
				free(mine);
				return d;
			}
		if (!mine && !(mine = calloc(1, sizeof(*mine))))
			return NULL;
		mine->number = number;
		mine->next = upto = first;
		if (atomic_compare_exchange_weak(&devices, &first, mine))
			return mine;
		/* others have come meanwhile, up to those that were seen */
	}
}
