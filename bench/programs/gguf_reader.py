# SPDX-License-Identifier: Apache-2.0
"""A GGUF file mapped in llama.cpp's way, all tensors in order: `gguf_reader.py FILE [--numa]`.

It is not llama.cpp, but maps as its `llama_mmap` does (src/llama-mmap.cpp): a shared mapping with
MAP_POPULATE, then posix_madvise(WILLNEED) of all of it; with --numa neither of them, but RANDOM.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from pathlib import Path
from typing import Any

from reading import Reading

ALIGNMENT_BYTES = 32
#: ggml_type of a tensor: bytes of an element.
ELEMENT_BYTES = {0: 4, 1: 2}  # F32, F16


def tensors_of(data: memoryview) -> list[tuple[int, int]]:
    """(offset, bytes) of each tensor of a GGUF file of version 3 without metadata."""
    magic, version, count, pairs = struct.unpack_from("<4sIQQ", data)
    if (magic, version, pairs) != (b"GGUF", 3, 0):
        raise SystemExit(f"no GGUF file of ours: {magic!r}, version {version}, {pairs} pairs")
    at, found = struct.calcsize("<4sIQQ"), []
    for _ in range(count):
        (name_bytes,) = struct.unpack_from("<Q", data, at)
        at += 8 + name_bytes
        (dimensions,) = struct.unpack_from("<I", data, at)
        sizes = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
        at += 4 + 8 * dimensions
        kind, offset = struct.unpack_from("<IQ", data, at)
        at += 12
        length = ELEMENT_BYTES[kind]
        for size in sizes:
            length *= size
        found.append((offset, length))
    begin = -(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return [(begin + offset, length) for offset, length in found]


def main() -> None:
    """Map it, and read its tensors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--numa", action="store_true", help="as llama.cpp with --numa")
    args = parser.parse_args()
    flags = mmap.MAP_SHARED | (0 if args.numa else mmap.MAP_POPULATE)
    with Reading() as reading, open(args.directory / "model.gguf", "rb") as file:
        mapped: Any = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM if args.numa else mmap.MADV_WILLNEED)
        view = memoryview(mapped)
        for offset, length in tensors_of(view):
            reading.add(view[offset : offset + length])
        view.release()
        mapped.close()


if __name__ == "__main__":
    main()
