# SPDX-License-Identifier: Apache-2.0
"""How a job and its service ended, where they did not end well; from the summary's JSON."""

from __future__ import annotations

import os
import signal

from uffdprefetch.base.units import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from uffdprefetch.report.line import Line

#: By these users, terminals and batch systems end programs; a shell then exits with 128 more.
_OF_USERS = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
_NUMBERS = frozenset(map(int, signal.Signals))


def how_it_failed(summary: Mapping[str, Any]) -> str | None:
    """How the command ended, where it did not end well."""
    job = summary.get("job") or {}
    status, name = job.get("status") or 0, os.path.basename((job.get("command") or ["CMD"])[0])
    if (summary.get("oom") or {}).get("job"):
        return f"{name} was killed for want of memory (OOM)"
    if number := _ended_by(status):
        with_name = signal.Signals(number).name if number in _NUMBERS else "unknown"
        return f"{name} was ended by signal {number} ({with_name})"
    return f"{name} failed (exit status {status})" if status else None


def _ended_by(status: int) -> int:
    """The signal that ended the command, or one of a shell's, which says so by its status; 0:
    none."""
    return -status if status < 0 else status - 128 if status - 128 in _OF_USERS else 0


def cut_off(summary: Mapping[str, Any]) -> list[Line]:
    """That the run was not at its end: a terminal was closed, a time limit was over."""
    status = (summary.get("job") or {}).get("status") or 0
    if not _ended_by(status) or (summary.get("oom") or {}).get("job"):
        return []
    until = format_duration(summary["wall_seconds"])
    return [f"{how_it_failed(summary)} after {until}: what is said here is of that time"]


def short_of_memory(summary: Mapping[str, Any]) -> list[Line]:
    """Processes that the kernel killed for want of memory, but the service (see death())."""
    oom = summary.get("oom") or {}
    found: list[Line] = []
    if oom.get("job") and (summary.get("files") or (summary.get("service") or {}).get("died")):
        found.append(f"{how_it_failed(summary)}: give it {more_memory(summary)}")
    others = (oom.get("kills") or 0) - sum(oom.get(who) is not False for who in ("job", "service"))
    others -= (summary.get("pool") or {}).get("oom_canaries") or 0  # which have spared the job
    if oom and others > 0:
        processes = "a process" if others == 1 else f"{others} processes"
        found.append(f"{processes} of this control group killed for want of memory (OOM)")
    return found


def death(summary: Mapping[str, Any]) -> str:
    """Why the service has told nothing, as far as that is known."""
    if (summary.get("oom") or {}).get("service"):
        return "the service died during the run (killed for want of memory, OOM)"
    return str(summary["rung_reason"])


def deaths(summary: Mapping[str, Any], see_log: str = "") -> list[str]:
    """The lines about a service that ended during the run, and what then became of the job: first
    that it was killed for want of memory, where it was. ``see_log``: the end of a line about an
    error of ours."""
    oom, status = summary["oom"], summary["job"]["status"]
    first = [f"{how_it_failed(summary)}: give it {more_memory(summary)}"] if oom["job"] else []
    if oom["job"]:
        job = []
    elif oom["job"] is None and oom["kills"]:
        job = ["the job was killed, too; one of them for want of memory (OOM)"]
    elif oom["job"] is None:
        job = [f"the job was killed, too; by whom is not known ({oom['why_not']})"]
    elif status == -signal.SIGKILL:
        job = ["the job was killed, too (signal 9)"]
    else:
        job = ["the job went on without it"]
    parts = [death(summary), *job, "nothing is known of what was served"]
    told = "; ".join(parts) + ("" if oom["kills"] else see_log)
    more = [f"try: {more_memory(summary)}"] if oom["service"] and not first else []
    return [*first, told, *more]


def more_memory(summary: Mapping[str, Any]) -> str:
    smaller = ", or a smaller --budget" if summary["engine"] == "pool" else ""
    return f"more memory (Slurm: --mem){smaller}"


def stood_still(summary: Mapping[str, Any]) -> list[Line]:
    seconds = (summary.get("service") or {}).get("stood_still_seconds") or 0.0
    if not seconds:
        return []
    return [
        f"the service stood still for {format_duration(seconds)} (SIGSTOP, or no CPU): nothing was"
        " read ahead meanwhile"
    ]
