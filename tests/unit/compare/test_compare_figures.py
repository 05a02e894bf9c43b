# SPDX-License-Identifier: Apache-2.0
"""`compare`: what its runs say, as figures and as text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from uffdprefetch.compare.figures import (
    PLAIN,
    Interval,
    MeasuredRun,
    Remark,
    Verdict,
    document,
    interval,
    remark,
    whole_rounds,
)
from uffdprefetch.compare.show import lines, remark_text

MIB = 1 << 20


def run(variant: str, number: int, seconds: float, **changes: Any) -> MeasuredRun:
    """One of a job that reads 100 MiB and waits for most of its time."""
    figures: dict[str, Any] = {
        "status": 0, "waited_seconds": 0.8 * seconds, "read_bytes": 100 * MIB,
        "read_is_estimated": False, "major_faults": 800, "cpu_seconds": 0.5,
        "unused_bytes": None if variant == PLAIN else 0, "others_cpu_seconds": 0.0,
        "stolen_seconds": 0.0,
    }  # fmt: skip
    return MeasuredRun(variant, number, seconds, **{**figures, **changes})


def rounds(plain: list[float], ours: list[float], **changes: Any) -> list[MeasuredRun]:
    """Of each list a run a round; ``changes``: of ours."""
    runs = [run(PLAIN, n, seconds) for n, seconds in enumerate(plain, 1)]
    return runs + [run("cache", n, seconds, **changes) for n, seconds in enumerate(ours, 1)]


def compared(runs: list[MeasuredRun], asked: int = 3, **changes: Any) -> dict[str, Any]:
    """The document of these runs."""
    files = {"count": 1, "bytes": 100 * MIB, "paths": ["/d/a.bin"], "not_dropped": []}
    given: dict[str, Any] = {"files": files, "remarks": [], "cpus": 2} | changes
    names = given.pop("names", list(dict.fromkeys(one.variant for one in runs)))
    return document(["./a job"], names, runs, asked, None, **given)


def kinds(found: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in found["remarks"]]


# ---- intervals and verdicts ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 9, 20, 100])
def test_an_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    """Counted over all ways in which n values lie below and above it, each as likely."""
    found = interval([float(value) for value in range(n)])
    low, high = round(found.low), round(found.high)
    assert low == n - 1 - high  # as many are left out below as above
    if n <= 9:
        sides = list(itertools.product((0, 1), repeat=n))
        # With `below` values below the median, it lies between the values below - 1 and below.
        holds = sum(low < n - sum(side) <= high for side in sides)
        assert found.confidence == pytest.approx(holds / len(sides))
    if n >= 6:
        assert found.confidence >= 0.95
    else:
        assert (low, high) == (0, n - 1)


def test_few_values_go_from_the_least_to_the_largest() -> None:
    assert interval([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0, 0.75)
    assert interval([4.0]) == Interval(4.0, 4.0, 4.0, 0.0)


def decided(plain: list[float], ours: list[float]) -> str:
    """The verdict of the document."""
    return str(compared(rounds(plain, ours), asked=len(plain))["variants"][1]["verdict"])


@pytest.mark.parametrize(
    "ours, expected",
    [
        ([3.5, 3.6, 3.7], Verdict.QUICKER),
        ([10.3, 10.4, 10.5], Verdict.SLOWER),
        ([9.5, 9.9, 10.1], Verdict.SAME),  # quicker in one round, slower in another
        ([8.0, 8.1, 9.81], Verdict.UNKNOWN),  # quicker in each, but not than each
    ],
)
def test_a_difference_is_one_where_the_intervals_have_nothing_in_common(
    ours: list[float], expected: Verdict
) -> None:
    found = compared(rounds([9.8, 9.7, 10.2], ours))
    assert found["variants"][1]["verdict"] == expected.value
    assert ("few-rounds" in kinds(found)) == (expected is Verdict.UNKNOWN)


def test_six_rounds_that_are_all_quicker_decide_though_the_times_overlap() -> None:
    """The machine gets slower from round to round."""
    plain = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    ours = [0.9 * seconds for seconds in plain]
    assert decided(plain, ours) == "quicker" and decided(ours, plain) == "slower"
    assert decided(plain[:5], ours[:5]) == "not decided"
    assert decided(plain, [*ours[:5], 6.1]) == "no difference"


def test_two_rounds_decide_nothing() -> None:
    assert decided([9.9, 9.8], [1.0, 1.1]) == "not decided"
    found = compared(rounds([9.9], [1.0]), asked=1)
    assert kinds(found) == ["few-rounds"]
    assert any("0.10 of plain's time, not decided" in line for line in lines(found))


def test_ratios_are_of_runs_of_the_same_round() -> None:
    """A machine that gets slower from round to round changes no ratio."""
    found = compared(rounds([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]))
    ratio = found["variants"][1]["ratio"]
    assert (ratio["median"], ratio["low"], ratio["high"]) == (0.5, 0.5, 0.5)


def test_a_round_that_was_cut_off_counts_for_nothing_and_is_told() -> None:
    runs = [run(PLAIN, 1, 2.0), run("cache", 1, 1.0), run(PLAIN, 2, 90.0)]
    assert [sorted(one) for one in whole_rounds(runs, [PLAIN, "cache"])] == [["cache", "plain"]]
    found = compared(runs)
    assert found["rounds"] == 1 and found["variants"][0]["seconds"]["median"] == 2.0
    assert kinds(found) == ["interrupted", "few-rounds"]
    assert len(found["variants"][0]["runs"]) == 2  # but nothing is lost


def test_without_one_whole_round_the_runs_are_told() -> None:
    text = lines(compared([run(PLAIN, 1, 2.0)], names=[PLAIN, "cache"]))
    assert "no round is whole: plain 2.00 s" in text
    assert "note: ended early, after 0 of 3 rounds" in text


def test_a_figure_that_is_unknown_of_one_run_is_unknown() -> None:
    runs = rounds([9.8, 9.9, 10.0], [3.5, 3.6, 3.7])
    runs[0] = run(PLAIN, 1, 9.8, read_bytes=None)
    found = compared(runs)
    assert found["variants"][0]["read_bytes"] is None
    assert found["variants"][1]["bytes_ratio"] is None
    assert any("bytes not known" in line for line in lines(found))


# ---- remarks -------------------------------------------------------------------------------------


def test_a_disturbed_run_is_named_with_what_disturbed_it() -> None:
    runs = rounds([9.8, 9.9, 10.0], [3.5, 3.6, 3.7])
    runs[1] = run(PLAIN, 2, 9.9, others_cpu_seconds=5.0)
    runs[4] = run("cache", 2, 3.6, stolen_seconds=0.5)
    found = compared(runs)
    assert [(one["kind"], one["variant"], one["round"]) for one in found["remarks"]] == [
        ("stolen", "cache", 2), ("others", "plain", 2),
    ]  # fmt: skip
    assert kinds(compared(rounds([0.01] * 3, [0.01] * 3, others_cpu_seconds=0.02))) == []


def test_files_that_stay_cached_are_named_where_they_matter() -> None:
    def left(path: str, left_bytes: int | None, why: str = "held") -> dict[str, Any]:
        return {
            "path": path, "size_bytes": 50 * MIB, "left_bytes": left_bytes, "why": why,
            "holders": [77],
        }  # fmt: skip

    files = {"count": 3, "bytes": 150 * MIB, "paths": [], "not_dropped": [
        left("/d/page", 4096), left("/d/half", 25 * MIB), left("/d/unknown", None, "refused"),
    ]}  # fmt: skip
    found = compared(rounds([2.0] * 3, [1.0] * 3), files=files)
    (one,) = found["remarks"]
    assert [file["path"] for file in one["files"]] == ["/d/half", "/d/unknown"]
    text = remark_text(one)
    assert "25 MiB of /d/half: somebody has it mapped" in text and "process 77" in text


def test_files_that_were_seen_late_are_told_where_they_matter() -> None:
    runs = rounds([2.0] * 3, [1.0] * 3)
    runs[0] = run(PLAIN, 1, 2.0, late_bytes=300)
    assert kinds(compared(runs)) == []
    runs[0] = run(PLAIN, 1, 2.0, late_bytes=3 * MIB)
    assert kinds(compared(runs)) == ["seen-late"]


def test_a_job_that_hardly_waits_is_said_to_have_little_to_gain() -> None:
    runs = [run(one.variant, one.round, one.seconds, waited_seconds=0.05)
            for one in rounds([9.8, 9.9, 10.0], [9.8, 9.9, 10.0])]  # fmt: skip
    assert kinds(compared(runs)) == ["little-waited"]


#: Of each kind one, with what it has.
SAID = {
    Remark.INTERRUPTED: {"rounds": 1, "asked": 3},
    Remark.FEW_ROUNDS: {"rounds": 1, "least": 3, "variants": ["cache", "pool"]},
    Remark.NOT_DROPPED: {"files": []},
    Remark.SEEN_LATE: {"bytes": 5 * MIB, "round": 2, "variant": "plain"},
    Remark.NO_FILES: {},
    Remark.LITTLE_WAITED: {"waited_seconds": 0.1, "seconds": 9.0},
    Remark.STOLEN: {"runs": 1, "seconds": 1.0, "of_seconds": 4.0, "round": 1, "variant": "cache"},
    Remark.OTHERS: {"runs": 2, "seconds": 1.0, "of_seconds": 4.0, "round": 1, "variant": "cache"},
    Remark.STATUS: {"status": -9},
    Remark.LEFT_OUT: {"variant": "pool", "why": "no userfaultfd"},
    Remark.NOT_SERVED: {"variant": "cache", "lines": ["not served: 200 MiB by read(2)"]},
}


@pytest.mark.parametrize("kind", Remark, ids=lambda kind: kind.value)
def test_each_remark_has_words(kind: Remark) -> None:
    assert remark_text(remark(kind, **SAID[kind]))


# ---- text ----------------------------------------------------------------------------------------


def test_the_verdict_is_a_fact_with_its_interval() -> None:
    text = lines(compared(rounds([9.81, 9.93, 10.1], [3.52, 3.61, 3.7])))
    assert "cache 3.61 s, plain 9.93 s: 0.36 of plain's time [0.36..0.37], the same bytes" in text
    assert "plain  9.93 s [9.81..10.10]  7.94 s  100 MiB           800  0.50 s" in text


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ([7.0, 7.1, 7.2], ["quickest: --engine cache"]),
        ([4.9, 5.1, 5.3], ["quickest: --engine cache or pool, alike within the runs' own spread"]),
        ([3.0, 3.1, 3.2], ["quickest: --engine pool"]),
        ([9.8, 10.1, 10.2], ["quickest: --engine cache"]),  # which is no quicker than plain
    ],
)
def test_of_several_engines_the_one_to_take_is_named(pool: list[float], told: list[str]) -> None:
    plain, cache = [10.0, 10.1, 10.2], [5.0, 5.1, 5.2]
    runs = [*rounds(plain, cache), *(run("pool", n, s) for n, s in enumerate(pool, 1))]
    assert [line for line in lines(compared(runs)) if line.startswith("quickest")] == told
    alone = lines(compared(rounds(plain, cache)))
    assert not any(line.startswith("quickest") for line in alone)


def test_a_difference_that_is_not_decided_is_told_of_whom() -> None:
    runs = [run(PLAIN, 1, 10.0), run("cache", 1, 5.0), run("pool", 1, 6.0)]
    (note,) = [line for line in lines(compared(runs, 1)) if line.startswith("note")]
    assert note.startswith("note: cache and pool: 1 round cannot tell the difference from chance")
    assert not any(line.startswith("quickest") for line in lines(compared(runs, 1)))


def test_a_difference_within_the_spread_is_told_as_none() -> None:
    text = "\n".join(lines(compared(rounds([9.8, 9.9, 10.2], [9.7, 9.9, 10.0]))))
    assert "no difference beyond the runs' own spread" in text


def test_bytes_that_differ_and_bytes_for_nothing_are_said() -> None:
    runs = rounds([2.0] * 3, [2.2] * 3, read_bytes=190 * MIB, unused_bytes=90 * MIB)
    (text,) = [line for line in lines(compared(runs)) if line.startswith("cache 2.2")]
    assert "1.90 times the bytes" in text and "90 MiB read ahead and not used" in text
    nearly = rounds([2.0] * 3, [2.2] * 3, read_bytes=101 * MIB, unused_bytes=5 * MIB)
    (text,) = [line for line in lines(compared(nearly)) if line.startswith("cache 2.2")]
    assert text.endswith("the same bytes")


def test_an_estimate_is_told_as_one_and_judged_by_its_error() -> None:
    runs = rounds([2.0] * 3, [1.0] * 3, read_bytes=106 * MIB, read_is_estimated=True)
    text = "\n".join(lines(compared(runs)))
    assert "about 106 MiB" in text and "the same bytes" in text


def test_of_one_round_no_interval_is_shown() -> None:
    text = "\n".join(lines(compared(rounds([2.0], [1.0]), asked=1)))
    assert "[" not in text and "0.50 of plain's time" in text


@pytest.mark.parametrize("width", [80, 160])
def test_on_a_terminal_no_line_is_wider_and_no_word_is_lost(width: int) -> None:
    runs = rounds([9.81, 9.93, 10.1], [9.52, 9.93, 10.0], read_bytes=190 * MIB)
    whole = lines(compared(runs, remarks=[remark(Remark.LEFT_OUT, variant="pool", why="x " * 90)]))
    shown = lines(
        compared(runs, remarks=[remark(Remark.LEFT_OUT, variant="pool", why="x " * 90)]), width
    )
    assert max(map(len, shown)) <= width < max(map(len, whole))
    assert " ".join(shown).split() == " ".join(whole).split()
