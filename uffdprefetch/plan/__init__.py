# SPDX-License-Identifier: Apache-2.0
"""What to read next and where to listen. Pure: streams and limits in, extents and pages out.

For code that knows its order: :func:`announce`.
"""

from uffdprefetch.plan.saying import Announcement, announce

__all__ = ["Announcement", "announce"]
