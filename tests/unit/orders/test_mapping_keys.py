# SPDX-License-Identifier: Apache-2.0
"""orders/mapping.hypotheses(): for keys as people make them the true way is among those found, it
is
true for every sample, and no key is looked for in vain for long."""

from __future__ import annotations

import hashlib
import pickle
import random
import string
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from conftest import warnings_fail
from mapping_readers import byte_keys, ints, keys_of, lmdb_index, plain_index, texts

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.orders import key_table
from uffdprefetch.orders.key_forms import Binary, Decimal, forms
from uffdprefetch.orders.key_table import KeyTable
from uffdprefetch.orders.mapping import Hypothesis, KeyList, hypotheses

pytestmark = warnings_fail

N = 300


def names_of(found: Sequence[Hypothesis]) -> list[str]:
    return [hypothesis.name for hypothesis in found]


def found_in(
    keys: Sequence[bytes], lists: Sequence[KeyList] = (), n: int = N, seed: int = 0
) -> tuple[RecordIndex, list[Hypothesis]]:
    index = lmdb_index([(key, 5000) for key in keys])
    probe = np.random.default_rng(seed).permutation(n)[:64]
    return index, hypotheses(index, n, lists, probe)


def says(hypothesis: Hypothesis, index: RecordIndex, n: int = N) -> list[list[bytes | None]]:
    """The keys of the records of every sample."""
    records, which = hypothesis.records(np.arange(n))
    assert (np.diff(which) >= 0).all()
    said: list[list[bytes | None]] = [[] for _ in range(n)]
    for record, sample in zip(records.tolist(), which.tolist(), strict=True):
        said[sample].append(index.key(record))
    return said


def one_that_says(
    found: Sequence[Hypothesis], index: RecordIndex, keys: Sequence[bytes], n: int = N
) -> str:
    """The name of the one hypothesis that says sample i has keys[i], for all i."""
    wanted = [[key] for key in keys]
    right = [each.name for each in found if says(each, index, n) == wanted]
    assert len(right) == 1, (right, names_of(found))
    return right[0]


# ---- keys made of numbers -----------------------------------------------------------------------

NUMBERED = [
    ("keys 'image-%09d', from 1", lambda i: b"image-%09d" % (i + 1), [b"num-samples"]),
    ("keys '%08d', from 0", lambda i: b"%08d" % i, [b"__keys__", b"__len__"]),
    ("keys '%d', from 0", lambda i: b"%d" % i, []),
    ("keys '%d', from 1", lambda i: b"%d" % (i + 1), [b"length"]),
    ("keys '%d', from 57", lambda i: b"%d" % (i + 57), []),
    ("keys '%02d', from 0", lambda i: b"%02d" % i, []),
    ("keys '256-%05d', from 0", lambda i: b"256-%05d" % i, [b"length"]),
    ("keys 'a%d-image.png', from 0", lambda i: b"a%d-image.png" % i, []),
    ("keys '100%%%06d', from 7", lambda i: b"100%%%06d" % (i + 7), []),
    ("keys as little-endian uint32, from 0", lambda i: i.to_bytes(4, "little"), []),
    ("keys as little-endian uint64, from 1", lambda i: (i + 1).to_bytes(8, "little"), []),
    ("keys as big-endian uint64, from 5", lambda i: (i + 5).to_bytes(8, "big"), [b"__len__"]),
    ("keys as pickle of protocol 4, from 0", lambda i: pickle.dumps(i, 4), []),
    (
        "keys md5 of '%d', from 0",
        lambda i: hashlib.md5(b"%d" % i).hexdigest().encode(),
        [b"__len__"],
    ),
    ("keys sha1 (bytes) of '%06d', from 1", lambda i: hashlib.sha1(b"%06d" % (i + 1)).digest(), []),
    (
        "keys sha256 of '%d', from 1: ... + '.jpg'",
        lambda i: hashlib.sha256(b"%d" % (i + 1)).hexdigest().encode() + b".jpg",
        [],
    ),
]


@pytest.mark.parametrize(("name", "key", "special"), NUMBERED, ids=[n for n, *_ in NUMBERED])
def test_numbers_in_keys_are_understood(
    name: str, key: Callable[[int], bytes], special: list[bytes]
) -> None:
    keys = [key(i) for i in range(N)]
    index, found = found_in(keys + special)
    shown = name.replace("%%", "%")
    assert one_that_says(found, index, keys) == shown


def test_each_group_of_keys_is_found() -> None:
    keys = [b"%s-%06d" % (kind, i) for i in range(N) for kind in (b"depth", b"image", b"mask")]
    index, found = found_in(keys)
    for kind in (b"depth", b"image", b"mask"):
        wanted = [b"%s-%06d" % (kind, i) for i in range(N)]
        assert one_that_says(found, index, wanted) == f"keys '{kind.decode()}-%06d', from 0"


def test_groups_that_take_turns_in_the_order_of_keys_are_found() -> None:
    """A sample of every other key would only see one."""
    keys = [b"%06d%s" % (i, kind) for i in range(2000) for kind in (b".cls", b".jpg")]
    index, found = found_in(keys, n=2000)
    for kind in ("cls", "jpg"):
        wanted = [f"{i:06d}.{kind}".encode() for i in range(2000)]
        assert one_that_says(found, index, wanted, 2000) == f"keys '%06d.{kind}', from 0"


def test_only_the_count_that_fits_the_keys_is_offered() -> None:
    _, found = found_in([b"image-%09d" % i for i in range(1, N + 1)])
    assert names_of(found) == ["keys 'image-%09d', from 1"]


def test_a_few_missing_keys_do_not_hide_the_form() -> None:
    gone = {0, 77, 150, N - 1}
    _, found = found_in([b"%06d" % i for i in range(N) if i not in gone])
    assert "keys '%06d', from 0" in names_of(found)
    right = found[names_of(found).index("keys '%06d', from 0")]
    assert set(range(N)) - set(right.records(np.arange(N))[1].tolist()) == gone


# ---- record numbers -----------------------------------------------------------------------------


def test_files_without_keys_have_record_numbers_only() -> None:
    found = hypotheses(plain_index([100] * N), N, [], np.arange(10))
    assert names_of(found) == ["record number = sample number"]
    assert [a.tolist() for a in found[0].records(np.array([5, 2, 5]))] == [[5, 2, 5], [0, 1, 2]]


def test_more_samples_than_records_leave_nothing() -> None:
    assert hypotheses(plain_index([100] * N), N + 1, [], np.arange(10)) == []
    _, found = found_in([b"%d" % i for i in range(N)], n=2 * N)
    assert found == []


def test_a_list_of_numbers_may_be_record_numbers() -> None:
    numbers = list(range(2 * N))
    random.Random(1).shuffle(numbers)
    found = hypotheses(plain_index([100] * 2 * N), N, [ints("index", numbers)], np.arange(10))
    assert names_of(found) == ["record number = sample number", "record number = .index"]
    assert found[1].records(np.arange(N))[0].tolist() == numbers[:N]


def words(count: int, seed: int = 0) -> list[bytes]:
    """Keys that have no number in them, ascending."""
    rng = random.Random(seed)
    made = {"".join(rng.choices(string.ascii_letters, k=rng.randint(8, 9))) for _ in range(count)}
    assert len(made) == count
    return sorted(each.encode() for each in made)


@pytest.mark.parametrize(
    "special", [[b"__keys__", b"__len__"], [b"length"], [b"num-samples", b"zzzz"]], ids=str
)
def test_records_beside_the_samples_do_not_count(special: list[bytes]) -> None:
    keys = words(N)
    index, found = found_in([*keys, *special], n=N if b"zzzz" not in special else N + 1)
    wanted = sorted([*keys, *[key for key in special if key == b"zzzz"]])
    assert says(found[0], index, len(wanted)) == [[key] for key in wanted]
    names = ", ".join(sorted(key.decode() for key in special if key != b"zzzz"))
    assert names_of(found) == [f"record number = sample number, without {names}"]


def test_records_of_another_key_length_do_not_count() -> None:
    keys = sorted(hashlib.sha1(b"x%d" % i).hexdigest().encode() for i in range(N))
    index, found = found_in([*keys, b"1about", b"Zoo"])
    assert one_that_says(found, index, keys) == "record number = sample number, without 1about, Zoo"


# ---- keys from lists ----------------------------------------------------------------------------


def paths(seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    made = [f"/data/train/{rng.choice('abc')}/{word.decode()}.JPEG" for word in words(N, seed)]
    rng.shuffle(made)
    return made


def digest(name: str, text: str) -> bytes:
    return hashlib.new(name, text.encode()).hexdigest().encode()


LISTED: list[tuple[str, Callable[[str], bytes]]] = [
    (".paths", lambda path: path.encode()),
    ("file name of .paths", lambda path: path.split("/")[-1].encode()),
    ("last 2 components of .paths", lambda path: "/".join(path.split("/")[-2:]).encode()),
    ("last 3 components of .paths", lambda path: "/".join(path.split("/")[-3:]).encode()),
    ("path without extension of .paths", lambda path: path.removesuffix(".JPEG").encode()),
    (
        "file name without extension of .paths",
        lambda path: path.split("/")[-1].removesuffix(".JPEG").encode(),
    ),
    ("md5 of .paths", lambda path: digest("md5", path)),
    ("sha1 of .paths", lambda path: digest("sha1", path)),
    ("sha256 of .paths", lambda path: digest("sha256", path)),
    ("md5 (bytes) of .paths", lambda path: hashlib.md5(path.encode()).digest()),
    ("sha1 of file name of .paths", lambda path: digest("sha1", path.split("/")[-1])),
    ("pickle of .paths", lambda path: pickle.dumps(path, 3)),
]


@pytest.mark.parametrize(("name", "key"), LISTED, ids=[name for name, _ in LISTED])
def test_keys_from_a_list_are_understood(name: str, key: Callable[[str], bytes]) -> None:
    made = paths()
    index, found = found_in(
        [key(path) for path in made] + [b"__len__"],
        [texts("other", words_text()), texts("paths", made)],
    )
    assert one_that_says(found, index, [key(path) for path in made]) == f"keys from {name}"


def words_text() -> list[str]:
    return [each.decode() for each in words(N, 99)]


def test_what_stands_around_an_element_is_found_and_groups_are_told_apart() -> None:
    made = paths()
    keys = [b"%s-%s" % (kind, path.encode()) for path in made for kind in (b"image", b"label")]
    keys += [path.encode() + b".txt" for path in made]
    index, found = found_in(keys, [texts("paths", made)])
    for name, wanted in [
        ("'image-' + ...", [b"image-" + path.encode() for path in made]),
        ("'label-' + ...", [b"label-" + path.encode() for path in made]),
        ("... + '.txt'", [path.encode() + b".txt" for path in made]),
    ]:
        assert one_that_says(found, index, wanted) == f"keys from .paths: {name}"


def test_a_list_of_keys_longer_than_the_data_set_is_used_from_its_start() -> None:
    keys = words(N)
    random.Random(5).shuffle(keys)
    index, found = found_in(keys, [byte_keys("keys", keys)], n=100)
    assert one_that_says(found, index, keys[:100], 100) == "keys from .keys"


def test_a_list_shorter_than_the_data_set_is_none_of_it() -> None:
    keys = words(N)
    random.Random(5).shuffle(keys)
    _, found = found_in(keys, [byte_keys("keys", keys[:-1])])
    assert names_of(found) == ["record number = sample number"]


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("kind", ["ints", "text"])
def test_a_list_of_numbers_goes_through_the_form_of_the_keys(kind: str, more: int) -> None:
    numbers = list(range(N))
    random.Random(2).shuffle(numbers)
    made = ints("ids", numbers) if kind == "ints" else texts("ids", [str(i) for i in numbers])
    keys = [b"label-%05d" % (number + more) for number in numbers]
    index, found = found_in(keys, [made])
    name = one_that_says(found, index, keys)
    assert name == "keys 'label-%05d' of .ids" + " + 1" * more


def test_a_list_with_a_few_keys_that_are_gone_is_still_a_list_of_keys() -> None:
    keys = words(N)
    random.Random(5).shuffle(keys)
    index, found = found_in(keys[5:], [byte_keys("keys", keys)])
    right = found[names_of(found).index("keys from .keys")]
    assert says(right, index) == [[key] if i >= 5 else [] for i, key in enumerate(keys)]


def test_a_list_of_other_things_leads_nowhere() -> None:
    index, found = found_in(words(N), [texts("classes", [f"class {i % 10}" for i in range(N)])])
    assert one_that_says(found, index, words(N)) == "record number = sample number"


# ---- what is alike, and what is hostile ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_two_hypotheses_say_the_same_of_all_samples(seed: int) -> None:
    keys = [b"%06d" % i for i in range(N)]
    lists = [byte_keys("keys", keys), texts("more", [f"a/{i:06d}.x" for i in range(N)])]
    lists += [ints("ids", range(N))]
    _, found = found_in(keys, lists, seed=seed)
    assert names_of(found) == ["keys '%06d', from 0"]


def test_a_sample_that_is_not_of_the_data_set_has_no_record() -> None:
    _, found = found_in([b"%06d" % i for i in range(2 * N)])
    records, which = found[0].records(np.array([-1, 3, N, 1 << 62, 5]))
    assert records.tolist() == [3, 5] and which.tolist() == [1, 4]


def test_a_key_with_several_records_gives_all_of_them_and_with_too_many_none() -> None:
    many = key_table.DUPLICATES_MAX + 1
    keys = [b"a", b"b", b"b", *[b"c"] * many, b"d"]
    size = np.full(len(keys), 10)
    places = RecordPlaces(one_part(len(keys)), [Listed(np.arange(len(keys)) * 10, size)])
    index = RecordIndex("lmdb", 10 * len(keys), places, keys_of(keys))
    records, which = KeyTable(index).find([b"d", b"c", b"b", b"x", b"", b"a"])
    assert records.tolist() == [len(keys) - 1, 1, 2, 0] and which.tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ascending", [True, False])
def test_keys_are_found_at_once_as_one_by_one(seed: int, ascending: bool) -> None:
    rng = random.Random(seed)
    made = [rng.randbytes(rng.choice((1, 2, 2, 4))) for _ in range(200)]
    if rng.random() < 0.5:
        made = [key.ljust(4, b"\0") for key in made]
    keys = sorted(made) if ascending else made
    index = RecordIndex("lmdb", 10, RecordPlaces(one_part(0), []), keys_of(keys, ascending))
    asked = rng.choices(made, k=50) + [rng.randbytes(2) for _ in range(50)]
    records, which = KeyTable(index).find(asked)
    for number, key in enumerate(asked):
        assert sorted(records[which == number].tolist()) == index.find(key).tolist()


def test_keys_in_several_databases_are_all_found() -> None:
    keys = keys_of([b"a", b"b", b"a", b"b"])
    keys = Keys(keys.offset, keys.length, keys.data, ((0, 2, True), (2, 4, True)))
    index = RecordIndex("lmdb", 10, RecordPlaces(one_part(0), []), keys)
    records, which = KeyTable(index).find([b"b", b"a"])
    assert records.tolist() == [1, 3, 0, 2] and which.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_no_keys_and_no_lists_do_more_than_give_hypotheses(seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        b"%",
        b"%d",
        b"\n",
        b"\0",
        b"0",
        b"01",
        b"9" * 19,
        b"9" * 30,
        b"/",
        b".",
        b"",
        b"\x80\x04",
    ]
    keys = {b"".join(rng.choices(parts, k=rng.randint(1, 9))) for _ in range(100)} - {b""}
    keys |= {rng.randbytes(rng.choice((4, 8, 40))) for _ in range(20)}
    made = [b"".join(rng.choices(parts, k=rng.randint(0, 5))) for _ in range(100)]
    lists = [byte_keys("a\nb" * 50, made), ints("n", [rng.getrandbits(63) for _ in range(100)])]
    lists += [texts("t", ["a" * rng.randrange(600) for _ in range(100)])]
    n = rng.choice((1, 2, 50, 100))
    index, found = found_in(sorted(keys), lists, n=n)
    for hypothesis in found:
        records, which = hypothesis.records(np.array([0, n - 1, 1 << 62, -1]))
        assert ((records >= 0) & (records < len(index))).all() and (which < 2).all()
        assert hypothesis.name.isprintable() and len(hypothesis.name) < 200


# ---- forms --------------------------------------------------------------------------------------


def test_a_form_reads_the_numbers_that_it_writes_and_no_others() -> None:
    form = Decimal(b"a", 3, b"z")
    assert [form.number(key) for key in form.keys(np.array([0, 42, 999, 1000]))] == [
        0,
        42,
        999,
        1000,
    ]
    for key in (
        b"a01z",
        b"a0001z",
        b"a001",
        b"001z",
        b"az",
        b"a+01z",
        b"a 12z",
        b"a" + b"9" * 30 + b"z",
    ):
        assert form.number(key) is None
    assert form.keys(np.array([-1])) == [b""]


@pytest.mark.parametrize("form", [Binary(4, "<"), Binary(8, "<"), Binary(4, ">"), Binary(8, ">")])
def test_a_binary_form_reads_what_it_writes(form: Binary) -> None:
    numbers = np.array([0, 1, 255, 256, (1 << 31) - 1, (1 << 32) - 1])
    assert [form.number(key) for key in form.keys(numbers)] == numbers.tolist()
    wide = form.keys(np.array([-1, 1 << 32]))
    assert wide[0] == b"" and (wide[1] == b"") == (form.size == 4)


def test_numbers_filled_up_in_two_ways_are_no_form() -> None:
    assert (
        forms([b"image-%02d" % i for i in range(9)] + [b"image-%03d" % i for i in range(9)]) == []
    )


def test_names_with_numbers_in_them_are_no_form() -> None:
    assert forms([f"n{i:08d}_{i * 7}_{i % 3}".encode() for i in range(100, 400)]) == []
    assert forms([hashlib.sha1(b"%d" % i).hexdigest().encode() for i in range(300)]) == []
