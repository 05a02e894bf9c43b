# SPDX-License-Identifier: Apache-2.0
"""Memory and disk: of two blocks that may go, the one with a copy goes first, once the disk is full
(pool/eviction.py); and how large the disk's part may be (base/spill_place.py)."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_pool import part_of, pool_of

from uffdprefetch.base import file_systems, options, spill_place
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.file_systems import FileSystem, Medium
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool import order_eviction
from uffdprefetch.pool.eviction import LRU, BlockReader, Cyclic, Residents, copied_first

GIB = 1 << 30


def residents(blocks: list[int], touched: list[int], copied: list[bool] | None) -> Residents:
    return Residents(
        np.zeros(len(blocks), np.int32), np.array(blocks), np.array(touched, np.uint32),
        np.zeros(len(blocks), bool), None if copied is None else np.array(copied),
    )  # fmt: skip


def copies(mask: np.ndarray) -> uffd_pool.DiskCopies:
    return uffd_pool.DiskCopies(
        np.packbits(mask, bitorder="little").view(np.uint16).data, 16, len(mask)
    )


@pytest.mark.parametrize("chunks, per_word", [(64, 16), (35, 16), (5, 1)])
def test_a_bit_a_chunk_says_which_have_a_copy(chunks: int, per_word: int) -> None:
    words: np.ndarray = np.zeros(-(-chunks // per_word), np.uint16)
    for chunk in (1, 3, chunks - 1):
        words[chunk // per_word] |= 1 << chunk % per_word
    mask = uffd_pool.DiskCopies(words.data, per_word, chunks).mask()
    assert len(mask) == chunks and np.flatnonzero(mask).tolist() == [1, 3, chunks - 1]


def test_those_with_a_copy_go_first_and_then_the_others_as_ever() -> None:
    rows = residents([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [False, True, False, True, False])
    policy = LRU()
    chosen = copied_first(rows, 4, lambda some: policy.victims(some, [], 4))
    assert chosen.tolist() == [1, 3, 0, 2]
    assert policy.victims(rows, [], 4).tolist() == [0, 1, 2, 3]
    without = residents([0, 1], [1, 2], None)
    assert copied_first(without, 1, lambda some: policy.victims(some, [], 1)).tolist() == [0]


def test_what_nobody_has_come_to_yet_is_not_sent_back() -> None:
    rows = residents([0, 1], [9, 0], [False, True])
    assert copied_first(rows, 1, lambda some: LRU().victims(some, [], 1)).tolist() == [0]


@pytest.mark.parametrize("rule", ["cyclic", "planned"])
def test_what_is_read_just_now_stays_with_a_copy_too(rule: str) -> None:
    rows = residents(list(range(8)), [1] * 8, [True, True] + [False] * 6)
    reader = BlockReader(file=0, position=0, direction=1, low=0, high=8, ahead=1, behind=0)

    def choose(some: Residents) -> np.ndarray:
        if rule == "cyclic":
            return Cyclic().victims(some, [reader], 8)
        known: np.ndarray = np.zeros(8, bool)
        return order_eviction.victims(some, [reader], 8, np.full(8, np.inf), known, 1 << 20, 1, 1e9)

    chosen = copied_first(rows, 8, choose).tolist()
    assert len(chosen) == 6 and not {0, 1} & set(chosen)


def test_a_disk_of_two_thirds_saves_what_memory_and_disk_hold_together() -> None:
    """As much as both hold is not read from storage, where the farthest block alone would have it
    lie in both: memory 0.25 of the data, disk 0.65, shuffled epochs that are known."""
    blocks, epochs = 200, 4
    draw = random.Random(0)
    order = [b for _ in range(epochs + 1) for b in draw.sample(range(blocks), blocks)]
    memory, disk = blocks // 4, blocks * 65 // 100

    def storage_reads(prefers: bool) -> int:
        held: list[int] = []
        copies: set[int] = set()
        reads = 0
        for at, block in enumerate(order[: epochs * blocks]):
            last_epoch = at >= (epochs - 1) * blocks
            if block not in held:
                reads += last_epoch and block not in copies
                held.append(block)
            if len(held) <= memory:
                continue
            rest = order[at + 1 :]
            distance = np.array([float(rest.index(b)) for b in held])
            full = len(copies) >= disk
            rows = residents(
                held, [1] * len(held), [b in copies for b in held] if full and prefers else None
            )

            def choose(some: Residents, distance: np.ndarray = distance) -> np.ndarray:
                known: np.ndarray = np.ones(len(distance), bool)
                return order_eviction.victims(some, [], 1, distance * 4096, known, 4096, 1, 1e9)

            victim = held.pop(int(copied_first(rows, 1, choose)[0]))
            if not full:
                copies.add(victim)
        return reads

    assert storage_reads(prefers=True) <= 0.12 * blocks
    assert storage_reads(prefers=False) >= 0.2 * blocks


@pytest.mark.parametrize(
    "has_room, writes, first",
    [(True, True, [0, 1]), (False, True, [16, 17]), (False, False, [20, 21])],
)
def test_the_list_of_victims_is_of_both_tiers(
    has_room: bool, writes: bool, first: list[int]
) -> None:
    """On a full disk there is a place beside the copies of neighbours."""
    pool, told = pool_of(4 << 20, "lru")
    pool.victims.plan([])
    alone = len(told)
    spilled: np.ndarray = np.zeros(64, bool)
    spilled[20:40] = True
    pool.files.spilled[3] = copies(spilled)
    pool.victims._disk = SimpleNamespace(has_room=has_room, writes=writes, free=lambda *_: 0)
    pool.victims.plan([])
    assert [chunk for _, chunk, _ in told][:2] == first
    assert len(told) == (2 * alone if writes else alone), "what is written meanwhile"


@pytest.mark.parametrize("evict", ["lru", "cyclic"])
def test_a_full_disk_has_room_again_when_a_files_break_has_expired(evict: str) -> None:
    pool, told = pool_of(4 << 20, evict)
    freed: list[tuple[int, int]] = []
    by_number = pool.files.by_number
    native: Any = None
    state: np.ndarray = np.zeros(64, np.uint8)
    state[0] = uffd_pool.PRESENT
    old = part_of(native, 4, 64 << 10, state, np.zeros(64, np.uint32))
    by_number[4] = SimpleNamespace(pooled=old, size_bytes=4 << 20)  # type: ignore[assignment]
    pool.files.spilled = {3: copies(np.zeros(64, bool)), 4: copies(np.ones(64, bool))}

    def free(number: int, size_bytes: int) -> int:
        freed.append((number, size_bytes))
        return 1 << 20

    disk = SimpleNamespace(has_room=True, writes=True, free=free)
    pool.victims._disk = disk

    def use(number: int, at_ms: int) -> None:
        part = by_number[number].pooled
        assert part is not None
        part.books.touched_ms[0] = at_ms
        pool.victims.plan([])

    for at in (100, 200, 300):  # both are read, in an order that nobody knows
        use(4, at)
        use(3, at + 1)
    assert not freed, "there is room"
    disk.has_room = False
    use(3, 400)
    assert not freed, "a use of the other one is expected for twice its longest break"
    use(3, 800)
    assert freed and {number for number, _ in freed} == {4}
    lacking = sum(chunks for number, _, chunks in told if number == 3)
    assert freed[-1][1] == lacking * (64 << 10), "so much as leaves memory without a copy"
    freed.clear()
    use(4, 810)
    assert not freed, "it is read again"


def test_a_list_that_is_written_is_what_could_be_before_the_pool_was_full() -> None:
    pool, told = pool_of(640 << 20, "lru")
    for number in range(20):
        pool.files.by_number[number] = pool.files.by_number[3]
    pool.victims.plan([])
    alone = len(told)
    pool.victims._disk = SimpleNamespace(has_room=True, writes=True, free=lambda *_: 0)
    pool.victims.plan([])
    blocks = (640 << 20) // pool.victims.block_bytes
    assert (alone, len(told)) == (blocks // 32, blocks // 10)


def test_a_directory_and_its_size_are_told_apart() -> None:
    assert spill_place.parse("/tmp") == ("/tmp", None)
    assert spill_place.parse("/tmp:3GiB") == ("/tmp", 3 * GIB)
    assert spill_place.parse("/a:b/c") == ("/a:b/c", None)
    for wrong in ("/tmp:much", ":1GiB"):
        with pytest.raises(UffdPrefetchError):
            spill_place.parse(wrong)
    option = options.BY_KEY["spill"]
    assert option.parse("off") is None
    for text in ("/tmp", "/tmp:3GiB"):
        assert option.format(option.parse(text)) == text
        assert option.parse(option.format(option.parse(text))) == text


@pytest.mark.parametrize(
    "name, medium",
    [("tmpfs", Medium.MEMORY), ("NFS", Medium.NETWORK), ("FUSE", Medium.UNKNOWN)],
)
def test_what_is_no_disk_of_this_node_is_refused(
    name: str, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "at", lambda _: FileSystem(name, medium))
    assert name in (spill_place.why_not("/") or "")


def test_an_overlay_is_what_it_writes_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    overlay, ext4 = FileSystem("overlayfs"), FileSystem("ext4", Medium.LOCAL)
    monkeypatch.setattr(file_systems, "at", lambda _: overlay)
    assert "overlayfs" in (spill_place.why_not(str(tmp_path)) or "")
    monkeypatch.setattr(spill_place, "_below", lambda _, overlay: ext4)
    monkeypatch.setattr(spill_place, "FREE_BYTES", 0)
    assert spill_place.why_not(str(tmp_path)) is None


def test_a_full_disk_and_a_missing_directory_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_systems, "at", lambda _: FileSystem("ext4", Medium.LOCAL))
    monkeypatch.setattr(spill_place, "FREE_BYTES", 1 << 60)
    assert "are free" in (spill_place.why_not(str(tmp_path)) or "")
    monkeypatch.setattr(spill_place, "FREE_BYTES", 0)
    monkeypatch.setattr(spill_place, "FREE_PART", 1)
    assert "are free" in (spill_place.why_not(str(tmp_path)) or ""), "others have no room then"
    monkeypatch.undo()
    assert "No such file" in (spill_place.why_not(str(tmp_path / "none")) or "")


def test_others_keep_a_twentieth_and_a_gibibyte() -> None:
    assert spill_place.allowed_bytes(50 * GIB, 100 * GIB, 0) == 45 * GIB
    assert spill_place.allowed_bytes(3 * GIB, 10 * GIB, 2 * GIB) == 4 * GIB
    assert spill_place.allowed_bytes(0, 100 * GIB, 3 * GIB) == 0
    assert spill_place.default_bytes(50 * GIB, 45 * GIB) == 25 * GIB
    assert spill_place.default_bytes(2 * GIB, GIB // 2) == GIB // 2
