# SPDX-License-Identifier: Apache-2.0
"""Bounds that hold whatever the service wants, and a service without descriptors.

What does not grow over attaches, and a huge file, is tests/faults/test_stability.py.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from components import ARRAY, data
from conftest import HANG_SECONDS, wait_until
from harness import (
    OWN_DESCRIPTORS,
    Records,
    Start,
    fd_count,
    file_digest,
    hammered,
    python,
    settle,
)
from paths import SUPPORT

from uffdprefetch.base import limits
from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.predict.checkpoints import CHECKPOINTS_MAX

pytest_plugins = ("harness_fixtures", "components")

CROWD = """
maps = [Mapping(sys.argv[1]) for _ in range(int(sys.argv[2]))]
laid = [m.checkpoints() for m in maps]
say(laid=laid, digests=sorted({m.digest() for m in maps}))
for m in maps:
    m.unmap()
until(lambda: Mapping(sys.argv[1]).checkpoints(), "room again")
say(again=True)
"""


def test_the_agent_lays_no_more_than_it_may_whatever_it_is_told(
    small: Path, tmp_path: Path, hammer: Any
) -> None:
    """28 checkpoints a mapping are wanted, 256 in all are allowed (a quarter of the process's
    mappings, where the kernel's own limit stands); what is given back makes room."""
    most = 256
    stop = hammer(1, "100000")  # hardly a command: nothing is given back meanwhile
    env = {**hammered(tmp_path), "PYTHONPATH": str(SUPPORT)}
    env["UFFDPREFETCH_TEST_OVERLAYS"] = str(most)
    done = subprocess.run(
        python(CROWD, small, 40), env=env, capture_output=True, timeout=HANG_SECONDS
    )
    stop()
    assert done.returncode == 0, done.stderr
    line, again = map(json.loads, done.stdout.splitlines())
    assert line["digests"] == [file_digest(small)] and again == {"again": True}
    # 28 at a time, and one process may have been told while the limit was reached
    assert most / 2 < sum(line["laid"]) <= most
    assert 0 in line["laid"]


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


def test_a_mapping_is_cut_into_few_pieces_however_often_it_is_read(
    job: Start, bed: SlowBed
) -> None:
    """FUSE and Lustre mappings have a close operation: pieces of them never merge again."""
    path = data(bed.path(ARRAY))
    work = job(
        python(PIECES, path), options=("--distance", "128KiB"), UFFDPREFETCH_TEST_PATIENCE="1000"
    )
    line = work.line()
    done = work.finish().good()
    assert done.summary is not None
    assert line["digests"] == [file_digest(path)]
    laid = done.summary["totals"]["checkpoints"]["laid"]
    assert 0 < laid <= CHECKPOINTS_MAX
    assert line["most"] == 2 * laid + 1


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
    # what is looked at of /proc is kept open as there is room
    work = job(python(EMFILE, records.path), options=("--reads", "off"))
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
    assert said.count("Too many open files") < 60  # none where the log could not be opened
    limit_descriptors(service, 1000)
    read("managed")
    most = descriptors + OWN_DESCRIPTORS

    def what_is_open() -> str:
        links = sorted(os.readlink(link) for link in Path(f"/proc/{service}/fd").iterdir())
        return f"its descriptors to be {most} at most again, of {links}"

    wait_until(lambda: fd_count(service) <= most, what_is_open)
    assert work.service() == service
    work.tell("end")
    assert work.finish().status == 0


MANY = """
maps = [Mapping(path).managed() for path in sys.argv[1:5]]
more = [Mapping(path) for path in sys.argv[5:]]
say(all=len(maps) + len(more), read=sum(m.view[0] for m in more))
hear()
"""


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_with_as_few_descriptors_as_it_needs_it_serves_some_and_names_the_limit(
    job: Start, tmp_path: Path, engine: str
) -> None:
    least = limits.DESCRIPTORS_LEAST
    paths = [tmp_path / f"{number}.bin" for number in range(30)]
    for path in paths:
        path.write_bytes(bytes(2 << 20))
    options = ("--engine", engine, "--reads", "off", "--strict")
    work = job(python(MANY, *paths), options=options, before=("prlimit", f"--nofile={least}"))
    assert work.line()["all"] == len(paths)
    work.tell()
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert not done.summary["service"]["died"]
    refused = [one for one in done.summary["unserved"] if one["reason"] == "not-followed"]
    assert len(paths) // 2 < len(refused) < len(paths), "with twice as many half are served"
    assert {one["why"] for one in refused} == {
        f"it cannot be opened: RLIMIT_NOFILE is {least} (ulimit -n)"
    }


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
