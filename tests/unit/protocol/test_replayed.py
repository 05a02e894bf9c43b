# SPDX-License-Identifier: Apache-2.0
"""What came of the replays of a run's starts, as launchers tell it and as the summary has it."""

from __future__ import annotations

import pytest

from uffdprefetch.job.messages import FINISH_BODY
from uffdprefetch.protocol.replayed import BUSY, learned, merged, text_of

REPLAYED = {
    "files": 1000, "directories": 40, "names": 300, "bytes": 1 << 27, "waited_bytes": 1 << 26,
    "seconds": 3.25, "cpu_seconds": 0.00001, "skipped": {"changed": 2, "gone": 0, "refused": 7},
}  # fmt: skip


def told(state: str, replayed: dict[str, object] | None = None) -> bytes:
    """As the service has it from a message."""
    text = text_of(learned("key", state, replayed or {}))
    body: bytes = FINISH_BODY.unpack(FINISH_BODY.pack(0, 0, 0, 0, text))[4]
    return body


def test_of_one_launcher_the_service_has_what_the_launcher_has() -> None:
    own, service = learned("key", "done", REPLAYED), merged([told("done", REPLAYED)])
    assert service == {**{name: own[name] for name in service}, "cpu_seconds": 0.0}
    assert own["bytes"] == 1 << 27 and own["skipped"] == {"changed": 2, "refused": 7}


def test_of_several_it_is_the_sum_and_the_state_of_who_read() -> None:
    another = {**REPLAYED, "bytes": 5, "seconds": 9.0}
    found = merged([told(BUSY), told("done", REPLAYED), told(BUSY), told("budget", another)])
    assert (found["state"], found["paths"], found["bytes"]) == ("done", 2680, (1 << 27) + 5)
    assert (found["seconds"], found["skipped"]) == (9.0, {"changed": 4, "refused": 14})
    assert merged([told("first run"), told("first run")])["state"] == "first run"
    assert merged([told(BUSY), told("no profile")])["state"] == "no profile"
    assert merged([]) == {}


def test_the_longest_fits_and_what_does_not_is_not_told() -> None:
    names = ("changed", "gone", "refused", "no_file", "failed", "budget", "time")
    why = dict.fromkeys(names, 65536 // len(names))
    longest = {
        "files": 65536, "bytes": 4 << 30, "waited_bytes": 4 << 30, "seconds": 30.0,
        "cpu_seconds": 480.0, "skipped": why,
    }  # fmt: skip
    text = text_of(learned("key", "no room in the run directory", longest))
    assert merged([text])["skipped"] == why
    assert text_of(learned("key", "x" * 200, longest)) == b""


@pytest.mark.parametrize("text", [b"", b"state", b"bytes x", b"\xff", b"state done\npaths 1"])
def test_what_is_no_such_text_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        merged([text])
