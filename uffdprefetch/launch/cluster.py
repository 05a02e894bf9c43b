# SPDX-License-Identifier: Apache-2.0
"""`wrap --cluster`: where and as whom this node meets the run's others."""

from __future__ import annotations

import json
import os

from uffdprefetch.base.config import Config
from uffdprefetch.cluster.which_node import which_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def why_not(config: Config, environ: Mapping[str, str]) -> str | None:
    """Why this node cannot meet the others, and what to do; None: it can."""
    told = which_node(environ)
    if config.engine != "pool":
        return "what nodes share lies in the pool: add --engine pool"
    if told.number is None:
        return (
            "no launcher says which node this is: start one wrap on each, as by srun -N2 "
            "--ntasks-per-node=1, or set GROUP_RANK and UFFDPREFETCH_CLUSTER_RUN"
        )
    if told.run is None:
        return "nothing names the run: set UFFDPREFETCH_CLUSTER_RUN, the same on all its nodes"
    nodes = config.cluster or told.nodes
    if not nodes:
        return "no launcher says how many nodes there are: --cluster=N"
    if nodes < 2:
        return "there is one node"
    if told.number >= nodes:
        return f"this is node {told.number} of {nodes}"
    return None


def placed(config: Config, environ: Mapping[str, str]) -> Config:
    """With the place, where why_not() is None."""
    told = which_node(environ)
    place = {
        "meet": config.meet or os.getcwd(),
        "run": told.run,
        "node": told.number,
        "nodes": config.cluster or told.nodes,
        "launcher": config.launcher,
    }
    return Config(**{**vars(config), "place": json.dumps(place)})


def alone(config: Config) -> Config:
    """Without a cluster."""
    return Config(**{**vars(config), "cluster": None})
