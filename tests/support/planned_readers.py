# SPDX-License-Identifier: Apache-2.0
"""Planned readers (readers/known_order.py) of orders that are made up; without a service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from walked_orders import KIB, PAGE, fixed_records

from tests.support.file_states import file_of
from uffdprefetch.predict.order.order import Order
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.known_order import PlannedReader
from uffdprefetch.state.reader import Region, reader_of
from uffdprefetch.warm.consumer import PrefetchRange

RECORD = 64 * KIB
RECORDS = 4096
SIZE = RECORDS * RECORD
MS = 1_000_000


def order(records: Iterable[int]) -> Order:
    return fixed_records(np.array([*records]), RECORD)


class Orders:
    """A source: the orders that have come, how many epochs there are, which were asked for."""

    how = "a test"
    exact = False

    def __init__(self, *orders: Iterable[int], epochs: int | None = None) -> None:
        self.come = dict(enumerate(map(order, orders)))
        self.epochs = len(orders) if epochs is None else epochs
        self.asked: set[int] = set()

    def order(self, epoch: int) -> Any:
        self.asked.add(epoch)
        return self.come.pop(epoch, None)

    def over(self, epoch: int) -> bool:
        return epoch >= self.epochs


def region_of(client: Any, file: Any, mode: ServingMode = ServingMode.CHECKPOINTS) -> Region:
    reader = reader_of(client, file)
    region = Region(1, file, 1 << 40, SIZE, 0, mode, reader)
    reader.add(region)
    return region


def follows(source: Orders, rank: int = 0) -> PlannedReader:
    return PlannedReader(file_of(SIZE, "/data/records"), rank, source)


def reads(reader: PlannedReader, records: Iterable[int], now: int = 1) -> None:
    """Its touch of each of them is told."""
    for record in records:
        reader.saw(record * RECORD, record * RECORD + PAGE, now)


def found(records: Iterable[int]) -> list[tuple[int, int]]:
    """Their ranges, as a look into a page table finds them."""
    return [(record * RECORD, (record + 1) * RECORD) for record in records]


def place(reader: PlannedReader) -> tuple[int, int]:
    assert reader.cursor is not None
    return reader.epoch, reader.cursor.position


class Notes:
    """A scheduler: the streams whose windows were taken away, the ranges that were wanted."""

    def __init__(self) -> None:
        self.forgotten: list[Any] = []
        self.wanted: list[tuple[int, int]] = []

    def forget(self, stream: Any) -> None:
        self.forgotten.append(stream)

    def want(self, consumer: Any, wanted: PrefetchRange) -> None:
        self.wanted.append((wanted.start, wanted.end))
