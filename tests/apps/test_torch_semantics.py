# SPDX-License-Identifier: Apache-2.0
"""Announcing changes nothing in a training job, to the last bit, and what is announced is true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import SUPPORT
from torch_service import HAVE_TORCH, Listener, job_environment, output_of

pytestmark = [
    pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed"),
    pytest.mark.torch,
]

JOB = SUPPORT / "torch_job.py"
LEFT_ALONE = ("unknown", "iterable")
#: Workers take time to start. With all of these kinds all samplers are tried when this is set.
WHOLE = os.environ.get("UFFDPREFETCH_TEST_TORCH_ALL", "0") != "0"
SOME = ("shuffle", "distributed", "weighted once", "no batches", "nested", "unknown")
FEW = ("shuffle", "distributed")
KINDS = {
    "0": (), "fork": (), "persistent": SOME, "forkserver": SOME, "spawn": FEW,
    "spawn persistent": FEW,
}  # fmt: skip


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    service = Listener(tmp_path)
    yield service
    service.close()


def both(listener: Listener, *arguments: str) -> tuple[Any, Any]:
    """What the job saw without the hook, and with it."""
    plain = output_of("-W", "ignore", JOB, *arguments, environment=job_environment())
    hooked = output_of("-W", "ignore", JOB, *arguments, environment=listener.environment())
    return plain, hooked


def by_part(order: list[list[int]]) -> list[tuple[int, int]]:
    """(leaf, sample) with the leaves counted as parts: those that are read at all."""
    leaves = sorted({leaf for leaf, _ in order})
    return [(leaves.index(leaf), sample) for leaf, sample in order]


def check(listener: Listener, plain: Any, hooked: Any) -> None:
    for name in plain:
        assert hooked[name] == plain[name], f"with the hook {name} went otherwise"
    epochs = [(n, e) for n, es in hooked.items() if n not in LEFT_ALONE for e in es]
    said = [a for a in listener.announced() if a.reader.startswith("loader-")]
    announced = [a for a in said if a.items]  # else that an order is not known
    assert len(announced) == len(epochs)
    for said, (name, epoch) in zip(announced, epochs, strict=True):
        assert said.order() == by_part(epoch["order"]), name


@pytest.mark.parametrize("workers", KINDS)
def test_order_generators_and_losses_are_bit_identical_and_the_announced_order_is_the_real_one(
    listener: Listener, workers: str
) -> None:
    plain, hooked = both(listener, workers, *(() if WHOLE else KINDS[workers]))
    assert len(plain) >= 2
    check(listener, plain, hooked)
