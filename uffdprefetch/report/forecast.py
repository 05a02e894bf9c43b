# SPDX-License-Identifier: Apache-2.0
"""What a replay of a plain recording says beside a wrapped one."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.sim.replay.choices import check, choices, predict
from uffdprefetch.sim.replay.demand import demand_of
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.trace.file.events import Kind
from uffdprefetch.trace.file.trace_file import Trace


def predicted(before: Trace, after: Trace) -> dict[str, Any] | None:
    """What a replay of the first run (sim/replay) says that it takes under `wrap`, by the storage
    as our own reads of the second one have found it; None where that was not told, or does not
    explain how long the first one took."""
    warm = after.events[(after.events["kind"] == Kind.WARM) & (after.events["aux"] == 0)]
    begin = (warm["time_ns"] - np.uint64(after.start_ns)).astype(np.float64) / 1e9
    took = warm["value"].astype(np.float64) / 1e9
    rows = zip(begin.tolist(), (begin + took).tolist(), warm["length"].tolist(), strict=True)
    storage = StorageModel.seen(list(rows))
    if storage is None:
        return None
    try:
        demand = demand_of(before)
    except UffdPrefetchError:  # nothing that it could replay
        return None
    if not check(demand, storage).holds:
        return None
    wrap = [one for one in choices((), (), None, (), 0) if one.name == "wrap"]
    (found,) = predict(demand, storage, wrap)
    return {
        "seconds": found.outcome.seconds,
        "bandwidth_bytes_per_second": storage.bandwidth,
        "latency_seconds": storage.latency,
    }
