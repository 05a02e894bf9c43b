# SPDX-License-Identifier: Apache-2.0
"""sense/opens.py: how many directories one service watches, by inotify(7), which any kernel has."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from uffdprefetch.sense.opens import Opens


def refuse() -> Any:
    raise OSError(errno.EPERM, "not permitted here")


def test_no_more_are_marked_than_an_eighth_of_what_all_may(tmp_path: Path) -> None:
    for name in ("hub", "a", "b", "c"):
        (tmp_path / name).mkdir()
    opens = Opens(str(tmp_path / "hub"), fanotify=refuse, limit=lambda sensor: 16)
    key = opens.mark(str(tmp_path / "a"))
    opens.mark(str(tmp_path / "b"))
    with pytest.raises(OSError, match="2 directories") as refused:
        opens.mark(str(tmp_path / "c"))
    assert refused.value.errno == errno.ENOSPC
    opens.unmark(key)
    opens.mark(str(tmp_path / "c"))
    opens.close()
