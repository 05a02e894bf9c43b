# SPDX-License-Identifier: Apache-2.0
"""What a job reads through a mapping on a Lustre client is right, and comes in whole requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lustre import client, job
from lustre.conftest import Data

#: RPCs beside those of 4 MiB: one for the file's format, what a job reads before we know of it, on
#: an emulated machine 4 to 6, and two each of 1 and of 2 MiB until windows are whole requests,
#: which bring what one or two of 4 MiB would have. Of many it is a tenth.
FIRST_RPCS = 10


def options_of(case: str, data: Data, directory: Path) -> tuple[str, tuple[str, ...]]:
    """(pattern, options of wrap)."""
    pattern = "contiguous"
    options: tuple[str, ...] = ("--engine", "pool") if case.startswith("pool") else ()
    if "skipping" in case:
        pattern = "skipping:4"
    if "plan" in case:
        directory.mkdir(parents=True, exist_ok=True)
        plan = directory / "plan.json"
        plan.write_text(json.dumps(job.plan_of(str(data.path), data.size_bytes)))
        pattern, options = "shuffled", (*options, "--plan", str(plan))
    return pattern, options


def check(case: str, data: Data, directory: Path) -> client.Ran:
    pattern, options = options_of(case, data, directory)
    # an emulated machine's service, which looks 20 times later, must come to be ahead of the job
    more = ["--compute", "20", "--planned" if "plan" in case else "--known"]
    more += [f"--{way}" for way in ("weights", "populated") if way in case]
    ran = client.run_job(directory, data.path, pattern, options, more=tuple(more))
    assert ran.said["digest"] == data.digest
    assert ran.said["bytes"] == data.size_bytes
    most = data.least_rpcs + max(FIRST_RPCS, data.least_rpcs // 10)
    # beside the pool's samples: a page of each 4 MiB a second, once a file was open for 5 s
    samples = ran.rpcs.by_pages.get(1, 0) if case.startswith("pool") else 0
    made = ran.requests.by_program
    assert ran.rpcs.count - samples <= most, f"{case}: {ran.rpcs}, {made}"
    assert ran.rpcs.bytes - samples * client.PAGE_BYTES <= 1.01 * data.size_bytes, str(ran)
    return ran


@pytest.mark.parametrize("case", ["contiguous", "weights", "populated", "pool"])
def test_a_file_is_read_once_in_whole_requests(case: str, data: Data, tmp_path: Path) -> None:
    ran = check(case, data, tmp_path)
    assert ran.summary is not None
    (file,) = ran.summary["files"]
    assert file["file_system"] == "lustre"
    assert file["served_by"] == ("pool" if case == "pool" else "page_tables")
    if case == "contiguous":
        assert file["warmed_by"] == "pread, FADV_RANDOM of 4096 KiB, known of Lustre"


@pytest.mark.long_form
@pytest.mark.parametrize(
    "case",
    [
        "contiguous",
        "weights",
        "populated",
        "skipping",
        "shuffled by plan",
        "pool",
        "pool populated",
        "pool skipping",
        "pool by plan",
    ],
)
def test_a_large_file_is_read_once_in_whole_requests(
    case: str, large: Data, tmp_path: Path
) -> None:
    check(case, large, tmp_path)


@pytest.mark.long_form
@pytest.mark.parametrize("policy", ["fixed", "stride"])
def test_other_policies_ask_for_whole_requests_too(policy: str, data: Data, tmp_path: Path) -> None:
    ran = client.run_job(
        tmp_path, data.path, "contiguous", ("--policy", policy),
        more=("--compute", "5", "--known"),
    )  # fmt: skip
    assert ran.said["digest"] == data.digest
    assert ran.rpcs.count <= data.least_rpcs + FIRST_RPCS, str(ran.rpcs)


@pytest.mark.long_form
@pytest.mark.parametrize(("engine", "most_mib"), [("cache", 8), ("pool", 128)])
def test_pages_here_and_there_do_not_each_bring_a_request(
    large: Data, tmp_path: Path, engine: str, most_mib: int
) -> None:
    """300 of them read the whole file of 256 MiB in the pool, and 69 MiB of it into the cache; 56
    and 6 MiB since."""
    pattern, page = "places:300", client.PAGE_BYTES
    numbers = job.order_of(pattern, -(-large.size_bytes // page), 0)
    ran = client.run_job(
        tmp_path, large.path, pattern, ("--engine", engine),
        more=(str(page), "--compute", "5", "--known"),
    )  # fmt: skip
    assert ran.said["digest"] == client.digest_of(large.path, page, numbers)
    assert ran.rpcs.bytes < most_mib << 20, str(ran.rpcs)
