# SPDX-License-Identifier: Apache-2.0
"""A few nodes on one machine for what starts MPI: each with a network, host name, IPC and process
numbers of its own, joined by a bridge. Root, iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PREFIX = "10.99.0."


def why_none() -> str:
    """Why there can be none here; '': nothing is missing."""
    if os.geteuid() != 0:
        return "nodes of our own need root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing: install iproute2 and util-linux"
    done = subprocess.run(["ip", "netns", "add", f"up-try-{os.getpid()}"], capture_output=True)
    if done.returncode:
        return "no network namespaces here"
    subprocess.run(["ip", "netns", "delete", f"up-try-{os.getpid()}"], check=True)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Bed:
    """``count`` nodes, from 0."""

    def __init__(self, count: int, directory: Path) -> None:
        self.names = [f"upnode{i}" for i in range(count)]
        self._spaces = [f"up-{os.getpid()}-{i}" for i in range(count)]
        self._hosts = directory / "hosts"
        lines = [f"{PREFIX}{i + 1} {name}" for i, name in enumerate(self.names)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(
        self, node: int, argv: Sequence[str], env: Mapping[str, str], cwd: Path
    ) -> subprocess.Popen[str]:
        """A command there, with pipes; its end ends all that it has started."""
        enter = (
            f"hostname {self.names[node]}; mount --make-rprivate /; "
            f'mount --bind {self._hosts} /etc/hosts; exec "$@"'
        )
        words = [
            *("ip", "netns", "exec", self._spaces[node]),
            *("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"),
            *("--mount-proc", "sh", "-c", enter, "sh", *argv),
        ]
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env), cwd=cwd
        )


@contextmanager
def nodes_bed(count: int, directory: Path) -> Iterator[Bed]:
    """The bed, which is gone afterwards."""
    bed = Bed(count, directory)
    bridge = f"up{os.getpid()}"
    with ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        for i, space in enumerate(bed._spaces):
            inside = f"{bridge}n{i}"
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "delete", space)
            _ip("link", "add", f"{bridge}v{i}", "type", "veth", "peer", "name", inside)
            _ip("link", "set", f"{bridge}v{i}", "master", bridge, "up")
            _ip("link", "set", inside, "netns", space)
            _ip("-n", space, "link", "set", inside, "name", "eth0")
            _ip("-n", space, "address", "add", f"{PREFIX}{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
        yield bed
