# SPDX-License-Identifier: Apache-2.0
"""The node's page pool against a model of it, over several processes, and the zero-read hammer.

tests/programs/pool_model.c drives csrc/service/pool/ at random, with its threads stopped in the
middle of a read, a punch, a UFFDIO_CONTINUE; pool_held.c goes through the worst of
these moments one by one. A seed that failed is run again by UFFDPREFETCH_TEST_POOL_SEEDS=SEED. Then
the C is broken on purpose, in a copy: a rule that is broken is zeros that somebody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pool_hammer
import pytest
from components import why_no_checkpoints
from conftest import HANG_SECONDS, require
from harness import programs
from paths import ROOT

from uffdprefetch.pool.node_pool import SHMEM_HUGE

#: Minutes of CPU, and another time limit than the suite's for a busy machine.
pytestmark = [pytest.mark.limit_seconds(1800), pytest.mark.slow]

SEEDS = [int(n) for n in os.environ.get("UFFDPREFETCH_TEST_POOL_SEEDS", "1 2 3 4").split()]
#: (chunk bytes, huge, rounds): small chunks are filled by a write, or in place as huge pages are.
SHAPES = {
    "4 KiB pages": (64 << 10, 0, 300),
    "in place": (64 << 10, 1, 300),
    "2 MiB chunks": (2 << 20, 1, 25),
}
#: (file, text, its replacement)
BREAKAGES = {
    "a chunk that is being mapped leaves the pool": (
        "pool_room.c", "!f->pins[chunk] &&", "1 &&",
    ),
    "a chunk is there before its bytes are": (
        "pool_fill.c", "f->state[c] = UP_FILLING;", "f->state[c] = UP_PRESENT;",
    ),
    "a chunk that is being filled is mapped": (
        "pool_faults.c", "if (f->state[chunk] == UP_PRESENT) {",
        "if (f->state[chunk] >= UP_FILLING) {",
    ),
    "nobody waits for what is being mapped when a mapping goes": (
        "pool_clients.c", "while (c->mapping[turn])", "while (0 && c->mapping[turn])",
    ),
    "nobody waits for what is being mapped when a process goes": (
        "pool_clients.c", "while (c->users)", "while (0 && c->users)",
    ),
    "nobody waits for what is being mapped when a process runs another program": (
        "pool_clients.c", "if (c->uffd < 0 || c->pid != pid || c->former)", "if (pid)",
    ),
    "a chunk is filled in place while an agent may map it": (
        "pool_fill.c", "f->map && !pool_is_stood_in_for(p)",
        "f->map && pool_is_stood_in_for(p) < 2",
    ),
}  # fmt: skip


RUNS_OF_THE_BROKEN = 6


@pytest.fixture(autouse=True)
def userfaultfd() -> None:
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")


def build(directory: Path, name: str, csrc: Path = ROOT / "csrc") -> str:
    """A program around the pool, with gates in its calls."""
    parts = (csrc / "service" / part for part in ("pool", "net"))
    sources = sorted(source for part in parts for source in part.glob("*.c"))
    sources += [
        csrc / "uffd_helper.c",
        *(csrc / "service" / n for n in ("residency.c", "closing.c")),
    ]
    wrap = "-Wl,--wrap=pread,--wrap=fallocate,--wrap=ioctl,--wrap=syscall"
    return programs(directory, name, f"-I{csrc}", wrap, *map(str, sources))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("model"), "pool_model")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_word_is_right_whatever_happens(
    seed: int, shape: str, model: str, tmp_path: Path
) -> None:
    chunk, huge, rounds = SHAPES[shape]
    words = [model, str(tmp_path), str(seed), str(rounds), str(chunk), str(huge)]
    print(" ".join(words))  # what to run again
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}, {shape}: {done.stderr[-2000:]}"
    met = json.loads(done.stdout)
    forgotten = met.pop("files_forgotten")  # only one that nobody maps: not in each run
    if rounds > 100:
        assert all(met.values()), (met, forgotten)
        assert met["held_in_continue"] > 5 and met["evicted_bytes"] > 100 * chunk
    else:
        assert met["words"] > 100_000


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 2 << 20])
def test_the_worst_moments_one_by_one(chunk_bytes: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [build(tmp_path, "pool_held"), str(tmp_path), str(chunk_bytes)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "all as it should be\n"), done.stderr


@pytest.mark.parametrize("what", BREAKAGES)
def test_a_rule_that_is_broken_is_zeros_that_somebody_reads(what: str, tmp_path: Path) -> None:
    name, text, replacement = BREAKAGES[what]
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    path = csrc / "service" / "pool" / name
    source = path.read_text()
    assert source.count(text) == 1, f"{name} has changed: break it in another place"
    path.write_text(source.replace(text, replacement))
    program, seen = build(tmp_path, "pool_held", csrc), ""
    for _ in range(RUNS_OF_THE_BROKEN):  # what is broken may hang as well, or be lucky
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [program, str(tmp_path), str(64 << 10)],
                capture_output=True, text=True, timeout=HANG_SECONDS / 10,
            )  # fmt: skip
            seen = done.stderr
            if done.returncode == 1 and "offset 0: 0, not" in seen:
                return
    pytest.fail(f"nobody reads a zero: {seen}")


@pytest.mark.parametrize(
    ("huge", "mwords"), [(False, 12), pytest.param(True, 6, marks=pytest.mark.alone)]
)
def test_no_word_of_many_millions_is_wrong_while_the_pool_evicts(
    huge: bool, mwords: int, env: dict[str, str], tmp_path: Path
) -> None:
    budget = (16 if huge else 8) << 20
    hang = 3 * HANG_SECONDS
    if huge:
        writable = os.access(SHMEM_HUGE, os.W_OK)
        require(writable, f"{SHMEM_HUGE} cannot be written: huge pages need root")
        with pool_hammer.huge_pages():
            found = pool_hammer.run(
                pool_hammer.program(tmp_path), tmp_path, env, mwords=mwords,
                size_bytes=4 * budget, budget_bytes=budget, timeout_seconds=hang,
            )  # fmt: skip
    else:
        found = pool_hammer.run(
            pool_hammer.program(tmp_path), tmp_path, env, mwords=mwords,
            size_bytes=4 * budget, budget_bytes=budget, options=("--huge-pages", "off"),
            timeout_seconds=hang,
        )  # fmt: skip
    assert (found["wrong"], found["zeros"]) == (0, 0), found["said"]
    assert found["words"] >= mwords * 1e6 and found["huge_pages"] == huge
    assert (found["mapped_huge_bytes"] > 4 * budget) == huge
    assert pool_hammer.why_nothing_is_shown(found, 4 * budget) == ""
