# SPDX-License-Identifier: Apache-2.0
"""Several nodes, one data set: who keeps which block, and how the others get it."""
