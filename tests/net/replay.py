# SPDX-License-Identifier: Apache-2.0
"""Plays a tape to the core: `python -m tests.net.replay [NAME...] [--write]`.

The core gets the tape's inputs one after the other under the tape's clock, and the tape's answers.
Where it asks what nobody asked when the tape was made, or reads what was not read then, it has an
answer of what the tape says of this time and before; such questions are counted.

Prints a line of JSON for each: inputs, decisions, questions without an answer, and the first
decision that is not the one of tapes/NAME.decisions.gz. --write makes that file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from tests.net import seams, tape
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.orders import indexer_client
from uffdprefetch.pool.node_pool import NodePool
from uffdprefetch.protocol import wire
from uffdprefetch.sense import pagetables
from uffdprefetch.service.door import Coordinator, build
from uffdprefetch.service.known_orders import OrderService
from uffdprefetch.state import agent_link, client, copies, files, processes
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened

#: A read that the tape does not know takes as long as on the bed of the tapes (300 MB/s, 1 ms).
UNKNOWN_NS, UNKNOWN_NS_A_BYTE = 1_000_000, 1e9 / 300e6


class Replay:
    """A World that is a tape."""

    def __init__(self) -> None:
        self._now = 0
        self._cpu = 0
        self.item = 0
        self.decisions: list[Any] = []
        self.unanswered = 0
        self._answers: dict[str, deque[Any]] = {}
        self._last: dict[str, Any] = {}  # by what was asked
        self._mapped: dict[tuple[int, int], IntervalSet] = {}
        self._files: list[files.FileState] = []
        self._books: dict[int, tuple[Any, Any]] = {}
        self._ids: dict[str, list[tuple[int, int]]] = {}  # what is read -> [(our id, since when)]
        self._results: dict[int, str] = {}  # the tape's id -> what is read

    def begin(self, now: int, answers: list[Any]) -> None:
        """The next input."""
        self.item += 1
        self._now = now
        self._answers = {}
        for question, answer in answers:
            if question[0] == "changed":
                rows, state, touched = answer
                books = self._books[question[1]]
                books[0][rows], books[1][rows] = state, touched
                continue
            self._answers.setdefault(json.dumps(question), deque()).append(answer)
            self._last[question[0]] = answer
            if question[0] == "runs":
                self._note_mapped(question, answer)
            if question[0] in ("submit", "pool_submit"):
                self._results[question[1]] = json.dumps(question[2:])

    def now(self) -> int:
        return self._now

    def cpu(self) -> int:
        return self._cpu

    def ask(self, question: list[Any], real: Callable[[], Any]) -> Any:
        if question[0] in ("submit", "pool_submit"):
            return self._submit(question)
        if question[0] in ("reap", "pool_reap"):
            return self._reap(question)
        key = json.dumps(question)
        waiting = self._answers.get(key)
        if waiting:
            answer = waiting.popleft()
        else:
            answer = self._guess(question)
            # a look that finds nothing is on no tape
            self.unanswered += question[0] != "drain" and answer != []
        if question[0] == "runs":
            self._cpu += seams.SCAN_CPU_NS + seams.RUN_CPU_NS * len(answer)
        return answer

    def _note_mapped(self, question: list[Any], answer: list[Any]) -> None:
        _, process, region, start, end = question
        if len(answer) >= uffd.RUNS_AT_ONCE:
            end = sum(answer[-1])
        mapped = self._mapped.setdefault((process, region), IntervalSet())
        if start < end:
            mapped.replace(start, end, [(a, a + n) for a, n in answer])

    def _guess(self, question: list[Any]) -> Any:
        kind = question[0]
        if kind == "runs":
            _, process, region, start, end = question
            mapped = self._mapped.get((process, region), IntervalSet())
            gaps, found, at = mapped.missing(start, end), [], start
            for a, b in [*gaps, (end, end)]:
                if at < a:
                    found.append([at, a - at])
                at = b
            return found[: uffd.RUNS_AT_ONCE]
        if kind == "drain":
            return []
        if kind in self._last:
            return self._last[kind]
        raise LookupError(f"the tape has no answer to {question}, nor had it one before")

    def _submit(self, question: list[Any]) -> bool:
        what = json.dumps(question[2:])
        self._ids.setdefault(what, []).append((question[1], self._now))
        waiting = self._answers.get(json.dumps(question))
        self.unanswered += not waiting
        return bool(waiting.popleft()) if waiting else True

    def _reap(self, question: list[Any]) -> list[Any]:
        """The tape's results, with our numbers; and what only we have read, when it is time."""
        waiting = self._answers.get(json.dumps(question))
        rows = []
        for row in waiting.popleft() if waiting else []:
            ours = self._ids.get(self._results.get(row[0], ""))
            if ours:
                rows.append([ours.pop(0)[0], *row[1:]])
        if question[0] != "reap":
            return rows
        known = set(self._results.values())
        for what, ours in self._ids.items():
            if not ours or what in known:
                continue
            length = json.loads(what)[2]
            for one in list(ours):
                if self._now - one[1] >= UNKNOWN_NS + length * UNKNOWN_NS_A_BYTE:
                    ours.remove(one)
                    rows.append([
                        one[0], one[1], one[1], self._now, 0, length, 0, uffd.WARM_PREAD, length, 0,
                    ])  # fmt: skip
        return rows

    def decide(self, *decision: Any) -> None:
        self.decisions.append(json.loads(json.dumps([self.item, *decision])))

    def file(self, fd: int) -> int:
        return next((i for i, f in enumerate(self._files) if fd in f.opened[:3]), -1)

    def opened(self, file: files.FileState) -> None:
        self._files.append(file)

    def of(self, number: int) -> files.FileState:
        return self._files[number]

    def mapped(self, file: int, state: Any, touched: Any) -> tuple[Any, Any]:
        self._books[file] = state, touched
        return self._books[file]


class Workers(uffd.Workers):
    """Threads that are none: what is submitted the tape has read."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        """See uffd.Workers."""


class Core:
    """The part of a service that decides, and nothing of it that waits or reads."""

    def __init__(self, config: Config, world: Replay, directory: str) -> None:
        self.config, self.world, self._directory = config, world, directory
        self.ledger = Ledger()
        self.clock = Clock(world.now, world.cpu)
        self.pool: NodePool | None = None
        self.coordinator: Coordinator | None = None
        self.order_service: OrderService | None = None
        self.clients: dict[int, client.Client] = {}

    def start(self) -> Coordinator:
        """As Service.__init__ does."""
        opener: Any = SimpleNamespace(
            open=lambda fd, *_, **__: os.close(fd), run=lambda work, then: False, step=lambda: None
        )
        core = build(
            self.config, Workers(), self.ledger, opener=opener, clock=self.clock, pool=self.pool
        )
        self.scheduler = core.scheduler
        if self.config.policy != "none":
            poll: Any = None
            windows, clients = core.windows, core.mappings.clients
            self.order_service = OrderService(
                f"{self._directory}/socket", self.config, poll, core.scheduler, self.ledger,
                self.clock, core.arbiter, clients, windows.room_bytes,
                lambda pooled: windows.reader_bytes(pooled, len(clients)), None,
            )  # fmt: skip
            core.use_known_orders(self.order_service.known_orders)
        return core

    def take(self, kind: str, args: list[Any]) -> None:
        """One input of the tape."""
        if kind == "pool":
            self.pool = NodePool(self.config, -1, self.ledger, self.clock)
            return
        if self.coordinator is None:
            self.coordinator = self.start()
        getattr(self, f"_{kind}", self._other)(kind, *args)

    def _other(self, kind: str, *args: Any) -> None:
        getattr(self.coordinator, kind)(*args)

    # ---- processes and files --------------------------------------------------------------------

    def _hello(self, kind: str, number: int, hello: list[Any], pid: int) -> None:
        assert self.coordinator is not None
        sock: Any = SimpleNamespace(
            fileno=lambda: number, send=lambda *_: 0, sendmsg=lambda *_: 0, close=lambda: None
        )
        one = client.Client(sock, wire.Hello(*hello), os.getpid())
        one.__dict__["net_number"], one.pid = number, pid
        one.agent.__dict__["net_number"] = number
        os.close(one.ring.fd)
        self.clients[number] = self.coordinator.mappings.clients[number] = one
        self.ledger.processes.hello(one)

    def _close(self, kind: str, number: int) -> None:
        assert self.coordinator is not None
        one = self.clients.pop(number)
        del self.coordinator.mappings.clients[number]
        one.close()

    def _opens(self, size_bytes: int) -> int:
        path = f"{self._directory}/{size_bytes}"
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        os.truncate(path, size_bytes)
        return fd

    def _attach(self, kind: str, number: int, a: list[Any], with_fd: bool) -> None:
        assert self.coordinator is not None
        one = wire.Attach(*a)
        fd = self._opens(one.size_bytes) if with_fd else None
        self.coordinator.attachments.attach(self.clients[number], one, fd)

    def _opened(self, kind: str, number: int, a: list[Any], told: Any) -> None:
        assert self.coordinator is not None
        one, found = wire.Attach(*a), None
        if isinstance(told, int):
            found = OSError(told, os.strerror(told))
        else:
            fds = [self._opens(one.size_bytes) for _ in range(3)]
            status: Any = SimpleNamespace(**told[0])
            found = Opened(*fds, status, *told[1:])
        self.coordinator.attachments._opened(self.clients[number], one, found)

    def _detached(self, kind: str, number: int, region: int) -> None:
        assert self.coordinator is not None
        self.coordinator.mappings.detached(self.clients[number], region)

    def _laid(self, kind: str, number: int, ack: list[Any]) -> None:
        assert self.coordinator is not None
        self.coordinator.attachments.laid(self.clients[number], wire.Ack(*ack))

    def _bypassed(self, kind: str, number: int, why: int) -> None:
        assert self.coordinator is not None
        self.coordinator.mappings.bypassed(self.clients[number], why)

    def _give_up(self, kind: str, file: int, why: str) -> None:
        assert self.coordinator is not None
        self.coordinator.mappings.give_up(self.world.of(file), why)

    def _account_all(self, kind: str, number: int) -> None:
        pagetables.note_all_used(self.clients[number])

    def _files(self, kind: str) -> None:
        assert self.coordinator is not None
        self.coordinator.table.look(self.world.now())

    def _ended(self, kind: str, pid: int) -> None:
        assert self.coordinator is not None
        self.coordinator.table.ended(pid)

    def _left(self, kind: str, number: int) -> None:
        assert self.coordinator is not None
        self.coordinator.mappings.left(self.clients[number])

    def _join(self, kind: str, number: int) -> None:
        assert self.pool is not None
        self.pool.processes.join(self.clients[number], -1)

    def _leave(self, kind: str, number: int) -> None:
        assert self.pool is not None
        self.pool.processes.leave(self.clients[number])

    def _pool_housekeep(self, kind: str) -> None:
        assert self.pool is not None
        self.pool.housekeep()

    # ---- turns ----------------------------------------------------------------------------------

    def _on_events(self, kind: str, number: int, events: list[Any]) -> None:
        assert self.coordinator is not None
        self.coordinator.events.take(self.clients[number], [uffd.Event(*event) for event in events])

    def _on_pool_events(self, kind: str) -> None:
        assert self.coordinator is not None
        if self.coordinator.bridge is not None:
            self.coordinator.bridge.take_events()

    def _look(self, kind: str) -> None:
        assert self.coordinator is not None
        self.coordinator.look(self.world.now())

    def _evictions(self, kind: str) -> None:
        assert self.coordinator is not None
        self.coordinator.plan_evictions(self.world.now())

    def _refresh_all(self, kind: str, allowed_bytes: int) -> None:
        assert self.coordinator is not None
        self.coordinator.windows.allowed_bytes = allowed_bytes
        self.coordinator.refresh_all()

    def _reap(self, kind: str) -> None:
        self.scheduler.reap()

    def _pump(self, kind: str) -> None:
        self.scheduler.pump(self.world.now())

    # ---- orders ---------------------------------------------------------------------------------

    def _announced(self, kind: str, *who: int) -> None:
        assert self.order_service is not None
        self.order_service.announcements.announced(*who)

    def _announcements(self, kind: str) -> None:
        assert self.order_service is not None
        self.order_service.announcements.look(self.world.now())

    def _forgotten(self, kind: str, pid: int) -> None:
        assert self.order_service is not None
        self.order_service.announcements.forget_process(pid)

    def _answer(self, kind: str, line: str) -> None:
        assert self.order_service is not None
        self.order_service.resolver._on_answer(line.encode())


def without_kernel(put: seams.Put) -> None:
    """What a replay never does: start a helper, open another process, end the pool's threads."""
    put(processes, "read", lambda pid: None)
    put(processes, "run_delay_ns", lambda pid: 0)
    put(agent_link, "rights", lambda pid: None)
    put(indexer_client.IndexerClient, "start", lambda self: setattr(self, "_starts", 1) or True)
    put(indexer_client.IndexerClient, "ready", lambda self: None)
    put(indexer_client.IndexerClient, "fd", property(lambda self: 0 if self._starts else -1))
    put(copies.Copies, "fds", lambda self: (-1, -1))

    def no_pool(self: Any, *args: Any, **how: Any) -> None:
        self._pointer = None

    put(uffd_pool.Pool, "__init__", no_pool)
    put(uffd_pool.Pool, "is_gone", lambda self, slot: True)
    for name in ("leave", "orphan", "map", "unmap", "hush_file", "drop_file", "unpark_file"):
        put(uffd_pool.Pool, name, lambda self, *args: None)
    put(os, "close", _close)


_real_close = os.close


def _close(fd: int) -> None:
    """Descriptors of the tape are none of ours."""
    try:
        _real_close(fd)
    except OSError:
        pass


@contextlib.contextmanager
def putting() -> Iterator[seams.Put]:
    """setattr whose doings are undone at the end."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            before = vars(owner)[name]
            setattr(owner, name, value)
            undo.callback(setattr, owner, name, before)

        yield put


def replay(name: str) -> Replay:
    """Play a tape: what the core decided, in ``decisions``."""
    lines = tape.load(tape.TAPES / f"{name}.tape.gz")
    config = Config.from_json(next(lines)["config"])
    world = Replay()
    with tempfile.TemporaryDirectory() as directory, putting() as put:
        seams.install(world, put)
        without_kernel(put)
        core = Core(config, world, directory)
        for kind, now, args, answers in lines:
            world.begin(now, answers)
            core.take(kind, args)
    return world


def compare(name: str, world: Replay) -> list[Any] | None:
    """The first decision that differs, [as it was, as it is]; None when all are the same."""
    before = tape.load(tape.TAPES / f"{name}.decisions.gz")
    for was, now in zip_longest(before, world.decisions):
        if was != now:
            return [was, now]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of tapes; all of them")
    parser.add_argument("--write", action="store_true", help="these are the decisions from now on")
    args = parser.parse_args()
    for name in args.names or tape.scenarios():
        began = time.perf_counter()
        world = replay(name)
        if args.write:
            tape.dump(tape.TAPES / f"{name}.decisions.gz", world.decisions)
        kinds = Counter(kind for _, kind, *_ in world.decisions)
        print(json.dumps({
            "name": name, "inputs": world.item, "decisions": len(world.decisions), "kinds": kinds,
            "unanswered": world.unanswered, "differs": compare(name, world),
            "seconds": round(time.perf_counter() - began, 3),
        }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
