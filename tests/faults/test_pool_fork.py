# SPDX-License-Identifier: Apache-2.0
"""--engine pool and fork: what no child inherits is there again before its code runs, whoever forks
and however; and children read from the pool, too."""

from __future__ import annotations

import array
import ctypes
import platform
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, require
from harness import Records, Start, python

pytest_plugins = ("harness_fixtures",)

POOL = ("--engine", "pool", "--budget", "6MiB")
WHOLE = ("--engine", "pool", "--budget", "64MiB")


def test_ranks_and_their_workers_read_each_byte_from_storage_once(
    job: Start, records: Records
) -> None:
    """Four ranks, each with two forked workers, one of which has a child: sixteen digests."""
    code = """
    def read(generation):
        pids = []
        for _ in range((2, 1, 0)[generation]):
            pid = os.fork()
            if pid == 0:
                if generation == 0 and pids:
                    generation = 1
                read(generation + 1)
            pids.append(pid)
        say(digest=m.digest(), pooled=m.pooled())
        for pid in pids:
            if os.waitpid(pid, 0)[1]:
                say(error="a child failed")
        os._exit(0)

    for rank in range(4):
        if os.fork() == 0:
            m = Mapping(sys.argv[1])
            read(0)
    for _ in range(4):
        if os.wait()[1]:
            say(error="a rank failed")
    """
    done = job(python(code, records.path), options=WHOLE).finish().good()
    assert {line["digest"] for line in done.lines} == {records.digest}
    assert len(done.lines) == 16 and all(line["pooled"] for line in done.lines)
    assert done.summary is not None
    pool = done.summary["pool"]
    assert pool["read_bytes"] == pool["unique_bytes"] == records.size_bytes
    assert pool["reread_bytes"] == 0 and pool["evicted_bytes"] == 0


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_not_forked_from_the_reader_share_the_pool(
    job: Start, records: Records, method: str
) -> None:
    code = """
    import inside
    import multiprocessing

    m = Mapping(sys.argv[1])
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        found = pool.map(inside.read_pooled, [sys.argv[1]] * 4)
    say(found=sorted(set(found)), digest=m.digest())
    """
    done = job(python(code, records.path, method), options=WHOLE).finish().good()
    assert done.lines == [{"found": [[records.digest, True]], "digest": records.digest}]
    assert done.summary is not None
    assert done.summary["pool"]["read_bytes"] == records.size_bytes


def test_a_child_whose_parent_has_ended_before_it_looks_reads_right_bytes(
    job: Start, records: Records
) -> None:
    """As daemons do it: nobody is the child's parent any more when its first code runs."""
    code = """
    m = Mapping(sys.argv[1])
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: they are ours to wait for
    for i in range(40):
        if os.fork() == 0:
            if os.fork() == 0:
                at = i * m.length // 40
                os._exit(m.view[at : at + 9] != open(sys.argv[1], "rb").read()[at : at + 9])
            os.kill(os.getpid(), 9)
    statuses = []
    while True:
        try:
            statuses.append(os.wait()[1])
        except ChildProcessError:
            break
    say(statuses={str(s): statuses.count(s) for s in set(statuses)}, digest=m.digest())
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines == [{"statuses": {"0": 40, "9": 40}, "digest": records.digest}]


def test_a_child_in_a_pid_namespace_of_its_own_reads_right_bytes(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
    if libc.syscall(number, 0x20000000):  # unshare(CLONE_NEWPID), for the children; by its
        # number, because the agent ends before a call of that name
        say(refused=ctypes.get_errno())
        os._exit(0)
    if os.fork() == 0:
        say(pid=os.getpid(), parent=os.getppid(), digest=m.digest())
        os._exit(0)
    os.wait()
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    require("refused" not in done.lines[0], "unshare(CLONE_NEWPID) is not allowed here")
    assert done.lines == [{"pid": 1, "parent": 0, "digest": records.digest}]


def test_a_child_of_the_fork_that_runs_no_handlers_reads_right_bytes(
    job: Start, records: Records
) -> None:
    require(hasattr(ctypes.CDLL(None), "_Fork"), "no _Fork before glibc 2.34")
    code = """
    m = Mapping(sys.argv[1])
    for _ in range(8):
        if libc._Fork() == 0:
            os._exit(m.digest() != sys.argv[2])
        if os.wait()[1]:
            say(error="a child failed")
    if libc._Fork() == 0:
        if os.fork() == 0:
            say(digest=m.digest(), pooled=m.pooled())
            os._exit(0)
        os._exit(os.wait()[1])
    os.wait()
    say(digest=m.digest(), pooled=m.pooled())
    """
    done = job(python(code, records.path, records.digest), options=POOL).finish().good()
    assert done.lines == [{"digest": records.digest, "pooled": True}] * 2


def test_a_child_that_nobody_sees_made_dies_where_it_touches_and_never_reads_a_zero(
    job: Start, records: Records
) -> None:
    """clone(2) by an instruction: no library is told. Its own children by fork(3) have the file."""
    require(platform.machine() == "x86_64", "the instructions are of x86-64")
    code = """
    m = Mapping(sys.argv[1])
    m.digest()

    def child(what):
        pid = by_instruction(56, 17)
        if pid == 0:
            os._exit(what())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def grandchild():
        if os.fork() == 0:
            os._exit(m.digest() != sys.argv[2])
        return os.waitstatus_to_exitcode(os.wait()[1])

    say(touch=child(lambda: 7 + (m.view[m.length // 2] == 0)), grandchild=child(grandchild))
    say(digest=m.digest(), pooled=m.pooled())
    """
    done = job(python(code, records.path, records.digest), options=POOL).finish().good()
    assert done.lines == [
        {"touch": -signal.SIGSEGV, "grandchild": 0},
        {"digest": records.digest, "pooled": True},
    ]


@pytest.mark.parametrize("by", ["libc", "libc's syscall"])
def test_a_job_that_advises_itself_by_process_madvise_has_its_file_first(
    job: Start, records: Records, by: str
) -> None:
    """MADV_DOFORK would give such a child the pool's memory, with holes that nobody fills."""
    require(platform.machine() == "x86_64", "the instructions are of x86-64")
    code = """
    DOFORK, SYS_process_madvise, SYS_pidfd_open = 11, 440, 434
    m = Mapping(sys.argv[1])
    m.view[0]
    ranges = (ctypes.c_size_t * 2)(m.address, m.length)
    pidfd = checked(libc.syscall(SYS_pidfd_open, os.getpid(), 0), "pidfd_open")
    if sys.argv[3] == "libc" and hasattr(libc, "process_madvise"):
        said = libc.process_madvise(pidfd, ranges, 1, DOFORK, 0)
    else:
        said = libc.syscall(SYS_process_madvise, pidfd, ranges, 1, DOFORK, 0)
    pid = by_instruction(57, 0)
    if pid == 0:
        os._exit(m.digest() != sys.argv[2])
    say(said=said, child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pooled=m.pooled())
    """
    done = job(python(code, records.path, records.digest, by), options=POOL).finish().good()
    (line,) = done.lines
    require(line["said"] > 0, "no advice to oneself by process_madvise(2) before Linux 6.13")
    assert (line["child"], line["pooled"]) == (0, False)


def test_a_child_by_libc_s_syscall_finds_the_file(job: Start, records: Records) -> None:
    code = """
    SYS_clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    m = Mapping(sys.argv[1])
    m.digest()
    pid = libc.syscall(SYS_clone, 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(7 if m.digest() == sys.argv[2] else 8)
    say(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), digest=m.digest())
    """
    done = job(python(code, records.path, records.digest), options=POOL).finish().good()
    assert done.lines == [{"child": 7, "digest": records.digest}]


def test_a_handler_that_reads_the_mapping_may_run_first_of_all_in_a_child(
    job: Start, compiled: Callable[..., str], tmp_path: Path
) -> None:
    """libc lets signals in again before it runs the handlers of fork(3). (Of 600 children of a
    release that blocked them in its own handler alone, 530 died.)"""
    file = tmp_path / "numbered"
    file.write_bytes(array.array("Q", range(3 << 20)).tobytes())
    words = [compiled("forks_in_signals"), str(file), "200"]
    done = job(words, options=("--engine", "pool", "--budget", "64MiB")).finish()
    assert done.status == 0, done.stderr
    assert done.lines == [{"forks": 200, "signals": True, "bad": 0, "ends": 0}]
    assert done.summary is not None and done.summary["pool"]["faults"] > 0


def test_a_childs_mapping_that_is_longer_than_its_file_has_the_advice_of_its_parents(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1], length=64 << 20)
    m.advise(2)  # MADV_SEQUENTIAL
    if os.fork() == 0:
        m.grow(65 << 20)
        say(sequential=["sr" in advice_flags(m.address + at) for at in (0, 63 << 20)])
        os._exit(0)
    os._exit(os.wait()[1])
    """
    done = job(python(code, records.path), options=WHOLE).finish().good()
    assert done.lines == [{"sequential": [True, True]}]


def test_a_hundred_children_while_other_threads_fault_and_map(job: Start, records: Records) -> None:
    code = """
    m, end, wrong = Mapping(sys.argv[1]), threading.Event(), []

    def fault():
        while not end.is_set():
            m.forget()
            if m.digest() != sys.argv[2]:
                wrong.append("fault")

    def remap():
        while not end.is_set():
            other = Mapping(sys.argv[1], length=4 << 20, offset=8 << 20)
            if other.digest() != expected:
                wrong.append("remap")
            other.unmap()

    expected = hashlib.sha256(m.view[8 << 20 : 12 << 20]).hexdigest()
    threads = [threading.Thread(target=what) for what in (fault, fault, remap, remap)]
    for t in threads:
        t.start()
    for i in range(100):
        pid = os.fork()
        if pid == 0:
            at = i * 200_000
            data = os.pread(os.open(sys.argv[1], os.O_RDONLY), 150_000, at)
            os._exit(bytes(m.view[at : at + 150_000]) != data)
        if os.waitpid(pid, 0)[1]:
            wrong.append(i)
    end.set()
    for t in threads:
        t.join()
    say(wrong=wrong, digest=m.digest(), pooled=m.pooled())
    """
    done = job(python(code, records.path, records.digest), options=POOL).finish().good()
    assert done.lines == [{"wrong": [], "digest": records.digest, "pooled": True}]
    assert done.summary is not None and done.summary["pool"]["evicted_bytes"] > 0


def test_a_stopped_service_holds_a_fork_of_many_mappings_once_and_not_for_each(
    job: Start, records: Records
) -> None:
    code = """
    maps = [Mapping(sys.argv[1], length=1 << 20, offset=n << 20) for n in range(20)]
    say(service=True)
    hear()
    began = time.monotonic()
    if os.fork() == 0:
        took = time.monotonic() - began
        sha = hashlib.sha256(b"".join(bytes(m.view) for m in maps)).hexdigest()
        say(took=took, digest=sha)
        os._exit(0)
    os.wait()
    """
    work = job(python(code, records.path), options=POOL)
    work.line()
    with work.stopped_service():
        work.tell()
        line = work.line()
    first = subprocess.run(
        ["sh", "-c", 'head -c 20971520 "$0" | sha256sum', str(records.path)],
        capture_output=True, timeout=HANG_SECONDS,
    ).stdout.split()[0]  # fmt: skip
    assert line["digest"] == first.decode()
    assert line["took"] < 10  # one second for each would be twenty
    work.finish()


#: Memory of the job's own in the place of the pool's mapping, past every library.
REPLACED = """
    m = Mapping(sys.argv[1])
    assert m.pooled()
    shmat, SHM_REMAP, IPC_RMID = 30, 0o40000, 0
    segment = checked(libc.shmget(0, ctypes.c_size_t(m.length), 0o600), "shmget")
    assert by_instruction(shmat, segment, m.address, SHM_REMAP) == m.address
    checked(libc.shmctl(segment, IPC_RMID, None), "shmctl")
    ctypes.memset(m.address, 7, m.length)
    is_own = lambda: bytes(m.view) == bytes([7]) * m.length
"""


FORKED = """
    pid = os.fork()
    if pid == 0:
        os._exit(0 if is_own() else 3)
    say(own=[os.waitpid(pid, 0)[1] == 0, is_own()])
"""

#: PR_SET_NO_NEW_PRIVS: our threads end, and give back.
ENDED = """
    libc.prctl(38, 1, 0, 0, 0)
    say(own=[len(os.listdir("/proc/self/task")) == 1, is_own()])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize("then", [FORKED, ENDED], ids=["in a child", "when our threads end"])
def test_what_a_raw_call_put_in_the_pools_place_stays(
    job: Start, records: Records, then: str
) -> None:
    done = job(python(REPLACED + then, records.path), options=WHOLE).finish().good()
    assert done.lines == [{"own": [True, True]}]
