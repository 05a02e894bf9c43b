# SPDX-License-Identifier: Apache-2.0
"""Verify every word that readers get from a pool that is much too small for their file.

    python -m tests.support.pool_hammer [--mwords 1500] [--size 256MiB] [--budget 64MiB]
                                        [--huge-pages] [--spill DIR]
                                        [--plan EPOCHS [--kill]]

The real thing: tests/programs/pool_hammer.c under ``wrap --engine pool``, several processes with
several threads each, which read a file of known words in order, backwards and at random, while the
pool evicts all the time. `make hammer` runs it with 4 KiB pages and with huge ones (as root: these
need shmem_enabled=advise, which is put back afterwards). With --plan they read shuffled epochs that
a plan file tells of, so that it says what leaves the pool; with --kill the service dies on the way.
With --spill the file lies on a bed, and what leaves the pool goes to a disk, and comes from there.
Status 1 when a word was wrong, or when the run proves nothing: no eviction, a mapping given back to
the kernel, a plan that was dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import HANG_SECONDS, process_gone, wait_until
from harness import service_pid
from paths import PROGRAMS

from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.pool.node_pool import SHMEM_HUGE

PROCESSES, THREADS = 3, 3
#: Of a plan's items, the mean.
ITEM_BYTES = 32 << 10


def program(directory: Path) -> str:
    """Compile the reader: its path."""
    out = directory / "pool_hammer"
    source = PROGRAMS / "pool_hammer.c"
    words = ["cc", "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*words, str(source), "-o", str(out)], check=True)
    return str(out)


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Let shared memory have huge pages where it asks for them. Raises OSError where we may not."""
    path = Path(SHMEM_HUGE)
    before = path.read_text().partition("[")[2].partition("]")[0]
    path.write_text("advise")
    try:
        yield
    finally:
        path.write_text(before)


def run(
    reader: str,
    directory: Path,
    env: dict[str, str],
    *,
    mwords: int,
    size_bytes: int,
    budget_bytes: int,
    seed: int = 1,
    options: tuple[str, ...] = (),
    timeout_seconds: float | None = None,
    bed: SlowBed | None = None,
) -> dict[str, Any]:
    """What the readers found, and the summary's ``pool``, in one dict.

    Raises RuntimeError when the job failed, subprocess.TimeoutExpired when it hangs.
    """
    data = _file(reader, directory, size_bytes)
    seen = bed.path(data.name) if bed is not None else data
    began = time.monotonic()
    done = subprocess.run(
        [
            *_wrap(budget_bytes), *options, "--", reader, str(seen), "read",
            *map(str, (PROCESSES, THREADS, mwords, seed)),
        ],
        env=env, cwd=directory, capture_output=True, text=True, check=False,
        timeout=timeout_seconds,
    )  # fmt: skip
    seconds = time.monotonic() - began
    data.unlink()
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr}")
    summary = json.loads((directory / "hammer.summary.json").read_text())
    return {**json.loads(done.stdout), **summary["pool"], "seconds": seconds, "said": done.stderr}


def _file(reader: str, directory: Path, size_bytes: int) -> Path:
    data = directory / "hammer.bin"
    subprocess.run([reader, str(data), "make", str(size_bytes)], check=True)
    return data


def _wrap(budget_bytes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", "hammer"),
        *("--engine", "pool", "--budget", f"{budget_bytes}B", "--min-size", "1MiB"),
    ]


def write_plan(directory: Path, data: Path, epochs: int, seed: int) -> Path:
    """Cut a file into items of all sizes from a word to 128 KiB and shuffle them for each epoch;
    every rank has its part. Returns the plan file."""
    random = np.random.default_rng(seed)
    size = data.stat().st_size
    cuts = np.unique(random.integers(1, size // 8, size // ITEM_BYTES)) * 8
    items = np.stack([np.append(0, cuts), np.append(cuts, size)], axis=1)
    items = items[items[:, 1] - items[:, 0] <= 4 * ITEM_BYTES]
    told = []
    for epoch in range(epochs):
        order = random.permutation(items)
        for rank in range(PROCESSES):
            np.save(directory / f"{epoch}-{rank}.npy", order[rank::PROCESSES])
        told.append({"ranks": {str(rank): f"{epoch}-{rank}.npy" for rank in range(PROCESSES)}})
    file = {"file": str(data), "unit": "bytes", "epochs": told}
    plan = directory / "plan.json"
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [file]}))
    return plan


def follow(
    reader: str,
    directory: Path,
    env: dict[str, str],
    *,
    epochs: int,
    size_bytes: int,
    budget_bytes: int,
    seed: int = 1,
    kill: bool = False,
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What readers of known orders found, the summary's ``pool`` and its ``plans``. With ``kill``
    the service dies when half of the epochs are over, in one that is read until it is dead, and
    there is no summary.

    Raises RuntimeError when the job failed.
    """
    env = {**env, "UFFDPREFETCH_RUN": "hammer"}
    data, log = _file(reader, directory, size_bytes), directory / "epochs"
    plan = write_plan(directory, data, epochs, seed)
    log.write_bytes(b"")
    held = directory / "held"
    if kill:
        held.touch()  # so that they are reading when it dies, and long after
    began = time.monotonic()
    job = subprocess.Popen(
        [
            *_wrap(budget_bytes), "--plan", str(plan), *options, "--", reader, str(data), "follow",
            *map(str, (PROCESSES, THREADS, epochs, directory)),
        ],
        env=env, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        if kill:
            service = service_pid(env)
            half = PROCESSES * (epochs // 2)
            wait_until(lambda: log.stat().st_size >= half or job.poll() is not None, "an epoch")
            os.kill(service, signal.SIGKILL)
            wait_until(lambda: process_gone(service), "the service's death")
            held.unlink()
        out, said = job.communicate(timeout=HANG_SECONDS * epochs)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if job.returncode:
        raise RuntimeError(f"status {job.returncode}: {said}")
    found = {**json.loads(out), "seconds": time.monotonic() - began, "said": said}
    if kill:
        return found
    summary = json.loads((directory / "hammer.summary.json").read_text())
    return {**found, **summary["pool"], "plans": summary["plans"]}


def why_nothing_is_shown(found: dict[str, Any], size_bytes: int) -> str:
    """'' when the words were read from a pool that evicted; else what was otherwise."""
    if found["mappings_given_back"]:
        return f"{found['mappings_given_back']} mappings were given back to the kernel"
    if found["evicted_bytes"] < 2 * size_bytes:
        return f"only {found['evicted_bytes'] >> 20} MiB were evicted"
    if found["resident_peak_bytes"] > found["budget_bytes"]:
        return "the pool was larger than its budget"
    return ""


def why_no_plan_is_shown(found: dict[str, Any], epochs: int, size_bytes: int) -> str:
    """'' when known orders were followed, from a pool that evicted by them. Readers that compute
    nothing outrun what the service hears of them, and an order may be dropped for it at last."""
    plans = {plan["rank"]: plan for plan in found["plans"]}
    if len(plans) != PROCESSES:
        return f"plans {found['plans']}"
    if any(plan["epoch"] < epochs // 2 for plan in plans.values()):  # who is told of lags behind
        return f"not all epochs were seen: {found['plans']}"
    if found["evicted_bytes"] < (epochs - 1) * size_bytes // 2:
        return f"only {found['evicted_bytes'] >> 20} MiB were evicted"
    if found["mappings_given_back"] or found["resident_peak_bytes"] > found["budget_bytes"]:
        return "the pool was larger than its budget, or gave mappings back"
    return ""


def _told(found: dict[str, Any], args: argparse.Namespace) -> int:
    """Say what readers of known orders found. Returns the status."""
    bad = "" if args.kill else why_no_plan_is_shown(found, args.plan, args.size)
    print(
        f"{args.plan} epochs in known orders{', the service killed' if args.kill else ''}: "
        f"{found['words'] / 1e6:.0f} million words in {found['seconds']:.0f} s, wrong "
        f"{found['wrong']}, of these zero {found['zeros']}"
    )
    if bad:
        print(f"this shows nothing: {bad}", file=sys.stderr)
    sys.stderr.write(found["said"])
    return 1 if bad or found["wrong"] else 0


def main() -> int:
    """The command line. Returns the status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mwords", type=int, default=1500, help="million words to verify")
    parser.add_argument("--size", type=parse_size, default=256 << 20, help="of the file")
    parser.add_argument("--budget", type=parse_size, default=64 << 20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--huge-pages", action="store_true", help="2 MiB pages, as root")
    parser.add_argument("--spill", type=Path, metavar="DIR", help="what leaves goes to a disk")
    parser.add_argument("--plan", type=int, metavar="EPOCHS", help="read so many, as a plan tells")
    parser.add_argument("--kill", action="store_true", help="the service, in the midst of a plan")
    args = parser.parse_args()
    if args.kill and not args.plan:
        parser.error("--kill needs --plan")
    if args.spill and args.plan:
        parser.error("--spill is for readers without a plan")
    bad = ""
    with contextlib.ExitStack() as stack:
        if args.huge_pages:
            stack.enter_context(huge_pages())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hammer-")))
        env = {**os.environ, "UFFDPREFETCH_RUNDIR": str(directory / "hub")}
        options = ("--huge-pages", "auto" if args.huge_pages else "off")
        bed = None
        if args.spill:
            bed = stack.enter_context(SlowBed(directory, bandwidth=0, latency_us=0))
            options += ("--spill", f"{args.spill}:{args.size}B")
        if args.plan:
            found = follow(
                program(directory), directory, env, epochs=args.plan, size_bytes=args.size,
                budget_bytes=args.budget, seed=args.seed, kill=args.kill, options=options,
            )  # fmt: skip
            return _told(found, args)
        found = run(
            program(directory), directory, env, mwords=args.mwords, size_bytes=args.size,
            budget_bytes=args.budget, seed=args.seed, options=options, bed=bed,
        )  # fmt: skip
        bad = why_nothing_is_shown(found, args.size)
        if found["huge_pages"] != args.huge_pages:
            bad = f"huge pages: {found['huge_pages_reason']}"
        elif args.huge_pages and found["mapped_huge_bytes"] < args.size:
            bad = "page tables got no huge pages"
        if args.spill and (not found["spill"] or found["spill"]["read_bytes"] < args.size):
            bad = f"little came from the disk: {found['spill']}"
    gb = found["words"] * 8 / 1e9
    print(
        f"pages of {'2 MiB' if args.huge_pages else '4 KiB'}: {found['words'] / 1e6:.0f} million "
        f"words ({gb:.1f} GB) in {found['seconds']:.0f} s, wrong {found['wrong']}, of these zero "
        f"{found['zeros']}; evicted {found['evicted_bytes'] / 1e9:.1f} GB, read again "
        f"{found['reread_bytes'] / 1e9:.1f} GB, {found['faults']} faults, of which "
        f"{found['missing_faults']} waited; mapped {found['mapped_bytes'] / 1e9:.1f} GB, of it "
        f"{found['mapped_huge_bytes'] / 1e9:.1f} GB in huge pages"
    )
    if bad:
        print(f"this shows nothing: {bad}", file=sys.stderr)
    sys.stderr.write(found["said"])
    return 1 if bad or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
