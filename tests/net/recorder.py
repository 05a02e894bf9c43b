# SPDX-License-Identifier: Apache-2.0
"""Takes notes in a real service: every input of its core, and what the world answered meanwhile.

While an input is taken the clock stands still, and the pool's books are those of its beginning.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import time
from collections.abc import Callable
from typing import Any

from tests.net import seams
from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.config import Config
from uffdprefetch.orders import indexer_client
from uffdprefetch.pool import node_pool, processes
from uffdprefetch.readers import order_sources
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.checkpoint_events import CheckpointEvents
from uffdprefetch.service.attachments import Attachments
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.service.pool_bridge import PoolBridge
from uffdprefetch.service.serve import Service
from uffdprefetch.state import admission, client, files, job_processes
from uffdprefetch.state.opening import Opened
from uffdprefetch.warm import scheduler

#: Inputs that are nothing where nothing was asked, or told, or decided.
QUIET = {"on_events", "on_pool_events", "reap", "announcements", "files", "evictions"}


class Recorder:
    """A World that is the real one. One thread (the service's) calls everything here."""

    def __init__(self, path: str) -> None:
        self._path = f"{path}.{os.getpid()}"  # who is not elected ends at once
        self._out = gzip.open(self._path, "wt", 6)
        self._written = 0
        self._decisions: list[Any] = []
        self.depth = 0
        self._now = 0
        self._cpu = 0
        self._item: list[Any] = []
        self._decided = False
        self._clients = 0
        self._files: list[files.FileState] = []
        self._books: dict[int, tuple[Any, Any, Any, Any]] = {}

    def write(self, line: Any) -> None:
        self._out.write(json.dumps(line, separators=(",", ":"), default=list) + "\n")
        self._written += 1

    def close(self) -> None:
        self._out.close()
        with gzip.open(f"{self._path}.live", "wt", 6) as file:
            for line in self._decisions:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    # ---- inputs ---------------------------------------------------------------------------------

    def begin(self, kind: str, arguments: list[Any]) -> None:
        """An input comes."""
        self.depth = 1
        self._now = time.monotonic_ns()
        self._item, self._decided = [kind, self._now, arguments, []], False
        for number, (state, touched, state_now, touched_now) in self._books.items():
            rows = ((state != state_now) | (touched != touched_now)).nonzero()[0]
            if len(rows):
                state[rows], touched[rows] = state_now[rows], touched_now[rows]
                delta = rows.tolist(), state[rows].tolist(), touched[rows].tolist()
                self._item[3].append([["changed", number], delta])

    def end(self) -> None:
        """It has been taken."""
        self.depth = 0
        kind, _, arguments, answers = self._item
        told = any(answer for question, answer in answers if question[0] != "changed")
        changed = any(question[0] == "changed" for question, _ in answers)
        if (
            kind not in QUIET
            or told
            or changed
            or self._decided
            or any(isinstance(each, list) and each for each in arguments)
        ):
            self.write(self._item)

    def number(self, one: client.Client) -> int:
        """Give a process its number."""
        number = int(one.__dict__.setdefault("net_number", self._next_client()))
        one.agent.__dict__["net_number"] = number
        return number

    def _next_client(self) -> int:
        self._clients += 1
        return self._clients

    # ---- the world ------------------------------------------------------------------------------

    def now(self) -> int:
        return self._now if self.depth else time.monotonic_ns()

    def cpu(self) -> int:
        return self._cpu

    def ask(self, question: list[Any], real: Callable[[], Any]) -> Any:
        answer = real()
        if question[0] == "runs":
            self._cpu += seams.SCAN_CPU_NS + seams.RUN_CPU_NS * len(answer)
        if self.depth:
            self._item[3].append([question, answer])
        return answer

    def decide(self, *decision: Any) -> None:
        if self.depth:
            self._decided = True
            self._decisions.append([self._written, *decision])

    def file(self, fd: int) -> int:
        return next((i for i, f in enumerate(self._files) if fd in f.opened[:3]), -1)

    def opened(self, file: files.FileState) -> None:
        self._files.append(file)

    def mapped(self, file: int, state: Any, touched: Any) -> tuple[Any, Any]:
        self._books[file] = state.copy(), touched.copy(), state, touched
        return self._books[file][:2]


def of_opened(opened: Opened | OSError) -> Any:
    """What was opened, for replay.py."""
    if isinstance(opened, OSError):
        return opened.errno
    st = opened.status
    status = {
        name: getattr(st, name)
        for name in ("st_dev", "st_ino", "st_size", "st_mode", "st_mtime_ns", "st_ctime_ns")
    }
    return [status, opened.generation, opened.f_type]


def install(path: str) -> None:
    """Record from now on, until the service ends."""
    world = Recorder(path)
    atexit.register(world.close)
    seams.install(world, setattr)
    CLOCK.now_ns, CLOCK.cpu_ns = world.now, world.cpu

    def item(owner: Any, name: str, kind: str, arguments: Callable[..., list[Any]]) -> None:
        original = getattr(owner, name)

        def taken(self: Any, *args: Any) -> Any:
            if world.depth:
                return original(self, *args)
            world.begin(kind, arguments(self, *args))
            try:
                if kind in ("look", "pump", "files", "announcements", "evictions"):  # with the time
                    args = (world.now(),)
                return original(self, *args)
            finally:
                world.end()

        setattr(owner, name, taken)

    def attach(a: Any) -> list[Any]:
        return list(a)

    service_init = Service.__init__

    def begun(self: Service, listener: Any, lock: int, config: Config, *rest: Any) -> None:
        world.write({"config": config.to_json()})
        service_init(self, listener, lock, config, *rest)

    Service.__init__ = begun  # type: ignore[method-assign]
    core, number = Coordinator, seams.number
    item(node_pool.NodePool, "__init__", "pool", lambda self, *_: [])
    item(
        job_processes.JobProcesses,
        "hello",
        "hello",
        lambda self, c, met=None: [world.number(c), list(c.hello), c.pid],
    )
    offered, managed = Attachments, ManagedMappings
    item(offered, "attach", "attach", lambda self, c, a, fd: [number(c), attach(a), fd is not None])
    item(offered, "_opened", "opened", lambda self, c, a, o: [number(c), attach(a), of_opened(o)])
    item(managed, "detached", "detached", lambda self, c, region: [number(c), region])
    item(offered, "laid", "laid", lambda self, c, ack: [number(c), list(ack)])
    item(managed, "bypassed", "bypassed", lambda self, c, why: [number(c), why])
    item(managed, "give_up", "give_up", lambda self, file, why: [world.file(file.opened.fd), why])
    item(pagetables, "note_all_used", "account_all", lambda c: [number(c)])
    item(PoolBridge, "take_events", "on_pool_events", lambda self: [])
    item(core, "look", "look", lambda self, now: [])
    item(core, "plan", "plan", lambda self: [])
    item(core, "plan_evictions", "evictions", lambda self, now: [])
    item(core, "refresh_all", "refresh_all", lambda self: [self.windows.allowed_bytes])
    item(
        CheckpointEvents, "take", "on_events",
        lambda self, c, e: [number(c), [list(x) for x in e]],
    )  # fmt: skip
    item(client.Client, "close", "close", lambda self: [number(self)])
    item(scheduler.Scheduler, "reap", "reap", lambda self: [])
    item(scheduler.Scheduler, "pump", "pump", lambda self, now: [])
    item(admission.FileTable, "look", "files", lambda self, now: [])
    item(admission.FileTable, "ended", "ended", lambda self, pid: [pid])
    item(managed, "left", "left", lambda self, c: [number(c)])
    item(processes.PoolProcesses, "join", "join", lambda self, c, fd: [number(c)])
    item(processes.PoolProcesses, "leave", "leave", lambda self, c: [number(c)])
    item(node_pool.NodePool, "housekeep", "pool_housekeep", lambda self: [])
    item(order_sources.Announcements, "announced", "announced", lambda self, *who: list(who))
    item(order_sources.Announcements, "look", "announcements", lambda self, now: [])
    item(order_sources.Announcements, "forget_process", "forgotten", lambda self, pid: [pid])
    item(indexer_client.IndexerClient, "_on_answer", "answer", lambda self, line: [line.decode()])
