# SPDX-License-Identifier: Apache-2.0
"""Random memory calls over managed mappings, with a plain run of the same calls as the model.

The agent is driven by tests/support/hammer.py, which lays, takes and arms checkpoints without end,
and once more by the real service. What every page shows (its bytes, SIGSEGV, SIGBUS, what the
kernel reads from it) and what every call returns must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, clean_environment, uffdprefetch
from harness import AGENT_STATES, CHECKPOINTS, OPTIONS, both_engines, hammered, python
from paths import SUPPORT

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: Of `make test`; `make test-all` and the campaign say more.
OPERATIONS = int(os.environ.get("UFFDPREFETCH_TEST_MODEL_OPERATIONS", "2000"))
SEEDS = (1, 2)
#: Processes of the race.
RACES = int(os.environ.get("UFFDPREFETCH_TEST_RACES", "1000"))
#: Of the second hand.
RAW_OPERATIONS = int(os.environ.get("UFFDPREFETCH_TEST_RAW_OPERATIONS", "1000"))


def run(words: list[str], env: dict[str, str], cwd: Path) -> tuple[list[str], dict[str, Any]]:
    """The lines that a program printed, and the JSON of its last line on stderr."""
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, timeout=3 * HANG_SECONDS)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    err = done.stderr.decode().strip().splitlines()
    return done.stdout.decode().splitlines(), json.loads(err[-1]) if err else {}


def compare(managed: list[str], plain: list[str]) -> None:
    for got, expected in zip(managed, plain, strict=False):
        assert got == expected, "the managed run shows something else"
    assert len(managed) == len(plain)


def check_counts(counts: dict[str, Any]) -> None:
    """Each of the hammer's blows has come; nobody was taken for one who bypasses us."""
    assert counts.pop("bypassed") == [], "libc's functions were taken for raw system calls"
    counts.pop("failed")
    assert all(counts.values()), counts


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_and_every_page_is_as_without_us(
    seed: int, small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    words = [compiled("model"), str(small), str(seed), str(OPERATIONS)]
    plain, _ = run(words, clean_environment(), tmp_path)
    stop = hammer(seed)
    managed, met = run(words, hammered(tmp_path), tmp_path)
    counts = stop()
    compare(managed, plain)
    assert len(plain) > 1.5 * OPERATIONS
    # not vacuous: many calls met checkpoints, in every state, also in forked children
    assert met["over_checkpoints"] > OPERATIONS / 25
    check_counts(counts)
    assert counts["faults"] > OPERATIONS / 10


@both_engines
@pytest.mark.usefixtures("patient")  # the service may be long in starting: nothing is met before
def test_the_same_with_the_real_service(
    small: Path, tmp_path: Path, compiled: Callable[..., str], env: dict[str, str]
) -> None:
    operations = OPERATIONS // (8 if env["UFFDPREFETCH_ENGINE"] == "pool" else 4)
    words = [compiled("model"), str(small), "77", str(operations)]
    plain, _ = run(words, clean_environment(), tmp_path)
    options = [*OPTIONS, "--min-size", "16KiB"]
    if env["UFFDPREFETCH_ENGINE"] == "pool":
        options += ["--budget", "1MiB"]
    else:
        options += [*CHECKPOINTS, "--distance", "64KiB"]
    managed, met = run(uffdprefetch("wrap", *options, "--", *words), env, tmp_path)
    compare(managed, plain)
    assert met["over_checkpoints"] > operations / 100
    summary = json.loads((tmp_path / "run.summary.json").read_text())
    assert summary["rung"] == 1
    if env["UFFDPREFETCH_ENGINE"] == "pool":
        assert summary["pool"]["faults"] > 100 and summary["pool"]["evicted_bytes"] > 0
    else:
        assert summary["totals"]["checkpoints"]["laid"] > operations / 8


def test_threads_read_right_bytes_from_a_pool_of_a_quarter_of_the_file(
    small: Path, tmp_path: Path, compiled: Callable[..., str], env: dict[str, str]
) -> None:
    words = [compiled("threads"), str(small), "5", "8", str(OPERATIONS // 250)]
    options = [*OPTIONS, "--min-size", "16KiB", "--engine", "pool", "--budget", "1MiB"]
    lines, _ = run(uffdprefetch("wrap", *options, "--", *words), env, tmp_path)
    assert json.loads(lines[-1]) == {"wrong": 0, "rounds": OPERATIONS // 250}
    pool = json.loads((tmp_path / "run.summary.json").read_text())["pool"]
    assert pool["evicted_bytes"] > 0 and pool["waiters"] == 0


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_map_fork_and_unmap_at_once_read_right_bytes(
    threads: int, small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    rounds = OPERATIONS // 30
    words = [compiled("threads"), str(small), "5", str(threads), str(rounds)]
    stop = hammer(5)
    lines, _ = run(words, hammered(tmp_path), tmp_path)
    assert json.loads(lines[-1]) == {"wrong": 0, "rounds": rounds}
    check_counts(stop())


def test_advice_while_a_mapping_is_given_back_holds_for_all_of_it(
    small: Path, tmp_path: Path, hammer: Any
) -> None:
    """mremap(2) refuses a mapping whose parts have different advice: each must have the last.
    The hammer gives back each mapping after about 100 us, and the job advises all the while."""
    code = """
    for n in range(int(sys.argv[2])):
        m = Mapping(sys.argv[1])
        for i in range(n % 40):
            m.advise((MADV_RANDOM, MADV_NORMAL)[(n + i) % 2])
        m.grow(m.length + PAGE)
        m.length += PAGE
        m.unmap()
    """
    stop = hammer(6, "100", "100")
    done = subprocess.run(
        python(code, small, OPERATIONS), env={**hammered(tmp_path), "PYTHONPATH": str(SUPPORT)},
        capture_output=True, timeout=2 * HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    counts = stop()
    assert counts["bypassed"] == [] and counts["detach"] > OPERATIONS / 10


def rounds(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("round "):
            found.append([])
        found[-1].append(line)
    return found


@pytest.mark.parametrize("how", ["fixed", "pool", "auto"])
def test_raw_system_calls_change_what_they_change_without_us(
    how: str, small: Path, tmp_path: Path, compiled: Callable[..., str], env: dict[str, str]
) -> None:
    """A round that meets one of the known differences (programs/model.c) ends there."""
    seed = int(os.environ.get("UFFDPREFETCH_TEST_SEED", "8"))
    print(f"seed {seed}")
    mode = "raw-pool" if how == "pool" else "raw"
    words = [compiled("model"), str(small), str(seed), str(RAW_OPERATIONS), mode]
    plain = subprocess.run(words, env=clean_environment(), capture_output=True, check=True)
    options = [*OPTIONS, "--min-size", "16KiB"]
    variables = {"UFFDPREFETCH_TEST_PATIENCE": "1000"}
    if how == "pool":
        options += ["--engine", "pool", "--budget", "1MiB"]
    if how == "fixed":
        options += [*CHECKPOINTS, "--distance", "64KiB"]
    done = subprocess.run(
        uffdprefetch("wrap", *options, "--", *words),
        env={**env, **variables}, cwd=tmp_path, capture_output=True,
        timeout=HANG_SECONDS + RAW_OPERATIONS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    known, met = 0, done.stderr.count(b"met\n")
    managed = rounds(done.stdout.decode().splitlines())
    expected = rounds(plain.stdout.decode().splitlines())
    assert len(managed) == len(expected) == RAW_OPERATIONS // 20
    for got, want in zip(managed, expected, strict=True):
        if got[-1].startswith("known"):
            known += 1
            got, want = got[:-1], want[: len(got) - 1]
        compare(got, want)
    print(f"{how}: {met} rounds over ours, {known} ended at a known difference")
    assert (met == 0) if how == "auto" else (met > len(managed) // 2)
    assert known < 0.8 * len(managed)


def test_after_a_change_past_every_library_the_job_s_memory_is_its_own(
    small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    """Until our thread has been told, its last act may hit what is mapped over the file: counted,
    not promised away (docs/safety.md). From then on never."""
    seed = int(os.environ.get("UFFDPREFETCH_TEST_SEED", "1"))
    stop = hammer(seed, "100", "30")
    words = [compiled("race"), str(small), str(RACES), str(seed)]
    done = subprocess.run(
        words, env=hammered(tmp_path), capture_output=True, text=True,
        timeout=HANG_SECONDS + RACES / 10,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    counts, seen = stop(), json.loads(done.stdout)
    print(f"seed {seed}: {seen}; the service: {counts | {'bypassed': len(counts['bypassed'])}}")
    assert seen["after"] == 0
    # each touch of a page that lay there was seen
    assert seen["met"] > RACES / 2 and counts["detach"] > RACES / 10
    assert len(counts["bypassed"]) > RACES / 10


def test_a_page_that_is_mapped_while_a_file_is_put_back_stays_where_it_is(
    small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    """The file is mapped elsewhere for that and moved page by page: what a page leaves there must
    not be given to anybody else before it is unmapped."""
    stop = hammer(5, "100", "30")
    done = subprocess.run(
        [compiled("holes"), str(small), "1500"], env=hammered(tmp_path),
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]
    counts = stop()
    assert counts["laid"] > 1000 and counts["bypassed"] == [], counts


@pytest.mark.parametrize("agent", ["alive", "dead"])
def test_two_threads_that_change_two_parts_of_a_mapping_do_not_meet(
    small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any, agent: str
) -> None:
    """Where the agent does not answer the first of them puts the file back itself: not where the
    second has memory of its own by then."""
    stop = hammer(6, "1000000", "0")
    env = hammered(tmp_path)
    if agent == "dead":
        env["UFFDPREFETCH_TEST_AGENT_EXIT"] = "1"
        env["UFFDPREFETCH_TEST_AGENT_EXIT_STATE"] = str(AGENT_STATES.index("detaching"))
        env["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"] = str(tmp_path / "exits")
    for _ in range(5):
        done = subprocess.run(
            [compiled("two_parts"), str(small), "200"], env=env,
            capture_output=True, text=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]
    counts = stop()
    assert counts["laid"] > 10000 and counts["bypassed"] == [], counts
    assert (tmp_path / "exits").exists() == (agent == "dead")
