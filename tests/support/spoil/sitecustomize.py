# SPDX-License-Identifier: Apache-2.0
"""First on PYTHONPATH: on the host SPOILS the transport changes a bit in every fifth answer.

The first time, it makes the file that SPOILED names.
"""

import os
import platform
import random
import sys

if "uffdprefetch.cluster.carry" in sys.orig_argv and platform.node() == os.environ.get("SPOILS"):
    from uffdprefetch.cluster import fabric
    from uffdprefetch.cluster.requests import ANSWER
    from uffdprefetch.native.net import HEADER_BYTES

    _send = fabric.MpiFabric.send

    def _spoil(self, peer, tag, data, then=None):
        if tag >= ANSWER and len(data) > HEADER_BYTES and random.random() < 0.2:
            data = bytearray(data)
            data[random.randrange(HEADER_BYTES, len(data))] ^= 1
            open(os.environ["SPOILED"], "w").close()
        _send(self, peer, tag, data, then)

    fabric.MpiFabric.send = _spoil
