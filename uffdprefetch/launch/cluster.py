# SPDX-License-Identifier: Apache-2.0
"""`wrap --cluster`: where and as whom this node meets the run's others."""

from __future__ import annotations

import json
import os
import time

from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cluster.which_node import which_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from uffdprefetch.cluster.meeting import Meeting

#: Wait for the other nodes' summaries at the job's end; a later node's stays a summary of its own.
SUMMARY_SECONDS = 3.0
LOOK_SECONDS = 0.05


def why_not(config: Config, environ: Mapping[str, str]) -> str | None:
    """Why this node cannot meet the others, and what to do; None: it can."""
    told = which_node(environ)
    if config.engine != "pool":
        return f"what nodes share lies in the pool, and the engine is {config.engine}"
    if told.number is None:
        return (
            "no launcher says which node this is: start one wrap on each, as by srun -N2 "
            "--ntasks-per-node=1, or set GROUP_RANK and UFFDPREFETCH_CLUSTER_RUN"
        )
    if told.run is None:
        return "nothing names the run: set UFFDPREFETCH_CLUSTER_RUN, the same on all its nodes"
    nodes = config.cluster.nodes or told.nodes
    if not nodes:
        return "no launcher says how many nodes there are: --cluster=N"
    if nodes < 2:
        return "there is one node"
    if told.number >= nodes:
        return f"this is node {told.number} of {nodes}"
    return _why_no_launcher(config.cluster.launcher) if config.cluster.launcher else None


def _why_no_launcher(launcher: str) -> str | None:
    from uffdprefetch.cluster.mpi_start import NoMpiError, words_of

    try:
        words_of(launcher)
    except NoMpiError as error:
        return str(error)
    return None


def placed(config: Config, environ: Mapping[str, str]) -> Config:
    """With the place, where why_not() is None. Raises UffdPrefetchError where nobody can meet."""
    from pathlib import Path

    from uffdprefetch.cluster.meeting import Meeting

    told = which_node(environ)
    place: dict[str, Any] = {
        "meet": config.cluster.meet or os.getcwd(),
        "run": told.run,
        "node": told.number,
        "nodes": config.cluster.nodes or told.nodes,
        "launcher": config.cluster.launcher,
    }
    Meeting(Path(place["meet"]), str(told.run), told.number or 0)
    return config.but(place=json.dumps(place))


def one_summary(
    config: Config, document: dict[str, Any], seconds: float = SUMMARY_SECONDS
) -> dict[str, Any] | None:
    """The summary of all nodes, on the one with the lowest number that is still there; None: that
    one has taken ours. Where nobody takes it within ``seconds``, ours. Never raises."""
    from pathlib import Path

    from uffdprefetch.cluster.meeting import SUMMARY, Meeting, path_of
    from uffdprefetch.report.merge import merged

    place = json.loads(config.cluster.place or "{}")
    if not place:
        return document
    node = int(place["node"])
    meeting = Meeting.at(path_of(Path(place["meet"]), place["run"]), node)
    numbers = (document.get("cluster") or {}).get("present") or []
    try:
        if node not in numbers or len(numbers) < 2:
            return document
        if node != min(numbers):
            return (
                None if _handed_over(meeting, f"{SUMMARY}{node}", document, seconds) else document
            )
        found = {node: document}
        end = time.monotonic() + seconds
        while len(found) < len(numbers) and time.monotonic() < end:
            for name in meeting.names():
                if name.startswith(SUMMARY) and (other := meeting.take(name)) is not None:
                    found[int(name.removeprefix(SUMMARY))] = other
            time.sleep(LOOK_SECONDS)
        return merged(list(found.values()))
    except (UffdPrefetchError, OSError):
        return document
    finally:
        meeting.end()  # the convener may have been killed, and others may not have waited


def _handed_over(meeting: Meeting, name: str, document: dict[str, Any], seconds: float) -> bool:
    meeting.post(name, document)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not (meeting.path / f"{name}.json").exists():
            return True
        time.sleep(LOOK_SECONDS)
    return meeting.take(name) is None


def alone(config: Config) -> Config:
    """Without a cluster."""
    return config.but(cluster=None)
