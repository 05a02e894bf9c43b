# SPDX-License-Identifier: Apache-2.0
"""The snapshot's document: what is documented, what is written, what is read, are the same keys."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from paths import ROOT
from snapshots import document, pooled, rank, snapshot

from uffdprefetch.protocol import snapshot as doc
from uffdprefetch.protocol.document import Quantiles, encode
from uffdprefetch.view import model

SCHEMA_TEXT = (ROOT / "docs" / "summary-schema.md").read_text()
#: The headings under which the document's parts are told.
HEADINGS = {
    doc.Snapshot: "# The snapshot: `uffdprefetch.snapshot/1`",
    doc.Rank: "## `ranks[]` of a snapshot",
    doc.File: "## `files[]` of a snapshot",
    doc.Node: "## `node`",
    doc.PoolActivity: "## `pool` of a snapshot",
    doc.SpillState: "### `pool.spill`",
    doc.SmallFilesAhead: "## `small_files` of a snapshot",
}
#: Parts that are told in a line of their whole: whose, and the field.
LINES = {
    doc.Hit: (doc.Rank, "hit"), doc.Stall: (doc.Rank, "stall"),
    doc.StreamState: (doc.Rank, "streams"), Quantiles: (doc.Node, "checkpoint_wait_ns"),
    doc.IoPressure: (doc.Node, "io_pressure"), doc.PoolHit: (doc.PoolActivity, "hit"),
    doc.History: (doc.Snapshot, "history"), doc.NotManaged: (doc.Snapshot, "not_managed"),
    doc.UnservedProcess: (doc.Snapshot, "not_managed"),
    doc.FileTree: (doc.SmallFilesAhead, "trees"),
    doc.FollowedFiles: (doc.SmallFilesAhead, "orders"),
}  # fmt: skip
LOOKED = doc.NotManaged(
    (doc.UnservedProcess(7, 1, "go", "static", 1 << 24),), None, "/proc", 3, None, 0, 1
)


def section(heading: str) -> list[str]:
    """The lines below a heading up to the next one."""
    lines = SCHEMA_TEXT.split("\n")
    start = lines.index(heading) + 1
    end = next((i for i in range(start, len(lines)) if lines[i].startswith("#")), len(lines))
    return lines[start:end]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)(?:\[\])?`", text))


def keys(line: str) -> set[str]:
    """Of a table's row, or all that a sentence names."""
    return names(line.split("|")[1] if line.startswith("|") else line)


@pytest.mark.parametrize("part", HEADINGS, ids=lambda part: part.__name__)
def test_the_fields_are_the_keys_that_are_documented(part: type) -> None:
    told = set[str]().union(*map(keys, section(HEADINGS[part])))
    assert told - {"why", "top"} == {f.name for f in fields(part)}


@pytest.mark.parametrize("part", LINES, ids=lambda part: part.__name__)
def test_the_fields_of_a_small_part_are_named_in_its_line(part: type) -> None:
    whole, field = LINES[part]
    (line,) = [line for line in section(HEADINGS[whole]) if field in keys(line)]
    assert {f.name for f in fields(part)} - {"sum"} <= names(line)  # the sum is the pool's


def test_no_part_is_left_out_of_this_test() -> None:
    parts = (*HEADINGS, *LINES)
    types = " ".join(str(get_type_hints(part)) for part in parts)
    assert set(re.findall(r"protocol\.snapshot\.(\w+)", types)) < {p.__name__ for p in parts}


MADE = {
    "plain": document(),
    "empty": document(0, files=[]),
    "pool": pooled(),
    "nobody looked": document(not_managed={"processes": None, "why": doc.ADDED_BY_WATCHER}),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_document_is_read_and_written_as_it_was(made: dict[str, Any]) -> None:
    read = doc.decode(made)
    assert json.loads(encode(read)) == made
    for seen in (read, replace(read, not_managed=LOOKED)):
        assert doc.decode(json.loads(encode(seen))) == seen


def test_what_only_a_look_can_tell_is_written_once_there_was_one() -> None:
    seen = snapshot().snapshot
    before, after = (
        json.loads(encode(s))["not_managed"] for s in (seen, replace(seen, not_managed=LOOKED))
    )
    assert before.keys() == {"processes", "why"}
    assert after["births"] == 3 and after["births_why"] is None


def test_the_parts_of_a_document_are_typed() -> None:
    seen = snapshot(3).snapshot
    assert (seen.run, seen.host, len(seen.ranks)) == ("resnet50-7731", "node17", 3)
    assert model.streams(seen.ranks[1])[0].position_bytes == rank(1, 3)["position_bytes"]
    assert seen.ranks[0].hit.share == 0.998 and seen.node.io_pressure.share == 0.12
    assert model.hit_share(seen) == pytest.approx(1 - 6 / 3000)


def test_a_key_that_is_newer_than_its_reader_is_passed_over() -> None:
    assert doc.decode(document() | {"newer": {"x": [1]}}) == doc.decode(document())


@pytest.mark.parametrize("broken", ["schema", "ranks", "files", "node", "history", "degradations"])
def test_what_is_no_snapshot_is_refused_in_one_way(broken: str) -> None:
    made = document()
    del made[broken]
    with pytest.raises(ValueError, match="not a snapshot"):
        doc.decode(made)
    for wrong in (7, "x", {"x": 1}, None):
        with pytest.raises(ValueError, match="not a snapshot"):
            doc.decode(document(**{broken: wrong}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": None}, r"document\.ranks\[0\]\.rank: NoneType instead of int"),
        ({"rank": True}, r"document\.ranks\[0\]\.rank: bool instead of int"),
        ({"rank": 1.0}, r"document\.ranks\[0\]\.rank: float instead of int"),
        ({"pids": ["7"]}, r"document\.ranks\[0\]\.pids\[0\]: str instead of int"),
        ({"hit": {}}, r"document\.ranks\[0\]\.hit\.share is missing"),
    ],
)
def test_the_place_of_what_is_wrong_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        doc.decode(document(1, ranks=[rank(0, 1, **changes)]))
