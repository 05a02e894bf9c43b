# SPDX-License-Identifier: Apache-2.0
"""What a process opens is noted in the start log, by itself, and nothing that becomes of the log
becomes of the process."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require
from harness import programs

from uffdprefetch.native import uffd
from uffdprefetch.native.preload import preload_object
from uffdprefetch.native.start_log import Noted, StartLog
from uffdprefetch.protocol import start_log

ALL = 1 << 20


class Bed:
    """A start log, and processes that write it."""

    def __init__(self, directory: Path) -> None:
        self.fd = start_log.make()
        self.log = StartLog(self.fd)
        socket = str(directory / "s")
        start_log.publish(socket, os.getpid(), self.fd)
        self.name = Path(socket + start_log.SUFFIX)
        self.directory = directory

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(
            words, cwd=self.directory, capture_output=True, text=True,
            env={
                **os.environ, "LD_PRELOAD": preload_object(), start_log.VARIABLE: str(self.name),
            },
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def python(self, code: str, *args: object) -> str:
        text = "import os, sys\n" + textwrap.dedent(code)
        return self.run(sys.executable, "-I", "-S", "-c", text, *map(str, args))

    def noted(self) -> list[Noted]:
        """In this directory, or by a path that is not absolute."""
        found = self.log.take(ALL)
        here = f"{self.directory}/"
        return [
            one for one in found
            if not one.is_directory and (one.path.startswith(here) or one.path[0] != "/")
        ]  # fmt: skip


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    bed = Bed(tmp_path)
    yield bed
    bed.log.close()
    os.close(bed.fd)


def test_the_launcher_s_numbers_are_those_of_c() -> None:
    assert start_log.LOG_BYTES == uffd._lib.UP_START_LOG_BYTES


def test_it_is_noted_what_was_read_or_missing_once(bed: Bed) -> None:
    (bed.directory / "here").touch()
    bed.python(
        """
        here, missing = sys.argv[1] + "/here", sys.argv[1] + "/missing"
        for _ in range(3):
            os.close(os.open(here, os.O_RDONLY))
            for name in (missing, here + "/x"):
                try:
                    os.open(name, os.O_RDONLY)
                except OSError:
                    pass
        os.close(os.open(here, os.O_WRONLY))
        os.close(os.open(missing, os.O_RDWR | os.O_CREAT))
        os.close(os.open(missing, os.O_RDONLY))
        os.close(os.open("/proc/self/maps", os.O_RDONLY))
        """,
        bed.directory,
    )
    here = str(bed.directory)
    assert [(one.path, one.is_missing) for one in bed.noted()] == [
        (f"{here}/here", False), (f"{here}/missing", True), (f"{here}/here/x", True),
        (f"{here}/missing", False),
    ]  # fmt: skip


def test_what_is_not_absolute_comes_with_what_it_is_relative_to(bed: Bed) -> None:
    (bed.directory / "sub").mkdir()
    (bed.directory / "sub" / "here").touch()
    out = bed.python(
        """
        os.close(os.open("sub/here", os.O_RDONLY))
        fd = os.open("sub", os.O_RDONLY)
        os.close(os.open("here", os.O_RDONLY, dir_fd=fd))
        print(os.getpid(), fd)
        """
    )
    pid, fd = map(int, out.split())
    at_cwd = -100  # AT_FDCWD
    found = [(one.pid, one.path, one.directory) for one in bed.noted()]
    assert found == [(pid, "sub/here", at_cwd), (pid, "sub", at_cwd), (pid, "here", fd)]


def test_each_process_says_where_it_began(bed: Bed) -> None:
    pid = int(bed.python("print(os.getpid())"))
    found = [one for one in bed.log.take(ALL) if one.is_directory]
    assert [(one.pid, one.path) for one in found] == [(pid, str(bed.directory))]


def test_all_that_open_at_once_are_heard(bed: Bed) -> None:
    """Threads of forked processes, and of programs that these become."""
    names = 200
    bed.python(
        """
        import threading
        def work():
            threads = [threading.Thread(target=opens, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        def opens(thread):
            for i in range(int(sys.argv[2])):
                for name in (f"common-{i}", f"{os.getpid()}-{thread}-{i}"):
                    try:
                        os.open(f"{sys.argv[1]}/{name}", os.O_RDONLY)
                    except FileNotFoundError:
                        pass
        if len(sys.argv) > 3:
            work()
            sys.exit()
        pids = []
        for n in range(4):
            pid = os.fork()
            if not pid:
                if n % 2:
                    os.execv(sys.executable, sys.orig_argv + ["again"])
                work()
                os._exit(0)
            pids.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
        """,
        bed.directory, names,
    )  # fmt: skip
    found = [os.path.basename(one.path) for one in bed.noted()]
    assert len(found) == len(set(found)) == names + 4 * 4 * names
    assert bed.log.lost == 0


def test_what_does_not_fit_is_counted(bed: Bed) -> None:
    """Those that are relative, and may be many times the same, have a part of it only."""
    bed.python(
        """
        for name in ["a" * 200] * 10_000 + [f"{sys.argv[1]}/{i:0200}" for i in range(20_000)]:
            try:
                os.open(name, os.O_RDONLY)
            except FileNotFoundError:
                pass
        """,
        bed.directory,
    )
    found = bed.noted()
    relative = sum(one.path[0] != "/" for one in found)
    assert 0 < relative < 10_000 and 0 < len(found) - relative < 20_000
    assert len(found) + bed.log.lost == 30_000
    assert bed.python("print('still')") == "still\n"


def test_who_dies_over_it_spoils_one_place(bed: Bed) -> None:
    """It has taken a place and not filled it; one that was only stopped fills it later."""
    first = bed.directory / "first"
    bed.python("pass")
    begun = bed.log.take(ALL)
    taken = int.from_bytes(os.pread(bed.fd, 8, 0), "little")
    os.pwrite(bed.fd, (taken + (1 << 32) + 128).to_bytes(8, "little"), 0)
    bed.python("open(sys.executable)")
    again = bed.log.take(ALL)
    assert [one.path for one in again if one.path == sys.executable] == [sys.executable]
    log = uffd._ffi.typeof("struct up_start_log")
    offsets = {name: field.offset for name, field in log.fields}
    slot, at = taken >> 32, taken & 0xFFFFFFFF
    entry = uffd._ffi.new("struct up_start_entry *")
    entry.kind, entry.bytes = uffd._lib.UP_START_OPEN, len(os.fsencode(first))
    text = bytes(uffd._ffi.buffer(entry)) + os.fsencode(first)
    os.pwrite(bed.fd, text, offsets["text"] + at)
    os.pwrite(bed.fd, (at // 8 + 1).to_bytes(4, "little"), offsets["slot"] + 4 * slot)
    assert [one.path for one in bed.log.take(ALL)] == [str(first)] and begun


def test_nobody_makes_it_shorter(bed: Bed) -> None:
    with pytest.raises(PermissionError):
        os.truncate(bed.name, 0)
    with pytest.raises(OSError) as refused:
        os.ftruncate(bed.fd, 1)
    assert refused.value.errno == errno.EPERM


def test_when_it_is_over_nothing_is_noted(bed: Bed) -> None:
    bed.log.end()
    bed.python("open(sys.executable)")
    assert bed.log.take(ALL) == []


@pytest.mark.parametrize("what", ["nothing", "file", "fifo", "directory", "unsealed", "loop"])
def test_what_is_no_start_log_is_left_alone(bed: Bed, what: str) -> None:
    """A container, or another node, may have anything by that name."""
    bed.name.unlink()
    other, unsealed = bed.directory / "other", os.memfd_create("unsealed")
    if what == "file":
        other.write_bytes(bytes(start_log.LOG_BYTES))
    elif what == "fifo":
        os.mkfifo(other)
    elif what == "directory":
        other.mkdir()
    os.truncate(unsealed, start_log.LOG_BYTES)
    targets = {
        "nothing": "gone",
        "unsealed": f"/proc/{os.getpid()}/fd/{unsealed}",
        "loop": "s.starts",
    }
    bed.name.symlink_to(targets.get(what, str(other)))
    assert bed.python("open(sys.executable); print(open('/proc/self/maps').read())")
    assert bed.log.take(ALL) == []
    assert not os.pread(unsealed, 64, 0).strip(b"\0")
    if what == "file":
        assert not other.read_bytes().strip(b"\0")
    os.close(unsealed)


def test_whoever_writes_there_is_read_within_bounds(bed: Bed) -> None:
    """Any process of the job may: nothing outside the log is read, nothing else fails."""
    bed.python("open(sys.executable)")
    size = os.fstat(bed.fd).st_size
    with open("/dev/urandom", "rb") as random:
        os.pwrite(bed.fd, random.read(size - 64), 64)
    os.pwrite(bed.fd, b"\xff" * 8, 0)
    bed.log.take(ALL)
    assert bed.python("open(sys.executable); print('still')") == "still\n"


def test_an_open_makes_no_call_that_plain_would_not(bed: Bed, tmp_path: Path) -> None:
    """The program kills itself for any other."""
    program = programs(tmp_path, "frugal")
    assert bed.run(program) == "ok\n"
    assert "/nonexistent/file" in [one.path for one in bed.log.take(ALL)]


@pytest.mark.parametrize("mode", [0o755, 0o4755], ids=["other user", "set-uid"])
def test_who_has_other_rights_than_the_launcher_notes_nothing(
    bed: Bed, own_directory: Path, mode: int
) -> None:
    """The kernel does not let it follow the link; a set-uid program does not even load us."""
    require(os.geteuid() == 0 and shutil.which("setpriv"), "only root can become another user")
    source, program = own_directory / "reads.c", own_directory / "reads"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        "int main(int argc, char **argv) { return argc < 2 || open(argv[1], O_RDONLY) < 0; }\n"
    )
    subprocess.run(["cc", "-O1", source, "-o", program], check=True)
    program.chmod(mode)
    preload = shutil.copy(preload_object(), own_directory)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program, source],
        env={"LD_PRELOAD": preload, start_log.VARIABLE: os.readlink(bed.name)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [one for one in bed.log.take(ALL) if one.path == str(source)]


@pytest.fixture
def own_directory() -> Iterator[Path]:
    """One that everybody may read."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)
