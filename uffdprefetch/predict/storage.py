# SPDX-License-Identifier: Apache-2.0
"""What storage costs a reader, what it is worth to read ahead on a guess, and how much of that may
be lost: the one model, which everybody asks who decides or keeps books.

A request takes its latency and its bytes' share of the bandwidth; of a stream, where the next
requests are under way meanwhile, the bandwidth alone counts. warm/meter.py measures both. What a
byte for nothing costs, and what a miss that does not happen saves, are kept in seconds of the link.
One account bounds a whole run: all files and processes, whoever has guessed.
"""

from __future__ import annotations

from math import inf

from uffdprefetch.base.record import dataclass, replace

#: The unit of all books: what one fault maps of the page cache (fault_around_bytes, mm/memory.c).
BLOCK_BYTES = 64 << 10
#: What a miss brings where the kernel's readahead window is not known: read_ahead_kb's default, and
#: what the kernel reads around a miss (mm/filemap.c).
MISS_BYTES = 128 << 10
#: A byte for nothing costs as much as so many bytes' time on the link: others wait for it, too, and
#: memory is taken.
SHY = 2.0
#: Seconds of the link that may be lost before anything is known.
FREE_SECONDS = 0.05
#: Bytes that a run may read for nothing before anything is known, however fast the link is: others
#: share the storage. It is there once: what measures the link, streams, chains and files that are
#: read whole have it together. Streams and chains may lose no more beyond as many as were used;
#: files that are read whole no more beyond a part of what their visits bring.
#: So much bench/harm_table.py allows to any program.
FREE_BYTES = 4 << 20
#: ... of a reader whose job says that it reads in no order (MADV_RANDOM): a miss of it brings a
#: page, so that plain reads little.
RANDOM_FREE_BYTES = 2 << 20
#: No more than so much of one stream keeps a link busy, however fast that is: what a disk of 3 GB/s
#: brings in 5 ms. Others share it.
UNDER_WAY_BYTES = 16 << 20
#: Of what is asked for and not yet used, so much is thought to be lost.
OPEN_SHARE = 0.5
#: A guess is under way by no more than so much beside what keeps the link busy.
PIECE_BYTES = 256 << 10
#: What reading a byte ahead takes beyond a miss's, seconds of a core, which may be the job's:
#: readahead(2) fills the cache in folios of one page, the kernel's own in large ones, of which one
#: fault maps all (mm/readahead.c, do_page_cache_ra() and page_cache_ra_order()). Measured: 0.2 s a
#: GB of the workers, 0.1 of the service's thread. (In the pool the same threads read both.)
TAKES_SECONDS = 0.3e-9


@dataclass(frozen=True)
class Storage:
    """Its bandwidth in bytes/s and the latency of a request in s; 0: not known."""

    bandwidth_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0

    def request_seconds(self, size_bytes: float) -> float:
        """That a reader waits for one request of so much, with nothing beside it."""
        return self.latency_seconds + self.stream_seconds(size_bytes)

    def stream_seconds(self, size_bytes: float) -> float:
        """That so much takes on the link."""
        return size_bytes / self.bandwidth_bytes_per_second

    def busy_bytes(self, more_seconds: float = 0.0) -> int:
        """What, under way at one time, keeps it busy for its latency and so much longer (Little's
        law)."""
        return int(self.bandwidth_bytes_per_second * (self.latency_seconds + more_seconds))


@dataclass(frozen=True)
class RequestCost(Storage):
    """``reads``: requests of which the quickest has told the latency."""

    reads: int = 0


@dataclass(frozen=True)
class Link(Storage):
    """Storage as one reader meets it. ``waiting``: how many readers wait at one time, whose waits
    overlap; ``miss_bytes``: what one miss brings without us; ``waits_a_byte``: the seconds that who
    goes on in order waits at the most; ``takes_a_byte``: those of a core that reading ahead takes
    beyond a miss's; ``beside``: how many of those that wait do so for other requests, which the
    link brings meanwhile."""

    waiting: float = 1.0
    miss_bytes: int = MISS_BYTES
    waits_a_byte: float = inf
    takes_a_byte: float = TAKES_SECONDS
    beside: float = 0.0

    def as_seen(self, plain_bytes_per_second: float, best_bytes_per_second: float) -> Link:
        """With what readers have shown who went on in order while nothing was read ahead for them
        (0: none has): so much it does bring, and beyond what it takes, or the best one would, they
        have not waited."""
        plain = plain_bytes_per_second
        if not plain:
            return self
        bandwidth = max(plain, self.bandwidth_bytes_per_second)
        return replace(
            self,
            bandwidth_bytes_per_second=bandwidth,
            waits_a_byte=1 / plain - 1 / max(bandwidth, best_bytes_per_second),
        )

    @property
    def miss_seconds(self) -> float:
        """That a miss costs its reader."""
        return self.request_seconds(self.miss_bytes)

    def in_order_seconds(self, size_bytes: float) -> float:
        """That who goes on in order waits for the latency of so much: the kernel's next request is
        under way when it comes to the first page of the last one, for half of that."""
        waits = size_bytes / self.miss_bytes * self.latency_seconds / 2
        return min(waits, size_bytes * self.waits_a_byte)

    def beside_others(self, seconds: float, size_bytes: float) -> float:
        """What of a wait for so much counts for the run, where others wait beside it: nothing if
        what the link brings them takes as long: over one that is busy no bytes come sooner."""
        if self.beside * self.stream_seconds(size_bytes) >= seconds:
            return 0.0
        return seconds / max(1.0, self.waiting)

    @property
    def reach_bytes(self) -> int:
        """The gap that costs to read what a miss costs."""
        return self.busy_bytes() + self.miss_bytes


#: A link is thought no slower than this (bytes/s) until some large reads have told
#: (warm/meter.py): who reads little ahead because the first one stood behind others never learns
#: better.
SLOW_BYTES_PER_SECOND = 100e6
#: The link before anything was measured: a slow one, on which a miss costs no more than its bytes.
UNKNOWN = Link(SLOW_BYTES_PER_SECOND, 1e-3)


def least_gain(link: Link) -> float:
    """Less, in times that a byte takes on the link, is what it takes to read ahead."""
    return link.takes_a_byte * link.bandwidth_bytes_per_second


def least_probability(gain: float, link: Link, kernel: float = 0.0) -> float:
    """From which probability of use on a byte is worth its price. ``gain``: seconds saved by the
    use of a byte, in times that the byte takes on the link; ``kernel``: the part of what lies there
    that plain reads anyway."""
    if gain <= least_gain(link):
        return 1.0
    return SHY / (gain + kernel * SHY)


def stream_gain(density: float, runs: float, backward: bool, link: Link) -> float:
    """See least_probability(). ``density``: the touched part of a stream; ``runs``: runs of touches
    a block of it. A run's miss costs its latency, and who goes on in order beyond what that brings
    half the latency, as the kernel reads ahead; backward it does not, and a miss is 1.5 times the
    latency. (What plain reads is on the link with us or without: no transfer is saved.)"""
    beyond = max(0.0, density * BLOCK_BYTES - runs * link.miss_bytes)
    in_order = link.in_order_seconds(beyond) * (3 if backward else 1)
    brings = beyond + runs * link.miss_bytes
    saved = link.beside_others(in_order + runs * link.latency_seconds, brings)
    return saved / link.stream_seconds(BLOCK_BYTES)


@dataclass
class Account:
    """Of a run. Bytes that were asked for on a guess, of them used and known to be lost; seconds
    that readers need not wait."""

    asked: int = 0
    used: int = 0
    lost: int = 0
    allowed: int = 0  # for what streams have missed: that one that goes on gets a first guess
    saved_seconds: float = 0.0
    over: int = 0  # of files that are read whole: for nothing, beyond what their visits allow

    @property
    def open(self) -> int:
        """Bytes of which it is not known yet."""
        return self.asked - self.used - self.lost

    def spare_bytes(self, own_bytes: int, free_bytes: int, share: float) -> int:
        """So many may be asked for ahead of a reader that needs none of them yet, ``own_bytes`` of
        which are already: that all of them are lost costs ``free_bytes``, and a ``share`` of what
        was used."""
        others = max(0, self.open - own_bytes)
        return max(0, free_bytes + int(share * self.used) - self.lost - self.over - others)

    def room_bytes(
        self, storage: Storage, open_share: float = OPEN_SHARE, free_bytes: int = FREE_BYTES
    ) -> int:
        """So many more may be asked for, if ``open_share`` of what is open is lost, and
        ``free_bytes`` more than are used may be, and what is allowed."""
        # of what was saved as much as costs no more
        may_lose = (FREE_SECONDS + self.saved_seconds / SHY) * storage.bandwidth_bytes_per_second
        may_lose = min(may_lose, free_bytes + self.used) + self.allowed
        return max(0, int((may_lose - self.lost - self.over) / open_share) - self.open)

    def note_use(self, used: int, was_lost: int, is_miss: bool, link: Link) -> None:
        """Bytes are used that were read on a guess, ``was_lost`` of them after all. ``is_miss``: a
        reader has come there from elsewhere, and would have waited at the first byte."""
        self.used += used
        self.lost -= was_lost
        saved = link.in_order_seconds(used)
        if is_miss:
            saved += link.miss_seconds - link.in_order_seconds(link.miss_bytes)
        self.saved_seconds += link.beside_others(saved, used)
