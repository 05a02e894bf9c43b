# SPDX-License-Identifier: Apache-2.0
"""--engine pool beside a scan: what is used again and again stays (pool/workingset.py)."""

from __future__ import annotations

import pytest
from harness import Records, Start, python

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.root

#: Of 385 chunks, so that a scan has to displace some of them.
BUDGET = "16MiB"
HOT = 24

LOOK_UPS_AND_SCANS = """
import random
m, chunk, hot = Mapping(sys.argv[1]), 64 << 10, int(sys.argv[2])
view, rng = m.view, random.Random(5)
chunks = m.length // chunk
hot = rng.sample(range(chunks), hot)
def stays():  # what was mapped, and has not been punched out of the pool since
    with open("/proc/self/pagemap", "rb") as file:
        def mapped(n):
            file.seek((m.address // PAGE + n * chunk // PAGE) * 8)
            return file.read(8)[7] >> 7
        return sum(map(mapped, hot))
best = rounds = total = 0
while best < len(hot) - 1 and rounds < 20:
    for _ in range(30 * len(hot)):
        n = rng.choice(hot) if rng.random() < 0.9 else rng.randrange(chunks)
        total += view[n * chunk]
    for n in hot:
        total += view[n * chunk]
    m.digest()
    best, rounds = max(best, stays()), rounds + 1
say(pooled=m.pooled(), best=best, digest=m.digest())
"""


def test_scans_come_to_leave_a_hot_set_where_it_is(
    job: Start, records: Records, patient: None
) -> None:
    """Without a working set each of them takes a third of it."""
    words = python(LOOK_UPS_AND_SCANS, records.path, HOT)
    done = (
        job(words, options=("--engine", "pool", "--budget", BUDGET, "--huge-pages", "off"))
        .finish()
        .good()
    )
    (found,) = done.lines
    assert found == {"pooled": True, "best": found["best"], "digest": records.digest}
    assert found["best"] >= HOT - 1
