# SPDX-License-Identifier: Apache-2.0
"""Whether all of a file is in the page cache: when the kernel is asked, and at what cost."""

from __future__ import annotations

import pytest

from uffdprefetch.base.clock import Clock
from uffdprefetch.state.cached import LOOK_COST, LOOK_NS, PIECE_BYTES, TURN_NS, AllCached


class Kernel:
    """A file of some pieces; what each look at a piece costs."""

    def __init__(self, pieces: int, piece_ns: int = 0) -> None:
        self.now = self.cpu = 0
        self.there: list[bool | None] = [True] * pieces
        self.piece_ns = piece_ns
        self.asked: list[int] = []
        self.clock = Clock(lambda: self.now, lambda: self.cpu)
        self.file = AllCached(self.resident_bytes, pieces * PIECE_BYTES - 1)

    def resident_bytes(self, start: int, length: int) -> int | None:
        piece = start // PIECE_BYTES
        self.asked.append(piece)
        self.cpu += self.piece_ns
        there = self.there[piece]
        return None if there is None else length - (not there)

    def after(self, ns: int) -> bool:
        self.now += ns
        return self.file.ask(self.clock)


def test_it_is_asked_now_and_then() -> None:
    kernel = Kernel(1)
    assert kernel.after(0)
    kernel.there[0] = False
    assert kernel.after(LOOK_NS - 1), "it is as old as that at most"
    assert not kernel.after(1)
    kernel.there[0] = True
    assert not kernel.after(LOOK_NS - 1)
    assert kernel.after(1)
    assert kernel.asked == [0, 0, 0]


@pytest.mark.parametrize("told", [False, None])
def test_the_first_hole_decides(told: bool | None) -> None:
    kernel = Kernel(4)
    kernel.there[1] = told
    assert not kernel.after(0)
    assert kernel.asked == [0, 1]
    kernel.there[1] = True
    assert kernel.after(LOOK_NS), "from its beginning again"
    assert kernel.asked == [0, 1, 0, 1, 2, 3]


def test_a_look_is_rested_for() -> None:
    kernel = Kernel(2, TURN_NS // 2)
    assert kernel.after(0)
    rest = LOOK_COST * 2 * kernel.piece_ns
    assert rest > LOOK_NS
    kernel.there[1] = False
    assert kernel.after(rest - 1)
    assert not kernel.after(1)


def test_a_file_that_takes_long_is_asked_about_once() -> None:
    kernel = Kernel(5, TURN_NS // 2 + 1)
    assert not kernel.after(0)
    assert not kernel.after(1 << 40)
    assert kernel.asked == [0, 1], "and no further than a turn may take"


def test_an_empty_file_is_nothing_that_is_there() -> None:
    assert not AllCached(lambda _start, length: length, 0).ask(Clock())
