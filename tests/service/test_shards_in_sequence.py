# SPDX-License-Identifier: Apache-2.0
"""Shards of a checkpoint read one after the other under `wrap`, on the slow bed: the next one is on
its way before its first byte is touched, and nothing of it stays open (readers/next_shard.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from components import slowly
from conftest import wait_until
from harness import MIB, Start, auto, python

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache, resident_bytes

pytest_plugins = ("harness_fixtures", "components")
pytestmark = auto

SIZE, COUNT = 96 * MIB, 3

#: Reads files in order, each mapped when it is its turn; waits near the end of the first one.
READER = """
paths = sys.argv[1:]
sha = hashlib.sha256()
for path in paths:
    m = Mapping(path)
    for at in range(0, m.length, 1 << 20):
        if path == paths[0] and at == m.length - (2 << 20):
            say(near=path)
            hear()
        sha.update(m.view[at : at + (1 << 20)])
say(digest=sha.hexdigest())
"""


def names(kind: str) -> list[str]:
    """Others for each test: the bed remembers when a file of a name was written."""
    if kind == "index":
        return [f"part_{letter}.safetensors" for letter in "abc"]
    return [f"{kind}-{number:05d}-of-{COUNT:05d}.safetensors" for number in range(1, COUNT + 1)]


@pytest.fixture
def shards(store: Path, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Files of which no word is there twice; where their names do not tell, with an index."""
    made = names(request.param)
    for number, name in enumerate(made):
        begin = number * SIZE // 8
        numpy.arange(begin, begin + SIZE // 8).tofile(store / name)
    index = store / "model.safetensors.index.json"
    if request.param == "index":
        weights = {f"w{number}": name for number, name in enumerate(made)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    yield made
    for name in made:
        (store / name).unlink()
    index.unlink(missing_ok=True)


@pytest.mark.parametrize("shards", ["model", "index"], indirect=True)
def test_the_next_shard_is_on_its_way_before_it_is_mapped(
    job: Start, bed: SlowBed, store: Path, shards: list[str]
) -> None:
    paths = [bed.path(name) for name in shards]
    for path in paths:
        drop_cache(path)
    plain = job(python(READER, *(store / name for name in shards)), wrap=False)
    plain.line()
    plain.tell()
    digest = plain.line()["digest"]
    plain.finish()
    bed.reset()
    # half of a shard: else all of the next one lies in the window
    work = job(python(READER, *paths), options=("--budget", "48MiB"))
    assert work.line()["near"]
    wait_until(
        lambda: resident_bytes(paths[1]) >= 4 * MIB,
        lambda: f"some of {paths[1]}: {resident_bytes(paths[1])} bytes",
    )
    assert resident_bytes(paths[1]) < SIZE, "no more than lies in its window"
    assert resident_bytes(paths[2]) == 0, "not the one after that"
    work.tell()
    assert work.line()["digest"] == digest
    summary = work.finish().good().summary
    assert summary is not None
    assert bed.counters()["bytes"] <= COUNT * SIZE * 1.03, "each byte once"
    files = {os.path.basename(f["path"]): f for f in summary["files"]}
    assert files[shards[1]]["served_by"] and files[shards[1]]["prefetched_bytes"] > SIZE // 2


@pytest.mark.parametrize("shards", ["pool"], indirect=True)
def test_the_next_shard_comes_into_the_pool_before_it_is_mapped(
    job: Start, bed: SlowBed, store: Path, shards: list[str]
) -> None:
    """Where not all of it fits, too: what is to be read next does not leave it. (Its window is
    shorter there than what the reader leaves of the first one.)"""
    paths = [bed.path(name) for name in shards]
    plain = job(python(READER, *(store / name for name in shards)), wrap=False)
    plain.line()
    plain.tell()
    digest = plain.line()["digest"]
    plain.finish()
    for budget in ("1GiB", "64MiB"):
        for path in paths:
            drop_cache(path)
        bed.reset()
        options = ("--engine", "pool", "--budget", budget)
        work = job(python(READER, *paths), options=options)
        assert work.line()["near"]
        if budget == "1GiB":
            wait_until(
                lambda: bed.counters()["bytes"] >= SIZE + 2 * MIB,
                lambda: f"some of the next one: {bed.counters()['bytes']} bytes",
            )
        assert bed.counters()["bytes"] <= 2 * SIZE + MIB, "nothing of the one after that"
        work.tell()
        assert work.line()["digest"] == digest
        summary = work.finish().good().summary
        assert summary is not None and summary["degradations"] == []
        assert bed.counters()["bytes"] <= COUNT * SIZE * 1.03, "each byte once"
        files = {os.path.basename(f["path"]): f for f in summary["files"]}
        assert files[shards[1]]["served_by"] == "pool"
        assert all(resident_bytes(path) < SIZE // 8 for path in paths), "past the page cache"


@pytest.mark.parametrize("shards", ["between"], indirect=True)
def test_what_was_asked_of_the_next_shard_comes_though_this_one_is_unmapped(
    job: Start, bed: SlowBed, shards: list[str]
) -> None:
    """Between two shards a loader has none mapped; the storage need not rest."""
    paths = [bed.path(name) for name in shards]
    for path in paths:
        drop_cache(path)
    # by the link: of what lies in memory unread some may be taken away again
    code = """
    def read():
        with open(sys.argv[2]) as file:
            return json.load(file)["bytes"]

    m = Mapping(sys.argv[1])
    for at in range(0, m.length, PAGE):
        m.view[at]
    before = read()
    m.unmap()
    say(before=before)
    hear()
    """
    # who only touches waits for a slow link all the time: much of what was asked is to come then
    with slowly(bed, 100_000_000):
        work = job(python(code, paths[0], bed.path(CONTROL_NAME)))
        before = work.line()["before"]
        wait_until(
            lambda: bed.counters()["bytes"] >= min(2 * SIZE, before + 16 * MIB),
            lambda: f"more than {before} bytes: {bed.counters()}",
        )
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert summary["totals"]["prefetched_bytes"] >= 16 * MIB


@pytest.mark.parametrize("shards", ["unmapped"], indirect=True)
def test_a_shard_that_is_not_mapped_after_all_does_not_stay_open(
    job: Start, bed: SlowBed, shards: list[str]
) -> None:
    paths = [bed.path(name) for name in shards]
    for path in paths:
        drop_cache(path)
    work = job(python(READER, paths[0]))
    work.line()
    wait_until(lambda: resident_bytes(paths[1]) >= 4 * MIB, "some of the next one")

    def holders() -> list[str]:
        found = []
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(link) == str(paths[1]):
                    found.append(str(link))
            except OSError:
                continue
        return found

    wait_until(lambda: not holders(), lambda: f"nobody to have it open: {holders()}")
    work.tell()
    assert work.line()["digest"]
    summary = work.finish().good().summary
    assert summary is not None and summary["degradations"] == []
