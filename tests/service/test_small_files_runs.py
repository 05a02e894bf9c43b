# SPDX-License-Identifier: Apache-2.0
"""Jobs that read trees of small files under `wrap`, from cold on the slow bed: what comes over its
link, what the job has read, and what is said of it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from components import Run, Runner, python
from conftest import require
from harness import MIB

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache, why_no_bed
from uffdprefetch.report.summary import short_lines

pytest_plugins = ("components",)

DIRECTORIES, FILES = 10, 80
#: Slow enough that a service beside a busy machine comes before a job's end.
LATENCY_US = 5000
#: What is not of the data: what the probe of a mount reads, a moment's guesses.
FEW_FILES = 24

WALK = """
import hashlib, os, random, sys
paths = [os.path.join(at, name) for at, _, names in os.walk(sys.argv[1]) for name in names]
{order}
sha = hashlib.sha256()
for path in paths:
    with open(path, "rb") as file:
        sha.update(file.read())
print(sha.hexdigest())
"""
#: Until something is read of the bed.
AWAIT = """
import json, sys, time
while not json.load(open(sys.argv[1]))["bytes"]:
    time.sleep(0.01)
"""
SHUFFLED = WALK.format(order="random.Random(1).shuffle(paths)")


def shell(command: str, tree: Path) -> list[str]:
    return ["bash", "-o", "pipefail", "-c", f"cd '{tree}' || exit; {command}"]


TOOLS = {
    "tar": "tar cf - . | sha256sum",
    "md5sum": "md5sum */* | sha256sum",
    "cp": 'd=$(mktemp -d); cp -r . "$d/to" && cat "$d"/to/*/* | sha256sum; rm -r "$d"',
    "xargs": "find . -type f | xargs -P 4 -n 50 md5sum | sort | sha256sum",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, chance = tmp_path_factory.mktemp("small"), random.Random(1)
    for number in range(DIRECTORIES):
        (directory / f"class{number:02}").mkdir()
        for file in range(FILES):
            path = directory / f"class{number:02}" / f"{chance.getrandbits(32):08x}-{file}.jpg"
            path.write_bytes(chance.randbytes(chance.randrange(4_000, 30_000)))
    return directory


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def total_bytes(tree: Path) -> int:
    return sum(path.stat().st_size for path in files_of(tree))


@pytest.fixture(scope="module")
def bed(tree: Path) -> Iterator[SlowBed]:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(tree, latency_us=LATENCY_US) as mounted:
        yield mounted


@pytest.fixture
def runner(runner: Runner) -> Runner:
    """The service is up before the job: what is read until then nobody sees."""
    runner.env["UFFDPREFETCH_STRICT"] = "1"
    return runner


def cold(bed: SlowBed) -> None:
    for path in files_of(bed.path(".")):
        drop_cache(path)
    bed.reset()


def bytes_of(bed: SlowBed) -> int:
    return int(bed.counters()["bytes"])


def wrapped(runner: Runner, *words: str, **how: Any) -> tuple[Run, dict[str, int]]:
    """The run, and what is said of small files."""
    run = runner.wrapped(*words, **how)
    assert run.status == 0, run.stderr
    return run, (run.summary["reads"] or {}).get("small_files") or {}


def check_followed(runner: Runner, bed: SlowBed, words: list[str], total_bytes: int) -> None:
    """Many were read ahead, beside a busy machine, too; each once, and next to nothing in vain."""
    cold(bed)
    run, small = wrapped(runner, *words)
    came_bytes = bytes_of(bed)
    assert run.stdout == runner.plain(*words), "from memory by now"
    assert small["used"] > DIRECTORIES * FILES // 8, run.summary["degradations"]
    assert small["read"] - small["used"] <= 64
    assert came_bytes <= 1.05 * total_bytes + 4 * MIB
    assert run.summary["reads"]["read_bytes"] >= small["used_bytes"] > 0
    assert "small files: " in run.stderr or not run.stderr
    assert run.summary["reads"]["processes"] >= 1
    assert run.summary["totals"]["storage_read_bytes"] is None, "FUSE counts nothing"
    assert not run.summary["degradations"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tree_that_is_gone_over_is_read_ahead(
    runner: Runner, bed: SlowBed, total_bytes: int, tool: str
) -> None:
    check_followed(runner, bed, shell(TOOLS[tool], bed.path(".")), total_bytes)


def test_a_program_that_walks_is_read_ahead_of(
    runner: Runner, bed: SlowBed, total_bytes: int
) -> None:
    check_followed(runner, bed, python(WALK.format(order=""), bed.path(".")), total_bytes)


def test_without_an_order_next_to_nothing_is_read_for_nothing(
    runner: Runner, bed: SlowBed, total_bytes: int
) -> None:
    words = python(SHUFFLED, bed.path("."))
    cold(bed)
    run, small = wrapped(runner, *words)
    assert bytes_of(bed) <= total_bytes + FEW_FILES * 32_768
    assert small.get("read", 0) - small.get("used", 0) <= FEW_FILES
    assert run.stdout == runner.plain(*words)


@pytest.mark.parametrize("tool", ["tar", "md5sum"])
def test_of_what_is_in_memory_nothing_is_read(runner: Runner, bed: SlowBed, tool: str) -> None:
    words = shell(TOOLS[tool], bed.path("."))
    for path in files_of(bed.path(".")):
        path.read_bytes()
    bed.reset()
    run, small = wrapped(runner, *words)
    assert bytes_of(bed) == 0 and small.get("read", 0) == 0
    assert run.stdout == runner.plain(*words)


def test_with_reads_off_nothing_is_read_ahead(
    runner: Runner, bed: SlowBed, total_bytes: int
) -> None:
    cold(bed)
    run, small = wrapped(runner, *shell(TOOLS["md5sum"], bed.path(".")), options=("--reads", "off"))
    assert run.summary["reads"] is None and not small
    assert bytes_of(bed) == total_bytes


@pytest.mark.parametrize("how", [{"keep_cache": False}, {"direct_io": True}])
def test_where_nothing_is_kept_nothing_is_read_ahead_and_that_is_said(
    runner: Runner, tree: Path, how: dict[str, bool]
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(tree, latency_us=LATENCY_US, **how) as bed:  # type: ignore[arg-type]
        words = shell(TOOLS["md5sum"], bed.path("."))
        bed.reset()
        out = runner.plain(*words)
        plain_bytes = bytes_of(bed)
        bed.reset()
        run, small = wrapped(runner, *words)
        came_bytes = bytes_of(bed)
    assert run.stdout == out
    assert came_bytes <= plain_bytes + 32_768, "the probe's"
    assert small.get("read", 0) == 0
    said = [*run.summary["degradations"], *map(str, run.summary["reads"]["left_alone"])]
    assert any("its file system" in one for one in said), said


def test_two_jobs_in_one_tree_read_it_once(
    runner: Runner, bed: SlowBed, total_bytes: int, tmp_path: Path
) -> None:
    """The second service leaves it to the first, and says so."""
    words = shell(TOOLS["md5sum"], bed.path("."))
    cold(bed)
    (tmp_path / "other").mkdir()
    other = Runner(runner.env, tmp_path / "other")
    env = {**runner.env, "UFFDPREFETCH_RUN": "other"}
    with subprocess.Popen(
        other.command(*words), env=env, cwd=other.cwd, stdout=subprocess.PIPE
    ) as first:
        run, small = wrapped(runner, *words)
        out, _ = first.communicate()
    assert first.returncode == 0 and run.stdout == out
    assert bytes_of(bed) <= 1.05 * total_bytes + 4 * MIB
    others = (other.summary()["reads"] or {}).get("small_files") or {}
    assert small.get("used", 0) + others.get("used", 0) > DIRECTORIES * FILES // 8
    for one, each in ((run.summary, small), (other.summary(), others)):
        said = [line for line in one["degradations"] if "another service of this user" in line]
        assert len(said) <= 1 and (each.get("directories") or not each or said)


def test_what_is_no_file_is_not_touched(runner: Runner, tmp_path: Path, tree: Path) -> None:
    """Pipes, sockets, links and strange names among the files; the pipe's writer loses nothing."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "odd"
    subprocess.run(["cp", "-r", str(tree / "class00"), str(source)], check=True)
    os.mkfifo(source / "80000000.jpg")
    os.symlink("loop.jpg", source / "loop.jpg")
    os.symlink("80000000.jpg", source / "70000000.jpg")
    os.symlink("..", source / "up")
    (source / os.fsdecode(b"90\xff\xfe.jpg")).write_bytes(b"x" * 5000)
    (source / "a0\n.jpg").write_bytes(b"y" * 5000)
    (source / ("b" * 255)).write_bytes(b"z" * 5000)
    with socket.socket(socket.AF_UNIX) as bound, SlowBed(source, latency_us=LATENCY_US) as bed:
        bound.bind(str(source / "60000000.jpg"))
        pipe = bed.path("80000000.jpg")
        command = (
            f"(for i in $(seq 2000); do echo $i; done > '{pipe}') & "
            f"exec 3< '{pipe}';"
            " find . -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum;"
            " cat <&3 | sha256sum; wait"
        )
        words = shell(command, bed.path("."))
        run, small = wrapped(runner, *words)
        assert run.stdout == runner.plain(*words)
        assert bytes_of(bed) <= 1.05 * sum(p.stat().st_size for p in files_of(source)) + 4 * MIB
    assert small["used"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--plan: of its 80 files none was seen to be opened"),
        (("--reads", "off"), "--plan: its files are not read ahead"),
        (("--policy", "plan"), "--plan: its files are not read ahead"),
        (("--policy", "none"), "--plan: it is not followed under --policy none"),
    ],
)
def test_a_plan_of_which_nothing_is_followed_is_said(
    runner: Runner, tmp_path: Path, bed: SlowBed, options: tuple[str, ...], said: str
) -> None:
    """Of a job that opens none of its files, and ends once they are read ahead, if they are."""
    cold(bed)
    plan = tmp_path / "plan.txt"
    plan.write_text("".join(f"{path}\n" for path in sorted(files_of(bed.path("class00")))))
    job = python(AWAIT if not options else "import time; time.sleep(0.5)", bed.path(CONTROL_NAME))
    run, _ = wrapped(runner, *job, options=("--plan", str(plan), *options))
    (note,) = [one["text"] for one in run.summary["notes"] if one["asked"]]
    assert note.startswith(said)
    assert f"note: {note}" in short_lines(run.summary)
