# SPDX-License-Identifier: Apache-2.0
"""The next shard: where a reader comes to the end of a file in order, its window goes on into the
file that follows, as if the two were one.

What follows is known by its name or by the index beside it (predict/shards.py), or it is a file
that the process has mapped already and not touched. Nothing else is guessed. A file that nobody
maps is opened as one that nobody maps any more (state/admission.py): it is closed a moment after
it was last needed, at once when it is deleted or the reader's process ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from uffdprefetch.base.record import dataclass
from uffdprefetch.predict import shards
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.survival import Law
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.scheduler import GUESSED_EXTENT_BYTES, Scheduler

#: A name that counts on, or a mapping that waits, tells as much as so many files in a row that were
#: followed: the next is with 8 in 9, which pays on a link of which nothing is known yet, and where
#: four ranks of 300 MB/s and 1 ms wait side by side (predict/storage.py: 0.84, 0.87).
TOLD = 8
#: Files that may have an index beside them: formats of weights.
INDEXED = (".safetensors", ".bin", ".pt", ".pth")
INDEX = ".index.json"
#: The cache of the Hugging Face hub: MODEL/blobs has the files under their digests, MODEL/snapshots
#: for each revision links to them under their names.
BLOBS, SNAPSHOTS = "blobs", "snapshots"
#: An index of the largest models has a few MiB; more is none.
INDEX_MAX_BYTES = 64 << 20


class StreamConsumer(Consumer, Protocol):
    """Of a reader, through its file."""

    @property
    def last_ns(self) -> int:
        """When it went on last."""

    @property
    def settled(self) -> bool:
        """Whether it surely is one."""


@dataclass
class Next:
    """What follows a file. ``path``: by which it was opened; '': it was mapped already."""

    file: FileState | None = None
    path: str = ""
    opening: bool = False
    frontier_bytes: int = 0  # asked for up to here ...
    asked_ns: int = 0  # ... then, ...
    consumer: Beyond | None = None  # ... for this stream


@dataclass
class Beyond:
    """A stream seen from the file that follows: it stands before its beginning. What is read for it
    there is still wanted when its own file is unmapped, and the stream over."""

    stream: StreamConsumer
    length_bytes: int  # of the file that it is in

    def __post_init__(self) -> None:
        self.rank, self.reader = self.stream.rank, self.stream.reader
        self.direction, self.feedback = self.stream.direction, self.stream.feedback

    @property
    def position_bytes(self) -> int:
        """See Consumer."""
        return self.stream.position_bytes - self.length_bytes

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self.stream.rate_bytes_per_second

    @property
    def depth_bytes(self) -> int:
        """See Consumer."""
        return self.stream.depth_bytes

    @property
    def depth_of_all_bytes(self) -> int:
        """See Consumer."""
        return self.stream.depth_of_all_bytes

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        return self.stream.expected_bytes(now_ns, most_bytes) - self.length_bytes


class NextShard:
    """Of all files of a service, whose thread calls everything here."""

    def __init__(self, table: FileTable, opener: Opener, scheduler: Scheduler) -> None:
        self._table, self._opener, self._scheduler = table, opener, scheduler
        #: Told of a file that was read ahead and that nobody came to.
        self.in_vain: Callable[[FileState], None] = lambda file: None
        self._law = Law()  # of how many files in a row are followed
        self._right: dict[int, int] = {}  # by process, how many it has followed
        self._found: dict[Key, Next] = {}
        #: By process and the file before it: what was read ahead and is not judged yet.
        self._guesses: dict[int, dict[Key, tuple[Reader, Next]]] = {}

    def beyond(
        self, reader: Reader, stream: StreamConsumer, ahead_bytes: int, least: float, now: int
    ) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """What of the file that follows lies within ``ahead_bytes`` of a stream, if that goes on
        into it with the probability ``least``."""
        file = reader.file
        most = stream.position_bytes + ahead_bytes - file.size_bytes
        whole = reader.span.end_bytes == file.size_bytes
        if most < GUESSED_EXTENT_BYTES or not whole or stream.direction < 0 or not stream.settled:
            return
        self._judge_all(reader.pid)
        found = self._next(reader, now)
        if found is None or found.file is None:
            return
        before = found.consumer
        if (before is None or before.stream is not stream) and now - found.asked_ns > LATELY_NS:
            self._forget(found)  # somebody comes there once more
        after = found.file
        most = min(most, after.size_bytes)
        start, last = found.frontier_bytes, most == after.size_bytes
        if (
            after.guard.changed
            or most <= start
            or (most - start < GUESSED_EXTENT_BYTES and not last)
        ):
            return
        self._note(reader, found)
        if not self._law.window(self._followed(reader.pid), least, 1):
            found.frontier_bytes, found.asked_ns = most, now  # it would have been read
            return
        if after.opened.fd < 0 or after.mappings.resting:
            self._open(found, found.path or after.path, reader.pid)
            return
        pooled = reader.reads_pool
        if pooled and not self._in_pool(after):
            return
        if not after.mappings.attached:
            after.mappings.needed(now)
        found.frontier_bytes, found.asked_ns = most, now
        if found.consumer is None:
            found.consumer = Beyond(stream, file.size_bytes)
        yield found.consumer, PrefetchRange(after, start, most, pooled=pooled)

    def _in_pool(self, file: FileState) -> bool:
        """Whether the file is in the pool, or can be: before anybody maps it."""
        if file.pooled is None and self._table.pool is not None and file.copies.rw < 0:
            with contextlib.suppress(OSError):  # as a mapping it would be told why
                self._table.pool.open(file)
        return file.pooled is not None

    def awaited(self, now: int) -> Iterator[tuple[FileState, int]]:
        """Files of the pool that nobody maps yet, and up to where each was asked for, in bytes: a
        stream comes to them."""
        for found in self._found.values():
            file, consumer = found.file, found.consumer
            if file is None or consumer is None or file.pooled is None or file.mappings.attached:
                continue
            if now - consumer.stream.last_ns <= LATELY_NS:
                yield file, found.frontier_bytes

    def dismissed(self, reader: Reader) -> None:
        """Its streams say nothing any more: nor of what follows."""
        found = self._found.get(reader.file.key)
        consumer = found.consumer if found is not None else None
        if found is not None and consumer is not None and consumer.reader == reader.pid:
            self._forget(found)

    def _forget(self, found: Next) -> None:
        if found.consumer is not None:
            self._scheduler.forget(found.consumer)
        found.consumer, found.frontier_bytes = None, 0

    def _followed(self, pid: int) -> int:
        return TOLD + self._right.get(pid, 0)

    def left(self, reader: Reader) -> None:
        """The process is gone, or has mapped too many other files since: what came of the guess
        that was made at its end of the file."""
        guess = self._guesses.get(reader.pid, {}).get(reader.file.key)
        if guess is not None and guess[0] is reader:
            self._judge(reader, guess[1])

    def _judge_all(self, pid: int) -> None:
        """A process is at the end of a file: what came of its guesses before. It is known if it has
        left the file that one was made at; it has come to the one that was guessed by then."""
        for before, guess in list(self._guesses.get(pid, {}).values()):
            if before.regions:
                continue
            after = self._reader_of(before, guess)
            if after is not None and after.regions and not after.seen_ns:
                continue  # mapped, and not touched yet
            self._judge(before, guess)

    @staticmethod
    def _reader_of(before: Reader, guess: Next) -> Reader | None:
        """That its process is of the file that was guessed."""
        readers = before.client.readers.values()
        return next((one for one in readers if one.file is guess.file), None)

    def _judge(self, before: Reader, guess: Next) -> None:
        """Whether a guess was right."""
        pid, after = before.pid, self._reader_of(before, guess)
        del self._guesses[pid][before.file.key]
        if not self._guesses[pid]:
            del self._guesses[pid]
        number = self._followed(pid)
        if after is not None and after.seen_ns:
            self._law.passed(number, number + 1)
            self._right[pid] = self._right.pop(pid, 0) + 1
            if len(self._right) > ENTRIES_MAX:
                del self._right[next(iter(self._right))]
            return
        self._law.died(number)
        self._right.pop(pid, None)
        if guess.file is not None:
            self.in_vain(guess.file)

    def _note(self, reader: Reader, found: Next) -> None:
        """A guess that is to be judged."""
        guesses = self._guesses.setdefault(reader.pid, {})
        guesses.setdefault(reader.file.key, (reader, found))
        if len(self._guesses) > ENTRIES_MAX:
            del self._guesses[next(iter(self._guesses))]
        if len(guesses) > ENTRIES_MAX:
            del guesses[next(iter(guesses))]

    def _next(self, reader: Reader, now: int) -> Next | None:
        found = self._found.get(reader.file.key)
        if found is None:
            found = self._found[reader.file.key] = Next()
            if len(self._found) > ENTRIES_MAX:
                del self._found[next(iter(self._found))]
            path = reader.file.path
            directory, name = os.path.split(path)
            stored = os.path.basename(directory) == BLOBS
            if shards.successor(name) or path.endswith(INDEXED) or stored:
                self._open(found, path, reader.pid, follow=True)
        if found.file is None and not found.opening:
            found.file = self._mapped(reader)
        return found

    @staticmethod
    def _mapped(reader: Reader) -> FileState | None:
        """The first file that the process has mapped and not touched, of the same kind."""
        directory, name = os.path.split(reader.file.path)
        suffix, pooled = os.path.splitext(name)[1], reader.reads_pool
        for other in reader.client.readers.values():
            there, called = os.path.split(other.file.path)
            same = there == directory and os.path.splitext(called)[1] == suffix
            if other.regions and not other.seen_ns and same and other.reads_pool == pooled:
                return other.file
        return None

    def _open(self, found: Next, path: str, pid: int, follow: bool = False) -> None:
        """Open the file of a path, or the one that follows it."""
        if found.opening:
            return
        found.opening = True
        what = (lambda: path_after(path)) if follow else path
        self._opener.open(what, lambda opened: self._opened(found, opened, pid))

    def _opened(self, found: Next, opened: Opened | OSError, pid: int) -> None:
        found.opening = False
        if isinstance(opened, OSError):
            return
        try:
            found.file = self._table.ahead(opened, pid)
        except (OSError, MemoryError):
            return
        if found.file is not None:
            found.path = found.file.path


def path_after(path: str) -> str:
    """The path of the shard after that of ``path``. Reads the directory, and may wait for storage.
    Raises OSError where there is none."""
    directory, name = os.path.split(path)
    if os.path.basename(directory) == BLOBS:
        directory, name = _link_to(path)
    following = shards.successor(name)
    if following is None:
        for index in sorted(Path(directory).glob(f"*{INDEX}"))[:8]:
            following = following or _after_in(index, name)
    if following is None:
        raise FileNotFoundError(errno.ENOENT, "no shard follows")
    return os.path.join(directory, following)


def _link_to(path: str) -> tuple[str, str]:
    """(directory, name) under which the hub's cache has a file of its blobs. Raises OSError."""
    blobs, digest = os.path.split(path)
    for link in Path(blobs).with_name(SNAPSHOTS).glob("*/*"):
        if link.is_symlink() and os.path.basename(os.readlink(link)) == digest:
            return str(link.parent), link.name
    raise FileNotFoundError(errno.ENOENT, "no name of it")


def _after_in(index: Path, name: str) -> str | None:
    try:
        if index.stat().st_size > INDEX_MAX_BYTES:
            return None
        weights = json.loads(index.read_bytes())["weight_map"]
        return shards.after(name, weights.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # another kind of file
