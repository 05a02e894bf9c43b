# SPDX-License-Identifier: Apache-2.0
"""What checkpoints are worth under `auto`: `python bench/checkpoints.py --json F`, `show F`.

Each case runs plainly, as it is (16 checkpoints a mapping), and by page tables alone, in turns,
each from cold, so many rounds. Of a pair of runs in one round the ratio counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harm_beds import LINKS, loop_disk
from pool_cgroup import memory_group, why_not
from reports import ROOT, Report, conditions, load, save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed, drop_cache

SCHEMA = "uffdprefetch-checkpoints/1"
MIB = 1 << 20
PAGE = mmap.PAGESIZE
NOBODY = 65534
PR_SET_DUMPABLE = 4
#: The variants, and what each adds to the environment of wrap; None: without wrap.
VARIANTS: dict[str, dict[str, str] | None] = {
    "plain": None, "with": {}, "none": {"UFFDPREFETCH_RUNG": "2"},
}  # fmt: skip


# ---- the jobs --------------------------------------------------------------------------------


def _take(data: mmap.mmap, first: int, end: int) -> int:
    """[first, end), page by page; its CRC-32."""
    crc = 0
    for at in range(first, end, PAGE):
        crc = zlib.crc32(data[at : at + PAGE], crc)
    return crc


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def in_order(paths: list[Path], epochs: int = 1) -> list[float]:
    """The first file, so many times: seconds of each time."""
    data, took = _mapped(paths[0]), []
    for _ in range(epochs):
        began = time.monotonic()
        _take(data, 0, len(data))
        took.append(time.monotonic() - began)
    return took


def begin(paths: list[Path]) -> list[float]:
    """The first 16 MiB."""
    data, began = _mapped(paths[0]), time.monotonic()
    _take(data, 0, 16 * MIB)
    return [time.monotonic() - began]


def short(paths: list[Path]) -> list[float]:
    """Each file is mapped, read, and unmapped."""
    began = time.monotonic()
    for path in paths:
        with _mapped(path) as data:
            _take(data, 0, len(data))
    return [time.monotonic() - began]


def ranks(paths: list[Path], count: int = 4) -> list[float]:
    """So many processes read a part each."""
    began, children = time.monotonic(), []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            data = _mapped(paths[0])
            _take(data, len(data) * rank // count, len(data) * (rank + 1) // count)
            os._exit(0)
        children.append(pid)
    for pid in children:
        if os.waitpid(pid, 0)[1]:
            raise UffdPrefetchError(f"rank {pid} has failed")
    return [time.monotonic() - began]


def skipping(paths: list[Path]) -> list[float]:
    """One MiB of four."""
    data, began = _mapped(paths[0]), time.monotonic()
    for at in range(0, len(data), 4 * MIB):
        _take(data, at, min(at + MIB, len(data)))
    return [time.monotonic() - began]


def undumpable(paths: list[Path]) -> list[float]:
    """In order; the kernel shows nobody the page tables."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return in_order(paths)


JOBS: dict[str, Callable[[list[Path]], list[float]]] = {
    "in-order": in_order, "epochs": lambda paths: in_order(paths, 3), "begin": begin,
    "short": short, "ranks": ranks, "skipping": skipping, "undumpable": undumpable,
}  # fmt: skip


def job(name: str, directory: Path) -> None:
    """One job over the files of a directory: prints seconds and CPU seconds."""
    took = JOBS[name](sorted(directory.iterdir()))
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in spent)
    print(json.dumps({"seconds": took, "cpu": cpu}))


# ---- the cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``files``: number and bytes; ``bed``: of harm_beds.py; ``limit``: of memory, bytes."""

    job: str
    bed: str = "300/1"
    files: tuple[int, int] = (1, 256 * MIB)
    limit: int = 0
    user: int = 0
    env: tuple[tuple[str, str], ...] = ()
    wrap: tuple[str, ...] = ()


CASES = {
    "in order": Case("in-order"),
    "in order, 5 ms": Case("in-order", "300/5"),
    "first 16 MiB": Case("begin"),
    "first 16 MiB, 5 ms": Case("begin", "300/5"),
    "1 MiB of 4": Case("skipping"),
    "4 ranks": Case("ranks"),
    "1,000 short mappings": Case("short", files=(1000, 256 << 10), wrap=("--min-size=64KiB",)),
    "3 epochs, half the memory": Case("epochs", "1G/1", (1, 384 * MIB), 192 * MIB),
    "ext4": Case("in-order", "ext4", (1, 1024 * MIB)),
    "no PAGEMAP_SCAN": Case("in-order", env=(("UFFDPREFETCH_TEST_NO_PAGEMAP_SCAN", "1"),)),
    "page tables shut": Case("undumpable", user=NOBODY),
}


@contextlib.contextmanager
def _bed(case: Case, place: Path) -> Iterator[tuple[Any, Path]]:
    """The bed and the directory of the case's files on it."""
    if case.bed in LINKS:
        link = LINKS[case.bed]
        with SlowBed(place, bandwidth=link.bandwidth, latency_us=link.latency_us) as bed:
            yield bed, bed.path("files")
    else:
        with (
            tempfile.TemporaryDirectory(dir="/var/tmp") as scratch,
            loop_disk(Path(scratch)) as bed,
        ):
            subprocess.run(["cp", "-r", place / "files", bed.mountpoint], check=True)
            os.sync()
            yield bed, bed.path("files")


def _make(case: Case, place: Path) -> None:
    (place / "files").mkdir()
    number, size = case.files
    block = os.urandom(min(size, 64 * MIB))
    for one in range(number):
        with open(place / "files" / f"{one:04}", "wb") as file:
            for _ in range(0, size, len(block)):
                file.write(block)


def _run(case: Case, variant: str, bed: Any, directory: Path) -> dict[str, Any]:
    for path in directory.iterdir():
        drop_cache(path)
    bed.reset()
    words = [sys.executable, str(Path(__file__)), "job", case.job, str(directory)]
    added, env = VARIANTS[variant], {**os.environ, **dict(case.env)}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        os.chmod(scratch, 0o777)
        summary = Path(scratch) / "summary.json"
        if added is not None:
            env |= {"UFFDPREFETCH_RUNDIR": f"{scratch}/run", **added}
            wrap = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-o", str(summary)]
            words = [*wrap, *case.wrap, "--", *words]
        if case.user:
            user = f"--reuid={case.user}", f"--regid={case.user}", "--clear-groups"
            words = ["setpriv", *user, *words]
        if case.limit:
            words = stack.enter_context(memory_group(case.limit)).joined(words)
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        if done.returncode:
            raise UffdPrefetchError(f"{variant} failed: {done.stderr.strip()[-300:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        counted = bed.counters()
        found |= {"requests": counted["requests"], "bytes": counted["bytes"]}
        if added is not None:
            service = json.loads(summary.read_text())["service"]
            found["service"] = service["cpu_seconds"] + service["worker_cpu_seconds"]
    return found


def measure(args: argparse.Namespace) -> Report:
    """All cases that are wanted, those that are in the report already excepted."""
    report = load(args.json, SCHEMA) if args.json.exists() else {"schema": SCHEMA, "cases": {}}
    report |= conditions()
    until = time.monotonic() + args.minutes * 60
    for name, case in CASES.items():
        if name in report["cases"] or (args.cases and name not in args.cases.split(";")):
            continue
        if time.monotonic() > until:
            break
        if case.limit and (why := why_not()):
            print(f"bench: {name}: left out: {why}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            os.chmod(place, 0o755)
            _make(case, Path(place))
            rounds = []
            with _bed(case, Path(place)) as (bed, directory):
                for number in range(args.rounds):
                    order = list(VARIANTS) if number % 2 else list(reversed(VARIANTS))
                    rounds.append({one: _run(case, one, bed, directory) for one in order})
        report["cases"][name] = rounds
        save(args.json, report)
        print(_row(name, rounds), file=sys.stderr, flush=True)
    return report


def _middle(rounds: list[dict[str, Any]], variant: str, key: str) -> float:
    values = [one[variant][key] for one in rounds]
    return statistics.median(v[-1] if isinstance(v, list) else v for v in values)


def _row(name: str, rounds: list[dict[str, Any]]) -> str:
    pairs = [one["none"]["seconds"][-1] / one["with"]["seconds"][-1] for one in rounds]
    times = [f"{_middle(rounds, one, 'seconds'):.3f}" for one in VARIANTS]
    ratio = f"{statistics.median(pairs):.3f} [{min(pairs):.2f}, {max(pairs):.2f}]"
    both = [
        " / ".join(f"{_middle(rounds, one, key):{form}}" for one in ("with", "none"))
        for key, form in (("requests", ".0f"), ("cpu", ".2f"), ("service", ".2f"))
    ]
    return f"| {' | '.join([name, *times, ratio, *both])} |"


def show(report: Report) -> None:
    """The table."""
    print(
        "| | plain, s | with, s | none, s | none / with | requests | job's CPU, s | service's |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for name, rounds in report["cases"].items():
        print(_row(name, rounds))


def main(words: Sequence[str]) -> int:
    """As a program."""
    if words[:1] == ["job"]:
        job(words[1], Path(words[2]))
        return 0
    if words[:1] == ["show"]:
        show(load(Path(words[1]), SCHEMA))
        return 0
    parser = argparse.ArgumentParser(
        prog="bench/checkpoints.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="F", help="goes on where it was cut off"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no case after so long")
    parser.add_argument("--cases", help="by name, with semicolons")
    show(measure(parser.parse_args(words)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UffdPrefetchError as error:
        sys.exit(f"bench: {error}")
