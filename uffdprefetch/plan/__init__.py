# SPDX-License-Identifier: Apache-2.0
"""For code that knows its order: :func:`announce` (docs/plans.md)."""

from uffdprefetch.job.announce import Announcement, announce

__all__ = ["Announcement", "announce"]
