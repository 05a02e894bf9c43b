# SPDX-License-Identifier: Apache-2.0
"""What the options of wrap do to a real job: which files, which policy, how much, who answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from components import (
    ARRAY,
    TESTING,
    TESTING_BYTES,
    TRAINING,
    TRAINING_BYTES,
    Run,
    Runner,
    Start,
    check_managed,
    data,
    python,
)
from conftest import HANG_SECONDS, require, wait_until
from harness import programs, service_pid, snapshot

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ["components"]
pytestmark = [pytest.mark.root, pytest.mark.slow]

MIB = 1 << 20

#: argv: files. Maps each and reads it twice; prints the digest of each.
READ = """
import hashlib, mmap, sys
for path in sys.argv[1:]:
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        for epoch in range(2):
            for at in range(0, len(view), 1 << 18):
                digest.update(view[at:at + (1 << 18)])
    print(digest.hexdigest())
"""


def check_run(runner: Runner, paths: Sequence[Path], *options: str) -> Run:
    """Read ``paths`` under wrap with ``options``, cold, and compare with a plain run."""
    files = [data(path) for path in paths]
    run = runner.wrapped(*python(READ, *files), cold=files, options=options)
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*python(READ, *files))
    return run


def managed(run: Run) -> set[str]:
    return {entry["path"] for entry in run.summary["files"]}


# ---- which files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--exclude", "*.npy"), [TRAINING, TESTING]),
        (("--include", "*.npy"), [ARRAY]),
        (("--include", "*/training/*"), [TRAINING]),
        (("--include", "data.mdb", "--exclude", "*/testing/*"), [TRAINING]),
        (("--include", "data.mdb", "--include", "*.npy", "--exclude", "/no/such"), None),
        (("--exclude", "*"), []),
    ],
)
def test_globs_choose_the_files(
    runner: Runner, bed: SlowBed, options: tuple[str, ...], expected: list[str] | None
) -> None:
    names = [TRAINING, TESTING, ARRAY]
    wanted = {str(data(bed.path(name))) for name in (names if expected is None else expected)}
    run = check_run(runner, [bed.path(name) for name in names], *options)
    assert managed(run) == wanted
    for path in wanted:
        check_managed(run, Path(path))
    others = {str(data(bed.path(name))) for name in names} - wanted
    assert run.summary["refused"] == dict.fromkeys(others, "left out by --include or --exclude")


def test_smaller_mappings_than_min_size_are_left_alone(runner: Runner, bed: SlowBed) -> None:
    assert TESTING_BYTES < 80 * MIB < TRAINING_BYTES
    paths = [bed.path(TRAINING), bed.path(TESTING)]
    run = check_run(runner, paths, "--min-size", "80MiB")
    assert managed(run) == {str(data(paths[0]))}
    run = check_run(runner, paths, "--min-size", "200MiB")
    assert managed(run) == set()
    assert run.summary["rung"] is None


# ---- policies -----------------------------------------------------------------------------------


def test_policy_none_watches_and_prefetches_nothing(runner: Runner, bed: SlowBed) -> None:
    bed.reset()
    run = check_run(runner, [bed.path(TRAINING)], "--policy", "none")
    file = check_managed(run, bed.path(TRAINING), prefetched=False)
    assert run.summary["policy"] == "none"
    assert file["prefetched_bytes"] == 0
    assert file["demand_used_blocks_bytes"] > 0


ADVICE = """
import lmdb, os, sys
env = lmdb.open(sys.argv[1], readonly=True, lock=False, readahead=False)
inside = found = False
for line in open('/proc/self/smaps'):
    if line.split()[0].count('-') == 1 and not line.split()[0].endswith(':'):
        inside = line.rstrip().endswith('data.mdb')
    elif inside and line.startswith('VmFlags:'):
        found |= 'rr' in line.split()
print('random' if found else 'normal')
with env.begin(buffers=True) as txn:
    print(sum(txn.get(b'%08d' % i)[0] for i in range(100)))
"""


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_the_jobs_advice_reaches_the_kernel(runner: Runner, bed: SlowBed, policy: str) -> None:
    path = bed.path(TRAINING)
    run = runner.wrapped(*python(ADVICE, path), cold=[path], options=["--policy", policy])
    assert run.status == 0, run.stderr
    plain = runner.plain(*python(ADVICE, path)).splitlines()
    assert plain[0] == b"random"
    assert run.stdout.splitlines() == plain
    run.file(path)


def test_fixed_windows_do_not_overlap(runner: Runner, bed: SlowBed) -> None:
    options = ("--policy", "fixed", "--size", "50MiB", "--distance", "8MiB")
    bed.reset()
    run = check_run(runner, [bed.path(TRAINING)], *options)
    fetched = bed.counters()["bytes"]
    file = check_managed(run, bed.path(TRAINING))
    assert run.summary["policy"] == "fixed"
    # each byte at most once from the storage, by whomever
    assert fetched <= 1.05 * file["size_bytes"]
    assert file["prefetched_bytes"] <= file["size_bytes"]
    windows = {b["window_bytes"] for b in run.summary["timeline"]["bins"] if b["window_bytes"]}
    distances = {b["distance_bytes"] for b in run.summary["timeline"]["bins"]} - {0}
    assert (windows, distances) == ({50 * MIB}, {8 * MIB})


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "fixed", "--size", "1MiB", "--distance", "64KiB"),
        ("--policy", "fixed", "--size", "1GiB", "--distance", "32MiB", "--threshold", "0.1"),
        ("--distance", "1MiB"),
        ("--budget", "1MiB"),
        ("--budget", "5MiB", "--max-rate", "40MiB/s"),
    ],
)
def test_extreme_settings_give_the_right_bytes(
    runner: Runner, bed: SlowBed, options: tuple[str, ...]
) -> None:
    run = check_run(runner, [bed.path(TRAINING)], *options)
    assert managed(run) == {str(data(bed.path(TRAINING)))}
    check_managed(run, bed.path(TRAINING))


def test_the_budget_bounds_every_window(runner: Runner, bed: SlowBed) -> None:
    run = check_run(runner, [bed.path(TRAINING)], "--budget", "6MiB")
    check_managed(run, bed.path(TRAINING))
    windows = [b["window_bytes"] for b in run.summary["timeline"]["bins"]]
    # it lies ahead of the block of 64 KiB in which the reader is
    assert 0 < max(windows) < 6 * MIB + 64 * 1024


def test_the_time_line_accounts_for_every_byte(runner: Runner, bed: SlowBed) -> None:
    run = check_run(runner, [bed.path(TRAINING), bed.path(ARRAY)])
    totals = run.summary["totals"]
    bins = run.summary["timeline"]["bins"]
    assert sum(b["prefetched_bytes"] for b in bins) == totals["prefetched_bytes"] > 0
    assert totals["prefetched_bytes"] == sum(f["prefetched_bytes"] for f in run.summary["files"])


def test_a_maximum_rate_is_kept_to(runner: Runner, bed: SlowBed) -> None:
    """Bytes over the run's own clock, as the service counted both: no time is asserted."""
    run = check_run(runner, [bed.path(TRAINING)], "--max-rate", "20MiB/s")
    file = check_managed(run, bed.path(TRAINING))
    burst_bytes = 12 * MIB  # a full bucket, an extent of debt, and the one under way
    allowed = 20 * MIB * run.summary["wall_seconds"] + burst_bytes
    assert file["prefetched_bytes"] <= allowed


# ---- from outside -------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("-static",)])
def test_with_the_engine_off_a_program_is_watched_from_outside(
    runner: Runner, bed: SlowBed, children: Start, flags: tuple[str, ...]
) -> None:
    """Nothing is preloaded, so a static program is like any other; it is there until it is seen."""
    require(shutil.which("cc"), "no C compiler: install gcc")
    path = bed.path(ARRAY)
    drop_cache(path)
    words = [programs(runner.cwd, "sum_mapping", *flags), str(path), "shared", "1", "held"]
    runner.env["UFFDPREFETCH_RUN"] = "watched"
    process = children(
        runner.command(*words, options=["--engine", "off"]), env=runner.env, cwd=runner.cwd,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    service_pid(runner.env)
    wait_until(lambda: snapshot(runner.env).files, "the mapping to be seen")
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, stderr
    assert stdout == runner.plain(*words[:-1])
    summary = runner.summary()
    assert summary["engine"] == "off"
    assert summary["totals"]["checkpoints"]["laid"] == 0
    (file,) = summary["files"]
    assert (file["path"], file["served_by"]) == (os.path.realpath(path), "page_tables")


def test_a_disabled_wrap_leaves_no_summary(runner: Runner, store: Path) -> None:
    path = data(store / TRAINING)
    words = runner.command(*python(READ, path))
    assert runner.plain(*words, UFFDPREFETCH_DISABLE="1") == runner.plain(*python(READ, path))
    assert os.listdir(runner.cwd) == []


# ---- who and how --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, -1)),
        ({"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "SLURM_PROCID": "0"}, (6, 2)),
        # srun --mpi=pmix: PMIx has no local rank, Slurm counts the same ranks
        ({"PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, (5, 1)),
        ({"PMIX_RANK": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (5, -1)),
    ],
)
def test_the_job_s_ranks_are_what_its_launcher_says(
    runner: Runner, store: Path, variables: dict[str, str], expected: tuple[int, int]
) -> None:
    run = runner.wrapped(*python(READ, store / ARRAY), **variables)
    assert run.status == 0, run.stderr
    assert [(e["rank"], e["local_rank"]) for e in run.summary["ranks"]] == [expected]


#: argv: a file. Computes between its reads, and for a moment between its epochs.
COLD_TWICE = """
import hashlib, mmap, os, sys, time
digest = hashlib.sha256()
with open(sys.argv[1], 'rb') as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for epoch in range(2):
        for at in range(0, len(view), 1 << 18):
            digest.update(view[at:at + (1 << 18)])
            time.sleep(0.004)
        view.madvise(mmap.MADV_DONTNEED)  # else what is mapped stays in the cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(0.5)
print(digest.hexdigest())
"""


def test_a_later_cold_epoch_is_prefetched_too(runner: Runner, bed: SlowBed) -> None:
    """What is mapped shows once in a page table, and again after it has left it."""
    path = bed.path(ARRAY)
    words = python(COLD_TWICE, path)
    run = runner.wrapped(*words, cold=[path])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    file = check_managed(run, path)
    assert file["prefetched_bytes"] > 1.5 * file["size_bytes"]
