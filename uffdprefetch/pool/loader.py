# SPDX-License-Identifier: Apache-2.0
"""Loads a module that brings numpy, once something needs it: a service is up sooner, and smaller,
without it, and many jobs end before."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable


class Loader:
    """Of one module."""

    def __init__(self, module: str, tell: Callable[[str], None]) -> None:
        """``tell``: is told, once, why it cannot be loaded."""
        self._module, self._tell = module, tell
        #: Whether it is loaded by a thread. If not, by whoever uses it first.
        self.aside = False
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def has_loaded(self) -> bool:
        """Whether it can be used without a wait. From the first call on it is loaded; never, where
        it cannot be: what a failed import leaves behind is no module to go on with."""
        if not self.aside:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._error = str(error)
        if self._thread.is_alive():
            return False
        if self._error:
            self._tell(self._error)
            self._error = ""
        return self._error is None

    def _load(self) -> None:
        try:
            importlib.import_module(self._module)
        except BaseException as error:  # descriptors or memory are short, or numpy is broken
            self._error = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """The interpreter may end."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
