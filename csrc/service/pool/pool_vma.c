// SPDX-License-Identifier: Apache-2.0
/* pool_vma.c - vma.c for the service: an object of its own, since the one that is loaded into jobs is
 * built without all that needs a C library (setup.py). */
#include "common/vma.c"
