# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a real program's start, against what it has read: as strace(1) sees it, and
as its own page table shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from components import on_memory
from conftest import HANG_SECONDS, require, wait_until

from uffdprefetch.native.preload import preload_object
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.native.start_log import StartLog
from uffdprefetch.orders.start_profile import StartEntry
from uffdprefetch.protocol import start_log
from uffdprefetch.service.start_recorder import StartRecorder, StartState

FILE, DIRECTORY = EntryKind.FILE, EntryKind.DIRECTORY
BLOCK = 64 << 10


class Recorded:
    """A job whose start is recorded in this process, as a service does it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.entries = directory, list[StartEntry]()
        self._fd = start_log.make()
        start_log.publish(str(directory / "s"), os.getpid(), self._fd)
        self.recorder = StartRecorder(StartLog(self._fd), self.entries.extend)
        self._jobs: list[subprocess.Popen[str]] = []

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        name = str(self.directory / "s") + start_log.SUFFIX
        job = subprocess.Popen(
            words, cwd=self.directory, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": preload_object(), start_log.VARIABLE: name},
        )  # fmt: skip
        self._jobs.append(job)
        self.recorder.runs(one.pid for one in self._jobs)
        return job

    def python(self, code: str, *args: object) -> subprocess.Popen[str]:
        text = "import os, sys\n" + textwrap.dedent(code)
        return self.start(sys.executable, "-c", text, *map(str, args))

    def knows(self, path: Path) -> None:
        """Wait until it does."""
        wait_until(lambda: str(path) in self.recorder._files._known, f"{path} in the record")

    def looked_at(self, job: subprocess.Popen[str]) -> None:
        """Wait until this job, which opens what it is told, has been looked at."""
        marker, before = self.directory / "marker", self.recorder.describe()["looks"]
        tell(job, str(marker))
        self.knows(marker)
        wait_until(lambda: self.recorder.describe()["looks"] > before, "a look at the job")

    def end(self) -> list[StartEntry]:
        for job in self._jobs:
            job.communicate()
            assert job.returncode == 0
        self.recorder.end()
        self.recorder.join(HANG_SECONDS)
        assert self.recorder.state is StartState.WRITTEN
        os.close(self._fd)
        return self.entries


def tell(job: subprocess.Popen[str], line: str = "") -> None:
    assert job.stdin is not None
    job.stdin.write(f"{line}\n")
    job.stdin.flush()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    require(not on_memory(tmp_path), "the files of a start are on storage")
    for name in ("a/in_a", "b/in_b", "c/in_c", "here", "short", "data/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("it was there before")
    one = Recorded(tmp_path)
    yield one
    one.recorder.end()


def of(entries: Sequence[StartEntry], kind: EntryKind, below: Path) -> list[str]:
    return [
        os.path.relpath(one.path, below) for one in entries
        if one.kind is kind and one.path.startswith(f"{below}/")
    ]  # fmt: skip


#: Of its own page table: the pages of files that lie in it, as the test's oracle.
SAYS_ITS_PAGES = """
import json, struct
pages = {}
with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", buffering=0) as table:
    for line in maps:
        fields = line.rstrip("\\n").split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        start, end = (int(word, 16) for word in fields[0].split("-"))
        table.seek(start // 4096 * 8)
        data = table.read((end - start) // 4096 * 8)
        first = int(fields[2], 16) // 4096
        pages.setdefault(fields[5], []).extend(
            first + i for i, (word,) in enumerate(struct.iter_unpack("<Q", data)) if word >> 63
        )
print(json.dumps(pages), flush=True)
"""
WAITS = """
for line in sys.stdin:
    try:
        open(line.strip())
    except FileNotFoundError:
        pass
"""


def opened_by(strace: str, words: Sequence[str], log: Path) -> set[str]:
    """Regular files on storage that a program opens to read, as the kernel is asked for them."""
    calls = "trace=open,openat"
    subprocess.run([strace, "-f", "-y", "-e", calls, "-o", log, *words], check=True)
    paths = re.findall(r"O_RDONLY.*= \d+<(/.*)>$", log.read_text(), re.MULTILINE)
    return {
        path for path in map(os.path.realpath, paths)
        if os.path.isfile(path) and not path.startswith(("/proc/", "/sys/", "/dev/"))
    }  # fmt: skip


def test_all_that_an_import_reads_is_recorded(recorded: Recorded, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    require(strace is not None, "no strace: apt-get install strace")
    assert strace is not None
    words = [sys.executable, "-c", "import numpy"]
    truth = opened_by(strace, words, tmp_path / "strace.log")
    job = recorded.python(f"import numpy\n{SAYS_ITS_PAGES}{WAITS}")
    assert job.stdout is not None
    pages = json.loads(job.stdout.readline())
    recorded.looked_at(job)
    files = {os.path.realpath(one.path): one for one in recorded.end() if one.kind is FILE}
    # what libc and the dynamic linker open for themselves, and do not map (docs/learn.md)
    own = ("/etc/ld.so.cache", "/etc/locale.alias", "/usr/share/zoneinfo/")
    truth = {path for path in truth if not path.startswith(own)}
    unseen = truth - files.keys()
    assert len(truth) > 150 and len(unseen) <= 0.005 * len(truth), unseen
    touched = seen = 0
    for path, numbers in pages.items():
        blocks = {number // (BLOCK // 4096) for number in numbers}
        if path not in files or not blocks:
            continue
        runs = files[path].blocks
        mine = {block for first, count in runs for block in range(first, first + count)}
        touched, seen = touched + len(blocks), seen + len(blocks & mine if runs else blocks)
    assert touched > 100 and seen >= 0.95 * touched


def test_what_is_not_absolute_is_where_its_process_is_or_was(
    recorded: Recorded, tmp_path: Path
) -> None:
    """A process that has ended when its names are read: where it was loaded."""
    job = recorded.python(
        """
        import subprocess
        subprocess.run([sys.executable, "-S", "-c", "open('short')"], check=True)
        os.open("here", os.O_RDONLY)
        fd = os.open("a", os.O_RDONLY)
        os.open("in_a", os.O_RDONLY, dir_fd=fd)
        sys.stdin.readline()
        os.chdir("b")
        pid = os.fork()
        if pid:
            os.open("../c/in_c", os.O_RDONLY)
            os.waitpid(pid, 0)
        else:
            os.open("in_b", os.O_RDONLY)
            sys.stdin.readline()
        """
    )
    recorded.knows(tmp_path / "a" / "in_a")
    tell(job)
    recorded.knows(tmp_path / "b" / "in_b")
    recorded.knows(tmp_path / "c" / "in_c")
    tell(job)
    entries = recorded.end()
    assert set(of(entries, FILE, tmp_path)) == {"short", "here", "a/in_a", "c/in_c", "b/in_b"}
    assert {"a", "b", "c"} <= set(of(entries, DIRECTORY, tmp_path))
    assert recorded.recorder.describe()["unresolved"] == 0


def test_programs_that_note_nothing_are_named_and_what_they_map_is_seen(
    recorded: Recorded, tmp_path: Path
) -> None:
    source, program = tmp_path / "quiet.c", tmp_path / "data" / "quiet"
    source.write_text(
        "#include <unistd.h>\nint main(void) { char c; return read(0, &c, 1) != 1; }\n"
    )
    subprocess.run(["cc", "-static", "-O1", source, "-o", program], check=True)
    os.utime(program, ns=(0, 0))
    job = recorded.start(program)
    wait_until(lambda: recorded.recorder.describe()["silent_programs"] == ["quiet"], "its name")
    tell(job)
    [entry] = [one for one in recorded.end() if one.kind is FILE]
    assert entry.path == str(program) and entry.blocks[0][0] == 0


def test_opens_that_pass_libc_s_are_not_seen(recorded: Recorded, tmp_path: Path) -> None:
    """docs/learn.md says so."""
    recorded.python(
        """
        import ctypes
        assert ctypes.CDLL(None).fopen(b"here", b"r")
        os.open("short", os.O_RDONLY)
        """
    )
    assert of(recorded.end(), FILE, tmp_path) == ["short"]


def test_a_process_with_mounts_of_its_own_is_left_out(recorded: Recorded, tmp_path: Path) -> None:
    """By the same path another file may lie there: a container's."""
    apart = ["unshare", "--mount"]
    works = shutil.which("unshare") and subprocess.run([*apart, "true"], capture_output=True)
    require(works and works.returncode == 0, "no mount namespace may be made")
    code = "import os, sys; os.open(os.path.abspath('short'), 0); print(flush=True); input()"
    job = recorded.start(*apart, sys.executable, "-c", code)
    assert job.stdout is not None and job.stdout.readline() == "\n"
    here = recorded.python("os.open(os.path.abspath('here'), os.O_RDONLY); sys.stdin.readline()")
    recorded.knows(tmp_path / "here")
    tell(job)
    tell(here)
    assert of(recorded.end(), FILE, tmp_path) == ["here"]


def test_a_start_of_which_nothing_was_seen_is_not_written() -> None:
    written: list[StartEntry] = []
    recorder = StartRecorder(None, written.extend)
    recorder.end()
    recorder.join(HANG_SECONDS)
    assert recorder.state is StartState.EMPTY and written == []


def test_what_cannot_be_written_is_told() -> None:
    def fails(_: list[StartEntry]) -> None:
        raise OSError("full")

    recorder = StartRecorder(None, fails)
    recorder.runs([os.getpid()])
    wait_until(lambda: recorder.describe()["looks"] > 0, "a look at this process")
    recorder.end()
    recorder.join(HANG_SECONDS)
    assert recorder.state is StartState.FAILED
