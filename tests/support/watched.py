# SPDX-License-Identifier: Apache-2.0
"""A job to be watched: ``pytest_plugins = ("harness_fixtures", "watched")``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import clean_environment, wait_until
from harness import Job, Records, jobs, python, service_socket, snapshot

from uffdprefetch.view import watch

READER = """
m = Mapping(sys.argv[1]).followed()
say(ready=True)
while (word := hear()) != "end":
    m.forget()
    say(digest=m.digest())
"""


class Watched:
    """A job that reads when it is told to, and its service."""

    def __init__(self, job: Job, records: Records) -> None:
        assert job.line() == {"ready": True}
        self.job, self.records, self.env = job, records, job.env
        self.pid = job.service()
        self.read()
        wait_until(self._placed, "the service to know where the reader is")

    def _placed(self) -> bool:
        return any(rank.position_bytes for rank in snapshot(self.env).ranks)

    def read(self) -> None:
        self.job.tell("read")
        assert self.job.line() == {"digest": self.records.digest}

    def watcher(self) -> watch.WatchClient:
        return watch.WatchClient.open(service_socket(self.env))


@contextlib.contextmanager
def watched(cwd: Path, records: Records, name: str) -> Iterator[Watched]:
    env = {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(cwd / "hub")}
    env.update(UFFDPREFETCH_RUN=name, LANG="C.UTF-8", XDG_CONFIG_HOME=str(cwd))
    env["UFFDPREFETCH_POLICY"] = "auto"
    with jobs(env, cwd) as start:
        yield Watched(start(python(READER, records.path)), records)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, records: Records) -> Iterator[Watched]:
    """A job for all tests of this module that leave it alone."""
    with watched(tmp_path_factory.mktemp("watched"), records, "alpha-1") as one:
        yield one


@pytest.fixture
def own(tmp_path: Path, records: Records) -> Iterator[Watched]:
    """A job for a test that kills it or its service."""
    with watched(tmp_path, records, "beta-2") as one:
        yield one
