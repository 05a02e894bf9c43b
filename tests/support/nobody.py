# SPDX-License-Identifier: Apache-2.0
"""Running this checkout as another user, who may not even be able to read it where it lies."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import _cffi_backend
from conftest import require

import uffdprefetch

UID = 65534


def as_nobody(action: Callable[[], int]) -> int:
    """Run in a child of that user, and of no group of ours: its exit status."""
    require(os.geteuid() == 0, "only root can become another user")
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            status = action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Nobody:
    """A directory that everybody can read, with the package in it, and how to run from there."""

    def __init__(self, directory: Path) -> None:
        require(os.geteuid() == 0 and shutil.which("setpriv"), "only root can become another user")
        self.directory = directory
        directory.chmod(0o755)
        package = Path(uffdprefetch.__file__).parent
        shutil.copytree(
            package, directory / "uffdprefetch", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(_cffi_backend.__file__, directory)
        # the interpreter behind a virtual environment's link: the environment may be private
        self.python = os.path.realpath(sys.executable)
        self.prefix = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        self.work = directory / "work"
        self.work.mkdir()
        os.chown(self.work, UID, UID)

    def bring(self, module: str) -> None:
        """A package, with the libraries that its wheel brings."""
        (where,) = importlib.import_module(module).__path__
        for name in (module, f"{module}.libs"):
            source = Path(where).parent / name
            if source.is_dir():
                shutil.copytree(source, self.directory / name, dirs_exist_ok=True)

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        """``env`` with the package in reach and a runtime directory of the other user's."""
        return {
            **env,
            "PYTHONPATH": str(self.directory),
            "PYTHONDONTWRITEBYTECODE": "1",
            "UFFDPREFETCH_RUNDIR": str(self.work / "hub"),
            "TMPDIR": str(self.work),
            "HOME": str(self.work),
        }

    def wrap(self, out: Path, *options: str) -> list[str]:
        """The command line up to and including ``--``."""
        words = ["-m", "uffdprefetch", "wrap", "-f", "-o", str(out), *options, "--"]
        return [*self.prefix, self.python, *words]


def with_open_device() -> tuple[str, ...]:
    """The words before a command that see /dev/userfaultfd open to everybody."""
    device = Path("/dev/userfaultfd")
    require(device.exists(), "no /dev/userfaultfd in this kernel (6.1 and later)")
    number = device.stat().st_rdev
    # in a mount namespace: the machine's own device stays as it is
    script = (
        'd=$(mktemp -d) && mount -t tmpfs none "$d" &&'
        f' mknod "$d/open" c {os.major(number)} {os.minor(number)} && chmod 0666 "$d/open" &&'
        ' mount --bind "$d/open" /dev/userfaultfd && umount -l "$d" && rmdir "$d" && exec "$@"'
    )
    return ("unshare", "-m", "sh", "-c", script, "sh")
