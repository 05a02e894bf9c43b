# SPDX-License-Identifier: Apache-2.0
"""What is not served stands in the summary: each large mapping with its reason and what would
change that, and what came by read(2)."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness import MIB, Records, Start, python

from uffdprefetch.report.summary import three_lines
from uffdprefetch.state.unserved import Reason

pytest_plugins = ("harness_fixtures",)

#: Waits until the service knows of a mapping that no agent tells of: it looks each second.
LOOKED = "time.sleep(2.5)"
#: What a job does with its own copy of the records -> the reason, and a word of what was seen.
CASES = {
    "shared-writable": (
        f"""
        fd = os.open(path, os.O_RDWR)
        checked(libc.mmap(None, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), "mmap")
        {LOOKED}
        """,
        "shared and writable",
    ),
    "deleted": (
        f"""
        m = Mapping(path, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE | 4)
        m.protect(PROT_READ)
        os.unlink(path)
        {LOOKED}
        """,
        "deleted",
    ),
    "changed": (
        """
        m, times = Mapping(path).managed(), os.stat(path)
        with open(path, "r+b") as file:
            file.write(b"more")
        m.plain()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        Mapping(path).digest()
        """,
        "opened for writing",
    ),
    "in-memory": (
        """
        import shutil
        path = f"/dev/shm/{os.environ['UPTEST_MARK'].replace('/', '-')}"
        shutil.copyfile(sys.argv[1], path)
        try:
            Mapping(path).digest()
        finally:
            os.unlink(path)
        """,
        "tmpfs is memory already",
    ),
    "program": (
        """
        os.rename(path, path + ".so.1")
        Mapping(path + ".so.1").digest()
        """,
        "a library",
    ),
    "excluded": ("Mapping(path).digest()", "--include/--exclude"),
}


@pytest.mark.parametrize("reason", list(CASES))
def test_a_mapping_that_is_not_served_is_named_with_its_reason_and_a_remedy(
    job: Start, own_records: Records, reason: str
) -> None:
    code, word = CASES[reason]
    options = ("--exclude", "*.bin") if reason == "excluded" else ()
    head = "path, size = sys.argv[1], os.stat(sys.argv[1]).st_size\n"
    words = python(head + textwrap.dedent(code), own_records.path)
    done = job(words, options=options).finish().good()
    assert done.summary is not None
    (unserved,) = [one for one in done.summary["unserved"] if one["reason"] == reason]
    assert word in unserved["why"], unserved
    assert unserved["mapped_bytes"] >= own_records.size_bytes
    assert done.summary["refused"][unserved["path"]] == unserved["why"]
    remedies = {one.value[0]: one.remedy for one in Reason}
    assert unserved["remedy"] == remedies[reason]
    if not done.summary["files"]:
        last = three_lines(done.summary)[-1]
        assert unserved["path"] in last and unserved["why"] in last
        assert (unserved["remedy"] or "wrap -v") in last


def test_what_is_read_by_calls_is_named(job: Start, tmp_path: Path) -> None:
    path = tmp_path / "read.bin"
    path.write_bytes(bytes(24 * MIB))
    code = """
    with open(sys.argv[1], "rb") as file:
        while file.read(1 << 20):
            pass
        m = Mapping(sys.argv[2])
        until(agents, "the agent")
        time.sleep(2.5)
    """
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(2 * MIB))
    done = job(python(code, path, other)).finish().good()
    assert done.summary is not None
    totals: dict[str, Any] = done.summary["totals"]
    files = [one for one in totals["unserved_read_files"] if one["path"] == str(path)]
    assert files == [{"path": str(path), "bytes": 24 * MIB}], json.dumps(totals)


@pytest.mark.parametrize("pause", ["", "; sleep 2"])
def test_what_the_jobs_processes_read_is_counted_from_their_start(
    job: Start, records: Records, pause: str
) -> None:
    """None of them maps anything; with and without a service that is up before they end."""
    line = f'cat "$0" > /dev/null{pause}; (cat < "$0") > /dev/null'
    done = job(["sh", "-c", line, str(records.path)]).finish().good()
    assert done.summary is not None
    read = done.summary["totals"]["unserved_read_bytes"]
    # beside the files: what the programs themselves, and wrap meanwhile, load
    assert 2 * records.size_bytes <= read <= 2 * records.size_bytes + 8 * MIB
