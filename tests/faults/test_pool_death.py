# SPDX-License-Identifier: Apache-2.0
"""--engine pool: the service is killed or silent, an agent ends, a rank dies, all while readers
wait for storage and blocks leave the pool. Every byte is compared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import inside
import pytest
from conftest import process_gone, process_state, require, wait_until
from harness import (
    MIB,
    Records,
    Start,
    fd_count,
    file_digest,
    memfd_bytes,
    python,
    settle,
    write_records,
)  # fmt: skip

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

POOL = ("--engine", "pool", "--budget", "6MiB")
#: What an agent does in the pool each time that a mapping comes or goes.
STATES = {"idle": 0, "laying": 2, "detaching": 4}
#: And when it answers in the service's stead.
RESOLVING = 1


def waits(pid: int, where: str, thread: str = "") -> bool:
    """Whether a thread of the process (one of that name) is blocked in a kernel's function."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            named = not thread or (task / "comm").read_text().strip() == thread
            if named and where in (task / "wchan").read_text():
                return True
    return False


def waits_in_the_pool(pid: int) -> bool:
    return waits(pid, "userfault")


def test_a_stopped_service_holds_a_reader_for_less_than_two_seconds(
    job: Start, records: Records
) -> None:
    """The contract's time; how late a process of the job comes that only sleeps is not ours. (No
    thread: it would wait for the interpreter's lock while the reader waits for a page.)"""
    code = """
    told, tell = os.pipe()
    if os.fork() == 0:
        late = 0.0
        while not os.path.exists("go"):
            began = time.monotonic()
            time.sleep(0.02)
            late = max(late, time.monotonic() - began - 0.02)
        os.write(tell, struct.pack("d", late))
        os._exit(0)

    done = os.open("passes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    m = Mapping(sys.argv[1])
    longest, at, last, wrong = 0.0, 0, time.monotonic(), 0
    data = open(sys.argv[1], "rb").read()
    say(ready=True)
    while not os.path.exists("go"):
        wrong += m.view[at : at + 65536] != data[at : at + 65536]
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        at = (at + 65536) % m.length
        if at < 65536:
            os.write(done, b".")
            m.forget()
    (late,) = struct.unpack("d", os.read(told, 8))
    os.wait()
    say(wrong=wrong, longest=longest, late=late, digest=m.digest(), pooled=m.pooled())
    """
    work = job(python(code, records.path), options=POOL)
    work.line()
    passes = work.cwd / "passes"
    wait_until(lambda: passes.stat().st_size, "a pass")
    with work.stopped_service() as service:
        before = passes.stat().st_size
        wait_until(lambda: passes.stat().st_size >= before + 3, "the reader to go on")
        assert process_state(service) == "T"
    before = passes.stat().st_size
    wait_until(lambda: passes.stat().st_size >= before + 3, "the reader to go on")
    (work.cwd / "go").touch()
    line = work.line()
    # the agent stood in for it, so that nothing had to be given back
    assert (line["wrong"], line["digest"], line["pooled"]) == (0, records.digest, True)
    assert line["longest"] < 2 + 2 * line["late"], line
    assert work.finish().status == 0


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with 8 MiB in it, for a bed; and their SHA-256."""
    directory = tmp_path_factory.mktemp("far")
    return directory, write_records(directory / "far.bin", 8 * MIB, seed=4)


#: They read on until they are told to end, then once more.
READERS = """
m = Mapping(sys.argv[1])
end = threading.Event()
digests = {}
def once(number):
    start = m.length // 8 * number
    for at in range(start, start + m.length // 8, 1 << 16):
        sha = hashlib.sha256(m.view[at : at + (1 << 16)]).hexdigest()
        digests.setdefault(at, set()).add(sha)
def read(number):
    while not end.is_set():
        m.forget()
        once(number)
    once(number)
threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
say(pid=os.getpid())
for t in threads:
    t.start()
hear()
end.set()
for t in threads:
    t.join()
say(digests=[sorted(digests[at]) for at in sorted(digests)])
"""


def pieces(path: Path) -> list[list[str]]:
    """What READERS must find, and nothing else."""
    data = path.read_bytes()
    return [
        [hashlib.sha256(data[at : at + 65536]).hexdigest()] for at in range(0, len(data), 65536)
    ]


def test_while_the_service_stands_still_the_whole_file_is_read_from_the_pool(
    job: Start, records: Records
) -> None:
    """By our own thread in the job, the part of a page at the end included; once the service is
    back, what is above the budget goes."""
    assert records.size_bytes % os.sysconf("SC_PAGESIZE")
    code = """
    m = Mapping(sys.argv[1])
    for _ in range(3):
        say(pooled=m.pooled())
        hear()
        say(digest=m.digest(), pooled=m.pooled())
    """
    work = job(python(code, records.path), options=POOL)
    assert work.line() == {"pooled": True}
    with work.stopped_service() as service:
        for _ in range(2):
            work.tell()
            assert work.line() == {"digest": records.digest, "pooled": True}
            assert work.line() == {"pooled": True}
        assert memfd_bytes(service) >= records.size_bytes > 6 * MIB
    wait_until(lambda: memfd_bytes(service) <= 6 * MIB, "what is above the budget to go")
    work.tell()
    assert work.line() == {"digest": records.digest, "pooled": True}
    summary = work.finish().good().summary
    assert summary is not None
    pool = summary["pool"]
    assert pool["stand_in_bytes"] >= records.size_bytes - MIB
    assert pool["resident_peak_bytes"] <= 6 * MIB


def test_what_a_file_has_lost_while_the_service_stands_still_is_sigbus_as_without_us(
    job: Start, own_records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    say(pooled=m.pooled(), pid=os.getpid())  # and nothing is read
    hear()
    say(digest=hashlib.sha256(m.view[: 6 << 20]).hexdigest())
    say(lost=m.view[6 << 20])
    """
    kept = hashlib.sha256(own_records.path.read_bytes()[: 6 * MIB]).hexdigest()
    work = job(python(code, own_records.path), options=POOL)
    line = work.line()
    assert line["pooled"]
    with work.stopped_service():
        os.truncate(own_records.path, 6 * MIB)
        work.tell()
        assert work.line() == {"digest": kept}
        wait_until(lambda: process_gone(line["pid"]), "the job's end")
    assert work.finish().status == -signal.SIGBUS


def test_a_rank_that_dies_while_it_reads_for_a_silent_service_leaves_nothing_above_the_budget(
    job: Start, far: tuple[Path, str]
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    other = """
    m = Mapping(sys.argv[1])
    say(first=m.view[0])
    hear()
    say(digest=m.digest(), pooled=m.pooled())
    """
    jumps = """
    m = Mapping(sys.argv[1])
    say(pid=os.getpid())
    for n in range(128):  # so that nothing is read ahead
        m.view[n * 37 % 128 << 16]
    """
    with SlowBed(far[0], latency_us=50_000) as bed:
        path, budget = bed.path("far.bin"), ("--budget", "2MiB")
        work = job(python(other, path), options=(*budget, *POOL[:2]))
        work.line()
        victim = job(python(jumps, path), options=POOL)
        pid = victim.line()["pid"]
        with work.stopped_service() as service:
            wait_until(lambda: memfd_bytes(service) > 2 * MIB, "the rank to have read by itself")
            wait_until(lambda: waits(pid, "folio_wait", inside.AGENT), "its agent to read")
            os.kill(pid, signal.SIGKILL)
        assert victim.finish().status == -signal.SIGKILL
        wait_until(lambda: memfd_bytes(service) <= 2 * MIB, "what is above the budget to go")
        work.tell()
        assert work.line() == {"digest": far[1], "pooled": True}
        done = work.finish().good()
    assert done.summary is not None and done.summary["pool"]["stand_in_bytes"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_readers_that_wait_for_slow_storage_go_on_without_the_service(
    job: Start, far: tuple[Path, str], number: int
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(far[0], latency_us=50_000) as bed:
        work = job(python(READERS, bed.path("far.bin")), options=("--budget", "2MiB", *POOL[:2]))
        pid = work.line()["pid"]
        wait_until(lambda: waits_in_the_pool(pid), "a thread to be blocked on a page")
        service = work.kill_service(number)
        work.tell()
        assert work.line()["digests"] == pieces(far[0] / "far.bin")
        if number == signal.SIGSTOP:
            os.kill(service, signal.SIGCONT)
        assert work.finish().status == 0


def test_ranks_killed_in_mid_fault_leave_their_places_and_the_others_read_on(
    job: Start, far: tuple[Path, str]
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    other = """
    m = Mapping(sys.argv[1])
    say(first=m.view[0])  # who reads first opens the file
    while hear() == "read":
        m.forget()
        say(digest=m.digest(), pooled=m.pooled())
    """
    with SlowBed(far[0], latency_us=50_000) as bed:
        path = bed.path("far.bin")
        work = job(python(other, path), options=("--budget", "2MiB", *POOL[:2]))
        work.line()
        service = work.service()
        descriptors = settle(lambda: fd_count(service), "the service's descriptors")
        for _ in range(3):
            victim = job(python(READERS, path), options=POOL)
            pid = victim.line()["pid"]
            wait_until(lambda pid=pid: waits_in_the_pool(pid), "a thread to be blocked on a page")
            os.kill(pid, signal.SIGKILL)
            assert victim.finish().status == -signal.SIGKILL
        work.tell("read")
        assert work.line() == {"digest": far[1], "pooled": True}
        wait_until(lambda: fd_count(service) <= descriptors, "the descriptors of the dead")
        work.tell("end")
        done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert done.summary["pool"]["waiters"] == 0


def test_a_read_that_fails_is_sigbus_as_without_us_and_nobody_hangs(
    job: Start, far: tuple[Path, str]
) -> None:
    """The file's server is gone. What the pool holds of it is given back with the rest."""
    require(why_no_bed() is None, why_no_bed() or "")
    code = """
    m = Mapping(sys.argv[1])
    say(first=m.view[0], pooled=m.pooled())
    hear()
    if os.fork() == 0:
        m.digest()
        os._exit(0)
    say(child=os.waitstatus_to_exitcode(os.wait()[1]))
    threads = [threading.Thread(target=m.digest) for _ in range(3)]
    for t in threads:
        t.start()
    m.digest()
    say(survived=True)
    """
    bed = SlowBed(far[0], latency_us=50_000)
    bed.mount()
    try:
        work = job(python(code, bed.path("far.bin")), options=("--budget", "1MiB", *POOL[:2]))
        assert work.line()["pooled"]
        os.kill(bed.pid, signal.SIGKILL)
        wait_until(lambda: process_gone(bed.pid), "the server's end")
        work.tell()
        assert work.line() == {"child": -signal.SIGBUS}
        assert work.finish().status == -signal.SIGBUS
    finally:
        bed.unmount()


# ---- the agent ends ---------------------------------------------------------------------------

#: Runs tests/programs/exits.c again and again under one service, each time with another exit.
EXITS = """
import subprocess
program, path, points = sys.argv[1], sys.argv[2], sys.argv[3:]
for point in points:
    state, _, step = point.partition(":")
    log = os.path.abspath("exit-" + point)
    env = {**os.environ, "UFFDPREFETCH_TEST_AGENT_EXIT": step,
           "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": log}
    if state:
        env["UFFDPREFETCH_TEST_AGENT_EXIT_STATE"] = state
    done = subprocess.run([program, path, log], env=env, capture_output=True, timeout=50)
    sha = hashlib.sha256(done.stdout).hexdigest()
    hit = open(log).read()[:1] if os.path.exists(log) else ""
    say(point=point, status=done.returncode, digest=sha, hit=hit)
"""


def test_what_a_raw_call_has_left_of_a_mapping_is_the_file_again_when_that_cannot_be_read(
    job: Start, far: tuple[Path, str]
) -> None:
    """The file's server is gone; the job has memory of its own in the middle of the mapping."""
    require(why_no_bed() is None, why_no_bed() or "")
    code = """
    m = Mapping(sys.argv[1])
    say(first=m.view[0], pooled=m.pooled())
    go, told = os.pipe()
    child = os.fork()  # before the raw call: it has the pool, too
    if not child:
        os.read(go, 1)
        m.digest()
        os._exit(0)
    middle, length = m.address + (4 << 20), 1 << 20
    past_us = ctypes.CDLL("libc.so.6").mmap
    past_us.restype, past_us.argtypes = libc.mmap.restype, libc.mmap.argtypes
    anonymous = MAP_PRIVATE | 0x20 | 0x10  # MAP_ANONYMOUS, MAP_FIXED
    assert past_us(middle, length, PROT_READ | 2, anonymous, -1, 0) == middle
    ctypes.memset(middle, 0x5A, length)
    say(ready=True)
    hear()
    os.write(told, b"x")
    say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    m.plain()
    say(own=ctypes.string_at(middle, length) == bytes([0x5A]) * length)
    say(survived=m.view[6 << 20])
    """
    bed = SlowBed(far[0], latency_us=50_000)
    bed.mount()
    try:
        work = job(python(code, bed.path("far.bin")), options=("--budget", "1MiB", *POOL[:2]))
        assert work.line()["pooled"]
        assert work.line() == {"ready": True}
        os.kill(bed.pid, signal.SIGKILL)
        wait_until(lambda: process_gone(bed.pid), "the server's end")
        work.tell()
        assert work.line() == {"child": -signal.SIGBUS}
        assert work.line() == {"own": True}
        assert work.finish().status == -signal.SIGBUS
    finally:
        bed.unmount()


def test_the_job_reads_right_bytes_wherever_its_agent_ends(
    job: Start, small: Path, compiled: Callable[..., str]
) -> None:
    """Each of the first steps, which attach, lay and detach; then each state some steps on."""
    points = [f":{step}" for step in (*range(1, 19), 31, 57)]
    points += [f"{n}:{step}" for n in STATES.values() for step in (1, 2, 3, 8)]
    work = job(
        python(EXITS, compiled("exits"), small, *points),
        options=("--engine", "pool", "--budget", "1MiB"),
    )
    digest, hits = file_digest(small), set()
    for point in points:
        line = work.line()
        assert (line["point"], line["status"], line["digest"]) == (point, 0, digest)
        hits.add(int(line["hit"]))
    assert hits >= set(STATES.values())
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert done.summary["pool"]["evicted_bytes"] > 0


@pytest.mark.parametrize("threads", ["one thread", "all threads"])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_nobody_hangs_whose_agent_ends_while_it_answers_for_a_silent_service(
    job: Start, records: Records, tmp_path: Path, step: int, threads: str
) -> None:
    """The fault that it had read from the kernel goes to nobody else."""
    code = """
    m = Mapping(sys.argv[1])
    say(pooled=m.pooled())
    hear()
    say(digest=m.digest())
    """
    log = tmp_path / "exit"
    variables = {
        "UFFDPREFETCH_TEST_AGENT_EXIT": str(step),
        "UFFDPREFETCH_TEST_AGENT_EXIT_STATE": str(RESOLVING),
        "UFFDPREFETCH_TEST_AGENT_EXIT_ALL": str(int(threads == "all threads")),
        "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(log),
    }
    work = job(python(code, records.path), options=POOL, **variables)
    assert work.line() == {"pooled": True}
    with work.stopped_service():
        work.tell()
        wait_until(log.exists, "the exit")
    assert work.line() == {"digest": records.digest}
    assert work.finish().status == 0


def test_a_job_whose_agent_and_service_have_both_ended_reads_right_bytes(
    job: Start, records: Records, tmp_path: Path
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    log = os.environ["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"]
    until(lambda: Mapping(sys.argv[1], length=4 << 20).unmap() or os.path.exists(log), "the exit")
    until(lambda: not agents(), "the agent's end")
    say(served=m.pooled())
    hear()
    say(digest=m.digest(), served=m.pooled())
    """
    variables = {
        "UFFDPREFETCH_TEST_AGENT_EXIT": "20",
        "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(tmp_path / "exit"),
    }
    work = job(python(code, records.path), options=POOL, **variables)
    assert work.line() == {"served": True}
    work.kill_service()
    work.tell()
    assert work.line() == {"digest": records.digest, "served": True}
    assert work.finish().status == 0


def test_what_a_job_without_its_agent_does_with_its_mapping_is_done_to_the_file(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """The service goes on serving it; before the kernel changes it, the file takes its place."""
    code = """
    import mmap
    m, part = Mapping(sys.argv[1]), Mapping(sys.argv[1], length=8 << 20)
    log = os.environ["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"]
    until(lambda: Mapping(sys.argv[1], length=4 << 20).unmap() or os.path.exists(log), "the exit")
    until(lambda: not agents(), "the agent's end")
    say(served=m.pooled(), digest=m.digest())
    refused = libc.mprotect(m.address, PAGE, PROT_READ | PROT_WRITE)  # it was opened O_RDONLY
    say(refused=refused, errno=ctypes.get_errno(), pooled=m.pooled())
    if os.fork() == 0:
        say(child=m.digest())
        os._exit(0)
    os.wait()
    part.unmap(0, 4 << 20)
    say(rest=hashlib.sha256(part.view[4 << 20 :]).hexdigest(), digest=m.digest())
    """
    variables = {
        "UFFDPREFETCH_TEST_AGENT_EXIT": "30",
        "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(tmp_path / "exit"),
    }
    done = job(python(code, records.path), options=POOL, **variables).finish().good()
    rest = hashlib.sha256(records.path.read_bytes()[4 * MIB : 8 * MIB]).hexdigest()
    assert done.lines == [
        {"served": True, "digest": records.digest},
        {"refused": -1, "errno": 13, "pooled": False},
        {"child": records.digest},
        {"rest": rest, "digest": records.digest},
    ]
