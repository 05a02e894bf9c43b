# SPDX-License-Identifier: Apache-2.0
"""Guesses where a request costs more than its bytes: what it brings is what the account has."""

from __future__ import annotations

from pathlib import Path

import pytest
from guess_bed import BLOCK, MIB, SIZE, Bed, opened

from uffdprefetch.base.file_systems import LUSTRE_RPC_BYTES
from uffdprefetch.predict.fronts import Front, Rests, Texture
from uffdprefetch.predict.storage import FREE_BYTES
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange

pytest_plugins = ("guess_bed",)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def by_requests(file: FileState) -> FileState:
    """The file, as if it lay where each is of 4 MiB."""
    file.call.unit_bytes = LUSTRE_RPC_BYTES
    return file


def test_pages_here_and_there_lose_what_is_free_and_no_more(bed: Bed, file: FileState) -> None:
    region = bed.region(by_requests(file))
    bed.arbiter.begin(file, 0)
    bed.visits(region, 300)
    assert bed.sent[0] == (0, LUSTRE_RPC_BYTES)
    account = bed.ahead.account
    assert account.lost <= FREE_BYTES + account.used
    assert bed.sent_bytes < 2 * FREE_BYTES, "with what visits allow of a file that is read whole"


def test_who_goes_on_in_order_has_whole_requests(bed: Bed, file: FileState) -> None:
    region = bed.region(by_requests(file))
    bed.arbiter.begin(file, 0)
    bed.walk(region, 0, SIZE)
    whole = [start for start, length in bed.sent if length == LUSTRE_RPC_BYTES]
    assert len(whole) >= 60 and bed.sent_bytes <= SIZE + FREE_BYTES
    assert bed.ahead.account.lost < FREE_BYTES, "what is beside a guess is, until somebody comes"


def test_a_little_of_a_request_is_read_as_it_is(bed: Bed, file: FileState) -> None:
    """Parts of 1.5 MiB, 13.5 MiB apart."""
    region = bed.region(by_requests(file))
    bed.arbiter.begin(file, 0)
    for at in range(0, SIZE - 2 * MIB, 15 * MIB):
        bed.walk(region, at, at + 3 * MIB // 2)
    parts = len(range(0, SIZE - 2 * MIB, 15 * MIB)) * 3 * MIB // 2
    assert bed.read().total_bytes() <= parts * 3 // 2


def test_a_mapping_begins_with_a_request_while_one_may_be_lost(
    bed: Bed, tmp_path: Path, file: FileState
) -> None:
    other = by_requests(opened(tmp_path / "other"))
    bed.arbiter.begin(by_requests(file), 0)
    bed.arbiter.begin(other, 0)
    assert bed.sent == [(0, LUSTRE_RPC_BYTES)], "the second one"
    bed.turn()
    bed.walk(bed.region(file), 0, LUSTRE_RPC_BYTES)
    bed.sent.clear()
    bed.arbiter.begin(other, 0)
    assert bed.sent == [(0, LUSTRE_RPC_BYTES)], "now that the first was used"


def test_what_one_turn_asks_for_shares_what_may_be_lost(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.touch(region, 0)
    ahead, reader = bed.ahead, region.reader
    of, link = ahead._of(file), ahead._link(region.reader)
    for turn in (1, 2):
        ahead._traffic.begins(bed.now + turn)
        before = ahead._room_of(reader, link)
        asked = sum(one.end - one.start for one in ahead._ranges(of, reader, 800, 816))
        ahead._traffic.begins(bed.now + turn)  # for the next reader
        assert before > asked == MIB and ahead._room_of(reader, link) == before - MIB


@pytest.mark.parametrize(("start", "length", "sent"), [
    (MIB, MIB, (MIB, MIB)),  # of three that are missing
    (MIB, 2 * MIB, (MIB, 3 * MIB)),
    (0, 2 * MIB - 4096, (0, 2 * MIB - 4096)),
    (0, 2 * MIB, (0, 4 * MIB)),
])  # fmt: skip
def test_a_guess_goes_on_to_the_end_of_its_request_where_half_is_asked_for(
    bed: Bed, file: FileState, start: int, length: int, sent: tuple[int, int]
) -> None:
    consumer = FileConsumer(0, 7)
    wanted = PrefetchRange(by_requests(file), start, start + length, guess=True)
    bed.scheduler.want(consumer, wanted)
    bed.scheduler.pump(bed.now)
    assert bed.sent == [sent]
    account = bed.ahead.account
    assert (account.asked, account.lost) == (
        -(-sent[1] // BLOCK) * BLOCK, (sent[1] - length) // BLOCK * BLOCK,
    ), "what is beside it, until somebody comes there"  # fmt: skip


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize(("ahead", "most", "end"), [
    (8, 400, 8), (31, 400, 31), (32, 400, 64), (40, 400, 64), (90, 400, 64), (96, 400, 128),
    (40, 63, 40), (31, 63, 31), (100, 120, 100),
])  # fmt: skip
def test_up_to_where_is_read_ahead(
    bed: Bed, file: FileState, way: int, ahead: int, most: int, end: int
) -> None:
    """Of requests of 64 blocks, half of what is missing of the last one has to pay, and all of it
    to be allowed."""
    reader = bed.region(by_requests(file)).reader
    front = Front(640, 640, 7, 0, Rests(0), Texture(1, 1, 1), direction=way, wanted=640)
    assert bed.ahead._whole_requests(reader, front, ahead, most) == 640 + way * end


@pytest.mark.parametrize("unit_bytes", [0, LUSTRE_RPC_BYTES])
def test_whatever_was_lost_before_who_goes_on_is_read_ahead_of(
    bed: Bed, tmp_path: Path, file: FileState, unit_bytes: int
) -> None:
    """A file that is mapped, and of which nobody reads anything, has lost all that is free."""
    other = opened(tmp_path / "other")
    file.call.unit_bytes = other.call.unit_bytes = unit_bytes
    region = bed.region(file)
    bed.arbiter.begin(file, 0)
    bed.ahead.account.asked = bed.ahead.account.lost = FREE_BYTES
    bed.turn()
    bed.walk(bed.region(other), 0, 64 * MIB)
    assert bed.misses < 32, "of 512"
    bed.unmap(region)


@pytest.mark.parametrize("unit_bytes", [0, LUSTRE_RPC_BYTES])
def test_whatever_was_lost_before_who_goes_by_steps_is_read_ahead_of(
    bed: Bed, file: FileState, unit_bytes: int
) -> None:
    """Of a mapping the first request was read in vain: its reader begins in the middle."""
    file.call.unit_bytes = unit_bytes
    region = bed.region(file)
    bed.arbiter.begin(file, 0)
    bed.ahead.account.asked = bed.ahead.account.lost = FREE_BYTES
    bed.turn()
    places = range(SIZE // 4, SIZE - BLOCK, 3 * MIB // 2)
    for at in places:
        bed.touch(region, at)
    assert bed.misses < len(places) // 3
