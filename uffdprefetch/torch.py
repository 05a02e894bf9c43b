# SPDX-License-Identifier: Apache-2.0
"""One explicit line in a training script: ``loader = uffdprefetch.torch.prefetch(loader)``.

Under `uffdprefetch wrap` nothing of it is needed for torch's own samplers (docs/pytorch.md). It is
for samplers of others, and for datasets whose keys cannot be found by looking on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from uffdprefetch.base.messages import say

Key = bytes | str | int
Loader = TypeVar("Loader")

_PACKAGE = "_uffdprefetch_job"  # job/site/sitecustomize.py
_told: set[str] = set()


def prefetch(
    loader: Loader,
    *,
    key: Callable[[int], Key | Sequence[Key]] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Loader:
    """Have the records that ``loader`` (a torch DataLoader) will read fetched before it reads them.

    From its next epoch on its order is announced, whatever its sampler: one that is not torch's is
    run in advance on a deep copy, with the global generators of torch, numpy and random put back
    after it, so it must depend on nothing else.

    ``key``: from the item number that the sampler gives to the key of its record (bytes, str), or
    its record number (int), or several of either; asked once for each item, in this process.
    Without it the service finds out. ``file``: the record file (without: any that the job maps).

    Returns ``loader`` itself. Outside of `uffdprefetch wrap` nothing else is done but to say so.
    Raises TypeError for anything but a DataLoader, ValueError for one of an IterableDataset.
    """
    data: Any = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        raise TypeError(f"prefetch: a torch DataLoader is wanted, not {type(loader).__qualname__}")
    if isinstance(loader.dataset, data.IterableDataset):
        raise ValueError(
            f"prefetch: {type(loader.dataset).__qualname__} is an IterableDataset: it chooses its"
            " samples itself; use a map-style dataset"
        )
    if key is not None and not callable(key):
        raise TypeError(f"prefetch: key is a function of an item number, not {key!r}")
    hook, settings, available = _job()
    if os.environ.get(hook.VARIABLE) == "off":
        _say_once("prefetch: switched off by --torch off")
    elif not available():
        _say_once("prefetch: not under `uffdprefetch wrap`, so nothing is prefetched")
    elif not hook.install(sys.modules["torch.utils.data.dataloader"]):
        _say_once("prefetch: this torch's DataLoader is unknown, so nothing is prefetched")
    else:
        path = None if file is None else os.path.abspath(os.fspath(file))
        hook.settings(loader, settings(key, path))
    return loader


def _job() -> Any:
    """The hook, Settings and available() of the package that is already at work in this process, or
    else of our own."""
    if f"{_PACKAGE}.hook" in sys.modules:
        package = sys.modules[_PACKAGE]
        return package.hook, package.epochs.Settings, package.channel.available
    from uffdprefetch.job import channel, epochs, hook

    return hook, epochs.Settings, channel.available


def _say_once(line: str) -> None:
    if line not in _told:
        _told.add(line)
        say(line)
