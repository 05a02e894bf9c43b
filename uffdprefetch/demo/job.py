# SPDX-License-Identifier: Apache-2.0
"""A training-like job: reads an LMDB by mmap in batches, and computes between them.

The program to be measured, independent of uffdprefetch. Standard library and py-lmdb only (torch
with --dataloader-workers, numpy with --peer-thread).

Per batch it reads its records, every page of every value, as a decoder does (the time inside
these reads is the stall time), then computes for a fixed time: a sleep, since an accelerator
does not use our CPU, or a spin. The access patterns ([Haderbache] section 2.3 for the first two):

contiguous  rank r of n reads the r-th n-th of the file, in order
skipping    rank r reads records r, r + n, r + 2n, ... (original MPI-Caffe)
shuffled    one seeded permutation per epoch for all ranks, rank r takes every n-th of it

Prints one line of JSON. With --spawn it starts --ranks copies of itself, lets them begin
together, and prints one aggregate line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lmdb

SCHEMA = "uffdprefetch.job/1"
PATTERNS = ("contiguous", "skipping", "shuffled")
PEER_AHEAD_BYTES = 50 << 20  # as the best setting of [Haderbache] figure 8
PEER_CHUNK_BYTES = 1 << 20
KEY = b"%08d"

Value = bytes | memoryview  # a record that was read


def rank_order(
    pattern: str, records: int, rank: int, ranks: int, *, seed: int = 0, epoch: int = 0
) -> Sequence[int]:
    """A rank's record numbers in an epoch, in order.

    Over all ranks each record occurs exactly once per epoch. Only `shuffled` depends on `seed`
    and `epoch`.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    if pattern == "contiguous":
        return range(records * rank // ranks, records * (rank + 1) // ranks)
    if pattern == "skipping":
        return range(rank, records, ranks)
    if pattern == "shuffled":
        order = list(range(records))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        return order[rank::ranks]
    raise ValueError(f"unknown pattern {pattern!r}; one of {', '.join(PATTERNS)}")


def open_database(path: str, *, readahead: bool = True, lock: bool = False) -> lmdb.Environment:
    """Open an LMDB read-only; `path` is its directory or, with subdir=False, its file."""
    return lmdb.open(
        path,
        subdir=os.path.isdir(path),
        readonly=True,
        lock=lock,
        readahead=readahead,
        max_readers=512,
        max_spare_txns=1,
    )


def get_record(txn: lmdb.Transaction, record: int) -> memoryview:
    """The value of a record, still in the mapping (the transaction must have buffers=True)."""
    value = txn.get(KEY % record)
    if value is None:
        raise lmdb.Error(f"record {record} is not in the database")
    return memoryview(value)


def data_file(path: str) -> str:
    """The file that an LMDB at `path` is mapped from."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


# ---- advice and hand-written prefetching: the alternatives to a tool ------------------------


def advise_mapping(file: str, advice: str) -> None:
    """madvise(2) this process's whole mapping of `file`; advice is `sequential` or `willneed`.

    py-lmdb has no call for it, so the mapping is looked up and libc called, as in a job.
    """
    import ctypes

    code = {"sequential": mmap.MADV_SEQUENTIAL, "willneed": mmap.MADV_WILLNEED}[advice]
    size_bytes = os.path.getsize(file)
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end, offset in mappings_of(file):
        # LMDB's map is larger than the file: advise the file's part only.
        length = min(end - start, size_bytes - offset)
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), code):
            raise OSError(ctypes.get_errno(), f"madvise({advice}) on {file}")


def mappings_of(file: str) -> list[tuple[int, int, int]]:
    """(start address, end address, file offset in bytes) of each of this process's maps of it."""
    real = os.path.realpath(file)
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] == real:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                found.append((start, end, int(fields[2], 16)))
    return found


class PeerPrefetcher:
    """Hand-written prefetch threads in the job: pread ahead of the reader, discard the data.

    Args:
        file: the LMDB's data file.
        extents: per record (offset, length) in bytes, shape (records, 2).
        threads: how many.

    `begin(order)` starts an epoch; `consumed(n)`: n records of it have been read. The threads stay
    at most PEER_AHEAD_BYTES ahead, in reads of up to PEER_CHUNK_BYTES; adjacent records are merged.
    """

    def __init__(self, file: str, extents: Sequence[Sequence[int]], threads: int) -> None:
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._extents = extents
        self._changed = threading.Condition()
        self._pieces: Iterator[tuple[int, int, int]] = iter(())
        self._next: tuple[int, int, int] | None = None
        self._starts: list[int] = [0]
        self._consumed_bytes = 0
        self._closing = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def begin(self, order: Sequence[int]) -> None:
        """Start over with the epoch's order of records."""
        starts = [0]
        for record in order:
            starts.append(starts[-1] + int(self._extents[record][1]))
        with self._changed:
            self._starts = starts
            self._consumed_bytes = 0
            self._pieces = self._cut(order)
            self._next = next(self._pieces, None)
            self._changed.notify_all()

    def consumed(self, records: int) -> None:
        """The reader has read the first `records` records of the epoch."""
        with self._changed:
            self._consumed_bytes = self._starts[records]
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        os.close(self._fd)

    def _cut(self, order: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(position in the epoch, file offset, length) in bytes of each pread to make."""
        position = run_position = run_start = run_end = 0
        for record in order:
            offset, length = (int(value) for value in self._extents[record])
            # page headers and a few tree pages between two records do not split a read
            if not (run_end <= offset <= run_end + 4 * mmap.PAGESIZE) or run_end == 0:
                if run_end > run_start:
                    yield run_position, run_start, run_end - run_start
                run_position, run_start = position, offset
            run_end = offset + length
            position += length
            while run_end - run_start >= PEER_CHUNK_BYTES:
                yield run_position, run_start, PEER_CHUNK_BYTES
                run_start += PEER_CHUNK_BYTES
                run_position += PEER_CHUNK_BYTES
        if run_end > run_start:
            yield run_position, run_start, run_end - run_start

    def _take(self) -> tuple[int, int, int] | None:
        with self._changed:
            while not self._closing:
                piece = self._next
                if piece is not None and piece[0] <= self._consumed_bytes + PEER_AHEAD_BYTES:
                    self._next = next(self._pieces, None)
                    return piece
                self._changed.wait()
        return None

    def _work(self) -> None:
        buffer = bytearray(PEER_CHUNK_BYTES)
        while (piece := self._take()) is not None:
            _, offset, length = piece
            os.preadv(self._fd, [memoryview(buffer)[:length]], offset)


# ---- the gate: a barrier of the ranks --------------------------------------------------------


class Gate:
    """One rank's end of the parent's barrier: a byte up: arrived, a byte down: go."""

    def __init__(self, fds: tuple[int, int] | None) -> None:
        self._fds = fds

    def wait(self) -> None:
        """Wait until every running rank has arrived; returns at once without a parent."""
        if self._fds is None:
            return
        os.write(self._fds[1], b"h")
        if not os.read(self._fds[0], 1):
            raise SystemExit("job.py: the parent of this rank is gone")


def run_gate(up: Sequence[int], down: Sequence[int], on_first: Callable[[], None]) -> None:
    """Parent's side: release each round when all open ranks have arrived; end when all have closed.

    Args:
        up, down: per rank the descriptors to read arrivals from and to write go to.
        on_first: called once, before the first round is released: the start of the clock.
    """
    open_ranks = list(range(len(up)))
    first = True
    while open_ranks:
        open_ranks = [rank for rank in open_ranks if os.read(up[rank], 1)]
        if first and len(open_ranks) < len(up):
            return  # one died before the start: the others' gates close
        if first:
            on_first()
            first = False
        for rank in open_ranks:
            os.write(down[rank], b"g")


# ---- one rank -------------------------------------------------------------------------------


def usage_now() -> dict[str, float]:
    """This process's and its ended children's faults and CPU seconds (getrusage(2))."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "majflt": own.ru_majflt + children.ru_majflt,
        "minflt": own.ru_minflt + children.ru_minflt,
        "user_seconds": own.ru_utime + children.ru_utime,
        "system_seconds": own.ru_stime + children.ru_stime,
    }


def compute(until_seconds: float, spin: bool) -> None:
    """Compute until this value of time.perf_counter()."""
    if spin:
        while time.perf_counter() < until_seconds:
            pass
        return
    left_seconds = until_seconds - time.perf_counter()
    if left_seconds > 0:
        time.sleep(left_seconds)


def read_batches(env: lmdb.Environment, order: Sequence[int], batch: int) -> Iterator[list[Value]]:
    """Batches of record values in order; each value is copied whole out of the mapping."""
    with env.begin(buffers=True) as txn:
        for start in range(0, len(order), batch):
            values: list[Value] = []
            for record in order[start : start + batch]:
                values.append(bytes(get_record(txn, record)))
            yield values


class LoaderDataset:
    """A dataset for torch's DataLoader: opens the LMDB per worker, returns a tensor."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._env: lmdb.Environment | None = None

    def __getitem__(self, record: int) -> Any:
        import torch

        if self._env is None:  # an environment does not survive fork (py-lmdb)
            self._env = open_from(self._options)
        with self._env.begin(buffers=True) as txn:
            return torch.frombuffer(bytearray(get_record(txn, record)), dtype=torch.uint8)


def join_tensors(values: Sequence[Any]) -> Any:
    """Collate: one tensor per batch, so that one shared-memory segment crosses per batch."""
    import torch

    return [value.numel() for value in values], torch.cat(list(values))


def loader_batches(options: argparse.Namespace, order: Sequence[int]) -> Iterator[list[Value]]:
    """As read_batches(), through torch's DataLoader with its worker processes."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        LoaderDataset(options),  # type: ignore[arg-type,unused-ignore]
        batch_size=options.batch,
        sampler=list(order),
        num_workers=options.dataloader_workers,
        collate_fn=join_tensors,
    )
    for lengths, joined in loader:
        view, at = memoryview(joined.numpy()), 0
        values: list[Value] = []
        for length in lengths:
            values.append(view[at : at + length])
            at += length
        yield values


def open_from(options: argparse.Namespace) -> lmdb.Environment:
    """The database as the options ask for it, with the advice given."""
    env = open_database(options.db, readahead=options.readahead, lock=options.lock)
    if options.advice != "none":
        advise_mapping(data_file(options.db), options.advice)
    return env


def run_epoch(
    options: argparse.Namespace,
    env: lmdb.Environment,
    order: Sequence[int],
    peer: PeerPrefetcher | None,
    gate: Gate,
) -> dict[str, Any]:
    """One epoch over `order`: its times in seconds, counts, and digest or null."""
    digest = hashlib.sha256() if options.digest else None
    before = usage_now()
    stall_seconds = late_seconds = 0.0
    total_bytes = done = 0
    begin = time.perf_counter()
    if peer is not None:
        peer.begin(order)
    if options.dataloader_workers is None:
        batches = read_batches(env, order, options.batch)
    else:
        batches = loader_batches(options, order)
    while True:
        start = time.perf_counter()
        values = next(batches, None)
        ready = time.perf_counter()
        stall_seconds += ready - start
        if values is None:
            break
        batch_bytes = sum(len(value) for value in values)
        total_bytes += batch_bytes
        done += len(values)
        if peer is not None:
            peer.consumed(done)
        slot_end = ready + options.compute_per_batch
        slot_end += options.compute_seconds_per_byte * batch_bytes
        if digest is not None:
            # Hashing is this job's use of the data: part of the compute time, and free as long as
            # it is shorter.
            for value in values:
                digest.update(value)
            late_seconds += max(0.0, time.perf_counter() - slot_end)
        compute(slot_end, options.spin)
        if options.barrier == "batch":
            gate.wait()
    seconds = time.perf_counter() - begin
    after = usage_now()
    return {
        "seconds": seconds,
        "stall_seconds": stall_seconds,
        "digest_beyond_compute_seconds": late_seconds,
        "bytes": total_bytes,
        "records": done,
        "majflt": int(after["majflt"] - before["majflt"]),
        "minflt": int(after["minflt"] - before["minflt"]),
        "user_seconds": after["user_seconds"] - before["user_seconds"],
        "system_seconds": after["system_seconds"] - before["system_seconds"],
        "sha256": None if digest is None else digest.hexdigest(),
    }


def run_rank(options: argparse.Namespace, gate: Gate) -> dict[str, Any]:
    """All epochs of this rank, as the JSON line's object."""
    begin = time.perf_counter()
    env = open_from(options)
    with env.begin() as txn:
        records = txn.stat()["entries"]
    if options.dataloader_workers is not None:
        env.close()  # py-lmdb refuses a path that is open here, in a forked worker too
    peer = None
    if options.peer_thread:
        import numpy

        extents = numpy.load(options.peer_index)
        peer = PeerPrefetcher(data_file(options.db), extents, options.peer_thread)
    open_seconds = time.perf_counter() - begin
    gate.wait()
    epochs = []
    for epoch in range(options.epochs):
        if epoch and options.barrier != "none":
            gate.wait()
        order = rank_order(
            options.pattern, records, options.rank, options.ranks, seed=options.seed, epoch=epoch
        )
        epochs.append(run_epoch(options, env, order, peer, gate))
    if peer is not None:
        peer.close()
    env.close()
    return {
        "schema": SCHEMA,
        "pattern": options.pattern,
        "rank": options.rank,
        "ranks": options.ranks,
        "records_in_database": records,
        "open_seconds": open_seconds,
        "epochs": epochs,
    }


# ---- all ranks ------------------------------------------------------------------------------


def aggregate(per_rank: Sequence[dict[str, Any]], wall_seconds: float) -> dict[str, Any]:
    """One summary of all ranks: times are the slowest rank's, counts are sums.

    The sha256 of more than one rank is that of the ranks' hex digests, in rank order.
    """
    epochs: list[dict[str, Any]] = []
    for rows in zip(*(one["epochs"] for one in per_rank), strict=True):
        merged: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name == "sha256":
                joined = None if None in values else "".join(values)
                merged[name] = values[0] if len(values) == 1 or joined is None else None
                if joined is not None and len(values) > 1:
                    merged[name] = hashlib.sha256(joined.encode()).hexdigest()
            elif name in ("seconds", "stall_seconds", "digest_beyond_compute_seconds"):
                merged[name] = max(values)
            else:
                merged[name] = sum(values)
        epochs.append(merged)
    return {
        "schema": SCHEMA,
        "pattern": per_rank[0]["pattern"],
        "ranks": len(per_rank),
        "records_in_database": per_rank[0]["records_in_database"],
        "wall_seconds": wall_seconds,
        "epochs": epochs,
        "per_rank": list(per_rank),
    }


def spawn(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start all ranks at a barrier, print the aggregate; 0, or 1 if a rank failed."""
    words = [word for word in argv if word != "--spawn"]
    children: list[subprocess.Popen[bytes]] = []
    up: list[int] = []
    down: list[int] = []
    for rank in range(options.ranks):
        here_read, here_write = os.pipe()
        go_read, go_write = os.pipe()
        environment = os.environ | {
            # as torchrun sets them
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
        }
        command = [sys.executable, __file__, *words, "--rank", str(rank)]
        command += ["--gate-fds", f"{go_read},{here_write}"]
        children.append(
            subprocess.Popen(
                command,
                env=environment,
                pass_fds=(go_read, here_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
        )
        os.close(go_read)
        os.close(here_write)
        up.append(here_read)
        down.append(go_write)
    started = [0.0]
    ended = [0.0]

    def start_clock() -> None:
        started[0] = time.perf_counter()

    run_gate(up, down, start_clock)
    ended[0] = time.perf_counter()
    for fd in (*up, *down):
        os.close(fd)
    outputs = [child.communicate()[0] for child in children]
    failed = [rank for rank, child in enumerate(children) if child.returncode != 0]
    if failed:
        print(f"job.py: ranks {failed} failed", file=sys.stderr)
        return 1
    per_rank = [json.loads(output) for output in outputs]
    print(json.dumps(aggregate(per_rank, ended[0] - started[0])))
    return 0


def environment_rank(name: str, default: int) -> int:
    """RANK or SIZE from mpirun's or torchrun's environment."""
    torch_name = {"RANK": "RANK", "SIZE": "WORLD_SIZE"}[name]
    for variable in (f"OMPI_COMM_WORLD_{name}", torch_name):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return default


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="job.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--db", required=True, help="the LMDB: its directory, or its file")
    add("--pattern", choices=PATTERNS, default="contiguous")
    add("--rank", type=int, default=environment_rank("RANK", 0))
    add("--ranks", type=int, default=environment_rank("SIZE", 1))
    add("--spawn", action="store_true", help="start all --ranks here, and begin together")
    add("--epochs", type=int, default=1)
    add("--batch", type=int, default=32, help="records per batch")
    add("--seed", type=int, default=0, help="of the shuffled order")
    add("--compute-seconds-per-byte", type=float, default=0.0)
    add("--compute-per-batch", type=float, default=0.0, help="seconds")
    add("--spin", action="store_true", help="compute on the CPU instead of sleeping")
    add("--readahead", action=argparse.BooleanOptionalAction, default=True)
    add("--lock", action=argparse.BooleanOptionalAction, default=False)
    add("--advice", choices=("none", "sequential", "willneed"), default="none")
    add("--digest", action="store_true", help="SHA-256 over all record bytes, in compute time")
    add("--peer-thread", type=int, default=0, metavar="K", help="hand-written prefetch threads")
    add("--peer-index", metavar="F.npy", help="record extents for --peer-thread")
    add("--dataloader-workers", type=int, metavar="K", help="read through torch's DataLoader")
    add(
        "--barrier",
        choices=("none", "epoch", "batch"),
        default="none",
        help="where ranks wait for each other after the common start (with --spawn)",
    )
    add("--barrier-free", dest="barrier", action="store_const", const="none")
    add("--gate-fds", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ranks < 1 or not 0 <= options.rank < options.ranks:
        parser.error(f"rank {options.rank} of {options.ranks} does not exist")
    if options.batch < 1 or options.epochs < 1:
        parser.error("--batch and --epochs must be at least 1")
    if options.peer_thread and not options.peer_index:
        parser.error("--peer-thread needs --peer-index")
    if options.barrier != "none" and not (options.spawn or options.gate_fds):
        parser.error("--barrier needs --spawn")
    return options


def main(argv: Sequence[str]) -> int:
    """Run one rank, or with --spawn all of them."""
    options = parse(argv)
    if options.spawn:
        return spawn(options, argv)
    fds = None
    if options.gate_fds:
        go_read, here_write = (int(fd) for fd in options.gate_fds.split(","))
        fds = (go_read, here_write)
    try:
        print(json.dumps(run_rank(options, Gate(fds))))
    except (OSError, lmdb.Error) as error:
        print(f"job.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
