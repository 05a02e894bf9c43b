# SPDX-License-Identifier: Apache-2.0
"""Files that are each mapped for a moment (service/brief.py)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from harness import Start, auto, python, snapshot

from uffdprefetch.service.brief import BRIEF_NS, IN_VAIN, TELLING

pytest_plugins = ("harness_fixtures",)
pytestmark = auto

SIZE = 256 << 10
#: Of mappings that need not be told of one in so many is (csrc/job/mapping.c).
BRIEF_SHARE = 16

#: One page of each, which stay mapped for a moment; of the last ones, for longer.
READER = """
say(ready=True)
hear()
said, paths = hashlib.sha256(), sorted(os.listdir(sys.argv[1]))
last, stays = int(sys.argv[2]), float(sys.argv[3])
for number, name in enumerate(paths):
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            said.update(view[:4096])
            time.sleep(stays if number >= len(paths) - last else 0.002)
say(digest=said.hexdigest())
"""


def read(job: Start, directory: Path, moments: int, last: int, *options: str) -> dict[str, Any]:
    """The summary's files by their names, of a job that has mapped so many for moments, and then
    so many that stay."""
    crops, pages = directory / "crops", hashlib.sha256()
    crops.mkdir()
    for number in range(moments + last):
        data = os.urandom(SIZE)
        (crops / f"{number:03}.crop").write_bytes(data)
        pages.update(data[:4096])
    words = python("import mmap, time\n" + READER, crops, str(last), str(4 * BRIEF_NS / 1e9))
    work = job(words, options=("--min-size", "64KiB", *options))
    assert work.line() == {"ready": True}
    snapshot(work.env)  # its service is up: it is told of each mapping
    work.tell()
    done = work.finish().good()
    assert done.lines[-1] == {"digest": pages.hexdigest()}
    assert done.summary is not None
    return {Path(file["path"]).name: file for file in done.summary["files"]}


def test_the_pool_follows_those_like_them_by_page_tables_until_some_stay(
    job: Start, tmp_path: Path
) -> None:
    """Where they are told of: something was gained, or they are mapped again."""
    moments, last = 3 * TELLING, 4
    files = read(job, tmp_path, moments, last, "--engine", "pool")
    served = {name: file["served_by"] for name, file in files.items()}
    assert served["000.crop"] == "pool"
    assert list(served.values()).count("page_tables") > TELLING
    assert served[f"{moments + last - 1:03}.crop"] == "pool", "after some that stayed"


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_most_that_would_be_followed_in_vain_are_left_to_the_kernel_until_some_stay(
    job: Start, tmp_path: Path, engine: str
) -> None:
    moments, last = 4 * IN_VAIN, 3 * BRIEF_SHARE
    files = read(job, tmp_path, moments, last, "--engine", engine)
    brief = [name for name in files if name < f"{moments:03}"]
    assert IN_VAIN <= len(brief) < moments // 2
    assert {f"{moments + last - one:03}.crop" for one in (1, 2)} <= set(files)
