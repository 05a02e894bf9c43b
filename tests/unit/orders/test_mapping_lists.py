# SPDX-License-Identifier: Apache-2.0
"""orders/key_lists.py: lists of a data set come through as they were, and no bytes do harm."""

from __future__ import annotations

import random

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.job.channel import packed
from uffdprefetch.orders.mapping import KeyList

pytestmark = warnings_fail


def some_keys(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, 7, 40))) for _ in range(rng.randrange(60))]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_job_packs_is_what_is_taken(seed: int) -> None:
    rng = random.Random(seed)
    keys = some_keys(rng)
    found = KeyList.parse("keys", "bytes", packed(keys))
    assert len(found) == len(keys)
    samples = [rng.randrange(len(keys)) for _ in range(100)] if keys else []
    assert found.take(np.array(samples, np.int64)) == [keys[i] for i in samples]


def test_an_array_is_not_copied() -> None:
    data = np.frombuffer(packed([b"abc", b"de"]), np.uint8)
    found = KeyList.parse("keys", "text", data)
    assert np.shares_memory(found.data, data) and found.take(np.array([1])) == [b"de"]


def test_numbers_are_taken_as_numbers_and_as_text() -> None:
    found = KeyList.parse("ids", "ints", np.array([5, -3, 2**62], np.int64).tobytes())
    assert found.numbers.tolist() == [5, -3, 2**62] and len(found) == 3
    assert found.take(np.array([2, 1])) == [b"%d" % 2**62, b"-3"]


@pytest.mark.parametrize("sample", [-1, 2, 1 << 40])
@pytest.mark.parametrize("kind", ["text", "ints"])
def test_an_element_that_is_not_there_is_an_index_error(kind: str, sample: int) -> None:
    data = packed([b"a", b"b"]) if kind == "text" else bytes(16)
    with pytest.raises(IndexError, match="there are 2"):
        KeyList.parse("x", kind, data).take(np.array([0, sample]))


def words(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        ("ints", bytes(9), "no array of int64"),
        ("bytes", b"", "no packed list"),
        ("bytes", bytes(7), "no packed list"),
        ("text", words(-1), "cannot be in"),
        ("text", words(2, 1), "cannot be in"),
        ("text", words(1 << 62), "cannot be in"),
        ("text", words(-(1 << 63)), "cannot be in"),
        ("bytes", words(2, 2, 1) + b"a", "do not ascend"),
        ("bytes", words(2, -1, 1) + b"a", "do not ascend"),
        ("bytes", words(1, 2) + b"a", "do not end where"),
        ("bytes", words(1, 1) + b"ab", "do not end where"),
        ("bytes", words(0) + b"a", "do not end where"),
        ("bytes", words(1, 1 << 62) + b"a", "do not end where"),
        ("floats", bytes(8), "kind 'floats'"),
    ],
)
def test_what_cannot_be_a_list_is_refused(kind: str, data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        KeyList.parse("keys", kind, data)
    assert str(caught.value).startswith("keys: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(10))
def test_no_mutation_does_more_than_be_refused(seed: int) -> None:
    """2000 mutations in all: an error of one line, or elements that are within the bytes."""
    rng = random.Random(seed)
    for _ in range(200):
        data = bytearray(packed(some_keys(rng)))
        for _ in range(rng.randrange(1, 4)):
            if rng.random() < 0.3:
                del data[rng.randrange(len(data) + 1) :]
            elif len(data):
                at = rng.randrange(min(len(data), rng.choice((8, 64, len(data)))))
                data[at] = rng.randrange(256)
        try:
            found = KeyList.parse("keys", rng.choice(("bytes", "text")), bytes(data))
        except ValueError:
            continue
        taken = found.take(np.arange(len(found)))
        assert b"".join(taken) == bytes(data[8 * (len(found) + 1) :])
