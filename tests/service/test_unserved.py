# SPDX-License-Identifier: Apache-2.0
"""What is not served stands in the summary: each large mapping with its reason and what would
change that, and what came by read(2)."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require, uffdprefetch, wait_until
from figures import contradictions
from harness import MIB, Finished, Job, Records, Start, python, snapshot, write_records
from nobody import UID, Nobody

from uffdprefetch.base.units import parse_size
from uffdprefetch.report.summary import short_lines
from uffdprefetch.state.unserved import Reason

pytest_plugins = ("harness_fixtures",)

#: Waits until the service knows of a mapping that no agent tells of (known()).
LOOKED = "say(mapped=True); hear()"


def known(env: dict[str, str], path: Path) -> bool:
    """Whether the service has seen that the file is mapped: it looks each second."""
    found = snapshot(env)
    served = [file.path for file in found.files if file.served_by]
    return any(str(path) in each for each in (*found.refused, *served))


@dataclass(frozen=True)
class Case:
    """What a job does with its own copy of the records that is not served; a word of what was seen
    (``told``); what it does when it follows the remedy. ``options``: of the first one's wrap."""

    job: str
    told: str
    mended: str | None = None
    options: tuple[str, ...] = ()


READ = "Mapping(path).digest()"
CASES = {
    Reason.SHARED_WRITABLE: Case(
        f"""
        fd = os.open(path, os.O_RDWR)
        checked(libc.mmap(None, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), "mmap")
        {LOOKED}
        """,
        "shared and writable",
        f"""
        fd = os.open(path, os.O_RDWR)
        checked(libc.mmap(None, size, PROT_READ, MAP_SHARED, fd, 0), "mmap")
        {LOOKED}
        """,
    ),
    Reason.DELETED: Case(
        f"""
        m = Mapping(path, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE | 4)
        m.protect(PROT_READ)
        os.unlink(path)
        {LOOKED}
        """,
        "deleted",
        f"""
        m = Mapping(path, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE | 4)
        m.protect(PROT_READ)
        {LOOKED}
        """,
    ),
    Reason.CHANGED: Case(
        """
        m, times = Mapping(path).managed(), os.stat(path)
        with open(path, "r+b") as file:
            file.write(b"more")
        m.plain()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        Mapping(path).digest()
        """,
        "opened for writing",
        """
        m = Mapping(path).managed()
        with open(path + ".new", "wb") as file:
            file.write(b"more")
        Mapping(path).digest()
        """,
    ),
    Reason.IN_MEMORY: Case(
        """
        import shutil
        path = f"/dev/shm/{os.environ['UPTEST_MARK'].replace('/', '-')}"
        shutil.copyfile(sys.argv[1], path)
        try:
            Mapping(path).digest()
        finally:
            os.unlink(path)
        """,
        "tmpfs is memory already",
    ),
    Reason.LIBRARY: Case(
        """
        os.rename(path, path + ".so.1")
        Mapping(path + ".so.1").digest()
        """,
        "a library",
    ),
    Reason.EXCLUDED: Case(READ, "left out by", READ, ("--exclude", "*.bin")),
}


def check(summary: dict[str, Any], reason: Reason, told: str, size_bytes: int) -> None:
    """The mapping stands there with all that is to be said of it, and on the second line."""
    (unserved,) = [one for one in summary["unserved"] if one["reason"] == reason.value[0]]
    assert told in unserved["why"], unserved
    assert unserved["mapped_bytes"] >= size_bytes
    assert summary["refused"][unserved["path"]] == unserved["why"]
    assert unserved["remedy"] == reason.remedy
    if summary["files"]:
        return
    gained, *more = short_lines(summary)
    if reason is Reason.LIBRARY:  # of use to nobody
        assert gained != "served nothing: no mapping was served" and more == []
        return
    assert gained == "served nothing: no mapping was served"
    line = re.fullmatch(
        r"not served: (?P<size>[0-9.]+ [KMGT]iB) of (?P<path>.+): (?P<why>.+?)( \(and .*)?", more[0]
    )
    assert line is not None, more
    assert parse_size(line["size"].replace(" ", "")) >= 0.99 * size_bytes
    assert (line["path"], line["why"]) == (unserved["path"], unserved["why"])
    assert more[1:] == ([f"try: {reason.remedy}"] if reason.remedy else [])


def test_each_reason_is_tried_here() -> None:
    elsewhere = {Reason.NOT_OPENED, Reason.PAGE_TABLE, Reason.TOO_LARGE}  # below
    elsewhere |= {Reason.PROGRAM}  # kernel/test_preload_alone.py
    elsewhere |= {Reason.NOT_FOLLOWED}  # test_wrap_service.py
    hostile = {Reason.ANOTHER_FILE}  # test_hostile_clients.py: no program of libc's can
    assert set(CASES) | elsewhere | hostile == set(Reason)
    assert {one for one, case in CASES.items() if case.mended is None} == {
        one for one in CASES if one.remedy is None
    }


@pytest.mark.parametrize("reason", list(CASES), ids=lambda one: one.value[0])
def test_a_mapping_that_is_not_served_is_named_with_its_reason_and_a_remedy(
    job: Start, own_records: Records, reason: Reason
) -> None:
    case = CASES[reason]
    head = "path, size = sys.argv[1], os.stat(sys.argv[1]).st_size\n"

    def finished(code: str, *options: str) -> Finished:
        run = job(python(head + textwrap.dedent(code), own_records.path), options=options)
        if LOOKED in code:
            assert run.line() == {"mapped": True}
            wait_until(lambda: known(run.env, own_records.path), "the service to see the mapping")
            run.tell()
        return run.finish().good()

    done = finished(case.job, *case.options)
    assert done.summary is not None
    check(done.summary, reason, case.told, own_records.size_bytes)
    if case.mended is None:
        return
    write_records(own_records.path, own_records.size_bytes, seed=2)
    done = finished(case.mended)
    assert done.summary is not None
    assert done.summary["unserved"] == [], "the remedy does not help"
    (file,) = done.summary["files"]
    assert file["path"] == str(own_records.path) and file["served_by"] is not None


@pytest.mark.parametrize("columns", [None, 60])
def test_into_a_pipe_a_line_is_whole_and_on_a_terminal_it_says_why(
    env: dict[str, str], tmp_path: Path, columns: int | None
) -> None:
    folder = tmp_path / "a-folder-whose-name-is-long" / "of-the-data"
    folder.mkdir(parents=True)
    path = folder / "a.bin"
    write_records(path, 2 * MIB)
    env["UFFDPREFETCH_RUN"] = "a-line"
    ours, theirs = os.pipe() if columns is None else os.openpty()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    options = ("--strict", "--min-size", "1MiB", "--exclude", "*.bin", "-o", "/dev/null")
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); "
    job = subprocess.Popen(
        [*uffdprefetch("wrap", *options, "--"), sys.executable, "-S", "-c", f"{code}input()",
         str(path)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=theirs, text=True,
    )  # fmt: skip
    os.close(theirs)

    def seen() -> bool:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # it just starts
            return known(env, path)
        return False

    wait_until(seen, "the service to see the mapping")
    job.communicate("\n", HANG_SECONDS)
    said = b""
    with contextlib.suppress(OSError):  # EIO: a terminal whose other side is closed
        while piece := os.read(ours, 65536):
            said += piece
    os.close(ours)
    assert job.returncode == 0, said
    named = str(path) if columns is None else "a.bin"
    (line,) = [line for line in said.decode().splitlines() if "not served" in line]
    assert line == f"uffdprefetch: not served: 2 MiB of {named}: left out by --include or --exclude"


def test_huge_pages_of_no_mount_are_memory_as_well(job: Start) -> None:
    """Of a memfd of huge pages no mount tells. None need be there: nothing is touched."""
    code = """
    fd = os.memfd_create("huge", 4)  # MFD_HUGETLB
    os.truncate(fd, 64 << 20)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    m = Mapping(again, 64 << 20, flags=MAP_SHARED | 0x4000)  # MAP_NORESERVE
    say(ours=m.checkpoints() > 0)
    hear()
    """
    work = job(python(code), options=("--engine", "pool", "--budget", "32MiB"))
    assert work.line() == {"ours": False}
    wait_until(lambda: snapshot(work.env).refused, "the service to refuse it")
    work.tell()
    done = work.finish().good()
    assert done.summary is not None
    (unserved,) = done.summary["unserved"]
    assert unserved["why"] == "hugetlbfs is memory already"


INHERITED = """
first = Mapping(sys.argv[1]).managed()
say(ready=True); hear()
m = Mapping(sys.argv[2], flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
reader, writer = os.pipe()
if not os.fork():
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
say(forked=True); hear()
os.close(writer)
os.wait()
"""


def test_what_a_child_inherits_while_the_service_stands_still_is_served_too(
    job: Start, records: Records, own_records: Records
) -> None:
    run = job(python(INHERITED, records.path, own_records.path))
    assert run.line() == {"ready": True}
    with run.stopped_service():
        run.tell()
        assert run.line() == {"forked": True}

    def mappings() -> int:
        found = {file.path: file.mappings for file in snapshot(run.env).files}
        return found.get(str(own_records.path), 0)

    wait_until(lambda: mappings() == 2, "both mappings to be served")
    run.tell()
    summary = run.finish().good().summary
    assert summary is not None and summary["unserved"] == []


# ---- as another user ----------------------------------------------------------------------------

#: Maps a file of its own, of which the service is to know, in one of several ways.
OTHER_USERS = """
import ctypes, mmap, os, sys, time
path, how = sys.argv[1:]
if how == "hidden":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
fd = os.open(path, os.O_RDONLY)
if how == "closed":
    os.chmod(path, 0)
m = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
time.sleep(1)
print(sum(m[at] for at in range(0, len(m), 4096)))
"""


@pytest.fixture(scope="module")
def nobody() -> Iterator[Nobody]:
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        yield Nobody(Path(directory))


@pytest.mark.root
@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("closed", Reason.NOT_OPENED, "it cannot be opened (Permission denied)"),
        ("hidden", Reason.PAGE_TABLE, "its process hides its page tables"),
    ],
)
def test_what_a_user_hides_from_the_service_is_named(
    nobody: Nobody, env: dict[str, str], how: str, reason: Reason, told: str
) -> None:
    """Root may open and see all."""
    path = nobody.work / "weights.bin"
    write_records(path, 20 * MIB, seed=4)
    os.chown(path, UID, UID)
    summaries = []
    for way in (how, "as the remedy says"):
        done = subprocess.run(
            [*nobody.wrap(nobody.work / "out"), nobody.python, "-S", "-c", OTHER_USERS,
             str(path), way],
            env=nobody.environment(env), cwd="/", capture_output=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads((nobody.work / "out.summary.json").read_text()))
        path.chmod(0o600)
    unmended, mended = summaries
    check(unmended, reason, told, 20 * MIB)
    assert contradictions(unmended) == contradictions(mended) == []
    assert mended["unserved"] == [] and mended["files"][0]["served_by"] == "page_tables"


#: Opens a file for writing where it may, and only reads it; is there for three looks of a service
#: that nobody else may ask.
MAY_WRITE = """
import mmap, os, sys, time
try:
    fd, prot = os.open(sys.argv[1], os.O_RDWR), mmap.PROT_READ | mmap.PROT_WRITE
except PermissionError:
    fd, prot = os.open(sys.argv[1], os.O_RDONLY), mmap.PROT_READ
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, prot)
time.sleep(3)
print(sum(m[at] for at in range(0, len(m), 4096)))
"""


@pytest.mark.root
def test_chmod_a_w_has_a_program_that_only_reads_served(
    nobody: Nobody, env: dict[str, str]
) -> None:
    """The remedy of who cannot change the program; root may write all the same."""
    path = nobody.work / "matrix.bin"
    write_records(path, 20 * MIB, seed=5)
    os.chown(path, UID, UID)
    reasons, served = [], []
    for mode in (0o644, 0o444):
        path.chmod(mode)
        done = subprocess.run(
            [*nobody.wrap(nobody.work / "out", "--strict"), nobody.python, "-S", "-c", MAY_WRITE,
             str(path)],
            env=nobody.environment(env), cwd="/", capture_output=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        summary = json.loads((nobody.work / "out.summary.json").read_text())
        reasons.append([one["reason"] for one in summary["unserved"]])
        served.append([file["path"] for file in summary["files"]])
    assert reasons == [["shared-writable"], []] and served == [[], [str(path)]]
    assert "chmod a-w it" in str(Reason.SHARED_WRITABLE.remedy)


# ---- more than the service's memory has room for ------------------------------------------------

#: Of ext4, in blocks of 4 KiB. The books of a file have a byte for 64 KiB of it.
HUGE_BYTES = (1 << 44) - 8192
BOOKS_BYTES = HUGE_BYTES >> 16
FIRST = f"Mapping(sys.argv[1], length={16 * MIB}).digest(); say(mapped=True); hear()"


def is_judged(started: Job) -> bool:
    now = snapshot(started.env)
    return bool(now.files or now.refused)


def test_a_file_that_is_too_large_is_named(job: Start, tmp_path: Path) -> None:
    path, small = tmp_path / "huge.bin", tmp_path / "small.bin"
    small.write_bytes(bytes(16 * MIB))
    try:
        with open(path, "wb") as file:
            file.truncate(HUGE_BYTES)
    except OSError as error:
        require(False, f"no file of 16 TiB here: {error}")

    numbers = itertools.count()

    def run(file: Path, *before: str) -> tuple[int, dict[str, Any]]:
        """The most of the service's address space, and the summary."""
        name = f"run{next(numbers)}"  # the last one's service may be just ending
        options = ("--policy", "auto")
        started = job(python(FIRST, file), options, before=before, UFFDPREFETCH_RUN=name)
        assert started.line() == {"mapped": True}
        wait_until(lambda: is_judged(started), "the service to know the file")
        status = Path(f"/proc/{started.service()}/status").read_text()
        started.tell()
        summary = started.finish().good().summary
        assert summary is not None
        return int(status.split("VmPeak:")[1].split()[0]) << 10, summary

    peak_bytes, _ = run(small)
    _, summary = run(path)
    assert summary["unserved"] == [] and summary["files"][0]["size_bytes"] == HUGE_BYTES
    # neither what is known of its blocks fits, nor what is guessed of them; or the first alone
    _, summary = run(path, "prlimit", f"--as={peak_bytes + BOOKS_BYTES // 2}")
    check(summary, Reason.TOO_LARGE, "too large for the service's memory", 16 * MIB)
    _, summary = run(path, "prlimit", f"--as={peak_bytes + BOOKS_BYTES * 3 // 2}")
    assert summary["unserved"] == []
    assert [one for one in summary["degradations"] if "nothing is read ahead" in one]


# ---- by read(2) ---------------------------------------------------------------------------------


def test_what_is_read_by_calls_is_named(job: Start, tmp_path: Path) -> None:
    path = tmp_path / "read.bin"
    path.write_bytes(bytes(24 * MIB))
    code = f"""
    with open(sys.argv[1], "rb") as file:
        while file.read(1 << 20):
            pass
        m = Mapping(sys.argv[2])
        until(agents, "the agent")
        fd = os.open(sys.argv[3], os.O_RDWR)
        checked(libc.mmap(None, {MIB}, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), "mmap")
        {LOOKED}
    """
    other, seen = tmp_path / "other.bin", tmp_path / "seen.bin"
    for file in other, seen:
        file.write_bytes(bytes(2 * MIB))
    run = job(python(code, path, other, seen))
    assert run.line() == {"mapped": True}
    # what a process has mapped and what it has open is looked at in one go
    wait_until(lambda: known(run.env, seen), "the service to look at the process")
    run.tell()
    done = run.finish().good()
    assert done.summary is not None
    totals: dict[str, Any] = done.summary["totals"]
    files = [one for one in totals["unserved_read_files"] if one["path"] == str(path)]
    assert files == [{"path": str(path), "bytes": 24 * MIB}], json.dumps(totals)


@pytest.mark.parametrize("pause", ["", "; sleep 2"])
def test_what_the_jobs_processes_read_is_counted_from_their_start(
    job: Start, records: Records, pause: str
) -> None:
    """None of them maps anything; with and without a service that is up before they end."""
    line = f'cat "$0" > /dev/null{pause}; (cat < "$0") > /dev/null'
    done = job(["sh", "-c", line, str(records.path)]).finish().good()
    assert done.summary is not None
    read = done.summary["totals"]["unserved_read_bytes"]
    # beside the files: what the programs themselves, and wrap meanwhile, load
    assert 2 * records.size_bytes <= read <= 2 * records.size_bytes + 8 * MIB
