# SPDX-License-Identifier: Apache-2.0
"""The recorder's process: what it is told, whom it listens to, when it ends.

It is told by its starter on a pipe, a line of JSON at a time ({"socket": path}, {"status": n},
{"discard": true}); the pipe's end means that the starter is gone, and the recording ends too. It
answers once, on another pipe: {"witness": bool, "sees_faults": bool, "missing": [...]} or {"error":
text, "exit_code": n}; the end of that pipe means that the file is whole. Letting go of the kernel's
probes, which takes seconds, comes after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from uffdprefetch import __version__
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.messages import say
from uffdprefetch.protocol import wire
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.sensors import BY_BPF, Sensor, entry
from uffdprefetch.trace.record.bpf_compiler import NoBpf
from uffdprefetch.trace.record.kernel_tracer import CHILDREN_ONLY, KernelTracer
from uffdprefetch.trace.record.process_identity import TraceLimits
from uffdprefetch.trace.record.recorder import Recorder

#: Period at which the rings are emptied (kernel_tracer.RING_PAGES: two seconds of events); twice
#: that while few come.
TURN_SECONDS = 0.02
#: Age of a process up to which the period is a quarter: it may end before it is identified.
YOUNG_NS = 500_000_000
MESSAGE_MAX_BYTES = 1 << 20
MESSAGES_AT_ONCE = 256
#: Time after the starter's last message for a service that has not said that it is finished.
PATIENCE_SECONDS = 3.0
WITHOUT_BPF = "the kernel's own events (faults, page-cache fills, readahead, system calls)"
WITHOUT_STALL = "stall times of single faults (under userfaultfd the kernel's counters are silent)"


@dataclass
class Spec:
    """A recorder's options; made by trace/record/starter.py."""

    output: str
    force: bool
    limits: TraceLimits
    command: list[str]
    launcher: int = 0  # record what this process starts
    adopt: int = 0  # record this process, which runs already
    duration_seconds: float | None = None
    quiet: bool = False
    witness: bool = True
    control_fd: int = -1
    ready_fd: int = -1

    @classmethod
    def read(cls, text: str) -> Spec:
        """What write() has made. Raises ValueError, TypeError, KeyError."""
        values = json.loads(text)
        return cls(**{**values, "limits": TraceLimits(**values["limits"])})

    def write(self) -> str:
        """For the recorder's command line."""
        return json.dumps(asdict(self))


def _meta(
    spec: Spec, witness: KernelTracer | None, missing: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "program": f"uffdprefetch {__version__}",
        "host": platform.node(),
        "kernel": platform.release(),
        "uid": os.geteuid(),
        "command": spec.command,
        "started_ns": time.monotonic_ns(),
        "started_unix_ns": time.time_ns(),
        "page_bytes": os.sysconf("SC_PAGESIZE"),
        "max_events": spec.limits.max_events,
        "source": "bpf" if witness else "service",
        "missing": missing,
        "wrapped": False,
    }


class _Control:
    """The starter's pipe: lines of JSON, then its end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = fd < 0
        self._rest = b""
        if fd >= 0:
            os.set_blocking(fd, False)

    def lines(self) -> list[dict[str, Any]]:
        """Lines that have come since the last call."""
        found = []
        while not self.ended:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
            self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        for line in whole:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def _connect(path: str) -> socket.socket | None:
    """Listen to the service's events; None when it is not there any more."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(path)
        fields = (wire.Role.RECORDER, os.getpid(), os.getppid(), -1, -1, -1, 0, 0, 0, 0, 0, 0, b"")
        sock.send(wire.pack(wire.Type.HELLO, wire.HELLO.pack(*fields)))
        sock.setblocking(False)
    except OSError as error:
        say(f"trace: the service's events are missing: {error.strerror}")
        sock.close()
        return None
    return sock


def _messages(sock: socket.socket) -> tuple[list[bytes], bool]:
    """(messages that wait, whether the service is still connected)."""
    found: list[bytes] = []
    for _ in range(MESSAGES_AT_ONCE):
        try:
            data = sock.recv(MESSAGE_MAX_BYTES)
        except BlockingIOError:
            break
        except OSError:
            return found, False
        if not data:
            return found, False
        found.append(data)
    return found, True


def _answer(fd: int, what: dict[str, Any]) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.write(fd, json.dumps(what).encode() + b"\n")


class _Session:
    """One recording from start to end."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.stopped = self.discarded = False
        self.status: int | None = None
        self._service: socket.socket | None = None
        self._control = _Control(spec.control_fd)
        self._ended_at: float | None = None
        self.missing: list[dict[str, Any]] = []
        self.witness: KernelTracer | None = None
        try:
            if not spec.witness:
                raise NoBpf("not wanted (--no-bpf)", "leave out --no-bpf")
            self.witness = KernelTracer()
            self.missing = list(self.witness.missing)
        except NoBpf as error:
            self.missing = [
                entry(BY_BPF - {Sensor.SLEEPS}, error.why, error.remedy, WITHOUT_BPF),
                entry([Sensor.SLEEPS], "no eBPF", error.remedy, WITHOUT_STALL),
            ]
        meta = _meta(spec, self.witness, self.missing)
        self._writer = trace_file.create(spec.output, spec.force, meta)
        self.recorder = Recorder(self._writer, spec.limits, self.witness)
        if self.witness is not None and spec.launcher:
            self.recorder.known.files.know_files_of(spec.launcher)
            self.witness.follow(spec.launcher, CHILDREN_ONLY)
        if spec.adopt:
            self.recorder.adopt(spec.adopt)

    def stop(self, *_: object) -> None:
        """A signal: end now."""
        self.stopped = True

    def run(self) -> None:
        """Record until the starter, a signal, the clock or the process's end says so."""
        until = None
        if self.spec.duration_seconds is not None:
            until = time.monotonic() + self.spec.duration_seconds
        wait = TURN_SECONDS
        while not self._is_over(until) and not self.recorder.failed:
            sources: list[Any] = [self._service] if self._service else []
            if not self._control.ended:
                sources.append(self._control.fd)
            select.select(sources, [], [], wait)
            events = self.recorder.turn(self._receive())
            young = time.monotonic_ns() - self.recorder.known.births_ns < YOUNG_NS
            wait = (
                TURN_SECONDS / 4 if young else TURN_SECONDS if events > 1000 else 2 * TURN_SECONDS
            )

    def _is_over(self, until: float | None) -> bool:
        if self.stopped or (until is not None and time.monotonic() >= until):
            return True
        if self.spec.adopt and not os.path.exists(f"/proc/{self.spec.adopt}"):
            return True
        if self.spec.control_fd < 0 or not self._control.ended:
            return False
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        return self._service is None or time.monotonic() - self._ended_at > PATIENCE_SECONDS

    def _receive(self) -> list[bytes]:
        """Messages of the service, after those of the starter."""
        for line in self._control.lines():
            if "socket" in line and self._service is None:
                self._service = _connect(line["socket"])
                source = "service" if self.witness is None else "bpf+service"
                with contextlib.suppress(OSError):
                    self._writer.block("meta", {"source": source})
            if "meta" in line:
                with contextlib.suppress(OSError):
                    self._writer.block("meta", line["meta"])
            self.status = line.get("status", self.status)
            if line.get("discard"):
                self.stopped = self.discarded = True
        if self._service is None:
            return []
        messages, connected = _messages(self._service)
        finished = any(m[6:8] == _FINISH for m in messages)
        if not connected or finished:
            self._service.close()
            self._service = None
            self._control.ended = True  # the job is over on this node
        return messages

    def _last_word(self) -> None:
        """The service is finished before the starter has said how the job ended."""
        if self.spec.control_fd >= 0 and self.status is None and not self.stopped:
            select.select([self._control.fd], [], [], 1.0)
            self._control.ended = False
            self._receive()

    def finish(self) -> None:
        """Write the end and say where it is; of a job that never began remove the file."""
        self._last_word()
        if self.discarded:
            with contextlib.suppress(OSError):
                self._writer.remove(self.spec.output)
            return
        totals = self.recorder.finish({"status": self.status})
        with contextlib.suppress(OSError):
            self._writer.close()
        if self.spec.quiet or self.recorder.failed:
            return
        lost = totals["lost_events"]
        say(
            f"trace: {totals['events_seen']} events"
            f"{f', {lost} LOST' if lost else ''}"
            f"{'' if self.witness else ', without eBPF'};"
            f" next: uffdprefetch trace {self.spec.output}"
        )

    def let_go(self) -> None:
        """Detach the kernel's probes."""
        if self.witness is not None:
            self.witness.close()


_FINISH = int(wire.Type.FINISH).to_bytes(2, "little")


def main(spec: Spec) -> int:
    """Record; 0, or 1 when the recording ended before its time (the disk is full)."""
    try:
        session = _Session(spec)
    except UffdPrefetchError as error:
        _answer(spec.ready_fd, {"error": error.message, "exit_code": error.exit_code})
        if spec.ready_fd < 0:
            raise
        return error.exit_code
    with contextlib.suppress(OSError):  # where all CPUs are busy, names are gone before we look
        os.setpriority(os.PRIO_PROCESS, 0, -5)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, session.stop)
    _answer(
        spec.ready_fd,
        {
            "witness": session.witness is not None,
            "sees_faults": session.witness is not None and session.witness.sees_faults,
            "missing": session.missing,
        },
    )
    session.run()
    session.finish()
    sys.stderr.flush()
    if spec.ready_fd >= 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):  # the other end may be a pipe whose end is waited for
            os.dup2(nothing, fd)
        os.close(spec.ready_fd)
    session.let_go()
    return 1 if session.recorder.failed else 0
