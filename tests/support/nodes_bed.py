# SPDX-License-Identifier: Apache-2.0
"""A few nodes on one machine for what starts MPI: each with a network, host name, IPC and process
numbers of its own, joined by a bridge. Root, iproute2."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PREFIX = "10.99.0."
_numbers = itertools.count()


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


def _pid_space(pid: int | str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _shape(device: str, bytes_per_second: int) -> None:
    words = ["root", "tbf", "rate", f"{bytes_per_second}bps", "burst", "64kb", "latency", "500ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", device, *words], check=True, capture_output=True)


class Bed:
    """``count`` nodes, from 0. What is started on a node is in PID namespaces of its own."""

    def __init__(self, count: int, directory: Path) -> None:
        self._started: list[list[subprocess.Popen[str]]] = [[] for _ in range(count)]
        number = next(_numbers)  # what the last one had may go a little later
        self.bridge = f"u{os.getpid()}.{number}"
        self.names = [f"upnode{i}" for i in range(count)]
        self._spaces = [f"up-{os.getpid()}-{number}-{i}" for i in range(count)]
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
        job = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env), cwd=cwd
        )
        self._started[node].append(job)
        return job

    # -------------------------------------------------------------- what may happen to a node

    def processes(self, node: int) -> list[int]:
        """All that has been started there, and what that has started."""
        spaces = {
            _pid_space(child) for job in self._started[node] for child in _children(job.pid)
        } - {0}
        return [int(p) for p in os.listdir("/proc") if p.isdigit() and _pid_space(p) in spaces]

    def find(self, node: int, word: str) -> list[int]:
        """Those with this in their command line."""
        found = []
        for pid in self.processes(node):
            try:
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                pass
        return sorted(found)

    def link(self, node: int, up: bool) -> None:
        """Plug or pull the cable: nobody is told."""
        _ip("link", "set", f"{self.bridge}v{node}", "up" if up else "down")

    def kill(self, node: int, silent: bool = False) -> None:
        """All processes end at once. The kernel closes their connections, but not of one that was
        switched off."""
        if silent:
            self.link(node, False)
        for job in self._started[node]:
            job.kill()
            job.wait()

    def freeze(self, node: int, stop: bool = True) -> None:
        """No process does anything any more; the kernel goes on acknowledging."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stop else signal.SIGCONT)


@contextmanager
def nodes_bed(count: int, directory: Path, bytes_per_second: int | None = None) -> Iterator[Bed]:
    """The bed, which is gone afterwards. ``bytes_per_second``: of each node's link, each way."""
    bed = Bed(count, directory)
    bridge = bed.bridge
    with ExitStack() as undo:
        undo.callback(lambda: [bed.kill(node) for node in range(count)])
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        for i, space in enumerate(bed._spaces):
            inside = f"{bridge}n{i}"
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "delete", space)
            _ip("link", "add", f"{bridge}v{i}", "type", "veth", "peer", "name", inside)
            _ip("link", "set", f"{bridge}v{i}", "master", bridge, "up")
            for device in (inside, f"{bridge}v{i}") if bytes_per_second else ():
                _shape(device, bytes_per_second or 0)
            _ip("link", "set", inside, "netns", space)
            _ip("-n", space, "link", "set", inside, "name", "eth0")
            _ip("-n", space, "address", "add", f"{PREFIX}{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
        yield bed
