# SPDX-License-Identifier: Apache-2.0
"""The summary of a job whose service has none: it was not up yet when the job ended, it died, or it
does not answer.

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
    config: Config, run: str, seconds: float, service_cpu_seconds: float, read: int | None,
    why: str = WHY, *, died: bool = False, silent: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The document of docs/summary-schema.md. ``seconds``: of the job; ``run``: its key;
    ``service_cpu_seconds``: what the service took until it ended; ``read``: what the job has read
    by read(2) and its kind, in bytes; ``why`` there is none: a sentence; ``died``: the service
    ended during the run; ``silent``: it did not answer at the end."""
    totals = doc.Totals(
        demand_misses_sensor=why,
        used_sensor=why,
        fault_wait_ns=doc.fault_wait(why),
        gain="unknown",
        gained_method=why,
        waited_sensor=why,
        unserved_read_bytes=read,
        unserved_read_sensor="/proc/PID/io rchar of wrap and of what it has waited for",
        unserved_read_files_sensor=why,
        storage_read_reason=why,
    )
    fallen_back = [why_fallen_back(config)] if config.source.engine_asked else []
    return vars(
        doc.Summary(
            run=run,
            host=os.uname().nodename,
            engine=config.engine,
            engine_asked=config.engine_asked,
            policy=config.policy,
            rung_reason=why,
            wall_seconds=round(seconds, 3),
            totals=vars(totals),
            service=doc.service(service_cpu_seconds, died=died, silent=silent),
            storage=doc.storage(why),
            degradations=fallen_back,
            notes=[{"path": "", "text": text} for text in fallen_back],
        )
    )
