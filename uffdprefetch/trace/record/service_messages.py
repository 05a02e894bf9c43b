# SPDX-License-Identifier: Apache-2.0
"""What our service tells a recorder: its events, and which files and processes they are of."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.messages import say
from uffdprefetch.base.procfs import descendants
from uffdprefetch.protocol import wire
from uffdprefetch.trace.file.events import EVENT
from uffdprefetch.trace.file.trace_file import TracedProcess
from uffdprefetch.trace.record.file_numbers import NUMBERS
from uffdprefetch.trace.record.file_registry import FileRegistry
from uffdprefetch.trace.record.kernel_tracer import CHILDREN_ONLY, KernelTracer
from uffdprefetch.trace.record.process_identity import kernel_device


class ServiceMessages:
    """Those of one recording."""

    def __init__(self, known: FileRegistry, witness: KernelTracer | None) -> None:
        self._known, self._witness = known, witness
        self._numbers: Array = np.zeros(NUMBERS, "<u2")  # of files, by the service's
        self._launchers: set[int] = set()
        self.lost = 0  # events that the service could not send

    def take(self, message: bytes) -> list[Array]:
        """The events of one, and those that follow from whom it names."""
        try:
            kind, body = wire.unpack_stream(message)
            if kind == wire.Type.EVENTS:
                events = np.frombuffer(body, EVENT).copy()
                events["file"] = self._numbers[events["file"]]
                return [events]
            document = json.loads(body)
            if not isinstance(document, dict):
                raise ValueError("not an object")
            self.lost = document.get("lost", self.lost)
            return self._tables(document)
        except (wire.WireError, ValueError, KeyError, TypeError) as error:
            say(f"trace: a message of the service cannot be read: {error}")
        return []

    def _tables(self, document: dict[str, Any]) -> list[Array]:
        processes, found = self._known.processes, list[Array]()
        for entry in document.get("files", ()):
            device = kernel_device(entry["st_dev"])
            number = self._known.files.name(device, entry["inode"], entry["path"])
            self._numbers[entry["id"]] = number
        for entry in document.get("processes", ()):
            pid = entry["pid"]
            if pid not in processes.known and self._witness is not None:
                self._witness.follow(pid)
            processes.put(TracedProcess(**entry))
        if "service" in document:
            service = TracedProcess(document["service"], command="uffdprefetch", role="service")
            processes.put(service)
        for pid in document.get("launchers", ()):
            if self._witness is not None and pid not in self._launchers:
                self._launchers.add(pid)
                self._witness.follow(pid, CHILDREN_ONLY)
                for child in descendants(pid)[1:]:
                    if child not in self._ours():
                        found += self._known.adopt(child)
        return found

    def _ours(self) -> set[int]:
        """The recorder and the service: their launcher's children too, and not the job."""
        known = self._known.processes.known.values()
        return {os.getpid(), *(p.pid for p in known if p.role == "service")}
