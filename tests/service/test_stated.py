# SPDX-License-Identifier: Apache-2.0
"""`--whole GLOB` under `wrap`, on the slow bed: what the user has said will be needed is on its way
before the job has touched a byte of it (docs/bulk.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from components import ARRAY
from conftest import wait_until
from harness import Start, python

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ("harness_fixtures", "components")

#: Maps the file, touches it only when it is told to, and compares it with the one beside the bed.
SITTER = """
path, beside = sys.argv[1:3]
m = Mapping(path)
say(mapped=m.length)
while (word := hear()) != "end":
    with open(beside, "rb") as plain:
        say(right=all(
            plain.read(1 << 20) == bytes(m.view[at : at + (1 << 20)])
            for at in range(0, m.length, 1 << 20)
        ))
"""


def start(job: Start, bed: SlowBed, store: Path, *options: str) -> Any:
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    work = job(python(SITTER, path, store / ARRAY), options=options)
    assert work.line()["mapped"]
    return work


def end(work: Any, bed: SlowBed) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was said of the file, the summary)."""
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = [f for f in summary["files"] if f["path"] == str(bed.path(ARRAY))]
    return file["stated"], summary


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_a_file_of_the_users_is_read_whole_before_it_is_touched(
    job: Start, bed: SlowBed, store: Path, engine: str
) -> None:
    size = (store / ARRAY).stat().st_size
    options = "--engine", engine, "--budget", "512MiB", "--whole", ARRAY
    work = start(job, bed, store, *options)
    wait_until(lambda: bed.counters()["bytes"] >= size, lambda: f"all of it: {bed.counters()}")
    came = bed.counters()["bytes"]
    work.tell("read")
    assert work.line()["right"]
    # a kernel that takes single pages away at any moment may have to bring some back
    assert bed.counters()["bytes"] - came < size * 0.03
    said, summary = end(work, bed)
    assert said["state"] in ("streamed", "done") and said["by"] == "--whole"
    assert size * 0.9 <= said["read_bytes"] <= size * 1.03
    assert bed.counters()["bytes"] < size * 1.05, "once"
    assert summary["degradations"] == []


def test_a_file_that_is_not_named_or_does_not_fit_is_not(
    job: Start, bed: SlowBed, store: Path
) -> None:
    for options, findings in (("--whole", "*.other"), 0), (("--whole", "*", "--budget", "4MiB"), 1):
        work = start(job, bed, store, *options)
        work.tell("read")
        assert work.line()["right"]
        said, summary = end(work, bed)
        assert (said["state"] if said else None) == ("refused" if findings else None)
        found = [line for line in summary["degradations"] if "--whole" in line]
        assert len(found) == findings
