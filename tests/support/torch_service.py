# SPDX-License-Identifier: Apache-2.0
"""A service that only listens, and a reader of what jobs announce to it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uffdprefetch.job

SITE = Path(uffdprefetch.job.__file__).parent / "site"
HAVE_TORCH = importlib.util.find_spec("torch") is not None
ENDED = 1 << 63


@dataclass
class ReceivedAnnouncement:
    """An announcement as it lies in the directory."""

    pid: int
    number: int
    reader: str
    slot: int
    items: int
    parts: list[dict[str, Any]]
    arrays: dict[str, bytes] = field(repr=False)

    def numbers(self, name: str) -> list[int]:
        """An array of int64."""
        return array("q", self.arrays[name]).tolist()

    def column(self, said: dict[str, Any]) -> list[Any]:
        """The elements of a list."""
        data = self.arrays[said["array"]]
        if said["kind"] == "ints":
            return array("q", data).tolist()
        (count,) = struct.unpack_from("<q", data)
        assert count == said["count"]
        ends = (0, *struct.unpack_from(f"<{count}q", data, 8))
        body = data[8 * (count + 1) :]
        strings = [body[ends[i] : ends[i + 1]] for i in range(count)]
        return [s.decode() for s in strings] if said["kind"] == "text" else strings

    def lists(self, part: int = 0) -> dict[str, list[Any]]:
        """The lists of a part by name."""
        return {said["name"]: self.column(said) for said in self.parts[part]["lists"]}

    def order(self) -> list[tuple[int, int]]:
        """(part, sample) by turn."""
        turns: dict[int, tuple[int, int]] = {}
        for number, part in enumerate(self.parts):
            samples = self.numbers(part["array"])
            its_turns = self.numbers(part["turns"]) if "turns" in part else range(len(samples))
            assert len(its_turns) == len(samples)
            turns.update(zip(its_turns, ((number, s) for s in samples), strict=True))
        assert sorted(turns) == list(range(self.items))
        return [turns[turn] for turn in range(self.items)]


class Listener:
    """Takes connections at ``socket``; ``heard``: the messages of each, as they came."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "service"
        self.plans = directory / "service.plan"
        self.plans.mkdir(mode=0o700)
        self.heard: list[list[bytes]] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(self.socket))
        self._listening.listen(128)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                messages = list(iter(lambda: connection.recv(4096), b""))  # noqa: B023
            if not messages:
                return
            self.heard.append(messages)

    def close(self) -> None:
        """Returns when all that was sent has been heard."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            last.connect(str(self.socket))
        self._thread.join()
        self._listening.close()

    def environment(self, **more: str) -> dict[str, str]:
        """That of a job under `wrap`."""
        return job_environment(**{
            "PYTHONPATH": str(SITE), "UFFDPREFETCH_SOCKET": str(self.socket), **more
        })  # fmt: skip

    def announced(self) -> list[ReceivedAnnouncement]:
        """All announcements, by process and number."""
        bodies = [json.loads(path.read_text()) for path in self.plans.glob("*.json")]
        return [self._read(body) for body in sorted(bodies, key=lambda b: (b["pid"], b["number"]))]

    def _read(self, body: dict[str, Any]) -> ReceivedAnnouncement:
        stem = f"{body['pid']}-{body['number']}."
        arrays = {
            path.name[len(stem) :]: path.read_bytes()
            for path in self.plans.glob(stem + "*")
            if path.suffix not in (".json", ".tmp")
        }
        assert body.pop("schema") == "uffdprefetch.announce/1"
        return ReceivedAnnouncement(**body, arrays=arrays)


def job_environment(**more: str) -> dict[str, str]:
    """Ours, without what would change a job's result, on few threads."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UFFDPREFETCH_", "PYTHON"))
    }
    return {**environment, "OMP_NUM_THREADS": "1", **more}


def run_python(
    *arguments: str | Path, environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python with these arguments, whatever its status."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment, cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def output_of(*arguments: str | Path, environment: dict[str, str], cwd: Path | None = None) -> Any:
    """The JSON on its standard output; it must end well."""
    done = run_python(*arguments, environment=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
