# SPDX-License-Identifier: Apache-2.0
"""Iterable data sets of Hugging Face's library, the real one: what is announced is the order in
which its rows are read, and the job notices nothing of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrow_shards import write_shards
from torch_service import ENDED, HAVE_TORCH, Listener, job_environment, output_of

from uffdprefetch.job import iterables
from uffdprefetch.job.samplers import Unknown

pytestmark = [
    pytest.mark.skipif(
        not HAVE_TORCH or importlib.util.find_spec("datasets") is None,
        reason="torch or the package datasets is not installed",
    ),
    pytest.mark.torch,
]

ROWS = (70, 61, 32)
N = sum(ROWS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("shards")
    return write_shards(directory, ROWS, np.random.default_rng(3), (500, 900))


@pytest.fixture(scope="module")
def dataset(shards: list[Path]) -> Any:
    import datasets

    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(f)) for f in shards])


# ---- the order is that of the library ------------------------------------------------------------


def shuffled(stream: Any, buffer: int) -> Any:
    return stream.shuffle(seed=4, buffer_size=buffer)


STREAMS = {
    "one shard": lambda d: d.to_iterable_dataset(),
    "several": lambda d: d.to_iterable_dataset(num_shards=12),
    "indexed": lambda d: d.select(range(N - 1, 9, -1)).to_iterable_dataset(num_shards=5),
    "buffer": lambda d: shuffled(d.to_iterable_dataset(num_shards=24), 40),
    "small buffer": lambda d: shuffled(d.to_iterable_dataset(num_shards=7), 10),
    "large buffer": lambda d: shuffled(d.to_iterable_dataset(num_shards=7), 1000),
    "buffer of one shard": lambda d: shuffled(d.to_iterable_dataset(), 50),
    "columns": lambda d: shuffled(
        d.to_iterable_dataset(num_shards=7).select_columns(["label"]), 40
    ),
    "a node's part": lambda d: shuffled(d.to_iterable_dataset(num_shards=24), 40).shard(3, 1),
    "formatted": lambda d: shuffled(d.to_iterable_dataset(num_shards=24), 40).with_format("arrow"),
}
OUTER = ("FormattedExamplesIterable", "RebatchedArrowExamplesIterable")


def node_of(stream: Any) -> Any:
    """The node of a prepared tree that announces."""
    node = stream._prepare_ex_iterable_for_iteration()
    while type(node).__name__ in OUTER:
        node = node.ex_iterable
    return node


def labels(order: iterables.RowOrder) -> list[int]:
    """Of the rows of an order."""
    own = [label for shard in order.shards for label in shard._data.column("label").to_pylist()]
    return [own[row] for row in order.rows.tolist()]


@pytest.mark.parametrize("by_tables", [True, False])
@pytest.mark.parametrize("name", STREAMS)
def test_the_order_is_the_one_in_which_rows_are_taken(
    dataset: Any, name: str, by_tables: bool
) -> None:
    node = node_of(STREAMS[name](dataset))
    order = iterables.order_of(node, by_tables)
    assert order.columns == (["label"] if name == "columns" else None)
    taken: list[int] = []
    inner = getattr(node, "ex_iterable", None) if order.buffer else None
    source = node if inner is None else inner

    def tables(real: Any = source._iter_arrow) -> Iterator[Any]:
        for key, table in real():
            taken.extend(table.column("label").to_pylist())
            yield key, table

    if not by_tables:
        taken += [example["label"] for _, example in source]
    elif inner is None:
        list(tables())
    else:
        inner._iter_arrow = tables
        read = [len(taken) for _ in node._iter_arrow()]
        assert order.taken is not None and order.taken[: len(read)] == read
    assert labels(order) == taken and len(taken) > N // 4


def test_what_is_not_known_to_read_in_an_order_is_left_alone(dataset: Any) -> None:
    from datasets import interleave_datasets

    stream = dataset.to_iterable_dataset(num_shards=4)
    mapped = shuffled(stream.map(lambda row: row), 20)
    chances = interleave_datasets([stream, stream], probabilities=[0.5, 0.5], seed=1)
    in_memory = dataset.map(lambda row: row, keep_in_memory=True).to_iterable_dataset()
    for each in (mapped, chances):
        with pytest.raises(Unknown):
            iterables.order_of(node_of(each), True)
    with pytest.raises(Unknown, match="in memory"):
        iterables.describe(iterables.order_of(node_of(in_memory), True))


def test_one_that_goes_on_where_it_was_stopped_is_left_alone(dataset: Any) -> None:
    stream = dataset.to_iterable_dataset(num_shards=4)
    iterator = iter(stream)
    for _ in range(50):
        next(iterator)
    stream.load_state_dict(stream.state_dict())
    with pytest.raises(Unknown, match="goes on"):
        iterables.order_of(node_of(stream), True)


# ---- under the hook ------------------------------------------------------------------------------

JOB = """
import itertools, json, os, sys
from torch.utils.data import DataLoader
import datasets
files, workers = sys.argv[2:], int(sys.argv[1])
base = datasets.concatenate_datasets([datasets.Dataset.from_file(f) for f in files])
stream = base.to_iterable_dataset(num_shards=12).shuffle(seed=3, buffer_size=30)
def read(source, most=None):
    batches = DataLoader(source, batch_size=8, num_workers=workers)
    return [b["label"].tolist() for b in itertools.islice(batches, most)]
seen = [read(stream), read(stream, 2), read(stream.map(lambda row: row))]
print(json.dumps([seen, os.getpid()]))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_each_process_that_iterates_announces_one_order_and_gives_the_same_rows(
    tmp_path: Path, shards: list[Path], workers: int
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    words = [str(workers), *map(str, shards)]
    plain, _ = output_of("-W", "ignore", script, *words, environment=job_environment())
    listener = Listener(tmp_path)
    try:
        seen, pid = output_of("-W", "ignore", script, *words, environment=listener.environment())
        announced = listener.announced()
    finally:
        listener.close()
    assert seen == plain
    assert sorted(label for batch in seen[0] for label in batch) == list(range(N))
    assert len(announced) == 3 * max(1, workers)
    for said in announced:
        assert (said.pid == pid) == (workers == 0)
        (part,) = said.parts
        assert part["ahead"] == 30 and part["samples"] == said.items
        assert sorted(said.numbers("rows")) == list(range(said.items))
    by_pass = max(1, workers)
    assert sum(said.items for said in announced[:by_pass]) == N
    for said in announced if workers == 0 else []:
        counts = (listener.plans / f"{pid}.progress").read_bytes()
        ended = int.from_bytes(counts[8 * said.slot : 8 * said.slot + 8], "little")
        assert ended & ENDED
