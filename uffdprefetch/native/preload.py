# SPDX-License-Identifier: Apache-2.0
"""The LD_PRELOAD object: never imported, only found on disk."""

from __future__ import annotations

import os
import sys

import uffdprefetch
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError

PRELOAD_MODULE = "uffdprefetch._preload"


def preload_object() -> str:
    """The path of the LD_PRELOAD object, found without importing it.

    Raises UffdPrefetchError when it was not built.
    """
    spec = None
    for finder in sys.meta_path:  # as importlib.util.find_spec(), without what it imports
        spec = spec or finder.find_spec(PRELOAD_MODULE, uffdprefetch.__path__)
    if spec is None or not spec.origin or not os.path.exists(spec.origin):
        raise UffdPrefetchError(
            f"the preload object ({PRELOAD_MODULE}) was not built; run `make setup`", EXIT_OURS
        )
    return os.path.abspath(spec.origin)
