# SPDX-License-Identifier: Apache-2.0
"""In which order sources that are taken in turn give their rows, and when a shuffle buffer reads
what it has taken: as one would write it down row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from uffdprefetch.job.iterables import in_turn, takes


def cut(rng: random.Random, rows: list[int], most: int) -> list[list[int]]:
    """The rows in pieces."""
    pieces, at = [], 0
    while at < len(rows):
        end = at + rng.randint(1, most)
        pieces.append(rows[at:end])
        at = end
    return pieces


def numbered(pieces: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, the number of the piece that each is in)."""
    rows = [row for piece in pieces for row in piece]
    numbers = [number for number, piece in enumerate(pieces) for _ in piece]
    return np.array(rows, np.int64), np.array(numbers, np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_sources_give_a_piece_each_in_turn_until_all_have_ended(seed: int) -> None:
    rng = random.Random(seed)
    sources, count = [], 0
    for _ in range(rng.randint(1, 6)):
        rows = list(range(count, count := count + rng.choice([0, 1, 7, 40])))
        sources.append(cut(rng, rows, 9))
    expected, left = [], [list(pieces) for pieces in sources]
    while any(left):
        expected += [pieces.pop(0) for pieces in left if pieces]
    rows, numbers = in_turn([numbered(pieces) for pieces in sources])
    assert rows.tolist() == [row for piece in expected for row in piece]
    assert numbers.tolist() == numbered(expected)[1].tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("buffer", [1, 2, 10, 33, 1000])
def test_a_buffer_reads_what_it_has_taken_when_it_is_full(seed: int, buffer: int) -> None:
    rng = random.Random(seed)
    pieces = cut(rng, list(range(rng.choice([0, 1, 100]))), 15)
    expected, held, count = [], 0, 0
    for piece in pieces:
        held, count = held + len(piece), count + len(piece)
        if held >= buffer:
            expected.append(count)
            held = buffer // 2
    expected.append(count)  # what is left
    found = takes(numbered(pieces)[1], buffer)
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {count}
