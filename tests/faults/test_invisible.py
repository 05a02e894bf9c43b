# SPDX-License-Identifier: Apache-2.0
"""What a program can see of itself is the same under wrap: descriptors, locks, errno, identity,
signals, and what the kernel reads from its mappings."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    HANG_SECONDS,
    clean_environment,
    process_gone,
    require,
    uffdprefetch,
    wait_until,
)
from harness import CHECKPOINTS, MIB, OPTIONS, Records, Start, both_engines, python
from inside import libc
from suite import own_name

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow


def both(job: Start, code: str, *args: object, **variables: str) -> list[dict[str, Any]]:
    """Run a program plainly and under wrap: it must say the same. ``managed(m)`` in it waits for
    checkpoints under wrap only. Returns what it said."""
    code = (
        """
    WRAPPED = "UFFDPREFETCH_SOCKET" in os.environ
    def managed(m):
        return m.managed() if WRAPPED else m
    """
        + code
    )
    plain = job(python(code, *args), wrap=False, **variables).finish()
    assert plain.status == 0, plain.stderr
    wrapped = job(python(code, *args), **variables).finish()
    assert wrapped.status == 0, wrapped.stderr
    assert wrapped.lines == plain.lines
    assert wrapped.stderr == plain.stderr  # -q: nothing of ours
    assert plain.lines
    return plain.lines


# ---- descriptors --------------------------------------------------------------------------------


@both_engines
def test_the_descriptor_table_is_the_same(job: Start, records: Records) -> None:
    code = """
    def table():
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
            except FileNotFoundError:
                pass  # the listing's own
        return {k: v.split(":")[0] if v.startswith("pipe:") else v for k, v in found.items()
                if not v.endswith(".stderr")}
    before = table()
    fd = os.open(sys.argv[1], os.O_RDONLY)
    m = managed(Mapping(fd))
    during = table()
    m.unmap()
    next_one = os.open("/dev/null", os.O_RDONLY)
    say(before=before, during=during, after=table(), next=next_one)
    """
    (line,) = both(job, code, records.path)
    assert len(line["during"]) == len(line["before"]) + 1


@both_engines
def test_a_job_that_closes_everything_and_loses_its_service_reads_right_bytes(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """After closerange the numbers are other files': a detach by a remembered number would map
    one of those."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"wrong" * (6 * MIB))
    code = """
    m = Mapping(sys.argv[1]).managed()
    os.closerange(3, 1000)
    others = [os.open(sys.argv[2] + "/" + name, os.O_RDONLY) for name in "abc" * 4]
    say(others=others)
    hear()
    m.plain()
    digests = {m.digest()}
    m.forget()
    digests.add(m.digest())
    again = Mapping(sys.argv[1])
    digests.add(again.digest())
    say(digests=sorted(digests), same=[os.readlink(f"/proc/self/fd/{fd}")[-1] for fd in others])
    """
    work = job(python(code, records.path, tmp_path))
    assert min(work.line()["others"]) == 3
    work.kill_service()
    work.tell()
    assert work.line() == {"digests": [records.digest], "same": list("abc" * 4)}
    assert work.finish().status == 0


def test_a_job_at_its_descriptor_limit_maps_as_ever(job: Start, records: Records) -> None:
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    first = os.open(sys.argv[1], os.O_RDONLY)
    taken = []
    try:
        while True:
            taken.append(os.dup(first))
    except OSError as error:
        say(error_number=error.errno, count=len(taken) > 40)
    m = Mapping(first)
    say(digest=m.digest(), highest=max(taken))
    os.closerange(max(taken) - 3, 64)  # only to be able to look
    managed(m)
    m.forget()
    say(digest=m.digest())
    """
    assert both(job, code, records.path)[-1]["digest"] == records.digest


def test_pipes_see_their_end(job: Start, records: Records) -> None:
    """Those that were there before the agent, and those that came after it."""
    code = """
    before = os.pipe()
    m = managed(Mapping(sys.argv[1]))
    after = os.pipe()
    if os.fork() == 0:
        for r, w in (before, after):
            os.close(r)
            os.write(w, b"x")
        os._exit(0)
    got = []
    for r, w in (before, after):
        os.close(w)
        got += [os.read(r, 10).decode(), os.read(r, 10).decode()]
    os.wait()
    say(got=got)
    """
    assert both(job, code, records.path) == [{"got": ["x", "", "x", ""]}]


def links(process: str) -> list[str]:
    """What the descriptors of /proc/PID or /proc/PID/task/TID are."""
    found = []
    for fd in os.listdir(f"{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"{process}/fd/{fd}"))
    return found


def test_the_reader_of_a_job_that_closes_its_stdout_sees_the_end(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    say(pid=os.getpid())
    os.close(1)
    time.sleep(HANG_SECONDS)
    """
    work = job(python(code, records.path))
    pid = work.line()["pid"]
    assert work.process.stdout is not None
    # wrap itself has the same pipe, as any shell between would: it is the job's own we look at
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/1"), "the job to close it")
    target = os.readlink(f"/proc/{work.process.pid}/fd/1")
    tasks = [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    assert len(tasks) == 3  # its own, and our two
    processes = [*tasks, f"/proc/{work.service()}"]
    # a thread of ours that has just begun may be about to close what it was born with
    wait_until(lambda: not any(target in links(one) for one in processes), "nobody to have it")
    os.kill(pid, signal.SIGKILL)
    assert work.finish().status == -signal.SIGKILL


# ---- locks --------------------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_posix_lock_is_held_while_mappings_of_its_file_come_and_go(
    job: Start, own_records: Records, kind: str
) -> None:
    """sqlite lives on them, and closing any descriptor of the file would drop them. The lock is on
    the mapped file itself, by the one descriptor that the program has of it; an exclusive one needs
    a descriptor for writing, and then nothing is laid, but descriptors are taken and sent."""
    code = """
    import fcntl

    def held():
        pid = os.fork()
        if pid == 0:
            with open("/proc/locks") as file:
                inode = str(os.stat(sys.argv[1]).st_ino)
                mine = [l for l in file if "POSIX" in l and l.split()[5].endswith(":" + inode)]
            os._exit(sum(int(l.split()[4]) == os.getppid() for l in mine))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    shared = sys.argv[2] == "shared"
    fd = os.open(sys.argv[1], os.O_RDONLY if shared else os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    seen = [held()]
    m = managed(Mapping(fd)) if shared else Mapping(fd)
    seen.append(held())
    for _ in range(20):
        other = Mapping(fd)
        other.digest(1 << 22)
        other.unmap()
    seen.append(held())
    m.unmap(0, 1 << 20)  # given back
    seen.append(held())
    m.unmap(1 << 20, m.length - (1 << 20))
    seen.append(held())
    os.close(fd)
    say(seen=seen, closed=held())
    """
    lines = both(job, code, own_records.path, kind)
    assert lines == [{"seen": [1] * 5, "closed": 0}]


@both_engines
def test_a_flock_ends_when_the_job_has_unmapped_and_closed(job: Start, records: Records) -> None:
    code = """
    import fcntl

    def free():
        fd = os.open(sys.argv[1], os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    seen = []
    for order in ("unmap first", "close first"):
        fd = os.open(sys.argv[1], os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        m = managed(Mapping(fd))
        seen.append(free())
        if order == "unmap first":
            m.unmap()
            seen.append(free())
            os.close(fd)
        else:
            os.close(fd)
            seen.append(free())
            m.unmap()
        seen.append(free())
    say(seen=seen)
    """
    assert both(job, code, records.path) == [{"seen": [False, False, True] * 2}]


def test_so_does_one_on_a_file_of_which_we_have_said_that_nothing_will_be_laid(
    job: Start, own_records: Records
) -> None:
    """Of its later mappings nobody of ours has the description, and nobody is waited for."""
    with open(own_records.path, "rb") as file:  # what is in memory needs no stream
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = """
    import fcntl

    def unlaid():
        m = Mapping(sys.argv[1])
        laid = m.checkpoints()
        m.unmap()
        return not laid

    unlaid()  # our thread starts; what it is told it tells from then on
    until(lambda: ring() and unlaid(), "no checkpoints")
    free = 0
    for number in range(200):
        fd = os.open(sys.argv[1], os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        m = Mapping(fd, os.fstat(fd).st_size)
        m.view[number * PAGE]
        m.unmap()
        os.close(fd)
        fd = os.open(sys.argv[1], os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free += 1
        except BlockingIOError:
            pass
        os.close(fd)
    say(free=free)
    """
    run = job(python(code, own_records.path), ("--whole", "*"))
    assert run.line() == {"free": 200}
    run.finish().good()


# ---- calls --------------------------------------------------------------------------------------


@both_engines
def test_errno_is_left_alone_by_calls_that_succeed(job: Start, records: Records) -> None:
    code = """
    seen = []
    def keep(name, *args):
        ctypes.set_errno(77)
        ret = getattr(libc, name)(*args)
        seen.append((name, ctypes.get_errno(), ret == -1))
        return ret
    libc.mlock.argtypes = libc.munmap.argtypes
    fd = os.open(sys.argv[1], os.O_RDONLY)
    for _ in range(30):
        address = keep("mmap", None, 8 << 20, PROT_READ, MAP_SHARED, fd, 0)
        for advice in (1, 2, 0, 3, 4):
            keep("madvise", address, 8 << 20, advice)
        keep("mprotect", address, 1 << 20, PROT_READ)
        keep("mprotect", address, 1 << 20, PROT_NONE)
        keep("munmap", address + (4 << 20), 4 << 20)
        keep("munmap", address, 4 << 20)
        keep("munmap", 1, 4096)  # and by one that fails it is set
        keep("mmap", None, 8 << 20, PROT_READ, MAP_SHARED, -1, 0)
    m = managed(Mapping(fd))
    if os.fork() == 0:
        seen.clear()
        ctypes.set_errno(77)
        seen.append(ctypes.get_errno())
        os._exit(seen != [77])
    say(seen=seen, child=os.wait()[1])
    """
    (line,) = both(job, code, records.path)
    assert {tuple(s) for s in line["seen"]} >= {("mmap", 77, False), ("munmap", 22, True)}


@both_engines
def test_the_kernel_reads_an_armed_page_like_any_other(
    job: Start, records: Records, tmp_path: Path
) -> None:
    code = """
    import random, socket
    m = managed(Mapping(sys.argv[1]))
    fd = os.open(sys.argv[1], os.O_RDONLY)

    class iovec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    def armed():
        # offsets of pages under a checkpoint; in a plain run the same pages, which are nothing
        pages = {}
        if WRAPPED and m.pooled():
            return [n * m.length // 6 // PAGE * PAGE for n in range(6)]
        for line in open("/proc/self/maps"):
            if CHECKPOINTS in line:
                offset = int(line.split()[2], 16)
                pages[offset] = None
        return list(pages) if WRAPPED else [1 << 20]

    def by_write(page):
        r, w = os.pipe()
        os.write(w, page)
        return os.read(r, PAGE)

    def by_send(page):
        a, b = socket.socketpair()
        a.send(page)
        return b.recv(PAGE)

    def by_direct(page):
        path = sys.argv[2] + "/direct"
        out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        assert os.write(out, page) == PAGE
        os.close(out)
        return open(path, "rb").read()

    def by_process_vm_readv(page):
        out = ctypes.create_string_buffer(PAGE)
        here = iovec(ctypes.addressof(out), PAGE)
        there = iovec(address_of(page), PAGE)
        n = libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        return out.raw if n == PAGE else n

    def by_load(page):
        return page.tobytes()

    def by_file(page):
        path = sys.argv[2] + "/file"
        with open(path, "wb") as out:
            out.write(page)
        return open(path, "rb").read()

    def by_tmpfs(page):
        path = "/dev/shm/" + sys.argv[3]
        with open(path, "wb") as out:
            out.write(page)
        data = open(path, "rb").read()
        os.unlink(path)
        return data

    where = {}
    def address_of(page):
        return where[id(page)]

    wrong = []

    def read_some(name):
        # a checkpoint that lay there a moment ago may have been taken away: then another one
        offset = random.choice(until(armed, "a checkpoint"))
        page = m.view[offset : offset + PAGE]
        where[id(page)] = m.address + offset
        m.forget()  # armed again
        before = ring().get("faults", 0)
        if globals()[name](page) != os.pread(fd, PAGE, offset):
            wrong.append((name, offset))
        if not WRAPPED or m.pooled():
            return True
        told = lambda: ring()["faults"] > before
        until(lambda: told() or offset not in armed(), f"{name}: an event of {offset}")
        return told()

    for name in ("by_write", "by_send", "by_direct", "by_process_vm_readv", "by_load",
                 "by_file", "by_tmpfs"):
        for _ in range(6):
            until(lambda: read_some(name), name + ": an event")
    say(wrong=wrong)
    """
    assert both(job, code, records.path, tmp_path, own_name("tmpfs")) == [{"wrong": []}]


@both_engines
@pytest.mark.parametrize("how", ["process_vm_readv", "ptrace"])
def test_another_process_reads_the_mapping(job: Start, records: Records, how: str) -> None:
    """A profiler's way works on armed pages. A debugger's (/proc/PID/mem, PTRACE_PEEKDATA) may not
    wait for a fault: it gets EIO there, as the design says, and the job does not notice."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    m.forget()
    say(pid=os.getpid(), address=m.address, length=m.length)
    hear()
    say(digest=m.digest())
    """
    work = job(python(code, records.path))
    line = work.line()
    if how == "ptrace":
        with (
            open(f"/proc/{line['pid']}/mem", "rb", buffering=0) as mem,
            pytest.raises(OSError, match="Input/output error"),
        ):
            for at in range(0, line["length"], 4096):
                os.pread(mem.fileno(), 4096, line["address"] + at)
    else:
        out = ctypes.create_string_buffer(line["length"])
        here = (ctypes.c_size_t * 2)(ctypes.addressof(out), line["length"])
        there = (ctypes.c_size_t * 2)(line["address"], line["length"])
        n = libc.process_vm_readv(
            line["pid"], here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0)
        )
        assert n == line["length"]
        assert out.raw == records.path.read_bytes()
    work.tell()
    assert work.line() == {"digest": records.digest}
    assert work.finish().status == 0


@both_engines
def test_past_the_end_of_the_file_it_is_sigbus_exactly_where_it_was(
    job: Start, records: Records
) -> None:
    code = """
    m = managed(Mapping(sys.argv[1], length=(32 << 20)))
    size = os.stat(sys.argv[1]).st_size
    last = size // PAGE * PAGE
    def touch(at):
        pid = os.fork()
        if pid == 0:
            os._exit(m.view[at] % 2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tail = bytes(m.view[size : last + PAGE])
    say(
        inside=[touch(0), touch(size - 1), touch(last + PAGE - 1)],
        outside=[touch(last + PAGE), touch(last + 2 * PAGE), touch((32 << 20) - 1)],
        tail=tail.count(0) == len(tail),
    )
    """
    (line,) = both(job, code, records.path)
    assert line["outside"] == [-signal.SIGBUS] * 3 and line["tail"] is True
    assert all(status >= 0 for status in line["inside"])


@both_engines
def test_random_advice_is_in_force_while_managed_and_afterwards(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    m.advise(MADV_RANDOM)
    say(managed="rr" in advice_flags(m.address))
    hear()
    m.plain()
    until(lambda: not agents(), "the agent's end")
    say(after="rr" in advice_flags(m.address), all=[
        "rr" in advice_flags(m.address + at) for at in range(0, m.length, 1 << 20)
    ])
    """
    work = job(python(code, records.path))
    assert work.line() == {"managed": True}
    work.kill_service()
    work.tell()
    assert work.line() == {"after": True, "all": [True] * 25}
    assert work.finish().status == 0


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_a_mapping_with_random_advice_grows(job: Start, records: Records, flags: str) -> None:
    """One kind of pages again, all with that advice: else the kernel would not move it."""
    code = f"""
    m = Mapping(sys.argv[1], flags={flags}).managed()
    m.advise(MADV_RANDOM)
    m.grow(2 * m.length)
    say(digest=m.digest(), parts=m.parts(), random="rr" in advice_flags(m.address))
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"digest": records.digest, "parts": [0, 1], "random": True}]


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
@both_engines
def test_one_that_is_longer_than_its_file_has_random_advice_up_to_its_end(
    job: Start, records: Records, flags: str
) -> None:
    """As LMDB maps; an end that has other advice the kernel would not move with the rest."""
    code = f"""
    m = Mapping(sys.argv[1], length=64 << 20, flags={flags}).managed()
    m.advise(MADV_RANDOM)
    m.grow(65 << 20)
    say(random=["rr" in advice_flags(m.address + at) for at in (0, 63 << 20)])
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"random": [True, True]}]


def in_half_the_room(flags: str) -> str:
    """A mapping that does not fit a second time (`ulimit -v`); ``unlimited()`` ends that."""
    return f"""
    import resource
    m = Mapping(sys.argv[1], flags={flags}).managed()
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * PAGE + m.length // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    def unlimited():
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_a_mapping_grows_where_there_is_no_room_for_a_second_one(
    job: Start, records: Records, flags: str
) -> None:
    """`ulimit -v`: what takes the checkpoints' place comes page by page."""
    code = (
        in_half_the_room(flags)
        + """
    m.grow(m.length + m.length // 4)
    unlimited()
    say(digest=hashlib.sha256(m.view[:os.stat(sys.argv[1]).st_size]).hexdigest(), parts=m.parts())
    """
    )
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"digest": records.digest, "parts": [0, 1]}]


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_the_file_is_back_after_the_services_death_where_there_is_no_room_for_a_second_mapping(
    job: Start, records: Records, flags: str
) -> None:
    code = (
        in_half_the_room(flags)
        + """
    say(ready=True)
    hear()
    m.plain()
    unlimited()
    say(digest=m.digest())
    """
    )
    work = job(python(code, records.path))
    assert work.line() == {"ready": True}
    work.kill_service()
    work.tell()
    assert work.line() == {"digest": records.digest}
    assert work.finish().status == 0


def test_calls_by_libcs_syscall_that_the_kernel_refuses_are_refused(
    job: Start, records: Records
) -> None:
    """Programs probe for clone3(2) with no memory there."""
    code = """
    m = managed(Mapping(sys.argv[1]))
    ctypes.set_errno(0)
    said = []
    for bytes_ in (0, 88):
        said.append((libc.syscall(435, None, bytes_), ctypes.get_errno()))
    say(clone3=said)
    """
    assert both(job, code, records.path)


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_what_is_left_of_a_mapping_grows(job: Start, records: Records, flags: str) -> None:
    code = f"""
    m = Mapping(sys.argv[1], flags={flags}).managed()
    half = m.length // 2 // PAGE * PAGE
    m.unmap(0, half)
    rest, m.address, m.length = m.length - half, m.address + half, m.length - half
    m.grow(2 * rest)
    said = hashlib.sha256(bytes(m.view[:rest])).hexdigest()
    with open(sys.argv[1], "rb") as file:
        file.seek(half)
        say(same=said == hashlib.sha256(file.read()).hexdigest(), checkpoints=m.checkpoints())
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"same": True, "checkpoints": 0}]


def test_random_advice_is_in_force_where_we_only_watch(job: Start, records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1]).followed()
    m.advise(MADV_RANDOM)
    say(flag="rr" in advice_flags(m.address))
    """
    done = job(python(code, records.path), options=("--policy", "none")).finish().good()
    assert done.lines == [{"flag": True}]


def test_a_single_threaded_program_stays_one_in_libcs_eyes(
    job: Start, records: Records, compiled: Callable[..., str]
) -> None:
    program = compiled("single")
    plain = job([program, str(records.path), "0"], wrap=False).finish().good()
    managed = job([program, str(records.path), "1"]).finish().good()
    assert plain.lines[0]["before"] == plain.lines[0]["after"] == 1
    assert managed.lines[0] == {**plain.lines[0], "threads": 3}


def test_signals_reach_the_job_and_nobody_else(job: Start, records: Records) -> None:
    code = """
    import signal
    got = []
    for number in (signal.SIGUSR1, signal.SIGURG, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda n, _: got.append(n))
    m = managed(Mapping(sys.argv[1]))
    for _ in range(50):  # each of these rings the agent's bell
        Mapping(sys.argv[1]).unmap()
    quiet = list(got)
    for _ in range(30):  # to the process: the agent must not be the thread that takes one
        for number in (signal.SIGUSR1, signal.SIGURG, signal.SIGTERM):
            os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.kill(os.getpid(), signal.SIGUSR2)
    waited = signal.sigwait({signal.SIGUSR2})
    say(quiet=quiet, got=got, waited=waited, digest=m.digest())
    """
    (line,) = both(job, code, records.path)
    assert line["quiet"] == [] and line["waited"] == signal.SIGUSR2


# ---- identity -----------------------------------------------------------------------------------

CHANGES = {
    "setuid": "os.setuid(65534)",
    "setgid": "os.setgid(65534)",
    "seteuid": "os.seteuid(65534)",
    "setreuid": "os.setreuid(65534, 65534)",
    "setresuid": "os.setresuid(65534, 65534, 0)",
    "setresgid": "os.setresgid(65534, 65534, 0)",
    "setgroups": "os.setgroups([65534, 1])",
    "initgroups": "os.initgroups('nobody', 65534)",
    "unshare-user": "checked(libc.unshare(0x10000000), 'unshare')",
    "unshare-pid": "checked(libc.unshare(0x20000000), 'unshare')",
    "unshare-mount": "checked(libc.unshare(0x00020000), 'unshare')",
    "setns": "checked(libc.setns(os.open('/proc/self/ns/mnt', os.O_RDONLY), 0), 'setns')",
    "capset": (
        "checked(libc.capset(struct.pack('Ii', 0x20080522, 0), bytes(24)), 'capset')"
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_job_that_becomes_somebody_else_does_so_with_all_its_threads(
    job: Start, records: Records, change: str
) -> None:
    require(os.geteuid() == 0, "needs root")
    code = f"""
    m = managed(Mapping(sys.argv[1]))
    digests = [m.digest()]
    {change}
    def who(tid):
        with open(f"/proc/self/task/{{tid}}/status") as file:
            words = [line.split() for line in file]
        return [w for w in words if w[0] in ("Uid:", "Gid:", "Groups:", "CapEff:", "CapPrm:")]
    me = who(os.getpid())
    # ours, if they are still there, have no capability left whatever the job has
    ids = lambda words: [w for w in words if not w[0].startswith("Cap")]
    same = all(ids(who(tid)) == ids(me) for tid in os.listdir("/proc/self/task"))
    m.forget()
    digests.append(m.digest())
    try:
        other = Mapping(sys.argv[1]).digest()
    except PermissionError:
        other = "EACCES"
    if os.fork() == 0:
        os._exit(m.digest() != digests[0])
    say(me=me, same=same, digests=digests, other=other, child=os.wait()[1],
        links=sorted(os.readlink(f"/proc/self/ns/{{n}}")[:4] for n in ("user", "mnt")))
    """
    (line,) = both(job, code, records.path)
    assert line["same"] and line["digests"] == [records.digest] * 2 and line["child"] == 0


@both_engines
def test_the_agent_has_ended_when_the_identity_changes(job: Start, records: Records) -> None:
    require(os.geteuid() == 0, "needs root")
    code = """
    m = Mapping(sys.argv[1]).managed()
    before = agents() != []  # the responder bears the agent's name at first
    os.setuid(65534)
    say(before=before, after=len(agents()), left=m.checkpoints(), digest=m.digest())
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"before": True, "after": 0, "left": 0, "digest": records.digest}]


def test_a_set_uid_program_gets_nothing_of_ours(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    """The loader ignores LD_PRELOAD there; it must do so without a word."""
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    program = next((p for p in ("/usr/bin/su", "/bin/su") if os.path.exists(p)), None)
    require(program is not None and os.stat(program).st_mode & 0o4000, "no set-uid program here")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    # not below ours, which is closed to others
    directory = tempfile.mkdtemp(prefix=own_name(""), dir="/tmp")
    try:
        os.chown(directory, 65534, 65534)
        words = ["sh", "-c", f"{program} --version; {program} --no-such-option; echo $?"]
        environment = {**clean_environment(), "HOME": directory, "TMPDIR": directory}
        plain = subprocess.run([*nobody, *words], env=environment, capture_output=True)
        environment["UFFDPREFETCH_RUNDIR"] = f"{directory}/hub"
        wrapped = subprocess.run(
            [*nobody, *uffdprefetch("wrap", *OPTIONS, *CHECKPOINTS, "--", *words)],
            env=environment, cwd=directory, capture_output=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert (wrapped.stdout, wrapped.stderr) == (plain.stdout, plain.stderr)
        assert wrapped.returncode == plain.returncode == 0
    finally:
        shutil.rmtree(directory)


# ---- the rest -----------------------------------------------------------------------------------


def test_a_socket_to_a_worker_carries_pages_of_the_mapping(job: Start, records: Records) -> None:
    """The service never reads what the job writes; a job that blocks in send() holds nobody."""
    code = """
    import socket
    m = Mapping(sys.argv[1]).managed()
    a, b = socket.socketpair()
    if os.fork() == 0:
        a.close()
        sha = hashlib.sha256()
        while data := b.recv(1 << 16):
            sha.update(data)
        say(digest=sha.hexdigest())
        os._exit(0)
    b.close()
    m.forget()
    a.sendall(m.view)
    a.close()
    os.wait()
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"digest": records.digest}]


@both_engines
def test_a_job_blocked_on_its_stdout_does_not_hold_the_service(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """It writes the mapping into a pipe that nobody reads yet; another job is served meanwhile."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    m.forget()
    say(pid=os.getpid())
    data = m.view
    while data:
        data = data[os.write(1, data) :]
    """
    blocked = job(python(code, records.path))
    pid = blocked.line()["pid"]
    wchan = Path(f"/proc/{pid}/wchan")
    wait_until(lambda: "pipe" in wchan.read_text() or process_gone(pid), "the job to block")
    other = job(python("m = Mapping(sys.argv[1]).managed()\nsay(d=m.digest())", records.path))
    assert other.line() == {"d": records.digest}
    assert other.finish().status == 0
    assert blocked.process.stdout is not None
    data = blocked.taken()
    while more := os.read(blocked.process.stdout.fileno(), MIB):
        data += more
    assert data == records.path.read_bytes()
    assert blocked.process.wait(HANG_SECONDS) == 0
