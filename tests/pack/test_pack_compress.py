# SPDX-License-Identifier: Apache-2.0
"""`--compress`: tried on a sample first, with a dictionary, undone by whoever reads."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import lmdb
import pytest
from packed_trees import packed_telling, read_tree, write_tree

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.data import Packed, layout
from uffdprefetch.pack import compress
from uffdprefetch.pack.stored import Stored
from uffdprefetch.pack.unpacking import unpack
from uffdprefetch.pack.verifying import verify

zstandard = pytest.importorskip("zstandard")

WORDS = ("batch", "epoch", "rank", "record", "stride", "window", "prefetch", "page", "fault")


def texts(count: int = 60) -> dict[bytes, bytes]:
    """Files that have much in common, and little each."""
    chance = random.Random(1)
    return {
        b"t/%03d.json" % i: (
            '{"kind": "annotation", "words": "' + " ".join(chance.choices(WORDS, k=40)) + '"}'
        ).encode()
        for i in range(count)
    }  # fmt: skip


def nothing(text: str) -> None:
    raise AssertionError(text)


def test_each_value_is_compressed_and_everybody_undoes_it(tmp_path: Path) -> None:
    files = texts()
    write_tree(tmp_path / "tree", files)
    path = tmp_path / "o.lmdb"
    result, told = packed_telling((tmp_path / "tree",), path, level=5)
    assert len(told) == 1 and "zstd:5" in told[0] and "a ratio of" in told[0], told
    assert result.description.level == 5
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as transaction:
        stored = {key: value for key, value in transaction.cursor() if key in files}
    assert stored.keys() == files.keys()
    assert sum(map(len, stored.values())) < sum(map(len, files.values())) // 2
    with Stored(str(path)) as reader:
        dictionary = zstandard.ZstdCompressionDict(reader.dictionary)
    assert dictionary.dict_id(), "it is trained"
    one = zstandard.ZstdDecompressor(dict_data=dictionary)
    assert {key: one.decompress(value) for key, value in stored.items()} == files
    data = Packed(path)
    assert {name.encode(): data[i][0] for i, (name, _) in enumerate(data.samples)} == files
    assert verify(str(path), (), nothing) == (len(files), 0, 0)
    assert unpack(str(path), str(tmp_path / "back"), nothing) == (len(files), 0, 0)
    assert read_tree(tmp_path / "back") == files


def test_a_dictionary_is_what_makes_short_files_shorter() -> None:
    values = list(texts(600).values())
    ratio = compress.tried(values, 3).text
    alone = zstandard.ZstdCompressor(level=3)
    plainly = sum(map(len, values)) / sum(len(alone.compress(value)) for value in values)
    assert float(ratio.partition("ratio of ")[2].split(",")[0]) > 1.3 * plainly


def test_where_it_does_not_pay_nothing_is_compressed_and_that_is_one_line(tmp_path: Path) -> None:
    """And the same command goes on with it."""
    chance = random.Random(1)
    files = {b"r/%03d" % i: chance.randbytes(3000) for i in range(40)}
    write_tree(tmp_path / "tree", files)
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", level=3)
    assert len(told) == 1 and told[0].startswith("nothing is compressed: ")
    assert result.description.level is None
    path = str(tmp_path / "o.lmdb")
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as transaction:
        assert transaction.get(b"r/007") == files[b"r/007"]
    _, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", level=3, resume=True)
    assert told == []


def test_what_is_taken_by_resume_is_compressed_alike(tmp_path: Path) -> None:
    files = texts()
    write_tree(tmp_path / "tree", files)
    packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", level=3)
    more = {b"t/new.json": files[b"t/000.json"] * 2}
    write_tree(tmp_path / "tree", more)
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", resume=True)
    assert (result.written, told) == (1, [])
    assert Packed(tmp_path / "o.lmdb").read(b"t/new.json") == more[b"t/new.json"]


def test_a_damaged_value_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree", texts())
    path = tmp_path / "o.lmdb"
    packed_telling((tmp_path / "tree",), path, level=3)
    with lmdb.open(str(path), lock=False) as env, env.begin(write=True) as transaction:
        value = bytearray(transaction.get(b"t/004.json"))
        value[-6] ^= 4
        transaction.put(b"t/004.json", bytes(value))
    with pytest.raises(layout.DamagedError, match=r"o\.lmdb: t/004\.json: damaged"):
        Packed(path).read("t/004.json")


@pytest.mark.parametrize("text", ["lz4", "zstd:", "zstd:0", "zstd:23", "zstd:-3", "zstd:x"])
def test_another_way_or_level_is_an_error(text: str) -> None:
    with pytest.raises(UffdPrefetchError, match="--compress") as raised:
        compress.level_of(text)
    assert raised.value.exit_code == 2
    assert (compress.level_of("zstd"), compress.level_of("zstd:19")) == (3, 19)


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "tree", texts())
    packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", level=3)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UffdPrefetchError, match="pip install zstandard"):
        Packed(tmp_path / "o.lmdb")
    with pytest.raises(UffdPrefetchError, match="pip install zstandard"):
        packed_telling((tmp_path / "tree",), tmp_path / "p.lmdb", level=3)
    assert not (tmp_path / "p.lmdb").exists()


def test_a_sample_is_drawn_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from uffdprefetch.pack.found import Found

    files = [Found(b"%d" % i, 0, data=b"%d" % i) for i in range(1, 20_001)]
    values = [int(value) for value in compress.drawn(files)]
    assert len(set(values)) == compress.SAMPLE
    thirds = [sum(low <= value < low + 6667 for value in values) for low in (1, 6668, 13335)]
    assert min(thirds) > compress.SAMPLE // 4
