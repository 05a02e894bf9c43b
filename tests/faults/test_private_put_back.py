# SPDX-License-Identifier: Apache-2.0
"""The file is put back in the place of a private mapping that the pool serves: whoever does it ends
at each of its steps, and the thread that does it where the agent is dead finds no descriptor free,
or the leader of its process gone. (What a job may do to such mappings: test_private_pool.py.)"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import process_state, require, wait_until
from harness import AGENT_STATES, Records, Start, python
from private_jobs import FORKS, GONE, POOL, WRITTEN, dies_at

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)

pytestmark = pytest.mark.slow

# ---- at each step ------------------------------------------------------------------------------

#: More steps than there are: each of them is tried until one is not reached any more.
STEPS_MOST = 100
#: At its start, with the file mapped elsewhere, after each part, and at its end.
STEPS_LEAST = 9

PART_GOES = """
start = 3 * PAGE
m.unmap(0, start)
"""
#: The service commands it, and nobody in the job waits.
FILE_GROWS = """
start = 0
say(ready=True)
hear()
until(lambda: os.path.exists(log) or m.parts()[1] > 1, "the exit, or the file in its place")
"""
BEGINS = {"the job unmaps a part": PART_GOES, "the file changes": FILE_GROWS}
#: Whether the agent has ended by now.
REPORTS = """
def seen():  # of one moment: an agent that has just told of its step ends next
    hit, count = os.path.exists(log), len(agents())
    return hit == (count == 0) and {"hit": hit, "agents": count}
say(**until(seen, "the end of an agent that has told of its step"))
hear()
"""
#: A child has the file where the pool serves all of a mapping (docs/safety.md): so the job changes
#: it before.
AFTERWARDS = """
say(wrong=wrong(m, start))
m.unmap(1499 * PAGE, PAGE)
model[1499 * PAGE : 1500 * PAGE] = bytes(PAGE)
anonymous = MAP_PRIVATE | MAP_FIXED | 0x20  # MAP_ANONYMOUS
libc.mmap(m.address + 1499 * PAGE, PAGE, PROT_READ | PROT_WRITE, anonymous, -1, 0)
"""


IN_DETACHING = {"UFFDPREFETCH_TEST_AGENT_EXIT_STATE": str(AGENT_STATES.index("detaching"))}


@pytest.mark.parametrize(
    ("begins", "service"),
    [*((begins, "lives") for begins in BEGINS), ("the job unmaps a part", "dies")],
)
def test_whatever_step_of_putting_it_back_is_the_agents_last(
    job: Start, own_records: Records, tmp_path: Path, begins: str, service: str
) -> None:
    """The job's own thread, or the service, has the rest. Where both die while the job does nothing
    there are holes: the double fault that is not handled (docs/safety.md)."""
    for step in range(1, STEPS_MOST):
        variables = dies_at(tmp_path, step, **IN_DETACHING)
        work = job(
            python(WRITTEN + BEGINS[begins] + REPORTS + AFTERWARDS + FORKS, own_records.path),
            options=POOL, **variables,
        )  # fmt: skip
        if begins == "the file changes":
            work.line()
            with open(own_records.path, "ab") as file:
                file.write(b"more")
            work.tell()
        first = work.line()
        assert first["hit"] == (first["agents"] == 0)
        if service == "dies":
            work.kill_service()
        work.tell()
        done = work.finish()
        assert done.status == 0 and done.lines == [{"wrong": []}] * 4, (step, done.lines)
        if not Path(variables["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"]).exists():
            break  # nor in what the job does afterwards
    assert STEPS_LEAST < step < STEPS_MOST - 1


@pytest.mark.parametrize("begins", BEGINS)
def test_whatever_step_of_putting_it_back_is_the_services_last(
    job: Start, own_records: Records, tmp_path: Path, begins: str
) -> None:
    """The process stands still right there until the service is dead."""
    for step in range(1, STEPS_MOST):
        variables = dies_at(tmp_path, step, UFFDPREFETCH_TEST_AGENT_STOP="1", **IN_DETACHING)
        text = WRITTEN + "say(pid=os.getpid())\n" + BEGINS[begins] + "hear()\n" + AFTERWARDS + FORKS
        work = job(python(text, own_records.path), options=POOL, **variables)
        pid = work.line()["pid"]
        log = Path(variables["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"])
        with goes_on_without_its_service(work, pid, log):
            if begins == "the file changes":
                work.line()
                with open(own_records.path, "ab") as file:
                    file.write(b"more")
                work.tell()
            work.tell()
            done = work.finish()
        assert done.status == 0 and done.lines == [{"wrong": []}] * 4, (step, done.lines)
        if not log.exists():
            break
    assert STEPS_LEAST < step < STEPS_MOST - 1


@contextlib.contextmanager
def goes_on_without_its_service(work: Any, pid: int, log: Path) -> Iterator[None]:
    """Where the process stops, whenever that is, its service is killed, and it goes on."""

    def watch() -> None:
        while not (over.wait(0.002) or (log.exists() and process_state(pid) == "T")):
            pass
        if not over.is_set():
            work.kill_service()
            os.kill(pid, signal.SIGCONT)

    over, thread = threading.Event(), threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---- where no descriptor is free -----------------------------------------------------------------

#: All numbers but those of the test's pipes are a file's, whose server may not answer.
FULL = """
    import resource
    far = os.open(sys.argv[2], os.O_RDONLY)
    until(lambda: Mapping(path, length=4 << 20).unmap() or os.path.exists(log), "the exit")
    until(lambda: not agents(), "the agent's end")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            os.dup(far)
    except OSError as error:
        say(full=error.errno == errno.EMFILE)
    hear()
"""


@pytest.fixture
def far(tmp_path: Path) -> Iterator[SlowBed]:
    """A file system whose server stands still as soon as the test says so."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "far"
    source.mkdir()
    (source / "far.bin").write_bytes(bytes(4096))
    with SlowBed(source, latency_us=0, told_of_closes=True) as bed:
        yield bed
        with contextlib.suppress(ProcessLookupError):
            os.kill(bed.pid, signal.SIGCONT)


def test_where_no_descriptor_is_free_nobody_waits_for_the_server_of_a_file(
    job: Start, records: Records, far: SlowBed, tmp_path: Path
) -> None:
    """Not for its being closed in the table of the thread that acts, nor for that thread's end: the
    server may be the very thread that waits for it."""
    code = """
    for page in (4, 1000, 1499):
        at = m.address + page * PAGE
        checked(libc.mprotect(at, 4 * PAGE, PROT_READ | PROT_WRITE), "mprotect")
        say(wrong=wrong(m))
    """
    text = WRITTEN + textwrap.dedent(FULL) + textwrap.dedent(code)
    words = python(text, records.path, far.path("far.bin"))
    work = job(words, options=POOL, **dies_at(tmp_path, 60))
    assert work.line() == {"full": True}
    os.kill(far.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(far.pid) == "T", "the stop")
    work.tell()
    assert [work.line() for _ in range(3)] == [{"wrong": []}] * 3
    os.kill(far.pid, signal.SIGCONT)
    work.finish().good()


@pytest.mark.parametrize("agent", ["there", "dead"])
def test_where_the_thread_that_led_the_process_has_ended_the_others_go_on(
    job: Start, records: Records, tmp_path: Path, agent: str
) -> None:
    """Of such a process /proc/self tells nothing: by its own name the thread that acts asks."""
    code = """
    def other():
        state = lambda: open("/proc/self/stat").read().rpartition(")")[2].split()[0]
        until(lambda: state() == "Z", "the leader's end")
        checked(libc.mprotect(m.address + 4 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE), "mprotect")
        say(wrong=wrong(m), left=m.view[6 * PAGE : 6 * PAGE + 9] == b"written 6")
        os._exit(0)

    threading.Thread(target=other).start()
    libc.syscall(60, 0)  # exit(2): of this thread alone
    """
    require(platform.machine() == "x86_64", "the number of exit(2) is x86-64's")
    gone = (
        GONE["dead"].replace("say(pooled=pooled, agents=agents())", "") if agent == "dead" else ""
    )
    text = WRITTEN + textwrap.dedent(gone) + textwrap.dedent(code)
    variables = dies_at(tmp_path, 60) if agent == "dead" else {}
    done = job(python(text, records.path), options=POOL, **variables).finish().good()
    assert done.lines == [{"wrong": [], "left": True}]
