# SPDX-License-Identifier: Apache-2.0
"""A node of a cluster without a job: a pool, its link to other nodes, and who convenes them. Does
what it is told, a line of JSON at a time, and says what came of it.

    python -m tests.support.cluster_node MEET RUN NODE NODES BUDGET_BYTES BLOCK_BYTES FILE
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from uffdprefetch.cluster.link import PoolNetwork
from uffdprefetch.native.pool import Pool
from uffdprefetch.protocol import wire
from uffdprefetch.state.file_times import Times

CHUNK = 64 << 10
FILE_ID = (0x1234, 0x5678)


class Node:
    def __init__(self, argv: list[str]) -> None:
        meet, run, node, nodes, budget, block, path = argv
        self.node, self.budget, self.block = int(node), int(budget), int(block)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.pool = Pool(self.budget, CHUNK, 8, self.wake)
        fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(fd).st_size
        self.stamp = Times.of(fd)
        self.file, self.memfd = self.pool.add_file(fd, self.size)
        directory = tempfile.mkdtemp(prefix="cluster-node-", dir="/tmp")
        self.path = f"{directory}/socket"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        options = {
            "meet": meet,
            "run": run,
            "node": self.node,
            "nodes": int(nodes),
            "socket": self.path,
        }
        self.convener = subprocess.Popen(
            [sys.executable, "-m", "uffdprefetch.cluster.convene"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.convener.stdin is not None and self.convener.stdout is not None
        self.convener.stdin.write(json.dumps(options).encode() + b"\n")
        self.convener.stdin.flush()
        self.link: PoolNetwork | None = None
        self.jobs, self.done = 0, set[int]()

    def say(self, **values: Any) -> None:
        print(json.dumps({"node": self.node, **values}), flush=True)

    def tell(self, **values: int) -> None:
        assert self.convener.stdin is not None
        self.convener.stdin.write(json.dumps(values).encode() + b"\n")
        self.convener.stdin.flush()

    def lose(self, link: PoolNetwork) -> None:
        assert link.joined is not None
        self.tell(left=link.joined.generation)
        link.leave()

    def run(self) -> None:
        out = self.convener.stdout
        assert out is not None
        heard = b""
        while True:
            waits = [0, self.listener, self.wake, out]
            if self.link is not None and self.link.joined is not None:
                waits.append(self.link.joined.sock)
            ready, _, _ = select.select(waits, [], [], 0.05)
            self.pool.alive()
            if self.wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake)
            self.done |= {result.id for result in self.pool.reap()}
            if self.listener in ready and self.link is not None:
                self.accept(self.link)
            elif self.link is not None and self.link.joined in ready:
                pass
            if self.link is not None and self.link.joined is not None:
                if self.link.joined.sock in ready:
                    self.say(lost=True)
                    self.lose(self.link)
                elif self.link.is_failed:
                    self.lose(self.link)
            if out in ready:
                heard += os.read(out.fileno(), 1 << 16)
                *lines, heard = heard.split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    if "key" in said and self.link is not None:
                        self.link.key = bytes.fromhex(said["key"])
                    elif "key" in said:
                        self.link = PoolNetwork(
                            self.pool,
                            self.node,
                            bytes.fromhex(said["key"]),
                            chunk_bytes=CHUNK,
                            block_bytes=self.block,
                        )
                        self.pool.set_budget(self.budget, self.link.keep_bytes(self.budget))
                        self.link.share(self.file, FILE_ID, self.stamp)
                    else:
                        self.say(convener=said)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                for line in data.splitlines():
                    self.act(json.loads(line))
        assert self.convener.stdin is not None
        self.convener.stdin.close()
        if self.link is not None:
            self.link.leave()
        self.convener.wait()

    def accept(self, link: PoolNetwork) -> None:
        sock, _ = self.listener.accept()
        hello = wire.hello(wire.unpack(sock.recv(wire.MESSAGE_BYTES))[1])
        assert hello.role == wire.Role.TRANSPORT
        link.join(sock, hello.pid, hello.job_pid)
        self.tell(joined=hello.job_pid)
        self.say(joined=hello.job_pid)

    def act(self, said: dict[str, Any]) -> None:
        if said["do"] == "read":
            began = time.monotonic()
            start, length = said["start"], said["length"]
            step = 4 << 20
            for at in range(start, start + length, step):
                self.jobs += 1
                while not self.pool.submit(
                    self.jobs, self.file, at, min(step, start + length - at)
                ):
                    time.sleep(0.001)
            while self.jobs not in self.done or len(self.done) < self.jobs:
                self.done |= {result.id for result in self.pool.reap()}
                time.sleep(0.001)
            digest = hashlib.sha256(os.pread(self.memfd, length, start)).hexdigest()
            self.say(read=digest, seconds=round(time.monotonic() - began, 3))
        elif said["do"] == "counts":
            counts = self.pool.file_counts(self.file)
            self.say(counts=counts._asdict(), net=self.link.counts() if self.link else {})
        elif said["do"] == "kill":
            assert self.link is not None and self.link.joined is not None
            generation = self.link.joined.generation
            os.kill(self.link.joined.pid, signal.SIGKILL)
            self.say(killed=generation)
        elif said["do"] == "drop":
            self.pool.drop_file(self.file)
            while self.pool.file_counts(self.file).resident_bytes:
                time.sleep(0.001)
            self.say(dropped=True)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    Node(sys.argv[1:]).run()
