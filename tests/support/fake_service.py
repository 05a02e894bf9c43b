# SPDX-License-Identifier: Apache-2.0
"""A service that speaks the launcher's protocol and does nothing else, with faults on demand.

    python fake_service.py SOCKET LOG [MODE]

LOG gets one JSON object a line: {"event": "ready"}, then what each launcher said. MODE:
``good``; ``dies-at-job``: ends when a job has started; ``mute``: takes FINISH, never answers;
``babbles``: answers HELLO with bytes that are no message; ``garbage``: its summary is not JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
from typing import Any

from uffdprefetch.job import messages

SUMMARY_JSON: dict[str, Any] = {
    "schema": "uffdprefetch.summary/2",
    "run": "fake",
    "engine": "cache",
    "rung": 1,
    "rung_reason": "userfaultfd with kernel faults works",
    "policy": "auto",
    "wall_seconds": 12.5,
    "ranks": [{"rank": 0}],
    "files": [
        {
            "path": "/data/train.mdb",
            "size_bytes": 1 << 30,
            "served_by": "checkpoints",
            "warmed_by": "posix_fadvise",
            "prefetched_used_blocks_bytes": 1 << 30,
            "demand_used_blocks_bytes": 0,
        }
    ],
    "streams": [{"file": "/data/train.mdb", "rank": 0, "pattern": "random"}],
    "totals": {
        "gain": "saved",
        "saved_at_least_seconds": 2.345,
        "cost_seconds": 0.0,
        "waited_seconds": 0.2,
        "demand_misses": 3,
        "demand_misses_sensor": "fake",
        "prefetched_bytes": 1 << 30,
        "used_bytes": 1 << 30,
        "wasted_bytes": 0,
        "already_resident_bytes": 0,
        "accuracy": 1.0,
        "coverage": 0.99,
        "coverage_denominator_bytes": 1 << 30,
        "timeliness": 0.98,
        "fault_wait_ns": {"count": 256, "p50": 3300, "p99": 9000, "max": 60000, "sensor": "fake"},
        "storage_read_bytes": 1 << 30,
        "storage_read_reason": None,
        "unserved_read_bytes": 0,
    },
    "service": {"cpu_seconds": 0.1, "cpu_share": 0.008},
    "degradations": [],
    "timeline": [],
}


def serve(path: str, log_path: str, mode: str) -> None:
    log = open(log_path, "a", buffering=1)

    def note(event: str, **values: object) -> None:
        log.write(json.dumps({"event": event, **values}) + "\n")

    lock = open(path + ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # as long as we live our files are in use
    print("ready", file=lock, flush=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    note("ready", pid=os.getpid())
    launchers: set[socket.socket] = set()
    finished: set[socket.socket] = set()  # they hang up some time later
    while True:
        ready, _, _ = select.select([listener, *launchers], [], [])
        for connection in ready:
            if connection is listener:
                launchers.add(listener.accept()[0])
                continue
            try:
                message = connection.recv(4096)
            except ConnectionResetError:
                message = b""
            if not message:
                note("hangup")
                launchers.discard(connection)
                finished.discard(connection)
                connection.close()
                continue
            header = messages.HEADER
            kind, payload = header.unpack_from(message)[2], message[header.size :]
            if kind == messages.HELLO:
                names = ("role", "pid", "ppid", "rank", "local_rank", "world", "job_pid")
                values = messages.HELLO_BODY.unpack_from(payload)
                note("hello", length=len(message), **dict(zip(names, values, strict=True)))
                answer = messages.pack(messages.WELCOME, messages.WELCOME_BODY.pack(0))
                connection.send(b"hello?" if mode == "babbles" else answer)
            elif kind == messages.JOB:
                note("job", pid=messages.JOB_BODY.unpack_from(payload)[0])
                if mode == "dies-at-job":
                    os._exit(1)
            elif kind == messages.FINISH:
                finished.add(connection)
                last = launchers == finished
                status = messages.FINISH_BODY.unpack_from(payload)[0]
                note("finish", status=status, last=last)
                if mode == "mute":
                    continue
                text = b"{" if mode == "garbage" else json.dumps(SUMMARY_JSON).encode()
                memfd = os.memfd_create("summary")
                os.write(memfd, text)
                words = messages.SUMMARY_BODY.pack(len(text), int(last))
                socket.send_fds(connection, [messages.pack(messages.SUMMARY, words)], [memfd])
                os.close(memfd)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "good")
