# SPDX-License-Identifier: Apache-2.0
"""`wrap --learn` whose replay, service or launcher is killed at any moment, and whose home takes
nothing: the job reads what is there, and nothing stays."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from components import on_memory
from conftest import HANG_SECONDS, require, uffdprefetch, wait_until
from start_profiles import file_entry, left_behind, name_entry

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.launch import replay as replays
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartProfile

#: Of each kind of process a third of them; `make campaign` has 500.
KILLS = int(os.environ.get("UFFDPREFETCH_TEST_START_KILLS", "12"))
KEY = "start"
FILES, FILE_BYTES = 40, 200_000
#: What it opens it reads; half of it are files that the profile has not.
JOB = """
import hashlib, sys, time
sha = hashlib.sha256()
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        sha.update(file.read())
    time.sleep(0.005)
print(sha.hexdigest())
"""


class Home:
    """A user's, and files that a job reads."""

    def __init__(self, env: dict[str, str], directory: Path) -> None:
        self.env, self.directory = env, directory
        env["XDG_CACHE_HOME"] = str(directory / "cache")
        self.profiles = directory / "cache" / "uffdprefetch" / "profiles"
        self.paths = [directory / f"file{number}" for number in range(FILES)]
        for path in self.paths:
            path.write_bytes(os.urandom(FILE_BYTES))
        self.digest = hashlib.sha256(b"".join(path.read_bytes() for path in self.paths)).hexdigest()
        self.words = [sys.executable, "-S", "-c", JOB, *map(str, self.paths)]

    def keep(self) -> None:
        """A profile of half of the files."""
        program = name_entry(Path(os.path.realpath(sys.executable)))
        entries = (program, *map(file_entry, self.paths[::2]))
        profile_store.store(str(self.profiles / f"{KEY}.upl"), StartProfile(entries, 1))

    def start(self) -> subprocess.Popen[str]:
        words = uffdprefetch("wrap", "-q", "-o", "/dev/null", f"--learn={KEY}", "--", *self.words)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, env=self.env, cwd=self.directory, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True,
        )  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Of its runs, by pid: launcher, service, replay or job."""
        found = {}
        mark = f"UFFDPREFETCH_RUNDIR={self.env['UFFDPREFETCH_RUNDIR']}".encode()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_ours = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0] == os.fsencode(replays.PROGRAM):
                if any(os.fsencode(self.profiles) in word for word in words):
                    found[pid] = "replay"
            elif is_ours and b"uffdprefetch" in words:
                found[pid] = "service" if b"serve" in words else "launcher"
            elif is_ours:
                found[pid] = "job"
        return found

    def left(self) -> list[str]:
        """In the runtime directory, but for logs of services."""
        return left_behind(self.env["UFFDPREFETCH_RUNDIR"])

    def run(self) -> None:
        """One that nobody kills."""
        running = self.start()
        out, said = running.communicate(timeout=HANG_SECONDS)
        assert (running.returncode, out.strip(), said) == (0, self.digest, "")
        wait_until(lambda: not self.processes(), lambda: f"the end of {self.processes()}")
        wait_until(lambda: self.left() == [], "the runtime directory to be empty")


@pytest.fixture
def home(env: dict[str, str], tmp_path: Path) -> Home:
    require(replays.why_not() is None, replays.why_not() or "")
    require(not on_memory(tmp_path), "the files of a start are on storage")
    return Home(env, tmp_path)


def test_whoever_is_killed_at_any_moment(home: Home) -> None:
    """The job of a launcher that was killed may end in the middle: nobody can tell it."""
    home.keep()
    began = time.monotonic()
    home.run()
    whole, chance = time.monotonic() - began, random.Random(1)
    killed: dict[str, int] = {}
    for number in range(KILLS):
        whom = ("replay", "service", "launcher")[number % 3]
        running = home.start()
        until = time.monotonic() + chance.uniform(0, whole)
        while time.monotonic() < until and running.poll() is None:
            for pid, what in home.processes().items():
                if what == whom and (whom == "replay" or time.monotonic() + 0.02 >= until):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGKILL)
                        killed[whom] = killed.get(whom, 0) + 1
                    until = 0.0
        out, said = running.communicate(timeout=HANG_SECONDS)
        if running.returncode != -signal.SIGKILL:
            assert (running.returncode, out.strip()) == (0, home.digest), (whom, killed, said)
        elif out:
            assert out.strip() == home.digest
        wait_until(lambda: not home.processes(), lambda: f"the end of {home.processes()}")
        profile_store.load(str(home.profiles / f"{KEY}.upl"))
    home.run()
    assert min(killed.get(whom, 0) for whom in ("replay", "service", "launcher")) > 0


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "full"
    where.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(where)]
    mounted = shutil.which("mount") and subprocess.run(words, capture_output=True).returncode == 0
    require(mounted, "no tmpfs may be mounted")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_home_that_is_full(home: Home, full: Path) -> None:
    home.env["XDG_CACHE_HOME"] = str(full)
    (full / "uffdprefetch" / "profiles").mkdir(parents=True)
    with (full / "more").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    home.run()
    kept = list((full / "uffdprefetch" / "profiles").iterdir())
    assert [path for path in kept if path.name != ".lock"] == []


def test_a_home_that_may_only_be_read(home: Home, tmp_path: Path) -> None:
    """A profile that lies there is read ahead."""
    require(why_no_bed() is None, why_no_bed() or "")
    home.keep()
    (tmp_path / "mount").mkdir()
    before = (home.profiles / f"{KEY}.upl").read_bytes()
    with SlowBed(tmp_path / "cache", tmp_path / "mount") as bed:
        home.env["XDG_CACHE_HOME"] = str(bed.mountpoint)
        home.run()
    assert (home.profiles / f"{KEY}.upl").read_bytes() == before
