# SPDX-License-Identifier: Apache-2.0
"""How many bytes to keep under way: as many as make storage faster, and no more.

Little's law says bandwidth x latency, but the latency that can be seen is mostly waiting behind
our own requests. So this climbs: more under way as long as that brings more bandwidth, back one
step when it does not, and another try a while later, because a link changes. A demand miss waits
behind what is under way, hence the bound in seconds.
"""

from __future__ import annotations

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.units import MIB
from uffdprefetch.predict.bounds import LATELY_NS

#: One request of the largest, which few readers wait behind ...
MIN_BYTES = CHUNK_MAX_BYTES
#: ... and so many that a link of some GB/s is busy.
MAX_BYTES = 64 * MIB
#: Never more under way than storage brings in this time, over which its bandwidth is taken, too
#: (warm/meter.py): what a step has changed shows in the next sample.
MAX_SECONDS = 0.05
#: Nor less: what the service may take until it sends the next, on a node whose cores are busy.
MIN_SECONDS = 0.016
#: The next try is so many times as much: less would not show in the bandwidth (GAIN).
STEP = 1.5
#: A step is kept when the bandwidth grew by this; less is noise.
GAIN = 1.1
#: Samples to wait before the next try: what one has found holds as long as all that was seen, and a
#: sample is of MAX_SECONDS at least.
HOLD = round(LATELY_NS / (MAX_SECONDS * 1e9))


class Depth:
    """``bytes`` is the target; feed :meth:`note` with bandwidth samples."""

    def __init__(self) -> None:
        self.bytes = MIN_BYTES
        self._lower = MIN_BYTES
        self._reference = 0.0  # bytes/s at the lower step
        self._trial = False
        self._hold = 0

    def note(self, bandwidth: float) -> None:
        """One sample of bytes/s, taken while more work was waiting than was under way."""
        if self._trial:
            self._trial = False
            if bandwidth < self._reference * GAIN:
                self.bytes, self._hold = self._lower, HOLD
        elif self._hold:
            self._hold -= 1
        if not self._hold and not self._trial:
            self._lower, self._reference = self.bytes, bandwidth
            self.bytes, self._trial = int(self.bytes * STEP), True
        most = min(MAX_BYTES, int(bandwidth * MAX_SECONDS))
        least = min(MAX_BYTES, max(MIN_BYTES, int(bandwidth * MIN_SECONDS)))
        self.bytes = max(least, min(self.bytes, most))
