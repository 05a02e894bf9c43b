# SPDX-License-Identifier: Apache-2.0
"""What is found in a data set without calling anything of it: key lists, inner ones, tokens."""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import sys
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pytest
from arrow_shards import write_library, write_shards
from torch_service import HAVE_TORCH

from uffdprefetch.job import datasets, lists, samplers
from uffdprefetch.job.channel import packed
from uffdprefetch.job.epochs import Settings
from uffdprefetch.job.keys import part
from uffdprefetch.job.tables import IdentityTable
from uffdprefetch.orders.key_lists import KeyList

if not HAVE_TORCH:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, Subset

pytestmark = pytest.mark.torch

N = 20


class Records(Dataset):
    """Whatever attributes a test gives it."""

    def __init__(self, samples: int = N, **attributes: Any) -> None:
        self.__dict__.update(attributes, samples=samples)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Touchy(list):
    """A list of the user's own: any use is an error."""

    def __len__(self) -> int:
        raise AssertionError("called")

    __getitem__ = __iter__ = __eq__ = __hash__ = __len__  # type: ignore[assignment]


class Holder:
    """An attribute with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("called")


def found(**attributes: Any) -> dict[str, tuple[str, Any]]:
    """name -> (kind, elements) of what is found in a data set with these attributes."""
    records = Records(**attributes)
    said, arrays = datasets._lists(lists.columns(records, N), "x", lists.CAP_BYTES)
    result = {}
    for each in said:
        data, count = arrays[each["array"]], each["count"]
        values: list[Any]
        if each["kind"] == "ints":
            values = array("q", data).tolist()
        else:
            numbers = array("q", data[: 8 * (count + 1)]).tolist()
            body, ends = data[8 * (count + 1) :], [0, *numbers[1:]]
            values = [body[a:b] for a, b in itertools.pairwise(ends)]
            if each["kind"] == "text":
                values = [value.decode("utf-8", "surrogateescape") for value in values]
        assert len(values) == count
        result[each["name"]] = each["kind"], values
    return result


class Slotted:
    """An element without an instance dictionary, one of whose slots has no value."""

    __slots__ = ("later", "path")

    def __init__(self, path: str) -> None:
        self.path = path


class Row(NamedTuple):
    """An element that is a tuple; its fields are found by their places."""

    path: str
    label: int

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("called")


def closed_over(values: Any) -> Any:
    return lambda i: values[i]


TEXTS = [f"kéy-{i}" for i in range(N)]
BYTES = [b"%d" % i for i in range(N)]
INTS = [7 * i - 3 for i in range(N)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (TEXTS, {"x": ("text", TEXTS)}),
        (tuple(BYTES), {"x": ("bytes", BYTES)}),
        (INTS, {"x": ("ints", INTS)}),
        ([*BYTES, b"one more"], {"x": ("bytes", BYTES)}),
        (dict(enumerate(TEXTS)), {"x": ("text", TEXTS)}),
        ([(t, 0.5, i) for i, t in enumerate(TEXTS)],
         {"x[0]": ("text", TEXTS), "x[2]": ("ints", list(range(N)))}),
        ([{"image": t, "size": 1.5} for t in TEXTS], {"x[image]": ("text", TEXTS)}),
        ([Path("/a") / t for t in TEXTS], {"x": ("text", [f"/a/{t}" for t in TEXTS])}),
        (["\udc80" + t for t in TEXTS], {"x": ("text", ["\udc80" + t for t in TEXTS])}),
        (np.array(INTS, np.int32), {"x": ("ints", INTS)}),
        (np.array(BYTES), {"x": ("bytes", BYTES)}),
        (np.array(TEXTS), {"x": ("text", TEXTS)}),
        (np.array(TEXTS, object), {"x": ("text", TEXTS)}),
        (Holder(keys=BYTES), {"x.keys": ("bytes", BYTES)}),
        ({"train": TEXTS, "few": TEXTS[:3]}, {"x[train]": ("text", TEXTS)}),
        ([TEXTS, BYTES], {"x[0]": ("text", TEXTS), "x[1]": ("bytes", BYTES)}),
        ([Holder(path=t, size=0.5) for t in TEXTS], {"x.path": ("text", TEXTS)}),
        ([Slotted(t) for t in TEXTS], {"x.path": ("text", TEXTS)}),
        ([Row(t, i) for i, t in enumerate(TEXTS)],
         {"x[0]": ("text", TEXTS), "x[1]": ("ints", list(range(N)))}),
        (np.array([TEXTS, TEXTS]).T, {"x[:, 0]": ("text", TEXTS), "x[:, 1]": ("text", TEXTS)}),
        (TEXTS[:10], {"x": ("text", TEXTS[:10])}),
        (closed_over(TEXTS), {"x.values": ("text", TEXTS)}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_lists_of_keys_are_found_whatever_they_are_kept_in(value: Any, expected: Any) -> None:
    assert found(x=value) == expected


@pytest.mark.parametrize(
    "value",
    [
        TEXTS[1:],
        [0.5] * N,
        [True] * N,
        [*TEXTS[:-1], None],
        [*TEXTS[:9], 5, *TEXTS[10:]],
        [*TEXTS[:9], Path("a"), *TEXTS[10:]],
        [None] * N,
        [(t,) for t in TEXTS[:9]] + [()] + [(t,) for t in TEXTS[10:]],
        [*INTS[:9], 1 << 70, *INTS[10:]],
        dict(zip(TEXTS, TEXTS, strict=True)),
        Touchy(TEXTS),
        [Touchy() for _ in range(N)],
        [Holder(path=t) for t in TEXTS[:-1]] + [Holder(path=3)],
        [Holder(path=t) for t in TEXTS[1:]] + [Holder(other="x")],
        [Holder(path=t) if i else Slotted(t) for i, t in enumerate(TEXTS)],
        TEXTS[:7],
        np.zeros((N, 2), np.int64),
        torch.zeros(N, dtype=torch.int64),
        "k" * N,
        Records,
        sys,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_list_of_keys_is_passed_over(value: Any) -> None:
    assert found(x=value) == {}


def test_lists_by_the_elements_of_another_list() -> None:
    ids = [3 * i + 5 for i in range(N)]
    images = {at: {"id": at, "name": text} for at, text in zip(ids, TEXTS, strict=True)}
    assert found(ids=ids, of=Holder(images={**images, 4: {}})) == {
        "ids": ("ints", ids),
        "of.images[ids][id]": ("ints", ids),
        "of.images[ids][name]": ("text", TEXTS),
    }
    del images[ids[8]]
    images |= {1: {}, 2: {}}
    assert list(found(ids=ids, images=images)) == ["ids"]


def test_columns_of_tables_are_found_and_are_the_same_next_time() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": TEXTS, "b": INTS, "c": [0.5] * N, "d": [None, *TEXTS[1:]]})
    named = pandas.DataFrame({"b": INTS}, index=TEXTS)
    expected = {"x[a]": ("text", TEXTS), "x[b]": ("ints", INTS)}
    assert found(x=frame) == expected
    assert found(x=named) == {"x[b]": ("ints", INTS), "x.index": ("text", TEXTS)}
    assert found(x=frame["a"]) == {"x": ("text", TEXTS)}
    records = Records(x=frame, y=np.array([TEXTS, TEXTS]).T)
    describe(records, [1]).published()
    assert describe(records, [1]).parts[0].get("known")


def test_a_table_that_is_made_otherwise_has_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": TEXTS})
    monkeypatch.setattr(pandas.DataFrame, "iloc", None)
    assert found(x=frame, y=BYTES) == {"y": ("bytes", BYTES)}


def test_texts_that_may_be_directories_are_told() -> None:
    records = Records(
        root="/data", at=Path("/more"), config={"split": "train"}, own=Holder(ext=".jpg"),
        long="x" * 5000, number=3,
    )  # fmt: skip
    (said,) = describe(records, [1]).parts
    assert said["texts"] == ["/data", "/more", "train", ".jpg"]
    assert said["cwd"] == os.getcwd()
    many = Records(**{f"a{i}": f"{i}" + 200 * "é" for i in range(99)})
    assert sum(map(len, describe(many, [1]).parts[0]["texts"])) <= 4096


def test_an_array_that_lies_in_a_mapped_file_is_not_touched(tmp_path: Path) -> None:
    np.arange(N).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.int64)
    with open(tmp_path / "tokens", "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        through = np.frombuffer(pages, np.int64)
        assert found(a=mapped, b=np.asarray(mapped), c=np.asarray(mapped)[:], d=through) == {}
        del through


def test_one_list_under_two_names_is_one_and_all_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(found(x=INTS, y=INTS)) == ["x"]
    monkeypatch.setattr(lists, "CAP_BYTES", 8 * N + 10)
    assert list(found(x=INTS, y=[*INTS])) == ["x"]


@pytest.mark.parametrize("values", [TEXTS, [f"key-{i}" for i in range(N)], ["", *TEXTS[1:]]])
def test_text_is_packed_as_the_channel_packs_it(values: list[str]) -> None:
    (column,) = lists.columns(Records(x=values), N)
    assert column.data() == packed(value.encode() for value in values)


def describe(dataset: Any, items: list[int]) -> datasets.Description:
    return datasets.describe(dataset, array("q", items), None, torch)


def test_lists_are_said_again_only_when_they_have_changed() -> None:
    records = Records(keys=list(BYTES))
    first = describe(records, [1])
    assert [each["name"] for each in first.parts[0]["lists"]] == ["keys"]
    assert "known" not in describe(records, [1]).parts[0], "the first one has not arrived"
    first.published()
    again = describe(records, [2])
    assert (again.parts[0]["known"], again.parts[0]["lists"]) == (True, [])
    assert again.parts[0]["token"] == first.parts[0]["token"]
    records.keys.reverse()
    assert [each["name"] for each in describe(records, [2]).parts[0]["lists"]] == ["keys"]


def test_items_lead_through_subsets_and_concatenations_to_samples_of_inner_data_sets() -> None:
    a, b = Records(5), Records(7)
    tree = Subset(ConcatDataset([a, Subset(b, torch.tensor([6, 5, 4])), a]), range(12, -1, -1))
    said = describe(tree, [0, 12, 7, 5])
    samples, turns = ([said.arrays[part[name]].tolist() for part in said.parts]
                      for name in ("array", "turns"))  # fmt: skip
    assert samples == [[0], [6, 4], [4]]
    assert turns == [[1], [2, 3], [0]]
    assert [part["samples"] for part in said.parts] == [5, 7, 5]
    assert said.parts[0]["token"] == said.parts[2]["token"] != said.parts[1]["token"]


def test_what_overrides_torchs_way_to_a_sample_is_a_data_set_of_its_own() -> None:
    class Odd(ConcatDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index - 1)

    class Many(Subset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return []

    for dataset in (Odd([Records(1), Records(2)]), Many(Records(), [5, 6, 7])):
        (part,) = describe(dataset, [0, 2]).parts
        assert part["samples"] == 3


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package ``datasets`` as far as tests/support/arrow_shards.py has it."""
    write_library(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("datasets", "datasets.table", "datasets.arrow_dataset"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("datasets")
    for name in ("datasets", "datasets.table", "datasets.arrow_dataset"):
        del sys.modules[name]


def told(said: datasets.Description) -> tuple[list[Path], set[tuple[int, int, int, int]]]:
    """The files of the only part; and of each buffer (number of the file that is mapped at its
    address, first row, rows, row in the buffer)."""
    (part,) = said.parts
    files = KeyList.parse("files", "bytes", said.arrays[part["files"]])
    paths = [Path(os.fsdecode(path)) for path in files.take(np.arange(len(files)))]
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if Path(path) in paths:
            mapped.append((*(int(end, 16) for end in span.split("-")), paths.index(Path(path))))
    numbers = said.arrays[part["buffers"]].tolist()
    return paths, {
        (next(file for start, end, file in mapped if start <= address < end), *rows)
        for address, *rows in zip(*(numbers[i::4] for i in range(4)), strict=True)
    }


def test_a_shuffled_hugging_face_data_set_leads_to_rows_of_its_table(library: Any) -> None:
    shuffled = library.Dataset(library.table.InMemoryTable(pyarrow.table({"x": range(10)})))
    said = describe(shuffled.indexed([7, 3, 9]), [2, 0])
    assert said.parts[0]["samples"] == 10
    assert said.arrays["p0.samples"].tolist() == [9, 7]
    assert "buffers" not in said.parts[0], "it is in memory"


def test_a_hugging_face_table_tells_in_which_files_its_rows_are(
    library: Any, tmp_path: Path
) -> None:
    table = library.table
    paths = write_shards(tmp_path, (7, 5), np.random.default_rng(1), (10, 20))
    one, two = (table.MemoryMappedTable.from_file(str(path)) for path in paths)
    mapped = table.InMemoryTable(one.table.slice(0, 2))  # by its name alone it is in memory
    for data, expected in (
        (one, (paths[:1], {(0, 0, 7, 0)})),
        (table.ConcatenationTable([[one], [two]]), (paths, {(0, 0, 7, 0), (1, 7, 5, 0)})),
        (  # selected twice, none, a file again
            table.ConcatenationTable(
                [[one.slice(2).slice(1, 3)], [one.slice(7)], [mapped], [two], [one]]
            ),
            (paths, {(0, 0, 3, 3), (0, 3, 2, 0), (1, 5, 5, 0), (0, 10, 7, 0)}),
        ),
    ):
        said = describe(library.Dataset(data), [3, 1, 4])
        assert told(said) == expected
        assert said.parts[0]["lists"] == []


def test_of_a_table_it_is_told_what_is_read_of_it(library: Any, tmp_path: Path) -> None:
    """Renamed, cast, without a column, or by a format that gives one."""
    (path,) = write_shards(tmp_path, (7,), np.random.default_rng(1), (10, 20))
    table = library.table.MemoryMappedTable.from_file(str(path))

    def addresses(made: Any, given: list[str] | None = None) -> list[int]:
        dataset = library.Dataset(library.table.MemoryMappedTable(made, str(path)))
        dataset._format_columns = given
        return describe(dataset, [1]).arrays["p0.buffers"].tolist()[::4]

    label, data = addresses(table.table)
    assert addresses(table.table.rename_columns(["a", "b"])) == [label, data]
    assert addresses(table.table.drop_columns(["label"])) == [data]
    assert addresses(table.table, ["label"]) == [label]
    wider = pyarrow.schema([("label", pyarrow.int64()), ("data", pyarrow.large_binary())])
    assert addresses(table.table.cast(wider))[0] == label, "its other buffers are made anew"


def test_a_table_of_a_class_that_is_not_known_tells_nothing(library: Any, tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, (7,), np.random.default_rng(1), (10, 20))
    table = library.table.MemoryMappedTable.from_file(str(path))

    class Own(type(table)):  # type: ignore[misc]
        pass

    own = Own(table.table, table.path)
    assert "files" not in describe(library.Dataset(own), [1]).parts[0]
    within = library.table.ConcatenationTable([[own]])
    assert "files" not in describe(library.Dataset(within), [1]).parts[0]
    del table.path
    assert "files" not in describe(library.Dataset(table), [1]).parts[0]


def test_samples_beyond_the_data_set_are_not_announced() -> None:
    for items in ([N], [-1]):
        with pytest.raises(samplers.Unknown):
            describe(Records(), items)
    with pytest.raises(samplers.Unknown):
        describe(ConcatDataset([Records()]), [-1])


def test_tokens_tell_data_sets_apart_and_are_the_same_for_an_equal_one_elsewhere() -> None:
    def token(dataset: Any) -> str:
        return datasets.discover_datasets(dataset)[0].token

    one, two = Records(root="/data/token-one"), Records(root="/data/token-one")
    assert token(one) == token(one)
    assert token(Records(root="/data/token-two")) != token(one)
    assert token(two) == token(one) + "-2"
    del two
    assert token(Records(root="/data/token-one")) == token(one) + "-2"


def test_lists_that_come_with_the_first_samples_are_the_news() -> None:
    records = Records(labels=INTS)
    before = datasets.known_datasets(records)
    assert datasets.late_lists(records, array("q", [3]), before, torch) == []
    records.keys = BYTES
    ((token, said, _),) = datasets.late_lists(records, array("q", [3]), before, torch)
    assert (token, said[0]["name"], said[0]["count"]) == (before[0].token, "keys", N)


# ---- samplers ------------------------------------------------------------------------------------


def test_an_order_is_computed_without_moving_any_generator() -> None:
    own = torch.Generator().manual_seed(3)
    for generator in (None, own):
        sampler = RandomSampler(Records(1000), generator=generator)
        before = torch.get_rng_state(), own.get_state()
        order = samplers.order(sampler, torch)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(own.get_state(), before[1])
        assert order.tolist() == list(sampler)


def test_a_length_is_asked_for_once() -> None:
    class Counting(Records):
        asked = 0

        def __len__(self) -> int:
            Counting.asked += 1
            return N

    sampler = RandomSampler(Counting(), num_samples=3 * N)
    Counting.asked = 0
    samplers.order(sampler, torch)
    assert Counting.asked == 1


def test_samplers_with_an_iteration_of_their_own_are_unknown() -> None:
    class Own(RandomSampler):
        def __iter__(self) -> Any:
            return super().__iter__()

    batches = torch.utils.data.BatchSampler(Own(Records()), 2, False)
    for sampler in (Own(Records()), batches, object(), [[1, 2]].__iter__()):
        with pytest.raises(samplers.Unknown, match="not a sampler of torch's"):
            samplers.order(sampler, torch)


def test_a_method_of_torchs_that_somebody_has_replaced_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter([1]))
    with pytest.raises(samplers.Unknown):
        samplers.order(RandomSampler(Records()), torch)


def test_longer_orders_than_the_cap_are_left_alone_before_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "randperm", None)
    with pytest.raises(samplers.Unknown, match="more than"):
        samplers.order(RandomSampler(Records(samplers.CAP_ITEMS + 1)), torch)


# ---- the user's own key function -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "what", "turns"),
    [
        (lambda i: f"k{i}", "keys", [0, 1, 2]),
        (lambda i: b"k%d" % i, "keys", [0, 1, 2]),
        (lambda i: i + 5, "records", [0, 1, 2]),
        (lambda i: np.int64(i), "records", [0, 1, 2]),
        (lambda i: [f"a{i}", f"b{i}"], "keys", [0, 0, 1, 1, 2, 2]),
        (lambda i: (i % 3) * (i,), "records", [0, 2, 2]),
    ],
)
def test_key_gives_keys_or_record_numbers_one_or_several(key: Any, what: str, turns: Any) -> None:
    (said,), arrays = part(Settings(key, "/f"), array("q", [4, 3, 2]))
    assert (said["what"], said["file"], arrays["p0.turns"].tolist()) == (what, "/f", turns)
    answers = [key(i) for i in (4, 3, 2)]
    flat = [a for some in answers for a in (some if type(some) in (list, tuple) else [some])]
    if what == "records":
        assert arrays["p0.records"].tolist() == flat
    else:
        text = b"".join(a if isinstance(a, bytes) else a.encode() for a in flat)
        assert arrays["p0.keys"][8 * (1 + len(flat)) :] == text


def test_key_is_asked_once_for_each_item() -> None:
    asked: list[int] = []
    given = Settings(lambda i: asked.append(i) or i)  # type: ignore[func-returns-value]
    part(given, array("q", [1, 2, 1]))
    part(given, array("q", [2, 1, 3]))
    assert asked == [1, 2, 3]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (lambda i: 1 / 0, "key(4) raised ZeroDivisionError: division by zero"),
        (lambda i: 0.5, "key(4) gave 0.5: a key is bytes, str, int or a list of these"),
        (lambda i: i if i == 4 else "x", "key() gives keys for some samples and record numbers"),
    ],
)
def test_what_is_wrong_with_key_is_one_line(
    capsys: pytest.CaptureFixture[str], key: Any, told: str
) -> None:
    given = Settings(key)
    for _ in range(2):
        with pytest.raises(TypeError):
            part(given, array("q", [4, 3]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"uffdprefetch: prefetch: {told}")
    assert line.endswith("nothing is prefetched for this loader")


@pytest.mark.parametrize(
    ("path", "paths", "turns"),
    [
        (lambda i: f"a/{i}", [b"a/4", b"a/3"], [0, 1]),
        (lambda i: [Path(f"/a/{i}"), b"/m/%d" % i], [b"/a/4", b"/m/4", b"/a/3", b"/m/3"],
         [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_path_gives_files_one_or_several(path: Any, paths: list[bytes], turns: Any) -> None:
    (said,), arrays = part(Settings(path=path), array("q", [4, 3]))
    assert (said["what"], said["cwd"]) == ("paths", os.getcwd())
    assert arrays["p0.paths"] == packed(paths)
    assert arrays["p0.turns"].tolist() == turns


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (lambda i: {}[i], "path(4) raised KeyError: 4"),
        (lambda i: i, "path(4) gave 4: a path is str, bytes, os.PathLike or a list of these"),
        (lambda i: "", "path(4) gave '': a path is str"),
        (lambda i: ["a\0"], "path(4) gave ['a"),
    ],
)
def test_what_is_wrong_with_path_is_one_line(
    capsys: pytest.CaptureFixture[str], path: Any, told: str
) -> None:
    with pytest.raises(TypeError):
        part(Settings(path=path), array("q", [4, 3]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"uffdprefetch: prefetch: {told}")


# ---- tables --------------------------------------------------------------------------------------


def test_a_table_forgets_with_the_object_and_asks_it_nothing() -> None:
    class Proud:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("called")

        __hash__ = None  # type: ignore[assignment]

    gone: list[str] = []
    table = IdentityTable(gone.append)
    one, two = Proud(), Proud()
    table.set(one, "one")
    table.set(two, "two")
    assert (table.get(one), table.get(two), table.get(Proud())) == ("one", "two", None)
    del one
    assert gone == ["one"]
    assert table.get(two) == "two"
