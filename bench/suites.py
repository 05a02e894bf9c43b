# SPDX-License-Identifier: Apache-2.0
"""The suites of bench/run.py: cases and their variants. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from uffdprefetch.demo.run import COMPUTE_SHARE

BASELINE = "plain mmap"
WARM = "warm cache"
TOOL = "uffdprefetch"

# [Haderbache] figure 8 plots six (size, distance) pairs and its text names 50 MiB, 8 and 10 MiB;
# the others here span the same directions: larger windows, rarer checkpoints.
SWEEP_SIZES_MIB = (50, 100, 200)
SWEEP_DISTANCES_MIB = (8, 10, 20, 40)

# The link's bandwidth over the thirds of the adapt suite's file, bytes/s.
ADAPT_BANDWIDTHS = (300_000_000, 1_000_000_000, 100_000_000)


@dataclass(frozen=True)
class Case:
    """What is read: pattern, ranks, and compute time over the transfer time of the same bytes."""

    pattern: str
    ranks: int
    compute_share: float

    @property
    def name(self) -> str:
        """As tables head it: `contiguous 4, compute 0.95`."""
        return f"{self.pattern} {self.ranks}, compute {self.compute_share:g}"


@dataclass(frozen=True)
class Variant:
    """One way to run the job.

    wrap is the options of `uffdprefetch wrap`, or None for no wrap; environment is NAME=VALUE
    words; before and beside are commands (`{}` is the data file) run to their end before, and
    started with, the job.
    """

    name: str
    job: tuple[str, ...] = ()
    wrap: tuple[str, ...] | None = None
    warm: bool = False
    read_ahead_kb: int | None = None
    before: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    needs_module: str | None = None
    epochs: int = 1
    environment: tuple[str, ...] = ()
    slow: str | None = None


def paper1_variants() -> list[Variant]:
    """Figure 7's four configurations, two epochs."""
    return [
        Variant(BASELINE, epochs=2),
        Variant("prefetch-off", wrap=("--policy", "none"), epochs=2),
        Variant(TOOL, wrap=("--policy", "auto"), epochs=2),
        Variant(WARM, warm=True, epochs=2),
    ]


def sweep_variants() -> list[Variant]:
    """Figure 8's sweep: --policy fixed over size x distance."""
    return [
        Variant(
            f"fixed size {size} distance {distance} MiB",
            wrap=("--policy", "fixed", "--size", f"{size}MiB", "--distance", f"{distance}MiB"),
        )
        for size in SWEEP_SIZES_MIB
        for distance in SWEEP_DISTANCES_MIB
        if distance < size
    ]


def peer_variants(vmtouch: str, index: Path) -> list[Variant]:
    """The alternatives without this tool."""
    peer = ("--peer-index", str(index), "--peer-thread")
    loaders = [
        Variant(
            f"DataLoader with {workers} workers",
            job=(f"--dataloader-workers={workers}",),
            needs_module="torch",
        )
        for workers in (0, 2, 4, 8)
    ]
    return [
        Variant(BASELINE),
        Variant(TOOL, wrap=("--policy", "auto")),
        Variant(WARM, warm=True),
        Variant(
            "readahead=False",
            job=("--no-readahead",),
            slow="a read of 4 to 32 KiB per latency takes some 40 times as long",
        ),
        Variant("MADV_SEQUENTIAL", job=("--advice=sequential",)),
        Variant("MADV_WILLNEED", job=("--advice=willneed",)),
        Variant("vmtouch first", before=(vmtouch, "-q", "-t", "{}")),
        Variant("vmtouch in background", beside=(vmtouch, "-q", "-t", "{}")),
        Variant("read_ahead_kb 1024", read_ahead_kb=1024),
        Variant("read_ahead_kb 8192", read_ahead_kb=8192),
        Variant("own prefetch thread x1", job=(*peer, "1")),
        Variant("own prefetch thread x8", job=(*peer, "8")),
        *loaders,
    ]


def plan_of(suite: str, vmtouch: str, index: Path) -> list[tuple[list[Case], list[Variant]]]:
    """The cases of a suite with their variants."""
    full = COMPUTE_SHARE
    if suite == "paper1":
        one = [Case("contiguous", 1, full)]
        # The sweep has its own baseline and warm run, so that its rounds are self-contained.
        anchors = [Variant(BASELINE), Variant(WARM, warm=True), Variant(TOOL, wrap=())]
        return [(one, paper1_variants()), ([Case("sweep", 1, full)], anchors + sweep_variants())]
    if suite == "peers":
        shapes = (("contiguous", 1), ("contiguous", 4), ("skipping", 4))
        cases = [Case(*shape, share) for share in (full, 0.0) for shape in shapes]
        return [(cases, peer_variants(vmtouch, index))]
    if suite == "patterns":
        every = [
            (name, ranks) for name in ("contiguous", "skipping", "shuffled") for ranks in (1, 4)
        ]
        every.remove(("skipping", 1))  # is contiguous
        few = [
            variant
            for variant in peer_variants(vmtouch, index)
            if variant.name in (BASELINE, TOOL, WARM, "own prefetch thread x8")
        ]
        return [([Case(*shape, full) for shape in every], few)]
    if suite == "adapt":
        # Compute is half of the transfer time at 300 MB/s: the reader could take 600 MB/s.
        few = [Variant(BASELINE), Variant(TOOL, wrap=("--policy", "auto"))]
        return [([Case("contiguous", 1, 0.5)], few)]
    raise ValueError(suite)
