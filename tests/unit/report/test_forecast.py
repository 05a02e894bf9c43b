# SPDX-License-Identifier: Apache-2.0
"""What a replay says beside a recording under wrap."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from uffdprefetch.report import compare, forecast
from uffdprefetch.sim.replay.link import READS_LEAST, StorageModel
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import Kind

MIB = 1 << 20


@pytest.mark.parametrize("latency", [5e-3, 20e-3])
def test_a_storage_is_known_by_what_it_took_to_read(latency: float) -> None:
    truth = StorageModel(200e6, latency)
    free, reads = 0.0, []
    for at in range(40):  # two at a time, behind one link
        begin = max(0.0, free - 0.01)
        free = max(free, begin) + 4 * MIB / truth.bandwidth
        reads.append((begin, free + truth.latency, 4 * MIB))
        free += 0.05 if at % 10 == 9 else 0.0
    found = StorageModel.seen(reads)
    assert found is not None
    assert found.bandwidth == pytest.approx(truth.bandwidth, rel=0.15)
    assert found.latency == pytest.approx(truth.latency, abs=3e-3)  # a tenth of the bytes' time
    assert StorageModel.seen(reads[: READS_LEAST - 1]) is None


def test_the_prediction_stands_beside_what_was_measured() -> None:
    plain = synthetic.make("contiguous", ranks=1, records=200, epochs=1)
    served = synthetic.make("contiguous", ranks=1, records=200, epochs=1, served=True)
    found = forecast.predicted(plain, served)
    assert found is not None
    assert 0 < found["seconds"] < 1.5 * analyse(plain, lambda *_: None)["trace"]["seconds"]
    document = compare.of_traces(*(analyse(one, lambda *_: None) for one in (plain, served)))
    shown = compare.lines({**document, "predicted": found})
    assert any(line.startswith("predicted by a replay of the first one: ") for line in shown)
    # where nobody read ahead, or it lay in memory, nothing tells what the storage is
    assert forecast.predicted(plain, plain) is None
    warm = served.events["kind"] == Kind.WARM
    served.events["aux"][warm] = np.uint32(4096)
    assert forecast.predicted(plain, served) is None
