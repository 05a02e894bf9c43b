# SPDX-License-Identifier: Apache-2.0
"""The suite itself: small suites that break its rules, each run by a pytest of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import owned
import pytest
import suite
from conftest import HANG_SECONDS, require, wait_until
from paths import ROOT, SUPPORT

pytestmark = pytest.mark.slow

CONFTEST = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import dispositions, progress, suite
suite.GRACE_SECONDS, suite.SERVICE_SECONDS, suite.RETRY_SECONDS = 0.3, 1.0, 0.3
dispositions.usual_signals()

def pytest_addoption(parser):
    parser.addoption("--progress", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(suite.Suite(config), "suite")
    if config.option.progress and not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config), "progress")
"""
#: Orphans in sessions of their own, one of them without our environment, and it ignores SIGTERM.
SLEEPERS = """
import os, pathlib, subprocess, sys, time
import pytest

HERE = pathlib.Path(__file__).parent

def start():
    subprocess.Popen(["sh", "-c",
        "echo $$ >> pids; setsid sh -c 'echo $$ >> pids; exec sleep 1000' &"
        "env -i setsid sh -c 'echo $$ >> pids; trap \\"\\" TERM; sleep 1000; :' &"], cwd=HERE)
    while not (HERE / "pids").exists() or len((HERE / "pids").read_text().split()) < 3:
        time.sleep(0.01)
"""


@dataclass
class Ended:
    status: int
    text: str

    def line(self, pattern: str) -> str:
        """The line that fits."""
        found = [line for line in self.text.splitlines() if re.search(pattern, line)]
        assert found, f"no line with {pattern!r} in\n{self.text}"
        return found[0]


Inner = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def begin(tmp_path: Path, children: Inner) -> Callable[..., subprocess.Popen[bytes]]:
    """Start pytest with our rules on a test file given as text."""

    def start(
        text: str,
        limit_seconds: float = HANG_SECONDS,
        before: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        **more: str,
    ) -> subprocess.Popen[bytes]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n limit_seconds\n alone\n")
        (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
        environment = {**os.environ, suite.LIMIT_VARIABLE: f"{limit_seconds:g}", **more}
        words = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        words += options
        return children(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    return start


@pytest.fixture
def run(begin: Inner) -> Callable[..., Ended]:
    """The same to its end."""

    def to_its_end(text: str, **options: object) -> Ended:
        process = begin(text, **options)
        out, _ = process.communicate(timeout=HANG_SECONDS)
        return Ended(process.returncode, out.decode())

    return to_its_end


def sleepers(directory: Path) -> list[int]:
    """Those of SLEEPERS that live."""
    found = [owned.look(int(pid)) for pid in (directory / "pids").read_text().split()]
    assert len(found) == 3
    return [process.pid for process in found if process is not None and not process.ended]


# ---- the time limit -----------------------------------------------------------------------------

HANGS = {
    "waiting for its processes": "subprocess.run(['sleep', '1000'])",
    "in a loop": "while True: pass",
    "and catches everything": """
    try: time.sleep(1000)
    except BaseException: pass
    """,
    "and fails of it": "assert subprocess.run(['sleep', '1000']).returncode == 0",
    "with the lock of the interpreter": "import ctypes; ctypes.PyDLL(None).sleep(1000)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_test_that_hangs_fails_and_its_processes_end_and_the_next_one_runs(
    run: Callable[..., Ended], tmp_path: Path, how: str
) -> None:
    body = textwrap.indent(textwrap.dedent(HANGS[how]), "    ")
    text = f"{SLEEPERS}\ndef test_hang():\n    start()\n{body}\n\ndef test_next(): pass\n"
    ended = run(text, limit_seconds=1)
    assert ended.status == 1 and "1 failed, 1 passed" in ended.text, ended.text
    assert "time limit: the test took more than 1 s" in ended.text
    assert not sleepers(tmp_path)


def test_a_set_up_and_a_tear_down_that_hang_are_errors(run: Callable[..., Ended]) -> None:
    ended = run(
        """
        import time, pytest
        @pytest.fixture
        def slow(): time.sleep(1000)
        @pytest.fixture
        def never_gone():
            yield
            time.sleep(1000)
        def test_one(slow): pass
        def test_two(never_gone): pass
        """,
        limit_seconds=1,
    )
    assert "1 passed, 2 errors" in ended.text, ended.text
    assert "time limit: setting it up took more than 1 s" in ended.text
    assert "time limit: tearing it down took more than 1 s" in ended.text


def test_a_marker_says_how_long_a_test_may_take(run: Callable[..., Ended]) -> None:
    ended = run(
        """
        import time, pytest
        @pytest.mark.limit_seconds(0.5)
        def test_one(): time.sleep(1000)
        """,
        **{suite.LIMIT_VARIABLE: ""},
    )
    assert "time limit: the test took more than 0.5 s" in ended.text, ended.text


def test_a_pytest_that_cannot_be_moved_is_ended_and_says_where(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = run(
        f"""{SLEEPERS}
def test_stuck():
    import ctypes, itertools
    start()
    # a loop in C that holds the lock: no handler of Python's ever runs
    all(map(ctypes.PyDLL(None).sleep, itertools.repeat(1000)))
""",
        limit_seconds=1,
    )
    assert ended.status == -signal.SIGABRT
    ended.line("tests: test_it.py::test_stuck, the test cannot be ended: pytest hangs")
    ended.line('File ".*test_it.py", line .* in test_stuck')
    assert not sleepers(tmp_path)


# ---- what lives on ------------------------------------------------------------------------------


def test_what_a_failed_test_has_started_ends_with_it(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = run(
        f"""{SLEEPERS}
def test_fails():
    start()
    assert False
def test_next():
    import owned
    for pid in map(int, (HERE / "pids").read_text().split()):
        process = owned.look(pid)
        assert process is None or process.ended
"""
    )
    assert "1 failed, 1 passed" in ended.text, ended.text
    assert "left" not in ended.text


def test_a_test_that_passes_and_leaves_a_process_is_in_error(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = run(f"{SLEEPERS}\ndef test_leaves(): start()\ndef test_next(): pass\n")
    assert "2 passed, 1 error" in ended.text, ended.text
    assert ended.line("the test left the process").count("sleep 1000") >= 2
    assert not sleepers(tmp_path)


def test_what_a_fixture_of_the_module_has_started_lives_as_long_as_the_module(
    run: Callable[..., Ended],
) -> None:
    ended = run(
        """
        import subprocess, pytest
        @pytest.fixture(scope="module")
        def lasting():
            with subprocess.Popen(["sh", "-c", "exec env -i sleep 1000"]) as process:
                yield process
                assert process.poll() is None
                process.kill()
        def test_fails(lasting): assert False
        def test_one(lasting): assert lasting.poll() is None
        def test_two(lasting): assert lasting.poll() is None
        """
    )
    assert "1 failed, 2 passed" in ended.text and "error" not in ended.text, ended.text


def test_the_status_of_a_child_is_left_to_who_started_it(run: Callable[..., Ended]) -> None:
    ended = run(
        """
        import os, subprocess, time, owned, pytest
        @pytest.fixture(scope="module")
        def lasting():
            process = subprocess.Popen(["sh", "-c", "exit 7"])
            yield process
            assert process.wait() == 7
        def test_one(lasting):
            while open(f"/proc/{lasting.pid}/stat").read().split()[2] != "Z": time.sleep(0.01)
            subprocess.run(["sh", "-c", "sleep 0 & :"])
        def test_two(lasting):  # the orphan's status has been taken
            assert not [process for process in owned.everything().values() if process.ended
                        and process.parent == os.getpid() and process.pid != lasting.pid]
        """
    )
    assert ended.status == 0, ended.text


def test_the_daemon_of_mpi_in_pytest_itself_is_left_alone(run: Callable[..., Ended]) -> None:
    pytest.importorskip("mpi4py")
    ended = run(
        """
        def test_one(): from mpi4py import MPI
        def test_two():
            from mpi4py import MPI
            assert MPI.COMM_WORLD.allreduce(1) == 1
        """
    )
    assert ended.status == 0 and "2 passed" in ended.text, ended.text


# ---- the last check -----------------------------------------------------------------------------


def test_a_service_that_does_not_end_fails_the_run(run: Callable[..., Ended]) -> None:
    ended = run(
        """
        import subprocess, sys
        def test_leaves():
            code = "import time; time.sleep(1000)"
            words = ["setsid", "-f", sys.executable, "-c", code, "uffdprefetch serve"]
            subprocess.run(words, check=True)
        """
    )
    assert ended.status == 1 and "1 passed" in ended.text, ended.text
    assert re.search(r"test_leaves left a service: \d+ \(.* uffdprefetch serve\)", ended.text)


def test_the_runtime_directory_of_a_user_is_not_the_suites(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "users").mkdir(0o700)
    text = """
        import os, pytest
        from uffdprefetch.base.rundir import runtime_directory
        @pytest.mark.parametrize("name", ["index", "test@vm.sock"])
        def test_leaves(name):
            os.mkdir(os.path.join(runtime_directory(), name))
        """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for variables in ({"XDG_RUNTIME_DIR": str(tmp_path / "users")}, {}):
        ended = run(text, PYTHONPATH=paths, **variables)
        assert ended.status == 1 and "2 passed" in ended.text, ended.text
        left = re.findall(r"^the file (\S+)$", ended.text, re.MULTILINE)
        assert [os.path.basename(path) for path in left] == ["test@vm.sock"]
        assert ("/xdg-" in left[0]) == bool(variables)
    assert not list((tmp_path / "users").iterdir())


def test_a_file_that_is_left_fails_the_run_and_is_removed(run: Callable[..., Ended]) -> None:
    require(os.path.isdir("/dev/shm"), "no /dev/shm")
    ended = run(
        """
        import os, tempfile, suite
        def test_leaves():
            file = tempfile.mkstemp(suffix="-one")[1]
            directory = tempfile.mkdtemp(suffix="-two")
            open("/dev/shm/" + suite.own_name("three"), "w")
            print(file, directory)
        """
    )
    assert ended.status == 1 and "1 passed" in ended.text, ended.text
    left = re.findall(r"^the file (\S+)$", ended.text, re.MULTILINE)
    assert {path[-4:] for path in left} >= {"-one", "-two"} and len(left) == 3
    assert not any(map(os.path.exists, left))


def test_a_mount_that_is_left_is_an_error_and_is_taken_away(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    require(os.geteuid() == 0 and shutil.which("mount"), "only root can mount")
    ended = run(
        """
        import subprocess, pytest
        def test_leaves(tmp_path):
            (tmp_path / "here and there").mkdir()
            where = str(tmp_path / "here and there")
            subprocess.run(["mount", "-t", "tmpfs", "none", where], check=True)
        @pytest.fixture(scope="module")
        def lasting(tmp_path_factory):
            where = str(tmp_path_factory.mktemp("lasting"))
            subprocess.run(["mount", "-t", "tmpfs", "none", where], check=True)
            yield where
        def test_lasting(lasting): subprocess.run(["mountpoint", lasting], check=True)
        def test_lasts(lasting): subprocess.run(["mountpoint", lasting], check=True)
        """
    )
    assert "3 passed, 1 error" in ended.text, ended.text
    ended.line("the test left the mount .*/here and there")
    path = re.search(r"^the mount (\S+lasting0)$", ended.text, re.MULTILINE)
    assert path, ended.text
    assert path[1] not in Path("/proc/self/mounts").read_text()


def test_a_run_that_is_killed_leaves_nothing_either(begin: Inner, tmp_path: Path) -> None:
    process = begin(
        f"""{SLEEPERS.replace("env -i", "")}
def test_waits():
    start()
    (HERE / "tmpdir").write_text(os.environ["TMPDIR"])
    time.sleep(1000)
"""
    )
    told = tmp_path / "tmpdir"
    wait_until(lambda: told.exists() and told.read_text(), "the test to begin")
    process.kill()
    process.wait()
    # (one that cleared its environment would live: what tells its origin died with pytest)
    wait_until(lambda: not sleepers(tmp_path), "the end of what it has started")
    wait_until(lambda: not os.path.exists(told.read_text()), "its TMPDIR's end")


# ---- workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "workers"])
def test_progress_counts_names_what_fails_and_tells_what_is_missing(
    run: Callable[..., Ended], options: tuple[str, ...]
) -> None:
    ended = run(
        """
        import pytest
        def test_passes(): pass
        def test_fails(): assert 0
        @pytest.mark.parametrize("number", [1, 2])
        def test_skips(number): pytest.skip("no zsh here")
        """,
        options=(*options, "--progress"),
    )
    assert ended.status == 1
    ended.line(r"^FAILED test_it.py::test_fails")
    ended.line(r"^4 of 4 tests, 1 failed, 2 skipped, \d+:\d\d$")
    ended.line(r"^no zsh here: test_it.py \(2\)$")
    ended.line(r"^1 failed, 1 passed, 2 skipped in ")


def test_what_a_worker_leaves_fails_the_run_and_is_named(run: Callable[..., Ended]) -> None:
    ended = run(
        """
        import tempfile
        def test_leaves(): tempfile.mkstemp(suffix="-left")
        """,
        options=("-n", "1"),
    )
    assert ended.status == 1 and "1 passed" in ended.text, ended.text
    ended.line("^the file .*-left$")


def test_one_that_is_to_be_alone_is_so(run: Callable[..., Ended]) -> None:
    """The others say that they run; who is alone sees none, and they go on when it has ended."""
    ended = run(
        """
        import os, pathlib, time, pytest
        HERE = pathlib.Path(__file__).parent
        @pytest.mark.parametrize("number", range(30))
        def test_beside(number):
            mine = HERE / f"running-{os.getpid()}"
            mine.touch()
            time.sleep(0.01)
            mine.unlink()
        @pytest.mark.alone
        @pytest.mark.parametrize("number", range(3))
        def test_alone(number):
            assert not list(HERE.glob("running-*"))
        """,
        options=("-n", "3", "--dist", "load"),
    )
    assert ended.status == 0 and "33 passed" in ended.text, ended.text


# ---- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["INT", "INT QUIT HUP", "TERM USR1 CHLD ALRM TSTP TTOU"])
def test_jobs_have_the_usual_dispositions_whatever_the_suite_was_started_with(
    run: Callable[..., Ended], names: str
) -> None:
    ended = run(
        """
        import os, signal, subprocess, sys
        def test_it():
            status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True)
            assert status.returncode == 0
            fields = dict(line.split(":", 1) for line in status.stdout.splitlines())
            libcs = 3 << 31  # 32 and 33: no program can set what it inherited of these by libc
            assert not (int(fields["SigIgn"], 16) | int(fields["SigBlk"], 16)) & ~libcs, fields
            assert subprocess.run(["sh", "-c", "kill -INT $$"]).returncode == -signal.SIGINT
        """,
        before=("sh", "-c", f'trap "" {names}; exec "$@"', "sh"),
    )
    assert ended.status == 0, ended.text


def test_a_suite_that_ignores_ctrl_c_goes_on_ignoring_it(begin: Inner, tmp_path: Path) -> None:
    process = begin(
        """
        import os, pathlib, time
        def test_it():
            pathlib.Path("ready").touch()
            while not os.path.exists("go"): time.sleep(0.01)
        """,
        before=("sh", "-c", 'trap "" INT; exec "$@"', "sh"),
    )
    wait_until((tmp_path / "ready").exists, "the test to begin")
    assert os.getpgid(process.pid) == process.pid  # Ctrl-C reaches nothing of it
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    assert process.wait(HANG_SECONDS) == 0
