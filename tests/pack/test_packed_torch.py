# SPDX-License-Identifier: Apache-2.0
"""What finds the keys of any data set finds those of a packed one: the job's lists, and the ways
that the service tries, lead from each sample to its record alone."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import numpy as np
from packed_trees import packed, write_tree

from uffdprefetch.data import Packed
from uffdprefetch.formats import lmdb
from uffdprefetch.job import lists
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.mapping import hypotheses

N = 200


def make(tmp_path: Path) -> dict[bytes, bytes]:
    chance = random.Random(3)
    # as keys a-b/ comes before a/, as directories after it: no sample has its record's number
    files = {
        b"class%d/%s%04d.bin" % (i % 7, (b"a/", b"a-b/")[i % 2], i): chance.randbytes(300)
        for i in range(N)
    }
    files |= {b"class0/a/caf\xc3\xa9.bin": b"UTF-8", b"class0/a/caf\xe9.bin": b"Latin-1"}
    write_tree(tmp_path / "tree", files)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    return files


def test_each_sample_leads_to_its_record_and_no_other(tmp_path: Path) -> None:
    make(tmp_path)
    data = Packed(tmp_path / "o.lmdb")
    columns = lists.columns(data, len(data))
    assert "samples[0]" in [column.name for column in columns]
    found = []
    for column in columns:
        made = column.data()
        assert made is not None
        found.append(KeyList.parse(column.name, column.kind, np.frombuffer(made, np.uint8)))
    index = lmdb.as_record_index(lmdb.open_index(tmp_path / "o.lmdb"))
    assert index.keys is not None
    ways = {each.name: each for each in hypotheses(index, len(data), found, np.arange(N))}
    samples = np.arange(len(data))
    records, which = ways["keys from .samples[0]"].records(samples)
    assert array("q", which.tobytes()).tolist() == samples.tolist(), "one record each"
    for sample, record in enumerate(records.tolist()):
        name = data.samples[sample][0]
        assert index.keys.key(record) == name.encode("utf-8", "surrogateescape")
