# SPDX-License-Identifier: Apache-2.0
"""The core decides what it decided: every tape, with three orders of sets and dicts of strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.net.drawn import SCENARIOS

#: Looks that only the replay makes: when they are due hangs on what quiet ones have cost, which are
#: on no tape.
UNANSWERED_MAX = 16
ROOT = Path(__file__).resolve().parents[2]
#: Decisions that each tape is for: what it must hold, or it has been made in vain.
HELD = {
    "demo-fixed": {"want", "read"},
    "demo-off": {"tell"},
    "demo-on": {"want", "read", "tell"},
    "demo-warm": {"tell"},
    "pool": {"victims", "fill", "budget"},
    "pool-hook": {"victims", "fill", "ask"},
    "random": {"want", "read"},
    "shuffled-hook": {"ask", "want"},
    "shuffled-plan": {"ask", "want"},
    "skipping-4": {"want", "read"},
    "stride": {"ask", "want"},
    "stride-auto": {"want", "read"},
}


def played(seed: int, *words: str) -> dict[str, dict[str, object]]:
    """What tests.net.replay says of each tape."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.net.replay", *words], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {str(one["name"]): one for one in found}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_decision_is_what_it_was(seed: int) -> None:
    found = played(seed)
    assert found.keys() == HELD.keys()
    for name, one in found.items():
        assert one["differs"] is None, (name, one["differs"])
        assert one["unanswered"] <= UNANSWERED_MAX, name
        kinds = one["kinds"]
        assert isinstance(kinds, dict) and HELD[name] <= kinds.keys(), (name, kinds)


def test_a_decision_that_differs_is_found() -> None:
    code = (
        "from tests.net import mutate; from tests.net.replay import compare, replay\n"
        "with mutate.mutated('predict.storage', 'SHY', 2):\n"
        "    world = replay('random')\n"
        "print(compare('random', world) is not None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_readers_are_followed_as_they_were(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.net.drawn"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS), done.stdout
    assert all(line.endswith("as they were") for line in lines), done.stdout


def test_the_recorder_can_be_put_into_a_service(tmp_path: Path) -> None:
    """Else a tape cannot be made anew when it is needed."""
    code = "import sys; from tests.net import recorder; recorder.install(sys.argv[1])"
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", code, str(tmp_path / "tape")]
    subprocess.run(words, cwd=root, check=True, timeout=60)
    assert list(tmp_path.glob("tape.*.live"))
