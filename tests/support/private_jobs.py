# SPDX-License-Identifier: Apache-2.0
"""Jobs with a private mapping, some of whose pages were written, and with an agent that is there,
dead or silent when they change it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from conftest import PATIENCE_VARIABLE, require
from harness import Start, python

POOL = ("--engine", "pool", "--budget", "64MiB")

#: What every job here begins with: a private mapping, some of whose pages were written, and a model
#: of what each byte must be. ``wrong`` is the pages whose bytes are not the model's.
BEGINNING = """
path = sys.argv[1]
log = os.environ.get("UFFDPREFETCH_TEST_AGENT_EXIT_LOG", "")

with open(path, "rb") as file:
    model = bytearray(file.read())

def written(m, write):
    for page in (0, 5, 6, 7, 1500, (m.length - 1) // PAGE):
        data = b"written %d" % page
        write(page * PAGE, data)
        model[page * PAGE : page * PAGE + len(data)] = data

def wrong(m, start=0, end=None):
    end = end or m.length
    found = []
    for at in range(start, end, PAGE):
        piece = slice(at, min(at + PAGE, end))
        if m.view[piece] != model[piece]:
            found.append(at // PAGE)
    return found
"""
#: The pool serves it, and the pages were written past us.
WRITTEN = (
    BEGINNING
    + """
m = Mapping(path, flags=MAP_PRIVATE)
pooled = until(lambda: m.pooled() or m.again(), "the pool")
written(m, m.write_past_us)
"""
)
#: The job may write it.
WRITABLE = (
    BEGINNING
    + """
m = Mapping(path, flags=MAP_PRIVATE, prot=PROT_READ | PROT_WRITE)
pooled = m.pooled()
def write(start, data):
    m.view[start : start + len(data)] = data
written(m, write)
"""
)
CACHE = ("--engine", "cache")
#: A child has what its parent has, and what it writes is its own.
FORKS = """
if os.fork() == 0:
    say(wrong=wrong(m, start))
    rest = m.address + start, m.length - start  # what is before it has been taken away
    checked(libc.mprotect(*rest, PROT_READ | PROT_WRITE), "mprotect")
    for page in range(start // PAGE, m.length // PAGE, 3):
        m.view[page * PAGE + 99] = model[page * PAGE + 99] = 9
    say(wrong=wrong(m, start))
    os._exit(0)
os.wait()
say(wrong=wrong(m, start))
"""

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


@contextlib.contextmanager
def held(tid: int) -> Iterator[None]:
    """One thread of another process stands still, held by a tracer."""
    ptrace_scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = int(ptrace_scope.read_text()) if ptrace_scope.exists() else 0
    require(scope < 2 or (scope < 3 and os.geteuid() == 0), "nobody may trace here")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(PTRACE_SEIZE, tid, None, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.ptrace(PTRACE_INTERRUPT, tid, None, None) == 0
    assert os.waitpid(tid, WALL)[0] == tid
    try:
        yield
    finally:
        if libc.ptrace(PTRACE_DETACH, tid, None, None):
            os.waitpid(tid, WALL)  # its process has ended, which nobody is told before we have been


#: How the agent has gone before the job does anything: it says ``gone`` then.
GONE = {
    "dead": """
    until(lambda: Mapping(path, length=4 << 20).unmap() or os.path.exists(log), "the exit")
    until(lambda: not agents(), "the agent's end")
    say(pooled=pooled, agents=agents())
    """,
    "silent": """
    say(pooled=pooled, agents=agents())
    """,
}
AGENTS = ("there", *GONE)


def dies_at(tmp_path: Path, step: int, **more: str) -> dict[str, str]:
    """The variables by which the agent ends at a step of its own."""
    return {
        "UFFDPREFETCH_TEST_AGENT_EXIT": str(step),
        "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(tmp_path / f"exit-{step}"),
        **more,
    }


def said(
    job: Start, env: dict[str, str], tmp_path: Path, agent: str, path: Path, code: str,
    begin: str = WRITTEN, options: tuple[str, ...] = POOL,
) -> list[dict[str, object]]:  # fmt: skip
    """What a job says that has such a mapping, loses its agent, or does not, and runs ``code``."""
    gone = GONE["dead" if agent == "dead" else "silent"]
    text = begin + "\n".join(map(textwrap.dedent, (gone, "hear()", code, "say(done=True)")))
    variables = {}
    if agent == "dead":
        variables = dies_at(tmp_path, 60)
    if agent == "silent":
        del env[PATIENCE_VARIABLE]  # as users have it: 50 ms
    work = job(python(text, path), options=options, **variables)
    first = work.line()
    assert first["pooled"] == (begin == WRITTEN) and len(first["agents"]) == (agent != "dead")
    with contextlib.ExitStack() as stack:
        if agent == "silent":
            stack.enter_context(held(first["agents"][0]))
        work.tell()
        lines = [work.line()]
        while "done" not in lines[-1]:
            lines.append(work.line())
    work.finish().good()
    return lines[:-1]
