# SPDX-License-Identifier: Apache-2.0
"""What all parts of the core are bounded by: how much is remembered."""

from __future__ import annotations

#: Entries of a table of files, processes, threads, ranges or places: beyond, the oldest go, or no
#: more are taken. More than a job has at a time (the files of a data set, the ranges that one scan
#: finds), and some hundred KiB of memory for each table.
ENTRIES_MAX = 4096
