# SPDX-License-Identifier: Apache-2.0
"""What was not served, or less well than it could be, why, and what would change that; from the
summary's JSON."""

from __future__ import annotations

import os

from uffdprefetch.base.config import GUESSING
from uffdprefetch.base.units import format_size
from uffdprefetch.report.endings import how_it_failed, more_memory
from uffdprefetch.report.line import Named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from uffdprefetch.report.line import Line

#: Bytes, and share of what was served (one in this many), below which a job's read(2) traffic
#: counts as headers and indices, and its other mappings as no data set.
_WORTH_SAYING_BYTES = 16 << 20
_WORTH_SAYING_SHARE = 16
_MODULES_SHARE = 2
#: What programs read by calls when they start, without a word's being worth while: a shell and its
#: tools some 0.1 MiB each.
_START_BYTES = 1 << 20
#: Launchers that start programs by daemons, on other nodes, where wrap does not reach. (Those that
#: an mpirun starts here are served.)
LAUNCHERS = frozenset(("srun", "jsrun", "aprun", "prun"))
#: One-letter options of launchers that take no value.
_FLAGS = frozenset("-" + letter for letter in "lukvQOsXHEbh")
#: Reasons (state/unserved.py) that only -v speaks of.
OF_PROGRAMS = frozenset(("library",))
#: Run time below which the service has not looked at the job (service/observe.py, LOOK_NS).
LOOKED_SECONDS = 0.25
#: Where small files were waited for, and most of what was read was not followed.
TELL_ORDER = "try: tell the order of its small files (`wrap --plan`, uffdprefetch.plan.announce)"


def notes_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What works less well than it could."""
    notes = summary.get("notes")
    if notes is None:  # of a release before there were any
        return [{"path": "", "text": text} for text in summary.get("degradations") or []]
    return list(notes)


def refused(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mappings that were not served, but those of programs' own files: nobody wants these to be
    served."""
    return [one for one in summary.get("unserved") or [] if one.get("reason") not in OF_PROGRAMS]


def _served_bytes(summary: Mapping[str, Any]) -> int:
    return sum(file.get("size_bytes") or 0 for file in summary.get("files") or [])


def calls_bytes(summary: Mapping[str, Any]) -> int | None:
    """All that the job has read by calls, from anything; None: not known."""
    read = summary["totals"].get("unserved_read_bytes")
    return None if read is None else read + ((summary.get("reads") or {}).get("read_bytes") or 0)


def _touched_bytes(summary: Mapping[str, Any]) -> int:
    """Bytes, in blocks, that readers have mapped of the served files; a file's size where that is
    unknown."""
    found = 0
    for file in summary.get("files") or []:
        parts = [file.get(f"{name}_used_blocks_bytes", 0) for name in ("prefetched", "demand")]
        size = file.get("size_bytes") or 0
        found += size if None in parts else min(size, sum(parts))
    return found


def _launches_elsewhere(summary: Mapping[str, Any]) -> bool:
    """A launcher, and nothing was seen of what it has started."""
    command = (summary.get("job") or {}).get("command") or [""]
    return os.path.basename(command[0]) in LAUNCHERS and not refused(summary)


def _wrapped_inside(command: Sequence[str]) -> list[str]:
    """A launcher's command with `wrap` before its program, the first word that is one; and a
    shorter text."""
    import shlex
    import shutil

    name = os.path.basename(command[0])
    for at, word in enumerate(command[1:], 1):
        last = command[at - 1] if at > 1 else ""
        if word.startswith("-") or (len(last) == 2 and last[0] == "-" and last not in _FLAGS):
            continue
        if last.startswith("--") and "=" not in last:
            break  # it may be that option's value
        if shutil.which(word):
            words = [*command[:at], "uffdprefetch", "wrap", "--", *command[at:]]
            return [shlex.join(words), f"{name} ... uffdprefetch wrap -- {word} ..."]
        break
    return [f"{name} OPTIONS uffdprefetch wrap -- COMMAND"]


def _was_looked_at(summary: Mapping[str, Any]) -> bool:
    return float(summary["wall_seconds"]) >= LOOKED_SECONDS


def why_nothing(summary: Mapping[str, Any]) -> str:
    """No file was served."""
    job = summary.get("job") or {}
    if how_it_failed(summary):
        if (summary.get("oom") or {}).get("job"):
            return f"{how_it_failed(summary)}: give it {more_memory(summary)}"
        was_seen = "and mapped no file" if _was_looked_at(summary) else "before it was looked at"
        return f"{how_it_failed(summary)}{'' if refused(summary) else f' {was_seen}'}"
    if _launches_elsewhere(summary):
        name = os.path.basename(job["command"][0])
        return f"{name} runs its programs outside of this wrap"
    if refused(summary):
        return "no mapping was served"
    if summary["totals"].get("gain") == "unknown":  # nobody was there to see one
        return str(summary["rung_reason"])
    if not job:
        return "no mapping was served"
    if not _was_looked_at(summary):
        return "the job ended before it was looked at"
    seen = f"no mapping of {format_size(job['min_size_bytes'])} or more was seen"
    return seen if not_served_lines(summary) else f"{seen}{_left_by_calls(summary)}"


def _left_by_calls(summary: Mapping[str, Any]) -> str:
    """What was read by calls, where that is all that there is to be said of it."""
    read, reads = calls_bytes(summary) or 0, summary.get("reads")
    if read < _START_BYTES:
        return ""
    size = format_size(read)
    if reads is None:
        return f"; {size} by read(2) were left to the kernel{_why_left(summary)}"
    if left := reads.get("left_alone"):
        return f"; {left[0]['path']}: {left[0]['why']}"
    if reads.get("small_files") is None:
        return f"; nobody was seen to wait for the {size} by read(2)"
    return f"; of the {size} by read(2) no order was seen"


def _why_left(summary: Mapping[str, Any]) -> str:
    """Which option leaves to the kernel what is read by calls, in brackets."""
    if summary["engine"] == "off":
        return " (--engine off)"
    if summary["policy"] not in GUESSING:
        return f" (--policy {summary['policy']})"
    # else the service was not there, or could not follow it, which is said elsewhere
    unknown = summary["totals"].get("gain") == "unknown" or summary.get("degradations")
    return "" if unknown else " (--reads off)"


def not_served_lines(summary: Mapping[str, Any]) -> list[Line]:
    """The largest mapping that was not served, else what was read by read(2); and the remedy."""
    served, job = _served_bytes(summary), summary.get("job") or {}
    mappings = refused(summary)
    if not served and how_it_failed(summary) and not mappings:
        return []
    if not served and _launches_elsewhere(summary):
        return [tuple(f"try: {words}" for words in _wrapped_inside(job["command"]))]
    unserved = [
        one
        for one in mappings
        if not served or (one["remedy"] and one["mapped_bytes"] * _WORTH_SAYING_SHARE >= served)
    ]
    unserved.sort(key=lambda one: one["remedy"] is None)
    if unserved:
        first = unserved[0]
        size = f"{format_size(first['mapped_bytes'])} of " if first["mapped_bytes"] else ""
        more = f" (and {len(unserved) - 1} more)" if len(unserved) > 1 else ""
        remedy = [f"try: {first['remedy']}"] if first["remedy"] else []
        also = first["path"] in {file["path"] for file in summary.get("files") or []}
        other = "; other mappings of it are" if also else ""
        return [
            Named(f"not served: {size}", first["path"], f": {first['why']}{other}{more}"),
            *remedy,
        ]
    return [] if summary["policy"] == "none" else _read_by_calls(summary)


def _read_by_calls(summary: Mapping[str, Any]) -> list[Line]:
    """What came by read(2): not served is what was seen of files. All that is known of the rest is
    its size: pipes and sockets are in it, and the program's own modules. What the job has
    written may be what it has read of its own pipes."""
    totals, mapped, reads = summary["totals"], _touched_bytes(summary), summary.get("reads")
    written = (summary.get("job") or {}).get("written_bytes") or 0
    every, files = totals.get("unserved_read_bytes") or 0, totals.get("unserved_read_files") or []
    seen = min(every, sum(file["bytes"] for file in files))
    if seen < max(_WORTH_SAYING_BYTES, mapped // _WORTH_SAYING_SHARE):
        others = every - written
        if others < max(_WORTH_SAYING_BYTES, mapped // _MODULES_SHARE):
            return []
        return _not_followed(others, summary)
    before = f"not served: {format_size(seen)}"
    if mapped:
        before = (
            f"of {format_size(mapped + seen)}: {format_size(mapped)} served, {format_size(seen)}"
        )
    path, largest = files[0]["path"], format_size(files[0]["bytes"])
    said = f"{before} by read(2)"
    if largest == format_size(seen):
        named = Named(f"{before} of ", path, " by read(2)", without=said)
    else:
        named = Named(f"{said}, {largest} of ", path, "", without=said)
    remedy = "try: a format that is mapped (LMDB, Arrow, numpy.memmap)"
    return [named, remedy] if reads is None else [named]


def _not_followed(size_bytes: int, summary: Mapping[str, Any]) -> list[Line]:
    """So much came by calls of which no large file's reader was followed."""
    before, reads = f"not followed: {format_size(size_bytes)} by read(2)", summary.get("reads", {})
    if reads is None:
        return [f"{before}: left to the kernel{_why_left(summary)}"]
    small = reads.get("small_files")
    if left := reads.get("left_alone"):
        return [Named(f"{before}; ", left[0]["path"], f": {left[0]['why']}", without=before)]
    told: list[Line] = [f"{before}: in no order, or from memory; small files, pipes, sockets"]
    if small is not None and (small.get("used_bytes") or 0) < size_bytes:
        told.append(TELL_ORDER)
    return told


def less_well(summary: Mapping[str, Any]) -> list[Line]:
    """Where all is served: what was less than it could have been."""
    if summary["policy"] == "none":
        return []
    for plan in summary.get("plans") or []:
        if plan.get("dropped"):
            return [f"the known order was given up: {plan['dropped']}"]
    reason = summary.get("rung_reason") or ""
    if summary.get("rung") == 2 and summary.get("rung_remedy"):
        return [
            (f"seen less closely than it could be: {reason}", f"seen less closely: {reason}"),
            f"try: {summary['rung_remedy']}",
        ]
    for note in notes_of(summary):
        if note.get("asked"):
            continue  # that is said anyway
        path, text = note["path"], note["text"]
        if not path:
            return [f"note: {text}"]
        return [(f"note: {path}: {text}", f"note: {os.path.basename(path)}: {text}")]
    return []
