# SPDX-License-Identifier: Apache-2.0
"""An LMDB of records: `records.py DIR` reads all of them by a cursor, in the order of their keys;
with --shuffled it gets them in random order, --reads of them."""

from __future__ import annotations

import argparse

import lmdb
import numpy as np
from reading import Reading


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--reads", type=int, help="with --shuffled (default: all)")
    args = parser.parse_args()
    with (
        Reading() as reading,
        lmdb.open(args.directory, readonly=True, lock=False) as environment,
        environment.begin(buffers=True) as transaction,
    ):
        if args.shuffled:
            order = np.random.default_rng(8).permutation(environment.stat()["entries"])
            for number in order[: args.reads].tolist():
                reading.add(transaction.get(b"%08d" % number))
        else:
            for _, value in transaction.cursor():
                reading.add(value)


if __name__ == "__main__":
    main()
