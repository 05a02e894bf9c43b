# SPDX-License-Identifier: Apache-2.0
"""readers/next_shard.py: the window of a reader that comes to the end of a file goes on into the
file that follows, and such a file is open for no longer than that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.file_systems import FILE_SYSTEMS, TMPFS, FileSystem
from uffdprefetch.pool.eviction import BlockReader as Block
from uffdprefetch.pool.residents import to_come
from uffdprefetch.predict.storage import UNKNOWN, Link, least_probability, stream_gain
from uffdprefetch.predict.streams import Feedback, Stream
from uffdprefetch.readers import next_shard as module
from uffdprefetch.readers.next_shard import NextShard, path_after
from uffdprefetch.state.admission import IDLE_NS, LOOK_NS, FileTable
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import FLAGS, reopen

MIB, MS = 1 << 20, 1_000_000
SIZE, PID = 64 * MIB, 7


def least(link: Link) -> float:
    """So sure must be what is read ahead of a walk."""
    return least_probability(stream_gain(1.0, 0.0, False, link), link, 1.0)


LEAST = least(Link(300e6, 1e-3))


def made(path: Path, size: int = SIZE) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


class Walked(Stream):
    """A walk that somebody reads ahead of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.feedback = Feedback()


class Node:
    """A table of files, opens that end when they are told to, and readers of one process."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.directory, self.now = directory, 10**12
        self.config = Config.of(**config)
        scheduler: Any = SimpleNamespace(forget_file=lambda _: 0, busy_with=lambda _: False)
        self.ledger = Ledger()
        self.table = FileTable(self.config, scheduler, self.ledger, Clock(lambda: self.now))
        self.asked: list[tuple[Any, Any]] = []
        opener: Any = SimpleNamespace(open=lambda what, then: self.asked.append((what, then)))
        self.streams: dict[int, Walked] = {}
        self.forgotten: list[Any] = []
        asks: Any = SimpleNamespace(forget=self.forgotten.append)
        self.shards = NextShard(self.table, opener, asks)
        self.vain: list[str] = []
        self.shards.in_vain = lambda file: self.vain.append(os.path.basename(file.path))
        self.client = SimpleNamespace(pid=PID, readers={})

    def reader(self, name: str, seen: bool = True) -> Any:
        path = self.directory / name
        status = path.stat()
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in self.table.files:
            opened = reopen(os.open(path, os.O_RDONLY))
            self.table.files[key] = FileState.open(opened, str(path))
        file = self.table.files[key]
        file.mappings.attached += 1
        reader = SimpleNamespace(
            file=file, client=self.client, pid=self.client.pid, regions={1: None}, reads_pool=False,
            seen_ns=self.now if seen else 0, span=SimpleNamespace(end_bytes=file.size_bytes),
        )  # fmt: skip
        self.client.readers[key] = reader
        return reader

    def beyond(
        self, reader: Any, at: int, ahead: int = 32 * MIB, least: float = LEAST, **walk: Any
    ) -> list[Any]:
        """What is wanted of the file that follows by a reader that has come so far."""
        made = Walked(1, 0, PID, 0, at, self.now, self.now, active=True)
        stream = self.streams.setdefault(walk.pop("id", 1), made)
        stream.position_bytes = at
        for name, value in walk.items():
            setattr(stream, name, value)
        found = []
        for consumer, wanted in self.shards.beyond(reader, stream, ahead, least, self.now):
            found.append(wanted)
            self.consumer = consumer
        return found

    def opens(self) -> None:
        """What was to be opened is."""
        asked, self.asked = self.asked, []
        for what, then in asked:
            try:
                path = what() if callable(what) else what
                opened: Any = reopen(os.open(path, FLAGS))
            except OSError as error:
                opened = error
            then(opened)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setitem(FILE_SYSTEMS, TMPFS, FileSystem("tmpfs"))
    for number in range(1, 4):
        made(tmp_path / f"model-{number:05d}-of-00003.safetensors")
    node = Node(tmp_path)
    yield node
    for file in [*node.table.files.values(), *node.table.parked.values()]:
        file.close()


SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


def test_the_window_goes_over_the_files_end(node: Node) -> None:
    reader = node.reader(SHARDS[0])
    assert node.beyond(reader, SIZE - 40 * MIB) == [] and node.asked == [], "it ends before"
    assert node.beyond(reader, SIZE - 24 * MIB) == [] and len(node.asked) == 1
    assert node.beyond(reader, SIZE - 24 * MIB) == [] and len(node.asked) == 1, "once"
    node.opens()
    (first,) = node.beyond(reader, SIZE - 24 * MIB)
    assert os.path.basename(first.file.path) == SHARDS[1]
    assert (first.start, first.end) == (0, 8 * MIB)
    consumer = node.consumer
    assert consumer.position_bytes == -24 * MIB, "as if the two were one"
    assert node.beyond(reader, SIZE - 24 * MIB) == []
    (more,) = node.beyond(reader, SIZE - 16 * MIB)
    assert (more.start, more.end) == (8 * MIB, 16 * MIB)
    (last,) = node.beyond(reader, SIZE, 1 << 40)
    assert (last.start, last.end) == (16 * MIB, SIZE)
    assert node.consumer is consumer and node.forgotten == [], "one queue for all of it"


def test_several_ranks_have_one_stream_of_it(node: Node) -> None:
    ranks = [node.reader(SHARDS[0]) for _ in range(4)]
    for reader in ranks:
        node.beyond(reader, SIZE - 24 * MIB)
    assert len(node.asked) == 1
    node.opens()
    assert sum(len(node.beyond(reader, SIZE - 24 * MIB)) for reader in ranks) == 1


def test_what_is_asked_for_is_taken_back_when_its_stream_is_none(node: Node) -> None:
    reader = node.reader(SHARDS[0])
    node.beyond(reader, SIZE - 24 * MIB)
    node.opens()
    assert node.beyond(reader, SIZE - 24 * MIB)
    another = SimpleNamespace(file=reader.file, pid=PID + 1)
    node.shards.dismissed(another)  # type: ignore[arg-type]
    assert node.forgotten == []
    node.shards.dismissed(reader)
    assert node.forgotten == [node.consumer]
    (again,) = node.beyond(reader, SIZE - 24 * MIB)
    assert again.start == 0


def test_who_reads_the_pools_memory_finds_the_next_file_there(node: Node) -> None:
    pool = SimpleNamespace(open=lambda file: setattr(file, "pooled", SimpleNamespace(number=3)))
    node.table.pool = pool  # type: ignore[assignment]
    reader = node.reader(SHARDS[0])
    reader.reads_pool = True
    node.beyond(reader, SIZE - 24 * MIB)
    node.opens()
    (wanted,) = node.beyond(reader, SIZE - 24 * MIB)
    assert wanted.pooled and wanted.file.pooled is not None and wanted.end == 8 * MIB
    stream = node.streams[1]
    assert list(node.shards.awaited(stream.last_ns)) == [(wanted.file, 8 * MIB)]
    assert to_come(wanted.file, 8 * MIB, MIB) == Block(3, 0, 1, 0, 64, 8)
    assert list(node.shards.awaited(stream.last_ns + 2 * module.LATELY_NS)) == [], "nobody came"
    wanted.file.mappings.attached = 1
    assert list(node.shards.awaited(stream.last_ns)) == [], "its own readers tell"
    wanted.file.pooled = None


def test_what_has_checkpoints_is_not_read_into_the_pool(node: Node) -> None:
    """As of a mapping: its pages and the pool's are not compared at once."""
    node.table.pool = SimpleNamespace(open=lambda file: pytest.fail("it has"))  # type: ignore[assignment]
    after = node.reader(SHARDS[1]).file
    after.copies.fds()
    reader = node.reader(SHARDS[0])
    reader.reads_pool = True
    for _ in range(2):
        assert node.beyond(reader, SIZE - 24 * MIB) == []
        node.opens()


@pytest.mark.parametrize(
    ("walk", "whole"),
    [({"direction": -1}, True), ({"start_bytes": SIZE - 8 * MIB}, True), ({}, False)],
    ids=["backward", "not sure", "a part is mapped"],
)
def test_who_has_no_next_file(node: Node, walk: dict[str, Any], whole: bool) -> None:
    reader = node.reader(SHARDS[0])
    if not whole:
        reader.span.end_bytes -= 4096
    for _ in range(2):
        assert node.beyond(reader, SIZE - 8 * MIB, **walk) == []
        node.opens()
    assert len(node.table.files) == 1


def test_the_last_shard_and_a_shard_that_is_not_there(node: Node) -> None:
    (node.directory / SHARDS[1]).unlink()
    for name in (SHARDS[0], SHARDS[2]):
        reader = node.reader(name)
        for _ in range(3):
            assert node.beyond(reader, SIZE - 8 * MIB) == []
            node.opens()
        assert len(node.shards._found) and node.asked == []
    assert len(node.table.files) == 2


def test_a_file_that_nobody_maps_is_closed_a_moment_later_and_opened_again(node: Node) -> None:
    reader = node.reader(SHARDS[0])
    node.beyond(reader, SIZE - 24 * MIB)
    node.opens()
    (wanted,) = node.beyond(reader, SIZE - 24 * MIB)
    node.now += IDLE_NS - 1
    node.table.look(node.now)
    assert wanted.file.opened.fd >= 0
    node.now += LOOK_NS
    node.table.look(node.now)
    assert wanted.file.opened.fd < 0 and node.table.parked
    assert node.beyond(reader, SIZE - 16 * MIB) == []
    node.opens()
    (more,) = node.beyond(reader, SIZE - 16 * MIB)
    assert more.file is wanted.file and more.file.opened.fd >= 0 and more.start == 8 * MIB


def test_it_is_closed_at_once_when_its_readers_process_ends_or_it_is_deleted(node: Node) -> None:
    for ends in (lambda: node.table.ended(PID), (node.directory / SHARDS[1]).unlink):
        node.shards._found.clear()
        reader = node.reader(SHARDS[0])
        node.beyond(reader, SIZE - 24 * MIB)
        node.opens()
        (wanted,) = node.beyond(reader, SIZE - 24 * MIB)
        ends()
        node.table.look(node.now)
        assert wanted.file.opened.fd < 0


def test_what_must_not_be_served_is_not_read(node: Node) -> None:
    for name, config in [
        ("small", {"min_size_bytes": SIZE + 1}),
        ("excluded", {"exclude": ("*-00002-*",)}),
        ("fifo", {}),
    ]:
        other = Node(node.directory, **config)
        if name == "fifo":
            (node.directory / SHARDS[1]).unlink()
            os.mkfifo(node.directory / SHARDS[1])
        reader = other.reader(SHARDS[0])
        other.beyond(reader, SIZE - 24 * MIB)
        other.opens()
        assert other.beyond(reader, SIZE - 24 * MIB) == [], name
        assert len(other.table.files) == 1
        reader.file.close()


def test_it_is_read_again_when_the_reader_comes_again(node: Node) -> None:
    reader = node.reader(SHARDS[0])
    node.beyond(reader, SIZE - 24 * MIB)
    node.opens()
    assert node.beyond(reader, SIZE - 24 * MIB)
    node.now += 2 * module.LATELY_NS
    assert node.beyond(reader, SIZE - 24 * MIB) == [], "it stands there"
    (wanted,) = node.beyond(reader, SIZE - 24 * MIB, id=2)  # a second epoch
    assert wanted.start == 0


def test_without_a_name_it_is_the_first_that_is_mapped_and_not_touched(node: Node) -> None:
    for name in ("a.npy", "b.npy", "c.npy", "d.raw"):
        made(node.directory / name)
    reader, other, _ = node.reader("a.npy"), node.reader("d.raw", False), node.reader("b.npy")
    assert node.beyond(reader, SIZE - 24 * MIB) == [], "none is left"
    assert other.file.mappings.attached
    third = node.reader("c.npy", False)
    (wanted,) = node.beyond(reader, SIZE - 24 * MIB)
    assert wanted.file is third.file and node.asked == []


def test_an_index_beside_it_tells(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors", "other.safetensors"):
        made(tmp_path / name, 1)
    weights = {"w0": "y.safetensors", "w1": "x.safetensors", "w2": "x.safetensors"}
    (tmp_path / "a.index.json").write_text("no JSON")
    (tmp_path / "b.index.json").write_text('{"weight_map": [1, 2]}')
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": weights}))
    assert path_after(str(tmp_path / "x.safetensors")) == str(tmp_path / "y.safetensors")
    for name in ("y.safetensors", "other.safetensors"):
        with pytest.raises(FileNotFoundError):
            path_after(str(tmp_path / name))


@pytest.mark.parametrize(("mib", "is_read"), [(60, True), (68, False)])
def test_what_is_larger_than_64_mib_is_no_index(tmp_path: Path, mib: int, is_read: bool) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        made(tmp_path / name, 1)
    text = json.dumps({"weight_map": {"w0": "y.safetensors", "w1": "x.safetensors"}})
    (tmp_path / "model.index.json").write_text(text.ljust(mib * MIB))
    if is_read:
        assert path_after(str(tmp_path / "x.safetensors")) == str(tmp_path / "y.safetensors")
    else:
        with pytest.raises(FileNotFoundError):
            path_after(str(tmp_path / "x.safetensors"))


def test_in_the_hubs_cache_a_file_has_its_name_in_a_snapshot(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "a1b2"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, digest in enumerate(("d0", "c1", "b2")):
        made(blobs / digest, 1)
        (snapshot / SHARDS[number]).symlink_to(Path("../../blobs") / digest)
    made(blobs / "none", 1)
    assert os.path.realpath(path_after(str(blobs / "d0"))) == str(blobs / "c1")
    assert os.path.realpath(path_after(str(blobs / "c1"))) == str(blobs / "b2")
    for digest in ("b2", "none"):
        with pytest.raises(FileNotFoundError):
            path_after(str(blobs / digest))


def test_an_index_is_asked_for_where_there_may_be_one(node: Node) -> None:
    (node.directory / "blobs").mkdir()
    for name in ("weights.bin", "data.mdb", "blobs/d0"):
        made(node.directory / name)
        node.beyond(node.reader(name), SIZE - 24 * MIB)
    assert len(node.asked) == 2


# ---- how sure it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "link", [UNKNOWN, Link(300e6, 1e-3), Link(300e6, 1e-3, waiting=4)], ids=str
)
def test_a_named_sequence_is_read_from_its_first_file_on(node: Node, link: Link) -> None:
    """Be nothing of the link known yet, or its latency shared by some ranks."""
    reader = node.reader(SHARDS[0])
    node.beyond(reader, SIZE - 24 * MIB, least=least(link))
    node.opens()
    assert node.beyond(reader, SIZE - 24 * MIB, least=least(link))


def sequences(node: Node, count: int) -> list[list[str]]:
    """Names of pairs, one of which follows the other."""
    found = []
    for number in range(count):
        pair = [f"{number}-{part:05d}-of-00002.bin" for part in (1, 2)]
        for name in pair:
            made(node.directory / name)
        found.append(pair)
    return found


def reads(node: Node, name: str, id: int) -> int:
    """Somebody reads a file to its end, and unmaps it; what was asked for of the next, bytes."""
    reader, asked = node.reader(name), 0
    for _ in range(2):
        asked += sum(one.end - one.start for one in node.beyond(reader, SIZE, id=id))
        node.opens()
    reader.regions.clear()
    return asked


def test_where_nobody_goes_on_into_the_next_file_it_is_read_no_more(node: Node) -> None:
    """After the first in vain, of which is told; and when somebody does, it is read again."""
    pairs = sequences(node, 12)
    asked = [reads(node, first, number) for number, (first, _) in enumerate(pairs[:6])]
    assert asked[0] == 32 * MIB and asked[2:] == [0] * 4
    assert node.vain[0] == pairs[0][1]
    for number, pair in enumerate(pairs[6:]):
        asked = [reads(node, name, 2 * number + part + 100) for part, name in enumerate(pair)]
    assert asked[0] == 32 * MIB


def test_what_one_process_does_tells_of_the_next(node: Node) -> None:
    """Of each it is known when it is at the end of another file, or gone."""
    pairs = sequences(node, 12)
    for number, (first, _) in enumerate(pairs[:3]):
        node.client = SimpleNamespace(pid=100 + number, readers={})
        asked = reads(node, first, number)
        for reader in node.client.readers.values():
            node.shards.left(reader)
    assert asked == 0 and node.vain == [second for _, second in pairs[:3]]
    for number, pair in enumerate(pairs[3:]):
        node.client = SimpleNamespace(pid=200 + number, readers={})
        asked, _ = (reads(node, name, 2 * number + part + 100) for part, name in enumerate(pair))
    assert asked == 32 * MIB and len(node.vain) == 3


def test_a_file_that_is_mapped_may_still_be_come_to(node: Node) -> None:
    """By one thread, while another is at the end of its own file."""
    (first, second), (other, _) = sequences(node, 2)
    reads(node, first, 1)
    mapped = node.reader(second, seen=False)
    reads(node, other, 2)
    assert node.vain == []
    mapped.regions.clear()
    reads(node, other, 2)
    assert second in node.vain


def test_who_comes_to_the_next_file_before_its_end_is_told_of_has_followed(node: Node) -> None:
    first, second = sequences(node, 1)[0]
    reads(node, first, 1)
    node.reader(second)
    for reader in node.client.readers.values():
        node.shards.left(reader)
    assert node.vain == []


def test_who_follows_is_followed_however_long(node: Node) -> None:
    count = 40
    for number in range(1, count + 1):
        made(node.directory / f"s-{number:05d}-of-{count:05d}.bin")
    names = [f"s-{number:05d}-of-{count:05d}.bin" for number in range(1, count)]
    assert all(reads(node, name, number) for number, name in enumerate(names))
    assert node.vain == []


def test_two_files_side_by_side_are_no_guess_in_vain(node: Node) -> None:
    """Threads of a process that each come to the end of their own file, again and again."""
    for number in range(4, 8):
        made(node.directory / f"other-{number:05d}-of-00007.safetensors")
    readers = [node.reader(SHARDS[0]), node.reader("other-00004-of-00007.safetensors")]
    for step in range(24):
        for number, reader in enumerate(readers):
            node.beyond(reader, SIZE - (24 - step) * MIB, id=number)
            node.opens()
    for number, reader in enumerate(readers):
        assert node.beyond(reader, SIZE, 1 << 40, id=number), "not stopped"
    assert node.vain == []
