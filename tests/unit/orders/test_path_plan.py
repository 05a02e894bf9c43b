# SPDX-License-Identifier: Apache-2.0
"""orders/path_plan.py: plan files of whole files, as JSON and as text; and `uffdprefetch plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.orders import paths_file
from uffdprefetch.orders.indexer import Indexer
from uffdprefetch.orders.path_plan import PathPlan
from uffdprefetch.orders.plan_file import load
from uffdprefetch.report import plan as report

pytestmark = warnings_fail

NAMES = [f"c{i % 2}/{i}.jpg" for i in range(6)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in NAMES[:5]:  # one is missing
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def written(directory: Path, paths: Any, **more: Any) -> PathPlan:
    path = directory / "plan.json"
    path.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "paths": paths, **more}))
    plan = load(str(path)).paths
    assert plan is not None
    return plan


def read(plan: PathPlan, rank: int | None, epoch: int) -> list[str] | None:
    order = plan.order(rank, epoch)
    return None if order is None else order.paths(0, len(order))


def whole(directory: Path, *numbers: int) -> list[str]:
    return [str(directory / NAMES[i]) for i in numbers]


def test_a_text_file_has_a_path_a_line_for_all_ranks_and_epochs(directory: Path) -> None:
    lines = [NAMES[3], "", str(directory / NAMES[1]) + "\r", NAMES[3]]
    (directory / "plan.txt").write_text("\n".join(lines))
    plan = load(str(directory / "plan.txt"))
    assert plan.files == () and plan.paths is not None
    for rank, epoch in ((0, 0), (7, 3), (None, 1)):
        assert read(plan.paths, rank, epoch) == whole(directory, 3, 1, 3)


def test_json_has_orders_of_numbers_of_a_list(directory: Path) -> None:
    (directory / "list.txt").write_text("\n".join(NAMES) + "\n")
    np.save(directory / "e0.npy", np.array([5, 0]))
    plan = written(directory, {
        "list": "list.txt", "repeat": True,
        "epochs": [{"ranks": {"0": "e0.npy", "*": [2]}}, {"ranks": {"0": {"range": [3, 0, -1]}}}],
    })  # fmt: skip
    assert read(plan, 0, 0) == whole(directory, 5, 0)
    assert read(plan, 4, 0) == whole(directory, 2)
    assert read(plan, 0, 1) == read(plan, 0, 9) == whole(directory, 3, 2, 1)
    assert read(plan, 1, 1) is None
    assert read(written(directory, {"list": NAMES}), 1, 2) == whole(directory, *range(6))


def test_both_records_and_files_may_be_planned(directory: Path) -> None:
    (directory / "raw.bin").write_bytes(bytes(100))
    entry = {"file": "raw.bin", "unit": "bytes", "epochs": [{"ranks": {"*": [[0, 10]]}}]}
    written(directory, {"list": NAMES}, files=[entry])
    plan = load(str(directory / "plan.json"))
    assert len(plan.files) == 1 and plan.paths is not None
    document = report.document(plan, None, None, 1 << 20, None)
    assert len(document["files"]) == 1 and document["paths"]["files"] == 6
    assert "6 files of" in str(report.text(document).tables[1])


@pytest.mark.parametrize(
    ("paths", "wrong"),
    [
        ([], "paths: a list: an object with list, epochs, repeat"),
        ({}, "paths: no 'list'"),
        ({"list": 3}, "paths.list: 3: a list of paths, or the name of a text file"),
        ({"list": []}, "paths.list: no path"),
        ({"list": ["a", ""]}, "paths.list[1]: an empty text"),
        ({"list": ["a" * 5000]}, "paths.list: paths: an empty path, or one of 4096 bytes"),
        ({"list": "../x"}, "a file beside the plan file"),
        ({"list": "none.txt"}, "none.txt"),
        ({"list": ["a"], "repeat": True}, "paths.repeat: of epochs"),
        ({"list": ["a"], "epochs": [{"ranks": {"0": ["a"]}}]}, "[0]: text: a record's number"),
        ({"list": ["a"], "epochs": [{"ranks": {"0": [1]}}]}, "[0]: path 1: the list has 1"),
    ],
)
def test_each_way_to_be_wrong_is_one_line(directory: Path, paths: Any, wrong: str) -> None:
    with pytest.raises(UffdPrefetchError) as error:
        read(written(directory, paths), 0, 0)
    assert wrong in error.value.message and error.value.exit_code == EXIT_USAGE
    assert "\n" not in error.value.message


def test_what_is_planned_is_shown(directory: Path) -> None:
    (directory / "plan").write_text("\n".join([*NAMES, NAMES[0]]))
    document = report.document(load(str(directory / "plan")), 0, None, 1 << 20, None)
    paths = document["paths"]
    assert (paths["missing_files"], paths["looked_for_files"]) == (1, 7)
    assert paths["orders"] == [
        {"epoch": 0, "rank": "*", "items": 7, "unique_files": 6, "repeated_items": 1}
    ]
    with pytest.raises(UffdPrefetchError, match="nothing is said of rank 3"):
        written(directory, {"list": NAMES, "epochs": [{"ranks": {"0": [1]}}]})
        report.document(load(str(directory / "plan.json")), 3, None, 1 << 20, None)


def test_the_helper_answers_with_the_order_of_a_rank(directory: Path, tmp_path: Path) -> None:
    written(directory, {"list": NAMES, "epochs": [{"ranks": {"1": [4, 2]}}]})
    there = tmp_path / "helper"
    there.mkdir()
    indexer = Indexer(str(there), str(directory / "plan.json"))

    def ask(rank: int, epoch: int) -> Any:
        question = {"do": "plan_paths", "rank": rank, "epoch": epoch}
        return indexer.answer(question, lambda _: None)

    order = paths_file.read(str(there), ask(1, 0)["file_order"])
    assert order.paths(0, 9) == whole(directory, 4, 2)
    assert ask(0, 0) == ask(1, 1) == {"file_order": None}
