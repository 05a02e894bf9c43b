# SPDX-License-Identifier: Apache-2.0
"""predict/bounds.py: how much is remembered is what users are told, and what memory it takes."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from paths import ROOT

from uffdprefetch.base.units import MIB
from uffdprefetch.predict.bounds import ENTRIES_MAX, LIST_MAX
from uffdprefetch.predict.read_streams import ReadSighting, ReadStreams

#: What is bounded by each, as its document has it.
TOLD = [
    ("reads.md", r"is bounded: ([0-9,]+) directories of a service", ENTRIES_MAX),
    ("reads.md", r"as they come up, ([0-9,]+) at most", ENTRIES_MAX),
    ("reads.md", r"a directory of more than ([0-9,]+) names", LIST_MAX),
    ("stride.md", r"at most ([0-9,]+) records of a rank", LIST_MAX),
]


@pytest.mark.parametrize(("document", "words", "bound"), TOLD)
def test_a_bound_is_what_users_are_told(document: str, words: str, bound: int) -> None:
    found = re.search(words, (ROOT / "docs" / document).read_text())
    assert found is not None and int(found[1].replace(",", "")) == bound


def test_each_thread_of_a_full_node_is_remembered_in_a_mebibyte_or_two() -> None:
    """128 processes of 32 threads; of ten times as many no more is kept."""
    streams = ReadStreams()

    def sees(process: int, thread: int) -> None:
        streams.saw(ReadSighting((process, thread), 3, "a", 0, 65536, 0, 0))

    for process in range(128):
        for thread in range(32):
            sees(process, thread)
    assert len(streams) == 128 * 32
    tracemalloc.start()
    try:
        for process in range(1000, 2280):
            for thread in range(32):
                sees(process, thread)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 2 * MIB, f"{used / MIB:.1f} MiB"
