# SPDX-License-Identifier: Apache-2.0
"""C programs with threads and static ones, shell scripts, and how programs end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from components import (
    ARRAY,
    NAMED,
    TRAINING,
    TRAINING_BYTES,
    Runner,
    Start,
    check_managed,
    data,
    python,
    slowly,
)
from conftest import HANG_SECONDS, require
from harness import programs

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ["components"]

# ---- C ------------------------------------------------------------------------------------------


@pytest.fixture
def cc() -> None:
    require(shutil.which("cc"), "no C compiler: install gcc")


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_a_c_program_keeps_libcs_single_threaded_paths(
    runner: Runner, bed: SlowBed, cc: None, sharing: str
) -> None:
    """MAP_PRIVATE is what Arrow and safetensors map with."""
    path = bed.path(ARRAY)
    words = [programs(runner.cwd, "sum_mapping"), str(path), sharing, "1"]
    run = runner.wrapped(*words, cold=[path])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    assert b"single-threaded 1\n" in run.stdout
    check_managed(run, path)


def test_four_threads_in_four_places(runner: Runner, bed: SlowBed, cc: None) -> None:
    path = bed.path(ARRAY)
    words = [programs(runner.cwd, "sum_mapping"), str(path), "shared", "4"]
    bed.reset()
    run = runner.wrapped(*words, "ahead", cold=[path])  # its service has come to its turn
    fetched = bed.counters()["bytes"]
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    file = check_managed(run, path)
    assert file["prefetched_bytes"] > file["size_bytes"] // 2
    assert len(run.summary["streams"]) > 1
    assert run.summary["totals"]["coverage"] > 0.5
    assert fetched <= 1.05 * file["size_bytes"]


def test_a_static_program_simply_runs(runner: Runner, store: Path, cc: None) -> None:
    program = programs(runner.cwd, "sum_mapping", "-static")
    words = [program, str(store / ARRAY), "shared", "1"]
    run = runner.wrapped(*words, cold=[store / ARRAY])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    # who looks into /proc once a second may have seen it; nothing was laid in it
    assert all(file["served_by"] == "page_tables" for file in run.summary["files"])
    assert run.summary["totals"]["checkpoints"]["laid"] == 0
    assert run.summary["rung"] in (None, 2)


# ---- where ranks begin --------------------------------------------------------------------------


def test_a_rank_that_begins_in_the_middle_of_the_file(runner: Runner, bed: SlowBed) -> None:
    job = Path(sys.modules["uffdprefetch.demo.bed"].__file__ or "").with_name("job.py")
    path = bed.path(TRAINING)
    words = [sys.executable, str(job), "--db", str(path), "--digest", "--rank", "1", "--ranks", "2"]
    words += ["--epochs", "2"]
    digest = 'import json, sys; print(json.load(sys.stdin)["epochs"][1]["sha256"])'
    code = ["sh", "-c", '"$@" | ' + f"'{sys.executable}' -c '{digest}'", "sh", *words]
    bed.reset()
    with slowly(bed, 200_000_000):  # what may be lost at first is some time of the link
        run = runner.wrapped(*code, cold=[path])
    fetched = bed.counters()["bytes"]
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*code)
    file = check_managed(run, path)
    half = TRAINING_BYTES // 2
    assert any(half < stream["position_bytes"] for stream in run.summary["streams"])
    # The half that it does not read is not fetched: a window at the tree's root is the slack.
    assert fetched < 0.75 * file["size_bytes"]


# ---- shell scripts and ends ---------------------------------------------------------------------


def test_a_shell_script_with_pipes(runner: Runner, store: Path, bed: SlowBed) -> None:
    require(shutil.which("mdb_dump"), "mdb_dump is missing: install lmdb-utils")
    script = runner.cwd / "script.sh"
    script.write_text(
        "set -eu\n"
        'mdb_dump -a "$1" | tee "$2" | sha256sum | cut -d" " -f1\n'
        'wc -c < "$2"\n'
        '(mdb_dump -a "$1" | head -n 3; echo done) | tac\n'  # mdb_dump dies of SIGPIPE here
        'cat "$1/data.mdb" | cksum &\n'
        "wait\n"
    )
    words = ["sh", str(script), str(bed.path(NAMED)), str(runner.cwd / "dump")]
    run = runner.wrapped(*words, cold=[bed.path(NAMED)])
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    check_managed(run, bed.path(NAMED))


READ_ALL = """
import mmap, os, signal, sys
file = open(sys.argv[1], 'rb')
view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(view[at] for epoch in range(2) for at in range(0, len(view), 4096))
print('ready', total, flush=True)
"""


def test_a_program_that_exits_with_7(runner: Runner, bed: SlowBed) -> None:
    path = bed.path(ARRAY)
    run = runner.wrapped(*python(READ_ALL + "sys.exit(7)", path), cold=[path])
    assert run.status == 7
    check_managed(run, path)


def test_a_program_that_dies_of_a_segmentation_fault(runner: Runner, bed: SlowBed) -> None:
    """A real one, not a signal that was sent; the shell must see 139 as without us."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n" + READ_ALL
    path = bed.path(ARRAY)
    words = python(code + "import ctypes; ctypes.string_at(0)", path)
    run = runner.wrapped(*words, cold=[path])
    assert run.status == -signal.SIGSEGV
    check_managed(run, path)
    shell = ["sh", "-c", '"$@" >/dev/null 2>&1; echo $?', "sh"]
    under_wrap = subprocess.run(
        [*shell, *runner.command(*words)], env=runner.env, capture_output=True, check=True
    )
    assert under_wrap.stdout == runner.plain(*shell, *words) == b"139\n"


def start_reader(
    runner: Runner, start: Callable[..., subprocess.Popen[bytes]], path: Path, **options: object
) -> subprocess.Popen[bytes]:
    """A wrap whose job has read all of the mapping and waits for a signal, by looks: Python notes
    one that comes just before signal.pause(), and waits for the next."""
    drop_cache(data(path))
    process = start(
        runner.command(*python(READ_ALL + "import time\nwhile True:\n    time.sleep(0.02)", path)),
        **{"env": runner.env, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **options},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"ready")
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_sent_to_wrap_ends_a_managed_job(
    runner: Runner, bed: SlowBed, children: Start, number: signal.Signals
) -> None:
    process = start_reader(runner, children, bed.path(ARRAY))
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) == -number
    assert runner.summary()["totals"]["prefetched_bytes"] > 0


def test_ctrl_c_ends_a_managed_job_on_a_terminal(
    runner: Runner, bed: SlowBed, children: Start
) -> None:
    master, slave = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(slave), os.O_RDWR))

    process = start_reader(
        runner, children, bed.path(ARRAY), stdin=slave, stderr=slave, preexec_fn=take_terminal
    )
    os.close(slave)
    os.write(master, b"\x03")
    # Python's KeyboardInterrupt ends by the same signal, and so does wrap.
    assert process.wait(HANG_SECONDS) == -signal.SIGINT
    os.close(master)
    assert runner.summary()["totals"]["prefetched_bytes"] > 0
