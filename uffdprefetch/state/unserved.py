# SPDX-License-Identifier: Apache-2.0
"""What of the files that a job reads is not served, why, and what would change that."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class Reason(Enum):
    """Why a mapping is not served: the summary's word for it, and the remedy; none where nothing is
    to be gained, or nobody can do anything."""

    SHARED_WRITABLE = (
        "shared-writable",
        "map it read-only (numpy: mode='r'; lmdb: readonly=True; R: readonly = TRUE); chmod a-w it"
        " where nobody writes it",
    )
    DELETED = "deleted", "keep the file until the job has ended"
    CHANGED = "changed", "write it before the job starts, or under another name"
    NOT_OPENED = "not-opened", "let the user of the job open the file by its path"
    PAGE_TABLE = "page-table", "let the program be dumpable (prctl PR_SET_DUMPABLE)"
    EXCLUDED = "excluded", "change --include or --exclude"
    TOO_LARGE = "too-large", "let the service have more memory (ulimit -v)"
    IN_MEMORY = "in-memory", None
    LIBRARY = "library", None  # of a program's own files: a library, a lock file
    PROGRAM = "program", None  # a program that is left alone
    NOT_FOLLOWED = "not-followed", "let it have what it lacks (ulimit -a)"
    ANOTHER_FILE = "another-file", None  # its number, or its descriptor, is another file's by now

    @property
    def remedy(self) -> str | None:
        """What to do, for people."""
        remedy: str | None = self.value[1]
        return remedy


#: Of all mappings of a file, as long as it is what it is.
FOR_GOOD = frozenset({Reason.EXCLUDED, Reason.IN_MEMORY, Reason.PROGRAM})


class Coarse(Enum):
    """Why a mapping is followed by page tables alone, less closely than others of the run: the
    words for it, and the remedy; none where nothing is to be gained, or nobody can do anything."""

    OPENED_FOR_WRITING = (
        "opened for writing (O_RDWR)",
        "open it read-only (lmdb: readonly=True), or chmod a-w it where nobody writes it",
    )
    WRITER = "a writer has it open", "open it read-only everywhere (lmdb: readonly=True)"
    COPIES = (
        "private and writable, its pages may be the job's own: "
        "later passes over pages that are still mapped do not show",
        None,
    )
    STATIC = (
        "its program is statically linked: nothing of ours loads into it, what it maps is found in "
        "/proc about a second later; later epochs hardly show",
        "link it dynamically (without -static; a Go program is not helped by that)",
    )
    NOT_LOADED = (
        "nothing of ours is in its process (set-uid, a cleared environment, another libc): what it "
        "maps is found in /proc about a second later; later epochs hardly show",
        "let LD_PRELOAD reach it",
    )
    BYPASSES = "the process changes its mappings without libc's functions", None
    PAST_LIBC = (
        "not handed over (mapped past libc or while its file was small, locked, or before the "
        "service answered): "
        "later epochs hardly show",
        None,
    )
    MANY = "many mappings were made at once: later epochs hardly show", None
    GONE_ON = "its program went on before the service answered: later epochs hardly show", None
    ENGINE_OFF = "engine off: later epochs hardly show", "wrap --engine cache"
    NO_USERFAULTFD = "no userfaultfd", "uffdprefetch doctor"
    NOT_POOLED = "not served by the pool", None
    BRIEF = "files like it are mapped for moments, which the pool would make longer", None

    @property
    def words(self) -> str:
        """For people."""
        words: str = self.value[0]
        return words

    @property
    def remedy(self) -> str | None:
        """What to do, for people."""
        remedy: str | None = self.value[1]
        return remedy


class Refusal(NamedTuple):
    """``detail``: the reason with what was seen, for people."""

    reason: Reason
    detail: str


class Unserved(NamedTuple):
    """What is told of the mappings of a file that are not served, the largest one's."""

    path: str
    mapped_bytes: int
    refusal: Refusal

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "path": self.path,
            "mapped_bytes": self.mapped_bytes,
            "reason": self.refusal.reason.value[0],
            "why": self.refusal.detail,
            "remedy": self.refusal.reason.remedy,
        }
