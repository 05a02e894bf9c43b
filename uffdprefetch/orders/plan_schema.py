# SPDX-License-Identifier: Apache-2.0
"""What a plan file calls itself (docs/plans.md), for who writes one without reading any."""

from __future__ import annotations

SCHEMA = "uffdprefetch.plan/1"
