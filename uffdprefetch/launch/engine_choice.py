# SPDX-License-Identifier: Apache-2.0
"""Chooses a run's engine: the requested one, or `cache` where the pool cannot work."""

from __future__ import annotations

import os

from uffdprefetch.base import cgroup
from uffdprefetch.base.config import POOL_LEAST_BYTES, fall_back
from uffdprefetch.base.units import format_size, parse_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from uffdprefetch.base.config import Config

#: Time limit of the probe, which normally takes some milliseconds.
PROBE_SECONDS = 5.0
#: One write(2) to a pipe is whole up to this (PIPE_BUF).
ANSWER_MOST_BYTES = 4096
TEST_LEAST_VARIABLE = "UFFDPREFETCH_TEST_POOL_LEAST"


def choose(config: Config, environ: Mapping[str, str]) -> Config:
    """``config``, or its fall_back() where `--engine pool` is requested and cannot work."""
    why = _why_no_pool(config, environ) if config.engine == "pool" else None
    return fall_back(config, why) if why else config


def _why_no_pool(config: Config, environ: Mapping[str, str]) -> str | None:
    least = parse_size(environ.get(TEST_LEAST_VARIABLE) or f"{POOL_LEAST_BYTES}B")
    if config.budget_bytes < least:
        have, need = format_size(config.budget_bytes), format_size(least)
        return f"--budget {have} is below the least, {need}"
    if environ.get("UFFDPREFETCH_RUNG") == "2":
        return "no userfaultfd (UFFDPREFETCH_RUNG=2)"
    if environ.get("UFFDPREFETCH_SOCKET"):
        return None  # nested in a wrap: its service exists
    why = cgroup.why_no_room(cgroup.POOL_BYTES)
    if why is not None:
        return why
    return _in_a_child(_probe)


def _probe() -> str:
    """Why a pool cannot work here; '' where it can."""
    from uffdprefetch.doctor import pool
    from uffdprefetch.doctor.check import OK, run_isolated

    found = run_isolated(pool.NAME, pool.mechanism, PROBE_SECONDS)
    if found.status == OK:
        return ""
    return found.found + (f" ({found.remedy})" if found.remedy else "")


def _in_a_child(ask: Callable[[], str]) -> str | None:
    """Call ``ask`` in a child, and return its answer, None for ''. The launcher stays beside the
    job to its end: the memory of ``ask``'s imports, some MiB, may be what the job lacks."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = ask()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        try:
            os.write(writer, answer.encode(errors="replace")[:ANSWER_MOST_BYTES])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        said = answers.read().decode(errors="replace")
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # we were started with SIGCHLD ignored
        status = 0
    if status:
        return f"the probe has ended with status {os.waitstatus_to_exitcode(status)}"
    return said or None
