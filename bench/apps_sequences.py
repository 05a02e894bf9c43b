# SPDX-License-Identifier: Apache-2.0
"""Databases of the programs that search sequences, made by their own tools from random sequences.

A database's directory also has the queries: parts of what is in it, with errors.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BASES = np.frombuffer(b"ACGT", dtype=np.uint8)
AMINO_ACIDS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", dtype=np.uint8)
PAGE_BYTES = 4096


def run(*words: str | Path, cwd: Path | None = None) -> None:
    """A tool, which must succeed."""
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, cwd=cwd)


def random_letters(letters: np.ndarray, count: int, seed: int) -> np.ndarray:
    """A random sequence, as bytes."""
    generator = np.random.Generator(np.random.SFC64(seed))
    return letters[generator.integers(0, len(letters), count, dtype=np.uint8)]


def pieces(
    every: np.ndarray, letters: np.ndarray, count: int, length: int, errors: float
) -> list[bytes]:
    """``count`` parts of a sequence from random places, in which some letters are replaced."""
    generator = np.random.default_rng(11)
    found = []
    for start in generator.integers(len(every) - length, size=count):
        piece = every[start : start + length].copy()
        wrong = generator.random(length) < errors
        piece[wrong] = generator.choice(letters, int(wrong.sum()))
        found.append(piece.tobytes())
    return found


def write_fasta(path: Path, names: Sequence[str], sequences: Sequence[bytes]) -> None:
    """Each sequence in one line."""
    with open(path, "wb") as file:
        for name, sequence in zip(names, sequences, strict=True):
            file.write(b">" + name.encode() + b"\n" + sequence + b"\n")


def cut(every: np.ndarray, length: int) -> list[bytes]:
    """A sequence in parts of one length."""
    return [every[at : at + length].tobytes() for at in range(0, len(every), length)]


def make_kraken2(directory: Path, size_bytes: int) -> None:
    """Genomes of 1 Mbp, each a species; two bytes of the hash table come of each base."""
    every = random_letters(BASES, size_bytes // 2, 21)
    genomes = cut(every, 1_000_000)
    making = directory / "making"
    (making / "taxonomy").mkdir(parents=True)
    species = range(2, 2 + len(genomes))
    parents = [(1, 1, "no rank"), *((number, 1, "species") for number in species)]
    (making / "taxonomy/nodes.dmp").write_text(
        "".join(f"{own}\t|\t{parent}\t|\t{rank}\t|\t-\t|\n" for own, parent, rank in parents)
    )
    (making / "taxonomy/names.dmp").write_text(
        "".join(f"{own}\t|\tspecies {own}\t|\t\t|\tscientific name\t|\n" for own, *_ in parents)
    )
    fasta = making / "genomes.fa"
    write_fasta(fasta, [f"g{number}|kraken:taxid|{number}" for number in species], genomes)
    build = ("kraken2-build", "--db", making, "--no-masking", "--threads=2")
    run(*build, "--add-to-library", fasta)
    run(*build, "--build", "--fast-build")
    for name in ("hash.k2d", "opts.k2d", "taxo.k2d"):
        (making / name).rename(directory / name)
    shutil.rmtree(making)
    # A read looks some 40 times into the table: nearly every page is touched.
    reads = pieces(every, BASES, size_bytes // PAGE_BYTES // 16, 150, 0.005)
    write_fasta(directory / "queries.fa", [f"r{number}" for number in range(len(reads))], reads)


def make_mmseqs(directory: Path, size_bytes: int) -> None:
    """Proteins of 350 residues with an index for words of 5, which has 417 MB of scores and of
    offsets by words, however small the database is, and then 10 bytes for each residue."""
    fixed_bytes, residue_bytes = 417_000_000, 10
    count = max(1_000_000, (size_bytes - fixed_bytes) // residue_bytes)
    every = random_letters(AMINO_ACIDS, count, 22)
    proteins = cut(every, 350)
    making = directory / "making"
    making.mkdir()
    fasta = making / "proteins.fa"
    write_fasta(fasta, [f"p{number}" for number in range(len(proteins))], proteins)
    database = directory / "proteins"
    run("mmseqs", "createdb", fasta, database)
    run("mmseqs", "createindex", database, making / "tmp", "-k", "5", "--threads", "2")
    shutil.rmtree(making)
    queries = pieces(every, AMINO_ACIDS, 20, 300, 0.2)
    write_fasta(directory / "queries.fa", [f"q{number}" for number in range(len(queries))], queries)


def make_blast(directory: Path, size_bytes: int) -> None:
    """Sequences of 1 Mbp, four bases in a byte, of a quarter of the size."""
    every = random_letters(BASES, size_bytes, 23)
    sequences = cut(every, 1_000_000)
    fasta = directory / "making.fa"
    write_fasta(fasta, [f"s{number}" for number in range(len(sequences))], sequences)
    run("makeblastdb", "-in", fasta, "-dbtype", "nucl", "-out", directory / "sequences")
    fasta.unlink()
    queries = pieces(every, BASES, 4, 500, 0.05)
    write_fasta(directory / "queries.fa", [f"q{number}" for number in range(len(queries))], queries)
