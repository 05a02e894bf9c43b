# SPDX-License-Identifier: Apache-2.0
"""The training-like job: which rank reads what, in which way, and that every way reads the same
bytes. Bytes, counts and digests only; times are for the benches."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import require
from training import run_job, run_words

from uffdprefetch.demo import dataset, job
from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully, why_no_bed

pytest_plugins = ("training",)

# ---- who reads what ---------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", job.PATTERNS)
@pytest.mark.parametrize("ranks", [1, 3, 4, 11])
def test_the_ranks_together_read_each_record_once(pattern: str, ranks: int) -> None:
    records = 103
    seen: list[int] = []
    for rank in range(ranks):
        seen += job.rank_order(pattern, records, rank, ranks, seed=5, epoch=2)
    assert sorted(seen) == list(range(records))


def test_the_patterns_are_what_they_are_called() -> None:
    assert list(job.rank_order("contiguous", 10, 1, 3)) == [3, 4, 5]
    assert list(job.rank_order("skipping", 10, 1, 3)) == [1, 4, 7]
    shuffled = list(job.rank_order("shuffled", 100, 0, 2, seed=1))
    assert shuffled == list(job.rank_order("shuffled", 100, 0, 2, seed=1))
    assert shuffled != sorted(shuffled)
    assert shuffled != list(job.rank_order("shuffled", 100, 0, 2, seed=2))
    assert shuffled != list(job.rank_order("shuffled", 100, 0, 2, seed=1, epoch=1))


def test_a_rank_or_pattern_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4"):
        job.rank_order("contiguous", 10, 4, 4)
    with pytest.raises(ValueError, match="zigzag"):
        job.rank_order("zigzag", 10, 0, 1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({}, (0, 1)),
    ],
)
def test_rank_and_size_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = job.parse(["--db", "x"])
    assert (options.rank, options.ranks) == expected


# ---- the job ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--no-readahead"],
        ["--lock"],
        ["--advice=sequential"],
        ["--advice=willneed", "--no-readahead"],
        ["--batch=7"],
        ["--compute-per-batch=0.001", "--spin"],
    ],
    ids=" ".join,
)
def test_every_way_to_read_gives_the_data_sets_digest(
    database: Path, manifest: dataset.Manifest, words: list[str]
) -> None:
    (epoch,) = run_job(database, "--rank=0", "--ranks=1", "--digest", *words)["epochs"]
    assert epoch["sha256"] == manifest.sha256
    assert epoch["records"] == manifest.records
    assert epoch["bytes"] == manifest.record_bytes
    assert epoch["minflt"] + epoch["majflt"] > 0
    assert 0 <= epoch["stall_seconds"] <= epoch["seconds"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_data_sets_digest(
    database: Path, manifest: dataset.Manifest, workers: int
) -> None:
    require(importlib.util.find_spec("torch"), "torch is missing: pip install torch")
    words = ["--digest", f"--dataloader-workers={workers}", "--rank=0", "--ranks=1"]
    (epoch,) = run_job(database, *words)["epochs"]
    assert epoch["sha256"] == manifest.sha256


def test_the_path_may_be_the_file_itself(database: Path, manifest: dataset.Manifest) -> None:
    (epoch,) = run_job(database / "data.mdb", "--digest", "--ranks=1", "--rank=0")["epochs"]
    assert epoch["sha256"] == manifest.sha256


def test_without_digest_there_is_none(database: Path) -> None:
    result = run_job(database, "--epochs=3", "--rank=0", "--ranks=1")
    assert [epoch["sha256"] for epoch in result["epochs"]] == [None] * 3


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("pattern", job.PATTERNS)
def test_hand_written_prefetch_threads_change_no_byte(
    made: tuple[Path, dataset.Manifest], database: Path, pattern: str, threads: str
) -> None:
    words = ["--pattern", pattern, "--rank=1", "--ranks=2", "--digest", "--epochs=2"]
    index = made[0] / dataset.INDEX_NAME
    result = run_job(database, *words, "--peer-thread", threads, "--peer-index", index)
    for number, epoch in enumerate(result["epochs"]):
        order = job.rank_order(pattern, made[1].records, 1, 2, epoch=number)
        assert epoch["sha256"] == dataset.digest_of(database, order)


@pytest.mark.parametrize("pattern", job.PATTERNS)
def test_prefetch_threads_read_every_byte_of_the_records(
    made: tuple[Path, dataset.Manifest], database: Path, pattern: str
) -> None:
    extents = np.load(made[0] / dataset.INDEX_NAME)
    order = job.rank_order(pattern, len(extents), 0, 2)
    peer = job.PeerPrefetcher(str(database / "data.mdb"), extents, 0)
    covered = np.zeros(made[1].file_bytes, dtype=bool)
    for _, offset, length in peer._cut(order):
        assert 0 < length <= job.PEER_CHUNK_BYTES
        assert not covered[offset : offset + length].any(), "read twice"
        covered[offset : offset + length] = True
    for record in order:
        offset, length = extents[record]
        assert covered[offset : offset + length].all()
    peer.close()


@pytest.mark.parametrize("barrier", ["none", "epoch", "batch"])
@pytest.mark.parametrize("pattern", job.PATTERNS)
def test_spawned_ranks_read_their_own_records_and_are_summed(
    database: Path, manifest: dataset.Manifest, pattern: str, barrier: str
) -> None:
    ranks = 3
    result = run_job(
        database,
        *("--pattern", pattern, "--ranks", str(ranks), "--spawn", "--digest", "--epochs=2"),
        *("--barrier", barrier),
    )
    assert result["ranks"] == ranks == len(result["per_rank"])
    for number, epoch in enumerate(result["epochs"]):
        assert epoch["records"] == manifest.records
        assert epoch["bytes"] == manifest.record_bytes
        digests = []
        for rank in range(ranks):
            order = job.rank_order(pattern, manifest.records, rank, ranks, epoch=number)
            digests.append(dataset.digest_of(database, order))
        mine = [one["epochs"][number]["sha256"] for one in result["per_rank"]]
        assert mine == digests
        assert epoch["sha256"] == hashlib.sha256("".join(digests).encode()).hexdigest()


def test_one_spawned_rank_has_the_data_sets_digest(
    database: Path, manifest: dataset.Manifest
) -> None:
    result = run_job(database, "--spawn", "--ranks=1", "--digest")
    assert result["epochs"][0]["sha256"] == manifest.sha256


@pytest.mark.parametrize("words", [[], ["--spawn", "--ranks=2"]], ids=["alone", "spawned"])
def test_a_missing_database_ends_the_job_with_one_line_a_rank(
    tmp_path: Path, words: list[str]
) -> None:
    ended = run_words("--db", tmp_path / "absent", *words)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "absent" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--rank=2", "--ranks=2"],
        ["--batch=0"],
        ["--peer-thread=1"],
        ["--barrier=batch"],
        ["--pattern=zigzag"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(database: Path, words: list[str]) -> None:
    assert run_words("--db", database, *words).returncode == 2


class Ranks:
    """The parent's and the ranks' ends of a gate, without processes."""

    def __init__(self, count: int) -> None:
        self.gates = []
        self.up, self.down, self.ends = [], [], []
        for _ in range(count):
            here_read, here_write = os.pipe()
            go_read, go_write = os.pipe()
            self.gates.append(job.Gate((go_read, here_write)))
            self.up.append(here_read)
            self.down.append(go_write)
            self.ends.append((go_read, here_write))
        self.begun = 0
        self.parent = threading.Thread(
            target=job.run_gate, args=(self.up, self.down, self._begin), daemon=True
        )
        self.parent.start()

    def _begin(self) -> None:
        self.begun += 1

    def leave(self, rank: int) -> None:
        """The rank's process ends."""
        for fd in self.ends[rank]:
            os.close(fd)

    def close(self) -> None:
        """The parent's ends."""
        for fd in (*self.up, *self.down):
            os.close(fd)


@pytest.fixture
def make_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Makes Ranks, and closes the parent's ends afterwards."""
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def test_the_gate_opens_when_the_last_rank_has_come(make_ranks: Callable[[int], Ranks]) -> None:
    ranks = make_ranks(2)
    passed = threading.Event()

    def first() -> None:
        ranks.gates[0].wait()
        passed.set()

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert not passed.is_set()
    assert ranks.begun == 0
    ranks.gates[1].wait()
    assert passed.wait(timeout=30)
    assert ranks.begun == 1
    ranks.leave(0)
    ranks.gates[1].wait()  # a rank that has left is not waited for
    ranks.leave(1)
    ranks.parent.join(timeout=30)
    assert not ranks.parent.is_alive()
    assert ranks.begun == 1


def test_a_rank_that_dies_before_the_start_stops_the_start(
    make_ranks: Callable[[int], Ranks],
) -> None:
    ranks = make_ranks(2)
    os.write(ranks.ends[1][1], b"h")
    ranks.leave(0)
    ranks.parent.join(timeout=30)
    assert not ranks.parent.is_alive()
    assert ranks.begun == 0
    ranks.leave(1)


# ---- on the bed -------------------------------------------------------------------------------


def test_a_cold_job_reads_through_the_bed_and_a_warm_one_does_not(
    made: tuple[Path, dataset.Manifest],
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    directory, manifest = made
    with SlowBed(directory, bandwidth=0, latency_us=0) as bed:
        database = bed.path(dataset.DATABASE_NAME)
        drop_cache(database / "data.mdb")
        bed.reset()
        (cold,) = run_job(database, "--digest", "--lock", "--rank=0", "--ranks=1")["epochs"]
        came_bytes = bed.counters()["bytes"]
        assert manifest.record_bytes <= came_bytes <= manifest.file_bytes
        warm_fully(database / "data.mdb")
        bed.reset()
        (warm,) = run_job(database, "--digest", "--rank=0", "--ranks=1")["epochs"]
        # not nothing: a kernel with proactive reclaim may have taken a page since the check
        assert bed.counters()["bytes"] < manifest.record_bytes / 10
    assert cold["sha256"] == warm["sha256"] == manifest.sha256
