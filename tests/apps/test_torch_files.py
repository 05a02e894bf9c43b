# SPDX-License-Identifier: Apache-2.0
"""Data sets of several files under `wrap`: the order goes through all of them, each followed in the
whole; the job reads the same bytes in the same order as without."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import wait_until
from harness import Job, Start, auto, snapshot

torch = pytest.importorskip("torch")
from arrow_shards import write_library, write_shards  # noqa: E402
from lmdb_datasets import make_unpadded  # noqa: E402
from record_files import grow  # noqa: E402

pytest_plugins = ("harness_fixtures",)
pytestmark = [auto, pytest.mark.torch]

ROWS = (210, 170)
N = sum(ROWS)
SIZES = (40_000, 160_000)
HOW = "loader-1: records as the data set tells, in 2 files"

#: DATASET is what is read. The pause lets the test look.
SCRIPT = """
import hashlib, json, sys
import torch
from torch.utils.data import DataLoader
import datasets

def main():
    files, workers = sys.argv[2:], int(sys.argv[1])
    torch.manual_seed(5)
    DATASET
    loader = DataLoader(dataset, batch_size=10, shuffle=SHUFFLE, num_workers=workers,
                        multiprocessing_context=START if workers else None)
    sha = hashlib.sha256()
    for number, batch in enumerate(loader):
        for data, label in zip(batch["data"], batch["label"]):
            sha.update(data + b"%d" % label)
        if number == 3:
            print(json.dumps({"read": number}), flush=True)
            sys.stdin.readline()
    print(json.dumps({"digest": sha.hexdigest()}), flush=True)

if __name__ == "__main__":
    main()
"""

#: Of the library as far as tests/support/arrow_shards.py has it, and of the real one.
LIKE = "dataset = datasets.Dataset.of_files(files)"
LIKE_SHUFFLED = LIKE + ".indexed(torch.randperm(N).tolist())"
REAL = "dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(f) for f in files])"
REAL_SHUFFLED = REAL + ".shuffle(seed=3, keep_in_memory=True)"
REAL_STREAM = REAL + ".to_iterable_dataset(num_shards=8).shuffle(seed=3, buffer_size=60)"
#: (library, dataset, workers, how they start, whether the loader shuffles, engine)
CASES = [
    ("like", LIKE, 0, "fork", True, "cache"),
    ("like", LIKE, 2, "fork", True, "cache"),
    ("like", LIKE, 4, "spawn", True, "cache"),
    ("like", LIKE_SHUFFLED, 0, "fork", False, "cache"),
    ("like", LIKE, 2, "fork", True, "pool"),
    ("real", REAL, 0, "fork", True, "cache"),
    ("real", REAL, 4, "fork", True, "cache"),
    ("real", REAL_SHUFFLED, 2, "spawn", False, "cache"),
    ("real", REAL_SHUFFLED, 0, "fork", False, "pool"),
    ("real", REAL_STREAM, 0, "fork", False, "cache"),
    ("real", REAL_STREAM, 0, "fork", False, "pool"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("shards")
    return write_shards(directory, ROWS, np.random.default_rng(3), SIZES)


def cold(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def plans(run: Job) -> list[dict[str, Any]]:
    return list(snapshot(run.env).plans)


def orders_followed(
    job: Start, script: str, directory: Path, words: list[object], files: list[Path],
    seen: int, options: tuple[str, ...] = (),
) -> dict[Path, dict[str, Any]]:  # fmt: skip
    """Run the script plainly and, from cold, under wrap, with an order of each of the files known
    by the batch after ``seen``: it says the same. The summary's plans, by file."""
    for file in files:
        grow(file)
    path = directory / "train.py"
    path.write_text(script)
    line = [sys.executable, str(path), *map(str, words)]
    plain = job(line, wrap=False)
    assert plain.line() == {"read": seen}
    plain.tell()
    expected = plain.line()
    assert plain.finish().status == 0
    cold(files)
    run = job(line, options=options)
    assert run.line() == {"read": seen}
    wait_until(lambda: len(plans(run)) == len(files), lambda: f"an order of each: {plans(run)}")
    run.tell()
    assert run.line() == expected
    summary = run.finish().good().summary
    assert summary is not None
    found = {Path(plan["file"]): plan for plan in summary["plans"]}
    assert set(found) == set(files)
    return found


def in_batches(script: str, dataset: str) -> str:
    """The script with a data set that gives pairs of numbers, seen later."""
    script = script.replace("    DATASET\n", dataset).replace("import datasets\n", "")
    script = script.replace('zip(batch["data"], batch["label"])', "zip(*batch)")
    script = script.replace("data + b", "b'%d' % data + b").replace("number == 3", "number == 11")
    return script.replace("SHUFFLE", "True").replace("START", "'fork'")


@pytest.mark.parametrize(("library", "dataset", "workers", "start", "shuffle", "engine"), CASES)
def test_an_order_goes_through_all_files_of_a_hugging_face_data_set(
    job: Start, shards: list[Path], tmp_path: Path, library: str, dataset: str, workers: int,
    start: str, shuffle: bool, engine: str,
) -> None:  # fmt: skip
    if library == "like":
        write_library(tmp_path)
    elif importlib.util.find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed")
    script = SCRIPT.replace("DATASET", dataset).replace("SHUFFLE", str(shuffle))
    script = script.replace("START", repr(start)).replace("(N)", f"({N})")
    found = orders_followed(
        job, script, tmp_path, [workers, *shards], shards, 3, ("--engine", engine)
    )
    for shard, rows in zip(shards, ROWS, strict=True):
        plan = found[shard]
        assert (plan["how"], plan["items"], plan["read_items"]) == (HOW, rows, rows)
        assert plan["dropped"] is None
        assert plan["sent_bytes"] > N * SIZES[0] // 4


CONCATENATED = """
    from lmdb_datasets import KINDS
    from torch.utils.data import ConcatDataset
    dataset = ConcatDataset([KINDS["unpadded"].dataset(path) for path in files])
"""


TOGETHER = """
    from lmdb_datasets import KINDS
    class Both(torch.utils.data.Dataset):
        def __init__(self):
            self.parts = [KINDS["unpadded"].dataset(path) for path in files]
        def __len__(self):
            return sum(map(len, self.parts))
        def __getitem__(self, index):
            first = len(self.parts[0])
            return self.parts[index >= first][index - first * (index >= first)]
    dataset = Both()
"""


@pytest.mark.parametrize(
    ("dataset", "workers", "engine"),
    [(CONCATENATED, 0, "cache"), (CONCATENATED, 2, "cache"), (CONCATENATED, 0, "pool"),
     (TOGETHER, 0, "cache"), (TOGETHER, 2, "cache"), (TOGETHER, 2, "pool")],
)  # fmt: skip
def test_databases_with_the_same_keys_are_told_apart(
    job: Start, tmp_path: Path, dataset: str, workers: int, engine: str
) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for number, (directory, rows) in enumerate(zip(directories, ROWS, strict=True)):
        make_unpadded(directory, rows, np.random.default_rng(number), SIZES)
    files = [directory / "data.mdb" for directory in directories]
    script = in_batches(SCRIPT, dataset)
    found = orders_followed(
        job, script, tmp_path, [workers, *directories], files, 11, ("--engine", engine)
    )
    assert all(
        "keys '%d', from 0" in plan["how"] and not plan["dropped"] for plan in found.values()
    )


SEQUENCE = """
    import numpy, zlib
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.ends = numpy.cumsum([len(numpy.load(f, mmap_mode="r")) for f in files])
            self.open = {}
        def __len__(self):
            return int(self.ends[-1])
        def __getitem__(self, index):
            file = int(numpy.searchsorted(self.ends, index, "right"))
            if file not in self.open:
                self.open[file] = numpy.load(files[file], mmap_mode="r")
            return zlib.crc32(self.open[file][index - self.ends[file]]), index
    dataset = Rows()
"""


@pytest.mark.parametrize(("engine", "workers"), [("cache", 0), ("cache", 2), ("pool", 2)])
def test_records_of_several_files_one_after_the_other_are_found_out(
    job: Start, tmp_path: Path, engine: str, workers: int
) -> None:
    files = [tmp_path / f"part-{number}.npy" for number in (9, 10, 11)]
    rows = (150, 130, 170)
    for file, count in zip(files, rows, strict=True):
        np.save(file, np.random.default_rng(count).integers(0, 256, (count, 120_000), np.uint8))
    options = ("--engine", engine)
    script = in_batches(SCRIPT, SEQUENCE)
    found = orders_followed(job, script, tmp_path, [workers, *files], files, 11, options)
    assert {file: plan["items"] for file, plan in found.items()} == dict(
        zip(files, rows, strict=True)
    )
    how = "loader-1: record number = sample number, in 3 files"
    assert all(plan["how"] == how and not plan["dropped"] for plan in found.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_that_a_sample_does_not_give_are_not_read_ahead(
    job: Start, tmp_path: Path, workers: int
) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed")
    rng, files, image_bytes = np.random.default_rng(1), [], 0
    for number, rows in enumerate(ROWS):
        files.append(tmp_path / f"data-{number}.arrow")
        images = [{"bytes": rng.bytes(int(rng.integers(*SIZES))), "path": "p"} for _ in range(rows)]
        image_bytes += sum(len(image["bytes"]) for image in images)
        other = [rng.bytes(SIZES[1]) for _ in range(rows)]
        table = pa.table({"label": range(rows), "other": other, "image": images, "more": other})
        with pa.OSFile(str(files[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=40)
    path = tmp_path / "train.py"
    dataset = REAL + (
        '.cast_column("image", datasets.Image(decode=False)).remove_columns(["other"])'
        '.with_format(columns=["label", "image"])'
    )
    source = SCRIPT.replace("DATASET", dataset).replace("SHUFFLE", "True")
    source = source.replace('zip(batch["data"], batch["label"])', "batch").replace(
        "in batch:", 'in [(each["image"]["bytes"], each["label"]) for each in batch]:'
    )
    path.write_text(
        source.replace("START", "'fork'").replace("shuffle=", "collate_fn=list, shuffle=")
    )
    words = [sys.executable, str(path), str(workers), *map(str, files)]
    plain = job(words, wrap=False)
    assert plain.line() == {"read": 3}
    plain.tell()
    expected = plain.line()
    assert plain.finish().status == 0
    cold(files)
    run = job(words)
    assert run.line() == {"read": 3}
    wait_until(lambda: len(plans(run)) == 2, lambda: f"an order of each file: {plans(run)}")
    run.tell()
    assert run.line() == expected
    summary = run.finish().good().summary
    for plan in summary["plans"]:
        assert (plan["how"], plan["dropped"]) == (HOW, None)
        assert image_bytes < plan["sent_bytes"] < 1.02 * image_bytes, "the whole order's"
    # with what pyarrow has said of all columns before the order was known; beside a busy machine
    # the kernel may have read it all by then
    assert summary["totals"]["prefetched_bytes"] < 1.5 * image_bytes


def test_files_that_were_replaced_between_two_epochs_are_followed_anew(
    job: Start, tmp_path: Path
) -> None:
    write_library(tmp_path)
    halves = [tmp_path / "first", tmp_path / "second"]
    for number, half in enumerate(halves):
        half.mkdir()
        rows = ROWS[::-1] if number else ROWS
        write_shards(half, rows, np.random.default_rng(number), SIZES)
    files = [tmp_path / f"data-{number}.arrow" for number in range(2)]

    def renew(half: int) -> None:
        for file, new in zip(files, sorted(halves[half].iterdir()), strict=True):
            cold([new])
            file.unlink(missing_ok=True)
            os.link(new, file)

    path = tmp_path / "train.py"
    body = SCRIPT.replace("DATASET", LIKE).replace("SHUFFLE", "True").replace("START", "'fork'")
    body = body.replace("def main():", "def main(files, workers):")
    body = body.replace("    files, workers = sys.argv[2:], int(sys.argv[1])\n", "")
    path.write_text(
        body.replace("    main()", "    for _ in range(2): main(sys.argv[2:], int(sys.argv[1]))")
    )
    words = [sys.executable, str(path), "0", *map(str, files)]

    def epochs(run: Job, wrapped: bool) -> list[Any]:
        digests = []
        for half in range(2):
            assert run.line() == {"read": 3}
            if wrapped:
                known = 2 * (half + 1)  # those of the first epoch are told of still
                wait_until(
                    lambda: len(plans(run)) >= known,  # noqa: B023
                    lambda: f"orders: {plans(run)}",
                )
            if not half:
                renew(1)  # while the first is read
            run.tell()
            digests.append(run.line())
        return digests

    renew(0)
    plain = job(words, wrap=False)
    expected = epochs(plain, False)
    assert plain.finish().status == 0
    renew(0)
    run = job(words)
    assert epochs(run, True) == expected
    found = run.finish().good().summary["plans"]
    read = sorted((plan["items"], plan["read_items"]) for plan in found)
    assert read == sorted([(rows, rows) for rows in ROWS] * 2)
    assert all(plan["dropped"] is None and plan["how"] == HOW for plan in found)


SCRAMBLED = """
    import numpy, zlib
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.parts = [numpy.load(f, mmap_mode="r") for f in files]
        def __len__(self):
            return sum(map(len, self.parts))
        def __getitem__(self, index):
            at = index * 7919 % len(self)  # which nobody tells
            for part in self.parts:
                if at < len(part):
                    return zlib.crc32(part[at]), index
                at -= len(part)
    dataset = Rows()
"""


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_an_order_that_cannot_be_proven_is_not_followed(
    job: Start, tmp_path: Path, engine: str
) -> None:
    files = [tmp_path / f"part-{number}.npy" for number in range(3)]
    for number, file in enumerate(files):
        np.save(file, np.random.default_rng(number).integers(0, 256, (150, 120_000), np.uint8))
    path = tmp_path / "train.py"
    source = SCRIPT.replace("    DATASET\n", SCRAMBLED).replace("import datasets\n", "")
    source = source.replace('zip(batch["data"], batch["label"])', "zip(*batch)")
    source = source.replace("data + b", "b'%d' % data + b").replace("number == 3", "number == 11")
    path.write_text(source.replace("SHUFFLE", "True").replace("START", "'fork'"))
    words = [sys.executable, str(path), "0", *map(str, files)]
    plain = job(words, wrap=False)
    assert plain.line() == {"read": 11}
    plain.tell()
    expected = plain.line()
    assert plain.finish().status == 0
    cold(files)
    run = job(words, options=("--engine", engine))
    assert run.line() == {"read": 11}
    said = "which records its samples read is not known"
    wait_until(
        lambda: any(said in each for each in snapshot(run.env).degradations),
        lambda: f"findings: {snapshot(run.env).degradations}",
    )
    run.tell()
    assert run.line() == expected
    assert run.finish().good().summary["plans"] == []
