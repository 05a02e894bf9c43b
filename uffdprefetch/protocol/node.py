# SPDX-License-Identifier: Apache-2.0
"""The launcher's end of the service's socket: five fixed-size messages (csrc/common/wire.h).

launcher                         service
HELLO (who we are)          ->
                            <-   WELCOME
JOB (pid of the job)        ->
... the connection stays open: its hang-up tells the service that the launcher is gone ...
FINISH (wait status)        ->
                            <-   SUMMARY, with a memfd that holds the JSON
shutdown of our half        ->
                            <-   hang-up, when the service has removed its files if it ends too
"""

from __future__ import annotations

import _socket  # the standard socket module loads enum, selectors and collections around it
import array
import os
import select
import struct
import time

from uffdprefetch.base.record import record
from uffdprefetch.job import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from uffdprefetch.base.identity import Identity

    _Client = TypeVar("_Client", bound="NodeClient")

#: Bound on a summary, which names every file and a bounded timeline: a larger one is not ours.
MAX_SUMMARY_BYTES = 64 << 20


class ServiceGone(Exception):
    """The service hung up."""


class SummaryCut(ServiceGone):
    """It is there, and of its summary not all has come."""


class NotOurService(ServiceGone):
    """The listener is another version's or user's service, or none: trying again is of no use."""


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


@record(frozen=True)
class JobRead:
    """Bytes that a job has read by read(2) and its kind, from block devices; that it has written by
    write(2) and its kind. None: not known."""

    by_calls: int | None = None
    from_storage: int | None = None
    written: int | None = None

    @classmethod
    def now(cls) -> JobRead:
        """What this process and its children have read (/proc/PID/io): the kernel adds those of a
        child when it is waited for."""
        try:
            with open("/proc/self/io", "rb", buffering=0) as file:
                words = file.read(512).split()
            storage_bytes = int(words[words.index(b"read_bytes:") + 1])
            return cls(int(words[1]), storage_bytes, int(words[3]))
        except (OSError, ValueError, IndexError):
            return cls()

    def since(self, before: JobRead) -> JobRead:
        """Without what was read up to then."""
        return JobRead(
            _minus(self.by_calls, before.by_calls),
            _minus(self.from_storage, before.from_storage),
            _minus(self.written, before.written),
        )


@record(frozen=True)
class Finished:
    """``summary`` as the service sent it; ``last``: no other launcher of the job is left here."""

    summary: dict[str, Any]
    last: bool


def unpack(message: bytes) -> tuple[int, bytes]:
    """(type, payload) of a message; raises ServiceGone at the end, else NotOurService."""
    if not message:
        raise ServiceGone("it hung up")
    if len(message) != messages.MESSAGE_BYTES:
        raise NotOurService(f"{len(message)} bytes are no message")
    magic, version, kind = messages.HEADER.unpack_from(message)
    if magic != messages.MAGIC:
        raise NotOurService("it does not speak this protocol")
    if version != messages.VERSION:
        ours = messages.VERSION
        raise NotOurService(f"it speaks version {version} of the protocol, this is {ours}")
    return kind, message[messages.HEADER.size :]


class NodeClient:
    """A connection to the service. Every wait is bounded by ``deadline``, a time.monotonic()."""

    role = messages.LAUNCHER

    def __init__(self, connection: _socket.socket, service_pid: int = 0) -> None:
        """``service_pid``: of who listens; 0: it is in no PID namespace that we see."""
        self._socket = connection
        self.service_pid = service_pid
        self.welcomed = False
        self.options = 0  # Config.fingerprint() of the service that has welcomed us

    @classmethod
    def connect(cls: type[_Client], path: str, identity: Identity, deadline: float) -> _Client:
        """Connect and exchange HELLO and WELCOME: call() and await_welcome().

        Raises OSError when nobody listens on ``path``, and what await_welcome() raises.
        """
        client = cls.call(path, identity)
        try:
            client.await_welcome(deadline)
        except BaseException:
            client.close()
            raise
        return client

    @classmethod
    def call(cls: type[_Client], path: str, identity: Identity) -> _Client:
        """Connect and say HELLO, which waits there for a service that is just starting.

        Raises OSError when nobody listens on ``path``, ServiceGone when the service is just ending,
        NotOurService for another user's.
        """
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)  # close-on-exec
        try:
            # Not blocking: a full backlog must not hold us beyond the deadline.
            connection.setblocking(False)
            connection.connect(path)
            credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
            peer_pid, peer_uid, _ = struct.unpack("iII", credentials)
            if peer_uid != os.geteuid():
                raise NotOurService(f"the listener belongs to uid {peer_uid}")
            hello = messages.HELLO_BODY.pack(
                cls.role,
                os.getpid(),
                os.getppid(),
                *(-1 if n is None else n for n in (identity.rank, identity.local_rank)),
                -1 if identity.world is None else identity.world,
                0,  # the job is not there yet: JOB tells
            )
            client = cls(connection, peer_pid)
            client._send(messages.pack(messages.HELLO, hello))
            return client
        except BaseException:
            connection.close()
            raise

    def await_welcome(self, deadline: float) -> None:
        """Take the WELCOME, unless that has been done.

        Raises ServiceGone when the service is just ending, TimeoutError when it does not welcome us
        before the deadline, NotOurService for a stranger.
        """
        if self.welcomed:
            return
        kind, payload, descriptors = self._receive(deadline)
        _close_all(descriptors)
        if kind != messages.WELCOME:
            raise NotOurService(f"it answered HELLO with message type {kind}")
        (self.options,) = messages.WELCOME_BODY.unpack_from(payload)
        self.welcomed = True

    def job_started(self, pid: int) -> None:
        """Tell the job's pid; a service that is gone by now is noticed at the end."""
        try:
            self._send(messages.pack(messages.JOB, messages.JOB_BODY.pack(pid)))
        except ServiceGone:
            pass

    def finish(
        self, wait_status: int, read: JobRead, deadline: float, replay: bytes = b""
    ) -> Finished:
        """Tell how the job ended (as waitpid's status), what it has read, and what came of the
        replay of its start (protocol/replayed.py), and take the summary.

        Raises ServiceGone when the service died, TimeoutError when it does not answer in time.
        """
        told = (-1 if n is None else n for n in (read.by_calls, read.from_storage))
        body = messages.FINISH_BODY.pack(wait_status, 0, *told, replay)
        self._send(messages.pack(messages.FINISH, body))
        return self._receive_summary(deadline)

    def _receive_summary(self, deadline: float) -> Finished:
        while True:
            kind, payload, descriptors = self._receive(deadline)
            try:
                if kind == messages.SUMMARY and descriptors:
                    length_bytes, last = messages.SUMMARY_BODY.unpack_from(payload)
                    return Finished(_read_summary(descriptors[0], length_bytes), last == 1)
            finally:
                _close_all(descriptors)

    def part(self) -> None:
        """Say good-bye after finish(); the service hangs up when it has tidied up (gone())."""
        try:
            self._socket.shutdown(_socket.SHUT_WR)
        except OSError:
            pass

    def gone(self, deadline: float) -> bool:
        """Wait until the service has hung up; False when it has not by then."""
        try:
            while True:
                _close_all(self._receive(deadline)[2])
        except ServiceGone:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message, _socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ServiceGone(f"it hung up ({error.strerror})") from None

    def _receive(self, deadline: float) -> tuple[int, bytes, list[int]]:
        """Wait for one message: (type, payload, descriptors that came with it)."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        remaining_ms = max(0, int((deadline - time.monotonic()) * 1000))
        if not poll.poll(remaining_ms):
            raise TimeoutError("it does not answer")
        try:
            message, ancillary, _, _ = self._socket.recvmsg(
                messages.MESSAGE_BYTES + 1, _socket.CMSG_SPACE(4 * 4), _socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ServiceGone(f"it hung up ({error.strerror})") from None
        numbers = array.array("i")
        for level, type_, data in ancillary:
            if (level, type_) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
        descriptors = numbers.tolist()
        try:
            kind, payload = unpack(message)
        except ServiceGone:
            _close_all(descriptors)
            raise
        return kind, payload, descriptors


def _read_summary(descriptor: int, length_bytes: int) -> dict[str, Any]:
    if length_bytes > MAX_SUMMARY_BYTES:
        raise ServiceGone(f"its summary claims to have {length_bytes} bytes")
    # pread: the description is shared with the service, its offset is nobody's.
    data = b""
    while len(data) < length_bytes:
        piece = os.pread(descriptor, length_bytes - len(data), len(data))
        if not piece:
            break
        data += piece
    if len(data) < length_bytes:
        raise SummaryCut(f"{len(data)} of {length_bytes} bytes of its summary came")
    import json

    try:
        summary = json.loads(data)
    except ValueError as error:
        raise ServiceGone(f"its summary is not JSON: {error}") from None
    if not isinstance(summary, dict):
        raise ServiceGone("its summary is not a JSON object")
    return summary


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
