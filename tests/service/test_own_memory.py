# SPDX-License-Identifier: Apache-2.0
"""What our own processes take of the memory that is the job's (docs/limits.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conftest import wait_until
from harness import MIB, Records, Start, auto, python, rss_bytes, snapshot

pytest_plugins = ("harness_fixtures",)
pytestmark = auto

READER = """
say(digest=Mapping(sys.argv[1]).digest())
hear()
"""
#: Of the service where no order is known, and of the launcher: as docs/limits.md says.
SERVICE_BYTES, LAUNCHER_BYTES = 20 * MIB, 8 * MIB
#: Only a known order needs numpy, only people rich, nobody torch.
DEAR = {"numpy", "torch", "rich", "asyncio", "argparse", "tomllib", "zipfile"}
#: 64 MiB of addresses for what a thread other than the first allocates (malloc/arena.c).
ARENA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ---p 00000000 00:00 0 *$", re.MULTILINE)


def arenas(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text()
    sizes = [int(end, 16) - int(start, 16) for start, end in ARENA.findall(maps)]
    return sum(32 * MIB < size < 64 * MIB for size in sizes)


def loaded_libraries(pid: int) -> set[str]:
    """Packages of whose C something is in memory."""
    return set(re.findall(r"/site-packages/(\w+)/", Path(f"/proc/{pid}/maps").read_text()))


def test_a_service_takes_20_mib_until_an_order_is_known(
    env: dict[str, str], own_records: Records, job: Start
) -> None:
    """With all that it keeps for watchers."""
    reader = job(python(READER, own_records.path))
    assert reader.line() == {"digest": own_records.digest}
    snapshot(env)
    service, launcher = reader.service(), reader.process.pid
    assert rss_bytes(service) <= SERVICE_BYTES
    assert rss_bytes(launcher) <= LAUNCHER_BYTES
    assert not DEAR & (loaded_libraries(service) | loaded_libraries(launcher))
    assert arenas(service) == 0
    reader.tell()
    reader.finish().good()


def test_threads_of_the_pool_that_read_nothing_have_no_memory_for_it(
    env: dict[str, str], own_records: Records, job: Start
) -> None:
    told = """
        first = Mapping(sys.argv[1])
        say(ready=first.address)
        hear()
        say(digest=first.digest())
        hear()
    """
    reader = job(python(told, own_records.path), ("--engine", "pool", "--budget", "64MiB"))
    reader.line()
    launcher = rss_bytes(reader.process.pid)
    assert launcher <= LAUNCHER_BYTES, launcher  # a child of it has looked for the pool
    before = rss_bytes(reader.service())
    reader.tell()
    assert reader.line() == {"digest": own_records.digest}
    wait_until(lambda: rss_bytes(reader.service()) < before + 2 * MIB, "the threads' buffers to go")
    reader.tell()
    reader.finish().good()


def test_no_process_of_ours_loads_what_only_some_runs_need() -> None:
    """The service with what it loads for watchers, and with a pool (numpy apart); the launcher with
    its report."""
    script = """
import sys
from importlib import import_module
for name in sys.argv[2:]:
    import_module(name)
loaded = set(sys.argv[1].split()) & sys.modules.keys()
assert not loaded, loaded
"""
    service = "uffdprefetch.cli.serve", "uffdprefetch.service.live"
    launcher = "uffdprefetch.cli.wrap", "uffdprefetch.launch.launcher"
    for spared, names in (
        (DEAR, service),
        (DEAR - {"numpy"}, (*service, "uffdprefetch.pool.node_pool")),
        (DEAR, (*launcher, "json", "shlex", "uffdprefetch.report.summary")),
    ):
        words = [sys.executable, "-I", "-c", script, " ".join(spared), *names]
        subprocess.run(words, check=True)
