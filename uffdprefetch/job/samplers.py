# SPDX-License-Identifier: Apache-2.0
"""The order that a sampler is about to give, computed without side effects on it.

A sampler of torch's is run on a shallow copy, by torch's own code, with private generators in the
present state of the real ones. Shared generators are only read (get_state), never set: another
thread may draw from them meanwhile. So it must be done right before the real sampler draws.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

#: Items of an order at most: 512 MiB of numbers.
CAP_ITEMS = 1 << 26
#: The same for a sampler that is not torch's and may be infinite.
CAP_FOREIGN_ITEMS = 1 << 24

_SAMPLERS = "torch.utils.data.sampler"
_DISTRIBUTED = "torch.utils.data.distributed"
_GENERATOR_FUNCTION = 0x20  # inspect.CO_GENERATOR


class Unknown(Exception):
    """The order cannot be known beforehand; the message, a line, says why."""


def runs(thing: object, module: str, name: str, method: str) -> bool:
    """Whether ``method`` of ``thing`` is the one that torch's class ``name`` defines, inherited or
    not."""
    home = sys.modules.get(module)
    function = vars(getattr(home, name, object)).get(method)
    return (
        function is not None
        and getattr(type(thing), method, None) is function
        and getattr(function, "__globals__", None) is vars(home)  # not monkey-patched
    )


def flat(index: Any) -> array[int]:
    """Item numbers of a sampler's index: a batch of numbers, or one.

    Raises TypeError, ValueError or OverflowError when it is something else.
    """
    if type(index) not in (list, tuple):
        try:
            return array("q", (operator.index(index),))
        except TypeError:
            index = index.tolist() if hasattr(index, "tolist") else index
    return array("q", index)


def order(index_sampler: Any, torch: Any) -> array[int]:
    """The item numbers (int64, shape (items,)) that ``index_sampler`` of a DataLoader would give
    from now.

    Raises Unknown for samplers that are not torch's, and whatever goes wrong in torch's code.
    """
    if not runs(index_sampler, _SAMPLERS, "BatchSampler", "__iter__"):
        return _numbers(index_sampler, torch)
    batches = vars(index_sampler)
    numbers = _numbers(batches["sampler"], torch)
    if batches["drop_last"]:
        del numbers[len(numbers) - len(numbers) % batches["batch_size"] :]
    return numbers


def _numbers(sampler: Any, torch: Any) -> array[int]:
    if type(sampler) in (list, tuple, range):  # a BatchSampler takes any iterable
        return _collect(len(sampler), sampler)
    if runs(sampler, _SAMPLERS, "SequentialSampler", "__iter__"):
        n = len(vars(sampler)["data_source"])
        return _collect(n, _copy(sampler, data_source=range(n)))
    if runs(sampler, _SAMPLERS, "RandomSampler", "__iter__"):
        return _of_random(sampler, torch)
    if runs(sampler, _SAMPLERS, "SubsetRandomSampler", "__iter__"):
        indices = plain(vars(sampler)["indices"], torch)
        return _collect(len(indices), _copy(sampler, torch, indices=indices))
    if runs(sampler, _SAMPLERS, "WeightedRandomSampler", "__iter__"):
        return _collect(vars(sampler)["num_samples"], _copy(sampler, torch))
    if runs(sampler, _DISTRIBUTED, "DistributedSampler", "__iter__"):
        n = len(vars(sampler)["dataset"])
        return _collect(n, _copy(sampler, dataset=range(n)))
    raise Unknown(f"{type(sampler).__qualname__} is not a sampler of torch's")


def _of_random(sampler: Any, torch: Any) -> array[int]:
    """RandomSampler: without a generator it seeds one of its own from the default one."""
    n = len(vars(sampler)["data_source"])
    generator = vars(sampler)["generator"]
    if generator is None:
        drawn = torch.empty((), dtype=torch.int64).random_(
            generator=clone_generator(torch.default_generator, torch)
        )
        generator = torch.Generator()
        generator.manual_seed(int(drawn.item()))
    else:
        generator = clone_generator(generator, torch)
    clone = _copy(sampler, data_source=range(n), generator=generator)
    return _collect(max(n, clone.num_samples), clone)


def clone_generator(generator: Any, torch: Any) -> Any:
    """A private generator in the state of ``generator``. Raises Unknown for one of a device."""
    if generator.device.type != "cpu":
        raise Unknown(f"its generator draws on {generator.device}")
    private = torch.Generator()
    private.set_state(generator.get_state())
    return private


def _copy(sampler: Any, torch: Any = None, **changes: Any) -> Any:
    """A shallow copy, without the type's __copy__. With ``torch`` its generator is a clone of its
    own or of the default one."""
    state = dict(vars(sampler), **changes)
    if torch is not None:
        generator = state["generator"]
        state["generator"] = clone_generator(generator or torch.default_generator, torch)
    clone = object.__new__(type(sampler))
    vars(clone).update(state)
    return clone


def plain(indices: Any, torch: Any) -> Any:
    """``indices`` as a sequence that runs no code of the user's.

    Raises Unknown for other types than list, tuple, range, tensor and numpy's array.
    """
    numpy = sys.modules.get("numpy")
    arrays = (torch.Tensor,) if numpy is None else (torch.Tensor, numpy.ndarray)
    if type(indices) in arrays:
        return indices.tolist()
    if type(indices) in (list, tuple, range):
        return indices
    raise Unknown(f"its indices are a {type(indices).__qualname__}")


def _collect(items: int, numbers: Iterable[Any]) -> array[int]:
    if items > CAP_ITEMS:
        raise Unknown(f"{items} items are more than {CAP_ITEMS}")
    return array("q", numbers)


# ---- other samplers, when the user has called prefetch() -----------------------------------------


def begins_at_once(index_sampler: object) -> bool:
    """Whether iter() may already draw: all but generator functions, which run from next() on."""
    code = getattr(getattr(type(index_sampler), "__iter__", None), "__code__", None)
    return not getattr(code, "co_flags", 0) & _GENERATOR_FUNCTION


def dry_run(index_sampler: Any, shared: Iterable[object], torch: Any) -> array[int]:
    """As order(), of any sampler: runs a deep copy, and restores the global generators of torch,
    numpy and random. ``shared``: objects that are not copied, beside the sampler's datasets.

    Raises Unknown beyond CAP_FOREIGN_ITEMS, and whatever the sampler raises.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared}
    for holder in (index_sampler, getattr(index_sampler, "sampler", None)):
        for value in list(getattr(holder, "__dict__", {}).values()):
            if type(value) is torch.Generator:  # of older torch: not copyable
                memo[id(value)] = clone_generator(value, torch)
            elif isinstance(value, torch.utils.data.Dataset):
                memo[id(value)] = value
    memo[id(torch.default_generator)] = torch.default_generator  # restored below
    numbers = array("q")
    with _global_generators_kept(torch):
        for index in islice(copy.deepcopy(index_sampler, memo), CAP_FOREIGN_ITEMS):
            numbers.extend(flat(index))
            if len(numbers) > CAP_FOREIGN_ITEMS:
                raise Unknown(f"more than {CAP_FOREIGN_ITEMS} items, or no end")
    return numbers


@contextmanager
def _global_generators_kept(torch: Any) -> Iterator[None]:
    numpy_random: Any = sys.modules.get("numpy.random")
    torch_state = torch.default_generator.get_state()
    random_state = random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(random_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
