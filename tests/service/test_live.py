# SPDX-License-Identifier: Apache-2.0
"""`wrap --live`: a view beside the job, which keeps its streams, its status and its signals."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, process_gone, uffdprefetch, wait_until
from harness import Records, Start, auto, python, service_pid
from paths import SUPPORT
from terminal import PROMPT, Terminal, terminal

pytest_plugins = ("harness_fixtures",)
pytestmark = auto

Children = Callable[..., "subprocess.Popen[bytes]"]
LIVE = ("--live", "--interval", "100ms")


def wrapped(*options: str) -> list[str]:
    return uffdprefetch("wrap", "-q", "-f", "-o", "run", "--min-size", "1MiB", *options, "--")


# ---- the job's bytes ----------------------------------------------------------------------------

NOISE = """
import hashlib, os, random, sys, time
source, sent, sha = random.Random(5), 0, hashlib.sha256()
while not os.path.exists("stop"):
    block = source.randbytes(source.randrange(1, 5000)) + b"\\x1b7\\x1b[1;5r\\r\\n"
    sha.update(block)
    while block:
        block = block[os.write(1, block):]
    os.write(2, b"job line %d\\n" % sent)
    sent += 1
    time.sleep(0.002)
os.write(2, b"job sent %s\\n" % sha.hexdigest().encode())
sys.exit(9)
"""


@pytest.mark.parametrize("target", ["pipe", "file"])
def test_every_byte_of_the_job_arrives_and_stderr_only_gains_whole_lines(
    env: dict[str, str], tmp_path: Path, children: Children, target: str
) -> None:
    errors = tmp_path / "err"
    with open(tmp_path / "out", "wb") as file, open(errors, "wb") as err:
        process = children(
            [*wrapped(*LIVE), sys.executable, "-c", NOISE],
            env=env, cwd=tmp_path, stderr=err, stdout=subprocess.PIPE if target == "pipe" else file,
        )  # fmt: skip
    received: list[bytes] = []
    reader = threading.Thread(
        target=lambda: received.extend(iter(lambda: process.stdout.read(4096), b""))  # type: ignore[union-attr]
    )
    if target == "pipe":
        reader.start()
    wait_until(lambda: errors.read_bytes().count(b"ranks") >= 3, "some of our lines")
    (tmp_path / "stop").touch()
    assert process.wait(HANG_SECONDS) == 9
    if target == "pipe":
        reader.join(HANG_SECONDS)
    out = b"".join(received) if target == "pipe" else (tmp_path / "out").read_bytes()
    lines = errors.read_text().splitlines()
    ours = [line for line in lines if line.startswith("uffdprefetch: ")]
    theirs = [line for line in lines if not line.startswith("uffdprefetch: ")]
    assert theirs[-1] == f"job sent {hashlib.sha256(out).hexdigest()}"
    assert theirs[:-1] == [f"job line {i}" for i in range(len(theirs) - 1)]
    assert all("ranks" in line and "\x1b" not in line for line in ours)


def test_the_job_has_the_descriptors_it_would_have_without(
    env: dict[str, str], tmp_path: Path
) -> None:
    """No pty in between: the very files, and no descriptor more."""
    code = (
        "import os\n"
        "for fd in sorted(map(int, os.listdir('/proc/self/fd'))):\n"
        "    try: print(fd, os.fstat(fd).st_ino, os.readlink(f'/proc/self/fd/{fd}'))\n"
        "    except OSError: pass\n"
    )
    found = []
    for options in ((), LIVE):
        with open(tmp_path / "out", "w+b") as out, open(os.devnull) as null:
            subprocess.run(
                [*wrapped(*options), sys.executable, "-I", "-S", "-c", code],
                env=env, cwd=tmp_path, stdin=null, stdout=out, stderr=out, check=True,
            )  # fmt: skip
            out.seek(0)
            text = out.read().decode()
        found.append([line for line in text.splitlines() if not line.startswith("uffdprefetch")])
    assert found[0] == found[1] and len(found[0]) >= 3


def test_a_stderr_that_nobody_reads_holds_up_neither_the_job_nor_its_status(
    env: dict[str, str], tmp_path: Path, children: Children
) -> None:
    unread, stderr = os.pipe()
    size = fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
    os.write(stderr, bytes(size - 100))
    process = children(
        [*wrapped(*LIVE), "sh", "-c", "read line; exit 6"],
        env=env, cwd=tmp_path, stdin=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    assert process.stdin is not None
    wait_until(lambda: _blocked_in_write(process.pid), "the view to be stuck in a full pipe")
    process.stdin.close()
    assert process.wait(HANG_SECONDS) == 6
    process.stdin = None
    os.close(unread)
    os.close(stderr)


def _blocked_in_write(pid: int) -> bool:
    """Whether some thread waits in pipe_write, as wchan or the system call's number (1) tells."""
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            call = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
            if call[:2] == ["1", "0x2"]:
                return True
    return False


# ---- status and signals -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7, 125])
def test_the_exit_status_is_the_jobs(env: dict[str, str], tmp_path: Path, code: int) -> None:
    words = [*wrapped(*LIVE), "sh", "-c", f"exit {code}"]
    assert subprocess.run(words, env=env, cwd=tmp_path).returncode == code


@pytest.mark.parametrize("name", ["SEGV", "KILL", "INT", "TERM"])
def test_wrap_dies_of_the_jobs_signal(env: dict[str, str], tmp_path: Path, name: str) -> None:
    words = [*wrapped(*LIVE), "sh", "-c", f"ulimit -c 0; kill -{name} $$"]
    done = subprocess.run(words, env=env, cwd=tmp_path)
    assert done.returncode == -getattr(signal, f"SIG{name}")


TRAP = """
import os, signal, sys, time
seen = []
def got(number, frame):
    seen.append(number)
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
names = sys.argv[1].split(",")
for name in names:
    signal.signal(getattr(signal, name), got)
print("ready", flush=True)
while len(seen) < len(names):
    time.sleep(0.01)
sys.exit(40 + len(seen))
"""


def test_signals_are_passed_on_while_the_view_runs(
    env: dict[str, str], tmp_path: Path, children: Children
) -> None:
    names = ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"]
    process = children(
        [*wrapped(*LIVE), sys.executable, "-c", TRAP, ",".join(names)],
        env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    assert b"uffdprefetch: " in process.stderr.readline()  # the thread is there
    for name in names:
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline().decode().strip() == name
    assert process.wait(HANG_SECONDS) == 45


def test_a_resize_signal_is_ours_and_not_passed_on(
    env: dict[str, str], tmp_path: Path, children: Children
) -> None:
    process = children(
        [*wrapped(*LIVE), sys.executable, "-c", TRAP, "SIGWINCH,SIGUSR1"],
        env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.stderr.readline()
    process.send_signal(signal.SIGWINCH)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == b"SIGUSR1\n"
    os.killpg(process.pid, signal.SIGKILL)  # the job too: it waits for the other one


def test_a_program_that_cannot_be_executed_is_127_as_ever(
    env: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [*wrapped(*LIVE), "/no/such/program"], env=env, cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 127 and b"Traceback" not in done.stderr


def test_without_a_service_there_is_nothing_to_show_and_the_job_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    os.symlink("/", tmp_path / "hub")
    del env["UFFDPREFETCH_STRICT"]
    words = [*wrapped(*LIVE), "sh", "-c", "echo ran; exit 4"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout) == (4, b"ran\n")
    assert done.stderr.count(b"\n") == 1


def test_headless_wins_over_a_variable(env: dict[str, str], tmp_path: Path) -> None:
    """The view is a second thread of wrap: the job looks for it."""
    env["UFFDPREFETCH_LIVE"] = "1"
    env["UFFDPREFETCH_INTERVAL"] = "0.1"
    more = "[ $(ls /proc/$PPID/task | wc -l) -gt 1 ]"
    for options, code in (
        ((), f"until {more}; do :; done"),
        (("--headless",), f"sleep 0.1; ! {more}"),
    ):
        # strict: else the job of the second one has ended before there is a service to show
        words = [*wrapped("--strict", *options), "sh", "-c", code]
        done = subprocess.run(words, env=env, cwd=tmp_path, timeout=HANG_SECONDS)
        assert done.returncode == 0, options


# ---- lines --------------------------------------------------------------------------------------


def test_lines_tell_how_it_goes_and_that_the_service_died(job: Start, records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1]).followed()
    while hear() == "again":  # so fast a reader may be past a place before a checkpoint lies there
        m.forget()
        say(digest=m.digest())
    """
    work = job(python(code, records.path), LIVE)

    def read() -> None:
        work.tell("again")
        assert work.line() == {"digest": records.digest}

    def told() -> int:
        return work.errors().count("1 rank, at ")

    def at_its_end() -> bool:
        read()
        enough = told() + 3
        wait_until(lambda: told() >= enough, "lines of the time after the reading")
        return "1 rank, at 100 %" in work.errors()

    wait_until(at_its_end, lambda: f"a line with the rank at its end:\n{work.errors()}")
    work.kill_service()
    wait_until(lambda: "the service died" in work.errors(), "the death to be told")
    read()
    work.tell("end")
    done = work.finish()
    assert done.status == 0 and done.lines == []
    told_lines = [line for line in done.stderr.splitlines() if "1 rank, at " in line]
    assert len(set(told_lines)) == len(told_lines), "each look is told once"
    deaths = [line for line in done.stderr.splitlines() if "the service died" in line]
    assert deaths[0] == "uffdprefetch: the service died; the job goes on without prefetching"


def test_one_launcher_of_a_job_shows_and_the_others_leave_it_to_it(
    env: dict[str, str], tmp_path: Path, children: Children
) -> None:
    env["UFFDPREFETCH_RUN"] = "shared"
    logs = [tmp_path / f"err{i}" for i in range(3)]
    processes = []
    for log in logs:
        with open(log, "wb") as err:
            words = [*wrapped(*LIVE), "sh", "-c", "read line"]
            processes.append(
                children(words, env=env, cwd=tmp_path, stdin=subprocess.PIPE, stderr=err)
            )
    wait_until(lambda: any(log.stat().st_size > 500 for log in logs), "somebody's lines")
    assert sum(b"ranks" in log.read_bytes() for log in logs) == 1
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(HANG_SECONDS) == 1  # read found the end
        process.stdin = None
    assert not list((tmp_path / "hub").glob("*.live"))


# ---- on a terminal ------------------------------------------------------------------------------

STEPS = """
import os, sys, time
from inside import Mapping
tty = os.ttyname(1)
assert os.isatty(0) and os.ttyname(2) == tty
m = Mapping(sys.argv[1])
m.digest()
print("tty", tty, flush=True)
n = 0
while not os.path.exists("stop"):
    n += 1
    print("step", n, flush=True)
    time.sleep(0.02)
print("last", n, flush=True)
sys.exit(5)
"""


class Shown:
    """A job with a panel under its output."""

    def __init__(self, screen: Terminal, cwd: Path, records: Records) -> None:
        self.screen, self.cwd = screen, cwd
        (cwd / "steps.py").write_text(STEPS)
        words = " ".join([*wrapped("--live"), sys.executable, "steps.py", str(records.path)])
        screen.type(f"clear; {words}; echo sta''tus=$?")
        # and the job at its work: only from then on is Ctrl-C an exception in it
        self.until(lambda: self.panel() and steps(screen.screen()), "the panel under the job")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a state of the screen; a failure shows it."""
        wait_until(condition, lambda: f"{what}:\n{self.screen.screen()}")

    def panel(self) -> list[str]:
        """The lines from the headline to the bottom of the screen; [] without one."""
        lines = self.screen.lines()
        for i, line in enumerate(lines):
            if re.match(r"^[─-]{2} .*(hit|stall|went|ended|died)", line):
                return lines[i:]
        return []

    def gone(self) -> bool:
        """No panel, and the whole screen scrolls."""
        return not self.panel() and self.screen.show("scroll_region_lower") == "23"

    def end(self) -> str:
        """Let the job end; everything that was ever on the screen."""
        (self.cwd / "stop").touch()
        self.screen.shows("status=")
        return self.screen.everything()


@pytest.fixture
def terminal_env(env: dict[str, str]) -> dict[str, str]:
    tests = str(SUPPORT)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")]))
    env["UFFDPREFETCH_RUN"] = "panel"
    env["LANG"] = "C.UTF-8"
    return env


def steps(text: str) -> list[int]:
    """The job's numbers, as far as they stand alone on their lines."""
    return [int(n) for n in re.findall(r"^step (\d+)$", text, re.MULTILINE)]


def test_the_panel_stays_at_the_bottom_and_every_line_of_the_job_is_above_it(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        shown.until(lambda: any("rank " in line for line in shown.panel()), "the rank's titles")
        shown.until(lambda: len(steps(screen.screen())) > 10, "the job's output over the panel")

        def fits() -> bool:
            panel = shown.panel()
            region = screen.show("scroll_region_lower")
            return 4 <= len(panel) <= 8 and "panel" in panel[0] and region == str(23 - len(panel))

        shown.until(fits, "a panel with a scroll region that ends above it")
        assert len(screen.lines()) == 24
        text = shown.end()
        assert "status=5" in text
        assert f"tty {screen.show('pane_tty')}" in text  # the job had this very terminal
        numbers = steps(text)
        assert numbers == list(range(1, len(numbers) + 1))
        assert f"last {len(numbers)}" in text
        assert screen.show("scroll_region_lower") == "23"
        assert shown.panel() == [] and "hit" not in screen.screen()
        screen.type("seq 60")  # the whole screen scrolls again
        wait_until(lambda: "60" in screen.lines()[-2], "the last lines at the bottom")


def test_the_panel_makes_room_below_an_unfinished_line_at_the_end_of_a_full_screen(
    terminal_env: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import os, time; print('unfinished', end='', flush=True)\n"
        "while not os.path.exists('stop'): time.sleep(0.02)\n"
        "print('-finished', flush=True)\n"
    )
    (tmp_path / "part.py").write_text(code)
    # at first too small for a panel: it is drawn when the line is there, and not before
    with terminal(terminal_env, tmp_path, 80, 8) as screen:
        screen.type("seq 100")
        screen.matches(rf"^100\n{re.escape(PROMPT)}\n")  # typed any sooner, it would be in between
        # from a file: a typed line that just fills a row would be joined with what follows it
        words = " ".join([*wrapped("--live"), sys.executable, "part.py"])
        (tmp_path / "go").write_text(f"{words}; echo status=$?")
        screen.type(". ./go")
        screen.matches("^unfinished$")
        screen.resize(80, 24)  # what had scrolled out comes back, and fills it to the last line
        text = screen.matches("^── panel", "^unfinished$")
        lines = [line for line in text.splitlines() if line]
        at = next(i for i, line in enumerate(lines) if line.startswith("── panel"))
        assert lines[at - 1] == "unfinished"
        (tmp_path / "stop").touch()
        screen.shows("status=0")
        everything = screen.everything()
        assert re.search(r"^unfinished-finished$", everything, re.MULTILINE)
        numbers = re.findall(r"^(\d+)$", everything, re.MULTILINE)
        assert [int(n) for n in numbers] == [*range(1, 101)]


def test_the_panel_follows_resizes_and_leaves_no_second_one(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path, 80, 24) as screen:
        shown = Shown(screen, tmp_path, records)
        for width, height in ((120, 30), (60, 16), (80, 24)):
            screen.resize(width, height)

            def fits(width: int = width, height: int = height) -> bool:
                lines = screen.lines()
                heads = [line for line in lines if re.match(r"^── .*hit", line)]
                fills = len(heads) == 1 and width - 2 <= len(heads[0]) <= width
                region = int(screen.show("scroll_region_lower"))
                return len(lines) == height and fills and region == height - len(shown.panel()) - 1

            shown.until(fits, f"one panel of {width}x{height}")
        screen.resize(80, 8)  # too small for a panel: the job has it all
        wait_until(lambda: not shown.panel(), "the panel to go")
        wait_until(lambda: len(steps(screen.screen())) >= 7, "the job alone on the screen")
        screen.resize(80, 24)
        wait_until(lambda: shown.panel(), "the panel again")
        assert "status=5" in shown.end()


def test_ctrl_z_gives_the_whole_screen_to_the_shell_and_fg_brings_the_panel_back(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        screen.key("C-z")
        screen.shows("Stopped")
        shown.until(shown.gone, "the whole screen to be the shell's")
        screen.type("clear; bg")
        # longer than it takes to draw twice
        wait_until(lambda: len(steps(screen.everything())) > 120, "the job to go on behind it")
        assert shown.gone()
        screen.type("fg")
        wait_until(lambda: shown.panel(), "the panel again")
        (tmp_path / "stop").touch()
        screen.matches(r"^last \d+$")
        shown.until(shown.gone, "the panel to go")


def test_ctrl_c_ends_the_job_as_it_would_without_and_the_screen_is_whole(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        screen.key("C-c")
        screen.shows("KeyboardInterrupt")
        screen.type("echo and=$?")
        screen.shows("and=130")
        assert shown.gone()


def test_the_panel_says_that_the_service_died_and_the_job_goes_on(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        wait_until(lambda: steps(screen.screen()), "the job's output")
        pid = service_pid(terminal_env)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process_gone(pid), "the service's death")
        screen.shows("! the service died; the job goes on without prefetching")
        before = max(steps(screen.everything()))  # the screen may be just being drawn
        wait_until(lambda: max(steps(screen.everything())) > before, "the job to go on")
        text = shown.end()
        assert "status=5" in text and "the service died during the run" in text


def test_a_terminal_without_utf8_and_colour_gets_neither(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    terminal_env.update(LC_ALL="C", NO_COLOR="1")
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        assert screen.screen().isascii()
        assert not re.search(r"\x1b\[[\d;]*3[1-8]", screen.coloured())
        shown.end()


def test_wrap_killed_leaves_the_job_alone(
    terminal_env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with terminal(terminal_env, tmp_path) as screen:
        shown = Shown(screen, tmp_path, records)
        shell = int(screen.show("pane_pid"))
        (wrap,) = map(int, Path(f"/proc/{shell}/task/{shell}/children").read_text().split())
        children = Path(f"/proc/{wrap}/task/{wrap}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        (job,) = [pid for pid, line in lines.items() if "steps.py" in line and "wrap" not in line]
        os.kill(wrap, signal.SIGKILL)
        screen.shows("status=137")
        assert not process_gone(job)
        (shown.cwd / "stop").touch()
        wait_until(lambda: process_gone(job), "the job's own end")
