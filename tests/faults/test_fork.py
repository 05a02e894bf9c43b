# SPDX-License-Identifier: Apache-2.0
"""Forked processes read right bytes from inherited mappings, and are served again."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    HANG_SECONDS,
    process_gone,
    require,
    uffdprefetch,
    wait_until,
)
from harness import CHECKPOINTS, OPTIONS, Records, Start, both_engines, python

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow


@both_engines
def test_parent_child_and_grandchild_read_right_bytes_and_are_served(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    for generation in range(3):
        pid = os.fork()
        if pid:
            more = faults_again(m) if generation == 0 else taken_up(m)
            digest = m.digest()
            end = os.waitpid(pid, 0)[1]
            say(generation=generation, more=more, digest=digest, agents=len(agents()), status=end)
            break
    else:
        more = taken_up(m)
        digest = m.managed().digest()
        say(generation=3, more=more, digest=digest, agents=len(agents()), status=0)
    os._exit(0)
    """
    work = job(python(code, records.path))
    done = work.finish().good()
    assert sorted(line["generation"] for line in done.lines) == [0, 1, 2, 3]
    for line in done.lines:
        assert line["more"] > 0 and line["digest"] == records.digest, line
        assert (line["agents"], line["status"]) == (1, 0)
    assert done.summary is not None
    (rank,) = done.summary["ranks"]
    assert len(rank["processes"]) == 4  # under the rank of the process that they come from


@both_engines
def test_a_child_of_a_private_mapping_reads_right_bytes(job: Start, records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1], flags=MAP_PRIVATE).managed()
    if os.fork() == 0:
        more = taken_up(m)
        say(more=more, digest=m.digest())
        os._exit(0)
    os.wait()
    say(more=faults_again(m), digest=m.digest())
    """
    done = job(python(code, records.path)).finish().good()
    assert [line["digest"] for line in done.lines] == [records.digest] * 2
    assert all(line["more"] > 0 for line in done.lines)


@both_engines
def test_a_child_that_ends_at_once_or_execs_troubles_nobody(job: Start, records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    for i in range(60):
        pid = os.fork()
        if pid == 0:
            if i % 3 == 0:
                os._exit(7)
            if i % 3 == 1:
                os.execv("/bin/sh", ["sh", "-c", "exit 7"])
            ok = m.digest() == sys.argv[2]
            os._exit(7 if ok else 1)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != 7:
            say(error=f"child {i}: {status}")
    say(digest=m.digest(), more=faults_again(m))
    """
    done = job(python(code, records.path, records.digest)).finish().good()
    assert done.lines[0]["digest"] == records.digest and done.lines[0]["more"] > 0


@both_engines
def test_a_child_that_outlives_its_parent_is_served_on(job: Start, records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    known, tell = os.pipe()
    if os.fork() == 0:
        until(ring, "a ring of its own: else the service may end with the parent")
        os.write(tell, b"x")
        say(child=os.getpid())
        hear()
        say(more=taken_up(m), digest=m.digest(), agents=len(agents()))
        os._exit(0)
    os.read(known, 1)
    say(parent=os.getpid())
    os._exit(0)
    """
    work = job(python(code, records.path))
    said = {**work.line(), **work.line()}
    wait_until(lambda: process_gone(said["parent"]), "the parent's end")
    work.tell()
    line = work.line()
    assert line["more"] > 0 and line["digest"] == records.digest and line["agents"] == 1
    assert work.finish().status == 0


@both_engines
def test_spawned_programs_that_share_memory_until_exec_are_left_alone(
    job: Start, records: Records
) -> None:
    """vfork and posix_spawn run on the parent's memory: no handler of ours may touch it there."""
    code = """
    import subprocess
    m = Mapping(sys.argv[1]).managed()
    for _ in range(20):
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        assert os.waitpid(pid, 0)[1] == 0
        assert subprocess.run(["/bin/echo", "x"], capture_output=True).stdout == b"x\\n"
        out = subprocess.run([sys.executable, "-S", "-c", "print(1)"], capture_output=True)
        assert out.stdout == b"1\\n" and out.stderr == b"", out
    say(digest=m.digest(), more=faults_again(m), agents=len(agents()))
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines[0]["digest"] == records.digest
    assert done.lines[0]["agents"] == 1 and done.lines[0]["more"] > 0


@both_engines
def test_a_fork_storm_from_threads_reads_right_bytes_everywhere(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    wrong = []

    def storm(number):
        for i in range(12):
            own = Mapping(sys.argv[1], length=4 << 20, offset=(number * 4) << 20)
            expected = own.digest()
            pid = os.fork()
            if pid == 0:
                good = own.digest() == expected
                if i % 4 == 0:
                    good = good and m.digest() == sys.argv[2]
                os._exit(0 if good else 1)
            if os.waitpid(pid, 0)[1] or own.digest() != expected:
                wrong.append((number, i))
            own.unmap()

    threads = [threading.Thread(target=storm, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        m.forget()
        t.join()
    say(wrong=wrong, digest=m.digest(), more=faults_again(m), agents=len(agents()))
    """
    done = job(python(code, records.path, records.digest)).finish().good()
    (line,) = done.lines
    assert line["wrong"] == [] and line["digest"] == records.digest
    assert line["more"] > 0 and line["agents"] == 1


@both_engines
def test_workers_of_a_data_loader_are_served_under_their_parents_rank(
    job: Start, records: Records
) -> None:
    """Two epochs of two forked workers each, that take records from an inherited mapping and send
    them through a pipe: write(2) from the mapping, checkpoints included."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    step = 1 << 16

    def worker(number, pipe):
        for at in range(number * step, m.length, 2 * step):
            data = m.view[at : at + step]
            while data:
                data = data[os.write(pipe, data) :]
        taken_up(m)
        os._exit(0)

    for epoch in range(2):
        ends = []
        for number in range(2):
            r, w = os.pipe()
            if os.fork() == 0:
                worker(number, w)
            os.close(w)
            ends.append(open(r, "rb"))
        sha, at = hashlib.sha256(), 0
        while at < m.length:
            sha.update(ends[at // step % 2].read(min(step, m.length - at)))
            at += step
        statuses = [os.wait()[1] for _ in range(2)]
        say(epoch=epoch, digest=sha.hexdigest(), statuses=statuses)
    """
    done = job(python(code, records.path), RANK="3", WORLD_SIZE="4").finish().good()
    for line in done.lines:
        assert line["digest"] == records.digest and line["statuses"] == [0, 0]
    assert done.summary is not None
    (rank,) = done.summary["ranks"]
    assert rank["rank"] == 3 and len(rank["processes"]) == 5


@both_engines
@pytest.mark.parametrize("first", ["fork", "death"])
def test_fork_around_the_services_death_reads_right_bytes(
    job: Start, records: Records, first: str
) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    def child():
        if os.fork() == 0:
            say(child=True)
            hear_from_child()
            say(digest=m.digest(), after=Mapping(sys.argv[1]).digest())
            os._exit(0)
    def hear_from_child():
        if sys.argv[2] == "fork":
            hear()
    if sys.argv[2] == "fork":
        child()
    else:
        say(ready=True)
        hear()
        child()
    os.wait()
    say(digest=m.digest(), after="")
    """
    work = job(python(code, records.path, first))
    work.line()
    work.kill_service()
    work.tell()
    done = work.finish()
    assert done.status == 0
    digests = [line["digest"] for line in done.lines if "digest" in line]
    assert digests == [records.digest] * 2
    assert done.lines[-2]["after"] == records.digest


@both_engines
def test_a_stopped_service_does_not_hold_a_fork_and_its_child_may_remap(
    job: Start, records: Records
) -> None:
    """The child's mapping is not answered for; what the job does with it works all the same."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    say(ready=True)
    hear()
    inherited = os.environ["UFFDPREFETCH_ENGINE"] == "cache"  # the pool is not inherited
    pid = os.fork()
    if pid == 0:
        before = (m.checkpoints() > 0 or not inherited) and m.digest()
        m.grow(2 * m.length)
        say(before=before, digest=m.digest(), checkpoints=m.checkpoints())
        os._exit(0)
    os.waitpid(pid, 0)
    say(parent=m.digest())
    """
    work = job(python(code, records.path))
    work.line()
    with work.stopped_service():
        work.tell()
        child = work.line()
        assert child == {"before": records.digest, "digest": records.digest, "checkpoints": 0}
        assert work.line() == {"parent": records.digest}
    assert work.finish().status == 0


def test_where_a_child_has_unmapped_a_checkpoint_nothing_is_put(
    job: Start, records: Records
) -> None:
    """Past every library, and before the service knows the child: no event tells of it."""
    require(platform.machine() == "x86_64", "the number and the code are of x86-64")
    code = """
    from inside import CHECKPOINTS
    m = Mapping(sys.argv[1]).managed()
    with open("/proc/self/maps") as maps:
        laid = [int(line.split("-")[0], 16) for line in maps if CHECKPOINTS in line]
    ours = [at for at in laid if m.address <= at < m.address + m.length]
    at, resident = ours[len(ours) // 2], ctypes.create_string_buffer(1)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pid = os.fork()
    if pid == 0:
        by_instruction(11, at, PAGE)  # munmap
        libc.mprotect(m.address, PAGE, PROT_NONE)  # takes the whole mapping back
        os._exit(libc.mincore(at, PAGE, resident) == 0)
    say(checkpoints=len(ours), child=os.waitpid(pid, 0)[1])
    """
    done = job(python(code, records.path)).finish().good()
    (line,) = done.lines
    assert line["checkpoints"] > 0 and line["child"] == 0


def test_vfork_from_c_does_not_reach_the_agent(
    env: dict[str, str], tmp_path: Path, records: Records, compiled: Callable[..., str]
) -> None:
    words = [compiled("vfork"), str(records.path)]
    plain = subprocess.run(words, capture_output=True, timeout=HANG_SECONDS)
    done = subprocess.run(
        uffdprefetch("wrap", *OPTIONS, *CHECKPOINTS, "--", *words),
        env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, b"40 right\n")


@both_engines
def test_a_forked_multiprocessing_pool_reads_right_bytes(job: Start, records: Records) -> None:
    code = """
    import multiprocessing

    def read(path):
        import inside
        return inside.Mapping(path).managed().digest()

    if __name__ == "__main__":
        m = Mapping(sys.argv[1]).managed()
        with multiprocessing.get_context("fork").Pool(3) as pool:
            say(kind="fork", digests=sorted(set(pool.map(read, [sys.argv[1]] * 6))))
        say(kind="parent", digests=[m.digest()])
    """
    done = job(python(code, records.path)).finish().good()
    assert [line["digests"] for line in done.lines] == [[records.digest]] * 2
