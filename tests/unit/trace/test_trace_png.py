# SPDX-License-Identifier: Apache-2.0
"""The picture for papers: made for any trace, said in grey as well, with what is missing."""

from __future__ import annotations

import builtins
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from conftest import require

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.report import panels, png
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import Kind
from uffdprefetch.trace.file.trace_file import Trace

pytestmark = pytest.mark.slow


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    return matplotlib


@pytest.fixture(autouse=True)
def _needs_matplotlib(request: pytest.FixtureRequest) -> Iterator[None]:
    if "without" not in request.node.name:
        require(_matplotlib(), "matplotlib is not installed")
    yield


def texts_of(fig: Any) -> str:
    import matplotlib.text

    return " ".join(one.get_text() for one in fig.findobj(matplotlib.text.Text))


def drawn(trace: Trace, report: dict[str, Any] | None = None) -> Any:
    drawn = analyse(trace) if report is None else report
    return png.draw(trace, drawn, png.matplotlib_or_error("--format png"))


def test_the_file_is_a_png_of_a_papers_width(tmp_path: Path) -> None:
    path = tmp_path / "trace.png"
    trace = synthetic.make("skip", records=200)
    png.write(trace, analyse(trace), str(path))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == int(png.WIDTH_INCHES * png.DPI) and 1000 < height < 4000


def test_axes_have_units_panels_titles_and_the_legend_all_ranks() -> None:
    words = texts_of(drawn(synthetic.make("contiguous", records=300, served=True)))
    for expected in ("offset in the file [MiB]", "time [s]", "(a) train.lmdb/data.mdb",
                     "(b) single accesses", "(c) stall by rank", "(d) time of each iteration",
                     "rank 0", "rank 3", "miss", "read ahead by our service"):  # fmt: skip
        assert expected in words


def test_where_a_rank_read_there_is_its_mark() -> None:
    trace = synthetic.make("skip", records=120, epochs=1)
    access_map = drawn(trace).axes[0]
    span, size = access_map.get_xlim()[1], access_map.get_ylim()[1]
    marks = np.concatenate(
        [one.get_offsets().filled() for one in access_map.collections if one.get_zorder() == 3]
    )
    around = trace.events[trace.events["kind"] == Kind.AROUND]
    times = (around["time_ns"] - synthetic.START_NS) / 1e9
    offsets = around["offset"] + around["aux"] * synthetic.PAGE
    assert len(marks) > 0.9 * len(around)
    for t, offset in zip(times, offsets, strict=True):
        near = np.hypot((marks[:, 0] - t) / span, (marks[:, 1] - offset) / size)
        assert near.min() < 1.5 / panels.ROWS


def test_no_rank_covers_the_others_for_a_while() -> None:
    """Drawn slice by slice of time, a shuffled trace showed stripes that were not in it."""
    access_map = drawn(synthetic.make("shuffled", records=4000, epochs=1)).axes[0]
    for one in access_map.collections:
        if one.get_zorder() == 3:
            times = one.get_offsets()[:, 0]
            assert np.ptp(times) > 0.7 * access_map.get_xlim()[1]


def test_ranks_differ_in_more_than_colour() -> None:
    def lightness(colour: str) -> float:
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * r + 0.587 * g + 0.114 * b

    looks = [panels.look_of(i) for i in range(28)]
    assert len(set(looks)) == 28
    for a, b in itertools.pairwise(looks):
        assert a[1] != b[1] or abs(lightness(a[0]) - lightness(b[0])) > 20


def test_the_caption_says_what_is_missing_and_why() -> None:
    trace = synthetic.make("skip", records=60)
    report = analyse(trace)
    report["trace"]["missing"] = [{"what": "page-cache fills", "why": "no tracepoint"}]
    report["trace"]["raw_until_seconds"] = 0.1
    words = " ".join(texts_of(drawn(trace, report)).split())
    assert "Not in this trace: page-cache fills (no tracepoint); single events after" in words


@pytest.mark.parametrize("report", [{}, {"trace": {"missing": None}, "readers": [{}]}])
def test_an_empty_trace_gives_a_picture_that_says_so(report: dict[str, Any]) -> None:
    words = " ".join(texts_of(drawn(Trace(meta={}), report)).split())
    assert "n/a (no access to a file is in the trace)" in words


def test_a_path_with_dollars_and_controls_is_text_and_no_formula(tmp_path: Path) -> None:
    trace = synthetic.make("skip", records=40, path="/d/$\\frac{1$/\x1b[2J\ud800.mdb")
    png.write(trace, analyse(trace), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_many_ranks_find_room() -> None:
    fig = drawn(synthetic.make("contiguous", ranks=64, records=640, epochs=1))
    assert "rank 7 … 63" in texts_of(fig)
    assert fig.get_figheight() < 12


def test_without_matplotlib_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UffdPrefetchError, match="pip install matplotlib"):
        png.write(Trace(meta={}), {}, str(tmp_path / "x.png"))
    assert not (tmp_path / "x.png").exists()
