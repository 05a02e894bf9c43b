# SPDX-License-Identifier: Apache-2.0
"""What a mapping has touched is known though it goes before the service's next look: the service
stands still meanwhile, so that none of its own looks can have seen it."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
from components import why_no_checkpoints
from conftest import require, wait_until
from harness import MIB, Job, Records, Start, python, snapshot
from paths import ROOT

from uffdprefetch.demo.bed import drop_cache

pytest_plugins = ("harness_fixtures",)
BLOCK = 64 << 10
#: Of ten places three are touched; what the kernel maps around each is up to the file system.
PLACES, TOUCHED = tuple(range(0, 10 * MIB, MIB)), (1, 4, 8)

#: ioctl, pread64, preadv, mincore, openat: what looks into a page table, by machine.
FORBIDDEN = {"x86_64": (16, 17, 295, 27, 257), "aarch64": (29, 67, 69, 232, 56)}

#: Takes a mapping away as it is told to, once it has touched some places.
TAKER = """
def forbid(numbers):  # to this thread alone, and past us: our agent goes on
    equal = [(0x15, 0, 1, n, 0x06, 0, 0, 0x80000000) for n in numbers]  # SECCOMP_RET_KILL_PROCESS
    code = b"".join(struct.pack("=HBBI", *one[i : i + 4]) for one in equal for i in (0, 4))
    code = struct.pack("=HBBI", 0x20, 0, 0, 0) + code + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    text = ctypes.create_string_buffer(code)
    program = struct.pack("=H6xQ", len(code) // 8, ctypes.addressof(text))
    prctl = ctypes.CDLL("libc.so.6").prctl
    assert not prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    assert not prctl(22, 2, ctypes.c_char_p(program), 0, 0)  # PR_SET_SECCOMP

libc.syscall.restype = ctypes.c_long
m = Mapping(sys.argv[1])
say(mapped=m.length)
how = hear()
kept = [m]
while how == "again":
    m = Mapping(sys.argv[1])
    kept.append(m)
    say(mapped=m.length)
    how = hear()
seen = bytes(m.view[int(at)] for at in sys.argv[2:])
mapped = sum(bool(m.present(at, 65536)) for at in range(0, m.length, 65536))
if how == "filtered munmap":
    forbid(FORBIDDEN)
if how.endswith("munmap"):
    m.unmap()
elif how == "mmap":
    there = libc.mmap(m.address, m.length, PROT_READ, 0x32, -1, 0)  # MAP_FIXED, of nothing
    assert there == m.address and not m.view[int(sys.argv[2])]
elif how == "mremap":
    was = m.address
    m.grow(2 * m.length)
    assert bytes(m.view[int(at)] for at in sys.argv[2:]) == seen
say(seen=seen.hex(), blocks=mapped)
hear()
"""


def started(job: Start, records: Records, *before: str, **variables: str) -> Job:
    """One whose mapping the service knows, by page tables alone."""
    places = [str(PLACES[i]) for i in TOUCHED]
    numbers = FORBIDDEN[platform.machine()]
    code = TAKER.replace("FORBIDDEN", str(numbers))
    command = [*before, *python(code, records.path, *places)]
    work = job(command, options=("--policy", "none"), **variables)
    assert work.line()["mapped"] == records.size_bytes
    wait_until(lambda: mappings(work, records) == 1, "the service to know the mapping")
    return work


def mappings(work: Job, records: Records) -> int:
    return sum(f.mappings for f in snapshot(work.env).files if f.path == str(records.path))


def read_bytes(work: Job, records: Records) -> int:
    """Read ahead of it."""
    files = snapshot(work.env).files
    return sum(f.prefetched_bytes for f in files if f.path == str(records.path))


def used_bytes(work: Job, records: Records) -> int:
    """Of the file, as the run's summary has it."""
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = [f for f in summary["files"] if f["path"] == str(records.path)]
    return int(file["demand_used_blocks_bytes"] + file["prefetched_used_blocks_bytes"])


def take(work: Job, records: Records, how: str, left: int = 0) -> int:
    """Touched and taken away while the service stands still, for which the job does not wait: how
    much of it was in the page table, in whole blocks."""
    with work.stopped_service():
        work.tell(how)
        data = records.path.read_bytes()
        said = work.line()
        assert said["seen"] == bytes(data[PLACES[i]] for i in TOUCHED).hex()
    wait_until(lambda: mappings(work, records) == left, "the service to hear of it")
    assert len(TOUCHED) <= said["blocks"] < records.size_bytes // BLOCK / 2
    return int(said["blocks"]) * BLOCK


@pytest.mark.parametrize("how", ["munmap", "mmap", "mremap"])
def test_what_was_touched_is_known_though_the_mapping_goes_before_it_is_looked_at(
    job: Start, own_records: Records, how: str
) -> None:
    work = started(job, own_records)
    touched = take(work, own_records, how)
    assert used_bytes(work, own_records) == touched


def test_a_job_s_thread_makes_no_call_of_its_own_for_a_look(
    job: Start, own_records: Records
) -> None:
    """A filter of the job's would end it by the first."""
    work = started(job, own_records)
    touched = take(work, own_records, "filtered munmap")
    assert used_bytes(work, own_records) == touched


def test_of_a_mapping_that_need_not_be_waited_for_a_look_is_waited_for_shortly(
    job: Start, own_records: Records
) -> None:
    """Of a file that is read whole nobody waits for an answer, nor for our thread to let go."""
    why = why_no_checkpoints()
    require(why is None, why or "")
    drop_cache(own_records.path)
    code = TAKER.replace("FORBIDDEN", "()")
    places = [str(PLACES[i]) for i in TOUCHED]
    options = "--whole", "*", "--min-size", "1MiB"
    work = job(python(code, own_records.path, *places), options=options)
    assert work.line()["mapped"] == own_records.size_bytes
    wait_until(lambda: read_bytes(work, own_records) > 0, "the file to be read whole")
    for count in (2, 3):  # the answer to the second is the same for each that follows
        work.tell("again")
        assert work.line()["mapped"] == own_records.size_bytes
        wait_until(lambda c=count: mappings(work, own_records) == c, "the service to know it")
    touched = take(work, own_records, "munmap", 2)
    assert used_bytes(work, own_records) == touched


def filtered(directory: Path, *rules: dict[str, Any]) -> list[str]:
    """What runs a command under a filter that refuses some system calls."""
    found = subprocess.run(["/usr/bin/python3", "-c", "import seccomp"], capture_output=True)
    require(found.returncode == 0, "the distribution's Python has no libseccomp")
    profile = directory / "filter.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    return ["/usr/bin/python3", str(ROOT / "tests/support/with_seccomp.py"), str(profile)]


SCAN = {"index": 1, "value": 0xC0606610, "op": "SCMP_CMP_EQ"}
REFUSED = {"names": ["ioctl"], "action": "SCMP_ACT_ERRNO", "args": [SCAN]}


def test_without_pagemap_scan_the_entries_are_read(
    job: Start, own_records: Records, tmp_path: Path
) -> None:
    """As before Linux 6.7."""
    rule = {**REFUSED, "errnoRet": errno.ENOTTY}
    work = started(job, own_records, *filtered(tmp_path, rule))
    touched = take(work, own_records, "munmap")
    assert used_bytes(work, own_records) == touched


def test_a_filter_that_refuses_the_look_costs_the_job_nothing_else(
    job: Start, own_records: Records, tmp_path: Path
) -> None:
    work = started(job, own_records, *filtered(tmp_path, {**REFUSED, "errnoRet": errno.EPERM}))
    take(work, own_records, "munmap")
    assert used_bytes(work, own_records) == 0
