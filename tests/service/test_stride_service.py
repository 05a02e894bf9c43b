# SPDX-License-Identifier: Apache-2.0
"""Ranks that skip, under `wrap` on the slow bed: what is read is right, and little else is read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import require, uffdprefetch, wait_until
from harness import Job, Start, auto
from jobs.skipping_ranks import MEETINGS, RANKS, digest
from paths import JOBS

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = [auto, pytest.mark.usefixtures("patient")]

KIB, MIB = 1 << 10, 1 << 20
RECORD_BYTES = 192 * KIB
RECORDS = 2000
PERIOD = 16
SKIP, ALL_HERE = f"skip:{PERIOD}", f"skip:{RANKS}"
NEEDED_BYTES = RECORDS // PERIOD * RANKS * (RECORD_BYTES + 4 * KIB)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowBed]:
    """An LMDB of equal records behind a link that is not slow: only its counters matter."""
    reason = why_no_bed()
    require(reason is None, reason or "")
    source = tmp_path_factory.mktemp("stride")
    env = lmdb.open(str(source / "records.lmdb"), map_size=2 * RECORDS * RECORD_BYTES, sync=False)
    generator = np.random.default_rng(0)
    with env.begin(write=True) as txn:
        for record in range(RECORDS):
            txn.put(b"%08d" % record, generator.bytes(RECORD_BYTES), append=True)
    env.close()
    with SlowBed(source, bandwidth=150_000_000, latency_us=500) as mounted:
        yield mounted


@dataclass
class Read:
    """What a run has brought."""

    read_bytes: int  # that the bed gave
    helpers: list[int]  # of the service, at the end
    numpy: bool  # whether the service has it
    summary: dict[str, Any]

    def followed(self) -> set[tuple[int, str]]:
        plans = self.summary["plans"]
        return {(plan["rank"], plan["how"]) for plan in plans if not plan["dropped"]}


#: For the index, where it is asked for at all by then.
UNSURE_SECONDS = 20.0


def has_numpy(job: Job) -> bool:
    return "numpy" in Path(f"/proc/{job.service()}/maps").read_text()


def wait_for_index(job: Job) -> None:
    end = time.monotonic() + UNSURE_SECONDS
    wait_until(lambda: has_numpy(job) or time.monotonic() > end, "the index")


def run(start: Start, bed: SlowBed, how: str, *options: str, known: bool = False) -> Read:
    """The ranks read, and the right bytes; ``known``: they go on from a third when the service has
    the file's index (it takes numpy to map it), or is not sure yet that they skip."""
    database = bed.path("records.lmdb")
    drop_cache(database / "data.mdb")
    bed.reset()
    job = start(
        uffdprefetch(
            "wrap", "-q", "-f", "-o", "run", "--strict", *options, "--",
            sys.executable, str(JOBS / "skipping_ranks.py"), str(database), how,
        ),
        wrap=False,
    )  # fmt: skip
    digests: dict[int, str] = {}
    for name in MEETINGS:
        while "met" not in (line := job.line()):
            digests[line["rank"]] = line["sha256"]
        assert line["met"] == name
        if known and name == "third":
            wait_for_index(job)
        if name == "ended":
            service = job.service()
            helpers = Path(f"/proc/{service}/task/{service}/children").read_text().split()
            numpy = has_numpy(job)
        job.tell()
    source = str(bed.source / "records.lmdb")
    assert digests == {rank: digest(source, how, rank) for rank in range(RANKS)}
    read_bytes = bed.counters()["bytes"]
    summary = job.finish().good().summary
    assert summary is not None and summary["degradations"] == []
    return Read(read_bytes, list(map(int, helpers)), numpy, summary)


SEQUENCES = {(rank, f"skipping, record {rank} of each {PERIOD}") for rank in range(RANKS)}


def test_four_of_sixteen_ranks_read_what_is_theirs(job: Start, bed: SlowBed) -> None:
    done = run(job, bed, SKIP, "--policy", "stride", known=True)
    assert done.followed() == SEQUENCES
    # until the index is there the kernel reads around each miss: some 20 MiB, once
    assert done.read_bytes < NEEDED_BYTES * 1.1 + 24 * MIB
    # a window over all that is ahead would have read nearly all of it
    assert done.read_bytes < RECORDS * RECORD_BYTES // 2


def test_auto_reads_what_is_theirs_when_it_has_seen_that_they_skip(
    job: Start, bed: SlowBed
) -> None:
    # a small budget keeps windows short, so that little more than what the ranks have passed when
    # their sequences are known is read whole
    done = run(job, bed, SKIP, "--budget", "64MiB", known=True)
    assert done.followed() == SEQUENCES
    assert done.read_bytes < NEEDED_BYTES + (RECORDS * RECORD_BYTES - NEEDED_BYTES) * 3 // 4


@pytest.mark.parametrize("how", [ALL_HERE, "contiguous", "random"])
def test_auto_asks_for_no_index_where_ranks_do_not_leave_anything_out(
    job: Start, bed: SlowBed, how: str
) -> None:
    done = run(job, bed, how)
    assert done.summary["plans"] == []
    assert (done.helpers, done.numpy) == ([], False)
    if how != "random":
        # the waits of four overlap, so that what lies ahead of them is worth little
        assert done.summary["totals"]["prefetched_bytes"] > RECORDS * RECORD_BYTES // 32


def test_ranks_that_do_not_skip_are_prefetched_as_ever(job: Start, bed: SlowBed) -> None:
    done = run(job, bed, "contiguous", "--policy", "stride")
    assert done.summary["plans"] == []
    assert done.summary["totals"]["prefetched_bytes"] > RECORDS * RECORD_BYTES // 2
