# SPDX-License-Identifier: Apache-2.0
"""A plan file's entry for one data file: the files it covers and each rank's order."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.formats.detect import data_file
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.orders import stated

#: Key of the order of ranks that are not named.
ANY_RANK = "*"
#: Files that one glob may match.
MATCHES_MAX = 10_000

Identity = tuple[int, int]  # device, inode


Spec = TypeVar("Spec")


def spec_of(
    epochs: Sequence[Mapping[str, Spec]], repeat: bool, rank: int | None, epoch: int
) -> Spec | None:
    """The order of a rank (None: not known) in an epoch, from 0 on; the last one's go on where they
    ``repeat``."""
    if epoch >= len(epochs) and repeat:
        epoch = len(epochs) - 1
    if not 0 <= epoch < len(epochs):
        return None
    ranks = epochs[epoch]
    return ranks.get(str(rank), ranks.get(ANY_RANK))


@dataclass(frozen=True, eq=False)
class FilePlan:
    """The plan file's entry for one data file, or for all that a glob matches."""

    where: str
    file: str  # absolute; a glob if is_glob
    is_glob: bool
    unit: str
    format: str | None
    options: FormatOptions
    epochs: Sequence[Mapping[str, stated.OrderSpec]]  # rank, or ANY_RANK -> its order
    repeat: bool  # the last epoch's orders go on

    def spec(self, rank: int | None, epoch: int) -> stated.OrderSpec | None:
        """The order of a rank (None: not known) in an epoch, from 0 on."""
        return spec_of(self.epochs, self.repeat, rank, epoch)

    def data_files(self) -> list[str]:
        """The existing files that it covers. Raises UffdPrefetchError when there is none."""
        if not self.is_glob:
            return [_data_file(self.where, self.file)]
        found = list(itertools.islice(glob.iglob(self.file), MATCHES_MAX + 1))
        if not found:
            raise usage_error(f"{self.where}.file: no file is meant by {self.file}")
        if len(found) > MATCHES_MAX:
            raise usage_error(f"{self.where}.file: {self.file} means more than {MATCHES_MAX} files")
        return sorted(_data_file(self.where, name) for name in found)

    def is_of(self, path: str, identity: Identity | None) -> bool:
        """Whether it covers the file with this path, or with this device and inode."""
        if self.is_glob:
            names = {path, os.path.dirname(path), os.path.realpath(path)}
            return any(fnmatch.fnmatchcase(name, self.file) for name in names)
        try:
            name = data_file(self.file)
            status = os.stat(name)
        except (OSError, ValueError, UffdPrefetchError):
            return False
        if identity is not None:
            return (status.st_dev, status.st_ino) == identity
        return os.path.realpath(name) == os.path.realpath(path)

    def index(self, path: str) -> RecordIndex | None:
        """Index of a data file, from the node's cache; None for byte ranges, which need none."""
        from uffdprefetch.formats.cache import open_cached

        return None if self.unit == "bytes" else open_cached(path, self.format, self.options)


def _data_file(where: str, name: str) -> str:
    try:
        found = data_file(name)
        os.stat(found)
    except OSError as error:
        raise usage_error(f"{where}.file: cannot read {name}: {error.strerror}") from None
    except UffdPrefetchError as error:
        raise usage_error(f"{where}.file: {error.message}") from None
    return found
