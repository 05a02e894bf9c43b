# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch top`: finds runs, shows them on terminals, in pipes, as JSON; nobody feels it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, clean_environment, uffdprefetch, wait_until
from harness import auto, service_socket
from nobody import as_nobody
from snapshots import document
from terminal import terminal
from watched import Watched

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.rundir import socket_path
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.snapshot import decode
from uffdprefetch.view import fetch, model, watch
from uffdprefetch.view.sensors import Sensors

pytest_plugins = ("harness_fixtures", "watched")
pytestmark = auto

Start = Callable[..., "subprocess.Popen[bytes]"]


def top(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        uffdprefetch("top", *words), env=env, capture_output=True, text=True, timeout=HANG_SECONDS
    )


# ---- one look, a pipe, JSON ---------------------------------------------------------------------


def test_once_and_json_through_json_tool(run: Watched) -> None:
    tool = [sys.executable, "-m", "json.tool"]
    words = " ".join([*uffdprefetch("top", "--once", "--json"), "|", *tool])
    done = subprocess.run(["sh", "-c", words], env=run.env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    assert (read["schema"], read["run"]) == ("uffdprefetch.snapshot/1", "alpha-1")
    (rank,) = read["ranks"]
    (file,) = read["files"]
    assert rank["file"] == file["path"] == str(run.records.path)
    assert rank["size_bytes"] == file["size_bytes"] == run.records.size_bytes
    assert 0 < rank["position_bytes"] <= run.records.size_bytes
    assert file["resident_bytes"] is not None and file["mappings"] == 1
    assert read["service_pid"] == run.pid and len(read["job_pids"]) == 1
    decode(read)


def test_what_is_unknown_has_its_reason_beside_it(run: Watched) -> None:
    read = json.loads(top(run.env, "--once", "--json").stdout)
    for rank in read["ranks"]:
        for part in (rank["hit"], rank["stall"]):
            assert (part["share"] is None) == (part["why"] is not None)
    assert (read["node"]["io_pressure"]["share"] is None) == bool(
        read["node"]["io_pressure"]["why"]
    )
    births = read["not_managed"]
    assert (births["births"] is None) == (births["births_why"] is not None)
    assert {"hit.misses", "hit.blocks", "resident", "wasted"} <= set(read["sensors"])


def test_once_into_a_pipe_is_one_line(run: Watched) -> None:
    done = top(run.env, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1 and done.stdout.startswith("alpha-1 ")
    assert "1 rank" in done.stdout and "\x1b" not in done.stdout


def test_into_a_pipe_a_plain_line_per_interval(run: Watched, children: Start) -> None:
    process = children(
        uffdprefetch("top", "--interval", "100ms"), env=run.env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert all(line.startswith(b"alpha-1 ") and line.endswith(b"\n") for line in lines)
    assert not any(b"\x1b" in line for line in lines)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_SECONDS) == -signal.SIGINT


def test_json_into_a_pipe_is_a_document_a_line(run: Watched, children: Start) -> None:
    process = children(
        uffdprefetch("top", "--json", "--interval", "0.1"), env=run.env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    read = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert [d["run"] for d in read] == ["alpha-1"] * 3
    assert read[0]["seconds"] <= read[1]["seconds"] <= read[2]["seconds"]
    process.terminate()
    process.wait(HANG_SECONDS)


def test_a_reader_that_has_seen_enough_is_no_error_of_ours(run: Watched) -> None:
    words = " ".join([*uffdprefetch("top", "--interval", "100ms"), "| head -n 1"])
    done = subprocess.run(["sh", "-c", words], env=run.env, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--interval", "soon"), ("--interval", "1ms"), ("--", "x")])
def test_wrong_words_are_usage_errors(run: Watched, words: tuple[str, ...]) -> None:
    done = top(run.env, *words)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr


# ---- which run ----------------------------------------------------------------------------------


class Fake(threading.Thread):
    """A service that has one document to tell, in this process."""

    def __init__(self, directory: Path, key: str) -> None:
        super().__init__(daemon=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(socket_path(str(directory), key))
        self.listener.listen()
        self.key = key
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.recv(512)
            peer.send(wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0)))
            while peer.recv(512):
                text = json.dumps(document(2, run=self.key)).encode()
                memfd = os.memfd_create("fake")
                os.write(memfd, text)
                answer = wire.pack(wire.Type.SUMMARY, wire.SUMMARY.pack(len(text), 0))
                socket.send_fds(peer, [answer], [memfd])
                os.close(memfd)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Callable[[str], dict[str, str]]]:
    """Start fake services in one runtime directory; returns its environment."""
    made: list[Fake] = []

    def start(key: str) -> dict[str, str]:
        made.append(Fake(tmp_path / "fakes", key))
        return {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(tmp_path / "fakes")}

    yield start
    for one in made:
        one.close()


def test_the_only_run_needs_no_name_and_a_beginning_is_enough(fakes: Any) -> None:
    env = fakes("train-17")
    for words in ((), ("train-17",), ("tr",)):
        run = watch.choose(env, *(words or (None,)))
        assert run.key == "train-17"
        run.client.close()


def test_an_ambiguous_name_lists_the_runs_and_an_exact_one_is_taken(fakes: Any) -> None:
    fakes("train-1")
    env = fakes("train-17")
    for wanted, called in ((None, "RUN"), ("tr", "'tr'")):
        with pytest.raises(UffdPrefetchError) as caught:
            watch.choose(env, wanted)
        assert caught.value.exit_code == 2
        first, *rest = caught.value.message.splitlines()
        assert first == f"{called} may be any of 2, name one:"
        assert [line.split()[0] for line in rest] == ["train-1", "train-17"]
        assert "2 ranks, 2 min 34 s, python3" in rest[0]
    run = watch.choose(env, "train-1")
    assert run.key == "train-1"
    run.client.close()


def test_an_unknown_name_is_answered_with_those_that_run(fakes: Any) -> None:
    env = fakes("train-17")
    with pytest.raises(UffdPrefetchError, match=r"no run 'x' .*running: train-17") as caught:
        watch.choose(env, "x")
    assert caught.value.exit_code == 1


def test_no_job_is_one_clear_line_and_nothing_is_made(tmp_path: Path) -> None:
    env = {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(tmp_path / "none")}
    done = top(env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("uffdprefetch: no job of yours runs under uffdprefetch")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "none").exists()


def test_sockets_of_dead_services_and_of_other_nodes_are_passed_over(
    tmp_path: Path, fakes: Any
) -> None:
    env = fakes("alive")
    directory = str(tmp_path / "fakes")
    for path in (socket_path(directory, "dead"), socket_path(directory, "x", "other-node")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
            gone.bind(path)
    (tmp_path / "fakes" / "file@x.sock").write_text("no socket")
    run = watch.choose(env, None)
    assert run.key == "alive"
    run.client.close()


def test_what_listens_and_is_no_service_is_passed_over(tmp_path: Path, fakes: Any) -> None:
    env = fakes("alive")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(socket_path(str(tmp_path / "fakes"), "stranger"))
        stranger.listen()

        def babble() -> None:
            peer, _ = stranger.accept()
            with peer:
                peer.send(b"hello?")

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        assert [run.key for run in watch.runs(env)] == ["alive"]
        thread.join(HANG_SECONDS)


def test_a_job_with_another_tmpdir_is_found_by_the_kernels_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "elsewhere"
    directory.mkdir(mode=0o700)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    ours = socket_path(str(directory), "job")
    listing = "Num       RefCount Protocol Flags    Type St Inode Path\n" + "".join(
        f"ffff: 00000002 00000000 {flags} {kind} 01 4711 {path}\n"
        for flags, kind, path in (
            ("00010000", "0005", ours),
            ("00000000", "0005", socket_path(str(directory), "connected")),
            ("00010000", "0001", socket_path(str(directory), "stream")),
            ("00010000", "0005", socket_path(str(open_to_all), "untrusted")),
            ("00010000", "0005", str(directory / "other.sock")),
            ("00010000", "0005", "@abstract"),
        )
    )
    environ = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}
    monkeypatch.setattr(watch.rundir, "existing_directories", lambda environ: [])
    assert watch.sockets(environ, listing) == [ours]
    assert watch.sockets({"UFFDPREFETCH_RUNDIR": str(tmp_path / "x")}, listing) == []


def test_another_users_run_is_not_listed_and_refuses_to_be_watched(run: Watched) -> None:
    path = service_socket(run.env)
    directory = os.path.dirname(path)

    def knock() -> int:
        try:
            watch.WatchClient.open(path)
        except PermissionError:
            return 13
        except watch.NotOurService:
            return 14  # the listener is another uid's: we hang up
        return 0

    assert as_nobody(knock) == 13
    try:  # as if somebody had opened both
        os.chmod(directory, 0o711)
        os.chmod(path, 0o666)
        for parent in Path(directory).parents[:2]:
            os.chmod(parent, 0o711)
        assert as_nobody(knock) in (13, 14)
        done = top(run.env, "--once")
        assert done.returncode == 1 and "others may enter" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        os.chmod(directory, 0o700)
    run.read()


# ---- ends ---------------------------------------------------------------------------------------


def test_a_job_that_is_killed_while_watched_is_told_and_is_no_failure(
    own: Watched, children: Start
) -> None:
    process = children(
        uffdprefetch("top", "--interval", "100ms"), env=own.env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    os.killpg(own.job.process.pid, signal.SIGKILL)
    last = process.stdout.read().splitlines()[-1]
    assert process.wait(HANG_SECONDS) == 0
    assert last.startswith(b"uffdprefetch: beta-2: the job has ended (watched for ")


def test_a_service_that_dies_is_told_apart_from_a_job_that_ends(
    own: Watched, children: Start
) -> None:
    process = children(
        uffdprefetch("top", "--interval", "100ms"), env=own.env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    own.job.kill_service()
    last = process.stdout.read().splitlines()[-1]
    assert process.wait(HANG_SECONDS) == 1
    assert b"the service died; the job goes on without prefetching" in last
    assert top(own.env).returncode == 1  # its socket is still there, and nobody listens
    own.read()


def test_a_service_that_is_stopped_is_silent_and_comes_back(
    own: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ANSWER_SECONDS", 0.05)
    client = own.watcher()
    fetcher = fetch.Fetcher(client, client.snapshot(), 0.05, lambda: None, Sensors())
    fetcher.start()
    os.kill(own.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: fetcher.latest.state == model.SILENT, "the silence to be noticed")
    finally:
        os.kill(own.pid, signal.SIGCONT)
    wait_until(lambda: fetcher.latest.state == model.LIVE, "the service to answer again")
    fetcher.stop()
    own.read()
    assert own.job.service() == own.pid


# ---- on a terminal ------------------------------------------------------------------------------

TOP = " ".join(uffdprefetch("top"))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_dashboard_fills_a_terminal_and_q_gives_it_back(
    run: Watched, tmp_path: Path, width: int, height: int
) -> None:
    with terminal(run.env, tmp_path, width, height) as screen:
        screen.type("echo before; stty -a > stty.before; clear; echo kept")
        screen.type(f"{TOP}; echo status=$?; stty -a | cmp - stty.before && echo sa''me")
        parts = ("storage", "ahead", "prefetch", "readers", "file", "records.bin")
        text = screen.matches(r"^alpha-1 .* q quits$", "^rank ", r"^ +0 .*[▆►]", *parts)
        assert screen.show("alternate_on") == "1"
        titles = next(line for line in text.splitlines() if line.startswith("rank "))
        assert {"at", "pattern", "MB/s", "hit", "stall", "window", "flight", "wasted"} <= set(
            titles.split()
        )
        assert ("misses" in titles) == (width == 160)
        screen.key("q")
        after = screen.shows("same", "status=0", "kept")
        assert "records.bin" not in after
        assert screen.show("alternate_on") == "0" and screen.show("cursor_flag") == "1"


def test_the_picture_follows_a_resize_and_ctrl_c_leaves_cleanly(
    run: Watched, tmp_path: Path
) -> None:
    with terminal(run.env, tmp_path, 160, 50) as screen:
        screen.type(f"{TOP}; echo status=$?")
        screen.shows("misses stall")  # a column that 80 have no room for
        screen.resize(80, 24)

        def narrow() -> bool:
            text = screen.screen()
            one = len(re.findall("^rank ", text, re.MULTILINE)) == 1
            return one and "hit stall" in text and "misses stall" not in text

        wait_until(narrow, "the picture for 80 columns and nothing of the old one")
        screen.resize(30, 5)
        screen.shows("needs 40x6")
        screen.resize(100, 30)
        screen.shows("pattern")
        screen.key("C-c")
        screen.shows("status=0")
        assert screen.show("alternate_on") == "0"


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(
    run: Watched, tmp_path: Path
) -> None:
    with terminal(run.env, tmp_path) as screen:
        screen.type(TOP)
        screen.shows("q quits")
        screen.key("C-z")
        screen.shows("Stopped")
        assert screen.show("alternate_on") == "0"
        screen.type("stty -a | grep -q ' icanon' && echo coo''ked; fg")
        wait_until(lambda: screen.show("alternate_on") == "1", "the dashboard again")
        screen.shows("q quits")
        screen.key("q")
        screen.shows("cooked")


def test_a_terminal_without_utf8_and_colour_gets_neither(run: Watched, tmp_path: Path) -> None:
    with terminal(run.env, tmp_path) as screen:
        screen.type(f"LC_ALL=C NO_COLOR=1 {TOP}")
        assert screen.shows("q quits", "records.bin").isascii()
        assert not re.search(r"\x1b\[[\d;]*3[1-8]", screen.coloured())
        screen.key("q")


def test_a_job_that_ends_while_watched_is_told_on_the_terminal_it_was_watched_on(
    own: Watched, tmp_path: Path
) -> None:
    with terminal(own.env, tmp_path) as screen:
        screen.type(f"{TOP}; echo status=$?")
        screen.shows("q quits")
        own.job.tell("end")
        own.job.finish().good()
        text = screen.shows("status=0", "uffdprefetch: beta-2: the job has ended (watched for")
        assert screen.show("alternate_on") == "0" and "q quits" not in text


def test_once_on_a_terminal_is_a_picture_that_stays(run: Watched, tmp_path: Path) -> None:
    with terminal(run.env, tmp_path) as screen:
        screen.type(f"{TOP} --once; echo status=$?")
        screen.shows("status=0", "records.bin", "rank ")
        assert screen.show("alternate_on") == "0"


def test_a_dumb_terminal_gets_lines(run: Watched, tmp_path: Path) -> None:
    with terminal(run.env, tmp_path) as screen:
        screen.type(f"TERM=dumb {TOP} --interval 100ms")
        screen.shows("1 rank")
        assert screen.show("alternate_on") == "0"
        screen.key("C-c")
