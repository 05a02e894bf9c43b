# SPDX-License-Identifier: Apache-2.0
"""A search in a database of sequences that stays in its files: `sequences.py DIR --tool NAME`.

Tools: kraken2 --memory-mapping; mmseqs easy-search with an index that is mapped; blastn. Their
answers are what is taken in.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from reading import Reading


def command(tool: str, directory: Path, scratch: Path) -> list[str]:
    """The command line; its answers go to the file ``answers`` in ``scratch``."""
    queries, answers = str(directory / "queries.fa"), str(scratch / "answers")
    if tool == "kraken2":
        return ["kraken2", "--db", str(directory), "--memory-mapping", "--output", answers, queries]
    if tool == "mmseqs":
        search = ["mmseqs", "easy-search", queries, str(directory / "proteins"), answers]
        return [*search, str(scratch / "tmp"), "-k", "5", "--threads", "2", "--db-load-mode", "2"]
    database = str(directory / "sequences")
    return ["blastn", "-db", database, "-query", queries, "-outfmt", "6", "-out", answers]


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tool", choices=("kraken2", "mmseqs", "blastn"), required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Reading() as reading:
        words = command(args.tool, args.directory, Path(scratch))
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (Path(scratch) / "answers").read_bytes().splitlines(keepends=True)
        if not lines:
            raise SystemExit(f"{args.tool} has found nothing")
        reading.add(b"".join(sorted(lines)))


if __name__ == "__main__":
    main()
