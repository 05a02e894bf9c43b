# SPDX-License-Identifier: Apache-2.0
"""orders/file_links.py: the real names of files, and announced paths with them, as the helper
resolves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import warnings_fail

from uffdprefetch.job import announce as job_announce
from uffdprefetch.job import channel
from uffdprefetch.orders import announcement, paths_file
from uffdprefetch.orders.file_links import RealNames, aliases
from uffdprefetch.orders.file_order import FileOrder, PathOrder
from uffdprefetch.orders.indexer import Indexer

pytestmark = warnings_fail


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """store/d0, store/d1 with 20 files; data/a -> d0; data/b with a link to each of d1."""
    for i in range(20):
        path = tmp_path / "store" / f"d{i % 2}" / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "data" / "b").mkdir(parents=True)
    (tmp_path / "data" / "a").symlink_to("../store/d0")
    for i in range(1, 20, 2):
        (tmp_path / "data" / "b" / f"link{i}.jpg").symlink_to(f"../../store/d1/{i:02}.jpg")
    return tmp_path


def test_a_directory_that_is_a_link_is_an_alias_and_links_of_files_are_none(tree: Path) -> None:
    names = RealNames()
    through = [f"{tree}/data/a/{i:02}.jpg" for i in range(0, 20, 2)]
    assert names.file(through[0]) == f"{tree}/store/d0/00.jpg"
    assert aliases(through, names) == [(f"{tree}/store/d0/", f"{tree}/data/a/")]
    each = [f"{tree}/data/b/link{i}.jpg" for i in range(1, 20, 2)]
    assert names.file(each[0]) == f"{tree}/store/d1/01.jpg"
    assert aliases(each, names) == []
    assert aliases([f"{tree}/store/d0/00.jpg", f"{tree}/none/x"], names) == []


def resolved(directory: Path, monkeypatch: pytest.MonkeyPatch, **order: Any) -> dict[str, Any]:
    """The helper's answer to what this process announces."""
    told = directory / "told.plan"
    told.mkdir(0o700)
    monkeypatch.setenv(channel.SOCKET_VARIABLE, str(directory / "told"))
    monkeypatch.setattr(channel, "_notify_service", lambda *_: None)
    assert job_announce.announce(**order).active
    (name,) = (path.stem for path in told.glob("*.json"))
    question = {
        "do": "announced", "pid": os.getpid(), "number": int(name.split("-")[1]), "files": [],
        "process": 0, "said": 0, "done": [], "first": True,
    }  # fmt: skip
    answer = Indexer(str(told), None).answer(question, lambda _: None)
    assert "error" not in answer, answer
    return answer


def order_of(directory: Path, answer: dict[str, Any]) -> PathOrder:
    (found,) = answer["file_orders"]
    assert (found["part"], found["how"]) == (0, "paths announced")
    return paths_file.read(str(directory / "told.plan"), found["order"])


def test_announced_paths_are_an_order_at_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "data")
    given = [Path("a/02.jpg"), "a/00.jpg", f"{tree}/store/d1/01.jpg", b"a/\xff.jpg"]
    answer = resolved(tree, monkeypatch, paths=given)
    assert (answer["orders"], answer["again"], answer["findings"]) == ([], False, [])
    order = order_of(tree, answer)
    whole = [os.path.join(tree / "data", os.fsdecode(path)) for path in given]
    assert order.paths(0, 9) == whole and order.items == 4
    reader = FileOrder(order, "told")
    assert [reader.opened(f"{tree}/store/d0/{name}.jpg") for name in ("02", "00")] == [0, 1]
    assert reader.ahead(reader.position, 8) == whole[2:]


@pytest.mark.parametrize(
    "order",
    [{"paths": []}, {"paths": "a"}, {"paths": [3]}, {"paths": ["a\0"]}, {"paths": [""]},
     {"paths": ["a"], "file": "b"}, {"paths": ["a"], "records": [1]}, {"records": [1]}],
)  # fmt: skip
def test_paths_that_cannot_be_are_refused(order: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        job_announce.announce(**order)


@pytest.mark.parametrize(
    "data", [channel.packed([b"a\0"]), channel.packed([b""]), channel.packed([b"a" * 5000]), b"12"]
)
def test_what_is_no_list_of_paths_is_no_announcement(tmp_path: Path, data: bytes) -> None:
    part = announcement._part({"what": "paths", "array": "a", "cwd": "/"}, 1)
    (tmp_path / "1-1.a").write_bytes(data)
    said = announcement.StoredAnnouncement(str(tmp_path / "1-1"), 1, 1, "r", 1, 1, [part])
    with pytest.raises(announcement.AnnounceError):
        said.paths(part)
    with pytest.raises(announcement.AnnounceError):
        announcement._part({"what": "paths", "array": "a", "cwd": "here"}, 1)
