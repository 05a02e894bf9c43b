# SPDX-License-Identifier: Apache-2.0
"""Small files that are read ahead whole, for whoever knows their names, and the books of that."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.base.file_systems import PREAD, READAHEAD, FileSystem
from uffdprefetch.base.units import MIB
from uffdprefetch.native.paths import (
    Keeping,
    PathDone,
    PathProbe,
    PathReader,
    PathRequest,
    PathState,
)
from uffdprefetch.predict.storage import BLOCK_BYTES, Account, Link
from uffdprefetch.sense.opens import Opens
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import OPENS_MAX, Opener
from uffdprefetch.warm.token_bucket import TokenBucket

#: A file is read no further than so many times the mean of those before it: one that is larger by
#: far is followed as it is read (opened_files.py).
MEANS = 4
#: Directories that are unmarked at a time, of OPENS_MAX that may wait for storage: a whole tree may
#: be left at once, and files that are mapped are opened meanwhile.
UNMARKING_MOST = OPENS_MAX // 8
#: A file that is held for its job is held for so long after it was opened: a small file is read,
#: and decoded, and closed by then. Who closes last asks the server.
READ_NS = 100 * MS
#: Guessed files are ahead of their readers by no more than so many bytes, and so large a part of
#: what was used: they may stop there. Storage of a GB/s needs 4 ms for that.
AHEAD_BYTES = 4 * MIB
AHEAD_PART = 20
_UNKNOWN = FileSystem("unknown")


class Mounts:
    """By device, whether a mount's page cache keeps what is read, until another opens it; and which
    file system it is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rows: dict[int, FileSystem] = {}
        self._keeps: dict[int, bool | None] = {}  # None: it is being found out

    def is_known(self, device: int) -> bool:
        """Whether nobody needs to find out."""
        return device in self._keeps

    def asked(self, device: int) -> None:
        """It is being found out."""
        self._keeps[device] = None

    def unanswered(self, device: int) -> None:
        """It could not be found out: by the next one."""
        if self._keeps.get(device, False) is None:
            del self._keeps[device]

    def drops(self, device: int) -> bool:
        """Whether it does not, for sure."""
        return self._keeps.get(device, True) is False

    def keeps(self, device: int) -> bool:
        """Whether it does, as far as is known."""
        return bool(self._keeps.get(device))

    def file_system(self, device: int) -> FileSystem:
        """Its row in the table, as a probe has found it."""
        return self._rows.get(device, _UNKNOWN)

    @property
    def uncounted(self) -> list[str]:
        """File systems whose reads the kernel counts for no process (FileSystem.counts_reads)."""
        return sorted({row.name for row in self._rows.values() if row.counts_reads is False})

    def note(self, device: int, probe: PathProbe, path: str) -> None:
        """What a probe of it says."""
        keeping = probe.keeping
        keeps = keeping not in (Keeping.NOTHING, Keeping.WHILE_OPEN)
        self._keeps[device], self._rows[device] = keeps, probe.file_system
        if not keeps:
            self._ledger.leave_alone(
                f"its small files are left to the kernel: its file system keeps {keeping.value}",
                path,
            )


class NamesAhead(Protocol):
    """Who wants files of a group, a number that nobody else has."""

    def path_of(self, name: str) -> str:
        """The path of a file, as the service can open it. Raises OSError: it cannot."""

    def came(self, name: str, done: PathDone) -> None:
        """What became of a request."""


@dataclass
class SmallFileCounts:
    """Of a run: files, and their bytes."""

    directories: int = 0
    read: int = 0
    read_bytes: int = 0
    used: int = 0
    used_bytes: int = 0
    there: int = 0


class _Request(NamedTuple):
    by: NamesAhead
    group: int
    name: str
    is_guess: bool
    mean_bytes: int  # as it was then


@dataclass
class _AheadFile:
    """A file that is ahead of the job, by the request ``id``. ``is_held``: it is, or will be, open
    until its job has opened it; ``bytes``: read of it, 0: it is being read, or was there;
    ``is_lost``: it is thought not to be opened any more."""

    id: int
    is_held: bool
    bytes: int = 0
    is_lost: bool = False


class ReadBounds:
    """What all that a service reads keeps to: --max-rate, and what memory leaves."""

    def __init__(
        self, bucket: TokenBucket, allowed_bytes: Callable[[], int], clock: Clock = CLOCK
    ) -> None:
        self._bucket, self._allowed_bytes, self._clock = bucket, allowed_bytes, clock

    def allow(self, ahead_bytes: int) -> bool:
        """Whether more may be read now, where so much lies ahead."""
        return ahead_bytes < self._allowed_bytes() and not self._bucket.wait_ns(
            self._clock.now_ns()
        )

    def take(self, read_bytes: int) -> None:
        """So much is read; below 0: less was than was thought."""
        self._bucket.take(read_bytes)


class SmallReads:
    """Of one service, whose thread calls everything here."""

    def __init__(
        self, reader: PathReader, most_bytes: int, account: Account,
        measured: Callable[[], Link], bounds: ReadBounds,
    ) -> None:  # fmt: skip
        """``most_bytes``: a file that is as large is none; ``account``: of all guesses of the run;
        ``measured``: the link."""
        self._reader, self._most_bytes = reader, most_bytes
        self._account, self._measured, self._bounds = account, measured, bounds
        self._open_bytes = 0  # read, and neither opened nor left ...
        self._guessed_bytes = 0  # ... and on a guess
        self._requests: dict[int, _Request] = {}
        #: By group, files that are being read, were read, or are held open, and not opened since.
        self._ahead: dict[int, dict[str, _AheadFile]] = {}
        self._number = 0
        self.counts = SmallFileCounts()
        self._group_counts: dict[int, SmallFileCounts] = {}

    @property
    def mean_bytes(self) -> int:
        """Of a file."""
        return self.counts.read_bytes // self.counts.read if self.counts.read else BLOCK_BYTES

    @property
    def room_files(self) -> int:
        """How many files more may be guessed, by the account and by what is ahead; one, where
        nothing is, however large it may be."""
        mean_bytes = self.mean_bytes
        under_way_bytes = len(self._requests) * mean_bytes
        if self._account.room_bytes(self._measured()) <= under_way_bytes:
            return 0
        ahead_bytes = self._guessed_bytes + under_way_bytes
        room_bytes = AHEAD_BYTES + self.counts.used_bytes // AHEAD_PART - ahead_bytes
        return max(room_bytes // mean_bytes, int(not ahead_bytes))

    def read(
        self, by: NamesAhead, group: int, name: str, probe: bool = False, is_guess: bool = True,
        on: FileSystem = _UNKNOWN,
    ) -> bool:  # fmt: skip
        """Have a file read. ``probe``: only to find out what its mount keeps (PathDone.probe);
        ``is_guess``: it goes to the account; ``on``: where it lies. False: not now, too much is
        under way or ahead."""
        mean_bytes = self.mean_bytes
        if not self._bounds.allow(self._open_bytes + len(self._requests) * mean_bytes):
            return False
        try:
            path = by.path_of(name)
        except OSError:  # its process has ended
            return False
        self._number += 1
        most_bytes = min(self._most_bytes, max(MIB, MEANS * mean_bytes))
        hold = on.opens_held and not probe
        request = PathRequest(
            self._number, path, group=group, most_bytes=most_bytes, probe=probe, hold=hold,
            method=PREAD if on.call == PREAD else READAHEAD,
        )  # fmt: skip
        if not self._reader.submit(request):
            return False
        self._bounds.take(mean_bytes)
        self._requests[self._number] = _Request(by, group, name, is_guess, mean_bytes)
        if not probe:
            self._ahead.setdefault(group, {})[name] = _AheadFile(self._number, hold)
            self._group_counts.setdefault(group, SmallFileCounts())
        return True

    def reap(self) -> list[NamesAhead]:
        """Book what has come: whose it was."""
        whose = dict[int, NamesAhead]()
        for done in self._reader.reap():
            request = self._requests.pop(done.id)
            whose[id(request.by)] = request.by
            self._bounds.take((done.bytes if done.waited else 0) - request.mean_bytes)
            if done.state is PathState.DONE and done.probe is None and done.waited:
                self._book(request, done)
            else:
                self.counts.there += done.state is PathState.DONE and done.probe is None
                if not done.held:
                    self._ahead.get(request.group, {}).pop(request.name, None)
            request.by.came(request.name, done)
        return list(whose.values())

    def _book(self, request: _Request, done: PathDone) -> None:
        for counts in self._counts_with(request.group):
            counts.read += 1
            counts.read_bytes += done.bytes
        if request.is_guess:
            self._account.asked += done.bytes
        group = self._ahead.get(request.group)
        file = group.get(request.name) if group is not None else None
        if file is not None:
            file.bytes, file.is_held = done.bytes, done.held
            self._lie_ahead(done.bytes, request.is_guess and not file.is_lost)
        is_lost = file.is_lost if file is not None else group is None  # left meanwhile
        if is_lost and request.is_guess:
            self._account.lost += done.bytes
        if group is not None and file is None:
            came = _AheadFile(done.id, False, done.bytes)
            self._used(request.group, came, request.is_guess)

    def opened(self, group: int, name: str, is_guess: bool = True) -> None:
        """The job has opened a file."""
        file = self._ahead.get(group, {}).pop(name, None)
        if file is None:
            return
        if file.is_held:
            self._reader.release(file.id, READ_NS)
        if file.bytes:
            self._lie_ahead(-file.bytes, is_guess and not file.is_lost)
            self._used(group, file, is_guess)

    def _lie_ahead(self, more_bytes: int, is_guess: bool) -> None:
        self._open_bytes += more_bytes
        self._guessed_bytes += more_bytes if is_guess else 0

    def _used(self, group: int, file: _AheadFile, is_guess: bool) -> None:
        for counts in self._counts_with(group):
            counts.used += 1
            counts.used_bytes += file.bytes
        if is_guess:
            was_lost = file.bytes if file.is_lost else 0
            self._account.note_use(file.bytes, was_lost, True, self._measured())

    def counts_of(self, group: int) -> SmallFileCounts:
        """Of a group, until it is left."""
        return self._group_counts.get(group) or SmallFileCounts()

    def _counts_with(self, group: int) -> Iterator[SmallFileCounts]:
        """The run's, and the group's."""
        yield self.counts
        if group in self._group_counts:
            yield self._group_counts[group]

    def lost(self, group: int, name: str) -> None:
        """A file of a guess, read ahead or not, is thought not to be opened any more."""
        file = self._ahead.get(group, {}).get(name)
        if file is not None and not file.is_lost:
            file.is_lost = True
            self._account.lost += file.bytes
            self._guessed_bytes -= file.bytes

    def withdraw(self, group: int) -> None:
        """What was not begun is not read."""
        self._reader.withdraw(group)

    def leave(self, group: int, is_guess: bool = True) -> None:
        """Nobody wants files of a group any more: what was not opened is lost."""
        self._reader.withdraw(group)
        files = self._ahead.pop(group, {}).values()
        if any(file.is_held for file in files):
            self._reader.release_group(group)
        self._group_counts.pop(group, None)
        for file in files:
            self._lie_ahead(-file.bytes, is_guess and not file.is_lost)
            self._account.lost += file.bytes if is_guess and not file.is_lost else 0

    def close(self) -> None:
        """End it."""
        self._reader.close()


class Watching:
    """What all need who read small files ahead: ``opens`` tells of names, ``reads`` reads,
    ``opener`` does what may wait, ``mounts`` knows which of them keep what is read."""

    def __init__(self, opens: Opens, reads: SmallReads, opener: Opener, ledger: Ledger) -> None:
        self.opens, self.reads, self.opener = opens, reads, opener
        self.mounts = Mounts(ledger)
        self._left = deque[int]()  # keys of directories that are to be unmarked
        self._unmarking = 0  # threads
        self._ledger = ledger
        self._refused = {errno.EBUSY, errno.ENOSPC, errno.E2BIG}  # for people (Opens.mark())

    def refused(self, directory: str, error: OSError) -> None:
        """A directory is not watched: say why, once for each reason."""
        if error.errno in self._refused:
            self._refused.remove(error.errno)
            self._ledger.leave_alone(
                f"its small files are not read ahead: {error.strerror}", directory
            )

    def leave(self, key: int) -> None:
        """Who had a directory marked (Opens.mark()) wants it watched no more."""
        self._left.append(key)
        self.step()

    @property
    def active(self) -> bool:
        """Whether step() is to be called."""
        return bool(self._left)

    def step(self) -> None:
        """Unmark what was left, where that waits for nobody else's opens."""

        def unmarked(_: OSError | None) -> None:
            self._unmarking -= 1
            self.step()

        while self._left and self._unmarking < UNMARKING_MOST:
            key = self._left[0]
            if not self.opener.run(partial(self.opens.unmark, key), unmarked):
                return
            self._left.popleft()
            self._unmarking += 1

    def close(self) -> None:
        """End it."""
        self.reads.close()
        self.opens.close()
