# SPDX-License-Identifier: Apache-2.0
"""report/gained.py: the lines that say what a run gained, and what nodes shared."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import SUMMARY_JSON
from good_summary import KEPT, LOOKED, NO_MAPPING, SMALL, TERMINAL, changed, job, unserved

from uffdprefetch.report.how_it_ran import how_it_ran
from uffdprefetch.report.summary import lines, short_lines


def test_a_good_run_says_what_was_kept_ahead_and_what_it_saved_and_no_more() -> None:
    assert short_lines(SUMMARY_JSON) == [f"{KEPT}; saved at least 2.35 s"]
    assert short_lines(SUMMARY_JSON, TERMINAL) == [
        "kept ahead: 1014 MiB of 1 GiB; saved at least 2.35 s"
    ]


NODES = {"nodes": 2, "present": [0, 1], "from_bytes": 0, "why_not": None, "not_shared": []}


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"from_bytes": 3 << 20}, "2 nodes shared: 1 MiB from storage, 3 MiB from each other"),
        ({"why_not": "there is no MPI"}, "nodes shared nothing: there is no MPI"),
        (
            {"not_shared": [{"path": "/data/a", "why": "ext4 is a local file system"}]},
            "nodes shared nothing: /data/a: ext4 is a local file system",
        ),
        ({}, "nodes shared nothing: none had what another one read"),
    ],
)
def test_a_run_of_many_nodes_says_what_they_shared_or_why_nothing(
    cluster: dict[str, Any], said: str
) -> None:
    summary = changed(cluster={**NODES, **cluster}, pool={"read_bytes": 1 << 20})
    assert short_lines(summary)[1] == said
    first = short_lines({**summary, "totals": {**summary["totals"], "gain": "even"}})[0]
    assert first == said if cluster.get("from_bytes") else first.startswith("kept ahead of the job")


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (changed(totals_saved_at_least_seconds=0.05), KEPT),
        (changed(totals_gain="even", totals_saved_at_least_seconds=0.0), KEPT),
        (changed(totals_gain="unknown", totals_saved_at_least_seconds=None), KEPT),
        (
            changed(totals_gain="unknown", totals_coverage=None, totals_prefetched_bytes=1 << 20),
            "read 1 MiB ahead",
        ),
        (
            changed(totals_coverage=1.0, totals_waited_seconds=None, totals_gain="even"),
            "kept ahead of the job: 1 of 1 GiB",
        ),
        (
            changed(totals_coverage=1.0, totals_waited_seconds=0.0, totals_gain="even"),
            "kept ahead of the job: 1 of 1 GiB (nobody was seen to wait)",
        ),
        (changed(totals_gain="in-memory"), "nothing to gain: the data was in memory"),
        (
            changed(totals_gain="nothing-read"),
            "nothing to gain: nothing of the mapped files was read",
        ),
        (
            changed(totals_gain="just-read", totals_job_storage_bytes=1 << 20),
            "the data was in memory when it was mapped: the job had read 1 MiB itself",
        ),
        (changed(files=[]), "served nothing: no mapping was served"),
        (changed(files=[], totals_gain="unknown", rung_reason="too early"),
         "served nothing: too early"),
        (changed(files=[], totals_gain="unknown", rung_reason="no mapping was managed",
                 unserved=[unserved(None, 1 << 27)]), "served nothing: no mapping was served"),
        (changed(policy="none"), "read nothing ahead: --policy none only watches"),
    ],
)  # fmt: skip
def test_the_first_line_is_what_the_run_gained(summary: dict[str, Any], line: str) -> None:
    assert short_lines(summary)[0] == line


COST = {"totals_gain": "cost", "totals_cost_seconds": 0.51, "totals_saved_at_least_seconds": 0.0}


UNUSED = {"totals_prefetched_bytes": 491 << 20, "totals_wasted_bytes": 337 << 20}


def test_a_loss_is_told_first_and_by_what() -> None:
    assert short_lines(changed(**COST, **UNUSED)) == [
        "cost about 510 ms: 337 of 491 MiB read ahead were not used", KEPT
    ]  # fmt: skip
    assert short_lines(changed(**{**COST, **UNUSED, "totals_cost_seconds": 0.05})) == [
        KEPT, "read for nothing: 337 of 491 MiB read ahead were not used"
    ]  # fmt: skip


@pytest.mark.parametrize("gain", ["saved", "even", "unknown", "in-memory", "just-read"])
def test_what_was_read_for_nothing_is_always_told_above_a_tenth(gain: str) -> None:
    told = short_lines(changed(totals_gain=gain, **UNUSED))
    assert told[1:] == ["read for nothing: 337 of 491 MiB read ahead were not used"]
    less = {**UNUSED, "totals_wasted_bytes": 49 << 20}
    assert len(short_lines(changed(totals_gain=gain, **less))) == 1


def test_a_sparse_summary_has_a_line() -> None:
    sparse = {"engine": "off", "policy": "none", "wall_seconds": 0.01, "totals": {}}
    assert short_lines(sparse) == ["read nothing ahead: --policy none only watches"]
    assert not any("\n" in line for line in lines(sparse, verbose=True))


def test_small_files_have_a_line_of_their_own() -> None:
    line = "small files: 1,849 of 1,900 read ahead were opened (182 MiB)"
    assert line in short_lines(changed(reads=SMALL))
    alone = changed(files=[], rung=None, reads=SMALL)
    assert short_lines(alone)[0] == line, "no file was mapped: it has served these"
    told = how_it_ran(alone)
    assert "watched from outside" in told[0] and "nothing prefetched" not in told[1]
    none = {"read_bytes": 0, "small_files": {"read": 0, "used": 0, "used_bytes": 0, "there": 9}}
    assert not any("small" in one for one in short_lines(changed(reads=none)))


def test_a_start_that_was_read_ahead_or_recorded_is_not_nothing() -> None:
    learn = {
        "key": "k", "state": "done", "paths": 1200, "bytes": 31 << 20, "seconds": 0.1, "used": 640,
        "skipped": {}, "recorded": None,
    }  # fmt: skip
    plain = {"files": [], "job": job("python"), "reads": LOOKED}
    read = "start read ahead: 1,200 paths (31 MiB); the job opened 640 of the profile's files"
    assert short_lines(changed(**plain, learn=learn)) == [read]
    failed = {**plain, "job": job("python", status=3)}
    assert short_lines(changed(**failed, learn=learn)) == [
        f"{read}; python failed (exit status 3) and mapped no file"
    ]
    assert short_lines(changed(**plain, learn={**learn, "used": None})) == [
        read.removesuffix("; the job opened 640 of the profile's files")
    ]
    first = {**learn, "paths": 0, "bytes": 0, "recorded": {"record": "written", "bytes": 19 << 20}}
    assert short_lines(changed(**plain, learn=first)) == [
        "start recorded (19 MiB): the next one is read ahead"
    ]
    none = {**first, "recorded": {"record": "nothing to record", "bytes": 0}}
    assert short_lines(changed(**plain, learn=none)) == [NO_MAPPING]
