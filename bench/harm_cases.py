# SPDX-License-Identifier: Apache-2.0
"""The jobs of bench/harm.py: most of them read a part of what they map, so a guess may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from apps_programs import Program

MB, MIB, GIB = 1_000_000, 1 << 20, 1 << 30
#: What a job may take, of plain; and a walk beside a random reader, as the two share a link.
MOST_TIME, MOST_TIME_BESIDE = 1.02, 1.05


@dataclass(frozen=True)
class Case(Program):
    """A job on files of ``size_bytes``. At 300 MB/s and 1 ms it takes 1 to 6 s and mostly waits."""

    size_bytes: int = 0
    #: Of whatever the job counts: pages, records, queries.
    reads: int = 0
    #: Options of `wrap` that it needs to be served.
    wrap: tuple[str, ...] = ()
    most_time: float = MOST_TIME
    #: One that is known to be served well.
    control: bool = False

    def scaled(self, files: float, reads: float) -> tuple[int, int]:
        """Bytes of the files and reads of a run in small."""
        return max(MIB, round(self.size_bytes * files)), max(2, round(self.reads * reads))

    def described(self, size_bytes: int, reads: int) -> dict[str, Any]:
        """For a report."""
        return {
            "job": [self.script, *self.options, f"--reads={reads}"],
            "kind": self.kind,
            "size_bytes": size_bytes,
            "most_time": self.most_time,
            "control": self.control,
        }

    def job(self, directory: Path, reads: int) -> list[str]:
        """The command line."""
        return [*self.command(directory), f"--reads={reads}"]


AnyCase = TypeVar("AnyCase", bound=Case)


def _pattern(name: str, kind: str, size_bytes: int, reads: int, *options: str, **more: Any) -> Case:
    """A walk or jumps by numpy.memmap; the pattern's name is the case's, or the first option."""
    pattern, *rest = options or (name,)
    words = (f"--pattern={pattern}", *rest)
    return Case(name, kind, "patterns.py", words, size_bytes=size_bytes, reads=reads, **more)


def _library(
    name: str, script: str, kind: str, size_bytes: int, reads: int, needs: str, **more: Any
) -> Case:
    """A part of what a library maps; the reader's name is the case's up to its first point."""
    words = (f"--reader={name.partition('.')[0]}",)
    return Case(
        name, kind, script, words, tuple(needs.split()), size_bytes=size_bytes, reads=reads, **more
    )


_ARRAYS, _STORES = "arrays.py", "stores.py"
_SHUFFLED = ("--shuffled",)
#: Those that read the same files stand together: files are made for the first and go with the last.
EVERY: tuple[Case, ...] = (
    # Tables of which some columns are read, and other parts of what a library maps.
    _library("polars.columns", _STORES, "columns", 1250 * MB, 2, "polars pyarrow"),
    _library("pyarrow.columns", _STORES, "columns", 1250 * MB, 2, "pyarrow"),
    _library("parquet.columns", _STORES, "parquet", 1250 * MB, 2, "pyarrow"),
    _library("mrcfile.images", _ARRAYS, "mrc", 830 * MB, 30, "mrcfile"),
    _library("blosc2.crops", _ARRAYS, "blosc2", 672 * MB, 60, "blosc2"),
    _library("zarr.crops", _ARRAYS, "zarr", 400 * MB, 30, "zarr"),
    _library("h5py.planes", _ARRAYS, "hdf5", 537 * MB, 4, "h5py"),
    _library("npy.crops", _ARRAYS, "npy", 268 * MB, 25, "numpy"),
    _library("astropy.cut-outs", _ARRAYS, "fits", 838 * MB, 50, "astropy"),
    _library("scipy.variables", _ARRAYS, "netcdf", 800 * MB, 3, "scipy"),
    _library("safetensors.some", _STORES, "weights", 1000 * MB, 32, "safetensors"),
    _library("datasets.rows", _STORES, "dataset", 400 * MB, 600, "datasets"),
    # Stores, of which some records are read.
    _library("sqlite.rows", _STORES, "sqlite", 400 * MB, 1500, ""),
    _library("sqlite-ranges", _STORES, "sqlite", 400 * MB, 200, ""),
    _library("rocksdb.rows", _STORES, "rocksdb", 400 * MB, 1200, "rocksdict"),
    _library("git.blobs", _STORES, "git", 400 * MB, 600, "", commands=(("git", "git"),)),
    _library("tantivy.queries", _STORES, "tantivy", 200 * MB, 100, "tantivy"),
    Case(
        "lmdb-few", "records", "records.py", _SHUFFLED, ("lmdb",), size_bytes=400 * MB, reads=500
    ),
    Case(
        "lmdb-shuffled", "records", "records.py", _SHUFFLED, ("lmdb",),
        size_bytes=400 * MB, reads=1_000_000, control=True,
    ),
    # Vectors near others.
    Case("faiss-few", "vectors", "vectors.py", (), ("faiss",), size_bytes=400 * MB, reads=5),
    _library("annoy.queries", _STORES, "annoy", 200 * MB, 3, "annoy"),
    _library("usearch.queries", _STORES, "usearch", 200 * MB, 7, "usearch"),
    # Nothing of these is mapped.
    _library("hnswlib.queries", _STORES, "hnswlib", 200 * MB, 15, "hnswlib"),
    _library("duckdb.columns", _STORES, "duckdb", 500 * MB, 12, "duckdb pyarrow"),
    # numpy.memmap.
    _pattern("random-300", "noise", 100 * MB, 300, "random"),
    _pattern(
        "every-page-MADV_RANDOM", "noise", 20 * MIB, 4000, "every-page", "--advice=MADV_RANDOM"
    ),
    _pattern("pointer-chase", "noise", 512 * MIB, 1000, "chase"),
    _pattern("in-order", "noise", 512 * MIB, 8192, control=True),
    _pattern("copied", "noise", 512 * MIB, 512, control=True),
    _pattern("turns-and-computes", "noise", 512 * MIB, 1600, control=True),
    _pattern("strided-512KiB", "holes", 1 * GIB, 2048, "strided"),
    _pattern("strided-2MiB", "holes", 4 * GIB, 2048, "strided"),
    _pattern("random-1500", "noise", 1000 * MB, 1500, "random"),
    _pattern("switch", "noise", 1000 * MB, 600),
    _pattern("any-length", "noise", 1000 * MB, 100),
    _pattern("short-walks", "noise", 1000 * MB, 300),
    _pattern("record-ends", "noise", 1000 * MB, 960),
    _pattern("backward", "noise", 1000 * MB, 4000),
    _pattern("skip-3-of-4", "noise", 1000 * MB, 1200, control=True),
    _pattern("beside", "pair", 600 * MB, 1500, most_time=MOST_TIME_BESIDE),
    _pattern("indexed", "pair", 600 * MB, 200),
    _pattern("small-files-whole", "small", 430 * MB, 1000, "whole", wrap=("--min-size=16KiB",)),
    _pattern("one-place-of-each", "sparse", 20_000 * MB, 1000, "one-place"),
)  # fmt: skip


def named_like(cases: Sequence[AnyCase], globs: str) -> list[AnyCase]:
    """Those whose names match one of these globs, with commas; in their order."""
    patterns = globs.split(",")
    return [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in patterns)]


def chosen(globs: str) -> list[Case]:
    """The cases whose names match one of these globs, with commas; in the order of EVERY."""
    return named_like(EVERY, globs)
