# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.lustre.guest``: this directory's tests on a Lustre client, in a small guest.

The image lies where UFFDPREFETCH_LUSTRE says: its ``run-guest``, or the directory that has it
(docs/lustre.md). It runs a command on a client under QEMU's emulation: times there mean nothing,
counts do. The tree and the interpreter's packages are shared with it, read-only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "UFFDPREFETCH_LUSTRE"
TREE = Path(__file__).resolve().parent.parent.parent
#: One run of all tests on an idle machine takes a quarter of it; the short form a minute or two.
LIMIT_SECONDS = 1800


def program(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """(run-guest, "") or (None, why not)."""
    named = environ.get(VARIABLE)
    if not named:
        return None, f"{VARIABLE} does not say where an image of a Lustre client lies"
    path = Path(named)
    path = path / "run-guest" if path.is_dir() else path
    if not os.access(path, os.X_OK):
        return None, f"{VARIABLE}: {path} cannot be executed"
    emulator = environ.get("GUEST_QEMU", "qemu-system-x86_64")
    if shutil.which(emulator) is None:
        return None, f"{emulator} is missing"
    return path, ""


def shared(tree: Path, prefix: str, paths: Sequence[str]) -> list[str]:
    """Directories that the guest needs from here: the tree, the interpreter's packages. The
    distribution's own are in the image."""
    found = [str(tree)]
    for one in (prefix, *paths):
        path = os.path.realpath(one) if one else ""
        if not os.path.isdir(path) or path.startswith(("/usr/", "/lib")):
            continue
        if not any(path == kept or path.startswith(f"{kept}/") for kept in found):
            found.append(path)
    return found


def command(
    run_guest: Path, words: Sequence[str], seconds: int, writable: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """The command line that runs ``words`` in the guest, in the tree."""
    options = ["-2", "-q", "-t", str(seconds), "-d", str(TREE)]
    for directory in shared(TREE, sys.prefix, sys.path):
        options += ["-r", directory]
    for directory in writable:
        options += ["-w", directory]
    variables = {
        "UFFDPREFETCH_LUSTRE_MOUNT": "/mnt/lus", "UFFDPREFETCH_LUSTRE_SECOND": "/mnt/lus2",
        "PYTHONPATH": f"{TREE / 'tests'}:{TREE / 'tests' / 'support'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    passed = ("UFFDPREFETCH_LUSTRE_TREE",)
    variables |= {name: os.environ[name] for name in passed if name in os.environ}
    for name, value in variables.items():
        options += ["-e", f"{name}={value}"]
    return [str(run_guest), *options, "--", *words]


def compiled() -> None:
    """Byte code for the guest, which is slow at making it and may not write it."""
    names = ["uffdprefetch", "tests/lustre", "tests/conftest.py"]
    words = [sys.executable, "-m", "compileall", "-q", *names]
    subprocess.run(words, cwd=TREE, check=False, stdout=subprocess.DEVNULL)


def test_words(short: bool, more: Sequence[str] = ()) -> list[str]:
    """What runs the tests in the guest."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short"]
    return [*words, *(["-m", "not long_form"] if short else []), *(more or ["tests/lustre"])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lustre.guest", description=__doc__)
    parser.add_argument("--short", action="store_true", help="what takes no more than 3 minutes")
    parser.add_argument("--measure", action="store_true", help="the table of docs/lustre.md")
    parser.add_argument("--writers", action="store_true", help="how late others' writes show")
    parser.add_argument("--starts", action="store_true", help="a start, plain and learned")
    parser.add_argument("--print", action="store_true", help="only show the command")
    parser.add_argument("--write", action="append", default=[], metavar="DIR", help="shared too")
    parser.add_argument("more", nargs="*", help="words for pytest, or for these")
    args = parser.parse_args()
    run_guest, why = program(os.environ)
    if run_guest is None:
        print(f"nothing is run: {why}", file=sys.stderr)
        return 0 if VARIABLE not in os.environ else 1
    which = [name for name in ("measure", "writers", "starts") if getattr(args, name)]
    if which:
        what = f"lustre.{which[0]}"
        words = [sys.executable, "-m", what, *args.more]
    else:
        words = test_words(args.short, args.more)
    line = command(run_guest, words, LIMIT_SECONDS, args.write)
    if args.print:
        print(shlex.join(line))
        return 0
    compiled()
    return subprocess.run(line, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
