# SPDX-License-Identifier: Apache-2.0
"""A job that writes a file from its own mapping of it where no lease can be had: root without
CAP_LEASE on a file that is another's.

It sees what it has written at once. With --engine pool it holds the inode's lock while it faults,
and O_DIRECT on ext4 wants that. (A job that hangs is ended by the test's own bound.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require
from disks import disk
from harness import MIB, Records, Start, python, write_records

from uffdprefetch.demo.bed import drop_cache

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.root

ENGINES = {
    "cache": ("--engine", "cache"),
    "pool": ("--engine", "pool", "--budget", "32MiB", "--policy", "none"),
}
NO_LEASE = ("setpriv", "--bounding-set", "-lease")

#: It opens the file for writing before it is mapped, after that by libc, or by the kernel's own
#: call; then writes its last two MiB, which nobody has read, over the second and the third.
WRITER = """
SYS_openat = {"x86_64": 257, "aarch64": 56}[os.uname().machine]
path, how = sys.argv[1:]
size = os.stat(path).st_size
if how == "before":
    out = os.open(path, os.O_RDWR)
    m = Mapping(path)
else:
    m = Mapping(path)
    m.managed()
    _ = m.view[0]  # what is there is sampled, by reads that want the lock as well
    out = os.open(path, os.O_RDWR) if how == "libc" else checked(
        libc.syscall(SYS_openat, -100, path.encode(), os.O_RDWR, 0), "openat")
ours = m.checkpoints() > 0
for part in range(4):
    at = size - 2 * MIB + part * MIB // 2
    written = os.pwrite(out, m.view[at : at + MIB // 2], MIB + part * MIB // 2)
    assert written == MIB // 2, written
again = Mapping(path)
say(ours=ours, same=m.view[MIB : 3 * MIB] == m.view[-2 * MIB :], again=again.checkpoints() > 0)
"""


@pytest.mark.parametrize(
    ("engine", "how"),
    [("pool", "before"), ("pool", "libc"), ("pool", "raw"), ("cache", "before"), ("cache", "libc")],
)
def test_a_file_is_written_from_its_own_mapping_where_no_lease_tells(
    job: Start, own_records: Records, engine: str, how: str
) -> None:
    require(bool(shutil.which("setpriv")), "needs setpriv")
    path = own_records.path
    expected = bytearray(path.read_bytes())
    expected[MIB : 3 * MIB] = expected[-2 * MIB :]
    os.chown(path, 1, 1)
    drop_cache(path)
    code = f"MIB = {MIB}\n" + WRITER
    work = job(python(code, path, how), ENGINES[engine], before=NO_LEASE)
    line = work.line()
    done = work.finish()
    assert line["same"], line
    assert path.read_bytes() == expected
    # Where it is seen that the file is opened nothing lies over it, nor over what is mapped later.
    assert line["ours"] == (how == "raw")
    assert not line["again"] or how == "raw"
    if how == "raw":
        assert done.summary is not None and done.summary["pool"]["mapped_for_writers"] > 0


@pytest.fixture(params=["the test's", "xfs"])
def someones_records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """12 MiB, of which no lease can be had. XFS wants the inode's lock for every read(2)."""
    require(bool(shutil.which("setpriv")), "needs setpriv")
    with contextlib.ExitStack() as stack:
        own = request.param == "the test's"
        path = (tmp_path if own else stack.enter_context(disk("xfs", tmp_path))) / "own.bin"
        write_records(path, 12 * MIB, seed=2)
        os.chown(path, 1, 1)
        drop_cache(path)
        yield path


@pytest.mark.parametrize("after_ms", [0, 60, 230])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_service_that_ends_while_a_writer_waits_for_it_holds_up_neither(
    job: Start, someones_records: Path, end: signal.Signals, after_ms: int
) -> None:
    """Where its O_DIRECT read waits for the inode's lock, not even SIGKILL ends the service before
    the writer has gone on. A rescue begins after 200 ms."""
    path = someones_records
    expected = bytearray(path.read_bytes())
    expected[MIB : 3 * MIB] = expected[-2 * MIB :]
    drop_cache(path)
    code = f"MIB = {MIB}\n" + WRITER.replace("for part", "say()\nfor part")
    work = job(python(code, path, "raw"), ENGINES["pool"], before=NO_LEASE)
    work.line()
    service = work.service()
    time.sleep(after_ms / 1000)
    os.kill(service, end)
    line = work.line()
    if end == signal.SIGSTOP:
        os.kill(service, signal.SIGCONT)
    assert line["same"], line
    work.finish()
    assert path.read_bytes() == expected
