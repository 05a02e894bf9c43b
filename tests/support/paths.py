# SPDX-License-Identifier: Apache-2.0
"""Where things lie in the source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
#: On the path of every test, and of the jobs that tests start.
SUPPORT = TESTS / "support"
PROGRAMS = TESTS / "programs"
JOBS = TESTS / "jobs"
BENCH = ROOT / "bench"
