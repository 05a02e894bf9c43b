# SPDX-License-Identifier: Apache-2.0
"""What a trace's HTML page holds: all marks, no network, no stranger's markup, what is missing."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import synthetic
from browser import Open, drawn

from uffdprefetch.trace.analyse import marks
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.sensors import Sensor, entry
from uffdprefetch.trace.file.trace_file import Trace

pytest_plugins = ("browser_fixtures",)
pytestmark = pytest.mark.browser

HOSTILE = '/data/</script><img src=x onerror="window.pwned=1">/\'"&lt;b>.mdb'


def test_it_opens_from_disk_and_asks_nothing_of_any_network(
    open_page: Open, cold_trace: Trace
) -> None:
    page = open_page(cold_trace)
    assert page.run("return location.protocol") == "file:"
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return uffdprefetch.firstPictureMs") > 0
    assert page.run("return document.documentElement.outerHTML.match(/https?:/) === null")
    assert drawn(page)["marks"] > 1000


def test_what_is_unpacked_is_what_was_recorded(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    found = page.run(
        """await allWindows.want(allWindows.list, Infinity);
        await uffdprefetch.idle();
        return allWindows.list.flatMap((w) => w.pieces.map((p) => ({
          rank: p.rank, kind: p.kind, start: [...p.start].map((x) => x * STEP_SECONDS),
          offset: [...p.offset].map((x) => x * p.unit),
          before: [...p.before].map((x) => x * p.unit),
          length: [...p.length].map((x) => x * p.unit),
          duration: [...p.duration].map((x) => x * p.durationScale),
        })));"""
    )
    recorded = {(s.rank, s.kind): s for s in marks.collect(cold_trace)}
    assert {(p["rank"], p["kind"]) for p in found} == set(recorded)
    for (rank, kind), stream in recorded.items():
        pieces = [p for p in found if (p["rank"], p["kind"]) == (rank, kind)]

        def whole(name: str, pieces: list[Any] = pieces) -> Any:
            return np.concatenate([p[name] for p in pieces])

        assert np.array_equal(whole("offset"), stream.offset), kind
        assert np.array_equal(whole("before"), stream.before), kind
        assert np.array_equal(whole("length"), stream.length), kind
        assert np.abs(whole("start") - stream.start_ns / 1e9).max() <= 1e-7
        assert np.abs(whole("duration") - stream.duration_ns).max() <= 100


def test_strings_of_a_trace_are_text_and_never_markup(open_page: Open) -> None:
    trace = synthetic.make("skip", records=60, path=HOSTILE)
    trace.meta["command"] = ["python", HOSTILE]
    report = analyse(trace)
    hostile = {"severity": HOSTILE, "title": HOSTILE, "detail": HOSTILE, "remedy": HOSTILE,
               "cost_text": HOSTILE, "source": HOSTILE}  # fmt: skip
    report["findings"] = [hostile]
    report["trace"]["missing"] = [{"what": HOSTILE, "why": HOSTILE, "lift": HOSTILE}]
    report["phases"] = [{"start_seconds": 0, "end_seconds": 1, "name": HOSTILE, "why": HOSTILE}]
    page = open_page(trace, report)
    assert page.run("return window.pwned ?? null") is None
    assert page.run("return document.images.length") == 0
    assert HOSTILE in page.run("return document.querySelector('figure h2').textContent")
    assert HOSTILE in page.run("return document.title")
    scripts = page.run("return document.scripts.length")
    assert scripts == 2 + page.run("return allWindows.list.length")


def test_what_is_missing_stands_on_top_and_under_the_picture_it_concerns(
    open_page: Open, cold_trace: Trace
) -> None:
    report = analyse(cold_trace)
    report["trace"]["missing"] = [entry([Sensor.FILLS], "uid 1000 may not", "sudo x")]
    page = open_page(cold_trace, report)
    top = page.run("return document.getElementById('missing').innerText")
    assert "page-cache fills: uid 1000 may not" in top and "sudo x" in top
    captions = page.run(
        "return [...document.querySelectorAll('figure')]"
        ".map(f => [f.id, f.querySelector('figcaption').innerText])"
    )
    concerned = {name for name, text in captions if "page-cache fills" in text}
    assert concerned == {"map-1", "figure-bytes"}


def test_findings_are_listed_in_their_order(open_page: Open, cold_trace: Trace) -> None:
    findings = [{"severity": s, "title": f"finding {s}", "remedy": "run `this`", "cost_text": "3 s"}
                for s in ("high", "medium", "low")]  # fmt: skip
    page = open_page(cold_trace, {**analyse(cold_trace), "findings": findings})
    rows = page.run(
        "return [...document.querySelectorAll('#findings tbody tr')].map(r => r.innerText)"
    )
    assert [row.split()[0] for row in rows] == ["high", "medium", "low"]
    assert page.run("return document.querySelector('#findings code').innerText") == "this"


@pytest.mark.parametrize("report", [{}, {"trace": {}, "readers": [{}], "files": [{}]}])
def test_a_trace_of_nothing_says_so_in_every_picture(
    open_page: Open, report: dict[str, Any]
) -> None:
    page = open_page(Trace(meta={}), report)
    places = page.run("return [...document.querySelectorAll('.nothing')].map(n => n.innerText)")
    assert len(places) == 6 and all(text.startswith("n/a (") for text in places)


def test_it_prints(open_page: Open, cold_trace: Trace) -> None:
    page = open_page(cold_trace)
    answer = page.command("Page.printToPDF", printBackground=True)
    assert base64.b64decode(answer["data"])[:5] == b"%PDF-"
