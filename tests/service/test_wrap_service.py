# SPDX-License-Identifier: Apache-2.0
"""What `wrap` says to the service and does when that fails it (tests/support/fake_service.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, process_gone, uffdprefetch, wait_until
from fake_service import SUMMARY_JSON

from uffdprefetch.base import limits
from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.rundir import runtime_directory
from uffdprefetch.launch import getting_on, nothing_reported, service
from uffdprefetch.launch.address import Address, address_of
from uffdprefetch.launch.environment import preloadable, prepend_preload
from uffdprefetch.protocol import leftovers

Start = Callable[..., "subprocess.Popen[bytes]"]


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def wrap(
    env: dict[str, str], cwd: Path, *words: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        uffdprefetch("wrap", *options, "--", *words),
        env=env, cwd=cwd, capture_output=True, timeout=HANG_SECONDS,
    )  # fmt: skip


def document(path: Path) -> dict[str, Any]:
    """A summary, but for what the launcher says of the command."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert found.pop("job")["status"] == 0
    assert found.pop("oom").keys() >= {"kills", "job", "service", "why_not"}
    return found


def test_the_protocol_in_order(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    log = fake("good")
    env.update(RANK="3", LOCAL_RANK="1", WORLD_SIZE="8")
    done = wrap(env, tmp_path, "sh", "-c", "echo $$; exit 7")
    assert done.returncode == 7
    wait_until(lambda: events(log)[-1]["event"] == "hangup", "the launcher to hang up")
    # whoever comes after that has asked whether somebody listens, and says nothing
    ready, hello, job, finish, hangup, *_ = events(log)
    assert [e["event"] for e in (ready, hello, job, finish, hangup)] == [
        "ready", "hello", "job", "finish", "hangup",
    ]  # fmt: skip
    assert (hello["length"], hello["role"]) == (256, 1)
    assert (hello["rank"], hello["local_rank"], hello["world"]) == (3, 1, 8)
    assert job["pid"] == int(done.stdout)
    assert os.waitstatus_to_exitcode(finish["status"]) == 7


def test_a_death_by_signal_is_told_as_a_wait_status(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    log = fake("good")
    done = wrap(env, tmp_path, "sh", "-c", "kill -KILL $$")
    assert done.returncode == -signal.SIGKILL
    finish = next(e for e in events(log) if e["event"] == "finish")
    assert os.WTERMSIG(finish["status"]) == signal.SIGKILL


def test_the_last_launcher_prints_what_was_gained_and_writes_the_summary(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    env["RANK"] = "2"
    done = wrap(env, tmp_path, "true", options=("-v",))
    lines = done.stderr.decode().splitlines()
    assert all(line.startswith("uffdprefetch: ") for line in lines)
    (gained,) = [line for line in lines if "saved at least 2.35 s" in line]
    again = wrap(env, tmp_path, "true", options=("-o", "again"))
    (short,) = again.stderr.decode().splitlines()
    assert short.endswith("; saved at least 2.35 s") and gained.endswith("; saved at least 2.35 s")
    path = tmp_path / "uffdprefetch.test.2.summary.json"
    assert document(path) == SUMMARY_JSON
    assert lines[-1].endswith(path.name)


def test_by_default_the_last_summaries_lie_in_the_state_directory(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    """Homes are shared: other nodes keep their own."""
    fake("good")
    env["XDG_STATE_HOME"] = str(tmp_path / "state")
    state, host = tmp_path / "state" / "uffdprefetch", os.uname().nodename
    state.mkdir(parents=True)
    for number in range(60):
        for node in (host, "another"):
            old = state / f"{node}.old-{number:02}.0.summary.json"
            old.write_text("{}")
            os.utime(old, (1e9 + number, 1e9 + number))
    (state / "mine.txt").touch()
    done = wrap(env, tmp_path, "true")
    assert done.returncode == 0 and not list(tmp_path.glob("*.summary.json"))
    new = state / f"{host}.test.0.summary.json"
    kept = [f"{host}.old-{number:02}.0.summary.json" for number in range(11, 60)]
    assert sorted(path.name for path in state.glob(f"{host}.*")) == sorted([*kept, new.name])
    assert len(list(state.glob("another.*"))) == 60 and (state / "mine.txt").exists()
    shown = subprocess.run(
        uffdprefetch("summary", "--json"), env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(shown.stdout) == json.loads(new.read_text())
    before = set(state.iterdir())
    assert wrap(env, tmp_path, "true", options=("-o", os.devnull)).returncode == 0
    assert set(state.iterdir()) == before and not list(tmp_path.glob("*.json"))


def test_quiet_writes_the_summary_and_prints_nothing(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    done = wrap(env, tmp_path, "true", options=("-q", "-o", "here/%j.%q{WHO}"))
    assert b"summary not written" in done.stderr  # there is no such directory: one line
    assert done.stderr.count(b"\n") == 1 and done.returncode == 0
    done = wrap({**env, "WHO": "me"}, tmp_path, "true", options=("-q", "-o", "%j.%q{WHO}"))
    assert done.stderr == b""
    assert (tmp_path / "test.me.summary.json").exists()


def test_nothing_is_overwritten_without_force(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    old = tmp_path / "mine.summary.json"
    old.write_text("precious")
    assert wrap(env, tmp_path, "true", options=("-o", "mine")).returncode == 0
    assert old.read_text() == "precious"
    assert document(tmp_path / "mine-2.summary.json") == SUMMARY_JSON
    wrap(env, tmp_path, "true", options=("-o", "mine", "-f"))
    assert document(old) == SUMMARY_JSON


@pytest.mark.parametrize("given", ["place", "place/", "."])
def test_of_a_directory_the_summary_is_in_it(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path], given: str
) -> None:
    fake("good")
    (tmp_path / "place").mkdir()
    done = wrap({**env, "RANK": "3"}, tmp_path, "true", options=("-o", given))
    made = tmp_path / given / f"{os.uname().nodename}.test.3.summary.json"
    assert done.returncode == 0 and document(made) == SUMMARY_JSON
    assert list(tmp_path.rglob("*.json")) == [made]


def test_only_the_last_of_several_launchers_reports(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path], children: Start
) -> None:
    fake("good")
    waiting = children(
        uffdprefetch("wrap", "--", "sh", "-c", "echo ready; read line"),
        env=env, cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert waiting.stdout is not None and waiting.stdout.readline() == b"ready\n"
    first = wrap(env, tmp_path, "true")
    assert first.stderr == b""
    assert list(tmp_path.glob("*.summary.json")) == []
    _, err = waiting.communicate(b"go\n", timeout=HANG_SECONDS)
    assert err.count(b"uffdprefetch: ") == 1
    assert len(list(tmp_path.glob("*.summary.json"))) == 1


def test_a_nested_wrap_shares_the_service_and_preloads_once(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    log = fake("good")
    inner = uffdprefetch("wrap", "--", "sh", "-c", "echo $LD_PRELOAD; echo $UFFDPREFETCH_POLICY")
    done = wrap(env, tmp_path, *inner, options=("--policy", "fixed"))
    preload, policy = done.stdout.decode().splitlines()
    assert preload.count("_preload") == 1 and ":" not in preload
    assert policy == "fixed"
    assert [e["event"] for e in events(log)].count("hello") == 2
    assert [e["last"] for e in events(log) if e["event"] == "finish"] == [False, True]
    assert done.stderr.count(b"uffdprefetch: ") == 1


def test_the_options_of_the_first_wrap_hold_and_another_is_told_so(
    env: dict[str, str], tmp_path: Path
) -> None:
    """A nested wrap inherits them; only what is given to it anew can differ."""
    told = b"was started with other options"
    inner = uffdprefetch("wrap", "--", "true")
    assert told not in wrap(env, tmp_path, *inner, options=("--policy", "fixed")).stderr
    inner = uffdprefetch("wrap", "--policy", "none", "--", "true")
    assert wrap(env, tmp_path, *inner, options=("--policy", "fixed", "-f")).stderr.count(told) == 1


@pytest.mark.parametrize("leaves_a_log", [False, True])
def test_a_service_that_dies_costs_the_job_nothing(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path], children: Start,
    leaves_a_log: bool,
) -> None:  # fmt: skip
    log = fake("dies-at-job")
    process = children(
        uffdprefetch("wrap", "--", "sh", "-c", "echo ready; read line; echo $line; exit 6"),
        env=env, cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    wait_until(lambda: process_gone(events(log)[0]["pid"]), "the service's death")
    (socket,) = Path(env["UFFDPREFETCH_RUNDIR"]).glob("*.sock")
    if leaves_a_log:
        Path(f"{socket}.log").touch()
    out, err = process.communicate(b"on\n", timeout=HANG_SECONDS)
    assert (process.returncode, out) == (6, b"on\n")
    (line,) = err.decode().splitlines()
    assert line.startswith("uffdprefetch: the service died during the run")
    assert line.endswith(f"; see {socket}.log") == leaves_a_log


def test_a_summary_that_is_garbage_is_one_line(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("garbage")
    done = wrap(env, tmp_path, "sh", "-c", "exit 4")
    assert done.returncode == 4
    assert b"not JSON" in done.stderr and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("kib", "lines"),
    [
        (1, ["what was gained is not known: {limit}",
             "summary not written: [Errno 27] File too large"]),
        (64, ["served nothing: no mapping was served",
              "not served: program python3: what it maps is not followed: {limit}",
              "try: let it have what it lacks (ulimit -a)"]),
    ],
)  # fmt: skip
def test_where_no_file_may_grow_that_is_what_is_said(
    env: dict[str, str], tmp_path: Path, kib: int, lines: list[str]
) -> None:
    """RLIMIT_FSIZE holds for the memory by which a service tells, and shares with the job, too."""
    path, limit = tmp_path / "data", f"RLIMIT_FSIZE is {kib} KiB (ulimit -f)"
    path.write_bytes(bytes(17 << 20))
    env["UFFDPREFETCH_RUN"] = "test"
    program = (
        "import mmap, sys, time; file = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(file.fileno(), 0, prot=1); time.sleep(0.5)"
    )
    words = uffdprefetch("wrap", "--", "python3", "-c", program, str(path))
    done = subprocess.run(
        ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash", *words], env=env, cwd=tmp_path,
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    limit += ", which holds for shared memory, too"
    assert done.returncode == 0
    assert done.stderr.splitlines() == [f"uffdprefetch: {one.format(limit=limit)}" for one in lines]
    (log,) = Path(env["UFFDPREFETCH_RUNDIR"]).glob("*.log")
    assert log.read_text().endswith(f" WARNING peer dropped: {limit}\n")
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("engine", ["cache", "pool"])
@pytest.mark.parametrize("most", [8, 16, 32, 63])
def test_where_few_descriptors_are_allowed_the_job_runs_without(
    env: dict[str, str], tmp_path: Path, most: int, engine: str, strict: bool
) -> None:
    """A service that lacks one ends somewhere, in the middle of something."""
    words = uffdprefetch(
        "wrap", "--engine", engine, *["--strict"][:strict], "sh", "-c", "ulimit -n"
    )
    done = subprocess.run(
        ["prlimit", f"--nofile={most}", *words], env=env, cwd=tmp_path, capture_output=True,
        text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    without = "" if strict else "running the job without prefetching: "
    said = f"RLIMIT_NOFILE is {most} (ulimit -n): a service needs {limits.DESCRIPTORS_LEAST}"
    assert done.stderr == f"uffdprefetch: {without}{said}\n"
    assert (done.returncode, done.stdout) == ((125, "") if strict else (0, f"{most}\n"))
    assert not list(tmp_path.glob("hub/*"))


@pytest.mark.parametrize("strict", [False, True])
def test_no_service_is_a_warning_or_125_with_strict(
    env: dict[str, str], tmp_path: Path, strict: bool
) -> None:
    os.symlink("/", tmp_path / "hub")
    options = ("--strict",) if strict else ()
    done = wrap(env, tmp_path, "echo", "ran", options=options)
    assert b"symbolic link" in done.stderr and done.stderr.count(b"\n") == 1
    assert (done.returncode, done.stdout) == ((125, b"") if strict else (0, b"ran\n"))


# ---- finding and starting, in this process ------------------------------------------------------


@pytest.fixture
def meeting(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Address:
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", 0.5)
    env["UFFDPREFETCH_RUN"] = "test"
    runtime_directory(env)
    return address_of(env)


def runs_instead(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """What is started as the service."""
    monkeypatch.setattr(service, "command", lambda *_: list(words))


def test_the_service_is_started_if_nobody_listens(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    first = service.find_or_start(env, Config(), meeting)
    assert first.started is not None and not first.is_welcome
    again = service.find_or_start(env, Config(), meeting)
    assert again.started is None  # the second finds the first
    assert not first.end_unused()  # somebody has come
    assert again.come_up().is_welcome and first.come_up().is_welcome
    again.close()
    first.close()
    pid = first.started.pid
    wait_until(lambda: process_gone(pid), "the service's end")
    assert first.started.has_ended() and first.started.status == 0


@pytest.mark.parametrize("has_socket", [True, False], ids=["", "somebody has removed its socket"])
def test_a_service_that_nobody_came_to_is_ended_and_leaves_nothing(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch, has_socket: bool
) -> None:
    runs_instead(monkeypatch, "sleep", "60")
    found = service.find_or_start(env, Config(), meeting)
    if has_socket:
        assert found.is_awaited()
    else:
        os.unlink(meeting.socket)
    assert os.path.isdir(meeting.socket + ".plan")  # what the job announces early is kept
    assert found.end_unused()
    assert found.started is not None and process_gone(found.started.pid)
    assert os.listdir(meeting.directory) == []


def test_what_another_service_has_made_meanwhile_is_left_to_it(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours has ended, and has removed its names, before we look."""
    runs_instead(monkeypatch, "sleep", "60")
    found = service.find_or_start(env, Config(), meeting)
    assert found.started is not None
    for path in Path(meeting.directory).iterdir():
        path.unlink() if not path.is_dir() else path.rmdir()
    another = leftovers.hold(meeting.socket + leftovers.LOCK)
    assert another is not None and not found.end_unused()
    assert leftovers.is_starting(meeting.socket)
    leftovers.release(meeting.socket + leftovers.LOCK, another)
    os.kill(found.started.pid, signal.SIGKILL)
    wait_until(found.started.has_ended, "its end")
    found.close()


def test_a_service_that_is_up_is_not_ended(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    found = service.find_or_start(env, Config(), meeting)
    wait_until(lambda: not leftovers.is_starting(meeting.socket), "the service")
    assert not found.end_unused()
    assert os.path.exists(meeting.socket)
    assert found.come_up().is_welcome
    found.close()


def test_a_service_that_cannot_start_is_reported_with_its_last_words(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(meeting.log).write_text("one\nno memory for the ring\n")
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    runs_instead(monkeypatch, "sh", "-c", "exit 3")
    found = service.find_or_start(env, Config(), meeting)
    with pytest.raises(UffdPrefetchError, match=r"status 3 \(no memory for the ring\)") as caught:
        found.come_up()
    assert caught.value.exit_code == 125
    found.close()


def test_a_service_that_does_not_start_is_not_waited_for_without_end(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_instead(monkeypatch, "sleep", "60")
    found = service.find_or_start(env, Config(), meeting)
    with pytest.raises(UffdPrefetchError, match="does not start"):
        found.come_up()
    assert found.end_unused()


@pytest.mark.parametrize("ours", [True, False])
def test_one_that_stands_still_is_not_waited_for_when_the_job_is_over(
    env: dict[str, str], meeting: Address, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """By the launcher that has started it, and by another one, which sees it by its socket."""
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(getting_on, "STANDS_SECONDS", 0.0)
    runs_instead(monkeypatch, "sleep", "60")
    first = service.find_or_start(env, Config(), meeting)
    second = service.find_or_start(env, Config(), meeting)
    assert first.started is not None and second.started is None
    waited: list[float] = []
    monkeypatch.setattr(service.time, "sleep", waited.append)
    with pytest.raises(TimeoutError):
        (first if ours else second).client(job_is_over=True)
    assert waited == [] and first.lives_on and not second.lives_on
    second.close()
    os.kill(first.started.pid, signal.SIGKILL)
    monkeypatch.undo()
    wait_until(first.started.has_ended, "its end")
    first.close()
    service.tidy(meeting.socket)


def test_a_stranger_on_the_socket_is_not_believed(
    env: dict[str, str], meeting: Address, fake: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake("babbles")
    monkeypatch.setattr(service, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    with pytest.raises(UffdPrefetchError, match="no message"):
        service.find_or_start(env, Config(), meeting)


def test_a_job_that_ends_before_its_service_is_up_has_a_summary_of_the_same_form(
    env: dict[str, str], tmp_path: Path, gate: Callable[[], None]
) -> None:
    def form(value: object) -> object:
        """Names and nesting; a list's elements and the type of a figure do not matter."""
        if isinstance(value, dict):
            return {name: form(each) for name, each in value.items()}
        return isinstance(value, list)

    done = wrap(env, tmp_path, "true", options=("-o", "short"))
    assert done.stderr.count(b"uffdprefetch: ") == 1 and done.returncode == 0
    short = json.loads((tmp_path / "short.summary.json").read_text())
    assert nothing_reported.WHY in short["rung_reason"]
    gate()
    wrap(env, tmp_path, "true", options=("-o", "strict", "--strict"))  # waits for the service
    strict = json.loads((tmp_path / "strict.summary.json").read_text())
    assert nothing_reported.WHY not in strict["rung_reason"]
    assert short["reads"] is None and strict["reads"], "nobody was there to follow any"
    strict["reads"] = None
    assert form(short) == form(strict)
    assert list(short["totals"]) == list(strict["totals"]) and list(short) == list(strict)


def test_the_services_environment_is_not_the_jobs(env: dict[str, str], meeting: Address) -> None:
    env.update(LD_PRELOAD="/x.so", PYTHONINSPECT="1", PYTHONPATH="relative:/abs")
    config = Config.of(policy="fixed", distance_bytes=8 << 20)
    environment = service._service_environment(env, config, meeting)
    assert "LD_PRELOAD" not in environment and "PYTHONINSPECT" not in environment
    assert Config.from_json(environment["UFFDPREFETCH_SERVE_CONFIG"]) == config
    entries = environment["PYTHONPATH"].split(os.pathsep)
    assert entries[:2] == [os.path.abspath("relative"), "/abs"]


def test_an_object_path_with_a_space_is_linked(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    path = tmp_path / "a b" / "x.so"
    path.write_text("")
    link = preloadable(str(path), str(tmp_path))
    assert " " not in link and os.path.samefile(link, path)
    assert preloadable(link, str(tmp_path)) == link


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (None, "/u.so"),
        ("", "/u.so"),
        ("/a.so", "/u.so:/a.so"),
        ("/a.so /b.so", "/u.so:/a.so:/b.so"),
        ("/a.so:/u.so", "/u.so:/a.so"),
        ("/u.so", "/u.so"),
    ],
)
def test_prepending_to_the_preload_list(old: str | None, expected: str) -> None:
    assert prepend_preload(old, "/u.so") == expected
