# SPDX-License-Identifier: Apache-2.0
"""Trees of small files, drawn, to be packed; `pack` as a process; what a database must be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from uffdprefetch.pack.packing import PackedResult, PackOptions, pack

#: Of files: none, inside a leaf page, on overflow pages of one and of several.
SIZES = (0, 20, 300, 1500, 5000, 9000)


def make_tree(root: Path, classes: int = 4, files: int = 12, seed: int = 1) -> dict[bytes, bytes]:
    """Files in directories of directories: path below ``root`` -> bytes."""
    chance = random.Random(seed)
    made: dict[bytes, bytes] = {}
    for number in range(classes):
        for file in range(files):
            below = chance.choice(("", "a/", "a-b/", "a/b/"))
            path = f"class{number}/{below}{file:03}.bin"
            made[path.encode()] = chance.randbytes(chance.choice(SIZES))
    write_tree(root, made)
    return made


def write_tree(root: Path, files: dict[bytes, bytes]) -> None:
    for path, data in files.items():
        file = os.path.join(os.fsencode(root), path)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "wb") as out:
            out.write(data)


def read_tree(root: Path) -> dict[bytes, bytes]:
    """What write_tree() was given."""
    found = {}
    for directory, _, names in os.walk(os.fsencode(root)):
        for name in names:
            file = os.path.join(directory, name)
            with open(file, "rb") as data:
                found[os.path.relpath(file, os.fsencode(root))] = data.read()
    return found


def packed(source: Path | tuple[Path, ...], output: Path, **options: object) -> PackedResult:
    """Packed in this process, with nothing left out."""
    sources = source if isinstance(source, tuple) else (source,)
    result, told = packed_telling(sources, output, **options)
    assert not told, told
    return result


def packed_telling(
    sources: tuple[Path, ...], output: Path, **options: object
) -> tuple[PackedResult, list[str]]:
    """Packed in this process, and what was told meanwhile."""
    told: list[str] = []
    asked = PackOptions(tuple(map(str, sources)), str(output), **options)  # type: ignore[arg-type]
    return pack(asked, told.append), told


def command(*words: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """`uffdprefetch` with these words, after ``code``."""
    return subprocess.run(
        [sys.executable, "-c", code + MAIN, *map(str, words)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


MAIN = "\nimport sys\nfrom uffdprefetch.cli import main\nsys.exit(main(sys.argv[1:]))\n"
