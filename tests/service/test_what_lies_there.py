# SPDX-License-Identifier: Apache-2.0
"""What of ours is in a job's process, by engine and policy (docs/safety.md)."""

from __future__ import annotations

import os
from typing import Any

import pytest
from components import why_no_checkpoints
from conftest import require, wait_until
from harness import CHECKPOINTS, Job, Records, Start, python, snapshot

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.usefixtures("patient")

#: What /proc shows of a process that has read its mapping.
LOOK = """
    def descriptors():
        for tid in os.listdir("/proc/self/task"):
            for fd in os.listdir(f"/proc/self/task/{tid}/fd"):
                try:
                    yield os.readlink(f"/proc/self/task/{tid}/fd/{fd}")
                except FileNotFoundError:
                    pass  # of this listing itself

    def threads():
        for tid in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{tid}/comm") as file:
                yield file.read().strip()

    m = Mapping(sys.argv[1])
    say(mapped=m.length)
    hear()
    if sys.argv[2] == "fixed":
        m.managed()
    digest, open_ = m.digest(), list(descriptors())
    with open("/proc/self/maps") as file:
        lines = [line for line in file if int(line.partition("-")[0], 16) == m.address]
    say(
        digest=digest,
        threads=sorted(name for name in threads() if name.startswith("uffdprefetch")),
        userfaultfds=sum("userfaultfd" in name for name in open_),
        memfds=sum("uffdprefetch-checkpoints" in name for name in open_),
        pages=m.parts()[0],
        whole=[line.split()[0] for line in lines if line.split()[-1] == sys.argv[1]],
        expected=f"{m.address:x}-{m.address + -(-m.length // PAGE) * PAGE:x}",
    )
    hear()
"""


def known(work: Job, records: Records) -> bool:
    return any(f.mappings and f.path == str(records.path) for f in snapshot(work.env).files)


def looked(job: Start, records: Records, policy: str, *options: str) -> tuple[Job, dict[str, Any]]:
    """(A job that the service has answered and that has read all, what it has seen of itself)."""
    work = job(python(LOOK, records.path, policy), options=options)
    assert work.line()["mapped"] == records.size_bytes
    wait_until(lambda: known(work, records), "the service to know the mapping")
    work.tell()
    said = work.line()
    assert said["digest"] == records.digest
    return work, said


@pytest.mark.parametrize("policy", ["auto", "stride", "plan", "none"])
def test_nothing_lies_over_a_mapping_by_default(job: Start, records: Records, policy: str) -> None:
    """No userfaultfd, no thread but the agent, no page of ours: what the job has mapped is there in
    one piece."""
    work, said = looked(job, records, policy, "--policy", policy)
    assert said["threads"] == ["uffdprefetch"]
    assert (said["userfaultfds"], said["memfds"], said["pages"]) == (0, 0, 0)
    assert said["whole"] == [said["expected"]]
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert (summary["rung"], summary["files"][0]["served_by"]) == (2, "page_tables")
    assert "lease" not in summary["files"][0]["change_guard"]
    told = summary["degradations"], summary["coarse"], summary["rung_remedy"], summary["rung_lifts"]
    assert told == ([], {}, None, False)
    assert summary["totals"]["freshness"]["compared_pages"] == 0


def test_by_the_fixed_policy_checkpoints_do(job: Start, records: Records) -> None:
    """Else nothing would have been seen above."""
    why = why_no_checkpoints()
    require(why is None, why or "")
    work, said = looked(job, records, "fixed", *CHECKPOINTS)
    assert said["threads"] == ["uffdprefetch", "uffdprefetch/r"]
    assert said["userfaultfds"] > 0 and said["pages"] > 4
    assert said["whole"] and said["whole"] != [said["expected"]]
    work.tell()
    summary = work.finish().good().summary
    assert summary is not None
    assert (summary["rung"], summary["files"][0]["served_by"]) == (1, "checkpoints")
    assert "lease" in summary["files"][0]["change_guard"]


def test_mmap_does_not_wait_for_a_service_that_stands_still(job: Start, records: Records) -> None:
    """With patience for five seconds: a job that waited would be seen to."""
    code = """
        m = Mapping(sys.argv[1])
        say(mapped=True)
        hear()
        began = time.monotonic()
        again = [Mapping(sys.argv[1]) for _ in range(8)]
        say(seconds=time.monotonic() - began, digest=again[-1].digest())
        hear()
    """
    waits = {}
    for options in (("--policy", "auto"), CHECKPOINTS):
        work = job(python(code, records.path), options=options, UFFDPREFETCH_RUN=options[1])
        assert work.line() == {"mapped": True}
        wait_until(lambda w=work: known(w, records), "the service to know the mapping")  # type: ignore[misc]
        with work.stopped_service():
            work.tell()
            said = work.line()
        assert said["digest"] == records.digest
        waits[options[1]] = said["seconds"]
        work.tell()
        work.finish().good()
    assert waits["auto"] < 1 < 4 < waits["fixed"]


def test_who_writes_a_file_that_is_read_does_not_wait(job: Start, own_records: Records) -> None:
    """There is no lease to be given back: who opens it for writing, with O_NONBLOCK, may."""
    work, _ = looked(job, own_records, "auto", "--policy", "auto")
    with work.stopped_service():
        os.close(os.open(own_records.path, os.O_WRONLY | os.O_NONBLOCK))
    work.tell()
    work.finish().good()
