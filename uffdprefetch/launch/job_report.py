# SPDX-License-Identifier: Apache-2.0
"""What a launcher tells of a job that has ended: the summary, written and shown."""

from __future__ import annotations

import os
import time

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.identity import identify
from uffdprefetch.base.messages import columns, say
from uffdprefetch.base.record import record
from uffdprefetch.launch import oom
from uffdprefetch.launch.address import GROUP_VARIABLE
from uffdprefetch.protocol.node import ServiceGone, SummaryCut
from uffdprefetch.report import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from uffdprefetch.base.config import Config
    from uffdprefetch.launch.address import Address
    from uffdprefetch.launch.service import JobService
    from uffdprefetch.protocol.node import JobRead

SUMMARY_TIMEOUT_SECONDS = 5.0
#: Wait of the last launcher for the service's clean-up: a job manager kills remaining processes
#: when the launcher ends.
TIDY_TIMEOUT_SECONDS = 2.0


@record(frozen=True)
class EndedJob:
    """The job's end. ``status``: as waitpid(2) has it; ``kills_before``: of its beginning;
    ``learn``: what came of the replay of its start, where there was to be one."""

    argv: Sequence[str]
    status: int
    seconds: float
    read: JobRead
    kills_before: oom.Counts | str
    learn: dict[str, Any] | None = None

    def replay(self) -> bytes:
        """What came of the replay, for the service."""
        if self.learn is None:
            return b""
        from uffdprefetch.protocol.replayed import text_of

        return text_of(self.learn)

    def oom(self, service_killed: bool | None) -> dict[str, Any]:
        """Processes that the kernel has killed meanwhile for want of memory."""
        return oom.verdict(self.kills_before, oom.Counts.now(), self.status, service_killed)

    def add_to(self, document: dict[str, Any], config: Config) -> None:
        """What the launcher knows of it: the command, and the replay of its start, of which the
        service tells what became of it."""
        document["job"] = {
            "command": list(self.argv),
            "status": os.waitstatus_to_exitcode(self.status),
            "seconds": round(self.seconds, 3),
            "min_size_bytes": config.files.min_size_bytes,
            "written_bytes": self.read.written,
        }
        if self.learn is not None:
            told = document.get("learn") or {}
            document["learn"] = {**self.learn, **{n: v for n, v in told.items() if v is not None}}


class JobReport:
    """The report of one job on this node. ``only_record``: a recording tells all; no summary."""

    def __init__(
        self, config: Config, environ: Mapping[str, str], node: JobService, ended: EndedJob,
        only_record: bool,
    ) -> None:  # fmt: skip
        self._config = config
        self._environ = environ
        self._node = node
        self._ended = ended
        self._only_record = only_record

    def make(self) -> bool:
        """Have the summary from whoever has it; the last launcher of the node and job writes and
        prints it. Returns whether this is the last."""
        if self._node.end_unused():
            self._tell_what_nobody_saw()
            return True
        return self._ask_the_service()

    def _tell_what_nobody_saw(self) -> None:
        """The job has ended before its service was up."""
        if self._only_record:
            return
        from uffdprefetch.launch import nothing_reported

        started = self._node.started
        document = nothing_reported.summary(
            self._config, self._node.address.key, self._ended.seconds,
            started.cpu_seconds if started is not None else 0.0, self._ended.read.by_calls,
        )  # fmt: skip
        document["oom"] = self._ended.oom(service_killed=False)
        self._write_and_print(document)

    def _ask_the_service(self) -> bool:
        """Returns whether this is the last launcher."""
        waited = not self._node.is_welcome
        try:
            client = self._node.client(job_is_over=True)
            deadline = time.monotonic() + SUMMARY_TIMEOUT_SECONDS
            ended = self._ended
            finished = client.finish(ended.status, ended.read, deadline, ended.replay())
        except SummaryCut as error:
            self._tell_that_it_is_cut(error)
            return True
        except ServiceGone as error:
            self._tell_that_it_died(error)
            return not self._node.lives_on  # whoever came before its socket was gone has it still
        except TimeoutError:
            self._tell_that_it_is_silent()
            return not self._node.lives_on
        if waited:
            say_if_other_options_hold(self._config, self._node)
        client.part()
        if not finished.last:
            return False
        if not self._only_record:
            self._tell(finished.summary)
        client.gone(time.monotonic() + TIDY_TIMEOUT_SECONDS)
        return True

    def _tell(self, summary: dict[str, Any]) -> None:
        """``summary``: the service's, of this node."""
        summary["oom"] = self._ended.oom(service_killed=False)
        document: dict[str, Any] | None = summary
        # the services of `cluster` hand theirs to it
        if self._config.cluster.place is not None and GROUP_VARIABLE not in self._environ:
            from uffdprefetch.launch import cluster

            document = cluster.one_summary(self._config, summary)
        if document is not None:
            self._write_and_print(document)

    def _write_and_print(self, document: dict[str, Any]) -> None:
        self._ended.add_to(document, self._config)
        write_and_print(self._config, self._environ, self._node.address, document)

    def _tell_that_it_died(self, error: ServiceGone) -> None:
        """The service is gone since some time of the run: lines, and a summary with what is known
        without it."""
        from uffdprefetch.report.endings import deaths

        why = f"the service died during the run ({error})"
        if self._node.had_no_room:
            why = "the service ended during the run, to leave its memory to the job"
        document = self._write_without_it(why, died=True)
        for line in deaths(document, self._node.address.see_log):
            say(line)

    def _tell_that_it_is_cut(self, error: SummaryCut) -> None:
        """What the service has told did not fit into the memory that it is handed over in."""
        from uffdprefetch.base.limits import file_limit

        why = file_limit() or str(error)
        say(f"what was gained is not known: {why}")
        self._write_without_it(why)

    def _tell_that_it_is_silent(self) -> None:
        what = "was not up" if self._node.is_starting else "did not answer"
        stood = ", for it stood still (SIGSTOP)" if self._node.let_it_end() else ""
        why = f"the service did not answer within {SUMMARY_TIMEOUT_SECONDS:.0f} s{stood}"
        if not self._node.is_welcome:
            why = f"the service {what} when the job ended, and did not get on{stood}"
        say(f"what was gained is not known: {why}{self._node.address.see_log}")
        self._write_without_it(why, silent=True)

    def _write_without_it(
        self, why: str, *, died: bool = False, silent: bool = False
    ) -> dict[str, Any]:
        """Write the summary of a run of which the service has told nothing."""
        from uffdprefetch.launch import nothing_reported

        document = nothing_reported.summary(
            self._config, self._node.address.key, self._ended.seconds, self._node.cpu_seconds(),
            self._ended.read.by_calls, why, died=died, silent=silent,
        )  # fmt: skip
        document["oom"] = self._ended.oom(self._node.was_killed() if died else False)
        self._ended.add_to(document, self._config)
        if not self._only_record and not identify(self._environ).local_rank:
            write(self._config, self._environ, self._node.address, document)  # one for the node
        return document


def say_if_other_options_hold(config: Config, node: JobService) -> None:
    """The options are those of the launcher that has started the service."""
    if node.client().options not in (0, config.fingerprint()) and not config.wrap.quiet:
        say("the job's service on this node was started with other options: those hold")


#: Names of summaries of which it was said that they cannot be written.
_told: set[str] = set()


def say_if_unwritable(config: Config, environ: Mapping[str, str], address: Address) -> None:
    """While the job can still be stopped. For the one of a node's launchers that has started the
    service. The job may still make the directory."""
    name = _summary_name(config, environ, address)
    why = output.why_not(name)
    if why is not None and config.wrap.output != os.devnull:
        _told.add(name)
        say(f"the summary will not be written: {why}")


def _summary_name(config: Config, environ: Mapping[str, str], address: Address) -> str:
    pattern = config.wrap.output or output.default_pattern(environ)
    return output.summary_name(pattern, address.key, identify(environ).rank, environ)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this is the node of a run that speaks for the others: as many lines as nodes would
    hide the job's own. Theirs are in their files (`uffdprefetch summary` shows all of a run)."""
    from uffdprefetch.cluster.which_node import which_node

    told = which_node(environ)
    return not told.number or not told.nodes or told.nodes == 1


def write(
    config: Config, environ: Mapping[str, str], address: Address, document: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Write a run's summary; its path, if it was written, and a line where that is not the one that
    was asked for."""
    path, name, beside = None, "", None
    try:
        if config.wrap.output != os.devnull:
            name = _summary_name(config, environ, address)
            path = output.write(name, document, config.wrap.force)
            if config.wrap.output is None and os.path.isabs(path):
                output.keep_last(os.path.dirname(path))
            elif path != output.named(name) and output.is_older(
                output.named(name), document["wall_seconds"]
            ):
                beside = f"{output.named(name)} was there: this run's is {path} (-f overwrites)"
    except (OSError, UffdPrefetchError) as error:
        if name not in _told or output.why_not(name) is None:
            say(f"summary not written: {error}")
    return path, beside


def write_and_print(
    config: Config, environ: Mapping[str, str], address: Address, document: dict[str, Any]
) -> None:
    """A run's summary, as the user has asked for it."""
    from uffdprefetch.report import summary

    path, beside = write(config, environ, address, document)
    if not config.wrap.quiet and (config.wrap.verbose or speaks(environ)):
        try:
            lines = summary.lines(document, path, config.wrap.verbose, columns())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lines = [f"the summary cannot be shown ({type(error).__name__}: {error})"]
        for line in [beside, *lines] if beside is not None else lines:
            say(line)
