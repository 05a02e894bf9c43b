# SPDX-License-Identifier: Apache-2.0
"""Run by Python at its start: `uffdprefetch wrap` puts this directory on PYTHONPATH.

When one of _TARGETS is imported the package around this file is loaded and its hook installed
there. Nothing else changes: this directory is removed from sys.path, and the sitecustomize that it
shadows is run.

The syntax is valid from Python 2.7 on, since any may be started inside a job.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_TARGETS = ["torch.utils.data.dataloader", "datasets.iterable_dataset"]
_PACKAGE = "_uffdprefetch_job"


def _wanted():  # type: ignore[no-untyped-def]
    # job/channel.py's available(), without loading it.
    socket = os.environ.get("UFFDPREFETCH_SOCKET")
    return (
        sys.version_info >= (3, 8)
        and os.environ.get("UFFDPREFETCH_TORCH") != "off"
        and socket is not None
        and os.path.isdir(socket.replace("%h", os.uname()[1]) + ".plan")
        and not any(name in sys.modules for name in _TARGETS)
    )


class _Finder:
    """Finds nothing itself: delegates, and wraps the loaders of the targets."""

    def __init__(self):  # type: ignore[no-untyped-def]
        self._left = list(_TARGETS)

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self._left:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                try:
                    self._watch(name, spec.loader)
                except Exception:
                    pass  # an unusual loader: the job goes on without the hook
                return spec
        return None

    def _watch(self, name, loader):  # type: ignore[no-untyped-def]
        execute = loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            if module.__name__ != name:  # a loader shared by several modules
                return execute(module)
            loader.__dict__.pop("exec_module", None)
            execute(module)
            if name in self._left:
                self._left.remove(name)
            if not self._left and self in sys.meta_path:
                sys.meta_path.remove(self)
            _install(module)

        # On the instance, once: module.__loader__ stays the original object.
        loader.exec_module = exec_module


def _install(module):  # type: ignore[no-untyped-def]
    try:
        import importlib
        import importlib.util

        if _PACKAGE not in sys.modules:
            home = os.path.dirname(_HERE)
            spec = importlib.util.spec_from_file_location(
                _PACKAGE, os.path.join(home, "__init__.py"), submodule_search_locations=[home]
            )
            assert spec is not None and spec.loader is not None
            package = importlib.util.module_from_spec(spec)
            sys.modules[_PACKAGE] = package
            spec.loader.exec_module(package)
        importlib.import_module(_PACKAGE + ".hook").install(module)
    except Exception as error:
        if os.environ.get("UFFDPREFETCH_TORCH") == "debug":
            sys.stderr.write("uffdprefetch: torch: no hook: %r\n" % (error,))  # noqa: UP031


def _chain():  # type: ignore[no-untyped-def]
    """Run the sitecustomize that we shadow. Its errors propagate to Python's site."""
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # there is none: ours stays imported


if __name__ == "sitecustomize":
    try:
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
        if _wanted():
            sys.meta_path.insert(0, _Finder())
    except Exception:
        pass
    _chain()
