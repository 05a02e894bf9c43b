# SPDX-License-Identifier: Apache-2.0
"""Where the core of the service meets the world: its clock, its questions, what it decides.

install() puts a World there. recorder.py answers from the real thing and takes notes; replay.py
answers from the notes.
"""

from __future__ import annotations

import base64
import importlib
import os
import time
import zlib
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from uffdprefetch.native import memory_limits as limits
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.orders import announcement, indexer_client
from uffdprefetch.pool import node_pool
from uffdprefetch.protocol import wire
from uffdprefetch.readers import ahead, order_sources
from uffdprefetch.sense import pagetables
from uffdprefetch.state import admission, agent_link, client, files, guard, ledger, notes
from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.guard import Guard
from uffdprefetch.warm import scheduler
from uffdprefetch.warm.consumer import PrefetchRange

#: Of all that the core is made of, also what it imports late.
MODULES = [
    *("state." + name for name in (
        "admission", "agent_link", "client", "files", "ledger", "opening",
    )),
    *("predict." + name for name in (
        "fronts", "randomness", "steps", "storage", "streams", "stride", "survival", "visits",
        "window",
    )),
    *("predict.order." + name for name in ("cursor", "epochs", "progress", "seen", "validator")),
    "native.memory_limits", "warm.token_bucket", "warm.meter", "warm.placement", "warm.scheduler",
    "sense.checkpoint_events", "sense.pagetables",
    "state.reader",
    *("pool." + name for name in (
        "files", "node_pool", "order_eviction", "processes", "residents", "size", "victims",
    )),
    *("orders." + name for name in (
        "announcement", "extents_file", "indexer_client", "indices",
    )),
    *("readers." + name for name in (
        "advice", "ahead", "arbiter", "file_stream", "fixed_windows", "known_order", "next_shard",
        "order_sources", "reader_streams", "stated", "stride_order", "strides", "whole_files",
    )),
    *("service." + name for name in (
        "attachments", "coordinator", "known_orders", "mappings", "pool_bridge", "pooled",
    )),
]  # fmt: skip
#: What looking into a page table costs, of our own CPU time: a call, and each run that it finds.
SCAN_CPU_NS, RUN_CPU_NS = 20_000, 100
#: Of a file that has just been opened: what its storage has said of it.
OPENED = {
    **{name: name for name in (
        "key", "path", "size_bytes",
    )},
    "generation": "opened.generation",
    **{name: f"guard.{name}" for name in ("network", "leased", "no_lease", "writer")},
    **{name: f"call.{name}" for name in (
        "file_system", "method", "chunk_bytes", "unit_bytes", "counts_reads", "ahead_bytes",
    )},
    "method_reason": "call.reason",
}  # fmt: skip

#: read_ahead_kb of the slow bed, of which older tapes do not tell.
BED_AHEAD_BYTES = 128 << 10

Put = Callable[[Any, str, Any], None]


class World(Protocol):
    """What lies outside of the core."""

    def now(self) -> int:
        """CLOCK_MONOTONIC, ns."""

    def cpu(self) -> int:
        """Our own CPU time, ns."""

    def ask(self, question: list[Any], real: Callable[[], Any]) -> Any:
        """An answer, as JSON has it; ``real`` asks the kernel, or another thread."""

    def decide(self, *decision: Any) -> None:
        """The core has decided something."""

    def file(self, fd: int) -> int:
        """The number of the file that a descriptor of the service is of."""

    def opened(self, file: files.FileState) -> None:
        """A file is under management from now on."""

    def mapped(self, file: int, state: Any, touched: Any) -> tuple[Any, Any]:
        """The pool's books of a file of the pool: as the core is to see them."""


def number(client_: client.Client | agent_link.AgentLink) -> int:
    """Of a process, in the order of arrival."""
    return int(client_.__dict__["net_number"])


def install(world: World, put: Put) -> None:
    """Let the core have this world; ``put`` is setattr, or a test's that is undone."""
    for name in MODULES:  # those, too, that are imported late
        importlib.import_module(f"uffdprefetch.{name}")
    put(guard, "time", SimpleNamespace(**{**vars(time), "monotonic_ns": world.now}))
    _questions(world, put)
    _of_files(world, put)
    _of_orders(world, put)
    _of_the_pool(world, put)
    _decisions(world, put)


def _questions(world: World, put: Put) -> None:
    runs, resident = pagetables.runs, uffd.resident_bytes

    def asked_runs(region: client.Region, start: int, end: int) -> list[tuple[int, int]]:
        question = ["runs", number(region.reader.client), region.id, start, end]
        return [(a, n) for a, n in world.ask(question, lambda: runs(region, start, end))]

    def asked_resident(fd: int, offset: int, length: int) -> tuple[int | None, str]:
        question = ["resident", world.file(fd), offset, length]
        there, sensor = world.ask(question, lambda: resident(fd, offset, length))
        return there, sensor

    put(pagetables, "runs", asked_runs)
    put(uffd, "resident_bytes", asked_resident)
    allowed, pool_bytes = limits.allowed_bytes, limits.pool_bytes

    def limit(question: list[Any], real: Callable[[], tuple[int, limits.Limit]]) -> Any:
        def told() -> list[Any]:
            size, binds = real()
            return [size, binds.value]

        size, binds = world.ask(question, told)
        return size, limits.Limit(binds)

    put(limits, "allowed_bytes", lambda budget: limit(
        ["allowed", budget], lambda: allowed(budget)
    ))  # fmt: skip
    put(limits, "pool_bytes", lambda budget, held, kept=0, pressure=None: limit(
        ["pool_bytes", budget, held, kept], lambda: pool_bytes(budget, held, kept)
    ))  # fmt: skip
    descends = client.Client.descends_from
    put(client.Client, "descends_from", lambda self, pid: bool(
        world.ask(["descends", number(self), pid], lambda: descends(self, pid))
    ))  # fmt: skip
    side_by_side = ahead.Ahead.side_by_side
    put(ahead.Ahead, "side_by_side", lambda self: float(
        world.ask(["side_by_side"], lambda: side_by_side(self))
    ))  # fmt: skip
    submit, reap = uffd.Workers.submit, uffd.Workers.reap

    def asked_submit(
        self: uffd.Workers, job: int, fd: int, start: int, length: int, **how: Any
    ) -> bool:
        what = [world.file(fd), start, length, how["pages"], how["method"], how["chunk_bytes"]]
        world.decide("read", *what)
        question = ["submit", job, *what[:3]]
        return bool(world.ask(question, lambda: submit(self, job, fd, start, length, **how)))

    put(uffd.Workers, "submit", asked_submit)
    put(uffd.Workers, "reap", lambda self: [
        uffd.WarmResult(*row)
        for row in world.ask(["reap"], lambda: [list(r) for r in reap(self)])
    ])  # fmt: skip


def _of_files(world: World, put: Put) -> None:
    opens = files.FileState.open

    def opened(what: Any, path: str, takes_lease: bool = True) -> files.FileState:
        found: list[files.FileState] = []

        def real() -> dict[str, Any]:
            found.append(opens(what, path, takes_lease))
            return {name: attrgetter(where)(found[0]) for name, where in OPENED.items()}

        told = world.ask(["open", path], real)
        if not found:
            found.append(_file(what, {"ahead_bytes": BED_AHEAD_BYTES, **told}, world.now()))
        world.opened(found[0])
        return found[0]

    put(files.FileState, "open", staticmethod(opened))
    for name in ("deleted", "in_use"):
        real = getattr(files.FileState, name)

        def asked(self: files.FileState, name: str = name, real: Any = real) -> bool:
            return bool(world.ask([name, world.file(self.opened.fd)], lambda: real(self)))

        put(files.FileState, name, asked)
    unfit = admission.FileTable._unfit
    put(admission.FileTable, "_unfit", lambda self, key, what, path: world.ask(
        ["unfit", key[1]], lambda: unfit(self, key, what, path)
    ))  # fmt: skip
    generation = admission.generation
    put(admission, "generation", lambda fd: world.ask(["generation"], lambda: generation(fd)))
    seen = SimpleNamespace(**vars(os))
    seen.readlink = lambda path: world.ask(["readlink"], lambda: os.readlink(path))
    put(admission, "os", seen)


def _file(what: Any, told: dict[str, Any], now: int) -> files.FileState:
    """One that a tape tells of."""
    parts: dict[str, dict[str, Any]] = {"": {}, "opened": {}, "call": {}, "guard": {}}
    for name, where in OPENED.items():
        part, _, field = where.rpartition(".")
        parts[part][field] = told[name]
    own = parts[""]
    return files.FileState(
        **{**own, "key": tuple(own["key"])}, opened=what._replace(**parts["opened"]),
        call=FileCall(**parts["call"]), guard=Guard(**parts["guard"], opened_ns=now),
    )  # fmt: skip


def _of_orders(world: World, put: Put) -> None:
    count, load = order_sources.Announcements._count, announcement.load
    put(order_sources.Announcements, "_count", lambda self, pid, slot: world.ask(
        ["count", pid, slot], lambda: count(self, pid, slot)
    ))  # fmt: skip

    def asked_load(directory: str, pid: int, n: int) -> Any:
        found: list[Any] = []

        def real() -> dict[str, Any]:
            try:
                found.append(load(directory, pid, n))
            except announcement.AnnounceError as error:
                return {"error": str(error)}
            said = found[0]
            parts = [
                {"what": part.what, "why": part.why, "ahead": part.ahead} for part in said.parts
            ]
            return {"reader": said.reader, "slot": said.slot, "items": said.items, "parts": parts}

        told = world.ask(["load", pid, n], real)
        if "error" in told:
            raise announcement.AnnounceError(told["error"])
        if found:
            return found[0]
        # in older tapes nothing is said of what may have been read ahead
        parts = [SimpleNamespace(**{"ahead": 0, **part}) for part in told.pop("parts")]
        return SimpleNamespace(pid=pid, number=n, parts=parts, remove=lambda: None, **told)

    put(announcement, "load", asked_load)
    for name in ("order", "index"):
        real = getattr(indexer_client.IndexerClient, name)

        def asked_file(
            self: indexer_client.IndexerClient, told: Any, name: str = name, real: Any = real,
        ) -> Any:  # fmt: skip
            path = os.path.join(self.directory, told["name"] if name == "order" else told)

            def text() -> str:
                with open(path, "rb") as file:
                    return base64.b85encode(zlib.compress(file.read(), 9)).decode()

            data = world.ask([name, os.path.basename(path)], text)
            if not os.path.exists(path):
                private = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                with open(private, "wb") as file:
                    file.write(zlib.decompress(base64.b85decode(data)))
            return real(self, told)

        put(indexer_client.IndexerClient, name, asked_file)


def _of_the_pool(world: World, put: Put) -> None:
    real = {
        name: getattr(uffd_pool.Pool, name) for name in (
            "add_file", "books", "join", "submit", "reap", "drain", "used_bytes", "victims_left",
            "forget_file", "park_file", "file_counts", "set_victims", "set_budget", "evictions",
            "say_random",
        )
    }  # fmt: skip
    of_files: dict[
        int, uffd_pool.Books
    ] = {}  # from their beginning on, whenever they are asked for
    huge = node_pool.huge_pages
    put(node_pool, "huge_pages", lambda wanted: tuple(world.ask(["huge"], lambda: huge(wanted))))

    def add_file(self: Any, fd: int, size: int, unit: int = 0, was: Any = None) -> tuple[int, int]:
        made = world.ask(
            ["add_file", world.file(fd)], lambda: real["add_file"](self, fd, size, unit, was)
        )
        of_files[made[0]] = books_of(self, made[0])
        return made[0], made[1] if self._pointer else -1

    def books_of(self: Any, n: int) -> uffd_pool.Books:
        chunks = world.ask(["books", n], lambda: len(real["books"](self, n)[0]))
        empty = np.zeros(chunks, np.uint8), np.zeros(chunks, np.uint32)
        seen = map(np.asarray, real["books"](self, n)[:2]) if self._pointer else empty
        # nothing is kept for others, and nothing was evicted before
        small = np.zeros((2, chunks), np.uint8)
        arrays = *world.mapped(n, *seen), *small, np.zeros(chunks, np.uint32)
        return uffd_pool.Books(*(each.data for each in arrays))

    def books(self: Any, n: int) -> uffd_pool.Books:
        return of_files[n]

    def submit(self: Any, job: int, n: int, offset: int, length: int, **more: Any) -> bool:
        world.decide("fill", n, offset, length)
        return bool(world.ask(
            ["pool_submit", job, n, offset, length],
            lambda: real["submit"](self, job, n, offset, length, **more),
        ))  # fmt: skip

    def reap(self: Any) -> list[uffd.WarmResult]:
        rows = world.ask(["pool_reap"], lambda: [list(r) for r in real["reap"](self)])
        return [uffd.WarmResult(*row) for row in rows]

    def drain(self: Any) -> list[uffd_pool.PoolEvent]:
        return [
            uffd_pool.PoolEvent(*row)
            for row in world.ask(["drain"], lambda: [list(e) for e in real["drain"](self)])
        ]

    def set_victims(self: Any, victims: Any) -> None:
        rows = list(victims)
        world.decide("victims", rows)
        if self._pointer:
            real["set_victims"](self, rows)

    def set_budget(self: Any, size: int, keep_bytes: int) -> None:
        world.decide("budget", size)
        if self._pointer:
            real["set_budget"](self, size, keep_bytes)

    def say_random(self: Any, n: int, so: bool) -> None:
        if self._pointer:
            real["say_random"](self, n, so)

    for each in (add_file, books, submit, reap, drain, set_victims, set_budget, say_random):
        put(uffd_pool.Pool, each.__name__, each)
    for name in ("used_bytes", "victims_left", "forget_file", "park_file", "evictions"):

        def asked(self: Any, *args: Any, name: str = name) -> Any:
            return world.ask([name, *args], lambda: real[name](self, *args))

        put(uffd_pool.Pool, name, asked)
    put(uffd_pool.Pool, "file_counts", lambda self, n: uffd_pool.FileCounts(
        *world.ask(["file_counts", n], lambda: list(real["file_counts"](self, n)))
    ))  # fmt: skip
    put(uffd_pool.Pool, "join", lambda self, fd, pid, ring: world.ask(
        ["join", pid], lambda: real["join"](self, fd, pid, ring)
    ))  # fmt: skip


def _decisions(world: World, put: Put) -> None:
    want, send, degrade = scheduler.Scheduler.want, agent_link.AgentLink.send, ledger.Ledger.degrade
    ask = indexer_client.IndexerClient.ask

    def wanted(self: scheduler.Scheduler, by: Any, what: PrefetchRange) -> int:
        world.decide(
            "want", world.file(what.file.opened.fd), by.rank, what.start, what.end, what.need,
            what.priority.name, what.whole, what.pooled,
        )  # fmt: skip
        return want(self, by, what)

    def sent(self: agent_link.AgentLink, message: bytes, fds: list[int] | None = None) -> None:
        world.decide("tell", number(self), *told(message))
        send(self, message, fds)

    def degraded(self: ledger.Ledger, text: str, path: str = "", is_mendable: bool = True) -> None:
        note = notes.Note(text, path, is_mendable)
        world.decide("finding", note.line)
        degrade(self, text, path, is_mendable)

    def asks(self: indexer_client.IndexerClient, question: dict[str, Any], done: Any) -> None:
        world.decide("ask", question)
        ask(self, question, done)

    put(scheduler.Scheduler, "want", wanted)
    put(agent_link.AgentLink, "send", sent)
    put(ledger.Ledger, "degrade", degraded)
    put(indexer_client.IndexerClient, "ask", asks)


def told(message: bytes) -> list[Any]:
    """A message to an agent: its kind, whose mapping, how, which pages."""
    kind, body = wire.unpack(message)
    if kind == wire.Type.FILE:
        region, mode, n, _, _, _, *pages = wire.FILE.unpack_from(body)
        return [kind.name, region, wire.ServingMode(mode).name, pages[:n]]
    if kind in (wire.Type.REARM, wire.Type.DETACH):
        _, region, n, _, *pages = wire.COMMAND.unpack_from(body)
        return [kind.name, region, pages[:n]]
    return [kind.name]
