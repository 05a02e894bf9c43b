# SPDX-License-Identifier: Apache-2.0
"""`wrap --learn` with a start profile, `profile` and `warm`: the replay beside a job, and what is
told of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, process_gone, require, uffdprefetch, wait_until
from start_profiles import directory_entry, file_entry, left_behind, name_entry

from uffdprefetch.base.config import LearnOptions
from uffdprefetch.base.start_key import start_key, started
from uffdprefetch.base.units import format_size
from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.launch import replay as replays
from uffdprefetch.orders import learned_ranges, profile_store
from uffdprefetch.orders.start_profile import StartProfile
from uffdprefetch.predict.first_touches import RankOf
from uffdprefetch.protocol.replayed import learned, told_by

pytestmark = pytest.mark.slow

KEY = "start"
FILE_BYTES = 40_000
#: That jobs here start with: a profile that does not name it is another program's.
PROGRAMS = [
    Path(os.path.realpath(shutil.which(name) or sys.executable))
    for name in ("sleep", "sh", "true", "cat", sys.executable)
]
#: That a profile names: files, their directory, a name that is not there, and these.
PATHS = 22 + len(PROGRAMS)
#: Where a replay tells how far it is (csrc/replay/replay.c).
RESULT_FD, RESULT_BYTES = 3, 1024


class Home:
    """A user's profiles, and files that they name."""

    def __init__(self, env: dict[str, str], directory: Path) -> None:
        self.env, self.directory = env, directory
        env["XDG_CACHE_HOME"] = str(directory / "cache")
        self.profiles = directory / "cache" / "uffdprefetch" / "profiles"
        self.files = [directory / f"file{number}" for number in range(20)]
        for path in self.files:
            path.write_bytes(b"x" * FILE_BYTES)

    def keep(self, key: str = KEY, where: Path | None = None) -> Path:
        """A profile of all files, their directory and a name that is not there."""
        path = (where or self.profiles) / f"{key}.upl"
        entries = (*map(file_entry, self.files), directory_entry(self.directory))
        entries += (name_entry(self.directory / "missing"),)
        entries += tuple(map(name_entry, PROGRAMS))
        profile_store.store(str(path), StartProfile(entries, 2))
        return path

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            uffdprefetch(*words), env={**self.env, **more}, cwd=self.directory,
            capture_output=True, text=True, timeout=HANG_SECONDS,
        )  # fmt: skip

    def wrap(self, *options: str, job: tuple[str, ...] = ("sleep", "0.3")) -> dict[str, Any]:
        """The summary of a job that ended well."""
        done = self.run("wrap", "-f", "-o", "run", *options, "--", *job)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        found: dict[str, Any] = json.loads((self.directory / "run.summary.json").read_text())
        return found

    def left(self) -> list[str]:
        """In the runtime directory, when everybody has ended, but for logs of services."""
        return left_behind(self.env["UFFDPREFETCH_RUNDIR"])


@pytest.fixture
def home(env: dict[str, str], tmp_path: Path) -> Home:
    require(replays.why_not() is None, replays.why_not() or "")
    return Home(env, tmp_path)


# ---- beside a job ---------------------------------------------------------------------------


def test_what_a_profile_names_is_read_beside_the_job_and_told(home: Home) -> None:
    home.keep()
    home.files[3].write_bytes(b"another")
    learn = home.wrap(f"--learn={KEY}", "-v")["learn"]
    counts = [learn[name] for name in ("key", "state", "paths", "bytes", "skipped")]
    assert counts == [KEY, "done", PATHS - 1, 19 * FILE_BYTES, {"changed": 1}]
    assert learn["seconds"] > 0 and learn["cpu_seconds"] >= 0
    said = f"uffdprefetch: start {KEY}: {PATHS - 1} paths (742 KiB) asked for ahead of it in "
    (line,) = [line for line in home.said.splitlines() if line.startswith(said)]
    assert line.endswith("; 1 changed since")
    assert home.left() == []


def test_its_reads_are_none_of_the_jobs(home: Home) -> None:
    plain = home.wrap()["totals"]["unserved_read_bytes"]
    home.keep()
    learned = home.wrap(f"--learn={KEY}")["totals"]["unserved_read_bytes"]
    assert learned < plain + FILE_BYTES


def test_without_the_option_nothing_is_replayed(home: Home) -> None:
    home.keep(start_key(started(["sleep", "0.3"], "/usr/bin/sleep"), home.env))
    assert home.wrap()["learn"] is None


def test_the_key_is_the_programs_own_where_no_name_is_given(home: Home) -> None:
    program = subprocess.run(["which", "sleep"], capture_output=True, text=True).stdout.strip()
    key = start_key(started(["sleep", "0.3"], program), home.env)
    assert home.wrap("--learn")["learn"]["state"] == "first run"
    home.keep(key)
    learn = home.wrap("--learn")["learn"]
    assert (learn["key"], learn["state"], learn["paths"]) == (key, "done", PATHS)


def test_a_nested_wrap_replays_nothing_for_it_is_a_part_of_the_start(home: Home) -> None:
    home.keep()
    inner = uffdprefetch("wrap", "-v", "-o", "/dev/null", "--", "sleep", "0.3")
    home.wrap(f"--learn={KEY}", "-q", job=tuple(inner))
    assert "start " not in home.said
    home.keep()  # that start may have been recorded
    home.env["UFFDPREFETCH_LEARN"] = KEY  # by a user's variable it is asked for, too
    assert home.wrap(job=tuple(inner))["learn"]["paths"] == PATHS
    assert home.said.count("start start:") == 0


def test_a_sites_profile_is_read_where_the_user_has_none_and_never_written(home: Home) -> None:
    site = home.directory / "site"
    path = home.keep(where=site)
    before = path.read_bytes(), path.stat().st_mtime_ns
    options = (f"--learn={KEY}", "--learn-dir", str(site))
    assert home.wrap(*options)["learn"]["paths"] == PATHS
    home.files = home.files[:2]
    home.keep()
    assert home.wrap(*options)["learn"]["paths"] == 4 + len(PROGRAMS)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert os.listdir(site) == [path.name]


def test_another_program_s_profile_is_not_read_ahead_and_is_merged_with_what_starts(
    home: Home,
) -> None:
    """Of one name, in another environment: the next start has both."""
    entries = (*map(file_entry, home.files), name_entry(Path("/opt/env/bin/sleep")))
    path = home.profiles / f"{KEY}.upl"
    profile_store.store(str(path), StartProfile(entries, 2))
    learn = home.wrap(f"--learn={KEY}", "--strict", job=("sleep", "1"))["learn"]
    assert (learn["state"], learn["bytes"]) == ("another program", 0)
    assert profile_store.load(str(path)).runs == 3
    again = home.wrap(f"--learn={KEY}", job=("sleep", "1"))["learn"]
    assert again["state"] == "done"


def test_a_profile_that_is_none_is_told_and_the_job_runs(home: Home) -> None:
    path = home.keep()
    path.write_bytes(path.read_bytes()[:-1])
    learn = home.wrap(f"--learn={KEY}")["learn"]
    assert (learn["state"], learn["paths"]) == ("no profile", 0)


def test_the_budget_and_the_rate_are_kept(home: Home) -> None:
    home.keep()
    learn = home.wrap(f"--learn={KEY}", "--learn-budget", "100000", "--learn-depth=1")["learn"]
    assert (learn["state"], learn["bytes"]) == ("budget", 100_000)


def test_what_a_job_uses_is_read_on_and_no_more_than_that(home: Home) -> None:
    """More files than are read ahead of a job that opens none."""
    home.files = [home.directory / f"more{number}" for number in range(50)]
    for path in home.files:
        path.write_bytes(b"x" * FILE_BYTES)
    home.keep()
    idle = home.wrap(f"--learn={KEY}")["learn"]
    assert (idle["state"], idle["bytes"]) == ("cut short", 24 * FILE_BYTES)
    home.keep()
    reads = f"sleep 0.3; cat {' '.join(map(str, home.files))} >/dev/null; sleep 0.3"
    used = home.wrap(f"--learn={KEY}", "--strict", job=("sh", "-c", reads))["learn"]
    assert (used["state"], used["bytes"]) == ("done", 50 * FILE_BYTES)


def test_it_is_started_without_a_copy_of_its_launcher(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fork(2) copies, and each page that is written after it, the job would wait for."""
    monkeypatch.setenv("UFFDPREFETCH_RUNDIR", home.env["UFFDPREFETCH_RUNDIR"])
    monkeypatch.setattr(os, "fork", None)
    replay = replays.Replay(KEY, "")
    replay.begin([str(home.keep())], LearnOptions(KEY), None)
    replay.wait()
    assert replay.end()["state"] == "done"


LOOK = """
import os, sys
pid = os.getpid()
print(open(f"/proc/{pid}/task/{pid}/children").read().split(), sorted(os.listdir("/proc/self/fd")))
try:
    print(os.wait())
except ChildProcessError:
    print("no child")
"""


def test_the_job_has_no_child_and_no_descriptor_of_it(home: Home) -> None:
    home.keep()
    seen = []
    for options in ([], [f"--learn={KEY}"]):
        words = uffdprefetch("wrap", "-q", *options, "--", sys.executable, "-c", LOOK)
        seen.append(subprocess.run(words, env=home.env, capture_output=True, check=True).stdout)
    assert seen[0] == seen[1] and b"no child" in seen[1] and seen[1].startswith(b"[] ")


def replay_of(launcher: int) -> int | None:
    """The pid of the replay among a launcher's children."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            if os.readlink(f"/proc/{pid}/exe") == replays.PROGRAM:
                return int(pid)
        except OSError:
            continue
    return None


@pytest.fixture
def endless(home: Home) -> Home:
    """Its replay takes longer than any test: one MiB a second."""
    home.files[0].write_bytes(b"x" * (40 << 20))
    home.keep()
    home.env["UFFDPREFETCH_MAX_RATE"] = "1MiB/s"
    return home


def test_it_ends_with_the_job(endless: Home) -> None:
    summary = endless.wrap(f"--learn={KEY}", job=("sleep", "0.5"))
    assert summary["learn"]["state"] == "cut short"
    assert endless.left() == []


def test_storage_that_does_not_answer_holds_up_no_job(home: Home) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    source, mount = home.directory / "source", home.directory / "mount"
    source.mkdir()
    mount.mkdir()
    for path in home.files:
        path.rename(source / path.name)
    with SlowBed(source, mount) as bed:
        home.files = [bed.path(path.name) for path in home.files]
        home.keep()
        bed.unmount()  # nothing is known of it any more
        bed.mount()
        try:
            os.kill(bed.pid, signal.SIGSTOP)
            learn = home.wrap(f"--learn={KEY}", job=("sh", "-c", "sleep 0.3; exit 0"))["learn"]
            assert (learn["state"], learn["bytes"]) == ("cut short", 0)
            wait_until(lambda: not replays_of(home.profiles), "the end of the replay")
        finally:
            os.kill(bed.pid, signal.SIGCONT)
    assert home.left() == []


def replays_of(profiles: Path) -> list[str]:
    """The pids of replays of what lies in a directory of profiles."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == os.fsencode(replays.PROGRAM) and str(profiles).encode() in words[-2]:
            found.append(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_launcher_however_that_ends(endless: Home, number: int) -> None:
    words = uffdprefetch("wrap", "-q", f"--learn={KEY}", "--", "sleep", "60")
    wrap = subprocess.Popen(words, env=endless.env, start_new_session=True)
    found: list[int] = []
    wait_until(lambda: found.append(replay_of(wrap.pid) or 0) or found[-1], "the replay")
    os.kill(wrap.pid, number)
    wrap.wait(HANG_SECONDS)
    wait_until(lambda: process_gone(found[-1]), "the end of the replay")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(wrap.pid, signal.SIGKILL)  # the job, whose launcher cannot tell it


def test_it_ends_where_the_job_cannot_be_executed(endless: Home) -> None:
    done = endless.run("wrap", "-q", f"--learn={KEY}", "--", "./none")
    assert done.returncode == 127 and done.stderr.count("\n") == 1
    wait_until(lambda: endless.left() == [], "the runtime directory to be empty")


def test_what_a_killed_launcher_has_left_the_next_service_removes(endless: Home) -> None:
    words = uffdprefetch("wrap", "-q", f"--learn={KEY}", "--", "sleep", "60")
    wrap = subprocess.Popen(words, env=endless.env, start_new_session=True)
    wait_until(lambda: any(name.endswith(".replay") for name in endless.left()), "the replay")
    os.killpg(wrap.pid, signal.SIGKILL)
    wrap.wait()
    assert endless.wrap(job=("sleep", "0.5"))["learn"] is None
    wait_until(lambda: endless.left() == [], "the runtime directory to be empty")


def test_a_replay_that_is_killed_is_told_and_is_no_zombie(endless: Home) -> None:
    words = uffdprefetch("wrap", "-f", "-o", "run", f"--learn={KEY}", "--", "sleep", "3")
    wrap = subprocess.Popen(words, env=endless.env, cwd=endless.directory, stderr=subprocess.PIPE)
    found: list[int] = []
    wait_until(lambda: found.append(replay_of(wrap.pid) or 0) or found[-1], "the replay")
    os.kill(found[-1], signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{found[-1]}"), "its status to be taken")
    assert wrap.poll() is None
    wrap.communicate(timeout=HANG_SECONDS)
    summary = json.loads((endless.directory / "run.summary.json").read_text())
    assert wrap.returncode == 0 and summary["learn"]["state"] == "killed"
    assert endless.left() == []


def test_of_several_launchers_one_replays(endless: Home) -> None:
    endless.env["UFFDPREFETCH_RUN"] = "ranks"
    words = uffdprefetch("wrap", "-q", f"--learn={KEY}", "--", "sleep", "2")
    ranks = [subprocess.Popen(words, env=endless.env) for _ in range(4)]
    wait_until(lambda: any(map(_replays, ranks)), "a replay")
    assert {rank.wait(HANG_SECONDS) for rank in ranks} == {0}
    wait_until(lambda: endless.left() == [], "the runtime directory to be empty")


def test_the_last_of_several_launchers_tells_what_another_has_replayed(endless: Home) -> None:
    endless.env["UFFDPREFETCH_RUN"] = "ranks"
    words = uffdprefetch("wrap", "-q", "-f", "-o", "run", f"--learn={KEY}", "--", "cat")
    ranks = []
    for _ in range(2):
        ranks.append(
            subprocess.Popen(words, env=endless.env, cwd=endless.directory, stdin=subprocess.PIPE)
        )
        wait_until(lambda: any(map(_replays, ranks)), "a replay")
        wait_until(lambda: _has_started(ranks[-1]), "its job")
    replay = replay_of(ranks[0].pid)
    wait_until(lambda: _has_told(replay)["paths"] > 0, "what it tells of that")
    for rank in ranks:  # the one that replays first
        assert rank.stdin is not None
        rank.stdin.close()
        assert rank.wait(HANG_SECONDS) == 0
    learn = json.loads((endless.directory / "run.summary.json").read_text())["learn"]
    assert learn["state"] == "cut short" and learn["key"] == KEY
    assert learn["paths"] > 0 and learn["seconds"] > 0


def test_a_launcher_that_comes_when_the_replay_has_ended_replays_nothing(home: Home) -> None:
    home.keep()
    home.env["UFFDPREFETCH_RUN"] = "ranks"
    words = uffdprefetch("wrap", "-q", "-f", "-o", "run", f"--learn={KEY}", "--", "cat")
    ranks = []
    for _ in range(2):
        ranks.append(
            subprocess.Popen(words, env=home.env, cwd=home.directory, stdin=subprocess.PIPE)
        )
        wait_until(lambda: _has_started(ranks[-1]), "its job")
        wait_until(lambda: not _replays(ranks[-1]), "the end of its replay")
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
        assert rank.wait(HANG_SECONDS) == 0
    learn = json.loads((home.directory / "run.summary.json").read_text())["learn"]
    assert (learn["state"], learn["paths"]) == ("done", PATHS)
    assert home.left() == []


def _has_started(rank: subprocess.Popen[bytes]) -> bool:
    """Whether its job runs."""
    for child in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text() == "cat\n":
                return True
    return False


def _has_told(pid: int | None) -> dict[str, Any]:
    """What a replay that goes on has told of itself: each 0.1 s (its TELL_NS)."""
    text = Path(f"/proc/{pid}/fd/{RESULT_FD}").read_bytes()[:RESULT_BYTES]
    return learned(KEY, "", told_by(text.decode()))


def _replays(rank: subprocess.Popen[bytes]) -> bool:
    try:
        return replay_of(rank.pid) is not None
    except FileNotFoundError:
        return False


def test_without_the_program_a_line_says_so_and_the_job_runs(home: Home) -> None:
    home.keep()
    code = (
        "import sys; from uffdprefetch.launch import replay; replay.PROGRAM += '-not-built';"
        " from uffdprefetch.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "wrap", "-q", f"--learn={KEY}", "--", "echo", "ran"]
    done = subprocess.run(words, env=home.env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("uffdprefetch: --learn: the program that reads ahead (")
    assert line.endswith("-not-built) was not built; run `make setup`")


# ---- the commands ---------------------------------------------------------------------------


def test_where_no_file_may_be_written_the_job_runs(home: Home) -> None:
    """RLIMIT_FSIZE holds for the memory by which the replay is told, too."""
    home.keep()
    words = uffdprefetch("wrap", f"--learn={KEY}", "--", "sh", "-c", "exit 7")
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words], env=home.env,
        cwd=home.directory, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


def test_profiles_are_listed_shown_exported_and_removed(home: Home) -> None:
    assert home.run("profile", "list").stdout == f"no start profile in {home.profiles}\n"
    path = home.keep()
    (home.profiles / "bad.upl").write_bytes(b"no")
    path.with_suffix(".txt").write_text("/usr/bin/python3 /home/a/train.py\n")
    heads, row, flaw = home.run("profile", "list").stdout.splitlines()
    assert heads.split() == [
        "key", "of", "runs", "paths", "to", "read", "size", "orders", "recorded", "used"
    ]  # fmt: skip
    of, size = "/usr/bin/python3 /home/a/train.py", format_size(path.stat().st_size)
    assert row.split("  ")[:2] == [KEY, of] and f" 2     {PATHS}  781 KiB  {size} " in row
    assert row.split()[-1] in ("s", "min") and flaw == (
        f"{home.profiles}/bad.upl: it is no start profile"
    )
    document = json.loads(home.run("profile", "list", "--json").stdout)
    assert [one["key"] for one in document["profiles"]] == ["bad", KEY]
    shown = json.loads(home.run("profile", "show", KEY, "--json").stdout)
    assert (shown["schema"], len(shown["entries"])) == ("uffdprefetch.profile/1", PATHS)
    text = home.run("profile", "show", str(path)).stdout
    assert str(home.files[7]) in text and f"of {of}, 2 runs, 20 files" in text
    there = home.directory / "site"
    there.mkdir()
    assert home.run("profile", "export", KEY, str(there)).returncode == 0
    assert (there / path.name).read_bytes() == path.read_bytes()
    for name in (path.name, path.with_suffix(".txt").name):
        assert (there / name).stat().st_mode & 0o777 == 0o644
    assert home.run("profile", "remove", KEY).returncode == 0
    assert [one.name for one in home.profiles.iterdir()] == ["bad.upl"]


def test_learned_orders_are_listed_shown_exported_and_removed(home: Home) -> None:
    data = str(home.files[0])
    kept = home.profiles / f"{KEY}.ranges"
    ranks = [RankOf(0, 2), RankOf(1, 2)]
    names = [learned_ranges.name_of(data, (FILE_BYTES, 1, 1), rank) for rank in ranks]
    for name in names:
        learned_ranges.store(str(kept), name, data, array("q", [0, FILE_BYTES]))
    os.truncate(kept / f"{names[1]}.npy", 5)
    listed = home.run("profile", "list").stdout.splitlines()
    row = [KEY, "?", "0", "0", "0", "B", "0", "B", "2"]
    assert listed[1].split()[:9] == row, "without a profile, too"
    home.keep()
    (told,) = json.loads(home.run("profile", "list", "--json").stdout)["profiles"]
    assert (told["files"], told["orders"]) == (20, 2) and told["orders_bytes"] > 300
    sound, damaged = sorted(
        json.loads(home.run("profile", "show", KEY, "--json").stdout)["orders"],
        key=lambda one: "flaw" in one,
    )
    assert (sound["file"], sound["rank"], sound["ranks"], sound["ranges"]) == (data, 0, 2, 1)
    assert damaged["name"] == names[1]
    text = home.run("profile", "show", KEY).stdout
    assert "0 of 2" in text and damaged["flaw"] in text
    there = home.directory / "site"
    there.mkdir()
    assert home.run("profile", "export", KEY, str(there)).returncode == 2, "one is damaged"
    learned_ranges.remove(str(kept), names[1])
    assert home.run("profile", "export", KEY, str(there)).returncode == 0
    for end in (".json", ".npy"):
        copy = there / kept.name / (names[0] + end)
        assert copy.read_bytes() == (kept / copy.name).read_bytes()
        assert copy.stat().st_mode & 0o777 == 0o644
    assert home.run("profile", "remove", KEY).returncode == 0
    assert not kept.exists() and not home.profiles.joinpath(f"{KEY}.upl").exists()
    assert home.run("profile", "remove", KEY).returncode == 2


def test_warm_reads_what_a_profile_names(home: Home) -> None:
    path = home.keep()
    for which in (KEY, str(path)):
        document = json.loads(home.run("warm", which, "--json").stdout)
        assert (document["state"], document["bytes"]) == ("done", 20 * FILE_BYTES)
    home.files[0].unlink()
    said = home.run("warm", KEY).stdout
    assert said.startswith(f"start {KEY}: {PATHS - 1} paths (742 KiB) asked for ahead of it in ")
    assert said.endswith("; 1 gone\n")
    assert home.run("warm", KEY, "--learn-budget", "50000", "--max-rate", "1GB/s").returncode == 0
    assert home.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_warm_that_is_ended_leaves_nothing(endless: Home, number: int) -> None:
    words = uffdprefetch("warm", KEY, "--max-rate", "1MiB/s")
    warm = subprocess.Popen(words, env=endless.env, stderr=subprocess.PIPE)
    wait_until(lambda: endless.left() != [], "the replay")
    warm.send_signal(number)
    assert warm.communicate(timeout=HANG_SECONDS)[1] == b""
    assert warm.returncode == -number
    assert endless.left() == []
    wait_until(lambda: not replays_of(endless.profiles), "the end of the replay")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["profile"], 2, "the following arguments are required: list|show|remove|export"),
        (["profile", "what"], 2, "invalid choice: 'what'"),
        (["profile", "show"], 2, "profile show: wants a KEY or a FILE after it"),
        (["profile", "list", "x"], 2, "profile list: wants nothing after it"),
        (["profile", "show", "none"], 2, "no start profile 'none' in "),
        (["profile", "show", "none/none.upl"], 2, "none/none.upl: there is no such file"),
        (["profile", "show", "bad.upl"], 2, "bad.upl: it is no start profile"),
        (["profile", "remove", "bad.upl"], 2, "bad.upl: it is no start profile"),
        (["profile", "export", KEY], 2, "wants a KEY or a FILE, and a DIR after it"),
        (["profile", "export", KEY, "none"], 2, "none: it is no directory"),
        (["profile", "remove", KEY, "--json"], 2, "--json goes with list and show"),
        (["profile", "list", "--", "x"], 2, "nothing goes after --"),
        (["warm"], 2, "the following arguments are required: KEY|FILE"),
        (["warm", "none"], 2, "no start profile 'none' in "),
        (["warm", "fifo.upl"], 2, "fifo.upl: it is no file"),
        (["warm", "/proc/self/mem"], 1, "cannot read /proc/self/mem: "),
        (["warm", KEY, "--learn-depth", "0"], 2, "--learn-depth 0 is not in 1..256"),
        (["warm", KEY, "--max-rate", "x"], 2, "--max-rate: "),
    ],
)
def test_what_is_wrong_is_one_line(home: Home, words: list[str], status: int, said: str) -> None:
    home.keep()
    (home.directory / "bad.upl").write_bytes(b"no")
    os.mkfifo(home.directory / "fifo.upl")
    done = home.run(*words)
    assert done.returncode == status and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("uffdprefetch: ") and said in line


def test_without_a_place_for_profiles_a_line_says_so(home: Home) -> None:
    del home.env["XDG_CACHE_HOME"]
    home.env.pop("HOME", None)
    done = home.run("profile", "list")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "neither XDG_CACHE_HOME nor HOME is set" in done.stderr
    assert home.wrap("--learn")["learn"]["state"] == "first run"
