# SPDX-License-Identifier: Apache-2.0
"""The environment of the job: what makes its programs load the preload object, and what that and
nested wraps read."""

from __future__ import annotations

import os

from uffdprefetch.base.config import LOCKS_VARIABLE
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.options import as_variables
from uffdprefetch.launch import service
from uffdprefetch.native.preload import preload_object
from uffdprefetch.protocol import start_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from uffdprefetch.base.config import Config
    from uffdprefetch.launch.address import Address

#: Without it AddressSanitizer's run-time aborts when another library is preloaded before it.
ASAN_NO_ORDER_CHECK = "verify_asan_link_order=0"
#: Directory of the sitecustomize.py that hooks PyTorch (docs/pytorch.md).
SITE = os.path.join(service.PACKAGE, "job", "site")
#: Overrides the LD_PRELOAD list: a sanitizer's run-time and a build with it (`make asan`).
TEST_PRELOAD_VARIABLE = "UFFDPREFETCH_TEST_PRELOAD"


def preload_path(config: Config, environ: Mapping[str, str], directory: str) -> str | None:
    """What is preloaded into the job, as LD_PRELOAD can name it; None: nothing is.
    ``directory``: for a link to it."""
    if config.engine == "off" and not config.wrap.ownlock and config.learn.name is None:
        return None
    return environ.get(TEST_PRELOAD_VARIABLE) or preloadable(preload_object(), directory)


def preloadable(path: str, directory: str) -> str:
    """``path``, or a link to it in ``directory``: LD_PRELOAD cannot quote ' ' and ':'."""
    if not any(separator in path for separator in " :"):
        return path
    link = os.path.join(directory, f"preload-{os.stat(path).st_ino:x}.so")
    if any(separator in link for separator in " :"):
        raise UffdPrefetchError(
            f"LD_PRELOAD cannot name {path}: set UFFDPREFETCH_RUNDIR to a path without ' ' and ':'",
            EXIT_OURS,
        )
    temporary = f"{link}.{os.getpid()}"
    os.symlink(path, temporary)
    os.replace(temporary, link)  # ranks do this at the same time
    return link


def without_order_check(old: str | None) -> str:
    """ASAN_OPTIONS with which a program built with AddressSanitizer starts although its run-time is
    not the first library; the preload object is inactive in it. The user's options come later and
    win."""
    entries = [entry for entry in (old or "").split(":") if entry]
    return ":".join(dict.fromkeys([ASAN_NO_ORDER_CHECK, *entries]))


def prepend_preload(old: str | None, path: str) -> str:
    """LD_PRELOAD with ``path`` first and once; other entries keep their order."""
    entries = [entry for entry in (old or "").replace(" ", ":").split(":") if entry]
    return ":".join([path, *(entry for entry in entries if entry != path)])


def preloading(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """The variables that make the job's programs load ``path``."""
    return {
        "LD_PRELOAD": prepend_preload(environ.get("LD_PRELOAD"), path),
        "ASAN_OPTIONS": without_order_check(environ.get("ASAN_OPTIONS")),
    }


def job_environment(
    environ: Mapping[str, str], config: Config, address: Address, preload: str | None
) -> dict[str, str]:
    """The job's environment: ``environ`` and the variables of the preload object and nested
    wraps."""
    environment = {**environ, **as_variables(config)}
    environment["UFFDPREFETCH_RUN"] = address.key
    environment["UFFDPREFETCH_RUNDIR"] = address.directory
    environment["UFFDPREFETCH_SOCKET"] = address.socket
    environment["UFFDPREFETCH_MIN_SIZE"] = str(config.files.min_size_bytes)
    environment["UFFDPREFETCH_LISTEN"] = str(config.spacing_bytes)
    if config.learn.name is not None:  # what a nested wrap runs is a part of this start
        environment["UFFDPREFETCH_LEARN"] = "off"
    if config.engine == "pool" or "UFFDPREFETCH_ENGINE" in environment:
        environment["UFFDPREFETCH_ENGINE"] = config.engine  # the one in use, not the one asked for
    environment.pop("UFFDPREFETCH_KEEP_ADVICE", None)
    if config.policy == "none":
        # Only observing: MAP_POPULATE is the kernel's affair.
        environment["UFFDPREFETCH_KEEP_ADVICE"] = "1"
    if preload is not None:
        environment.update(preloading(environ, preload))
    if config.orders.torch != "off" and config.policy != "none":
        before = [entry for entry in [environ.get("PYTHONPATH", "")] if entry]
        environment["PYTHONPATH"] = os.pathsep.join([SITE, *before])
    if not config.wrap.ownlock:
        environment.pop(LOCKS_VARIABLE, None)
    if config.learn.name is not None:
        environment[start_log.VARIABLE] = address.socket + start_log.SUFFIX
    if config.engine == "off" and preload is not None:
        # the preload object only serves --ownlock, and --learn
        del environment["UFFDPREFETCH_SOCKET"]
    return environment
