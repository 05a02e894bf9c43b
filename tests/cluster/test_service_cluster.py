# SPDX-License-Identifier: Apache-2.0
"""service/cluster.py: what it makes of its convener's words, which files it shares, and its end."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.file_states import file_of
from uffdprefetch.cluster import identity
from uffdprefetch.native.net import NodeCounts
from uffdprefetch.service.cluster import Cluster, Place
from uffdprefetch.state.file_times import Times
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener

KEY = "ab" * 32
NFS, EXT4, OVERLAY = 0x6969, 0xEF53, 0x794C7630


class FakeLink:
    def __init__(self, key: bytes) -> None:
        self.key, self.shared, self.joined = key, dict[int, Any](), None
        self.is_failed, self.left, self.corrupt = False, 0, 0
        self.totals = SimpleNamespace(generations=0, cpu_seconds=1.5)
        self.present: list[int] = []

    def share(self, file: int, digest: Any, stamp: Any) -> None:
        self.shared[file] = digest

    def pending(self, file: int, patience_ms: int) -> None:
        self.waits = patience_ms

    def unshare(self, file: int) -> None:
        self.shared.pop(file, None)

    def join(self, sock: Any, pid: int, generation: int) -> None:
        self.joined = SimpleNamespace(generation=generation)

    def leave(self) -> None:
        self.left += 1
        self.joined = None

    def counts(self) -> dict[str, int]:
        return {"from_bytes": 7}

    def sample_cpu(self) -> None:
        pass

    def links(self) -> dict[int, NodeCounts]:
        return {2: NodeCounts(5, 6, 7_000_000, 1, self.corrupt, 1, 0, 0, 0)}

    def rates(self) -> tuple[int | None, int | None]:
        return 8, None

    def keepers(self, file: int, cells: int) -> list[int | None]:
        return [2] * cells


class Bed:
    """A cluster whose convener says what the test wants, and tells what it was told."""

    def __init__(
        self, tmp_path: Path, *said: dict[str, Any], ends: bool = False, chunk_bytes: int = 1 << 16
    ) -> None:
        lines = "".join(json.dumps(one) + "\n" for one in said)
        code = (
            f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.readline());"
            f"sys.stdout.write({lines!r}); sys.stdout.flush();"
        )
        code += "" if ends else "sys.stdin.read()"
        self.wake, self.ledger = os.eventfd(0, os.EFD_NONBLOCK), Ledger()
        self.opener = Opener(self.wake)
        self.told = tmp_path / "told"
        self.cluster: Any = Cluster(
            Place("/meet", "run.0", 1, 3), "/run/socket", FakeLink, self.ledger, self.opener,
            argv=[sys.executable, "-c", code], chunk_bytes=chunk_bytes,
        )  # type: ignore[arg-type]  # fmt: skip

    def hear(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            if select.select([self.cluster.fd], [], [], 0.05)[0] and not self.cluster.hear():
                return

    def open(self, path: Path, number: int, times: Times | None = None, f_type: int = NFS) -> None:
        fd = os.open(path, os.O_RDONLY)
        file = file_of(path.stat().st_size, str(path))
        file.opened = file.opened._replace(fd=fd, f_type=f_type)
        file.guard.times = times or Times.of(fd)
        self.cluster.opened(file, number)
        end = time.monotonic() + 30
        while self.opener._under_way:
            assert time.monotonic() < end
            self.opener.step()
            time.sleep(0.001)
        os.close(fd)

    def close(self) -> None:
        self.cluster.close()
        os.close(self.wake)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    beds = list[Bed]()

    def start(*said: dict[str, Any], **more: Any) -> Bed:
        beds.append(Bed(tmp_path, *said, **more))
        return beds[-1]

    yield start
    for bed in beds:
        bed.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(1 << 20))
    return path


def test_its_convener_is_told_where_and_who_and_tells_the_key(make: Callable[..., Bed]) -> None:
    bed = make({"key": KEY, "generation": 1}, {"present": [0, 1, 2], "missing": 0, "seconds": 20.0})
    bed.hear(lambda: bed.cluster.present)
    assert bed.cluster.link.key == bytes.fromhex(KEY)
    assert json.loads(bed.told.read_text()) == {
        "meet": "/meet", "run": "run.0", "node": 1, "nodes": 3, "launcher": None,
        "socket": "/run/socket",
    }  # fmt: skip
    assert not bed.ledger.degradations


def test_too_few_nodes_no_mpi_and_a_convener_that_has_ended_are_one_line_each(
    make: Callable[..., Bed],
) -> None:
    bed = make(
        {"present": [1], "missing": 2, "seconds": 20.0}, {"failed": "no MPI here"}, ends=True
    )
    bed.hear(lambda: False)
    assert [text.split(":")[0] for text in bed.ledger.degradations] == [
        "cluster", "cluster", "the nodes do not meet any more"
    ]  # fmt: skip
    assert "1 of 3 nodes" in bed.ledger.degradations[0]


def test_a_file_that_other_nodes_see_is_shared_whenever_the_key_comes(
    make: Callable[..., Bed], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = make({"key": KEY, "generation": 1})
    bed.open(data, 4)
    bed.hear(lambda: bed.cluster.link)
    assert set(bed.cluster.link.shared) == {4}
    second = data.with_name("second.bin")
    second.write_bytes(b"x" * 5000)
    bed.open(second, 5)
    assert set(bed.cluster.link.shared) == {4, 5}
    assert len(set(bed.cluster.link.shared.values())) == 2
    bed.cluster.closed(4)
    bed.cluster.closed(4)
    assert set(bed.cluster.link.shared) == {5}


def test_one_that_cannot_be_looked_at_yet_is_looked_at_later(
    make: Callable[..., Bed], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = make({"key": KEY, "generation": 1})
    bed.hear(lambda: bed.cluster.link)
    with monkeypatch.context() as patch:
        patch.setattr(bed.opener, "run", lambda *_: False)
        for number in range(4, 7):
            bed.open(data, number)
        bed.cluster.closed(5)
        bed.cluster.housekeep()
    assert not bed.cluster.link.shared
    bed.cluster.housekeep()
    end = time.monotonic() + 30
    while set(bed.cluster.link.shared) != {4, 6}:
        assert time.monotonic() < end
        bed.opener.step()
        time.sleep(0.001)


def test_pools_of_other_chunks_call_it_by_another_name(
    make: Callable[..., Bed], data: Path
) -> None:
    """Messages count in chunks."""
    names = set()
    for chunk_bytes in (1 << 16, 1 << 21):
        bed = make({"key": KEY, "generation": 1}, chunk_bytes=chunk_bytes)
        bed.hear(lambda bed=bed: bed.cluster.link)
        bed.open(data, 4)
        names.add(bed.cluster.link.shared[4])
    assert len(names) == 2


def test_what_has_left_the_pool_meanwhile_is_not_shared(
    make: Callable[..., Bed], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another file's by then."""
    bed = make({"key": KEY, "generation": 1})
    bed.hear(lambda: bed.cluster.link)
    looked = list[Any]()

    def late(look: Any, then: Any) -> bool:
        looked.append((look(), then))
        return True

    with monkeypatch.context() as patch:
        patch.setattr(bed.opener, "run", late)
        bed.open(data, 4)
    bed.cluster.closed(4)
    found, then = looked[0]
    then(found)
    assert not bed.cluster.link.shared


def test_what_has_changed_since_it_was_opened_is_not_shared(
    make: Callable[..., Bed], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pool has read of it may be older than what the name would say."""
    bed = make({"key": KEY, "generation": 1})
    bed.hear(lambda: bed.cluster.link)
    st = data.stat()
    bed.open(data, 4, Times(st.st_size, st.st_mtime_ns - 1, st.st_ctime_ns))
    assert not bed.cluster.link.shared
    assert "changed since it was opened" in bed.ledger.degradations[0]


def test_one_that_is_not_shared_or_cannot_be_read_is_said_but_a_local_one(
    make: Callable[..., Bed], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = make({"key": KEY, "generation": 1})
    bed.hear(lambda: bed.cluster.link)
    bed.open(data, 1, f_type=EXT4)
    assert not bed.ledger.degradations
    bed.open(data, 3, f_type=OVERLAY)

    def broken(*_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(identity, "probe", broken)
    bed.open(data, 2)
    assert not bed.cluster.link.shared
    first, second = bed.ledger.degradations
    assert "not a network file system" in first and "Input/output error" in second
    (own,) = bed.cluster.describe()["not_shared"]
    assert own == {"path": str(data), "why": "Input/output error"}, "the last one of that path"


def test_a_transport_of_an_older_generation_is_not_let_in(make: Callable[..., Bed]) -> None:
    bed = make({"key": KEY, "generation": 1})
    ours, theirs = socket.socketpair()
    assert not bed.cluster.join(ours, 7, 1), "nobody knows the key yet"
    bed.hear(lambda: bed.cluster.link)
    bed.cluster._heard({"failed": "no MPI yet"})
    assert bed.cluster.describe()["why_not"] == "no MPI yet"
    assert not bed.cluster.join(ours, 7, 2), "nobody knows that one's key yet"
    bed.cluster._heard({"key": "07" * 32, "generation": 2})
    assert bed.cluster.join(ours, 7, 2) and bed.cluster.link.key == bytes([7]) * 32
    assert bed.cluster.describe()["why_not"] is None
    assert not bed.cluster.join(ours, 7, 1)
    bed.cluster._heard({"key": KEY, "generation": 3})
    assert bed.cluster.join(ours, 7, 3)
    bed.cluster.link.is_failed = True
    bed.cluster.housekeep()
    assert bed.cluster.link.left == 1
    said = bed.cluster.describe()
    assert said["from_bytes"] == 7 and said["transport_cpu_seconds"] == 1.5
    assert said["network_bytes_per_second"] == 8 and said["file_system_bytes_per_second"] is None
    (link,) = said["links"]
    assert link == {
        "node": 2, "from_bytes": 5, "to_bytes": 6, "late": 1, "corrupt": 0,
        "longest_answer_seconds": 0.007,
    }  # fmt: skip
    bed.cluster.link.corrupt = 3
    for _ in range(3):
        bed.cluster.housekeep()
    named = [text for text in bed.ledger.degradations if "node 2 has sent bytes" in text]
    assert len(named) == 1
    for end in (ours, theirs):
        end.close()


def test_nonsense_of_a_convener_is_passed_over(make: Callable[..., Bed]) -> None:
    bed = make({"what": 1}, {"started": 2, "mpi": "MPICH"})
    bed.cluster._convener._rest = b"{nonsense\n[1, 2]\n"
    bed.hear(lambda: bed.cluster.mpi)
    assert bed.cluster.mpi == "MPICH" and not bed.ledger.degradations
