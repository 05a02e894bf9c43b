# SPDX-License-Identifier: Apache-2.0
"""Where a job's processes find their service on this node."""

from __future__ import annotations

import os
import time

from uffdprefetch.base.identity import job_key
from uffdprefetch.base.record import record
from uffdprefetch.base.rundir import runtime_directory, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Variable that replaces the control group in a socket's name.
GROUP_VARIABLE = "UFFDPREFETCH_GROUP"


@record(frozen=True)
class Address:
    """Of one job; ``is_shared``: others of its launchers, on this node, have the same."""

    key: str
    key_source: str
    directory: str
    socket: str
    is_shared: bool = True

    @property
    def log(self) -> str:
        return f"{self.socket}.log"

    @property
    def see_log(self) -> str:
        """The end of a line about a service that is gone: where more is said, if it is anywhere."""
        return f"; see {self.log}" if os.path.exists(self.log) else ""


def address_of(environ: Mapping[str, str]) -> Address:
    """Key, runtime directory and socket of this job; raises UffdPrefetchError (125). One that is
    not shared is another each time."""
    key = job_key(environ, os.getpid(), os.getppid(), f"{time.time_ns():x}")
    directory = runtime_directory(environ)
    group = environ.get(GROUP_VARIABLE)  # the same on all nodes: launch/on_nodes.py
    socket = socket_path(directory, key.key, group=group)
    return Address(key.key, key.source, directory, socket, key.shared)
