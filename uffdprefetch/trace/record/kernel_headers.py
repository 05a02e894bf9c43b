# SPDX-License-Identifier: Apache-2.0
"""Kernel headers for bcc's compiler, where the running kernel's own are not in place.

bcc looks into /lib/modules/RELEASE/{build,source}. Where the distribution's headers are of another
version than the running kernel nothing is there, and they will still do for a program that takes
tracepoint arguments only and touches no kernel structure.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path


def installed() -> list[Path] | None:
    """Directories of a headers installation in /usr/src, the common part first; None if none.

    Debian splits it: linux-headers-VERSION-common has the sources' headers, the one of the
    architecture the generated ones.
    """
    found = [Path(d) for d in sorted(glob.glob("/usr/src/linux-headers-*"))]
    specific = [d for d in found if not d.name.endswith("-common") and (d / "include").is_dir()]
    if not specific:
        return None
    chosen = specific[-1]
    common = chosen.with_name(chosen.name.rpartition("-")[0] + "-common")
    return [common, chosen] if common.is_dir() else [chosen]


def in_place() -> bool:
    """Whether bcc finds the running kernel's headers by itself."""
    modules = Path(f"/lib/modules/{platform.release()}")
    return any((modules / name).is_dir() for name in ("build", "source"))


def _merge(parts: list[Path], target: Path) -> None:
    """One tree of links that looks like an unsplit kernel source, as far as headers go."""
    for part in parts:
        for directory in (part / "include", *part.glob("arch/*/include")):
            place = target / directory.relative_to(part)
            place.mkdir(parents=True, exist_ok=True)
            for entry in directory.iterdir():
                link = place / entry.name
                if not link.exists():
                    link.symlink_to(entry)


@contextlib.contextmanager
def for_bcc() -> Iterator[bool]:
    """Let bcc find headers while the context is open; yields False if the machine has none.

    Sets BCC_KERNEL_SOURCE, which bcc reads at each compilation, unless the user has set it.
    """
    variable = "BCC_KERNEL_SOURCE"
    if in_place() or variable in os.environ:
        yield True
        return
    parts = installed()
    if parts is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-headers-") as directory:
        _merge(parts, Path(directory))
        os.environ[variable] = directory
        try:
            yield True
        finally:
            del os.environ[variable]
