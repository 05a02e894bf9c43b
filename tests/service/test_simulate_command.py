# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch simulate`: what it prints, draws and refuses."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import warnings_fail
from sim_bed import SMALL

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cli import main
from uffdprefetch.cli.simulate import node_counts
from uffdprefetch.report import simulate_png
from uffdprefetch.report.simulate import out_of_order
from uffdprefetch.sim import simulate

pytestmark = warnings_fail

PNG = b"\x89PNG\r\n\x1a\n"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_a_table_beside_its_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "paper5-1")
    head = text.splitlines()[1].split()
    assert head == [
        "policy",
        "nodes",
        "seconds",
        "published",
        "error",
        "stall",
        "preload",
        "hits",
        "file",
        "system",
    ]
    assert "Lower Bound" in text and "7.30" in text and "LBANN In Memory Store (Dynamic)" in text
    naive = next(line for line in text.splitlines() if line.startswith("Naive"))
    assert "27.78" in naive and "0.0%" in naive
    assert "the other way round" not in text


def test_json_has_everything_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "paper5-1", "--json", "--only", "hdmlp,lower"))
    assert found["schema"] == "uffdprefetch.simulation/1"
    assert [row["name"] for row in found["policies"]] == ["Lower Bound", "HDMLP"]
    hdmlp = found["policies"][1]
    assert hdmlp["options"] == {"in_order": True, "cleanup_read": False, "remote": False}
    assert hdmlp["stall_seconds"] == pytest.approx(hdmlp["seconds"] - hdmlp["compute_seconds"])
    assert sum(hdmlp["read_mb_by_source"].values()) == pytest.approx(hdmlp["consumed_mb"])
    assert found["samples"] == 10_000 and found["dataset_mb"] == pytest.approx(270, rel=0.02)


def test_what_does_not_apply_is_na_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(scenario().replace('d = "1GB"', 'd = "1MB"'))
    text = shown(capsys, str(path))
    assert "n/a" in text and "lbann: the data set is larger than the memory of all nodes" in text


def scenario() -> str:
    """Two nodes, a data set of 22 MB, two policies."""
    return replaced(
        SMALL,
        ('title = "two nodes"', 'title = "small"'),
        ('d = "1GiB"', 'd = "1GB"'),
        ("F = 100", "F = 200"),
        ("B = 10", "B = 8"),
        ('name = "ours"\n', ""),
        ('policy = "node-pool"\nevict = "lru"', 'policy = "lbann"'),
    )


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_sweep_over_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(scenario())
    picture = tmp_path / "s.png"
    found = json.loads(shown(capsys, str(path), "--nodes", "1..8", "--png", str(picture), "--json"))
    rows = found["policies"]
    assert [row["nodes"] for row in rows] == [1, 1, 2, 2, 4, 4, 8, 8]
    computing = [row["compute_seconds"] for row in rows[::2]]
    assert computing == pytest.approx([0.44, 0.22, 0.11, 0.055])
    assert picture.read_bytes().startswith(PNG)


def test_what_does_not_apply_is_said_once_with_its_numbers_of_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(replaced(scenario(), ('d = "1GB"', 'd = "8MB"')))
    lines = shown(capsys, str(path), "--nodes", "1..4").splitlines()
    why = "the data set is larger than the memory of all nodes"
    assert [line for line in lines if why in line] == [f"lbann, nodes 1, 2: {why}"]


def test_a_picture_of_the_time_by_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "s.png"
    shown(capsys, "paper5-1", "--png", str(picture))
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 20_000


def test_how_often_a_node_reads_a_sample(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["paper5-figure3.1", "--access-frequency", "0.1"]
    text = shown(capsys, *words, "--png", str(tmp_path / "f.png"))
    assert "more than 275 times (delta 0.1): expected 322.9 samples a node, drawn" in text
    assert (tmp_path / "f.png").read_bytes().startswith(PNG)
    found = json.loads(shown(capsys, *words, "--json"))
    # Of four nodes with 323 expected, each within five standard deviations.
    assert all(abs(drawn - 323) < 90 for drawn in found["drawn_samples"])
    assert found["mean_reads"] == 250


def test_what_comes_along_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--list")
    for name in ("paper5-1", "paper5-table5.6", "cluster-pool", "hdmlp", "staging-pool"):
        assert f"  {name} " in text
    assert "[in_order = true, cleanup_read = false, remote = true]" in text  # hdmlp's options


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which SCENARIO?"),
        (["paper9"], "no scenario 'paper9': give a TOML file or one of paper5-1"),
        (["/nonexistent.toml"], "cannot read scenario /nonexistent.toml: No such file"),
        (["paper5-1", "--only", "nobody"], "--only nobody: none of Lower Bound, Naive"),
        (["paper5-1", "--nodes", "x"], "'x' is no number"),
        (["paper5-1", "--nodes", "4..2"], "the smaller first"),
        (["paper5-1", "--nodes", "0"], "from 1 to"),
        (["paper5-1", "--seed", "-1"], "--seed -1: from 0 on"),
        (["paper5-1", "--access-frequency", "-2"], "more than -1"),
        (["paper5-1", "--access-frequency", "inf"], "more than -1"),
        (["paper5-1", "--epochs", "2"], "--epochs belongs to --replay"),
        (["paper5-1", "--access-frequency", "1", "--only", "x"], "--only has no meaning with"),
        (["--replay", "t", "--access-frequency", "1"], "--access-frequency has no meaning with"),
        (["--replay", "t", "--nodes", "2"], "--nodes has no meaning with --replay"),
        (
            ["--replay", "t", "--bandwidth", "1MB/s", "--latency", "1ms", "--budget", "512KiB"],
            "--budget 512KiB: at least 1MiB",
        ),
        (["paper5-1", "--only", "hdmlp,cluster-pool,naive"], "--only cluster-pool: none of Lower"),
        (["paper5-1", "--only", ""], "--only '': nothing is given"),
        (["paper5-1", "--only", "naive,"], "--only naive,: none of Lower Bound"),
        (["paper5-1", "--nodes", ""], "--nodes '': nothing is given"),
        (["paper5-1", "--png", ""], "--png '': nothing is given"),
        ([""], "SCENARIO '': nothing is given"),
        (["--list", "--json"], "--list stands alone: without --json"),
        (["--list", "--seed", "0"], "--list stands alone: without --seed"),
        (["nonsense", "--list", "--nodes", "3"], "--list stands alone: without --nodes"),
        (["/"], "cannot read scenario /: Is a directory"),
        (["paper5-1", "--", "x"], "nothing goes after --"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/x.png", "--png: cannot write {tmp}/no/x.png: No such file or directory"),
        ("picture", "--png {tmp}/picture: a picture's name ends in .png"),
        ("folder.png", "--png {tmp}/folder.png: is no file"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--access-frequency", "0.1"]])
def test_a_picture_that_cannot_be_is_said_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    said: str,
    option: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate, "workload_of", None)
    (tmp_path / "folder.png").mkdir()
    assert main(["simulate", "paper5-1", *option, "--png", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert said.format(tmp=tmp_path) in error and len(error.splitlines()) == 1


def test_without_matplotlib_nothing_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "workload_of", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "paper5-1", "--png", str(tmp_path / "x.png")]) == 2
    assert "-m pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_leaves_pictures_as_they_were(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "old.png").write_text("mine")
    for name in ("old.png", "new.png"):
        words = ["paper5-1", "--only", "nobody", "--png", str(tmp_path / name)]
        assert main(["simulate", *words]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert (tmp_path / "old.png").read_text() == "mine"


def test_the_result_is_printed_when_the_picture_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: bytes, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(simulate_png, "_write", full)
    for option in (["--only", "lower"], ["--access-frequency", "0.1"]):
        words = ["paper5-1", *option, "--png", str(tmp_path / "x.png"), "--json"]
        assert main(["simulate", *words]) == 1
        out, error = capsys.readouterr()
        assert "schema" in json.loads(out) and "x.png: No space left on device" in error


def test_a_kind_is_a_name_of_its_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "paper5-1", "--json", "--only", "perfect,naive"))
    assert [row["name"] for row in found["policies"]] == ["Lower Bound", "Naive"]


def test_a_pipe_is_no_scenario_unless_the_shell_made_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["simulate", str(tmp_path / "pipe")]) == 2
    assert capsys.readouterr().err == f"uffdprefetch: {tmp_path}/pipe is a pipe: give a file\n"
    end, other = os.pipe()
    with open(other, "w") as file:
        file.write(scenario())
    assert "small" in shown(capsys, f"/dev/fd/{end}")
    os.close(end)


@pytest.mark.parametrize("option", [[], ["--access-frequency", "0.1"]])
def test_more_than_memory_holds_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: list[str]
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(replaced(scenario(), ("F = 200", "F = 1_000_000_000")))
    words = [sys.executable, "-m", "uffdprefetch", "simulate", str(path), *option]
    # Less than the sizes of the samples alone.
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (4 << 30, 4 << 30))
    ended = subprocess.run(words, capture_output=True, text=True, preexec_fn=limit)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    assert "simulate: needs more memory than there is (F x E = 1,000,000,000 x" in ended.stderr


def test_node_counts() -> None:
    assert node_counts("1..512") == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert node_counts("3,5..11") == [3, 5, 10, 11]
    with pytest.raises(UffdPrefetchError):
        node_counts("1..x")


def test_out_of_order_pairs_are_named() -> None:
    def row(name: str, ours: float | None, published: float | None) -> dict[str, object]:
        return {"name": name, "seconds": ours, "published_seconds": published}

    rows = [row("a", 1.0, 2.0), row("b", 3.0, 1.0), row("c", None, 0.5), row("d", 9.0, None)]
    assert out_of_order(rows) == [["b", "a"]]
    assert out_of_order([row("a", 2.0, 1.0), row("b", 1.0, 1.0005)]) == []
