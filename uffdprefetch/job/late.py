# SPDX-License-Identifier: Apache-2.0
"""Publishes key lists that a dataset reads on first use, from the worker that has them."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

from . import channel, datasets, samplers
from .tables import IdentityTable

_fetchers = IdentityTable()  # that have fetched before


def around_fetch(guarded: Callable[..., None]) -> Callable[[Any], Any]:
    """The wrapper of _MapDatasetFetcher.fetch; ``guarded`` calls and lets no error out."""

    def around(original: Any) -> Any:
        def fetch(self: Any, index: Any) -> Any:
            if _fetchers.get(self) is not None:
                return original(self, index)
            late_lists = _LateLists()
            guarded(_fetchers.set, self, True)
            guarded(late_lists.before, self.dataset)
            data = original(self, index)
            guarded(late_lists.after, self.dataset, index)
            return data

        return fetch

    return around


class _LateLists:
    """Finds the lists that a process's first fetch has brought. Of a loader's workers, which all
    have the same, worker 0 does; of several epochs' workers the first epoch's publishes."""

    def __init__(self) -> None:
        self._known: list[datasets.DatasetInfo] = []

    def before(self, dataset: Any) -> None:
        worker = sys.modules["torch"].utils.data.get_worker_info()
        if worker is None or worker.id == 0:
            self._known = datasets.known_datasets(dataset)

    def after(self, dataset: Any, index: Any) -> None:
        if not self._known:
            return
        torch = sys.modules["torch"]
        job = _job_pid()
        late = datasets.late_lists(dataset, samplers.flat(index), self._known, torch)
        for token, lists, arrays in late:
            if _first(job, token):
                part = {"what": "lists", "token": token, "parent": job, "lists": lists}
                channel.announce("lists-" + token, 0, [part], arrays)


def _job_pid() -> int:
    """The process that has the loader: this one, or this worker's multiprocessing parent (getppid()
    of a forkserver's worker is the forkserver)."""
    torch = sys.modules["torch"]
    if torch.utils.data.get_worker_info() is None:
        return os.getpid()
    from multiprocessing import parent_process

    parent = parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _first(job: int, token: str) -> bool:
    """Whether no process has published these lists of that job process yet."""
    directory = (channel.socket_path() or "") + channel.SUFFIX
    path = os.path.join(directory, f"{job}-{zlib.crc32(token.encode()):08x}.late")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True
