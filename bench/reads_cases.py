# SPDX-License-Identifier: Apache-2.0
"""The jobs of bench/reads.py: files read by read(2) and pread(2), and trees of small files."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harm_cases import GIB, MB, MIB, Case, named_like


class Limit(str, enum.Enum):
    """What no job is quicker than; warm are the seconds of the same job with all in memory."""

    #: The larger of the bytes over the bandwidth, and warm: who reads ahead computes meanwhile.
    LARGER = "larger"
    #: Their sum: of small files each is read when it is opened.
    SUM = "sum"
    #: It is not to be made quicker: it may not be slower than plain.
    NONE = "none"


@dataclass(frozen=True)
class ReadCase(Case):
    """A job, and the bed it runs on.

    ``warm``: all of it is in memory before, names too. ``whole``: each byte of its files is read.
    ``compute``: seconds of computing for each second that the link takes. ``bed``: options of it.
    """

    limit: Limit = Limit.LARGER
    warm: bool = False
    whole: bool = True
    compute: float = 0.0
    bed: Mapping[str, bool] = field(default_factory=dict)

    def scaled(self, files: float, reads: float) -> tuple[int, int]:
        """Where nothing is counted, 0 reads."""
        size_bytes, count = super().scaled(files, reads)
        return size_bytes, count if self.reads else 0

    def described(self, size_bytes: int, reads: int) -> dict[str, Any]:
        """For a report."""
        return super().described(size_bytes, reads) | {
            "limit": self.limit.value,
            "warm": self.warm,
            "compute": self.compute,
            "bed": dict(self.bed),
        }

    def computing(self, bandwidth: int) -> list[str]:
        """The option that says how long it computes."""
        if not self.compute:
            return []
        return [f"--compute-seconds-per-byte={self.compute / bandwidth}"]


_STREAMS, _SMALL = "streams.py", "small_files.py"
#: Of streams, of what libraries read, and of the small files: 2,000 of them, of 100 KiB.
_STREAM_BYTES, _LIBRARY_BYTES, _TREE_BYTES = 256 * MIB, 60 * MB, 2000 * 100 * 1024
#: Files that a job takes 0.1 s to read from memory it reads more often.
_PASSES = 10


def _of(script: str, name: str, kind: str, size_bytes: int, **more: Any) -> ReadCase:
    """The reader's name is the case's after its script's word, up to a comma."""
    needs: str = more.pop("needs", "")
    reader = more.pop("reader", "") or name.partition(".")[2]
    return ReadCase(
        name, kind, script, (f"--reader={reader}",), tuple(needs.split()),
        size_bytes=size_bytes, **more,
    )  # fmt: skip


def _stream(name: str, kind: str = "noise", **more: Any) -> ReadCase:
    return _of(_STREAMS, f"stream.{name}", kind, _STREAM_BYTES, **more)


def _library(name: str, kind: str, needs: str, **more: Any) -> ReadCase:
    return _of(_STREAMS, f"library.{name}", kind, _LIBRARY_BYTES, needs=needs, **more)


def _small(name: str, **more: Any) -> ReadCase:
    size_bytes = more.pop("size_bytes", _TREE_BYTES)
    return _of(_SMALL, f"small.{name}", "tree", size_bytes, limit=Limit.SUM, **more)


def _harm(name: str, script: str, kind: str, size_bytes: int, **more: Any) -> ReadCase:
    return _of(script, f"harm.{name}", kind, size_bytes, limit=Limit.NONE, **more)


_ZSTD = (("zstd", "zstd"),)
_DIRECT, _FORGETS = {"direct_io": True}, {"keep_cache": False}
#: Those that read the same files stand together: files are made for the first and go with the last.
EVERY: tuple[ReadCase, ...] = (
    _stream("zstd", "zstd", commands=_ZSTD),
    _stream("dd-4k"),
    _stream("dd-64k"),
    _stream("dd-4M"),
    _stream("sha1sum"),
    _stream("cp"),
    _stream("wc"),
    _stream("read-all"),
    _stream("pread-64k"),
    _stream("pread-64k-computing", reader="pread-64k", compute=0.95),
    _stream("pread-4M"),
    _stream("pread-4M-computing", reader="pread-4M", compute=0.95),
    _stream("threads"),
    _harm("cached-stream", _STREAMS, "noise", _STREAM_BYTES, reader="read", reads=_PASSES,
          warm=True),
    *(
        _harm(name, _STREAMS, "noise", _STREAM_BYTES, reads=_PASSES, warm=True)
        for name in ("crowd", "crowd-busy", "crowd-large")
    ),
    _harm("direct-io-stream", _STREAMS, "noise", _STREAM_BYTES, reader="dd-64k", bed=_DIRECT),
    _harm("no-keep-cache-stream", _STREAMS, "noise", _STREAM_BYTES, reader="dd-64k", bed=_FORGETS),
    _harm("dontneed", _STREAMS, "noise", _STREAM_BYTES, reads=2),
    _harm("tenth", _STREAMS, "noise", _STREAM_BYTES, whole=False),
    _harm("random", _STREAMS, "noise", 1 * GIB, reads=400, whole=False),
    _harm("chase", _STREAMS, "noise", 1 * GIB, reads=1000, whole=False),
    _library("parquet-groups", "grouped", "pyarrow"),
    _library("arrow-file", "table", "pyarrow"),
    _library("hdf5-chunks", "chunks", "h5py"),
    _library("np-load", "npy", "numpy"),
    _library("np-fromfile", "noise", "numpy"),
    _library("torch-load", "pickled", "torch"),
    _of(_SMALL, "stream.shards", "shards", _TREE_BYTES),
    _small("tar"),
    _small("md5sum"),
    _small("cp"),
    _small("rsync", commands=(("rsync", "rsync"),)),
    _small("grep"),
    _small("xargs"),
    _small("walk"),
    _small("classes"),
    *(_small(f"loader-{workers}", needs="torch") for workers in (0, 2, 4, 8, 16)),
    _small("ranks", needs="torch"),
    _harm("cached-small", _SMALL, "tree", _TREE_BYTES, reader="md5sum", reads=_PASSES, warm=True),
    _harm("direct-io-small", _SMALL, "tree", _TREE_BYTES, reader="md5sum", bed=_DIRECT),
    _harm("no-keep-cache-small", _SMALL, "tree", _TREE_BYTES, reader="md5sum", bed=_FORGETS),
    _harm("shuffled", _SMALL, "tree", _TREE_BYTES),
    _small("md5sum-20000", reader="md5sum", size_bytes=10 * _TREE_BYTES),
)  # fmt: skip


def chosen(globs: str) -> Sequence[ReadCase]:
    """The cases whose names match one of these globs, with commas; in the order of EVERY."""
    return named_like(EVERY, globs)
