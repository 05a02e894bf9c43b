# SPDX-License-Identifier: Apache-2.0
"""Packing a tree of small files, and epochs over it: `python bench/pack.py --json F`, `show F`.

The tree is on the slow bed, with a latency for each name that is asked for. Beside `pack`, `tar`,
`cp -r` and mksquashfs (where it is installed) read it, each from cold; what they write is local.
Then an epoch of a DataLoader, shuffled with the same seed, reads on the bed, from cold:

- tree: the files; tree, wrap: the same under `wrap`;
- packed: the packed database; packed, wrap; compressed, wrap, where compressing pays.

All must give the same samples in the same order. Names: lookups, getattrs, opens, listings that the
bed was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from render import markdown_table, number
from reports import Report, a_line_for_errors, conditions, save, show_or_measure

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed

SCHEMA = "uffdprefetch.bench.pack/1"
NAMES = ("lookups", "getattrs", "opens", "opendirs", "readdirs")
KIB = 1 << 10
#: Words that repeat, of which a text has many: what compresses as annotations do.
WORDS = [bytes(random.Random(i).choices(b"abcdefghijklmnop ", k=9)) for i in range(500)]

#: An epoch, or some of it, by a DataLoader over a directory or a packed database.
EPOCH = """
import hashlib, json, os, sys, time
import torch
from torch.utils.data import DataLoader
kind, path, workers, batches = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Tree:
    def __init__(self, root):
        self.root, self.samples = root, []
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        for target, name in enumerate(classes):
            for directory, _, names in sorted(os.walk(os.path.join(root, name))):
                self.samples += [(os.path.join(directory, each), target) for each in sorted(names)]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        path, target = self.samples[index]
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()[:8], target

def digest(value):
    return hashlib.sha256(value).digest()[:8]

def main():
    began = time.perf_counter()
    if kind == "tree":
        data = Tree(path)
    else:
        from uffdprefetch.data import Packed
        data = Packed(path, loader=digest)
    torch.manual_seed(1)
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=workers, collate_fn=list)
    opened, sha = time.perf_counter() - began, hashlib.sha256()
    for number, batch in enumerate(loader):
        for value, target in batch:
            sha.update(value + target.to_bytes(4, "little"))
        if number + 1 == batches:
            break
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "listed": opened, "digest": sha.hexdigest()}))

if __name__ == "__main__":
    main()
"""


class Bench:
    """A tree of ``args.files`` files in memory, and what is made of it."""

    def __init__(self, own: Path, memory: Path, args: argparse.Namespace) -> None:
        self.own, self.args = own, args
        self.source, self.made = memory / "source", memory / "made"
        self.tree = self.source / "tree"
        self.mountpoint = own / "bed"
        self.mountpoint.mkdir()
        self.made.mkdir()
        (own / "epoch.py").write_text(EPOCH)

    def make(self) -> int:
        """The tree; its bytes."""
        chance, total = random.Random(1), 0
        for number_ in range(self.args.files):
            directory = self.tree / f"class{number_ % 100:03}"
            if number_ < 100:
                directory.mkdir(parents=True)
            size = round(2 * KIB * 100 ** chance.random())  # 2 to 200 KiB, more small than large
            if self.args.text:
                data = b" ".join(chance.choices(WORDS, k=size // 10))
            else:
                data = chance.randbytes(size)
            (directory / f"{number_:06}.bin").write_bytes(data)
            total += len(data)
        return total

    def bed(self) -> SlowBed:
        """The source behind the slow link."""
        args = self.args
        return SlowBed(
            self.source, self.mountpoint, bandwidth=args.bandwidth * 10**6,
            latency_us=args.latency_us, lookup_us=args.lookup_us,
        )  # fmt: skip

    def timed(self, mount: SlowBed, words: Sequence[str | Path]) -> dict[str, Any]:
        """Run from cold; seconds, CPU, and what the bed was asked for."""
        mount.reset()
        before, began = os.times(), time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        done = subprocess.run(
            [*map(str, words)], capture_output=True, text=True, cwd=self.own, env=environment,
            check=False, timeout=1800,
        )  # fmt: skip
        seconds, after = time.perf_counter() - began, os.times()
        counted = mount.counters()
        if done.returncode:
            raise UffdPrefetchError(
                f"{words[0]} ended with {done.returncode}: {done.stderr[-300:]}"
            )
        return {
            "seconds": seconds, "cpu_seconds": after[2] + after[3] - before[2] - before[3],
            "names": sum(counted[name] for name in NAMES), "bytes": counted["bytes"],
            "told": done.stdout, "said": done.stderr,
        }  # fmt: skip

    def preparing(self) -> dict[str, list[str | Path]]:
        """Programs that make one file, or another tree, of the tree."""
        tree = self.mountpoint / "tree"
        ours: list[str | Path] = [sys.executable, "-m", "uffdprefetch", "pack", tree, "-o"]
        found: dict[str, list[str | Path]] = {
            "pack": [*ours, self.made / "packed.lmdb"],
            "pack --compress zstd": [*ours, self.made / "small.lmdb", "--compress", "zstd"],
            "tar": ["tar", "-cf", self.own / "out.tar", "-C", tree, "."],
            "cp -r": ["cp", "-r", tree, self.own / "copied"],
        }
        if shutil.which("mksquashfs"):
            found["mksquashfs"] = ["mksquashfs", tree, self.own / "out.sqfs", "-quiet"]
        return found

    def epochs(self) -> dict[str, list[str | Path]]:
        """Jobs by name."""
        wrap: list[str | Path] = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "--"]
        args = [str(self.args.workers), str(self.args.batches)]

        def job(kind: str, name: str) -> list[str | Path]:
            return [sys.executable, self.own / "epoch.py", kind, self.mountpoint / name, *args]

        found = {}
        for told, kind, name in (
            ("tree", "tree", "tree"),
            ("packed", "packed", "packed.lmdb"),
            ("compressed", "packed", "small.lmdb"),
        ):
            if (self.source / name).exists():
                found[told] = job(kind, name)
                found[f"{told}, wrap"] = [*wrap, *job(kind, name)]
        return found


def measure(args: argparse.Namespace) -> Report:
    """All of it, once, but for the epochs: as often as there are rounds, in turns."""
    report: Report = {
        "schema": SCHEMA,
        **conditions(),
        "prepared": {},
        "epochs": [],
        "failures": [],
    }
    report |= {
        key: getattr(args, key)
        for key in ("files", "text", "workers", "bandwidth", "latency_us", "lookup_us")
    }

    def told(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        own, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pack-", dir=where)))
            for where in (None, "/dev/shm")
        )
        bench = Bench(own, memory, args)
        report["tree_bytes"] = bench.make()
        for name, words in bench.preparing().items():
            if args.programs and name not in args.programs.split(","):
                continue
            with bench.bed() as mount:
                report["prepared"][name] = bench.timed(mount, words)
            told(f"{name}: {report['prepared'][name]['seconds']:.1f} s")
            shutil.rmtree(own / "copied", ignore_errors=True)
            for made in bench.made.glob("*.lmdb"):  # what a bed shows does not change meanwhile
                made.rename(bench.source / made.name)
            save(args.json, report)
        for turn in range(args.rounds):
            for name, words in bench.epochs().items():
                with bench.bed() as mount:
                    run = bench.timed(mount, words)
                run |= json.loads(run.pop("told")) | {"variant": name, "round": turn}
                report["epochs"].append(run)
                told(f"{name}: {run['seconds']:.1f} s")
                save(args.json, report)
    if len({run["digest"] for run in report["epochs"]}) > 1:
        raise UffdPrefetchError("OTHER SAMPLES, or another order, were read")
    return report


def markdown(report: Report) -> str:
    """Two tables."""
    head = (
        f"{report['files']:,} files, {report['tree_bytes'] / 2**20:,.0f} MiB;"
        f" {report['bandwidth']} MB/s, {report['latency_us']} us a read,"
        f" {report['lookup_us']} us a name\n\n"
    )
    rows = [
        [name, number(one["seconds"]), number(one["cpu_seconds"]), f"{one['names']:,}"]
        for name, one in report["prepared"].items()
    ]
    text = head + markdown_table(["", "seconds", "CPU s", "names asked for"], rows)
    rows = [
        [one["variant"], number(one["seconds"]), number(one["listed"]), number(one["cpu_seconds"]),
         f"{one['names']:,}", f"{one['bytes'] / 2**20:,.0f}"]
        for one in sorted(report["epochs"], key=lambda one: one["round"])
    ]  # fmt: skip
    return f"{text}\n" + markdown_table(
        ["epoch", "seconds", "of these listing", "CPU s", "names asked for", "MiB read"], rows
    )


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command."""
    return show_or_measure(words, SCHEMA, _measured, markdown)


def _measured(words: Sequence[str]) -> tuple[Report, bool]:
    parser = argparse.ArgumentParser(
        prog="bench/pack.py", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F")
    add("--files", type=int, default=20_000)
    add("--text", action="store_true", help="files that compress")
    add("--programs", metavar="LIST", help="of those that prepare, with commas (default: all)")
    add("--workers", type=int, default=8)
    add("--rounds", type=int, default=1)
    add("--batches", type=int, default=0, help="of an epoch (default: all)")
    add("--bandwidth", type=int, default=300, help="MB/s")
    add("--latency-us", type=int, default=500)
    add("--lookup-us", type=int, default=500)
    return measure(parser.parse_args(words)), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
