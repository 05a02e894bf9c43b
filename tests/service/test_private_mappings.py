# SPDX-License-Identifier: Apache-2.0
"""Private mappings: those that may be written, as torch's storages are, are followed by page
tables, and what the job writes stays its own; the pool takes those that only read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import require
from harness import Records, Start, both_engines, file_digest, python

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.usefixtures("patient")

POOL = ("--engine", "pool", "--budget", "64MiB")


def the_file(summary: dict[str, Any] | None) -> dict[str, Any]:
    assert summary is not None
    (file,) = summary["files"]
    return dict(file)


@pytest.mark.alone  # how much is read ahead needs a service that gets a processor
@both_engines
@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_a_private_mapping_that_may_be_written_is_prefetched_and_its_writes_stay(
    job: Start, records: Records, engine: str, policy: str
) -> None:
    """In order, with a write in every second MiB behind and one ahead of the reader."""
    code = """
    with open(sys.argv[1], "rb") as file:
        model = bytearray(file.read())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
    wrong = []
    for at in range(0, m.length, 1 << 18):
        piece = slice(at, min(at + (1 << 18), m.length))
        if m.view[piece] != model[piece]:
            wrong.append(at)
        for place in (at // 2, at, min(at + (9 << 20), m.length - 1)):
            m.view[place] = model[place] = (place * 7 + 1) % 256
        time.sleep(0.01)
    pages = [slice(at, at + PAGE) for at in range(0, m.length, PAGE)]
    again = [page.start for page in pages if m.view[page] != model[page]]
    if os.fork() == 0:
        m.view[0] = 99
        say(child=m.view[0] == 99 and m.view[1:] == model[1:])
        os._exit(0)
    os.wait()
    say(wrong=wrong, again=again, whole=m.view == model)
    m.protect(PROT_READ)
    say(whole=m.view == model, checkpoints=m.checkpoints())
    """
    reason = why_no_bed()
    require(reason is None, reason or "")
    with SlowBed(records.path.parent) as bed:  # a local disk may be left to the kernel
        work = job(python(code, bed.path(records.path.name)), ("--policy", policy))
        done = work.finish().good()
    assert done.lines == [
        {"child": True},
        {"wrong": [], "again": [], "whole": True},
        {"whole": True, "checkpoints": 0},
    ]
    assert file_digest(records.path) == records.digest
    file = the_file(done.summary)
    assert file["served_by"] == "page_tables"
    assert file["prefetched_bytes"] > 0
    assert done.summary is not None
    others_are_seen_better = policy == "fixed" or engine == "pool"
    told = "private and writable" in json.dumps(done.summary["degradations"])
    assert told == others_are_seen_better


def test_what_a_forked_child_has_not_read_itself_is_no_stream_of_it(
    job: Start, records: Records
) -> None:
    """fork(2) copies the page table of a private mapping that was written."""
    code = """
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
    m.digest()
    m.view[0] = 1
    if os.fork() == 0:
        until(agents, "the child's agent")
        time.sleep(0.5)
        say(present=m.present() > m.length // PAGE * 0.9, pid=os.getpid())
        os._exit(0)
    os.wait()
    """
    done = job(python(code, records.path)).finish().good()
    assert done.summary is not None
    (said,) = done.lines
    assert said["present"]
    (rank,) = done.summary["ranks"]
    child = said["pid"]
    assert child in [process["pid"] for process in rank["processes"]]
    assert [s for s in done.summary["streams"] if s["pid"] == child] == []


def test_the_pool_serves_a_private_mapping_until_it_is_to_be_written(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE)
    pooled = m.pooled()
    digest = m.digest()
    if os.fork() == 0:
        say(child=m.digest(), pooled=m.pooled())
        os._exit(0)
    os.wait()
    say(pooled=pooled, digest=digest)
    m.protect(PROT_READ | PROT_WRITE)
    m.view[PAGE + 5] = 7
    m.protect(PROT_READ)
    before, after = m.view[: PAGE + 5], m.view[PAGE + 6 :]
    with open(sys.argv[1], "rb") as file:
        data = file.read()
    say(pooled=m.pooled(), kept=m.view[PAGE + 5], same=before == data[: PAGE + 5]
        and after == data[PAGE + 6 :])
    m.unmap()
    n = Mapping(sys.argv[1], flags=MAP_PRIVATE)
    say(pooled=n.pooled(), digest=n.digest())
    n.grow(n.length + PAGE)
    say(digest=n.digest())
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines == [
        {"child": records.digest, "pooled": True},
        {"pooled": True, "digest": records.digest},
        {"pooled": False, "kept": 7, "same": True},
        {"pooled": True, "digest": records.digest},
        {"digest": records.digest},
    ]
    assert file_digest(records.path) == records.digest
    assert the_file(done.summary)["served_by"] == "pool"


def test_a_page_of_the_pool_that_was_written_past_us_stays_written(
    job: Start, own_records: Records
) -> None:
    """As a debugger does it, by /proc/PID/mem: of a private mapping the page is then a copy."""
    code = """
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE)
    say(pooled=m.pooled(), first=m.view[5 * PAGE])  # what is not mapped cannot be written so: EIO
    m.write_past_us(5 * PAGE, b"breakpoint")
    say(written=bytes(m.view[5 * PAGE : 5 * PAGE + 10]).decode())
    hear()
    until(lambda: m.parts()[1] > 1, "the file in its place")
    rest = m.digest()
    say(written=bytes(m.view[5 * PAGE : 5 * PAGE + 10]).decode())
    """
    work = job(python(code, own_records.path), options=POOL)
    assert work.line()["pooled"]
    assert work.line() == {"written": "breakpoint"}
    with open(own_records.path, "ab") as file:  # the file changes: all is given back
        file.write(b"more")
    work.tell()
    assert work.line() == {"written": "breakpoint"}
    work.finish().good()


def test_a_private_mapping_outlives_the_service(job: Start, records: Records) -> None:
    code = """
    read = Mapping(sys.argv[1], flags=MAP_PRIVATE)
    write = Mapping(sys.argv[1], flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
    write.view[77] = 1
    say(pooled=read.pooled())
    hear()
    say(read=read.digest(), kept=write.view[77])
    write.view[77] = write.view[78]
    with open(sys.argv[1], "rb") as file:
        say(write=write.view[78:] == file.read()[78:])
    """
    work = job(python(code, records.path), options=POOL)
    assert work.line() == {"pooled": True}
    work.kill_service()
    work.tell()
    assert work.line() == {"read": records.digest, "kept": 1}
    assert work.line() == {"write": True}
    assert work.finish().status == 0
