# SPDX-License-Identifier: Apache-2.0
"""Opens that are told before their file has a number."""

from __future__ import annotations

import pytest

from uffdprefetch.trace.file.events import Kind, empty
from uffdprefetch.trace.record import seen_opens
from uffdprefetch.trace.record.seen_opens import SeenOpens

KEY, OTHER = (8, 1), (8, 2)


def an_open(value: int = 5) -> seen_opens.Array:
    event = empty(1)
    event["kind"], event["value"] = Kind.CALL, value
    return event


def test_an_open_waits_for_the_number_that_its_file_gets_when_it_is_read() -> None:
    opens = SeenOpens()
    assert not len(opens.note(KEY, an_open(1))) and not len(opens.note(KEY, an_open(2)))
    assert not len(opens.note(OTHER, an_open(3)))
    found = opens.named(KEY, 7)
    assert [(int(one["file"][0]), int(one["value"][0])) for one in found] == [(7, 1), (7, 2)]
    assert opens.named(KEY, 7) == []
    later = opens.note(KEY, an_open(4))
    assert int(later["file"][0]) == 7, "it has one by now"


def test_one_that_nobody_reads_is_told_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = SeenOpens()
    opens.note(KEY, an_open())
    assert opens.unnamed() == []
    (left,) = opens.unnamed(at_the_end=True)
    assert int(left["file"][0]) == 0
    monkeypatch.setattr(seen_opens, "WAIT_NS", 0)
    opens.note(KEY, an_open())
    assert len(opens.unnamed()) == 1, "its time is over"


def test_no_more_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_opens, "WAITING_MAX", 2)
    opens = SeenOpens()
    for inode in range(3):
        opens.note((8, inode), an_open(inode))
    assert [int(one["value"][0]) for one in opens.unnamed()] == [0]
