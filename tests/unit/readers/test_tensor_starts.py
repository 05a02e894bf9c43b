# SPDX-License-Identifier: Apache-2.0
"""readers/tensor_starts.py: the starts of a file's tensors are read when it is mapped, a touch of
one is no walk, and who has touched some is given what follows the first of them."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until

from tests.support.file_states import file_of
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.tensor_starts import (
    TensorStarts,
    starts,
    tensor_starts_of,
)
from uffdprefetch.sense import pagetables
from uffdprefetch.state.region_state import ScanState
from uffdprefetch.warm.consumer import PrefetchRange, Priority

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
COUNT, TENSOR = 40, 4 * MIB


def made(path: Path, count: int = COUNT, length: int = TENSOR) -> Path:
    """A file of safetensors, sparse."""
    named = {
        f"t{n}": {"dtype": "U8", "shape": [length], "data_offsets": [n * length, (n + 1) * length]}
        for n in range(count)
    }
    text = json.dumps(named).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + count * length)
    return path


def opened(path: Path) -> int:
    """How many descriptors of the file we have."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return found


def expected(path: Path) -> list[tuple[int, int]]:
    data = path.stat().st_size - COUNT * TENSOR
    return [(data + n * TENSOR, data + n * TENSOR + PAGE) for n in range(COUNT)]


class Node:
    """One process that maps a file; threads end when they are told to."""

    def __init__(self, path: Path, policy: str = "auto") -> None:
        self.wanted: list[PrefetchRange] = []
        self.asked: list[tuple[Any, Any]] = []
        self.forgotten: list[Any] = []
        self.busy = False
        self.fd = os.open(path, os.O_RDONLY)
        self.file = file_of(path.stat().st_size)
        self.file.opened = self.file.opened._replace(fd=self.fd, page_fd=self.fd)
        reader = SimpleNamespace(rank=0, pid=7, reads_pool=False)
        self.region: Any = SimpleNamespace(
            file=self.file, reader=reader, scan=ScanState(),
            span=SimpleNamespace(start_bytes=0, end_bytes=self.file.size_bytes),
            checkpoints=SimpleNamespace(laid=set()), mode=ServingMode.PAGE_TABLES,
        )  # fmt: skip
        windows: Any = SimpleNamespace(allowed_bytes=1 << 40, places=SimpleNamespace(all=1))
        self.windows = windows
        walks: Any = SimpleNamespace(forget=self.forgotten.append)
        opener: Any = SimpleNamespace(run=self.run)
        self.room_bytes = 12 * MIB
        self.starts = TensorStarts(
            policy, self.want, walks, windows, opener, lambda: self.room_bytes
        )

    def want(self, consumer: Any, wanted: PrefetchRange) -> int:
        self.wanted.append(wanted)
        return 0

    def run(self, work: Any, then: Any) -> bool:
        if not self.busy:
            self.asked.append((work, then))
        return not self.busy

    def mapped(self) -> None:
        self.starts.attached(self.region)
        asked, self.asked = self.asked, []
        for work, then in asked:
            then(work())

    def touch(self, monkeypatch: pytest.MonkeyPatch, *found: tuple[int, int]) -> list[Any]:
        """A look at the page table finds these mapped, and what was; the touches that walks see."""
        mapped = self.region.scan.mapped.copy()
        for start, end in found:
            mapped.add(start, end)
        runs = [(start, end - start) for start, end in mapped]
        monkeypatch.setattr(pagetables, "runs", lambda *_: runs)
        news: list[tuple[int, int]] = []
        size = self.file.size_bytes
        clusters, _ = pagetables.new_touches(
            self.region, 0, size, lambda a, b: news.append((a, b))
        )  # fmt: skip
        self.starts.scanned(self.region, news)
        return clusters


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return made(tmp_path / "model.safetensors")


@pytest.fixture
def node(path: Path) -> Iterator[Node]:
    node = Node(path)
    yield node
    os.close(node.fd)


def test_tensor_starts_are_read_once_and_at_once_when_the_file_is_mapped(
    node: Node, path: Path
) -> None:
    node.mapped()
    assert [(one.start, one.end) for one in node.wanted] == expected(path)
    assert {(one.need, one.priority) for one in node.wanted} == {(0, Priority.NEEDED)}
    assert list(node.file.blocks.tensor_starts) == expected(path)
    node.wanted.clear()
    node.mapped()
    assert node.wanted == []


@pytest.mark.parametrize(
    "change",
    [{"policy": "fixed"}, {"unit_bytes": 4 * MIB}, {"reads_pool": True}, {"busy": True}],
    ids=str,
)
def test_where_tensor_starts_are_not_read(path: Path, change: dict[str, Any]) -> None:
    node = Node(path, change.get("policy", "auto"))
    node.file.call.unit_bytes = change.get("unit_bytes", 0)
    node.region.reader.reads_pool = change.get("reads_pool", False)
    node.busy = change.get("busy", False)
    node.mapped()
    assert node.wanted == []
    wait_until(lambda: opened(path) == 1, "all but the node's own to be closed")
    os.close(node.fd)


def test_nothing_is_wanted_of_a_file_that_was_closed_or_changed_meanwhile(path: Path) -> None:
    for gone in (True, False):
        node = Node(path)
        node.starts.attached(node.region)
        if gone:
            node.file.opened = node.file.opened.closed()
        else:
            node.file.guard.give_up("written")
        ((work, then),) = node.asked
        then(work())
        assert node.wanted == []
        os.close(node.fd)


def test_a_touch_of_a_start_is_no_stream_and_one_behind_it_is(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mapped()
    first, second, *_ = expected(path)
    assert node.touch(monkeypatch, first, second) == []
    beyond = (first[1], first[1] + 64 * KIB)
    assert node.touch(monkeypatch, beyond) == [beyond]
    whole = (second[0], second[1] + PAGE)
    assert node.touch(monkeypatch, whole) == [(second[1], second[1] + PAGE)]


def test_who_looks_at_tensors_is_given_what_follows_the_first(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mapped()
    node.wanted.clear()
    third, fourth, fifth, *more = expected(path)[2:]
    node.touch(monkeypatch, fourth)
    node.touch(monkeypatch, fifth)
    assert node.wanted == [] and node.forgotten == []
    node.touch(monkeypatch, third)
    (one,) = node.wanted
    assert (one.start, one.end, one.priority) == (
        third[0], third[0] + 12 * MIB, Priority.STATED,
    )  # fmt: skip
    assert one.guess, "which is counted as one"
    assert node.forgotten == [node.region.reader], "what was seen before was no walk"
    node.touch(monkeypatch, *more)
    assert len(node.wanted) == 1, "once"


def test_what_was_touched_before_the_starts_were_known_counts_as_the_first(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has mapped what follows with it, and of a small tensor not the first page."""
    node.mapped()
    node.wanted.clear()
    first, second, third, *more = expected(path)
    node.touch(monkeypatch, (first[0], first[1] + 60 * KIB), second, third)
    assert node.wanted == []
    node.touch(monkeypatch, more[0])
    assert node.wanted[0].start == first[0]
    other = Node(path)
    other.mapped()
    other.wanted.clear()
    assert other.file.blocks.tensor_starts is not None
    other.file.blocks.tensor_starts.add(MIB, MIB + 4 * PAGE)
    other.touch(
        monkeypatch, *((at, at + PAGE) for at in range(MIB + PAGE, MIB + 4 * PAGE, 2 * PAGE))
    )
    other.touch(monkeypatch, second)
    assert other.wanted[0].start == MIB + PAGE
    os.close(other.fd)


def test_who_reads_what_follows_the_starts_is_a_stream(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mapped()
    node.wanted.clear()
    for start, end in expected(path):
        node.touch(monkeypatch, (start, end))
        node.touch(monkeypatch, (end, end + MIB))
    assert node.wanted == []


@pytest.mark.parametrize(
    ("allowed_bytes", "room_bytes", "read_bytes"),
    [(16 * MIB, 1 << 40, 8 * MIB), (1 << 40, 3 * MIB, 3 * MIB)],
    ids=["the budget's share", "what may be lost"],
)
def test_what_is_read_then_is_bounded(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch, allowed_bytes: int, room_bytes: int,
    read_bytes: int,
) -> None:  # fmt: skip
    node.mapped()
    node.wanted.clear()
    node.windows.allowed_bytes, node.windows.places.all = allowed_bytes, 2
    node.room_bytes = room_bytes
    node.touch(monkeypatch, *expected(path)[:3])
    assert node.wanted[0].end - node.wanted[0].start == read_bytes


def test_where_nothing_may_be_lost_nothing_is_read_then(
    node: Node, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mapped()
    node.wanted.clear()
    node.room_bytes = 0
    node.touch(monkeypatch, *expected(path)[:3])
    assert sum(one.end - one.start for one in node.wanted) == 0


def test_small_tensors_are_read_whole_and_neighbours_as_one() -> None:
    size = 1 << 30
    large = (10_000, 10_000 + MIB)
    assert starts([large], size) == [(8192, 16384)]
    norm = (large[1], large[1] + 60_000)
    low, high = large[1] // PAGE * PAGE, -(-norm[1] // PAGE) * PAGE
    assert starts([large, norm], size) == [(8192, 16384), (low, high)]
    assert starts([(0, 100), (100, 200), (200, MIB)], size) == [(0, 8192)]
    assert starts([(size - 10, size)], size) == [(size - PAGE, size)]


def test_of_too_many_or_too_much_none_is_read() -> None:
    few = [(n * MIB, (n + 1) * MIB) for n in range(ENTRIES_MAX)]
    assert len(starts(few, ENTRIES_MAX * MIB)) == ENTRIES_MAX
    assert starts([*few, (ENTRIES_MAX * MIB, (ENTRIES_MAX + 1) * MIB)], 1 << 40) == []
    dense = [(n * 128 * KIB, (n + 1) * 128 * KIB) for n in range(100)]
    assert starts(dense, 100 * 128 * KIB) == []


def test_a_file_that_tells_nothing_or_what_cannot_be_has_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", bytes(8192), struct.pack("<Q", 20) + b"{" + bytes(8192)):
        path.write_bytes(content)
        fd = os.open(path, os.O_RDONLY)
        assert tensor_starts_of(fd, len(content)) == []
        wait_until(lambda: not opened(path), "the descriptor to be closed")
