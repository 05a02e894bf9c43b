# SPDX-License-Identifier: Apache-2.0
"""What came of the replay of a start: as the program tells it (csrc/replay/replay.c), as a launcher
tells the service (FINISH), and as the summary has it (docs/summary-schema.md, ``learn``).

It is no JSON, to load whose reader the job's end would wait.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: Of a launcher that has replayed nothing, since another does it.
BUSY = "another replays"
#: Bytes of the text in FINISH (UP_REPLAY_BYTES).
_TEXT_BYTES = 224
#: What of several adds up, but for ``cpu_seconds`` and ``skipped``.
_COUNTS = ("paths", "bytes", "read_bytes")


def told_by(text: str) -> dict[str, Any]:
    """What a replay tells (csrc/replay/replay.c, tell()), with ``skipped`` by reason. Raises
    ValueError. (It is no JSON, to load whose reader the job's end would wait.)"""
    told: dict[str, Any] = {"skipped": {}}
    for line in text.split("\n"):
        name, _, value = line.partition(" ")
        if name == "skipped":
            why, _, count = value.partition(" ")
            told["skipped"][why] = int(count)
        elif name:
            told[name] = value if name == "state" else float(value) if "." in value else int(value)
    return told


def learned(key: str, state: str, replayed: Mapping[str, Any]) -> dict[str, Any]:
    """The object ``learn``, as a launcher knows it; ``replayed``: as csrc/replay/replay.c tells.
    What is None the service has to say, which records."""
    names = ("files", "directories", "names")
    return {
        "key": key,
        "state": state,
        "paths": sum(replayed.get(name, 0) for name in names),
        "bytes": replayed.get("bytes", 0),
        "read_bytes": replayed.get("waited_bytes", 0),
        "seconds": replayed.get("seconds", 0.0),
        "cpu_seconds": replayed.get("cpu_seconds", 0.0),
        "skipped": {why: n for why, n in replayed.get("skipped", {}).items() if n},
        "used": None,
        "ring_losses": None,
        "recorded": None,
        "orders": None,
    }


def text_of(learn: Mapping[str, Any]) -> bytes:
    """The object ``learn`` of a launcher, for the service; one that is too long is not told."""
    lines = [f"state {learn['state']}"]
    lines += [f"{name} {learn[name]:.3f}" for name in ("seconds", "cpu_seconds")]
    lines += [f"{name} {learn[name]}" for name in _COUNTS]
    lines += [f"{why} {count}" for why, count in learn["skipped"].items()]
    text = "\n".join(lines).encode()
    return text if len(text) < _TEXT_BYTES else b""


def _parsed(text: str) -> dict[str, Any]:
    """What text_of() has made. Raises ValueError."""
    found: dict[str, Any] = {"skipped": {}}
    for line in text.split("\n"):
        name, _, value = line.partition(" ")
        if name == "state":
            found[name] = value
        elif name in ("seconds", "cpu_seconds"):
            found[name] = float(value)
        else:
            (found if name in _COUNTS else found["skipped"])[name] = int(value)
    return found


def merged(texts: Sequence[bytes]) -> dict[str, Any]:
    """What the launchers of a node have told, as far as it is part of ``learn``: sums, the time of
    the longest, and the state of the one that has read most. Raises ValueError."""
    told = [_parsed(text.rstrip(b"\0").decode("ascii")) for text in texts]
    if not told:
        return {}
    skipped: dict[str, int] = {}
    for one in told:
        for why, count in one["skipped"].items():
            skipped[why] = skipped.get(why, 0) + count
    most = max(told, key=lambda one: (one["bytes"], one["paths"], one["state"] != BUSY))
    return {
        "state": most["state"],
        **{name: sum(one[name] for one in told) for name in (*_COUNTS, "cpu_seconds")},
        "seconds": max(one["seconds"] for one in told),
        "skipped": skipped,
    }
