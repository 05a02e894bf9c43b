# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of a Lustre client is what a run does there; and who may not ask is not told
wrong figures."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lustre import client, job
from lustre.conftest import Data

USER = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")


def test_doctor_names_the_call_the_readahead_and_the_danger(data: Data, tmp_path: Path) -> None:
    client.make_cold()
    ended = subprocess.run(
        client.program("doctor", "--json", str(data.path)), capture_output=True, text=True,
        env=client.environment(tmp_path), timeout=400,
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert checks["file system"]["found"] == "Lustre"
    assert checks["read_ahead_kb"]["found"].startswith("0 (/sys/class/bdi/")
    assert ": on Lustre the next read panics the node" in checks["read_ahead_kb"]["follows"]
    warm = checks["warm 4 MiB"]
    assert warm["status"] == "ok" and warm["follows"].startswith("pread is used here")
    assert warm["values"]["chosen"] == "pread, FADV_RANDOM of 4096 KiB, known of Lustre"
    assert "does not show our own fill" not in checks["eBPF (bcc)"]["found"]


@pytest.mark.long_form
def test_a_cached_file_of_somebody_elses_was_not_prefetched(data: Data, tmp_path: Path) -> None:
    """The user may not ask what is cached; the client counts what is read for whom."""
    client.make_cold()
    data.path.chmod(0o644)
    # in small reads: one of 8 MiB and more goes past the cache there
    assert client.digest_of(data.path, job.RECORD_BYTES) == data.digest
    os.chown(tmp_path, 1000, 1000)
    tmp_path.chmod(0o755)
    ran = client.run_job(
        tmp_path, data.path, "contiguous", (), before=USER, cold=False,
        UFFDPREFETCH_RUNDIR="/tmp/uffdprefetch-user",
    )  # fmt: skip
    assert ran.said["digest"] == data.digest and ran.summary is not None
    assert ran.rpcs.count == 0, str(ran.rpcs)
    (file,) = ran.summary["files"]
    assert file["prefetched_bytes"] == 0
    assert ran.summary["totals"]["prefetched_bytes"] == 0


@pytest.mark.long_form
def test_a_cold_file_of_somebody_elses_counts_as_what_was_read(data: Data, tmp_path: Path) -> None:
    os.chown(tmp_path, 1000, 1000)
    tmp_path.chmod(0o755)
    ran = client.run_job(
        tmp_path, data.path, "contiguous", (), before=USER, more=("--compute", "5"),
        UFFDPREFETCH_RUNDIR="/tmp/uffdprefetch-user",
    )  # fmt: skip
    assert ran.said["digest"] == data.digest and ran.summary is not None
    prefetched = ran.summary["totals"]["prefetched_bytes"]
    assert data.size_bytes // 2 <= prefetched <= ran.rpcs.bytes
