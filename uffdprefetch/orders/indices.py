# SPDX-License-Identifier: Apache-2.0
"""Record indices of files, made by the indexer (orders/indexer.py) asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

from uffdprefetch.orders.indexer_client import Answer, IndexerClient

if TYPE_CHECKING:  # it brings numpy, which a service that needs none spares
    from uffdprefetch.formats.index import RecordIndex


class IndexedFile(Protocol):
    """A file that may have an index."""

    path: str
    size_bytes: int

    @property
    def key(self) -> Hashable:
        """What tells it from others, and from what it was before it was changed."""


class IndexSource(Protocol):
    """Where the indices of files come from; never blocks."""

    def get(self, file: IndexedFile) -> RecordIndex | None:
        """The index; None: not yet, or never. The first call asks for it."""

    def why_not(self, file: IndexedFile) -> str | None:
        """Why there will be none, in one line."""


class Indices:
    """See IndexSource: by the helper process (orders/indexer_client.py), mapped. ``on_ready`` is
    called when one has come."""

    def __init__(self, indexer: IndexerClient, on_ready: Callable[[], None]) -> None:
        self._indexer, self._on_ready = indexer, on_ready
        self._found: dict[Hashable, RecordIndex | str | None] = {}

    def get(self, file: IndexedFile) -> RecordIndex | None:
        if file.key not in self._found:
            self._found[file.key] = None

            def done(answer: Answer) -> None:
                self._found[file.key] = self._opened(file, answer)
                self._on_ready()

            self._indexer.ask({"do": "index", "path": file.path}, done)
        found = self._found[file.key]
        return None if isinstance(found, str) else found

    def why_not(self, file: IndexedFile) -> str | None:
        found = self._found.get(file.key)
        return found if isinstance(found, str) else None

    def _opened(self, file: IndexedFile, answer: Answer) -> RecordIndex | str:
        if "error" in answer:
            return str(answer["error"])
        index = self._indexer.index(answer["index"])
        if index is None or index.file_bytes != file.size_bytes:
            return "its index cannot be mapped"
        return index
