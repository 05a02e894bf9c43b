# SPDX-License-Identifier: Apache-2.0
"""Make it be there: the queue of extents, how much at a time, limits, checkpoints armed again."""
