# SPDX-License-Identifier: Apache-2.0
"""What a data-loading policy would cost, before node hours are spent on it.

The performance model and the policies of "Clairvoyant Prefetching for Distributed Machine Learning
I/O" (paper 5: chapters 3.1, 4.1 and 5.2), and our own. Data flows one way:

    scenario (TOML) -> model, workload -> policy -> steps (time) -> result -> picture
"""
