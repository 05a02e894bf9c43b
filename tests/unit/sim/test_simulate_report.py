# SPDX-License-Identifier: Apache-2.0
"""report/simulate.py: the table of a terminal, and what a document has."""

from __future__ import annotations

from typing import Any

import pytest
import tomllib
from conftest import warnings_fail
from sim_bed import SMALL

from uffdprefetch.report import simulate as report
from uffdprefetch.report import simulate_png
from uffdprefetch.sim import simulate
from uffdprefetch.sim.scenario import parse

pytestmark = warnings_fail

LONG = "read ahead as far as there is room"
MORE = f"""
[[policies]]
policy = "staging-pool"
name = "{LONG}"
published = 12.5
write = "once"

[[policies]]
policy = "lbann"
"""


@pytest.fixture
def document() -> dict[str, Any]:
    text = (SMALL + MORE).replace("1GiB", "1MB")  # too little for lbann
    scenario = parse(tomllib.loads(text), "small.toml")
    workload = simulate.workload_of(scenario)
    return report.document(
        scenario, "small.toml", workload, list(simulate.run(scenario, workload)), 0.1
    )


def test_names_stay_whole_where_a_terminal_is_narrow(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, gone in ((80, "stall, preload, hits, file system"), (110, "preload"), (200, None)):
        monkeypatch.setenv("COLUMNS", str(width))
        report.text(document).print()
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert any(LONG in line and "12.50" in line for line in lines)
        said = [line for line in lines if line.endswith(": in a wider terminal, or by --json")]
        assert said == ([f"{gone}: in a wider terminal, or by --json"] if gone else [])
        assert ("preload" in lines[2]) == (gone is None)


def test_a_document_says_what_was_simulated(document: dict[str, Any]) -> None:
    assert {key: document[key] for key in ("seed", "scheme", "order", "drop_last", "rates")} == {
        "seed": 0,
        "scheme": "uniform",
        "order": "shuffled",
        "drop_last": True,
        "rates": "thread",
    }
    rows = document["policies"]
    assert [row["policy"] for row in rows] == ["naive", "node-pool", "staging-pool", "lbann"]
    assert [row["write"] for row in rows] == ["overlapped", "overlapped", "once", "overlapped"]
    assert rows[3]["seconds"] is None and rows[3]["why"]
    assert len({frozenset(row) for row in rows}) == 1, "all rows have the same keys"
    assert f"{LONG}: write = 'once'" in report.text(document).plain()


def test_a_legend_has_what_is_to_be_seen(document: dict[str, Any]) -> None:
    import matplotlib.figure
    import matplotlib.ticker

    def legend() -> list[str]:
        figure = simulate_png._sources(matplotlib, document)
        return [text.get_text() for each in figure.legends for text in each.get_texts()]

    staged = document["policies"][2]
    assert list(staged["source_kinds"]) == list(staged["stall_seconds_by_source"])
    staged["stall_seconds_by_source"] = {
        "the file system": staged["seconds"],
        "own RAM": 1e-9,
        "other nodes' RAM": 0.0,
    }
    assert set(legend()) == {"computing", "waiting for the file system", "published"}
    document["policies"] = document["policies"][3:]  # that does not apply
    assert legend() == []
