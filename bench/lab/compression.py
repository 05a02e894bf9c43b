# SPDX-License-Identifier: Apache-2.0
"""Whether a disk tier should compress: `python bench/lab/compression.py`.

LZ4 over units of 256 KiB, one core, CPU time: what a unit shrinks to, and how fast it is made and
undone. Needs liblz4, pyarrow and Pillow.
"""

from __future__ import annotations

import ctypes
import io
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

UNIT = 256 << 10
SIZE = 8 << 20
_lz4 = ctypes.CDLL("liblz4.so.1")


def source_text(size: int) -> bytes:
    """That much of the standard library."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return bytes(text[:size])


def tokens(text: bytes) -> bytes:
    """A word's place by frequency, uint16, as a tokenizer numbers them."""
    words = re.findall(rb"\w+|[^\w\s]+|\s+", text)
    rank = {word: min(i, 65535) for i, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([rank[word] for word in words], np.uint16).tobytes()


def arrow(text: bytes) -> bytes:
    """A column of lines and one of numbers."""
    rows = [line.decode("latin1") for line in text.split(b"\n")]
    table = pa.table({"text": rows, "id": list(range(len(rows)))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def jpeg(rng: np.random.Generator) -> bytes:
    """Pictures of 500 x 375, quality 90."""
    found = io.BytesIO()
    while found.tell() < SIZE:
        noise = np.clip(rng.normal(128, 40, (64, 64, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noise).resize((500, 375)).save(found, "JPEG", quality=90)
    return found.getvalue()


def kinds() -> Iterator[tuple[str, bytes]]:
    rng, text = np.random.default_rng(0), source_text(8 * SIZE)
    yield "tokens, uint16", tokens(text)[:SIZE]
    yield "Arrow, lines of text", arrow(text[:SIZE])[:SIZE]
    yield "JPEG", jpeg(rng)[:SIZE]
    yield "weights, float32", rng.normal(0, 0.02, SIZE // 4).astype(np.float32).tobytes()
    yield "random bytes", rng.bytes(SIZE)


def figures(data: bytes) -> tuple[float, float, float]:
    """Ratio, and GB/s of CPU time to compress and to undo that."""
    units = [data[at : at + UNIT] for at in range(0, len(data) - UNIT + 1, UNIT)]
    rooms = [ctypes.create_string_buffer(_lz4.LZ4_compressBound(UNIT)) for _ in units]
    began = time.process_time()
    sizes = [
        _lz4.LZ4_compress_default(unit, room, UNIT, len(room))
        for unit, room in zip(units, rooms, strict=True)
    ]
    took, size = time.process_time() - began, len(units) * UNIT
    packed = [room.raw[:length] for room, length in zip(rooms, sizes, strict=True)]
    back = ctypes.create_string_buffer(UNIT)
    began = time.process_time()
    for unit in packed:
        _lz4.LZ4_decompress_safe(unit, back, len(unit), UNIT)
    undone = time.process_time() - began
    for unit, one in zip(packed, units, strict=True):
        assert _lz4.LZ4_decompress_safe(unit, back, len(unit), UNIT) == UNIT and back.raw == one
    return size / sum(sizes), size / took / 1e9, size / undone / 1e9


def main() -> None:
    print("| data | ratio | compress, GB/s | undo, GB/s |\n|---|---:|---:|---:|")
    for name, data in kinds():
        best = [max(column) for column in zip(*(figures(data) for _ in range(5)), strict=True)]
        print(f"| {name} | {best[0]:.1f} | {best[1]:.2f} | {best[2]:.1f} |")


if __name__ == "__main__":
    main()
