"""The demonstration's data set, job and runner, and the bench's runner in small.

Bytes, counts and digests only; times are for the benches.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FORCED = os.environ.get("UFFDPREFETCH_TEST_FORCE", "") not in ("", "0")
if not FORCED:
    pytest.importorskip("lmdb", reason="py-lmdb is missing (UFFDPREFETCH_TEST_FORCE=1: failure)")
    pytest.importorskip("numpy", reason="numpy is missing (UFFDPREFETCH_TEST_FORCE=1: failure)")

import numpy as np  # noqa: E402

from uffdprefetch.demo import dataset, job  # noqa: E402
from uffdprefetch.demo import run as demo  # noqa: E402
from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully, why_no_bed  # noqa: E402
from uffdprefetch.errors import UffdPrefetchError  # noqa: E402

SIZE_BYTES = 6 << 20
SEED = 11
JOB = Path(job.__file__)
ROOT = JOB.resolve().parents[2]


def skip_or_fail(reason: str | None) -> None:
    """Skip for `reason` (None: go on); UFFDPREFETCH_TEST_FORCE=1 makes the skip a failure."""
    if reason is None:
        return
    if FORCED:
        pytest.fail(f"UFFDPREFETCH_TEST_FORCE is set, and: {reason}")
    pytest.skip(f"{reason} (UFFDPREFETCH_TEST_FORCE=1 makes this a failure)")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dataset.Manifest]:
    """A small data set: its directory and manifest."""
    directory = tmp_path_factory.mktemp("dataset")
    return directory, dataset.make_dataset(directory, SIZE_BYTES, SEED)


@pytest.fixture
def database(made: tuple[Path, dataset.Manifest]) -> Path:
    """The LMDB of the data set."""
    return made[0] / dataset.DATABASE_NAME


@pytest.fixture
def manifest(made: tuple[Path, dataset.Manifest]) -> dataset.Manifest:
    """What the LMDB holds."""
    return made[1]


def run_words(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run job.py as the plain script that it is: without this package in its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    return subprocess.run(
        [sys.executable, str(JOB), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def run_job(database: Path, *words: str | Path) -> dict[str, Any]:
    """The JSON of a job that must end well and print one line."""
    ended = run_words("--db", database, *words)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 1
    result: dict[str, Any] = json.loads(lines[0])
    return result


# ---- the data set -----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_on_any_machine(tmp_path: Path) -> None:
    manifest = dataset.make_dataset(tmp_path, 1 << 20, 3)
    assert manifest.records == 13
    assert manifest.record_bytes == 966400
    assert manifest.sha256 == "593d5ef9fc543d6bf900924ee7f061208864230cb358d8092cf7fd01b62179cb"


def test_the_manifest_says_what_is_there(database: Path, manifest: dataset.Manifest) -> None:
    assert manifest.file_bytes == (database / "data.mdb").stat().st_size
    assert abs(manifest.file_bytes - SIZE_BYTES) < dataset.LARGEST_RECORD_BYTES + (1 << 16)
    assert dataset.digest_of(database, range(manifest.records)) == manifest.sha256
    sizes = dataset.record_sizes(SIZE_BYTES, SEED)
    assert (len(sizes), sum(sizes)) == (manifest.records, manifest.record_bytes)
    assert all(12 << 10 <= size <= 192 << 10 for size in sizes)


def test_record_sizes_span_their_range() -> None:
    sizes = dataset.record_sizes(256 << 20, 0)
    assert min(sizes) < 13 << 10
    assert max(sizes) > 190 << 10


def test_a_made_data_set_is_used_again_and_another_is_made_anew(tmp_path: Path) -> None:
    first = dataset.make_dataset(tmp_path, 1 << 20, 1)
    file = tmp_path / dataset.DATABASE_NAME / "data.mdb"
    inode = file.stat().st_ino, file.stat().st_mtime_ns
    assert dataset.make_dataset(tmp_path, 1 << 20, 1) == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == inode
    other = dataset.make_dataset(tmp_path, 1 << 20, 2)
    assert other.sha256 != first.sha256
    assert dataset.read_manifest(tmp_path) == other


@pytest.mark.parametrize("damage", ["no manifest", "manifest of another program", "short file"])
def test_a_half_made_data_set_is_made_anew(tmp_path: Path, damage: str) -> None:
    first = dataset.make_dataset(tmp_path, 1 << 20, 1)
    manifest = tmp_path / dataset.MANIFEST_NAME
    file = tmp_path / dataset.DATABASE_NAME / "data.mdb"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "short file":
        os.truncate(file, 8192)
    else:
        manifest.write_text('{"schema": "another/1"}')
    assert dataset.make_dataset(tmp_path, 1 << 20, 1) == first
    records = range(first.records)
    assert dataset.digest_of(tmp_path / dataset.DATABASE_NAME, records) == first.sha256


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dataset.DatasetError, match=r"cannot make a data set of 1048576 bytes"):
        dataset.make_dataset(tmp_path / "file" / "below", 1 << 20)


def test_the_index_names_each_records_place_in_the_file(
    made: tuple[Path, dataset.Manifest], database: Path
) -> None:
    extents = np.load(made[0] / dataset.INDEX_NAME)
    assert extents.shape == (made[1].records, 2)
    digest = hashlib.sha256()
    with open(database / "data.mdb", "rb") as file:
        for offset, length in extents.tolist():
            digest.update(os.pread(file.fileno(), length, offset))
    assert digest.hexdigest() == made[1].sha256


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
    skip_or_fail(why_no_bed())
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


# ---- the demonstration ------------------------------------------------------------------------


def options(**changes: Any) -> demo.Options:
    """Baseline and warm only: what this file tests does not need the tool."""
    return dataclasses.replace(
        demo.Options(
            size_bytes=SIZE_BYTES, bandwidth=1 << 30, configurations=("baseline", "warm cache")
        ),
        **changes,
    )


@pytest.mark.parametrize("local", [False, True], ids=["bed", "local"])
def test_the_demo_proves_the_bytes_and_leaves_nothing(tmp_path: Path, local: bool) -> None:
    if not local:
        skip_or_fail(why_no_bed())
    said: list[str] = []
    work = tmp_path / "work"
    result = demo.run_demo(options(local=local, work=work), said.append)
    assert [row.name for row in result.configurations] == ["baseline", "warm cache"]
    assert result.digests_right
    assert all(row.sha256 == result.expected_sha256 for row in result.configurations)
    assert all(len(row.epoch_seconds) == 2 for row in result.configurations)
    baseline, warm = result.configurations
    if local:
        assert baseline.storage_counters is None
    else:
        assert baseline.storage_counters is not None and warm.storage_counters is not None
        assert baseline.storage_counters["bytes"] >= result.record_bytes
        assert warm.storage_counters["bytes"] < result.record_bytes / 10
        assert baseline.storage_counters["bandwidth_bytes_per_second"] == 1 << 30
    assert any("local disk" in line for line in said) == local
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    json.dumps(result.to_json())


def test_the_demo_falls_back_to_the_local_disk_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UFFDPREFETCH_SLOWFS", "/nonexistent/slowfs")
    said: list[str] = []
    result = demo.run_demo(
        options(work=tmp_path, configurations=("baseline",), epochs=1), said.append
    )
    assert result.storage.startswith("local disk")
    assert any("/nonexistent/slowfs" in line and "local disk" in line for line in said)


def row(name: str, seconds: float, right: bool = True, **changes: Any) -> demo.Configuration:
    """A configuration with invented times."""
    base = demo.Configuration(
        name=name,
        epoch_seconds=[seconds, 1.0],
        stall_seconds=seconds - 1,
        major_faults=7,
        sha256="ab" * 32 if right else "cd" * 32,
        digest_right=right,
        digest_beyond_compute_seconds=0.0,
        resident_before_bytes=0,
        storage_counters={"bytes": 0},
        tool_summary=None,
        run={"steal_seconds": 0.0, "wall_seconds": 10.0},
    )
    return dataclasses.replace(base, **changes)


def result_of(*rows: demo.Configuration) -> demo.Result:
    """A result with those rows."""
    return demo.Result(demo.SCHEMA, "a link", 1 << 30, 1 << 30, 1, 1.0, "ab" * 32, list(rows))


def shown(result: demo.Result) -> str:
    """The table as 80 columns of text."""
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        console.print(demo.render_table(result))
    return captured.get()


def test_the_table_shows_ratios_and_check_marks() -> None:
    result = result_of(row("baseline", 6.0), row("prefetch-on", 2.2), row("warm cache", 2.0))
    lines = shown(result).splitlines()
    (line,) = [line for line in lines if "prefetch-on" in line]
    assert line.split()[:7] == ["prefetch-on", "2.20", "1.00", "1.20", "1.10", "2.73", "7"]
    assert line.split()[7:] == ["abababababab", "✓"]
    text = demo.verdict(result)
    assert "6.0 s to 2.2 s" in text and "2.73 times" in text and "1.10 x" in text


def test_no_gain_is_called_no_gain() -> None:
    result = result_of(row("baseline", 2.0), row("prefetch-on", 2.5), row("warm cache", 1.9))
    assert demo.verdict(result).startswith("Prefetching gained nothing on this storage")


def test_a_wrong_digest_is_shown_and_said() -> None:
    result = result_of(row("baseline", 6.0), row("prefetch-on", 2.0, right=False))
    assert not result.digests_right
    assert "cdcdcdcdcdcd ✗" in shown(result)
    assert demo.verdict(result).startswith("WRONG BYTES in prefetch-on")


def test_a_row_without_its_reference_is_not_available() -> None:
    assert "n/a" in shown(result_of(row("prefetch-on", 2.0)))


def test_disturbances_are_remarked_and_silence_is_golden() -> None:
    assert demo.remarks(result_of(row("baseline", 6.0), row("warm cache", 2.0))) == []
    stolen = row("baseline", 6.0, run={"steal_seconds": 1.0, "wall_seconds": 10.0})
    late = row("prefetch-on", 2.0, digest_beyond_compute_seconds=0.5)
    cold = row("warm cache", 2.0, storage_counters={"bytes": 4096})
    first, second, third = demo.remarks(result_of(stolen, late, cold))
    assert "1.00 s of CPU" in first
    assert "hashing" in second
    assert "4 KiB" in third


def command(*words: str) -> tuple[Any, argparse.Namespace]:
    """The demo command and its parsed options."""
    from uffdprefetch.cli.demo import Command

    parser = argparse.ArgumentParser()
    one = Command()
    one.prepare_parser(parser)
    return one, parser.parse_args(words)


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_the_command_fails_exactly_when_a_digest_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool, status: int
) -> None:
    asked: list[demo.Options] = []

    def fake(options: demo.Options, say: Callable[[str], None]) -> demo.Result:
        asked.append(options)
        return result_of(row("baseline", 6.0), row("prefetch-on", 2.0, right=right))

    monkeypatch.setattr(demo, "run_demo", fake)
    file = tmp_path / "demo.json"
    words = ["--size=2GiB", "--bandwidth=1GB/s", "--latency=5ms", "--local", "--json", str(file)]
    one, args = command(*words)
    assert one.run(args, None) == status
    assert json.loads(file.read_text())["digests_right"] is right
    (options,) = asked
    assert (options.size_bytes, options.bandwidth) == (2 << 30, 1_000_000_000)
    assert (options.latency_us, options.local) == (5000, True)


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--size=1"], None),
        (["--configurations=cold"], None),
        (["--bandwidth=fast"], None),
        ([], ["python"]),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words: list[str], rest: list[str] | None) -> None:
    one, args = command(*words)
    with pytest.raises(UffdPrefetchError) as caught:
        one.run(args, rest)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such disk')", "status 1: no such disk"),
        ("print('hello')", "no JSON"),
        ("import time; time.sleep(600)", "was killed"),
    ],
)
def test_a_job_that_fails_or_hangs_is_one_clear_error(program: str, message: str) -> None:
    timeout_seconds = 1.0 if "sleep" in program else 60.0
    with pytest.raises(UffdPrefetchError, match=message):
        demo.run_job([sys.executable, "-c", program], timeout_seconds=timeout_seconds)


# ---- the bench's runner and renderer ----------------------------------------------------------


def load_bench(name: str) -> ModuleType:
    """A script of bench/ as a module; it is no package."""
    path = ROOT / "bench" / f"{name}.py"
    if not path.exists():
        pytest.skip("the benches are only in a source tree")
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_ratios_are_paired_within_a_round() -> None:
    bench = load_bench("run")
    names = {field.name: None for field in dataclasses.fields(bench.Run)}

    def run(variant: str, number: int, seconds: float) -> Any:
        given = {"case": "c", "variant": variant, "round": number, "seconds": seconds}
        return bench.Run(**(names | given | {"stall_seconds": 0.0}))

    # The machine is twice as slow in round 1: no ratio may show it.
    runs = []
    for number, factor in enumerate((1.0, 2.0, 1.0)):
        runs += [
            run(bench.BASELINE, number, 6.0 * factor),
            run(bench.TOOL, number, 3.0 * factor),
            run(bench.WARM, number, 2.0 * factor),
        ]
    rows = {row["variant"]: row for row in bench.summarize(runs, 200, 100)}
    assert rows[bench.TOOL]["ratio_to_limit"] == 1.5
    assert rows[bench.TOOL]["ratio_to_limit_interval"] == (1.5, 1.5)
    assert rows[bench.TOOL]["ratio_to_baseline"] == 0.5
    assert rows[bench.WARM]["ratio_to_limit"] == 1.0
    # A link that takes longer than the warm run is the limit.
    slow = {row["variant"]: row for row in bench.summarize(runs[:3], 1200, 100)}
    assert slow[bench.TOOL]["ratio_to_limit"] == 0.25
    # Without a warm run in the round there is no limit.
    assert bench.summarize(runs[:2], 200, 100)[0]["ratio_to_limit"] is None


def test_the_bootstrap_interval_holds_the_median_and_narrows() -> None:
    bench = load_bench("run")
    few, many = [1.0, 1.1, 1.2, 1.3], [1.0, 1.1, 1.2, 1.3] * 25
    low, high = bench.bootstrap_interval(few)
    assert 1.0 <= low <= 1.15 <= high <= 1.3
    narrow = bench.bootstrap_interval(many)
    assert narrow[1] - narrow[0] < high - low


def test_a_bench_in_small_measures_counts_and_renders(tmp_path: Path) -> None:
    skip_or_fail(why_no_bed())
    file = tmp_path / "bench.json"
    words = ["--suite=peers", "--pairs=2", "--size=4MiB", "--case=skipping 4, compute 0.95"]
    words += ["--only=MADV_WILLNEED,own prefetch thread x8", "--work", str(tmp_path / "data")]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), *words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(file.read_text())
    variants = ["plain mmap", "warm cache", "MADV_WILLNEED", "own prefetch thread x8"]
    assert [run["variant"] for run in report["runs"]] == variants * 2
    assert [run["round"] for run in report["runs"]] == [0] * 4 + [1] * 4
    assert report["failures"] == []
    for run in report["runs"]:
        assert run["as_prepared"] is True
        assert run["epochs"][0]["bytes"] == report["dataset"]["record_bytes"]
        assert run["bed"]["bandwidth_bytes_per_second"] == 300_000_000
    for place in (str(ROOT), sys.executable, "uffdprefetch-bed-"):
        assert place not in file.read_text()
    for name in ("command", "date", "kernel", "cpus", "bed"):
        assert report[name]

    render = load_bench("render")
    text = render.markdown(report)
    assert "skipping 4, compute 0.95" in text
    assert report["command"] in text
    assert all(f"| {name} |" in text for name in variants)
    if importlib.util.find_spec("matplotlib") is not None:
        assert render.main([str(file), "-o", str(tmp_path / "t.md"), "--png", str(tmp_path)]) == 0
        (picture,) = tmp_path.glob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_renderer_refuses_what_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    render = load_bench("render")
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert render.main([str(file)]) == 1
    assert "no report" in capsys.readouterr().err


def test_a_sweep_and_a_timeline_are_rendered() -> None:
    render = load_bench("render")
    summary = {"median_stall_seconds": 0.0, "ratio_to_limit": None, "ratio_to_baseline": None}
    summary |= {"ratio_to_limit_interval": None, "ratio_to_baseline_interval": None, "runs": 1}
    report = {
        "summary": [
            summary
            | {
                "case": "sweep 1, compute 0.95",
                "variant": f"fixed size {size} distance {distance} MiB",
                "median_seconds": size + distance / 100,
            }
            for size in (50, 100)
            for distance in (8, 10)
        ],
        "runs": [
            {"tool_summary": None},
            {
                "tool_summary": {
                    "timeline": {
                        "bin_seconds": 0.5,
                        "bins": [{"window_bytes": 7, "deep": {}}, {"window_bytes": 9, "deep": {}}],
                    }
                }
            },
        ],
    }
    lines = render.sweep_table(report).splitlines()
    assert lines[0] == "| epoch 1 s | distance 8 MiB | distance 10 MiB |"
    assert lines[3] == "| size 100 MiB | 100.08 | 100.10 |"
    lines = render.timeline_table(report).splitlines()
    assert (lines[0], lines[3]) == ("| seconds | window_bytes |", "| 0.5 | 9 |")
    assert render.timeline_table({"runs": []}) is None
