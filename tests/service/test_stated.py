# SPDX-License-Identifier: Apache-2.0
"""What is said to be needed is on its way before the job has touched a byte of it, on the slow bed:
by the user (`--whole GLOB`), by the job (MAP_POPULATE, MADV_WILLNEED); docs/whole.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from components import ARRAY, slowly
from conftest import wait_until
from harness import Start, auto, python, snapshot

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache

pytest_plugins = ("harness_fixtures", "components")
pytestmark = auto

#: Maps the file, touches it only when it is told to, and compares it with the one beside the bed.
SITTER = """
path, beside = sys.argv[1:3]
m = Mapping(path)
say(mapped=m.length)
while (word := hear()) != "end":
    with open(beside, "rb") as plain:
        say(right=all(
            plain.read(1 << 20) == bytes(m.view[at : at + (1 << 20)])
            for at in range(0, m.length, 1 << 20)
        ))
"""


def start(job: Start, bed: SlowBed, store: Path, *options: str) -> Any:
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    work = job(python(SITTER, path, store / ARRAY), options=options)
    assert work.line()["mapped"]
    return work


def end(work: Any, bed: SlowBed) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was said of the file, the summary)."""
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = [f for f in summary["files"] if f["path"] == str(bed.path(ARRAY))]
    return file["stated"], summary


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_a_file_of_the_users_is_read_whole_before_it_is_touched(
    job: Start, bed: SlowBed, store: Path, engine: str
) -> None:
    size = (store / ARRAY).stat().st_size
    options = "--engine", engine, "--budget", "512MiB", "--whole", ARRAY
    work = start(job, bed, store, *options)
    wait_until(lambda: bed.counters()["bytes"] >= size, lambda: f"all of it: {bed.counters()}")
    came = bed.counters()["bytes"]
    work.tell("read")
    assert work.line()["right"]
    # a kernel that takes single pages away at any moment may have to bring some back
    assert bed.counters()["bytes"] - came < size * 0.03
    said, summary = end(work, bed)
    assert said["state"] in ("streamed", "done") and said["by"] == "--whole"
    assert size * 0.9 <= said["read_bytes"] <= size * 1.03
    assert bed.counters()["bytes"] < size * 1.05, "once"
    assert summary["degradations"] == []


def test_a_file_that_is_not_named_or_does_not_fit_is_not(
    job: Start, bed: SlowBed, store: Path
) -> None:
    for options, findings in (
        (("--whole", "*.other"), False),
        (("--whole", "*", "--budget", "4MiB"), True),
    ):
        work = start(job, bed, store, *options)
        work.tell("read")
        assert work.line()["right"]
        said, summary = end(work, bed)
        assert (said["state"] if said else None) == ("refused" if findings else None)
        found = [line for line in summary["degradations"] if "--whole" in line]
        # again where it has become a new file to the service meanwhile, with more or less room
        assert bool(found) == findings


def all_of_it(bed: SlowBed, store: Path) -> None:
    size = (store / ARRAY).stat().st_size
    wait_until(lambda: bed.counters()["bytes"] >= size, lambda: f"all of it: {bed.counters()}")


@pytest.mark.parametrize("engine", ["cache", "pool"])
@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_a_mapping_to_be_populated_is_there_at_once_and_streamed_then(
    job: Start, bed: SlowBed, store: Path, engine: str, flags: str
) -> None:
    """As llama.cpp maps a model. The kernel would have read all of it before mmap(2) returned."""
    code = SITTER.replace("Mapping(path)", f"Mapping(path, flags={flags} | MAP_POPULATE)")
    code = code.replace("mapped=m.length", "came=json.load(open(sys.argv[3]))['bytes']")
    path = bed.path(ARRAY)
    drop_cache(path)
    with slowly(bed, 20_000_000):  # all of it would take seconds
        bed.reset()
        work = job(
            python(code, path, store / ARRAY, bed.path(CONTROL_NAME)),
            options=("--engine", engine, "--budget", "512MiB"),
        )
        assert work.line()["came"] < (store / ARRAY).stat().st_size / 2
    all_of_it(bed, store)
    work.tell("read")
    assert work.line()["right"]
    said, _ = end(work, bed)
    assert said["state"] in ("streamed", "done") and said["by"] == "the job"
    assert bed.counters()["bytes"] < (store / ARRAY).stat().st_size * 1.05, "once"


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_what_is_in_memory_is_populated_at_once(
    job: Start, bed: SlowBed, store: Path, engine: str
) -> None:
    """As the kernel would have done. (The pool maps its own memory.) Nobody has read it by that."""
    code = """
    m = Mapping(sys.argv[1], flags=MAP_SHARED | MAP_POPULATE)
    say(present=m.present(), pages=-(-m.length // PAGE))
    hear()
    """
    path = bed.path(ARRAY)
    path.read_bytes()
    bed.reset()
    work = job(python(code, path), options=("--engine", engine, "--budget", "512MiB"))
    line = work.line()
    most = line["pages"] // 64  # that the kernel takes away at any moment, and our checkpoints
    assert line["present"] >= line["pages"] - most if engine == "cache" else not line["present"]
    wait_until(lambda: snapshot(work.env).files, "the service to know it")
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert engine == "pool" or bed.counters()["bytes"] < 4 << 20
    (file,) = summary["files"]
    assert engine == "pool" or file["stated"]["state"] == "done"
    assert summary["streams"] == []


def test_of_a_private_writable_mapping_populate_stays_what_it_is(
    job: Start, bed: SlowBed, store: Path
) -> None:
    """The kernel makes the copies by it."""
    code = """
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE | MAP_POPULATE, prot=PROT_READ | PROT_WRITE)
    say(missing=-(-m.length // PAGE) - m.present())
    """
    drop_cache(bed.path(ARRAY))
    done = job(python(code, bed.path(ARRAY))).finish().good()
    assert done.lines == [{"missing": 0}]


def test_a_range_that_the_job_wants_is_read_and_no_other(
    job: Start, bed: SlowBed, store: Path
) -> None:
    """MADV_WILLNEED: the kernel alone reads read_ahead_kb of it. (No more than what a link of which
    nothing is known brings in 50 ms, before any of it is used.)"""
    code = """
    m = Mapping(sys.argv[1])
    say(mapped=m.length)
    m.advise(MADV_WILLNEED, 4 << 20, 3 << 20)
    hear()
    """
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    work = job(python(code, path))
    assert work.line()["mapped"] > 16 << 20
    wait_until(lambda: bed.counters()["bytes"] >= 3 << 20, lambda: f"it: {bed.counters()}")
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert bed.counters()["bytes"] < 4 << 20
    (file,) = summary["files"]
    assert (file["stated"]["asked_bytes"], file["stated"]["by"]) == (3 << 20, "the job")


def test_ranges_that_lie_apart_are_read_and_nothing_between_them(
    job: Start, bed: SlowBed, store: Path
) -> None:
    """Said before the service could hear of any: it stands still while the job maps the file."""
    code = """
    say(ready=1)
    hear()
    m = Mapping(sys.argv[1])
    for start in 1, 12, 2:
        m.advise(MADV_WILLNEED, start << 20, 1 << 20)
    say(said=m.length)
    hear()
    """
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    work = job(python(code, path))
    assert work.line() == {"ready": 1}
    with work.stopped_service():
        work.tell()
        assert work.line()["said"] > 16 << 20
        came = bed.counters()["bytes"]  # the kernel reads some of each at once
    wait_until(lambda: bed.counters()["bytes"] >= 3 << 20, lambda: f"it: {bed.counters()}")
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = summary["files"]
    assert file["stated"]["asked_bytes"] == 3 << 20
    assert came < 2 << 20 and bed.counters()["bytes"] < 4 << 20


def all_that_comes(work: Any, bed: SlowBed) -> int:
    """What has come when nothing more does, while a job waits."""
    came = -1
    while came != bed.counters()["bytes"]:
        came = bed.counters()["bytes"]
        work.tell("wait")
        work.line()
    return came


@pytest.mark.parametrize("engine", ["cache", "pool"])
@pytest.mark.parametrize("advice", ["NORMAL", "SEQUENTIAL", "RANDOM"])
def test_however_a_job_says_that_it_reads_one_touch_brings_little_and_right_bytes(
    job: Start, bed: SlowBed, store: Path, engine: str, advice: str
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    m.advise({"NORMAL": 0, "RANDOM": 1, "SEQUENTIAL": 2}[sys.argv[3]])
    say(mapped=m.length)
    hear()
    m.view[8 << 20]
    say(touched=1)
    while hear() == "wait":
        time.sleep(0.2)
        say(waited=1)
    with open(sys.argv[2], "rb") as plain:
        say(right=plain.read() == bytes(m.view))
    """
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    words = python(code, path, store / ARRAY, advice)
    work = job(words, options=("--engine", engine, "--budget", "512MiB"))
    work.line()
    work.tell()
    assert work.line() == {"touched": 1}
    came = all_that_comes(work, bed)
    work.tell("read")
    assert work.line() == {"right": True}
    work.finish().good()
    assert came < 6 << 20, "what tells the link, and what the kernel reads"


@pytest.mark.parametrize("engine", ["cache", "pool"])
@pytest.mark.parametrize("advice", ["DONTNEED", "COLD", "PAGEOUT"])
def test_what_the_job_has_no_use_for_any_more_does_not_come(
    job: Start, bed: SlowBed, store: Path, engine: str, advice: str
) -> None:
    """Of a file that is being streamed. Who reads it all the same reads right bytes."""
    code = """
    m = Mapping(sys.argv[1], flags=MAP_SHARED | MAP_POPULATE)
    say(mapped=m.length)
    hear()
    m.advise({"DONTNEED": 4, "COLD": 20, "PAGEOUT": 21}[sys.argv[3]], 32 << 20, 64 << 20)
    say(said=1)
    while hear() == "wait":
        time.sleep(0.2)
        say(waited=1)
    with open(sys.argv[2], "rb") as plain:
        say(right=plain.read() == bytes(m.view))
    """
    path = bed.path(ARRAY)
    drop_cache(path)
    with slowly(bed, 5_000_000):  # the rest of it would be on its way in some seconds
        bed.reset()
        words = python(code, path, store / ARRAY, advice)
        work = job(words, options=("--engine", engine, "--budget", "512MiB"))
        work.line()
        wait_until(lambda: bed.counters()["bytes"] >= 1 << 20, lambda: f"begun: {bed.counters()}")
        work.tell()
        assert work.line() == {"said": 1}
    wait_until(lambda: bed.counters()["bytes"] >= 31 << 20, lambda: f"it: {bed.counters()}")
    came = all_that_comes(work, bed)
    work.tell("read")
    assert work.line() == {"right": True}
    work.finish().good()
    assert came < 44 << 20, "the rest of it, and what was under way"
