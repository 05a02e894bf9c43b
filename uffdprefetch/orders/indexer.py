# SPDX-License-Identifier: Apache-2.0
"""``python -m uffdprefetch.orders.indexer DIRECTORY [PLAN]``: the service's helper process.

The service has one thread and never waits for storage; indexing a large file and sorting a long
order take seconds. This process resolves orders to bytes: requests are lines of JSON on standard
input, answers go to standard output, orders as files (orders/extents_file.py) into DIRECTORY. Each
request has an ``id``, which its answer repeats; answers come in any order. It ends with its
standard input.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.oom import goes_first
from uffdprefetch.formats import cache, stored
from uffdprefetch.formats.reader import FileReader
from uffdprefetch.orders import (
    announcement,
    extents_file,
    learned_plan,
    paths_file,
    plan_file,
    stated,
)
from uffdprefetch.orders.file_order import PathOrder, PathTable
from uffdprefetch.orders.mapped_files import ResolveRequest
from uffdprefetch.orders.opens import JobOpens
from uffdprefetch.orders.provisional import provisional_order
from uffdprefetch.orders.samples import SampleResolver
from uffdprefetch.predict.order.extents import OrderExtents
from uffdprefetch.predict.order.order import Order

THREADS = 4
#: Delay before a provisional order is made: an index in the node's cache is there sooner.
GUESS_SECONDS = 0.1

OnProvisional = Callable[[dict[str, Any]], None]


class Indexer:
    """Answers requests."""

    def __init__(self, directory: str, plan: str | None) -> None:
        self._directory = directory
        self._plan_path = plan
        self._plan: plan_file.ParsedPlan | None = None
        self._plan_lock = threading.Lock()
        self._samples = SampleResolver()
        self._count = 0
        self._count_lock = threading.Lock()
        self._tables: weakref.WeakKeyDictionary[PathTable, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def answer(self, request: dict[str, Any], on_provisional: OnProvisional) -> dict[str, Any]:
        """A request's answer; its ``error`` is a line for the user. ``on_provisional`` is called
        with a provisional answer, if there is one before."""
        try:
            if request["do"] == "plan":
                return self._of_plan(self._load(), request, on_provisional)
            if request["do"] == "learned":
                return self._of_learned(request, on_provisional)
            if request["do"] == "plan_paths":
                return self._paths_of_plan(request)
            if request["do"] == "index":
                return self._index(request)
            if request["do"] == "prepare":
                cache.open_cached(request["path"])
                return {}
            return self._of_announced(request)
        except UffdPrefetchError as error:
            return {"error": error.message}
        except announcement.AnnounceError as error:
            return {"error": f"announcement {request.get('number')}: {error}"}
        except (OSError, ValueError, MemoryError) as error:
            return {"error": f"{request['do']}: {type(error).__name__}: {error}"}

    # ---- --plan ---------------------------------------------------------------------------------

    def _of_learned(self, request: dict[str, Any], on_provisional: OnProvisional) -> dict[str, Any]:
        """The same, of a plan of `wrap --learn`, whose path is told."""
        found = learned_plan.load(request["plan"])
        found.check(request["key"][2])
        return self._of_plan(found.plan, request, on_provisional)

    def _of_plan(
        self, plan: plan_file.ParsedPlan, request: dict[str, Any], on_provisional: OnProvisional
    ) -> dict[str, Any]:
        """The order of a rank in an epoch of a file; null when the plan does not say."""
        path, rank, epoch = request["path"], request["rank"], request["epoch"]
        device, inode, *_ = key = tuple(request["key"])
        file = plan.file(path, (device, inode)) or plan.file(path)
        spec = None if file is None else file.spec(rank, epoch)
        if file is None or spec is None:
            return {"order": None}
        _assert_same(path, key)
        guess = threading.Event()
        if isinstance(spec, stated.RecordOrder) and file.format in (None, "lmdb"):
            guess = self._guess(path, spec, on_provisional)
        with self._plan_lock:  # it keeps one index at a time
            order = plan.resolve(file, spec, path)
        guess.set()
        _assert_same(path, key)
        return {"order": self._store(order, path)}

    def _paths_of_plan(self, request: dict[str, Any]) -> dict[str, Any]:
        """The order of whole files of a rank in an epoch; null when the plan does not say."""
        paths = self._load().paths
        order = None if paths is None else paths.order(request["rank"], request["epoch"])
        return {"file_order": None if order is None else self._store_paths(order, True)}

    def prepare(self) -> None:
        """Index the plan's files ahead of requests."""
        with contextlib.suppress(UffdPrefetchError, OSError, ValueError, MemoryError):
            for file in self._load().files:
                for path in file.data_files():
                    file.index(path)

    def _load(self) -> plan_file.ParsedPlan:
        assert self._plan_path is not None
        with self._plan_lock:
            if self._plan is None:
                self._plan = plan_file.load(self._plan_path)
            return self._plan

    def _guess(
        self, path: str, spec: stated.RecordOrder, on_provisional: OnProvisional
    ) -> threading.Event:
        """Make a provisional order beside the index, unless the event returned is set before."""
        known = threading.Event()

        def guess() -> None:
            try:
                with FileReader(path) as reader:
                    found = provisional_order(reader, spec.source.array())
            except (OSError, ValueError, UffdPrefetchError):
                return  # the index says why
            if found is not None and not known.is_set():
                on_provisional({"order": self._store(found.order, path), "early": True})

        def later() -> None:
            if not known.wait(GUESS_SECONDS):
                guess()

        threading.Thread(target=later, daemon=True).start()
        return known

    # ---- announcements --------------------------------------------------------------------------

    def _of_announced(self, request: dict[str, Any]) -> dict[str, Any]:
        """The orders of what was announced, in the files that the process maps.

        ``orders``: [{"part", "file": its index in the request, "order", "how"}]; ``file_orders``:
        [{"part", "order": a layout of orders/paths_file.py, "how"}], of whole files; ``watch``:
        directories in which opens have to be seen to prove one; ``again``: ask
        again when more has been read or mapped; ``more``: and there are more orders when another
        file is mapped; ``findings``: lines for the user.
        """
        announced = announcement.load(self._directory, request["pid"], request["number"])
        if request["first"]:
            self._samples.take_lists(announced)
        wanted = ResolveRequest(
            request["files"], request["said"], request["done"], request["process"],
            JobOpens.of_request(request.get("opens")),
        )  # fmt: skip
        return self._samples.orders(announced, wanted, self._store, self._store_paths)

    # ---- an index -------------------------------------------------------------------------------

    def _index(self, request: dict[str, Any]) -> dict[str, Any]:
        """The index of a file, as a file that the service maps (formats/stored.py)."""
        index = cache.open_cached(request["path"])
        name = f"{self._number()}.idx"
        path = os.path.join(self._directory, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            stored.write(fd, {"name": name}, index)
        finally:
            os.close(fd)
        return {"index": name}

    # ---- what is given ---------------------------------------------------------------------------

    def _number(self) -> int:
        with self._count_lock:
            self._count += 1
            return self._count

    def _store(self, order: Order, path: str) -> dict[str, Any]:
        """An order of a file, as the service maps it."""
        units = OrderExtents.of(order, os.stat(path).st_size, mmap.PAGESIZE)
        return extents_file.write(os.path.join(self._directory, f"{self._number()}.units"), units)

    def _store_paths(self, order: PathOrder, kept: bool) -> dict[str, Any]:
        """An order of files, as the service maps it; its paths are written once where the table is
        ``kept`` for other epochs, and removed with it."""
        with self._count_lock:
            table = self._tables.get(order.table)
        if table is None:
            path = os.path.join(self._directory, f"{self._number()}.paths")
            table = paths_file.write_table(path, order.table, kept)
            if kept:
                weakref.finalize(order.table, _remove, path)
                with self._count_lock:
                    self._tables[order.table] = table
        name = f"{self._number()}.order"
        return paths_file.write(os.path.join(self._directory, name), order, table)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _assert_same(path: str, key: tuple[int, ...]) -> None:
    """Raise UffdPrefetchError (exit 2) unless this is the file that the reader maps: its (device,
    inode, size, mtime_ns)."""
    status = os.stat(path)
    if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != key:
        raise usage_error(
            f"{path}: changed or replaced during the run: its orders are not followed any more"
        )


def main(arguments: list[str]) -> int:
    """Serve requests until standard input ends."""
    goes_first()
    indexer = Indexer(arguments[0], arguments[1] if len(arguments) > 1 else None)
    writing = threading.Lock()

    def serve(request: dict[str, Any]) -> None:
        def write(answer: dict[str, Any]) -> None:
            with writing:
                sys.stdout.write(json.dumps({"id": request["id"], **answer}) + "\n")
                sys.stdout.flush()

        try:
            answer = indexer.answer(request, write)
        except Exception as error:  # a fault of ours: this request's loss
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answer)

    with ThreadPoolExecutor(THREADS) as threads:
        if len(arguments) > 1:
            threads.submit(indexer.prepare)
        for line in sys.stdin:
            threads.submit(serve, json.loads(line))
        threads.shutdown(wait=False, cancel_futures=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
