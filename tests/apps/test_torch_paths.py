# SPDX-License-Identifier: Apache-2.0
"""Data sets of small files: from what the hook tells of a DataLoader's data set, and what was seen
to be opened, the helper finds out which files its samples read, or leaves it alone."""

from __future__ import annotations

import json
import os
import random
from array import array
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_service import HAVE_TORCH

from uffdprefetch.job import channel, datasets
from uffdprefetch.orders import paths_file
from uffdprefetch.orders.indexer import Indexer
from uffdprefetch.orders.sample_search import TRIES_MAX

if not HAVE_TORCH:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

pytestmark = pytest.mark.torch

N = 400
DIRECTORIES = 8
BATCH = 32


class Files:
    """A tree of files, images and masks, and which of them a data set has opened."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.opened: list[str] = []
        source = random.Random(3)
        for name in ("image", "mask"):
            for i in range(DIRECTORIES):
                os.makedirs(f"{root}/{name}/c{i}")
        ids = [f"{i % DIRECTORIES}/{source.randrange(10**7):07}" for i in range(N)]
        self.images = [f"{root}/image/c{name}.jpg" for name in ids]
        self.masks = [f"{root}/mask/c{name}_mask.png" for name in ids]
        os.makedirs(f"{root}/numbered")
        self.numbered = [f"{root}/numbered/img_{i:05}.bin" for i in range(N)]
        for path in (*self.images, *self.masks, *self.numbered):
            Path(path).touch()

    def open(self, *paths: Any) -> int:
        for path in paths:
            with open(path, "rb"):
                self.opened.append(os.path.realpath(path))
        return 0

    def names(self) -> list[str]:
        return [os.path.relpath(path, f"{self.root}/image") for path in self.images]


class Images(Dataset):
    """Whatever attributes a test gives it; ``path``: of a sample, or several."""

    def __init__(self, files: Files, path: Callable[[Any, int], Any], **attributes: Any) -> None:
        self.__dict__.update(attributes)
        type(self).read = staticmethod(lambda own, i: files.open(*_several(path(own, i))))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return type(self).read(self, index)  # type: ignore[attr-defined]


def _several(path: Any) -> Any:
    return path if isinstance(path, tuple) else (path,)


class Loader:
    """What the service sees of an epoch, and the helper's answers."""

    def __init__(self, directory: Path, files: Files, dataset: Any, ahead: int = BATCH) -> None:
        self.directory, self.files, self.dataset, self.ahead = directory, files, dataset, ahead
        self.told = directory / "told.plan"
        self.told.mkdir(0o700, exist_ok=True)
        self.indexer = Indexer(str(self.told), None)
        self.begin(1)

    def begin(self, seed: int) -> None:
        """An epoch begins."""
        self.order = random.Random(seed).sample(range(len(self.dataset)), len(self.dataset))
        said = datasets.describe(self.dataset, array("q", self.order), None, torch)
        for part in said.parts:
            part["ahead"] = self.ahead
        channel.announce("loader-1", len(self.order), said.parts, said.arrays)
        said.published()
        self.number = max(int(path.stem.split("-")[1]) for path in self.told.glob("*.json"))
        self.first, self.read = True, 0
        self.done: list[tuple[int, str]] = []
        self.files.opened.clear()
        self.watched: set[str] = set()
        self.since: int | None = None

    def ask(self) -> Any:
        """The answer now. Opens are seen in directories that are watched, and others by chance."""
        seen = [path for i, path in enumerate(self.files.opened)
                if os.path.dirname(path) in self.watched or i % 4 == 0]  # fmt: skip
        question = {
            "do": "announced", "pid": os.getpid(), "number": self.number, "files": [],
            "process": 0, "said": self.read, "done": self.done, "first": self.first,
            "opens": {"paths": seen, "directories": sorted(self.watched),
                      "since_items": self.since},
        }  # fmt: skip
        answer = json.loads(json.dumps(self.indexer.answer(question, lambda _: None)))
        assert "error" not in answer, answer
        self.first = False
        if answer["watch"] and self.since is None:
            self.since, self.watched = self.read, set(answer["watch"])
        return answer

    def go_on(self, items: int = BATCH) -> None:
        for i in self.order[self.read : self.read + items]:
            self.dataset[i]
        self.read += items

    def answer(self, batches: int = 3) -> Any:
        """The answer after so many batches, or once there is an order."""
        answer = self.ask()
        for _ in range(batches):
            if answer["file_orders"]:
                break
            self.go_on()
            answer = self.ask()
        return answer

    def paths(self, answer: Any) -> list[str]:
        (found,) = answer["file_orders"]
        order = paths_file.read(str(self.told), found["order"])
        return order.paths(0, len(order))

    def read_in_order(self) -> list[str]:
        """All files, as they are really opened."""
        self.files.opened.clear()
        for i in self.order:
            self.dataset[i]
        return list(self.files.opened)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path.resolve() / "tree")


@pytest.fixture
def loader(tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loader]:
    monkeypatch.setenv(channel.SOCKET_VARIABLE, str(tmp_path / "told"))
    monkeypatch.setattr(channel, "_notify_service", lambda *_: None)
    return lambda dataset, **options: Loader(tmp_path, files, dataset, **options)


Sample = namedtuple("Sample", "path label")


class Entry:
    """A sample as an object."""

    def __init__(self, path: str) -> None:
        self.path, self.label = path, 3


class Slotted:
    """A sample without an instance dictionary."""

    __slots__ = ("label", "path")

    def __init__(self, path: str) -> None:
        self.path, self.label = path, 3


class Holder:
    """An attribute with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def image_folder(f: Files) -> Any:
    samples = [(path, i % 3) for i, path in enumerate(f.images)]
    return Images(f, lambda s, i: s.samples[i][0], samples=samples, imgs=samples)


def relative_pandas(f: Files) -> Any:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"file": f.names(), "label": range(N)})
    return Images(f, lambda s, i: os.path.join(s.root, s.frame.iloc[i]["file"]),
                  frame=frame, root=Path(f.root) / "image")  # fmt: skip


def pandas_series(f: Files) -> Any:
    pandas = pytest.importorskip("pandas")
    return Images(f, lambda s, i: s.paths[i], paths=pandas.Series(f.images, dtype=object))


def pandas_index(f: Files) -> Any:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": range(N)}, index=f.names())
    return Images(f, lambda s, i: f"{s.at['root']}/{s.frame.index[i]}",
                  frame=frame, at={"root": f"{f.root}/image"})  # fmt: skip


def coco(f: Files) -> Any:
    ids = [7 * i + 100 for i in range(N)]
    images = {at: {"id": at, "file_name": name} for at, name in zip(ids, f.names(), strict=True)}
    images |= {3: {"id": 3, "file_name": "none"}}
    return Images(f, lambda s, i: os.path.join(s.root, s.coco.imgs[s.ids[i]]["file_name"]),
                  coco=Holder(imgs=images), ids=ids, root=f"{f.root}/image")  # fmt: skip


def split(f: Files) -> Any:
    return Images(f, lambda s, i: f"{s.root}/{s.part}/{s.names[i]}",
                  names=f.names(), root=f.root, part="image")  # fmt: skip


def stems(f: Files) -> Any:
    names = [path.removesuffix(".bin").rpartition("/")[2] for path in f.numbered]
    shuffled = random.Random(5).sample(names, N)
    return Images(f, lambda s, i: f"{f.root}/numbered/{s.ids[i]}.bin", ids=shuffled)


def hugging_face(f: Files, image: bool, shuffled: bool) -> Any:
    library = pytest.importorskip("datasets")
    data = library.Dataset.from_dict({"image": f.images, "label": list(range(N))})
    paths = {i: path for i, path in enumerate(data["image"])}
    if image:
        data = data.cast_column("image", library.Image())
    if shuffled:
        data = data.shuffle(seed=3)
        paths = {i: f.images[label] for i, label in enumerate(data["label"])}
    return Images(f, lambda s, i: paths[i], data=data)


def pairs_by_ending(f: Files) -> Any:
    names = [path.removesuffix("_mask.png") for path in f.masks]
    return Images(f, lambda s, i: (s.images[i], s.masks[i] + s.ending),
                  images=f.images, masks=names, ending="_mask.png")  # fmt: skip


CHOICE = np.random.default_rng(1).permutation(N)
FOUND: dict[str, Callable[[Files], Any]] = {
    "ImageFolder": image_folder,
    "list": lambda f: Images(f, lambda s, i: s.paths[i], paths=f.images),
    "pathlib": lambda f: Images(f, lambda s, i: s.paths[i], paths=[*map(Path, f.images)]),
    "numpy": lambda f: Images(f, lambda s, i: s.paths[i], paths=np.array(f.images)),
    "numpy of pairs": lambda f: Images(
        f, lambda s, i: tuple(s.both[i]), both=np.array([f.images, f.masks]).T
    ),
    "pairs": lambda f: Images(
        f, lambda s, i: (s.images[i], s.masks[i]), images=f.images, masks=f.masks
    ),
    "pairs in a dictionary": lambda f: Images(
        f, lambda s, i: (s.of["x"][i], s.of["y"][i]), of={"x": f.images, "y": f.masks}
    ),
    "pairs by ending": pairs_by_ending,
    "COCO": coco,
    "root and split": split,
    "stems": stems,
    "pandas": relative_pandas,
    "pandas series": pandas_series,
    "pandas index": pandas_index,
    "objects": lambda f: Images(f, lambda s, i: s.all[i].path, all=[*map(Entry, f.images)]),
    "slots": lambda f: Images(f, lambda s, i: s.all[i].path, all=[*map(Slotted, f.images)]),
    "namedtuples": lambda f: Images(
        f, lambda s, i: s.all[i].path, all=[Sample(path, 1) for path in f.images]
    ),
    "within": lambda f: Images(f, lambda s, i: s.base.x[i], base=Holder(x=f.images)),
    "permuted": lambda f: Images(
        f, lambda s, i: s.paths[s.perm[i]], paths=f.images, perm=CHOICE, labels=[1, 2] * (N // 2)
    ),
    "views": lambda f: Images(f, lambda s, i: s.paths[i // 4], paths=f.images[: N // 4]),
    "computed names": lambda f: Images(f, lambda s, i: f"{f.root}/numbered/img_{i:05}.bin"),
    "closure": lambda f: (lambda paths: Images(f, lambda s, i: s.at(i), at=lambda i: paths[i]))(
        list(f.images)
    ),
    "Hugging Face": lambda f: hugging_face(f, image=False, shuffled=False),
    "Hugging Face images": lambda f: hugging_face(f, image=True, shuffled=False),
    "Hugging Face, shuffled": lambda f: hugging_face(f, image=True, shuffled=True),
    "subset": lambda f: Subset(image_folder(f), CHOICE[:300].tolist()),
}


@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)
def test_the_files_of_samples_are_found(
    make: Callable[[Files], Any], files: Files, loader: Callable[..., Loader]
) -> None:
    epoch = loader(make(files))
    answer = epoch.answer()
    assert epoch.paths(answer) == epoch.read_in_order()
    assert (answer["again"], answer["findings"]) == (False, [])
    epoch.begin(2)
    assert epoch.paths(epoch.ask()) == epoch.read_in_order(), "it is known from its beginning on"


def test_a_data_set_whose_files_are_known_is_not_asked_for_records(
    files: Files, loader: Callable[..., Loader]
) -> None:
    epoch = loader(image_folder(files))
    assert epoch.answer()["file_orders"]
    epoch.done = [(0, "")]
    for _ in range(TRIES_MAX + 1):
        answer = epoch.ask()
        assert (answer["again"], answer["findings"], answer["file_orders"]) == (False, [], [])


def test_concatenated_data_sets_are_two_parts(files: Files, loader: Callable[..., Loader]) -> None:
    class More(Images):
        pass

    one = Images(files, lambda s, i: s.paths[i], paths=files.images)
    two = More(files, lambda s, i: s.paths[i], paths=files.numbered)
    epoch = loader(ConcatDataset([one, two]))
    answer = epoch.answer(6)
    assert {each["part"] for each in answer["file_orders"]} == {0, 1}


def permuted_unknown(f: Files) -> Any:
    return Images(f, lambda s, i: s.paths[int(CHOICE[i])], paths=f.images)


def from_lmdb(f: Files) -> Any:
    import lmdb

    env = lmdb.open(f"{f.root}/lmdb", map_size=1 << 24)
    with env.begin(write=True) as txn:
        for i, path in enumerate(random.Random(4).sample(f.images, N)):
            txn.put(b"%05d" % i, path.encode())

    def path(own: Any, i: int) -> str:
        with own.env.begin() as txn:
            return bytes(txn.get(b"%05d" % i)).decode()

    return Images(f, path, env=env)


LEFT_ALONE: dict[str, Callable[[Files], Any]] = {
    "permuted by what is not known": permuted_unknown,
    "names of files that are not there": lambda f: Images(
        f, lambda s, i: f.images[i], names=[f"{i}.none" for i in range(N)]
    ),
    "LMDB of paths": from_lmdb,
    "another list of the same files": lambda f: Images(
        f, lambda s, i: f.images[i], all=sorted(f.images), labels=list(range(N))
    ),
}


@pytest.mark.parametrize("make", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_read_in_another_order_is_left_alone(
    make: Callable[[Files], Any], files: Files, loader: Callable[..., Loader]
) -> None:
    epoch = loader(make(files))
    assert epoch.answer(N // BATCH)["file_orders"] == []


def test_a_list_of_files_in_another_order_is_refuted_by_the_opens(
    files: Files, loader: Callable[..., Loader]
) -> None:
    epoch = loader(permuted_unknown(files))
    for _ in range(TRIES_MAX):
        answer = epoch.answer()
    assert not answer["again"] and "opened in another order" in answer["findings"][0]


def test_workers_read_ahead_and_what_they_have_opened_before_is_not_missed(
    files: Files, loader: Callable[..., Loader]
) -> None:
    """They opened some before their directories were watched: that refutes nothing."""
    epoch = loader(image_folder(files), ahead=2 * BATCH)
    epoch.go_on(BATCH)
    epoch.read = 0
    files.opened.clear()  # nobody saw that
    epoch.ask()
    epoch.read = BATCH
    answer = epoch.ask()
    assert answer["again"] and not answer["file_orders"]
    assert epoch.paths(epoch.answer(6))


def test_files_behind_symbolic_links_are_found(files: Files, loader: Callable[..., Loader]) -> None:
    os.makedirs(f"{files.root}/links")
    links = [f"{files.root}/links/{i}.jpg" for i in random.Random(6).sample(range(N), N)]
    for link, path in zip(links, files.images, strict=True):
        os.symlink(path, link)
    os.symlink("image", f"{files.root}/again")
    for paths in (links, [path.replace("/image/", "/again/") for path in files.images]):
        epoch = loader(Images(files, lambda s, i: s.paths[i], paths=paths))
        found = epoch.paths(epoch.answer())
        assert found == [paths[i] for i in epoch.order]
