# SPDX-License-Identifier: Apache-2.0
"""Which mappings the pool serves, and what is said of those that it does not."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.service.pooled import PooledMappings
from uffdprefetch.state.ledger import Ledger


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENFILE, "as many files as it can"), (errno.EMFILE, os.strerror(errno.EMFILE))],
)
def test_one_file_too_many_looks_like_no_full_disk(number: int, says: str) -> None:
    def full(file: Any) -> Any:
        raise OSError(number, os.strerror(number))

    ledger, pool = Ledger(), SimpleNamespace(files=SimpleNamespace(open=full))
    pooled = PooledMappings(pool, ledger, is_shared=False)  # type: ignore[arg-type]
    file: Any = SimpleNamespace(pooled=None, copies=SimpleNamespace(rw=-1), path="/data/one")
    client: Any = SimpleNamespace(pool_slot=0)
    fds, why = pooled.accept(client, file)
    assert fds == [] and says in why
    assert says in "\n".join(ledger.degradations)
