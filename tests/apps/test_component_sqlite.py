# SPDX-License-Identifier: Apache-2.0
"""sqlite3 with PRAGMA mmap_size: its reads, its writes, and the locks that it lives on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from components import CHECKPOINTS, TABLES, Runner, Start, check_managed
from conftest import HANG_SECONDS, require

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ["components"]

MMAP = "PRAGMA mmap_size=268435456;"
QUERY = (
    "select label, count(*), sum(length(value)) from records group by label;"
    "select id, hex(substr(value, 1, 16)) from records where id % 1000 = 7;"
)


@pytest.fixture
def sqlite() -> str:
    program = shutil.which("sqlite3")
    require(program, "sqlite3 is missing: install it")
    assert program is not None
    return program


@pytest.fixture(autouse=True)
def served(runner: Runner) -> None:
    """The service is up before the program, which may end in less time than its start takes."""
    runner.env["UFFDPREFETCH_STRICT"] = "1"


@pytest.fixture
def tables(store: Path, tmp_path: Path) -> Path:
    """A copy of the SQLite database that may be written."""
    return Path(shutil.copy(store / TABLES, tmp_path / "copy.sqlite"))


def test_sqlite_reads_through_its_mapping(runner: Runner, bed: SlowBed, sqlite: str) -> None:
    path = bed.path(TABLES)
    words = [sqlite, "-readonly", str(path), MMAP + QUERY + QUERY]
    run = runner.wrapped(*words, cold=[path])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    check_managed(run, path)


def test_under_checkpoints_sqlite_that_may_write_is_only_watched(
    runner: Runner, tables: Path, sqlite: str
) -> None:
    words = [sqlite, str(tables), MMAP + QUERY]
    run = runner.wrapped(*words, cold=[tables], options=CHECKPOINTS)
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    assert run.file(tables)["served_by"] != "checkpoints"
    assert run.summary["totals"]["checkpoints"]["laid"] == 0


@pytest.mark.parametrize("laid", [(), CHECKPOINTS], ids=["auto", "fixed"])
def test_sqlite_sees_its_own_writes(
    runner: Runner, tables: Path, sqlite: str, laid: tuple[str, ...]
) -> None:
    """Reads by the mapping and writes by write(2) in turn, of the same pages."""
    change = "update records set label = label + 100 where id % 3 = 0;"
    check = QUERY + change + QUERY + "delete from records where label > 103;" + QUERY
    plain = Path(shutil.copy(tables, tables.with_name("plain.sqlite")))
    words = [sqlite, tables, MMAP + check + "pragma integrity_check;"]
    run = runner.wrapped(*words, cold=[tables], options=laid)
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(sqlite, plain, MMAP + check + "pragma integrity_check;")
    assert run.stdout.endswith(b"ok\n")
    assert run.file(tables)["served_by"] != "checkpoints"


class Shell:
    """An sqlite3 that takes statements one by one; an answer ends with a mark that we ask for."""

    def __init__(self, start: Start, words: list[str], env: dict[str, str]) -> None:
        self.process = start(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ask(self, statements: str) -> list[bytes]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{statements}\nselect 'mark';\n".encode())
        self.process.stdin.flush()
        lines = list(iter(self.process.stdout.readline, b"mark\n"))
        assert b"" not in lines, self.process.stderr
        return lines

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(HANG_SECONDS) == 0


def attempt(sqlite: str, path: Path, statements: str) -> subprocess.CompletedProcess[bytes]:
    """Another process, without wrap, that does not wait for a lock."""
    return subprocess.run(
        [sqlite, str(path), statements], capture_output=True, timeout=HANG_SECONDS
    )


def test_sqlites_locks_hold_under_wrap(
    runner: Runner, tables: Path, sqlite: str, children: Start
) -> None:
    """POSIX locks of a file go when any descriptor of it is closed in the process: none may be."""
    words = runner.command(sqlite, "-batch", tables)
    writer = Shell(children, words, runner.env)
    writer.ask(f"{MMAP} begin immediate;")
    assert writer.ask(QUERY)
    other = attempt(sqlite, tables, "begin immediate;")
    assert other.returncode != 0 and b"locked" in other.stderr
    writer.ask("update records set label = 77 where id = 1; commit;")
    assert attempt(sqlite, tables, "begin immediate; select label from records where id = 1;") \
        .stdout == b"77\n"  # fmt: skip
    writer.end()
    assert runner.summary()["files"]


def test_a_reader_with_checkpoints_keeps_its_lock_and_sees_a_later_writer(
    runner: Runner, tables: Path, sqlite: str, children: Start
) -> None:
    drop_cache(tables)
    words = runner.command(sqlite, "-batch", "-readonly", tables, options=CHECKPOINTS)
    reader = Shell(children, words, runner.env)
    before = reader.ask(f"{MMAP} begin; {QUERY}")
    # The writer's open(2) waits until the checkpoints are gone (a lease, where there are leases).
    other = attempt(sqlite, tables, "begin exclusive;")
    assert other.returncode != 0 and b"locked" in other.stderr
    reader.ask("commit;")
    change = "update records set label = label + 50, value = zeroblob(4000) where id % 2 = 1;"
    done = attempt(sqlite, tables, change)
    assert done.returncode == 0, done.stderr
    after = reader.ask(QUERY)
    assert after != before
    assert b"".join(after) == attempt(sqlite, tables, QUERY).stdout
    reader.end()
    summary = runner.summary()
    assert summary["totals"]["checkpoints"]["laid"] > 0
    assert summary["files"][0]["changed"]
