# SPDX-License-Identifier: Apache-2.0
"""Threads of C for each device that is being read from: one whose server does not answer holds up
nobody who reads elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Most devices read from at a time: each has threads, and a job reads from one or two.
DEVICES_MOST = 16


class _Crew:
    """Threads that read from one device at a time."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.under_way = 0  # what was submitted and not reaped


class Crews:
    """Groups of threads, each made when another device is read from, and another's when it rests.

    ``make``: the pointer of a new group; raises OSError when there can be no threads.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: list[_Crew] = []
        self._busy: dict[int, _Crew] = {}  # by device

    def begin(self) -> None:
        """Have one ready that rests. Raises OSError."""
        if not self._idle:
            self._idle.append(_Crew(self._make()))

    def submit(self, device: int, submit: Callable[[Any], int]) -> bool:
        """Have a device's threads do something, by a call that returns 0 or -errno. False: they do
        not accept it, there can be none, or too many other devices are being read from."""
        crew = self._busy.get(device)
        if crew is None:
            if len(self._busy) == DEVICES_MOST:
                return False
            try:
                self.begin()
            except OSError:
                return False
            crew = self._idle[-1]
        if submit(crew.pointer):
            return False
        if device not in self._busy:
            self._busy[device] = self._idle.pop()
        crew.under_way += 1
        return True

    def reap(self, take: Callable[[Any], int]) -> None:
        """Have ``take`` reap what is done of each that is busy, and say how many."""
        for device, crew in list(self._busy.items()):
            crew.under_way -= take(crew.pointer)
            if not crew.under_way:
                self._idle.append(self._busy.pop(device))

    @property
    def busy(self) -> list[Any]:
        """The pointers of those of which something is not reaped."""
        return [crew.pointer for crew in self._busy.values()]

    @property
    def all(self) -> list[Any]:
        """Their pointers."""
        return [crew.pointer for crew in self._idle] + self.busy

    def dissolve(self) -> list[Any]:
        """The pointers of all, for whoever ends them: there are none from now on."""
        pointers = self.all
        self._idle, self._busy = [], {}
        return pointers
