# SPDX-License-Identifier: Apache-2.0
"""`wrap --trace`: the recorder of a job on this node, of which one of the node's launchers starts
one."""

from __future__ import annotations

import os
import time

from uffdprefetch.base import rundir
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import identify
from uffdprefetch.base.messages import say
from uffdprefetch.launch import service
from uffdprefetch.protocol import leftovers
from uffdprefetch.report import output
from uffdprefetch.trace.record.process_identity import TraceLimits
from uffdprefetch.trace.record.program import Spec
from uffdprefetch.trace.record.starter import MAX_EVENTS, MIN_SIZE_BYTES, Recording, output_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uffdprefetch.base.config import Config
    from uffdprefetch.launch.address import Address

#: Interval of looks for the mark of another launcher's recorder, and the longest wait for it.
_POLL_SECONDS = 0.02
RECORDER_TIMEOUT_SECONDS = 10.0


def start(
    config: Config, environ: Mapping[str, str], address: Address | None, argv: Sequence[str]
) -> Recording | None:
    """Start the recorder of this job and node, unless another launcher has.

    Where that cannot be the job runs without it after a line; with --strict raises
    UffdPrefetchError.
    """
    assert config.wrap.trace is not None
    key = address.key if address else ""
    name = output.expand(config.wrap.trace, key, identify(environ).rank, environ, option="--trace")
    mark, mark_fd = None, None
    if address is not None:
        mark = address.socket + leftovers.TRACE
        try:
            mark_fd = leftovers.hold(mark)  # until we end; who was killed holds none
        except OSError as error:
            why = rundir.why_unusable(address.directory, error)
            _say_no_trace(config, UffdPrefetchError(why, EXIT_OURS))
            return None
        if mark_fd is None:
            _wait_for_recorder(mark)
            return None
    spec = Spec(
        output_path(name), config.wrap.force,
        TraceLimits(list(config.files.include), MIN_SIZE_BYTES, MAX_EVENTS), list(argv),
        launcher=os.getpid(), quiet=config.wrap.quiet,
    )  # fmt: skip
    directory = address.directory if address else "/"
    try:
        recording = Recording.start(spec, service.own_environment(environ), directory)
    except UffdPrefetchError as error:
        if mark is not None and mark_fd is not None:
            leftovers.release(mark, mark_fd)
        _say_no_trace(config, error)
        return None
    if mark_fd is not None:
        leftovers.mark(mark_fd)
        recording.keep(mark_fd)
    recording.tell(meta={"wrapped": config.policy != "none"})
    return recording


def _say_no_trace(config: Config, error: UffdPrefetchError) -> None:
    """With --strict it is raised."""
    if config.wrap.strict:
        raise error
    say(f"running the job without a trace: {error.message}")


def _wait_for_recorder(mark: str) -> None:
    """Wait for the recorder of another launcher, so that the job's first events are recorded."""
    deadline = time.monotonic() + RECORDER_TIMEOUT_SECONDS
    try:
        while os.stat(mark).st_size == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except OSError:
        pass
