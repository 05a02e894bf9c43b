# SPDX-License-Identifier: Apache-2.0
"""What a process of the job has beside its mappings: state/pending.py, state/sightings.py,
native/uffd.py."""

from __future__ import annotations

import os

from uffdprefetch.native.uffd import PageTable
from uffdprefetch.protocol import wire
from uffdprefetch.state.client import Client
from uffdprefetch.state.pending import STATEMENTS_MAX, PendingMappings
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.sightings import Sightings


def said(region: int, start: int = 0) -> wire.Statement:
    return wire.Statement(region, wire.Stated.NEEDED, start, start + 4096)


def test_what_is_said_while_a_file_is_opened_is_kept_until_the_mapping_is_managed() -> None:
    pending = PendingMappings()
    pending.hear(said(5))
    pending.add(5)
    pending.hear(said(5, 4096))
    assert 5 in pending and len(pending) == 1 and pending.by_agent
    assert pending.is_open(5) and 5 not in pending
    assert pending.said_of(5) == [said(5, 4096)], "of what was no mapping nothing is kept"
    assert pending.said_of(5) == []


def test_no_more_is_kept_than_an_agent_keeps() -> None:
    pending = PendingMappings()
    pending.add(5)
    for start in range(STATEMENTS_MAX + 10):
        pending.hear(said(5, start * 4096))
    assert len(pending.said_of(5)) == STATEMENTS_MAX


def test_a_mapping_that_goes_meanwhile_is_told_when_its_file_is_open() -> None:
    pending = PendingMappings()
    pending.add(FIRST_OBSERVED)
    assert not pending.by_agent
    pending.hear(said(FIRST_OBSERVED))
    pending.drop(FIRST_OBSERVED)
    assert not pending.is_open(FIRST_OBSERVED) and pending.said_of(FIRST_OBSERVED) == []


def test_no_mapping_comes_of_a_file_that_is_open_when_its_process_is_gone() -> None:
    hello = wire.Hello(wire.Role.AGENT, os.getpid(), 0, -1, -1, -1, 0, 0, 0, 0, 0, 0, "test")
    client = Client(None, hello, os.getpid())
    client.pending.add(5)
    client.pending.hear(said(5))
    client.close()
    assert not client.pending.is_open(5) and client.pending.said_of(5) == []


def test_what_was_new_or_missing_at_one_look_is_known_at_the_next() -> None:
    sightings = Sightings(refused={4096, 8192})
    assert not sightings.was_new(12288) and not sightings.was_missing(3)
    sightings.keep_only({4096: None, 12288: None})
    sightings.note_new({12288})
    sightings.note_missing(3)
    assert sightings.refused == {4096}
    assert sightings.was_new(12288) and sightings.was_missing(3)
    sightings.note_found(3)
    sightings.note_new(set())
    assert not sightings.was_new(12288) and not sightings.was_missing(3)


def test_a_page_table_that_cannot_be_read_says_why_and_shows_nothing() -> None:
    ours, nobodys = PageTable(os.getpid()), PageTable(1 << 30)
    assert ours.is_readable and not ours.error
    assert not nobodys.is_readable and nobodys.error and nobodys.runs(0, 1 << 20) == []
    ours.close()
    assert not ours.is_readable and ours.runs(0, 1 << 20) == []
