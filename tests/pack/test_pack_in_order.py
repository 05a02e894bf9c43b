# SPDX-License-Identifier: Apache-2.0
"""Results come in the order of what was given, and hold no more bytes than allowed."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from uffdprefetch.pack.in_order import Admit, in_order


@dataclass(frozen=True)
class Piece:
    number: int
    held_bytes: int = 0


def test_results_come_in_order_though_the_first_ends_last() -> None:
    later = threading.Barrier(3)

    def work(given: Piece, admit: Admit) -> Piece:
        admit(1)
        if given.number < 3:  # the three of them at once, so none waits for another's end
            later.wait(60)
        return given

    found = list(in_order(map(Piece, range(50)), work, workers=3))
    assert [piece.number for piece in found] == list(range(50))


@pytest.mark.parametrize("most", [10, 25])
def test_no_more_bytes_are_held_than_allowed_and_one_too_large_comes_alone(most: int) -> None:
    sizes = [1, 9, 10, 40, 3, 3, 3, 3, 3, 100, 1, 1, 30, 2] * 20
    lock, held, seen = threading.Lock(), [0], list[tuple[int, int]]()

    def work(given: Piece, admit: Admit) -> Piece:
        size = sizes[given.number]
        admit(size)
        with lock:
            held[0] += size
            seen.append((size, held[0]))
        return given

    for piece in in_order(map(Piece, range(len(sizes))), work, workers=8, most_bytes=most):
        with lock:
            held[0] -= sizes[piece.number]
    # what the consumer has taken leaves the account a moment before ours
    assert len(seen) == len(sizes)
    assert all(now <= most + size for size, now in seen if size <= most), seen


def test_what_holds_bytes_already_is_taken_only_while_there_is_room() -> None:
    taken = 0

    def given() -> object:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield Piece(number, 10)

    results = in_order(given(), lambda piece, admit: piece, workers=2, most_bytes=35)  # type: ignore[arg-type]
    next(results)
    assert taken == 4, "35 bytes are four pieces of ten, the last one begun below the bound"
    results.close()


def test_an_error_comes_in_its_place_and_nobody_waits_for_ever() -> None:
    def work(given: Piece, admit: Admit) -> Piece:
        if given.number == 7:
            raise ValueError("seven")
        admit(10)
        return given

    found = []
    with pytest.raises(ValueError, match="seven"):
        for piece in in_order(map(Piece, range(100)), work, workers=4, most_bytes=10):
            found.append(piece.number)
    assert found == list(range(7))
    assert not [t for t in threading.enumerate() if t.name.startswith("uffdprefetch-pack")]


def test_who_stops_taking_leaves_no_thread() -> None:
    def work(given: Piece, admit: Admit) -> Piece:
        admit(10)
        return given

    results = in_order(map(Piece, range(100)), work, workers=4, most_bytes=10)
    next(results)
    results.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("uffdprefetch-pack")]


def test_an_error_of_what_is_given_comes_after_what_was_given_before() -> None:
    def given() -> object:
        yield from map(Piece, range(5))
        raise ValueError("given")

    found = []
    with pytest.raises(ValueError, match="given"):
        for piece in in_order(given(), lambda piece, admit: piece, workers=2):  # type: ignore[arg-type]
            found.append(piece.number)
    assert found == list(range(5))
