# SPDX-License-Identifier: Apache-2.0
"""What is read by calls on a Lustre client: for small files that were read ahead a job asks the
servers next to nothing, and what the client's own readahead serves is left to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from lustre import client
from lustre.conftest import MIB, Data

FILES, FILE_BYTES = 200, 100 << 10
#: Of a known order: so many are read ahead before its reader begins.
FIRST_FILES = 32
#: Begin when the service is up, if there is one (protocol/leftovers.py).
UP = (
    'until [ ! "$UFFDPREFETCH_SOCKET" ] || [ -s "$UFFDPREFETCH_SOCKET.lock" ]; do sleep 0.1; done; '
)


class Trees:
    """Directories of small files, one for each run: a file that was opened often is not opened at
    the server again, whoever does."""

    def __init__(self, above: Path) -> None:
        self._above, self._made = above, 0

    def make(self) -> list[Path]:
        """A new one's files, in the order in which they are made: of no names, nor of readdir."""
        self._made += 1
        directory = self._above / f"tree{self._made}"
        directory.mkdir(parents=True)
        subprocess.run(["lfs", "setstripe", "-c", "1", str(directory)], check=True)
        paths = [directory / hashlib.sha256(b"%d" % i).hexdigest()[:8] for i in range(FILES)]
        block = os.urandom(FILE_BYTES)
        for i, path in enumerate(paths):
            path.write_bytes(i.to_bytes(8, "little") + block[8:])
        os.sync()
        return paths


@pytest.fixture
def trees() -> Iterator[Trees]:
    above = client.mount() / "small"
    yield Trees(above)
    shutil.rmtree(above)


def digest(paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()


def caller(*words: object) -> list[str]:
    return [sys.executable, str(client.HERE / "caller.py"), *map(str, words)]


def run(
    directory: Path, words: list[str], options: tuple[str, ...] | None, **variables: str
) -> client.Ran:
    ran = client.run(directory, words, options, **variables)
    print(f"{words[0]} {options}: {ran.requests}; {ran.rpcs}")
    print(ran.summary["reads"] if ran.summary else "", ran.stderr)
    return ran


def let_go(go: Path, ahead_bytes: int) -> threading.Thread:
    """A thread that lets a job begin when so many bytes were read from the servers."""

    def wait() -> None:
        wait_until(lambda: client.rpcs().bytes >= ahead_bytes, "what is read ahead")
        go.touch()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_files_of_a_known_order_are_opened_without_the_servers(
    trees: Trees, tmp_path: Path
) -> None:
    listed, plan, go = (tmp_path / name for name in ("paths.txt", "plan.json", "go"))
    epoch = {"ranks": {"*": {"range": [0, FILES]}}}
    said = {"list": listed.name, "epochs": [epoch], "repeat": False}
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "paths": said}))

    def read(options: tuple[str, ...] | None) -> client.Requests:
        paths = trees.make()
        listed.write_text("".join(f"{path}\n" for path in paths))
        client.reset_requests()
        thread = let_go(go, FIRST_FILES * FILE_BYTES if options else 0)
        ran = run(tmp_path / "ran", caller("files", listed), options, GO=str(go))
        thread.join()
        go.unlink()
        assert ran.said == {"bytes": FILES * FILE_BYTES, "digest": digest(paths)}
        assert ran.rpcs.bytes <= 1.01 * FILES * FILE_BYTES, "each once, whoever does"
        return ran.requests

    plain, wrapped = read(None), read(("--plan", str(plan)))
    assert plain.of("caller") >= 3 * FILES, "open, read, close"
    assert wrapped.of("caller") <= FILES // 10, wrapped


@pytest.mark.long_form
def test_of_files_that_are_opened_in_order_those_that_were_read_ahead_ask_nothing(
    trees: Trees, tmp_path: Path
) -> None:
    """How many these are is a matter of time, of which an emulated machine has none."""
    code = UP + "cd $0 && find . -type f | xargs -n 1000 md5sum | sort | md5sum; echo {}"

    def read(options: tuple[str, ...] | None) -> tuple[int, dict[str, int]]:
        directory = trees.make()[0].parent
        ran = run(tmp_path / "ran", ["bash", "-c", code, str(directory)], options)
        assert ran.rpcs.bytes <= 1.05 * FILES * FILE_BYTES
        used = ran.summary["reads"]["small_files"]["used"] if ran.summary else 0
        return used, ran.requests.by_program["md5sum"]

    _, plain = read(None)
    used, wrapped = read(())
    assert plain["open"] == plain["close"] == FILES
    assert used > FILES // 10
    for kind in ("open", "close"):
        assert wrapped[kind] <= FILES - 0.9 * used, wrapped


@pytest.mark.long_form
@pytest.mark.parametrize("how", ["stream", "gaps"])
def test_what_the_clients_own_readahead_serves_is_left_to_it(
    how: str, large: Data, tmp_path: Path
) -> None:
    code = UP + f"dd if={large.path} of=/dev/null bs=64k; echo {{}}"
    words = {"stream": ["bash", "-c", code], "gaps": caller("gaps", large.path, 64 << 10, MIB)}
    plain, ran = (run(tmp_path / "ran", words[how], options) for options in (None, ()))
    program = {"stream": "dd", "gaps": "caller"}[how]
    readers = {name for name, made in ran.requests.by_program.items() if "read" in made}
    assert readers == {program}
    assert abs(ran.rpcs.count - plain.rpcs.count) <= 2
    assert ran.rpcs.bytes == plain.rpcs.bytes
    if how == "stream":
        assert ran.rpcs.count <= large.least_rpcs + 6
