# SPDX-License-Identifier: Apache-2.0
"""A report for people: a few lines; all checks as a table on a terminal, as plain lines into a
pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from uffdprefetch.doctor import USERFAULTFD, Report, reads
from uffdprefetch.doctor.check import CANNOT, LAUNCHER, LIMIT, NOTE, OF_NODES, OK, Check

_STYLES = {"ok": "green", "limit": "yellow", "cannot": "bold red", "note": "cyan", "skipped": "dim"}
#: Most lines about what is lacking.
LACKS_MAX = 5
#: What works where each of these checks is well.
_WORKS = {
    "pool": "the pool", "eBPF (bcc)": "the kernel's events in traces", "warm 4 MiB": "the path",
    LAUNCHER: "nodes that share",
}  # fmt: skip
#: Checks about how readers are followed, which the short report sums up in one line.
_OF_FOLLOWING = frozenset(
    (
        *USERFAULTFD, "pidfd_getfd", "close_range", "userfaultfd(2)", "/dev/userfaultfd",
        "vm.unprivileged_userfaultfd", "page tables",
    )
)  # fmt: skip
_GROUPS = (
    (
        "following readers",
        _OF_FOLLOWING | {"kernel.yama.ptrace_scope", "vm.max_map_count", reads.CALLS, reads.NAMES},
    ),
    ("the installation", {"user", "preload object", "helper", "runtime directory"}),
    ("memory and the pool", {"memory", "pool", "pool memory", "pool huge pages", "pool disk"}),
    ("traces", {"eBPF (bcc)"}),
)


def _verdict(report: Report) -> str:
    fatal = next((check for check in report.checks if check.status == CANNOT), None)
    if fatal is not None:
        return f"{report.verdict}: {fatal.name}: {fatal.found}"
    world = [check.found for check in report.checks if check.name == LAUNCHER]
    return "; ".join((f"{report.verdict}: {report.rung_reason}", *world))


def _grouped(checks: Sequence[Check]) -> list[tuple[str, list[Check]]]:
    """The checks under the names of what they are about, the last ones about a path or nodes."""
    found = [(name, [c for c in checks if c.name in names]) for name, names in _GROUPS]
    known = {name for _, names in _GROUPS for name in names}
    nodes = [c for c in checks if c.name in OF_NODES]
    rest = [c for c in checks if c.name not in known and c not in nodes]
    both = (*found, ("the path", rest), ("the nodes", nodes))
    return [(name, some) for name, some in both if some]


def _what_and_why(check: Check) -> str:
    """What follows, and from what, unless it says so itself."""
    if check.found in check.follows:
        return check.follows
    return f"{check.follows} ({check.found})"


def short(report: Report, columns: int | None = None) -> str:
    """At most ten facts: the verdict, what works, what it costs not to have the rest, one cure; a
    line each, which is folded where a terminal has fewer ``columns``."""
    works = {1: ["readers followed by userfaultfd"], 2: ["readers followed by page tables"]}
    well = list(works.get(report.rung or 0, []))
    well += [_WORKS[c.name] for c in report.checks if c.status == OK and c.name in _WORKS]
    lacks = [c for c in report.checks if c.status in (CANNOT, LIMIT, NOTE) and c.follows]
    # The ways to a userfaultfd are notes: where one is shut another may be open.
    cures = [c.remedy for c in lacks if c.name in USERFAULTFD and c.status == LIMIT and c.remedy]
    lacks = [c for c in lacks if c.name not in _OF_FOLLOWING]  # of which the verdict speaks
    general = {name for _, names in _GROUPS for name in names}  # after what was asked about: PATH
    lacks.sort(key=lambda c: ((CANNOT, LIMIT, NOTE).index(c.status), c.name in general))
    lines = [_verdict(report)]
    if well:
        lines.append(f"works: {', '.join(well)}")
    lines += [f"{c.name}: {_what_and_why(c)}" for c in lacks[:LACKS_MAX]]
    if len(lacks) > LACKS_MAX:
        lines.append(f"and {len(lacks) - LACKS_MAX} more")
    # A note has no bearing on the verdict: what is well needs no cure, and least one by root.
    cures += [c.remedy for c in lacks if c.remedy and c.status != NOTE]
    wrapped = [line for text in lines for line in _folded(text, columns)]
    if cures:
        wrapped.append(f"cure: {cures[0]}")  # one line, to be copied
    return "\n".join([*wrapped, "all checks: uffdprefetch doctor --all", ""])


def _folded(text: str, columns: int | None) -> list[str]:
    if columns is None:
        return [text]
    return textwrap.wrap(
        text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def plain(report: Report, config: Sequence[tuple[str, str, str]] | None = None) -> str:
    """Plain text, one fact a line: greppable, and the same on every terminal."""
    lines = []
    for key, value, origin in config or ():
        lines.append(f"config   {key} = {value or '(empty)'}   [{origin}]")
    for name, checks in _grouped(report.checks):
        lines.append(f"# {name}")
        for check in checks:
            lines.append(f"{check.status:<8} {check.name}: {check.found}")
            if check.follows:
                lines.append(f"         -> {check.follows}")
            if check.remedy and check.status != "ok":
                lines.append(f"         $ {check.remedy}")
    lines += [_verdict(report), ""]
    return "\n".join(lines)


def table(report: Report, config: Sequence[tuple[str, str, str]] | None = None) -> None:
    """Print the report with rich to stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if config:
        settings = Table("option", "value", "from", title="configuration", title_justify="left")
        for column in settings.columns:
            column.overflow = "fold"
        for row in config:
            settings.add_row(*map(Text, row))
        console.print(settings)
    for name, checks in _grouped(report.checks):
        findings = Table(
            "check", "", "found", "what follows, and the command that lifts it", title=name,
            title_justify="left", expand=True,
        )  # fmt: skip
        for column in findings.columns:
            column.overflow = "fold"  # a command that is cut off cannot be copied
        for check in checks:
            follows = Text(check.follows)
            if check.remedy and check.status != "ok":
                follows.append(f"\n$ {check.remedy}", style="bold")
            findings.add_row(
                Text(check.name),
                Text(check.status, style=_STYLES.get(check.status, "")),
                Text(check.found),
                follows,
            )
        console.print(findings)
    console.print(Text(_verdict(report), style="bold"))
