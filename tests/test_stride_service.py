# SPDX-License-Identifier: Apache-2.0
"""Ranks that skip, under `wrap` on the slow bed: what is read is right, and little else is read."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import HANG_SECONDS, require, uffdprefetch

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

KIB, MIB = 1 << 10, 1 << 20
RECORD_BYTES = 192 * KIB
RECORDS = 2000
PERIOD = 16

#: Four ranks, as a launcher starts them.
RANKS = """
    import os, sys

    database, how = sys.argv[1], sys.argv[2]
    for rank in range(4):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            os.execv(sys.executable, [sys.executable, "-c", os.environ["ONE"], database, how,
                                      str(rank)])
    failed = sum(os.wait()[1] != 0 for _ in range(4))
    sys.exit(1 if failed else 0)
"""

#: One of them. Its digest is of its values in its order.
ONE = """
    import hashlib, json, os, sys
    import lmdb

    database, how, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    env = lmdb.open(database, readonly=True, lock=False)
    sha, count = hashlib.sha256(), env.stat()["entries"]
    order = range(rank, count, 16) if how == "skip" else range(count * rank // 4,
                                                              count * (rank + 1) // 4)
    with env.begin(buffers=True) as txn:
        for record in order:
            sha.update(bytes(txn.get(b"%08d" % record)))
    line = json.dumps({"rank": rank, "sha256": sha.hexdigest()}) + "\\n"
    os.write(1, line.encode())
"""


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


def digests(bed: SlowBed, how: str) -> dict[int, str]:
    """Read past the bed."""
    found = {}
    env = lmdb.open(str(bed.source / "records.lmdb"), readonly=True, lock=False)
    with env.begin() as txn:
        for rank in range(4):
            order = (
                range(rank, RECORDS, PERIOD)
                if how == "skip"
                else range(RECORDS * rank // 4, RECORDS * (rank + 1) // 4)
            )
            sha = hashlib.sha256()
            for record in order:
                sha.update(txn.get(b"%08d" % record))
            found[rank] = sha.hexdigest()
    env.close()
    return found


def run(
    bed: SlowBed, how: str, env: dict[str, str], cwd: Path, *options: str
) -> tuple[dict[int, str], int, dict[str, Any]]:
    """(rank -> digest, bytes that the bed gave, summary)."""
    database = bed.path("records.lmdb")
    drop_cache(database / "data.mdb")
    bed.reset()
    job = [sys.executable, "-c", textwrap.dedent(RANKS), str(database), how]
    words = uffdprefetch("wrap", "-q", "-f", "-o", "run", "--strict", *options, "--", *job)
    environment = {**env, "ONE": textwrap.dedent(ONE)}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, timeout=2 * HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    summary = json.loads((cwd / "run.summary.json").read_text())
    found = {line["rank"]: line["sha256"] for line in lines}
    return found, bed.counters()["bytes"], summary


def followed(summary: dict[str, Any]) -> set[tuple[int, str]]:
    return {(plan["rank"], plan["how"]) for plan in summary["plans"] if not plan["dropped"]}


@pytest.mark.parametrize("policy", ["stride"])
def test_four_of_sixteen_ranks_read_what_is_theirs(
    bed: SlowBed, env: dict[str, str], tmp_path: Path, policy: str
) -> None:
    found, read_bytes, summary = run(bed, "skip", env, tmp_path, "--policy", policy)
    assert found == digests(bed, "skip")
    assert summary["degradations"] == []
    assert followed(summary) == {
        (rank, f"skipping, record {rank} of each {PERIOD}") for rank in range(4)
    }
    needed_bytes = RECORDS // PERIOD * 4 * (RECORD_BYTES + 4 * KIB)
    # until the index is there the kernel reads around each miss: some 20 MiB, once
    assert read_bytes < needed_bytes * 1.1 + 24 * MIB
    # a window over all that is ahead would have read nearly all of it
    assert read_bytes < RECORDS * RECORD_BYTES // 2


@pytest.mark.parametrize("policy", ["stride"])
def test_ranks_that_do_not_skip_are_prefetched_as_ever(
    bed: SlowBed, env: dict[str, str], tmp_path: Path, policy: str
) -> None:
    found, _, summary = run(bed, "contiguous", env, tmp_path, "--policy", policy)
    assert found == digests(bed, "contiguous")
    assert (summary["degradations"], summary["plans"]) == ([], [])
    assert summary["totals"]["prefetched_bytes"] > RECORDS * RECORD_BYTES // 2
