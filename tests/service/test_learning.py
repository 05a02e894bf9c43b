# SPDX-License-Identifier: Apache-2.0
"""`wrap --learn`: what a job reads when it starts is kept, and is what is read ahead next time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from components import Runner, on_memory, python
from conftest import require, uffdprefetch, wait_until
from harness import Start, service_pid
from harness import python as job_of_python

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartProfile

pytest_plugins = ("harness_fixtures",)

LEARN = ("--learn=mine",)
READS = "import sys\nfor path in sys.argv[1:]: open(path).read()\n"
#: The service is up before the job: of one that ends sooner nothing is recorded.
STRICT = ("--strict",)


@pytest.fixture
def cache(env: dict[str, str], tmp_path: Path) -> Path:
    require(not on_memory(tmp_path), "the files of a start are on storage")
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    return tmp_path / "cache" / "uffdprefetch" / "profiles" / "mine.upl"


def old(path: Path) -> str:
    path.write_text("it was there before")
    return str(path)


def files(profile: StartProfile, below: Path) -> set[str]:
    return {
        os.path.basename(one.path)
        for one in profile.entries
        if one.kind is EntryKind.FILE and one.path.startswith(f"{below}/")
    }


@pytest.mark.parametrize("engine", ["cache", "off"])
def test_the_second_start_is_read_ahead(
    env: dict[str, str], tmp_path: Path, cache: Path, engine: str
) -> None:
    runner = Runner(env, tmp_path)
    options = (*LEARN, *STRICT, "--engine", engine)
    words = python(READS, old(tmp_path / "a"), old(tmp_path / "b"))
    first = runner.wrapped(*words, options=options)
    assert (first.status, first.stdout, first.stderr) == (0, b"", "")
    assert first.summary["learn"]["state"] == "first run"
    assert first.summary["learn"]["recorded"]["record"] == "written"
    profile = profile_store.load(str(cache))
    assert files(profile, tmp_path) == {"a", "b"} and profile.runs == 1
    program, flag, _ = profile_store.described(str(cache)).split(maxsplit=2)
    assert (program, flag) == (os.path.realpath(words[0]), "-c")
    again = runner.wrapped(*words, options=options).summary["learn"]
    assert again["state"] == "done" and again["skipped"] == {} and again["ring_losses"] == 0
    wanted = sum(one.kind is EntryKind.FILE for one in profile.entries)
    assert 0.9 * wanted <= again["used"] <= wanted
    assert profile_store.load(str(cache)).runs == 2
    assert [name for name in os.listdir(env["UFFDPREFETCH_RUNDIR"]) if ".starts" in name] == []


def test_a_program_that_reads_other_files_each_time_is_learned_anew(
    env: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    """The third run finds, as the second has, that what was known is mostly of no use."""
    runner = Runner(env, tmp_path)
    for run in "abc":
        paths = [tmp_path / f"{run}{i}" for i in range(6)]
        for path in paths:
            path.write_bytes(bytes(4 << 20))
        done = runner.wrapped(*python(READS, *paths), options=(*LEARN, *STRICT))
        assert done.status == 0
    profile = profile_store.load(str(cache))
    assert (files(profile, tmp_path), profile.runs) == ({f"c{i}" for i in range(6)}, 1)


def test_where_nothing_can_be_kept_the_job_runs_as_without(
    env: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    cache.parent.parent.parent.mkdir()
    cache.parent.parent.write_text("no directory")
    done = Runner(env, tmp_path).wrapped(
        *python(READS, old(tmp_path / "a")), options=(*LEARN, *STRICT)
    )
    assert (done.status, done.stdout, done.stderr) == (0, b"", "")
    (note,) = [note["text"] for note in done.summary["notes"] if note["asked"]]
    assert note.startswith("--learn: the start is not kept") and str(cache.parent) in note
    assert done.summary["learn"]["recorded"]["record"] == "not written"


def test_a_sites_directory_that_is_not_there_is_told(
    env: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    options = (*LEARN, *STRICT, "--learn-dir", str(tmp_path / "nope"))
    done = Runner(env, tmp_path).wrapped(*python(READS, old(tmp_path / "a")), options=options)
    (note,) = [note["text"] for note in done.summary["notes"] if note["asked"]]
    assert note == f"--learn-dir: {tmp_path}/nope is no directory"
    assert cache.exists()


def test_a_record_that_cannot_be_written_yet_keeps_no_job_and_is_written_after_it(
    env: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    """Another writer has the directory; the launcher has ended when it is gone."""
    cache.parent.mkdir(parents=True)
    with profile_store.only_writer(str(cache.parent)):
        done = Runner(env, tmp_path).wrapped(
            *python(READS, old(tmp_path / "a")), options=(*LEARN, *STRICT)
        )
        assert (done.status, done.stdout, done.stderr) == (0, b"", "")
        assert done.summary["learn"]["recorded"]["record"] == "being written"
    wait_until(cache.exists, "the record")
    assert files(profile_store.load(str(cache)), tmp_path) == {"a"}
    left = os.listdir(env["UFFDPREFETCH_RUNDIR"])
    assert [name for name in left if not name.endswith(".log")] == []


def test_a_job_whose_service_dies_opens_on(
    env: dict[str, str], job: Start, tmp_path: Path, cache: Path
) -> None:
    """The log lives as long as who has it mapped; who is loaded later finds none."""
    path = old(tmp_path / "a")
    one = job(
        job_of_python(
            """
            import subprocess
            say(ready=True)
            hear()
            for _ in range(3):
                open(sys.argv[1]).read()
            code = "import sys; open(sys.argv[1]).read()"
            done = subprocess.run([sys.executable, "-S", "-c", code, sys.argv[1]])
            say(status=done.returncode)
            """,
            path,
        ),
        (*LEARN, *STRICT),
    )
    assert one.line() == {"ready": True}
    service_pid(env)
    one.kill_service()
    one.tell()
    assert one.line() == {"status": 0}
    assert one.process.wait() == 0
    assert not cache.exists()


def test_what_a_nested_wrap_runs_is_a_part_of_the_start(
    env: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    """Its launcher was told nothing of --learn, and says nothing of other options."""
    nested = [*uffdprefetch("wrap", "-o", "/dev/null"), "--"]
    words = [*nested, *python(READS, old(tmp_path / "a"))]
    done = Runner(env, tmp_path).wrapped(*words, options=(*LEARN, *STRICT))
    assert (done.status, done.stdout) == (0, b"") and "other options" not in done.stderr
    assert files(profile_store.load(str(cache)), tmp_path) == {"a"}
