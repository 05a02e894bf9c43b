# SPDX-License-Identifier: Apache-2.0
"""One summary of all nodes, and nothing that is left of their meeting."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from uffdprefetch.base.config import Config
from uffdprefetch.cluster.meeting import Meeting
from uffdprefetch.launch.cluster import one_summary


def config(directory: Path, node: int) -> Config:
    place = {"meet": str(directory), "run": "run", "node": node, "nodes": 2}
    return Config.of(place=json.dumps(place))


def document(node: int) -> dict[str, Any]:
    return {"cluster": {"node": node, "present": [0, 1]}}


def test_where_all_have_left_already_no_directory_is_made_anew(tmp_path: Path) -> None:
    for node in (0, 1):
        assert one_summary(config(tmp_path, node), document(node), 0.1) is not None
    assert not list(tmp_path.iterdir())


def test_who_is_not_heard_by_the_first_node_takes_its_own_back_and_all_else_away(
    tmp_path: Path,
) -> None:
    meeting = Meeting(tmp_path, "run", 1)
    meeting.post("generation", {})
    assert one_summary(config(tmp_path, 1), document(1), 0.1) == document(1)
    assert not list(tmp_path.iterdir())


def test_a_note_of_a_convener_that_was_killed_goes_with_its_node(tmp_path: Path) -> None:
    meetings = [Meeting(tmp_path, "run", node) for node in (0, 1)]
    for one in meetings:
        one.arrive({})
    assert one_summary(config(tmp_path, 1), document(1), 0.1) == document(1)
    assert meetings[0].numbers() == [0], "the other one is still there"
    one_summary(config(tmp_path, 0), {"cluster": None}, 0.1)
    assert not list(tmp_path.iterdir())


def test_the_first_node_takes_what_the_others_hand_over(tmp_path: Path) -> None:
    for node in (0, 1):
        Meeting(tmp_path, "run", node).arrive({})
    other: list[Any] = []
    thread = threading.Thread(
        target=lambda: other.append(one_summary(config(tmp_path, 1), document(1), 20))
    )
    thread.start()
    taken = Meeting.at(tmp_path / "uffdprefetch-meet-run", 0)
    while taken.take("summary-1") is None:
        pass
    thread.join(20)
    assert other == [None]
