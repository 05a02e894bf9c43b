# SPDX-License-Identifier: Apache-2.0
"""The policies by the names that scenario files use. A new one is a class and a line here."""

from uffdprefetch.sim.policies.base import LoadingPolicy
from uffdprefetch.sim.policies.cluster import ClusterPool
from uffdprefetch.sim.policies.hdmlp import Frequency, Naive, Perfect, StagingPool
from uffdprefetch.sim.policies.ours import FixedWindowPolicy, KnownOrderCache, KnownOrderPool
from uffdprefetch.sim.policies.preloading import DeepIO, Lbann, LocalityAware, ParallelStaging

POLICIES: dict[str, type[LoadingPolicy]] = {
    "perfect": Perfect,
    "naive": Naive,
    "staging-pool": StagingPool,
    "deepio": DeepIO,
    "parallel-staging": ParallelStaging,
    "lbann": Lbann,
    "locality-aware": LocalityAware,
    "hdmlp": Frequency,
    "window": FixedWindowPolicy,
    "planned": KnownOrderCache,
    "node-pool": KnownOrderPool,
    "cluster-pool": ClusterPool,
}

__all__ = ["POLICIES", "LoadingPolicy"]
