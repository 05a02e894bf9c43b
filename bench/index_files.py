# SPDX-License-Identifier: Apache-2.0
"""Large sparse record files for bench/index.py: the records' metadata are real, the data are
holes. (An LMDB's pages are made here as liblmdb would, appending: it would write every value.)
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from uffdprefetch.formats import crc32c

PAGE_BYTES = 4096
_HEADER_BYTES = 16
_BRANCH, _LEAF, _META = 1, 2, 8
_KEY_BYTES = 8
_LEAF_NODE_BYTES = 8 + _KEY_BYTES + 8
_BRANCH_NODE_BYTES = 8 + _KEY_BYTES
_BATCH_ROWS = 1000


def npy(path: Path, records: int, record_bytes: int) -> None:
    np.lib.format.open_memmap(path, "w+", np.uint8, (records, record_bytes))


def raw(path: Path, records: int, record_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(records * record_bytes)


def tfrecord(path: Path, records: int, record_bytes: int) -> None:
    word = np.array([record_bytes], "<u8").view(np.uint8)
    header = word.tobytes() + crc32c.masked(crc32c.of_words(word[None])).astype("<u4").tobytes()
    framed_bytes = record_bytes + 16
    with path.open("wb") as file:
        if record_bytes < PAGE_BYTES:
            piece = header + bytes(record_bytes + 4)
            for at in range(0, records, 10_000):
                file.write(piece * min(10_000, records - at))
            return
        for number in range(records):
            file.seek(number * framed_bytes)
            file.write(header)
        file.truncate(records * framed_bytes)


def arrow(path: Path, records: int, record_bytes: int) -> None:
    """A stream of batches of an image and a label, as Hugging Face datasets writes them."""
    import pyarrow as pa

    image = {"bytes": bytes(record_bytes), "path": "a.jpg"}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [pa.array([image] * _BATCH_ROWS, kind), pa.array(range(_BATCH_ROWS))]
    batch = pa.RecordBatch.from_arrays(columns, ["image", "label"])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
        out.write_batch(batch)
        twice = sink.tell()
        out.write_batch(batch)
        ends = sink.tell()
    data = sink.getvalue()
    batch_bytes = ends - twice
    begins = twice - 2 * batch_bytes  # after the schema, which is written with the first batch
    with path.open("wb") as file:
        file.write(data[:begins])
        pieces = _not_zero(data[twice:ends])
        for number in range(records // _BATCH_ROWS):
            for at, piece in pieces:
                file.seek(begins + number * batch_bytes + at)
                file.write(piece)
        file.seek(begins + records // _BATCH_ROWS * batch_bytes)
        file.write(data[ends:])


def _not_zero(data: bytes) -> list[tuple[int, bytes]]:
    """The non-empty pages of ``data``, with their offsets."""
    pages = [(at, data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
    return [(at, page) for at, page in pages if any(page)]


# ---- LMDB ---------------------------------------------------------------------------------------


def _page(number: int, flags: int, nodes: list[bytes]) -> bytes:
    """A page with these nodes, filled from its end, as liblmdb does."""
    upper, pointers, body = PAGE_BYTES, [], b""
    for node in nodes:
        upper -= len(node)
        pointers.append(upper)
        body = node + body
    lower = _HEADER_BYTES + 2 * len(nodes)
    head = struct.pack("<QHHHH", number, 0, flags, lower, upper)
    return (head + struct.pack(f"<{len(nodes)}H", *pointers)).ljust(upper, b"\0") + body


def _meta(number: int, txnid: int, last_page: int, main: bytes) -> bytes:
    head = struct.pack("<QHHHH", number, 0, _META, 0, 0)
    free = struct.pack("<IHHQQQQQ", PAGE_BYTES, 0, 0, 0, 0, 0, 0, 2**64 - 1)
    body = struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, (last_page + 1) * PAGE_BYTES)
    return (head + body + free + main + struct.pack("<QQ", last_page, txnid)).ljust(
        PAGE_BYTES, b"\0"
    )


def lmdb(path: Path, records: int, record_bytes: int) -> None:
    """Keys of 8 digits in order, values on overflow pages after their leaf."""
    value_pages = (_HEADER_BYTES - 1 + record_bytes) // PAGE_BYTES + 1
    in_leaf = (PAGE_BYTES - _HEADER_BYTES) // (_LEAF_NODE_BYTES + 2)
    in_branch = (PAGE_BYTES - _HEADER_BYTES) // (_BRANCH_NODE_BYTES + 2)
    with path.open("wb") as file:

        def put(number: int, page: bytes) -> None:
            file.seek(number * PAGE_BYTES)
            file.write(page)

        at, level = 2, []
        for first in range(0, records, in_leaf):
            count = min(in_leaf, records - first)
            nodes = [
                struct.pack("<IHH8sQ", record_bytes, 1, _KEY_BYTES, b"%08d" % (first + i),
                            at + 1 + i * value_pages)
                for i in range(count)
            ]  # fmt: skip
            put(at, _page(at, _LEAF, nodes))
            level.append((b"%08d" % first, at))
            at += 1 + count * value_pages
        leaves, branches, depth = len(level), 0, 1
        while len(level) > 1:
            above = []
            for i in range(0, len(level), in_branch):
                children = level[i : i + in_branch]
                nodes = [
                    struct.pack("<IHH", child & 0xFFFFFFFF, child >> 32, len(key)) + key
                    for key, child in [(b"", children[0][1]), *children[1:]]
                ]
                # liblmdb leaves the first one's key empty
                put(at, _page(at, _BRANCH, nodes))
                above.append((children[0][0], at))
                at += 1
            branches, depth, level = branches + len(above), depth + 1, above
        main = struct.pack(
            "<IHHQQQQQ", 0, 0, depth, branches, leaves, records * value_pages, records, level[0][1]
        )
        file.truncate(at * PAGE_BYTES)
        for number in range(2):
            put(number, _meta(number, number, at - 1, main))


MAKERS: dict[str, Callable[[Path, int, int], None]] = {
    "raw": raw,
    "npy": npy,
    "lmdb": lmdb,
    "tfrecord": tfrecord,
    "arrow": arrow,
}
