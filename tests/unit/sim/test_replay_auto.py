# SPDX-License-Identifier: Apache-2.0
"""sim/replay/auto.py: `wrap` as it is, and in a pool: what it hears, what it reads ahead of whom,
and when it streams a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import warnings_fail
from replayed_jobs import MIB, PAGE, demand, run, straight, stream

from uffdprefetch.predict import window
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.sim.replay.auto import Auto, PoolAuto
from uffdprefetch.sim.replay.demand import Demand, ThreadAccesses, again
from uffdprefetch.sim.replay.eviction import BeladyEviction, CyclicEviction, LruEviction
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.sim.replay.policies import ANSWER_SECONDS, Plain, PoolPlanned
from uffdprefetch.state.reader import Region
from uffdprefetch.trace.file.trace_file import TracedFile

pytestmark = warnings_fail

#: A link on which a miss costs several times its bytes.
LINK = StorageModel(300e6, 5e-3)


def region_of(policy: Auto) -> Region:
    """Of the one rank in the one file."""
    [process] = policy.node.core.mappings.clients.values()
    [region] = process.regions.values()
    return region


# ---- walks --------------------------------------------------------------------------------------


def test_wrap_follows_streams_as_far_ahead_as_their_rate_asks_for() -> None:
    wanted = straight(16384, think=65536 / 90e6)  # computes a little longer than it reads
    result, plain = run(wanted, Auto()), run(wanted, Plain())
    # Lost is the beginning, until the walk is sure.
    assert result.seconds < 16384 * PAGE / 90e6 * 1.1 < plain.seconds
    assert result.read_bytes == 16384 * PAGE
    backward = demand(stream(list(range(16368, -1, -16)), 16, 65536 / 90e6), pages=16384)
    assert run(backward, Auto()).seconds < 0.7 * run(backward, Plain()).seconds
    # A job that stops leaves what was read ahead of it: a part of its walk, or what may be.
    for allowed, most in ((1 << 40, 32 * MIB), (2 * MIB, 2 * MIB)):
        stopped = demand(stream(list(range(0, 8192, 16)), 16, 0.002), pages=1 << 20)
        unused = run(stopped, Auto(allowed)).read_bytes - 8192 * PAGE
        assert MIB <= unused <= most + MIB, allowed  # the kernel reads ahead as well


def test_wrap_streams_a_file_for_random_readers_where_that_pays() -> None:
    pages = 16384
    order = np.random.default_rng(8).integers(0, pages // 2, 4000) * 2
    crops = demand(stream(order.tolist(), 2, 0.001), pages=pages)
    result, plain = run(crops, Auto(), storage=LINK), run(crops, Plain(), storage=LINK)
    assert result.stall_seconds < 0.6 * plain.stall_seconds
    assert result.misses < 0.6 * plain.misses
    assert plain.read_bytes * 0.9 <= result.read_bytes <= 1.1 * pages * PAGE
    # No room for it: what lies ahead of its places. A few crops only: as plain.
    policy = Auto(room_bytes=pages * PAGE // 4)
    run(crops, policy, storage=LINK)
    found = policy.node.core.arbiter.describe_file("/data/f")["whole"]
    assert found is not None and found["state"] == "refused"
    few = demand(stream(order[:30].tolist(), 2, 0.001), pages=pages)
    plain = run(few, Plain(), storage=LINK)
    assert run(few, Auto(), storage=LINK).stall_seconds < plain.stall_seconds + 0.05


def test_a_stream_in_a_pool_has_the_pools_window_ahead_of_it() -> None:
    stopped = demand(stream(list(range(0, 16384, 16)), 16, 0.002), pages=1 << 18)
    for budget in (256 * MIB, 4096 * MIB):
        ahead = min(window.pool_bytes(budget, (1 << 18) * PAGE, 1), 64 * MIB)
        result = run(stopped, PoolAuto(budget), CyclicEviction(stopped, budget))
        # Where it is is known when a run of up to 4 MiB is mapped; two requests of the largest size
        # are ahead at least; what has measured the link may have been for nothing.
        assert min(ahead // 8, 2 * MIB) <= result.read_bytes - 16384 * PAGE <= ahead + 4 * MIB
        assert result.misses < 80  # that is, of 1024 chunks
    assert window.pool_bytes(256 * MIB, 1 << 30, 1) == 4 * MIB
    assert window.pool_bytes(4096 * MIB, 1 << 30, 4) == 512 * MIB
    # Readers near each other share a window.
    at = [(0, 0), (0, 20 * MIB), (0, 30 * MIB), (1, 30 * MIB)]
    assert window.places(at) == 3 and window.places([]) == 1


def test_answering_the_touches_of_a_pool_takes_time() -> None:
    order = np.random.default_rng(9).permutation(1024) * 16
    wanted = demand(stream(order.tolist(), 16, 0.002), pages=16384)
    result = run(wanted, PoolPlanned(64 * MIB, 16 * MIB), BeladyEviction(wanted, 64 * MIB))
    # Each chunk once, beside the first miss.
    assert result.stall_seconds == pytest.approx(1024 * ANSWER_SECONDS + 0.002, abs=0.003)
    again_mapped = replace(wanted, streams=[again(wanted.streams[0], 3)])
    more = run(
        again_mapped, PoolPlanned(64 * MIB, 16 * MIB), BeladyEviction(again_mapped, 64 * MIB)
    )
    assert more.stall_seconds == pytest.approx(result.stall_seconds)


@pytest.mark.parametrize("make", [Auto, lambda: PoolAuto(16 * MIB)])
def test_later_epochs_are_followed_as_the_first(make: type[Auto]) -> None:
    """What left memory is read ahead of its reader again."""
    one, memory = straight(16384, think=0.001), 32 * MIB
    three = replace(one, streams=[again(one.streams[0], 3)])
    first = run(one, make(), LruEviction(one, memory))
    assert first.misses < 30
    whole = run(three, make(), LruEviction(three, memory))
    assert whole.read_bytes >= 2.9 * 16384 * PAGE  # by LRU nothing stays
    assert whole.misses < 160  # of 1024 chunks an epoch


def test_many_files_take_no_longer_than_their_accesses() -> None:
    files = [TracedFile(n, f"/data/{n}", 64 * PAGE) for n in range(800)]
    number = np.arange(800)
    one = replace(stream([0] * 800, 16, 1e-6), file=number)
    wanted = Demand(files, [one], PAGE, 1.0, 0.0, [])
    policy = Auto()
    assert run(wanted, policy).touched_bytes == 800 * 16 * PAGE
    core = policy.node.core  # nobody jumps about in any of them
    assert [core.arbiter.describe_file(file.path)["whole"] for file in files] == [None] * 800


def apart(threads: int, pages: int, think: float) -> Demand:
    """Threads of one rank that walk through parts of a file side by side."""
    part = pages // threads
    firsts = [list(range(t * part, (t + 1) * part, 16)) for t in range(threads)]
    return demand(
        *(replace(stream(first, 16, think), thread=t) for t, first in enumerate(firsts)),
        pages=pages,
    )


def test_threads_that_walk_apart_do_not_jump_about() -> None:
    """Each checkpoint is far from the last one that another thread has met, but what lies between
    it and its own last one was read."""
    wanted, storage = apart(4, 1 << 18, think=80e-6), StorageModel(4e9, 5e-3)
    policy = Auto()
    result = run(wanted, policy, None, storage)
    region = region_of(policy)
    assert len(region.reader.table.active()) == 4
    assert policy.node.core.arbiter.describe_file("/data/f")["whole"] is None, (
        "it does not jump about"
    )
    assert result.stall_seconds < 1  # how fast such a link is is known after some 0.3 s
    assert run(wanted, Plain(), None, storage).stall_seconds > 4


def test_several_streams_share_what_may_be_ahead() -> None:
    part = 1 << 16
    stopped = demand(
        *(
            replace(stream(list(range(t * part, t * part + 8192, 16)), 16, 0.01), thread=t)
            for t in range(4)
        ),
        pages=4 * part,
    )
    for allowed in (16 * MIB, 48 * MIB):
        unused = run(stopped, Auto(allowed)).read_bytes - 4 * 8192 * PAGE
        assert min(allowed // 2, 8 * MIB) <= unused <= allowed + 4 * 2 * MIB, allowed


def test_streams_that_have_ended_are_forgotten() -> None:
    there = list(range(0, 4096, 16))
    onward = list(range(1 << 17, (1 << 17) + 16 * 800, 16))
    wanted = demand(stream(there + onward, 16, 0.02), pages=1 << 18)
    policy = Auto()
    run(wanted, policy, None, StorageModel(1e9, 1e-3))
    active = region_of(policy).reader.table.active()
    assert [one.start_bytes // PAGE for one in active] == [1 << 17]


# ---- who jumps about ----------------------------------------------------------------------------


def jumping(pages: int, count: int, think: float, file: int = 0, rank: int = 0) -> ThreadAccesses:
    order = np.random.default_rng(rank).permutation(pages // 64)[:count] * 64
    return replace(stream(order.tolist(), 1, think, rank), file=np.full(count, file))


def test_no_more_files_are_read_whole_than_there_is_room_for() -> None:
    pages = 1 << 15
    files = [TracedFile(n, f"/data/{n}", pages * PAGE) for n in range(2)]
    streams = [jumping(pages, 2000, 0.002, rank, rank) for rank in range(2)]
    wanted = Demand(files, streams, PAGE, 1.0, 0.0, [])
    policy = Auto(room_bytes=200 * MIB)
    run(wanted, policy, storage=LINK)
    found = [policy.node.core.arbiter.describe_file(file.path)["whole"] for file in files]
    states = {one["state"] for one in found if one is not None}
    assert states - {"streamed", "done"} == {"refused"} and len(states) == 2


# ---- in a pool ----------------------------------------------------------------------------------


class TouchRecorder(PoolAuto):
    """``recorded``: (number of the access, page)."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.recorded: list[tuple[int, int]] = []

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        self.access = access
        return super().on_touch(stream, access, file, first, end, now)

    def on_pool_touches(
        self, stream: int, file: int, touches: list[tuple[int, int]], now: float
    ) -> None:
        self.recorded += [(self.access, page) for page, _ in touches]
        super().on_pool_touches(stream, file, touches, now)


@pytest.mark.parametrize(("think", "each"), [(0.0008, 0), (0.004, 1)])
def test_what_stays_in_a_pool_tells_once_a_cell_and_second(think: float, each: int) -> None:
    """In a second epoch nothing of it is missing or not mapped. The first took 0.8 or 4 s."""
    cell = DISTANCE_MIN_BYTES // PAGE
    one = straight(16 * cell, think=think)
    policy = TouchRecorder(1 << 30)
    run(replace(one, streams=[again(one.streams[0], 2)]), policy, None, StorageModel(4e9, 1e-4))
    later = [page for access, page in policy.recorded if access >= len(one.streams[0])]
    cells = [page // cell for page in later]
    assert sorted(set(cells)) == cells, "none twice"
    assert len(cells) >= 13 if each else not cells, str(cells)
