# SPDX-License-Identifier: Apache-2.0
"""predict/shards.py: which file comes after a file."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.shards import after, successor


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"),
        ("model-00009-of-00010.safetensors", "model-00010-of-00010.safetensors"),
        ("a-b.v2-00001-of-00002.tar.gz", "a-b.v2-00002-of-00002.tar.gz"),
        ("q4-00001-of-00003.gguf", "q4-00002-of-00003.gguf"),
        ("model-00004-of-00004.safetensors", None),
        ("model-00005-of-00004.safetensors", None),
        ("model-00000-of-00004.safetensors", None),  # they are counted from 1
        ("model-1-of-4.safetensors", None),
        ("model.safetensors", None),
        ("-00001-of-00004.safetensors", None),
        ("00001-of-00004.safetensors", None),
        ("model-00001-of-00004", None),
        ("", None),
    ],
)
def test_the_name_of_the_next_shard(name: str, expected: str | None) -> None:
    assert successor(name) == expected


def test_an_index_names_each_shard_often_and_in_any_order() -> None:
    names = ["b.bin", "a.bin", "b.bin", "c.bin", "a.bin"]
    assert [after(name, names) for name in ("a.bin", "b.bin", "c.bin", "d.bin")] == [
        "b.bin", "c.bin", None, None,
    ]  # fmt: skip


def test_an_index_leads_nowhere_else() -> None:
    assert after("a.bin", ["a.bin", "../b.bin", 7, None, ["c.bin"]]) is None
    assert after("a.bin", []) is None
