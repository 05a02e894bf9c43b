# SPDX-License-Identifier: Apache-2.0
"""Known orders and faults: readers die, fork, live in a namespace, their file changes, the service
is killed. Nothing gives a wrong byte, and nobody hangs. (The service killed under one reader:
test_plan_runs.py. Another user: test_unprivileged.py.)"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pool_hammer
import pytest
from conftest import HANG_SECONDS, require, wait_until
from harness import MIB, Records, Start, python, write_records
from plan_jobs import BATCH, Data, batches, followed, live, options_of, plan_file, reader, shuffled

from uffdprefetch.demo.bed import drop_cache
from uffdprefetch.orders.indexer import Indexer

pytest_plugins = ("harness_fixtures", "plan_jobs")
pytestmark = pytest.mark.slow

both_engines = pytest.mark.parametrize("engine", ["cache", "pool"])
#: By so many records in a row it is seen that a reader is elsewhere in its order
#: (predict/order/validator.py).
SEEN = 40 // BATCH + 1


def engine_options(plan: str, engine: str) -> tuple[str, ...]:
    return ("--engine", engine, *options_of(plan, engine))


def unhurried(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without waiting for anything."""
    return [{**step, "wait": None} for step in steps]


# ---- readers --------------------------------------------------------------------------------


@both_engines
def test_when_a_rank_is_killed_the_others_order_is_followed_and_so_is_its_successors(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records))
    parts = [order[rank::2] for rank in range(2)]
    plan = plan_file(tmp_path, cold, [{str(rank): part for rank, part in enumerate(parts)}])
    options = engine_options(plan, engine)

    def rank(number: int, steps: list[dict[str, Any]], name: str) -> Any:
        words = reader(tmp_path, cold, steps, name)
        return job(words, options, RANK=str(number), WORLD_SIZE="2")

    steps = batches(parts[0])
    steps[3]["say"] = steps[-1]["say"] = True
    survivor = rank(0, steps, "survivor")
    steps = batches(parts[1])
    steps[3]["say"] = steps[-1]["say"] = True  # it does not end before it is killed
    victim = rank(1, [*steps[:4], *unhurried(steps[4:])], "victim")
    pid = victim.line()["pid"]
    survivor.line()
    victim.tell()
    os.kill(pid, signal.SIGKILL)
    assert victim.finish().status == -signal.SIGKILL
    survivor.tell()
    survivor.line()  # to its end each batch was there before it was read
    steps = batches(parts[1], None)
    successor = rank(1, [*unhurried(steps[:SEEN]), *steps[SEEN:]], "successor")
    assert successor.finish().good().lines[0]["sha256"] == cold.digest(parts[1])
    survivor.tell()
    done = survivor.finish().good()
    assert done.lines[0]["sha256"] == cold.digest(parts[0])
    assert {plan["rank"] for plan in followed(done.summary)} == {0, 1}


@both_engines
@pytest.mark.parametrize("many", [False, True], ids=["a few", "many"])
def test_a_reader_that_forks_reads_on_beside_its_child(
    job: Start, cold: Data, tmp_path: Path, engine: str, many: bool
) -> None:
    """The child reads what is not in the order: a little of it does not disturb the parent's."""
    half = cold.records // 2
    order, others = shuffled(range(half)), shuffled(range(half, cold.records))
    others = others if many else others[:8]
    plan = plan_file(tmp_path, cold, [{"0": order}])
    steps = batches(order)
    steps[4]["fork"] = others
    if many:
        steps[5:] = unhurried(steps[5:])
    done = job(reader(tmp_path, cold, steps), engine_options(plan, engine)).finish().good()
    said = {key: line[key] for line in done.lines for key in ("sha256", "child") if key in line}
    assert said == {"sha256": cold.digest(order), "child": cold.digest(others)}
    if not many:
        followed(done.summary)


@both_engines
@pytest.mark.parametrize("whole", [True, False], ids=["wrap too", "the job only"])
def test_an_order_is_followed_in_a_pid_namespace(
    job: Start, cold: Data, tmp_path: Path, engine: str, whole: bool
) -> None:
    require(os.geteuid() == 0 and shutil.which("unshare"), "needs root and unshare")
    order = shuffled(range(cold.records // 2))
    plan = plan_file(tmp_path, cold, [{"0": order}])
    inside = ("unshare", "-p", "-f", "--mount-proc")
    words = reader(tmp_path, cold, batches(order))
    before, words = (inside, words) if whole else ((), [*inside, *words])
    done = job(words, engine_options(plan, engine), before=before).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    (walked,) = followed(done.summary)
    assert walked["sent_bytes"] > 0


# ---- the file -------------------------------------------------------------------------------

PIECE = 65536
#: An epoch a word, until one is "end"; with "new" of a mapping made then. It skips what the file is
#: too short for.
EPOCHS = """
orders = json.load(open(sys.argv[2]))
m = Mapping(sys.argv[1])
say(ready=True)
for order in orders:
    word = hear()
    if word == "new":
        m = Mapping(sys.argv[1])
    sha, count = hashlib.sha256(), 0
    for start, end in order:
        if end <= m.length and (word != "cut" or end <= os.stat(sys.argv[1]).st_size):
            sha.update(m.view[start:end])
            count += 1
            time.sleep(0.0005)
    say(sha256=sha.hexdigest(), count=count)
"""


def overwrite(path: Path) -> None:
    write_records(path, path.stat().st_size + MIB, seed=8)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(random.Random(8).randbytes(MIB))


def cut(path: Path) -> None:
    os.truncate(path, 5 * MIB)


def replace(path: Path) -> None:
    new = path.with_name("new.bin")
    write_records(new, path.stat().st_size + MIB, seed=8)
    os.rename(new, path)


def bytes_plan(tmp_path: Path, file: Path, orders: list[list[list[int]]]) -> Path:
    """A plan of byte ranges for rank 0."""
    epochs = [{"ranks": {"0": order}} for order in orders]
    entry = {"file": str(file), "unit": "bytes", "epochs": epochs}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
    return plan


@both_engines
@pytest.mark.parametrize("change", [overwrite, grow, cut, replace])
def test_when_the_file_changes_between_epochs_the_job_reads_what_is_in_it(
    job: Start, own_records: Records, tmp_path: Path, engine: str, change: Callable[[Path], None]
) -> None:
    path = own_records.path
    pieces = [[at, at + PIECE] for at in range(0, own_records.size_bytes, PIECE)]
    orders = [random.Random(epoch).sample(pieces, len(pieces)) for epoch in range(5)]
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    plan = bytes_plan(tmp_path, path, orders)
    old = path.read_bytes()

    def read(data: bytes, epoch: int) -> dict[str, Any]:
        fits = [(start, end) for start, end in orders[epoch] if end <= len(data)]
        joined = b"".join(data[start:end] for start, end in fits)
        return {"sha256": hashlib.sha256(joined).hexdigest(), "count": len(fits)}

    drop_cache(path, patience_seconds=HANG_SECONDS)
    options = ("--engine", engine, "--plan", str(plan), "--budget", "4MiB")
    work = job(python(EPOCHS, path, tmp_path / "orders.json"), options)
    work.line()
    wait_until(lambda: live(work)["plans"], "the order")
    work.tell()
    assert work.line() == read(old, 0)
    change(path)
    new = path.read_bytes()
    for epoch in range(1, 3):
        work.tell("cut" if change is cut else "go")
        assert work.line() == read(old if change is replace else new[: len(old)], epoch)
    for epoch in range(3, 5):
        work.tell("new")
        assert work.line() == read(new, epoch)
    done = work.finish().good()
    assert done.summary is not None
    ends = ("given back to the kernel", "not followed any more")
    told = [text for text in done.summary["degradations"] if any(end in text for end in ends)]
    if change is not replace:  # once, or for each step of a writer that takes its time
        assert told and all(ends[0] in text for text in told), told
    elif engine == "pool" or told:  # in the page cache few touches tell that an epoch has ended
        assert len(told) == 1 and ends[1] in told[0], told


@pytest.mark.parametrize("name", ["own.bin", "own.*"])
@pytest.mark.parametrize("change", [grow, replace])
def test_no_order_is_found_in_another_file_than_the_reader_maps(
    own_records: Records, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    path = own_records.path
    plan = bytes_plan(tmp_path, path.with_name(name), 2 * [[[0, PIECE]]])
    resolver = Indexer(str(tmp_path), str(plan))

    def ask(status: os.stat_result, epoch: int) -> dict[str, Any]:
        key = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
        request = {"do": "plan", "path": str(path), "key": key, "rank": 0, "epoch": epoch}
        return resolver.answer(request, lambda answer: None)

    before = path.stat()
    assert ask(before, 0)["order"]
    change(path)
    refused = ask(before, 1)
    assert "changed or replaced" in refused["error"] and "order" not in refused
    assert ask(path.stat(), 0)["order"]


# ---- the pool -------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [False, True], ids=["", "the service is killed"])
def test_no_word_from_a_pool_that_evicts_by_plan_is_wrong(
    env: dict[str, str], tmp_path: Path, kill: bool
) -> None:
    """Without a kill the pool must have evicted by the orders, or nothing is shown: readers that
    compute nothing may outrun a service that gets no processor, so a few runs are tried."""
    epochs, size = 6, 32 * MIB
    for trial in range(4):
        directory = tmp_path / str(trial)
        directory.mkdir()
        found = pool_hammer.follow(
            pool_hammer.program(directory), directory, env, epochs=epochs, size_bytes=size,
            budget_bytes=size // 4, kill=kill,
        )  # fmt: skip
        assert (found["wrong"], found["zeros"]) == (0, 0), found["said"]
        assert found["words"] > epochs * size // 8 * 0.8
        if kill:
            assert "the service died during the run" in found["said"]
            return
        why_nothing = pool_hammer.why_no_plan_is_shown(found, epochs, size)
        if not why_nothing:
            return
    pytest.fail(why_nothing)
