# SPDX-License-Identifier: Apache-2.0
"""Readers that are drawn, not recorded: they go where the twelve runs of the tapes do not.

`python -m tests.net.drawn [--write]`. Each scenario draws touches by a seed, tells a predictor of
them and notes what it says. tapes/drawn.json has, of every hundred decisions, a digest; --write
makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from replayed_jobs import demand, stream
from strided_records import index_of, mapped_by, uneven
from walked_orders import GIB, KIB, MIB, PAGE, fixed_records, shuffled

from tests.net import tape
from uffdprefetch.predict import checkpoints, stride, window
from uffdprefetch.predict.fronts import FileFronts, Front
from uffdprefetch.predict.order import guard
from uffdprefetch.predict.order.cursor import lookahead_bytes
from uffdprefetch.predict.order.epochs import Epochs
from uffdprefetch.predict.order.extents import OrderExtents
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.order.seen import SeenCursor
from uffdprefetch.predict.randomness import Access, RandomnessDetector
from uffdprefetch.predict.steps import Steps
from uffdprefetch.predict.storage import BLOCK_BYTES as BLOCK
from uffdprefetch.predict.storage import Account, Link, Storage, least_probability, stream_gain
from uffdprefetch.predict.streams import Feedback, StreamTable
from uffdprefetch.predict.survival import Law
from uffdprefetch.predict.visits import Visits
from uffdprefetch.sim.replay.auto import Auto
from uffdprefetch.sim.replay.engine import Range, replay
from uffdprefetch.sim.replay.link import StorageModel

GOLDEN = tape.TAPES / "drawn.json"
MS = 1_000_000
CHUNK = 100
Decision = Any


# ---- walks ----------------------------------------------------------------------------------


def walks(seed: int) -> Iterator[Decision]:
    """Walkers of all strides and directions in one file, some silent for long; windows of each."""
    rng = random.Random(seed)
    table, now, size = StreamTable(0, 1), 10**9, 64 * GIB
    count = rng.choice((1, 3, 8, 200))
    places = [rng.randrange(size) for _ in range(count)]
    ways = [rng.choice((1, 1, -1)) for _ in range(count)]
    steps = [
        rng.choice((4 * KIB, 64 * KIB, MIB, 3 * MIB, 20 * MIB, 50 * MIB)) for _ in range(count)
    ]
    lengths = [min(step, rng.choice((PAGE, 64 * KIB, 300 * KIB))) for step in steps]
    storage = Storage(rng.choice((50e6, 1e9, 8e9)), rng.choice((0.0, 1e-3, 0.08)))
    told = dict[int, Feedback]()  # by walk
    for turn in range(600):
        one = rng.randrange(count)
        now += rng.choice((MS // 10, MS, 15 * MS, 30 * MS, 400 * MS))
        if turn % 150 == 149:
            now += rng.choice((600 * MS, 1500 * MS, 12_000 * MS))
            table.expire(now)
            yield "expired", [s.id for s in table.streams]
        places[one] = (places[one] + ways[one] * steps[one]) % size
        if rng.random() < 0.03:
            places[one] = rng.randrange(size)
        start = places[one] - (rng.randrange(12 * MIB) if rng.random() < 0.05 else 0)
        walk, forward = table.touch(max(0, start), max(0, start) + lengths[one], now)
        if forward:
            walk.passed.saw(forward, [(start, int(forward * rng.choice((1.0, 0.9, 0.7, 0.3))))])
        feedback = told.setdefault(walk.id, Feedback())
        feedback.note(rng.random() < 0.2)
        rate, allowed = walk.rate_bytes_per_second, rng.choice((8 * MIB, GIB))
        ahead = window.lookahead_bytes(rate, storage, allowed, feedback.boost)
        yield (
            walk.id, forward, walk.active, walk.settled, walk.pattern, walk.skips,
            ahead,
            checkpoints.distance_bytes(walk.rate_bytes_per_second, ahead, None),
        )  # fmt: skip


def places(seed: int) -> Iterator[Decision]:
    """Pools and how many places they are read at; checkpoints of mappings."""
    rng = random.Random(seed)
    for _ in range(100):
        at = [(rng.randrange(2), rng.randrange(200) * MIB) for _ in range(rng.randrange(9))]
        places = window.places(at)
        budget, files = rng.randrange(MIB, 4 * GIB), rng.randrange(MIB, 8 * GIB)
        yield places, window.pool_bytes(budget, files, places)
        span = checkpoints.Span(rng.randrange(4) * PAGE, rng.randrange(2 * GIB), PAGE)
        yield checkpoints.fixed_set(span, rng.choice((40 * MIB, MIB, 8 * MIB)))


# ---- who jumps about ------------------------------------------------------------------------


def jumps(seed: int) -> Iterator[Decision]:
    """Readers that go in order, at random, near themselves, in runs, several at once, in turns."""
    rng = random.Random(seed)
    size = rng.choice((20 * MIB, 700 * MIB, 30 * GIB))
    detector, at, now = RandomnessDetector(size), 0, 10**9
    others = [rng.randrange(size) for _ in range(5)]
    for _ in range(8):
        kind = rng.choice(("order", "random", "near", "runs", "threads", "back", "mixed", "scan"))
        backs = rng.choice((0.0, 0.1, 0.2, 0.3, 0.45))
        for turn in range(rng.choice((20, 60, 150))):
            now += rng.choice((MS, 0, 5 * MS)) if kind != "scan" else MS * (turn % 24 == 0)
            passed = False
            if kind == "order":
                at, passed = at + rng.choice((64 * KIB, MIB)), rng.random() < 0.9
            elif kind == "random":
                at = rng.randrange(size)
            elif kind == "scan":
                at += rng.randrange(size // 40) * (-1 if rng.random() < backs else 1)
            elif kind == "near":
                at += rng.randrange(-24 * MIB, 24 * MIB)
            elif kind == "runs":
                at = rng.randrange(size) if turn % 12 == 0 else at + 64 * KIB
            elif kind == "threads":
                one = rng.randrange(5)
                others[one] += rng.choice((64 * KIB, 200 * KIB))
                at = others[one]
            elif kind == "back":
                at -= rng.choice((64 * KIB, 3 * MIB))
            else:
                at = rng.randrange(size) if rng.random() < 0.3 else at + 64 * KIB
            at %= size
            detector.saw(at, at + rng.choice((PAGE, 64 * KIB, 200 * KIB, 400 * KIB)), now, passed)
            jumps = detector.access is Access.JUMPS
            yield detector.access.value, detector.jumped() if jumps else 0


# ---- what is read ahead on a guess ----------------------------------------------------------


def fronts(seed: int) -> Iterator[Decision]:
    """Processes that walk, walk backward, skip, jump and stay away, in files of one kind: how far
    ahead of each place is worth reading, and what the account says."""
    rng = random.Random(seed)
    account, kind = Account(), Law(Law())
    link = Link(rng.choice((50e6, 300e6, 5e9)), rng.choice((3e-4, 1e-3, 1e-2)), rng.choice((1, 4)))
    for _ in range(6):
        blocks = rng.choice((40, 3000, 40_000))
        file, now = FileFronts(blocks, Law(kind), account), 10**9
        places = {pid: rng.randrange(blocks) for pid in range(rng.choice((1, 2, 30)))}
        ways = {pid: rng.choice(("on", "on", "back", "skips", "jumps", "dies")) for pid in places}
        for turn in range(200):
            pid, now = rng.choice(list(places)), now + MS
            at, moved = places[pid], set[Front]()
            length = rng.choice((1, 1, 3))
            if ways[pid] == "jumps" or (ways[pid] == "dies" and turn % 9 == 0):
                at = rng.randrange(blocks)
            elif ways[pid] == "back":
                at -= length
            elif ways[pid] == "skips":
                at += length + rng.choice((2, 6, 40))
            else:
                at += length
            places[pid] = at % blocks
            start, end = at % blocks, min(blocks, at % blocks + length)
            front, begins = file.touch(pid, start, end, now, link)
            moved.add(front)
            died = sorted((one.start, one.position) for one in file.looked(pid, moved))
            density, runs = front.density, front.gaps
            gain = stream_gain(density, runs, front.direction < 0, link)
            least = least_probability(gain, link, front.plain)
            window = file.streams.window(max(1, front.length), least, 10_000)
            low = front.position if front.direction > 0 else front.position - window
            low, high = max(0, low), min(blocks, max(0, low) + window)
            if low < high and account.room_bytes(link) >= (high - low) * BLOCK:
                file.ask(low, high)
                front.wanted = high if front.direction > 0 else low
            yield (
                begins, died, front.start, front.position, front.direction, front.state.value,
                window, account.asked, account.used, account.lost, file.unknown, file.used_bytes,
                round(account.saved_seconds, 9), account.room_bytes(link),
            )  # fmt: skip
        yield [front.position for front in file.closed(0, rng.random() < 0.5)], account.lost


def chains(seed: int) -> Iterator[Decision]:
    """Steps that repeat, for some time or always, of lengths that differ a little."""
    rng = random.Random(seed)
    link, law = Link(rng.choice((50e6, 300e6, 5e9)), rng.choice((3e-4, 1e-2))), Law()
    for _ in range(8):
        steps, at = Steps(law), 0
        pattern = [rng.randrange(-40, 4000) for _ in range(rng.choice((1, 2, 5, 25)))]
        for turn in range(150):
            at += pattern[turn % len(pattern)] + rng.choice((0, 0, 0, 1, -1))
            if rng.random() < 0.02:
                at += rng.randrange(9000)
            size, ahead = rng.choice((1, 4, 40)), rng.choice((1e6, 4e7))
            yield steps.begins(at), steps.right, steps.places(size, BLOCK, ahead, link)


def visits(seed: int) -> Iterator[Decision]:
    """Files that are read here and there, some in steps; whether each is worth reading whole."""
    rng = random.Random(seed)
    link, law = Link(rng.choice((50e6, 300e6, 5e9)), rng.choice((3e-4, 1e-3, 1e-2))), Law()
    for _ in range(12):
        file, now, touched = Visits(law), 10**9, 0
        size = rng.choice((20 * MIB, 100 * MIB, GIB))
        missing, backs = size, rng.choice((0.0, 0.3, 0.5))
        for _ in range(rng.choice((3, 50, 400))):
            now += rng.choice((MS // 10, MS, 4 * MS))
            file.begins(rng.random() < backs, rng.random() < 0.8, now)
            touched += rng.choice((BLOCK, BLOCK, 8 * BLOCK))
            missing = max(0, missing - 2 * BLOCK)
            yield (
                file.number, file.is_worth_it(size, missing, touched, BLOCK, now, link),
            )  # fmt: skip
        file.over()


# ---- known orders ---------------------------------------------------------------------------


def cursors(seed: int) -> Iterator[Decision]:
    """One reader, or several, of an order that is right, shifted, another one, or half of it."""
    rng = random.Random(seed)
    count, size = rng.choice((300, 3000)), rng.choice((5000, 80 * KIB, 3 * MIB, 40 * MIB))
    told = shuffled(count, seed) if seed % 2 else np.arange(count)
    walk = SeenCursor(fixed_records(told, size), count * size)
    read = {
        0: told, 1: told[::-1], 2: shuffled(count, seed + 99), 3: np.roll(told, count // 3),
        4: np.where(np.arange(count) % 3 == 0, shuffled(count, 7), told),
        5: told[::2],
    }[seed % 6]  # fmt: skip
    workers, now = rng.choice((1, 1, 2, 5)), 10**9
    batch = rng.choice((1, 8, 32))
    order: list[int] = []
    blocks = [range(b, min(b + batch, len(read))) for b in range(0, len(read), batch)]
    while blocks:
        group, blocks = [iter(block) for block in blocks[:workers]], blocks[workers:]
        while group:
            one = rng.choice(group)
            item = next(one, None)
            if item is None:
                group.remove(one)
            else:
                order.append(item)
    for turn, item in enumerate(order[:700]):
        now += rng.choice((MS // 10, MS, 20 * MS))
        at = int(read[item]) * size
        if rng.random() < 0.02:
            at = rng.randrange(count * size)
        ahead = lookahead_bytes(walk, Storage(300e6, 1e-3), rng.choice((MIB, GIB)))
        due = walk.due(ahead) if turn % 3 == 0 else []
        if rng.random() < 0.75:
            moved = walk.saw(at, at + rng.choice((PAGE, 64 * KIB)), now)
        elif rng.random() < 0.9:
            low = at // (64 * KIB) * 64 * KIB
            reach = rng.choice((64 * KIB, size, size + 3 * MIB))
            moved = walk.mapped([(low, low + reach)], now)
        else:
            moved = walk.said(turn, now) or 0
        yield walk.position, walk.position_bytes, walk.wrong, moved, due, walk.stray
        if walk.wrong is not None:
            break


def quiet(seed: int) -> Iterator[Decision]:
    """Readers of which few touches show: far on after a pause; scans with what no order explains;
    items that are handed out and never read."""
    rng = random.Random(seed)
    count, size = 3000, rng.choice((100 * KIB, MIB, 4 * MIB))
    rows = shuffled(count, seed)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    shows, skips = rng.choice((0.05, 0.3, 1.0)), rng.choice((0.0, 0.03, 0.06, 0.12))
    stray, item, now = rng.choice((0.0, 0.25, 0.5, 0.7)), 0, 10**9
    allowed = rng.choice((MIB, 4 * MIB, GIB))
    beside = rng.choice((1, 3, 9, 20))  # readers, each with its own part of a batch
    for turn in range(1500):
        now += rng.choice((MS // 5, MS))
        if turn % 50 == 49:
            pause = rng.choice((20, 80, 120, 200, 400, 900))
            now += pause * MS
            item += rng.choice((0, pause // 4, pause // 2, pause))
        item += 1
        at = item + 7 * (turn % beside)
        if at >= count:
            break
        due = walk.due(lookahead_bytes(walk, Storage(300e6, 1e-3), allowed))
        if rng.random() < skips:
            continue
        start = int(rows[at]) * size
        if turn % 10 == 0:
            found = [(start, start + size)]
            if rng.random() < stray:
                other = rng.randrange(count - 4) * size
                found.append((other, other + rng.choice((PAGE, size, 3 * size))))
            walk.looked(found, walk.mapped(found, now))
        elif rng.random() < shows:
            within = rng.randrange(size // PAGE) * PAGE
            walk.saw(start + within, start + within + PAGE, now)
            if rng.random() < 0.3:
                walk.saw(start, start + PAGE, now)
        yield walk.position, walk.wrong, len(due)
        if walk.wrong is not None:
            break


def sparse(seed: int) -> Iterator[Decision]:
    """Items with much between them, of which faults of all sizes map something."""
    rng = random.Random(seed)
    starts = np.arange(200, dtype=np.int64) * 8 * MIB + 64 * MIB
    order = Order(starts, starts + 100 * KIB, np.arange(200))
    walk, now = SeenCursor(order, 2 * GIB), 10**9
    for turn in range(200):
        now += MS
        low = int(starts[turn]) - rng.choice((0, 0, MIB, 3 * MIB))
        walk.mapped([(low, low + rng.choice((100 * KIB, MIB, 3 * MIB, 7 * MIB)))], now)
        if turn > 3 or seed % 2:
            walk.saw(low, low + rng.choice((PAGE, MIB, 3 * MIB, 6 * MIB)), now)
        yield walk.position, walk.wrong
        if walk.wrong is not None:
            break


def foreign(seed: int) -> Iterator[Decision]:
    """Touches of what is in no item: a header, another file's order."""
    rng = random.Random(seed)
    starts = np.arange(400, dtype=np.int64) * 200 * KIB + 100 * MIB
    order = Order(starts, starts + 100 * KIB, np.arange(400))
    walk, now = SeenCursor(order, 400 * MIB), 10**9
    for turn in range(900):
        now += MS
        inside = turn < 5 if seed % 2 else rng.random() < 0.3
        at = int(starts[turn % 400]) if inside else rng.randrange(90 * MIB)
        walk.saw(at, at + PAGE, now)
        yield walk.position, walk.wrong
        if walk.wrong is not None:
            break


class _Source:
    """Orders of epochs; the next one comes late."""

    how, exact = "drawn", False

    def __init__(self, orders: list[Order | None], late: bool) -> None:
        self.orders, self.asked, self.late = orders, 0, late

    def order(self, epoch: int) -> Order | OrderExtents | None:
        self.asked += 1
        if epoch >= len(self.orders) or (self.late and self.asked % 50):
            return None
        found, self.orders[epoch] = self.orders[epoch], None
        return found

    def over(self, epoch: int) -> bool:
        return epoch >= len(self.orders)


def epochs(seed: int) -> Iterator[Decision]:
    """Epochs that end early, begin with what the last one has, hold nothing, or come late."""
    rng = random.Random(seed)
    count, size = 500, 100 * KIB
    rows = [shuffled(count, seed + n) for n in range(3)]
    none: Order = fixed_records(np.zeros(0, np.int64), size)
    orders: list[Order | None] = [
        fixed_records(r[r % 3 == n] if seed % 2 else r[r % 5 > 0], size) for n, r in enumerate(rows)
    ]
    if seed % 4 == 1:
        orders[1:1] = [none] * 1500
    one, now = Epochs(_Source(orders, seed % 4 != 1), count * size), 10**9
    for n, row in enumerate(rows):
        one.look(now)
        mine = row[row % 3 == n] if seed % 2 else row
        for item in mine[: rng.choice((count, count // 4))].tolist():
            now += rng.choice((MS, 9 * MS))
            at = item * size + (rng.randrange(count * size) if rng.random() < 0.03 else 0)
            at %= count * size
            if rng.random() < 0.8:
                moved = one.saw(at, at + PAGE, now)
            else:
                moved = one.mapped([(at, at + 64 * KIB)], now, judge=rng.random() < 0.5)
            one.look(now)
            yield one.number, one.position_bytes, moved, one.through
        for _ in range(rng.choice((0, 25, 40, 70))):
            at = rng.randrange(count // 5) * 5 * size  # in neither order
            if seed % 2:  # in the next one, which may not be there yet
                at = int(rng.choice(rows[(n + 1) % 3][rows[(n + 1) % 3] % 3 == (n + 1) % 3])) * size
            yield one.saw(at, at + PAGE, now), one.number
        many = [(n * size, n * size + PAGE) for n in range(0, count, 5)] * 60
        many += [(int(n) * size, int(n) * size + PAGE) for n in row[:40]]
        yield one.mapped(many, now, judge=False), one.number, one.position_bytes


def long_items(seed: int) -> Iterator[Decision]:
    """Items that are cut into units; the next use of blocks."""
    rng = random.Random(seed)
    starts = np.array([rng.randrange(400 * MIB) for _ in range(60)], np.int64)
    ends = starts + np.array([rng.choice((PAGE, 700 * KIB, 9 * MIB)) for _ in range(60)])
    units = OrderExtents.of(Order(starts, ends, np.arange(60)), 500 * MIB, PAGE)
    yield len(units), units.starts.tolist(), units.coordinate.tolist()
    blocks = np.arange(0, 500 * MIB // (64 * KIB), 7)
    for first in range(0, len(units), 9):
        yield units.next_use.of(blocks, 64 * KIB, first).tolist()


# ---- strides --------------------------------------------------------------------------------


def strides(seed: int) -> Iterator[Decision]:
    """Ranks that skip, and those that do not, with records of all sizes; some pages are gone."""
    rng = random.Random(seed)
    if seed % 3:
        index = index_of(uneven(600, seed))
    else:
        index = index_of([rng.choice((2, 5, 7, 9, 20, 60, 66, 130)) * KIB] * 900)
    count = len(index)
    for _ in range(30):
        period, run = rng.choice((2, 3, 4, 8, 16, 60)), rng.choice((1, 1, 2))
        first = rng.randrange(period)
        members = [r for r in range(count) if (r - first) % period < run]
        upto = rng.choice((3, 5, 6, 7, 11, 13, 24, 40, 120))
        begin = rng.randrange(max(1, len(members) - upto * run))
        chosen = members[begin : begin + upto * run]
        chosen = [r for r in chosen if rng.random() < rng.choice((1.0, 0.97, 0.93, 0.88))]
        others = rng.choice((0, 0, 1, 3, 12))
        chosen += [rng.randrange(count) for _ in range(others)]
        runs = mapped_by(index, sorted(set(chosen)), cached=rng.random() < 0.5)
        if not runs:
            continue
        runs = [(a, n - (PAGE if rng.random() < 0.1 and n > PAGE else 0)) for a, n in runs]
        seen = stride.look(index, runs, runs[0][0], sum(runs[-1]), rng.choice((1, -1)))
        found = None if seen is None else stride.infer(seen, 1)
        yield None if found is None else [found.first, found.run, found.period]


# ---- the whole core -------------------------------------------------------------------------


class _Noted(Auto):
    """Notes what is read ahead."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(room_bytes)
        self.notes: list[Decision] = []

    def next_range(self, now: float) -> Range | None:
        wanted = super().next_range(now)
        self.notes.append(wanted)
        return wanted


def replayed(seed: int) -> Iterator[Decision]:
    """A job of made up readers, by the service's own core (sim/replay/node.py)."""
    rng = np.random.default_rng(seed)
    pages = 1 << 15
    kinds = [
        np.arange(0, 6000, 16), np.arange(6000, 0, -16), rng.integers(0, pages, 1500),
        np.arange(0, pages, 100)[:300], np.sort(rng.integers(0, pages, 1200)),
        np.concatenate([rng.integers(0, pages - 100) + np.arange(0, 96, 4) for _ in range(40)]),
    ]  # fmt: skip
    chosen = [kinds[seed % 6], kinds[(seed * 5 + 2) % 6]][: 1 + seed % 2]
    threads = [
        stream(one.tolist(), int(rng.choice([1, 3, 16])), float(rng.choice([2e-4, 2e-3, 8e-3])), n)
        for n, one in enumerate(chosen)
    ]
    policy = _Noted(int(rng.choice([40, 400])) * MIB)
    bandwidth, latency = float(rng.choice([1e8, 2e9])), float(rng.choice([2e-4, 5e-3]))
    made = replay(demand(*threads, pages=pages), StorageModel(bandwidth, latency), policy, None)
    yield from policy.notes
    yield made.misses, made.read_bytes, made.requests


def long_periods(seed: int) -> Iterator[Decision]:
    """Ranks of so many that a sequence takes thousands of records to show."""
    index = index_of([70 * KIB] * 15_000)
    for period in (500, 1000, 1040, 1500, 1900):
        members = np.arange(seed, 15_000, period)
        runs = mapped_by(index, members.tolist())
        seen = stride.look(index, runs, 0, sum(runs[-1]), 1)
        found = None if seen is None else stride.infer(seen, 1)
        yield None if found is None else [found.first, found.run, found.period]


def beside(seed: int) -> Iterator[Decision]:
    """What is read beside a long order before it begins; and the next use of blocks in another."""
    size = (60 + seed) * KIB
    walk = SeenCursor(fixed_records(np.arange(16_000), size), 4 * GIB)
    for at in range(16_000 * size, 4 * GIB, 64 * KIB):
        walk.saw(at, at + 64 * KIB, at)
        if walk.wrong:
            break
    yield at, walk.wrong
    rows, blocks = shuffled(4000, seed), np.arange(4000)
    walk = SeenCursor(fixed_records(rows, 64 * KIB), 4000 * 64 * KIB)
    for item in [*range(100, 180), *range(90, 100), *range(180, 400)]:
        at = int(rows[item]) * 64 * KIB
        walk.due(16 * MIB)
        walk.saw(at, at + PAGE, item)
        if item % 20 == 0:
            yield [float(one) for one in walk.future(blocks)[rows[: item + 40]]]


def guards(seed: int) -> Iterator[Decision]:
    """Announced orders of which a part is read, in short and long pieces, by readers that read more
    or less beside."""
    rng = random.Random(seed)
    for _ in range(10):
        trial, need = guard.OrderGuard(), 0
        part, piece = rng.choice((0.05, 0.15, 0.2, 0.3, 0.6)), rng.choice((PAGE, 80 * KIB, 3 * MIB))
        beside = rng.choice((0, 20, 40, 80, 160)) * KIB
        for turn in range(200 * MIB // max(piece, 256 * KIB)):
            trial.on_issued(need, need + piece, need)
            need += max(piece, rng.choice((piece, 128 * KIB, 256 * KIB)))
            trial.on_touched(beside * max(1, piece // MIB * 4))
            trial.on_position(need - rng.choice((0, MIB)), turn)
            yield trial.judge(turn - 3, lambda *_, part=part: rng.random() < part)  # type: ignore[misc]


def small_records(seed: int) -> Iterator[Decision]:
    """Records too small to be told apart in what a fault maps; and more than are looked at."""
    for size in (3 * KIB, 6 * KIB, 10 * KIB, 20 * KIB):
        index = index_of([size + 8 * seed] * 40_000)
        runs = mapped_by(index, list(range(0, 40_000, 50)))
        for direction in (1, -1):
            seen = stride.look(index, runs, 0, sum(runs[-1]), direction)
            yield None if seen is None else [seen.first, len(seen.mapped)]


def held(seed: int) -> Iterator[Decision]:
    """Touches of the next order by which it may have begun: of parts of its few long items, or of
    some items near its beginning and of others all over it."""
    few = np.arange(3, dtype=np.int64) * 64 * MIB + GIB
    part = [GIB + at * MIB for at in (0, 2, 40, 70, 3, 9, 130)]
    items = np.arange(2000, dtype=np.int64) * MIB + GIB
    deep = [GIB + at * MIB for at in (0, 5, 11)] + [GIB + at * MIB for at in range(1900, 1800, -1)]
    for starts, length, touches in ((few, 64 * MIB, part), (items, MIB, deep)):
        upcoming = Order(starts, starts + length, np.arange(len(starts)))
        first: Order = fixed_records(shuffled(200, seed), 100 * KIB)
        one = Epochs(_Source([first, upcoming], False), 4 * GIB)
        one.look(0)
        for turn, at in enumerate(int(start) for start in first.starts):
            one.saw(at, at + PAGE, turn * MS)
        for turn, at in enumerate(touches):
            moved = one.saw(at, at + PAGE, (200 + turn) * MS)
            yield one.number, one.position_bytes, moved


def twice(seed: int) -> Iterator[Decision]:
    """An order that has each record twice: a second touch goes on in a record that is being read,
    or is of its next turn."""
    size, rows = (100 + seed) * KIB, np.tile(np.arange(100), 2)
    walk = SeenCursor(fixed_records(rows, size), 100 * size)
    for half in (0, size // 8 * 4):
        for at in range(half, 100 * size, size):
            moved = walk.saw(at, at + PAGE, at)
            yield walk.position, moved


SCENARIOS: dict[str, tuple[Callable[[int], Iterator[Decision]], int]] = {
    "walks": (walks, 16), "places": (places, 2), "jumps": (jumps, 12),
    "fronts": (fronts, 8), "chains": (chains, 4), "visits": (visits, 6),
    "cursors": (cursors, 24), "foreign": (foreign, 4),
    "quiet": (quiet, 24), "sparse": (sparse, 6),
    "guards": (guards, 4), "beside": (beside, 2), "epochs": (epochs, 8),
    "long_items": (long_items, 2), "held": (held, 2), "twice": (twice, 2),
    "small_records": (small_records, 2),
    "strides": (strides, 12), "replayed": (replayed, 12), "long_periods": (long_periods, 2),
}  # fmt: skip


#: Which scenarios a module of predict/ decides in.
BY_MODULE = {
    "fronts": ["fronts", "replayed"], "storage": ["fronts", "chains", "visits", "replayed"],
    "survival": ["fronts", "chains", "visits", "replayed"], "steps": ["chains", "replayed"],
    "visits": ["visits", "replayed"], "bounds": ["walks", "epochs", "cursors", "replayed"],
    "sequences": ["quiet", "cursors", "epochs", "held"],
    "checkpoints": ["places", "walks"], "order": [
        "quiet", "sparse", "cursors", "foreign", "epochs", "long_items", "guards", "beside",
        "held", "twice",
    ], "randomness": ["jumps", "replayed"], "streams": ["walks", "cursors"],
    "stride": ["strides", "long_periods", "small_records"],
    "window": ["walks", "places", "cursors"],
}  # fmt: skip


def digests(name: str) -> Iterator[str]:
    """A digest of each hundred decisions of a scenario, and how many there are."""
    draw, seeds = SCENARIOS[name]
    sha, count = hashlib.sha256(), 0
    for seed in range(seeds):
        for decision in draw(seed):
            sha.update(json.dumps(decision, default=int).encode())
            count += 1
            if count % CHUNK == 0:
                yield sha.hexdigest()[:12]
    yield sha.hexdigest()[:12]
    yield str(count)


def differs(name: str) -> str | None:
    """Where a scenario's decisions are not those of GOLDEN; None: they are."""
    before = json.loads(GOLDEN.read_text())[name]
    for at, (was, now) in enumerate(zip_longest(before, digests(name))):
        if was != now:
            return f"{name}: within the {CHUNK} decisions from number {at * CHUNK}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="these are the decisions from now on")
    if parser.parse_args().write:
        found = {name: list(digests(name)) for name in SCENARIOS}
        GOLDEN.write_text(json.dumps(found, indent=0) + "\n")
    for name in SCENARIOS:
        count = json.loads(GOLDEN.read_text())[name][-1]
        print(name, count, "decisions:", differs(name) or "as they were")
    return 0


if __name__ == "__main__":
    sys.exit(main())
