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


@pytest.mark.parametrize(
    ("quick", "is_shared", "is_there", "needless"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),  # other nodes may ask for it
        (True, False, True, False),  # it has pages of it
    ],
)
def test_what_a_quick_disk_delivers_is_not_copied(
    quick: bool, is_shared: bool, is_there: bool, needless: bool
) -> None:
    ledger, pool = Ledger(), SimpleNamespace()
    pooled = PooledMappings(pool, ledger, is_shared=is_shared)  # type: ignore[arg-type]
    file: Any = SimpleNamespace(
        pooled=object() if is_there else None, path="/data/one",
        opened=SimpleNamespace(on_quick_disk=quick),
    )  # fmt: skip
    assert pooled.has_no_use_for(file) is needless
    told = "/data/one: its disk answers as quickly as the pool: served by the page cache"
    assert ledger.degradations == ([told] if needless else [])
