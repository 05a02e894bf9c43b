# SPDX-License-Identifier: Apache-2.0
"""Files of weights under `wrap`, on the slow bed: the start of each tensor is there before anybody
touches it, and who looks at some of them is given what follows (readers/tensor_starts.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until
from harness import MIB, Start, auto, python

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes
from uffdprefetch.native import uffd
from uffdprefetch.readers.tensor_starts import tensor_starts_of

pytest_plugins = ("harness_fixtures", "components")
pytestmark = auto

COUNT, TENSOR = 48, 4 * MIB
MAKE = {
    "safetensors": "from safetensors.torch import save_file as save",
    "torch": "from torch import save",
}
#: Maps a file, and touches a byte of each page that it is told, then of all.
READER = """
m = Mapping(sys.argv[1])
say(mapped=m.length)
say(read=sum(m.view[at] for at in json.loads(hear())))
hear()
say(read=sum(m.view[::PAGE]))
"""


@pytest.fixture(params=MAKE)
def weights(store: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkpoint of random tensors, as the library of that name writes it."""
    pytest.importorskip("torch")
    pytest.importorskip(request.param)
    path = store / f"weights.{request.param}"
    code = (
        f"import sys, torch\n{MAKE[request.param]}\n"
        f"save({{f't{{n}}': torch.randint(0, 255, ({TENSOR},), dtype=torch.uint8)"
        f" for n in range({COUNT})}}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)
    yield path
    path.unlink()


#: May be lost on a link of which nothing is known yet, and more (predict/storage.py).
FREE_BYTES = 8 * MIB


def present(path: Path, start: int, length: int) -> int:
    """Bytes of a range in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        there, _ = uffd.resident_bytes(fd, start, length)
    finally:
        os.close(fd)
    return there or 0


def test_tensor_starts_come_first_and_what_follows_when_some_are_touched(
    job: Start, bed: SlowBed, weights: Path
) -> None:
    size = weights.stat().st_size
    found = tensor_starts_of(os.open(weights, os.O_RDONLY), size)
    large = [part for part in found if part[0] + TENSOR <= size]
    assert len(large) >= COUNT - 1
    path = bed.path(weights.name)
    drop_cache(path)
    bed.reset()
    work = job(python(READER, path))
    assert work.line()["mapped"] == size
    left = list(found)  # one by one: what has come may be taken away again by the kernel

    def have_come() -> bool:
        left[:] = [(a, b) for a, b in left if present(path, a, b - a) < b - a]
        return not left

    wait_until(have_come, lambda: f"the starts in {path}: of {len(found)} {left} are missing")
    little = resident_bytes(path)
    assert little < 2 * MIB, "and nothing else, the header and the checkpoints apart"
    begun = large[0][0]
    # by the link: a page that has come may be taken away again by the kernel
    wanted = bed.counters()["bytes"] + FREE_BYTES - present(path, begun, FREE_BYTES)
    work.tell(json.dumps([a for a, _ in large[:8]]))
    wait_until(
        lambda: bed.counters()["bytes"] >= wanted,
        lambda: f"what follows the first: {wanted - bed.counters()['bytes']} bytes are missing",
    )
    expected = weights.read_bytes()
    assert work.line()["read"] == sum(expected[a] for a, _ in large[:8])
    work.tell()
    assert work.line()["read"] == sum(expected[:: os.sysconf("SC_PAGESIZE")])
    work.finish().good()
    assert bed.counters()["bytes"] <= size * 1.03, "each byte once"
