# SPDX-License-Identifier: Apache-2.0
"""How a mapping is followed, and what a run says of it (service/serving.py, state/ledger.py)."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.config import Config
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.service.serving import Serving, serving_of
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.sightings import Sightings
from uffdprefetch.state.unserved import Coarse, Reason

AUTO, FIXED, POOL = Config(), Config(policy="fixed"), Config(engine="pool")
STATIC, PAST = Sightings(is_static=True), Sightings(bypasses=True)
LOADED = Sightings(is_loaded=True)
LAYING = pytest.mark.parametrize("config", [FIXED, POOL], ids=["fixed", "pool"])


def served(
    config: Config, flags: int = 0, region: int = 5, has_uffd: bool = True, writer: bool = False,
    **client: Any,
) -> Serving:  # fmt: skip
    error = 0 if has_uffd else errno.EPERM
    facts: dict[str, Any] = {
        "observed": False, "sightings": Sightings(),
        "page_table": SimpleNamespace(is_readable=True),
    }  # fmt: skip
    hello = SimpleNamespace(uffd_error=error)
    one: Any = SimpleNamespace(hello=hello, has_uffd=has_uffd, **{**facts, **client})
    file: Any = SimpleNamespace(guard=SimpleNamespace(changed=None, writer=writer))
    return serving_of(one, wire.Attach(region, flags, *[0] * 9), file, config)


@pytest.mark.parametrize("flags", [0, wire.ATTACH_WRITABLE, wire.ATTACH_COPIES, wire.ATTACH_MANY])
@pytest.mark.parametrize("has_uffd", [True, False])
@pytest.mark.parametrize("writer", [True, False])
def test_page_tables_are_what_is_meant_by_default(flags: int, has_uffd: bool, writer: bool) -> None:
    """Whatever is done with the file: there is nothing better to be had."""
    one = served(AUTO, flags, has_uffd=has_uffd, writer=writer)
    assert (one.mode, one.coarse, one.refusal) == (ServingMode.PAGE_TABLES, None, None)


@LAYING
@pytest.mark.parametrize(
    ("facts", "coarse"),
    [
        ({"flags": wire.ATTACH_WRITABLE}, Coarse.OPENED_FOR_WRITING),
        ({"flags": wire.ATTACH_COPIES}, Coarse.COPIES),
        ({"flags": wire.ATTACH_MANY}, Coarse.MANY),
        ({"flags": wire.ATTACH_BRIEF}, Coarse.BRIEF),
        ({"writer": True}, Coarse.WRITER),
        ({"has_uffd": False}, Coarse.NO_USERFAULTFD),
    ],
)
def test_where_nothing_of_ours_may_lie_the_reason_is_told(
    config: Config, facts: dict[str, Any], coarse: Coarse
) -> None:
    one = served(config, **facts)
    assert (one.mode, one.coarse) == (ServingMode.PAGE_TABLES, coarse)
    assert served(config).mode is ServingMode.CHECKPOINTS


@pytest.mark.parametrize("config", [AUTO, FIXED, POOL], ids=["auto", "fixed", "pool"])
def test_what_is_found_late_is_followed_less_closely_under_every_policy(config: Config) -> None:
    assert served(config, observed=True).coarse is Coarse.NOT_LOADED
    assert served(config, observed=True, sightings=STATIC).coarse is Coarse.STATIC
    assert served(config, observed=True, sightings=LOADED).coarse is Coarse.PAST_LIBC
    assert served(config, region=FIRST_OBSERVED).coarse is Coarse.PAST_LIBC
    assert served(config, region=FIRST_OBSERVED, sightings=PAST).coarse is Coarse.BYPASSES


def test_who_hides_its_page_tables_is_not_served() -> None:
    one = served(AUTO, page_table=SimpleNamespace(is_readable=False, error="Permission denied"))
    assert one.refusal is not None and one.refusal.reason is Reason.PAGE_TABLE
    assert one.mode is ServingMode.REFUSE


def attached(*servings: Serving) -> Ledger:
    ledger = Ledger()
    for number, one in enumerate(servings):
        file: Any = SimpleNamespace(path=f"/data/{number}")
        ledger.attached(file, one.mode, one.reason, one.coarse)
    return ledger


def test_a_run_by_page_tables_has_nothing_to_mend() -> None:
    ledger = attached(served(AUTO))
    assert (ledger.serving.rung, ledger.serving.lifts, ledger.serving.remedy) == (2, False, None)
    assert (ledger.serving.coarse, ledger.degradations) == ({}, [])
    assert ledger.serving.modes == {"/data/0": "page_tables"}


@pytest.mark.parametrize("first", [True, False])
def test_of_several_mappings_the_one_that_is_followed_best_is_told(first: bool) -> None:
    well, late = served(AUTO), served(AUTO, observed=True, sightings=STATIC)
    ledger = attached(*((well, late) if first else (late, well)))
    assert (ledger.serving.rung, ledger.serving.remedy) == (2, None)
    assert ledger.serving.reason == well.reason
    assert list(ledger.serving.coarse.values()) == [Coarse.STATIC.words]
    alone = attached(late)
    assert alone.serving.remedy == Coarse.STATIC.remedy and len(alone.degradations) == 1


def test_without_userfaultfd_a_run_that_wants_one_has_something_to_mend() -> None:
    ledger = attached(served(FIXED, has_uffd=False))
    assert (ledger.serving.rung, ledger.serving.lifts, ledger.serving.remedy) == (
        2,
        True,
        "uffdprefetch doctor",
    )
