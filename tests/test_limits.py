# SPDX-License-Identifier: Apache-2.0
"""Bounds that hold whatever the service wants, and a service without descriptors.

What does not grow over attaches, and a huge file, is tests/test_stability.py.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from components import ARRAY, data
from conftest import HANG_SECONDS, wait_until
from harness import (
    Job,
    Records,
    Start,
    fd_count,
    file_digest,
    hammered,
    python,
    rss_bytes,
    settle,
)

from uffdprefetch.demo.bed import SlowBed

pytest_plugins = ("harness_fixtures", "components")

MIB = 1 << 20
#: Checkpoints that slide: CI's number; the full one is UFFDPREFETCH_TEST_SLIDES=100000.
SLIDES = int(os.environ.get("UFFDPREFETCH_TEST_SLIDES", "3000"))


def test_the_agent_lays_no_more_than_a_quarter_of_the_mappings_whatever_it_is_told(
    tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    """A greedy service over 80 MiB: 20 480 pages, of which it may lay 8 191."""
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(80 * MIB)
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    stop = hammer(1, "50", "greedy", file=path)
    done = subprocess.run(
        [compiled("crowd"), str(path), str(most)],
        env=hammered(tmp_path), capture_output=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    stop()
    assert done.returncode == 0, done.stderr
    before, highest = map(int, done.stdout.split())
    # the service went to the bound, and the agent not beyond it (its stack and ring are two more)
    assert most // 4 - 64 <= highest - before <= most // 4 + 2


SLIDER = """
slides = int(sys.argv[2])
m = Mapping(sys.argv[1]).managed()

def merged():
    checkpoints, parts = m.parts()
    return parts <= 2 * checkpoints + 1

for part in (1, 2, 3, 4):
    while ring()["taken"] < slides * part // 4:
        m.forget()
        for at in range(0, m.length, 1 << 20):
            hashlib.sha256(m.view[at : at + (1 << 20)])
            time.sleep(0.001)  # a job that computes: else the service sees nothing but touches
    until(merged, "what was taken away to be one mapping with its neighbours")
    say(part=part, fds=len(os.listdir("/proc/self/fd")), pid=os.getpid(), digest=m.digest())
    hear()
"""


def test_thousands_of_slides_cost_no_mapping_no_descriptor_and_no_memory(
    job: Start, records: Records
) -> None:
    """Behind the reader a checkpoint is taken away, ahead one is laid. With one struct file under
    all of it the mappings merge again: n checkpoints are 2 n + 1 mappings."""

    def part(work: Job) -> dict[str, int]:
        line = work.line()
        assert line.pop("digest") == records.digest
        said = {name: int(value) for name, value in line.items()}
        service = work.service()
        said["service_fds"] = settle(lambda: fd_count(service), "the service's descriptors")
        said["service_rss"] = rss_bytes(service)
        said["rss"] = rss_bytes(said["pid"])
        work.tell()
        return said

    work = job(python(SLIDER, records.path, SLIDES), options=("--distance", "128KiB"))
    _, early, later, late = (part(work) for _ in range(4))
    done = work.finish().good()
    assert done.summary is not None
    assert done.summary["totals"]["checkpoints"]["taken_away"] >= SLIDES
    assert late["fds"] == early["fds"] and late["service_fds"] == early["service_fds"]
    assert late["rss"] - early["rss"] < MIB
    # A leak grows in each part; what is loaded or reserved once does not.
    rss = [each["service_rss"] for each in (early, later, late)]
    assert min(rss[1] - rss[0], rss[2] - rss[1]) < MIB // 4, rss
    assert rss[2] - rss[0] < 8 * MIB, rss


PIECES = """
m = Mapping(sys.argv[1]).managed()
most, digests = 0, set()
for epoch in range(3):
    sha = hashlib.sha256()
    for at in range(0, m.length, 1 << 20):
        sha.update(m.view[at : at + (1 << 20)])
        most = max(most, m.parts()[1])
    digests.add(sha.hexdigest())
    m.forget()
say(most=most, digests=sorted(digests))
"""


def test_where_mappings_do_not_merge_again_their_pieces_are_bounded_all_the_same(
    job: Start, bed: SlowBed
) -> None:
    """FUSE and Lustre mappings have a close operation: each place that was ever cut out stays a
    piece of its own, and a process has 65 530. Here it may have 512 for 768 checkpoints."""
    path = data(bed.path(ARRAY))
    work = job(
        python(PIECES, path), options=("--distance", "128KiB"), UFFDPREFETCH_TEST_OVERLAYS="256"
    )
    line = work.line()
    done = work.finish().good()
    assert done.summary is not None
    assert line["digests"] == [file_digest(path)]
    assert done.summary["totals"]["checkpoints"]["laid"] > 768
    assert line["most"] <= 2 * 256 + 2


EMFILE = """
import subprocess
READ = '''
from inside import *
m = Mapping(sys.argv[1])
if sys.argv[2] == "managed":
    m.managed()
elif sys.argv[2] == "early":
    m.digest()
print(m.digest())
'''
m = Mapping(sys.argv[1]).managed()
say(ready=True)
while (word := hear()) != "end":
    words = [sys.executable, "-S", "-c", READ, sys.argv[1], word]
    out = subprocess.run(words, capture_output=True)
    say(status=out.returncode, digest=out.stdout.decode().strip(), own=m.digest(),
        agents=len(agents()), err=out.stderr.decode())
"""


def limit_descriptors(pid: int, most: int) -> None:
    resource.prlimit(
        pid, resource.RLIMIT_NOFILE, (most, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1])
    )


def test_a_service_without_descriptors_serves_whom_it_has_and_recovers(
    job: Start, records: Records
) -> None:
    work = job(python(EMFILE, records.path))
    work.line()
    service = work.service()

    def read(word: str) -> None:
        work.tell(word)
        line = work.line()
        digest = records.digest
        assert line == {"status": 0, "digest": digest, "own": digest, "agents": 1, "err": ""}

    read("managed")
    descriptors = settle(lambda: fd_count(service), "the service's descriptors")
    for room in (0, 1, 2, 3, 4, 6):
        # the lowest number that is not allowed any more: all below are taken, or nearly
        limit_descriptors(service, descriptors + room)
        read("early")
    log = Path(f"{work.env['UFFDPREFETCH_RUNDIR']}").glob("*.log")
    said = "".join(path.read_text() for path in log)
    # it says so now and then, not in a loop
    assert 0 < said.count("Too many open files") < 60, said
    limit_descriptors(service, 1000)
    read("managed")
    wait_until(lambda: fd_count(service) <= descriptors, "its descriptors to be the same again")
    assert work.service() == service
    work.tell("end")
    assert work.finish().status == 0


@pytest.mark.parametrize("soft", [64, 256])
def test_the_service_takes_the_descriptors_that_it_may_have(
    job: Start, records: Records, soft: int
) -> None:
    """Some for each process of the job: a login shell's soft limit is 1024."""
    code = "m = Mapping(sys.argv[1]).managed()\nsay(d=m.digest())\nhear()"
    before = ("prlimit", f"--nofile={soft}:4096")
    work = job(python(code, records.path), before=before)
    assert work.line() == {"d": records.digest}
    assert resource.prlimit(work.service(), resource.RLIMIT_NOFILE) == (4096, 4096)
    work.tell()
    assert work.finish().status == 0
