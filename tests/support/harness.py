# SPDX-License-Identifier: Apache-2.0
"""Real jobs under `wrap`, each with a service of its own: start, talk, break, compare.

A job is a Python program given as text; it imports tests/support/inside.py and speaks JSON lines on
its stdout, the test answers words on its stdin. So every step waits for a state of the other side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    HANG_SECONDS,
    clean_environment,
    process_gone,
    process_state,
    uffdprefetch,
    wait_until,
)
from figures import contradictions
from paths import PROGRAMS, SUPPORT

from uffdprefetch.base.rundir import runtime_directory, socket_path
from uffdprefetch.native.preload import preload_object
from uffdprefetch.protocol import leftovers
from uffdprefetch.protocol.snapshot import Snapshot
from uffdprefetch.view.watch import NOBODY, WatchClient

#: A test that runs once for each engine (harness_fixtures.py).
both_engines = pytest.mark.usefixtures("engine")
MIB = 1 << 20
OPTIONS = ("-q", "-f", "-o", "run", "--min-size", "1MiB")
#: Small files and dense checkpoints: every mechanism in a second. The policy that lays them, unless
#: the test, or its fixture ``auto``, says another.
CHECKPOINTS = ("--policy", "fixed", "--size", "1MiB", "--distance", "1MiB")
#: A test that runs under the default policy.
auto = pytest.mark.usefixtures("auto")


def write_records(path: Path, size_bytes: int, seed: int = 1) -> str:
    """Fill a file with bytes that repeat nowhere; returns their SHA-256."""
    sha, source = hashlib.sha256(), random.Random(seed)
    with open(path, "wb") as file:
        left = size_bytes
        while left:
            piece = source.randbytes(min(left, MIB))
            sha.update(piece)
            file.write(piece)
            left -= len(piece)
    return sha.hexdigest()


def file_digest(path: Path | str) -> str:
    """SHA-256 of the bytes that read(2) gives: what a plain mapping shows."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


#: What the agent says that it is doing, by the number of csrc/common/wire.h (enum up_agent_state).
AGENT_STATES = ("idle", "resolving", "laying", "rearming", "detaching")


def python(code: str, *args: object) -> list[str]:
    """The command line of a job. ``-S``: no site-packages, so it starts in 15 ms."""
    text = "from inside import *\n" + textwrap.dedent(code)
    return [sys.executable, "-S", "-c", text, *map(str, args)]


def service_socket(env: dict[str, str]) -> str:
    return socket_path(runtime_directory(env), env["UFFDPREFETCH_RUN"])


def connect(env: dict[str, str]) -> socket.socket:
    """A connection to the job's service that has said nothing yet."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(HANG_SECONDS)
    try:
        peer.connect(service_socket(env))
    except BaseException:
        peer.close()
        raise
    return peer


def listener(env: dict[str, str]) -> int | None:
    """The process that listens, by the kernel's word; None, too, while it does not answer yet."""
    if leftovers.is_starting(service_socket(env)):
        return None
    with contextlib.suppress(OSError), connect(env) as peer:
        data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("iII", data)[0])
    return None


def service_pid(env: dict[str, str]) -> int:
    """Who listens; waits until somebody does."""
    found = []

    def look() -> bool:
        pid = listener(env)
        found.extend([pid] if pid is not None else [])
        return bool(found)

    wait_until(look, "a service that listens")
    return found[0]


def snapshot(env: dict[str, str], path: str = "") -> Snapshot:
    """The run as its service tells of it, however long that takes beside a busy machine. ``path``:
    of its socket, where that is not a service of this process's control group."""
    path, end = path or service_socket(env), time.monotonic() + HANG_SECONDS
    with contextlib.closing(WatchClient.connect(path, NOBODY, end)) as client:
        return client.snapshot(HANG_SECONDS)


def has_seen(env: dict[str, str], at_bytes: int) -> bool:
    """Whether the run's service knows that a reader has come as far as this in its file."""
    return any((rank.position_bytes or 0) >= at_bytes for rank in snapshot(env).ranks)


#: The service's log, opened with the first warning, and what a comparison under way has open: so
#: many descriptors more than before are no leak. One that leaks each time is found by the fourth.
OWN_DESCRIPTORS = 3


def memfd_bytes(pid: int) -> int:
    """Memory in the pool's memfds, as the kernel counts it."""
    total = 0
    seen = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "uffdprefetch-checkpoints" in os.readlink(fd):
                status = fd.stat()
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
    return total


def fd_count(pid: int) -> int:
    """Open descriptors but those by which a service looks at threads that live: it has as many of
    them as there is to see, and begins with them when it first looks."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # listed, and closed meanwhile
            seen = _OF_THREADS.match(os.readlink(fd))
            count += seen is None or not Path(seen[0]).exists()
    return count


_OF_THREADS = re.compile(r"/proc/\d+(?=/task\b|/io$)")


def rss_bytes(pid: int | str) -> int:
    """Resident memory that is the process's own: shared file pages come and go by themselves."""
    fields = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) * 1024


@dataclass(frozen=True)
class Records:
    """A file of records and the digest that every reader of it must find."""

    path: Path
    digest: str
    size_bytes: int


@dataclass
class Finished:
    """A job that has ended."""

    status: int  # as Popen.returncode
    lines: list[dict[str, Any]]  # what it said and nobody took
    stderr: str
    summary: dict[str, Any] | None

    def good(self) -> Finished:
        """Assert that it ended with status 0 and complained of nothing; returns itself."""
        assert self.status == 0, self.stderr
        assert not any("error" in line for line in self.lines), self.lines
        return self


@dataclass
class Job:
    """A program under wrap. ``env`` is what its wrap was started with."""

    process: subprocess.Popen[bytes]
    env: dict[str, str]
    cwd: Path
    _buffer: bytes = b""
    _err: Path = field(default_factory=Path)
    _service: int = 0

    def _read(self) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        ready, _, _ = select.select([fd], [], [], HANG_SECONDS)
        if not ready:
            pytest.fail(f"the job says nothing for {HANG_SECONDS:.0f} s; {self.errors()}")
        return os.read(fd, 65536)

    def errors(self) -> str:
        """Its stderr until now."""
        return self._err.read_text(errors="replace")

    def line(self) -> dict[str, Any]:
        """The next JSON line that it says."""
        while b"\n" not in self._buffer:
            more = self._read()
            if not more:
                pytest.fail(f"the job ended without a word; {self.errors()}")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\n")
        said = json.loads(text)
        if "error" in said:
            pytest.fail(f"the job: {said['error']}; {self.errors()}")
        return dict(said)

    def taken(self) -> bytes:
        """What has been read of its stdout after the last line()."""
        data, self._buffer = self._buffer, b""
        return data

    def tell(self, word: str = "go") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def service(self) -> int:
        """The pid of its service. Asked for once: asking is a connection, which counts there."""
        if not self._service or process_gone(self._service):
            self._service = service_pid(self.env)
        return self._service

    def kill_service(self, number: int = signal.SIGKILL) -> int:
        """Send the service a signal. On return it is gone after SIGKILL, stands after SIGSTOP."""
        pid = self.service()
        os.kill(pid, number)
        if number == signal.SIGKILL:
            wait_until(lambda: process_gone(pid), "the service's death")
        elif number == signal.SIGSTOP:
            wait_until(lambda: process_state(pid) == "T", "the stop")
        return pid

    @contextlib.contextmanager
    def stopped_service(self) -> Iterator[int]:
        """Its service stands still meanwhile: its pid."""
        pid = self.kill_service(signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)

    def finish(self) -> Finished:
        """Let it run to its end; its summary must not contradict itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        while more := self._read():
            self._buffer += more
        self.process.wait(HANG_SECONDS)
        lines = [json.loads(text) for text in self._buffer.splitlines()]
        path = self.cwd / "run.summary.json"
        summary = json.loads(path.read_text()) if path.exists() else None
        found = [] if summary is None else contradictions(summary)
        assert found == [], (found, summary)
        return Finished(self.process.returncode, lines, self.errors(), summary)


Start = Callable[..., Job]


@contextlib.contextmanager
def jobs(env: dict[str, str], cwd: Path) -> Iterator[Start]:
    """A function that starts jobs; they and their services are gone when the block is left.

    start(words, options=(), wrap=True, **variables): ``words`` is a command line (harness.python
    makes one), ``wrap=False`` runs it plainly. With the cache engine they have CHECKPOINTS.
    """
    started: list[Job] = []
    env.setdefault("UFFDPREFETCH_RUN", "test")

    def start(
        words: list[str],
        options: tuple[str, ...] = (),
        wrap: bool = True,
        before: tuple[str, ...] = (),
        **variables: str,
    ) -> Job:
        environment = {**env, **variables}
        paths = [str(SUPPORT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        if wrap:
            pooled = "pool" in (environment.get("UFFDPREFETCH_ENGINE"), *options)
            chosen = "--policy" in options or "UFFDPREFETCH_POLICY" in environment
            laid = () if pooled or chosen else CHECKPOINTS
            words = uffdprefetch("wrap", *OPTIONS, *laid, *options, "--", *words)
        errors = cwd / f"job{len(started)}.stderr"
        with open(errors, "wb") as err:
            process = subprocess.Popen(
                [*before, *words], env=environment, cwd=cwd, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=err, start_new_session=True,
            )  # fmt: skip
        job = Job(process, environment, cwd, _err=errors)
        started.append(job)
        return job

    try:
        yield start
    finally:
        for job in started:
            _clean_up(job)


def _clean_up(job: Job) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)  # the wrap and the job: one session
    job.process.wait()
    for stream in (job.process.stdin, job.process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(OSError, Exception):
        with connect(job.env) as peer:
            data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        os.kill(struct.unpack("iII", data)[0], signal.SIGKILL)


def programs(directory: Path, name: str, *flags: str) -> str:
    """Compile tests/programs/NAME.c with cc: the path of the program."""
    out = directory / name
    if not out.exists():
        source = PROGRAMS / f"{name}.c"
        words = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
        subprocess.run([*words, str(source), "-o", str(out)], check=True)
    return str(out)


def settle(sample: Callable[[], int], what: str) -> int:
    """Wait until a count reads the same ten times in a row; returns it."""
    last = [sample()]

    def same() -> bool:
        now = sample()
        last[:] = [*last, now] if now == last[-1] else [now]
        time.sleep(0.01)
        return len(last) >= 10

    wait_until(same, f"{what} to settle")
    return last[-1]


def hammered(tmp_path: Path) -> dict[str, str]:
    """The environment of a job whose agent talks to the hammer."""
    return {
        **clean_environment(), "LD_PRELOAD": preload_object(),
        "UFFDPREFETCH_SOCKET": str(tmp_path / "s"), "UFFDPREFETCH_MIN_SIZE": "16384",
        "UFFDPREFETCH_LISTEN": "16384", "UFFDPREFETCH_TEST_PATIENCE": "1000",
    }  # fmt: skip
