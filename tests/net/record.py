# SPDX-License-Identifier: Apache-2.0
"""Makes the tapes anew: `python -m tests.net.record [NAME...]`, as root (the slow bed).

Real jobs on the bed of bench/slowfs.c, 300 MB/s and 1 ms, each under a `wrap` of its own whose
service takes notes (recorder.py); then the decisions of a replay are what is compared with from now
on. A new tape is a new beginning: what came before is compared with nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.net import tape
from uffdprefetch.demo.dataset import INDEX_NAME
from uffdprefetch.demo.jobrun import job_command
from uffdprefetch.demo.storage import DemoStorage, Wanted, open_storage

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
#: What all ranks together compute for a byte: 95 % of the link's time for it.
COMPUTE = 0.95 / 300e6


@dataclass(frozen=True)
class Scenario:
    """A job, and the options of its `wrap`."""

    job: Callable[[DemoStorage], list[str]]
    options: tuple[str, ...] = ()
    size_bytes: int = 96 * MIB
    warm: bool = False


def _demo(*options: str, ranks: int = 1) -> Callable[[DemoStorage], list[str]]:
    words = "--batch=8", f"--compute-seconds-per-byte={COMPUTE * ranks!r}", *options
    return lambda storage: job_command(storage.database, *words)


def _here(count: int, ranks: int) -> Callable[[DemoStorage], list[str]]:
    """The first ``count`` of some ranks that skip; the others are on other nodes."""

    def words(storage: DemoStorage) -> list[str]:
        jobs = [
            f"RANK={rank} " + shlex.join(job_command(
                storage.database, "--batch=4", "--pattern=skipping", f"--rank={rank}",
                f"--ranks={ranks}", f"--compute-seconds-per-byte={COMPUTE * count!r}",
                "--epochs=2",
            ))
            for rank in range(count)
        ]  # fmt: skip
        return ["sh", "-c", " & ".join(jobs) + " & wait"]

    return words


def _shuffled(*options: str) -> Callable[[DemoStorage], list[str]]:
    def words(storage: DemoStorage) -> list[str]:
        script = str(ROOT / "bench" / "shuffle_job.py")
        return [
            "env", "OMP_NUM_THREADS=1", sys.executable, script, "--db", str(storage.database),
            "--batch=8", f"--compute-seconds-per-byte={COMPUTE!r}", "--epochs=2", *options,
        ]  # fmt: skip

    return words


def _planned(storage: DemoStorage) -> list[str]:
    """A shuffled job whose order a plan file tells; written here, in bytes."""
    extents = np.load(storage.bed.source / INDEX_NAME)  # type: ignore[union-attr]
    random = np.random.default_rng(7)
    orders = [random.permutation(len(extents)) for _ in range(2)]
    reader = Path("reader.py")
    np.save("extents.npy", extents)
    epochs = []
    for i, order in enumerate(orders):
        np.save(f"order{i}.npy", order)
        rows = np.stack([extents[order, 0], extents[order].sum(axis=1)], axis=1)
        np.save(f"rows{i}.npy", rows.astype(np.int64))
        epochs.append(f'{{"ranks": {{"0": "rows{i}.npy"}}}}')
    entry = f'{{"file": "{storage.data}", "unit": "bytes", "epochs": [{", ".join(epochs)}]}}'
    Path("plan.json").write_text(f'{{"schema": "uffdprefetch.plan/1", "files": [{entry}]}}')
    reader.write_text(
        "import mmap, sys, time, numpy as np\n"
        "f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "m.madvise(mmap.MADV_RANDOM); extents = np.load('extents.npy')\n"
        "for i in range(2):\n"
        "    for k, (at, n) in enumerate(extents[np.load(f'order{i}.npy')].tolist()):\n"
        f"        sum(m[at:at + n:4096]); time.sleep(n * {COMPUTE!r})\n"
    )
    return [sys.executable, str(reader.absolute()), str(storage.data)]


SCENARIOS = {
    "demo-on": Scenario(_demo("--epochs=2")),
    "demo-off": Scenario(_demo("--epochs=2"), ("--policy", "none")),
    "demo-fixed": Scenario(_demo("--epochs=2"), ("--policy", "fixed")),
    "demo-warm": Scenario(_demo("--epochs=2"), warm=True),
    "skipping-4": Scenario(
        _demo("--epochs=2", "--pattern=skipping", "--ranks=4", "--spawn", ranks=4)
    ),
    "stride": Scenario(
        _demo("--epochs=2", "--pattern=skipping", "--ranks=4", "--spawn", ranks=4),
        ("--policy", "stride"),
    ),
    "stride-auto": Scenario(_here(2, 8), size_bytes=256 * MIB),
    "shuffled-plan": Scenario(_planned, ("--plan", "plan.json")),
    "shuffled-hook": Scenario(_shuffled()),
    "random": Scenario(_demo("--epochs=2", "--pattern=shuffled")),
    "pool": Scenario(_demo("--epochs=3"), ("--engine", "pool", "--budget", "48MiB")),
    "pool-hook": Scenario(_shuffled(), ("--engine", "pool", "--budget", "48MiB")),
}


def record(name: str) -> Path:
    """Run a scenario; its tape. Raises CalledProcessError where the job fails."""
    scenario, path = SCENARIOS[name], tape.TAPES / f"{name}.tape.gz"
    environment = {**os.environ, "UFFDPREFETCH_TEST_TAPE": str(path.with_suffix(".new"))}
    environment["PYTHONPATH"] = f"{Path(__file__).with_name('inject')}{os.pathsep}{ROOT}"
    tape.TAPES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        open_storage(Wanted(size_bytes=scenario.size_bytes), lambda _: None) as storage,
    ):
        os.chdir(directory)
        job = scenario.job(storage)
        (storage.make_warm if scenario.warm else storage.make_cold)()
        # --strict: the service is up before the job, whose mapping then has checkpoints
        # the core that replays a tape reads no files by calls
        wrap = [sys.executable, "-m", "uffdprefetch", "wrap", "-f", "-o", "run", "--strict"]
        wrap.append("--reads=off")
        subprocess.run([*wrap, *scenario.options, "--", *job], env=environment, check=True)
        os.chdir(ROOT)
    made = path.with_suffix(".new")
    best = max(made.parent.glob(f"{made.name}.*[0-9]"), key=lambda each: each.stat().st_size)
    tape.dump(path, tape.load(best))
    tape.dump(made, tape.load(best.with_name(best.name + ".live")))
    for each in made.parent.glob(f"{made.name}.*"):
        each.unlink()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    for name in parser.parse_args().names or SCENARIOS:
        path = record(name)
        words = [sys.executable, "-m", "tests.net.replay", name, "--write"]
        print(name, path.stat().st_size, flush=True)
        subprocess.run(words, check=True, cwd=ROOT)
        live = list(tape.load(path.with_suffix(".new")))
        path.with_suffix(".new").unlink()
        if live != list(tape.load(tape.TAPES / f"{name}.decisions.gz")):
            print(f"{name}: the replay does not decide what the service decided", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
