# SPDX-License-Identifier: Apache-2.0
"""Simulates the cost of data-loading policies on a cluster.

The performance model and the policies of [HDMLP] (chapters 3.1, 4.1 and 5.2), and our own. Data
flows one way:

    scenario (TOML) -> model, workload -> policy -> steps (time) -> result -> picture
"""
