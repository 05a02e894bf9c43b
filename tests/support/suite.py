# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a time limit, nothing that lives on; and a last check.

tests/conftest.py registers it; docs/internals.md (The suite) says what it means for who writes a
test. A run marks what it starts (tests/support/owned.py), and tests/support/warden.py, beside it,
holds the clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import owned
import pytest
from turns import Turns

#: Setting up, the test itself and tearing down may each take so long: far more than any needs
#: beside a busy machine. ``pytest.mark.limit_seconds(n)`` and this variable say otherwise (0: for
#: ever, as under a debugger).
LIMIT_SECONDS = 600.0
LIMIT_VARIABLE = "UFFDPREFETCH_TEST_LIMIT_SECONDS"
#: After the limit the test is told so often to end.
RETRY_SECONDS = 20.0
#: What a test that passed has started may take so long to end by itself; then the test is in error.
GRACE_SECONDS = 15.0
#: A service ends half a second after its last client, and one without any after 30 s: while that
#: lasts the next tests run.
SERVICE_SECONDS = 60.0
#: What else leaves files in TMPDIR; patterns of names.
FOREIGN_FILES = (
    r"ompi\..*", r"openmpi-.*", r"prte\..*", r"pymp-.*",
    r"torchinductor_.*", r"torch_.*", r"torchelastic_.*",
    r"\.?org\.chromium\..*", r"com\.google\..*", r"scoped_dir.*",
)  # fmt: skip
#: The directory of turns.py, in the run's own.
TURNS = "turns"
#: The owner of what no test and no fixture has started.
SESSION = 0

_failed = pytest.StashKey[bool]()


def _note_popens() -> weakref.WeakSet[subprocess.Popen[Any]]:
    """Every Popen from now on: their statuses are not ours to take."""
    noted: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def begin(self: subprocess.Popen[Any], *words: Any, **options: Any) -> None:
        original(self, *words, **options)
        noted.add(self)

    subprocess.Popen.__init__ = begin  # type: ignore[method-assign]
    return noted


@dataclass(frozen=True)
class Ending:
    """A service that is expected to end by itself."""

    process: owned.Process
    of: str  # the test
    text: str
    deadline: float


class Suite:
    """The plugin: one run of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self.run = secrets.token_hex(6)
        self._config = config
        self._serial = SESSION
        self._owner = SESSION
        self._test = ""
        self._phase: int | None = None  # the number of what the clock runs for
        self._lasting: dict[int, int] = {}  # id of a lasting fixture's definition -> its owner
        self._lasting_mounts: set[str] = set()
        self._lasting_unmarked: dict[tuple[int, int], int] = {}
        self._endings: list[Ending] = []
        self._left: list[str] = []
        #: What hangs in the kernel is told of one test, and not of each that comes after it.
        self._stays: set[tuple[int, int]] = set()
        self._popens = _note_popens()
        owned.adopt_orphans()
        self._own_directory()
        #: A worker has its turns from who started it.
        self._turns = Turns(
            getattr(config, "workerinput", {}).get("turns", os.path.join(self.directory, TURNS))
        )
        self._mark(SESSION)
        self._start_warden()

    # ---- the run's own things -------------------------------------------------------------------

    def _own_directory(self) -> None:
        """A TMPDIR of the run's own: what is left in it is ours. tmp_path stays where it was."""
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self.directory = tempfile.mkdtemp(prefix=f"up-{self.run[:4]}-")
        os.chmod(self.directory, 0o755)  # other users' tests run from there
        os.environ["TMPDIR"] = tempfile.tempdir = self.directory
        self._xdg = ""
        if "XDG_RUNTIME_DIR" in os.environ:
            os.environ["XDG_RUNTIME_DIR"] = self._xdg = tempfile.mkdtemp(prefix="xdg-")

    def _directories(self) -> list[str]:
        factory: Any = getattr(self._config, "_tmp_path_factory", None)
        return [self.directory, *([str(factory.getbasetemp())] if factory is not None else [])]

    def _mark(self, owner: int) -> None:
        self._owner = owner
        os.environ[owned.MARK] = f"{self.run}/{owner}"

    def _next_number(self) -> int:
        self._serial += 1
        return self._serial

    # ---- the time limit -------------------------------------------------------------------------

    def _start_warden(self) -> None:
        self._answers, answers = os.pipe()
        orders, self._orders = os.pipe()
        os.set_blocking(self._answers, False)
        capture = self._config.pluginmanager.getplugin("capturemanager")
        script = str(Path(__file__).with_name("warden.py"))
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            self._warden = subprocess.Popen(
                [sys.executable, "-S", script, self.run, str(RETRY_SECONDS), *self._directories()],
                stdin=orders, stdout=answers, start_new_session=True,
            )  # fmt: skip
        os.close(orders)
        os.close(answers)
        signal.signal(signal.SIGALRM, self._time_is_over)

    def _tell(self, **what: object) -> None:
        os.write(self._orders, json.dumps(what).encode() + b"\n")

    def _limit_seconds(self, item: pytest.Item) -> float:
        if item.config.getoption("usepdb", False):
            return 0.0
        mark = item.get_closest_marker("limit_seconds")
        return float(os.environ.get(LIMIT_VARIABLE) or (mark.args[0] if mark else LIMIT_SECONDS))

    @contextlib.contextmanager
    def _limited(self, item: pytest.Item, phase: str) -> Iterator[None]:
        seconds = self._limit_seconds(item)
        self._over = ""
        self._over_text = f"time limit: {phase} took more than {seconds:g} s; ended with it:"
        phase_number = self._next_number()
        self._tell(
            phase=phase_number, owner=self._test_owner, what=f"{item.nodeid}, {phase}",
            seconds=seconds,
        )  # fmt: skip
        self._phase = phase_number
        try:
            yield
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except BaseException as error:  # whatever came of it: the limit is the reason
            self._hear()
            if self._over and self._over not in str(error):
                pytest.fail(self._over)
            raise
        else:
            self._hear()
            if self._over:  # somebody has caught it
                pytest.fail(self._over)
        finally:
            self._phase = None
            self._tell(idle=1)

    def _hear(self) -> None:
        """Take what the warden has said of this phase."""
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._answers, 1 << 16):
                for line in text.splitlines():
                    answer = json.loads(line)
                    if answer["phase"] == self._phase:
                        self._over = f"{self._over_text} {', '.join(answer['ended']) or 'nothing'}"

    def _time_is_over(self, *_: object) -> None:
        """The warden's signal. It may come when the phase that it is about has just ended."""
        if self._phase is not None:
            self._hear()
            pytest.fail(self._over)

    # ---- workers (pytest-xdist) -----------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["turns"] = self._turns.directory

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker's exit status is lost, and so is what it prints."""
        self._left += getattr(node, "workeroutput", {}).get("left", [])

    # ---- hooks ----------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test, self._test_owner = item.nodeid, self._next_number()
        item.stash[_failed] = False
        with self._turns.taken(alone=item.get_closest_marker("alone") is not None):
            self._mark(self._test_owner)
            try:
                return (yield)
            finally:
                self._mark(SESSION)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(item, "setting it up"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(item, "the test"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            with self._limited(item, "tearing it down"):
                done = yield
        except BaseException:
            item.stash[_failed] = True
            raise
        finally:
            left = self._sweep(self._test_owner, item.nodeid, item.stash[_failed])
        if left and not item.stash[_failed]:
            pytest.fail(f"the test left {'; '.join(left)}", pytrace=False)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            item.stash[_failed] = True
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, there, unmarked = self._owner, set(self._mounts()), self._known_as(None)
        self._lasting[id(fixturedef)] = self._next_number()
        self._mark(self._lasting[id(fixturedef)])
        try:
            return (yield)
        finally:
            self._mark(before)
            self._lasting_mounts |= set(self._mounts()) - there
            self._note_unmarked(self._lasting[id(fixturedef)], unmarked)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        owner = self._lasting.pop(id(fixturedef), None)
        if owner is not None:
            name = f"the fixture {fixturedef.argname}"
            found = self._end_processes(owner, name, at_once=False, unmarked=False)
            self._left += [f"{name} left {what}" for what in found]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The last check, after all fixtures are gone."""
        interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        self._check_endings(SERVICE_SECONDS)
        if self._config.pluginmanager.has_plugin("dsession"):
            owned.wait_for(self._of_the_run, GRACE_SECONDS)  # workers' wardens end after them
        found = owned.end(self._of_the_run)
        mounts = self._detach(self._mounts())
        files = [*self._files_in_ours(), *self._files_elsewhere()]
        if not interrupted:
            self._left += [f"the process {text}" for text in found]
            self._left += [f"the mount {path}" for path in mounts]
            self._left += [f"the file {path}" for path in files]
        for path in (*files, self.directory):
            owned.remove(path)
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left"] = self._left
        if self._left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left:
            terminalreporter.section("left by this run", red=True)
            for what in self._left:
                terminalreporter.line(what)

    def pytest_unconfigure(self) -> None:
        if not hasattr(self._config, "workeroutput"):  # it ends when the others have, too
            self._tell(finished=1)

    # ---- what must not live on ------------------------------------------------------------------

    def _has_children(self) -> bool:
        return owned.has_children(except_for=self._warden.pid)

    def _owners(self) -> dict[owned.Process, int | None]:
        found = owned.owners(os.getpid(), self.run, self._lasting_unmarked)
        return {
            process: owner for process, owner in found.items() if process.pid != self._warden.pid
        }

    def _known_as(self, *owners: int | None) -> set[tuple[int, int]]:
        if not self._has_children():
            return set()
        return {process.key for process, owner in self._owners().items() if owner in owners}

    def _note_unmarked(self, owner: int, but: set[tuple[int, int]]) -> None:
        """A lasting fixture's processes that do not show its mark, or will not for long (an exec
        with another environment), are known by their numbers."""
        self._lasting_unmarked |= dict.fromkeys(self._known_as(owner, None) - but, owner)

    def _ours(self, owner: int, unmarked: bool) -> Callable[[], list[owned.Process]]:
        def find() -> list[owned.Process]:
            wanted = (owner, None) if unmarked else (owner,)
            expected = {ending.process.key for ending in self._endings} | self._stays
            found = self._owners().items()
            return [p for p, of in found if of in wanted and p.key not in expected]

        return find

    def _of_the_run(self) -> list[owned.Process]:
        found = {process.key: process for process in (*self._owners(), *owned.marked(self.run))}
        return [p for p in found.values() if p.pid not in (self._warden.pid, os.getpid())]

    def _end_processes(self, owner: int, of: str, at_once: bool, unmarked: bool) -> list[str]:
        """End what ``owner`` has started; after a pass (not ``at_once``) it may end by itself:
        what did not is returned."""
        find = self._ours(owner, unmarked)
        if not self._has_children():
            return []
        if at_once:
            owned.end(find)
            return []
        now = time.monotonic()
        for process in find():
            text = owned.command_line(process.pid)
            if "uffdprefetch serve" in text:
                self._endings.append(Ending(process, of, text, now + SERVICE_SECONDS))
        owned.wait_for(find, GRACE_SECONDS)
        left = owned.end(find)
        self._stays |= {process.key for process in find()}
        return [f"the process {text}" for text in left]

    def _check_endings(self, seconds: float = 0.0) -> None:
        """Services of tests that are over: one that does not end is ended and remembered."""

        def living() -> list[owned.Process]:
            self._endings = [one for one in self._endings if not owned.gone(one.process)]
            return [one.process for one in self._endings]

        owned.wait_for(living, seconds)
        late = [one for one in self._endings if seconds or time.monotonic() >= one.deadline]
        for one in late:
            owned.end(lambda one=one: [] if owned.gone(one.process) else [one.process])  # type: ignore[misc]
            self._left.append(f"{one.of} left a service: {one.process.pid} ({one.text})")
        self._endings = [one for one in self._endings if one not in late]

    def _sweep(self, owner: int, of: str, failed: bool) -> list[str]:
        """After a test: end its processes, take its mounts away. What it should not have left."""
        found = self._end_processes(owner, of, at_once=failed, unmarked=True)
        self._check_endings()
        if self._has_children():
            owned.reap(p.pid for p in self._popens if p.returncode is None)
        mounts = self._detach([path for path in self._mounts() if path not in self._lasting_mounts])
        return found + [f"the mount {path}" for path in mounts]

    def _mounts(self) -> list[str]:
        return owned.mounts_below(self._directories())

    def _detach(self, paths: list[str]) -> list[str]:
        for path in paths:
            owned.detach(path)
        return paths

    def _files_in_ours(self) -> Iterator[str]:
        yield from owned.files_below(self.directory, (*FOREIGN_FILES, r"xdg-\w+", TURNS))
        if self._xdg:  # desktop programs keep things there
            yield from owned.files_below(self._xdg, (r"(?!uffdprefetch).*",))

    def _files_elsewhere(self) -> list[str]:
        """Files of the run where TMPDIR does not lead: their names bear the run."""
        return [
            os.path.join(directory, name)
            for directory in ("/dev/shm", "/tmp", "/var/tmp")
            if os.path.isdir(directory)
            for name in os.listdir(directory)
            if self.run in name
        ]


def own_name(what: str) -> str:
    """The name of a file outside of TMPDIR: the last check finds it."""
    return f"uffdprefetch-test-{os.environ[owned.MARK].partition('/')[0]}-{what}"


def owner() -> str:
    """Who owns what is started now: the test, or the lasting fixture that is being set up."""
    return os.environ[owned.MARK]


@contextlib.contextmanager
def owned_by(whom: str) -> Iterator[None]:
    """For a lasting fixture that starts processes while a test runs: they last as it does."""
    before = owner()
    os.environ[owned.MARK] = whom
    try:
        yield
    finally:
        os.environ[owned.MARK] = before
