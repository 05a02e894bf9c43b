# SPDX-License-Identifier: Apache-2.0
"""Of stand-ins for files: the kernel does not say what of them is in the page cache."""

from __future__ import annotations

from uffdprefetch.state.cached import AllCached

UNTOLD = AllCached(lambda _start, _length: None, 1)
