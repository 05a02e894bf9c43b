# SPDX-License-Identifier: Apache-2.0
"""The helper process that finds the bytes of orders, which only takes notes; and a job for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned_readers import SIZE, Notes, order
from walked_orders import PAGE

from tests.support.file_states import file_of
from uffdprefetch.base.clock import MS, Clock
from uffdprefetch.predict.order.extents import OrderExtents
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.known_order import KnownOrders
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, reader_of


class Helper:
    """A resolver: the questions, and how to answer them. Orders are what is put there."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.fd, self.starts = str(directory), -1, 0
        self.asked: list[dict[str, Any]] = []
        self._done: list[Callable[[dict[str, Any]], None]] = []
        self.orders: dict[str, OrderExtents | Exception] = {}

    def start(self) -> bool:
        self.starts += 1
        return True

    def ask(self, question: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        self.asked.append(question)
        self._done.append(done)

    def answer(self, number: int = -1, **answer: Any) -> None:
        self._done[number](answer)

    def order(self, told: str) -> OrderExtents:
        found = self.orders[told]
        if isinstance(found, Exception):
            raise found
        return found


class Job:
    """Processes, their files, and the service's part."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.came = 1000 * MS, 0
        self.directory, self.helper, self.ledger = directory, Helper(directory), Ledger()
        self.helper.orders["some"] = OrderExtents.of(order(range(100, 200)), SIZE, PAGE)
        self.helper.orders["more"] = OrderExtents.of(order(range(500, 520)), SIZE, PAGE)
        self.scheduler = Notes()
        clock = Clock(lambda: self.now)
        self.known_orders = KnownOrders(self.scheduler, self.ledger, clock)  # type: ignore[arg-type]
        self.clients: list[Any] = []
        self.files: dict[str, Any] = {}

    def comes(self) -> None:
        self.came += 1

    def file(self, path: str) -> Any:
        number = len(self.files) + 1
        return self.files.setdefault(path, file_of(SIZE, path, number))

    def process(self, pid: int, rank: int, *paths: str, parents: tuple[int, ...] = ()) -> Any:
        """One that maps these, at addresses of its own."""
        client: Any = SimpleNamespace(
            pid=pid, rank=rank, world=8, regions={}, readers={},
            descends_from=lambda peer: peer == pid or peer in parents,
        )  # fmt: skip
        for number, path in enumerate(paths):
            file = self.file(path)
            client.regions[number] = SimpleNamespace(
                file=file, address=pid << 32, offset_bytes=4096, length_bytes=SIZE,
                reader=reader_of(client, file), mode=ServingMode.PAGE_TABLES,
            )  # fmt: skip
        self.clients.append(client)
        return client


def only(client: Any) -> Reader:
    """What a process is of the file that it maps."""
    reader: Reader = client.regions[0].reader
    return reader
