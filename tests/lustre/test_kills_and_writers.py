# SPDX-License-Identifier: Apache-2.0
"""Services that die and other clients that write: the job reads what is in the file."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lustre import client, job
from lustre.conftest import Data

pytestmark = pytest.mark.long_form

#: Only there so that a hang fails; the guest is slow.
HANG_SECONDS = 300.0


def wait_until(state: Callable[[], object], what: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not state():
        if time.monotonic() > end:
            pytest.fail(f"waited in vain for: {what}")
        time.sleep(0.02)


def started(tmp_path: Path, words: list[str], *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*client.wrapped(*options), "--", *words], cwd=tmp_path, env=client.environment(tmp_path),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def services() -> list[int]:
    """Processes that run `serve`."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and b"uffdprefetch" in words:
            found.append(int(entry))
    return found


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_a_service_that_is_killed_in_the_middle_costs_no_byte(
    engine: str, data: Data, tmp_path: Path
) -> None:
    client.make_cold()
    client.reset_rpcs()
    words = client.job_words(data.path, "contiguous", "--wait", "--compute", "5")
    with started(tmp_path, words, "--engine", engine) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        (service,) = services()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        wait_until(lambda: client.rpcs().bytes > data.size_bytes // 4, "a quarter to be read")
        os.kill(service, signal.SIGKILL)
        out, _ = process.communicate(timeout=HANG_SECONDS)
    said = json.loads(out.splitlines()[-1])
    assert said["digest"] == data.digest and said["bytes"] == data.size_bytes


#: Maps a file, reads all of it, then says the word at each offset that it is asked for.
WATCHER = """
import mmap, os, sys
path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
os.close(fd)
for at in range(0, len(view), 4096):
    view[at]
print("read", flush=True)
for line in sys.stdin:
    if line == "checkpoints\\n":
        pages = [l for l in open("/proc/self/maps") if "uffdprefetch-checkpoints" in l]
        print(*sorted({int(l.split()[2], 16) for l in pages}), flush=True)
    else:
        at = int(line)
        print(view[at : at + 8].hex(), flush=True)
"""


def ask(process: subprocess.Popen[bytes], word: object) -> str:
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(f"{word}\n".encode())
    process.stdin.flush()
    return process.stdout.readline().decode().strip()


def checkpoints(process: subprocess.Popen[bytes]) -> list[int]:
    """File offsets of the pages over which a checkpoint lies."""
    return [int(word) for word in ask(process, "checkpoints").split()]


@contextlib.contextmanager
def watched(tmp_path: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """(A wrapped process that has read a mapping with checkpoints, the file at its mount)."""
    path = client.mount() / name
    client.write_file(path, 64 << 20)  # has one checkpoint
    laid = ("--policy", "fixed", "--size", "4MiB", "--distance", "64MiB")
    with started(tmp_path, [sys.executable, "-S", "-c", WATCHER, str(path)], *laid) as process:
        assert process.stdout is not None and process.stdout.readline() == b"read\n"
        wait_until(lambda: checkpoints(process), "checkpoints over the mapping")
        yield process, path
        process.communicate(timeout=HANG_SECONDS)
    path.unlink()


def test_what_another_client_writes_to_a_checkpoint_page_shows_and_the_mapping_is_given_back(
    tmp_path: Path,
) -> None:
    second = Path(os.environ[client.SECOND_VARIABLE])
    with watched(tmp_path, "written.bin") as (process, path):
        (at,), new = checkpoints(process), os.urandom(8)
        with open(second / path.name, "r+b", buffering=0) as other:
            other.seek(at)
            other.write(new)
        with open(path, "rb") as plain:
            view = mmap.mmap(plain.fileno(), 0, prot=mmap.PROT_READ)
        assert view[at : at + 8] == new, "the client itself shows it"
        view.close()
        wait_until(lambda: ask(process, at) == new.hex(), "the word")
        wait_until(lambda: not checkpoints(process), "the mapping to be given back")
        assert ask(process, at) == new.hex()


def test_a_file_that_another_client_has_changed_in_size_is_given_back(tmp_path: Path) -> None:
    second = Path(os.environ[client.SECOND_VARIABLE])
    with watched(tmp_path, "grown.bin") as (process, path):
        with open(second / path.name, "r+b", buffering=0) as other:
            other.write(b"new words")
            other.seek(0, os.SEEK_END)
            other.write(b"more")
        wait_until(lambda: not checkpoints(process), "the mapping to be given back")
        assert bytes.fromhex(ask(process, 0)) == b"new word"


def test_the_plan_of_the_job_is_the_order_that_it_reads(data: Data) -> None:
    """What the measurements stand on."""
    plan = job.plan_of(str(data.path), data.size_bytes)
    ranges = plan["files"][0]["epochs"][0]["ranks"]["*"]  # type: ignore[index]
    count = -(-data.size_bytes // job.RECORD_BYTES)
    assert [start // job.RECORD_BYTES for start, _ in ranges] == job.order_of("shuffled", count, 0)
    assert sum(end - start for start, end in ranges) == data.size_bytes
