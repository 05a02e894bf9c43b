# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch trace``: record (with a command, --pid or --duration), or show FILE..."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.errors import usage_error

FORMATS = ("text", "json", "html", "png", "perfetto")
#: What the text gathers readers under.
GROUPINGS = ("file", "rank", "pid")
_USAGE = """uffdprefetch trace [options] -- CMD...             record a command
       uffdprefetch trace [options] --pid PID            record what runs
       uffdprefetch trace FILE... [--format F] [-o OUT]  show
       uffdprefetch trace --compare PLAIN WRAPPED        what got better, worse"""


class Command:
    """Record who reads which pages of which file, and what it costs; or show a recording.

    Recording: the kernel's own events (page faults, page-cache fills and evictions, readahead,
    block I/O, system calls) by eBPF, of CMD and what it starts, whether or not it runs under wrap;
    without the rights for that, what userfaultfd and page tables tell. CMD keeps its standard
    streams, signals and exit status. `wrap --trace FILE` records a prefetched run in the same way.
    """

    examples = (
        "uffdprefetch trace -o run -- python train.py",
        "uffdprefetch trace run.uptrace",
        "uffdprefetch trace run.uptrace --format html",
        "uffdprefetch trace --compare plain.uptrace wrapped.uptrace",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        from uffdprefetch.trace.record.starter import MAX_EVENTS, MIN_SIZE_BYTES

        parser.usage = _USAGE
        parser.add_argument("files", nargs="*", metavar="FILE", help="recordings to show")
        parser.add_argument(
            "-o", dest="output", metavar="FILE",
            help="where to write (the recording, not a summary as wrap -o: same tokens, .uptrace is"
            " appended, default uffdprefetch.%%p; showing: default FILE with the format's suffix, -"
            " for stdout)",
        )  # fmt: skip
        parser.add_argument("-f", "--force", action="store_true", help="overwrite it")
        record = parser.add_argument_group("recording")
        record.add_argument("--pid", type=int, metavar="PID", help="a process that runs already")
        record.add_argument("--duration", metavar="TIME", help="end after this long (10, 1.5s, 2m)")
        record.add_argument(
            "--include", action="append", default=[], metavar="GLOB",
            help="only files that match, of any size (repeatable; default: files of"
            f" {MIN_SIZE_BYTES >> 20} MiB and more that are no programs)",
        )  # fmt: skip
        record.add_argument(
            "--max-events", type=int, default=MAX_EVENTS, metavar="N",
            help=f"single events to keep (default: {MAX_EVENTS}); the overview has all",
        )  # fmt: skip
        record.add_argument("--no-bpf", action="store_true", help="as if eBPF were not permitted")
        record.add_argument("-q", "--quiet", action="store_true", help="no line at the end")
        show = parser.add_argument_group("showing")
        show.add_argument("--format", choices=FORMATS, help="text is the default")
        show.add_argument(
            "--compare", action="store_true", help="two recordings of one job (text or json)"
        )
        show.add_argument(
            "--by", choices=GROUPINGS, default="file",
            help="what the text gathers readers under (default: file)",
        )  # fmt: skip

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if args.pid is not None or rest is not None:
            return _record(args, rest)
        if not args.files:
            raise usage_error(f"nothing to record or to show\n{_USAGE}")
        if args.compare:
            return _compare(args)
        return _show(args)


# ---- recording ----------------------------------------------------------------------------------


def _record(args: argparse.Namespace, rest: list[str] | None) -> int:
    from uffdprefetch.base import spawn
    from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError, named
    from uffdprefetch.base.identity import identify
    from uffdprefetch.base.messages import say
    from uffdprefetch.base.units import parse_duration
    from uffdprefetch.report import output
    from uffdprefetch.trace.record.process_identity import TraceLimits
    from uffdprefetch.trace.record.program import Spec
    from uffdprefetch.trace.record.starter import MIN_SIZE_BYTES, Recording, output_path

    if args.files or args.format or args.compare:
        raise usage_error("either record (-- CMD or --pid) or show FILE, not both")
    if args.pid is not None and rest:
        raise usage_error("--pid and a command exclude each other")
    if rest is not None and not rest:
        raise usage_error(f"nothing to run\n{_USAGE}")
    if args.max_events < 0:
        raise usage_error(f"--max-events {args.max_events}: not a number of events")
    environ = spawn.inherited_environment()
    if args.pid is not None:
        _check_pid(args.pid)
    name = output.expand(args.output or "uffdprefetch.%p", "", identify(environ).rank, environ)
    spec = Spec(
        output_path(name), args.force,
        TraceLimits(args.include, MIN_SIZE_BYTES, args.max_events), rest or [],
        duration_seconds=None if args.duration is None
        else named("--duration", parse_duration, args.duration),
        quiet=args.quiet, witness=not args.no_bpf,
    )  # fmt: skip
    if rest:
        spec.launcher = os.getpid()
    else:
        spec.adopt = args.pid
    from uffdprefetch.base.rundir import runtime_directory
    from uffdprefetch.launch.service import own_environment

    if rest and not spawn.can_execute(rest[0], environ):
        spawn.execute(rest, environ)  # says why, before an earlier recording is overwritten
    try:
        recording = Recording.start(spec, own_environment(environ), runtime_directory(environ))
    except UffdPrefetchError as error:
        if not rest or error.exit_code == EXIT_USAGE:
            raise
        say(f"running the command without a recording: {error.message}")
        spawn.execute(rest, environ)
    if rest:
        return _run(recording, rest, args)
    return _watch(recording, args.pid, args)


def _check_pid(pid: int) -> None:
    """Raise if a process cannot be recorded, before anything is started."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise usage_error(f"--pid {pid}: there is no such process") from None
    if os.geteuid() not in (0, owner):
        raise usage_error(f"--pid {pid}: it belongs to uid {owner}, we are {os.geteuid()}")


def _watching(args: argparse.Namespace, engine: str) -> Any:
    """The options of a service that only observes."""
    from uffdprefetch.base import sources

    return sources.load(
        {"policy": "none", "engine": engine, "include": args.include or None, "quiet": "1",
         "min_size_bytes": "1MiB"}
    )  # fmt: skip


def _run(recording: Any, argv: list[str], args: argparse.Namespace) -> int:
    """Run the command; without kernel events for faults, under a service that observes."""
    from uffdprefetch.base import spawn
    from uffdprefetch.base.errors import UffdPrefetchError
    from uffdprefetch.base.messages import say
    from uffdprefetch.launch import launcher

    if not recording.sees_faults:
        if not args.quiet:
            for entry in recording.missing[:1]:
                remedy = f"; {entry['lift']}" if entry["lift"] else ""
                say(f"trace without {entry['what']}: {entry['why']}{remedy}")
        return launcher.run(_watching(args, "cache"), argv, recording, only_record=True)
    recording.began()
    try:
        status = spawn.run(
            argv, spawn.inherited_environment(), lambda pid: None,
            lambda: recording.ended() and None,
        )  # fmt: skip
    except UffdPrefetchError:  # it cannot be executed
        recording.discard()
        raise
    recording.end(os.waitstatus_to_exitcode(status), time.monotonic_ns())
    return spawn.end_like(status)


def _watch(recording: Any, pid: int, args: argparse.Namespace) -> int:
    """Wait for the recorder, which ends with the process, the duration, or us (Ctrl-C)."""
    from uffdprefetch.base import spawn
    from uffdprefetch.launch import service
    from uffdprefetch.launch.address import address_of

    node = None
    if not recording.sees_faults:
        environ = spawn.inherited_environment()
        address = address_of(environ)
        node = service.find_or_start(environ, _watching(args, "off"), address).come_up()
        node.job_started(pid)
        recording.tell(socket=address.socket)
    try:
        while not recording.is_whole():
            time.sleep(0.1)
        return 0
    except KeyboardInterrupt:
        return 0
    finally:
        if node is not None:
            node.close()
        if not recording.is_whole():
            recording.end(None)


# ---- showing ------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from uffdprefetch.trace.analyse.report import analyse
    from uffdprefetch.trace.file import trace_file

    trace = trace_file.read_all(args.files)
    report = analyse(trace)
    wanted = args.format or "text"
    if wanted == "text":
        import shutil

        from uffdprefetch.report import text

        width = shutil.get_terminal_size((100, 24)).columns
        return _write(args, "\n".join(text.lines(report, args.by, width)) + "\n", None)
    if wanted == "json":
        import json

        return _write(args, json.dumps(report, indent=2) + "\n", None)
    if wanted == "html":
        from uffdprefetch.report import html

        return _write(args, html.render(trace, report), ".html")
    path = _target(args, f".{wanted}.json" if wanted == "perfetto" else f".{wanted}")
    if wanted == "png":
        from uffdprefetch.report import png

        return _made(path, lambda temporary: png.write(trace, report, temporary))
    from uffdprefetch.report import perfetto

    return _made(path, lambda temporary: perfetto.write(trace, report, temporary))


def _compare(args: argparse.Namespace) -> int:
    from uffdprefetch.report import compare, forecast
    from uffdprefetch.trace.analyse.report import analyse
    from uffdprefetch.trace.file import trace_file

    if len(args.files) != 2 or args.format not in (None, "text", "json"):
        raise usage_error("--compare wants two recordings, and shows them as text or json")
    traces = [trace_file.read(path) for path in args.files]
    document = compare.of_traces(*map(analyse, traces))
    document["predicted"] = forecast.predicted(*traces)
    if args.format == "json":
        import json

        return _write(args, json.dumps(document, indent=2) + "\n", None)
    return _write(args, "\n".join(compare.lines(document)) + "\n", None)


def _target(args: argparse.Namespace, suffix: str) -> str:
    from uffdprefetch.trace.file.trace_file import SUFFIX

    path = str(args.output or args.files[0].removesuffix(SUFFIX) + suffix)
    if os.path.exists(path) and not args.force:
        raise usage_error(f"{path} exists; give -f or another -o")
    return path


def _write(args: argparse.Namespace, text: str, suffix: str | None) -> int:
    """Write to stdout if the format does (suffix None) or on request, else to a file."""
    if args.output == "-" or (suffix is None and args.output is None):
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    from uffdprefetch.report import output

    path = _target(args, suffix or "")
    return _made(path, lambda temporary: output.overwrite_text(temporary, text))


def _made(path: str, make: Callable[[str], None]) -> int:
    """The file is whole, or not there."""
    from uffdprefetch.report import output

    try:
        output.replace(path, make)
    except OSError as error:
        raise usage_error(f"cannot write {path}: {error.strerror}") from None
    print(path)
    return 0
