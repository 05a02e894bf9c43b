# SPDX-License-Identifier: Apache-2.0
"""The summary of a job that had ended before its service was up, without ever asking for it.

What a service says of a run in which nothing was reported to it (service/summary.py), with the
words for what nobody has looked at. Loads nothing of the service, for which nobody waits here.
"""

from __future__ import annotations

import os

from uffdprefetch.base.config import why_fallen_back
from uffdprefetch.protocol import summary as doc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from uffdprefetch.base.config import Config

WHY = "the job ended before the service was up"


def summary(
    config: Config, run: str, seconds: float, service_cpu_seconds: float, read: int | None
) -> dict[str, Any]:
    """The document of docs/summary-schema.md. ``seconds``: of the job; ``run``: its key;
    ``service_cpu_seconds``: what the service's start took until it was ended; ``read``: what the
    job has read by read(2) and its kind, in bytes."""
    totals = doc.Totals(
        demand_misses_sensor=WHY,
        used_sensor=WHY,
        fault_wait_ns=doc.fault_wait(WHY),
        gain="unknown",
        gained_method=WHY,
        waited_sensor=WHY,
        unserved_read_bytes=read,
        unserved_read_sensor="/proc/PID/io rchar of wrap and of what it has waited for",
        unserved_read_files_sensor=WHY,
        storage_read_reason=WHY,
    )
    return vars(
        doc.Summary(
            run=run,
            host=os.uname().nodename,
            engine=config.engine,
            engine_asked=config.engine_asked or config.engine,
            policy=config.policy,
            rung_reason=WHY,
            wall_seconds=round(seconds, 3),
            totals=vars(totals),
            service=doc.service(service_cpu_seconds),
            storage=doc.storage(WHY),
            degradations=[why_fallen_back(config)] if config.engine_asked else [],
        )
    )
