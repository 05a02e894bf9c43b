# SPDX-License-Identifier: Apache-2.0
"""Messages of csrc/common/wire.h for processes that load no C: the job, launchers, watchers.

The one copy of the header's numbers; tests/unit/service/test_wire.py compares the two.
"""

from __future__ import annotations

import struct

MAGIC, VERSION, MESSAGE_BYTES = 0x50444655, 10, 256
#: enum up_type
HELLO, WELCOME, JOB, FINISH, SUMMARY, SNAPSHOT, PLAN = 1, 2, 3, 4, 5, 7, 20
#: enum up_role
LAUNCHER, WATCHER, PLANNER = 1, 3, 5

#: The directory of announced orders is called after the socket (job/channel.py).
PLAN_SUFFIX = ".plan"

HEADER = struct.Struct("<IHH")
HELLO_BODY = struct.Struct("<I6i")  # struct up_hello up to job_pid; the rest is zero
WELCOME_BODY = struct.Struct("<I")
JOB_BODY = struct.Struct("<i")
FINISH_BODY = struct.Struct("<iiqq224s")
SUMMARY_BODY = struct.Struct("<II")
PLAN_BODY = struct.Struct("<IiI")


def pack(kind: int, body: bytes = b"") -> bytes:
    """One message: header, body, zeros up to MESSAGE_BYTES."""
    return (HEADER.pack(MAGIC, VERSION, kind) + body).ljust(MESSAGE_BYTES, b"\0")
