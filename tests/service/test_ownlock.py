# SPDX-License-Identifier: Apache-2.0
"""`wrap --ownlock`: a rank reads an LMDB with a lock file of its own; nobody writes with one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from conftest import HANG_SECONDS, process_state, require, uffdprefetch, wait_until
from harness import Job, Start
from nobody import Nobody

from uffdprefetch import ownlock
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.rundir import runtime_directory, socket_path
from uffdprefetch.native.preload import preload_object
from uffdprefetch.ownlock import OwnLocks

pytest_plugins = ("harness_fixtures",)

OWN = ("--ownlock",)
#: What a job says of itself: a digest of all records, and the lock files that it has mapped.
COMMON = """
import hashlib, json, os, sys
import lmdb
def say(**what):
    print(json.dumps(what), flush=True)
def hear():
    return sys.stdin.readline().strip()
def locks():
    lines = open("/proc/self/maps").read().splitlines()
    names = {line.split(None, 5)[5] for line in lines if line.count(" ") > 5 and "/" in line}
    return sorted(n for n in names if n.endswith(("lock.mdb", "-lock")) or ".rank" in n)
def digest(env):
    with env.begin() as txn:
        return hashlib.sha256(b"".join(k + v for k, v in txn.cursor())).hexdigest()
"""
#: argv: a database and options as key=0|1.
READER = """
options = {k: v == "1" for k, v in (word.split("=") for word in sys.argv[2:])}
env = lmdb.open(sys.argv[1], **{"readonly": True, **options})
say(digest=digest(env), locks=locks(), pid=os.getpid())
hear()
env.close()
"""


def job_of(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", COMMON + code, *map(str, words)]


def make(path: Path, version: int = 0, **options: Any) -> str:
    """A database of 50 records without its lock file; the digest of its records."""
    if version:
        options["lib_version"] = version
    env = lmdb.open(str(path), map_size=1 << 20, **options)
    digest = hashlib.sha256()
    with env.begin(write=True) as txn:
        for number in range(50):
            key, value = b"%04d" % number, b"%d" % number * (100 * number)
            txn.put(key, value)
            digest.update(key + value)
    env.close()
    os.unlink(f"{path}-lock" if options.get("subdir") is False else path / "lock.mdb")
    return digest.hexdigest()


def state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Every path below, its modification time and its size."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]


def own_name(data: Path, rank: str) -> str:
    status = data.stat()
    return f"{status.st_dev:x}-{status.st_ino:x}.rank{rank}"


def own_locks(job: Job) -> list[Path]:
    """The lock files in the runtime directory of the job."""
    return sorted(Path(job.env["UFFDPREFETCH_RUNDIR"]).glob("*.locks/*.rank*"))


def gone(job: Job) -> bool:
    return not list(Path(job.env["UFFDPREFETCH_RUNDIR"]).glob("*.locks"))


# ---- readers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
def test_each_of_four_ranks_has_its_own_lock_file_and_the_folder_stays_as_it_was(
    job: Start, tmp_path: Path, version: int
) -> None:
    folder = tmp_path / "db"
    digest = make(folder, version)
    before = state_of(folder)
    ranks = [job(job_of(READER, folder), OWN, RANK=str(rank)) for rank in range(4)]
    said = [rank.line() for rank in ranks]
    assert [line["digest"] for line in said] == [digest] * 4
    for rank, line in enumerate(said):
        assert [os.path.basename(lock) for lock in line["locks"]] == [
            own_name(folder / "data.mdb", str(rank))
        ]
    assert {os.path.dirname(line["locks"][0]) for line in said} == {
        str(own_locks(ranks[0])[0].parent)
    }
    assert own_locks(ranks[0])[0].parent.stat().st_mode & 0o777 == 0o700
    assert state_of(folder) == before
    for number, rank in enumerate(ranks):
        assert rank.finish().status == 0
        assert gone(rank) == (number == 3), "the last launcher removes them"
    assert state_of(folder) == before


def test_without_the_option_the_lock_file_is_the_data_sets(job: Start, tmp_path: Path) -> None:
    digest = make(tmp_path / "db")
    code = "say(variables=sorted(v for v in os.environ if 'LOCK' in v))" + READER
    ranks = [job(job_of(code, tmp_path / "db"), RANK=str(rank)) for rank in range(2)]
    for rank in ranks:
        assert not rank.line()["variables"]
        line = rank.line()
        assert line["locks"] == [str(tmp_path / "db" / "lock.mdb")]
        assert line["digest"] == digest
        assert gone(rank)


def test_a_database_without_a_folder_of_its_own(job: Start, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    digest = make(folder / "records", subdir=False)
    before = state_of(folder)
    reader = job(job_of(READER, folder / "records", "subdir=0"), OWN, RANK="2")
    line = reader.line()
    assert line["digest"] == digest
    assert [os.path.basename(lock) for lock in line["locks"]] == [own_name(folder / "records", "2")]
    assert state_of(folder) == before


def test_forked_workers_share_the_lock_file_of_their_rank(job: Start, tmp_path: Path) -> None:
    """As a DataLoader's: each opens the environment itself."""
    digest = make(tmp_path / "db")
    code = """
    said = []
    for worker in range(3):
        r, w = os.pipe()
        if os.fork() == 0:
            env = lmdb.open(sys.argv[1], readonly=True)
            os.write(w, json.dumps([digest(env), locks()]).encode())
            hear()
            os._exit(0)
        said.append(json.loads(os.read(r, 4096)))
    env = lmdb.open(sys.argv[1], readonly=True)
    say(said=[*said, [digest(env), locks()]])
    """
    line = job(job_of(textwrap.dedent(code), tmp_path / "db"), OWN, RANK="1").line()
    assert [d for d, _ in line["said"]] == [digest] * 4
    assert {os.path.basename(lock) for _, locks in line["said"] for lock in locks} == {
        own_name(tmp_path / "db" / "data.mdb", "1")
    }


def test_a_program_in_c_and_a_job_without_ranks(env: dict[str, str], tmp_path: Path) -> None:
    """Debian's mdb_stat: liblmdb is part of the program, and there is no rank."""
    program = shutil.which("mdb_stat")
    require(program, "mdb_stat is missing: install lmdb-utils")
    make(tmp_path / "db")
    before = state_of(tmp_path / "db")
    words = ["sh", "-c", f'"{program}" db && ls "$UFFDPREFETCH_LOCKDIR"']
    done = subprocess.run(
        uffdprefetch("wrap", "-q", "-f", *OWN, "--", *words),
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    assert "Entries: 50" in done.stdout
    assert own_name(tmp_path / "db" / "data.mdb", "none") in done.stdout.split()
    assert state_of(tmp_path / "db") == before


def test_an_unprivileged_reader_needs_no_right_to_write_the_folder(env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as name:
        nobody = Nobody(Path(name))
        shutil.copytree(Path(lmdb.__file__).parent, nobody.directory / "lmdb")
        folder = nobody.directory / "db"
        digest = make(folder)
        folder.chmod(0o555)
        (folder / "data.mdb").chmod(0o444)
        before = state_of(folder)
        code = f"{COMMON}\nenv = lmdb.open({str(folder)!r}, readonly=True)\nsay(digest=digest(env))"

        def run(*options: str) -> subprocess.CompletedProcess[str]:
            ours = nobody.wrap(nobody.work / "run.out", "-q", *options)
            return subprocess.run(
                [*ours, nobody.python, "-c", code], env=nobody.environment(env),
                cwd=nobody.work, capture_output=True, text=True, timeout=HANG_SECONDS,
            )  # fmt: skip

        plain, own = run(), run(*OWN)
        assert plain.returncode == 1
        assert "Permission denied" in plain.stderr
        assert own.returncode == 0, own.stderr
        assert json.loads(own.stdout) == {"digest": digest}
        assert state_of(folder) == before


# ---- writers ------------------------------------------------------------------------------------

WRITER = """
data = open(os.path.join(sys.argv[1], "data.mdb"), "rb")  # stays open, as a careless job's does
env = lmdb.open(sys.argv[1])
say(locks=locks(), pid=os.getpid())
hear()
say(trying=True)
with env.begin(write=True) as txn:
    count = int(txn.get(b"count", b"0"))
    say(count=count)
    hear()
    txn.put(b"count", b"%d" % (count + 1))
"""


def waits_for_a_mutex(job: Job, pid: int) -> bool:
    """futex(2): 202 on x86-64, 98 on AArch64; or it has gone on."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return process_state(pid) == "S" and words[0] in ("202", "98")


def test_two_writers_exclude_each_other_with_the_data_sets_own_lock_file(
    job: Start, tmp_path: Path
) -> None:
    make(tmp_path / "db")
    writers = [job(job_of(WRITER, tmp_path / "db"), OWN, RANK=str(rank)) for rank in range(2)]
    said = [writer.line() for writer in writers]
    assert [line["locks"] for line in said] == [[str(tmp_path / "db" / "lock.mdb")]] * 2
    first, second = writers
    first.tell()
    assert first.line()["trying"] and first.line() == {"count": 0}
    second.tell()
    assert second.line()["trying"]
    wait_until(lambda: waits_for_a_mutex(second, said[1]["pid"]), "the second writer to wait")
    first.tell()
    assert second.line() == {"count": 1}
    assert not own_locks(first)


def test_a_writer_after_a_reader_in_one_process_has_the_real_lock_file(
    job: Start, tmp_path: Path
) -> None:
    digest = make(tmp_path / "db")
    code = """
for locked in (True, False):
    env = lmdb.open(sys.argv[1], readonly=True, lock=locked)
    reader = digest(env), [os.path.basename(name) for name in locks()]
    env.close()
    env = lmdb.open(sys.argv[1])
    say(reader=reader, writer=locks())
    env.close()
"""
    work = job(job_of(code, tmp_path / "db"), OWN, RANK="0")
    real = str(tmp_path / "db" / "lock.mdb")
    own = own_name(tmp_path / "db" / "data.mdb", "0")
    assert work.line() == {"reader": [digest, [own]], "writer": [real]}
    assert work.line() == {"reader": [digest, []], "writer": [real]}


# ---- what counts as a read-only environment -----------------------------------------------------

#: The cases of tests/programs/lock_order.c that are one.
READERS = {"reader", "reader beside another thread", "reader that forked", "reader once",
           "reader that stays"}  # fmt: skip
NO_LOCK_AT_ALL = {"exclusive": "File exists"}


@pytest.fixture
def order(compiled: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Run lock_order, its lock files going to a directory: case -> path, or error."""
    folder = tmp_path / "db"
    folder.mkdir()
    for name in ("data.mdb", "other.mdb", "named"):
        (folder / name).write_bytes(bytes(8192))
    (folder / "cdata.mdb").hardlink_to(folder / "data.mdb")  # but clock.mdb is no lock file

    def run(directory: Path | str, *before: str) -> dict[str, str]:
        variables = {"LD_PRELOAD": preload_object(), ownlock.VARIABLE: str(directory)}
        words = ["env", "RANK=7", *(f"{k}={v}" for k, v in variables.items())]
        done = subprocess.run(
            [*before, *words, compiled("lock_order"), str(folder)],
            capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
        )  # fmt: skip
        return dict(line.split("\t") for line in done.stdout.splitlines())

    return run


def test_only_the_order_of_a_read_only_environment_gets_another_lock_file(
    order: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    directory, folder = tmp_path / "locks", tmp_path / "db"
    directory.mkdir()
    found = order(directory)
    own = str(directory / own_name(folder / "data.mdb", "7"))
    expected = {name: str(folder / "lock.mdb") for name in found}
    expected |= {name: own for name in READERS}
    expected |= {"reader of a file": str(directory / own_name(folder / "named", "7"))}
    expected |= {**NO_LOCK_AT_ALL, "another name": str(folder / "clock.mdb")}
    assert found == expected
    assert len(found) == 21
    # liblmdb takes a length of 0 for a new one; the blocks are there, else a full disk would
    # show as a SIGBUS
    assert os.stat(own).st_size == 0
    assert os.stat(own).st_blocks * 512 >= 128 << 10
    assert os.stat(own).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("directory", ["", "relative", "/nowhere/at/all", "/" + "x" * 5000])
def test_without_a_directory_to_use_the_lock_files_are_the_real_ones(
    order: Callable[..., dict[str, str]], tmp_path: Path, directory: str
) -> None:
    (tmp_path / "relative").mkdir()
    found = order(directory)
    assert {found[name] for name in READERS} == {str(tmp_path / "db" / "lock.mdb")}
    assert found["reader of a file"] == str(tmp_path / "db" / "named-lock")


def test_on_a_full_file_system_the_lock_files_are_the_real_ones(
    order: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """A lock file is mapped and written: without room that would be a SIGBUS."""
    require(os.geteuid() == 0 and shutil.which("unshare"), "only root can mount a small tmpfs")
    directory = tmp_path / "locks"
    directory.mkdir()
    mount = f'mount -t tmpfs -o size=64k none "{directory}" && exec "$@"'
    found = order(directory, "unshare", "-m", "sh", "-c", mount, "sh")
    assert {found[name] for name in READERS} == {str(tmp_path / "db" / "lock.mdb")}


# ---- the launcher -------------------------------------------------------------------------------


@pytest.mark.parametrize(("variables", "own"), [({}, True), ({"UFFDPREFETCH_OWNLOCK": "0"}, False)])
def test_a_nested_wrap_keeps_to_the_choice(
    job: Start, tmp_path: Path, variables: dict[str, str], own: bool
) -> None:
    make(tmp_path / "db")
    inner = ["env", *(f"{k}={v}" for k, v in variables.items()),
             *uffdprefetch("wrap", "-q", "-f", "-o", "inner", "--")]  # fmt: skip
    work = job([*inner, *job_of(READER, tmp_path / "db")], OWN, RANK="0")
    assert bool(own_locks(work)) is False
    line = work.line()
    assert (".rank0" in line["locks"][0]) is own
    assert work.finish().status == 0
    assert gone(work)


@pytest.mark.parametrize(
    ("options", "managed"), [(("--engine", "off"), False), (("--policy", "none"), True)]
)
def test_it_works_with_every_engine(
    job: Start, tmp_path: Path, options: tuple[str, ...], managed: bool
) -> None:
    """--engine off: the preload object is there for the locks, and manages no mapping."""
    digest = make(tmp_path / "db")
    code = "say(managed='UFFDPREFETCH_SOCKET' in os.environ)" + READER
    work = job(job_of(code, tmp_path / "db"), (*OWN, *options), RANK="0")
    assert work.line() == {"managed": managed}
    line = work.line()
    assert line["digest"] == digest
    assert ".rank0" in line["locks"][0]


def test_the_ranks_have_their_lock_files_when_there_is_no_service(
    env: dict[str, str], fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake("babbles")
    make(tmp_path / "db")
    done = subprocess.run(
        uffdprefetch("wrap", "-q", *OWN, "--", *job_of(READER, tmp_path / "db")),
        env=env, cwd=tmp_path, input="", capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert "running the job without prefetching" in done.stderr
    assert ".ranknone" in json.loads(done.stdout)["locks"][0]
    assert not list(Path(env["UFFDPREFETCH_RUNDIR"]).glob("*.locks"))


@pytest.mark.parametrize(
    ("words", "status"), [(["/no/such/program"], 127), (["sh", "-c", "kill -9 $$"], -9)]
)
def test_a_command_that_ends_badly_leaves_no_directory(
    env: dict[str, str], tmp_path: Path, words: list[str], status: int
) -> None:
    done = subprocess.run(
        uffdprefetch("wrap", "-q", *OWN, "--", *words),
        env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == status
    assert not list(Path(env["UFFDPREFETCH_RUNDIR"]).glob("*.locks"))


def test_a_directory_that_is_not_ours_is_refused_and_the_job_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    make(tmp_path / "db")
    env["UFFDPREFETCH_RUN"] = "test"
    place = Path(socket_path(runtime_directory(env), "test") + ownlock.SUFFIX)
    place.symlink_to(tmp_path)
    words = job_of(READER, tmp_path / "db")
    run = {"env": env, "cwd": tmp_path, "input": "", "capture_output": True, "text": True}
    done = subprocess.run(uffdprefetch("wrap", "-q", *OWN, "--", *words), **run)  # type: ignore[call-overload]
    assert "the ranks share the LMDB lock files" in done.stderr
    assert "symbolic link" in done.stderr
    assert json.loads(done.stdout)["locks"] == [str(tmp_path / "db" / "lock.mdb")]
    strict = uffdprefetch("wrap", "-q", "--strict", *OWN, "--", *words)
    assert subprocess.run(strict, **run).returncode == 125  # type: ignore[call-overload]


def test_the_last_of_several_launchers_removes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "x.locks"
    first, second = OwnLocks.enter(str(path)), OwnLocks.enter(str(path))
    (path / "1-2.rank0").touch()
    first.leave()
    first.leave()
    assert (path / "1-2.rank0").exists()
    second.leave()
    assert not path.exists()


def test_what_a_killed_launcher_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    node = socket.gethostname()
    left, used, other = (
        tmp_path / f"{name}.sock.locks" for name in (f"a@{node}+1", f"b@{node}+1", "c@elsewhere+1")
    )
    users = OwnLocks.enter(str(used))
    for path in (left, other):
        path.mkdir(mode=0o700)
        (path / "users").touch()
        (path / "1-2.rank0").touch()
    own = OwnLocks.enter(str(tmp_path / f"d@{node}+1.sock.locks"))
    assert sorted(p.name[0] for p in tmp_path.iterdir()) == ["b", "c", "d"]
    users.leave()
    own.leave()


def test_a_place_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        UffdPrefetchError, match=r"no directory for the ranks' lock files"
    ) as caught:
        (tmp_path / "file").touch()
        OwnLocks.enter(str(tmp_path / "file" / "x.locks"))
    assert caught.value.exit_code == 125
