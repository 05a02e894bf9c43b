# SPDX-License-Identifier: Apache-2.0
"""Limits of a process (ulimit) that a service may meet, and the words for them."""

from __future__ import annotations

import errno
import os

from uffdprefetch.base.units import format_size

#: Descriptors without which no service is started: 41 are its own (with the pool and --learn), two
#: for a process of the job, nine for a file.
DESCRIPTORS_LEAST = 64


def file_limit() -> str | None:
    """RLIMIT_FSIZE, which holds for memory that processes share as it does for files (mm/shmem.c),
    for people; None: there is none."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return None
    return f"RLIMIT_FSIZE is {format_size(soft)} (ulimit -f), which holds for shared memory, too"


def why_no_descriptors() -> str | None:
    """Why a service could not have what it needs; None: it can."""
    if not 0 <= os.sysconf("SC_OPEN_MAX") < DESCRIPTORS_LEAST:
        return None
    import resource  # loaded for nobody else

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which a service raises its own
    if not 0 <= hard < DESCRIPTORS_LEAST:
        return None
    return f"RLIMIT_NOFILE is {hard} (ulimit -n): a service needs {DESCRIPTORS_LEAST}"


def is_of_a_limit(error: OSError) -> bool:
    """Whether it is one of these limits that was met, or the machine's for all."""
    return error.errno in (errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def words_of(error: OSError) -> str:
    """The limit that was met, else what the error says."""
    if error.errno == errno.EMFILE:
        return f"RLIMIT_NOFILE is {os.sysconf('SC_OPEN_MAX')} (ulimit -n)"
    limit = file_limit() if error.errno == errno.EFBIG else None
    return limit or error.strerror or str(error)


def why_not_followed(error: OSError) -> str:
    """Why a process of the job is not: what we share with it was not to be had."""
    return f"what it maps is not followed: {words_of(error)}"
