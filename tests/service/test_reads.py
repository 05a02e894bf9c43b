# SPDX-License-Identifier: Apache-2.0
"""Jobs that read a file by read(2), pread(2) and their kind, under `wrap`, from cold on the slow
bed: what comes over its link, in how many requests, what the job has read, and what is said."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from components import Run, Runner, python
from conftest import require
from harness import MIB, write_records

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

pytest_plugins = ("components",)

SIZE = 96 * MIB
#: Slow enough that a service beside a busy machine comes before a job's end.
BANDWIDTH = 100_000_000
#: What the kernel asks for at a time, and what it makes of a file that is read in order.
AROUND = 128 << 10
PLAIN_REQUESTS = SIZE // AROUND
#: May be lost on a link of which nothing is known yet, and what one try brings
#: (predict/storage.py).
FREE_BYTES = 8 * MIB + 4 * MIB

DIGEST = """
import hashlib, os, sys, threading, time
sha, file = hashlib.sha256(), os.open(sys.argv[1], os.O_RDONLY)
"""
READERS = {
    "read by 64 KiB": "while piece := os.read(file, 65536): sha.update(piece)",
    "one read": "sha.update(os.read(file, 1 << 30))",
    "pread by 64 KiB": (
        "for at in range(0, os.fstat(file).st_size, 65536): sha.update(os.pread(file, 65536, at))"
    ),
    "pread by 4 MiB": (
        "for at in range(0, os.fstat(file).st_size, 4 << 20):"
        " sha.update(os.pread(file, 4 << 20, at))"
    ),
    "preadv": (
        "pieces, at = [bytearray(32768), bytearray(32768)], 0\n"
        "while count := os.preadv(file, pieces, at):\n"
        "    sha.update(b''.join(pieces)[:count]); at += count"
    ),
    "4 threads": (
        "part = os.fstat(file).st_size // 4\n"
        "found = [b''] * 4\n"
        "def read(number):\n"
        "    found[number] = b''.join(os.pread(file, 1 << 20, number * part + at)\n"
        "                             for at in range(0, part, 1 << 20))\n"
        "threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "sha.update(b''.join(found))"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A directory with a file, and what SHA-256 has to say of that."""

    directory: Path
    digest: str


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("read")
    return Source(directory, write_records(directory / "data.bin", SIZE))


@pytest.fixture(scope="module")
def bed(source: Source) -> Iterator[SlowBed]:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(source.directory, bandwidth=BANDWIDTH) as mounted:
        yield mounted


@pytest.fixture
def runner(runner: Runner) -> Runner:
    """The service is up before the job: what is read until then nobody sees."""
    runner.env["UFFDPREFETCH_STRICT"] = "1"
    return runner


@dataclass(frozen=True)
class Link:
    """What came over it."""

    bytes: int
    requests: int


def plainly(runner: Runner, bed: SlowBed, *words: str | Path) -> tuple[bytes, Link]:
    """What a job that is not wrapped prints."""
    drop_cache(bed.path("data.bin"))
    bed.reset()
    out = runner.plain(*words)
    return out, link(bed)


def wrapped(runner: Runner, bed: SlowBed, *words: str | Path, **how: Any) -> tuple[Run, Link]:
    drop_cache(bed.path("data.bin"))
    bed.reset()
    run = runner.wrapped(*words, **how)
    assert run.status == 0, run.stderr
    return run, link(bed)


def link(bed: SlowBed) -> Link:
    counters = bed.counters()
    return Link(counters["bytes"], counters["requests"])


def reader(code: str, bed: SlowBed) -> list[str]:
    return python(f"{DIGEST}{code}\nprint(sha.hexdigest())", bed.path("data.bin"))


def check_followed(run: Run, bed: SlowBed, came: Link) -> None:
    """Much was read ahead, beside a busy machine, too; each byte once."""
    (file,) = (one for one in run.summary["files"] if one["path"] == str(bed.path("data.bin")))
    assert file["served_by"] == "reads"
    assert file["prefetched_bytes"] > SIZE // 8, run.summary["degradations"]
    assert came.bytes <= 1.05 * SIZE + 4 * MIB
    assert came.requests < PLAIN_REQUESTS, "the kernel asks for little at a time, we for more"
    assert run.summary["reads"]["read_bytes"] > SIZE // 8
    assert run.summary["totals"]["unserved_read_bytes"] < SIZE
    assert not run.summary["degradations"]


@pytest.mark.parametrize("way", READERS)
def test_what_is_read_in_order_is_read_ahead(
    runner: Runner, bed: SlowBed, source: Source, way: str
) -> None:
    run, came = wrapped(runner, bed, *reader(READERS[way], bed))
    assert run.stdout.decode().strip() == source.digest
    check_followed(run, bed, came)


def test_a_process_that_maps_what_it_has_read_by_calls_is_one(
    runner: Runner, bed: SlowBed, source: Source
) -> None:
    """It is met when it reads, and connects when it maps."""
    code = """
for at in range(0, 48 << 20, 1 << 20): os.pread(file, 1 << 20, at)
import mmap
view = mmap.mmap(file, 0, prot=mmap.PROT_READ)
for at in range(0, len(view), 1 << 20): sha.update(view[at : at + (1 << 20)])
"""
    run, _ = wrapped(runner, bed, *reader(code, bed))
    assert run.stdout.decode().strip() == source.digest
    assert [len(rank["processes"]) for rank in run.summary["ranks"]] == [1]
    assert run.summary["reads"]["read_bytes"] > 0


def test_who_stops_on_the_way_has_drawn_little_that_it_does_not_read(
    runner: Runner, source: Source
) -> None:
    """It stays, so what was asked for is read to its end; a long latency is worth much to it."""
    stops = 64 * MIB
    code = (
        f"for at in range(0, {stops}, 65536): sha.update(os.pread(file, 65536, at))\n"
        "time.sleep(0.3)"
    )
    with SlowBed(source.directory, latency_us=5000) as far:
        plain, plain_link = plainly(runner, far, *reader(code, far))
        run, came = wrapped(runner, far, *reader(code, far))
    assert run.stdout == plain
    assert run.summary["totals"]["prefetched_bytes"] > stops // 8
    assert came.bytes <= 1.05 * plain_link.bytes + 4 * MIB


def test_a_program_without_python_is_read_ahead_of(
    runner: Runner, bed: SlowBed, source: Source
) -> None:
    run, came = wrapped(runner, bed, "dd", f"if={bed.path('data.bin')}", "bs=64k", "status=none")
    assert hashlib.sha256(run.stdout).hexdigest() == source.digest
    check_followed(run, bed, came)


def test_who_reads_here_and_there_is_read_ahead_of_for_no_more_than_finding_out_may_cost(
    runner: Runner, bed: SlowBed
) -> None:
    code = (
        "import random\n"
        "chance = random.Random(1)\n"
        "for _ in range(300):\n"
        f"    sha.update(os.pread(file, 65536, chance.randrange({SIZE >> 16}) << 16))"
    )
    out, plain = plainly(runner, bed, *reader(code, bed))
    run, came = wrapped(runner, bed, *reader(code, bed))
    assert run.stdout == out
    assert came.bytes <= 1.05 * plain.bytes + FREE_BYTES


@pytest.mark.parametrize(
    "options", [("--reads", "off"), ("--exclude", "*.bin"), ("--policy", "none")]
)
def test_what_is_not_to_be_followed_is_left_to_the_kernel(
    runner: Runner, bed: SlowBed, source: Source, options: tuple[str, ...]
) -> None:
    run, came = wrapped(runner, bed, *reader(READERS["read by 64 KiB"], bed), options=options)
    assert run.stdout.decode().strip() == source.digest
    assert not run.summary["files"] and came.bytes == SIZE
    assert run.summary["totals"]["unserved_read_bytes"] >= SIZE
    followed = run.summary["reads"]
    assert followed is None if "--exclude" not in options else followed["read_bytes"] == 0


def test_a_file_of_no_more_than_the_least_size_is_not_followed(
    runner: Runner, bed: SlowBed, source: Source
) -> None:
    words = reader(READERS["read by 64 KiB"], bed)
    run, _ = wrapped(runner, bed, *words, options=("--min-size", str(SIZE + 1)))
    assert run.stdout.decode().strip() == source.digest
    assert not [one for one in run.summary["files"] if one["served_by"] == "reads"]


# -------------------------------------------------------------- where it would do harm


def test_what_a_job_drops_behind_itself_comes_once(
    runner: Runner, bed: SlowBed, source: Source
) -> None:
    code = (
        "at = 0\n"
        "while piece := os.read(file, 65536):\n"
        "    sha.update(piece); at += len(piece)\n"
        "    os.posix_fadvise(file, 0, at, os.POSIX_FADV_DONTNEED)"
    )
    run, came = wrapped(runner, bed, *reader(code, bed))
    assert run.stdout.decode().strip() == source.digest
    assert came.bytes <= 1.05 * SIZE + 4 * MIB
    (said,) = run.summary["degradations"]
    assert "data.bin: left to the kernel: what is read of it is not kept" in said


@pytest.mark.parametrize("way", ["one read", "pread by 4 MiB"])
def test_a_file_system_that_keeps_nothing_is_left_alone_and_that_is_said(
    runner: Runner, source: Source, way: str
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(source.directory, direct_io=True) as bed:
        bed.reset()
        run = runner.wrapped(*reader(READERS[way], bed))
        came = link(bed)
        (left,) = run.summary["reads"]["left_alone"]
        assert left["path"] == str(bed.path("data.bin")) and "direct_io" in left["why"]
    assert run.status == 0 and run.stdout.decode().strip() == source.digest
    assert came.bytes == SIZE and not run.summary["files"]


def test_where_each_open_drops_what_is_there_an_open_file_is_read_ahead_of(
    runner: Runner, source: Source
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(source.directory, keep_cache=False, bandwidth=BANDWIDTH) as bed:
        run, came = wrapped(runner, bed, *reader(READERS["read by 64 KiB"], bed))
        assert run.stdout.decode().strip() == source.digest
        check_followed(run, bed, came)


def test_what_goes_past_the_page_cache_is_not_touched(
    runner: Runner, bed: SlowBed, source: Source
) -> None:
    words = ["dd", f"if={bed.path('data.bin')}", "bs=1M", "iflag=direct", "status=none"]
    run, came = wrapped(runner, bed, *words)
    assert hashlib.sha256(run.stdout).hexdigest() == source.digest
    assert came == Link(SIZE, SIZE // MIB) and not run.summary["files"]
    (left,) = run.summary["reads"]["left_alone"]
    assert left == {
        "path": str(bed.path("data.bin")), "why": "read past the page cache (O_DIRECT)",
    }  # fmt: skip


def test_a_file_that_may_be_written_is_not_touched(runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "own.bin"
    digest = write_records(path, 32 * MIB)
    drop_cache(path)
    code = DIGEST.replace("O_RDONLY", "O_RDWR") + READERS["read by 64 KiB"]
    run = runner.wrapped(*python(f"{code}\nprint(sha.hexdigest())", path))
    assert run.stdout.decode().strip() == digest and not run.summary["files"]


def test_a_pipe_that_comes_in_its_place_loses_nothing(
    runner: Runner, bed: SlowBed, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = (
        "for at in range(64): os.read(file, 65536)\n"
        "def write():\n"
        "    with open(sys.argv[2], 'wb', buffering=0) as pipe:\n"
        "        for number in range(200): pipe.write(b'%06d' % number); time.sleep(0.001)\n"
        "thread = threading.Thread(target=write); thread.start()\n"
        "os.close(file); pipe = os.open(sys.argv[2], os.O_RDONLY)\n"
        "assert pipe == file\n"
        "while piece := os.read(pipe, 4096): sha.update(piece)\n"
        "thread.join()"
    )
    run, _ = wrapped(runner, bed, *reader(code, bed), tmp_path / "pipe")
    expected = hashlib.sha256(b"".join(b"%06d" % number for number in range(200)))
    assert run.stdout.decode().strip() == expected.hexdigest()
