# SPDX-License-Identifier: Apache-2.0
"""Jobs that read by read(2), pread(2) and many small files, while whoever watches them is killed or
stopped at any moment, or loses what it is told, and while names become something else: they read
what they read without us, nothing is opened that is no regular file, and nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from components import on_memory
from conftest import HANG_SECONDS, process_gone, require, wait_until
from harness import MIB, Job, Start, python, write_records

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: Moments of each kind: `make test` has the few, `make test-all` 200 of all kinds.
FEW = {"killed": 3, "stopped": 8, "launcher": 2}
MANY = {"killed": 80, "stopped": 100, "launcher": 20}
#: Of the moments at which a service is stopped so many are in one run.
STOPS = 8
#: Of the job.
PARTS = 5
#: As a queue of opens is in Linux: fs.fanotify.max_queued_events.
QUEUE = 16384
STATUS = 5

PREAD = """
import hashlib, os, sys, threading
file = os.open(sys.argv[1], os.O_RDONLY)
part = os.fstat(file).st_size // 2
found = [b"", b""]
def read(number):
    sha = hashlib.sha256()
    for at in range(number * part, number * part + part, 65536):
        sha.update(os.pread(file, 65536, at))
    found[number] = sha.digest()
threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(hashlib.sha256(b"".join(found)).hexdigest(), os.listdir("/proc/self/fd"))
"""
LISTED = """
import hashlib, os, stat, sys, time
sha = hashlib.sha256()
for path in open(sys.argv[1]).read().split():
    if "odd" in path:
        continue
    with open(path, "rb") as file:
        sha.update(file.read())
    time.sleep(float(sys.argv[2]))
print(sha.hexdigest())
"""
#: One job that reads in each of the ways at once, and then says what each has read.
JOB = f"""
cd "$1" || exit 1
echo begun
dd if=read.bin bs=64k status=none | sha256sum > "$2/read" &
"$3" -S -c '{PREAD}' pread.bin > "$2/pread" &
find walked -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum | sha256sum > "$2/walked" &
tar cf - packed | sha256sum > "$2/packed" &
"$3" -S -c '{LISTED}' "$4" 0 > "$2/listed" &
wait
cat "$2"/*
exit {STATUS}
"""


@dataclass
class Scene:
    """``plan``: the files that the job reads in an order of their own; ``pipes``: FIFOs that lie
    among them, and among those that it walks over."""

    bed: SlowBed
    plan: Path
    pipes: list[Path]
    plain: bytes = b""
    seconds: float = 0.0

    def words(self, to: Path) -> list[str]:
        to.mkdir(exist_ok=True)
        return ["sh", "-c", JOB, "sh", str(self.bed.path(".")), str(to), sys.executable,
                str(self.plan)]  # fmt: skip

    def begin(self, to: Path) -> None:
        """As it was."""
        for path in to.iterdir() if to.exists() else ():
            path.unlink()
        self.cold()

    def cold(self) -> None:
        for path in self.bed.path(".").rglob("*"):
            if path.is_file():
                drop_cache(path)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    require(why_no_bed() is None, why_no_bed() or "")
    source, chance = tmp_path_factory.mktemp("faults"), random.Random(1)
    write_records(source / "read.bin", 12 * MIB, 2)
    write_records(source / "pread.bin", 8 * MIB, 3)
    for tree in ("walked", "packed", "listed"):
        for number in range(150):
            path = source / tree / f"c{number % 3}" / f"{chance.getrandbits(32):08x}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chance.randbytes(chance.randrange(4_000, 20_000)))
        for name in ("0odd.jpg", "7odd.jpg"):
            os.mkfifo(source / tree / "c1" / name)
            os.symlink(f"../c1/{name}", source / tree / "c2" / name)
            (source / tree / "c0" / name).mkdir()
    with SlowBed(source, bandwidth=100_000_000, latency_us=2000) as bed:
        listed = sorted(bed.path("listed").glob("*/*"))
        chance.shuffle(listed)
        plan = tmp_path_factory.mktemp("plan") / "files.txt"
        plan.write_text("\n".join(map(str, listed)))
        pipes = [path for path in bed.path(".").rglob("c1/*odd.jpg")]
        yield Scene(bed, plan, pipes)


@pytest.fixture
def plain(scene: Scene, job: Start, tmp_path: Path) -> Scene:
    """What the job says without us; and how long it takes with us, from its first word."""
    if not scene.plain:
        scene.cold()
        work = job(scene.words(tmp_path / "plain"), wrap=False)
        scene.plain = said(work)
        assert work.process.wait(HANG_SECONDS) == STATUS, work.errors()
        assert scene.plain.count(b"\n") == 6
        trial = Trial(scene, job, tmp_path)
        began = time.monotonic()
        trial.check()
        scene.seconds = trial.said_at - began
        reads = json.loads((tmp_path / "run.summary.json").read_text())["reads"]
        # else nothing is to be broken here
        assert reads["read_bytes"] > 0 and reads["small_files"]["used"] > 0, reads
    return scene


def said(work: Job) -> bytes:
    """All that a job prints, to its end."""
    assert work.process.stdout is not None
    return work.process.stdout.read()


@contextlib.contextmanager
def nobody_opens(pipes: list[Path]) -> Iterator[None]:
    """Whoever opens a FIFO to read, for however short, lets a writer go that waits for a reader."""
    opened: list[Path] = []

    def wait(path: Path) -> None:
        fd = os.open(path, os.O_WRONLY)
        opened.append(path)
        os.close(fd)

    threads = [threading.Thread(target=wait, args=(path,)) for path in pipes]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        early = list(opened)
        for path, thread in zip(pipes, threads, strict=True):
            while thread.is_alive():
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                thread.join(0.01)
    assert not early, "a FIFO was opened"


class Trial:
    """One run of the job under `wrap`, which something befalls."""

    def __init__(self, scene: Scene, job: Start, cwd: Path) -> None:
        self._scene, self.rundir, self.said_at = scene, cwd / "hub", 0.0
        scene.begin(cwd / "said")
        options = ("--strict", "--policy", "auto", "--plan", str(scene.plan))
        self.work = job(scene.words(cwd / "said"), options=options)
        first = b""
        assert self.work.process.stdout is not None
        while not first.endswith(b"begun\n"):
            more = os.read(self.work.process.stdout.fileno(), 6)
            assert more, self.work.errors()
            first += more
        self.service = self.work.service()

    def check(self, status: int | None = STATUS) -> None:
        """``status``: None, where nobody is left to tell it."""
        out = b"begun\n" + said(self.work)
        self.said_at = time.monotonic()
        ended = self.work.process.wait(HANG_SECONDS)
        assert out == self._scene.plain, self.work.errors()
        assert status is None or ended == status, self.work.errors()
        wait_until(lambda: process_gone(self.service), "the service's end")
        wait_until(
            lambda: not self.left(), lambda: f"the end of {self.left()} {self.work.errors()}"
        )

    @property
    def has_said_all(self) -> bool:
        """Whether all parts of the job have ended."""
        said = list((self.work.cwd / "said").iterdir())
        return len(said) == PARTS and all(path.stat().st_size for path in said)

    def kill(self) -> None:
        """The service, as long as its job runs: it stays for another one, and what it leaves then
        is removed by the next service."""
        if not self.has_said_all:
            os.kill(self.service, signal.SIGKILL)

    def left(self) -> list[str]:
        """Of the run, in the runtime directory: but indices of files, which are kept."""
        return [name for name in os.listdir(self.rundir) if name != "index"]


def killed(trial: Trial, moments: list[float], chance: random.Random) -> None:
    """The service, at a moment."""
    (moment,) = moments
    time.sleep(moment)
    with contextlib.suppress(ProcessLookupError):  # the job is over
        trial.kill()
    trial.check()


def stopped(trial: Trial, moments: list[float], chance: random.Random) -> None:
    """The service, for some time at each of the moments; at the last one until the job has ended,
    or until it is killed."""
    at = 0.0
    for moment in sorted(moments):
        time.sleep(moment - at)
        at = moment
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.service, signal.SIGSTOP)
            if moment < max(moments):
                time.sleep(chance.uniform(0, 0.05))
                os.kill(trial.service, signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):
        if chance.random() < 0.5:
            trial.kill()
        else:
            wait_until(lambda: trial.has_said_all, "the end of the job's parts")
        os.kill(trial.service, signal.SIGCONT)
    trial.check()


def launcher(trial: Trial, moments: list[float], chance: random.Random) -> None:
    """The launcher is killed; its job reads on, and the service ends with that."""
    (moment,) = moments
    time.sleep(moment)
    trial.work.process.kill()
    trial.check(None)


@pytest.mark.limit_seconds(1800)
@pytest.mark.parametrize("often", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("what", [killed, stopped, launcher], ids=lambda what: what.__name__)
def test_a_job_reads_as_without_us_whenever_who_watches_it_dies_or_stands_still(
    plain: Scene,
    job: Start,
    tmp_path: Path,
    what: Callable[[Trial, list[float], random.Random], None],
    often: dict[str, int],
) -> None:
    seed = os.environ.get("UFFDPREFETCH_TEST_SEED") or str(time.time_ns())
    chance, left = random.Random(f"{seed} {what.__name__}"), often[what.__name__]
    print(f"reads: seed {seed}")  # shown if it fails
    while left > 0:
        number = min(left, STOPS) if what is stopped else 1
        left -= number
        moments = [chance.uniform(0, plain.seconds) for _ in range(number)]
        with nobody_opens(plain.pipes):
            what(Trial(plain, job, tmp_path), moments, chance)


# -------------------------------------------------------------- what is told is lost


def marks(pid: int) -> int:
    """Directories that a process watches."""
    count = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            lines = path.read_text().splitlines()
            count += sum(line.startswith(("fanotify ino:", "inotify wd:")) for line in lines)
    return count


def test_a_job_whose_opens_are_lost_reads_as_without_us(job: Start, tmp_path: Path) -> None:
    """More than the kernel keeps for a service that stands still."""
    require(not on_memory(tmp_path), "files in memory are not read; set TMPDIR")
    data = tmp_path / "data"
    data.mkdir()
    paths = [data / f"{number * 7919 % 100_003:06}" for number in range(QUEUE + 1000)]
    for path in paths:
        path.write_bytes(path.name.encode())
    for path in paths[:100]:
        drop_cache(path)
    plan = tmp_path / "files.txt"
    plan.write_text("\n".join(map(str, paths)))
    code = """
    from hashlib import sha256
    paths = open(sys.argv[1]).read().split()
    sha = sha256()
    for part in (paths[:400], paths[400:-300], paths[-300:]):
        hear()
        for path in part:
            sha.update(open(path, "rb").read())
        say(digest=sha.hexdigest())
    """
    work = job(python(code, plan), options=("--strict", "--policy", "auto", "--plan", str(plan)))
    wait_until(lambda: resident_bytes(paths[60]), "the first files to be read ahead")
    assert marks(work.service()), "no opens are told of"
    work.tell()
    sha = hashlib.sha256(b"".join(path.name.encode() for path in paths[:400]))
    assert work.line() == {"digest": sha.hexdigest()}
    with work.stopped_service():
        work.tell()
        sha.update(b"".join(path.name.encode() for path in paths[400:-300]))
        assert work.line() == {"digest": sha.hexdigest()}
    work.tell()
    sha.update(b"".join(path.name.encode() for path in paths[-300:]))
    assert work.line() == {"digest": sha.hexdigest()}
    summary = work.finish().good().summary
    assert summary is not None
    small = summary["reads"]["small_files"]
    assert small["read"] > 0, small


# -------------------------------------------------------------- names become something else


def _kind(path: Path) -> int:
    """Of what is there; 0: nothing is."""
    return stat.S_IFMT(path.lstat().st_mode) if os.path.lexists(path) else 0


class Swapper:
    """Makes of some names one thing after the other, as fast as it can."""

    def __init__(self, names: list[Path], aside: Path, pipes: list[Path]) -> None:
        self._names, self._new, self._pipes = names, aside / "new", pipes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.changes = 0

    def _forms(self) -> Iterator[Callable[[], None]]:
        new = self._new
        yield lambda: os.link(self._pipes[0], new)
        yield lambda: None  # nothing is there
        yield lambda: os.symlink(self._pipes[1], new)
        yield lambda: new.write_bytes(b"x" * 100_000)
        yield lambda: os.symlink(new.name, new)
        yield new.mkdir
        yield lambda: new.write_bytes(b"")
        if os.geteuid() == 0:
            yield lambda: os.mknod(new, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
            yield lambda: os.symlink("/dev/zero", new)
        yield lambda: os.mknod(new, stat.S_IFSOCK | 0o600)

    def _run(self) -> None:
        forms = list(self._forms())
        while not self._ended.is_set():
            for number, name in enumerate(self._names):
                forms[(self.changes + number) % len(forms)]()
                there, new = _kind(name), _kind(self._new)
                if there == stat.S_IFDIR:
                    name.rmdir()
                elif there and new in (0, stat.S_IFDIR):
                    name.unlink()
                if new:
                    os.rename(self._new, name)
                if new == stat.S_IFREG:
                    os.truncate(name, 10)
            self.changes += 1

    def __enter__(self) -> Swapper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_of_names_that_become_something_else_only_regular_files_are_opened(
    job: Start, tmp_path: Path
) -> None:
    """Every fourth name of an order that is known, while it is read ahead."""
    require(not on_memory(tmp_path), "files in memory are not read; set TMPDIR")
    data, aside = tmp_path / "data", tmp_path / "aside"
    aside.mkdir()
    pipes = [aside / "pipe0", aside / "pipe1"]
    for pipe in pipes:
        os.mkfifo(pipe)
    paths = [
        data / str(number % 3) / f"{number}{'odd' * (not number % 4)}" for number in range(1200)
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 1000)
    plan = tmp_path / "files.txt"
    plan.write_text("\n".join(map(str, paths)))
    steady = [path for path in paths if "odd" not in path.name]
    sha = hashlib.sha256(b"".join(path.read_bytes() for path in steady))
    odd = [path for path in paths if "odd" in path.name]
    for path in paths:
        drop_cache(path)
    options = ("--strict", "--policy", "auto", "--plan", str(plan))
    with nobody_opens(pipes), Swapper(odd, aside, pipes) as swapper:
        work = job(python(f"hear(){LISTED}", plan, "0.002"), options=options)
        service = work.service()
        # one of those that are asked for at once: to look at it is to open it, which counts
        wait_until(lambda: resident_bytes(steady[30]), "the first files to be read ahead")
        work.tell()
        out = said(work)
        assert work.process.wait(HANG_SECONDS) == 0, work.errors()
    assert out.decode().strip() == sha.hexdigest()
    assert swapper.changes > 0
    wait_until(lambda: process_gone(service), "its end")
    summary = json.loads((tmp_path / "run.summary.json").read_text())
    assert not summary["service"].get("died") and not summary["degradations"]
    small = summary["reads"]["small_files"]
    assert small["read"] + small["there"] > len(steady) // 2, small
