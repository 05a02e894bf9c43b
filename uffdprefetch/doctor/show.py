# SPDX-License-Identifier: Apache-2.0
"""A report for people: a table on a terminal, plain lines into a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from uffdprefetch.doctor import Report

_STYLES = {"ok": "green", "limit": "yellow", "cannot": "bold red", "note": "cyan", "skipped": "dim"}


def _verdict(report: Report) -> str:
    fatal = next((check for check in report.checks if check.status == "cannot"), None)
    if fatal is not None:
        return f"{report.verdict}: {fatal.name}: {fatal.found}"
    rung = "none" if report.rung is None else str(report.rung)
    world = [check.found for check in report.checks if check.name == "cluster: launcher"]
    return "; ".join((f"{report.verdict}: rung {rung}: {report.rung_reason}", *world))


def plain(report: Report, config: Sequence[tuple[str, str, str]] | None = None) -> str:
    """Plain text, one fact a line: greppable, and the same on every terminal."""
    lines = []
    for key, value, origin in config or ():
        lines.append(f"config   {key} = {value or '(empty)'}   [{origin}]")
    for check in report.checks:
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
    findings = Table("check", "", "found", "what follows, and the command that lifts it")
    for column in findings.columns:
        column.overflow = "fold"  # a command that is cut off cannot be copied
    for check in report.checks:
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
