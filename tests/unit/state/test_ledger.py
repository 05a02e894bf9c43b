# SPDX-License-Identifier: Apache-2.0
"""The books: a histogram within its stated resolution, a time line and lists that stay bounded."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest

from tests.support.file_states import file_of
from uffdprefetch.protocol import wire
from uffdprefetch.service.summary import degradations
from uffdprefetch.state.client import Client
from uffdprefetch.state.job_processes import PROCESSES_MAX
from uffdprefetch.state.job_reads import READ_MAX
from uffdprefetch.state.ledger import FILES_MAX, Histogram, Ledger, Timeline
from uffdprefetch.state.notes import DEGRADATIONS_MAX
from uffdprefetch.state.processes import Counters
from uffdprefetch.state.unserved import Reason, Refusal

#: What Histogram's docstring promises.
RESOLUTION = 1 / 8


def true_quantile(values: list[int], share: float) -> int:
    """The smallest value that at least ``share`` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * len(ordered) * 1e9) // 10**9) - 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_within_the_stated_resolution(seed: int, share: float) -> None:
    chance = random.Random(seed)
    values = [int(chance.lognormvariate(9, 2.5)) for _ in range(1000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    truth = true_quantile(values, share)
    told = histogram.quantile(share)
    assert told is not None
    assert truth <= told <= truth * (1 + RESOLUTION)  # the upper edge of the truth's bin
    assert histogram.count == len(values)
    assert histogram.max == max(values)


@pytest.mark.parametrize(
    "value", [0, 1, 7, 8, 15, 16, 17, 31, 32, 1000, 3300, 2**31, 2**40 + 12345]
)
def test_a_single_value_is_told_as_it_is(value: int) -> None:
    histogram = Histogram()
    histogram.add(value)
    assert histogram.quantile(0.5) == value  # the bin's edge is cut to the greatest value seen
    assert histogram.max == value


@pytest.mark.parametrize("seed", range(6))
def test_the_least_values_are_told_no_higher_than_they_are(seed: int) -> None:
    rng, histogram = random.Random(seed), Histogram()
    values = sorted(rng.randrange(1, 10 ** rng.randrange(1, 12)) for _ in range(200))
    for value in values:
        histogram.add(value)
    above = values[20]
    found = histogram.least(3, above)
    for told, value in zip(found, [v for v in values if v >= above * 1.25], strict=False):
        assert above <= told <= value
    assert len(found) == 3 and Histogram().least(3, 0) == []


def test_an_empty_histogram_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None


def test_the_histogram_does_not_grow_with_the_run() -> None:
    histogram = Histogram()
    chance = random.Random(1)
    for _ in range(20_000):
        histogram.add(int(2 ** chance.uniform(0, 40)))
    assert len(histogram._bins) <= 41 * 8 + 8


def test_the_time_line_is_bounded_and_loses_nothing() -> None:
    line = Timeline(bins=16, width_seconds=0.1)
    for second in range(10_000):
        step = line.at(float(second))
        step.prefetched_bytes += 3
        step.events += 1
        step.positions["0"] = second
        assert len(line.bins) <= 16
    assert sum(b.prefetched_bytes for b in line.bins) == 30_000
    assert sum(b.events for b in line.bins) == 10_000
    assert line.width_seconds * 16 >= 10_000
    assert line.width_seconds * 8 <= 10_000  # no wider than need be
    ends = [b.positions["0"] for b in line.bins if b.positions]
    assert ends == sorted(ends)
    assert ends[-1] == 9999  # of each bin the last position


def test_a_doubled_bin_keeps_the_last_window_that_was_known() -> None:
    line = Timeline(bins=4, width_seconds=1.0)
    for second, window in ((0, 10), (1, 20), (2, 30), (3, 0)):
        line.at(second).window_bytes = window
    line.at(4.0)
    assert [b.window_bytes for b in line.bins[:2]] == [20, 30]


def test_a_job_that_forks_without_end_is_counted_in_bounded_space() -> None:
    ledger = Ledger()
    total = 3 * PROCESSES_MAX
    for number in range(total):
        hello = wire.Hello(wire.Role.AGENT, 1, 0, number % 2, 0, 2, 0, 0, 0, 0, 0, 0, "job")
        client = Client(None, hello, os.getpid())
        ledger.processes.hello(client)
        client.watched.now = Counters(major_faults=1, read_call_bytes=2, storage_bytes=3)
        client.watched.ended = True
        client.close()
    assert len(ledger.processes.single) <= PROCESSES_MAX
    told = ledger.processes.all()
    assert sum(one.count for one in told) == total
    assert sum(one.watched.now.major_faults for one in told) == total
    assert sum(one.watched.now.read_call_bytes or 0 for one in told) == 2 * total
    assert sorted(ledger.processes.folded) == [0, 1]


def test_what_is_said_to_the_user_is_said_once_and_bounded() -> None:
    ledger = Ledger()
    for i in range(10 * DEGRADATIONS_MAX):
        ledger.degrade("twice")
        ledger.degrade(f"number {i}")
    assert ledger.degradations[:2] == ["twice", "number 0"]
    assert len(ledger.degradations) == DEGRADATIONS_MAX
    for i in range(10 * FILES_MAX):
        ledger.refuse(f"/file/{i}", Refusal(Reason.DELETED, "why"), i)
    assert len(ledger.refused) == FILES_MAX
    ledger.refuse("/file/7", Refusal(Reason.IN_MEMORY, "it is memory"), 3)
    assert ledger.unserved["/file/7"].describe() == {
        "path": "/file/7", "mapped_bytes": 7, "reason": "in-memory", "why": "it is memory",
        "remedy": None,
    }  # fmt: skip


def test_the_books_of_all_closed_files_are_kept_in_bounded_space() -> None:
    ledger, count = Ledger(), 3 * FILES_MAX
    for number in range(count):
        file = file_of(1 << 20, f"/{number}", number)
        file.blocks.used.runs = 1
        ledger.close_file(file)
    assert len(ledger.closed.reads) == len(ledger.closed.files) == FILES_MAX
    assert sum(one.used.runs for one in ledger.closed.reads) == count


def test_what_was_read_by_calls_is_the_furthest_position_of_each_process() -> None:
    ledger = Ledger()
    for pid, path, position in ((1, "/a", 5), (1, "/a", 9), (2, "/a", 4), (1, "/b", 99)):
        ledger.jobs.by_calls(pid, path, position)
    assert ledger.jobs.files() == [{"path": "/b", "bytes": 99}, {"path": "/a", "bytes": 13}]
    for i in range(2 * READ_MAX):
        ledger.jobs.by_calls(i, "/c", 1)
    assert ledger.jobs.files()[0] == {"path": "/c", "bytes": READ_MAX - 3}


def test_what_limits_a_run_is_told_before_what_needs_nothing() -> None:
    ledger = Ledger()
    ledger.leave_alone("left to the kernel", "/a")
    ledger.degrade("opened for writing", "/b")
    assert ledger.degradations == ["/b: opened for writing", "/a: left to the kernel"]
    failing = SimpleNamespace(
        results=SimpleNamespace(failed_extents=2, last_error="Input/output error")
    )
    assert degradations(ledger, failing) == (  # type: ignore[arg-type]
        "/b: opened for writing",
        "2 extents could not be read (Input/output error)",
        "/a: left to the kernel",
    )
