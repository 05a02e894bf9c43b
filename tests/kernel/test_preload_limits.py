# SPDX-License-Identifier: Apache-2.0
"""Limits that are lowered under a running job, and system calls that are refused: it reads on."""

from __future__ import annotations

import mmap
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import require, wait_until
from harness import Records, Start, both_engines, python

pytest_plugins = ("harness_fixtures",)

#: The job's, and a child's of it, of which the first line is its pid.
READS = """
    m = Mapping(sys.argv[1], flags=int(sys.argv[2])).managed()
    m.digest()
    say(ready=os.getpid(), pooled=m.pooled())
    for _ in range(2):
        hear()
        m.forget()
        pid = os.fork()
        if not pid:
            say(child=m.digest())
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        say(digest=m.digest(), status=status)
    hear()
"""


def asleep(pid: int) -> bool:
    """Whether our threads in a process wait, rather than run; there are some."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name.startswith("uffdprefetch"):
            states.append(rest.split()[0])
    return bool(states) and set(states) == {"S"}


@both_engines
def test_a_job_that_may_have_no_descriptor_any_more_reads_on(
    own_records: Records, job: Start, engine: str
) -> None:
    """poll(2) takes no more descriptors than RLIMIT_NOFILE: our threads wait by another call. The
    limit comes from outside, while they wait."""
    one = job(python(READS, own_records.path, mmap.MAP_SHARED))
    said = one.line()
    assert said["pooled"] == (engine == "pool")
    _, hard = resource.prlimit(said["ready"], resource.RLIMIT_NOFILE)
    for limit in (3, 0):
        resource.prlimit(said["ready"], resource.RLIMIT_NOFILE, (limit, hard))
        wait_until(lambda: asleep(said["ready"]), "threads of ours that wait")
        if not limit:
            one.kill_service()
        one.tell()
        assert one.line() == {"child": own_records.digest}
        assert one.line() == {"digest": own_records.digest, "status": 0}
    one.tell()
    one.finish().good()


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_a_job_that_may_have_no_more_address_space_has_its_file_back_from_the_pool(
    own_records: Records, job: Start, flags: int
) -> None:
    """In a forked child, and where the service has died: RLIMIT_AS is below what is mapped, so
    nothing can be mapped, and what is kept for this is moved."""
    one = job(python(READS, own_records.path, flags), ("--engine", "pool", "--budget", "6MiB"))
    said = one.line()
    assert said["pooled"]
    resource.prlimit(said["ready"], resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    for killed in (False, True):
        if killed:
            one.kill_service()
        one.tell()
        assert one.line() == {"child": own_records.digest}
        assert one.line() == {"digest": own_records.digest, "status": 0}
    one.tell()
    one.finish().good()


@pytest.mark.parametrize("call", ["setrlimit(", "prlimit(0, "])
def test_a_job_that_limits_its_address_space_has_as_much_of_it_as_without_us(
    own_records: Records, job: Start, call: str
) -> None:
    """What is kept of the file for the pool would take the place of the job's own."""
    code = f"""
    import mmap, resource
    m = Mapping(sys.argv[1])
    say(pooled=m.pooled())
    size = int(open("/proc/self/statm").read().split()[0]) * PAGE
    resource.{call}resource.RLIMIT_AS, (size + (16 << 20), size + (16 << 20)))
    own = mmap.mmap(-1, m.length)
    again = Mapping(sys.argv[1])
    say(digest=m.digest(), again=again.digest())
    """
    one = job(python(code, own_records.path), ("--engine", "pool", "--budget", "32MiB"))
    assert one.line() == {"pooled": True}
    digest = own_records.digest
    done = one.finish().good()
    assert done.lines == [{"digest": digest, "again": digest}]


@pytest.mark.parametrize("call", ["rt_sigprocmask", "epoll_pwait", "epoll_ctl"])
def test_a_job_that_is_refused_a_call_of_ours_runs_as_if_we_were_not_there(
    own_records: Records, job: Start, compiled: Callable[..., str], call: str
) -> None:
    """A thread of ours whose signals cannot be blocked would die of those that wake it, and the
    process with it."""
    code = """
        m = Mapping(sys.argv[1])
        first = m.digest()
        m.unmap()
        say(digests=[first, Mapping(sys.argv[1]).digest()])
    """
    one = job([compiled("refused"), call, *python(code, own_records.path)])
    assert one.finish().good().lines == [{"digests": [own_records.digest] * 2}]


def test_threads_of_ours_that_may_not_wait_any_more_still_answer(
    own_records: Records, job: Start
) -> None:
    """A filter for all threads of the process, made past libc: they cannot have ended before."""
    require(platform.machine() == "x86_64", "by an instruction of x86-64")
    code = """
        m = Mapping(sys.argv[1]).managed()
        until(ring, "the ring")
        EPOLL_PWAIT, PRCTL, SECCOMP = 281, 157, 317
        refuse, allow = (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, EPOLL_PWAIT), refuse, allow]
        packed = b"".join(struct.pack("<HBBI", *step) for step in steps)
        filter = ctypes.create_string_buffer(packed)
        program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(filter)))
        by_instruction(PRCTL, 38, 1)  # PR_SET_NO_NEW_PRIVS
        said = by_instruction(SECCOMP, 1, 1, ctypes.addressof(program))  # a filter for all: TSYNC
        say(filtered=said, faults=faults_again(m), same=m.digest())
        m.unmap()
    """
    one = job(python(code, own_records.path))
    said = one.line()
    assert said.pop("faults") > 0
    assert said == {"filtered": 0, "same": own_records.digest}
    one.finish().good()
