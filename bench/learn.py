# SPDX-License-Identifier: Apache-2.0
"""What `wrap --learn` makes of a program's start: `python bench/learn.py --json F`, `show F`.

A Python with its standard library and this one's packages lies on the slow bed, whose lookups take
time, too. Each program imports some of them and prints a value, in turns, from cold but where said:

- plain; warm: all that it reads is in memory, names too;
- wrap: without `--learn`;
- record: the first run under `wrap --learn`; learn: the next one, on a mount of its own;
- needed: the files that the profile names are read by `cat` before; tree: all files are;
- tar: all is unpacked on the local disk before, from an archive on the bed;
- squashfs: mounted from an image on the bed.
- of profiles that do not fit: another program's; another environment's (the same files elsewhere,
  copied); one of which half of the files have changed; one of names that nothing has; one of
  other files of the tree, drawn at random.

What goes before a start counts. Outputs must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import wait_until_quiet
from harm_beds import LINKS
from render import markdown_table, number
from reports import (
    Report,
    a_line_for_errors,
    among,
    conditions,
    load,
    options,
    save,
    show_or_measure,
)
from rounds import NAME_REQUESTS

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.service.started_files import WHOLE_MOST_BYTES

SCHEMA = "uffdprefetch.bench.learn/1"
PLAIN, WARM, WRAP, RECORD, LEARN = "plain", "warm", "wrap", "record", "learn"
NEEDED, TREE, TAR, SQUASHFS = "needed", "tree", "tar", "squashfs"
OTHER, ELSEWHERE, CHANGED, NAMES = "other program", "elsewhere", "half changed", "no names"
RANDOM = "random"
WRONG = (OTHER, ELSEWHERE, CHANGED, NAMES, RANDOM)
VARIANTS = (PLAIN, WARM, WRAP, RECORD, LEARN, NEEDED, TREE, TAR, SQUASHFS, *WRONG)
#: Names on the bed are kept so long, as by a client of a parallel file system.
ENTRY_SECONDS = 3600.0
MOST_SECONDS = 600.0
ARCHIVE, IMAGE, PROFILE = "tree.tar", "tree.squashfs", "bench"
#: What each program runs, and the packages that it cannot do without.
PROGRAMS = {
    "json": ("import json, decimal; print(json.dumps({'a': str(decimal.Decimal(1) / 3)}))", ()),
    "numpy": ("import numpy; print(numpy.arange(9).sum())", ("numpy",)),
    "science": (
        "import scipy.stats, scipy.optimize, pandas, matplotlib.figure\n"
        "print(pandas.Series([1, 2]).sum(), scipy.stats.norm.cdf(0))",
        ("scipy", "pandas", "matplotlib"),
    ),
    "torch": ("import torch; print(torch.ones(3).sum().item())", ("torch",)),
    "causal-lm": (
        "from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.__name__)",
        ("torch", "transformers"),
    ),
}  # fmt: skip
#: Whose profile is another program's: of one that reads more, where there is one.
ANOTHER = {"torch": "science", "causal-lm": "science"}
MOST_READ = "torch"


@dataclass
class Place:
    """Where all is: the tree behind the bed, where that is mounted, and what is ours alone."""

    source: Path
    mountpoint: Path
    own: Path

    @property
    def cache(self) -> Path:
        """Where profiles lie."""
        return self.own / "cache"

    @property
    def profile(self) -> Path:
        """The one that is replayed."""
        return self.cache / "uffdprefetch" / "profiles" / f"{PROFILE}.upl"

    def python(self, root: Path) -> str:
        """The interpreter of a tree, which finds its library beside itself."""
        return str(root / "tree" / "bin" / f"python3.{sys.version_info[1]}")


# ---- what is there ------------------------------------------------------------------------------


def make_tree(source: Path, archives: bool) -> None:
    """A Python of its own, with all packages of this one but ours, compiled."""
    tree, version = source / "tree", f"python3.{sys.version_info[1]}"
    (tree / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), tree / "bin" / version)
    shutil.copytree(
        Path(os.__file__).parent, tree / "lib" / version, symlinks=True, ignore=_not_ours
    )
    for packages in reversed(places_of_packages()):  # what comes first counts
        shutil.copytree(packages, packages_of(tree), dirs_exist_ok=True, ignore=_not_ours)
    _run(str(tree / "bin" / version), "-m", "compileall", "-q", str(tree / "lib"), check=False)
    if archives:
        _run("tar", "-C", str(source), "-cf", str(source / ARCHIVE), "tree")
        if shutil.which("mksquashfs"):
            _run("mksquashfs", str(tree), str(source / IMAGE), "-quiet", "-no-progress")


def _not_ours(directory: str, names: Sequence[str]) -> set[str]:
    """What a tree does not need: ourselves, tests, and what no program imports."""
    left = {"test", "idlelib", "ensurepip", "polars", "_polars_runtime_32", "duckdb"}
    return {name for name in names if name in left or "uffdprefetch" in name}


def places_of_packages() -> list[str]:
    """Where this interpreter finds packages, in its order: of a virtual environment the system's,
    too, which has what some of its packages need."""
    names = "site-packages", "dist-packages"
    return [path for path in sys.path if os.path.basename(path) in names and os.path.isdir(path)]


def packages_of(tree: Path) -> Path:
    """Where the interpreter of a tree looks for packages."""
    says = "import site; print(site.getsitepackages()[0])"
    return Path(
        _run(str(tree / "bin" / f"python3.{sys.version_info[1]}"), "-c", says).stdout.strip()
    )


def why_not(program: str, tree: Path) -> str | None:
    """Why a program cannot be run, or None."""
    packages = packages_of(tree)
    missing = [name for name in PROGRAMS[program][1] if not (packages / name).is_dir()]
    return f"no package {missing[0]}" if missing else None


# ---- a run --------------------------------------------------------------------------------------


def _run(*words: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words, check=False, text=True, capture_output=True, timeout=MOST_SECONDS, **more
    )
    if check and done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UffdPrefetchError(f"{words[0]} ended with {done.returncode}: {' '.join(last)}")
    return done


@contextlib.contextmanager
def mounted(place: Place, args: argparse.Namespace, bed: str) -> Iterator[SlowBed]:
    """The bed, cold, always at the same place, as a profile names its files."""
    link = LINKS[bed]
    with SlowBed(
        place.source, place.mountpoint, bandwidth=link.bandwidth, latency_us=link.latency_us,
        lookup_us=args.lookup_us, entry_seconds=ENTRY_SECONDS,
    ) as mount:  # fmt: skip
        yield mount


def _job(
    place: Place, root: Path, program: str, learn: bool, wrap: bool = False
) -> tuple[list[str], dict[str, str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {
        "PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": str(place.own),
        "XDG_CACHE_HOME": str(place.cache), "UFFDPREFETCH_RUNDIR": str(place.own / "run"),
    }  # fmt: skip
    words = [place.python(root), "-c", PROGRAMS[program][0]]
    if learn or wrap:
        summary = str(place.own / "tool")
        ours = [sys.executable, "-m", "uffdprefetch", "wrap", "-f", "-o", summary]
        words = [*ours, *([f"--learn={PROFILE}"] if learn else []), "--", *words]
        environment["PYTHONPATH"] = ""
    return words, environment


def _before(place: Place, variant: str, bed: SlowBed) -> Path:
    """What goes before a start, by its variant; where the tree is then."""
    root = bed.mountpoint
    if variant == TREE:
        _run("sh", "-c", f"find {root}/tree -type f -print0 | xargs -0 cat > /dev/null")
    elif variant == NEEDED:
        listed = _run(
            sys.executable, "-m", "uffdprefetch", "profile", "show", "--json", PROFILE,
            env={**os.environ, "XDG_CACHE_HOME": str(place.cache)},
        ).stdout  # fmt: skip
        names = [one["path"] for one in json.loads(listed)["entries"] if one["kind"] == "file"]
        _run("xargs", "-0", "cat", input="\0".join(names), check=False)
    elif variant == TAR:
        _run("tar", "-C", str(place.own), "-xf", str(root / ARCHIVE))
        root = place.own
    elif variant == SQUASHFS:
        (place.own / "image" / "tree").mkdir(parents=True, exist_ok=True)
        _run("mount", "-o", "loop,ro", str(root / IMAGE), str(place.own / "image" / "tree"))
        root = place.own / "image"
    return root


def _make_wrong(place: Place, args: argparse.Namespace, variant: str, program: str) -> None:
    """A profile that does not fit, of what was recorded."""
    other = ANOTHER.get(program, MOST_READ)
    of = other if variant == OTHER else program
    kept = place.own / f"{of}.upl"
    if not kept.exists():
        with mounted(place, args, args.beds[0]) as mount:
            mount.set(bandwidth=0, latency_us=0, lookup_us=0)
            shutil.rmtree(place.cache, ignore_errors=True)
            words, environment = _job(place, mount.mountpoint, of, learn=True)
            _run(*words, env=environment)
        shutil.copy(place.profile, kept)
    profile = profile_store.load(str(kept))
    if variant == RANDOM:
        profile = replace(profile, entries=tuple(_drawn(place, profile.entries)))
    elif variant != OTHER:
        entries = tuple(_wrong(place, variant, *one) for one in enumerate(profile.entries))
        profile = replace(profile, entries=entries)
    shutil.rmtree(place.cache, ignore_errors=True)
    profile_store.store(str(place.profile), profile)


def _drawn(place: Place, entries: Sequence[StartEntry]) -> Iterator[StartEntry]:
    """As many files of the tree, as much of each; the program's own stays."""
    draw, program = random.Random(1), place.python(place.mountpoint)
    files = sorted(path for path in (place.source / "tree").rglob("*") if path.is_file())
    large = [path for path in files if path.suffix == ".so"]
    for entry in entries:
        if entry.kind is not EntryKind.FILE or entry.path == program:
            yield entry
            continue
        path = draw.choice(large if entry.blocks else files)
        status, where = path.stat(), place.mountpoint / path.relative_to(place.source)
        size = status.st_size
        blocks = tuple(one for one in entry.blocks if sum(one) * BLOCK_BYTES <= size)
        if size and (blocks or size <= WHOLE_MOST_BYTES):
            yield replace(
                entry, path=str(where), size_bytes=size, mtime_ns=status.st_mtime_ns, blocks=blocks
            )


def _wrong(place: Place, variant: str, number: int, entry: StartEntry) -> StartEntry:
    if variant == CHANGED:
        return replace(entry, mtime_ns=entry.mtime_ns + number % 2)
    if variant == NAMES:
        return replace(entry, path=f"{entry.path}.{number}")
    if not entry.path.startswith(f"{place.mountpoint}/tree/"):
        return entry
    path = entry.path.removeprefix(f"{place.mountpoint}/tree/")
    there = place.source / "elsewhere" / path
    if entry.kind is EntryKind.FILE and not there.exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(place.source / "tree" / path, there)
    return replace(entry, path=f"{place.mountpoint}/elsewhere/{path}")


def _after(place: Place, variant: str) -> None:
    if variant == TAR:
        shutil.rmtree(place.own / "tree", ignore_errors=True)
    elif variant == SQUASHFS:
        _run("umount", str(place.own / "image" / "tree"))


def once(place: Place, args: argparse.Namespace, bed: str, program: str, variant: str) -> Any:
    """A run; what is told of it."""
    learn = variant in (RECORD, LEARN, *WRONG)
    if variant == RECORD:
        shutil.rmtree(place.cache, ignore_errors=True)
    if variant in WRONG:
        _make_wrong(place, args, variant, program)
    with mounted(place, args, bed) as mount:
        words, environment = _job(place, mount.mountpoint, program, learn)
        if variant == WARM:
            mount.set(bandwidth=0, latency_us=0, lookup_us=0)
            _run(*words, env=environment)
            link = LINKS[bed]
            mount.set(
                bandwidth=link.bandwidth, latency_us=link.latency_us, lookup_us=args.lookup_us
            )
        mount.reset()
        faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt
        began = time.perf_counter()
        root = _before(place, variant, mount)
        before_seconds = time.perf_counter() - began
        words, environment = _job(place, root, program, learn, variant == WRAP)
        done = _run(*words, env=environment)
        seconds = time.perf_counter() - began
        faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt - faults
        counters = mount.counters()
        _after(place, variant)
    return {
        "seconds": seconds, "before_seconds": before_seconds, "major_faults": faults,
        "output": done.stdout, "said": done.stderr.strip().splitlines()[:4],
        **{name: counters[name] for name in ("bytes", "requests", *NAME_REQUESTS)},
    }  # fmt: skip


# ---- all of them --------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The rounds that are asked for and not there."""
    report: dict[str, Any] = {"runs": [], "failures": [], "skipped": {}}
    if args.json.exists():
        report = load(args.json, SCHEMA)
    report |= {"schema": SCHEMA, **conditions(), "lookup_us": args.lookup_us}
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-learn-") as own:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="uffdprefetch-learn-", dir=memory) as source:
            place = Place(args.tree or Path(source), Path(own, "bed"), Path(own, "own"))
            for path in (place.mountpoint, place.own):
                path.mkdir()
            if not (place.source / "tree").exists():
                make_tree(place.source, {TAR, SQUASHFS} & set(args.variants) != set())
            variants = [
                variant
                for variant in args.variants
                if variant != SQUASHFS or (place.source / IMAGE).exists()
            ]
            for program in args.programs:
                reason = why_not(program, place.source / "tree")
                if reason is not None:
                    report["skipped"][program] = reason
                    continue
                for bed in args.beds:
                    rounds(args, report, lambda *what: once(place, args, *what), bed, program,
                           variants)  # fmt: skip
    save(args.json, report)
    return report


def rounds(
    args: argparse.Namespace, report: dict[str, Any], once_: Callable[[str, str, str], Any],
    bed: str, program: str, variants: Sequence[str],
) -> None:  # fmt: skip
    """Those of one program on one bed."""
    output = None
    for turn in range(args.rounds):
        where = {"bed": bed, "program": program, "round": turn}
        had = {run["variant"] for run in report["runs"] if where.items() <= run.items()}
        for variant in variants:
            # a profile is of this round: it is made before it is used
            if variant in had and not (variant == RECORD and {LEARN, NEEDED} & {*variants} - had):
                continue
            if args.quiet:
                wait_until_quiet()
            try:
                run = once_(bed, program, variant)
                if run["output"] != (output := output or run["output"]):
                    raise UffdPrefetchError(f"ANOTHER OUTPUT: {run['output']!r}, not {output!r}")
            except UffdPrefetchError as error:
                report["failures"].append(where | {"variant": variant, "error": error.message})
                told = f"FAILED: {error.message}"
            else:
                report["runs"] = [
                    one
                    for one in report["runs"]
                    if not (where | {"variant": variant}).items() <= one.items()
                ]
                report["runs"].append(where | {"variant": variant} | run)
                told = f"{run['seconds']:.2f} s, {run['bytes'] / 1e6:.1f} MB"
            save(args.json, report)
            print(f"bench: {bed} | {program} | {variant}: {told}", file=sys.stderr, flush=True)


def markdown(report: dict[str, Any]) -> str:
    """A table for each bed: medians."""
    names = [one for one in VARIANTS if any(run["variant"] == one for run in report["runs"])]
    parts = []
    for bed in dict.fromkeys(run["bed"] for run in report["runs"]):
        rows = []
        for program in dict.fromkeys(run["program"] for run in report["runs"]):
            of = {
                name: [
                    run
                    for run in report["runs"]
                    if (run["bed"], run["program"], run["variant"]) == (bed, program, name)
                ]
                for name in names
            }
            if not any(of.values()):
                continue
            cells = [_median(runs, "seconds", 2) for runs in of.values()]
            for name in (PLAIN, LEARN):
                cells.append(_median(of.get(name, []), "major_faults", 0))
                cells.append(_median(of.get(name, []), "requests", 0))
            rows.append([program, *cells])
        head = ["program", *(f"{name}, s" for name in names)]
        head += [f"{what}, {name}" for name in (PLAIN, LEARN) for what in ("major faults", "reads")]
        parts.append(f"### {bed}, {report['lookup_us']} µs a name\n\n{markdown_table(head, rows)}")
    parts += [f"Not run: {name}: {why}" for name, why in report["skipped"].items()]
    parts += [
        f"FAILED: {one['bed']} {one['program']} {one['variant']}: {one['error']}"
        for one in report["failures"]
    ]
    return "\n\n".join(parts)


def _median(runs: Sequence[dict[str, Any]], what: str, places: int) -> str:
    return number(statistics.median(run[what] for run in runs), places) if runs else ""


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, or 1 if a run failed."""
    return show_or_measure(words, SCHEMA, _measured, markdown)


def _measured(words: Sequence[str]) -> tuple[Report, bool]:
    parser = options("bench/learn.py", __doc__)
    add = parser.add_argument
    links = f"with commas: {', '.join(LINKS)}"
    add("--bed", type=among(LINKS), default=["300/1"], dest="beds", help=links)
    add("--lookup-us", type=int, default=500, help="of each lookup, open and list")
    programs = f"of {', '.join(PROGRAMS)}"
    add("--programs", type=among(PROGRAMS), default=list(PROGRAMS), help=programs)
    variants = f"of {', '.join(VARIANTS)}"
    add("--variants", type=among(VARIANTS), default=list(VARIANTS), help=variants)
    add("--tree", type=Path, metavar="DIR", help="made there, or as an earlier run has made it")
    args = parser.parse_args(words)
    args.variants = [name for name in VARIANTS if name in args.variants]
    return measure(args), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
