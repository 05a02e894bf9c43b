# SPDX-License-Identifier: Apache-2.0
"""Values compressed each by itself, by zstd, with a dictionary that all share."""

from __future__ import annotations

import threading
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, pip_install

from .layout import DamagedError


def library() -> Any:
    """The library zstandard. Raises UffdPrefetchError where it is missing."""
    try:
        import zstandard
    except ImportError:
        what = f"values compressed by zstd need zstandard: {pip_install('zstandard')}"
        raise UffdPrefetchError(what) from None
    return zstandard


class Codec:
    """Compresses and decompresses values, in any thread; raises UffdPrefetchError where the library
    is missing. ``dictionary``: b"": none."""

    def __init__(self, level: int, dictionary: bytes) -> None:
        self.level, self.dictionary = level, dictionary
        self._zstd = library()
        #: The library's objects are for one thread at a time.
        self._own = threading.local()

    def encode(self, value: bytes) -> bytes:
        compressor = getattr(self._own, "compressor", None)
        if compressor is None:
            compressor = self._zstd.ZstdCompressor(
                level=self.level, dict_data=self._dict(), write_checksum=True
            )
            self._own.compressor = compressor
        return bytes(compressor.compress(value))

    def decode(self, value: Any) -> bytes:
        """Raises DamagedError."""
        decompressor = getattr(self._own, "decompressor", None)
        if decompressor is None:
            decompressor = self._zstd.ZstdDecompressor(dict_data=self._dict())
            self._own.decompressor = decompressor
        try:
            return bytes(decompressor.decompress(value))
        except (self._zstd.ZstdError, MemoryError) as error:
            raise DamagedError(f"damaged: {error}") from None

    def _dict(self) -> Any:
        return self._zstd.ZstdCompressionDict(self.dictionary) if self.dictionary else None
