# SPDX-License-Identifier: Apache-2.0
"""The process that holds the clock of a run of the suite:
``python -S warden.py RUN RETRY_SECONDS TMPDIR DIRECTORY...``.

A process of its own, since the one that runs the tests may hang with the interpreter's lock held.
Its parent, pytest, tells it on stdin (JSON lines) what begins and how many seconds that may take:
{"phase": 8, "owner": 7, "what": "tests/test_x.py::test_y, the test", "seconds": 300}, {"idle": 1}
between. When they are over it ends the owner's processes, says on stdout which, and sends pytest
SIGALRM; each RETRY_SECONDS again, then with all processes of the run. A pytest that does not move
even so is ended itself. When pytest is gone, however that came, nothing of the run lives on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

import owned

#: So often it is tried to get pytest to move.
TRIES = 4
#: After its last test pytest has so long to end: threads that nobody joined may hold it.
EXIT_SECONDS = 60.0
_PARENT_LOOK_SECONDS = 1.0


def _say(text: str) -> None:
    os.write(2, f"\nuffdprefetch tests: {text}\n".encode())


class Warden:
    """What began last, and until when it may last."""

    def __init__(self, run: str, retry_seconds: float, directories: list[str]) -> None:
        self._run, self._retry_seconds, self._directories = run, retry_seconds, directories
        self._pytest = os.getppid()
        self._now: dict[str, Any] = {}
        self._deadline: float | None = None
        self._tried = 0
        self._killed: list[str] = []

    def watch(self) -> None:
        """Until pytest is gone."""
        text = b""
        while os.getppid() == self._pytest:
            wait = _PARENT_LOOK_SECONDS
            if self._deadline is not None:
                wait = min(wait, max(0.0, self._deadline - time.monotonic()))
            if select.select([0], [], [], wait)[0]:
                more = os.read(0, 65536)
                if not more:
                    break
                *lines, text = (text + more).split(b"\n")
                for line in lines:
                    self._begin(json.loads(line))
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self._over()

    def _begin(self, what: dict[str, Any]) -> None:
        self._now, self._tried, self._killed = what, 0, []
        seconds = EXIT_SECONDS if what.get("finished") else what.get("seconds")
        self._deadline = time.monotonic() + seconds if seconds else None

    def _over(self) -> None:
        self._deadline = time.monotonic() + self._retry_seconds
        pytest = owned.look(self._pytest)
        if pytest is not None and pytest.state in "Tt":  # Ctrl-Z, or a debugger: it will go on
            return
        if self._now.get("finished"):
            _say(f"pytest does not end within {EXIT_SECONDS:.0f} s of its last test; it is ended")
            self._abort()
        elif self._tried == TRIES:
            _say(f"{self._now['what']} cannot be ended: pytest hangs; the run ends here")
            self._abort()
        else:
            self._answer([])  # first: their end may end the test before the signal comes
            self._killed += owned.end(self._of_the_test if self._tried == 0 else self._of_the_run)
            self._answer(self._killed)
            self._tried += 1
            os.kill(self._pytest, signal.SIGALRM)

    def _answer(self, killed: list[str]) -> None:
        os.write(1, json.dumps({"phase": self._now["phase"], "ended": killed}).encode() + b"\n")

    def _of_the_test(self) -> list[owned.Process]:
        mine = (self._now["owner"], None)
        found = owned.owners(self._pytest, self._run)
        return [p for p, owner in found.items() if owner in mine and p.pid != os.getpid()]

    def _of_the_run(self) -> list[owned.Process]:
        found = owned.owners(self._pytest, self._run)
        return [p for p in found if p.pid != os.getpid()]

    def _abort(self) -> None:
        """End pytest: SIGABRT has its fault handler write where each thread stands."""
        pytest = owned.look(self._pytest)
        for number in (signal.SIGABRT, signal.SIGKILL):
            if pytest is not None and not owned.gone(pytest):
                os.kill(self._pytest, number)
                owned.wait_for(lambda: [] if owned.gone(pytest) else [pytest], 5.0)

    def clean(self) -> None:
        """Pytest is gone: what shows the run's mark ends, its mounts and its TMPDIR go."""
        owned.end(lambda: [p for p in owned.marked(self._run) if p.pid != os.getpid()])
        for path in owned.mounts_below(self._directories):
            owned.detach(path)
        owned.remove(self._directories[0])


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for pytest, whose end is ours
    warden = Warden(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    warden.watch()
    warden.clean()


if __name__ == "__main__":
    main()
