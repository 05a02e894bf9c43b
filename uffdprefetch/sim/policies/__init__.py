# SPDX-License-Identifier: Apache-2.0
"""The policies by the names that scenario files use. A new one is a class and a line here."""

from uffdprefetch.sim.policies.base import Policy
from uffdprefetch.sim.policies.cluster import ClusterPool
from uffdprefetch.sim.policies.hdmlp import Frequency, Naive, Perfect, StagingPool
from uffdprefetch.sim.policies.ours import NodePool, Planned, Window
from uffdprefetch.sim.policies.preloading import DeepIO, Lbann, LocalityAware, ParallelStaging

POLICIES: dict[str, type[Policy]] = {
    "perfect": Perfect,
    "naive": Naive,
    "staging-pool": StagingPool,
    "deepio": DeepIO,
    "parallel-staging": ParallelStaging,
    "lbann": Lbann,
    "locality-aware": LocalityAware,
    "hdmlp": Frequency,
    "window": Window,
    "planned": Planned,
    "node-pool": NodePool,
    "cluster-pool": ClusterPool,
}

__all__ = ["POLICIES", "Policy"]
