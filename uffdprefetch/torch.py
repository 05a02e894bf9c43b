# SPDX-License-Identifier: Apache-2.0
"""One explicit line in a training script: ``loader = uffdprefetch.torch.prefetch(loader)``.

Under `uffdprefetch wrap` it is not needed for torch's own samplers (docs/pytorch.md). It is for
other samplers, and for datasets whose keys or files cannot be inferred.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from uffdprefetch.base.messages import say

Key = bytes | str | int
Path = str | bytes | os.PathLike[str]
Loader = TypeVar("Loader")

_PACKAGE = "_uffdprefetch_job"  # job/site/sitecustomize.py
_told: set[str] = set()


def prefetch(
    loader: Loader,
    *,
    key: Callable[[int], Key | Sequence[Key]] | None = None,
    file: str | os.PathLike[str] | None = None,
    path: Callable[[int], Path | Sequence[Path]] | None = None,
) -> Loader:
    """Have the records, or files, that ``loader`` (a torch DataLoader) will read prefetched.

    From its next epoch on its order is announced, whatever its sampler: a deep copy of one that is
    not torch's is run in advance, and the global generators of torch, numpy and random are restored
    afterwards, so it must depend on nothing else.

    ``key``: the sampler's item number -> its record's key (bytes, str) or record number (int), or
    several of either; called once for each item, in this process. Default: inferred by the service.
    ``file``: the record file (default: any that the job maps).
    ``path``: the item number -> the path of its file, or several, as ``key``; instead of it.

    Returns ``loader`` itself. Outside of `uffdprefetch wrap` it only prints a line.
    Raises TypeError for anything but a DataLoader, ValueError for one of an IterableDataset, and
    for ``path`` beside ``key`` or ``file``.
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
    if path is not None and not callable(path):
        raise TypeError(f"prefetch: path is a function of an item number, not {path!r}")
    if path is not None and (key is not None or file is not None):
        raise ValueError("prefetch: path is of whole files: give no key and no file with it")
    hook, settings, available = _job()
    if os.environ.get(hook.VARIABLE) == "off":
        _say_once("prefetch: switched off by --torch off")
    elif not available():
        _say_once("prefetch: not under `uffdprefetch wrap`, so nothing is prefetched")
    elif not hook.install(sys.modules["torch.utils.data.dataloader"]):
        _say_once("prefetch: this torch's DataLoader is unknown, so nothing is prefetched")
    else:
        whole = None if file is None else os.path.abspath(os.fspath(file))
        hook.settings(loader, settings(key, whole, path))
    return loader


def _job() -> Any:
    """The hook, Settings and available() of the package that sitecustomize.py has loaded, or else
    of our own."""
    if f"{_PACKAGE}.hook" in sys.modules:
        package = sys.modules[_PACKAGE]
        return package.hook, package.epochs.Settings, package.channel.available
    from uffdprefetch.job import channel, epochs, hook

    return hook, epochs.Settings, channel.available


def _say_once(line: str) -> None:
    if line not in _told:
        _told.add(line)
        say(line)
