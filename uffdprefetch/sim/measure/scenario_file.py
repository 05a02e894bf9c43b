# SPDX-License-Identifier: Apache-2.0
"""Writes measurements as a scenario file. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from uffdprefetch.sim.measure.calibrate import Measured, Wishes
from uffdprefetch.sim.measure.intervals import Median

MB = 1e6
#: Divisor of a node's memory for a pool or the page cache: the job needs the rest.
MEMORY_PART = 2


@dataclass(frozen=True)
class Job:
    """The part that cannot be measured, data set and training, as texts of a scenario file."""

    c: str = "100MB/s"
    beta: str = "200MB/s"
    E: int = 10
    B: int = 100
    dataset: Mapping[str, str | int] | None = None


def _rate(rate: float) -> str:
    digits = max(0, 3 - math.floor(math.log10(rate))) if rate < 1e3 else 0
    return f'"{rate:.{digits}f}MB/s"'


def _curve(points: Mapping[int, Median]) -> str:
    each = (f"{at} = {_rate(found.value)}" for at, found in sorted(points.items()))
    return "{ " + ", ".join(each) + " }"


def _text(text: str) -> str:
    """A TOML basic string."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in plain) + '"'


def _formatted(found: Median) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.4g} (n={found.n})"
    return f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}] (n={found.n})"


def text(wishes: Wishes, measured: Measured, job: Job, title: str) -> str:
    """A scenario (sim/scenario.py reads it); needs at least one point of the file system."""
    p0 = wishes.prefetchers
    t = measured.together
    fastest = max(
        (found.value for curve in measured.file_system.values() for found in curve.values()),
        default=max((found.value for found in t.values()), default=0.0),
    )
    memory = measured.memory
    lines = [f"title = {_text(title)}", 'source = "uffdprefetch calibrate"']
    lines += [f"# {note}" for note in measured.notes]
    lines += [
        "",
        "[system]",
        f"N = {measured.nodes}",
        f'c = "{job.c}"       # of a node: yours, calibrate cannot know it',
        f'beta = "{job.beta}"    # preprocessing: yours',
        f"b_c = {_rate(measured.link.value if measured.link else fastest)}"
        + ("" if measured.link else "    # not measured: as fast as the file system"),
        f"b_fs = {_rate(fastest)}",
        f"t = {_curve(t)}    # gamma nodes together, with {p0} threads each",
        'rates = "node"    # of these: the threads of a node share them',
    ]
    if measured.alone:
        lines.append(f"t_demand = {_curve(measured.alone)}    # with one thread each")
    lines += [
        "",
        "[[system.classes]]",
        'name = "staging buffer"',
        'd = "1GiB"',
        f"p = {p0}",
        f"r = {_curve(memory)}",
        "",
        "[[system.classes]]",
        'name = "RAM"',
        f'd = "{measured.memory_bytes // MEMORY_PART >> 20}MiB"    # half of the memory',
        f"p = {max(memory)}",
        f"r = {_curve(memory)}",
    ]
    if measured.disk:
        lines += [
            "",
            "[[system.classes]]",
            'name = "local disk"',
            f'd = "{measured.disk_bytes >> 20}MiB"    # what is free',
            f"p = {max(measured.disk)}",
            f"r = {_curve(measured.disk)}",
        ]
    dataset = job.dataset or {"F": 100_000, "size": "110kB"}
    lines += ["", "[dataset]    # yours"]
    lines += [
        f"{key} = {_text(value) if isinstance(value, str) else value}"
        for key, value in dataset.items()
    ]
    lines += ["", "[training]    # yours", f"E = {job.E}", f"B = {job.B}"]
    for name, options in POLICIES:
        lines += ["", "[[policies]]", f"policy = {_text(name)}", *options]
    lines += ["", "# Medians with their nonparametric 95 % intervals, MB/s:"]
    lines += ["[measured]"]
    for request, curve in sorted(measured.file_system.items()):
        lines += ["", f"[measured.file_system.{request}]    # bytes of a request, by threads"]
        lines += [f'{count} = "{_formatted(found)}"' for count, found in sorted(curve.items())]
    for name, points in (
        ("together", measured.together),
        ("alone", measured.alone),
        ("memory", measured.memory),
        ("disk", measured.disk),
    ):
        if points:
            lines += ["", f"[measured.{name}]"]
            lines += [f'{count} = "{_formatted(found)}"' for count, found in sorted(points.items())]
    if measured.link:
        lines += ["", "[measured.network]", f'link = "{_formatted(measured.link)}"']
    return "\n".join([*lines, ""])


#: Policies that a calibrated scenario compares.
POLICIES: tuple[tuple[str, list[str]], ...] = (
    ("perfect", []),
    ("naive", []),
    ("planned", []),
    ("node-pool", []),
    ("hdmlp", []),
    ("cluster-pool", []),
)
