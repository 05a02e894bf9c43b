# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch plan`: what it counts, what it predicts, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANG_SECONDS, uffdprefetch, warnings_fail

from uffdprefetch.cli import main
from uffdprefetch.orders import check
from uffdprefetch.predict.order.order import Order

pytestmark = [warnings_fail, pytest.mark.usefixtures("own_runtime_directory")]

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """100 records of 64 KiB; two ranks in epoch 0, every rank in epoch 1."""
    with open(tmp_path / "raw.bin", "wb") as file:
        file.truncate(100 * 64 * KIB)
    epochs = [
        {"ranks": {"0": [5, 6, 7, 5], "1": [7, 90]}},
        {"ranks": {"*": {"range": [0, 100]}}},
    ]
    entry = {"file": "raw.bin", "unit": "records", "record_size": "64k", "epochs": epochs}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert found["schema"] == "uffdprefetch.plancheck/1"
    return found


def orders(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    (file,) = document(capsys, *words)["files"]
    found: list[dict[str, Any]] = file["orders"]
    return found


def test_each_order_is_counted(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, plan)
    assert (found["plan"], found["lookahead_bytes"]) == (str(plan), 64 * MIB)
    assert found["bandwidth_bytes_per_second"] is found["seconds_per_item"] is None
    (file,) = found["files"]
    assert file["file"] == str(plan.parent / "raw.bin")
    assert (file["file_bytes"], file["epochs"], file["repeat"]) == (6400 * KIB, 2, False)
    first, second, last = file["orders"]
    size = 64 * KIB
    assert first == {
        "epoch": 0, "rank": "0", "items": 4, "bytes": 4 * size, "unique_bytes": 3 * size,
        "repeated_items": 1, "shared_bytes": size, "walked_items": 4, "walked_bytes": 4 * size,
        "requests": 1, "request_bytes": 3 * size, "mean_request_bytes": 3 * size,
        "amplification": 0.75,
    }  # fmt: skip
    assert (second["rank"], second["requests"], second["shared_bytes"]) == ("1", 2, size)
    assert (last["epoch"], last["rank"], last["items"]) == (1, "*", 100)
    assert (last["shared_bytes"], last["request_bytes"]) == (0, 6400 * KIB)


def test_one_rank_and_one_epoch(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: object) -> list[tuple[int, str]]:
        return [(row["epoch"], row["rank"]) for row in orders(capsys, plan, *words)]

    assert shown() == [(0, "0"), (0, "1"), (1, "*")]
    assert shown("--rank", 1) == [(0, "1"), (1, "*")]
    assert shown("--rank", 9) == [(1, "*")]
    assert shown("--epoch", 0) == [(0, "0"), (0, "1")]
    assert shown("--epoch", 1, "--rank", 0) == [(1, "*")]
    status, out, err = run(capsys, plan, "--rank", 9, "--epoch", 0)
    told = f"uffdprefetch: {plan}: nothing is said of rank 9 in epoch 0\n"
    assert (status, out, err) == (2, "", told)
    assert run(capsys, plan, "--epoch", 2)[0] == 2
    text = plan.read_text().replace('"unit"', '"repeat": true, "unit"')
    plan.write_text(text)
    assert shown("--epoch", 7) == [(7, "*")]


def test_small_records_cost_pages_and_a_lookahead_merges_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count, size = 100_000, 128
    with open(tmp_path / "raw.bin", "wb") as file:
        file.truncate(count * size)
    np.save(tmp_path / "order.npy", np.random.default_rng(1).permutation(count))
    entry = {"file": "raw.bin", "unit": "records", "record_size": size}
    entry["epochs"] = [{"ranks": {"0": "order.npy", "1": {"range": [0, count]}}}]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
    far, near = ({row["rank"]: row for row in orders(capsys, plan, "--lookahead", ahead)}
                 for ahead in ("64MiB", "4KiB"))  # fmt: skip
    assert far["0"]["amplification"] < 4.1 and far["1"]["amplification"] == 1.0
    assert near["0"]["amplification"] > 20 and near["1"]["amplification"] == 1.0
    assert near["0"]["requests"] > 50_000 > 100 > far["0"]["requests"]
    assert far["0"]["shared_bytes"] == far["0"]["unique_bytes"] == count * size


def test_the_prediction_is_between_the_bound_and_no_prefetching(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rank", 3, "--bandwidth", "64MiB/s", "--seconds-per-item")
    (row,) = orders(capsys, plan, *words, "10ms")
    times = row["prediction"]
    assert (times["compute_seconds"], times["lower_bound_seconds"]) == (1.0, 1.0)
    assert times["transfer_seconds"] == pytest.approx(6.25 / 64, abs=1e-6)
    # the first slice (4 MiB, or a quarter of the lookahead) comes as one request
    assert times["seconds"] == pytest.approx(1 + 4 / 64, abs=2e-3)
    assert times["stall_seconds"] == pytest.approx(times["seconds"] - 1.0)
    (row,) = orders(capsys, plan, *words, "0.1ms")
    times = row["prediction"]
    assert times["lower_bound_seconds"] == pytest.approx(6.25 / 64, abs=1e-6)
    assert times["lower_bound_seconds"] <= times["seconds"] < 0.12
    _, out, _ = run(capsys, plan, *words, "10ms")
    assert "takes" in out and "1.06 s" in out and "at 67.1 MB/s and 10 ms an item" in out


def replayed(order: Order, file_bytes: int, ahead_bytes: int, link: check.ReadRates) -> float:
    """The same item by item, a page at a time."""
    from uffdprefetch.predict.order.cursor import OrderCursor

    walk = OrderCursor(order, file_bytes)
    there: dict[int, float] = {}
    clock = free = 0.0
    for item in range(order.items):
        for piece in walk.due(ahead_bytes):
            size = piece.end - piece.start
            free = max(free, clock) + size / link.bandwidth_bytes_per_second
            for page in range(piece.start // PAGE, -(-piece.end // PAGE)):
                there[page] = free
        here = np.flatnonzero(order.item == item)
        for start, end in zip(order.starts[here].tolist(), order.ends[here].tolist(), strict=True):
            for page in range(start // PAGE, -(-end // PAGE)):
                clock = max(clock, there[page])
        clock += link.seconds_per_item
        walk.said(item + 1, 0)
    return clock


@pytest.mark.parametrize("seed", range(15))
def test_the_simulation_is_that_of_each_item_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    count, size = rng.randint(1, 400), rng.choice((PAGE, 5 * PAGE, 70_000))
    rows = np.random.default_rng(seed).permutation(count)
    order = Order(rows * size, rows * size + size, np.arange(count))
    ahead = rng.choice((1, 100_000, MIB, 64 * MIB))
    link = check.ReadRates(rng.choice((5e6, 1e8)), rng.choice((0.0, 1e-4, 1e-2)))
    found = check.simulated_epoch(order, count * size, ahead, link)["prediction"]
    plainly = replayed(order, count * size, ahead, link)
    # a request is waited for as a whole, and all that are needed before the item's end
    assert plainly - 1e-6 <= found["seconds"] <= plainly * 1.2 + size / 5e6 * 4
    assert found["seconds"] >= found["lower_bound_seconds"] - 1e-6


def test_counts_are_those_of_the_bytes() -> None:
    rng = random.Random(3)
    for _ in range(30):
        sets = []
        made = []
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(0, 8)
            starts = np.array([rng.randrange(60) for _ in range(count)], np.int64)
            ends = starts + np.array([rng.choice((0, 1, 7, 20)) for _ in range(count)], np.int64)
            order = Order(starts, ends, np.sort([rng.randrange(9) for _ in range(count)]))
            each = [set(range(a, b)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
            sets.append(set().union(*each))
            found = check.counts(order)
            assert found["bytes"] == sum(map(len, each))
            assert found["unique_bytes"] == len(sets[-1])
            made.append(order)
        shared = check.shared_bytes(made)
        for number, own in enumerate(sets):
            others = set().union(*(one for at, one in enumerate(sets) if at != number))
            assert shared[number] == len(own & others)


def test_of_a_very_long_order_the_beginning_is_walked(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SIMULATED_BYTES", 640 * KIB)
    row = orders(capsys, plan, "--epoch", 1)[0]
    assert (row["walked_items"], row["walked_bytes"], row["items"]) == (10, 640 * KIB, 100)
    _, out, _ = run(capsys, plan, "--epoch", 1)
    assert "* of the beginning only" in out
    monkeypatch.setattr(check, "SIMULATED_ITEMS", 3)
    assert orders(capsys, plan, "--epoch", 1)[0]["walked_items"] == 3


def test_what_it_shows_people(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, plan)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{plan.parent}/raw.bin (6.25 MiB): 2 epochs"
    heads, first = (" ".join(text.split()) for text in lines[1:3])
    assert heads == "epoch rank items bytes unique again shared requests mean read"
    assert first == "0 0 4 256 KiB 192 KiB 1 64 KiB 1 192 KiB 0.75x"
    assert "with 64 MiB asked for ahead" in lines[-1]
    assert "\x1b" not in out


def test_on_a_terminal_it_is_a_table(plan: Path) -> None:
    import pty

    parent, child = pty.openpty()
    with subprocess.Popen(
        [*uffdprefetch("plan", str(plan))], stdout=child, stderr=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(child)
        shown = b""
        try:
            while more := os.read(parent, 65536):
                shown += more
        except OSError:  # EIO: the other side has closed it
            pass
        _, err = process.communicate(timeout=HANG_SECONDS)
    os.close(parent)
    text = shown.decode()
    assert (process.returncode, err) == (0, b"")
    assert "epoch" in text and "192 KiB" in text and "\x1b" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gone.json",), "cannot read gone.json: No such file or directory"),
        (("{}", "--rank", "-1"), "--rank -1: they count from 0"),
        (("{}", "--epoch", "-1"), "--epoch -1: they count from 0"),
        (("{}", "--lookahead", "x"), "--lookahead: not a size: 'x' (write 4096, 16MiB or 1.5GB)"),
        (("{}", "--lookahead", "0"), "--lookahead: at least 1 byte"),
        (("{}", "--bandwidth", "1MB/s"), "--bandwidth and --seconds-per-item: give both, or none"),
        (("{}", "--seconds-per-item", "1"), "--bandwidth and --seconds-per-item: give both, or"),
        (("{}", "--bandwidth", "0", "--seconds-per-item", "1"), "--bandwidth 0: more than none"),
        (("{}", "--bandwidth", "x", "--seconds-per-item", "1"), "--bandwidth: not a rate: 'x'"),
        (
            ("{}", "--bandwidth", "1MB", "--seconds-per-item", "x"),
            "--seconds-per-item: not a duration: 'x'",
        ),
        (("{}", "--", "true"), "plan checks a plan, it starts nothing"),
    ],
)
def test_what_it_cannot_do_is_one_line_and_exit_2(
    plan: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *(word.replace("{}", str(plan)) for word in words))
    assert (status, out) == (2, "")
    assert err.startswith(f"uffdprefetch: {message}") and err.count("\n") == 1


def test_a_plan_that_does_not_fit_its_file(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(plan.parent / "raw.bin", 50 * 64 * KIB)
    status, out, err = run(capsys, plan)
    where = 'files[0].epochs[0].ranks["1"][1]: record 90: the file has 50, from 0 on'
    assert (status, out, err) == (2, "", f"uffdprefetch: {plan}: {where}\n")
    (plan.parent / "raw.bin").unlink()
    status, _, err = run(capsys, plan)
    assert status == 2 and err.count("\n") == 1
    assert f"{plan}: files[0].file: cannot read" in err
