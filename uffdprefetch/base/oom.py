# SPDX-License-Identifier: Apache-2.0
"""Whom the kernel kills where memory is short: ours before the job's."""

from __future__ import annotations

#: The highest of oom_score_adj (proc_pid_oom_score_adj(5)): such a process goes first.
SCORE_MOST = 1000
#: Of a process whose end frees next to nothing: after those of which much would be free.
SCORE_LATER = 900


def goes_first(score: int = SCORE_MOST) -> None:
    """Have the kernel kill this process before the job.

    Children inherit it, and who has no rights cannot lower it below what it was given: never in a
    process that becomes the job, nor in the launcher, by whose status the job's is known.
    """
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % score)
    except OSError:
        pass  # no /proc, or it cannot be written
