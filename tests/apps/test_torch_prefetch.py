# SPDX-License-Identifier: Apache-2.0
"""The explicit line, uffdprefetch.torch.prefetch(loader)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import SUPPORT
from torch_service import HAVE_TORCH, Listener, job_environment, output_of, run_python

pytestmark = [
    pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed"),
    pytest.mark.torch,
]

JOB = SUPPORT / "torch_explicit.py"
LOADER = """
import uffdprefetch.torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Six(Dataset):
    __len__ = lambda self: 6
    __getitem__ = lambda self, index: index
loader = DataLoader(Six(), batch_size=4)
"""
EPOCH = "\nprint([batch.tolist() for batch in loader])\n"
RIGHT = "[[0, 1, 2, 3], [4, 5]]\n"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    service = Listener(tmp_path)
    yield service
    service.close()


@pytest.mark.parametrize("workers", ["0", "fork", "persistent"])
def test_samplers_of_others_are_run_in_advance_and_nothing_in_the_job_is_different(
    listener: Listener, workers: str
) -> None:
    plain = output_of("-W", "ignore", JOB, workers, environment=job_environment())
    hooked = output_of("-W", "ignore", JOB, workers, environment=listener.environment())
    assert hooked == plain
    epochs = [(name, epoch) for name, epochs in plain.items() for epoch in epochs]
    announced = listener.announced()
    assert len(announced) == len(epochs)
    for said, (name, epoch) in zip(announced, epochs, strict=True):
        assert [sample for _, sample in said.order()] == epoch["order"], name
        assert said.parts[0]["file"] == os.path.abspath("relative.lmdb")


def test_outside_of_wrap_one_line_says_so_and_the_loader_is_as_it_was() -> None:
    twice = LOADER + "uffdprefetch.torch.prefetch(loader)\n"
    done = run_python("-c", 2 * twice + EPOCH, environment=job_environment())
    assert done.stdout == RIGHT
    assert done.stderr == (
        "uffdprefetch: prefetch: not under `uffdprefetch wrap`, so nothing is prefetched\n"
    )


def test_switched_off_it_does_nothing(listener: Listener) -> None:
    script = LOADER + "uffdprefetch.torch.prefetch(loader)" + EPOCH
    environment = listener.environment(UFFDPREFETCH_TORCH="off")
    done = run_python("-c", script, environment=environment)
    assert (done.stdout, listener.announced()) == (RIGHT, [])
    assert done.stderr == "uffdprefetch: prefetch: switched off by --torch off\n"


def test_what_it_cannot_take_is_an_error_of_one_line() -> None:
    script = (
        LOADER
        + """
import json
class Stream(IterableDataset):
    __iter__ = lambda self: iter([1])
said = []
for thing, more in ((Six(), {}), (DataLoader(Stream()), {}), (loader, {"key": 5}),
                    (loader, {"path": 5}), (loader, {"path": str, "file": "x"})):
    try:
        uffdprefetch.torch.prefetch(thing, **more)
    except Exception as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""
    )
    done = run_python("-c", script, environment=job_environment())
    assert json.loads(done.stdout) == [
        ["TypeError", "prefetch: a torch DataLoader is wanted, not Six"],
        ["ValueError", "prefetch: Stream is an IterableDataset: it chooses its samples itself;"
         " use a map-style dataset"],
        ["TypeError", "prefetch: key is a function of an item number, not 5"],
        ["TypeError", "prefetch: path is a function of an item number, not 5"],
        ["ValueError", "prefetch: path is of whole files: give no key and no file with it"],
    ]  # fmt: skip


def test_key_says_which_records_an_order_reads(listener: Listener) -> None:
    script = (
        LOADER
        + "uffdprefetch.torch.prefetch(loader, key=lambda i: [f'img-{i}', f'lbl-{i}'], file='/f')"
        + EPOCH
    )
    assert run_python("-c", script, environment=listener.environment()).stdout == RIGHT
    (said,) = listener.announced()
    (part,) = said.parts
    assert (part["what"], part["file"], said.items) == ("keys", "/f", 6)
    assert said.numbers(part["turns"]) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    keys = said.column({**part, "kind": "text", "count": 12})
    assert keys == [f"{kind}-{i}" for i in range(6) for kind in ("img", "lbl")]


def test_path_says_which_files_an_order_reads(listener: Listener) -> None:
    script = (
        LOADER
        + "uffdprefetch.torch.prefetch(loader, path=lambda i: [f'{i}.jpg', f'/masks/{i}.png'])"
        + EPOCH
    )
    assert run_python("-c", script, environment=listener.environment()).stdout == RIGHT
    (said,) = listener.announced()
    (part,) = said.parts
    assert (part["what"], said.items, "file" in part) == ("paths", 6, False)
    assert said.numbers(part["turns"]) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    paths = said.column({**part, "kind": "text", "count": 12})
    assert paths == [path for i in range(6) for path in (f"{i}.jpg", f"/masks/{i}.png")]


def test_a_key_function_that_fails_is_one_line_and_the_job_goes_on(listener: Listener) -> None:
    script = LOADER + "uffdprefetch.torch.prefetch(loader, key={}.__getitem__)" + 2 * EPOCH
    done = run_python("-c", script, environment=listener.environment())
    assert done.stdout == 2 * RIGHT
    assert done.stderr == (
        "uffdprefetch: prefetch: key(0) raised KeyError: 0; nothing is prefetched for this loader\n"
    )
    assert listener.announced() == []


def test_it_brings_the_hook_where_python_was_started_without(listener: Listener) -> None:
    script = LOADER + "uffdprefetch.torch.prefetch(loader)" + EPOCH
    done = run_python("-I", "-c", script, environment=listener.environment())
    assert (done.stdout, done.stderr) == (RIGHT, "")
    (said,) = listener.announced()
    assert said.order() == [(0, i) for i in range(6)]
