# SPDX-License-Identifier: Apache-2.0
"""The HTML report, driven in a headless Chromium: zoomed, filtered, pointed at."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import synthetic
from browser import Browser, Open, drawn, why_none
from conftest import require, wait_until
from paths import BENCH

from uffdprefetch.report.html import render
from uffdprefetch.trace.analyse import marks, pictures
from uffdprefetch.trace.file.trace_file import Trace

pytest_plugins = ("browser_fixtures",)
pytestmark = pytest.mark.browser

RANK_2 = (0x00, 0x9E, 0x73)  # page.css, light
EVENTS_OF_A_LARGE_TRACE = 1_000_000


def view(page: Browser) -> tuple[float, float, float, float]:
    found = page.run("return uffdprefetch.view")
    return found["t0"], found["t1"], found["maps"][0]["o0"], found["maps"][0]["o1"]


def tip_is(page: Browser, begin: str) -> str:
    """Wait until what the mouse points at is told so: an event may come after the one who sent it
    goes on. Returns what is told."""
    told: list[str] = []

    def is_told() -> bool:
        told[:] = [page.run("return uffdprefetch.tip") or ""]
        return told[0].startswith(begin)

    wait_until(is_told, lambda: f"{begin!r}, not {told}")
    return told[0]


def view_is(page: Browser, condition: Callable[[Any], bool], what: str) -> Any:
    """Wait until the view is such, for the same reason; returns it."""
    seen: list[Any] = []

    def is_such() -> bool:
        seen[:] = [view(page)]
        return condition(seen[0])

    wait_until(is_such, lambda: f"{what}, not {seen}")
    return seen[0]


def on_screen(page: Browser, seconds: float, offset: float) -> tuple[float, float]:
    """Where a time and an offset of the first map are, in the window."""
    x, y = page.run(
        """const canvas = document.querySelector("figure canvas");
        canvas.scrollIntoView({block: "center"});
        const rect = canvas.getBoundingClientRect();
        const [x, y] = uffdprefetch.place(arguments[0], arguments[1]);
        return [x + rect.left, y + rect.top];""",
        seconds,
        offset,
    )
    return x, y


def count_of_colour(page: Browser, colour: tuple[int, int, int], within: int = 12) -> int:
    """Pixels of the first map that are about of this colour."""
    found: int = page.run(
        """await uffdprefetch.idle();
        const canvas = document.querySelector("figure canvas");
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const [r, g, b, within] = arguments;
        let count = 0;
        for (let i = 0; i < data.length; i += 4) {
          count += Math.abs(data[i] - r) <= within && Math.abs(data[i + 1] - g) <= within
            && Math.abs(data[i + 2] - b) <= within;
        }
        return count;""",
        *colour,
        within,
    )
    return found


def test_a_dragged_box_zooms_to_single_accesses(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    before = drawn(page)
    assert before["mode"] == "marks"
    whole = view(page)
    around = next(s for s in marks.collect(cold_trace) if s.kind == "around" and s.rank == 0)
    middle = around.part(slice(400, 404))
    t0, t1 = middle.start_ns[0] / 1e9 - 0.02, middle.start_ns[-1] / 1e9 + 0.02
    low, high = float(middle.offset[0]) - 8e6, float(middle.offset[-1]) + 8e6
    x0, y0 = on_screen(page, t0, high)
    x1, y1 = on_screen(page, t1, low)
    page.mouse(("move", x0, y0), ("down",), ("move", (x0 + x1) / 2, y1), ("move", x1, y1), ("up",))
    now = view_is(
        page,
        lambda v: v[1] - v[0] < (whole[1] - whole[0]) / 5 and v[3] - v[2] < whole[3] / 3,
        "the box",
    )
    after = drawn(page)
    assert after["mode"] == "shapes" and 0 < after["marks"] < before["marks"] / 10
    expected = 0
    for stream in marks.collect(cold_trace):
        if stream.layer == "demand":
            seconds, bottom = stream.start_ns / 1e9, stream.offset - stream.before
            expected += int(((seconds >= now[0]) & (seconds < now[1]) & (bottom < now[3])
                             & (bottom + stream.length > now[2])).sum())  # fmt: skip
    assert after["by_kind"]["around"] == expected


def test_zooming_on_reaches_one_record_and_back_the_whole(
    open_page: Open, cold_trace: Trace
) -> None:
    page = open_page(cold_trace)
    major = next(s for s in marks.collect(cold_trace) if s.kind == "major" and s.rank == 1)
    t, offset = major.start_ns[20] / 1e9, float(major.offset[20])
    page.run(
        "return uffdprefetch.zoomTo({t0: arguments[0], t1: arguments[1], o0: arguments[2],"
        " o1: arguments[3]})",
        t - 1e-5, t + 2e-3, offset - 16384, offset + 32768,
    )  # fmt: skip
    found = drawn(page)
    assert found["by_kind"]["major"] == 1 and found["by_kind"]["around"] <= 3
    assert set(found["by_rank"]) == {"1"}
    page.run("return document.getElementById('reset').click()")
    assert drawn(page)["marks"] > 1000
    assert page.run("return document.getElementById('reset').disabled") is True


def test_a_rank_that_is_switched_off_leaves_no_pixel(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    page.run("uffdprefetch.setKind('major', false); uffdprefetch.setKind('kernel', false)")
    assert drawn(page)["by_rank"].keys() == {"0", "1", "2", "3"}
    assert count_of_colour(page, RANK_2) > 100
    page.run("document.querySelectorAll('#rank-chips button')[2].click()")
    assert drawn(page)["by_rank"].keys() == {"0", "1", "3"}
    assert count_of_colour(page, RANK_2) == 0
    page.run("document.getElementById('ranks-none').click()")
    assert drawn(page)["marks"] == 0
    page.run("document.getElementById('ranks-all').click()")
    assert count_of_colour(page, RANK_2) > 100
    pressed = page.run(
        "return [...document.querySelectorAll('#rank-chips button')].map(b => b.ariaPressed)"
    )
    assert pressed == ["true"] * 4


def test_layers_can_be_switched_off(open_page: Open) -> None:
    page = open_page(synthetic.make("contiguous", records=600, served=True))
    kinds = drawn(page)["by_kind"]
    assert {"around", "major", "warm"} <= set(kinds)
    chips = page.run(
        "return [...document.querySelectorAll('#layer-chips button')].map(b => b.textContent)"
    )
    for name, kind in (("our prefetching", "warm"), ("misses", "major"), ("accesses", "around")):
        place = next(i for i, text in enumerate(chips) if name in text)
        page.run(f"document.querySelectorAll('#layer-chips button')[{place}].click()")
        assert kind not in drawn(page)["by_kind"]


def test_pointing_at_a_miss_tells_time_place_rank_and_wait(
    open_page: Open, cold_trace: Trace
) -> None:
    page = open_page(cold_trace)
    major = next(s for s in marks.collect(cold_trace) if s.kind == "major" and s.rank == 3)
    t, offset = major.start_ns[5] / 1e9, float(major.offset[5])
    wait_ms = major.duration_ns[5] / 1e6
    page.run(
        "return uffdprefetch.zoomTo({t0: arguments[0], t1: arguments[1], o0: arguments[2],"
        " o1: arguments[3]})",
        t - 0.004, t + 0.008, offset - 2e6, offset + 2e6,
    )  # fmt: skip
    x, y = on_screen(page, t, offset)
    page.mouse(("move", x - 30, y), ("move", x, y))
    tip = tip_is(page, "rank 3: miss (major fault)")
    assert f"at {t:.6f} s" in tip and f"page {int(offset) // 4096}" in tip.replace("\u202f", "")
    assert f"waited {wait_ms:.2f}".rstrip("0").rstrip(".") in tip
    page.mouse(("move", 5, 5))
    wait_until(lambda: page.run("return uffdprefetch.tip") is None, "nothing to be told")


def test_pointing_at_a_picture_of_many_marks_tells_of_one(
    open_page: Open, cold_trace: Trace
) -> None:
    page = open_page(cold_trace)
    around = next(s for s in marks.collect(cold_trace) if s.kind == "around" and s.rank == 0)
    x, y = on_screen(page, around.start_ns[300] / 1e9, float(around.offset[300]))
    page.mouse(("move", x, y))
    assert "offset" in tip_is(page, "rank ")


def test_wheel_keys_and_double_click_move_the_view(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    whole = view(page)
    x, y = on_screen(page, whole[1] / 2, whole[3] / 2)
    page.wheel(x, y, -300)
    nearer = view_is(
        page,
        lambda v: v[1] - v[0] < whole[1] * 0.8 and v[3] - v[2] < whole[3] * 0.8,
        "a nearer view",
    )
    assert nearer[0] < whole[1] / 2 < nearer[1]
    page.mouse(("move", x, y), ("down",), ("up",))  # the keys are for what has the focus
    page.keys("\ue014")  # right
    view_is(page, lambda v: v[0] > nearer[0], "a view further right")
    page.keys("+")
    view_is(page, lambda v: v[1] - v[0] < (nearer[1] - nearer[0]) * 0.7, "one nearer still")
    page.mouse(("move", x, y), ("down",), ("up",), ("down",), ("up",))
    view_is(page, lambda v: v == pytest.approx(whole), "the whole")
    page.keys("\ue003")  # back
    view_is(page, lambda v: v[1] - v[0] < whole[1] * 0.8, "the view before")


def test_the_wheel_scrolls_the_page_where_there_is_nothing_to_zoom_out_of(
    open_page: Open, cold_trace: Trace
) -> None:
    page = open_page(cold_trace)
    whole = view(page)
    x, y = on_screen(page, whole[1] / 2, whole[3] / 2)
    before = page.run("return scrollY")
    page.wheel(x, y, 200)
    wait_until(lambda: page.run("return scrollY") > before, "the page to scroll")
    assert view(page) == whole


def test_all_pictures_over_time_are_zoomed_together(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    picture = "return document.querySelector('#figure-stall canvas').toDataURL()"
    before = page.run(picture)
    page.run("return uffdprefetch.zoomTo({t0: 0.1, t1: 0.2})")
    assert page.run(picture) != before
    page.run("uffdprefetch.reset(); return uffdprefetch.idle()")
    assert page.run(picture) == before


def test_dark_and_paper_have_their_own_colours(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    try:
        page.command("Emulation.setEmulatedMedia", features=dark)
        wait_until(lambda: count_of_colour(page, (0x10, 0x13, 0x16), 1) > 10_000, "the dark look")
        assert count_of_colour(page, (255, 255, 255), 1) < 1000
        page.run("dispatchEvent(new Event('beforeprint'))")
        assert count_of_colour(page, (255, 255, 255), 1) > 10_000
        page.run("dispatchEvent(new Event('afterprint')); return uffdprefetch.idle()")
        assert count_of_colour(page, (0x10, 0x13, 0x16), 1) > 10_000
    finally:
        page.command("Emulation.setEmulatedMedia", features=[])


def test_on_a_phone_the_remedies_are_in_view(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    try:
        page.command("Emulation.setDeviceMetricsOverride", **size)
        page.run("return uffdprefetch.idle()")
        boxes = page.run(
            "return [...document.querySelectorAll('#findings td:last-child')]"
            ".filter((cell) => cell.textContent).map((cell) => cell.getBoundingClientRect())"
            ".map((box) => [box.left, box.right, box.width])"
        )
        assert boxes, "a trace with findings"
        assert all(left >= 0 and right <= 390 and width > 200 for left, right, width in boxes)
        assert page.run("return document.documentElement.scrollWidth") <= 390
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("width", [900, 1600])
def test_nothing_sticks_out_of_the_window(open_page: Open, cold_trace: Trace, width: int) -> None:
    page = open_page(cold_trace)
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    try:
        page.command("Emulation.setDeviceMetricsOverride", **size)
        page.run("return uffdprefetch.idle()")
        assert page.run("return document.documentElement.scrollWidth") <= width
        plots = page.run("return [...document.querySelectorAll('canvas')].map(c => c.clientWidth)")
        assert min(plots) > width * 0.85
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")


def test_a_trace_of_a_million_events_is_light_and_shows_single_accesses(open_page: Open) -> None:
    trace = synthetic.make("skip", records=EVENTS_OF_A_LARGE_TRACE // 6, epochs=1)
    assert len(trace.events) > EVENTS_OF_A_LARGE_TRACE
    report = {"trace": {"command": ["train.py"]}}
    size_bytes = len(render(trace, report))
    assert size_bytes < 20e6 * EVENTS_OF_A_LARGE_TRACE / 10e6 * 1.5  # on the way to 10 million
    page = open_page(trace, report)
    major = next(s for s in marks.collect(trace) if s.kind == "major" and s.rank == 2)
    middle = len(major) // 2
    t, offset = major.start_ns[middle] / 1e9, float(major.offset[middle])
    page.run(
        "return uffdprefetch.zoomTo({t0: arguments[0], t1: arguments[1], o0: arguments[2],"
        " o1: arguments[3]})",
        t - 1e-5, t + 2e-3, offset - 16384, offset + 32768,
    )  # fmt: skip
    found = drawn(page)
    assert found["mode"] == "shapes"
    assert found["by_kind"]["major"] == 1 and "2" in found["by_rank"]
    assert found["marks"] < 10


def test_more_marks_than_are_drawn_singly_are_drawn_as_cells(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MARKS_WITHOUT_GRID", 100)
    trace = synthetic.make("shuffled", records=1500)
    page = open_page(trace)
    cells = page.run(
        """const keep = AccessMap.prototype.plan;
        AccessMap.prototype.plan = () => ({ready: [], wanted: [], spans: [[view.t0, view.t1]]});
        redrawAll();
        await uffdprefetch.idle();
        const found = uffdprefetch.drawn[0];
        AccessMap.prototype.plan = keep;
        return found;"""
    )
    assert cells["mode"] == "cells"
    around = sum(len(s) for s in marks.collect(trace) if s.kind == "around")
    # A mark on the border of two rows of cells is in both; counts are rounded to 4 %.
    assert around * 0.95 < cells["by_kind"]["around"] < around * 1.4
    assert cells["by_rank"].keys() == {"0", "1", "2", "3"}


def test_the_bench_of_the_page_says_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BENCH / "lab"
    require(bench.is_dir(), "the benches are only in a source tree")
    require(why_none() is None, str(why_none()))
    monkeypatch.syspath_prepend(str(bench))
    row = importlib.import_module("tracepage").measure("contiguous", 20_000, 1, None)
    assert row["events"] == pytest.approx(20_000, rel=0.1)
    assert row["zoomed"].startswith("shapes, ")
    assert 0 < row["page_megabytes"] < 1 and row["first_picture_seconds"] > 0
