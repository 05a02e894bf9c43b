# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch calibrate`: intervals and budgets by themselves, curves on the slow bed.

No time is asserted. What is: what the bed cannot exceed, whatever the machine does.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tomllib
from components import on_memory
from conftest import require, warnings_fail
from suite import own_name

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cli import calibrate, main, simulate
from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native.uffd import resident_bytes
from uffdprefetch.sim.measure import network, scratch
from uffdprefetch.sim.measure.bounds import RUNS_MAX, RUNS_MIN, Budget, repeat
from uffdprefetch.sim.measure.intervals import median, ranks
from uffdprefetch.sim.measure.reads import ReadBenchmark
from uffdprefetch.sim.scenario import load

if TYPE_CHECKING:
    from uffdprefetch.cli.parser import CommandProtocol

pytestmark = warnings_fail

FILE_BYTES = 32 << 20
MB = 1e6


# ---- intervals ----------------------------------------------------------------------------------


def test_the_papers_ten_runs_give_the_second_and_the_ninth() -> None:
    assert ranks(10) == (2, 9)  # section 5.1
    assert ranks(5) is None and ranks(6) == (1, 6) and ranks(1) is None
    # Le Boudec's table for the median, 95 %.
    assert [ranks(n) for n in (20, 30, 70)] == [(6, 15), (10, 21), (27, 44)]


def test_ranks_are_the_closest_that_cover_enough() -> None:
    for n in range(6, 120):
        pair = ranks(n)
        assert pair is not None
        j, k = pair

        def covered(low: int, high: int, n: int = n) -> float:
            return sum(math.comb(n, i) for i in range(low, high)) / 2**n

        assert j + k == n + 1 and covered(j, k) >= 0.95 - 1e-12
        if k - j > 2:
            assert covered(j + 1, k - 1) < 0.95


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(4)
    inside = 0
    for _ in range(600):
        found = median(random.lognormal(size=15).tolist())
        assert found.low is not None and found.high is not None
        inside += found.low <= 1.0 <= found.high
    assert 0.93 <= inside / 600 <= 1.0


def test_too_few_values_have_no_interval() -> None:
    found = median([3.0, 1.0, 2.0])
    assert (found.value, found.low, found.high, found.n) == (2.0, None, None, 3)
    assert found.half_width == math.inf
    assert median([1.0, 2.0]).value == 1.5


# ---- budgets ------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_point_ends_when_it_is_known_well_or_its_part_is_over() -> None:
    clock = Clock()
    budget = Budget(100.0, 1 << 40, clock)
    runs = []

    def steady() -> float:
        clock.now += 1
        runs.append(0)
        return 50.0

    found = repeat(steady, budget, 2)
    assert found is not None and found.n == RUNS_MIN == len(runs)
    values = iter(np.linspace(1, 100, 1000))

    def wild() -> float:
        clock.now += 1
        return float(next(values))

    found = repeat(wild, budget, 4)  # a quarter of 94 s
    assert found is not None and found.n == 24
    clock.now = 0
    found = repeat(lambda: float(next(values)), Budget(1e9, 1, clock), 1)
    assert found is not None and found.n == RUNS_MAX


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty directory whose files can leave the page cache, as those in tmpfs cannot."""
    where = "/var/tmp" if on_memory(tmp_path) else tmp_path
    with tempfile.TemporaryDirectory(prefix=own_name(""), dir=where) as made:
        require(not on_memory(made), f"{made} is in memory")
        yield Path(made)


def test_nothing_is_read_beyond_the_budget(disk: Path) -> None:
    path = disk / "data"
    path.write_bytes(os.urandom(1 << 20))
    budget = Budget(60.0, 3 << 16)
    with ReadBenchmark(str(path)) as reader:
        reader.run(1, 4096, budget)
        left = budget.size_bytes
        assert left == (3 << 16) - 4 * 4096
        assert reader.run(4, 65536, budget) is None and budget.size_bytes == left
        assert reader.run(64, 65536, Budget(60.0, 1 << 40)) is None  # the file is too small
    assert repeat(lambda: None, budget, 1) is None
    # A point whose part of the time is over is measured once.
    late = repeat(lambda: 7.0, Budget(0.0, 1), 1)
    assert late is not None and (late.value, late.n) == (7.0, 1)


# ---- the bed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowBed]:
    require(why_no_bed() is None, str(why_no_bed()))
    store = tmp_path_factory.mktemp("store", numbered=True)
    (store / "data").write_bytes(os.urandom(FILE_BYTES))
    with SlowBed(store, bandwidth=40_000_000, latency_us=1000) as made:
        yield made


def calibrated(bed: SlowBed, out: Path, *options: str) -> dict[str, Any]:
    """The scenario file of a short calibration, which must also be one that can be loaded."""
    words = [
        "calibrate",
        str(bed.path("data")),
        "-o",
        str(out),
        "-f",
        "--seconds",
        "6",
        "--threads",
        "1,8",
        "--requests",
        "4KiB,256KiB",
        *options,
    ]
    assert main(words) == 0
    assert load(str(out)).system.N == 1
    return tomllib.loads(out.read_text())


def rate(text: str) -> float:
    return float(re.match(r"[0-9.e+]+", text).group())  # type: ignore[union-attr]


def curve(found: dict[str, Any], request: int) -> dict[int, float]:
    return {int(k): rate(v) for k, v in found["measured"]["file_system"][str(request)].items()}


def test_curves_move_with_the_beds_bandwidth_and_latency(bed: SlowBed, tmp_path: Path) -> None:
    out = tmp_path / "s.toml"
    bed.set(bandwidth=40_000_000, latency_us=1000)
    slow = calibrated(bed, out)
    bed.set(bandwidth=400_000_000, latency_us=1000)
    fast = calibrated(bed, out)
    bed.set(bandwidth=400_000_000, latency_us=20_000)
    late = calibrated(bed, out)
    # A pipe of 40 MB/s delivers no more, one of 400 does; nor can one thread of 4 KiB requests
    # with 20 ms each have more than 0.2 MB/s, and eight more than eight times that.
    assert curve(slow, 256 << 10)[8] <= 41 < curve(fast, 256 << 10)[8]
    assert curve(late, 4096)[1] <= 4096 / MB / 0.020 * 1.01 < curve(fast, 4096)[1]
    assert curve(late, 4096)[8] <= 8 * 4096 / MB / 0.020 * 1.01
    assert curve(late, 4096)[8] > 2 * curve(late, 4096)[1]
    # The scenario's curves are these: a node with p_0 threads, which share it, and with one.
    assert late["system"]["rates"] == "node"
    assert rate(late["system"]["t"]["1"]) == pytest.approx(curve(late, 256 << 10)[8], rel=0.01)
    assert rate(late["system"]["t_demand"]["1"]) == pytest.approx(
        curve(late, 256 << 10)[1], rel=0.01
    )
    # On one node its threads stand for other nodes'.
    assert set(late["system"]["t"]) == {"1"} and set(late["system"]["t_demand"]) == {"1", "8"}


def test_every_figure_has_its_interval_or_says_of_how_many_runs_it_is(
    bed: SlowBed, disk: Path
) -> None:
    bed.set(bandwidth=400_000_000, latency_us=1000)
    found = calibrated(bed, disk / "s.toml", "--local", str(disk))["measured"]
    said = [
        *found["file_system"]["4096"].values(),
        *found["memory"].values(),
        *found["disk"].values(),
    ]
    for text in said:
        match = re.fullmatch(r"(\S+)(?: \[(\S+), (\S+)\])? \(n=(\d+)\)", text)
        assert match is not None, text
        value, low, high, n = match.groups()
        assert (low is None) == (int(n) < 6)
        if low is not None:
            assert float(low) <= float(value) <= float(high)
    assert os.listdir(disk) == ["s.toml"]  # no test file of the local disk's


def test_cold_bytes_come_from_the_bed(bed: SlowBed, tmp_path: Path) -> None:
    bed.set(bandwidth=400_000_000, latency_us=0)
    budget = Budget(60, 1 << 40)
    bed.reset()
    with ReadBenchmark(str(bed.path("data"))) as reader:
        for _ in range(3):
            reader.run(4, 256 << 10, budget)
    assert bed.counters()["bytes"] >= (1 << 40) - budget.size_bytes


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["/nonexistent"], 2, "cannot read /nonexistent: No such file"),
        (["{tmp}/small", "--seconds", "0s"], 2, "more than 0"),
        (["{tmp}/fifo"], 2, "is no file: give one, or a directory"),
        (["{tmp}/small", "--prefetchers", "2000"], 2, "--prefetchers: from 1 to 1024"),
        (["{tmp}/small"], 1, "has 10 bytes, less than the"),
        (["{tmp}/small", "-o", "{tmp}/small"], 2, "small exists: -o another name, or -f"),
        (["{tmp}/small", "--threads", "0"], 2, "--threads 0: numbers from 1"),
        (["{tmp}/small", "--requests", "1000"], 2, "multiples of 4KiB"),
        (["{tmp}/small", "--compute", "0MB/s"], 2, "--compute 0MB/s: more than none"),
        (["{tmp}/large", "--bytes", "4KiB"], 1, "within --seconds and --bytes"),
        (["{tmp}/large", "-o", "{tmp}/no/file"], 2, "its directory cannot be written"),
        (["{tmp}/large", "-o", "{tmp}/folder", "-f"], 1, "cannot write"),
        (["{tmp}/large", "--local", "{tmp}/no"], 2, "/no: cannot be read"),
        (["{tmp}/large", "--local", "{tmp}/small"], 2, "/small: is no directory"),
        (["{tmp}/large", "--local", "/proc"], 1, "cannot make a test file in /proc: "),
        (["{tmp}/large", "--data", "{tmp}/no"], 2, "--data {tmp}/no: cannot be read"),
        (["{tmp}", "--file-size", "1PB"], 2, "are free: at most 90 % of that"),
        (["{tmp}/large", "--local", "{tmp}", "--file-size", "1PB"], 2, "--file-size: 909 TiB in"),
    ],
)
def test_what_cannot_be_is_one_line(
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(disk)
    (disk / "small").write_bytes(bytes(10))
    (disk / "folder").mkdir()
    os.mkfifo(disk / "fifo")
    (disk / "large").write_bytes(os.urandom(16 << 20))
    filled = [word.format(tmp=disk) for word in words]
    assert main(["calibrate", "--seconds", "1", *filled]) == status
    lines = capsys.readouterr().err.splitlines()
    assert said.format(tmp=disk) in lines[-1] and "Traceback" not in "".join(lines)
    # What could be known before is said before minutes of measuring.
    assert len(lines) == 1 or "--bytes" in words or "-f" in words


def test_a_directory_gets_a_test_file_that_goes_away(disk: Path) -> None:
    out = disk / "s.toml"
    assert (
        main(
            [
                "calibrate",
                str(disk),
                "--file-size",
                "16MiB",
                "--seconds",
                "2",
                "--threads",
                "1",
                "--requests",
                "64KiB",
                "--prefetchers",
                "2",
                "-o",
                str(out),
                "--data",
                str(disk),
            ]
        )
        == 0
    )
    assert os.listdir(disk) == ["s.toml"]
    assert load(str(out)).dataset.path == str(disk)


def test_a_calibration_that_is_killed_leaves_nothing_behind(disk: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "uffdprefetch",
        "calibrate",
        str(disk),
        "--file-size",
        "16MiB",
        "--seconds",
        "60",
        "--requests",
        "64KiB",
        "--prefetchers",
        "2",
        "-o",
        "-",
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            "uffdprefetch: file system: 2 threads, requests of 64 KiB\n"
        )  # it measures: the file is there
        process.kill()
    assert os.listdir(disk) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_test_file_never_has_a_name_to_leave_behind(disk: Path, number: int) -> None:
    words = [
        sys.executable,
        "-m",
        "uffdprefetch",
        "calibrate",
        str(disk),
        "--file-size",
        "4GiB",
        "--seconds",
        "600",
        "-o",
        "-",
    ]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while not writes_below(disk, process.pid):
            assert process.poll() is None
            time.sleep(0.01)
        names = os.listdir(disk)
        process.send_signal(number)
    assert names == os.listdir(disk) == [] and process.returncode == -number


def writes_below(folder: Path, pid: int) -> bool:
    """Whether a process has a file open there that is not empty."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"{folder}/") and fd.stat().st_size:
                return True
        except FileNotFoundError:
            pass  # closed since
    return False


def short(path: Path, out: Path, *options: str) -> str:
    """The scenario file of the shortest calibration."""
    assert (
        main(
            [
                "calibrate",
                str(path),
                "--file-size",
                "16MiB",
                "--seconds",
                "1",
                "--threads",
                "1",
                "--requests",
                "64KiB",
                "--prefetchers",
                "2",
                "-o",
                str(out),
                *options,
            ]
        )
        == 0
    )
    return out.read_text()


def test_writing_the_test_file_ends_in_time_and_is_said(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = short(disk, disk / "s.toml", "--seconds", "1ms")
    said = f"test file in {disk}: 8 MiB of 16 MiB, for more there was no time"
    assert f"\n# {said}\n" in text and capsys.readouterr().err.startswith(f"uffdprefetch: {said}")
    # What is needed is written whatever it takes.
    fd = scratch.made(str(disk), 20 << 20, 9 << 20, 0.0)
    assert os.fstat(fd).st_size == 16 << 20
    os.close(fd)


def test_memory_is_no_local_disk(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path if on_memory(tmp_path) else Path("/dev/shm")
    require(on_memory(memory), f"{memory} is not in memory")
    with tempfile.TemporaryDirectory(prefix=own_name(""), dir=memory) as folder:
        for options in ([], ["--direct"]):
            text = short(disk, disk / "s.toml", "-f", "--local", folder, *options)
            said = f"local disk: left out: what is written in {folder} stays in the page cache"
            assert f"\n# {said}" in text and '"local disk"' not in text
            # Before anything else is measured.
            assert capsys.readouterr().err.startswith(f"uffdprefetch: {said}")
        assert os.listdir(folder) == []
    assert '"local disk"' in short(disk, disk / "s.toml", "-f", "--local", str(disk))


def test_a_file_without_a_name_is_read_past_the_page_cache(disk: Path) -> None:
    fd = scratch.made(str(disk), 1 << 20, 0, 60.0)
    os.pread(fd, 1 << 20, 0)
    assert resident_bytes(fd, 0, 1 << 20)[0] == 1 << 20
    with ReadBenchmark(str(disk), False, 0, os.dup(fd)) as reader:
        assert reader.size_bytes == 1 << 20 and reader.run(1, 4096, Budget(60.0, 1 << 30))
        assert resident_bytes(fd, 0, 1 << 20)[0] == 0
    with ReadBenchmark(str(disk), True, 0, fd) as reader:
        assert reader.run(2, 65536, Budget(60.0, 1 << 30))
        assert resident_bytes(fd, 0, 1 << 20)[0] == 0


def test_points_that_are_lost_are_noted_once_a_curve(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk / "data").write_bytes(os.urandom(16 << 20))
    text = short(
        disk / "data", disk / "s.toml", "--threads", "1,500,600", "--requests", "4KiB,64KiB"
    )
    lost = [line for line in text.splitlines() if "too little is left" in line]
    assert lost == [
        "# file system: not with 500, 600 threads, requests of 64 KiB: too little is "
        "left of --bytes, or the file is too small"
    ]
    assert lost[0][2:] in capsys.readouterr().err
    found = tomllib.loads(text)["measured"]["file_system"]
    assert set(found["4096"]) == {"1", "2", "500", "600"} and set(found["65536"]) == {"1", "2"}


@pytest.mark.parametrize("command", [calibrate.Command, simulate.Command])
def test_every_option_says_what_it_does(command: type[CommandProtocol]) -> None:
    parser = argparse.ArgumentParser()
    command().prepare_parser(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_first_ranks_of_hosts() -> None:
    assert network.leaders(["a", "a", "b", "a", "c", "b"]) == [0, 2, 4]
    assert network.world({}) is None and network.world({"OMPI_COMM_WORLD_SIZE": "1"}) is None
    # Not started by a launcher, whatever the environment says: mpi4py sees itself alone.
    with pytest.raises(UffdPrefetchError, match="one of 5 tasks"):
        network.world({"SLURM_STEP_NUM_TASKS": "5"})


def test_ranks_under_mpirun_measure_together(disk: Path) -> None:
    program = shutil.which("mpirun")
    require(program, "mpirun is missing: install openmpi-bin")
    assert program is not None
    (disk / "data").write_bytes(os.urandom(16 << 20))
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        [
            program,
            "--oversubscribe",
            "-n",
            "3",
            sys.executable,
            "-m",
            "uffdprefetch",
            "calibrate",
            str(disk / "data"),
            "--seconds",
            "3",
            "--threads",
            "1",
            "--requests",
            "64KiB",
            "--prefetchers",
            "2",
            "-o",
            str(disk / "s.toml"),
        ],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = tomllib.loads((disk / "s.toml").read_text())
    assert rate(found["system"]["b_c"]) > 0 and "link" in found["measured"]["network"]
    assert found["system"]["N"] == 1 and set(found["measured"]["together"]) == {"1"}
    assert "all ranks are on one node" in (disk / "s.toml").read_text()


def test_of_two_disks_the_one_that_fails_is_named(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = disk / "local"
    local.mkdir()
    run = ReadBenchmark.run

    def fails(reader: ReadBenchmark, *given: Any) -> float | None:
        if reader.path == str(local):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return run(reader, *given)

    monkeypatch.setattr(ReadBenchmark, "run", fails)
    words = [
        "calibrate",
        str(disk),
        "--file-size",
        "16MiB",
        "--seconds",
        "2",
        "--threads",
        "1",
        "--requests",
        "64KiB",
        "--prefetchers",
        "2",
        "--local",
        str(local),
        "-o",
        "-",
    ]
    assert main(words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"uffdprefetch: calibrate: cannot read {local}: Input/output error"
