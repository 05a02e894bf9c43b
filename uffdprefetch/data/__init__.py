# SPDX-License-Identifier: Apache-2.0
"""Data sets for a program to import: ``uffdprefetch.data.Packed`` reads what `uffdprefetch pack`
has packed (docs/pack.md)."""

from .packed import Packed, image

__all__ = ["Packed", "image"]
