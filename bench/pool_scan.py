# SPDX-License-Identifier: Apache-2.0
"""Show 3 of bench/pool.py: a warm scan of every cache line, by where the data are."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import shutil
import statistics
import struct
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pool_bench import (
    Bench,
    NotHere,
    Run,
    by_variant,
    cases_of,
    median,
    paired,
)
from pool_gate import Readers, check_sums, run_readers, unit_sums
from render import markdown_table, number, ratio

from uffdprefetch.demo.bed import drop_cache, warm_fully

TITLE = "Warm scans of every cache line"
MIB = 1 << 20
UNIT_BYTES = MIB
STEP_BYTES = 64
CASE = "warm scan"
SMALL_FOLIOS = "page cache, FUSE"
LARGE_FOLIOS = "page cache, local disk, large folios"
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KPF_COMPOUND_TAIL = 1 << 16  # include/uapi/linux/kernel-page-flags.h
_SAMPLED_PAGES = 4096


def add_options(parser: ArgumentParser) -> None:
    """The options of this measurement alone."""
    parser.add_argument("--passes", type=int, default=3, help="new mappings in each run")
    parser.add_argument(
        "--local", type=Path, default=Path("/var/tmp"), help="a directory on a real disk"
    )


# ---- what holds the data ---------------------------------------------------------------------


def folio_bytes(path: Path) -> float | None:
    """Mean size of the folios that hold the cached file; None where the kernel does not tell.

    Every fourth part of the file gives a sample. From /proc/self/pagemap and /proc/kpageflags,
    which are for root.
    """
    if os.geteuid() != 0:
        return None
    page = mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        pages = len(view) // page
        data: np.ndarray = np.frombuffer(view, dtype=np.uint8)
        base, tails, seen = data.ctypes.data // page, 0, 0
        try:
            with (
                open("/proc/self/pagemap", "rb") as maps,
                open("/proc/kpageflags", "rb", buffering=0) as flags,
            ):
                for first in range(0, pages, max(1, pages // 4)):
                    count = min(_SAMPLED_PAGES // 4, pages - first)
                    for number_ in range(first, first + count):
                        int(data[number_ * page])  # mapped, so that it has a frame
                    maps.seek((base + first) * 8)
                    for (entry,) in struct.iter_unpack("<Q", maps.read(8 * count)):
                        flags.seek((entry & ((1 << 55) - 1)) * 8)
                        (flag,) = struct.unpack("<Q", flags.read(8))
                        tails += bool(flag & _KPF_COMPOUND_TAIL)
                        seen += 1
        except OSError:
            return None
        finally:
            del data
    return page * seen / max(1, seen - tails)


@contextlib.contextmanager
def shmem_huge_pages() -> Iterator[None]:
    """The kernel gives shmem huge pages to who asks, for as long as this lasts. Root only.

    Raises:
        NotHere: it cannot be set.
    """
    try:
        text = SHMEM_ENABLED.read_text()
        before = text[text.index("[") + 1 : text.index("]")]
        if before not in ("always", "advise", "within_size", "force"):
            SHMEM_ENABLED.write_text("advise\n")
    except (OSError, ValueError) as error:
        raise NotHere(f"shmem_enabled cannot be set to advise: {error}") from None

    def restore() -> None:
        with contextlib.suppress(OSError):
            SHMEM_ENABLED.write_text(before + "\n")

    atexit.register(restore)
    try:
        yield
    finally:
        restore()
        atexit.unregister(restore)


@contextlib.contextmanager
def local_copy(bench: Bench, where: Path) -> Iterator[Path]:
    """The data set's file on a real disk, cached in folios as large as the file system makes."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-bench-", dir=where) as name:
        path = Path(name) / "data"
        shutil.copyfile(bench.original, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        yield path


def warm_in_large_folios(path: Path) -> None:
    """All of the file in the page cache, in folios of up to 2 MiB: what MADV_HUGEPAGE asks for."""
    drop_cache(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        with contextlib.suppress(OSError):
            view.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(view), mmap.PAGESIZE):
            view[at]
    warm_fully(path)


# ---- runs ------------------------------------------------------------------------------------


class Scan:
    """All variants on one data set."""

    def __init__(self, bench: Bench, local: Path, passes: int) -> None:
        self.bench, self.local, self.passes = bench, local, passes
        self.sums = unit_sums(bench.original, UNIT_BYTES, STEP_BYTES)

    def read(self, path: Path, how: str = "mmap", wrap: Sequence[str] = ()) -> Readers:
        """Pass 0 (which fills what is not warm) and the passes that count, checked."""
        readers = run_readers(
            lambda gate: [
                *wrap, self.bench.program("pool_read"), "--pattern=whole", f"--how={how}",
                f"--unit={UNIT_BYTES}", f"--step={STEP_BYTES}", "--remap",
                f"--epochs={1 + self.passes}", f"--gate={gate}", str(path),
            ],
            ranks=1, epochs=1 + self.passes, timeout_seconds=600, scratch=self.bench.scratch,
        )  # fmt: skip
        for lines in readers.epochs:
            check_sums(lines, self.sums, "whole")
            check_sums([{**lines[0], "sum": lines[0]["again_sum"]}], self.sums, "whole")
        return readers

    def run_of(self, readers: Readers, folios: float | None = None) -> Run:
        """Medians over the passes that count."""
        lines = [one for (one,) in readers.epochs[1:]]
        seconds = statistics.median(line["end_ns"] - line["begin_ns"] for line in lines) / 1e9
        again = statistics.median(line["again_ns"] for line in lines) / 1e9
        gigabytes = self.bench.file_bytes / 1e9
        return {
            "seconds": seconds,
            "again_seconds": again,
            "gb_per_second": gigabytes / seconds,
            "again_gb_per_second": gigabytes / again,
            "us_per_gb": 1e6 * seconds / gigabytes,
            "fault_us_per_gb": 1e6 * (seconds - again) / gigabytes,
            # Which of the two a fault is that waited for the pool differs between kernels.
            "faults_per_gb": statistics.median(line["minflt"] + line["majflt"] for line in lines)
            / gigabytes,
            "folio_bytes": folios,
            "wall_seconds": readers.wall_seconds,
        }

    def cached(self, path: Path, how: str = "mmap") -> Run:
        """From the page cache, which already holds it."""
        if path == self.bench.data:
            self.bench.prepare(bandwidth=0, latency_us=0)
            warm_fully(path)
        elif how == "mmap":
            warm_in_large_folios(path)
        else:
            warm_fully(path)
        return self.run_of(self.read(path, how), folio_bytes(path))

    def pool(self, *options: str) -> Run:
        """From the pool, which pass 0 fills."""
        words = self.bench.wrapped("pool", options)
        self.bench.prepare(bandwidth=0, latency_us=0)
        run = self.run_of(self.read(self.bench.data, wrap=words))
        pool = run["pool"] = self.bench.pool_summary()
        # Of all passes: pass 0 is in it, whose faults mostly found nothing there yet.
        gigabytes = self.bench.file_bytes / 1e9
        run["events_per_gb"] = (pool["present_faults"] or 0) / self.passes / gigabytes
        return run

    def huge(self) -> Run:
        """The pool with huge pages. NotHere where it did not get any."""
        with shmem_huge_pages():
            run = self.pool("--huge-pages", "auto")
        if not run["pool"]["huge_pages"]:
            raise NotHere(f"the pool has no huge pages: {run['pool']['huge_pages_reason']}")
        return run

    def variants(self) -> dict[str, Callable[[], Run]]:
        """By name."""
        data = self.bench.data
        return {
            SMALL_FOLIOS: lambda: self.cached(data),
            LARGE_FOLIOS: lambda: self.cached(self.local),
            "read(2) of 1 MiB, FUSE": lambda: self.cached(data, "read"),
            "read(2) of 1 MiB, local disk": lambda: self.cached(self.local, "read"),
            "pool, 4 KiB pages": lambda: self.pool("--huge-pages", "off"),
            "pool, 2 MiB pages": self.huge,
        }


def measure(bench: Bench, args: Namespace, save: Callable[[], None]) -> None:
    """All variants."""
    with local_copy(bench, args.local) as local:
        scan = Scan(bench, local, args.passes)
        bench.rounds(CASE, args.pairs, scan.variants(), save)


def tables(report: dict[str, Any]) -> list[str]:
    """One table."""
    rows = []
    runs = report["runs"]
    for name, mine in by_variant(runs, CASE).items():
        to_small = paired(runs, name, SMALL_FOLIOS, "gb_per_second")
        to_large = paired(runs, name, LARGE_FOLIOS, "gb_per_second")
        folios = median(mine, "folio_bytes")
        rows.append(
            [
                name,
                number(median(mine, "gb_per_second")),
                ratio(*to_small) if to_small else "n/a",
                ratio(*to_large) if to_large else "n/a",
                number(median(mine, "us_per_gb"), 0),
                number(median(mine, "again_gb_per_second")),
                number(median(mine, "fault_us_per_gb"), 0),
                number(median(mine, "faults_per_gb"), 0),
                number(median(mine, "events_per_gb"), 0),
                number(None if folios is None else folios / 1024, 0),
                str(len(mine)),
            ]
        )
    head = ["first scan", "GB/s", "to FUSE's page cache", "to large folios", "us for a GB"]
    head += ["again GB/s", "faults cost us for a GB", "faults for a GB", "events for a GB"]
    head += ["folio KiB", "runs"]
    return [markdown_table(head, rows)] if cases_of(runs) else []


def notes(report: dict[str, Any]) -> Sequence[str]:
    """The table's legend."""
    return (
        "One thread reads one word of each 64 bytes of a new mapping, all data resident: the first "
        "scan finds empty page tables. *again*: the same mapping once more, so what is left of the "
        "time is what the faults cost. Faults are the thread's own (getrusage); events are those "
        "faults that the pool's thread answered at once (its summary), for each warm pass. "
        "*folio*: what the file is cached in, mean of samples (/proc/kpageflags).",
    )
