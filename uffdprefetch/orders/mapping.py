# SPDX-License-Identifier: Apache-2.0
"""Hypotheses on which record of a file sample i of a data set reads. Pure.

A data set makes a key from a sample's number or from a list's element. hypotheses() finds the ways
that lead to existing records; choose() (orders/evidence.py) takes those that the touches prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.orders import derived_keys as derived
from uffdprefetch.orders import key_forms
from uffdprefetch.orders.derived_keys import ITSELF, KeyDerivation
from uffdprefetch.orders.evidence import HypothesisChoice, choose
from uffdprefetch.orders.hypothesis import Hypothesis, Pair
from uffdprefetch.orders.key_forms import Form, shown
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.key_table import KeyTable

__all__ = ["Hypothesis", "HypothesisChoice", "KeyList", "choose", "hypotheses"]

Keys = Callable[[Array], list[bytes]]
Numbers = Callable[[Array], Array]

#: Samples a hypothesis is tried on, and the share that must have a record: a list may name some
#: that the file lacks.
PROBE_MAX = 64
SHARE_MIN = 0.95
#: Bounds on the work for a hostile job or file.
LISTS_MAX, HYPOTHESES_MAX = 32, 64
#: Widest zero-padding tried of a number that is hashed.
_WIDTH_MAX = 12
_NONE: Array = np.zeros(0, np.int64)
#: Keys in common use for records that are no samples.
_SPECIAL = (
    b"__len__", b"__keys__", b"__meta__", b"__metadata__", b"__info__", b"num-samples",
    b"num_samples", b"nSamples", b"length", b"len", b"size", b"keys", b"meta", b"metadata", b"info",
)  # fmt: skip
#: Records of an unusual key length, at most, that count as no samples.
_ODD_MAX = 16


def hypotheses(
    index: RecordIndex,
    samples_count: int,
    lists: Sequence[KeyList],
    probe: Array,
    more: Iterable[Hypothesis] = (),
) -> list[Hypothesis]:
    """The ways in which (nearly) all samples have a record, the simplest first, without those that
    lead to the same records.

    ``lists``: of the data set; those shorter than it are ignored. ``probe``: sample numbers, of
    which PROBE_MAX are tried, and as many drawn from the whole data set. ``more``: tried after all
    others.
    """
    if samples_count <= 0 or not len(index):
        return []
    usable = [each for each in lists if len(each) >= samples_count][:LISTS_MAX]
    tried = _probed(samples_count, probe)
    found: list[Hypothesis] = []
    known: set[bytes] = set()
    for hypothesis in chain(_all(index, samples_count, usable, tried), more):
        seen = _seen(hypothesis, tried)
        if seen is not None and seen not in known:
            known.add(seen)
            found.append(hypothesis)
            if len(found) == HYPOTHESES_MAX:
                break
    return found


def in_each(indices: Sequence[RecordIndex], samples_count: int) -> Iterator[Hypothesis]:
    """Of databases, one after the other in ``indices``, in each of which the samples are counted
    anew: the ways that are the same in all of them. The records are those of all, counted on."""
    tables = [KeyTable(index) for index in indices if index.keys is not None]
    if len(tables) < len(indices):
        return
    whole = [len(table) for table in tables]
    named = [len(table) - len(table.find(_SPECIAL)[0]) for table in tables]
    usual = [len(table) - len(_without(table)) for table in tables]
    counts = next((each for each in (whole, named, usual) if sum(each) == samples_count), None)
    if counts is None:
        return
    ways = [
        {each.name: each for each in hypotheses(index, count, (), _NONE)}
        for index, count in zip(indices, counts, strict=True)
    ]
    firsts, records = (np.append(0, np.cumsum(each)) for each in (counts, whole))
    for name in ways[0]:
        if all(name in each for each in ways):
            parts = [each[name] for each in ways]
            yield Hypothesis(f"{name}, in each", samples_count, _of_each(parts, firsts, records))


def _of_each(parts: Sequence[Hypothesis], firsts: Array, records: Array) -> Callable[[Array], Pair]:
    """``firsts``, ``records``: the first sample and record of each part."""

    def find(samples: Array) -> Pair:
        of = np.searchsorted(firsts, samples, "right") - 1
        found, which = [_NONE], [_NONE]
        for number, part in enumerate(parts):
            its = np.flatnonzero(of == number)
            there, inner = part.records(samples[its] - firsts[number])
            found.append(there + records[number])
            which.append(its[inner])
        owner = np.concatenate(which)
        order = np.argsort(owner, kind="stable")
        return np.concatenate(found)[order], owner[order]

    return find


def _probed(samples_count: int, probe: Array) -> Array:
    """The first and the last sample, some all over the data set, and those asked for."""
    asked = np.asarray(probe).astype(np.int64)
    asked = asked[(asked >= 0) & (asked < samples_count)][:PROBE_MAX]
    spread = np.random.default_rng(samples_count).integers(0, samples_count, PROBE_MAX)
    both = np.concatenate([[0, samples_count - 1], spread, asked])
    _, first = np.unique(both, return_index=True)
    return both[np.sort(first)].astype(np.int64)


def _seen(hypothesis: Hypothesis, tried: Array) -> bytes | None:
    """Its records of these samples, as comparable bytes; None when too many have none."""
    few = tried[: derived.FEW]
    if len(np.unique(hypothesis.records(few)[1])) < len(few) // 2:
        return None
    records, which = hypothesis.records(tried)
    if len(np.unique(which)) < SHARE_MIN * len(tried):
        return None
    return records.tobytes() + which.tobytes()


def _all(
    index: RecordIndex, count: int, lists: list[KeyList], tried: Array
) -> Iterator[Hypothesis]:
    """All candidates, unverified."""
    if index.keys is None:
        yield from _counted(index, count, None)
        yield from _numbered_lists(len(index), count, lists)
        return
    table = KeyTable(index)
    sampled = [key for _, key in table.sample()]
    usual = [key for key in sampled if key not in _SPECIAL]
    forms = key_forms.forms(usual)
    yield from _formed(table, forms, usual, count, tried)
    yield from _counted(index, count, table)
    for each in lists:
        yield from _listed(table, usual, each, count, tried)
        yield from _listed_numbers(table, forms, each, count, tried)
    yield from _numbered_lists(len(index), count, lists)
    yield from _hashed(table, usual, count, tried)


# ---- record numbers -----------------------------------------------------------------------------


def _counted(index: RecordIndex, count: int, table: KeyTable | None) -> Iterator[Hypothesis]:
    """Sample i is record i of the file, or of a database in it, or of its main group of keys."""
    if table is None:
        if count <= len(index):
            yield Hypothesis("record number = sample number", count, _after(0, _NONE))
        return
    special = table.find(_SPECIAL)[0]
    if len(table.ranges) > 1:
        yield from _through_all(table, count)
    for first, end, _ in table.ranges:
        where = "" if len(table.ranges) == 1 else f", from record {first} on"
        beside = _beside(table, first, end, special)
        remaining = end - first - len(beside)
        # a data set as long as the records without those beside them does not read the latter
        if end - first >= count and not (len(beside) and remaining == count):
            name = f"record number = sample number{where}"
            yield Hypothesis(name, count, _after(first, _NONE))
        if len(beside) and remaining >= count:
            names = ", ".join(shown(table.key(record)) for record in beside[:3].tolist())
            more = ", ..." if len(beside) > 3 else ""
            name = f"record number = sample number, without {names}{more}{where}"
            yield Hypothesis(name, count, _after(first, beside))


def _through_all(table: KeyTable, count: int) -> Iterator[Hypothesis]:
    """Sample i is record i of several databases, or files, one after the other, that have just so
    many."""
    name = "record number = sample number"
    if count == len(table):
        yield Hypothesis(name, count, _after(0, _NONE))
        return
    without = _without(table)
    if count == len(table) - len(without):
        shown_keys = ", ".join(shown(table.key(each)) for each in without[:3].tolist())
        name += f", without {shown_keys}{', ...' if len(without) > 3 else ''}"
        yield Hypothesis(name, count, _after(0, without))


def _without(table: KeyTable) -> Array:
    """Records of all databases that are no samples, ascending."""
    special = table.find(_SPECIAL)[0]
    beside = [_beside(table, first, end, special) for first, end, _ in table.ranges]
    return np.concatenate([_NONE, *beside])


def _beside(table: KeyTable, first: int, end: int, special: Array) -> Array:
    """Records among [first, end) that are no samples, by their keys; ascending."""
    lengths = table.lengths[first:end]
    beside = special[(special >= first) & (special < end)]
    if len(lengths):
        usual = int(np.median(lengths))
        odd = np.flatnonzero(lengths != usual)
        if len(odd) <= min(_ODD_MAX, len(lengths) // 8):
            beside = np.concatenate([beside, first + odd])
    return np.unique(beside)


def _after(first: int, without: Array) -> Callable[[Array], Pair]:
    """Record ``first`` + i, not counting those ``without`` (ascending)."""
    before = without - first - np.arange(len(without))

    def find(samples: Array) -> Pair:
        records = first + samples + np.searchsorted(before, samples, "right")
        return records, np.arange(len(samples))

    return find


def _numbered_lists(records: int, count: int, lists: list[KeyList]) -> Iterator[Hypothesis]:
    for each in lists:
        if each.kind == "ints":
            name = f"record number = .{shown(each.name)}"
            yield Hypothesis(name, count, _of_numbers(each.numbers, records))


def _of_numbers(numbers: Array, records: int) -> Callable[[Array], Pair]:
    def find(samples: Array) -> Pair:
        asked: Array = numbers[samples].astype(np.int64)
        there = np.flatnonzero((asked >= 0) & (asked < records))
        return asked[there], there

    return find


# ---- keys ---------------------------------------------------------------------------------------


def _keyed(table: KeyTable, name: str, count: int, keys: Keys) -> Hypothesis:
    return Hypothesis(name, count, lambda samples: table.find(keys(samples)))


def _formed(
    table: KeyTable, forms: list[Form], usual: list[bytes], count: int, tried: Array
) -> Iterator[Hypothesis]:
    """The sample's number in the keys' forms, counted from 0, 1 or their smallest."""
    for form in forms:
        bases = [0, 1]
        has = [number for key in usual if (number := form.number(key)) is not None]
        if has:
            bases += [min(has)] if min(has) > 1 else []
        made = [
            _keyed(table, f"keys {form.name}, from {base}", count, _numbers(form, base))
            for base in bases
        ]
        yield from _whole_ones(made, tried)


def _whole_ones(made: list[Hypothesis], tried: Array) -> list[Hypothesis]:
    """Of mutually exclusive ones those with a record for every sample, if there are any."""
    whole = [each for each in made if len(np.unique(each.records(tried)[1])) == len(tried)]
    return whole or made


def _numbers(form: Form, base: int, of: Numbers | None = None) -> Keys:
    """``of``: a number for each sample, in place of the sample's own."""

    def keys(samples: Array) -> list[bytes]:
        return form.keys(base + (samples if of is None else of(samples)))

    return keys


def _listed(
    table: KeyTable, usual: list[bytes], each: KeyList, count: int, tried: Array
) -> Iterator[Hypothesis]:
    """A list's element, a part of it or its hash, with the keys' prefixes and endings."""
    elements = each.take(tried)
    befores = derived.prefixes(usual)
    made: list[tuple[KeyDerivation, KeyDerivation]] = []
    for way in derived.ways(elements, each.kind, usual, table.longest):
        stems = [way.make(element) for element in elements[: derived.FEW]]
        made += [(way, outer) for outer in derived.affixed_ways(table, stems, befores)]
    made.sort(key=lambda pair: pair[1] is not ITSELF)
    for way, outer in made:
        source = f"{way.name} .{shown(each.name)}".strip()
        yield _keyed(table, f"keys from {source}{_with(outer)}", count, _made(each, way, outer))


def _with(outer: KeyDerivation) -> str:
    return "" if outer is ITSELF else f": {outer.name}"


def _made(each: KeyList, way: KeyDerivation, outer: KeyDerivation) -> Keys:
    def keys(samples: Array) -> list[bytes]:
        return [outer.make(way.make(element)) for element in each.take(samples)]

    return keys


def _listed_numbers(
    table: KeyTable, forms: list[Form], each: KeyList, count: int, tried: Array
) -> Iterator[Hypothesis]:
    """A list's numbers, or those plus 1, in the keys' forms."""
    of = _numbers_of(each, tried)
    for form in forms if of is not None else ():
        made = []
        for base in (0, 1):
            more = " + 1" if base else ""
            name = f"keys {form.name} of .{shown(each.name)}{more}"
            made.append(_keyed(table, name, count, _numbers(form, base, of)))
        yield from _whole_ones(made, tried)


def _numbers_of(each: KeyList, tried: Array) -> Numbers | None:
    """The list's numbers, or its elements parsed as decimal if all that were tried are."""
    if each.kind == "ints":
        return lambda samples: each.numbers[samples].astype(np.int64)
    if all(key_forms.is_number(element) for element in each.take(tried)):
        return lambda samples: np.array(
            [int(e) if key_forms.is_number(e) else -2 for e in each.take(samples)], np.int64
        )
    return None


def _hashed(table: KeyTable, usual: list[bytes], count: int, tried: Array) -> Iterator[Hypothesis]:
    """The hash of the sample's number in decimal, zero-padded or not."""
    few = tried[: derived.FEW]
    befores = derived.prefixes(usual)
    for width, base in product(range(1, _WIDTH_MAX + 1), (0, 1)):
        form = key_forms.Decimal(width=width)
        written = form.keys(few + base)
        for way in derived.DIGESTS:
            stems = [way.make(text) for text in written]
            if len(stems[0]) > table.longest:
                continue
            for outer in derived.affixed_ways(table, stems, befores):
                name = f"keys {way.name} {form.name}, from {base}{_with(outer)}"
                yield _keyed(table, name, count, _hash_of(form, base, way, outer))


def _hash_of(form: Form, base: int, way: KeyDerivation, outer: KeyDerivation) -> Keys:
    def keys(samples: Array) -> list[bytes]:
        return [outer.make(way.make(text)) for text in form.keys(samples + base)]

    return keys
