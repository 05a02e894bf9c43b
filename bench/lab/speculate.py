# SPDX-License-Identifier: Apache-2.0
"""Missed and redundant pages of speculation: `python bench/lab/speculate.py [--png F] [--json F]`.

Repeats [LMDBIO-DM] section VI-D (figures 11 and 12). An LMDB is made with py-lmdb as by
convert_imageset; several processes read it with py-lmdb, each its part of each batch, in turn as
the cursor is passed on. Before a process reads its part it predicts the pages that it would fetch
(orders/placement_estimator.py); then the pages that it touches for the first time are compared with
these. They are recorded as in [LMDBIO-DM]: the mapping is protected (bench/lab/touched.c).

Two ways to speculate: `paper`: the first record's size, corrected by observation; `head`: by the
few tree pages that orders/provisional.py reads before the index is there, which then count as
fetched. Missed pages of values and of the tree are counted separately. Nothing is timed or fetched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from speculated import Part, count, stretch

from uffdprefetch.base.ranges import union
from uffdprefetch.formats.lmdb import BRANCH, LEAF, META, open_index
from uffdprefetch.formats.reader import FileReader
from uffdprefetch.orders.placement_estimator import PlacementEstimator
from uffdprefetch.orders.provisional import provisional_order

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096
KIB = 1 << 10
#: Records per transaction of Caffe's convert_imageset and convert_cifar_data.
COMMIT_RECORDS = 1000

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class DataSet:
    """A data set of [LMDBIO-DM], or one that violates its assumption."""

    name: str
    what: str
    least_bytes: int
    most_bytes: int
    batch_records: int
    iterations: int

    def sizes(self) -> Iterator[int]:
        source = random.Random(0)
        for _ in range(self.batch_records * self.iterations):
            yield source.randint(self.least_bytes, self.most_bytes)


#: A Datum of Caffe: 3 x 32 x 32 and 3 x 256 x 256 bytes and a few more; JPEGs are as they are.
DATA_SETS = (
    DataSet("cifar10-large", "3 KiB records", 3085, 3085, 4096, 32),
    DataSet("imagenet", "192 KiB records", 196_620, 196_620, 512, 32),
    DataSet("imagenet-jpeg", "records of 12 to 192 KiB", 12 * KIB, 192 * KIB, 512, 32),
)
PROCESSES = (2, 8, 32, 128, 512)


def key(number: int) -> bytes:
    return b"%08d" % number


def make(path: Path, data_set: DataSet) -> None:
    """Write it as Caffe's tools do: in key order, COMMIT_RECORDS a transaction."""
    import lmdb

    blob = random.Random(1).randbytes(data_set.most_bytes)
    with lmdb.open(
        str(path), subdir=False, map_size=1 << 40, lock=False, sync=False, metasync=False
    ) as env:
        transaction = env.begin(write=True)
        for number, size in enumerate(data_set.sizes()):
            transaction.put(key(number), blob[:size])
            if number % COMMIT_RECORDS == COMMIT_RECORDS - 1:
                transaction.commit()
                transaction = env.begin(write=True)
        transaction.commit()


# ---- one reader ---------------------------------------------------------------------------------


class Reader:
    """A process that reads its part of each batch with py-lmdb."""

    def __init__(self, path: str, library: str) -> None:
        import lmdb

        env = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)
        self._cursor = env.begin(buffers=True).cursor()
        line = next(line for line in open("/proc/self/maps") if line.endswith(f"{path}\n"))
        self._base, end = (int(word, 16) for word in line.split()[0].split("-"))
        pages = min(end - self._base, -(-os.path.getsize(path) // PAGE) * PAGE) // PAGE
        self._now: Any = np.zeros(pages, np.uint8)
        self._seen: Any = np.zeros(pages, bool)
        native = ctypes.CDLL(library, use_errno=True)
        address = ctypes.c_void_p(self._base)
        noted = ctypes.c_void_p(self._now.ctypes.data)
        if native.touched_watch(address, ctypes.c_size_t(pages * PAGE), noted):
            raise OSError(ctypes.get_errno(), "the mapping cannot be protected")

    def read(self, record: int, records: int) -> Any:
        """Read every byte of these; returns the pages that hold their values, ascending."""
        if not self._cursor.set_key(key(record)):
            raise KeyError(record)
        pages = []
        for remaining in range(records, 0, -1):
            value = self._cursor.value()
            at = np.frombuffer(value, np.uint8).ctypes.data - self._base
            pages.append(np.arange(at // PAGE, -(-(at + len(value)) // PAGE)))
            bytes(value)
            if remaining > 1:
                self._cursor.next()
        return np.unique(np.concatenate(pages))

    def touched(self) -> Any:
        """The pages first touched since the last call."""
        new = np.flatnonzero(self._now.view(bool) & ~self._seen)
        self._seen[new] = True
        return new


def runs(pages: Any) -> Ranges:
    """Ascending page numbers as half-open ranges."""
    first, end = union(pages, pages + 1)
    return list(zip(first.tolist(), end.tolist(), strict=True))


class Head:
    """The provisional order of a reader's records (orders/provisional.py), and the tree pages read
    for it."""

    def __init__(self, path: str, records: Any, pages: int) -> None:
        read: Any = np.zeros(pages, bool)

        class Noting(FileReader):
            def read(self, offset: int, length: int) -> bytes:
                read[offset // PAGE : -(-(offset + length) // PAGE)] = True
                return super().read(offset, length)

        with Noting(path) as file:
            provisional = provisional_order(file, records, seconds=60)
        if provisional is None:
            raise ValueError(f"{path}: nothing can be told")
        self._order = provisional.order
        #: Not touched yet.
        self.read = read

    def fetched(self, first: int, end: int, touched: Any) -> Ranges:
        """For items [first, end), and what it has read of these pages, which count when they are
        needed: those that never are, at last."""
        order = self._order
        items = slice(*np.searchsorted(order.item, [first, end]).tolist())
        starts, ends = order.starts[items] // PAGE, -(-order.ends[items] // PAGE)
        had = touched[self.read[touched]]
        self.read[had] = False
        return list(zip(starts.tolist(), ends.tolist(), strict=True)) + runs(had)


def reader_process(
    pipe: multiprocessing.connection.Connection,
    path: str,
    library: str,
    data_set: DataSet,
    number: int,
    processes: int,
    tree: Any,
) -> None:
    """For each line from the parent one iteration: its counts go back."""
    first_bytes = 2 * PAGE
    stride = -(-(next(data_set.sizes()) + 16) // PAGE) * PAGE
    part = Part(
        PlacementEstimator(stride, first_bytes, os.path.getsize(path)),
        number,
        processes,
        data_set.batch_records,
    )
    begins = part.record + data_set.batch_records * np.arange(data_set.iterations)
    head = Head(path, (begins[:, None] + np.arange(part.count)).ravel(), len(tree))
    reader = Reader(path, library)
    done = 0
    while pipe.recv():
        start, end = part.next()
        first, last = stretch(reader.read(part.record, part.count))
        new = reader.touched()
        fetched = {
            "paper": [(start // PAGE, end // PAGE)],
            "head": head.fetched(done, done + part.count, new),
        }
        values, trees = runs(new[~tree[new]]), runs(new[tree[new]])
        result = {}
        for name, ranges in fetched.items():
            both = count(ranges, values + trees)
            missed_trees = count(ranges, trees).missed
            result[name] = [both.needed, both.missed - missed_trees, missed_trees, both.redundant]
        pipe.send(result)
        part.read(first * PAGE, last * PAGE)
        done += part.count
    pipe.send(int(head.read.sum()))


# ---- all of them --------------------------------------------------------------------------------

#: What is counted of an iteration, in pages.
COLUMNS = ("needed", "missed_values", "missed_tree", "redundant")


def experiment(
    path: Path, library: Path, data_set: DataSet, processes: int, tree: Any
) -> dict[str, dict[str, list[int]]]:
    """Counts of all processes together: {way: {column: [one a iteration]}}."""
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for number in range(processes):
        ours, theirs = context.Pipe()
        arguments = (theirs, str(path), str(library), data_set, number, processes, tree)
        child = context.Process(target=reader_process, args=arguments, daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    sums: dict[str, Any] = {}
    for iteration in range(data_set.iterations):
        for pipe in pipes:  # in turn, as the cursor is passed on
            pipe.send(True)
            for way, counts in pipe.recv().items():
                table = sums.setdefault(way, np.zeros((data_set.iterations, len(COLUMNS)), int))
                table[iteration] += counts
    for pipe in pipes:
        pipe.send(False)
        sums["head"][0, COLUMNS.index("redundant")] += pipe.recv()  # it was read at the beginning
    for child in children:
        child.join()
    return {way: dict(zip(COLUMNS, table.T.tolist(), strict=True)) for way, table in sums.items()}


def run(data_set: DataSet, wanted: list[int], directory: str, say: Callable[[str], None]) -> Any:
    """One data set with each number of processes."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-speculate-", dir=directory) as name:
        path, library = Path(name) / "data.mdb", Path(name) / "touched.so"
        source = ROOT / "bench" / "lab" / "touched.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        say(f"{data_set.name}: {data_set.batch_records * data_set.iterations} records ...")
        make(path, data_set)
        tree = np.isin(open_index(path).page_types(), (META, BRANCH, LEAF))
        results = {}
        for processes in wanted:
            say(f"{data_set.name}: {processes} processes ...")
            results[str(processes)] = experiment(path, library, data_set, processes, tree)
        return {
            "what": data_set.what,
            "batch_records": data_set.batch_records,
            "iterations": data_set.iterations,
            "file_pages": len(tree),
            "processes": results,
        }


def table(document: dict[str, Any]) -> str:
    """The sums in Markdown."""
    lines = [
        "| data set | processes | needed | paper: missed (values, tree) | after two iterations"
        " | redundant | head: missed (values, tree) | redundant |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in document["results"].items():
        for processes, ways in sorted(result["processes"].items(), key=lambda item: int(item[0])):
            paper, head = ways["paper"], ways["head"]
            lines.append(
                f"| {name} | {processes} | {sum(paper['needed']):,}"
                f" | {sum(paper['missed_values']):,}, {sum(paper['missed_tree']):,}"
                f" | {sum(paper['missed_values'][2:]):,}, {sum(paper['missed_tree'][2:]):,}"
                f" | {sum(paper['redundant']):,}"
                f" | {sum(head['missed_values']):,}, {sum(head['missed_tree']):,}"
                f" | {sum(head['redundant']):,} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the data sets that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=[each.name for each in DATA_SETS])
    parser.add_argument("--processes", type=int, action="append", help=f"default: {PROCESSES}")
    parser.add_argument("--batch", type=int, help="records a batch")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--directory", help="where the files are made (default: TMPDIR)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to what is in that file already")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--draw", type=Path, help="draw this JSON again, run nothing")
    options = parser.parse_args()
    if options.draw:
        document = json.loads(options.draw.read_text())
    else:
        document = {
            "schema": "uffdprefetch.bench.speculate/1",
            "kernel": platform.release(),
            "results": {},
        }
        if options.add and options.json.exists():
            document = json.loads(options.json.read_text())
        for each in DATA_SETS:
            if options.only and each.name not in options.only:
                continue
            data_set = DataSet(
                each.name,
                each.what,
                each.least_bytes,
                each.most_bytes,
                options.batch or each.batch_records,
                options.iterations or each.iterations,
            )
            wanted = options.processes or list(PROCESSES)
            result = run(
                data_set, wanted, options.directory, lambda line: print(line, file=sys.stderr)
            )
            had = document["results"].get(each.name, {}).get("processes", {})
            result["processes"] = {**had, **result["processes"]}
            document["results"][each.name] = result
            if options.json:
                options.json.write_text(json.dumps(document) + "\n")
    done = document["results"]
    document["results"] = {each.name: done[each.name] for each in DATA_SETS if each.name in done}
    print(table(document))
    if options.png:
        from speculate_picture import draw

        draw(document, options.png)


if __name__ == "__main__":
    main()
