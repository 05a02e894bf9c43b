# SPDX-License-Identifier: Apache-2.0
"""The service is killed, stopped, absent or slow: the job reads right bytes and ends as ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest
from conftest import process_gone, process_state, wait_until
from harness import (
    OWN_DESCRIPTORS,
    Job,
    Records,
    Start,
    both_engines,
    fd_count,
    python,
    settle,
    snapshot,
)

from uffdprefetch.report.summary import short_lines
from uffdprefetch.service.standstill import LEAST_NS
from uffdprefetch.service.turn import HOUSEKEEPING_NS

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: Four ranks that start at different places of the file; each reads until it hears the word, and
#: where the service "dies" (the second argument) until it is rid of us.
RANKS = """
go = os.path.join(os.getcwd(), "go")

def rank(number):
    m = Mapping(sys.argv[1])
    start = m.length // 4 * number // PAGE * PAGE
    first = hashlib.sha256(m.view[start:]).hexdigest()
    m.managed()
    say(rank=number, pid=os.getpid(), ready=True)
    digests, passes = set(), 0
    done = os.open("passes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        ended = os.path.exists(go)
        m.forget()
        if hashlib.sha256(m.view[start:]).hexdigest() != first:
            say(error=f"rank {number} read wrong bytes")
        digests.add(m.digest())
        passes += 1
        os.write(done, b".")
        if ended:
            break
        if passes == 3:
            say(rank=number, passes=passes)
    if sys.argv[2:] == ["dies"]:
        until(lambda: not agents() and not m.checkpoints(), "the mapping to be given back")
        digests.add(m.digest())
    say(rank=number, digests=sorted(digests), agents=len(agents()), checkpoints=m.checkpoints())
    os._exit(0)

children = []
for number in range(4):
    pid = os.fork()
    if pid == 0:
        rank(number)
    children.append(pid)
for pid in children:
    if os.waitpid(pid, 0)[1]:
        say(error="a rank failed")
"""


class Ranks:
    """The job above; ``read_on`` waits until every rank has read some passes more."""

    def __init__(self, work: Job) -> None:
        self.job = work
        self.pids: list[int] = []
        waiting = 8  # each says ready, then that it has read three passes
        while waiting:
            line = work.line()
            waiting -= 1
            if "ready" in line:
                self.pids.append(line["pid"])

    def read_on(self) -> None:
        passes = self.job.cwd / "passes"
        before = passes.stat().st_size
        wait_until(lambda: passes.stat().st_size >= before + 12, "the ranks to read on")

    def end(self, digest: str) -> list[dict[str, int]]:
        (self.job.cwd / "go").touch()
        done = self.job.finish()
        assert done.status == 0, done.stderr
        assert not [line for line in done.lines if "error" in line]
        last = [line for line in done.lines if "digests" in line]
        assert [line["digests"] for line in last] == [[digest]] * 4
        return last


@contextmanager
def slow(pid: int, duty: float = 0.1, period_seconds: float = 0.02) -> Iterator[None]:
    """Let a process run for a tenth of the time only."""
    end = Event()

    def cycle() -> None:
        while not end.is_set() and not process_gone(pid):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(period_seconds * (1 - duty))
            os.kill(pid, signal.SIGCONT)
            time.sleep(period_seconds * duty)

    thread = Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@both_engines
def test_four_ranks_read_on_when_the_service_is_killed(job: Start, records: Records) -> None:
    ranks = Ranks(job(python(RANKS, records.path, "dies")))
    ranks.job.kill_service()
    ranks.read_on()
    for line in ranks.end(records.digest):
        assert (line["agents"], line["checkpoints"]) == (0, 0)  # given back to the kernel
    assert "the service died during the run" in ranks.job.errors()


@both_engines
def test_four_ranks_read_on_while_the_service_is_stopped(job: Start, records: Records) -> None:
    ranks = Ranks(job(python(RANKS, records.path)))
    with ranks.job.stopped_service() as service:
        ranks.read_on()
        ranks.read_on()
        assert process_state(service) == "T"
    for line in ranks.end(records.digest):  # in the pool the agent stands in for it
        assert (line["agents"], line["checkpoints"] > 0) == (1, True)


def test_four_ranks_read_on_with_a_service_ten_times_slower(job: Start, records: Records) -> None:
    ranks = Ranks(job(python(RANKS, records.path)))
    with slow(ranks.job.service()):
        for _ in range(3):
            ranks.read_on()
    assert len(ranks.end(records.digest)) == len(ranks.pids)


def test_a_job_that_starts_with_a_slow_service_is_served_in_the_end(
    job: Start, records: Records
) -> None:
    code = """
    say(ready=True)
    hear()
    m = Mapping(sys.argv[1])
    digests = {m.digest()}
    m.managed()
    for _ in range(5):
        m.forget()
        digests.add(m.digest())
    say(digests=sorted(digests))
    """
    work = job(python(code, records.path))
    work.line()
    with slow(work.service()):
        work.tell()
        assert work.line() == {"digests": [records.digest]}
    assert work.finish().status == 0


@both_engines
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_job_that_maps_after_the_service_has_gone_reads_plainly(
    job: Start, records: Records, number: int
) -> None:
    code = """
    say(pid=os.getpid())
    hear()
    m = Mapping(sys.argv[1])
    digests = {m.digest()}
    for _ in range(20):
        m.forget()
        digests.add(m.digest())
    say(digests=sorted(digests), checkpoints=m.checkpoints())
    """
    work = job(python(code, records.path))
    pid = work.line()["pid"]
    service = work.kill_service(number)
    work.tell()
    assert work.line() == {"digests": [records.digest], "checkpoints": 0}
    # a stopped service does not hold the job's exit either; only wrap waits for its summary
    wait_until(lambda: process_gone(pid), "the job's end")
    if number == signal.SIGSTOP:
        assert process_state(service) == "T"
        os.kill(service, signal.SIGCONT)
    assert work.finish().status == 0


def test_a_client_killed_in_mid_fault_leaves_the_service_serving_the_others(
    job: Start, records: Records
) -> None:
    victim = """
    def read():
        while True:
            m.forget()
            m.digest()
    m = Mapping(sys.argv[1]).managed()
    for _ in range(6):
        threading.Thread(target=read, daemon=True).start()
    say(pid=os.getpid())
    time.sleep(HANG_SECONDS)
    """
    code = """
    m = Mapping(sys.argv[1]).managed()
    say(ready=True)
    while hear() == "again":
        again = Mapping(sys.argv[1]).managed()
        digest = again.digest()
        again.unmap()
        say(digest=digest, more=faults_again(m), agents=len(agents()))
    """
    work = job(python(code, records.path))
    work.line()
    service = work.service()
    descriptors = settle(lambda: fd_count(service), "the service's descriptors")
    for n in range(8):
        other = job(python(victim, records.path))
        pid = other.line()["pid"]
        time.sleep(0.005 * n)  # anywhere in its faults: no state to wait for, and none is meant
        os.kill(pid, signal.SIGKILL)
        assert other.finish().status == -signal.SIGKILL
        work.tell("again")
        line = work.line()
        assert line["digest"] == records.digest and line["more"] > 0 and line["agents"] == 1
    most = descriptors + OWN_DESCRIPTORS
    wait_until(lambda: fd_count(service) <= most, "the descriptors of the dead")
    assert work.service() == service
    work.tell("end")
    assert work.finish().status == 0


@pytest.mark.parametrize("state", ["running", "stopped", "dead"])
def test_the_wait_of_a_touch_can_be_measured_in_the_job(
    job: Start, records: Records, compiled: Callable[..., str], state: str
) -> None:
    """A C reader times each touch. What it takes is the bench's affair; that it ends is ours."""
    work = job([compiled("latency"), str(records.path)])
    work.line()
    service = work.service()
    if state != "running":
        work.kill_service(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    pages = -(-records.size_bytes // 4096)
    before = work.errors().count(".")
    wait_until(lambda: work.errors().count(".") > before + 10, "more passes")
    work.tell()
    line = work.line()
    assert line["touches"] == line["passes"] * pages and line["slow"] > 0
    assert 0 < line["p50_ns"] <= line["p99_ns"] <= line["max_ns"]
    if state == "stopped":
        os.kill(service, signal.SIGCONT)
    assert work.finish().status == 0


@both_engines
def test_a_service_that_stands_still_at_the_end_of_its_job_goes_on_and_ends(
    job: Start, records: Records
) -> None:
    code = "m = Mapping(sys.argv[1])\nsay(first=m.view[0])\nhear()\nsay(digest=m.digest())"
    work = job(python(code, records.path))
    work.line()
    service = work.kill_service(signal.SIGSTOP)
    work.tell()
    done = work.finish()
    assert (done.status, done.lines) == (0, [{"digest": records.digest}])
    found = re.search(r"is not known: (the service did not answer .*\(SIGSTOP\))", done.stderr)
    assert found is not None, done.stderr
    why = found.group(1)  # by when depends on whether it has welcomed wrap
    assert done.summary is not None, "or `uffdprefetch summary` shows that of another run"
    assert (done.summary["service"]["silent"], done.summary["rung_reason"]) == (True, why)
    wait_until(lambda: process_gone(service), "its end")


def test_a_service_that_stood_still_says_so_in_the_summary(job: Start, records: Records) -> None:
    code = "m = Mapping(sys.argv[1])\nsay(first=m.view[0])\nhear()\nsay(digest=m.digest())"
    work = job(python(code, records.path))
    work.line()
    with work.stopped_service():
        time.sleep((LEAST_NS + HOUSEKEEPING_NS) / 1e9 + 0.5)  # what is stopped shows no state
    wait_until(lambda: snapshot(work.env).seconds > 0, "it to go on")
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert summary["service"]["stood_still_seconds"] >= LEAST_NS / 1e9
    assert short_lines(summary)[0].startswith("the service stood still for ")


def test_what_a_dead_service_has_read_is_no_read_of_the_jobs(job: Start, records: Records) -> None:
    """The launcher waits for it, and what its children have read counts for a process."""
    code = "m = Mapping(sys.argv[1])\nsay(digest=m.digest())\nhear()"
    work = job(python(code, records.path), options=("--engine", "pool", "--budget", "64MiB"))
    assert work.line() == {"digest": records.digest}
    work.kill_service()
    work.tell()
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert done.summary["totals"]["unserved_read_bytes"] < records.size_bytes // 2
