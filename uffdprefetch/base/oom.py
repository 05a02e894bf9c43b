# SPDX-License-Identifier: Apache-2.0
"""Whom the kernel kills where memory is short: ours before the job's."""

from __future__ import annotations

#: Highest oom_score_adj (proc_pid_oom_score_adj(5)): the kernel kills such a process first.
SCORE_MOST = 1000
#: oom_score_adj of a process whose end frees next to nothing: after those whose end frees much.
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
