# SPDX-License-Identifier: Apache-2.0
"""Private mappings, those that the pool serves and those that may be written: a page that was
written stays what it is, and all others are the file's, whatever the job does, and whoever puts
the file back. (Who dies over that: test_private_put_back.py.)"""

from __future__ import annotations

import errno
import platform
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import require
from harness import Records, Start, file_digest, python
from private_jobs import (
    AGENTS,
    BEGINNING,
    CACHE,
    FORKS,
    GONE,
    POOL,
    WRITABLE,
    WRITTEN,
    dies_at,
    said,
)

from uffdprefetch.service import observe

pytest_plugins = ("harness_fixtures",)

pytestmark = pytest.mark.slow

#: What the job then does to a mapping ``m``: what it says is compared with what it says without us.
ACTS = {
    "unmaps a part": """
    m.unmap(0, 3 * PAGE)
    say(wrong=wrong(m, 3 * PAGE))
    m.unmap(1499 * PAGE, PAGE)
    say(wrong=wrong(m, 3 * PAGE, 1499 * PAGE) + wrong(m, 1500 * PAGE))
    """,
    "makes a part writable": """
    checked(libc.mprotect(m.address + 4 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE), "mprotect")
    say(wrong=wrong(m))
    for page in (4, 6):
        m.view[page * PAGE + 99] = model[page * PAGE + 99] = 7
    say(wrong=wrong(m))
    """,
    "makes all of it writable": """
    m.protect(PROT_READ | PROT_WRITE)
    for page in range(0, m.length // PAGE, 3):
        m.view[page * PAGE + 99] = model[page * PAGE + 99] = 7
    m.protect(PROT_READ)
    say(wrong=wrong(m))
    """,
    "maps over a part": """
    flags = MAP_PRIVATE | MAP_FIXED | 0x20  # MAP_ANONYMOUS
    for page in (6, 1000):
        libc.mmap(m.address + page * PAGE, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0)
        model[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    say(wrong=wrong(m))
    """,
    "shrinks it": """
    kept = 2000 * PAGE
    checked(libc.mremap(m.address, m.length, kept, 0), "mremap")
    say(wrong=wrong(m, 0, kept))
    """,
    "moves a part": """
    other = Mapping(path)
    libc.mremap.argtypes = [*libc.mremap.argtypes, ctypes.c_void_p]
    for page in (6, 100):
        libc.mremap(m.address + page * PAGE, PAGE, PAGE, 3, other.address)  # MAYMOVE, FIXED
        say(moved=bytes(other.view[:PAGE]) == bytes(model[page * PAGE : (page + 1) * PAGE]))
    say(wrong=wrong(m, 0, 6 * PAGE) + wrong(m, 7 * PAGE, 100 * PAGE) + wrong(m, 101 * PAGE))
    """,
    "advises a part": """
    for advice in (2, 15, 10, 11):  # SEQUENTIAL, NOHUGEPAGE, DONTFORK, DOFORK
        m.advise(advice, 4 * PAGE, 4 * PAGE)
    say(wrong=wrong(m))
    """,
    "locks a part": """
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    say(locked=libc.mlock(m.address + 4 * PAGE, 4 * PAGE), wrong=wrong(m))
    libc.munlock(m.address + 4 * PAGE, 4 * PAGE)
    """,
    "looks for its file in /proc/self/maps": """
    found = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith(path)]
    page = 1234
    for where, rights, offset, *_ in found:
        start, end = (int(word, 16) for word in where.split("-"))
        at = page * PAGE - int(offset, 16)
        if 0 <= at < end - start:
            wanted = bytes(model[page * PAGE : (page + 1) * PAGE])
            same = rights[0] == "r" and ctypes.string_at(start + at, PAGE) == wanted
            say(wrong=[] if same else [where])
    say(wrong=[] if found else ["nothing"])
    m.unmap(0, 3 * PAGE)
    say(wrong=wrong(m, 3 * PAGE))
    """,
    "drops them itself": """
    checked(libc.mprotect(m.address, PAGE, PROT_READ | PROT_WRITE), "mprotect")
    m.forget()
    with open(path, "rb") as file:
        model[:] = file.read()
    say(wrong=wrong(m))
    """,
}

GOOD = ({"wrong": []}, {"wrong": [], "locked": 0}, {"moved": True})


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("act", ACTS)
def test_whatever_a_job_does_leaves_pages_of_the_pool_that_were_written_past_us(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path, agent: str, act: str
) -> None:
    code = textwrap.dedent(ACTS[act]) + "say(left=m.checkpoints())"
    *lines, last = said(job, env, tmp_path, agent, records.path, code)
    assert lines and all(line in GOOD for line in lines), lines
    assert last["left"] in range(1, 7)  # the written pages, and nothing else, are the pool's
    assert file_digest(records.path) == records.digest


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("act", ACTS)
def test_whatever_a_job_does_leaves_what_it_has_written(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path, agent: str, act: str
) -> None:
    code = textwrap.dedent(ACTS[act]) + "say(left=m.checkpoints())"
    *lines, last = said(job, env, tmp_path, agent, records.path, code, WRITABLE, CACHE)
    assert lines and all(line in GOOD for line in lines), lines
    assert last == {"left": 0} and file_digest(records.path) == records.digest


def test_what_the_file_is_put_back_from_is_no_mapping_of_the_jobs(
    job: Start, records: Records
) -> None:
    """Whoever looks for those past us leaves it alone, in a child of fork(2), too."""
    code = (
        BEGINNING
        + """
m = Mapping(path, flags=MAP_PRIVATE)
say(pooled=m.pooled())
say(files=[line.split()[1] for line in open("/proc/self/maps") if line.rstrip().endswith(path)])
child = os.fork()
time.sleep(float(sys.argv[2]))
if not child:
    os._exit(0)
say(left=os.waitpid(child, 0)[1])
"""
    )
    looks_seconds = 3 * observe.LOOK_ALL_NS / 1e9
    done = job(python(code, records.path, looks_seconds), options=POOL).finish().good()
    assert done.lines == [{"pooled": True}, {"files": ["r--p"]}, {"left": 0}]
    assert done.summary is not None
    assert not done.summary["degradations"], done.summary["degradations"]
    assert not done.summary["coarse"], done.summary["coarse"]


def test_a_page_that_was_written_past_us_is_not_armed_again(job: Start, records: Records) -> None:
    """Which would drop it. It is the page by which its reader was seen, in each 4 MiB."""
    code = (
        BEGINNING
        + """
m = Mapping(path, flags=MAP_PRIVATE)
say(pooled=m.pooled())
until(ring, "a ring of our own")
for page in range(0, m.length // PAGE, 1024):
    m.write_past_us(page * PAGE, b"written")
    model[page * PAGE : page * PAGE + 7] = b"written"
until(lambda: ring()["rearmed"], "a page that is armed again")
say(wrong=wrong(m))
"""
    )
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines == [{"pooled": True}, {"wrong": []}]


#: Each takes away all of a mapping ``m``, whose pages 3, 1000 and the last were written past us.
TAKEN = {
    "at once": "m.unmap()",
    "in parts": """
    for first, last in ((900, 1100), (0, 500), (1100, 0), (500, 900)):
        m.unmap(first * PAGE, (last * PAGE or m.length) - first * PAGE)
    """,
    "in parts, another in between": """
    m.unmap(0, 900 * PAGE)
    other = Mapping(path, length=900 * PAGE, flags=MAP_PRIVATE)
    other.write_past_us(5 * PAGE, b"other")
    m.unmap(900 * PAGE, m.length - 900 * PAGE)
    other.unmap()
    """,
    "by what is mapped over it": """
    libc.mmap(m.address, m.length, PROT_READ, MAP_PRIVATE | MAP_FIXED | 0x20, -1, 0)
    m.unmap()
    """,
    "once it was made shorter": """
    libc.mremap(m.address, m.length, 900 * PAGE, 0)
    m.unmap(0, 900 * PAGE)
    """,
    "by what is moved there": """
    shared = Mapping(path)
    libc.mremap.argtypes = [*libc.mremap.argtypes[:4], ctypes.c_void_p]
    libc.mremap(shared.address, m.length, m.length, 3, m.address)  # MAYMOVE, FIXED
    m.unmap()
    """,
}
#: More than the slots of a process (csrc/job/job.h, UP_REGIONS).
TAKEN_TIMES = 1100


@pytest.mark.parametrize("how", TAKEN)
def test_of_a_mapping_that_is_taken_away_nothing_is_left_though_it_was_written_past_us(
    job: Start, records: Records, how: str
) -> None:
    """No slot, no mapping of ours, and nobody takes it for a change past libc."""
    code = f"""
    path = sys.argv[1]
    def one():
        m = Mapping(path, flags=MAP_PRIVATE)
        for page in (3, 1000, (m.length - 1) // PAGE):
            m.write_past_us(page * PAGE, b"written")
        {textwrap.indent(textwrap.dedent(TAKEN[how]), "        ").strip()}
    def maps():
        return len(open("/proc/self/maps").readlines())
    one()
    before = maps()
    for _ in range({TAKEN_TIMES}):
        one()
    say(more=maps() - before, private=Mapping(path, flags=MAP_PRIVATE).pooled())
    say(shared=Mapping(path).pooled(), digest=Mapping(path).digest())
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines[0]["private"] and done.lines[0]["more"] < 10
    assert done.lines[1] == {"shared": True, "digest": records.digest}
    assert done.summary is not None and "without libc" not in str(done.summary["degradations"])


def test_where_the_job_may_write_the_pool_s_memory_the_file_is_not_put_back(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path
) -> None:
    """Whatever it writes after the kernel has been asked would be lost."""
    require(platform.machine() == "x86_64", "the number of mprotect(2) is x86-64's")
    code = """
    rights = PROT_READ | PROT_WRITE
    say(status=by_instruction(10, m.address + 20 * PAGE, PAGE, rights))
    m.unmap(0, PAGE)
    m.view[20 * PAGE] = model[20 * PAGE] = 1
    say(wrong=wrong(m, PAGE), left=m.checkpoints())
    """
    lines = said(job, env, tmp_path, "dead", records.path, code)
    assert lines == [{"status": 0}, {"wrong": [], "left": 6}]  # five copies, and that page


#: Sets a filter by which PAGEMAP_SCAN fails with an errno, and becomes another program. x86-64.
FILTERED = """
import ctypes, os, struct, sys
lines = [(0x20, 0, 0, 0), (0x15, 0, 3, 16), (0x20, 0, 0, 24), (0x15, 0, 1, 0xC0606610),
         (0x06, 0, 0, 0x50000 | int(sys.argv[1])), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
assert not libc.prctl(22, 2, ctypes.c_char_p(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execv(sys.argv[2], sys.argv[2:])
"""


def filtered(number: int, words: list[str]) -> list[str]:
    require(platform.machine() == "x86_64", "the numbers of the filter are of x86-64")
    return [sys.executable, "-S", "-c", FILTERED, str(number), *words]


@pytest.mark.parametrize("agent", ["there", "dead"])
def test_before_linux_6_7_the_page_table_s_entries_tell_which_pages_were_written(
    job: Start, records: Records, tmp_path: Path, agent: str
) -> None:
    code = WRITTEN + textwrap.dedent(GONE["dead"] if agent == "dead" else "say(pooled=pooled)")
    code += textwrap.dedent(ACTS["makes all of it writable"]) + "\nsay(left=m.checkpoints())"
    variables = dies_at(tmp_path, 60) if agent == "dead" else {}
    words = filtered(errno.ENOTTY, python(code, records.path))
    done = job(words, options=POOL, **variables).finish().good()
    assert done.lines[0]["pooled"] and done.lines[1:] == [{"wrong": []}, {"left": 6}]


def test_where_the_kernel_does_not_say_which_pages_are_copies_the_pool_serves_no_private_mapping(
    job: Start, records: Records
) -> None:
    code = """
    private, shared = Mapping(sys.argv[1], flags=MAP_PRIVATE), Mapping(sys.argv[1])
    say(private=private.pooled(), shared=shared.pooled(), digest=private.digest())
    """
    words = filtered(errno.EPERM, python(code, records.path))
    done = job(words, options=POOL).finish().good()
    assert done.lines == [{"private": False, "shared": True, "digest": records.digest}]


def test_a_job_without_its_agent_that_may_open_nothing_reads_the_file_s_bytes(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path
) -> None:
    """Nobody can tell it which pages were written: they are the file's, too (docs/safety.md)."""
    code = """
    import resource
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    m.protect(PROT_READ | PROT_WRITE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with open(path, "rb") as file:
        model[:] = file.read()
    say(wrong=wrong(m), left=m.checkpoints())
    """
    lines = said(job, env, tmp_path, "dead", records.path, code)
    assert lines == [{"wrong": [], "left": 0}]


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("begin", [WRITTEN, WRITABLE], ids=["of the pool", "writable"])
def test_a_child_has_the_written_pages_once_the_file_is_back(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path, agent: str, begin: str
) -> None:
    """Also one whose parent has written such a page itself, and one that has dropped them."""
    code = f"""
    start = 0
    m.protect(PROT_READ | PROT_WRITE)
    m.view[6 * PAGE + 50] = m.view[8 * PAGE] = model[6 * PAGE + 50] = model[8 * PAGE] = 3
    {textwrap.indent(FORKS, "    ").strip()}
    m.forget()
    with open(path, "rb") as file:
        model[:] = file.read()
    {textwrap.indent(FORKS, "    ").strip()}
    """
    options = POOL if begin == WRITTEN else CACHE
    lines = said(job, env, tmp_path, agent, records.path, code, begin, options)
    assert lines == [{"wrong": []}] * 6


def test_a_child_never_reads_zeros_where_its_parent_has_dropped_a_written_page(
    job: Start, records: Records, env: dict[str, str], tmp_path: Path
) -> None:
    """The pool has let go of the page's chunk meanwhile, and the child has nobody to ask for it."""
    code = f"""
    start = 0
    m.protect(PROT_READ | PROT_WRITE)
    m.forget()
    Mapping(path).digest()
    with open(path, "rb") as file:
        model[:] = file.read()
    {textwrap.indent(FORKS, "    ").strip()}
    """
    options = (*POOL[:3], "2MiB")
    lines = said(job, env, tmp_path, "silent", records.path, code, options=options)
    assert lines == [{"wrong": []}] * 3


@pytest.mark.parametrize("numbers", ["free", "taken"])
def test_a_child_has_the_file_where_its_parent_has_dropped_a_written_page_of_the_pool(
    job: Start, records: Records, numbers: str
) -> None:
    """The pool has let go of the page's chunk meanwhile. Where the child may open nothing more, a
    thread whose table is its own asks the kernel."""
    code = f"""
    import contextlib, resource
    m.unmap(1499 * PAGE, PAGE)
    m.advise(MADV_DONTNEED, 5 * PAGE, PAGE)
    with open(path, "rb") as file:
        model[5 * PAGE : 6 * PAGE] = file.read(6 * PAGE)[5 * PAGE :]
    Mapping(path).digest()
    if {numbers == "taken"}:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                os.dup(1)
    if os.fork() == 0:
        say(wrong=wrong(m, 0, 1499 * PAGE) + wrong(m, 1500 * PAGE))
        os._exit(0)
    os.wait()
    say(wrong=wrong(m, 0, 1499 * PAGE) + wrong(m, 1500 * PAGE))
    """
    words = python(WRITTEN + textwrap.dedent(code), records.path)
    done = job(words, options=(*POOL[:3], "2MiB")).finish()
    assert done.status == 0 and done.lines == [{"wrong": []}] * 2


@pytest.mark.parametrize("flags", ["MAP_PRIVATE", "MAP_SHARED"])
def test_a_child_has_the_file_where_there_is_no_room_for_it_twice(
    job: Start, records: Records, flags: str
) -> None:
    """And nobody who would lay the pool there again."""
    code = f"""
    import resource
    m = Mapping(sys.argv[1], flags={flags})
    say(pooled=m.pooled())
    hear()
    now = int(open("/proc/self/statm").read().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (now + (8 << 20), resource.RLIM_INFINITY))
    if os.fork() == 0:
        say(same=m.view[5 * PAGE :][:PAGE] == open(sys.argv[1], "rb").read(6 * PAGE)[5 * PAGE :])
        os._exit(0)
    say(status=os.wait()[1])
    """
    work = job(python(code, records.path), options=POOL)
    assert work.line() == {"pooled": True}
    with work.stopped_service():
        work.tell()
        assert [work.line(), work.line()] == [{"same": True}, {"status": 0}]
    work.finish().good()


def test_where_address_space_is_limited_a_private_mapping_takes_no_more_of_it(
    job: Start, records: Records
) -> None:
    """The pool keeps a private file's mapping elsewhere, too."""
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
    private, shared = Mapping(sys.argv[1], flags=MAP_PRIVATE), Mapping(sys.argv[1])
    say(private=private.pooled(), shared=shared.pooled(), digest=private.digest())
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines == [{"private": False, "shared": True, "digest": records.digest}]


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("begin", [WRITTEN, WRITABLE], ids=["of the pool", "writable"])
def test_behind_the_new_end_of_a_file_that_was_truncated_it_is_sigbus(
    job: Start, own_records: Records, env: dict[str, str], tmp_path: Path, agent: str, begin: str
) -> None:
    """In the pool as soon as it is known: to the agent, or by the job's next call."""
    code = f"""
    os.truncate(path, 8 << 20)
    if {agent == "there"}:
        until(lambda: not pooled or m.parts()[1] > 1, "the file in its place")
    m.unmap(0, 3 * PAGE)
    say(wrong=wrong(m, 3 * PAGE, 8 << 20))
    for page in (2048, 3000):
        if os.fork() == 0:
            m.view[page * PAGE]
            os._exit(0)
        say(status=os.waitstatus_to_exitcode(os.wait()[1]))
    rest = m.address + 3 * PAGE
    checked(libc.mprotect(rest, m.length - 3 * PAGE, PROT_READ | PROT_WRITE), "mprotect")
    m.view[2047 * PAGE] = model[2047 * PAGE] = 1
    say(wrong=wrong(m, 3 * PAGE, 8 << 20))
    """
    options = POOL if begin == WRITTEN else CACHE
    lines = said(job, env, tmp_path, agent, own_records.path, code, begin, options)
    sigbus = {"status": -signal.SIGBUS}
    assert lines == [{"wrong": []}, sigbus, sigbus, {"wrong": []}]
