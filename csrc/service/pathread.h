/* SPDX-License-Identifier: Apache-2.0 */
/* pathread.h - what paths.c has of pathread.c. */
#ifndef UP_PATHREAD_H
#define UP_PATHREAD_H

#include "service/helper.h"

/* Does what a request says, but for holding, and notes what came of it. Where it has read the file, the descriptor by
 * which it has, which is the caller's to close; else -1. `scratch`: UP_SCRATCH_BYTES. No further piece is read once
 * *stop is not 0. */
int up_path_read(const struct up_path_request *request, struct up_path_result *result, char *scratch,
		 const int *stop);

#endif
