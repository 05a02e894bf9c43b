# SPDX-License-Identifier: Apache-2.0
"""`wrap --plan` on the slow bed: what comes over the link, what the reader finds, and that whatever
goes wrong with a plan the job reads right bytes. The bed counts bytes, it has no link to wait for.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import uffdprefetch, wait_until
from harness import MIB, Start, auto, python
from plan_jobs import (
    BATCH,
    Data,
    batches,
    followed,
    live,
    options_of,
    plan_file,
    reader,
    shuffled,
)

pytest_plugins = ("harness_fixtures", "plan_jobs")
pytestmark = auto


@pytest.fixture(params=["cache", "pool"])
def engine(request: pytest.FixtureRequest, env: dict[str, str]) -> str:
    """The engine of the test's jobs, each in its turn."""
    env["UFFDPREFETCH_ENGINE"] = request.param
    return str(request.param)


# ---- a right plan ----------------------------------------------------------------------------


def test_what_the_order_names_is_there_before_it_is_read_and_comes_once(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records // 2))  # a split: the other half stays away
    plan = plan_file(tmp_path, cold, [{"0": order}])
    done = job(reader(tmp_path, cold, batches(order)), options_of(plan, engine)).finish().good()
    (line,) = done.lines
    assert line["sha256"] == cold.digest(order)
    (walked,) = followed(done.summary)
    assert (walked["rank"], walked["items"], walked["epoch"]) == (0, len(order), 0)
    needed = cold.page_bytes(order)
    assert needed <= cold.read_bytes() <= 1.03 * needed + MIB  # and tree pages, read by the kernel
    assert done.summary is not None
    assert done.summary["totals"]["demand_misses"] < len(order) // 10


def test_the_second_epoch_goes_by_its_own_order(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    first, second = shuffled(range(half), 1), shuffled(range(half, 2 * half), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    steps = batches(first) + batches(second, "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan, engine)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first + second)
    (walked,) = followed(done.summary)
    assert (walked["epoch"], walked["items"]) == (1, len(second))
    assert walked["read_items"] > len(first)


def test_a_pool_smaller_than_the_data_reads_again_only_what_it_cannot_hold(
    job: Start, cold: Data, tmp_path: Path, env: dict[str, str]
) -> None:
    env["UFFDPREFETCH_ENGINE"] = "pool"
    first, second = shuffled(range(cold.records), 1), shuffled(range(cold.records), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    # In epoch 2 it does not wait: what is mapped still is read without a touch.
    steps = batches(first) + [{**step, "wait": None} for step in batches(second)]
    budget = 32 * MIB
    words = ("--plan", plan, "--budget", str(budget))
    done = job(reader(tmp_path, cold, steps), words).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first + second)
    (walked,) = followed(done.summary)
    assert walked["epoch"] == 1
    # Belady's optimum is the difference, 17 MB; without an order it is all of the file, 50.
    assert cold.read_bytes() - cold.file_bytes <= 1.6 * (cold.file_bytes - budget)
    assert done.summary is not None
    assert done.summary["pool"]["resident_peak_bytes"] <= budget


def test_a_repeated_epoch_is_read_as_often_as_the_job_likes(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(200))
    plan = plan_file(tmp_path, cold, [{"*": order}], repeat=True)
    steps = batches(order) + 2 * batches(order, "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(3 * order)
    followed(done.summary)
    assert cold.read_bytes() <= 1.03 * cold.page_bytes(order) + MIB


def test_each_rank_goes_by_its_own_order(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records))
    parts = [order[rank::2] for rank in range(2)]
    plan = plan_file(tmp_path, cold, [{str(rank): part for rank, part in enumerate(parts)}])
    options = ("--plan", plan, *(("--budget", "16MiB") if engine == "cache" else ()))
    words = [reader(tmp_path, cold, batches(part), f"w{r}") for r, part in enumerate(parts)]
    launcher = """
    import subprocess
    started = [
        subprocess.Popen(words, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank, words in enumerate(json.loads(sys.argv[1]))
    ]
    sys.exit(max(child.wait() for child in started))
    """
    done = job(python(launcher, json.dumps(words)), options).finish().good()
    digests = {line["rank"]: line["sha256"] for line in done.lines}
    assert digests == {str(rank): cold.digest(part) for rank, part in enumerate(parts)}
    plans = {plan["rank"]: plan for plan in followed(done.summary)}
    assert [plans[rank]["items"] for rank in range(2)] == [len(part) for part in parts]
    assert cold.read_bytes() <= 1.03 * cold.file_bytes


@pytest.mark.parametrize("unit", ["range", "keys", "bytes"])
def test_an_order_of_another_unit_is_followed_as_well(
    job: Start, cold: Data, tmp_path: Path, unit: str
) -> None:
    order = shuffled(range(cold.records // 2))
    told: Any = [f"{record:08}" for record in order]
    if unit == "range":  # of record numbers: every other one
        order = list(range(0, cold.records, 2))
        told, unit = {"range": [0, cold.records, 2]}, "records"
    elif unit == "bytes":
        told = [[start, start + length] for start, length in cold.extents[order].tolist()]
    plan = plan_file(tmp_path, cold, [{"0": told}], unit)
    done = job(reader(tmp_path, cold, batches(order)), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    (walked,) = followed(done.summary)
    assert walked["items"] == len(order)


def test_a_job_that_stops_early_costs_what_lay_ahead_of_it(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(cold.records))
    plan = plan_file(tmp_path, cold, [{"0": order}])
    read = order[: 1 + 16 * BATCH]
    done = job(reader(tmp_path, cold, batches(read)), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(read)
    followed(done.summary)
    assert cold.read_bytes() <= 1.03 * cold.page_bytes(read) + 8 * MIB + 4 * MIB  # and a slice


def test_after_an_epoch_that_was_cut_short_the_next_ones_order_is_followed(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    first, second = shuffled(range(half), 1), shuffled(range(half, 2 * half), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    begun = 4 * BATCH  # by these it is seen that another epoch has begun
    steps = [*batches(first)[:9], {"records": second[:begun], "wait": None, "say": False}]
    steps += batches(second[begun:], "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan, engine)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first[: 1 + 8 * BATCH] + second)
    (walked,) = followed(done.summary)
    assert walked["epoch"] == 1


# ---- a wrong plan ----------------------------------------------------------------------------


def test_a_plan_of_other_records_is_dropped_with_a_line_and_costs_little(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    order, wrong = shuffled(range(half)), shuffled(range(half, cold.records))
    plan = plan_file(tmp_path, cold, [{"0": wrong}])
    # A word after each batch: on a busy machine the service, too, comes to its turn.
    steps = [{**step, "wait": step["wait"] and "bytes", "say": True} for step in batches(order)]
    work = job(reader(tmp_path, cold, steps), options_of(plan, engine))
    for _ in steps[1:]:
        work.line()
        work.tell()
    work.line()
    dropped = "not followed any more"
    wait_until(
        lambda: any(dropped in text for text in live(work)["degradations"]),
        lambda: f"{dropped!r} among {live(work)}",
    )
    work.tell()
    done = work.finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    assert done.summary is not None
    (walked,) = done.summary["plans"]
    assert walked["dropped"] is not None, walked
    (line,) = [text for text in done.summary["degradations"] if "not followed any more" in text]
    assert walked["dropped"] in line


def test_a_plan_that_does_not_fit_the_file_is_told_and_the_job_reads_on(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(100))
    plan = plan_file(tmp_path, cold, [{"0": [*order, cold.records]}])
    steps = [{**step, "wait": None} for step in batches(order)]
    steps[0]["say"] = True
    work = job(reader(tmp_path, cold, steps), options_of(plan))
    work.line()
    wanted = f'files[0].epochs[0].ranks["0"][100]: record {cold.records}:'
    wait_until(lambda: any(wanted in text for text in live(work)["degradations"]), wanted)
    work.tell()
    done = work.finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    assert done.summary is not None
    assert any(wanted in text for text in done.summary["degradations"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": "uffdprefetch.plan/1", "files": [{"fiel": "a"}]}', "fiel"),
        ('{"schema": "uffdprefetch.plan/1", "files": [', "JSON"),
        (None, "cannot read"),
    ],
    ids=["unknown key", "cut off", "missing"],
)
def test_a_bad_plan_is_one_line_and_status_2_before_the_job_runs(
    env: dict[str, str], tmp_path: Path, text: str | None, reason: str
) -> None:
    plan, marker = tmp_path / "plan.json", tmp_path / "ran"
    if text is not None:
        plan.write_text(text)
    words = uffdprefetch("wrap", "--plan", str(plan), "--", "touch", str(marker))
    ended = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert not marker.exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("uffdprefetch: ") and str(plan) in line
    assert reason in line


# ---- death -----------------------------------------------------------------------------------


def test_the_job_reads_right_bytes_when_the_service_is_killed_on_the_way(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records))
    plan = plan_file(tmp_path, cold, [{"0": order}])
    steps = batches(order)
    steps[3]["say"] = True  # until here the plan was followed
    for step in steps[4:]:
        step["wait"] = None
    work = job(reader(tmp_path, cold, steps), options_of(plan, engine))
    assert work.line()["step"] == 3
    work.kill_service()
    work.tell()
    done = work.finish()
    assert done.status == 0, done.stderr
    assert done.lines[0]["sha256"] == cold.digest(order)
