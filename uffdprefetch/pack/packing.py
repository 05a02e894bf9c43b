# SPDX-License-Identifier: Apache-2.0
"""The steps of `uffdprefetch pack`: what there is, read by many, written by one, in one order."""

from __future__ import annotations

import os
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, usage_error
from uffdprefetch.data.codec import Codec
from uffdprefetch.data.layout import Entry, PackDescription, shown
from uffdprefetch.pack import compress
from uffdprefetch.pack.found import Found, LeftOut
from uffdprefetch.pack.in_order import in_order
from uffdprefetch.pack.reading import Packable, WholeFileReader
from uffdprefetch.pack.stored import Stored, has_begun
from uffdprefetch.pack.tars import members
from uffdprefetch.pack.walk import walk
from uffdprefetch.pack.writer import PackWriter


@dataclass(frozen=True)
class PackOptions:
    """What is asked for. ``seed``: of `--shuffle`; ``level``: of `--compress`."""

    sources: tuple[str, ...]
    output: str
    seed: int | None = None
    level: int | None = None
    resume: bool = False


@dataclass(frozen=True)
class PackedResult:
    """What came of it. ``gone``: files of the database that are in no source any more."""

    description: PackDescription
    written: int
    left_out: LeftOut
    gone: int


class Sources:
    """Directories and tars. Raises UffdPrefetchError (2) for what is neither, or not there."""

    def __init__(self, roots: Sequence[str], left_out: LeftOut) -> None:
        self.roots = tuple(os.path.abspath(root) for root in roots)
        self._left_out = left_out
        self._tars = [_is_tar(root) for root in self.roots]

    @property
    def all_directories(self) -> bool:
        return not any(self._tars)

    def files(self, seed: int | None = None) -> Iterator[Found]:
        """All files, in the order of the sources, or shuffled."""
        if seed is None:
            return self._in_order(self._left_out)
        if not self.all_directories:
            raise usage_error(
                "--shuffle: a tar is read from its beginning to its end: unpack it first"
            )
        found = list(self._in_order(self._left_out))
        random.Random(seed).shuffle(found)
        return iter(found)

    def sample(self) -> list[bytes]:
        """Bytes of some files."""
        quiet = LeftOut(lambda text: None)
        if self.all_directories:
            return compress.drawn(self._in_order(quiet))
        share = -(-compress.SAMPLE // len(self.roots))
        each = (islice(self._of(number, quiet), share) for number in range(len(self.roots)))
        return compress.first(found for some in each for found in some)

    def _in_order(self, left_out: LeftOut) -> Iterator[Found]:
        for number in range(len(self.roots)):
            yield from self._of(number, left_out)

    def _of(self, number: int, left_out: LeftOut) -> Iterator[Found]:
        take = members if self._tars[number] else walk
        return take(os.fsencode(self.roots[number]), number, left_out)


def _is_tar(root: str) -> bool:
    if os.path.isdir(root):
        return False
    if not os.path.lexists(root):
        raise usage_error(f"{root}: there is no such directory or tar")
    try:
        if tarfile.is_tarfile(root):
            return True
    except OSError as error:
        raise UffdPrefetchError(f"cannot read {root}: {error.strerror}") from None
    raise usage_error(f"{root}: neither a directory nor a tar")


# ---- packing -------------------------------------------------------------------------------------


def pack(options: PackOptions, say: Callable[[str], None]) -> PackedResult:
    """Pack. ``say``: told of each file that is left out, and of the sample.

    Raises UffdPrefetchError: 1 when a tar or the database cannot be read or written, 2 for wrong
    usage and a damaged database.
    """
    left_out = LeftOut(say)
    sources = Sources(options.sources, left_out)
    before = _before(options, sources)
    if before is None:
        codec = _codec(options, sources, say)
        level = None if codec is None else codec.level
        description = PackDescription(sources.roots, options.seed, options.level, level)
        writer = PackWriter(options.output, description, b"" if codec is None else codec.dictionary)
        stored: Mapping[int, Entry] = {}
    else:
        description, dictionary, stored = before
        codec = None if description.level is None else Codec(description.level, dictionary)
        writer = PackWriter(options.output)
    try:
        found = sources.files(description.seed)
        books = _Books(stored, sources.roots, left_out)
        reader = WholeFileReader(books.stored, None if codec is None else codec.encode)
        for each in in_order(found, reader.read):
            if books.takes(each):
                assert each.entry is not None
                writer.put(books.number(each.entry), each.entry, each.value)
        writer.flush()
        description = replace(
            description, count=books.count, size_bytes=books.size_bytes, complete=True
        )
        writer.complete(description)
    except (UffdPrefetchError, KeyboardInterrupt):
        _keep(writer)
        raise
    finally:
        writer.close()
    return PackedResult(description, writer.written, left_out, len(books.unseen))


def _keep(writer: PackWriter) -> None:
    """What was read by now is kept, if it can be."""
    try:
        writer.flush()
    except UffdPrefetchError:
        pass


def _before(
    options: PackOptions, sources: Sources
) -> tuple[PackDescription, bytes, Mapping[int, Entry]] | None:
    """What the database has of an earlier run; None: it is a new one."""
    if not os.path.lexists(options.output):
        return None
    if not os.path.isdir(options.output):
        raise usage_error(f"{options.output}: it is there, and no directory of an LMDB")
    some = os.listdir(options.output)
    if some and not options.resume:
        raise usage_error(f"{options.output}: it is there: --resume goes on with it, or remove it")
    if not has_begun(options.output):
        return None
    with Stored(options.output) as stored:
        description = stored.description
        for what, asked, found in (
            ("SOURCE", list(sources.roots), list(description.roots)),
            ("--shuffle", options.seed, description.seed),
            ("--compress", options.level, description.asked_level),
        ):
            if asked is not None and asked != found:
                raise usage_error(
                    f"{what} {_told(asked)}: {options.output} was packed with {_told(found)}:"
                    " --resume wants the same, or name another database"
                )
        stored.check_lookups()
        return description, stored.dictionary, stored.entries


def _told(value: object) -> str:
    if isinstance(value, list):
        return " ".join(shown(os.fsencode(root)) for root in value)
    return "none" if value is None else str(value)


def _codec(options: PackOptions, sources: Sources, say: Callable[[str], None]) -> Codec | None:
    if options.level is None:
        return None
    trial = compress.tried(sources.sample(), options.level)
    say(trial.text)
    return trial.codec


class _Books:
    """Which files the database has, by which numbers, and which of them were seen again."""

    def __init__(
        self, entries: Mapping[int, Entry], roots: Sequence[str], left_out: LeftOut
    ) -> None:
        self.stored = {entry.path: entry for entry in entries.values()}
        self.unseen = set(self.stored)
        self.size_bytes = sum(entry.size_bytes for entry in entries.values())
        self._roots, self._left_out = roots, left_out
        #: path -> number, source, size.
        self._taken = {
            entry.path: (number, entry.source, entry.size_bytes)
            for number, entry in entries.items()
        }
        self._next = max(entries, default=-1) + 1

    @property
    def count(self) -> int:
        return len(self._taken)

    def takes(self, read: Packable) -> bool:
        """Whether it is to be written; names what is left out."""
        path = read.found.path
        _, source, _ = self._taken.get(path, (0, read.found.source, 0))
        if source != read.found.source:
            root = shown(os.fsencode(self._roots[source]))
            self._left_out.name(path, f"{root} has a file of this path, too, which is packed")
            return False
        self.unseen.discard(path)
        if read.why:
            self._left_out.name(path, read.why)
        return read.entry is not None

    def number(self, entry: Entry) -> int:
        """Of a file that is written: that of the one before of its path, or the next."""
        number, _, before = self._taken.get(entry.path, (self._next, 0, 0))
        self._next = max(self._next, number + 1)
        self.size_bytes += entry.size_bytes - before
        self._taken[entry.path] = number, entry.source, entry.size_bytes
        return number


def status(result: PackedResult) -> int:
    """0: the database has all files as they are; 1: some were named."""
    return EXIT_CANNOT if result.left_out.named or result.gone else 0
