# SPDX-License-Identifier: Apache-2.0
"""What all tests share: skipping with a reason, a clean environment, waiting on a state."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dispositions
import progress
import pytest
import suite
import turns
from paths import SUPPORT, TESTS

from uffdprefetch.base.identity import _FAMILIES

dispositions.usual_signals()
pytest.register_assert_rewrite("guess_bed", "components", "plan_jobs", "training", "watched")

FORCE_VARIABLE = "UFFDPREFETCH_TEST_FORCE"
#: Only there so that a hang fails with what was awaited; no test's meaning depends on it. Some wait
#: for what is minutes of work beside a busy machine; suite.LIMIT_SECONDS is the end of everything.
HANG_SECONDS = 150.0

#: How many steps of 5 ms a thread of the job waits for one of ours; 10 where it is not set. Beside
#: a busy compiler that is too few for a test that says what is served.
PATIENCE_VARIABLE = "UFFDPREFETCH_TEST_PATIENCE"

#: The kernel's default in the place of this machine's read_ahead_kb: where that is large the kernel
#: suffices for many readers, and a test would see nothing prefetched.
READAHEAD_VARIABLE, READAHEAD_BYTES = "UFFDPREFETCH_TEST_READAHEAD", 128 << 10
os.environ[READAHEAD_VARIABLE] = str(READAHEAD_BYTES)

#: No disk is so quick that the pool would leave its files to the page cache: tests' files lie on
#: whatever there is.
QUICK_VARIABLE, NONE_IS_QUICK = "UFFDPREFETCH_TEST_QUICK_DISK", "-1"
os.environ[QUICK_VARIABLE] = NONE_IS_QUICK

#: ``pytestmark`` of a module in which whatever Python or numpy warns of is an error. But what an
#: earlier test has left open warns when it is collected: at any time, so in any test.
warnings_fail = pytest.mark.filterwarnings(
    "error", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

_LAUNCHER_PREFIXES = ("UFFDPREFETCH_", "SLURM_", "PBS_", "LSB_", "FLUX_", "OMPI_", "PMI", "PALS_")
_LAUNCHER_NAMES = {name for _, *names in _FAMILIES for name in names} | {
    "LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pure", action="store_true",
        help="only tests that start nothing: no time limit, no look for what they leave",
    )  # fmt: skip
    parser.addoption(
        "--progress", action="store_true", help="a line of progress in the place of dots"
    )  # fmt: skip


@functools.cache
def long_tests() -> dict[str, frozenset[str] | None]:
    """What tests/long.txt names, and which of its variants are not meant (None: all are)."""
    named: dict[str, frozenset[str] | None] = {}
    for line in (TESTS / "long.txt").read_text().splitlines():
        name, but, variants = line.partition(" but ")
        if line and not line.startswith("#"):
            named[name] = frozenset(variants.split(" | ")) if but else None
    return named


def is_long(nodeid: str) -> bool:
    """Whether the test, or a file or a folder that it lies in, is in tests/long.txt."""
    name, _, variant = nodeid.partition("[")
    path, _, _ = name.partition("::")
    around = [name, path, *map(str, Path(path).parents)]
    return any(
        one in long_tests() and variant.removesuffix("]") not in (long_tests()[one] or ())
        for one in around
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
    # Workers take files in this order: what is short comes last, so that they end together.
    items.sort(key=lambda item: item.path.is_relative_to(TESTS / "unit"))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a socket's path has 107 bytes, and tmp_path is in it
        number = config.workerinput["workerid"].removeprefix("gw")
        config.option.basetemp = str(Path(config.option.basetemp).with_name(number))
    if not config.getoption("--pure"):
        config.pluginmanager.register(suite.Suite(config), "uffdprefetch-suite")
    if config.getoption("--progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config), "uffdprefetch-progress")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Asked for by --dist, so that an ordinary `pytest -n 2` is as everywhere.
    return turns.ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def require(condition: object, reason: str) -> None:
    """Skip the test unless ``condition``; with UFFDPREFETCH_TEST_FORCE=1 fail instead."""
    if condition:
        return
    if os.environ.get(FORCE_VARIABLE, "") not in ("", "0"):
        pytest.fail(f"{reason} ({FORCE_VARIABLE} is set, so this is no skip)")
    pytest.skip(reason)


def wait_until(condition: Callable[[], object], what: str | Callable[[], str]) -> None:
    """Return once ``condition()`` is true; fail, saying ``what`` was awaited (a function tells it
    when it is too late), if it never is."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            pytest.fail(f"waited {HANG_SECONDS:.0f} s in vain for: {text}")
        time.sleep(0.005)


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat (R, S, T, Z ...), or '' when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_gone(pid: int) -> bool:
    """Dead, whether or not its parent has taken the status yet."""
    return process_state(pid) in ("", "Z", "X")


def clean_environment() -> dict[str, str]:
    """Our environment without what launchers and this program put there, but what stands for this
    machine's devices. Without a state directory: summaries lie where a program runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    devices = {READAHEAD_VARIABLE: str(READAHEAD_BYTES), QUICK_VARIABLE: NONE_IS_QUICK}
    return {**kept, **devices, "XDG_STATE_HOME": os.devnull}


def uffdprefetch(*words: str) -> list[str]:
    """The command line of this checkout's program under the interpreter that runs the tests."""
    return [sys.executable, "-m", "uffdprefetch", *words]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A clean environment with a runtime directory of its own and no user configuration."""
    rundir = tmp_path / "hub"
    environment = clean_environment()
    environment["UFFDPREFETCH_RUNDIR"] = str(rundir)
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "no-config")
    environment[PATIENCE_VARIABLE] = "400"
    yield environment


@pytest.fixture
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process itself keeps or looks up goes to a runtime directory of the test's own."""
    monkeypatch.setenv("UFFDPREFETCH_RUNDIR", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir(mode=0o700)


#: In the service's interpreter, before it loads anything of ours.
_GATE = """
import os, sys, time
while "serve" in sys.orig_argv and not os.path.exists({gate!r}):
    time.sleep(0.01)
"""


@pytest.fixture
def gate(env: dict[str, str], tmp_path: Path) -> Callable[[], None]:
    """Services start when it is called, and not before."""
    (tmp_path / "site").mkdir()
    path = tmp_path / "gate"
    (tmp_path / "site" / "sitecustomize.py").write_text(_GATE.format(gate=str(path)))
    env["PYTHONPATH"] = str(tmp_path / "site")
    return path.touch


@pytest.fixture
def children() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A Popen whose processes are killed and reaped when the test ends, however it ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], **options: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(words, **options)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def fake(
    env: dict[str, str], children: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> Callable[..., Path]:
    """Start fake_service.py where a wrap with ``env`` looks for its service: its log."""

    def start(mode: str) -> Path:
        from uffdprefetch.base.rundir import runtime_directory, socket_path

        env["UFFDPREFETCH_RUN"] = "test"
        log = tmp_path / "fake.log"
        script = str(SUPPORT / "fake_service.py")
        path = socket_path(runtime_directory(env), "test")
        children([sys.executable, script, path, str(log), mode])
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the fake service")
        return log

    return start
