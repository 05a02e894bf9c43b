# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the service read when they start: from the same slow environment, often, as
the job's interpreter, and after the replay has begun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import uffdprefetch
from uffdprefetch.service import program_pages
from uffdprefetch.service.started_files import WHOLE_MOST_BYTES, StartedFiles


def note(files: StartedFiles) -> None:
    """Have it in the profile, too: in parts, all of them, since the job need not open it before
    it is read (csrc/replay/replay.c, may_go_on())."""
    for path in (*_modules(), *_launcher_s()):
        files.opened(path)
        files.mapped(path, [(0, WHOLE_MOST_BYTES)])
    seen = program_pages.look(os.getpid())
    if seen is not None:
        for path, runs in seen[1].items():
            files.mapped(path, runs)


def _modules() -> Iterator[str]:
    """Of this process, as they were read."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__cached__", None) or getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith((".py", ".pyc")) and os.path.isabs(path):
            yield path


def _launcher_s() -> Iterator[str]:
    """Of the launcher, which are no modules of this process."""
    cache = Path(uffdprefetch.__file__).parent / "launch" / "__pycache__"
    yield from map(str, sorted(cache.glob(f"*.{sys.implementation.cache_tag}.pyc")))
