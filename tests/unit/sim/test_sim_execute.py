# SPDX-License-Identifier: Apache-2.0
"""sim/execute.py: closed forms, an event-by-event reference, and what must hold for any policy."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import sim_bed
from sim_bed import FAST, RAM, T, outcome, storage, system, workload

from uffdprefetch.cluster.homes import BLOCK_BYTES
from uffdprefetch.sim.execute import execute
from uffdprefetch.sim.model import RATES, Curve, Readings, System
from uffdprefetch.sim.outcome import Outcome
from uffdprefetch.sim.plan import CannotRun, LoadingPlan, Phase
from uffdprefetch.sim.policies import POLICIES
from uffdprefetch.sim.policies.base import LoadingPolicy
from uffdprefetch.sim.policies.cluster import ClusterPool, keepers
from uffdprefetch.sim.policies.hdmlp import Frequency, Naive, Perfect, StagingPool
from uffdprefetch.sim.policies.ours import FixedWindowPolicy, KnownOrderCache, KnownOrderPool
from uffdprefetch.sim.policies.preloading import DeepIO, Lbann, LocalityAware, ParallelStaging
from uffdprefetch.sim.staged import StagedPhase
from uffdprefetch.sim.workload import Workload

EVERY: list[LoadingPolicy] = [
    Perfect(),
    Naive(),
    StagingPool(),
    DeepIO(),
    DeepIO(True),
    ParallelStaging(),
    Lbann(),
    Lbann(True),
    LocalityAware(),
    Frequency(),
    Frequency(remote=False),
    Frequency(in_order=False),
    Frequency(cleanup_read=True),
    FixedWindowPolicy(),
    KnownOrderCache(),
    KnownOrderPool("lru"),
    KnownOrderPool("cyclic"),
    KnownOrderPool("belady"),
    KnownOrderPool("planned"),
    KnownOrderPool("newest"),
    ClusterPool(),
    ClusterPool("frequency", "sample"),
]
NAMES = [f"{type(p).__name__}-{i}" for i, p in enumerate(EVERY)]


def test_every_policy_that_a_scenario_can_name_is_tried_here() -> None:
    assert {type(policy) for policy in EVERY} == set(POLICIES.values())


# ---- closed forms -------------------------------------------------------------------------------


def test_one_node_with_everything_infinite_takes_what_it_computes() -> None:
    at = replace(
        system(N=1, t=FAST, beta=FAST, b_c=FAST),
        b_fs=FAST,
        classes=[storage("staging", 100, FAST), storage("RAM", 1e6, FAST)],
    )
    work = workload(F=100, E=2, B=10)
    for policy in EVERY:
        assert outcome(policy, at, work).seconds == pytest.approx(2 * work.S / 100, rel=1e-6)


def test_one_node_on_demand_adds_up_fetching_preprocessing_and_computing() -> None:
    work = workload(F=100, E=2, B=10)
    seconds = outcome(Naive(), system(N=1), work).seconds
    assert seconds == pytest.approx(2 * work.S * (1 / 66 + 1 / 200 + 1 / 100))


@pytest.mark.parametrize(("t", "bound"), [(20.0, 2 / 20), (1000.0, 1 / 100)])
def test_one_node_that_reads_ahead_takes_the_longer_of_reading_and_computing(
    t: float, bound: float
) -> None:
    # Two threads, each with t: the first sample alone is waited for when computing is longer.
    at, work = system(N=1, t=t), workload(F=200, E=1, B=10)
    first = work.sizes[work.epoch(0, 1)[0, 0, 0]]
    seconds = outcome(StagingPool(), at, work).seconds
    assert seconds == pytest.approx(work.S * max(1 / t / 2, 1 / 100), rel=0.03)
    assert seconds > work.S * max(1 / t / 2, 1 / 100)
    assert seconds < work.S * max(1 / t / 2, 1 / 100) + first * bound + 0.5


def test_perfect_is_the_slowest_node_of_each_batch() -> None:
    work = workload()
    batches = [batch for e in range(3) for batch in work.epoch(e, 4)]
    by_hand = sum(work.sizes[batch].sum(axis=1).max() for batch in batches)
    assert outcome(Perfect(), system(), work).seconds == pytest.approx(by_hand / 100)


def test_a_preload_is_what_the_papers_is() -> None:
    # Everything in memory: S / N at (1 / 36.5 + 1 / 200) / 2 seconds a MB, then the lower bound.
    at, work = system(ram=400.0, staging=1e3), workload(mean=1.0, spread=0.0)
    bound = outcome(Perfect(), at, work).seconds
    for policy in (DeepIO(), Lbann(True), LocalityAware()):
        seconds = outcome(policy, at, work).seconds
        assert seconds == pytest.approx(bound + 150 * (1 / 36.5 + 1 / 200) / 2, rel=2e-3)


# ---- an event-by-event reference ----------------------------------------------------------------


def naive_by_events(at: System, work: Workload) -> float:
    """Naive with a queue of events; the same rule for gamma, nothing side by side."""
    total = 0.0
    for epoch in work.epochs(at.N):
        for batch in epoch:
            queue = [(0.0, node, 0) for node in range(at.N) if batch[node, 0] >= 0]
            heapq.heapify(queue)
            reading = [0.0] * at.N
            end = 0.0
            while queue:
                now, node, turn = heapq.heappop(queue)
                size = work.sizes[batch[node, turn]]
                gamma = 1 + sum(until > now for other, until in enumerate(reading) if other != node)
                fetch = size * max(gamma / float(at.t(gamma)), 1 / at.b_fs)
                reading[node] = now + fetch
                done = now + fetch + size / at.beta + size / at.c
                if turn + 1 < batch.shape[1] and batch[node, turn + 1] >= 0:
                    heapq.heappush(queue, (done, node, turn + 1))
                end = max(end, done)
            total += end
    return total


@pytest.mark.parametrize("nodes", [1, 2, 4, 7])
@pytest.mark.parametrize("scheme", ["uniform", "imbalanced"])
def test_naive_agrees_with_events_one_after_the_other(nodes: int, scheme: str) -> None:
    at = system(N=nodes)
    work = workload(F=210, E=2, B=20, spread=0.4, drop_last=False, scheme=scheme)
    assert outcome(Naive(), at, work).seconds == pytest.approx(naive_by_events(at, work), rel=1e-9)


def staged_by_samples(at: System, sizes: np.ndarray, order: np.ndarray, local: np.ndarray) -> float:
    """One node, equations 3.2 to 3.4 sample by sample: a sample is fetched when the one before has
    been, and when what is consumed has left so much of the buffer that it fits."""
    staging = at.classes[0]
    bytes_to, ends = np.cumsum(sizes[order]), []
    fetched = consumed = 0.0
    for f, sample in enumerate(order):
        size = sizes[sample]
        before = (
            np.searchsorted(bytes_to, bytes_to[f] - staging.d) if (bytes_to[f] > staging.d) else -1
        )
        room = ends[min(before, f - 1)] if f and before >= 0 else 0.0
        fetch = at.local(1, 2) if local[f] else float(at.pfs(1))
        fetched = max(fetched, room) + max(fetch, at.write()) * size / staging.p
        consumed = max(fetched, consumed) + size / at.c
        ends.append(consumed)
    return consumed


@pytest.mark.parametrize("staging", [0.5, 1.5, 4.0, 20.0, 1e4])
@pytest.mark.parametrize("batch", [1, 20])
def test_staging_agrees_with_samples_one_after_the_other(staging: float, batch: int) -> None:
    # 25 samples from memory, then 25 from a file system slower than computing, and so on: how much
    # the buffer has gathered in the quick stretches decides how long the slow ones take.
    at = system(N=1, staging=staging, t=40.0)
    work = workload(F=400, E=1, B=batch, spread=0.3)
    order = work.epoch(0, 1)
    local = (np.arange(400) // 25 % 2 == 0).reshape(order.shape)
    phase = Phase(order, "staged", source=local.astype(np.int8))
    plan = LoadingPlan([phase])
    out = execute(at, Readings(), work.with_zero(), plan)
    flat = local.ravel()
    reference = staged_by_samples(at, work.sizes, order.ravel(), flat)
    exact = batch == 1
    assert out.seconds == pytest.approx(reference, rel=1e-9 if exact else 0.03)
    assert out.read_mb[0] == pytest.approx(work.sizes[order.ravel()[~flat]].sum())
    assert out.read_mb[1] == pytest.approx(work.sizes[order.ravel()[flat]].sum())


# ---- for every policy ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY, ids=NAMES)
@pytest.mark.parametrize("scheme", ["uniform", "whole", "imbalanced"])
def test_bytes_are_conserved_and_nothing_beats_perfect(policy: LoadingPolicy, scheme: str) -> None:
    work = workload(F=410, E=3, B=20, spread=0.3, scheme=scheme, drop_last=False)
    at = system(ram=130.0, ssd=500.0)
    if scheme == "whole" and isinstance(policy, LocalityAware):
        with pytest.raises(CannotRun, match="every node reads"):
            outcome(policy, at, work)
        return
    result = outcome(policy, at, work)
    perfect = outcome(Perfect(), at, work)
    changed = isinstance(policy, ParallelStaging) or policy == DeepIO(True)
    if not changed:
        assert result.seconds >= perfect.seconds * (1 - 1e-9)
        assert result.consumed_mb == pytest.approx(perfect.consumed_mb)
    assert result.seconds >= result.compute_seconds * (1 - 1e-9)
    assert result.stall == pytest.approx(
        result.stall_seconds.sum() + result.preload_seconds, rel=1e-6, abs=1e-6
    )
    if not isinstance(policy, Perfect):
        assert result.read_mb.sum() == pytest.approx(result.consumed_mb)
    assert (result.read_mb >= 0).all() and result.pfs_mb >= 0


@pytest.mark.parametrize("policy", EVERY, ids=NAMES)
@pytest.mark.parametrize("nodes", [1, 7, 33])
def test_any_number_of_nodes_will_do(policy: LoadingPolicy, nodes: int) -> None:
    # 20 samples a batch: of 33 nodes 13 get none.
    work = workload(F=205, E=2, B=20, drop_last=False)
    at = system(N=nodes, ram=300.0)
    result = outcome(policy, at, work)
    changed = isinstance(policy, ParallelStaging) or policy == DeepIO(True)
    assert result.seconds >= outcome(Perfect(), at, work).seconds * (0.8 if changed else 1 - 1e-9)
    assert result.consumed_mb > 0 and np.isfinite(result.seconds)


@pytest.mark.parametrize("policy", EVERY, ids=NAMES)
@pytest.mark.parametrize("scheme", ["uniform", "imbalanced"])
def test_where_rates_are_a_nodes_hardware_delivers_no_more_than_it_can(
    policy: LoadingPolicy, scheme: str
) -> None:
    """Of the file system, and of each node's own classes; however many threads there are."""
    work = workload(F=510, E=4, B=20, scheme=scheme)
    classes = [
        storage("staging", 40.0, RAM, 8),
        storage("RAM", 130.0, 500.0, 16),
        storage("SSD", 30.0, 50.0, 2),
    ]
    at = replace(
        system(c=1000.0, beta=1e5, b_c=300.0), t=Curve.flat(80.0), rates="node", classes=classes
    )
    result = outcome(policy, at, work)
    assert result.pfs_mb <= result.seconds * 80.0 * 1.06
    for j, rate in ((1, 500.0), (2, 50.0)):
        assert result.read_mb[j] <= result.seconds * at.N * rate * 1.001
    remote_mb = result.read_mb[at.J + 1 :].sum()
    assert remote_mb <= result.seconds * at.N * 300.0 * 1.001


def test_nodes_that_come_at_once_get_no_more_than_there_is() -> None:
    """Where none reads the file system it is the quickest source for one, and none when all do."""
    work = workload(F=1920, E=10, B=64, spread=0.0)
    at = replace(
        system(N=16, c=1e4, beta=1e5, b_c=40.0, ram=200.0, ssd=0.0),
        rates="node",
        t=Curve.flat(80.0),
    )
    for policy in (ClusterPool(), Lbann(True), KnownOrderPool(), Frequency()):
        result = outcome(policy, at, work)
        assert result.pfs_mb <= result.seconds * 80.0 * 1.001, policy


def test_a_node_without_a_sample_in_a_batch_is_not_through() -> None:
    """The last batch of an epoch is a short one, of which six of sixteen nodes have nothing."""
    work = workload(F=330, E=4, B=32, drop_last=False, spread=0.0)
    order = np.concatenate([work.epoch(e, 16) for e in range(4)])
    phase = Phase(order, "staged")
    at = system(N=16, staging=1.0, t=100.0)
    staged = StagedPhase(
        at,
        Readings(),
        work.with_zero(),
        phase,
        Outcome(read_mb=np.zeros(5), stall_seconds=np.zeros(5)),
    )
    seen = []
    end_batch = staged.clients.end_batch

    def recorded(number: int, batch: Any, fetched: np.ndarray) -> None:
        end_batch(number, batch, fetched)
        seen.append((int((batch.mb > 0).sum()), staged.clients.gamma))

    staged.clients.end_batch = recorded  # type: ignore[method-assign]
    staged.run()
    short = [gamma for readers, gamma in seen[:-1] if readers < 16]
    assert len(short) == 3
    for gamma in short:
        assert gamma.min() > 13


def test_the_threads_of_a_node_share_its_rates() -> None:
    at = replace(system(t=80.0, b_c=100.0), rates="node")
    assert at.sharing(8) == 8 and system().sharing(8) == 1
    # SSD: four threads read 146 MB/s, two 86.
    assert at.local(2, 4) == pytest.approx(4 / 146) and at.local(2, 2) == pytest.approx(2 / 86)
    assert at.remote(2, 2) == pytest.approx(2 / 86) and at.remote(1, 2) == pytest.approx(2 / 100)
    work = workload(F=400, E=1, B=20)
    one = outcome(StagingPool(), replace(at, N=1), work).seconds
    assert one == pytest.approx(work.S / 80, rel=0.01)
    # Two classes are filled at once, before the first batch.
    preloaded = outcome(LocalityAware(), replace(at, N=1, beta=1e9), work)
    assert preloaded.preload_seconds == pytest.approx(work.S / 80)


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY, ids=NAMES)
@pytest.mark.parametrize("rates", RATES)
def test_more_of_anything_is_never_slower(policy: LoadingPolicy, rates: str) -> None:
    def system(**given: Any) -> System:
        return replace(sim_bed.system(**given), rates=rates)

    work = workload(F=420, E=4, B=20, spread=0.2)
    seconds = []
    for factor in (0.5, 1.0, 2.0, 4.0, 64.0):
        at = system(c=100 * factor)
        seconds.append(outcome(policy, at, work).seconds)
    assert_falls(seconds)
    assert_falls(
        [
            outcome(policy, system(t={k: v * f for k, v in T.items()}), work).seconds
            for f in (0.5, 1, 2, 4, 64)
        ]
    )
    if isinstance(policy, Lbann):
        return  # it does not run with less memory
    # Preloading more takes longer before it saves: [HDMLP] scenarios 3 and 4. And HDMLP's classes
    # go in the order of first access: where all of a node's samples are in one class, its threads
    # read what the staging threads read (test_hdmlp_with_one_class_reads_twice).
    exempt = isinstance(policy, DeepIO | ParallelStaging | LocalityAware | Frequency)
    if not exempt:
        assert_falls(
            [
                outcome(policy, system(ram=50.0 * f, ssd=60.0 * f), work).seconds
                for f in (1, 2, 4, 8)
            ]
        )
    if not (isinstance(policy, Frequency) and rates == "node"):
        # There what its staging threads read further ahead, its classes' read the later.
        assert_falls(
            [outcome(policy, system(staging=s), work).seconds for s in (1, 4, 20, 100, 1e4)]
        )
    assert_falls([outcome(policy, system(beta=b), work).seconds for b in (50, 100, 200, 1e3, 1e6)])
    assert_falls([outcome(policy, system(b_c=b), work).seconds for b in (20, 100, 1e3, 1e5)])


@pytest.mark.parametrize("t", [20.0, 60.0])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_a_larger_buffer_is_never_slower_where_parts_are_not_equal(t: float, spread: float) -> None:
    """A node that has read all that it will need is no client any more."""
    work = workload(F=420, E=4, B=20, spread=spread, scheme="imbalanced")
    results = [outcome(StagingPool(), system(staging=s, t=t), work) for s in (1, 4, 20, 50, 1e4)]
    for before, after in pairwise([each.seconds for each in results]):
        assert after <= before * 1.06
    assert results[-1].seconds < 0.9 * results[0].seconds
    # At last the file system is never idle while somebody still has to read.
    assert results[-1].seconds >= work.S * 4 / (2 * t)


def assert_falls(seconds: list[float]) -> None:
    """Each is at most the one before; gamma counts clients at moments, which shift: 1 %."""
    for before, after in pairwise(seconds):
        assert after <= before * 1.01, seconds


@pytest.mark.parametrize("staging", [0.5, 3.0, 50.0])
def test_a_small_staging_buffer_is_kept_to(staging: float) -> None:
    # With a file system that delivers a batch in no time and then nothing to read, the threads
    # can be ahead by the buffer only: a slow start of a batch shows.
    work = workload(F=200, E=1, B=20, spread=0.0)
    at = system(N=1, t=150.0, staging=staging)
    at = replace(at, classes=[replace(at.classes[0], p=1)])
    seconds = outcome(StagingPool(), at, work).seconds
    naive = outcome(Naive(), at, work).seconds
    if staging < 1:
        # One sample ahead at the most: fetching and computing still overlap, preprocessing too.
        assert 200 / 100 <= seconds < naive
    else:
        assert seconds == pytest.approx(200 / 100, rel=0.05)


def test_nothing_is_ahead_without_a_staging_buffer() -> None:
    at, work = system(staging=0.0, ram=0.0, ssd=0.0), workload()
    naive = outcome(Naive(), at, work).seconds
    assert outcome(StagingPool(), at, work).seconds == naive
    assert outcome(Frequency(), at, work).seconds == naive


# ---- single policies ----------------------------------------------------------------------------


def test_lbann_needs_the_memory_of_all_nodes_to_hold_the_data() -> None:
    with pytest.raises(CannotRun, match="larger than the memory"):
        outcome(Lbann(), system(ram=100.0), workload())


def test_our_pools_need_a_class_beside_the_staging_buffer() -> None:
    bare = system(ram=0.0, ssd=0.0)
    for policy in (KnownOrderPool(), ClusterPool(), KnownOrderCache()):
        with pytest.raises(CannotRun, match="no storage class"):
            outcome(policy, bare, workload())


def with_disk(ram: float, disk: float, rate: float = 4000.0, N: int = 1) -> System:
    classes = [storage("staging", 100, RAM), storage("RAM", ram, RAM), storage("disk", disk, rate)]
    return replace(system(N=N), classes=classes)


@pytest.mark.parametrize("evict", ["cyclic", "planned", "newest"])
def test_what_leaves_the_pools_memory_comes_back_from_the_nodes_disk(evict: str) -> None:
    order = "sequential" if evict == "cyclic" else "shuffled"
    work = workload(F=600, E=4, B=20, scheme="whole", order=order)
    sizes = (150.0, 0.0), (150.0, 470.0), (150.0, 240.0)
    alone, large, small = (outcome(KnownOrderPool(evict), with_disk(*s), work) for s in sizes)
    assert alone.pfs_mb == pytest.approx(work.S * (1 + 3 * 0.75), rel=0.02)
    assert large.pfs_mb == pytest.approx(work.S, rel=0.01) and large.read_mb[2] > 2.1 * work.S
    least = work.S + 3 * (work.S - 150 - 240)  # what neither can hold, in each epoch
    assert least <= small.pfs_mb < least + 3 * 0.1 * work.S
    slow = outcome(KnownOrderPool(evict), with_disk(150.0, 470.0, 50.0), work)
    assert slow.pfs_mb == alone.pfs_mb and slow.read_mb[2] == 0


@pytest.mark.parametrize("scheme", ["uniform", "whole"])
def test_what_a_cluster_does_not_keep_comes_back_from_each_nodes_own_disk(scheme: str) -> None:
    """Where its own disk alone has room for all that it reads, and others' would be slower."""
    work = workload(F=600, E=4, B=20, scheme=scheme)
    without, having = (
        outcome(ClusterPool(), with_disk(60.0, disk, N=4), work) for disk in (0.0, 100.0)
    )
    least = work.S + 3 * max(0.0, work.S - 4 * 130)  # what all of them cannot hold, in each epoch
    assert least <= having.pfs_mb < least + (without.pfs_mb - least) / 3
    assert having.read_mb[2] > 0


@pytest.mark.parametrize("scheme", ["uniform", "whole"])
def test_what_a_node_keeps_on_its_disk_others_get_from_there(scheme: str) -> None:
    """Memory a tenth, the disks of all hold it once: read once."""
    work = workload(F=600, E=4, B=20, scheme=scheme)
    result = outcome(ClusterPool(), with_disk(60.0, 1.05 * work.S / 4, N=4), work)
    assert result.pfs_mb == pytest.approx(work.S)
    own_disk, other_disks = result.read_mb[2], result.read_mb[4]
    assert other_disks > 2 * own_disk > 0
    assert result.read_mb.sum() == pytest.approx(4 * work.S * (4 if scheme == "whole" else 1))
    slow = outcome(ClusterPool(), with_disk(60.0, 1.05 * work.S / 4, 0.1, N=4), work)
    assert slow.read_mb[2] == slow.read_mb[4] == 0 and slow.pfs_mb > 2 * work.S


@pytest.mark.parametrize("scheme", ["uniform", "whole"])
def test_the_cluster_pool_reads_each_byte_once(scheme: str) -> None:
    work = workload(F=600, E=4, B=20, scheme=scheme)
    result = outcome(ClusterPool(), system(ram=300.0, b_c=10_000.0), work)
    assert result.pfs_mb == pytest.approx(work.S)
    assert result.read_mb[2:].sum() > 0 or scheme == "whole"


def test_where_the_network_is_slower_than_a_share_of_the_file_system_that_is_read() -> None:
    work = workload(F=600, E=2, B=20)
    result = outcome(ClusterPool(), system(ram=300.0, ssd=0.0, b_c=5.0), work)
    assert result.read_mb[2:].sum() == 0 and result.pfs_mb > work.S


def test_what_a_cluster_s_memory_does_not_hold_comes_from_the_file_system_in_each_epoch() -> None:
    work = workload(F=600, E=4, B=20)
    small = outcome(ClusterPool(), system(ram=60.0, ssd=0.0), work)
    # Four nodes keep 45 of 60 MB each, in blocks of 4.2 MB; the rest of their memory has copies.
    kept = 4 * 10 * BLOCK_BYTES / 1e6
    assert work.S + 3 * (work.S - 240) < small.pfs_mb < work.S + 3 * (work.S - kept)


def test_shards_move_no_byte_and_what_all_read_is_spread() -> None:
    at = system(ram=300.0)
    shards = workload(F=800, E=3, B=800, order="sequential", spread=0.0)
    result = outcome(ClusterPool(), at, shards)
    # A block at each of the three borders is read by two.
    assert result.read_mb[2:].sum() <= 3 * 3 * BLOCK_BYTES / 1e6
    whole = workload(F=800, E=1, B=800, order="sequential", scheme="whole", spread=0.0)
    blocks = (np.arange(800) / BLOCK_BYTES * 1e6).astype(int)
    found = keepers(whole.epoch(0, 4), blocks, np.bincount(blocks).astype(float), 1e6)
    counts = np.bincount(found, minlength=4)
    assert counts.sum() == blocks.max() + 1 and counts.max() <= 0.35 * counts.sum()


def test_frequency_finds_more_at_home_where_a_node_keeps_samples_and_not_where_blocks() -> None:
    work = workload(F=8000, E=30, B=200, mean=0.11, spread=0.0)
    at = system(ram=600.0, ssd=0.0)
    own = {
        policy: outcome(policy, at, work).read_mb[1]
        for policy in (ClusterPool(), ClusterPool("frequency"), ClusterPool("frequency", "sample"))
    }
    first, blocks, samples = own.values()
    assert blocks - first < (samples - first) / 2 and samples > 1.02 * first


def test_hdmlp_with_other_nodes_storage_reads_less_from_the_file_system() -> None:
    at, work = system(ram=40.0, ssd=0.0, c=20.0), workload(E=6)
    alone, together = (outcome(Frequency(remote=r), at, work) for r in (False, True))
    assert together.read_mb[0] < alone.read_mb[0]
    assert alone.read_mb[2:].sum() == 0 < together.read_mb[2:].sum()


def test_hdmlp_with_one_class_reads_twice() -> None:
    work = workload(F=420, E=4, B=20, spread=0.2)
    split = outcome(Frequency(), system(ram=100.0, ssd=400.0), work)
    whole = outcome(Frequency(), system(ram=500.0, ssd=0.0), work)
    assert whole.seconds > split.seconds
    assert whole.read_mb[0] > 1.5 * split.read_mb[0]


def test_cleaning_up_makes_room_for_more() -> None:
    at, work = system(ram=40.0, ssd=0.0, t=2000.0), workload(E=6)
    kept, cleaned = (outcome(Frequency(cleanup_read=c), at, work) for c in (False, True))
    assert kept.fill_mb <= 4 * 40.0 + 1e-6
    assert kept.fill_mb < cleaned.fill_mb <= 4 * 80.0 + 1e-6


def test_a_window_follows_file_order_and_nothing_else() -> None:
    straight = workload(order="sequential", E=1)
    window, naive = (outcome(p, system(N=1), straight) for p in (FixedWindowPolicy(), Naive()))
    assert window.seconds < naive.seconds
    window = outcome(FixedWindowPolicy(), system(), straight)
    # A node that takes a quarter of each batch has the other quarters brought to it as well.
    assert window.useless_mb == pytest.approx(3 * straight.S, rel=0.05)
    lone = outcome(FixedWindowPolicy(), system(N=1), straight)
    assert lone.useless_mb == 0 and lone.pfs_mb == pytest.approx(straight.S)
    lone_part = workload(E=1, scheme="imbalanced", B=21, drop_last=False)
    crowd = workload(E=1, B=20)
    for work, nodes in ((lone_part, 4), (crowd, 33)):  # places of a batch that are nobody's
        there, naive = (outcome(p, system(N=nodes), work) for p in (FixedWindowPolicy(), Naive()))
        assert there.useless_mb == 0 and there.seconds == pytest.approx(naive.seconds)
    shuffled = workload(E=1)
    assert outcome(FixedWindowPolicy(), system(), shuffled).seconds == pytest.approx(
        outcome(Naive(), system(), shuffled).seconds
    )


def test_samples_of_no_byte_are_in_no_cache_where_there_is_none() -> None:
    work = workload(mean=0.0, spread=1.0, E=2)
    assert (work.sizes == 0).any()
    for policy in EVERY:
        try:
            seconds = outcome(policy, system(ram=0.0, ssd=0.0), work).seconds
        except CannotRun:
            continue
        assert np.isfinite(seconds)


def test_pools_evict_as_they_are_told() -> None:
    work = workload(order="sequential", E=4, spread=0.0)
    at = system(N=1, ram=300.0, ssd=0.0)
    hits = {
        e: outcome(KnownOrderPool(e), at, work).read_mb[1] / work.S
        for e in ("lru", "cyclic", "belady")
    }
    assert hits["lru"] == 0
    assert 3 * 0.5 >= hits["belady"] >= hits["cyclic"] > 3 * 0.49


def test_gamma_falls_when_nodes_stop_reading() -> None:
    # Half of the nodes have all in memory: the file system is the others' alone.
    at = replace(system(staging=1000.0), t=Curve.flat(100.0))
    work = workload(E=1, spread=0.0)
    order = work.epoch(0, 4)
    source = np.zeros(order.shape, np.int8)
    seconds = {}
    for readers in (4, 2, 1):
        source[:, readers:] = 1
        plan = LoadingPlan([Phase(order, "staged", source=source.copy())])
        seconds[readers] = execute(at, Readings(), work.with_zero(), plan).seconds
    # 150 MB by each node, over two threads with 100 MB/s over the readers each.
    assert seconds[4] == pytest.approx(150 * 4 / 100 / 2, rel=0.02)
    # The first batch is read as if all read.
    assert seconds[2] == pytest.approx(150 * 2 / 100 / 2, rel=0.06)
    assert seconds[1] == pytest.approx(150 / 100, rel=0.06)


@pytest.mark.parametrize("policy", EVERY, ids=NAMES)
def test_the_file_system_delivers_no_more_than_it_can(policy: LoadingPolicy) -> None:
    # p threads for the staging buffer, as many for each class that is being filled.
    at = replace(system(ram=160.0, ssd=60.0), t=Curve.flat(80.0))
    for order in ("shuffled", "sequential"):
        result = outcome(policy, at, workload(order=order))
        most = sum(one.p for one in at.classes) * 80.0
        if not isinstance(policy, Frequency):
            most = 2 * 80.0 * (2 if result.preload_seconds else 1)
        assert result.pfs_mb <= result.seconds * most * 1.02
