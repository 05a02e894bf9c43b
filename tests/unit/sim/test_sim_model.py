# SPDX-License-Identifier: Apache-2.0
"""sim/model.py and sim/workload.py: the paper's equations and its ways to cut a batch."""

from __future__ import annotations

import numpy as np
import pytest
from sim_bed import RAM, T, storage, system, workload

from uffdprefetch.sim import frequency
from uffdprefetch.sim.model import Curve, Readings
from uffdprefetch.sim.workload import places


def test_a_curve_is_linear_between_its_points_and_flat_beyond_them() -> None:
    curve = Curve({2: 86.0, 4: 146.0, 1: 66.0})
    assert [float(curve(count)) for count in (1, 2, 3, 4)] == [66, 86, 116, 146]
    assert float(curve(1.5)) == 76
    assert float(curve(0.2)) == 66 and float(curve(1000)) == 146
    assert Curve.flat(5)(np.array([1, 9])).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({}, "without a point"),
        ({0: 1.0}, "begin at 1"),
        ({1: 0.0}, "positive"),
        ({1: -3.0}, "positive"),
        ({1: float("inf")}, "positive"),
        ({1: float("nan")}, "positive"),
    ],
)
def test_a_curve_that_is_none_is_refused(points: dict[int, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Curve(points)


def test_fetch_times_are_those_of_equations_3_5_to_3_7() -> None:
    at = system(b_c=10_000.0)
    for gamma, rate in T.items():
        assert float(at.pfs(gamma)) == pytest.approx(gamma / rate)
    # b_fs is the limit where the file system is faster.
    assert float(system(t={1: 9000.0}).pfs(1)) == pytest.approx(1 / 2000)
    assert at.local(1, 8) == pytest.approx(2 / RAM[2]) and at.local(2, 8) == pytest.approx(2 / 86)
    # The network is slower than memory, faster than the SSD.
    assert at.remote(1, 8) == pytest.approx(1 / 10_000) and at.remote(2, 8) == pytest.approx(2 / 86)
    assert at.D == 600 and at.J == 2


def test_write_is_the_slower_of_preprocessing_and_storing() -> None:
    assert system(beta=200).write() == pytest.approx(1 / 200)
    assert system(beta=1e6).write() == pytest.approx(2 / RAM[2])
    assert system().write(2) == pytest.approx(2 / 86)
    slow = storage("slow", 1, {1: 10.0, 4: 40.0}, p=4)
    assert slow.p / float(slow.w(slow.p)) == pytest.approx(0.1)


def test_readings_of_read() -> None:
    fetch, from_pfs = np.array([0.01, 0.002, 0.002]), np.array([True, True, False])
    assert Readings("overlapped").read(fetch, 0.005, from_pfs).tolist() == [0.01, 0.005, 0.005]
    assert Readings("once").read(fetch, 0.005, from_pfs).tolist() == [0.015, 0.007, 0.002]


def sizes_of(batch: int, nodes: int, scheme: str) -> list[int]:
    return (places(batch, nodes, scheme) >= 0).sum(axis=1).tolist()


def test_uniform_gives_the_last_node_what_is_left() -> None:
    assert sizes_of(100, 4, "uniform") == [25, 25, 25, 25]
    assert sizes_of(10, 4, "uniform") == [3, 3, 3, 1]
    assert sizes_of(2, 4, "uniform") == [1, 1, 0, 0]
    taken = places(10, 4, "uniform")
    assert sorted(taken[taken >= 0].tolist()) == list(range(10))


def test_whole_and_imbalanced_have_the_papers_sizes() -> None:
    assert sizes_of(7, 3, "whole") == [7, 7, 7]
    assert sizes_of(100, 4, "imbalanced") == [50, 50, 12, 12]
    assert sizes_of(8, 2, "imbalanced") == [8, 2]
    assert places(8, 2, "imbalanced").max() == 7
    assert sizes_of(100, 1, "imbalanced") == [100] and sizes_of(1, 2, "imbalanced") == [1, 1]


@pytest.mark.parametrize("scheme", ["uniform", "imbalanced", "whole"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_reads_every_sample_in_batches(scheme: str, drop_last: bool) -> None:
    work = workload(F=107, B=20, scheme=scheme, drop_last=drop_last)
    epoch = work.epoch(0, 4)
    assert len(epoch) == work.T == (5 if drop_last else 6)
    seen, counts = np.unique(epoch[epoch >= 0], return_counts=True)
    assert len(seen) == (100 if drop_last else 107)
    if scheme == "uniform":
        assert set(counts) == {1}
    if scheme == "whole":
        assert set(counts) == {4}
    for batch in epoch:
        held = [set(part[part >= 0]) for part in batch]
        if scheme == "uniform":
            assert sum(map(len, held)) == len(set().union(*held))


def test_epochs_differ_and_come_again_with_their_seed() -> None:
    work, same, other = workload(seed=1), workload(seed=1), workload(seed=2)
    assert np.array_equal(work.epoch(0, 4), same.epoch(0, 4))
    assert not np.array_equal(work.epoch(0, 4), work.epoch(1, 4))
    assert not np.array_equal(work.epoch(0, 4), other.epoch(0, 4))
    straight = workload(order="sequential", B=20).epoch(2, 4)
    assert straight.reshape(-1).tolist() == list(range(600))


def test_what_a_node_reads_more_often_is_as_the_paper_says() -> None:
    # Section 3.2.1: N = 4, E = 1000, F = 10 000, delta = 0.1: 323 expected, 329 drawn.
    assert frequency.most(1000, 4, 0.1) == 275
    assert frequency.expected(10_000, 1000, 4, 0.1) == pytest.approx(322.94, abs=0.01)
    assert frequency.expected(100, 5, 1, 0.0) == 0 and frequency.expected(100, 5, 1, -0.5) == 100
    # One epoch on two nodes: half of the samples are read, none twice.
    assert frequency.expected(100, 1, 2, 0.0) == pytest.approx(50)
    drawn = frequency.drawn(workload(F=400, E=50, B=20), 4)
    assert drawn.sum(axis=0).tolist() == [50] * 400
    limit = frequency.most(50, 4, 0.2)
    more = (drawn > limit).sum(axis=1).mean()
    assert more == pytest.approx(frequency.expected(400, 50, 4, 0.2), rel=0.2)
