# SPDX-License-Identifier: Apache-2.0
"""A training script as its users write them: an LMDB Dataset, a DistributedSampler, a DataLoader.

Independent of uffdprefetch: bench/shuffle.py measures it as it is, under `wrap` and without.
Rank and number of ranks come from RANK and WORLD_SIZE, as torchrun sets them; --ranks starts that
many copies with them set. Per batch it waits in next(iterator), which is the stall time of [HDMLP]
(section 6.1), then computes for a fixed time per byte: a sleep, since an accelerator does not use
our CPU. Hashing is its use of the data, and part of that time.

One JSON line for each epoch of each rank: with --gate into bench/pool_gate.py's FIFO, after one
that says that the rank is ready, else on stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import lmdb
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Line = dict[str, Any]


class Records(Dataset[torch.Tensor]):
    """Records b"00000000", b"00000001", ... of an LMDB as byte tensors of their own sizes.

    ``count``: only the first ``count`` (a split for training); None: all.
    """

    def __init__(self, path: str, count: int | None = None, readahead: bool = True) -> None:
        self.path, self.readahead = path, readahead
        env = self._open()
        self.count = env.stat()["entries"] if count is None else count
        env.close()  # an environment does not survive fork: each process opens its own
        self.env: lmdb.Environment | None = None

    def _open(self) -> lmdb.Environment:
        return lmdb.open(
            self.path, readonly=True, lock=False, readahead=self.readahead, max_spare_txns=1
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.env is None:
            self.env = self._open()
        with self.env.begin(buffers=True) as txn:
            value = txn.get(b"%08d" % index)
            if value is None:
                raise KeyError(index)
            return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def collate(records: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """(number of records, their bytes in a row): one piece of shared memory for a batch."""
    return len(records), torch.cat(list(records))


def peer_of(options: argparse.Namespace) -> Any:
    """The hand-written prefetcher with --peer-threads; else None."""
    if not options.peer_threads:
        return None
    import numpy

    from uffdprefetch.demo.job import PeerPrefetcher

    extents = numpy.load(options.peer_index)
    return PeerPrefetcher(os.path.join(options.db, "data.mdb"), extents, options.peer_threads)


def run_epoch(loader: DataLoader[Any], options: argparse.Namespace, peer: Any) -> Line:
    """One epoch; times in seconds and, of the clock that all ranks share, nanoseconds."""
    digest = hashlib.sha256()
    stall_seconds = late_seconds = 0.0
    records = total_bytes = batches = 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin_ns = time.monotonic_ns()
    begin = ready = time.perf_counter()
    if peer is not None:
        peer.begin(list(loader.sampler))
    iterator = iter(loader)  # starts the workers
    while True:
        batch = next(iterator, None)
        now = time.perf_counter()
        stall_seconds += now - ready
        if batch is None:
            break
        count, data = batch
        records, total_bytes, batches = records + count, total_bytes + len(data), batches + 1
        if peer is not None:
            peer.consumed(records)
        until = now + options.compute_seconds_per_byte * len(data)
        digest.update(data.numpy())
        left_seconds = until - time.perf_counter()
        if left_seconds > 0:
            time.sleep(left_seconds)
        else:
            late_seconds -= left_seconds
        ready = time.perf_counter()
        if batches == options.stop_after:
            break
    del iterator
    end, end_ns = time.perf_counter(), time.monotonic_ns()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "seconds": end - begin,
        "stall_seconds": stall_seconds,
        "digest_beyond_compute_seconds": late_seconds,
        "records": records,
        "bytes": total_bytes,
        "sha256": digest.hexdigest(),
        "majflt": after.ru_majflt - before.ru_majflt,
    }


def teller(options: argparse.Namespace, rank: int) -> Callable[[Line], None]:
    """The function that reports a rank's lines; with --gate it returns when the rank may go on."""
    if options.gate is None:
        return lambda line: print(json.dumps({"rank": rank, **line}), flush=True)
    up = os.open(f"{options.gate}/up", os.O_WRONLY)
    down = os.open(f"{options.gate}/down.{rank}", os.O_RDONLY)

    def say(line: Line) -> None:
        os.write(up, (json.dumps({"rank": rank, **line}) + "\n").encode())
        if not os.read(down, 1):
            raise SystemExit("shuffle_job: whoever holds the gate is gone")

    return say


def train(options: argparse.Namespace, rank: int, ranks: int) -> int:
    """All epochs of one rank."""
    dataset = Records(options.db, options.first, options.readahead)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=options.seed
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=options.batch, sampler=sampler, num_workers=options.workers,
        collate_fn=collate,
    )  # fmt: skip
    peer = peer_of(options)
    say = teller(options, rank)
    if options.gate is not None:
        say({"event": "ready"})
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        say({"event": "epoch", "epoch": epoch, **run_epoch(loader, options, peer)})
    if peer is not None:
        peer.close()
    return 0


def start_ranks(ranks: int, words: Sequence[str]) -> int:
    """As `torchrun --nproc-per-node` does; 0, or 1 if one failed."""
    started = []
    for rank in range(ranks):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        variables["LOCAL_WORLD_SIZE"] = ranks
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        started.append(subprocess.Popen([sys.executable, __file__, *words], env=environment))
    return max(min(1, abs(child.wait())) for child in started)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="shuffle_job.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--db", required=True, help="the LMDB's directory")
    add("--ranks", type=int, default=0, help="copies of this to start")
    add("--epochs", type=int, default=2)
    add("--batch", type=int, default=32, help="records per batch")
    add("--workers", type=int, default=0, help="of the DataLoader")
    add("--seed", type=int, default=0, help="of the DistributedSampler")
    add("--first", type=int, metavar="N", help="only the first N records")
    add("--stop-after", type=int, default=0, metavar="N", help="batches of an epoch (0: all)")
    add("--readahead", action=argparse.BooleanOptionalAction, default=True)
    add("--compute-seconds-per-byte", type=float, default=0.0)
    add("--peer-threads", type=int, default=0, metavar="K", help="a hand-written prefetcher")
    add("--peer-index", metavar="F.npy", help="record extents, for it")
    add("--gate", metavar="DIR")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """One rank, or with --ranks all of them."""
    options = parse(words)
    if options.ranks and "RANK" not in os.environ:
        return start_ranks(options.ranks, words)
    rank, ranks = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    return train(options, rank, ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
