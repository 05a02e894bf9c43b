# SPDX-License-Identifier: Apache-2.0
"""The LD_PRELOAD object: never imported, only found on disk."""

from __future__ import annotations

import importlib.util
import os

from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError

PRELOAD_MODULE = "uffdprefetch._preload"


def preload_object() -> str:
    """The path of the LD_PRELOAD object, found without importing it.

    Raises UffdPrefetchError when it was not built.
    """
    try:
        spec = importlib.util.find_spec(PRELOAD_MODULE)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not os.path.exists(spec.origin):
        raise UffdPrefetchError(
            f"the preload object ({PRELOAD_MODULE}) was not built; run `make setup`", EXIT_OURS
        )
    return os.path.abspath(spec.origin)
