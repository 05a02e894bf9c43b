# SPDX-License-Identifier: Apache-2.0
"""Random crops of a file on the slow bed under `wrap`: the bytes, what is read for them, and what
is said (readers/whole_files.py). Times are bench/lab/crops.py's affair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from components import ARRAY
from conftest import wait_until
from harness import MIB, Start, auto, python

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ("harness_fixtures", "components")
pytestmark = auto

ENGINES = ("cache", "pool")
#: So large that the windows of the first touches do not bring all of it.
LARGE, LARGE_BYTES = "large.bin", 256 * MIB
BATCH = 12

#: Batches of crops until the test says a word, then as many as it names; a batch may have a mapping
#: of its own, by numpy or by ourselves. Says the digest of these last crops and whether each crop
#: was as the file beside the bed has it.
CROPPER = """
import random, select
path, beside, how, batches, seed = sys.argv[1:6]
source, fd = random.Random(int(seed)), os.open(beside, os.O_RDONLY)
size = os.stat(path).st_size
if how == "numpy":
    import numpy

def mapping():
    if how == "numpy":
        return memoryview(numpy.memmap(path, dtype=numpy.uint16, mode="r")).cast("B")
    return (Mapping(path).followed() if how == "managed" else Mapping(path)).view

view, right, read = mapping(), True, 0

def batch():
    global view, right, read
    if how == "numpy":
        del view
        view = mapping()
    for _ in range(12):
        at = source.randrange(size - 2048) & ~1
        crop = bytes(view[at : at + 2048])
        right = right and crop == os.pread(fd, len(crop), at)
        read += 1

if int(batches) == 0:
    while not select.select([0], [], [], 0)[0]:
        batch()
    hear()
    say(read=read)
    batches = hear()
for _ in range(int(batches)):
    batch()
say(read=read, right=right)
"""


@pytest.fixture(scope="module")
def large(store: Path) -> Iterator[str]:
    """The name of a file of LARGE_BYTES, of which no word is there twice."""
    numpy.arange(LARGE_BYTES // 8).tofile(store / LARGE)
    yield LARGE
    (store / LARGE).unlink()


@pytest.fixture
def crops(job: Start, bed: SlowBed, store: Path) -> Callable[..., Any]:
    """crops(how, batches, options, file): a job that reads random crops of a file, which is cold
    when it begins; and its service is up."""

    def start(
        how: str = "one", batches: int = 0, options: tuple[str, ...] = (), file: str = ARRAY,
        **more: Any,
    ) -> Any:  # fmt: skip
        path = bed.path(file)
        drop_cache(path)
        bed.reset()
        words = python(CROPPER, path, store / file, how, batches, 1)
        if how == "numpy":
            words.remove("-S")
        return job(words, options=("--strict", *options), **more)

    return start


def whole_of(summary: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the summary says of it."""
    (file,) = [f for f in summary["files"] if f["path"] == str(path)]
    return dict(file["whole"] or {"state": "unseen"})


def check_streamed(summary: dict[str, Any], bed: SlowBed, large: str) -> dict[str, Any]:
    """It was read whole, once; what the summary says of it."""
    assert bed.counters()["bytes"] < LARGE_BYTES * 1.05, "once, by whomever"
    whole = whole_of(summary, bed.path(large))
    # by its stream, or what lay ahead of its places before that paid
    assert whole["state"] in ("streamed", "done", "stopped"), whole
    assert 0 <= whole["read_bytes"] <= LARGE_BYTES, whole
    return whole


def jumping(summary: dict[str, Any]) -> list[str]:
    """The findings about readers that jump about."""
    return [line for line in summary["degradations"] if "jumps about" in line]


@pytest.mark.parametrize("how", ["one", "managed", "numpy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_fits_is_streamed_and_then_no_crop_waits_for_the_link(
    crops: Callable[..., Any], bed: SlowBed, large: str, engine: str, how: str
) -> None:
    """Also where each batch maps it anew, as nanoGPT's get_batch does."""
    size = LARGE_BYTES
    work = crops(how, options=("--engine", engine, "--budget", "512MiB"), file=large)
    wait_until(
        lambda: bed.counters()["bytes"] >= size * 0.98,
        lambda: f"all of {size} bytes to come over the link: {bed.counters()}",
    )
    work.tell()
    before = work.line()["read"]
    came = bed.counters()["bytes"]
    work.tell("100")
    said = work.line()
    assert said["right"] and said["read"] == before + 100 * BATCH
    # a kernel that takes single pages away at any moment may have to bring some back
    assert bed.counters()["bytes"] - came < size * 0.03
    summary = work.finish().good().summary
    assert check_streamed(summary, bed, large)["ranks"] == [0]
    assert jumping(summary) == []


#: Enough to be known by beside a busy machine, where the service sees them in a few looks; a
#: quarter of the file, so that what is new in a look is no walk by its density.
BATCHES = 90


@pytest.mark.parametrize("how", ["one", "numpy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_over_the_budget_is_one_finding_and_costs_nothing(
    crops: Callable[..., Any], bed: SlowBed, large: str, engine: str, how: str
) -> None:
    """No byte more than plainly, but for a page here and there to see the reader by."""
    plain = crops(how, BATCHES, file=large, wrap=False)
    assert plain.line()["right"]
    plain.finish()
    plain_bytes = bed.counters()["bytes"]
    work = crops(how, BATCHES, options=("--engine", engine, "--budget", "32MiB"), file=large)
    assert work.line()["right"]
    summary = work.finish().good().summary
    # and what was read ahead of the first touches, before it was known
    assert bed.counters()["bytes"] <= plain_bytes * 1.05 + (16 << 20)
    (finding,) = jumping(summary)
    assert large in finding and "--budget" in finding and "plan" in finding
    whole = whole_of(summary, bed.path(large))
    assert whole["state"] == "refused" and whole["read_bytes"] == 0


WALKER = """
path, how, by = sys.argv[1:4]
m = Mapping(path)
if by == "cache":
    m.followed()
sha, step = hashlib.sha256(), 1 << 16
for epoch in range(2):
    places = list(range(0, m.length, step))
    if how == "backward":
        places.reverse()
    elif how == "skipping":
        places = [at for at in places if at // (3 * step) % 4 == 0]
    for at in places:
        sha.update(m.view[at : at + step])
say(digest=sha.hexdigest())
"""


@pytest.mark.parametrize(
    ("how", "engine"),
    [("order", "cache"), ("backward", "cache"), ("skipping", "cache"), ("order", "pool")],
)
def test_a_reader_that_goes_in_order_is_not_read_for_as_one_that_jumps_about(
    job: Start, bed: SlowBed, how: str, engine: str
) -> None:
    path = bed.path(ARRAY)
    drop_cache(path)
    plain = job(python(WALKER, path, how, "nobody"), wrap=False)
    digest = plain.line()["digest"]
    plain.finish()
    drop_cache(path)
    options = ("--engine", engine, "--budget", "256MiB")
    work = job(python(WALKER, path, how, engine), options=options)
    assert work.line()["digest"] == digest
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = summary["files"]
    assert file["whole"] is None
    assert file["prefetched_bytes"] > 0, "its windows are read"
    assert jumping(summary) == []


def test_two_ranks_have_the_file_read_once(
    job: Start, bed: SlowBed, store: Path, large: str
) -> None:
    path, size = bed.path(large), LARGE_BYTES
    drop_cache(path)
    bed.reset()
    ranks = [
        job(
            python(CROPPER, path, store / large, "one", 0, rank),
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        )
        for rank in range(2)
    ]  # fmt: skip
    wait_until(lambda: bed.counters()["bytes"] >= size * 0.98, "all of it to come over the link")
    for one in ranks:
        one.tell()
        assert one.line()["read"]
        one.tell("1")
        assert one.line()["right"]
    for one in ranks:
        one.finish().good()
    assert bed.counters()["bytes"] < LARGE_BYTES * 1.05, "once, by whomever"


def test_the_summary_is_json_that_says_what_was_done(
    crops: Callable[..., Any], bed: SlowBed, large: str, tmp_path: Path
) -> None:
    work = crops("one", BATCHES, options=("--budget", "32MiB"), file=large)
    assert work.line()["right"]
    summary = work.finish().good().summary
    assert json.loads((tmp_path / "run.summary.json").read_text()) == summary
    whole = whole_of(summary, bed.path(large))
    assert set(whole) == {"state", "why", "ranks", "read_bytes"}
    assert [row["pattern"] for row in summary["streams"]].count("random") <= 1


def test_the_policies_that_are_the_users_own_stream_nothing(
    crops: Callable[..., Any], bed: SlowBed
) -> None:
    work = crops("one", 40, options=("--policy", "none"))
    assert work.line()["right"]
    summary = work.finish().good().summary
    (file,) = summary["files"]
    assert file["whole"] is None and file["prefetched_bytes"] == 0
