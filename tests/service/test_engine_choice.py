# SPDX-License-Identifier: Apache-2.0
"""`--engine pool` where it cannot work: one line, the cache engine, and --strict."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require, uffdprefetch

from uffdprefetch.base import cgroup
from uffdprefetch.base.config import POOL_LEAST_BYTES, Config, fall_back, why_fallen_back
from uffdprefetch.doctor import faults, pool
from uffdprefetch.launch.engine_choice import choose

POOL = Config(engine="pool")


def works() -> bool:
    return pool.mechanism().status == "ok"


def test_what_is_not_the_pool_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "mechanism", lambda: pytest.fail("nothing is to be tried"))
    for name in ("cache", "off"):
        config = Config(engine=name)
        assert choose(config, {}) is config


def test_the_pool_is_used_where_it_works() -> None:
    require(works(), "no userfaultfd with kernel faults for this user")
    assert choose(POOL, {}) is POOL


def test_a_budget_below_the_least_falls_back_and_the_least_does_not() -> None:
    found = choose(Config(engine="pool", budget_bytes=POOL_LEAST_BYTES - 1), {})
    assert (found.engine, found.engine_asked) == ("cache", "pool")
    assert why_fallen_back(found).endswith("below the least, 1 MiB; using the cache engine")
    require(works(), "no userfaultfd with kernel faults for this user")
    assert choose(Config(engine="pool", budget_bytes=POOL_LEAST_BYTES), {}).engine == "pool"


def test_why_and_what_would_lift_it_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, str]:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(faults, "open_uffd", refuse)
    monkeypatch.setattr(faults, "DEVICE", "/dev/none")
    line = why_fallen_back(choose(POOL, {}))
    assert line.startswith("engine pool: no userfaultfd with kernel faults: EPERM")
    assert str(faults.cure()) in line and "\n" not in line


def test_where_a_pool_s_service_would_end_at_once_it_is_the_page_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "left_bytes", lambda: cgroup.POOL_BYTES - 1)
    assert choose(POOL, {}).engine == "cache"
    require(works(), "no userfaultfd with kernel faults for this user")
    monkeypatch.setattr(cgroup, "left_bytes", lambda: cgroup.POOL_BYTES)
    assert choose(POOL, {}).engine == "pool"


def test_a_service_that_fell_back_is_the_one_that_was_asked_for() -> None:
    """Else every other rank would say that it was started with other options."""
    assert fall_back(POOL, "x").fingerprint() == POOL.fingerprint()
    assert POOL.fingerprint() != Config().fingerprint()


# ---- whole runs ---------------------------------------------------------------------------------


#: A job that ends when its service is up.
MEETS_ITS_SERVICE = 'until [ -s "$UFFDPREFETCH_SOCKET.lock" ]; do sleep 0.01; done'


def wrap(env: dict[str, str], out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    job = ("--", "sh", "-c", MEETS_ITS_SERVICE)
    return subprocess.run(
        uffdprefetch("wrap", "-f", "-o", str(out), "--engine", "pool", *words, *job),
        env=env, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{out}.summary.json").read_text())
    return found


def test_without_userfaultfd_the_job_runs_with_the_cache_and_one_line_tells(
    env: dict[str, str], tmp_path: Path
) -> None:
    env["UFFDPREFETCH_RUNG"] = "2"
    done = wrap(env, tmp_path / "x")
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "using the cache engine" in line]
    why = "engine pool: no userfaultfd (UFFDPREFETCH_RUNG=2); using the cache engine"
    assert told == [f"uffdprefetch: {why}", f"uffdprefetch: note: {why}"]  # before and after
    summary = summary_of(tmp_path / "x")
    assert (summary["engine"], summary["engine_asked"], summary["pool"]) == ("cache", "pool", None)
    assert summary["degradations"] == [why]


def test_strict_is_125_before_the_job_runs(env: dict[str, str], tmp_path: Path) -> None:
    done = wrap(env, tmp_path / "x", "--strict", "--budget", "4KiB")
    assert done.returncode == 125
    assert done.stderr == "uffdprefetch: engine pool: --budget 4 KiB is below the least, 1 MiB\n"
    assert not (tmp_path / "x.summary.json").exists()


def test_of_many_ranks_one_tells(env: dict[str, str], tmp_path: Path) -> None:
    env["UFFDPREFETCH_RUN"] = "ranks"
    reader, writer = os.pipe()  # all of them run until it is closed
    words = uffdprefetch(
        *("wrap", "-q", "-f", "-o", str(tmp_path / "x"), "--engine", "pool", "--budget", "4KiB"),
        *("--", "sh", "-c", "echo here; exec cat"),
    )
    ranks = [
        subprocess.Popen(
            words, env=env, stdin=reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    os.close(reader)
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "here\n"
    os.close(writer)
    told = [rank.communicate(timeout=HANG_SECONDS)[1] for rank in ranks]
    assert sum("using the cache engine" in text for text in told) == 1, told
    assert not any("other options" in text for text in told)


def test_a_wrap_within_a_job_leaves_the_choice_to_the_jobs_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "mechanism", lambda: pytest.fail("nothing is to be tried"))
    assert choose(POOL, {"UFFDPREFETCH_SOCKET": "/run/x"}) is POOL


def test_a_service_that_cannot_make_its_pool_goes_on_without(
    env: dict[str, str], tmp_path: Path
) -> None:
    """Threads are refused: found out by the service only."""
    require(works(), "no userfaultfd with kernel faults for this user")
    code = (
        "import errno, sys\n"
        "from uffdprefetch.native import pool as uffd_pool\n"
        "def refuse(*_, **__): raise OSError(errno.EAGAIN, 'no thread to be had')\n"
        "uffd_pool.Pool = refuse\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    env["PYTHONPATH"] = str(tmp_path)
    done = wrap(env, tmp_path / "x")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "x")
    assert (summary["engine"], summary["engine_asked"]) == ("cache", "pool")
    assert "no thread to be had" in summary["degradations"][0]
    assert "other options" not in done.stderr
