# SPDX-License-Identifier: Apache-2.0
"""The programs of bench/apps.py: what they read, what they need, how they are run."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"
#: Peers, that is what users do by hand: a prefetcher in the program (programs/prefetcher.py), or
#: vmtouch before it.
OWN_PREFETCHER, VMTOUCH = "own prefetcher", "vmtouch"


@dataclass(frozen=True)
class Program:
    """A program: ``script`` of programs/ with its options, reading files of a ``kind``.

    ``needs``: Python packages; ``commands``: others, by the Debian packages that have them.
    ``slow``: why it runs with --slow only.
    """

    name: str
    kind: str
    script: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    peer: str = VMTOUCH
    slow: str = ""

    def command(self, directory: Path, peer: bool = False) -> list[str]:
        """The command line for the files in ``directory``."""
        words = [sys.executable, str(PROGRAMS / self.script), str(directory), *self.options]
        return [*words, "--prefetch"] if peer and self.peer == OWN_PREFETCHER else words

    def why_not(self, slow: bool) -> str | None:
        """Why it cannot run here, None if it can. ``slow``: slow ones too."""
        if self.slow and not slow:
            return f"{self.slow}; --slow runs it"
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"the Python package {package} is missing: make apps"
        for command, package in self.commands:
            if shutil.which(command) is None:
                return f"{command} is missing: apt-get install {package}"
        return None


def _weights(name: str, kind: str, reader: str, *needs: str) -> Program:
    options = (f"--reader={reader}",)
    return Program(name, kind, "weights.py", options, needs, peer=OWN_PREFETCHER)


def _dataset(name: str, *options: str) -> Program:
    return Program(name, "dataset", "hf_loader.py", options, ("datasets", "torch"))


def _search(name: str, kind: str, *commands: tuple[str, str]) -> Program:
    options = (f"--tool={commands[0][0]}",)
    return Program(name, kind, "sequences.py", options, commands=commands)


#: Those that read the same files stand together: files are made for the first and go with the last.
EVERY = (
    _weights("safetensors-load_file", "weights", "load_file", "safetensors", "torch"),
    _weights("safetensors-safe_open", "weights", "safe_open", "safetensors", "torch"),
    _weights("safetensors-numpy", "weights", "numpy", "safetensors"),
    _weights("safetensors-4-shards", "checkpoint", "safe_open", "safetensors", "torch"),
    Program(
        "safetensors-4-shards-8-ranks", "checkpoint", "weight_slices.py", ("--ranks=8",),
        ("safetensors", "torch"), peer=OWN_PREFETCHER,
    ),
    Program(
        "transformers-from_pretrained", "checkpoint", "pretrained.py", (),
        ("safetensors", "torch", "transformers"), peer=OWN_PREFETCHER,
    ),
    _weights("torch.load-mmap", "pickled", "torch.load", "torch"),
    Program("gguf-as-llama.cpp", "gguf", "gguf_reader.py"),
    Program(
        "gguf-as-llama.cpp-numa", "gguf", "gguf_reader.py", ("--numa",),
        slow="plain waits once a page, four minutes for a GB at 1 ms",
    ),
    _dataset("hf-loader"),
    _dataset("hf-loader-2-workers", "--workers=2"),
    _dataset("hf-loader-4-workers", "--workers=4"),
    _dataset("hf-shuffle", "--way=shuffle"),
    _dataset("hf-iterable", "--way=iterable"),
    Program("megatron-blended", "megatron", "megatron_data.py", (), ("megatron", "torch")),
    Program(
        "megatron-blended-2-workers", "megatron", "megatron_data.py", ("--workers=2",),
        ("megatron", "torch"),
    ),
    Program("memmap-batches", "tokens", "memmaps.py", ("--reader=batches",)),
    Program("memmap-scan", "tokens", "memmaps.py", ("--reader=scan",)),
    Program("memmap-copy-on-write", "tokens", "memmaps.py", ("--reader=copy-on-write",)),
    Program("pyarrow-ipc", "table", "arrow_table.py", ("--reader=pyarrow",), ("pyarrow",)),
    Program("polars-scan", "table", "arrow_table.py", ("--reader=polars",), ("polars", "pyarrow")),
    Program("lmdb-cursor", "records", "records.py", (), ("lmdb",)),
    Program("faiss-ivf-mmap", "vectors", "vectors.py", (), ("faiss",)),
    _search("kraken2-memory-mapping", "kraken2", ("kraken2", "kraken2")),
    _search("mmseqs-easy-search", "mmseqs", ("mmseqs", "mmseqs2")),
    _search("blastn", "blast", ("blastn", "ncbi-blast+"), ("makeblastdb", "ncbi-blast+")),
)  # fmt: skip


def chosen(globs: str) -> list[Program]:
    """The programs whose names match one of these globs, with commas; in the order of EVERY."""
    patterns = globs.split(",")
    return [
        program
        for program in EVERY
        if any(fnmatchcase(program.name, pattern) for pattern in patterns)
    ]
