# SPDX-License-Identifier: Apache-2.0
"""sense/checkpoint_events.py: what follows from the touch of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from guess_bed import BLOCK, MIB, MS, Bed

from uffdprefetch.native import uffd
from uffdprefetch.sense.observation import Batch
from uffdprefetch.state.files import FileState

pytest_plugins = ("guess_bed",)


class Touched(Bed):
    """A mapping with one checkpoint at 16 MiB; what its predictors are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: FileState) -> None:
        super().__init__(monkeypatch)
        self.mapping, self.told = self.region(file), list[Batch]()
        self.page = 16 * MIB // uffd.PAGE_BYTES
        self.mapping.checkpoints.laid = {self.page}
        self.mapping.scan.due_ns = self.now + 10**9
        observe = self.arbiter.observe
        monkeypatch.setattr(
            self.arbiter, "observe", lambda batch: self.told.append(batch) or observe(batch)
        )

    def fires(self) -> None:
        """A thread has read from 12 MiB on, up to the checkpoint, and the ring tells."""
        client: Any = self.mapping.reader.client
        start = self.mapping.address_of(12 * MIB)
        client.mapped.add(start, start + 4 * MIB + uffd.PAGE_BYTES)
        self.now += MS
        event = uffd.Event(self.now, self.page, self.mapping.id, 0, 3, 0)
        self.core.events.take(client, [event])


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch, file: FileState) -> Touched:
    return Touched(monkeypatch, file)


def test_the_touch_of_a_checkpoint_has_page_tables_looked_at_in_the_same_turn(
    touched: Touched,
) -> None:
    touched.fires()
    assert not touched.told, "page tables tell more, and of it all at once"
    touched.core.look(touched.now)
    (batch,) = touched.told
    assert batch.found == [(12 * MIB, 16 * MIB + uffd.PAGE_BYTES)]
    assert [(seen.start, seen.end) for seen in batch.touches] == batch.found
    touched.core.plan()
    touched.scheduler.pump(touched.now)
    assert touched.sent, "in that turn what comes next is asked for"


def test_where_no_page_table_can_be_read_the_touch_itself_tells(touched: Touched) -> None:
    touched.mapping.reader.client.page_table.is_readable = False  # type: ignore[misc]
    touched.fires()
    (batch,) = touched.told
    assert [(seen.start, seen.end, seen.told) for seen in batch.touches] == [
        (16 * MIB, 16 * MIB + uffd.PAGE_BYTES, True)
    ]
    touched.core.plan()
    touched.scheduler.pump(touched.now)
    assert touched.sent and all(start >= 16 * MIB + BLOCK for start, _ in touched.sent)
