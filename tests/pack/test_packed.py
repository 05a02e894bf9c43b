# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch.data.Packed``: samples as torchvision has them, in whatever process and thread."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest
from packed_trees import make_tree, packed, write_tree

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.data import Packed, image, layout
from uffdprefetch.pack import writer


def as_torchvision(root: Path) -> tuple[list[str], dict[str, int], list[tuple[str, int]]]:
    """What its find_classes() and make_dataset() give, with paths below the root: directories
    sorted; in each os.walk() sorted, and of each directory the names sorted."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    numbers = {name: number for number, name in enumerate(classes)}
    samples = []
    for name in classes:
        for directory, _, names in sorted(os.walk(root / name)):
            for each in sorted(names):
                path = os.path.relpath(os.path.join(directory, each), root)
                samples.append((path, numbers[name]))
    return classes, numbers, samples


@pytest.fixture(params=[None, 4], ids=["shuffled", "as it is"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, dict[bytes, bytes]]:
    """A tree, what it is packed to, and its files; one lies in no directory."""
    files = make_tree(tmp_path / "tree", files=40)
    files |= {b"class1-x/1": b"1", b"class\xff/2": b"2", b"alone": b"no class"}
    write_tree(tmp_path / "tree", files)
    packed(tmp_path / "tree", tmp_path / "o.lmdb", seed=request.param)
    return tmp_path / "tree", tmp_path / "o.lmdb", files


def test_classes_samples_and_targets_are_as_torchvision_has_them(
    tree: tuple[Path, Path, dict[bytes, bytes]],
) -> None:
    root, path, files = tree
    data = Packed(path)
    assert (data.classes, data.class_to_idx, data.samples) == as_torchvision(root)
    assert data.imgs is data.samples
    assert data.targets == [target for _, target in data.samples]
    assert len(data) == len(files) - 1
    for number, (name, target) in enumerate(data.samples):
        assert data[number] == (files[os.fsencode(name)], target)
    assert data.read("alone") == data.read(b"alone") == b"no class"
    for missing in ("nothing", b"/meta", "x" * 600):
        with pytest.raises(KeyError):
            data.read(missing)


def test_loader_transforms_and_extensions(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree", {b"a/1.PNG": b"1", b"b/2.png": b"22", b"b/3.txt": b"333"})
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data = Packed(
        tmp_path / "o.lmdb", loader=len, transform=lambda n: n * 10,
        target_transform=lambda n: -n, extensions=(".png",),
    )  # fmt: skip
    assert [data[i] for i in range(len(data))] == [(10, 0), (20, -1)]
    assert "2 samples, 2 classes" in repr(data)


def test_files_in_no_directory_are_samples_of_no_class(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree", {b"1": b"1", b"2": b"22"})
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data = Packed(tmp_path / "o.lmdb")
    assert (data.classes, data.samples) == ([], [("1", -1), ("2", -1)])
    assert data[1] == (b"22", -1)


def test_in_stored_order_it_reads_as_it_was_shuffled(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb", seed=3)
    names = [name.encode() for name, _ in Packed(tmp_path / "o.lmdb", stored=True).samples]
    assert sorted(names) == sorted(files) != names
    with lmdb.open(str(tmp_path / "plain"), lock=False) as env:
        env.close()  # py-lmdb still opens others beside it
    assert names != [name.encode() for name, _ in Packed(tmp_path / "o.lmdb").samples]


def test_a_picture_is_as_image_folder_gives_it(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    (tmp_path / "tree" / "a").mkdir(parents=True)
    pil.new("P", (3, 2), 1).save(tmp_path / "tree" / "a" / "1.png")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    picture, _ = Packed(tmp_path / "o.lmdb", loader=image)[0]
    assert (picture.mode, picture.size) == ("RGB", (3, 2))


# ---- processes and threads -----------------------------------------------------------------------


def reads_all(data: Packed, results: Any) -> None:
    results.put([data[number] for number in range(len(data))])


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_it_is_read_in_children_however_they_start(
    tmp_path: Path, start: str, compressed: bool
) -> None:
    tree = {b"%d/%d" % (i % 3, i): b"some text that repeats %d" % i * 30 for i in range(80)}
    write_tree(tmp_path / "tree", tree)
    if compressed:
        pytest.importorskip("zstandard")
        from uffdprefetch.pack.packing import PackOptions, pack

        pack(PackOptions((str(tmp_path / "tree"),), str(tmp_path / "o"), level=3), print)
    else:
        packed(tmp_path / "tree", tmp_path / "o")
    data = Packed(tmp_path / "o")
    other = Packed(tmp_path / "o", loader=len)  # of the same file, as a validation's often is
    expected = [data[number] for number in range(len(data))]  # so the parent has it open
    context = multiprocessing.get_context(start)
    results = context.Queue()
    children = [context.Process(target=reads_all, args=(data, results)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in children:
        assert results.get(timeout=120) == expected
    for child in children:
        child.join()
    assert other[0] == (len(expected[0][0]), expected[0][1])
    assert [data[number] for number in range(len(data))] == expected


def test_the_metadata_server_hears_of_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "tree", {b"a/1": b"one", b"a/2": b"two"})
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data = Packed(tmp_path / "o.lmdb")
    asked = []
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **more: asked.append(args) or real(*args, **more))
    assert [data[i] for i in (0, 1, 0)] == [(b"one", 0), (b"two", 0), (b"one", 0)]
    assert asked == []


def test_another_database_at_the_same_path_is_another_data_set(tmp_path: Path) -> None:
    for value in (b"first", b"second"):
        write_tree(tmp_path / value.decode(), {b"a/1": value})
        packed(tmp_path / value.decode(), tmp_path / f"{value.decode()}.lmdb")
        os.replace(tmp_path / f"{value.decode()}.lmdb" / "data.mdb", tmp_path / "data.mdb")
        assert Packed(tmp_path)[0] == (value, 0)


def test_it_is_pickled_without_what_is_open(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data = Packed(tmp_path / "o.lmdb", loader=bytes)
    first = data[0]
    again = pickle.loads(pickle.dumps(data))
    assert again.samples == data.samples and again[0] == first


def test_threads_read_at_once(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data, wrong = Packed(tmp_path / "o.lmdb"), []

    def read() -> None:
        for _ in range(20):
            for name, _ in data.samples:
                if data.read(name) != files[name.encode()]:
                    wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what it refuses -----------------------------------------------------------------------------


def test_what_is_not_complete_or_no_packed_database_is_said(tmp_path: Path) -> None:
    one = writer.PackWriter(str(tmp_path / "half"), layout.PackDescription(("x",)))
    one.close()
    with lmdb.open(str(tmp_path / "other"), lock=False) as env, env.begin(write=True) as some:
        some.put(b"a", b"b")
    later = writer.PackWriter(
        str(tmp_path / "later"), layout.PackDescription(("x",), version=layout.VERSION + 1)
    )
    later.close()
    for name, why in (
        ("half", "packing has not come to its end"),
        ("other", "has not packed"),
        ("later", "use a newer uffdprefetch"),
        ("none", "cannot read"),
    ):
        with pytest.raises(UffdPrefetchError, match=why):
            Packed(tmp_path / name)
