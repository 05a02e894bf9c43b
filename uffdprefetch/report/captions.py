# SPDX-License-Identifier: Apache-2.0
"""What a picture of a trace shows, what it lacks and why, and what to do to have it. Pure.

As in Darshan's reports: a picture has a title and a caption that says what is on it, and where data
is missing, what to enable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.trace.analyse.marks import LAYER_OF
from uffdprefetch.trace.file.sensors import BY_BPF, Sensor, is_of

#: A sensor that is missing, as trace/file/sensors.entry() makes it; ``lift`` is the remedy.
Lack = dict[str, Any]

#: Names of the access map's marks, for legends and tooltips.
KIND_TEXTS = {
    "around": "access (fault, mapped with its neighbours)",
    "fault": "access (fault)",
    "touch": "access (checkpoint touched)",
    "pool": "access (reached the pool)",
    "seen": "access (found in the page table)",
    "read": "access (read(2))",
    "major": "miss (major fault)",
    "late": "late: the page was on its way",
    "missed": "miss (the pool had to read it)",
    "warm": "read ahead by our service",
    "kernel": "read ahead by the kernel",
    "other": "brought in by another process",
    "evict": "evicted",
    "punch": "let go by the pool",
}

#: Which sensors each picture is made of.
_CONCERNS = {
    "map": BY_BPF - {Sensor.CALLS, Sensor.BLOCK, Sensor.BIRTHS, Sensor.SLEEPS},
    "hits": {Sensor.FAULTS, Sensor.AROUND, Sensor.ADDRESSES},
    "bytes": {Sensor.FILLS, Sensor.BLOCK},
    "stall": {Sensor.FAULTS, Sensor.SLEEPS},
    "epochs": {Sensor.FAULTS, Sensor.AROUND},
    "calls": {Sensor.CALLS},
    "iterations": {Sensor.FAULTS, Sensor.AROUND, Sensor.CALLS},
}

_WITHOUT_BPF: Lack = {
    "sensors": None,  # all
    "what": "page faults and waits in them, page-cache fills, readahead, system calls, block I/O",
    "why": "recorded without BPF, by what our service sees",
    "lift": "uffdprefetch doctor",
}

_SENSORS = (
    (
        {"around", "fault"},
        "Accesses are page faults as the kernel's tracepoints report them: a page that is mapped"
        " already is not seen again, and a fault maps up to 64 KiB that are cached around it.",
    ),
    (
        {"touch"},
        "Accesses are touches of our service's checkpoints: what lies between two of them is not"
        " seen.",
    ),
    (
        {"pool"},
        "Accesses are touches that reached our service's pool: a page that it has mapped already is"
        " not seen again, and it maps up to 4 MiB ahead of who reads in order.",
    ),
    (
        {"seen"},
        "Accesses are pages that were found in page tables: when, is known to one scan, and where,"
        " to 64 KiB.",
    ),
    ({"read"}, "read(2) is seen where it takes pages from the cache."),
)


def lacks_of_trace(report: dict[str, Any]) -> list[Lack]:
    """Data that the trace lacks, for the top of a report."""
    about = report.get("trace") or {}
    return _missing(about) + _gaps(about)


def _missing(about: dict[str, Any]) -> list[Lack]:
    """The sensors that were not there, each once: several nodes may lack the same."""
    found: list[Lack] = []
    for entry in about.get("missing") or []:
        lack = {name: entry.get(name) for name in ("sensors", "what", "why", "lift")}
        lack["what"] = lack["what"] or "?"
        if lack not in found:
            found.append(lack)
    # A trace without BPF lacks what only BPF sees, whether or not its recorder says so.
    if not found and about.get("source") == "service":
        found.append(dict(_WITHOUT_BPF))
    return found


def _gaps(about: dict[str, Any]) -> list[Lack]:
    """Data that every picture lacks: events lost although their sensor was there."""
    found: list[Lack] = []
    if about.get("lost_events"):
        found.append(
            {
                "what": f"{about['lost_events']} events",
                "why": "they came faster than they could be taken from the kernel's buffer; every"
                " count is that much too low",
                "lift": None,
            }
        )
    if about.get("raw_until_seconds") is not None:
        at = format_duration(about["raw_until_seconds"])
        found.append(
            {
                "what": f"single events after {at}",
                "why": "the trace's limit of events was reached; from there on the pictures are"
                " drawn from its overview, in bins",
                "lift": "uffdprefetch trace --max-events N",
            }
        )
    if about.get("truncated"):
        found.append({"what": "the end of the trace", "why": about["truncated"], "lift": None})
    return found


def lacks_of(picture: str, report: dict[str, Any]) -> list[Lack]:
    """The part of lacks_of_trace() that concerns this picture."""
    about = report.get("trace") or {}
    found = [lack for lack in _missing(about) if is_of(lack, _CONCERNS[picture])]
    return found + (_gaps(about) if picture != "iterations" else [])


def captions(report: dict[str, Any], pictures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By picture: `title`, `text` (what is on it), `lacks`, and `empty`: what stands in its place.

    The pictures are map, hits, bytes, stall, epochs, calls and iterations.
    """
    bin_text = format_duration(pictures["series"]["bin_seconds"])
    stalled = _sensor(report, "stall_sensor")
    texts = {
        "map": ("Access map", map_text({s.kind for s in pictures["streams"]})),
        "hits": (
            "Hit rate over time",
            "Of the page faults of the chosen ranks those that found their page in the cache"
            + (" or in the pool" if _of_pool(pictures) else "")
            + f", in bins of {bin_text} and more. Accesses to pages that are mapped already fault"
            " no more and are in no count.",
        ),
        "bytes": (
            "Bandwidth over time",
            "Bytes that came into the page cache, of small files, programs and libraries, too, by"
            f" who brought them, in bins of {bin_text} and more. The kernel's readahead is done by"
            " the process that reads, and counts as its rank's."
            + (
                " What our service reads into its pool is counted as its, though it comes past the"
                " page cache; what it reads on demand is not in it."
                if _of_pool(pictures)
                else ""
            ),
        ),
        "stall": (
            "Stall by rank over time",
            "How much of the time a rank stood still in page faults that had to wait, in bins of"
            f" {bin_text} and more; several threads of a rank add up, and the colours end at 100 %."
            + (f" Seen by: {stalled}." if stalled and not stalled.startswith("n/a") else ""),
        ),
        "epochs": (
            "Epochs",
            "Each pass of a rank over a file, with the pattern that was found in it."
            + (" Passes over several files lie in one row." if len(pictures["files"]) > 1 else ""),
        ),
        "calls": (
            "System calls over time",
            "Each dot is a call; its height within the row says nothing, it only keeps dots apart."
            " Rows with many calls show some of each moment; their number stands to the right."
            " Reading through a mapping makes no calls. Bands are the phases that were found.",
        ),
        "iterations": (
            "Time of each iteration",
            "Iterations are bursts of accesses with the pause of a batch's computation between"
            " them; each mark is one iteration of one rank.",
        ),
    }
    return {
        name: {
            "title": title,
            "text": text,
            "lacks": lacks_of(name, report),
            "empty": _empty(name, report),
        }
        for name, (title, text) in texts.items()
    }


def _of_pool(pictures: dict[str, Any]) -> bool:
    return any(stream.kind == "pool" for stream in pictures["streams"])


def map_text(kinds: Iterable[str]) -> str:
    """The caption of an access map with marks of these kinds."""
    present = set(kinds)
    layers = {LAYER_OF[kind] for kind in present}
    parts = [
        "Offset in the file over time; marks have the colour and shape of their rank, and a pixel"
        " that several ranks share shows one of them."
    ]
    parts += [text for kinds_of, text in _SENSORS if present & kinds_of]
    if "miss" in layers:
        parts.append("Crosses are accesses that had to wait, with a line as long as the wait.")
    if present & {"warm", "kernel", "other"}:
        who = {
            "warm": "hatched by our service",
            "kernel": "grey by the kernel's readahead",
            "other": "light by other processes",
        }
        named = ", ".join(text for kind, text in who.items() if kind in present)
        parts.append(f"Bands were read ahead ({named}), and lie there until their first use.")
    return " ".join(parts)


def map_captions(report: dict[str, Any], pictures: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By file id: `text` of its access map, with the patterns that were found in it."""
    found = {}
    for file in pictures["files"]:
        kinds = {s.kind for s in pictures["streams"] if s.file == file["id"]}
        entry = file_of(report, file["id"])
        first = f"{format_size(file['size_bytes'])}"
        if entry.get("file_system"):
            first += f" on {entry['file_system']}"
        patterns = _patterns(report, file["id"])
        text = f"{first}{'; ' + patterns if patterns else ''}. {map_text(kinds)}"
        found[file["id"]] = {"text": text}
    return found


def file_of(report: dict[str, Any], number: int) -> dict[str, Any]:
    """A report's entry of a file; empty, if there is none."""
    for file in report.get("files") or []:
        if file.get("id") == number:
            return dict(file)
    return {}


def pattern_text(pattern: dict[str, Any] | None) -> str:
    """'strided, every 4th record', 'consecutive' ...; 'unknown' for none."""
    pattern = pattern or {}
    name = pattern.get("name") or "unknown"
    records = pattern.get("stride_records")
    if records and records != 1:
        name += f", every {ordinal(records)} record"
    elif name == "strided" and pattern.get("stride_bytes"):
        name += f" by {format_size(pattern['stride_bytes'])}"
    return str(name)


def ordinal(number: float) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 22nd ...; other than whole numbers as they are."""
    if number != int(number):
        return f"{number:g}th"
    whole = int(number)
    last = "th" if whole // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(whole % 10, "th")
    return f"{whole}{last}"


def _patterns(report: dict[str, Any], file: int) -> str:
    """'ranks 0-3 strided, every 4th record'."""
    by_pattern: dict[str, list[int]] = {}
    for reader in report.get("readers") or []:
        if reader.get("file") == file and reader.get("rank") is not None:
            by_pattern.setdefault(pattern_text(reader.get("pattern")), []).append(reader["rank"])
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {number_ranges(ranks)} {text}"
        for text, ranks in by_pattern.items()
    )


def short_command(words: Iterable[object], most: int = 90) -> str:
    """A command for a title: paths by their last part, scripts within it by their beginning."""
    parts = []
    for word in map(str, words):
        if any(c.isspace() for c in word):
            word = f"'{' '.join(word.split())[:20]} …'"
        elif "/" in word.strip("/"):
            word = word.rstrip("/").rsplit("/", 1)[-1]
        parts.append(word)
    text = " ".join(parts)
    return text if len(text) <= most else text[: most - 2].rstrip() + " …"


def number_ranges(numbers: Iterable[int]) -> str:
    """'0-3, 5' of 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _sensor(report: dict[str, Any], name: str) -> str:
    return "; ".join(sorted({str(r[name]) for r in report.get("readers") or [] if r.get(name)}))


def _empty(picture: str, report: dict[str, Any]) -> str:
    """The text in the place of a picture without data."""
    if picture == "stall" and any(file.get("pool") for file in report.get("files") or []):
        return "n/a (the pool does not tell how long each touch waited: see the run's summary)"
    why = lacks_of(picture, report)
    if why and picture != "iterations":
        return "n/a (" + "; ".join(f"{w['what']}: {w['why']}" for w in why if w["why"]) + ")"
    return {
        "map": "n/a (no access to a file is in the trace)",
        "hits": "n/a (no fault is in the trace)",
        "bytes": "n/a (nothing came into the page cache while the trace was recorded)",
        "stall": "n/a (no fault is in the trace)",
        "epochs": "n/a (no epochs were found)",
        "calls": "n/a (no system call is in the trace)",
        "iterations": "n/a (no regular pauses were found between the accesses)",
    }[picture]
