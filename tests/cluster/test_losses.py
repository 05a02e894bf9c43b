# SPDX-License-Identifier: Apache-2.0
"""tests/support/losses.py, a few of them once (`make cluster`: all of them, ten times)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import losses
import pytest
from conftest import require
from nodes_bed import nodes_bed, why_none

from uffdprefetch.demo.bed import why_no_bed

pytestmark = [pytest.mark.root, pytest.mark.mpi]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[losses.Data]:
    for reason in (why_none(), why_no_bed()):
        require(not reason, str(reason))
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    with losses.data(tmp_path_factory.mktemp("far")) as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "means"),
    [
        *(
            (kind, 0)
            for kind in ("transport", "service", "job", "leader", "silent", "freeze", "cable")
        ),
        ("spoiled", 0),
        ("transport", 1),
        ("freeze", 1),
        ("spoiled", 1),
        *((kind, 2) for kind in ("transport", "service", "node", "silent")),
    ],
)
def test_every_byte_is_right_whatever_happens(
    kind: str, means: int, data: losses.Data, tmp_path: Path
) -> None:
    how, chance = losses.How(), random.Random(kind)
    with nodes_bed(losses.NODES, tmp_path) as bed:
        found = losses.happen(kind, bed, data, tmp_path, how, chance, means=losses.MEANS[means])
    assert found.wrong == 0 and found.epochs > losses.NODES
    assert (kind == "spoiled") == (found.corrupt > 0)
    if kind in ("transport", "leader"):
        assert found.again is not None, "they share again, with a transport each"
