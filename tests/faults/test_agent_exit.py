# SPDX-License-Identifier: Apache-2.0
"""The agent ends at its N-th step, whatever it was about to do: the job does not notice.

UFFDPREFETCH_TEST_AGENT_EXIT ends the thread as a crash would: no farewell, nothing given back, the
checkpoints stay where they are. The kernel closes its userfaultfd and wakes who waits on it.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS
from harness import AGENT_STATES, Records, Start, file_digest, hammered, python

from uffdprefetch import _uffd  # type: ignore[attr-defined]
from uffdprefetch.native import uffd

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: The first steps one by one, then ever further ones: from the first attach to the steady state.
STEPS = (*range(1, 33), *(int(34 * 1.12**n) for n in range(28)))


def exit_at(
    step: int, small: Path, program: str, cwd: Path, only: str = ""
) -> tuple[int, str, str]:
    """(status, SHA-256 of the mapping, state hit) of a reader whose agent ends at ``step``, where
    steps of all states count, or ``only`` those of one."""
    log = cwd / f"exit-{step}"
    log.unlink(missing_ok=True)
    env = hammered(cwd)
    env["UFFDPREFETCH_TEST_AGENT_EXIT"] = str(step)
    env["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"] = str(log)
    if only:
        env["UFFDPREFETCH_TEST_AGENT_EXIT_STATE"] = str(AGENT_STATES.index(only))
    done = subprocess.run(
        [program, str(small), str(log)], env=env, capture_output=True, timeout=HANG_SECONDS
    )
    digits = log.read_text() if log.exists() else ""
    # one digit of the reader's agent; its forked child has an agent, which may get that far too
    state = AGENT_STATES[int(digits[0])] if digits else ""
    return done.returncode, hashlib.sha256(done.stdout).hexdigest(), state


def test_the_job_reads_right_bytes_wherever_its_agent_ends(
    small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    program = compiled("exits")
    digest = file_digest(small)
    stop = hammer(9)
    for step in STEPS:
        status, found, state = exit_at(step, small, program, tmp_path)
        assert (step, status, found) == (step, 0, digest) and state in AGENT_STATES
    stop()


@pytest.mark.parametrize("state", AGENT_STATES)
def test_the_job_reads_right_bytes_in_whichever_state_its_agent_ends(
    state: str, small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    program = compiled("exits")
    digest = file_digest(small)
    stop = hammer(AGENT_STATES.index(state))
    for step in (1, 2, 3, 4, 5, 8, 13):
        hit = exit_at(step, small, program, tmp_path, only=state)
        assert hit == (0, digest, state), step
    stop()


def test_a_touch_that_dies_with_its_thread_is_answered_where_the_mapping_is_given_back_just_then(
    small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    """The kernel wakes nobody whose page is unregistered (MINOR mode)."""
    program = compiled("exits")
    digest = file_digest(small)
    stop = hammer(3, "100", "60")
    for step in (1, 2, 3, 4, 5, 6, 7, 8) * 5:
        assert exit_at(step, small, program, tmp_path, only="resolving")[:2] == (0, digest), step
    stop()


def test_under_the_real_service_too_and_it_forgets_the_process(
    job: Start, records: Records, tmp_path: Path
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    digests, log = set(), os.environ["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"]
    def read_on():
        digests.add(m.digest())
        m.forget() if m.checkpoints() else m.again()
    until(lambda: read_on() or os.path.exists(log), "the exit")
    until(lambda: not agents(), "the agent's end")
    digests.add(m.digest())
    again = Mapping(sys.argv[1])  # nobody is asked any more
    digests.add(again.digest())
    again.unmap()
    if os.fork() == 0:
        digests.add(m.digest())
        os._exit(len(digests) - 1)
    say(digests=sorted(digests), child=os.wait()[1], agents=len(agents()))
    m.unmap()
    say(unmapped=True)
    """
    for step in (1, 2, 7, 19, 60):
        log = tmp_path / f"exit-{step}"
        variables = {
            "UFFDPREFETCH_TEST_AGENT_EXIT": str(step),
            "UFFDPREFETCH_TEST_AGENT_EXIT_ALL": "1",  # the step may be the responder's
            "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(log),
        }
        work = job(python(code, records.path), **variables)
        assert work.line() == {"digests": [records.digest], "child": 0, "agents": 0}
        done = work.finish().good()
        assert done.lines == [{"unmapped": True}]
        assert done.summary is not None and done.summary["rung"] in (1, None)


def test_threads_that_wait_for_a_checkpoint_go_on_when_the_agent_ends(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """Many threads touch many armed pages at once, so that some wait while the agent ends."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    log = os.environ["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"]
    digests = set()
    def read():
        while True:
            ended = os.path.exists(log)
            m.forget()
            digests.add(m.digest())
            if ended:
                break
    threads = [threading.Thread(target=read) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    say(digests=sorted(digests))
    """
    for step in (55, 70, 102):  # 48 of them lay the 16 checkpoints
        log = tmp_path / f"exit-{step}"
        variables = {
            "UFFDPREFETCH_TEST_AGENT_EXIT": str(step),
            "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(log),
        }
        done = job(python(code, records.path), **variables).finish().good()
        assert done.lines == [{"digests": [records.digest]}]
        assert log.read_text()[0] in "01234"


@pytest.mark.parametrize("state", ["laying", "detaching"])
def test_a_job_that_gives_up_rights_keeps_no_thread_of_ours_where_the_agent_has_died(
    job: Start, records: Records, tmp_path: Path, state: str
) -> None:
    """Before, or just as it was asked to end: nobody ends the responder but itself."""
    code = """
    m = Mapping(sys.argv[1])
    ours = lambda: len(os.listdir("/proc/self/task")) - 1
    if sys.argv[2] == "laying":
        until(lambda: not agents() or m.again(), "the agent's end")
    else:
        m.managed()
    before, agent = ours(), agents() != []  # the responder bears the agent's name at first
    status = libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    say(before=before, agent=agent, status=status, after=ours(), digest=m.digest())
    """
    log = tmp_path / "exit"
    variables = {
        "UFFDPREFETCH_TEST_AGENT_EXIT": "1",
        "UFFDPREFETCH_TEST_AGENT_EXIT_STATE": str(AGENT_STATES.index(state)),
        "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(log),
    }
    done = job(python(code, records.path, state), **variables).finish().good()
    alive = state == "detaching"
    assert done.lines == [
        {"before": 1 + alive, "agent": alive, "status": 0, "after": 0, "digest": records.digest}
    ]


def test_no_thread_of_ours_stays_where_the_agent_dies_of_the_job_s_giving_up_rights(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """It ends when it comes back from being asked to, at one of its first idle moments."""
    code = """
    m = Mapping(sys.argv[1])
    until(lambda: m.checkpoints() or not agents() or m.again(), "checkpoints, or the agent's end")
    status = libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    say(status=status, after=len(os.listdir("/proc/self/task")) - 1, digest=m.digest())
    """
    for step in range(1, 9):
        log = tmp_path / f"exit-{step}"
        variables = {
            "UFFDPREFETCH_TEST_AGENT_EXIT": str(step),
            "UFFDPREFETCH_TEST_AGENT_EXIT_STATE": str(AGENT_STATES.index("idle")),
            "UFFDPREFETCH_TEST_AGENT_EXIT_LOG": str(log),
        }
        done = job(python(code, records.path), **variables).finish().good()
        assert done.lines == [{"status": 0, "after": 0, "digest": records.digest}], step


def test_the_states_have_the_numbers_that_the_ring_shows() -> None:
    states = _uffd.ffi.typeof("enum up_agent_state").elements
    names = [f"UP_STATE_{name.upper()}" for name in AGENT_STATES]
    assert [states[i] for i in range(len(states))] == names
    assert uffd.RingCounts._fields[-1] == "state"
