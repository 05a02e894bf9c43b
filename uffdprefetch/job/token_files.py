# SPDX-License-Identifier: Apache-2.0
"""How Megatron's samples lead to the tokens of a ``.bin`` file: through arrays of its own.

Sample i of a GPTDataset begins and ends where rows ``shuffle_index[i]`` and the next one of
``sample_index`` say, (place in ``document_index``, token) each; of a document the ``.idx`` file has
the first byte and the length. The arrays are mapped files mostly, of which nothing is read here:
the service's helper reads them (orders/token_files.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from .samplers import Unknown, runs

_GPT = "megatron.core.datasets.gpt_dataset"
_BLENDED = "megatron.core.datasets.blended_dataset"
#: Bytes of an array in memory, at most: it is copied.
_COPIED_BYTES = 1 << 28


def is_tokens(dataset: object) -> bool:
    """Whether its samples come from the code of Megatron's GPTDataset, not overridden."""
    return all(
        runs(dataset, _GPT, "GPTDataset", name)
        for name in ("__getitem__", "_query_document_sample_shuffle_indices")
    )


def is_blended(dataset: object) -> bool:
    """Whether its samples come from the code of Megatron's BlendedDataset, not overridden."""
    return runs(dataset, _BLENDED, "BlendedDataset", "__getitem__")


def blended(
    dataset: Any, numbers: array[int], turns: array[int] | None
) -> tuple[Sequence[Any], list[tuple[array[int], array[int]]]] | None:
    """(the data sets that a BlendedDataset mixes, of each the samples that these are, and their
    turns); None: it is none. Raises Unknown, IndexError."""
    if not is_blended(dataset):
        return None
    numpy: Any = sys.modules["numpy"]
    state = vars(dataset)
    if state["dataset_index"] is None:
        raise Unknown("a BlendedDataset that has not read its index")
    asked = numpy.frombuffer(numbers, numpy.int64)
    when = numpy.arange(len(asked)) if turns is None else numpy.frombuffer(turns, numpy.int64)
    which, inner = state["dataset_index"][asked], state["dataset_sample_index"][asked]
    shares = []
    for number in range(len(state["datasets"])):
        its = numpy.flatnonzero(which == number)
        shares.append((_packed(inner[its]), _packed(when[its])))
    return state["datasets"], shares


def _packed(numbers: Any) -> array[int]:
    found = array("q")
    found.frombytes(numbers.astype("int64").tobytes())
    return found


def describe(dataset: Any, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what leads to its tokens, as an announcement's part has it, arrays that it names). Raises
    Unknown, KeyError, AttributeError."""
    state, tokens = vars(dataset), vars(vars(dataset)["dataset"])
    if type(tokens["bin_reader"]).__name__ != "_MMapBinReader":
        raise Unknown("tokens that are read and not mapped")
    index = vars(tokens["index"])
    leading = {
        "shuffle": state["shuffle_index"],
        "sample": state["sample_index"],
        "document": state["document_index"],
        "pointers": index["sequence_pointers"],
        "lengths": index["sequence_lengths"],
    }
    found: dict[str, Any] = {
        "file": tokens["path_prefix"] + ".bin",
        "token_bytes": int(index["dtype_size"]),
        "extra_tokens": int(state["config"].add_extra_token_to_sequence),
    }
    copied: dict[str, Any] = {}
    for name, values in leading.items():
        if values is None:
            raise Unknown("a GPTDataset that has not read its index")
        place = _mapped(values, index["bin_buffer_mmap"])
        if place is None:
            if values.nbytes > _COPIED_BYTES:
                raise Unknown(f"an index of {values.nbytes} bytes in memory")
            copied[f"{prefix}.{name}"] = values.tobytes()
            place = {"array": f"{prefix}.{name}"}
        found[name] = {**place, "type": values.dtype.str, "count": int(values.size)}
    return found, copied


def _mapped(values: Any, index_file: Any) -> dict[str, Any] | None:
    """Where an array lies in a file; None: in memory. ``index_file``: the mapped .idx."""
    numpy: Any = sys.modules["numpy"]
    if type(values) is numpy.memmap and type(values.base) is not numpy.memmap:
        return {"path": str(values.filename), "offset": int(values.offset)}
    offset = _address(values) - _address(index_file)
    if 0 <= offset < index_file.nbytes:
        return {"path": str(index_file.filename), "offset": int(offset)}
    return None


def _address(values: Any) -> int:
    return int(values.__array_interface__["data"][0])
