# SPDX-License-Identifier: Apache-2.0
"""A Lustre client under the hand of the tests and measurements that run on one (in the guest)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent
MOUNT_VARIABLE = "UFFDPREFETCH_LUSTRE_MOUNT"
#: Another checkout is run instead of this one.
TREE_VARIABLE = "UFFDPREFETCH_LUSTRE_TREE"
SECOND_VARIABLE = "UFFDPREFETCH_LUSTRE_SECOND"
RPC_BYTES = 4 << 20
PAGE_BYTES = 4096


def mount() -> Path:
    """The client's mount; raises KeyError where this is no guest of ours."""
    return Path(os.environ[MOUNT_VARIABLE])


def lctl(*words: str) -> str:
    """What lctl says."""
    return subprocess.run(["lctl", *words], check=True, capture_output=True, text=True).stdout


def instance(at: Path) -> str:
    """What the names of a mount's own parameters end with."""
    said = subprocess.run(
        ["lfs", "getname", "-i", str(at)], check=True, capture_output=True, text=True
    ).stdout
    return said.split()[0]


def make_cold(at: Path | None = None) -> None:
    """Drop a mount's locks, and with them every cached page and name."""
    own = instance(at or mount())
    for kind in ("osc", "mdc"):
        lctl("set_param", "-n", f"ldlm.namespaces.*{kind}-{own}.lru_size=clear")


@dataclass(frozen=True)
class Rpcs:
    """READ RPCs since the last reset: how many of each size (pages, rounded up to a power of two
    by the client's own histogram), and the bytes that they brought."""

    by_pages: dict[int, int]
    bytes: int

    @property
    def count(self) -> int:
        return sum(self.by_pages.values())

    @property
    def of_one_page(self) -> int:
        return self.by_pages.get(1, 0)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{n} of {pages * 4} KiB" for pages, n in sorted(self.by_pages.items()) if n
        )
        return f"{self.count} READ RPCs ({sizes}), {self.bytes / (1 << 20):.1f} MiB"


def reset_rpcs(at: Path | None = None) -> None:
    """Forget the counts."""
    own = instance(at or mount())
    lctl("set_param", "-n", f"osc.*-osc-{own}.rpc_stats=0", f"osc.*-osc-{own}.stats=0")


def rpcs(at: Path | None = None) -> Rpcs:
    """The counts of a mount."""
    own = instance(at or mount())
    by_pages: dict[int, int] = {}
    for text in re.split(r"\n(?=osc\.)", lctl("get_param", f"osc.*-osc-{own}.rpc_stats")):
        table = text.partition("pages per rpc")[2].partition("rpcs in flight")[0]
        for pages, count in re.findall(r"^(\d+):\s+(\d+)", table, re.MULTILINE):
            by_pages[int(pages)] = by_pages.get(int(pages), 0) + int(count)
    brought = 0
    for line in lctl("get_param", "-n", f"osc.*-osc-{own}.stats").splitlines():
        if line.startswith("read_bytes"):
            brought += int(line.split()[6])
    return Rpcs({pages: n for pages, n in by_pages.items() if n}, brought)


@dataclass(frozen=True)
class Requests:
    """All RPCs of a client since the last reset, by their names in its own counts; and those that
    the servers have counted, by the names of the programs that made them (not those of locks)."""

    by_kind: dict[str, int]
    by_program: dict[str, dict[str, int]]

    @property
    def count(self) -> int:
        return self.by_kind["req_waittime"]

    def of(self, program: str) -> int:
        """That a program of this name made itself."""
        made = self.by_program.get(program, {})
        return sum(count for kind, count in made.items() if not kind.endswith("_bytes"))


def reset_requests() -> None:
    """Forget the counts, and have servers count by programs."""
    own = instance(mount())
    lctl("set_param", "-n", "jobid_var=procname_uid", f"mdc.*-mdc-{own}.stats=0")
    lctl("set_param", "-n", "mdt.*.job_stats=clear", "obdfilter.*.job_stats=clear")
    reset_rpcs()


def requests() -> Requests:
    """The counts of the first mount."""
    own = instance(mount())
    by_kind = Counter[str]()
    for line in lctl(
        "get_param", "-n", f"mdc.*-mdc-{own}.stats", f"osc.*-osc-{own}.stats"
    ).splitlines():
        if found := re.match(r"(\w+) +(\d+) samples", line):
            by_kind[found[1]] += int(found[2])
    by_program: dict[str, Counter[str]] = {}
    program = Counter[str]()
    told = lctl("get_param", "-n", "mdt.*.job_stats", "obdfilter.*.job_stats")
    for line in told.splitlines():
        if found := re.match(r"- job_id: +(\S+)\.\d+$", line):
            program = by_program.setdefault(found[1], Counter())
        elif found := re.match(r" +(\w+): +\{ samples: +([1-9]\d*)", line):
            program[found[1]] += int(found[2])
    return Requests(dict(by_kind), {name: dict(made) for name, made in by_program.items()})


def write_file(path: Path, size_bytes: int) -> None:
    """Bytes that repeat nowhere, made by the kernel: Python's own generator is slow here."""
    with open(path, "wb") as out:
        subprocess.run(["head", "-c", str(size_bytes), "/dev/urandom"], check=True, stdout=out)
    os.sync()


def digest_of(path: Path, record_bytes: int, numbers: Iterable[int] | None = None) -> str:
    """What the job's digest must be, by read(2); of ``numbers`` alone."""
    digests = []
    if numbers is None:
        numbers = range(-(-path.stat().st_size // record_bytes))
    with open(path, "rb", buffering=0) as file:
        for number in sorted(numbers):
            file.seek(number * record_bytes)
            digests.append(hashlib.sha256(file.read(record_bytes)).hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


#: A mapping waits 50 ms for the service and its checkpoints, in which an emulated machine does
#: nothing: 20 s.
PATIENCE = "4000"


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Of a job: no launcher's, a runtime directory of its own (a 9p share holds no sockets)."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("UFFDPREFETCH_", "SLURM_"))}
    path = [os.environ.get(TREE_VARIABLE, str(TREE))]
    return {
        **kept, "PYTHONPATH": os.pathsep.join(path), "XDG_CONFIG_HOME": str(directory / "none"),
        "UFFDPREFETCH_RUNDIR": "/tmp/uffdprefetch-lustre", "UFFDPREFETCH_TEST_PATIENCE": PATIENCE,
        **more,
    }  # fmt: skip


#: An emulated machine is 20 times slower: what `wrap` waits for takes longer than it waits.
_PATIENT = (
    "import sys; from uffdprefetch.launch import job_report, service; "
    "from uffdprefetch.cli import main; "
    "service.START_TIMEOUT_SECONDS = job_report.SUMMARY_TIMEOUT_SECONDS = 120.0; sys.exit(main())"
)


def program(*words: str) -> list[str]:
    """`uffdprefetch ...`."""
    return [sys.executable, "-c", _PATIENT, *words]


def wrapped(*words: str) -> list[str]:
    """`uffdprefetch wrap ...`."""
    return program("wrap", "-f", "-o", "run", *words)


def warm_up() -> None:
    """Read what a service needs once: its first start, from a cold share, takes longer than `wrap`
    waits for it."""
    names = [f"uffdprefetch.{name}" for name in (
        "predict.order.cursor", "service.serve", "pool.node_pool", "readers.known_order",
    )]  # fmt: skip
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    words = [sys.executable, "-c", code, "numpy", "msgpack", *names]
    subprocess.run(words, check=True, env=environment(Path("/tmp")))


def job_words(path: Path, pattern: str, *more: str) -> list[str]:
    """The job's command line."""
    return [sys.executable, "-S", str(HERE / "job.py"), str(path), pattern, *more]


@dataclass(frozen=True)
class Ran:
    """A job that has ended well."""

    said: dict[str, Any]
    rpcs: Rpcs
    requests: Requests
    summary: dict[str, Any] | None
    stderr: str


def run(
    directory: Path,
    words: list[str],
    options: tuple[str, ...] | None = (),
    before: tuple[str, ...] = (),
    cold: bool = True,
    timeout_seconds: float = 400,
    **variables: str,
) -> Ran:
    """Run a program, on cold files if ``cold``; ``options`` None: plainly, without wrap.
    ``before``: a command that starts it, as setpriv. Its last line is JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    if options is not None:
        words = [*wrapped(*options), "--", *words]
    if cold:
        make_cold()
    reset_requests()
    ended = subprocess.run(
        [*before, *words], cwd=directory, env=environment(directory, **variables),
        capture_output=True, text=True, timeout=timeout_seconds,
    )  # fmt: skip
    counted, made = rpcs(), requests()
    if ended.returncode:
        raise RuntimeError(f"{words}: status {ended.returncode}\n{ended.stderr}")
    summary = directory / "run.summary.json"
    if options is not None and not summary.exists():
        raise RuntimeError(f"{words}: no summary\n{ended.stderr}")
    return Ran(
        json.loads(ended.stdout.splitlines()[-1]), counted, made,
        json.loads(summary.read_text()) if options is not None else None, ended.stderr,
    )  # fmt: skip


def run_job(
    directory: Path,
    path: Path,
    pattern: str,
    options: tuple[str, ...] | None = (),
    before: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    cold: bool = True,
    **variables: str,
) -> Ran:
    """Run our own reader (job.py). ``more``: its own words."""
    words = job_words(path, pattern, *more)
    return run(directory, words, options, before, cold, **variables)
