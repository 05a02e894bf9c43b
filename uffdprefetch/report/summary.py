# SPDX-License-Identifier: Apache-2.0
"""The lines that end a run, from the summary's JSON (docs/summary-schema.md): what it gained, what
was not served and why, and what would change that; with -v how it ran, too."""

from __future__ import annotations

import os
import signal

from uffdprefetch.base.config import GUESSING
from uffdprefetch.base.messages import PREFIX
from uffdprefetch.base.record import record
from uffdprefetch.base.units import format_duration, format_rate, format_size, node_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    #: A line, or its wordings from the longest to the shortest: the first that fits is shown.
    Line: TypeAlias = "str | tuple[str, ...] | Named"

#: Least gain or cost that is reported: less is within the variation of runs.
REPORTED_SECONDS = 0.1
#: Unused bytes are reported where they are more than one in this many prefetched ones.
_WASTE_SHARE = 10
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
#: Most files of which -v says how they are served.
DECISIONS_MAX = 20
#: Run time below which the service has not looked at the job (service/observe.py, LOOK_NS).
LOOKED_SECONDS = 0.25
_SERVED_BY = {"page_tables": "page tables", "pool": "the pool's faults", "reads": "its calls"}
#: Least characters that a shortened path keeps.
_PATH_LEAST = 12
_RUNG_NAMES = {1: "userfaultfd", 2: "page tables"}


def lines(
    summary: Mapping[str, Any],
    path: str | None = None,
    verbose: bool = False,
    columns: int | None = None,
) -> list[str]:
    """The lines at a run's end, without prefix. ``path``: of the JSON, if it was written;
    ``verbose``: with how_it_ran(); ``columns``: of the terminal, None where there is none."""
    if not verbose:
        return short_lines(summary, columns)
    return [*short_lines(summary), *how_it_ran(summary, path)]


def short_lines(summary: Mapping[str, Any], columns: int | None = None) -> list[str]:
    """One to six lines: what was kept ahead of the job, and what that has saved or cost; what was
    read for nothing; what nodes have shared, or why nothing; what was asked for and not done; what
    was not served, or not as well as it could be, and why; what to do about that. All but the first
    only where there is something to say. Where a terminal has too few ``columns`` for one, the file
    that it names loses folders; what is said of it stays whole.

    Pure; raises KeyError or TypeError for what is no summary.
    """
    width = None if columns is None else columns - len(PREFIX)
    return [_fitted(line, width) for line in _lines(summary)]


def not_served(summary: Mapping[str, Any]) -> list[str]:
    """The lines of short_lines() about what was not served, or less well than possible: why, and
    the remedy."""
    return [_fitted(line, None) for line in _not_served(summary) or _less_well(summary)]


def _lines(summary: Mapping[str, Any]) -> list[Line]:
    first = [*_short_of_memory(summary), *_stood_still(summary)]
    gained, shared = [*_gained(summary), *_small_files(summary)], _shared(summary)
    if _moved(summary) and summary["totals"].get("gain") != "saved":
        gained = []  # the accounts are of one node's storage, not of what all nodes ask of it
    undone = [f"note: {one['text']}" for one in _notes(summary) if one.get("asked")]
    more = _not_served(summary) or _less_well(summary)
    if undone:  # what the user has tried already is no remedy
        more = [line for line in more if line != TELL_ORDER]
    return [*first, *gained, *shared, *undone, *more]


def _notes(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What works less well than it could."""
    notes = summary.get("notes")
    if notes is None:  # of a release before there were any
        return [{"path": "", "text": text} for text in summary.get("degradations") or []]
    return list(notes)


def how_it_ran(summary: Mapping[str, Any], path: str | None = None) -> list[str]:
    """With what, how that went, the pool and known orders where there were any, and where all
    figures are. One that is null is shown as 'n/a (reason)', never as 0."""
    more = [_with_what(summary), _what_came_of_it(summary), pool_line(summary), order_line(summary)]
    more += [
        start_line(summary),
        learned_line(summary),
        *cluster_lines(summary),
        *decision_lines(summary),
    ]
    where = f"all figures: {path}" if path is not None else None
    return [line for line in (*more, where) if line]


# ---- short lines --------------------------------------------------------------------------------


@record(frozen=True)
class Named:
    """A line that names a file. ``without``: the line that does not, for where there is no room for
    its name."""

    before: str
    path: str
    after: str
    without: str | None = None

    def fitted(self, width: int | None) -> str:
        """With the folders of its path that fit."""
        name = os.path.basename(self.path)
        room = len(self.path) if width is None else width - len(self.before) - len(self.after)
        folders = self.path[3 - room :] if room > len(name) + 3 else ""
        if len(self.path) <= room:
            part = self.path
        elif "/" in folders:
            part = f"...{folders[folders.index('/') :]}"
        elif len(name) <= max(room, _PATH_LEAST if self.without is None else 0):
            part = name
        elif self.without is not None:
            return self.without
        else:
            part = f"...{name[3 - max(_PATH_LEAST, room) :]}"
        return self.before + part + self.after


def _fitted(line: Line, width: int | None) -> str:
    """The first of its texts that fits; of those that do not the last, for the terminal to wrap:
    cut short it would lack its end, which says why."""
    if isinstance(line, Named):
        return line.fitted(width)
    texts = (line,) if isinstance(line, str) else line
    return next((text for text in texts if width is None or len(text) <= width), texts[-1])


def _refused(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mappings that were not served, but those of programs' own files: nobody wants these to be
    served."""
    return [one for one in summary.get("unserved") or [] if one.get("reason") not in OF_PROGRAMS]


def _served_bytes(summary: Mapping[str, Any]) -> int:
    return sum(file.get("size_bytes") or 0 for file in summary.get("files") or [])


def _gained(summary: Mapping[str, Any]) -> list[Line]:
    """Bytes read ahead of the job, what they gained, and those that were not used."""
    totals = summary["totals"]
    gain, service = totals.get("gain"), summary.get("service") or {}
    if service.get("died") or service.get("silent"):
        return [f"what was gained is not known: {_death(summary)}"]
    if summary["policy"] == "none":
        return ["read nothing ahead: --policy none only watches"]
    if not summary.get("files"):
        return _without_a_file(summary)
    unused = _unused(totals)
    if gain == "cost" and (totals.get("cost_seconds") or 0.0) >= REPORTED_SECONDS:
        cost = f"cost about {format_duration(totals['cost_seconds'])}"
        kept = _kept(totals)
        return [f"{cost}: {unused}" if unused else cost, *([kept] if kept else [])]
    if gain == "in-memory":
        said: Line = "nothing to gain: the data was in memory"
    elif gain == "nothing-read":
        said = "nothing to gain: nothing of the mapped files was read"
    elif gain == "just-read":
        itself = format_size(totals.get("job_storage_bytes") or 0)
        said = f"the data was in memory when it was mapped: the job had read {itself} itself"
    else:
        said = _kept_and_saved(totals)
    wasted = totals.get("wasted_bytes") or 0
    much = wasted * _WASTE_SHARE > (totals.get("prefetched_bytes") or 0)
    return [said, *([f"read for nothing: {unused}"] if unused and much else [])]


def _without_a_file(summary: Mapping[str, Any]) -> list[Line]:
    """No large file was served: what was done all the same, or why nothing was."""
    started = _start_read(summary)
    if _small_files(summary) and not started:
        return []
    failed = bool(_failed(summary))
    if started:
        return [f"{started}; {_why_nothing(summary)}" if failed else started]
    return [f"served nothing: {_why_nothing(summary)}"]


def _start_read(summary: Mapping[str, Any]) -> str | None:
    """What was read ahead of the program's start, or is to be the next time; None: nothing."""
    learn = summary.get("learn") or {}
    recorded = learn.get("recorded") or {}
    if not learn.get("bytes"):
        if recorded.get("record") != "written":
            return None
        return f"start recorded ({format_size(recorded['bytes'])}): the next one is read ahead"
    opened = "" if learn["used"] is None else f", of which {learn['used']:,} files were opened"
    return f"start read ahead: {learn['paths']:,} paths ({format_size(learn['bytes'])}){opened}"


def _small_files(summary: Mapping[str, Any]) -> list[Line]:
    """Files that were read ahead whole, since the next ones were known by their names."""
    counts = (summary.get("reads") or {}).get("small_files") or {}
    read, used = counts.get("read") or 0, counts.get("used") or 0
    if not read:
        return []
    size = format_size(counts["used_bytes"])
    return [f"small files: {used:,} of {read:,} read ahead were opened ({size})"]


def _part(part_bytes: int, whole_bytes: int) -> str:
    """`315 of 320 MiB`."""
    part, whole = format_size(part_bytes), format_size(whole_bytes)
    number, _, unit = part.partition(" ")
    return f"{number if unit == whole.partition(' ')[2] else part} of {whole}"


def _unused(totals: Mapping[str, Any]) -> str | None:
    wasted = totals.get("wasted_bytes")
    if not wasted:
        return None
    return f"{_part(wasted, totals['prefetched_bytes'])} read ahead were not used"


def _kept(totals: Mapping[str, Any]) -> str | None:
    """How much of what the job came to had been read by then; None where nobody knows."""
    needed, share = totals.get("coverage_denominator_bytes"), totals.get("coverage")
    if not needed or share is None:
        return None
    kept, waited = round(needed * share), totals.get("waited_seconds")
    rest = [f"{format_size(needed - kept)} missed"] if needed > kept else []
    if waited is not None:
        rest.append(f"{format_duration(waited)} waited" if waited else "nobody was seen to wait")
    more = f" ({', '.join(rest)})" if rest else ""
    return f"kept ahead of the job: {_part(kept, needed)}{more}"


def _kept_and_saved(totals: Mapping[str, Any]) -> Line:
    kept = _kept(totals) or f"read {format_size(totals.get('prefetched_bytes') or 0)} ahead"
    seconds = totals.get("saved_at_least_seconds") or 0.0
    if totals.get("gain") != "saved" or seconds < REPORTED_SECONDS:
        return kept
    saved = f"saved at least {format_duration(seconds)}"
    short = kept.partition(" (")[0].replace(" of the job", "")
    return f"{kept}; {saved}", f"{short}; {saved}", saved


def _failed(summary: Mapping[str, Any]) -> str | None:
    """How the command ended, where it did not end well."""
    job = summary.get("job") or {}
    status, name = job.get("status") or 0, os.path.basename((job.get("command") or ["CMD"])[0])
    if status > 0:
        return f"{name} failed (exit status {status})"
    if (summary.get("oom") or {}).get("job"):
        return f"{name} was killed for want of memory (OOM)"
    return f"{name} was ended by signal {-status}" if status else None


def _short_of_memory(summary: Mapping[str, Any]) -> list[Line]:
    """Processes that the kernel killed for want of memory, but the service (see _death())."""
    oom = summary.get("oom") or {}
    found: list[Line] = []
    if oom.get("job") and (summary.get("files") or (summary.get("service") or {}).get("died")):
        found.append(f"{_failed(summary)}: give it {_more_memory(summary)}")
    others = (oom.get("kills") or 0) - sum(oom.get(who) is not False for who in ("job", "service"))
    others -= (summary.get("pool") or {}).get("oom_canaries") or 0  # which have spared the job
    if oom and others > 0:
        processes = "a process" if others == 1 else f"{others} processes"
        found.append(f"{processes} of this control group killed for want of memory (OOM)")
    return found


def _death(summary: Mapping[str, Any]) -> str:
    """Why the service has told nothing, as far as that is known."""
    if (summary.get("oom") or {}).get("service"):
        return "the service died during the run (killed for want of memory, OOM)"
    return str(summary["rung_reason"])


def deaths(summary: Mapping[str, Any], see_log: str = "") -> list[str]:
    """The lines about a service that ended during the run, and what then became of the job: first
    that it was killed for want of memory, where it was. ``see_log``: the end of a line about an
    error of ours."""
    oom, status = summary["oom"], summary["job"]["status"]
    first = [f"{_failed(summary)}: give it {_more_memory(summary)}"] if oom["job"] else []
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
    parts = [_death(summary), *job, "nothing is known of what was served"]
    told = "; ".join(parts) + ("" if oom["kills"] else see_log)
    more = [f"try: {_more_memory(summary)}"] if oom["service"] and not first else []
    return [*first, told, *more]


def _more_memory(summary: Mapping[str, Any]) -> str:
    smaller = ", or a smaller --budget" if summary["engine"] == "pool" else ""
    return f"more memory (Slurm: --mem){smaller}"


def _stood_still(summary: Mapping[str, Any]) -> list[Line]:
    seconds = (summary.get("service") or {}).get("stood_still_seconds") or 0.0
    if not seconds:
        return []
    return [
        f"the service stood still for {format_duration(seconds)} (SIGSTOP, or no CPU): nothing was"
        " read ahead meanwhile"
    ]


def _why_nothing(summary: Mapping[str, Any]) -> str:
    """No file was served."""
    job = summary.get("job") or {}
    if _failed(summary):
        if (summary.get("oom") or {}).get("job"):
            return f"{_failed(summary)}: give it {_more_memory(summary)}"
        return f"{_failed(summary)}{'' if _refused(summary) else ' and mapped no file'}"
    if _launches_elsewhere(summary):
        name = os.path.basename(job["command"][0])
        return f"{name} runs its programs outside of this wrap"
    if _refused(summary):
        return "no mapping was served"
    if summary["totals"].get("gain") == "unknown":  # nobody was there to see one
        return str(summary["rung_reason"])
    if not job:
        return "no mapping was served"
    if summary["wall_seconds"] < LOOKED_SECONDS:
        return "the job ended before it was looked at"
    seen = f"no mapping of {format_size(job['min_size_bytes'])} or more was seen"
    return seen if _not_served(summary) else f"{seen}{_left_by_calls(summary)}"


def _left_by_calls(summary: Mapping[str, Any]) -> str:
    """What was read by calls, where that is all that there is to be said of it."""
    read, reads = _calls_bytes(summary) or 0, summary.get("reads")
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


def _calls_bytes(summary: Mapping[str, Any]) -> int | None:
    """All that the job has read by calls, from anything; None: not known."""
    read = summary["totals"].get("unserved_read_bytes")
    return None if read is None else read + ((summary.get("reads") or {}).get("read_bytes") or 0)


def _launches_elsewhere(summary: Mapping[str, Any]) -> bool:
    """A launcher, and nothing was seen of what it has started."""
    command = (summary.get("job") or {}).get("command") or [""]
    return os.path.basename(command[0]) in LAUNCHERS and not _refused(summary)


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


def _moved(summary: Mapping[str, Any]) -> int:
    """Bytes that came from other nodes."""
    return (summary.get("cluster") or {}).get("from_bytes") or 0


def _shared(summary: Mapping[str, Any]) -> list[Line]:
    cluster = summary.get("cluster")
    if not cluster or not summary.get("files"):
        return []
    if moved := _moved(summary):
        read = (summary.get("pool") or {}).get("read_bytes") or 0
        return [
            f"{_count(len(cluster['present']), 'node')} shared: {format_size(read)} from storage, "
            f"{format_size(moved)} from each other"
        ]
    first = next(iter(cluster.get("not_shared") or []), None)
    if cluster.get("why_not"):
        return [f"nodes shared nothing: {cluster['why_not']}"]
    if first is not None:
        return [Named("nodes shared nothing: ", first["path"], f": {first['why']}")]
    return ["nodes shared nothing: none had what another one read"]


#: Where small files were waited for, and most of what was read was not followed.
TELL_ORDER = "try: tell the order of its small files (`wrap --plan`, uffdprefetch.plan.announce)"


def _not_served(summary: Mapping[str, Any]) -> list[Line]:
    """The largest mapping that was not served, else what was read by read(2); and the remedy."""
    served, job = _served_bytes(summary), summary.get("job") or {}
    mappings = _refused(summary)
    if not served and _failed(summary) and not mappings:
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


def _touched_bytes(summary: Mapping[str, Any]) -> int:
    """Bytes, in blocks, that readers have mapped of the served files; a file's size where that is
    unknown."""
    found = 0
    for file in summary.get("files") or []:
        parts = [file.get(f"{name}_used_blocks_bytes", 0) for name in ("prefetched", "demand")]
        size = file.get("size_bytes") or 0
        found += size if None in parts else min(size, sum(parts))
    return found


def _less_well(summary: Mapping[str, Any]) -> list[Line]:
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
    for note in _notes(summary):
        if note.get("asked"):
            continue  # that is said anyway
        path, text = note["path"], note["text"]
        if not path:
            return [f"note: {text}"]
        return [(f"note: {path}: {text}", f"note: {os.path.basename(path)}: {text}")]
    return []


# ---- with -v ------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.0f} %"


def _with_what(summary: Mapping[str, Any]) -> str:
    reads = summary.get("reads") or {}
    none = "watched from outside" if reads else "nobody was followed"
    sensor = _RUNG_NAMES.get(summary.get("rung") or 0, none)
    files = summary.get("files") or []
    size_bytes = sum(file.get("size_bytes") or 0 for file in files)
    what = f"{_count(len(files), 'file')} ({format_size(size_bytes)})" if files else "no large file"
    who = [_count(len(summary["ranks"]), "rank")] if summary.get("ranks") else []
    if not who and reads.get("processes"):
        who = [_count(reads["processes"], "process").replace("processs", "processes")]
    service = summary.get("service") or {}
    share = service.get("cpu_share")
    asked = summary.get("engine_asked") or summary["engine"]
    instead = "" if asked == summary["engine"] else f" ({asked} was asked for)"
    return (
        f"engine {summary['engine']}{instead}, policy {summary['policy']}, {sensor}: "
        f"{', '.join([what, *who, format_duration(summary['wall_seconds'])])};"
        f" our CPU {'n/a' if share is None else f'{share * 100:.1f} % of a core'}"
    )


def _what_came_of_it(summary: Mapping[str, Any]) -> str:
    totals = summary["totals"]
    misses = totals.get("demand_misses")
    parts = []
    if misses is not None:
        parts.append(_count(misses, "demand miss").replace("misss", "misses"))
    elif summary.get("files"):
        parts.append(f"demand misses n/a ({totals.get('demand_misses_sensor') or 'no sensor'})")
    prefetched_bytes = totals.get("prefetched_bytes")
    if prefetched_bytes:
        parts.append(
            f"prefetched {format_size(prefetched_bytes)}"
            f" (accuracy {_percent(totals.get('accuracy'))},"
            f" coverage {_percent(totals.get('coverage'))},"
            f" on time {_percent(totals.get('timeliness'))})"
        )
    small = (summary.get("reads") or {}).get("small_files") or {}
    if small.get("read"):
        size, used = format_size(small["read_bytes"]), format_size(small["used_bytes"])
        parts.append(f"prefetched {_count(small['read'], 'small file')} ({size}, {used} used)")
    elif not prefetched_bytes and not (summary.get("learn") or {}).get("bytes"):
        parts.append("nothing prefetched")
    if calls := _calls_bytes(summary):
        parts.append(f"the job read {format_size(calls)} by calls")
    wait = totals.get("fault_wait_ns") or {}
    if wait.get("count"):
        parts.append(f"{_count(wait['count'], 'checkpoint')} answered, {_within(wait)}")
    read_bytes = totals.get("storage_read_bytes")
    if read_bytes is None:
        why = totals.get("storage_read_reason") or "no reason given"
        parts.append(f"read n/a ({why})")
    else:
        parts.append(f"read {format_size(read_bytes)} by the kernel's count")
    return "; ".join(parts)


def decision_lines(summary: Mapping[str, Any]) -> list[str]:
    """For each served file how and why, and its readers' patterns; for each other one the
    reason."""
    patterns: dict[str, dict[str, list[int]]] = {}
    for (path, rank), pattern in _patterns(summary).items():
        patterns.setdefault(path, {}).setdefault(pattern, []).append(rank)
    found = []
    for file in summary.get("files") or []:
        path = file["path"]
        readers = [
            f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {_numbers(ranks)}: {pattern}"
            for pattern, ranks in patterns.get(path, {}).items()
        ]
        by = file.get("served_by")
        how = "nobody" if by is None else _SERVED_BY.get(by, by)
        why = f", warmed by {file['warmed_by']}" if file.get("warmed_by") else ""
        found.append(f"{path}: followed by {how}{why}{''.join(f'; {one}' for one in readers)}")
    served = {file["path"] for file in summary.get("files") or []}
    for one in summary.get("unserved") or []:
        which = "another mapping of it is " if one["path"] in served else ""
        found.append(f"{one['path']}: {which}not served: {one['why']}")
    rest = len(found) - DECISIONS_MAX
    return found[:DECISIONS_MAX] + ([f"and {_count(rest, 'file')} more"] if rest > 0 else [])


def _patterns(summary: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """(file, rank) -> how it went through it: by its longest stream. The first touches of a file
    are one, too, mostly forward, whichever way the reader goes then."""
    found: dict[tuple[str, int], str] = {}
    walked: dict[tuple[str, int], int] = {}
    for one in summary.get("streams") or []:
        key = one["file"], one["rank"]
        length = abs((one.get("position_bytes") or 0) - (one.get("start_bytes") or 0))
        if length > walked.get(key, -1):
            found[key], walked[key] = one["pattern"], length
    return found


def _numbers(values: Sequence[int]) -> str:
    """Numbers in order, those in a row as one range: 0-3, 8."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _within(wait: Mapping[str, Any]) -> str:
    """How long waits were, from their quantiles in ns."""
    half, most = (format_duration(wait[name] / 1e9) for name in ("p50", "p99"))
    return f"half of them within {half}, 99 % within {most}"


def pool_line(summary: Mapping[str, Any]) -> str | None:
    """What the pool held, read and let go of; None for a run without one."""
    pool = summary.get("pool")
    if not pool:
        return None
    others = pool.get("others_bytes") or 0
    if not pool["read_bytes"] and not others and not pool["faults"]:
        return "pool: nothing was mapped from it"
    peak, budget = pool["resident_peak_bytes"], pool["budget_bytes"]
    bound = ""
    if pool.get("limited_by") and (pool["evicted_bytes"] or peak >= budget):
        bound = f" (bounded by {pool['limited_by']})"
    size = f"{format_size(peak)} of {format_size(budget)}{bound}"
    if peak > budget:  # which has become smaller
        size = f"{format_size(peak)} at the most, {format_size(budget)} at the end{bound}"
    again = pool["reread_bytes"]
    source = f" ({pool['source']})" if pool.get("source") else ""
    brought = f"read {format_size(pool['read_bytes'])}"
    if others:  # what came again came from either
        brought += f"{source} and {format_size(others)} from other nodes"
        source = ""
    parts = [
        size,
        brought + (f", {format_size(again)} of it again" if again else ", nothing twice") + source,
        f"evicted {format_size(pool['evicted_bytes'])} ({pool['evict']})"
        if pool["evicted_bytes"]
        else "",
    ]
    wait = pool["demand_wait_ns"]
    if wait["count"]:
        parts.append(
            f"{pool['missing_faults']} of {_count(pool['faults'], 'fault')} waited, {_within(wait)}"
        )
    elif pool["faults"]:
        parts.append(f"nobody waited in {_count(pool['faults'], 'fault')}")
    return "pool: " + "; ".join(part for part in parts if part)


def cluster_lines(summary: Mapping[str, Any]) -> list[str]:
    """Traffic between the run's nodes and its rates; for each shared file, which node keeps which
    part (a digit or letter each, '.' for none). None for a run without nodes that share."""
    cluster = summary.get("cluster")
    if not cluster or not cluster.get("generations"):
        return []
    moved = cluster.get("from_bytes") or 0
    used = cluster.get("transport_cpu_seconds")
    parts = [
        f"{len(cluster['present'])} nodes ({cluster['mpi']})",
        f"{format_size(moved)} from other nodes",
        f"{format_size(cluster.get('to_bytes') or 0)} to them",
    ]
    for what, name in (("network", "network"), ("file system", "file_system")):
        rate = cluster.get(f"{name}_bytes_per_second")
        if rate:
            parts.append(f"{what} {format_rate(rate)}")
    if used is not None and moved:
        parts.append(f"transport {used:.1f} s of CPU, {used / moved * 1e9:.1f} a GB")
    keepers = cluster.get("keepers") or {}
    maps = [
        f"kept by: {node_map(cells)} {path}"
        for path, cells in keepers.items()
        if any(n is not None for n in cells)
    ]
    return ["cluster: " + "; ".join(parts), *maps]


#: Why files of a start profile were left out, by the words of csrc/replay/replay.c.
_LEFT_OUT = {
    "changed": "changed since",
    "gone": "gone",
    "refused": "not permitted",
    "no_file": "no files",
    "failed": "failed",
    "budget": "beyond --learn-budget",
    "time": "came too late",
}


def start_line(summary: Mapping[str, Any]) -> str | None:
    """What was read ahead of the program's start; None without --learn."""
    learn = summary.get("learn")
    if not learn:
        return None
    paths, skipped = learn["paths"], learn["skipped"]
    if not paths and not skipped:
        return f"start {learn['key']}: nothing was read ahead of it ({learn['state']})"
    read = f"{_count(paths, 'path')} ({format_size(learn['bytes'])})"
    parts = [f"{read} asked for ahead of it in {format_duration(learn['seconds'])}"]
    if learn["used"] is not None:
        parts.append(f"{learn['used']} opened")
    if skipped:
        parts.append(", ".join(f"{n} {_LEFT_OUT.get(why, why)}" for why, n in skipped.items()))
    end = "" if learn["state"] in ("done", "budget") else f" ({learn['state']})"
    return f"start {learn['key']}: {'; '.join(parts)}{end}"


def learned_line(summary: Mapping[str, Any]) -> str | None:
    """What was learned of mapped files; None where nothing was."""
    orders = (summary.get("learn") or {}).get("orders")
    if not orders:
        return None
    words = {
        "dropped": "wrong", "written": "written", "added": "added to", "failed": "not written",
    }  # fmt: skip
    parts = [f"{orders[name]} {text}" for name, text in words.items() if orders[name]]
    if orders["followed"]:
        parts.insert(0, f"{orders['followed']} followed")
    return f"learned orders: {', '.join(parts)}" if parts else None


def order_line(summary: Mapping[str, Any]) -> str | None:
    """Which orders were known and followed; None for a run without any."""
    plans = summary.get("plans") or []
    if not plans:
        return None
    dropped = [plan for plan in plans if plan.get("dropped")]
    followed = [plan for plan in plans if not plan.get("dropped")]
    parts = []
    if followed:
        items = sum(plan["read_items"] for plan in followed)
        ways = list(dict.fromkeys(plan["how"] for plan in followed))
        more = f" and {len(ways) - 1} more" if len(ways) > 1 else ""
        parts.append(f"{items} items read in a known order ({ways[0]}{more})")
    if dropped:
        first = dropped[0]
        parts.append(
            f"{_count(len(dropped), 'order')} not followed to the end (rank {first['rank']},"
            f" {first['how']}: {first['dropped']})"
        )
    return "order: " + "; ".join(parts)
