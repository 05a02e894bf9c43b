# SPDX-License-Identifier: Apache-2.0
"""Has torch's DataLoader announce what it will read, transparently to the job.

Five methods of torch's classes are wrapped. Before an epoch's first index is drawn its order is
computed (job/samplers.py) and announced; each index that the sampler then gives is compared with
it; each batch that the job receives is progress. No attribute of the job's objects is set, and no
error of ours reaches the job: UFFDPREFETCH_TORCH=debug prints them to stderr.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from . import channel, datasets, iterables, keys, late, samplers
from .epochs import STRIKES, Epoch, LoaderReader, Settings
from .tables import IdentityTable

VARIABLE = "UFFDPREFETCH_TORCH"
_MARK = "_uffdprefetch"  # attribute of our wrappers

_readers = IdentityTable()  # by loader
_epochs = IdentityTable(on_death=Epoch.end)  # by iterator


def install(module: Any) -> bool:
    """Wrap the methods of ``module``: torch.utils.data.dataloader, or iterables.MODULE. Returns
    whether they are wrapped: not where this version of it lacks one of them."""
    ours = _install_iterables if module.__name__ == iterables.MODULE else _install_loader
    return ours(module)


def _install_iterables(module: Any) -> bool:
    if not iterables.install(module, _guarded):
        _debug("these iterable datasets are made otherwise; nothing is announced")
        return False
    _guarded(channel.expect)
    return True


def _install_loader(module: Any) -> bool:
    iterator = getattr(module, "_BaseDataLoaderIter", None)
    fetcher = getattr(sys.modules.get("torch.utils.data._utils.fetch"), "_MapDatasetFetcher", None)
    wanted = [
        (iterator, "__init__", _around_init),
        (iterator, "_reset", _around_reset),
        (iterator, "_next_index", _around_next_index),
        (iterator, "__next__", _around_next),
        (fetcher, "fetch", late.around_fetch(_guarded)),
    ]
    if any(type(vars(owner).get(name)) is not types.FunctionType for owner, name, _ in wanted):
        _debug("this torch's DataLoader is made otherwise; nothing is announced")
        return False
    if not hasattr(vars(iterator)["__next__"], _MARK):
        for owner, name, around in wanted:
            original = vars(owner)[name]
            wrapper = functools.wraps(original)(around(original))
            setattr(wrapper, _MARK, True)
            setattr(owner, name, wrapper)
        _guarded(channel.expect)
    return True


def settings(loader: Any, given: Settings) -> None:
    """Apply the user's settings to a loader, from its next epoch on."""
    _reader(loader).settings = given


# ---- the wrappers --------------------------------------------------------------------------------


def _around_init(original: Any) -> Any:
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        _guarded(_opening, self, loader, False)
        original(self, loader, *args, **kwargs)
        _guarded(_opened, self, loader)

    return __init__


def _around_reset(original: Any) -> Any:
    def _reset(self: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(_opening, self, loader, True)
        return original(self, loader, *args, **kwargs)

    return _reset


def _around_next_index(original: Any) -> Any:
    def _next_index(self: Any) -> Any:
        epoch = _epochs.get(self)
        if epoch is None:
            return original(self)
        if not epoch.begun:
            _guarded(_begin, self, epoch)
        index = original(self)
        _guarded(_on_index, epoch, index)
        return index

    return _next_index


def _around_next(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            _guarded(_end, _epochs.get(self))
            raise
        epoch = _epochs.get(self)
        if epoch is not None:
            _guarded(epoch.on_batch)
        return batch

    return __next__


# ---- their work ----------------------------------------------------------------------------------


def _reader(loader: Any) -> LoaderReader:
    reader: LoaderReader | None = _readers.get(loader)
    if reader is None:
        reader = LoaderReader()
        _readers.set(loader, reader)
    return reader


def _opening(iterator: Any, loader: Any, again: bool) -> None:
    """``iterator`` is about to call iter() on its sampler: in __init__, or ``again`` in _reset."""
    if loader._dataset_kind != _kinds().Map:
        return
    before = _epochs.get(iterator)
    if before is not None:
        if again and before.is_ahead:
            return  # of the workers, which have been started meanwhile
        before.end()
    reader = _reader(loader)
    epoch = Epoch(reader, loader.num_workers > 0, _ahead(loader))
    _epochs.set(iterator, epoch)
    datasets.discover_datasets(loader.dataset)
    # With workers _reset follows and calls iter() again: that one counts.
    now = again or loader.num_workers == 0
    if reader.settings is not None and now and samplers.begins_at_once(loader._index_sampler):
        epoch.early = _order(reader, loader._index_sampler, loader.dataset)


def _opened(iterator: Any, loader: Any) -> None:
    """Workers, if there are any, are about to be started, which takes a while: torch's own samplers
    draw no index meanwhile, nor does anything else draw from their generators."""
    epoch = _epochs.get(iterator)
    if epoch is not None and loader.num_workers > 0 and epoch.reader.settings is None:
        _begin(iterator, epoch)


def _kinds() -> Any:
    return sys.modules["torch.utils.data.dataloader"]._DatasetKind  # type: ignore[attr-defined]


def _begin(iterator: Any, epoch: Epoch) -> None:
    """The epoch's first index is about to be drawn."""
    epoch.begun = True
    reader, dataset = epoch.reader, iterator._dataset
    if reader.strikes >= STRIKES:
        return
    order = epoch.early
    if order is None:
        try:
            order = _order(reader, iterator._index_sampler, dataset)
        except samplers.Unknown as why:
            _announce_refusal(reader, str(why))
            raise
    given = reader.settings or Settings()
    if given.key is not None or given.path is not None:
        description = datasets.Description(*keys.part(given, order))
    else:
        description = datasets.describe(dataset, order, given.file, sys.modules["torch"])
    for part in description.parts:
        part["ahead"] = epoch.ahead_items
    epoch.follow(
        order, channel.announce(reader.name, len(order), description.parts, description.arrays)
    )
    description.published()


def _announce_refusal(reader: LoaderReader, why: str) -> None:
    """Announce, for the run's summary, that the order cannot be known; once for a loader."""
    if not reader.refusal_announced:
        reader.refusal_announced = True
        channel.announce(reader.name, 0, [{"what": "nothing", "why": why}], {})


def _ahead(loader: Any) -> int:
    """Items that may have been read beyond the batches that the job has received."""
    batch = getattr(loader._index_sampler, "batch_size", None) or 1
    return int(batch * (loader.num_workers * (loader.prefetch_factor or 2) + 1))


def _order(reader: LoaderReader, index_sampler: Any, dataset: Any) -> Any:
    torch = sys.modules["torch"]
    try:
        return samplers.order(index_sampler, torch)
    except samplers.Unknown:
        if reader.settings is None:
            raise
    return samplers.dry_run(index_sampler, [dataset], torch)


def _on_index(epoch: Epoch, index: Any) -> None:
    wrong = epoch.on_index(index)
    if wrong is not None:
        _debug(wrong)


def _end(epoch: Epoch | None) -> None:
    if epoch is not None:
        wrong = epoch.on_sampler_end()
        if wrong is not None:
            _debug(wrong)
        epoch.end()


# ---- no error reaches the job --------------------------------------------------------------------


def _guarded(function: Callable[..., object], *args: Any) -> None:
    try:
        function(*args)
    except samplers.Unknown as why:
        _debug(f"left alone: {why}")
    except Exception as error:
        if _of_a_signal_handler(error):
            raise
        _debug(f"{type(error).__name__}: {error}")


def _of_a_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the job raised it, having interrupted our code: a function one of
    whose locals is the frame that it interrupted."""
    step, before = error.__traceback__, None
    while step is not None:
        frame = step.tb_frame
        if before is not None and any(value is before for value in frame.f_locals.values()):
            return True
        step, before = step.tb_next, frame
    return False


def _debug(line: str) -> None:
    if os.environ.get(VARIABLE) == "debug":
        try:
            sys.stderr.write(f"uffdprefetch: torch: {line}\n")
        except Exception:
            pass
