# SPDX-License-Identifier: Apache-2.0
"""What base/jsontext.py writes is what the standard module writes."""

from __future__ import annotations

import json

import pytest

from uffdprefetch.base import jsontext

VALUE = {
    "none": None, "yes": True, "no": False, "int": -(1 << 63), "float": [0.1, 1e-7, 2.0, 1e300],
    "text": ["", "plain", 'quo"te', "back\\slash", "new\nline", "\x7f", "umläut", "\udcff", "/"],
    "nested": {"empty": {}, "list": [[], [1, [2, {"a": ()}]], (3, "4")]}, "a key\n": "",
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
def test_it_is_the_text_of_the_standard_module(indent: int | None) -> None:
    assert jsontext.dumps(VALUE, indent=indent) == json.dumps(VALUE, indent=indent)
