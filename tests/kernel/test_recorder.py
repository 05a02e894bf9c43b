# SPDX-License-Identifier: Apache-2.0
"""The recorder and the job beside it: killed, starved of disk, without rights, told nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    HANG_SECONDS,
    clean_environment,
    process_gone,
    require,
    uffdprefetch,
    wait_until,
)
from nobody import Nobody
from witness import count, drop_cache, faults, ranks_of, reader, record, why_no_witness

from uffdprefetch.base.config import SERVED_VARIABLE, Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.rundir import socket_path
from uffdprefetch.protocol import leftovers, wire
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.events import Call, Kind
from uffdprefetch.trace.record.process_identity import (
    Paths,
    Processes,
    TraceLimits,
    parse_getstripe,
)
from uffdprefetch.trace.record.recorder import Recorder

pytestmark = pytest.mark.bpf

MIB = 1 << 20
RECORD_BYTES = 256 << 10
Children = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 MiB on the disk of TMPDIR."""
    path = tmp_path_factory.mktemp("data") / "records.bin"
    path.write_bytes(np.random.PCG64(2).random_raw(4 * MIB).tobytes())
    return path


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    """Not in pytest's own directory: each run of pytest that begins takes others' rights there."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        yield Nobody(Path(directory))


def kernel() -> None:
    require(why_no_witness() is None, f"no eBPF: {why_no_witness()}")


def recorder_of(pid: int) -> int:
    """The recorder that a launcher has started."""
    found: list[int] = []

    def look() -> bool:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                with contextlib.suppress(OSError):  # it has just ended
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                    if b"record" in words:
                        found.append(int(child))
        return bool(found)

    wait_until(look, "the recorder to be started")
    return found[0]


@pytest.fixture
def waiting(
    env: dict[str, str], tmp_path: Path, data: Path, children: Children
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a recorded reader that has read once and waits for a line before it reads on."""

    def start(*options: str, command: str = "trace") -> subprocess.Popen[bytes]:
        job = ["sh", "-c", 'first="$1"; shift; eval "$first"; exec "$@"', "sh",
               " ".join(f"'{w}'" for w in reader(data, "faults:23")),
               *reader(data, "consecutive", RECORD_BYTES, "--wait")]  # fmt: skip
        process: subprocess.Popen[bytes] = children(
            [*uffdprefetch(command, *options), "--", *job],
            env=env, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pages"] == 23
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start


def go_on(process: subprocess.Popen[bytes]) -> tuple[list[dict[str, Any]], str]:
    """Let the reader read; what it printed and what was said on stderr."""
    out, err = process.communicate(b"\n", timeout=HANG_SECONDS)
    return [json.loads(line) for line in out.splitlines()], err.decode()


# ---- its end ------------------------------------------------------------------------------------


def test_a_killed_recorder_leaves_a_trace_and_the_job_in_peace(
    waiting: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, data: Path
) -> None:
    kernel()
    path = tmp_path / "t.uptrace"
    process = waiting("-o", str(path))
    recorder = recorder_of(process.pid)

    def written() -> bool:
        trace = trace_file.read(str(path))
        return faults(trace.events[trace.events["file"] != 0]) > 0

    wait_until(written, "what was read first to be in the file")
    os.kill(recorder, signal.SIGKILL)
    said, err = go_on(process)
    assert process.returncode == 0
    assert said[0]["pages"] == data.stat().st_size // 4096
    assert "Traceback" not in err
    trace = trace_file.read(str(path))
    assert trace.end is None
    report = analyse(trace)
    (found,) = report["readers"]
    assert found["faults"]["total"] == faults(trace.events[trace.events["file"] != 0])
    shown = subprocess.run(
        uffdprefetch("trace", str(path)), capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert shown.returncode == 0 and "records.bin" in shown.stdout, shown.stderr


def test_a_full_disk_is_one_line_and_the_job_goes_on(
    waiting: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A file system of 64 KiB that something else fills while the recorder runs."""
    kernel()
    require(os.geteuid() == 0, "only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=True)
    try:
        process = waiting("-o", str(small / "t"))
        (small / "filler").write_bytes(b"")
        fill = os.open(small / "filler", os.O_WRONLY)
        try:
            while os.write(fill, bytes(4096)):
                pass
        except OSError:
            pass
        os.close(fill)
        said, err = go_on(process)
        assert process.returncode == 0 and said[0]["pages"] > 0
        lines = [line for line in err.splitlines() if line]
        assert len(lines) == 1 and "No space left on device" in lines[0], lines
        assert lines[0].startswith("uffdprefetch: trace ends after")
        trace_file.read(str(small / "t.uptrace"))  # up to its last whole block
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.parametrize("words", [("trace", "-o"), ("wrap", "-q", "--trace")])
def test_where_the_disk_is_full_already_the_job_runs_without_a_recording(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    require(os.geteuid() == 0, "only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=True)
    try:
        (small / "filler").write_bytes(bytes(65536))
        done = subprocess.run(
            uffdprefetch(*words, str(small / "t"), "--", "sh", "-c", "echo ran; exit 3"),
            capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path,
            env=clean_environment(),
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (3, "ran\n"), done.stderr
        (line,) = done.stderr.splitlines()
        assert "without a" in line and "No space left on device" in line
        assert [path.name for path in small.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_killed_job_is_recorded_to_its_end(
    waiting: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    kernel()
    process = waiting("-q", "-o", "t")
    recorder = recorder_of(process.pid)
    process.send_signal(signal.SIGTERM)  # passed on
    assert process.wait(HANG_SECONDS) == -signal.SIGTERM
    trace = trace_file.read(str(tmp_path / "t.uptrace"))
    assert trace.end is not None and trace.end["status"] == -signal.SIGTERM
    # it has still to let go of the kernel's probes
    wait_until(lambda: process_gone(recorder), "the recorder to end")


def test_a_killed_launcher_ends_the_recorder(
    waiting: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    kernel()
    process = waiting("-q", "-o", "t")
    recorder = recorder_of(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: process_gone(recorder), "the recorder to end with its launcher")
    assert trace_file.read(str(tmp_path / "t.uptrace")).end is not None


@pytest.mark.parametrize("words", [["sh", "-c", "exit 7"], ["false"]])
def test_the_job_s_own_status(env: dict[str, str], tmp_path: Path, words: list[str]) -> None:
    plain = subprocess.run(words).returncode
    ours = uffdprefetch("trace", "-q", "-o", str(tmp_path / "t"), "--")
    assert subprocess.run([*ours, *words], env=env).returncode == plain


# ---- who and what -------------------------------------------------------------------------------


def test_a_process_that_runs_already(
    env: dict[str, str], tmp_path: Path, data: Path, children: Children
) -> None:
    kernel()
    job = children(
        reader(data, "faults:23", RECORD_BYTES, "--wait"), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=env,
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline() == b"ready\n"
    path = tmp_path / "t.uptrace"
    recording = children(
        uffdprefetch("trace", "--pid", str(job.pid), "-o", str(path)), env=env,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    def looked() -> bool:
        try:
            return bool((trace_file.read(str(path)).events["kind"] == Kind.MAP).any())
        except UffdPrefetchError:  # not there yet, or only just
            return False

    wait_until(looked, "the recorder to look")
    out, _ = job.communicate(b"\n", timeout=HANG_SECONDS)
    assert recording.wait(HANG_SECONDS) == 0  # it ends with the process
    trace = trace_file.read(str(path))
    mine = trace.events[trace.events["file"] != 0]
    assert faults(mine) == json.loads(out)["faults"] > 0


def test_a_duration(env: dict[str, str], tmp_path: Path, children: Children) -> None:
    job = children(["sleep", "1000"])
    done = subprocess.run(
        uffdprefetch("trace", "--pid", str(job.pid), "--duration", "100ms", "-o", "t"),
        env=env, cwd=tmp_path, timeout=HANG_SECONDS, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert job.poll() is None
    assert trace_file.read(str(tmp_path / "t.uptrace")).end is not None


def test_only_files_that_match(env: dict[str, str], tmp_path: Path, data: Path) -> None:
    kernel()
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(4 * MIB))
    job = ["sh", "-c", f"cat {other} {data} > /dev/null"]
    both = record(env, tmp_path, job)
    assert {f.path for f in both.trace.files.values()} == {str(other), str(data)}
    one = record(env, tmp_path, job, "--include", "other.*")
    assert {f.path for f in one.trace.files.values()} == {str(other)}
    assert count(one.trace.events, Kind.READ) > 0


def test_a_program_of_many_small_files_is_recorded(
    env: dict[str, str], tmp_path: Path, data: Path
) -> None:
    """A Python program with its modules: what it maps after them has its events all the same."""
    kernel()
    code = """
import os, sys, time
os.mkdir("modules")
for number in range(6000):
    with open(f"modules/{number}", "wb") as file:
        file.write(b"pass")
    with open(f"modules/{number}", "rb") as file:
        file.read()
time.sleep(1)  # on a busy machine the recorder is behind
os.execv(sys.argv[1], sys.argv[1:])
"""
    command = reader(data, "faults:23")
    recorded = record(env, tmp_path, [command[0], "-c", code, *command])
    (said,) = recorded.said
    assert faults(recorded.events(data)) == said["faults"]
    assert recorded.trace.end is not None and recorded.trace.end["lost_events"] == 0


def test_what_an_import_costs_is_told_by_package(
    env: dict[str, str], tmp_path: Path, data: Path
) -> None:
    kernel()
    package = tmp_path / "lib/python3/site-packages/slowly"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "".join(f"from slowly import part{i}\n" for i in range(60))
    )
    for i in range(60):
        (package / f"part{i}.py").write_text(f"x = {i}\n" * 3000)
    here = {**env, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import slowly, sys; open(sys.argv[1], 'rb').read()"
    job = ["/usr/bin/python3", "-c", code, str(data)]
    for path in [data, *package.iterdir()]:
        drop_cache(path)
    run = record(here, tmp_path, job)
    report = analyse(run.trace)
    (file,) = report["files"]
    assert file["path"] == str(data)
    taken = data.stat().st_size
    assert taken <= file["read_calls"]["bytes"] < 2 * taken
    (mine,) = (one for one in report["others"] if one["name"] == "slowly")
    assert mine["files"] == 61
    assert mine["fill_bytes"] >= 60 * 18000
    assert mine["requests"] >= 61
    assert mine["read_calls"]["bytes"] >= 60 * 18000
    assert 0 < mine["wait_seconds"] < report["trace"]["seconds"]
    # and with --include nothing of it is asked for
    assert not analyse(record(here, tmp_path, job, "--include", "records.bin").trace)["others"]


@pytest.mark.parametrize("block", ["4k", "64k", "1M"])
def test_what_read_takes_is_told_to_its_last_page(
    env: dict[str, str], tmp_path: Path, block: str
) -> None:
    kernel()
    path = tmp_path / "three.bin"
    path.write_bytes(os.urandom((3 << 20) + 9000))  # its last page not whole, no block's end
    os.sync()
    drop_cache(path)
    job = ["dd", f"if={path}", "of=/dev/null", f"bs={block}"]
    (file,) = (
        one
        for one in analyse(record(env, tmp_path, job).trace)["files"]
        if one["path"] == str(path)
    )
    assert file["touched_pages"] == file["touched_pages_least"] == file["pages"] == 771
    assert file["useless_bytes"] == 0
    assert file["read_calls"]["bytes"] == path.stat().st_size


def test_waiting_for_a_pipe_is_no_file_s(env: dict[str, str], tmp_path: Path) -> None:
    """Whose descriptor had been a file's."""
    kernel()
    code = (
        "import os, time\n"
        "file = open('/etc/passwd', 'rb'); file.read(); was = file.fileno(); file.close()\n"
        "r, w = os.pipe(); assert r == was\n"
        "if not os.fork(): time.sleep(1.5); os.write(w, b'x'); os._exit(0)\n"
        "os.read(r, 1)\n"
    )
    report = analyse(record(env, tmp_path, ["/usr/bin/python3", "-c", code]).trace)
    waited = {one["name"]: one["wait_seconds"] for one in report["others"]}
    assert "/etc" in waited
    assert sum(waited.values()) < 1.5, waited


def test_system_calls_of_the_job(env: dict[str, str], tmp_path: Path, data: Path) -> None:
    kernel()
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "for i in range(17): os.pread(fd, 4096, i << 20)\n"
        "mmap.mmap(fd, 0, prot=mmap.PROT_READ)[5]\n"
    )
    run = record(env, tmp_path, ["/usr/bin/python3", "-c", code, str(data)])
    calls = run.trace.events[run.trace.events["kind"] == Kind.CALL]
    what = calls["aux"] & 0xFF
    preads = calls[what == Call.PREAD]
    mine = preads[np.isin(preads["offset"], [i << 20 for i in range(17)])]
    assert len(mine[mine["length"] == 4096]) >= 17
    (maps,) = [run.events(data)[run.events(data)["kind"] == Kind.MAP]]
    assert [int(m["length"]) for m in maps] == [data.stat().st_size]
    opened = calls[(what == Call.OPEN) & (calls["value"] > 0)]
    assert len(opened) > 0


def test_ranks_of_mpirun_are_told_apart_under_one_recorder(
    env: dict[str, str], tmp_path: Path, data: Path
) -> None:
    kernel()
    require(shutil.which("mpirun"), "mpirun is missing")
    path = tmp_path / "t.uptrace"
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    ours = uffdprefetch("wrap", "-f", "-o", str(tmp_path / "s"), "--trace", str(path), "--")
    done = subprocess.run(
        [*words, *ours, *reader(data, "stride:3")], env=env, cwd=tmp_path, capture_output=True,
        text=True, timeout=2 * HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def ended() -> bool:
        return trace_file.read(str(path)).end is not None

    wait_until(ended, "the recorder, which outlives the rank that started it, to end")
    trace = trace_file.read(str(path))
    events = trace.events[trace.events["file"] != 0]
    readers = {int(p) for p in events["pid"][np.isin(events["kind"], (Kind.AROUND, Kind.FAULT))]}
    ranks = {trace.processes[pid].rank for pid in readers if trace.processes[pid].role == "job"}
    assert ranks == {0, 1, 2}


def test_the_next_run_of_a_name_has_a_recording_of_its_own_and_no_mark_is_left(
    env: dict[str, str], tmp_path: Path
) -> None:
    names = tmp_path / "names"
    names.mkdir(0o700)
    env |= {"UFFDPREFETCH_RUN": "again", "UFFDPREFETCH_RUNDIR": str(names)}
    for trace in ("first", "second"):
        words = ("wrap", "-q", "-o", "/dev/null", "--trace", str(tmp_path / trace), "--", "true")
        subprocess.run(uffdprefetch(*words), env=env, check=True, timeout=HANG_SECONDS)
        assert (tmp_path / f"{trace}.uptrace").exists()
        assert not list(names.glob("*.trace"))


def test_a_mark_of_a_launcher_that_was_killed_is_nobody_s(
    env: dict[str, str], tmp_path: Path
) -> None:
    """The next run of the name had no trace, without a word."""
    names = tmp_path / "names"
    names.mkdir(0o700)
    env |= {"UFFDPREFETCH_RUN": "again", "UFFDPREFETCH_RUNDIR": str(names)}
    trace = ("--trace", str(tmp_path / "next"))
    Path(socket_path(str(names), "again") + leftovers.TRACE).write_bytes(b"\0")
    words = ("wrap", "-q", "-o", "/dev/null", *trace, "--", "true")
    subprocess.run(uffdprefetch(*words), env=env, check=True, timeout=HANG_SECONDS)
    assert (tmp_path / "next.uptrace").exists()
    assert not list(names.glob("*.trace"))


# ---- bounds -------------------------------------------------------------------------------------


def test_single_events_end_at_max_events_and_the_overview_does_not(
    env: dict[str, str], tmp_path: Path, data: Path
) -> None:
    kernel()
    run = record(env, tmp_path, reader(data, "consecutive"), "--max-events", "100")
    trace = run.trace
    assert trace.end is not None and trace.overview is not None
    assert trace.end["events_kept"] == 100 < trace.end["events_seen"]
    assert len(trace.events) <= 100
    assert trace.end["raw_until_ns"] is not None
    number = next((f.id for f in trace.files.values() if f.path == str(data)), None)
    told = sum(
        v for s in trace.overview["series"] if s["file"] == number for _, v in s.get("faults", ())
    )
    assert told == run.said[0]["faults"]
    assert analyse(trace)["trace"]["raw_until_seconds"] is not None


# ---- without the kernel -------------------------------------------------------------------------


def test_without_bpf_the_service_tells_and_what_is_missing_is_named(
    env: dict[str, str], tmp_path: Path, data: Path
) -> None:
    run = record(
        env, tmp_path, ranks_of(2, reader(data, "consecutive")), "--no-bpf", cold=data
    )  # fmt: skip
    assert run.trace.meta["source"] == "service"
    assert "faults" in run.trace.meta["missing"][0]["what"]
    seen = run.events(data)
    assert count(seen, Kind.SEEN) + count(seen, Kind.TOUCH) > 0
    assert count(seen, Kind.FAULT) == count(seen, Kind.AROUND) == 0
    assert {p.rank for p in run.trace.processes.values() if p.role == "job"} >= {0, 1}
    report = analyse(run.trace)
    assert report["trace"]["missing"] == run.trace.meta["missing"]
    assert "trace without" in run.stderr


def test_an_unprivileged_user_gets_a_lesser_trace_and_the_reason_everywhere(
    env: dict[str, str], nobody: Nobody, data: Path
) -> None:
    data = Path(shutil.copy(data, nobody.directory))
    for module in ("numpy", "msgpack"):
        nobody.bring(module)
    script = shutil.copy(reader(data, "x")[1], nobody.directory / "reader.py")
    environment = nobody.environment(env)
    ours = [*nobody.prefix, nobody.python, "-m", "uffdprefetch"]
    job = [nobody.python, str(script), str(data), "consecutive", str(RECORD_BYTES)]
    done = subprocess.run(
        [*ours, "trace", "-o", "t", "--", *job], env=environment, cwd=nobody.work,
        capture_output=True, text=True, timeout=2 * HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trace without the kernel's own events" in done.stderr
    trace = trace_file.read(str(nobody.work / "t.uptrace"))
    (why,) = {entry["why"] for entry in trace.meta["missing"][:1]}
    assert why
    for form in ("text", "json", "html"):
        shown = subprocess.run(
            [*ours, "trace", "t.uptrace", "--format", form, "-o", "-"], env=environment,
            cwd=nobody.work, capture_output=True, text=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert why in " ".join(shown.stdout.split()), form  # text is wrapped


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to record or to show"),
        (["--"], "nothing to run"),
        (["--pid", "4194305"], "there is no such process"),
        (["--pid", "1", "--", "true"], "exclude each other"),
        (["x.uptrace", "--pid", "1"], "not both"),
        (["missing.uptrace"], "cannot read missing.uptrace"),
        (["--duration", "soon", "--", "true"], "not a duration"),
        (["-o", "/nonexistent/t", "--", "true"], "cannot write /nonexistent/t.uptrace"),
        (["-o", "%z", "--", "true"], "no token"),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_runs(
    env: dict[str, str], tmp_path: Path, words: list[str], said: str
) -> None:
    done = subprocess.run(
        uffdprefetch("trace", *words), env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.uptrace"))


@pytest.mark.parametrize("words", [("trace", "-o", "t"), ("trace", "--no-bpf", "-o", "t"),
                                   ("wrap", "-o", "t", "--trace", "t")],
                         ids=["trace", "no bpf", "wrap"])  # fmt: skip
@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/", 126)])
def test_a_command_that_cannot_be_started_leaves_nothing(
    env: dict[str, str], tmp_path: Path, words: tuple[str, ...], program: str, status: int
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    done = subprocess.run(
        uffdprefetch(*words, "--", program), env=env, cwd=place, capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == status and "Traceback" not in done.stderr
    assert f"cannot execute '{program}'" in done.stderr.splitlines()[-1]
    assert list(place.iterdir()) == []
    # nor does it take an earlier recording
    (place / "t.uptrace").write_text("earlier")
    done = subprocess.run(
        uffdprefetch(words[0], "-f", *words[1:], "--", program), env=env, cwd=place,
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == status
    assert (place / "t.uptrace").read_text() == "earlier"


@pytest.mark.parametrize("words", [("trace", "-o"), ("wrap", "-o", os.devnull, "--trace")])
def test_of_a_directory_the_trace_is_in_it(
    env: dict[str, str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "place").mkdir()
    done = subprocess.run(
        uffdprefetch(*words, "place", "--", "true"), env=env, cwd=tmp_path, capture_output=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    (made,) = (tmp_path / "place").iterdir()
    assert done.returncode == 0 and re.fullmatch(r"uffdprefetch\.\d+\.uptrace", made.name)
    assert not list(tmp_path.glob("*.uptrace"))


def test_a_trace_that_exists_is_not_overwritten(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "t.uptrace").write_text("precious")
    for command, status in ((("trace", "-o"), 2), (("wrap", "--strict", "--trace"), 2),
                            (("wrap", "--trace"), 0)):  # fmt: skip
        done = subprocess.run(
            [*uffdprefetch(*command, "t", "--"), "touch", "ran"], env=env, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == status and "exists" in done.stderr
        assert (tmp_path / "t.uptrace").read_text() == "precious"
        # a job goes on without its recording, unless that is not wanted
        assert (tmp_path / "ran").exists() == (status == 0)


def test_messages_that_are_none_do_not_end_a_recording(tmp_path: Path, capfd: Any) -> None:
    writer = trace_file.create(str(tmp_path / "t.uptrace"), False, {})
    recorder = Recorder(writer, TraceLimits([], 0, 1000), None)
    event = np.zeros(3, trace_file.EVENT)
    event["kind"], event["time_ns"] = Kind.TOUCH, 10**12
    messages = [
        b"", b"x" * 8, wire.stream(wire.Type.TABLES, b"{"), wire.stream(wire.Type.TABLES, b"[]"),
        wire.stream(wire.Type.TABLES, b'{"files": [{}]}'), wire.stream(wire.Type.EVENTS, b"odd"),
        wire.stream(wire.Type.EVENTS, event.tobytes()),
    ]  # fmt: skip
    assert recorder.turn(messages) == 3
    recorder.finish({})
    writer.close()
    assert len(trace_file.read(str(tmp_path / "t.uptrace")).events) == 3
    assert capfd.readouterr().err.count("cannot be read") == 6


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code", "size", "wanted"),
    [
        ("/data/train.lmdb/data.mdb", False, 1 << 30, True),
        ("/data/small", False, 1000, False),
        ("/data/train.lmdb/lock.mdb", False, 8192, True),
        ("/data/x.mdb-lock", False, 8192, True),
        ("/opt/app/libtorch.so.2", False, 1 << 30, False),
        ("/opt/app/program", True, 1 << 30, False),
        ("/usr/lib/locale/locale-archive", False, 1 << 30, False),
        ("/data/weights.bin", False, 2 << 20, True),
    ],
)
def test_which_files_belong_into_a_trace(path: str, code: bool, size: int, wanted: bool) -> None:
    assert Paths(TraceLimits([], MIB, 0)).wanted(path, code, size) is wanted
    assert Paths(TraceLimits(["*"], MIB, 0)).wanted(path, code, size) is True
    assert Paths(TraceLimits(["*.zip"], MIB, 0)).wanted(path, code, size) is False


def test_the_stripe_of_a_lustre_file() -> None:
    plain = "stripe_count:  4 stripe_size:   1048576\n"
    assert parse_getstripe(plain) == (1 << 20, 4)
    composite = (
        "  lcm_layout_gen:    3\n    lmm_stripe_count:  1\n    lmm_stripe_size:   1048576\n"
        "    lmm_stripe_count:  -1\n    lmm_stripe_size:   4194304\n"
    )
    assert parse_getstripe(composite) == (4 << 20, -1)
    assert parse_getstripe("lfs: cannot find layout\n") == (None, None)


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_our_service_is_known_by_its_options_whoever_has_started_it(policy: str) -> None:
    """`trace -- uffdprefetch wrap ...`: what it read was the job's, and `wrap` was recommended."""
    processes = Processes()
    environ = {**os.environ, SERVED_VARIABLE: Config(policy=policy).to_json()}
    with subprocess.Popen(["sleep", "60"], env=environ) as service:
        began = Path(f"/proc/{service.pid}/environ")  # it has none while execve(2) ends
        try:
            wait_until(lambda: SERVED_VARIABLE.encode() in began.read_bytes(), "it to begin")
            found = processes.identify(service.pid)
        finally:
            service.kill()
    assert found is not None and found.role == "service"
    assert processes.wrapped == (policy == "auto")
    child = processes.identify(2**22 + 1, parent=service.pid)
    assert child is not None and child.role == "service", "it has ended before it was looked at"
    ours = processes.identify(os.getpid())
    assert ours is not None and ours.role == "job"


@pytest.mark.parametrize("how", ["plainly", "wrap --trace", "trace -- wrap", "trace -- wrap none"])
def test_a_recording_says_whether_its_job_was_read_ahead_of(
    env: dict[str, str], tmp_path: Path, how: str
) -> None:
    """Of a job without a large file no event of the service tells. Its own reads are no job's."""
    kernel()
    command, wrap = ["sleep", "0.5"], None
    if how == "wrap --trace":
        wrap = ["--strict"]
    elif how.startswith("trace"):
        policy = "none" if how.endswith("none") else "auto"
        words = ("wrap", "-q", "--strict", "-o", os.devnull, f"--policy={policy}", "--")
        command = [*uffdprefetch(*words), *command]
    recorded = record(env, tmp_path, command, wrap=wrap).trace
    report = analyse(recorded)
    assert report["trace"]["wrapped"] == (how in ("wrap --trace", "trace -- wrap"))
    assert report["service"] is None
    if how.startswith("trace"):
        assert [p.role for p in recorded.processes.values()].count("service") >= 1
