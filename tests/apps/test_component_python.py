# SPDX-License-Identifier: Apache-2.0
"""NumPy's mapped arrays and PyTorch's DataLoader, fork and spawn, on cold files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import pytest
from components import (
    ARRAY,
    CHECKPOINTS,
    TRAINING,
    Runner,
    check_managed,
    python,
    ranks_of,
    slowly,
)
from conftest import require
from harness import file_digest
from paths import JOBS

from uffdprefetch.demo.bed import SlowBed

pytest_plugins = ["components"]
pytestmark = pytest.mark.torch

LOADER = JOBS / "torch_loader.py"

# ---- NumPy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opened",
    [
        "np.load(path, mmap_mode='r')",
        "np.memmap(path, dtype='u1', mode='r')",
        "np.memmap(path, dtype='<u8', mode='r', offset=128)",
        "np.memmap(path, dtype='<u8', mode='r', offset=(40 << 20) + 128)",
    ],
)
def test_sums_of_a_mapped_array(runner: Runner, bed: SlowBed, opened: str) -> None:
    code = f"""
import sys, numpy as np
path = sys.argv[1]
array = {opened}
for epoch in range(2):
    print(int(array.sum(dtype=np.uint64)), int(array[::-1][:100].sum(dtype=np.uint64)))
"""
    words = python(code, bed.path(ARRAY))
    run = runner.wrapped(*words, cold=[bed.path(ARRAY)])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    check_managed(run, bed.path(ARRAY))


@pytest.mark.parametrize("laid", [(), CHECKPOINTS], ids=["auto", "fixed"])
def test_an_array_is_written_out_from_its_mapping(
    runner: Runner, bed: SlowBed, laid: tuple[str, ...]
) -> None:
    """tofile() hands the mapping to write(2): the kernel itself touches the checkpoints."""
    code = """
import sys, numpy as np
array = np.memmap(sys.argv[1], dtype='u1', mode='r')
for epoch in range(2):
    array.tofile(sys.argv[2])
"""
    source, copy = bed.path(ARRAY), runner.cwd / "copy"
    run = runner.wrapped(*python(code, source, copy), cold=[source], options=laid)
    assert run.status == 0, run.stderr
    assert file_digest(copy) == file_digest(bed.source / ARRAY)
    check_managed(run, source)
    assert run.summary["totals"]["unserved_read_bytes"] < source.stat().st_size // 2


def test_a_mapped_array_that_is_read_backward(runner: Runner, bed: SlowBed) -> None:
    code = """
import hashlib, sys, numpy as np
array, digest = np.load(sys.argv[1], mmap_mode='r'), hashlib.sha256()
for end in range(len(array), 0, -64):
    digest.update(np.ascontiguousarray(array[max(0, end - 64):end]))
print(digest.hexdigest())
"""
    words = python(code, bed.path(ARRAY))
    run = runner.wrapped(*words, cold=[bed.path(ARRAY)])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    check_managed(run, bed.path(ARRAY))
    assert any(s["pattern"].endswith("backward") for s in run.summary["streams"])


# ---- PyTorch ------------------------------------------------------------------------------------


def torch() -> None:
    version = "no torch"
    if importlib.util.find_spec("torch"):
        version = importlib.metadata.version("torch")
    require(version.startswith("2.13."), f"{version} instead of 2.13: see tools/setup.sh")


_plain: dict[str, bytes] = {}  # kind -> digest of a plain run, which takes torch some seconds


@pytest.mark.alone  # that it is followed needs a service that gets a processor
@pytest.mark.parametrize("kind", ["lmdb", "array"])
@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (2, "fork"), (2, "spawn")])
def test_batches_of_a_dataloader(
    runner: Runner, bed: SlowBed, kind: str, workers: int, method: str
) -> None:
    torch()
    path = bed.path(TRAINING if kind == "lmdb" else ARRAY)
    words = [sys.executable, str(LOADER), kind, str(path)]
    ranks = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    with slowly(bed, 35_000_000):  # for 2 s nothing is guessed of an order that may become known
        run = runner.wrapped(*words, str(workers), method, cold=[path], **ranks)
    assert run.status == 0, run.stderr
    if kind not in _plain:
        _plain[kind] = runner.plain(*words, "0", "fork")
    assert run.stdout == _plain[kind]
    check_managed(run, path)
    (rank, processes), *others = ranks_of(run).items()
    assert (rank, others) == (2, [])
    # Who maps the file: the parent and the forked workers, or with spawn and the LMDB (opened by
    # path) again all of them; a spawned worker gets the array's bytes, not the mapping.
    assert processes == (1 if kind == "array" and method == "spawn" else 1 + workers)
    readers = {stream["pid"] for stream in run.summary["streams"]}
    # the walks of a worker that begins when its order is known already are not followed
    assert len(readers) >= max(1, workers) or processes == 1 or run.summary["plans"]
