# SPDX-License-Identifier: Apache-2.0
"""Small scenes with DataLoaders: ``torch_scenes.py SCENE...`` tells as JSON what happened in each.

``announced`` of a scene are the numbers of the announcements that this process made in it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

PLANS = Path(os.environ.get("UFFDPREFETCH_SOCKET", "nowhere") + ".plan")


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Broken(Numbers):
    """Sample 5 cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise FileNotFoundError(2, "no such record", f"record-{index}")
        return index


class Lazy(Numbers):
    """Reads its keys when it is first read itself."""

    def __init__(self, path: str) -> None:
        super().__init__(12)
        self.path = path
        self.keys: list[bytes] | None = None

    def __getitem__(self, index: int) -> int:
        if self.keys is None:
            self.keys = [b"%s/%d" % (self.path.encode(), i) for i in range(self.samples)]
        return index


class Unsized(Dataset):
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index


def said(slot: int = 1) -> int:
    """What the progress counter of this process says."""
    path = PLANS / f"{os.getpid()}.progress"
    return struct.unpack_from("<Q", path.read_bytes(), 8 * slot)[0] if path.exists() else -1


def slot_of(number: int) -> int:
    """The slot of an announcement of this process."""
    return json.loads((PLANS / f"{os.getpid()}-{number}.json").read_text())["slot"]


def announced() -> list[int]:
    """Numbers of the announcements of this process so far."""
    return sorted(int(p.stem.split("-")[1]) for p in PLANS.glob(f"{os.getpid()}-*.json"))


def progress(workers: int) -> Any:
    """What the counter says after each batch, and at the end."""
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    iterator = iter(loader)  # which lives on
    seen = []
    for _ in iterator:
        seen.append(said())
    return [*seen, said()]


class Noting(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
    """Makes workers, and notes how many orders are announced by then."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def Process(self, *args: Any, **options: Any) -> Any:
        self.noted.append(len(announced()))
        return super().Process(*args, **options)


def before_workers() -> Any:
    """The orders that are announced when each of two workers is about to be started, when both run,
    and after a second epoch of theirs."""
    context, before = Noting(), len(announced())
    loader = DataLoader(
        Numbers(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True,
        multiprocessing_context=context,
    )  # fmt: skip
    iterator = iter(loader)
    begun = len(announced())
    for _ in range(2):
        list(iterator)
        iterator = iter(loader)
    del iterator, loader._iterator
    return [*(count - before for count in context.noted), begun - before, len(announced()) - before]


def early_end() -> Any:
    """The counter when an epoch is left in its middle, and in the next."""
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    for _ in loader:
        inside = said()
        break
    left = said()
    iterator = iter(loader)
    next(iterator)
    again = said()
    del iterator
    return [inside, left, again, said()]


def early_end_persistent() -> Any:
    """As early_end(), where the iterator lives on."""
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True,
                        multiprocessing_context="fork")  # fmt: skip
    for _ in loader:
        break
    seen = [said()]
    for batch in loader:
        seen.append(said())
        if batch[0] == 4:
            break
    return seen


def two_iterators() -> Any:
    """The counter while two iterators of a loader live: it is the second one's."""
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(first)
    next(first)
    seen = [said()]
    del first
    seen.append(said())
    next(second)
    return [*seen, said()]


def iterator_without_loader() -> Any:
    """Slots of an iterator whose loader is gone, and of the loader that comes next."""
    iterator = iter(DataLoader(Numbers(), batch_size=2))
    next(iterator)
    slots = [slot_of(announced()[-1])]
    other = iter(DataLoader(Numbers(), batch_size=2))
    next(other)
    return [*slots, slot_of(announced()[-1])]


def many_loaders() -> Any:
    """A loader for each of more epochs than there are counters."""
    for _ in range(600):
        for _ in DataLoader(Numbers(2), batch_size=2):
            pass


def nothing_stays() -> Any:
    """Whether loader, data set and iterator are still there when the job has let go of them."""
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    references = [weakref.ref(thing) for thing in (loader, loader.dataset, iterator)]
    del loader, iterator
    gc.collect()
    return [reference() is None for reference in references]


def nothing_pickled() -> Any:
    """Whether a loader's things are pickled as before, and have the attributes that they had."""
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    things = (loader.dataset, loader.sampler, loader.batch_sampler)
    before = [pickle.dumps(thing) for thing in things], sorted(vars(loader))
    for _ in loader:
        pass
    after = [pickle.dumps(thing) for thing in things], sorted(vars(loader))
    return before == after


def failing(workers: int) -> Any:
    """What reaches the job of a data set's exception, and what comes after it."""
    loader = DataLoader(Broken(), batch_size=2, num_workers=workers)
    iterator = iter(loader)
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(iterator).tolist())
        except StopIteration:
            return seen
        except Exception as error:
            text = str(error).partition("\n")[0]
            seen.append([type(error).__name__, text, repr(error.args)[:60], error.__cause__,
                         error.__context__])  # fmt: skip


def drawn_between() -> Any:
    """The job draws from a generator that its sampler draws from later."""
    shared = torch.Generator().manual_seed(0)
    data = Numbers(100)
    sampler = RandomSampler(data, replacement=True, generator=shared)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    read, seen = [], []
    for _ in range(4):
        for batch in loader:
            torch.rand(1, generator=shared)
            read += batch.tolist()
            seen.append(said(slot_of(announced()[-1])) if PLANS.is_dir() else -1)
    return {"read": read, "said": seen}


def unsized() -> Any:
    """A data set without a length."""
    batches = BatchSampler([3, 1, 2], 2, drop_last=False)
    return [batch.tolist() for batch in DataLoader(Unsized(), batch_sampler=batches)]


def handler_raises() -> Any:
    """The job's signal handler raises, once, when the data set is asked for its length."""

    class Timeout(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise Timeout

    class Slow(Numbers):
        def __len__(self) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return 4

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    loader = DataLoader(Slow(), batch_size=2)
    signal.signal(signal.SIGUSR1, handler)
    try:
        return [batch.tolist() for batch in loader]
    except Timeout:
        return "raised"


def late_lists(context: str) -> Any:
    """Keys that a data set has from its first sample on, in whichever process that is read."""
    workers: dict[str, Any] = {}
    if context:
        workers = dict(num_workers=2, multiprocessing_context=context)
    data = Lazy(f"data-{context}")
    for _ in range(2):
        loader = DataLoader(data, batch_size=2, shuffle=True, **workers)
        for _ in loader:
            pass
    return os.getpid()


def changed_methods() -> Any:
    """The methods of torch's that are not its own."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    names = [name for name, value in vars(kind).items() if hasattr(value, "__wrapped__")]
    return sorted(names), [vars(kind)[name].__qualname__ for name in sorted(names)]


SCENES: dict[str, Callable[[], Any]] = {
    "progress 0": lambda: progress(0),
    "progress 2": lambda: progress(2),
    "failing 0": lambda: failing(0),
    "failing 2": lambda: failing(2),
    "late lists": lambda: late_lists(""),
    "late lists fork": lambda: late_lists("fork"),
    "late lists spawn": lambda: late_lists("spawn"),
    "late lists forkserver": lambda: late_lists("forkserver"),
}
SCENES |= {
    scene.__name__: scene
    for scene in (
        before_workers, early_end, early_end_persistent, two_iterators, iterator_without_loader,
        many_loaders, nothing_stays, nothing_pickled, drawn_between, unsized, handler_raises,
        changed_methods,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    """Play them."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_forkserver_preload(["torch"])
    seen = {}
    for name in names:
        before = set(announced())
        result = SCENES[name]()
        seen[name] = {"result": result, "announced": sorted(set(announced()) - before)}
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
