# SPDX-License-Identifier: Apache-2.0
"""Make it be there: the queue of extents, the call that fills the cache, and the limits."""
