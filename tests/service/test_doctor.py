# SPDX-License-Identifier: Apache-2.0
"""`doctor` tries what a run needs; here it meets real kernels, real limits and broken probes."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, process_gone, require, uffdprefetch, wait_until
from suite import own_name

from uffdprefetch import doctor
from uffdprefetch.base import cgroup
from uffdprefetch.base.config import Config
from uffdprefetch.doctor import faults, machine, reads, show, site, storage
from uffdprefetch.doctor.check import CANNOT, LIMIT, NOTE, OK, SKIPPED, Check, run_isolated
from uffdprefetch.native import opens
from uffdprefetch.native import syscalls as sc
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.trace.record import bpf_compiler


def run(env: dict[str, str], *words: str, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
    done = subprocess.run(
        [*prefix, *uffdprefetch("doctor", *words)],
        env=env, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def report(env: dict[str, str], *words: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    status, out, err = run(env, "--json", *words, prefix=prefix)
    document: dict[str, Any] = json.loads(out)
    assert document["schema"] == "uffdprefetch.doctor/1"
    assert document["exit_status"] == status
    assert err == ""
    document["by_name"] = {found["name"]: found for found in document["checks"]}
    return document


@pytest.fixture
def data() -> Iterator[Path]:
    """16 MiB on a real file system (pytest's own directory may be in memory), none of it cached."""
    directory = Path("/var/tmp") / own_name(f"{time.monotonic_ns()}")
    directory.mkdir()
    path = directory / "data.mdb"
    path.write_bytes(os.urandom(16 << 20))
    make_cold(path)
    yield path
    shutil.rmtree(directory)


def make_cold(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> int:
    with open(path, "rb") as file:
        return storage.Residency(file.fileno()).pages(0, path.stat().st_size)


def require_unprivileged(env: dict[str, str]) -> tuple[str, ...]:
    """The words that run a command as nobody, if that is possible here."""
    require(os.geteuid() == 0 and shutil.which("setpriv"), "only root can become another user")
    prefix = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    del env["UFFDPREFETCH_RUNDIR"]  # it lies in a directory of root's
    env["TMPDIR"] = "/tmp"
    can = subprocess.run([*prefix, sys.executable, "-c", "import uffdprefetch"], cwd="/", env=env)
    require(can.returncode == 0, "this checkout is not readable for other users")
    return prefix


# ---- whole runs ---------------------------------------------------------------------------------


def test_every_check_says_what_was_found_and_what_follows(env: dict[str, str], data: Path) -> None:
    document = report(env, str(data))
    for found in document["checks"]:
        assert found["status"] in (OK, LIMIT, CANNOT, NOTE, SKIPPED)
        assert found["found"] and found["follows"], found
        assert "the probe" not in found["found"], found  # none crashed
    assert document["rung"] in (1, 2)
    assert document["rung_reason"]


def test_root_is_ready_for_rung_1(env: dict[str, str], data: Path) -> None:
    require(os.geteuid() == 0, "only root has userfaultfd for sure")
    env["UFFDPREFETCH_POLICY"] = "fixed"
    document = report(env, str(data))
    assert document["rung"] == 1
    by_name = document["by_name"]
    for name in ("userfaultfd(2)", "lay a checkpoint", "kernel-mode fault", "pidfd_getfd"):
        assert by_name[name]["status"] == OK, by_name[name]
    assert "right bytes" in by_name["kernel-mode fault"]["found"]


def test_an_lmdb_directory_stands_for_its_data_file(env: dict[str, str], data: Path) -> None:
    (data.parent / "larger").write_bytes(b"x" * (17 << 20))
    by_name = report(env, str(data.parent))["by_name"]
    assert by_name["path"]["values"]["path"] == str(data)
    data.rename(data.with_name("smaller"))
    assert storage.record_file(str(data.parent)).endswith("larger")


def test_a_path_that_is_not_there_is_one_line(env: dict[str, str]) -> None:
    for words in (("--all", "/no/such/file"), ("/no/such/file",)):
        status, out, err = run(env, *words)
        assert (status, out) == (2, "")
        assert err == "uffdprefetch: doctor /no/such/file: there is no such file or directory\n"


def test_it_is_short_unless_all_is_asked_for(env: dict[str, str]) -> None:
    status, out, _ = run(env)
    lines = out.splitlines()
    assert lines[0].startswith(("ready", "works with limits", "cannot"))
    assert lines[-1] == "all checks: uffdprefetch doctor --all"
    assert not any(line.startswith(" ") for line in lines)  # one fact a line, into a pipe
    assert len(lines) <= 10
    assert sum(line.startswith("cure: ") for line in lines) <= 1
    again, every, _ = run(env, "--all")
    assert again == status and len(every.splitlines()) > 2 * len(lines)
    assert every.splitlines()[-1].startswith(lines[0][:20])


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_terminal_a_line_is_folded_and_nothing_of_it_is_lost(columns: int) -> None:
    note = Check("pool huge pages", NOTE, "shmem_enabled is never", "more faults " * 20)
    report = doctor.assess([*checks(lay=LIMIT), note])
    whole, folded = show.short(report), show.short(report, columns)
    assert max(map(len, folded.splitlines())) <= columns
    assert folded.split() == whole.split()


def test_plain_text_into_a_pipe_and_a_table_on_a_terminal(env: dict[str, str]) -> None:
    _, out, _ = run(env, "--all")
    assert "\x1b" not in out and "┃" not in out
    master, slave = os.openpty()
    process = subprocess.Popen(
        uffdprefetch("doctor", "--all"), env={**env, "TERM": "xterm", "COLUMNS": "60"},
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    drawn = b""
    while True:
        try:
            drawn += os.read(master, 65536)
        except OSError:  # EIO: the other side is closed
            break
    os.close(master)
    assert process.wait(HANG_SECONDS) in (0, 2)
    assert "┃".encode() in drawn
    assert "…".encode() not in drawn  # a command that is cut off cannot be copied


def test_show_config_tells_values_and_origins(env: dict[str, str]) -> None:
    env["UFFDPREFETCH_SIZE"] = "7MiB"
    _, out, _ = run(env, "--show-config")
    lines = [line.split() for line in out.splitlines() if line.startswith("config")]
    assert ["config", "size", "=", "7MiB", "[UFFDPREFETCH_SIZE]"] in lines
    document = report(env, "--show-config")
    assert document["config"]["size"] == {"value": "7MiB", "origin": "UFFDPREFETCH_SIZE"}


def test_nobody_gets_an_answer_for_every_probe(env: dict[str, str], data: Path) -> None:
    prefix = require_unprivileged(env)
    data.parent.chmod(0o755)
    document = report(env, str(data), prefix=prefix)
    by_name = document["by_name"]
    assert not any("the probe" in found["found"] for found in document["checks"])
    assert by_name["user"]["values"]["uid"] == 65534
    assert by_name["page tables"]["status"] == OK
    # mincore would call every page of another's file resident: it must not be believed.
    assert by_name["cachestat"]["status"] == LIMIT
    assert by_name["warm 4 MiB"]["status"] == SKIPPED
    assert by_name["read lease"]["status"] == NOTE
    open_to_all = Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() == "1"
    device = Path("/dev/userfaultfd")
    if not open_to_all and not (device.exists() and device.stat().st_mode & 0o006):
        assert by_name["lay a checkpoint"]["status"] == NOTE
        status, out, _ = run(env, prefix=prefix)
        assert status == 0 and out.startswith("ready: readers can be followed by page tables\n")
        assert "cure: " not in out
        env["UFFDPREFETCH_POLICY"] = "fixed"
        document = report(env, str(data), prefix=prefix)
        assert (document["rung"], document["exit_status"]) == (2, 2)
        lift = document["by_name"]["lay a checkpoint"]["lift"]
        assert lift
        _, out, _ = run(env, prefix=prefix)
        assert f"cure: {lift}" in out.splitlines()


def test_the_script_for_a_site_makes_files_that_the_system_reads(
    env: dict[str, str], tmp_path: Path
) -> None:
    status, script, _ = run(env, "--site")
    assert status == 0
    told = {**env, "DESTDIR": str(tmp_path)}
    nobody = subprocess.run(["sh", "-s"], input=script, text=True, env=told, capture_output=True)
    assert nobody.returncode and "the group of those" in nobody.stderr
    assert not list(tmp_path.iterdir())
    subprocess.run(["sh", "-s", "hpc"], input=script, text=True, check=True, env=told)
    made = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {
        "60-uffdprefetch.rules": (
            'KERNEL=="userfaultfd", SUBSYSTEM=="misc", GROUP="hpc", MODE="0660"\n'
        ),
        "60-uffdprefetch.conf": "#vm.max_map_count = 262144\n",
        "uffdprefetch.conf": (
            "w /sys/kernel/mm/transparent_hugepage/shmem_enabled - - - - advise\n"
        ),
    }


@pytest.mark.parametrize(
    ("there", "in_a_venv", "cure"),
    [
        (False, True, "sudo apt-get install python3-bpfcc"),
        (True, True, "include-system-site-packages = true"),
        (True, False, "/usr/bin/python3"),
    ],
)
def test_the_cure_of_a_missing_bcc_is_that_of_the_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool, in_a_venv: bool, cure: str
) -> None:
    place = tmp_path / "bcc"
    if there:
        place.touch()
    monkeypatch.setattr(bpf_compiler, "_DISTRIBUTIONS_BCC", place)
    monkeypatch.setattr(sys, "prefix", str(tmp_path) if in_a_venv else sys.base_prefix)
    monkeypatch.setitem(sys.modules, "bcc", None)
    with pytest.raises(bpf_compiler.NoBpf) as caught:
        bpf_compiler.import_bcc()
    assert caught.value.remedy is not None and cure in caught.value.remedy


def test_the_cure_of_a_venv_that_does_not_see_the_system_cures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    place = tmp_path / "bcc"
    place.touch()
    monkeypatch.setattr(bpf_compiler, "_DISTRIBUTIONS_BCC", place)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "v"))
    monkeypatch.setitem(sys.modules, "bcc", None)
    sees = "import site, sys; print(any('dist-packages' in p for p in sys.path))"
    python = tmp_path / "v" / "bin" / "python"

    def sees_the_system() -> bool:
        done = subprocess.run([python, "-c", sees], capture_output=True, text=True, check=True)
        return done.stdout.strip() == "True"

    require(not sees_the_system(), "this interpreter sees the system's packages in any case")
    with pytest.raises(bpf_compiler.NoBpf) as caught:
        bpf_compiler.import_bcc()
    subprocess.run(["sh", "-c", caught.value.remedy or "false"], check=True)
    config = (tmp_path / "v" / "pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in config


def with_a_device(tmp_path: Path, owner: str, mode: str) -> tuple[str, ...]:
    """The words that run a command where /dev/userfaultfd has this owner and mode: in a mount
    namespace."""
    require(Path("/dev/userfaultfd").exists(), "no /dev/userfaultfd in this kernel")
    number = Path("/dev/userfaultfd").stat().st_rdev
    script = (
        f"mount -t tmpfs none {tmp_path} && cd {tmp_path} &&"
        f" mknod open c {os.major(number)} {os.minor(number)} &&"
        f" chown {owner} open && chmod {mode} open &&"
        ' mount --bind open /dev/userfaultfd && cd / && exec "$@"'
    )
    return ("unshare", "-m", "sh", "-c", script, "sh")


def test_nobody_reaches_rung_1_through_an_open_device(env: dict[str, str], tmp_path: Path) -> None:
    """What `doctor --site` sets for a group really lifts the rung (in a mount namespace)."""
    prefix = require_unprivileged(env)
    env["UFFDPREFETCH_POLICY"] = "fixed"
    document = report(env, prefix=(*with_a_device(tmp_path, "0:65534", "0660"), *prefix))
    assert document["by_name"]["/dev/userfaultfd"]["status"] == OK
    assert document["by_name"]["kernel-mode fault"]["status"] == OK
    assert document["rung"] == 1


@pytest.mark.parametrize(
    ("owner", "mode", "cure"),
    [
        ("0:0", "0600", site.COMMAND),
        ("0:12345", "0660", "sudo gpasswd -a nobody 12345"),  # whose a site has chosen
    ],
)
def test_a_device_that_is_shut_to_this_user_is_a_matter_of_its_mode(
    env: dict[str, str], tmp_path: Path, owner: str, mode: str, cure: str
) -> None:
    """No option of a container's engine opens what is there and has the wrong mode."""
    require(Path("/proc/sys/vm/unprivileged_userfaultfd").read_text() != "1\n", "open to all")
    prefix = (*with_a_device(tmp_path, owner, mode), *require_unprivileged(env))
    env["UFFDPREFETCH_POLICY"] = "fixed"
    document = report(env, prefix=prefix)
    for name in ("lay a checkpoint", "/dev/userfaultfd", "pool"):
        assert document["by_name"][name]["lift"].startswith(cure), document["by_name"][name]
        assert f"/dev/userfaultfd is {mode} of uid 0" in document["by_name"][name]["found"]
    _, out, _ = run(env, prefix=prefix)
    (told,) = [line for line in out.splitlines() if line.startswith("cure: ")]
    assert told.startswith(f"cure: {cure}")


@pytest.mark.parametrize("in_a_container", [False, True])
def test_a_device_that_is_missing_is_a_matter_of_who_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_a_container: bool
) -> None:
    (tmp_path / "mark").touch()
    monkeypatch.setattr(faults, "DEVICE", str(tmp_path / "none"))
    monkeypatch.setattr(faults, "_seccomp_is_on", lambda: False)
    marks = (str(tmp_path / ("mark" if in_a_container else "no mark")),)
    monkeypatch.setattr(faults, "CONTAINER_MARKS", marks)
    assert faults.cure() == (faults.IN_A_CONTAINER if in_a_container else site.COMMAND)


def test_what_is_ready_needs_no_cure() -> None:
    """Least of all one that runs a script as root for the sake of huge pages."""
    note = Check("pool huge pages", NOTE, "shmem_enabled is never", "pages of 4 KiB", site.COMMAND)
    told = show.short(doctor.assess([*checks(), note]))
    assert told.startswith("ready") and "pool huge pages: pages of 4 KiB" in told
    assert "cure: " not in told and "sudo" not in told
    limit = Check("vm.max_map_count", LIMIT, "1024", "fewer streams are followed", site.COMMAND)
    told = show.short(doctor.assess([*checks(), note, limit]))
    assert told.startswith("works with limits") and f"\ncure: {site.COMMAND}\n" in told


def test_each_line_says_why() -> None:
    """Of the pool none did, as where this user gets no userfaultfd."""
    no_pool = Check("pool", NOTE, "no userfaultfd: /dev/userfaultfd is 0600", "runs as cache")
    told = show.short(doctor.assess([*checks(), no_pool]))
    assert "\npool: runs as cache (no userfaultfd: /dev/userfaultfd is 0600)\n" in told
    said = Check("read_ahead_kb", NOTE, "128 (sysfs)", "128 (sysfs): 59.6 MB/s at most")
    told = show.short(doctor.assess([*checks(), said]))
    assert "\nread_ahead_kb: 128 (sysfs): 59.6 MB/s at most\n" in told


# ---- storage ------------------------------------------------------------------------------------


def test_warming_is_checked_on_pages_that_were_cold(data: Path) -> None:
    require(cached_pages(data) == 0, "this file system does not drop pages by fadvise")
    found = storage.warm(str(data))
    assert found.status == OK, found
    assert found.values["wanted_pages"] == (4 << 20) // sc.PAGE_BYTES
    assert cached_pages(data) >= found.values["wanted_pages"]


def test_what_is_warm_is_not_taken_for_warmed(data: Path) -> None:
    data.read_bytes()
    found = storage.warm(str(data))
    assert found.status == SKIPPED
    assert "cached already" in found.found
    assert found.remedy == f"dd if={data} iflag=nocache count=0"


def test_warming_looks_for_a_cold_extent(data: Path) -> None:
    with open(data, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 0)
    found = storage.warm(str(data))
    assert found.status == OK
    assert found.values["offset_bytes"] >= 4 << 20


def test_a_call_that_fills_nothing_is_not_believed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Lustre client: readahead(2) returns 0 and does nothing; pread is then tried."""
    monkeypatch.setattr(sc, "readahead", lambda *_: None)
    monkeypatch.setattr(storage, "_SETTLE_SECONDS", 0.0)
    found = storage.warm(str(data))
    assert found.status == OK
    assert (found.values["readahead_pages"], found.values["pread_pages"]) == (0, 1024)
    assert "pread is used" in found.follows


def test_a_cache_that_keeps_nothing_is_a_limit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.Residency, "pages", lambda *_: 0)
    monkeypatch.setattr(storage, "_SETTLE_SECONDS", 0.0)
    assert storage.warm(str(data)).status == LIMIT


def test_a_file_in_memory_has_nothing_to_prefetch() -> None:
    require(os.path.isdir("/dev/shm"), "no /dev/shm")
    path = f"/dev/shm/{own_name('doctor')}"
    Path(path).write_bytes(b"x" * 65536)
    try:
        assert storage.file_system(path).status == NOTE
        assert storage.warm(path).status == SKIPPED
    finally:
        os.unlink(path)


def test_a_writer_refuses_the_lease(data: Path) -> None:
    quiet = storage.lease(str(data))
    require(quiet.status == OK, f"no lease on this file system: {quiet.found}")
    with open(data, "rb+"):
        busy, unasked = storage.lease(str(data), wanted=True), storage.lease(str(data))
    assert (busy.status, unasked.status) == (LIMIT, NOTE)
    assert "open for writing" in busy.found
    assert storage.lease(str(data)).status == OK  # and none is left behind


def test_the_readahead_file_is_never_opened_for_writing(env: dict[str, str], data: Path) -> None:
    """Writing read_ahead_kb of a Lustre client panics the node."""
    require(shutil.which("strace"), "strace is not installed")
    trace = data.with_name("trace")
    words = ["strace", "-f", "-qq", "-e", "trace=openat,open", "-o", str(trace)]
    subprocess.run(
        [*words, *uffdprefetch("doctor", str(data))], env=env, capture_output=True, check=False
    )
    opened = [line for line in trace.read_text(errors="replace").splitlines() if "/sys/" in line]
    assert any("read_ahead_kb" in line for line in opened)
    for line in opened:
        if "/sys/" in line and "/sys/kernel" not in line and "/sys/fs/bpf" not in line:
            assert "O_WRONLY" not in line and "O_RDWR" not in line, line


# ---- memory -------------------------------------------------------------------------------------


def test_a_small_cgroup_cuts_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_limit_bytes", lambda: 256 << 20)
    found = machine.memory(4 << 30)
    assert found.status == LIMIT and "256 MiB" in found.found
    assert found.remedy == f"run it {Limit.CGROUP.raised_to(0)}"
    with monkeypatch.context() as full:
        full.setattr(cgroup, "left_bytes", lambda: 33 << 20)
        found = machine.memory(4 << 30)
    assert found.status == CANNOT and found.found.startswith("33 MiB are left in the memory")
    monkeypatch.setattr(machine, "cgroup_limit_bytes", lambda: None)
    monkeypatch.setattr(machine, "_mem_available_bytes", lambda: 7 << 30)
    found = machine.memory(4 << 30)
    assert found.status == LIMIT and found.remedy == f"run it {Limit.MEMORY.raised_to(0)}"
    monkeypatch.setattr(machine, "_mem_available_bytes", lambda: 64 << 30)
    assert machine.memory(4 << 30).status == OK


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "files", "expected"),
    [
        (
            "30 1 0:26 / {root} rw - cgroup2 cgroup2 rw", "0::/job/step",
            {"job/memory.max": "1073741824", "job/step/memory.max": "max"}, 1 << 30,
        ),
        (
            "31 1 0:27 / {root} rw - cgroup cgroup rw,memory", "4:memory:/job",
            {"memory.limit_in_bytes": "9223372036854771712", "job/memory.limit_in_bytes": "4096"},
            4096,
        ),
        (
            "31 1 0:27 / {root} rw - cgroup cgroup rw,memory", "4:memory:/job",
            {"job/memory.limit_in_bytes": "9223372036854771712"}, None,
        ),
        ("", "0::/", {}, None),
    ],
)  # fmt: skip
def test_the_tightest_cgroup_limit_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mountinfo: str,
    cgroup: str,
    files: dict[str, str],
    expected: int | None,
) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    texts = {
        "/proc/self/mountinfo": mountinfo.replace("{root}", str(root)),
        "/proc/self/cgroup": cgroup,
    }
    real = Path.read_text

    def read_text(self: Path) -> str:
        return texts[str(self)] if str(self) in texts else real(self)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert machine.cgroup_limit_bytes() == expected


# ---- probes that go wrong -----------------------------------------------------------------------


def crash() -> Check:
    faulthandler.disable()  # pytest's would print a traceback of this wanted crash
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def test_a_probe_that_raises_crashes_or_answers_nonsense_is_a_finding() -> None:
    def raises() -> Check:
        raise RuntimeError("odd kernel")

    def leaves() -> Check:
        os._exit(3)

    assert "RuntimeError: odd kernel" in run_isolated("x", raises).found
    assert "killed by SIGSEGV" in run_isolated("x", crash).found
    assert "without an answer" in run_isolated("x", leaves).found
    assert run_isolated("x", crash).status == LIMIT


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def hangs() -> Check:
        subprocess.run(["sh", "-c", f"echo $$ >{note}; exec sleep 600"], check=False)
        raise AssertionError

    # The time limit must not run out before the grandchild is there.
    for seconds in (1.0, 5.0, 25.0):
        found = run_isolated("x", hangs, timeout_seconds=seconds)
        assert "did not end" in found.found
        if note.exists() and note.read_text():
            break
    pid = int(note.read_text())
    wait_until(lambda: process_gone(pid), "the end of what the probe had started")


def test_the_doctor_survives_every_probe_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, _ in doctor._probes("/x", Config())]
    monkeypatch.setattr(doctor, "_probes", lambda *_: [(name, crash) for name in names])
    found = doctor.examine("/etc/passwd", Config())
    assert found.exit_status == 1 and found.rung is None
    assert len(found.checks) == len(names)


# ---- the verdict --------------------------------------------------------------------------------


def checks(**changed: str) -> list[Check]:
    names = {
        "syscall": "userfaultfd(2)", "lay": "lay a checkpoint", "kernel": "kernel-mode fault",
        "pidfd": "pidfd_getfd", "close": "close_range", "tables": "page tables",
        "preload": "preload object", "helper": "helper", "rundir": "runtime directory",
    }  # fmt: skip
    return [Check(name, changed.get(key, OK), f"{key} found") for key, name in names.items()]


@pytest.mark.parametrize(
    ("changed", "rung", "exit_status", "reason"),
    [
        ({}, 2, 0, "page tables"),
        ({"syscall": NOTE, "lay": NOTE, "kernel": NOTE}, 2, 0, "page tables"),
        ({"pidfd": LIMIT}, 2, 2, "want of: pidfd_getfd"),
        ({"close": LIMIT}, 2, 2, "want of: close_range"),
        ({"tables": LIMIT}, None, 1, "page tables: tables found"),
        ({"pidfd": LIMIT, "tables": LIMIT}, None, 1, "neither pidfd_getfd"),
        ({"preload": CANNOT}, 2, 1, "preload object"),
        ({"helper": CANNOT}, None, 1, "no service: helper"),
    ],
)
def test_by_default_page_tables_are_all_that_is_needed(
    changed: dict[str, str], rung: int | None, exit_status: int, reason: str
) -> None:
    found = doctor.assess(checks(**changed))
    assert (found.rung, found.exit_status) == (rung, exit_status)
    assert reason in found.rung_reason


@pytest.mark.parametrize("options", [{"policy": "fixed"}, {"engine": "pool"}])
@pytest.mark.parametrize(
    ("changed", "rung", "exit_status", "reason"),
    [
        ({}, 1, 0, "userfaultfd"),
        ({"syscall": NOTE}, 1, 0, "userfaultfd"),  # the device was the way in
        ({"lay": LIMIT}, 2, 2, "lay found"),
        ({"kernel": LIMIT}, 2, 2, "kernel-mode fault"),
        ({"pidfd": LIMIT}, 2, 2, "pidfd_getfd"),
        ({"tables": LIMIT}, 1, 2, "userfaultfd"),
        ({"lay": LIMIT, "tables": LIMIT}, None, 1, "neither"),
        ({"preload": CANNOT}, 2, 1, "preload object"),
        ({"helper": CANNOT}, None, 1, "no service: helper"),
        ({"rundir": CANNOT}, None, 1, "no service: runtime directory"),
    ],
)
def test_what_lies_over_mappings_needs_a_userfaultfd(
    options: dict[str, str], changed: dict[str, str], rung: int | None, exit_status: int,
    reason: str,
) -> None:  # fmt: skip
    found = doctor.assess(checks(**changed), Config.of(**options))  # type: ignore[arg-type]
    assert (found.rung, found.exit_status) == (rung, exit_status)
    assert reason in found.rung_reason


# ---- what is read by calls ----------------------------------------------------------------------


def test_system_calls_that_are_hidden_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: Any) -> str:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    assert reads.calls().status == OK
    monkeypatch.setattr(Path, "read_text", refused)
    found = reads.calls()
    assert found.status == NOTE and "EPERM" in found.found and "pread(2)" in found.follows


def test_names_are_told_by_inotify_where_fanotify_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> Any:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    assert reads.names().status == OK
    monkeypatch.setattr(opens, "Fanotify", refused)
    monkeypatch.setattr(refused, "__name__", "Fanotify")
    found = reads.names()
    assert found.status == OK and found.found.startswith("inotify tells them (fanotify: ")
    monkeypatch.setattr(opens, "Inotify", refused)
    assert reads.names().status == NOTE
