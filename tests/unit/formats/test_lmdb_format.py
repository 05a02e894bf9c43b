# SPDX-License-Identifier: Apache-2.0
"""formats/lmdb: the extents are those of py-lmdb's records, and no file can harm who reads it.

py-lmdb writes the databases, deletes and rewrites in them, and its cursors say what must be where.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from conftest import HANG_SECONDS, require
from paths import SUPPORT, TESTS

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import lmdb as fmt
from uffdprefetch.formats import lmdb_pages

pytest_plugins = ("harness_fixtures",)

KIB = 1 << 10
PAGE_BYTES = 4096
#: Data formats: LMDB 0.9's and 1.0's.
VERSIONS = [pytest.param(0, id="0.9"), pytest.param(1, id="1.0")]


class Memory:
    """A RangeReader of bytes that remembers what was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


def index_of(data: bytes) -> fmt.Index:
    return fmt.read_index(Memory(data))


# ---- the databases ------------------------------------------------------------------------------


def open_environment(path: Path, version: int, **options: object) -> lmdb.Environment:
    if version:
        try:
            lmdb.version(lib_version=1)  # type: ignore[call-arg]
        except Exception as error:
            require(False, f"py-lmdb {lmdb.__version__} cannot write LMDB 1.0's format: {error}")
        options["lib_version"] = version
    return lmdb.open(
        str(path), map_size=1 << 30, max_dbs=8, sync=False, **options  # type: ignore[arg-type]
    )  # fmt: skip


Sizes = Callable[[random.Random], int]


def fill(env: lmdb.Environment, seed: int, count: int, sizes: Sizes) -> None:
    """Put ``count`` records, in no order of keys, of odd and even key lengths."""
    source = random.Random(seed)
    with env.begin(write=True) as txn:
        for number in source.sample(range(10 * count), count):
            key = b"%08d" % number + b"k" * source.randrange(5)
            txn.put(key, source.randbytes(sizes(source)))


def of_all_sizes(source: random.Random) -> int:
    """10 bytes to 200 KiB, most in leaves; and those at which a value leaves its leaf."""
    edge = source.randrange(2000, 2060)
    return source.choice([10, edge, source.randrange(10, 2000), source.randrange(4000, 200 * KIB)])


def churn(env: lmdb.Environment, seed: int) -> None:
    """Delete a third and rewrite a third of the records, in several transactions."""
    source = random.Random(seed)
    with env.begin() as txn:
        keys = [key for key, _ in txn.cursor()]
    for _ in range(3):
        with env.begin(write=True) as txn:
            for key in source.sample(keys, len(keys) // 9):
                txn.delete(key)
            for key in source.sample(keys, len(keys) // 9):
                txn.put(key, source.randbytes(of_all_sizes(source)))


def fill_duplicates(env: lmdb.Environment, seed: int) -> None:
    """Keys with one value, few (a sub-page) and many (a tree); fixed sizes 1, 4, 8 and 200."""
    source = random.Random(seed)
    free = env.open_db(b"duplicates", dupsort=True)
    with env.begin(write=True, db=free) as txn:
        for number in range(60):
            for _ in range(source.choice([1, 2, 7, 300])):
                key = b"key%d" % number + b"k" * (number % 3)
                txn.put(key, source.randbytes(source.randrange(1, 400)))
    for size in (1, 4, 8, 200):
        fixed = env.open_db(b"fixed%d" % size, dupsort=True, dupfixed=True)
        with env.begin(write=True, db=fixed) as txn:
            for number in range(20):
                for _ in range(source.choice([1, 3, 50, 1200])):
                    txn.put(b"%d" % number, source.randbytes(size))


def make(path: Path, version: int, kind: str) -> lmdb.Environment:
    """An environment of one of KINDS, still open."""
    env = open_environment(path, version)
    if kind == "empty":
        with env.begin(write=True) as txn:
            txn.put(b"a", b"b")
            txn.delete(b"a")
    elif kind == "one record":
        with env.begin(write=True) as txn:
            txn.put(b"key", b"")
    elif kind == "all sizes":
        fill(env, 1, 400, of_all_sizes)
    elif kind == "small":
        fill(env, 2, 20_000, lambda source: source.randrange(0, 60))
    elif kind == "rewritten":
        fill(env, 3, 600, of_all_sizes)
        churn(env, 4)
    else:
        assert kind == "named and duplicates"
        fill(env, 5, 200, of_all_sizes)
        fill_duplicates(env, 6)
        churn_names = env.open_db(b"fixed4", dupsort=True, dupfixed=True, create=False)
        with env.begin(write=True, db=churn_names) as txn:
            txn.delete(b"3")
    return env


KINDS = ["empty", "one record", "all sizes", "small", "rewritten", "named and duplicates"]


def cursor_of(env: lmdb.Environment, name: bytes) -> list[tuple[bytes, bytes]]:
    """What py-lmdb's cursor over a database gives, but for the main one's databases."""
    with env.begin() as txn:
        database = env.open_db(name, txn=txn, create=False) if name else env.open_db(None, txn=txn)
        names = (b"duplicates", b"fixed1", b"fixed4", b"fixed8", b"fixed200")
        return [
            pair for pair in txn.cursor(db=database) if pair[0].removesuffix(b"\0") not in names
        ]


def records_of(index: fmt.Index, database: fmt.Database, data: bytes) -> list[tuple[bytes, bytes]]:
    """The same by the index: the bytes of each record's extent."""
    found = []
    for record in range(database.first, database.first + database.records):
        at = int(index.offset[record])
        found.append((index.key(record), data[at : at + int(index.length[record])]))
    return found


# ---- records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_extent_holds_the_bytes_that_the_cursor_returns(
    tmp_path: Path, version: int, kind: str
) -> None:
    env = make(tmp_path / "db", version, kind)
    index = fmt.open_index(tmp_path / "db")
    data = (tmp_path / "db" / "data.mdb").read_bytes()
    assert len(index.databases) == (6 if "named" in kind else 1)
    for database in index.databases:
        assert records_of(index, database, data) == cursor_of(env, database.name)
    assert sum(database.records for database in index.databases) == len(index)
    with env.begin() as txn:
        for database in index.databases:
            opened = env.open_db(database.name, txn=txn, create=False) if database.name else None
            stat = txn.stat(opened) if opened else env.stat()
            told = database.tree._asdict()
            assert {name: told[name] for name in stat if name in told} == {
                name: value for name, value in stat.items() if name in told
            }
    env.close()


@pytest.mark.parametrize("page_bytes", [8192, 16384, 32768])
def test_pages_of_other_sizes(
    tmp_path: Path, page_bytes: int, compiled: Callable[..., str]
) -> None:
    """A real LMDB on a machine that says that its pages are larger; it digests what it reads."""
    code = """
import hashlib, random, sys
sys.path[:0] = sys.argv[2:]
import test_lmdb_format as t
from pathlib import Path
env = t.make(Path(sys.argv[1]), 0, "rewritten")
digest = hashlib.sha256()
for key, value in t.cursor_of(env, b""):
    digest.update(key + value)
print(env.stat()["psize"], digest.hexdigest())
"""
    library = compiled("page_size", "-shared", "-fPIC", "-ldl")
    paths = [str(Path(__file__).parent), str(SUPPORT), str(TESTS)]
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "db"), *paths],
        env={**os.environ, "LD_PRELOAD": library, "PAGE_SIZE": str(page_bytes)},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
    ).stdout.split()  # fmt: skip
    index = fmt.open_index(tmp_path / "db")
    data = (tmp_path / "db" / "data.mdb").read_bytes()
    digest = hashlib.sha256()
    for key, value in records_of(index, index.databases[0], data):
        digest.update(key + value)
    assert said == [str(index.page_bytes), digest.hexdigest()]
    assert index.page_bytes == page_bytes


def test_the_flags_and_the_leaf_page_are_those_of_the_record(tmp_path: Path) -> None:
    make(tmp_path / "db", 0, "named and duplicates").close()
    index = fmt.open_index(tmp_path / "db")
    types, page = index.page_types(), index.offset // PAGE_BYTES
    big = index.flags & fmt.ON_OVERFLOW != 0
    assert big.any() and (~big).any()
    assert (types[page[big]] == fmt.OVERFLOW).all()
    assert (index.offset[big] % PAGE_BYTES == 16).all()
    assert (types[index.leaf_page] == fmt.LEAF).all()
    assert (page[~big] == index.leaf_page[~big]).all()
    main = index.databases[0]
    assert not (index.flags[: main.records] & fmt.DUPLICATE).any()
    assert (index.flags[main.records :] & fmt.DUPLICATE).any()
    assert main.first == 0 and index.databases[-1].name == b"fixed8"


def test_an_index_takes_tens_of_bytes_a_record(tmp_path: Path) -> None:
    make(tmp_path / "db", 0, "small").close()
    index = fmt.open_index(tmp_path / "db")
    arrays = [index.offset, index.length, index.flags, index.leaf_page, index.key_offset]
    assert sum(array.nbytes for array in [*arrays, index.key_length]) == 31 * len(index)
    assert len(index.keys) == int(index.key_length.sum())
    within = index.offset - index.leaf_page * PAGE_BYTES  # also of values of no bytes
    assert ((within > 0) & (within + index.length <= PAGE_BYTES)).all()


# ---- pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_page_types_are_as_many_as_lmdb_counts(tmp_path: Path, kind: str) -> None:
    """mdb_stat counts the free list (-f) and every database (-a)."""
    program = shutil.which("mdb_stat")
    require(program, "mdb_stat is missing: install lmdb-utils")
    make(tmp_path / "db", 0, kind).close()
    text = subprocess.run(
        [str(program), "-f", "-a", str(tmp_path / "db")], check=True, capture_output=True, text=True
    ).stdout
    index = fmt.open_index(tmp_path / "db")
    counts = np.bincount(index.page_types(), minlength=5)
    for code, word in ((fmt.BRANCH, "Branch"), (fmt.LEAF, "Leaf"), (fmt.OVERFLOW, "Overflow")):
        told = [int(line.split()[-1]) for line in text.splitlines() if f"{word} pages:" in line]
        assert len(told) == 1 + len(index.databases)
        assert counts[code] == sum(told), word
    assert counts[fmt.META] == 2
    assert sum(counts) * PAGE_BYTES == (tmp_path / "db" / "data.mdb").stat().st_size
    assert len(fmt.PAGE_TYPE_NAMES) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_only_branch_and_leaf_pages_are_read_and_each_once(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "db", 0, kind).close()
    reader = Memory((tmp_path / "db" / "data.mdb").read_bytes())
    types = fmt.read_index(reader).page_types()
    metas, rest = reader.reads[:2], reader.reads[2:]
    assert metas == [(0, lmdb_pages.META_BYTES), (PAGE_BYTES, lmdb_pages.META_BYTES)]
    read = [page for at, n in rest for page in range(at // PAGE_BYTES, (at + n) // PAGE_BYTES)]
    assert all(at % PAGE_BYTES == 0 and n % PAGE_BYTES == 0 for at, n in rest)
    assert sorted(read) == np.flatnonzero((types == fmt.BRANCH) | (types == fmt.LEAF)).tolist()
    if kind == "small":
        assert len(rest) < len(read) // 2, "neighbours are read together"


# ---- from bytes to records ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["empty", "one record", "rewritten", "named and duplicates"])
def test_records_are_found_by_what_was_touched(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "db", 0, kind).close()
    index = fmt.open_index(tmp_path / "db")
    extents = [(int(a), int(a) + int(n)) for a, n in zip(index.offset, index.length, strict=True)]
    source = random.Random(7)
    places = [source.randrange(-5, index.file_bytes + 5000) for _ in range(300)]
    edges = [edge + d for a, b in source.sample(extents, min(100, len(extents)))
             for edge in (a, b) for d in (-1, 0)]  # fmt: skip
    expected = [
        next((i for i, (a, b) in enumerate(extents) if a <= place < b), -1)
        for place in places + edges
    ]
    assert index.records_at(np.array(places + edges)).tolist() == expected
    for count in (0, 1, 40):
        ranges = [(a, a + source.choice([0, 1, 4096, 1 << 20])) for a in places[:count]]
        ranges += [(b, a) for a, b in ranges[:5]]
        inside = [
            i for i, (a, b) in enumerate(extents)
            if a < b and any(max(a, c) < min(b, d) for c, d in ranges)
        ]  # fmt: skip
        starts, ends = np.array([a for a, _ in ranges]), np.array([b for _, b in ranges])
        assert index.records_in(starts, ends).tolist() == inside


# ---- which transaction --------------------------------------------------------------------------


def damaged(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_newer_of_two_valid_meta_pages_counts(tmp_path: Path, version: int) -> None:
    env = open_environment(tmp_path / "db", version)
    for number in range(3):
        with env.begin(write=True) as txn:
            txn.put(b"%d" % number, b"value")
        data = (tmp_path / "db" / "data.mdb").read_bytes()
        assert len(index_of(data)) == number + 1
    env.close()
    newest = index_of(data).meta
    magic = newest.layout.header_bytes + newest.offset
    older = index_of(damaged(data, magic, b"x"))
    assert (len(older), older.meta.txnid) == (2, newest.txnid - 1)
    other = PAGE_BYTES - newest.offset + newest.layout.header_bytes
    assert len(index_of(damaged(data, other, b"x"))) == 3
    with pytest.raises(fmt.FormatError, match="no LMDB meta page at byte 0"):
        index_of(damaged(damaged(data, other, b"x"), magic, b"x"))


@pytest.mark.parametrize("map_size", [1 << 12, 1 << 50])
def test_the_map_size_does_not_matter(tmp_path: Path, map_size: int) -> None:
    make(tmp_path / "db", 0, "all sizes").close()
    data = (tmp_path / "db" / "data.mdb").read_bytes()
    for page in (0, PAGE_BYTES):
        data = damaged(data, page + 32, struct.pack("<Q", map_size))
    index = index_of(data)
    assert (len(index), index.meta.map_size_bytes) == (400, map_size)


def test_a_file_as_long_as_its_map_costs_nothing(tmp_path: Path) -> None:
    """MDB_WRITEMAP makes the file that long; here it is a terabyte of holes."""
    env = open_environment(tmp_path / "db", 0, writemap=True)
    fill(env, 1, 50, of_all_sizes)
    env.close()
    file = tmp_path / "db" / "data.mdb"
    before = fmt.open_index(file)
    os.truncate(file, 1 << 40)
    index = fmt.open_index(file)
    assert index.offset.tolist() == before.offset.tolist()
    assert len(index.page_types()) == (1 << 40) // PAGE_BYTES


# ---- what is none -------------------------------------------------------------------------------


def test_what_is_no_lmdb_file_is_told_in_one_line(tmp_path: Path) -> None:
    env = make(tmp_path / "db", 0, "one record")
    env.close()
    good = (tmp_path / "db" / "data.mdb").read_bytes()
    big_endian = damaged(good, 16, struct.pack(">I", 0xBEEFC0DE))
    cases = {
        "empty": (b"", r"no LMDB meta page at byte 0: the file ends here"),
        "text": (b"records: none\n" * 900, r"no LMDB meta page at byte 0: .* where 'de c0 ef be'"),
        "zeros": (bytes(9000), r"no LMDB meta page at byte 0"),
        "few": (b"abc", r"no LMDB meta page at byte 0: 61 62 63"),
        "other end": (big_endian, r"big-endian"),
        "other format": (damaged(good, 20, b"\2"), r"data format 2; formats 1, 3 can be read"),
        "one page": (good[:4096], r"file cut short at byte 4096"),
        "no page size": (damaged(good, 40, b"\1"), r"no page size at byte 40: 4097"),
    }
    for name, (data, saw) in cases.items():
        file = tmp_path / name
        if name in ("other end", "other format", "no page size"):
            data = damaged(data, PAGE_BYTES, data[:PAGE_BYTES])  # else the second meta page helps
        file.write_bytes(data)
        with pytest.raises(fmt.FormatError, match=saw) as caught:
            fmt.open_index(file)
        assert caught.value.message.startswith(f"{file}: ")
        assert "\n" not in caught.value.message
        assert caught.value.offset <= len(data)
        assert fmt.looks_like_lmdb(data[:64]) == (name in ("one page", "no page size"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name, saw in (("pipe", "no regular file"), ("directory", "No such"), ("no", "No such")):
        with pytest.raises(UffdPrefetchError, match=saw):
            fmt.open_index(tmp_path / name)


def test_what_looks_like_lmdb(tmp_path: Path) -> None:
    for version in (0, 1):
        make(tmp_path / str(version), version, "one record").close()
        first = (tmp_path / str(version) / "data.mdb").read_bytes()[:32]
        assert fmt.looks_like_lmdb(first)
        assert not any(fmt.looks_like_lmdb(first[:n]) for n in range(24))


# ---- damage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Version -> a small file with everything in it."""
    files = {}
    for version in (0, 1):
        path = tmp_path_factory.mktemp("whole") / "db"
        env = open_environment(path, version)
        fill(env, 8, 500, lambda source: source.choice([5, 30, 3000, 9000]))
        for name, size in ((b"free", 0), (b"fixed", 4)):
            database = env.open_db(name, dupsort=True, dupfixed=bool(size))
            source = random.Random(9)
            with env.begin(write=True, db=database) as txn:
                for number in range(12):
                    for _ in range(source.choice([1, 5, 900])):
                        txn.put(b"%d" % number, source.randbytes(size or source.randrange(1, 40)))
        env.close()
        files[version] = (path / "data.mdb").read_bytes()
    return files


def tree_pages(data: bytes, *kinds: int) -> list[int]:
    return np.flatnonzero(np.isin(index_of(data).page_types(), kinds)).tolist()


def test_a_child_that_is_its_own_ancestor_ends_the_stream(whole: dict[int, bytes]) -> None:
    data = whole[0]
    index = index_of(data)
    root = index.meta.main.root
    assert index.page_types()[root] == fmt.BRANCH
    node = root * PAGE_BYTES + struct.unpack_from("<H", data, root * PAGE_BYTES + 16)[0]
    looped = damaged(data, node, struct.pack("<I", root))
    with pytest.raises(fmt.FormatError, match=f"page met twice at byte {node}: page {root}"):
        index_of(looped)


def test_two_branches_with_one_child_are_refused(whole: dict[int, bytes]) -> None:
    data = whole[0]
    root = index_of(data).meta.main.root * PAGE_BYTES
    first, second = (root + at for at in struct.unpack_from("<HH", data, root + 16))
    with pytest.raises(fmt.FormatError, match="page met twice"):
        index_of(damaged(data, first, data[second : second + 4]))


@pytest.mark.parametrize(
    ("field", "at", "value", "saw"),
    [
        ("depth", 6, struct.pack("<H", 60000), "impossible depth of a tree .*: 60000"),
        ("depth", 6, struct.pack("<H", 32), "no branch page"),
        ("depth", 6, struct.pack("<H", 0), "impossible depth of a tree .*: 0"),
        ("leaf pages", 16, struct.pack("<Q", 1 << 60), "more pages in a tree than in the file"),
        ("root", 40, struct.pack("<Q", 1 << 63), "root page not in the file"),
        ("root", 40, struct.pack("<Q", 1), "page not in the file"),
        ("last page", 48, struct.pack("<Q", 9), "root page not in the file"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(
    whole: dict[int, bytes], field: str, at: int, value: bytes, saw: str
) -> None:
    meta = index_of(whole[0]).meta
    with pytest.raises(fmt.FormatError, match=saw):
        index_of(damaged(whole[0], meta.trees_at[1] + at, value))


def test_a_value_that_ends_beyond_the_file_is_refused(whole: dict[int, bytes]) -> None:
    data = whole[0]
    index = index_of(data)
    record = int(np.flatnonzero(index.flags & fmt.ON_OVERFLOW)[0])
    leaf = int(index.leaf_page[record]) * PAGE_BYTES
    node = data.index(index.key(record), leaf, leaf + PAGE_BYTES) - 8
    longer = damaged(data, node, struct.pack("<I", len(data)))
    first = int(index.offset[record]) // PAGE_BYTES
    saw = f"overflow page not in the file at byte [0-9]+: page {first} and the [0-9]+ after it"
    with pytest.raises(fmt.FormatError, match=saw):
        index_of(longer)
    cut = data[: max(tree_pages(data, fmt.BRANCH, fmt.LEAF, fmt.OVERFLOW)) * PAGE_BYTES]
    with pytest.raises(fmt.FormatError, match="page not in the file"):
        index_of(cut)


def test_nodes_that_share_their_bytes_are_refused(whole: dict[int, bytes]) -> None:
    """Else a file could claim hundreds of times as many records as it holds."""
    data = whole[0]
    page = int(index_of(data).leaf_page[0]) * PAGE_BYTES
    first, second = (data[page + at : page + at + 2] for at in (16, 18))
    assert first != second
    with pytest.raises(fmt.FormatError, match="node within another one"):
        index_of(damaged(data, page + 18, first))


def test_a_file_that_ends_while_it_is_read_is_told(whole: dict[int, bytes]) -> None:
    class Shrinking(Memory):
        def read(self, offset: int, length: int) -> bytes:
            return super().read(offset, length if length < PAGE_BYTES else length - 1)

    with pytest.raises(fmt.FormatError, match=r"file cut short at byte .*: it ends here"):
        fmt.read_index(Shrinking(whole[0]))


@pytest.mark.parametrize("version", VERSIONS)
def test_no_damage_does_more_than_a_format_error(whole: dict[int, bytes], version: int) -> None:
    """Fixed seed: bytes of tree and meta pages flipped, words replaced, the file cut."""
    data = whole[version]
    pages = tree_pages(data, fmt.META, fmt.BRANCH, fmt.LEAF)
    source, refused, rounds = random.Random(10 + version), 0, 400
    for _ in range(rounds):
        bad = bytearray(data)
        for _ in range(source.choice([1, 1, 2, 8])):
            # near the page's beginning or end: headers, pointers and nodes
            place = source.choice([source.randrange(64), source.randrange(PAGE_BYTES)])
            at = source.choice(pages) * PAGE_BYTES + place
            if source.random() < 0.5:
                bad[at] ^= 1 << source.randrange(8)
            else:
                words = [0, 1, 0xFFFF, 0x7FFFFFFF, (1 << 64) - 1, source.getrandbits(64)]
                word = source.choice(words)
                new = struct.pack("<Q", word)[: source.choice([2, 4, 8])][: len(bad) - at]
                bad[at : at + len(new)] = new
        if source.random() < 0.1:
            del bad[source.randrange(len(bad)) :]
        try:
            index = index_of(bytes(bad))
        except fmt.FormatError as error:
            refused += 1
            assert "\n" not in error.message
            assert 0 <= error.offset <= len(bad)
            continue
        assert len(index) <= len(bad)
        assert (index.offset >= 0).all()
        assert (index.offset + index.length <= len(bad)).all()
        assert (index.key_offset + index.key_length <= len(index.keys)).all()
        index.records_in(np.array([0]), np.array([len(bad)]))
        index.page_types()
    assert rounds // 4 < refused < rounds
