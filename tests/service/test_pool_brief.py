# SPDX-License-Identifier: Apache-2.0
"""Files that are each mapped for a moment, under `wrap --engine pool` (service/brief.py)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from harness import Start, python

from uffdprefetch.service.brief import TELLING

pytest_plugins = ("harness_fixtures",)

FILES, SIZE = 4 * TELLING, 256 << 10

#: One page of each; then the last one stays, and so does another.
READER = """
said = hashlib.sha256()
paths = sorted(os.listdir(sys.argv[1]))
for name in paths[:-2]:
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            said.update(view[:4096])
kept = []
for name in paths[-2:]:
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    said.update(kept[-1][:4096])
    time.sleep(0.2)
    kept[-1].close()
say(digest=said.hexdigest())
"""


def test_those_like_them_are_followed_by_page_tables_until_one_stays(
    job: Start, tmp_path: Path
) -> None:
    crops, pages = tmp_path / "crops", hashlib.sha256()
    crops.mkdir()
    for number in range(FILES):
        data = os.urandom(SIZE)
        (crops / f"{number:03}.crop").write_bytes(data)
        pages.update(data[:4096])
    options = ("--engine", "pool", "--min-size", "64KiB")
    done = job(python("import mmap, time\n" + READER, crops), options=options).finish().good()
    assert done.lines == [{"digest": pages.hexdigest()}]
    assert done.summary is not None
    by = {Path(file["path"]).name: file["served_by"] for file in done.summary["files"]}
    assert by["000.crop"] == "pool"
    brief = [name for name, served in by.items() if served == "page_tables"]
    assert len(brief) > FILES // 2
    assert by[f"{FILES - 1:03}.crop"] == "pool", "after one that stayed"
