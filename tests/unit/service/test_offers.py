# SPDX-License-Identifier: Apache-2.0
"""What comes of checkpoints that a job was offered (service/offers.py)."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.protocol import wire
from uffdprefetch.service.offers import Offers
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.unserved import Coarse


def region(path: str = "/data") -> Any:
    return SimpleNamespace(
        file=SimpleNamespace(path=path), mode=wire.ServingMode.CHECKPOINTS,
        checkpoints=SimpleNamespace(offered=[0, 4096, 8192], laid=set()),
    )  # fmt: skip


def laid(done: int, error: int) -> tuple[Any, Ledger]:
    ledger, one = Ledger(), region()
    client: Any = SimpleNamespace(pid=7)
    Offers(SimpleNamespace(), ledger, CLOCK).laid(client, one, done, error)  # type: ignore[arg-type]
    return one, ledger


def test_what_was_laid_is_known() -> None:
    one, ledger = laid(2, 0)
    assert (one.checkpoints.laid, ledger.checkpoints.laid) == ({0, 4096}, 2)
    assert ledger.serving.modes == {"/data": "checkpoints"} and not ledger.serving.coarse


def test_a_program_that_has_gone_on_meanwhile_is_no_failure() -> None:
    one, ledger = laid(0, errno.ETIMEDOUT)
    assert not one.checkpoints.laid
    assert ledger.serving.coarse == {"/data": Coarse.GONE_ON.words}
    (said,) = ledger.degradations
    assert said.endswith(Coarse.GONE_ON.words), "such a line is none of those that end a run"


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOMEM])
def test_what_could_not_be_laid_is_said(error: int) -> None:
    _, ledger = laid(0, error)
    (said,) = ledger.degradations
    assert said.startswith("pid 7: a checkpoint could not be laid") and not ledger.serving.coarse
