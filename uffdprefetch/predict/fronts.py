# SPDX-License-Identifier: Apache-2.0
"""Where a file is being read on, by all processes together.

A *front* is the head of a stream: touches near it bring it on, others begin a new one. Its length
is what predict/survival.py judges; a front whose reader is seen elsewhere time and again has died.
All places are in blocks of BLOCK_BYTES. Pure: who reads ahead of fronts is readers/ahead.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from heapq import nsmallest
from itertools import takewhile
from operator import attrgetter

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.bounds import DECIDE_NS, ENTRIES_MAX, LATELY_COUNT
from uffdprefetch.predict.storage import BLOCK_BYTES, MISS_BYTES, Account, Link
from uffdprefetch.predict.streams import BACK_BYTES
from uffdprefetch.predict.survival import Law
from uffdprefetch.predict.visits import FREE_SHARE

#: Fronts of a file, or FRONTS_EACH for each process that has one, if that is more: the dead go
#: first, then those that have stood for the longest, one of FRONTS_MAX at once.
FRONTS_MAX, FRONTS_EACH = 24, 2
#: A front has died when its reader was seen elsewhere in so many looks, or twice as many each time
#: that it has come back.
LOOKS_ELSEWHERE = 3
#: A gap of no more than so many blocks is always part of a stream: pages of a B-tree, headers.
NEAR_BLOCKS = 2
#: What a miss brings: the kernel reads half of it before the touch, and half behind it.
MISS_BLOCKS = MISS_BYTES // BLOCK_BYTES
#: Touches that lie no further behind a front are its own: of other threads, and of ranks that are a
#: little behind. Further back it is read once more, and what it has brought may be gone by then.
BEHIND_BLOCKS = BACK_BYTES // BLOCK_BYTES
#: A first touch of no more blocks may turn out to be the end of a stream that goes backward.
TURNS_BLOCKS = 8

#: Flags of a block.
TOUCHED, ASKED, USED, LOST = 1, 2, 4, 8
_SET = {bit: bytes(value | bit for value in range(256)) for bit in (TOUCHED, ASKED, USED, LOST)}
_OPEN = bytes(value & (ASKED | USED | LOST) == ASKED for value in range(256))
_UNUSED = bytes(value & (ASKED | USED) == ASKED for value in range(256))
_BACK = bytes(value & (ASKED | USED | LOST) == ASKED | LOST for value in range(256))
#: A block that is asked for: one that was lost is open again.
_ASK = bytes(
    value or ASKED if value & (ASKED | USED | LOST) != ASKED | LOST else value & ~LOST
    for value in range(256)
)
#: A block that is read with its file as a whole, which the account of guesses does not have.
BROUGHT = ASKED | USED
_BRING = bytes(value or BROUGHT for value in range(256))
_LOSE = bytes(
    value | LOST if value & (ASKED | USED | LOST) == ASKED else value for value in range(256)
)
_USE = bytes(
    (value | USED) & ~LOST | TOUCHED if value & ASKED else value | TOUCHED for value in range(256)
)
_TOUCHED = bytes(value & TOUCHED for value in range(256))
#: What was touched, and what was used or lost of what was asked for: as if it had never been.
_RENEW = bytes(0 if value & (TOUCHED | USED | LOST) else value for value in range(256))
_UNASK = bytes(value & ~(ASKED | LOST) if not value & USED else value for value in range(256))


class State(Enum):
    """Of a front."""

    ALIVE = "alive"
    DEAD = "dead"  # and may come back
    ENDED = "ended"  # at the file's end, or where another has been


@dataclass
class Rests:
    """Of a stream: its reader does not come on though all that was asked for ahead of it has come,
    for longer than it takes to decide anew (DECIDE_NS). Once or twice that is a busy node; who
    computes in between does so again.
    """

    last_ns: int  # when it came on last
    length: int = 0  # how far it had come when it last rested
    bursts: tuple[int, int, int] = 0, 0, 0  # what it came over before each of the last ones

    @property
    def burst(self) -> int:
        """What it comes over between two rests, if it rests time and again."""
        return min(self.bursts)

    def goes_on(self, length: int, now_ns: int, idle_ns: int) -> None:
        """From a length; nothing was under way for so long."""
        if min(now_ns - self.last_ns, idle_ns) > DECIDE_NS:
            self.bursts = length - self.length, *self.bursts[:2]
            self.length = length
        self.last_ns = now_ns


@dataclass
class Texture:
    """Of a stream, of late: blocks that it came over, of them touched, and runs of touches, after
    gaps; ``turns``: of one of several readers, after what it has left out; ``around``: blocks that
    the kernel reads beside those runs; ``run``: how long the one is that it is in.

    A gap may be touched yet: a large copy touches the last block of what it takes before those in
    the middle, and of ranks one is behind the other. ``gaps``: those that are not far behind, or
    that one of its readers has not come to, ENTRIES_MAX at most; ``passed``: blocks of those before
    these, of which ``filled`` were touched since.
    """

    over: float
    touched: float
    run: int
    runs: float = 0.0
    turns: float = 0.0
    around: float = 0.0
    passed: float = 0.0
    filled: float = 0.0
    gaps: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def _fills(self) -> float:
        """The part of a gap that is touched yet, where three of four blocks are: who reads the ends
        of some records, and others whole, leaves gaps."""
        return self.filled / self.passed if 4 * self.filled > 3 * self.passed else 0.0

    @property
    def density(self) -> float:
        """The part of its blocks that is touched."""
        touched = self.touched + self._fills * (self.over - self.touched)
        return min(1.0, touched / max(1.0, self.over))

    @property
    def runs_a_block(self) -> float:
        """Runs of touches, after gaps of the stream or of one of its readers."""
        runs = max(self.turns, self.runs * (1 - self._fills))
        return runs / max(1.0, self.over)

    @property
    def around_a_block(self) -> float:
        """Blocks that the kernel reads beside them."""
        return self.around * (1 - self._fills) / max(1.0, self.over)

    @property
    def around_run(self) -> int:
        """Blocks that it reads beside the one that the stream is in: one that is longer than what a
        miss brings has made it read ahead as much again."""
        return MISS_BLOCKS // 2 + (MISS_BLOCKS if self.run > MISS_BLOCKS else 0)

    def goes_on(self, gone: int, gap: tuple[int, int]) -> None:
        """Over so many blocks, which are touched but for a gap, or an empty one."""
        start, end = gap
        size = max(0, end - start)
        share = 0.5 ** (gone / LATELY_COUNT)
        self.over = self.over * share + gone
        self.touched = self.touched * share + gone - size
        self.runs, self.turns, self.around, self.passed, self.filled = (
            each * share for each in (self.runs, self.turns, self.around, self.passed, self.filled)
        )
        if size:
            self.runs += 1
            self.around += self.around_run
            self.run = 0
            self.gaps.append(gap)
        self.run += gone - size

    def settles(self, behind: int, direction: int, untouched: Callable[[int, int], int]) -> None:
        """Nobody comes to the gaps any more that lie behind so far. (A reader that stands elsewhere
        for good never comes to any.)"""
        while self.gaps and (
            len(self.gaps) > ENTRIES_MAX or (behind - self.gaps[0][direction > 0]) * direction > 0
        ):
            gap = self.gaps.popleft()
            size = gap[1] - gap[0]
            self.passed += size
            self.filled += size - untouched(*gap)


@dataclass(eq=False)
class Front:
    """[start, position) where it goes on, [position, start) backward; ``wanted``: asked for up to
    there."""

    start: int
    position: int
    pid: int
    born_ns: int
    rests: Rests
    texture: Texture
    direction: int = 1
    wanted: int = 0
    number: int = 0  # of its file's
    elsewhere: int = 0  # looks
    patience: int = 1
    state: State = State.ALIVE

    @property
    def length(self) -> int:
        """How far it has come."""
        return abs(self.position - self.start)

    @property
    def density(self) -> float:
        """The part of its blocks that is touched."""
        return self.texture.density

    @property
    def gaps(self) -> float:
        """How many it has a block."""
        return self.texture.runs_a_block

    @property
    def plain(self) -> float:
        """The part of its blocks that is read without us."""
        return min(1.0, self.texture.density + self.texture.around_a_block)

    @property
    def last_ns(self) -> int:
        """When it came on last."""
        return self.rests.last_ns

    @property
    def ahead(self) -> int:
        """How far ahead of it was asked for."""
        return max(0, (self.wanted - self.position) * self.direction)


_POSITION = attrgetter("position")


def _age(front: Front) -> tuple[bool, int, int]:
    """The dead go first, then those that have stood for the longest."""
    return front.state is State.ALIVE, front.last_ns, front.number


class FileFronts:
    """Of one file. ``streams``: the law of how far its streams go; ``ending``: called before a
    front ends: what waits to be read for it is taken back."""

    def __init__(
        self, blocks: int, streams: Law, account: Account,
        ending: Callable[[Front], None] = lambda front: None,
    ) -> None:  # fmt: skip
        self.blocks, self.streams, self._account, self._ending = blocks, streams, account, ending
        self.flags = bytearray(blocks)
        self.unknown = blocks  # neither touched nor asked for
        self._used = 0  # of what was asked for
        self.fronts: list[Front] = []  # by position
        self._begun = 0
        self._asked = blocks, 0  # outside [start, end) nothing was asked for
        self._idle_ns = 0
        #: Of a process, where it has touched last in each front that it brings on, or follows.
        self._places: dict[int, dict[Front, int]] = {}

    # ---- blocks ---------------------------------------------------------------------------------

    def _mark(self, start: int, end: int, table: bytes) -> None:
        self.flags[start:end] = self.flags[start:end].translate(table)

    def ask(self, start: int, end: int) -> int:
        """[start, end) is asked for: how many blocks of it were not, nor touched."""
        part = self.flags[start:end]
        fresh = part.count(0)
        self.unknown -= fresh
        again = part.translate(_BACK).count(1)  # it was lost, and is read once more
        self.flags[start:end] = part.translate(_ASK)
        self._account.asked += (fresh + again) * BLOCK_BYTES
        self._asked = min(self._asked[0], start), max(self._asked[1], end)
        return fresh

    def bring(self, start: int, end: int) -> None:
        """[start, end) is read whole: whoever comes there has no miss, and the account of guesses
        does not have it."""
        self.unknown -= self.flags.count(0, start, end)
        self._mark(start, end, _BRING)

    def take_back(self, start: int, end: int) -> None:
        """What was asked for there is not read."""
        part = self.flags[start:end].translate(_UNUSED)
        lost = self.flags[start:end].translate(_BACK).count(1)
        self._account.asked -= part.count(1) * BLOCK_BYTES
        self._account.lost -= lost * BLOCK_BYTES
        before = self.flags.count(0, start, end)
        self._mark(start, end, _UNASK)
        self.unknown += self.flags.count(0, start, end) - before

    def lose(self, start: int, end: int) -> None:
        """Nobody will come to what was asked for there."""
        start, end = max(start, self._asked[0]), min(end, self._asked[1])
        if start < end:
            gone = self.flags[start:end].translate(_OPEN).count(1)
            self._account.lost += gone * BLOCK_BYTES
            self._mark(start, end, _LOSE)

    def renew(self, start: int, end: int) -> None:
        """What was touched there has left memory: nothing is known of it any more."""
        before = self.flags.count(0, start, end)
        self._mark(start, end, _RENEW)
        self.unknown += self.flags.count(0, start, end) - before

    def untouched(self, start: int, end: int) -> int:
        """How many blocks of [start, end) nobody has touched."""
        return self.flags[start:end].translate(_TOUCHED).count(0)

    def touched_runs(self, start: int, end: int, most: int) -> list[tuple[int, int]]:
        """Where [start, end) was touched: so many runs of blocks at the most."""
        part, found, at = self.flags[start:end].translate(_TOUCHED), list[tuple[int, int]](), 0
        while len(found) < most and (first := part.find(1, at)) >= 0:
            at = part.find(0, first)
            at = len(part) if at < 0 else at
            found.append((start + first, start + at))
        return found

    @property
    def used_bytes(self) -> int:
        """Of what was asked for."""
        return self._used * BLOCK_BYTES

    # ---- touches --------------------------------------------------------------------------------

    def look(self, idle_ns: int) -> None:
        """touch() tells of a process that is looked at; nothing was under way for so long."""
        self._idle_ns = idle_ns

    def touch(self, pid: int, start: int, end: int, now_ns: int, link: Link) -> tuple[Front, bool]:
        """A run of blocks is touched: its front, and whether that begins here."""
        part = self.flags[start:end]
        used = part.translate(_UNUSED)
        self.unknown -= part.count(0)
        self._used += used.count(1)
        if used.count(1):
            back = part.translate(_BACK).count(1)
            first = bool(used[0]) and not (start and self.flags[start - 1] & TOUCHED)
            self._account.note_use(used.count(1) * BLOCK_BYTES, back * BLOCK_BYTES, first, link)
        self.flags[start:end] = part.translate(_USE)
        # of gaps up to twice what a miss costs, of all lengths, the mean is what it costs
        reach = 2 * link.reach_bytes // BLOCK_BYTES
        front = self._follows(pid, start, end, reach) or self._match(pid, start, end, reach)
        if front is None:
            front, begins = self._begin(pid, start, end, now_ns), True
        else:
            begins = False
            self._account.allowed += int(FREE_SHARE * part.count(0) * BLOCK_BYTES)
            is_first = part.translate(_TOUCHED).count(0) > 0
            front.texture.turns += is_first and self._takes_turns(front, pid, start, end)
            self._advance(front, pid, start, end, now_ns, reach)
        self._places.setdefault(pid, {})[front] = end if front.direction > 0 else start
        return front, begins

    def _follows(self, pid: int, start: int, end: int, reach: int) -> Front | None:
        """The front behind whose position a process goes on, as ranks do one behind the other."""
        for front, place in self._places.get(pid, {}).items():
            if front.direction > 0:
                if -1 <= start - place <= reach and start < front.position:
                    return front
            elif -1 <= place - end <= reach and end > front.position:
                return front
        return None

    def _hindmost(self, front: Front) -> int:
        """Where the last of its readers is."""
        places = [places[front] for places in self._places.values() if front in places]
        return (min if front.direction > 0 else max)(places, default=front.position)

    def _match(self, pid: int, start: int, end: int, reach: int) -> Front | None:
        """The front that a touch brings on: the nearest, of several the one that was there first;
        or one that turns out to go backward, if that is nearer."""
        found = list[tuple[int, bool, int, Front]]()
        for front in self._near(start, end, reach):
            position, is_forward = front.position, front.direction > 0
            if is_forward:
                ahead, length = start - position, position - front.start
            else:
                ahead, length = position - end, front.start - position
            beyond = min(max(NEAR_BLOCKS, length // 2), reach)
            if -length <= ahead <= beyond and ahead >= -BEHIND_BLOCKS:
                found.append((max(0, ahead), False, front.number, front))
            # the block that it was in the middle of may be told of once more
            turns = is_forward and length <= reach and -1 <= front.start - end <= beyond
            if turns and front.texture.touched <= TURNS_BLOCKS:
                found.append((max(0, front.start - end), True, front.number, front))
        if len(found) > 1:
            own = self._places.get(pid, {})
            if any(front in own for _, turns, _, front in found if not turns):
                found = [each for each in found if not each[1]]
        return min(found)[3] if found else None

    def _near(self, start: int, end: int, reach: int) -> Iterator[Front]:
        """Those that a touch of [start, end) can bring on, and others."""
        low = start - max(reach, BEHIND_BLOCKS)
        high = end + max(2 * reach, BEHIND_BLOCKS) + 1
        first = bisect_left(self.fronts, low, key=_POSITION)
        return takewhile(lambda front: front.position <= high, self.fronts[first:])

    def _begin(self, pid: int, start: int, end: int, now_ns: int) -> Front:
        front = Front(
            start, end, pid, now_ns, Rests(now_ns), Texture(end - start, end - start, end - start),
            wanted=end, number=self._begun, patience=LOOKS_ELSEWHERE,
        )  # fmt: skip
        self._begun += 1
        if len(self.fronts) >= FRONTS_MAX:
            self._make_room()
        insort(self.fronts, front, key=_POSITION)
        self.streams.passed(1, end - start)
        return front

    def _make_room(self) -> None:
        many = len(self.fronts)
        alive = (front.pid for front in self.fronts if front.state is State.ALIVE)
        if many < FRONTS_EACH * len(set(alive)):
            return
        for old in nsmallest(many // FRONTS_MAX, self.fronts, _age):
            self.end(old)
            self.fronts.remove(old)
            for places in self._places.values():
                places.pop(old, None)

    def _advance(
        self, front: Front, pid: int, start: int, end: int, now_ns: int, reach: int
    ) -> None:
        if front.direction > 0 and start < front.start >= end - 1 and front.length <= reach:
            self._ending(front)
            self.lose(front.position, front.wanted)
            self._move(front, front.start, front.position)
            front.direction, front.wanted = -1, front.position
        before, position = front.length, front.position
        if front.direction > 0:
            gap_start, gap_end = position, start
            self._move(front, max(position, end), front.start)
        else:
            gap_start, gap_end = end, position
            self._move(front, min(position, start), front.start)
        if gap_end > gap_start:
            self._pass_over(gap_start, gap_end, front.texture.around_run)
        gone = front.length - before
        if gone <= 0:
            return
        front.rests.goes_on(before, now_ns, self._idle_ns)
        front.texture.goes_on(gone, (gap_start, gap_end))
        far = front.position - front.direction * LATELY_COUNT
        hindmost = self._hindmost(front)
        behind = min(far, hindmost) if front.direction > 0 else max(far, hindmost)
        front.texture.settles(behind, front.direction, self.untouched)
        if front.state is State.DEAD:
            self.streams.revived(before)
            front.patience *= 2
            front.wanted = front.position
        self.streams.passed(max(1, before), front.length)
        front.state, front.elsewhere = State.ALIVE, 0
        front.pid = pid

    def _takes_turns(self, front: Front, pid: int, start: int, end: int) -> bool:
        """Whether a process goes on in a front that has others from where it has left out some:
        of ranks that skip each has a miss there, though the stream as a whole has no gap."""
        place = self._places.get(pid, {}).get(front)
        if place is None or sum(front in places for places in self._places.values()) < 2:
            return False
        return start > place if front.direction > 0 else end < place

    def _move(self, front: Front, position: int, start: int) -> None:
        front.start = start
        if position != front.position:
            self.fronts.remove(front)
            front.position = position
            insort(self.fronts, front, key=_POSITION)

    def _pass_over(self, start: int, end: int, left: int) -> None:
        """A gap of a stream, or what is behind its end: so much of it the kernel would have read as
        well."""
        part, at = self.flags[start:end].translate(_OPEN), -1
        while left and (at := part.find(1, at + 1)) >= 0:
            self.take_back(start + at, start + at + 1)
            left -= 1
        self.lose(start, end)

    def looked(self, pid: int, moved: Collection[Front]) -> list[Front]:
        """A look at a process has found what it has touched, which brought ``moved`` on: the fronts
        that have died by it."""
        died = []
        for front in self.fronts:
            if front.state is State.ALIVE and front.pid == pid and front not in moved:
                front.elsewhere += 1
                if front.elsewhere >= front.patience:
                    self.end(front)
                    died.append(front)
        return died

    def end(self, front: Front) -> None:
        """Its reader has left it: what was asked for beyond it was for nothing."""
        if front.state is not State.ALIVE:
            return
        self._ending(front)
        at = front.position if front.direction > 0 else front.position - 1
        outside = not 0 <= at < self.blocks - (front.direction > 0)
        low, high = sorted((front.position, front.wanted))
        # who has not gone on into what was read ahead behind that has not met anybody
        beyond = self.flags[max(0, low) : high].translate(_OPEN).count(1)
        met = 0 <= at < self.blocks and bool(self.flags[at] & TOUCHED) and not beyond
        front.state = State.ENDED if outside or met else State.DEAD
        if front.state is State.DEAD:
            self.streams.died(max(1, front.length))
        if front.direction > 0:
            self._pass_over(low, high, front.texture.around_run)
        else:
            self.lose(low, high)
        front.wanted = front.position

    def closed(self, pid: int, others: bool) -> list[Front]:
        """A process has unmapped the file: its fronts, which have ended. ``others``: somebody else
        maps it."""
        self._places.pop(pid, None)
        ended = [front for front in self.fronts if front.pid == pid]
        for front in ended:
            self.end(front)
        if not others:
            self.fronts.clear()
            self._places.clear()
            self.lose(0, self.blocks)
        return ended
