# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch summary`: what runs have left behind, shown, merged and compared."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, clean_environment, uffdprefetch
from fake_service import SUMMARY_JSON

from uffdprefetch.report.summary import lines


def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        uffdprefetch("summary", *words), cwd=cwd, capture_output=True, text=True,
        timeout=HANG_SECONDS, env=clean_environment(),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def left(path: Path, age: int = 0, **changes: Any) -> dict[str, Any]:
    """A summary on disk, written ``age`` seconds ago."""
    document = {**copy.deepcopy(SUMMARY_JSON), "host": "n0", **changes}
    path.write_text(json.dumps(document))
    os.utime(path, (1e9 - age, 1e9 - age))
    return document


def test_the_newest_of_the_current_directory_is_shown_as_v_shows_it(tmp_path: Path) -> None:
    left(tmp_path / "old.summary.json", 10, run="old", wall_seconds=99.0)
    document = left(tmp_path / "new.summary.json", run="new")
    (tmp_path / "no.json").write_text("{}")
    status, out, err = run(cwd=tmp_path)
    assert (status, err) == (0, ""), err
    assert out.splitlines() == lines(document, "new.summary.json", verbose=True)


def test_the_nodes_of_a_run_are_one_and_of_several_runs_each_is_shown(tmp_path: Path) -> None:
    left(tmp_path / "a.summary.json", 3, run="one", host="n0")
    left(tmp_path / "b.summary.json", 2, run="one", host="n1")
    left(tmp_path / "c.summary.json", 1, run="two", host="n0")
    status, out, _ = run(str(tmp_path), cwd=tmp_path)
    assert status == 0 and out.count("all figures: ") == 2
    assert f"all figures: {tmp_path}/a.summary.json, {tmp_path}/b.summary.json" in out
    status, out, _ = run("a.summary.json", "b.summary.json", "--json", cwd=tmp_path)
    document = json.loads(out)
    assert status == 0 and len(document["nodes"]) == 2
    assert document["totals"]["prefetched_bytes"] == 2 << 30


def test_two_runs_are_put_beside_each_other(tmp_path: Path) -> None:
    totals = {**SUMMARY_JSON["totals"], "demand_misses": 300, "waited_seconds": 8.0}
    left(tmp_path / "plain.summary.json", run="plain", wall_seconds=40.0, totals=totals)
    better = {**SUMMARY_JSON["totals"], "waited_seconds": 0.5}
    left(tmp_path / "wrapped.summary.json", run="wrapped", totals=better)
    status, out, _ = run(
        "--compare", "plain.summary.json", "wrapped.summary.json", cwd=tmp_path
    )  # fmt: skip
    rows = dict(re.split(r"\s\s+", line, maxsplit=1) for line in out.splitlines()[4:10])
    assert status == 0
    assert rows["time"].split() == ["40", "s", "12.5", "s", "-69", "%", "better"]
    assert rows["demand misses"].endswith("better")
    assert rows["waited, all threads"].endswith("better")
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = run(
        "--compare", "--json", "plain.summary.json", "wrapped.summary.json", cwd=tmp_path
    )
    document = json.loads(out)
    assert document["schema"] == "uffdprefetch.comparison/1"
    assert document["figures"][0]["verdict"] == "better"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.summary.json"], "cannot read no.summary.json: No such file"),
        (["bad.json"], "bad.json is no summary of a run"),
        (["other.json"], "its schema is not uffdprefetch.summary/2"),
        (["empty"], "there is no summary (*.summary.json) in"),
        (["--compare", "a.summary.json"], "--compare wants two runs, these are 1"),
        (["sparse.summary.json"], "sparse.summary.json is no summary of a run: KeyError"),
        (["--", "true"], "nothing goes after --"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    left(tmp_path / "a.summary.json")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "sparse.summary.json").write_text('{"schema": "uffdprefetch.summary/2"}')
    (tmp_path / "empty").mkdir()
    status, out, err = run(*words, cwd=tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert said in err


def test_runs_of_the_same_key_are_not_one(tmp_path: Path) -> None:
    """torchrun gives each of its runs the same one."""
    left(tmp_path / "plain.summary.json", 100, run="torch", wall_seconds=10.0)
    left(tmp_path / "wrapped.summary.json", 10, run="torch", wall_seconds=5.0)
    left(tmp_path / "other.summary.json", 9, run="torch", host="n1", wall_seconds=5.0)
    words = ("--compare", "plain.summary.json", "wrapped.summary.json")
    status, out, err = run(*words, cwd=tmp_path)
    assert status == 0 and "before: plain.summary.json" in out, err
    _, out, _ = run("plain.summary.json", "wrapped.summary.json", cwd=tmp_path)
    assert out.count("all figures: ") == 2
    _, out, _ = run(cwd=tmp_path)
    assert out.count("all figures: ") == 1
    assert "all figures: wrapped.summary.json, other.summary.json" in out
    _, out, _ = run("--json", "plain.summary.json", "wrapped.summary.json", cwd=tmp_path)
    assert len(json.loads(out)) == 2


def test_one_damaged_file_of_a_directory_hides_no_run(tmp_path: Path) -> None:
    left(tmp_path / "a.summary.json")
    (tmp_path / "b.summary.json").write_text("{")
    status, out, err = run(".", cwd=tmp_path)
    assert status == 0 and "all figures: a.summary.json" in out
    assert err.count("\n") == 1 and "b.summary.json is no summary" in err


def test_a_path_that_is_no_text_is_shown_by_its_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"/data/caf\xe9.mdb")
    left(tmp_path / "a.summary.json", files=[{"path": name, "size_bytes": 1}])
    status, out, err = run(cwd=tmp_path)
    assert status == 0 and "/data/caf\\xe9.mdb" in out, err
