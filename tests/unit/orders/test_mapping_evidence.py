# SPDX-License-Identifier: Apache-2.0
"""orders/evidence.choose(): against readers whose page tables are a bitmap, with fault-around,
pages
that do not show and samples read ahead, the truth is chosen, and nothing else ever is; nor before
anything has been said (orders/sample_search.begun())."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import warnings_fail
from mapping_readers import (
    PAGE,
    Readers,
    byte_keys,
    ints,
    keys_of,
    lmdb_index,
    plain_index,
    texts,
)

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.orders.evidence import ENOUGH_SAMPLES
from uffdprefetch.orders.mapping import Hypothesis, HypothesisChoice, KeyList, choose, hypotheses
from uffdprefetch.orders.residency_evidence import (
    CERTAIN,
    ResidencyEvidence,
    Share,
    _between,
    certainty,
)
from uffdprefetch.orders.sample_search import BEGUN_MAX, BEGUN_MIN, begun

pytestmark = [warnings_fail, pytest.mark.slow]

KIB = 1 << 10
#: Bytes of a record, least and most: as small as tokens, as photographs, as volumes.
SIZES = {
    "tiny": (50, 400),
    "small": (2 * KIB, 6 * KIB),
    "middle": (8 * KIB, 24 * KIB),
    "large": (90 * KIB, 200 * KIB),
}


@dataclass(frozen=True)
class Case:
    """A data set: its file, its lists, and the keys of each sample's records."""

    index: RecordIndex
    lists: Sequence[KeyList]
    keys: Sequence[Sequence[bytes]]

    @property
    def n(self) -> int:
        return len(self.keys)

    def truth(self, samples: np.ndarray) -> set[int]:
        wanted = [key for sample in samples.tolist() for key in self.keys[sample]]
        return set(np.concatenate([self.index.find(key) for key in wanted]).tolist())


Make = Callable[[random.Random, int, tuple[int, int]], Case]


def numbered(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    """image-%09d from 1, of which the data set uses all but some at the end: from 0 would do too,
    but for the first."""
    extra = rng.choice((0, 0, 1, 40))
    made = [(b"image-%09d" % i, rng.randint(*sizes)) for i in range(1, n + extra + 1)]
    return Case(lmdb_index(made), [], [[b"image-%09d" % i] for i in range(1, n + 1)])


def ambiguous(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    """Keys from 0 on, one more than there are samples, which count from 0 or 1."""
    base = rng.randrange(2)
    made = [(b"%08d" % i, rng.randint(*sizes)) for i in range(n + 1)]
    return Case(lmdb_index(made), [], [[b"%08d" % (i + base)] for i in range(n)])


def unpadded(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    made = [(b"%d" % i, rng.randint(*sizes)) for i in range(n)] + [(b"length", 4)]
    return Case(lmdb_index(made), [], [[b"%d" % i] for i in range(n)])


def listed(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    """A list of keys in an order of its own, and another list that leads to records as well."""
    keys = [b"%s/%08x.jpg" % (rng.choice((b"cat", b"dog")), rng.getrandbits(32)) for _ in range(n)]
    written = rng.sample(keys, n)
    made = [(key, rng.randint(*sizes)) for key in written] + [(b"__keys__", 9 * n), (b"__len__", 4)]
    return Case(
        lmdb_index(made),
        [
            byte_keys("sorted_keys", sorted(keys)),
            byte_keys("keys", keys),
            byte_keys("all", written),
        ],
        [[key] for key in keys],
    )


def pairs(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    """Two large records for each sample, and a third that nobody reads."""
    kinds = (b"depth", b"image", b"mask")
    made = [(b"%s-%06d" % (kind, i), rng.randint(*sizes)) for i in range(n) for kind in kinds]
    return Case(lmdb_index(made), [], [[b"depth-%06d" % i, b"mask-%06d" % i] for i in range(n)])


def subset(rng: random.Random, n: int, sizes: tuple[int, int]) -> Case:
    """A list of numbers picks the records."""
    made = [(b"%06d" % i, rng.randint(*sizes)) for i in range(2 * n)]
    picked = rng.sample(range(2 * n), n)
    decoy = rng.sample(range(2 * n), n)
    lists = [ints("other", decoy), ints("indices", picked)]
    return Case(lmdb_index(made), lists, [[b"%06d" % i] for i in picked])


MAKERS: dict[str, Make] = {
    make.__name__: make for make in (numbered, ambiguous, unpadded, listed, pairs, subset)
}


def order_of(case: Case, rng: random.Random, kind: str) -> np.ndarray:
    if kind == "sequential":
        return np.arange(case.n)
    return np.random.default_rng(rng.getrandbits(32)).permutation(case.n)


def read_some(case: Case, rng: random.Random, order: np.ndarray, seen: int, ahead: int) -> Readers:
    """Readers that have read ``seen`` samples, workers that have read some more of the order, and
    all that blurs what can be seen of it."""
    around = rng.choice((1, 16, 16))  # pages: of none, of fault_around_bytes
    readers = Readers(case.index, around, rng.randrange(16))
    readers.read(np.array(sorted(case.truth(order[: seen + ahead]))))
    for _ in range(rng.randrange(30)):  # the pages of a B-tree, or what another reader touches
        page = rng.randrange(len(readers.mapped))
        readers.mapped[page : page + around] = True
    if rng.random() < 0.5:
        readers.hide(every=1024)  # overlays
    if rng.random() < 0.3:
        readers.hide(every=512, pages=16)  # dropped
    return readers


def right(choice: HypothesisChoice, case: Case, whole: bool = True) -> bool:
    """Whether the chosen hypotheses say what each sample reads; not ``whole``: nothing else."""
    wanted = case.truth(np.arange(case.n))
    for each in choice.hypotheses:
        records, which = each.records(np.arange(case.n))
        for record, sample in zip(records.tolist(), which.tolist(), strict=True):
            if case.index.key(record) not in case.keys[sample]:
                return False
    said = {r for each in choice.hypotheses for r in each.records(np.arange(case.n))[0].tolist()}
    return said == wanted if whole else said <= wanted


# ---- the truth, and nothing else ----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_chosen_is_true(make: str, size: str) -> None:
    """Many seeds, orders, and numbers of samples read: never a wrong one, whatever is seen."""
    for seed in range(12):
        rng = random.Random(f"{make} {size} {seed}")
        n = rng.choice((200, 1000)) if size == "large" else rng.choice((300, 1500))
        case = MAKERS[make](rng, n, SIZES[size])
        order = order_of(case, rng, rng.choice(("sequential", "shuffled", "shuffled")))
        seen = rng.choice((1, 8, 64, 200))
        readers = read_some(case, rng, order, seen, rng.choice((0, 20)))
        found = hypotheses(case.index, case.n, case.lists, order[:64])
        choice = choose(case.index, found, order[:seen], readers.present, "a.lmdb")
        assert right(choice, case, whole=False), (seed, choice.why)
        # the truth is among the hypotheses: to give up would be wrong
        assert choice.hypotheses or not choice.decided, (seed, choice.why)
        assert choice.decided == bool(choice.hypotheses)


#: Where some record of three kinds lies between two that are read, 16 KiB are too small to tell.
FEW = [(make, size) for make in MAKERS for size in ("middle", "large") if make != "pairs"]


@pytest.mark.parametrize(("make", "size"), [*FEW, ("pairs", "large")])
def test_a_few_batches_of_a_shuffled_epoch_are_enough(make: str, size: str) -> None:
    for seed in range(5):
        rng = random.Random(f"{make} {size} {seed}")
        case = MAKERS[make](rng, 5000 if size == "middle" else 600, SIZES[size])
        order = order_of(case, rng, "shuffled")
        seen = 64 if size == "large" else 400
        readers = read_some(case, rng, order, seen, 16)
        found = hypotheses(case.index, case.n, case.lists, order[:64])
        choice = choose(case.index, found, order[:seen], readers.present, "a.lmdb")
        assert choice.decided and right(choice, case), (seed, choice.why)


@pytest.mark.parametrize("make", ["numbered", "unpadded", "listed"])
def test_many_samples_tell_small_records_apart_too(make: str) -> None:
    for seed in range(3):
        rng = random.Random(f"{make} {seed}")
        case = MAKERS[make](rng, 20000, SIZES["tiny"])
        order = order_of(case, rng, "shuffled")
        # 20000 records of 225 bytes are 70 windows of fault-around
        readers = read_some(case, rng, order, 40, 0)
        found = hypotheses(case.index, case.n, case.lists, order[:64])
        choice = choose(case.index, found, order[:40], readers.present, "a.lmdb")
        assert choice.decided and right(choice, case), (seed, choice.why)


def test_the_file_without_keys_is_proven_by_what_is_touched() -> None:
    index = plain_index([12 * KIB] * 2000)
    order = np.random.default_rng(1).permutation(2000)
    found = hypotheses(index, 2000, [], order[:64])
    readers = Readers(index, phase=3)
    readers.read(order[:8])
    choice = choose(index, found, order[:8], readers.present, "x.npy")
    assert choice.decided and choice.hypotheses == tuple(found)
    assert choice.why == (
        "record number = sample number: 8 of 8 records of samples that were read are mapped"
    )


def test_small_records_that_lie_between_the_samples_hold_up_nothing() -> None:
    """Descriptions in pages all over the file are mapped with what surrounds them: not all of them,
    and no more of those of the samples read than of others."""
    chance = random.Random(8)
    names = [b"%08x" % chance.getrandbits(32) for _ in range(400)]
    made: list[tuple[bytes, int, int]] = []
    at = 2 * PAGE
    for first in range(0, len(names), 50):
        described = range(first, first + 50)
        made += [(b"~%04d" % i, at + 80 * (i - first), 73) for i in described]
        at += PAGE
        for name in names[first : first + 50]:
            made.append((name, at + 16, chance.randrange(30 * KIB, 60 * KIB)))
            at += -(-(made[-1][2] + 16) // PAGE) * PAGE
    made.sort()
    keys, starts, lengths = zip(*made, strict=True)
    places = RecordPlaces(
        one_part(len(made)), [Listed(np.array(starts, np.int64), np.array(lengths, np.uint32))]
    )
    index = RecordIndex("lmdb", at, places, keys_of(keys))
    case = Case(index, [byte_keys("samples", names)], [[name] for name in names])
    order = np.random.default_rng(2).permutation(400)
    readers = Readers(index)
    readers.read(np.array(sorted(case.truth(order[:96]))))
    for page in (starts[i] // PAGE for i in range(len(made)) if keys[i].startswith(b"~")):
        readers.mapped[page] = True
    found = hypotheses(index, 400, case.lists, order[:64])
    assert len(found) > 1
    choice = choose(index, found, order[: ENOUGH_SAMPLES - 1], readers.present, "a.lmdb")
    assert not choice.decided and "do not tell" in choice.why
    choice = choose(index, found, order[:96], readers.present, "a.lmdb")
    assert [each.name for each in choice.hypotheses] == ["keys from .samples"]


# ---- not yet ------------------------------------------------------------------------------------


def test_nothing_is_decided_while_the_whole_file_is_mapped() -> None:
    rng = random.Random(3)
    case = numbered(rng, 1000, SIZES["middle"])
    order = order_of(case, rng, "shuffled")
    readers = Readers(case.index)
    readers.mapped[:] = True
    found = hypotheses(case.index, case.n, [], order[:64])
    choice = choose(case.index, found, order[:500], readers.present, "a.lmdb")
    assert not choice.decided and not choice.hypotheses
    assert "nearly all of a.lmdb is mapped" in choice.why


def test_nothing_is_decided_after_every_sample_was_read() -> None:
    index = plain_index([12 * KIB] * 50)
    found = hypotheses(index, 50, [], np.arange(50))
    readers = Readers(index)
    readers.mapped[:] = True
    choice = choose(index, found, np.arange(50), readers.present, "x.npy")
    assert not choice.decided and "nearly all samples have been read already" in choice.why


def test_counting_from_0_or_1_is_left_open_while_reading_goes_straight_on() -> None:
    made = [(b"%08d" % i, 12 * KIB) for i in range(5001)]
    case = Case(lmdb_index(made), [], [[b"%08d" % i] for i in range(5000)])
    found = hypotheses(case.index, 5000, [], np.arange(64))
    assert len(found) == 2
    readers = Readers(case.index, phase=5)
    readers.read(np.arange(100))
    choice = choose(case.index, found, np.arange(64), readers.present, "a.lmdb")
    assert not choice.decided and "do not tell" in choice.why
    order = np.random.default_rng(0).permutation(5000)[:400]
    shuffled = Readers(case.index, phase=5)
    shuffled.read(order)
    choice = choose(case.index, found, order, shuffled.present, "a.lmdb")
    assert [each.name for each in choice.hypotheses] == ["keys '%08d', from 0"]


def test_readers_that_have_ended_are_no_proof_against_anything() -> None:
    rng = random.Random(4)
    case = numbered(rng, 1000, SIZES["middle"])
    order = order_of(case, rng, "shuffled")
    found = hypotheses(case.index, case.n, [], order[:64])
    choice = choose(case.index, found, order[:200], Readers(case.index).present, "a.lmdb")
    assert not choice.decided and choice.why == "the readers have little of a.lmdb mapped now"


def test_what_was_read_long_ago_need_not_be_mapped_any_more() -> None:
    rng = random.Random(5)
    case = listed(rng, 3000, SIZES["middle"])
    order = order_of(case, rng, "shuffled")
    readers = Readers(case.index)
    readers.read(np.array(sorted(case.truth(order[900:1000]))))
    found = hypotheses(case.index, case.n, case.lists, order[:64])
    choice = choose(case.index, found, order[:1000], readers.present, "a.lmdb")
    assert [each.name for each in choice.hypotheses] == ["keys from .keys"]


def test_what_was_read_ahead_is_no_second_record_of_each_sample() -> None:
    """Keys 0, 1, 10, 100, 101, ..., 109, 11, 12: their order's first ones are read soon as well."""
    made = [(b"%d" % i, 100 * KIB) for i in range(1000)]
    case = Case(lmdb_index(made), [], [[b"%d" % i] for i in range(1000)])
    order = np.arange(1000)
    found = hypotheses(case.index, 1000, [], order[:16])
    assert len(found) == 2
    readers = Readers(case.index)
    readers.read(np.array(sorted(case.truth(order[:116]))))
    seen, ahead = order[:16], order[16:144]
    choice = choose(case.index, found, seen, readers.present, "a.lmdb", ahead)
    assert not choice.hypotheses and not choice.decided
    readers.read(np.array(sorted(case.truth(order[:200]))))
    seen, ahead = order[:100], order[100:228]
    choice = choose(case.index, found, seen, readers.present, "a.lmdb", ahead)
    assert [each.name for each in choice.hypotheses] == ["keys '%d', from 0"]


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_one_or_two_samples_prove_nothing(seen: int) -> None:
    rng = random.Random(6)
    case = listed(rng, 1000, SIZES["large"])
    order = order_of(case, rng, "shuffled")
    readers = Readers(case.index)
    readers.read(np.array(sorted(case.truth(order[:2]))))
    found = hypotheses(case.index, case.n, case.lists, order[:64])
    choice = choose(case.index, found, order[:seen], readers.present, "a.lmdb")
    assert not choice.decided and not choice.hypotheses


# ---- never --------------------------------------------------------------------------------------


def strangers(case: Case, rng: random.Random) -> list[Hypothesis]:
    """Without the list that leads to the truth."""
    lists = [each for each in case.lists if each.name not in ("keys", "indices")]
    found = hypotheses(case.index, case.n, lists, np.array(rng.sample(range(case.n), 64)))
    return [
        each for each in found if not right(HypothesisChoice((each,), "", True), case, whole=False)
    ]


@pytest.mark.parametrize("size", ["small", "middle", "large"])
@pytest.mark.parametrize("make", ["listed", "subset"])
def test_where_the_truth_is_not_among_them_none_is_chosen_and_it_says_so(
    make: str, size: str
) -> None:
    for seed in range(4):
        rng = random.Random(f"{make} {size} {seed}")
        case = MAKERS[make](rng, {"small": 12000, "middle": 3000, "large": 500}[size], SIZES[size])
        found = strangers(case, rng)
        assert len(found) >= 2
        order = order_of(case, rng, "shuffled")
        for seen in (16, ENOUGH_SAMPLES, 200):
            readers = read_some(case, rng, order, seen, 10)
            choice = choose(case.index, found, order[:seen], readers.present, "a.lmdb")
            assert not choice.hypotheses, (seed, choice.why)
            assert choice.decided == (seen >= ENOUGH_SAMPLES), (seed, seen, choice.why)
        assert choice.why.startswith("of the records of a.lmdb that ") and "give key=" in choice.why


def test_no_hypothesis_at_all_is_said_at_once() -> None:
    index = lmdb_index([(b"x%x" % i, 5000) for i in range(0, 3000, 7)])
    nothing = Readers(index).present
    choice = choose(index, [], np.arange(3), nothing, "a.lmdb")
    assert choice.decided and not choice.hypotheses and choice.why.startswith("no key of a.lmdb")
    choice = choose(plain_index([5, 5]), [], np.arange(3), nothing, "x.npy")
    assert choice.decided and "x.npy has fewer records" in choice.why


# ---- what it costs, and its arithmetic ----------------------------------------------------------


def test_the_page_tables_are_asked_for_some_thousand_ranges_at_most() -> None:
    rng = random.Random(7)
    n = 100_000
    index = lmdb_index([(b"%06d" % i, 6000) for i in range(2 * n)])
    lists = [ints(f"list{i}", [rng.randrange(2 * n) for _ in range(n)]) for i in range(3)]
    order = np.random.default_rng(0).permutation(n)
    found = hypotheses(index, n, lists, order[:64])
    readers = Readers(index)
    readers.mapped[:] = True
    choose(index, found, order, readers.present, "a.lmdb")
    assert len(found) >= 4 and readers.asked <= 2 * 1024 * len(found)


def test_certainty_grows_with_the_count_and_has_a_sign() -> None:
    assert certainty(Share(4, 4), Share(0, 64)) >= CERTAIN
    assert certainty(Share(3, 3), Share(0, 64)) < certainty(Share(4, 4), Share(0, 64))
    assert certainty(Share(64, 64), Share(64, 64)) == 0 == certainty(Share(0, 0), Share(1, 2))
    assert certainty(Share(1, 50), Share(49, 50)) == -certainty(Share(49, 50), Share(1, 50)) < -30
    # by hand: 16 of 16 against 8 of 16: 24 log(3/4) + 8 log(1/4) together, 16 log(1/2) apart
    by_hand = 16 * np.log(0.5) - 24 * np.log(0.75) - 8 * np.log(0.25)
    assert certainty(Share(16, 16), Share(8, 16)) == pytest.approx(by_hand)


def test_records_that_one_fault_may_map_together_prove_as_much_as_one() -> None:
    index = plain_index([KIB] * 10_000)
    readers = Readers(index)
    readers.mapped[:] = True
    evidence = ResidencyEvidence(index, readers.present)
    evidence.measure(np.arange(10_000))
    side_by_side, apart = evidence.share(np.arange(64)), evidence.share(np.arange(0, 6400, 100))
    assert str(side_by_side) == str(apart) == "64 of 64"
    none = Share(0, 64)
    assert certainty(side_by_side, none) < certainty(Share(2, 2), none) < certainty(apart, none)


def test_a_record_between_two_that_are_read_is_not_taken_for_a_third() -> None:
    """It is mapped around both of them, each time."""
    kinds = (b"depth", b"image", b"mask")
    made = [(b"%s-%06d" % (kind, i), 12 * KIB) for i in range(5000) for kind in kinds]
    keys = [[b"depth-%06d" % i, b"mask-%06d" % i] for i in range(5000)]
    case = Case(lmdb_index(made), [], keys)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(5000)
        readers = Readers(case.index, phase=seed)
        readers.read(np.array(sorted(case.truth(order[:1000]))))
        found = hypotheses(case.index, 5000, [], order[:64])
        choice = choose(case.index, found, order[:1000], readers.present, "a.lmdb")
        assert right(choice, case, whole=False), choice.why


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("size", [12 * KIB, 100 * KIB])
def test_two_records_side_by_side_are_both_known_when_both_are_read(size: int, both: bool) -> None:
    kinds, rng = (b"in", b"out"), random.Random(size)
    some = range(size // 2, 2 * size)
    made = [(b"%s-%06d" % (kind, i), rng.choice(some)) for i in range(3000) for kind in kinds]
    keys = [[b"in-%06d" % i, b"out-%06d" % i][: 1 + both] for i in range(3000)]
    case = Case(lmdb_index(made), [], keys)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(3000)
        readers = Readers(case.index, phase=seed)
        readers.read(np.array(sorted(case.truth(order[:300]))))
        found = hypotheses(case.index, 3000, [], order[:64])
        choice = choose(case.index, found, order[:300], readers.present, "a.lmdb")
        assert choice.decided and right(choice, case), choice.why


def test_what_is_between_two_ranges_is_told() -> None:
    around = np.array([100_000, 200_000]), np.array([110_000, 210_000])
    starts = np.array([0, 99_000, 111_000, 150_000, 120_000, 209_000, 300_000])
    between = _between(starts, starts + 2000, around)
    assert between.tolist() == [False, False, False, True, False, False, False]


def test_records_without_bytes_prove_nothing() -> None:
    index = plain_index([0] * 500)
    found = hypotheses(index, 500, [], np.arange(64))
    choice = choose(index, found, np.arange(100), Readers(index).present, "a.raw")
    assert not choice.hypotheses


def test_a_list_is_text_or_bytes_alike() -> None:
    rng = random.Random(8)
    case = listed(rng, 500, SIZES["large"])
    order = order_of(case, rng, "shuffled")
    readers = read_some(case, rng, order, 64, 0)
    lists = [texts("keys", [key.decode() for (key,) in case.keys])]
    found = hypotheses(case.index, case.n, lists, order[:64])
    choice = choose(case.index, found, order[:64], readers.present, "a.lmdb")
    assert [each.name for each in choice.hypotheses] == ["keys from .keys"] and right(choice, case)


# ---- before anything has been said --------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MAKERS)
def test_a_first_batch_that_is_being_read_tells_the_truth_or_nothing(make: str, size: str) -> None:
    told = 0
    for seed in range(8):
        rng = random.Random(f"begun {make} {size} {seed}")
        case = MAKERS[make](rng, 300 if size == "large" else 1500, SIZES[size])
        order = order_of(case, rng, rng.choice(("sequential", "shuffled", "shuffled")))
        readers = read_some(case, rng, order, rng.choice((1, 3, 12, 31)), 0)
        found = hypotheses(case.index, case.n, case.lists, order[:64])
        count = begun(case.index, found, order[:BEGUN_MAX], readers.present)
        if count < BEGUN_MIN:
            continue
        choice = choose(
            case.index, found, order[:count], readers.present, "a.lmdb", order[count : count + 64]
        )
        assert right(choice, case, whole=False), (seed, choice.why)
        assert not choice.hypotheses or right(choice, case), (seed, choice.why)
        told += bool(choice.hypotheses)
    if size in ("middle", "large") and make in ("numbered", "unpadded", "listed"):
        assert told >= 2
