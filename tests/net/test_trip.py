# SPDX-License-Identifier: Apache-2.0
"""One fault's trip through the service: how many source files one must know who follows it.

The tape of the demonstration's sequential reader is played, and every function of ours that is
entered between the touch of a checkpoint and the request that comes of it is noted.
"""

from __future__ import annotations

import json
import subprocess
import sys

from paths import ROOT

AT_THE_END = ("readers/next_shard.py", "predict/shards.py")
#: A new file on the way of every touch wants a reason. What only holds data is not counted. The
#: last ones are there near the end of a file only: what follows it. What a guess is worth is asked
#: of its walk, its law and its price (predict/fronts.py, survival.py, price.py); whether a file is
#: read here and there, and then whole, of visits.py and readers/whole_files.py; gain.py keeps the
#: books for what was gained.
ROOMS_MAX = 24 + len(AT_THE_END)
DATA = ("base/", "state/")
CODE = """
import json, sys
from tests.net import replay
trips = replay.trips(sys.argv[1])
print(json.dumps(trips))
"""


def test_a_touch_of_a_plain_reader_visits_few_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "demo-on"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    trips = json.loads(done.stdout)
    assert trips, "no touch of a checkpoint led to a request"
    for trip in trips:
        rooms = [name for name in trip if not name.startswith(DATA)]
        assert len(rooms) <= ROOMS_MAX, rooms
        assert not [
            name for name in rooms if name in ("readers/known_order.py", "readers/strides.py")
        ]
        assert {"predict/fronts.py", "predict/survival.py", "warm/scheduler.py"} <= set(rooms)
