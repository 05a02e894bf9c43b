# SPDX-License-Identifier: Apache-2.0
"""The call that fills the page cache of a file, and what is known of the storage behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from uffdprefetch.base import file_systems
from uffdprefetch.base.cache_call import CHUNK_LEAST_BYTES, Choice, Doubt, choose
from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.mounts import mount_of, read_ahead_bytes
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.state.opening import Opened

#: Tests: bytes that stand for each device's read_ahead_kb.
_READAHEAD = "UFFDPREFETCH_TEST_READAHEAD"
_ADVICE = {
    uffd.WARM_READAHEAD: os.POSIX_FADV_SEQUENTIAL,
    uffd.WARM_PREAD: os.POSIX_FADV_RANDOM,
}


class DeviceFacts(NamedTuple):
    """What is known of a device: the type of its file system as mountinfo has it, the kernel's
    readahead window (None: not known), and when that was asked."""

    kind: str
    ahead_bytes: int | None
    asked_ns: int


_devices: dict[int, DeviceFacts] = {}


def facts_of(device: int) -> DeviceFacts:
    """Of a device number; asked once in a while for all of its files. Raises OSError."""
    now_ns, found = CLOCK.now_ns(), _devices.get(device)
    if found is None or now_ns - found.asked_ns > LATELY_NS:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        if len(_devices) >= ENTRIES_MAX:
            _devices.clear()
        kind, ahead_bytes = mount_of(device, mountinfo)[0], read_ahead_bytes(device, mountinfo)
        found = _devices[device] = DeviceFacts(kind, ahead_bytes, now_ns)
    return found


@dataclass
class FileCall:
    """Of one file. Until one is known to fill its cache, calls are probed."""

    file_system: str  # its name; f_type: see Opened
    unit_bytes: int = 0  # its storage's request size (base/file_systems.py)
    counts_reads: bool = False  # /proc/PID/io is known to count its reads
    ahead_bytes: int | None = None  # the kernel's readahead window; None: not known
    method: int = uffd.WARM_PROBE
    chunk_bytes: int = CHUNK_LEAST_BYTES
    reason: str = "not probed yet"
    doubt: Doubt = field(default_factory=Doubt)

    @classmethod
    def of(cls, opened: Opened) -> FileCall:
        """Choose it, before the first request. Raises OSError."""
        facts = facts_of(opened.status.st_dev)
        known, said = file_systems.known(opened.f_type), os.environ.get(_READAHEAD, "")
        call = cls(
            facts.kind,
            known.unit_bytes,
            known.counts_reads is True,
            int(said) if said.isdigit() else facts.ahead_bytes,
        )
        residency, _ = uffd.resident_bytes(opened.fd, 0, uffd.PAGE_BYTES)
        choice = choose(opened.f_type, call.ahead_bytes, residency is not None)
        call.use(choice, opened.fd)
        return call

    def use(self, choice: Choice, fd: int) -> None:
        """Prefetch with this call from now on, by this descriptor."""
        self.method, self.chunk_bytes, self.reason = choice
        self.doubt.forget()
        if self.method in _ADVICE:
            os.posix_fadvise(fd, 0, 0, _ADVICE[self.method])

    def use_again(self, fd: int) -> None:
        """The same by another descriptor."""
        if self.method == uffd.WARM_PREAD:
            os.posix_fadvise(fd, 0, 0, _ADVICE[self.method])
