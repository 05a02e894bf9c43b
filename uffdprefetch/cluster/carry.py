# SPDX-License-Identifier: Apache-2.0
"""The program that MPI starts on each node: joins its node's service, then carries until that hangs
up.

    python -m uffdprefetch.cluster.carry DIRECTORY GENERATION NODES

Exit status 0: the service has ended; 3: MPI made no world of NODES, or none at all; 4: the service
does not let it in; 5: the network has failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import select
import socket
import sys
import time
from pathlib import Path

from uffdprefetch.base.errors import EXIT_USAGE
from uffdprefetch.cluster import brood
from uffdprefetch.cluster.fabric import FabricError, MpiFabric
from uffdprefetch.cluster.meeting import socket_of
from uffdprefetch.cluster.transport import Transport
from uffdprefetch.native.net import NetRing
from uffdprefetch.protocol import leftovers, wire

NO_WORLD, NOT_LET_IN, LOST = 3, 4, 5
#: Time limit of MPI_Init: it waits for ranks that have died, too. Only C can end it, as it holds
#: the GIL.
INIT_SECONDS = 30.0
FINALIZE_SECONDS = 3.0
#: Wait for the key: a step may start a transport before its node's convener has looked for it.
KEY_SECONDS = 5.0


def join(path: str, generation: int) -> tuple[socket.socket, list[int], dict[str, object]]:
    """(the connection, [ring, to, from], what it was told) of a service. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10.0)
    sock.connect(path)
    zeros = dict.fromkeys(wire.Hello._fields, 0)
    said = {
        **zeros, "role": wire.Role.TRANSPORT, "pid": os.getpid(), "job_pid": generation,
        "command": b"transport",
    }  # fmt: skip
    sock.send(wire.pack(wire.Type.HELLO, wire.HELLO.pack(*said.values())))
    data, fds, _, _ = socket.recv_fds(sock, wire.MESSAGE_BYTES, 4)
    if len(fds) != 4 or wire.unpack(data)[0] != wire.Type.WELCOME:
        raise OSError(f"the service sent {len(fds)} descriptors")
    *wanted, info = fds
    told = json.loads(os.pread(info, 1 << 16, 0))
    os.close(info)
    return sock, wanted, told


def joined(path: str, generation: int) -> tuple[socket.socket, list[int], dict[str, object]]:
    """The same, of a service that may hear the generation's key only now. Raises OSError."""
    end = time.monotonic() + KEY_SECONDS
    while True:
        try:
            return join(path, generation)
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def say(text: str) -> None:
    """One line in the log of who started us."""
    print(f"uffdprefetch transport on {platform.node()}: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """See the module; never returns where MPI may hang at the end."""
    if len(argv) != 3 or not all(word.isdigit() for word in argv[1:]):
        say("DIRECTORY GENERATION NODES")
        return EXIT_USAGE
    directory, generation, nodes = Path(argv[0]), int(argv[1]), int(argv[2])
    faulthandler.dump_traceback_later(INIT_SECONDS, exit=True)
    try:
        path = socket_of(directory, platform.node())
    except FileNotFoundError as error:
        say(str(error))
        return NOT_LET_IN
    os.environ.update(brood.temporary(path + leftovers.MPI))
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_FUNNELED)
    except Exception as error:  # of another kind by each MPI
        say(f"no MPI: {error}")
        return NO_WORLD
    world = MPI.COMM_WORLD
    if world.Get_size() != nodes:
        say(f"MPI made a world of {world.Get_size()}, not of {nodes}")
        os._exit(NO_WORLD)
    try:
        sock, (ring_fd, to_fd, from_fd), told = joined(path, generation)
        ring = NetRing.open(ring_fd)
    except (OSError, ValueError, wire.WireError) as error:
        say(f"the service does not let it in: {error}")
        os._exit(NOT_LET_IN)
    faulthandler.cancel_dump_traceback_later()
    ended = select.poll()
    ended.register(sock, select.POLLIN)
    try:
        transport = Transport(
            ring, to_fd, from_fd, MpiFabric(MPI, world), node=int(str(told["node"])),
            key=bytes.fromhex(str(told["key"])), generation=generation,
            spins=bool(told["spins"]),
        )  # fmt: skip
        transport.run(ended)
    except FabricError as error:
        say(str(error))
        os._exit(LOST)
    # Whoever has lost a peer would wait for it in Finalize; a launcher may take the others down
    # where one ends without it. Neither matters any more: the run is over here.
    if len(transport.members) == nodes:
        faulthandler.dump_traceback_later(FINALIZE_SECONDS, exit=True)
        MPI.Finalize()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
