# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch compare`: plainly and under `wrap` in turns, each time cold."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    HANG_SECONDS,
    process_gone,
    process_state,
    require,
    uffdprefetch,
    wait_until,
)
from harness import MIB, Start, python, service_pid, write_records
from nobody import Nobody
from terminal import terminal

from uffdprefetch.base import procfs
from uffdprefetch.compare import watch
from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

pytest_plugins = ("harness_fixtures",)

SIZE_BYTES = 24 * MIB
#: Reads mappings page by page, or some pages alone (MADV_RANDOM), and rests before it takes them
#: down, if that is among its words.
READER = """
import mmap, os, sys, time
for path in [word for word in sys.argv[1:] if word not in ("rest", "alone")]:
    fd = os.open(path, os.O_RDONLY)
    m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    if "alone" in sys.argv:
        m.madvise(mmap.MADV_RANDOM)
    print(sum(m[::4096 * (40 if "alone" in sys.argv else 1)]))
    if "rest" in sys.argv:
        time.sleep(0.3)
    m.close()
    os.close(fd)
"""
SCAN = [sys.executable, "-S", "-c", READER]


@pytest.fixture
def scratch(env: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """TMPDIR of what the test starts: empty again in the end."""
    path = tmp_path / "scratch"
    path.mkdir()
    env["TMPDIR"] = str(path)
    yield path
    assert list(path.iterdir()) == []


def start(env: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        uffdprefetch("compare", *words), env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def compare(env: dict[str, str], *words: str, status: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a comparison that ends with this status."""
    process = start(env, *words)
    try:
        out, err = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == status, err
    return out, err


def compared(env: dict[str, str], *words: str) -> dict[str, Any]:
    """The document."""
    return dict(json.loads(compare(env, "--json", *words)[0]))


def runs(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for row in document["variants"] for run in row["runs"]]


def kinds(document: dict[str, Any]) -> set[str]:
    """Of its remarks, but those that tell of the tests beside this one."""
    return {one["kind"] for one in document["remarks"]} - {"others", "stolen", "not-served"}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowBed]:
    require(os.geteuid() == 0 and why_no_bed() is None, "no slow bed")
    source = tmp_path_factory.mktemp("source")
    write_records(source / "a.bin", SIZE_BYTES)
    (source / "small").mkdir()
    for number in range(64):
        write_records(source / "small" / f"{number:02}.npy", 100_000, seed=number)
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-compare-bed-") as where:
        os.chmod(where, 0o755)  # for others, too
        source.chmod(0o755)
        with SlowBed(source, where) as made:
            yield made


# ---- cold, and counted ---------------------------------------------------------------------------


@pytest.mark.root
def test_each_run_is_cold_and_its_bytes_are_told(
    bed: SlowBed, env: dict[str, str], scratch: Path
) -> None:
    path = bed.path("a.bin")
    drop_cache(path)
    bed.reset()
    found = compared(env, "--rounds", "1", "--engine", "cache,pool", "--", *SCAN, str(path))
    assert [row["name"] for row in found["variants"]] == ["plain", "cache", "pool"]
    assert str(path) in found["files"]["paths"] and found["files"]["not_dropped"] == []
    told = [run["read_bytes"] for run in runs(found)]
    # beside a busy machine our thread in the job reads what the pool then reads itself
    assert all(0.9 * SIZE_BYTES <= one <= 1.5 * SIZE_BYTES for one in told), told
    # the first run, which is not measured, too
    assert bed.counters()["bytes"] >= 4 * SIZE_BYTES
    plain, cache, _ = runs(found)
    assert plain["major_faults"] > 0 and plain["unused_bytes"] is None
    assert cache["unused_bytes"] is not None
    assert kinds(found) == {"few-rounds"}


@pytest.mark.root
def test_files_that_are_mapped_for_a_moment_are_cold_in_each_run(
    bed: SlowBed, env: dict[str, str], scratch: Path
) -> None:
    paths = sorted(map(str, bed.path("small").iterdir()))
    total = sum(os.path.getsize(path) for path in paths)
    for path in paths:
        drop_cache(path)
    bed.reset()
    found = compared(env, "--rounds", "1", "--engine", "off", "--", *SCAN, *paths)
    assert set(paths) <= set(found["files"]["paths"])
    assert min(run["read_bytes"] for run in runs(found)) >= 0.9 * total
    assert bed.counters()["bytes"] >= 3 * total
    assert "seen-late" not in kinds(found)


@pytest.mark.root
def test_named_files_need_no_first_run(bed: SlowBed, env: dict[str, str], scratch: Path) -> None:
    path = bed.path("a.bin")
    path.read_bytes()
    bed.reset()
    found = compared(
        env, "--rounds", "1", "--no-first-run", "--drop", str(path), "--", *SCAN, str(path)
    )
    assert found["first_run"] is None
    assert SIZE_BYTES * 2 <= bed.counters()["bytes"] < SIZE_BYTES * 3


@pytest.mark.root
def test_a_file_that_stays_mapped_is_named_with_who_maps_it(
    bed: SlowBed, env: dict[str, str], scratch: Path
) -> None:
    path = bed.path("a.bin")
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        sum(mapped[::4096])
        words = ("--rounds", "1", "--engine", "off", "--", *SCAN, str(path), "rest")
        found = compared(env, *words)
    (one,) = found["files"]["not_dropped"]
    assert (one["path"], one["why"], one["holders"]) == (str(path), "held", [os.getpid()])
    assert "not-dropped" in kinds(found)
    assert runs(found)[0]["read_bytes"] == 0


@pytest.mark.root
def test_another_users_file_is_cold_and_its_bytes_are_estimated(
    bed: SlowBed, env: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        nobody = Nobody(Path(directory))
        nobody.bring("numpy")
        words = ["-m", "uffdprefetch", "compare", "--json", "--rounds", "1", "--"]
        reader = [nobody.python, "-S", "-c", READER, str(bed.path("a.bin"))]
        bed.path("a.bin").read_bytes()
        bed.reset()
        done = subprocess.run(
            [*nobody.prefix, nobody.python, *words, *reader],
            env=nobody.environment(env), cwd="/", capture_output=True, text=True,
            timeout=HANG_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert str(bed.path("a.bin")) in found["files"]["paths"]
        assert found["files"]["not_dropped"] == []
        for run in runs(found):
            assert run["read_is_estimated"] and abs(run["read_bytes"] - SIZE_BYTES) < MIB
        assert bed.counters()["bytes"] >= 2 * SIZE_BYTES


# ---- how runs end --------------------------------------------------------------------------------


def test_a_run_that_ends_otherwise_is_an_error_with_its_last_words(
    env: dict[str, str], scratch: Path
) -> None:
    job = 'echo begun; test -z "$LD_PRELOAD" || { echo broken >&2; exit 3; }'
    _, err = compare(env, "--", "sh", "-c", job, status=1)
    assert "| broken" in err and "begun" not in err
    assert "exit status 3, plainly exit status 0" in err.splitlines()[-1]


def test_one_that_fails_alike_is_compared_and_told(env: dict[str, str], scratch: Path) -> None:
    found = compared(env, "--rounds", "1", "--engine", "off", "--", "sh", "-c", "kill -9 $$")
    assert {run["status"] for run in runs(found)} == {-signal.SIGKILL}
    assert {"status", "no-files"} <= kinds(found)


def test_names_that_are_no_text_are_shown_by_their_bytes(
    env: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    odd = os.fsdecode(bytes(tmp_path) + b"/\xff.bin")
    Path(odd).write_bytes(bytes(MIB))
    options = ("--rounds", "1", "--engine", "off", "--no-first-run", "--drop", odd)
    out, _ = compare(env, *options, "--", "cat", odd)
    assert "\\xff.bin" in out.splitlines()[0]
    assert compared(env, *options, "--", "cat", odd)["files"]["paths"] == [odd]


def test_a_command_that_is_not_there_is_127(env: dict[str, str], scratch: Path) -> None:
    _, err = compare(env, "--", "no-such-program", status=127)
    assert err.splitlines() == ["uffdprefetch: cannot execute 'no-such-program': not found"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_the_job_and_says_what_it_has(
    number: int, env: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    """In the second round the job waits, and takes its time to end; the second signal, as
    timeout(1) sends one, changes nothing."""
    pid, hang, trapped = (tmp_path / name for name in ("pid", "hang", "trapped"))
    job = (
        f"trap 'echo >{trapped}; sleep 0.3; exit 0' INT;"
        f" while [ -e {hang} ]; do echo $$ >{pid}; sleep 0.05; done"
    )
    process = start(env, "--rounds", "9", "--engine", "off", "--", "sh", "-c", job)
    assert process.stderr is not None
    try:
        while "round 1 of 9, off" not in process.stderr.readline():
            assert process.poll() is None
        hang.touch()
        wait_until(lambda: pid.exists() and pid.read_text().strip(), "the job in round 2")
        process.send_signal(number)
        wait_until(trapped.exists, "the job's own end")
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -number
    assert process_gone(int(pid.read_text()))
    done = re.search(r"note: ended early, after (\d) of 9 rounds", out)
    assert done and int(done[1]) >= 1, (out, err)
    assert f"{done[1]} round" in out.splitlines()[1]


# ---- what is looked at ---------------------------------------------------------------------------


def test_under_wrap_the_jobs_processes_are_looked_at_and_none_of_ours(
    job: Start, env: dict[str, str]
) -> None:
    before = procfs.children(os.getpid())
    running = job(
        python("""
            import signal
            child = os.fork()
            if not child:
                signal.pause()
            say(pids=[os.getpid(), child])
            hear()
            os.kill(child, signal.SIGKILL)
        """)
    )
    pids = running.line()["pids"]
    service = service_pid(env)
    wrap = running.process.pid
    assert sorted(watch.job_processes(wrap, True, before)) == sorted(pids)
    plainly = watch.job_processes(wrap, False, before)
    assert {wrap, service, *pids} <= set(plainly)
    running.tell()
    assert running.finish().status == 0


@pytest.mark.root
@pytest.mark.parametrize("how", ["rest", "alone"])
def test_a_thread_that_waits_for_a_page_is_seen_to_wait_and_one_that_sleeps_is_not(
    how: str, bed: SlowBed, children: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """For readahead in state D, for a single page of FUSE in state S."""
    path = bed.path("a.bin")
    drop_cache(path)
    before = procfs.children(os.getpid())
    reader = children([*SCAN, str(path), how], stdout=subprocess.DEVNULL)
    with watch.RunWatcher(reader.pid, False, before) as seen:
        reader.wait(HANG_SECONDS)
    assert str(path) in seen.files and seen.waited_seconds > 0

    sleeper = children(["sleep", "1000"])
    wait_until(lambda: process_state(sleeper.pid) == "S", "the sleeper")
    with watch.RunWatcher(sleeper.pid, False, before) as seen:
        wait_until(lambda: seen.looks > 20, "twenty looks")
    assert seen.waited_seconds == 0


# ---- on a terminal -------------------------------------------------------------------------------


def test_on_a_terminal_it_shows_how_it_goes_in_one_line(
    env: dict[str, str], tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    job = f"while [ -e {hang} ]; do sleep 0.05; done"
    hang.touch()
    words = uffdprefetch(
        "compare", "--rounds", "1", "--engine", "off", "--", "sh", "-c", f"'{job}'"
    )
    with terminal(env, tmp_path) as window:
        window.type(f"clear; {' '.join(words)}")
        window.shows("first run, to see which files the job reads: ")
        hang.unlink()
        screen = window.shows("of plain's time", "ready$")
    assert "first run" not in screen and "round 1 of 1" not in screen
