# SPDX-License-Identifier: Apache-2.0
"""bcc, kept quiet: it prints errors, the compiler's too, to stdout and raises bare Exceptions."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uffdprefetch.trace.record import kernel_headers

#: Of Debian and Ubuntu.
_DISTRIBUTIONS_BCC = Path("/usr/lib/python3/dist-packages/bcc/__init__.py")


class NoBpf(Exception):
    """A BPF program cannot be had here: why, and ``remedy``, a command that mends it, or None."""

    def __init__(self, why: str, remedy: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.remedy = remedy


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Send descriptors 1 and 2 to a file while the context is open; the list has its lines
    afterwards."""
    output: list[str] = []
    with tempfile.TemporaryFile() as sink:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield output
        finally:
            for number, descriptor in enumerate(saved, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            sink.seek(0)
            text = sink.read().decode(errors="replace")
            output += [line.strip() for line in text.splitlines() if line.strip()]


def import_bcc() -> Any:
    """bcc's BPF class; raises NoBpf."""
    try:
        from bcc import BPF
    except Exception as error:
        raise NoBpf(f"bcc cannot be imported: {error}", _cure_of_bcc()) from None
    return BPF


def _cure_of_bcc() -> str:
    """bcc comes with the distribution alone: it is installed, or a virtual environment is to see
    what the system has."""
    if not _DISTRIBUTIONS_BCC.exists():
        return install("python3-bpfcc", "python3-bcc")
    if sys.prefix != sys.base_prefix and _is_the_distributions(sys.base_prefix):
        return (
            "sed -i 's/^include-system-site-packages = .*/include-system-site-packages = true/'"
            f" {shlex.quote(sys.prefix)}/pyvenv.cfg"
        )
    return "install it with the distribution's /usr/bin/python3 (-m venv --system-site-packages)"


def _is_the_distributions(prefix: str) -> bool:
    """Whether it is that Python which has the distribution's packages, and does not look yet."""
    return os.path.realpath(prefix) == "/usr" and not any(
        str(_DISTRIBUTIONS_BCC.parents[1]) == os.path.realpath(place) for place in sys.path
    )


def install(debian: str, fedora: str) -> str:
    """The command that installs a package, by its names in the two families."""
    if shutil.which("apt-get") is None and shutil.which("dnf") is not None:
        return f"sudo dnf install {fedora}"
    return f"sudo apt-get install {debian}"


def load(text: str, function: str | None = None) -> Any:
    """Compile a program and attach its tracepoints; with ``function`` only load that one.

    Returns bcc's BPF object. Raises NoBpf with one line of what the compiler or the kernel said.
    """
    bpf_class = import_bcc()
    with kernel_headers.for_bcc() as found:
        if not found:
            raise NoBpf(
                "no kernel headers for the compiler",
                install("linux-headers-$(uname -r)", "kernel-devel-$(uname -r)"),
            )
        output: list[str] = []
        try:
            with quiet() as output:
                program = bpf_class(text=text)
                if function is not None:
                    program.load_func(function, bpf_class.TRACEPOINT)
        except Exception as error:  # bcc raises bare Exceptions
            errors = [line for line in output if "error" in line.lower() or "not permitted" in line]
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NoBpf(f"{first}; {errors[0]}"[:200] if errors else first[:200]) from None
    return program
