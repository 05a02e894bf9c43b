# SPDX-License-Identifier: Apache-2.0
"""predict/gain.py: no more than the kernel would have waited, and at least half of it."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.predict.gain import FileReads, ReadersTime, gain
from uffdprefetch.predict.storage import BLOCK_BYTES, RequestCost
from uffdprefetch.predict.used import FirstMisses, Used

LINK = RequestCost(300e6, 1e-3, 3)
PIECE = 128 << 10
TOOK = LINK.request_seconds(PIECE)
MS = 1_000_000
LOOK_NS = 4 * MS


def kernel_waits(requests: int, computed: float, at_once: int) -> float:
    """What a reader in order waits, request by request: it has the next one asked for when it comes
    to the last one's first page. ``at_once``: pieces that it reads before it computes for all."""
    now = waits = 0.0
    ready = TOOK  # of the piece that it comes to next
    for number in range(requests):
        arrived = now
        wait = max(0.0, ready - now)
        waits += wait
        now += wait + (computed * at_once if number % at_once == at_once - 1 else 0.0)
        ready = arrived + TOOK
    return waits


def watched(seconds: float, waited: float = 0.0, threads: int = 1) -> ReadersTime:
    return ReadersTime(seconds, threads * seconds, waited)


def told(used: Used, seconds: float, waited: float = 0.0, misses: int = 0) -> float:
    return gain([FileReads(used, PIECE)], misses, 0, watched(seconds, waited), LINK).saved_seconds


def in_order(blocks: int, each_ns: float, at_once: int = 1) -> tuple[Used, float]:
    """A reader that never waits and computes for each_ns a block, after ``at_once`` of them, as
    looks see it; and its time."""
    used, seen = Used(), 0
    end_ns = blocks * each_ns
    look_ns = 0.0
    while seen < blocks:
        look_ns += LOOK_NS
        over = min(blocks, int(look_ns / each_ns / at_once + 1) * at_once) if each_ns else blocks
        if over > seen:
            used.came(over - seen, over - seen, seen > 0, used_behind=False)
        seen = over
        used.looked(LOOK_NS)
    return used, max(end_ns, LOOK_NS) / 1e9


@pytest.mark.parametrize("computed", [0.0, 1e-4, 4e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("at_once", [1, 8, 64])
def test_in_order_it_is_no_more_than_readahead_waits_and_half_of_it(
    computed: float, at_once: int
) -> None:
    requests = 2048
    truth = kernel_waits(requests, computed, at_once)
    used, seconds = in_order(2 * requests, computed / 2 * 1e9, 2 * at_once)
    found = told(used, seconds)
    assert found <= truth * 1.01 + TOOK
    if at_once != 8:  # which is the time of a look: whether it computes for each is not seen
        assert found >= truth / 2 - 0.1


def test_what_looks_cannot_resolve_counts_as_computed_for_each() -> None:
    fine, seconds = in_order(4096, 5e5, 64)
    coarse = Used()
    coarse.came(4096, 4096, used_before=False, used_behind=False)
    coarse.looked(int(seconds * 1e9))
    assert told(coarse, seconds) < told(fine, seconds) / 2


def test_each_record_that_somebody_comes_to_from_elsewhere_is_a_whole_miss() -> None:
    used = Used()
    for _ in range(1000):
        used.came(1, 1, used_before=False, used_behind=False)
        used.looked(5 * MS)
    assert told(used, 5.0) == pytest.approx(1000 * TOOK)


def test_who_goes_backward_waits_for_each_request_as_a_whole() -> None:
    used = Used()
    used.came(1, 1, used_before=False, used_behind=False)
    used.looked(LOOK_NS)
    for _ in range(100):
        used.came(8, 8, used_before=False, used_behind=True)
        used.looked(LOOK_NS)
    assert told(used, 0.4) == pytest.approx(TOOK + 100 * 8 * BLOCK_BYTES / PIECE * TOOK)


def test_page_by_page_half_of_what_is_read_around_a_miss_is_there_already() -> None:
    """Of backward readers in the pool a sixth of what they saved was told."""
    page = LINK.request_seconds(BLOCK_BYTES)
    pool, cache = Used(), Used(first=FirstMisses(4, 4 * BLOCK_BYTES, 1, 4))
    for used in (pool, cache):
        used.came(1, 1, used_before=False, used_behind=False)
        used.looked(LOOK_NS)
    for _ in range(100):
        for _ in range(8):
            pool.came(1, 1, used_before=False, used_behind=True)
            pool.looked(LOOK_NS // 8, by_page=True)
        cache.came(8, 8, used_before=False, used_behind=True)
        cache.looked(LOOK_NS)
    for used in (pool, cache):
        assert used.ahead_blocks == 801
        assert told(used, 0.4) == pytest.approx(TOOK + 800 * page)
    pool.came(4, 4, used_before=False, used_behind=False)  # and then it reads something else
    pool.looked(LOOK_NS, by_page=True)
    assert pool.by_page == 800
    few = Used(first=FirstMisses(1, BLOCK_BYTES, 1, 1))
    around = Used(first=FirstMisses(4, 8 * BLOCK_BYTES, 1, 8))
    assert not few.first.brings_bytes and around.first.brings_bytes > PIECE


def test_who_goes_on_by_rows_that_lie_apart_waits_for_each_block() -> None:
    """Of cut-outs of an image nothing was told of 2.5 s: readahead never gets going there."""
    rows, some = (Used(first=FirstMisses(n, 20 * BLOCK_BYTES, 0, 20)) for n in (20, 10))
    dense = Used(first=FirstMisses(2, 20 * BLOCK_BYTES, 1, 20))
    pool = Used()
    for used in (rows, some, dense, pool):
        used.came(1, 1, used_before=False, used_behind=False)
        used.looked(LOOK_NS)
        for _ in range(200):
            used.came(4, 4, used_before=True, used_behind=False)
            used.looked(LOOK_NS, by_page=used is pool)
    block = LINK.request_seconds(BLOCK_BYTES)
    assert told(rows, 0.8) == pytest.approx(TOOK + 800 * block)
    assert told(pool, 0.8) == pytest.approx(TOOK + 800 * block)
    assert told(some, 0.8) == pytest.approx(TOOK + 400 * block, rel=0.1)
    # one that is mapped private and writable asks for no more, but PyTorch's
    found = gain([FileReads(rows, 2 * PIECE)], 0, 0, watched(0.8), LINK).saved_seconds
    assert found == pytest.approx(800 * block, rel=0.05)
    assert told(dense, 0.8) < told(some, 0.8) / 2


def test_in_the_pool_each_touch_tells_who_goes_backward_piece_by_piece() -> None:
    """A fifth of what was saved was told."""
    used = Used()
    for _ in range(100):
        used.came(4, 4, used_before=False, used_behind=True)
        used.looked(LOOK_NS // 4)
    assert used.backward and used.back == (400, 100 * (LOOK_NS // 4))
    for _ in range(100):  # who jumps about comes to what lies before where it was, too
        used.came(1, 1, used_before=False, used_behind=False)
        used.looked(LOOK_NS)
    assert not used.backward


def test_a_miss_takes_no_longer_than_the_readers_own_first_ones_have() -> None:
    """Where all our own reads stood beside the reader's a sixth too much was told."""
    first = FirstMisses(9, 9 * BLOCK_BYTES, 1, 9, ns=10 * MS)  # a ms each
    back = Used(first=first, by_page=100)
    assert told(back, 0.4) == pytest.approx(100 * 1e-3)
    random = Used(first=FirstMisses(19, 19 * 4096, 0, 9, ns=10 * MS))
    random.came(64, 64, used_before=True, used_behind=False)
    random.looked(LOOK_NS)
    assert told(random, 0.9) == pytest.approx(64 * 16 * 0.5e-3)
    assert first.most_seconds(4.0) == 4 * first.most_seconds(1.0)


def test_slices_that_go_backward_are_each_read_in_order() -> None:
    """Some looks see the slice that the reader is in, and above what it has not come to in that
    whole ones, which end where it was before; others come between two."""
    used = Used()
    for number in range(100):
        if number % 8 == 0:
            used.came(8, 8, used_before=False, used_behind=False)
        used.came(24, 24, used_before=False, used_behind=True)
        used.looked(LOOK_NS)
    blocks = 100 * 24 + 13 * 7
    waits = (blocks * BLOCK_BYTES / PIECE * TOOK - 100 * LOOK_NS / 1e9) / 2
    assert told(used, 0.4) == pytest.approx(13 * TOOK + waits)


def test_where_a_miss_brings_a_page_each_block_was_one_at_the_least() -> None:
    used, seconds = in_order(1024, 1e5)
    found = gain([FileReads(used, 4096)], 0, 0, watched(seconds), LINK)
    assert found.saved_seconds == pytest.approx(1024 * LINK.request_seconds(4096))


def test_first_misses_tell_what_a_reader_without_readahead_would_have_waited() -> None:
    """Under MADV_RANDOM: twenty pages in a row were twenty misses, two of them in each look."""
    used = Used(first=FirstMisses(20, 20 * 4096, 1, 10))
    used.came(64, 64, used_before=False, used_behind=False)
    used.looked(LOOK_NS)
    page = LINK.request_seconds(4096)
    assert 63 * 14 * page <= told(used, 0.1) <= 64 * 16 * page


def test_first_misses_in_order_tell_nothing_of_records_here_and_there() -> None:
    """A store reads its index, and then records: four times what was saved was told."""
    used = Used(first=FirstMisses(20, 20 * 4096, 1, 10))
    for _ in range(20):
        used.came(1, 1, used_before=False, used_behind=False)
        used.looked(LOOK_NS)
    used.came(1, 1, used_before=True, used_behind=False)
    used.looked(LOOK_NS)
    saved = gain([FileReads(used, 4096)], 0, 0, watched(0.1), LINK).saved_seconds
    assert saved == pytest.approx(21 * LINK.request_seconds(4096))


@pytest.mark.parametrize(
    "first",
    [
        FirstMisses(1, 6 * BLOCK_BYTES, 1, 6),
        FirstMisses(40, 40 * 4096, 40, 40),  # at forty places
        FirstMisses(32, 2 * BLOCK_BYTES, 1, 2),  # of libraries, which were not in memory
        FirstMisses(32, 2 * BLOCK_BYTES, 2, 4),  # ... and each fault's pages lie in two blocks
        FirstMisses(3, 3 * 4096, 1, 1),  # ... and a file's first page ends the mapping
        FirstMisses(),
    ],
)
def test_readers_whose_misses_map_whole_blocks_are_read_ahead_for(first: FirstMisses) -> None:
    assert first.a_block == 0


def test_waits_that_remained_are_taken_off_and_own_misses_not() -> None:
    used, seconds = in_order(4096, 1e5)
    whole = told(used, seconds)
    assert told(used, seconds, waited=0.05) == pytest.approx(whole - 0.05, abs=0.03)
    used.came(100, 0, used_before=False, used_behind=False)
    used.looked(LOOK_NS)
    own = 50 * TOOK  # of which each would have been a miss without us, too
    assert told(used, seconds, own / 2, misses=50) >= told(used, seconds, own / 2) + own / 4


def test_runs_of_its_own_that_begin_with_a_miss_plain_would_have_waited_for_all_along() -> None:
    """Of random records of 128 KiB the half of what they did wait was thought to be our doing."""
    used = Used()
    for _ in range(100):
        used.came(1, 1, used_before=False, used_behind=False)
        used.came(9, 0, used_before=False, used_behind=False)
    used.looked(LOOK_NS)
    own = 100 * 3 * TOOK  # a miss, and four requests in order
    assert told(used, 9.0, own, misses=1000) == pytest.approx(100 * TOOK)
    assert told(used, 9.0, own, misses=50) == pytest.approx(100 * TOOK - own / 2)
    assert told(used, 9.0, own, misses=0) < 0  # all of them were in memory


def test_what_was_there_when_it_was_asked_for_its_reader_had_begun_itself() -> None:
    """The kernel reads ahead for slices that are read backward; the rest of one is not ours."""
    used = Used()
    for _ in range(100):
        used.came(1, 0, used_before=False, used_behind=False)
        used.came(16, 16, used_before=True, used_behind=True)
        used.looked(1)
    waits = 100 * 16 * BLOCK_BYTES / PIECE * TOOK / 2
    half = FileReads(used, PIECE, 0.5)
    found = gain([half], 100, 0, watched(9.0, 100 * TOOK + waits / 2), LINK).saved_seconds
    assert found == pytest.approx(waits / 2)
    memory = gain([half], 0, 0, watched(9.0, waits / 4), LINK).saved_seconds
    assert memory == pytest.approx(waits / 4)


def test_where_own_misses_were_not_seen_to_wait_others_were_not_either() -> None:
    """A read of one page by FUSE is waited for in another state: of RocksDB, which took 0.3 s more
    than plain, 0.1 s was told as saved."""
    used = Used(runs=100, demand_runs=900, demand_blocks=900)
    assert told(used, 3.0, waited=900 * TOOK, misses=900) == pytest.approx(100 * TOOK)
    assert told(used, 3.0, waited=850 * TOOK, misses=900) == pytest.approx(50 * TOOK)
    assert told(used, 3.0, waited=0.0, misses=900) < 0.0


def test_what_the_first_look_finds_nobody_has_seen_anyone_wait_for() -> None:
    used = Used()
    used.came(9, 0, used_before=False, used_behind=False)
    used.looked(LOOK_NS)
    used.came(500, 0, used_before=False, used_behind=False, seen=False)
    used.came(3, 3, used_before=False, used_behind=False, seen=False)
    used.looked(LOOK_NS)
    assert (used.demand_runs, used.demand_blocks, used.ahead_blocks) == (1, 9, 3)
    used.came(1, 0, used_before=True, used_behind=False)
    used.looked(LOOK_NS)
    assert (used.demand_runs, used.demand_blocks) == (1, 10)


def test_in_stretches_that_lie_apart_the_first_request_behind_a_miss_overlaps_with_none() -> None:
    used = Used()
    for _ in range(100):
        used.came(4, 4, used_before=False, used_behind=False)
        used.looked(1)
    whole = 100 * TOOK + 300 * BLOCK_BYTES / PIECE * TOOK / 2
    assert told(used, 9.0) == pytest.approx(whole)
    apart = FileReads(used, PIECE, stretches=100)
    found = gain([apart], 0, 0, watched(9.0), LINK).saved_seconds
    assert found == pytest.approx(whole + 100 * TOOK / 2)
    assert apart.with_(apart).stretches == 200
    own = Used()
    for _ in range(100):
        own.came(4, 0, used_before=False, used_behind=False)
    seen = watched(9.0, 2 * whole)
    found = gain([FileReads(own, PIECE, stretches=100)], 100, 0, seen, LINK).saved_seconds
    assert found == pytest.approx(100 * TOOK / 2 - whole)


def test_what_comes_late_is_no_miss_of_the_readers_own() -> None:
    """The pool counts who waits for what was asked for ahead, too."""
    used, seconds = in_order(4096, 1e5)
    waits = 0.3
    assert told(used, seconds, waits, misses=10**6) == told(used, seconds, waits)


def test_readers_that_wait_side_by_side_gain_their_part_each() -> None:
    used = Used(runs=4000)
    reads, link = [FileReads(used, PIECE)], RequestCost(1e12, 1e-3, 3)
    alone = gain(reads, 0, 0, watched(9.0), link).saved_seconds
    four = gain(reads, 0, 0, watched(9.0, threads=4), link).saved_seconds
    assert alone == pytest.approx(4 * four)


def test_where_readers_side_by_side_keep_the_link_busy_no_request_is_alone() -> None:
    """Four ranks at the limit of the link: a request took 4 ms, of which 3 were the others', and a
    fifth of a second that plain would have taken as well was told as saved."""
    used = Used(went_on={18: (2800, 600 * MS)})
    seconds = used.ahead_blocks * BLOCK_BYTES / LINK.bandwidth_bytes_per_second / 0.95
    four = ReadersTime(seconds, 4 * seconds, 3.8 * seconds)
    link = RequestCost(LINK.bandwidth_bytes_per_second, 4e-3, 3)
    assert gain([FileReads(used, PIECE)], 0, 0, four, link).saved_seconds < 0.0
    # a link that is busy for a half shows what a request takes by itself
    rested = ReadersTime(2 * seconds, 8 * seconds, 3.8 * seconds)
    assert gain([FileReads(used, PIECE)], 0, 0, rested, link).saved_seconds > 0.0


def test_of_many_requests_some_were_alone_on_a_link_that_is_busy_now_and_then() -> None:
    """Of ranks that take turns and compute a latency of 1 ms was thought to be 0.1 ms."""
    used = Used(runs=4000)
    seconds = used.ahead_blocks * BLOCK_BYTES / LINK.bandwidth_bytes_per_second / 0.7
    four = ReadersTime(seconds, 4 * seconds, 0.1)
    saved = [
        gain([FileReads(used, PIECE)], 0, 0, four, RequestCost(300e6, 1e-3, reads)).saved_seconds
        for reads in (3, 50)
    ]
    assert 2 * saved[0] < saved[1] <= 4000 * TOOK / 4


def test_however_readers_wait_the_bytes_come_over_the_link() -> None:
    used = Used(runs=4000)
    found = gain([FileReads(used, PIECE)], 0, 0, ReadersTime(1.0, 100.0, 100.0), LINK)
    assert found.saved_seconds == pytest.approx(4000 * BLOCK_BYTES / 300e6 - 1.0)


def test_bytes_for_nothing_are_lost_as_far_as_they_exceed_what_was_spared() -> None:
    used = Used(runs=100)
    found = gain([FileReads(used, PIECE)], 0, 300_000_000, watched(3.0, 2.0), LINK)
    assert found.lost_seconds == pytest.approx(1.0 - 100 * TOOK)
    assert found.saved_seconds == pytest.approx(100 * TOOK - 2.0)


def test_what_one_miss_brings_are_no_two_misses() -> None:
    """With a readahead of MiB pages of a file, here and there, come by few of them."""
    used = Used(runs=500)
    alone = gain([FileReads(used, PIECE)], 0, 0, watched(9.0), LINK).saved_seconds
    few = gain([FileReads(used, PIECE, requests=20)], 0, 0, watched(9.0), LINK).saved_seconds
    both = FileReads(used, PIECE, requests=20).with_(FileReads(Used(runs=7), PIECE))
    assert few == pytest.approx(20 * TOOK) and alone > few
    assert both.misses_elsewhere == 27


def test_what_was_asked_for_when_it_was_used_is_no_less_its_readers_own_miss() -> None:
    """Of 700 misses of a graph's nodes 190 were thought to be plain's, too."""
    used = Used(runs=100, demand_runs=700, demand_blocks=1200)
    assert FileReads(used, PIECE, requests=900, own_requests=150).own_elsewhere == 700
    assert FileReads(used, PIECE, requests=300, own_requests=150).own_elsewhere == 350


def test_a_loss_is_none_that_misses_one_after_the_other_can_have_been() -> None:
    """Of who goes on in order at the least a half of each is spared; at the most all of it."""
    used, _ = in_order(1000, 0.0)
    found = gain([FileReads(used, PIECE)], 0, 600_000_000, watched(3.0, 2.9), LINK)
    requests = 1000 * BLOCK_BYTES / PIECE
    assert found.lost_seconds == pytest.approx(2.0 - requests * TOOK, abs=0.01)


def test_the_books_of_several_files_are_theirs_together() -> None:
    one, seconds = in_order(1024, 1e5)
    two, _ = in_order(4096, 2e5)
    two.came(5, 0, used_before=False, used_behind=False)
    files = [FileReads(one, PIECE), FileReads(two, PIECE, 0.5)]
    apart = gain(files, 9, 0, watched(seconds), LINK)
    together = gain([files[0].with_(files[1])], 9, 0, watched(seconds), LINK)
    assert together.saved_seconds == pytest.approx(apart.saved_seconds, rel=0.05)


def test_it_is_never_more_than_one_request_after_the_other() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        used = Used()
        for _ in range(chance.randrange(40)):
            blocks = chance.randrange(1, 40)
            ahead = chance.choice([0, blocks, chance.randrange(blocks + 1)])
            used.came(blocks, ahead, chance.random() < 0.5, chance.random() < 0.5)
            if chance.random() < 0.8:
                used.looked(chance.randrange(10**8), by_page=chance.random() < 0.5)
        wall = chance.uniform(1e-3, 100)
        threads = wall * chance.uniform(1, 9)
        seen = ReadersTime(wall, threads, threads * chance.random())
        latency, bandwidth = chance.uniform(1e-4, 0.1), chance.uniform(1e6, 1e10)
        link = RequestCost(bandwidth, latency, chance.randrange(100))
        pages = (used.ahead_blocks + used.demand_blocks) * BLOCK_BYTES // 4096
        found = gain([FileReads(used, PIECE)], chance.randrange(100), 0, seen, link)
        assert found.saved_seconds <= pages * link.request_seconds(4096)
