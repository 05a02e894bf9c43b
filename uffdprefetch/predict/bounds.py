# SPDX-License-Identifier: Apache-2.0
"""What all parts of the core are bounded by: how much is remembered, for how long it holds, and
what finding out may cost."""

from __future__ import annotations

#: Entries of a table of files, processes, ranges or places: beyond, the oldest go, or no
#: more are taken. More than a job has at a time (the files of a data set, the ranges that one scan
#: finds, 32 threads of 128 processes), and 0.1 to 2 MiB of memory for each table.
ENTRIES_MAX = 4096
#: What was seen within this time still holds: that a reader is there, how fast it is, that what was
#: read is in memory, and that there is room for more. A job's pauses between two batches are longer
#: than any reply of storage, and shorter than its epochs.
LATELY_NS = 1_000_000_000
#: Of what was seen of late so many are remembered (touches that are judged, latencies, names that
#: were opened, records that are being read), or after so many more one counts half (ends of
#: streams, blocks of one): a share of them is known to an eighth, and all are of the present way of
#: reading.
LATELY_COUNT = 64
#: Items that are gone over at one time (names of a directory, records of an inferred order): of
#: more nothing is known. It takes up to a second, and some 40 MB.
LIST_MAX = 1 << 20
#: How often what lasts much longer is decided anew: what an order needs next and how far its reader
#: is, whether a file is to be read whole, whether records are left out.
DECIDE_NS = 10_000_000
#: Whatever is found out by going over much (page tables, the places at which files are read,
#: records that are left out) may take one part in this many of a core.
CPU_PART = 25
