# SPDX-License-Identifier: Apache-2.0
"""An LMDB of records, all of them by a cursor, in the order of their keys: `records.py DIR`."""

from __future__ import annotations

import sys

import lmdb
from reading import Reading


def main() -> None:
    """Read."""
    with (
        Reading() as reading,
        lmdb.open(sys.argv[1], readonly=True, lock=False) as environment,
        environment.begin(buffers=True) as transaction,
    ):
        for _, value in transaction.cursor():
            reading.add(value)


if __name__ == "__main__":
    main()
