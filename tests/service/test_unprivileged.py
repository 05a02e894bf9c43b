# SPDX-License-Identifier: Apache-2.0
"""The user of a stock cluster: another uid, somebody else's files, one rung or none."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require
from harness import MIB, file_digest, write_records
from nobody import UID, Nobody, with_open_device

from uffdprefetch.base import file_systems
from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully, why_no_bed
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store

pytestmark = pytest.mark.root

SIZE_BYTES = 96 * MIB

#: Reads a mapping MiB by MiB and hashes each three times: a job that computes a little.
READER = """
import ctypes, hashlib, json, mmap, os, sys
if "undumpable" in sys.argv:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
digest = hashlib.sha256()
for at in range(0, len(m), 1 << 20):
    piece = m[at:at + (1 << 20)]
    hashlib.sha256(piece); hashlib.sha256(piece)
    digest.update(piece)
print(json.dumps({"sha256": digest.hexdigest(), "uid": os.getuid()}))
"""

#: The same in the order of a plan, once the service has it.
PLANNED_READER = """
import hashlib, json, mmap, os, sys, time
from uffdprefetch.view.watch import WatchClient
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
watch, end = WatchClient.open(os.environ["UFFDPREFETCH_SOCKET"]), time.monotonic() + 140
while not watch.snapshot().plans and time.monotonic() < end:
    time.sleep(0.05)  # who asks more often is hung up on
watch.hang_up()
read = bytearray(len(m))
for start, end in json.load(open(sys.argv[2]))["files"][0]["epochs"][0]["ranks"]["*"]:
    piece = m[start:end]
    for _ in range(3):
        hashlib.sha256(piece)
    read[start:end] = piece
print(json.dumps({"sha256": hashlib.sha256(read).hexdigest(), "uid": os.getuid()}))
"""


@pytest.fixture(scope="module")
def nobody() -> Iterator[Nobody]:
    """The package where another user can read it."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        yield Nobody(Path(directory))


@pytest.fixture(params=["own file", "another's file"])
def data(nobody: Nobody, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cold file that the user owns, or may only read (a shared data set)."""
    path = nobody.directory / "data.bin"
    write_records(path, SIZE_BYTES, seed=5)
    path.chmod(0o644)
    if request.param == "own file":
        os.chown(path, UID, UID)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    yield path
    path.unlink()


def run(
    nobody: Nobody,
    env: dict[str, str],
    data: Path,
    *words: str,
    before: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    reader: str = READER,
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run the reader wrapped as the other user: (what it printed, summary, stderr)."""
    out = nobody.work / "out"
    if reader is READER:  # the service is up before it: it may end in less time than that takes
        options = ("--strict", *options)
    done = subprocess.run(
        [
            *(*before, *nobody.wrap(out, *options)),
            *(nobody.python, "-S", "-c", reader, str(data), *words),
        ],
        env=nobody.environment(env),
        cwd="/",
        capture_output=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads(Path(f"{out}.summary.json").read_text())
    printed = json.loads(done.stdout)
    assert printed["uid"] == UID
    assert printed["sha256"] == file_digest(data)
    return printed, summary, done.stderr.decode()


FIXED = ("--policy", "fixed", "--size", "8MiB", "--distance", "8MiB")


def shut() -> bool:
    """Whether a user has no userfaultfd by the system call."""
    return Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() != "1"


@pytest.mark.parametrize("options", [(), FIXED], ids=["auto", "fixed"])
def test_without_userfaultfd_right_bytes_are_read_and_the_reader_is_followed(
    nobody: Nobody, env: dict[str, str], data: Path, options: tuple[str, ...]
) -> None:
    """Nothing is said of it, unless it was wanted."""
    require(shut(), "every user has userfaultfd here")
    _, summary, _ = run(nobody, env, data, options=options)
    assert summary["rung"] == 2
    assert summary["files"][0]["served_by"] == "page_tables"
    assert summary["totals"]["checkpoints"]["laid"] == 0
    file, reasons = summary["files"][0], [n for n in summary["degradations"] if "userfaultfd" in n]
    # how much is prefetched depends on the disk, whose own readahead of 8 MiB may suffice
    seen = file["demand_used_blocks_bytes"] + file["prefetched_used_blocks_bytes"]
    assert (summary["totals"]["prefetched_bytes"] if options else seen) >= MIB
    if options:
        assert len(reasons) == 1 and "doctor" in reasons[0]
    else:
        assert (reasons, summary["coarse"], summary["rung_remedy"]) == ([], {}, None)


def test_checkpoints_through_an_open_device(
    nobody: Nobody, env: dict[str, str], data: Path
) -> None:
    _, summary, _ = run(nobody, env, data, before=with_open_device(), options=FIXED)
    assert summary["rung"] == 1
    assert summary["files"][0]["served_by"] == "checkpoints"
    assert summary["totals"]["fault_wait_ns"]["count"] > 0


def test_the_pool_through_an_open_device(nobody: Nobody, env: dict[str, str], data: Path) -> None:
    """A third of the file fits, and without CAP_SYS_NICE no page table gets huge pages."""
    nobody.bring("numpy")
    options = ("--engine", "pool", "--budget", "32MiB")
    _, summary, said = run(nobody, env, data, before=with_open_device(), options=options)
    pool = summary["pool"]
    assert summary["engine"] == "pool", said
    assert summary["files"][0]["served_by"] == "pool"
    assert pool["evicted_bytes"] > 0 and pool["resident_peak_bytes"] <= 32 * MIB
    assert pool["mapped_bytes"] >= SIZE_BYTES and pool["mapped_huge_bytes"] == 0


def plan_of(nobody: Nobody, data: Path) -> str:
    """A plan that reads the file in shuffled pieces."""
    nobody.bring("numpy")
    pieces = [[at, at + MIB // 4] for at in range(0, SIZE_BYTES, MIB // 4)]
    random.Random(7).shuffle(pieces)
    plan = nobody.directory / "plan.json"
    epochs = [{"ranks": {"*": pieces}}]
    file = {"file": str(data), "unit": "bytes", "epochs": epochs}
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [file]}))
    return str(plan)


@pytest.mark.parametrize(
    ("engine", "rung", "namespace"),
    [("cache", 1, False), ("cache", 2, False), ("cache", 2, True),
     ("pool", 1, False), ("pool", 2, False), ("pool", 1, True)],
)  # fmt: skip
def test_a_known_order_is_followed(
    nobody: Nobody, env: dict[str, str], data: Path, engine: str, rung: int, namespace: bool
) -> None:
    """Where there is no userfaultfd for kernel faults, the page tables tell where the reader is;
    no pool can be then, and a line says so. ``namespace``: of processes, a new one."""
    require(rung == 1 or engine == "cache" or shut(), "every user has userfaultfd here")
    plan = plan_of(nobody, data)
    before = with_open_device() if rung == 1 else ()
    if namespace:
        before = ("unshare", "-p", "-f", "--mount-proc", *before)
    options = ("--engine", engine, "--budget", "32MiB", "--plan", plan)
    if (engine, rung) == ("cache", 1):
        options = (*FIXED, *options)
    _, summary, said = run(
        nobody, env, data, plan, before=before, options=options, reader=PLANNED_READER
    )
    assert summary["rung"] == rung
    pooled = engine == "pool" and rung == 1
    assert summary["engine"] == ("pool" if pooled else "cache"), said
    told = [line for line in said.splitlines() if "note: " not in line]  # which the end repeats
    fell_back = engine == "pool" and not pooled
    assert sum("using the cache engine" in line for line in told) == fell_back, said
    (followed,) = summary["plans"]
    assert followed["dropped"] is None and followed["how"] == "--plan", summary["degradations"]
    assert followed["sent_bytes"] > 0, summary
    assert followed["read_items"] > 0 or rung == 2  # looks into page tables take their time
    if pooled:
        assert summary["pool"]["evicted_bytes"] > 0


def test_with_everything_forbidden_the_job_runs_and_the_reason_is_said(
    nobody: Nobody, env: dict[str, str], data: Path
) -> None:
    _, summary, _ = run(nobody, env, data, "undumpable")
    assert summary["rung"] is None
    assert summary["files"] == [] or summary["files"][0]["served_by"] is None
    assert summary["totals"]["prefetched_bytes"] == 0
    (reason,) = summary["refused"].values()
    assert "page table" in reason


def test_the_residency_of_anothers_file_is_not_believed(
    nobody: Nobody, env: dict[str, str], data: Path
) -> None:
    _, summary, _ = run(nobody, env, data)
    owned = data.stat().st_uid == UID
    told = "not told to us" not in summary["files"][0]["warmed_by"]
    assert told == owned


# ---- who may not ask what is cached -------------------------------------------------------------


@pytest.fixture
def foreign(nobody: Nobody) -> Iterator[Path]:
    """A directory with a file of root's that everybody may read."""
    directory = nobody.directory / "foreign"
    directory.mkdir()
    write_records(directory / "data.bin", SIZE_BYTES, seed=6)
    (directory / "data.bin").chmod(0o644)
    yield directory
    shutil.rmtree(directory)


def test_a_cached_file_of_somebody_elses_was_not_prefetched_by_us(
    nobody: Nobody, env: dict[str, str], foreign: Path
) -> None:
    """By what the kernel counted as read, since it does not say what was there."""
    data = foreign / "data.bin"
    kind = file_systems.at(str(data))
    require(kind.counts_reads, f"{kind.name} does not count what is read for whom")
    warm_fully(data)
    _, summary, _ = run(nobody, env, data)
    # a kernel with proactive reclaim takes single pages away at any moment
    assert summary["totals"]["prefetched_bytes"] <= MIB


@pytest.mark.parametrize("cold", [False, True])
def test_where_nothing_counts_reads_our_own_waits_tell_what_was_cached(
    nobody: Nobody, env: dict[str, str], foreign: Path, cold: bool
) -> None:
    require(why_no_bed() is None, str(why_no_bed()))
    mountpoint = nobody.directory / "mount"
    mountpoint.mkdir(exist_ok=True)
    # so far away that plain waits for latency, eight times what the bytes take
    with SlowBed(foreign, mountpoint, bandwidth=100_000_000, latency_us=10_000) as bed:
        data = bed.path("data.bin")
        if cold:
            drop_cache(data)
        else:
            warm_fully(data)
        _, summary, said = run(nobody, env, data)
    totals = summary["totals"]
    if cold:
        assert totals["prefetched_bytes"] >= SIZE_BYTES // 2
        assert "kept ahead" in said and "nothing to gain" not in said
    else:
        # the first read of a file may wait for its attributes
        assert totals["prefetched_bytes"] <= 4 * MIB <= totals["already_resident_bytes"]
        assert "nothing to gain: the data was in memory" in said


def test_a_start_is_recorded_as_for_root(nobody: Nobody, env: dict[str, str]) -> None:
    """Another user's programs and libraries, whose residency nobody tells. A job that lives for
    some looks."""
    out = nobody.work / "run.summary.json"
    env["XDG_CACHE_HOME"] = str(nobody.work / "cache")
    code = "import decimal, json, time, xml.dom.minidom; time.sleep(1.5)"
    wanted = {}
    for name, prefix in (("nobody", nobody.prefix), ("root", [])):
        words = nobody.wrap(out, "-q", f"--learn={name}", "--strict")[len(nobody.prefix) :]
        done = subprocess.run(
            [*prefix, *words, nobody.python, "-c", code],
            cwd=nobody.work, env=nobody.environment(env), capture_output=True, text=True,
            timeout=HANG_SECONDS,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        path = nobody.work / "cache" / "uffdprefetch" / "profiles" / f"{name}.upl"
        entries = profile_store.load(str(path)).entries
        wanted[name] = {one.path for one in entries if one.kind is EntryKind.FILE}
        shutil.rmtree(nobody.work / "hub")  # it is its user's alone
    assert len(wanted["root"]) > 30
    assert len(wanted["nobody"] & wanted["root"]) >= 0.95 * len(wanted["root"])
