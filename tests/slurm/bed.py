# SPDX-License-Identifier: Apache-2.0
"""A Slurm of several nodes on this machine, by the program that UFFDPREFETCH_SLURMBED names.

The program is no part of this project. It understands ``--dir DIR up N --proctrack PLUGIN``,
``--dir DIR env`` (for the shell: SLURM_CONF) and ``--dir DIR down``. Its nodes have host names and
control groups of their own and share processes and files, so what is left shows from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from uffdprefetch.formats.cache import DIRECTORY

VARIABLE = "UFFDPREFETCH_SLURMBED"
#: How Slurm finds the processes of a step, and so whom it signals and kills.
TRACKINGS = ("cgroup", "linuxproc", "pgid")
HANG_SECONDS = 60.0
#: Adopts what the daemons and jobs leave, as init does on a node, and takes their statuses: Slurm
#: waits for processes that are dead and not reaped, and the tests' runner adopts them otherwise.
KEEPER = """
import ctypes, os, subprocess, sys, threading, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
done = subprocess.run(sys.argv[1:], capture_output=True, text=True, stdin=subprocess.DEVNULL)
sys.stderr.write(done.stderr)
print(done.returncode, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
READER = """
import mmap, os, signal, sys
path, ready, go, ignored = sys.argv[1:5]
got = []
def note(number, frame):
    got.append(signal.Signals(number).name)
    with open(ready + ".signals", "a") as file:
        file.write(got[-1] + "\\n")
names = ["SIGUSR1", "SIGUSR2", "SIGHUP"] + [name for name in ignored.split(",") if name]
for name in names:
    signal.signal(getattr(signal, name), note)
fd = os.open(path, os.O_RDONLY)
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
total = sum(m[at] for at in range(0, len(m) // 4, 4096))
with open(ready, "w") as file:
    file.write(os.environ.get("UFFDPREFETCH_SOCKET", "none"))
os.close(os.open(go, os.O_RDONLY))  # a fifo: until the test opens it
print(sum(m[at] for at in range(0, len(m), 4096)))
"""


class Bed:
    """A Slurm that runs, and jobs in it. ``program``: the command line of uffdprefetch."""

    def __init__(self, directory: Path, tracking: str, program: list[str]) -> None:
        self._bed = [os.environ[VARIABLE], "--dir", str(directory / "bed")]
        self.directory = directory
        self.run_directory = directory / "hub"
        self.tracking = tracking
        self._program = program
        self._count = 0
        self.environment = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "UFFDPREFETCH_"))
        }  # fmt: skip
        self.environment["UFFDPREFETCH_RUNDIR"] = str(self.run_directory)
        self.data = directory / "records.bin"
        self.data.write_bytes(os.urandom(16 << 20))
        (directory / "reader.py").write_text(READER)

    def up(self, nodes: int) -> None:
        """Start it. Raises RuntimeError with what it said."""
        words = [*self._bed, "up", str(nodes), "--proctrack", self.tracking]
        log = self.directory / "up.log"
        with open(log, "wb") as err:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", KEEPER, *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
            )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline().strip() != b"0":
            self._keeper.kill()
            raise RuntimeError(f"up: {log.read_text().strip()[-2000:]}")
        text = self._call("env")
        self.environment["SLURM_CONF"] = text.partition("SLURM_CONF=")[2].strip()

    def down(self) -> None:
        """End it and what it left."""
        self._call("down")
        self._keeper.communicate(timeout=HANG_SECONDS)

    def _call(self, *words: str) -> str:
        done = subprocess.run(
            [*self._bed, *words], capture_output=True, text=True, timeout=HANG_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words[0]}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def slurm(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command to its end. Raises RuntimeError when that does not come."""
        try:
            return subprocess.run(
                words, env=self.environment, capture_output=True, text=True,
                timeout=HANG_SECONDS, cwd=self.directory, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{words[0]} hangs: {self._how_it_is()}") from None

    def _how_it_is(self) -> str:
        text = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T %E"], env=self.environment, capture_output=True,
            text=True, timeout=HANG_SECONDS,
        ).stdout  # fmt: skip
        for log in sorted((self.directory / "bed").glob("**/slurm*.log")):
            text += f"--- {log.parent.name}/{log.name}\n" + log.read_text()[-2000:]
        return text

    def wrap(self, *words: str, options: tuple[str, ...] = ()) -> list[str]:
        """The command line of a wrapped program."""
        name = str(self.directory / "out.%h.%r")
        own = ("wrap", "-q", "-f", "-o", name, "--min-size", "1MiB")
        return [*self._program, *own, *options, "--", *words]

    def start(
        self, nodes: int = 2, tasks: int = 2, srun: tuple[str, ...] = (), ignored: str = "",
        **environment: str,
    ) -> Step:  # fmt: skip
        """A step of wrapped readers that have read a quarter and wait for go()."""
        self._count += 1
        step = Step(self, self.directory / f"step{self._count}", tasks)
        step.start([*srun, f"-N{nodes}", f"-n{tasks}"], ignored, environment)
        return step

    def left(self) -> list[str]:
        """The names in the run directory, but that of the indices that later runs find there."""
        if not self.run_directory.exists():
            return []
        return sorted(name for name in os.listdir(self.run_directory) if name != DIRECTORY)

    def processes(self) -> list[int]:
        """Processes that have anything to do with our run directory."""
        found = []
        mark = str(self.run_directory).encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(name) == os.getpid():
                    continue
                text = Path(f"/proc/{name}/cmdline").read_bytes()
                text += Path(f"/proc/{name}/environ").read_bytes()
                if mark in text and Path(f"/proc/{name}/comm").read_text() != "srun\n":
                    found.append(int(name))
        return found


class Step:
    """A step under Slurm; used by tests and by the table."""

    def __init__(self, bed: Bed, directory: Path, tasks: int) -> None:
        directory.mkdir()
        self._bed = bed
        self.directory = directory
        self._tasks = tasks
        os.mkfifo(directory / "go")

    def start(self, srun: list[str], ignored: str, environment: dict[str, str]) -> None:
        """Start it and wait until all of its readers are ready. Raises RuntimeError."""
        script = 'exec "$0" "$1" "$2" "$3/ready.$SLURM_PROCID" "$3/go" "$4"'
        reader = [sys.executable, str(self._bed.directory / "reader.py"), str(self._bed.data)]
        words = ["sh", "-c", script, *reader, str(self.directory), ignored]
        self.process = subprocess.Popen(
            ["srun", *srun, *self._bed.wrap(*words)],
            env={**self._bed.environment, **environment}, cwd=self.directory,
            stdin=subprocess.DEVNULL, stdout=open(self.directory / "out", "wb"),
            stderr=open(self.directory / "err", "wb"),
        )  # fmt: skip
        end = time.monotonic() + HANG_SECONDS
        while any(not self.ready(i).exists() or not self.ready(i).read_text() for i in self.ranks):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the step does not start: {self.errors()}")
            time.sleep(0.02)

    @property
    def ranks(self) -> range:
        return range(self._tasks)

    def ready(self, rank: int) -> Path:
        """What a reader writes when it waits: the path of its service's socket."""
        return self.directory / f"ready.{rank}"

    def sockets(self) -> list[str]:
        """Each rank's service."""
        return [self.ready(i).read_text() for i in self.ranks]

    def signals(self, rank: int) -> list[str]:
        """The signals that a reader has got."""
        path = Path(f"{self.ready(rank)}.signals")
        return path.read_text().split() if path.exists() else []

    def errors(self) -> str:
        """What it said on stderr."""
        return (self.directory / "err").read_text()

    def job(self) -> str:
        """The number of its job. Raises RuntimeError."""
        text = self._bed.slurm("squeue", "-h", "-o", "%A").stdout
        found = re.findall(r"\d+", text)
        if len(found) != 1:
            raise RuntimeError(f"which job? {text!r}")
        return found[0]

    def signal(self, name: str, of_step: bool = True) -> None:
        """scancel -s NAME, to the step or to the whole job."""
        job = self.job()
        self._bed.slurm("scancel", "-s", name, f"{job}.0" if of_step else job)

    def cancel(self) -> None:
        """scancel JOB: SIGCONT, SIGTERM and, after KillWait, SIGKILL."""
        self._bed.slurm("scancel", self.job())

    def go(self) -> None:
        """Let the readers end."""
        self._go = os.open(self.directory / "go", os.O_RDWR)

    def wait(self) -> int:
        """srun's exit status."""
        return self.process.wait(HANG_SECONDS)

    def end(self) -> None:
        """However it stands."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


@contextlib.contextmanager
def running(directory: Path, tracking: str, program: list[str], nodes: int = 2) -> Iterator[Bed]:
    """A bed that is ended when the block is left. Raises RuntimeError when it does not start."""
    bed = Bed(directory, tracking, program)
    bed.up(nodes)
    try:
        yield bed
    finally:
        bed.down()
