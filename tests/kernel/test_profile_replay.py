# SPDX-License-Identifier: Apache-2.0
"""The program that replays a start profile (csrc/replay/): what it reads, and never does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cgroups import entering, kills, memory_group, pids_group
from conftest import HANG_SECONDS, process_gone, require, wait_until
from nobody import Nobody
from start_profiles import Opens, Replays, directory_entry, file_entry, name_entry

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes, why_no_bed
from uffdprefetch.launch.replay import PROGRAM, why_not
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry, StartProfile

KIB, MIB = 1 << 10, 1 << 20
FILES, FILE_BYTES = 60, 30_000
KILLS = 40


@pytest.fixture(autouse=True)
def built() -> None:
    require(why_not() is None, why_not() or "")


@pytest.fixture
def replays(tmp_path: Path) -> Replays:
    return Replays(tmp_path)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[SlowBed]:
    """Files ``small0`` ... in directories of ten, and ``large`` (6 MiB)."""
    require(why_no_bed() is None, why_no_bed() or "")
    source, mount = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    mount.mkdir()
    (source / "large").write_bytes(os.urandom(6 * MIB))
    for number in range(FILES):
        directory = source / f"part{number // 10}"
        directory.mkdir(exist_ok=True)
        (directory / f"small{number}").write_bytes(os.urandom(FILE_BYTES))
    made = SlowBed(source, mount, bandwidth=0, latency_us=200, lookup_us=100)
    made.mount()
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.kill(made.pid, signal.SIGCONT)
    made.unmount()


def small(bed: SlowBed) -> list[Path]:
    return [bed.path(f"part{number // 10}/small{number}") for number in range(FILES)]


def start_of(bed: SlowBed) -> list[StartEntry]:
    """All of them, their directories and a name that is not there; nothing of it is in memory."""
    directories = [bed.path(f"part{number}") for number in range(FILES // 10)]
    entries = [*map(directory_entry, directories), *map(file_entry, small(bed))]
    entries += [name_entry(bed.path("part0/missing")), file_entry(bed.path("large"))]
    bed.unmount()
    bed.mount()
    return entries


# ---- what is read -------------------------------------------------------------------------------


def test_all_that_a_profile_names_is_read_by_no_more_requests_than_a_plain_start_makes(
    bed: SlowBed, replays: Replays
) -> None:
    replays.of(*start_of(bed))
    bed.reset()
    told = replays.run()
    asked = bed.counters()
    size = FILES * FILE_BYTES + 6 * MIB
    counts = [told[name] for name in ("state", "files", "directories", "names", "bytes")]
    assert counts == ["done", FILES + 1, FILES // 10, 1, size]
    assert told["skipped"] == {} and told["waited_bytes"] == size
    assert all(resident_bytes(path) >= path.stat().st_size for path in small(bed))
    assert asked["bytes"] == size
    start_of(bed)
    bed.reset()
    for path in (*small(bed), bed.path("large")):
        os.listdir(path.parent)
        with open(path, "rb") as file:
            while file.read(4096):
                pass
    plain = bed.counters()
    assert asked["requests"] <= plain["requests"] and asked["opens"] <= plain["opens"]
    # the missing name, which a start asks for, too; others on the machine may have names forgotten
    assert asked["lookups"] < plain["lookups"] + FILES // 10


def test_where_names_of_directories_are_not_kept_one_is_listed(
    bed: SlowBed, replays: Replays
) -> None:
    """This FUSE is asked for them each time. They are looked up all the same."""
    replays.of(*(one for one in start_of(bed) if one.kind is EntryKind.DIRECTORY))
    bed.reset()
    told = replays.run(depth=1)
    assert (told["state"], told["directories"]) == ("done", FILES // 10)
    asked = bed.counters()
    assert (asked["opendirs"], asked["lookups"]) == (1, FILES // 10)


def test_what_is_there_is_not_asked_for_again(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    replays.run()
    bed.reset()
    told = replays.run()
    assert told["waited_bytes"] == 0 and told["bytes"] == FILES * FILE_BYTES + 6 * MIB
    assert bed.counters()["requests"] == 0


def test_ranges_are_read_and_small_gaps_between_them(bed: SlowBed, replays: Replays) -> None:
    """Blocks of 64 KiB: a gap of two is read over, one of three is not; the last ends the file."""
    path = bed.path("large")
    drop_cache(path)
    replays.of(file_entry(path, ((0, 1), (3, 1), (7, 2), (95, 1))))
    told = replays.run()
    assert (told["files"], told["bytes"]) == (1, (4 + 2 + 1) * 64 * KIB)
    assert bed.counters()["bytes"] == told["bytes"]
    assert resident_bytes(path) == told["bytes"]


def test_no_more_is_read_than_the_budget(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    bed.reset()
    told = replays.run(budget_bytes=10 * FILE_BYTES + 5000)
    assert told["state"] == "budget" and told["bytes"] == 10 * FILE_BYTES + 5000
    assert bed.counters()["bytes"] <= 10 * FILE_BYTES + 5000 + 4 * KIB  # the last page whole
    assert told["skipped"] == {"budget": FILES + 1 - 11}
    assert (told["directories"], told["names"]) == (FILES // 10, 1)


@pytest.mark.root
def test_of_a_memory_groups_limit_no_more_than_a_share_is_taken(
    bed: SlowBed, replays: Replays
) -> None:
    """An eighth of what it leaves (native/memory_limits.py)."""
    replays.of(*start_of(bed))
    bed.reset()
    limit = 40 * MIB
    with memory_group(limit) as group:
        words = [*entering(group), *replays.words()]
        assert replays.start(words).wait(HANG_SECONDS) == 0
        assert kills(group) == 0
    told = replays.told()
    assert told["state"] == "budget" and 0 < told["bytes"] <= limit // 8
    assert bed.counters()["bytes"] <= limit // 8 + 4 * KIB


def test_what_is_left_out_takes_no_part_of_the_budget(bed: SlowBed, replays: Replays) -> None:
    entries = start_of(bed)
    files = [one for one in entries if one.kind is EntryKind.FILE][:FILES]
    changed = [replace(one, mtime_ns=one.mtime_ns + 1) for one in files[:30]]
    replays.of(*changed, *files[30:40])
    told = replays.run(budget_bytes=10 * FILE_BYTES)
    assert (told["files"], told["skipped"]) == (10, {"changed": 30})


def test_large_parts_are_read_by_requests_of_twice_the_kernels_own(
    bed: SlowBed, replays: Replays
) -> None:
    """FADV_SEQUENTIAL doubles read_ahead_kb, and FADV_RANDOM leaves it so (mm/fadvise.c)."""
    path = bed.path("large")
    entry = file_entry(path, ((0, 16), (32, 16)))
    drop_cache(path)
    bed.reset()
    replays.of(entry).run()
    asked = bed.counters()
    assert asked["largest_request_bytes"] == 2 * bed.read_ahead_kb * KIB
    assert (asked["bytes"], asked["requests"]) == (2 * MIB, 2 * MIB // (256 * KIB))


# ---- beside a job -------------------------------------------------------------------------------

#: AHEAD_FILES of csrc/replay/replay.c.
AHEAD = 24


@pytest.fixture
def opens() -> Iterator[Opens]:
    made = Opens()
    yield made
    os.close(made.fd)


@pytest.fixture
def following(bed: SlowBed, replays: Replays) -> Iterator[subprocess.Popen[bytes]]:
    """A replay of small files, which is told of none that its job has opened."""
    replays.of(*map(file_entry, small(bed)), file_entry(bed.path("large"), ((0, 1),)))
    with replays.start(follows=True) as running:
        wait_until(lambda: count(replays) == AHEAD, "all that may be ahead of the job is read")
        yield running
        running.kill()


def count(replays: Replays) -> int:
    """Files that were read so far."""
    try:
        return int(replays.told()["files"])
    except (KeyError, ValueError, UnicodeDecodeError):  # it tells just now, or not yet
        return -1


def test_no_more_is_read_than_the_job_uses(
    bed: SlowBed, replays: Replays, opens: Opens, following: subprocess.Popen[bytes]
) -> None:
    """Nor what is wanted in parts behind them. What was not there when it was opened, and what is
    not read ahead yet, shows no use."""
    replays.follow(opens.path)
    for path in (bed.path("missing"), *small(bed)[-3:]):
        opens.note(path)
    opens.note(small(bed)[0], missing=True)
    for path in small(bed)[:5]:
        opens.note(path)
    wait_until(lambda: count(replays) == AHEAD + 5, "so many more are read as were opened")
    for path in small(bed)[5:]:
        opens.note(path)
    assert following.wait(HANG_SECONDS) == 0
    told = replays.told()
    assert (told["state"], told["files"]) == ("done", FILES + 1)


def test_what_is_opened_by_a_path_that_is_not_absolute_is_used_too(
    bed: SlowBed, replays: Replays, opens: Opens, following: subprocess.Popen[bytes]
) -> None:
    """By the working directory, or the one that openat(2) is given, as long as its process has it;
    of one that has ended by that in which it was loaded. What nobody knows shows no use."""
    replays.follow(opens.path)
    root = bed.mountpoint
    names = [str(path.relative_to(root)) for path in small(bed)]
    job = subprocess.Popen(["sleep", "600"], cwd=root)
    fd = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in ("..", "/".join([".."] * 99), "x" * 256, f"{names[0]}/../missing", "." * 4000):
            opens.note(name, pid=job.pid)
        opens.note(names[1], pid=2**31 - 1)
        opens.note(names[1], pid=job.pid, directory=2**31 - 1)
        opens.note(names[0], pid=job.pid)
        opens.note(f"./none/..//{names[1]}", pid=job.pid)
        opens.note(f"{root.name}/{names[2]}", pid=os.getpid(), directory=fd)
        opens.note(f"{'../' * 99}{str(small(bed)[3])[1:]}", pid=job.pid)
        ended = 2**31 - 2
        opens.note("none", pid=ended, is_where=True)
        opens.note(names[4], pid=ended)
        opens.note(root, pid=ended, is_where=True, size=2**16 - 1)
        opens.note(names[4], pid=ended)
        opens.note(root, pid=ended, is_where=True)
        opens.note(names[4], pid=ended - 4096)
        opens.note(root.name, pid=ended, directory=2**31 - 1)
        opens.note(names[5], pid=ended)
        wait_until(lambda: count(replays) == AHEAD + 5, "so many more are read as were opened")
        for name in names[4:]:
            opens.note(name, pid=job.pid)
        assert following.wait(HANG_SECONDS) == 0
        assert replays.told()["state"] == "done"
    finally:
        os.close(fd)
        job.kill()
        job.wait()


def test_a_log_in_which_anything_may_lie_harms_nobody(
    bed: SlowBed, replays: Replays, opens: Opens, following: subprocess.Popen[bytes]
) -> None:
    """It is the job's memory. So is what lies under the log's name."""
    for other in ("/dev/zero", str(bed.path("large")), "/nowhere"):
        replays.follow(f"{other}\0")
    replays.follow(f"{opens.path}\0")
    for word in (2**32 - 1, 3403776 // 8, 3403776 // 8 + 1, 3403776 // 8 - 1, 5):
        opens.slot(word)
    opens.note(small(bed)[0], size=2**16 - 1)
    for path in small(bed):
        opens.note(path)
    assert following.wait(HANG_SECONDS) == 0
    assert replays.told()["state"] == "done"


@pytest.fixture
def long(tmp_path: Path, replays: Replays) -> Replays:
    """40 MiB, for which it takes 40 s with a rate of one a second."""
    paths = [tmp_path / f"file{number}" for number in range(40)]
    for path in paths:
        path.write_bytes(bytes(MIB))
    return replays.of(*map(file_entry, paths))


@contextlib.contextmanager
def beginning(replays: Replays, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that has just been started by the words before it."""
    running = replays.start([*before, *replays.words(rate=MIB)])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def has_workers(running: subprocess.Popen[bytes], workers: int, replays: Replays) -> None:
    if workers:
        tasks = Path(f"/proc/{running.pid}/task")
        wait_until(lambda: len(list(tasks.iterdir())) == 1 + workers, "its threads")
    else:
        assert running.wait(HANG_SECONDS) == 0
        assert replays.told()["state"] == "no threads"


@pytest.mark.parametrize(("may_have", "workers"), [(1024, 32), (100, 3), (20, 0)])
def test_of_the_threads_that_a_user_may_have_a_share_is_taken(
    may_have: int, workers: int, long: Replays
) -> None:
    """With ``ulimit -u 40`` the job could not fork any more."""
    with beginning(long, "prlimit", f"--nproc={may_have}") as running:
        has_workers(running, workers, long)


@pytest.mark.parametrize(("may_have", "workers"), [("1000", 32), ("40", 4), ("5", 0), ("max", 32)])
def test_of_the_threads_that_a_group_leaves_a_share_is_taken(
    may_have: str, workers: int, long: Replays
) -> None:
    """It is a group below the one that has the limit."""
    with pids_group(may_have) as group, beginning(long, *entering(group)) as running:
        has_workers(running, workers, long)


def test_it_is_no_real_time_program_where_the_job_is_one(long: Replays) -> None:
    require(os.geteuid() == 0, "an ordinary user may not enter SCHED_FIFO")
    with beginning(long, "chrt", "-f", "5") as running:
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, running.pid) == 10, "its priority")
        assert os.sched_getscheduler(running.pid) == os.SCHED_OTHER


def test_a_rate_that_is_given_is_kept_and_all_is_read(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    told = replays.run(rate=16 * MIB, depth=4)
    assert (told["state"], told["files"]) == ("done", FILES + 1)
    # the last piece is read at the beginning of its turn
    assert told["bytes"] <= 16 * MIB * told["seconds"] + MIB


# ---- files that are another's by now --------------------------------------------------------


def test_a_file_that_was_changed_is_left_out(tmp_path: Path, replays: Replays) -> None:
    paths = [tmp_path / name for name in ("longer", "touched", "moved", "gone", "same")]
    for path in paths:
        path.write_bytes(b"x" * 70_000)
    entries = [file_entry(path) for path in paths]
    entries[2] = replace(entries[2], f_type=entries[2].f_type + 1)
    with open(paths[0], "ab") as file:
        file.write(b"y")
    os.utime(paths[0], ns=(0, entries[0].mtime_ns))
    os.utime(paths[1], ns=(0, entries[1].mtime_ns + 1))
    paths[3].unlink()
    told = replays.of(*entries).run()
    assert told["skipped"] == {"changed": 3, "gone": 1}
    assert (told["files"], told["bytes"]) == (1, 70_000)


def test_nothing_is_opened_but_regular_files_and_directories(
    tmp_path: Path, replays: Replays
) -> None:
    """Whatever a profile says of them. (An open of a FIFO's end would take what lies in it, and
    some devices do something.)"""
    regular = tmp_path / "file"
    regular.write_bytes(b"x")
    fifo, loop, link = tmp_path / "fifo", tmp_path / "loop", tmp_path / "link"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    link.symlink_to("/dev/zero")
    like = file_entry(regular)
    made_up = [directory_entry(Path(name)) for name in ("/proc", "/sys/kernel")]
    names = [
        *(fifo, link, "/dev/zero", "/dev/watchdog", "/proc/self/environ", "/sys/kernel/vmcoreinfo"),
        tmp_path,
    ]
    files = [replace(like, path=str(name)) for name in names]
    root = tmp_path / "sys"
    root.symlink_to("/sys/kernel")
    about = [file_entry(root / "vmcoreinfo"), directory_entry(root)]
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"for somebody else")
    told = replays.of(*files, *made_up, *about, replace(like, path=str(loop))).run()
    assert os.read(writer, 64) == b"for somebody else"
    os.close(writer)
    assert told["files"] == told["directories"] == told["bytes"] == 0
    assert told["skipped"] == {"no_file": len(names) + len(made_up) + 2, "failed": 1}


def test_a_path_that_is_swapped_meanwhile_opens_nothing_else(
    tmp_path: Path, replays: Replays
) -> None:
    path, beside, fifo = tmp_path / "file", tmp_path / "beside", tmp_path / "fifo"
    path.write_bytes(b"x" * 5000)
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"for somebody else")
    entry = file_entry(path)
    others = (f"{tmp_path}/{'./' * (n + 1)}file" for n in range(400))
    replays.of(entry, *(replace(entry, path=name) for name in others))
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            beside.symlink_to(fifo)
            os.replace(beside, path)
            beside.write_bytes(b"x" * 5000)
            os.utime(beside, ns=(0, entry.mtime_ns))
            os.replace(beside, path)

    thread = threading.Thread(target=swap)
    thread.start()
    seen: set[str] = set()
    for _ in range(20):
        told = replays.run()
        seen |= {"read"} if told["files"] else set()
        seen |= set(told["skipped"])
        assert told["files"] + sum(told["skipped"].values()) == 401
    stop.set()
    thread.join()
    assert os.read(writer, 64) == b"for somebody else"
    os.close(writer)
    assert {"read", "no_file"} <= seen


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A directory that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        yield Path(directory)


@pytest.mark.root
def test_what_a_user_may_not_read_is_not_read(everybodys: Path) -> None:
    nobody = Nobody(everybodys)
    replays = Replays(nobody.work)
    secret, own = everybodys / "secret", nobody.work / "own"
    for path, mode in ((secret, 0o600), (own, 0o644)):
        path.write_bytes(b"x" * 5000)
        path.chmod(mode)
    os.chown(own, os.stat(nobody.work).st_uid, -1)
    replays.of(file_entry(secret), file_entry(own))
    replays.profile.chmod(0o644)
    program = str(nobody.directory / "uffdprefetch" / Path(PROGRAM).name)
    shell = ["sh", "-c", '"$0" "$$" "$@"; exit $?', program, *replays.words()[2:]]
    assert replays.start([*nobody.prefix, *shell]).wait(HANG_SECONDS) == 0
    told = replays.told()
    assert (told["files"], told["skipped"]) == (1, {"refused": 1})


# ---- a profile that is none -----------------------------------------------------------------


def test_of_several_profiles_the_first_sound_one_is_replayed(
    tmp_path: Path, replays: Replays
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    replays.of(file_entry(file))
    flipped = bytearray(replays.profile.read_bytes())
    flipped[-1] ^= 1
    damaged, fifo, none = tmp_path / "damaged", tmp_path / "fifo", tmp_path / "none"
    damaged.write_bytes(flipped)
    os.mkfifo(fifo)
    told = replays.run(profiles=[none, fifo, damaged, replays.profile])
    assert (told["state"], told["profile"], told["flaw"], told["files"]) == ("done", 3, 0, 1)
    told = replays.run(profiles=[none, damaged])
    assert (told["state"], told["profile"], told["flaw"], told["files"]) == ("no profile", -1, 3, 0)
    assert replays.run(profiles=[none, fifo])["flaw"] == 1
    told = replays.run(profiles=[none, tmp_path / "another"])
    assert (told["state"], told["profile"], told["flaw"]) == ("first run", -1, 0)


# ---- one at a time, and no longer than it is wanted ---------------------------------------------


def test_a_profile_that_does_not_name_what_starts_is_another_program_s(
    tmp_path: Path, replays: Replays
) -> None:
    """A site's that does is replayed in its place."""
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    replays.of(file_entry(file), name_entry(Path("/opt/other/python")))
    told = replays.run(program="/opt/mine/python")
    assert (told["state"], told["files"], told["flaw"]) == ("another program", 0, 0)
    site = tmp_path / "site.upl"
    entries = (file_entry(file), name_entry(Path("/opt/mine/python")))
    profile_store.store(str(site), StartProfile(entries, 1))
    told = replays.run(program="/opt/mine/python", profiles=[replays.profile, site])
    assert (told["state"], told["profile"], told["files"]) == ("done", 1, 1)


def test_only_one_replays_at_a_time(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    bed.reset()
    with open(replays.lock, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert replays.start().wait(HANG_SECONDS) == 3
    assert bed.counters()["lookups"] == 0
    assert replays.run()["state"] == "done" and not replays.lock.exists()


def test_where_there_can_be_no_lock_nothing_is_read(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    bed.reset()
    replays.lock.symlink_to(replays.lock.with_name("another"))
    assert replays.start().wait(HANG_SECONDS) == 4
    assert bed.counters()["lookups"] == 0


def test_a_lock_that_its_last_holder_has_removed_is_made_anew(
    tmp_path: Path, replays: Replays
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    replays.of(file_entry(file))
    for _ in range(20):
        running = [replays.start() for _ in range(4)]
        replays.lock.unlink(missing_ok=True)
        assert {one.wait(HANG_SECONDS) for one in running} <= {0, 3}


def test_who_is_no_child_of_its_launcher_reads_nothing(bed: SlowBed, replays: Replays) -> None:
    """The launcher had ended before."""
    replays.of(*start_of(bed))
    bed.reset()
    assert replays.start(parent=1).wait(HANG_SECONDS) == 0
    assert replays.result.read_bytes() == b"" and not replays.lock.exists()
    assert bed.counters()["lookups"] == 0


def test_it_ends_with_its_launcher(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    os.kill(bed.pid, signal.SIGSTOP)
    words = replays.words(parent=0)
    code = (
        "import os, signal, subprocess, sys; words = sys.argv[1:]; words[1] = str(os.getpid());"
        " print(subprocess.Popen(words).pid, flush=True); signal.pause()"
    )
    with open(replays.result, "wb") as told:
        launcher = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=told, stdout=subprocess.PIPE
        )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    wait_until(replays.result.read_bytes, "the replay")
    launcher.kill()
    launcher.wait()
    wait_until(lambda: process_gone(pid), "the end of the replay")
    launcher.stdout.close()


def test_it_ends_when_its_time_is_over_and_its_storage_does_not_answer(
    bed: SlowBed, replays: Replays
) -> None:
    replays.of(*start_of(bed))
    os.kill(bed.pid, signal.SIGSTOP)
    told = replays.run(seconds=1)
    assert told["state"] == "time" and told["bytes"] == 0
    assert told["skipped"] == {"time": FILES + 1 + FILES // 10 + 1}


def test_it_may_be_killed_at_any_moment(bed: SlowBed, replays: Replays) -> None:
    chance = random.Random(46)
    entries = start_of(bed)
    replays.of(*entries)
    whole = replays.run()["seconds"]
    for _ in range(KILLS):
        running = replays.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(chance.uniform(0, 2 * whole))
        running.kill()
        running.wait(HANG_SECONDS)
    assert replays.run()["state"] == "done"


def test_nothing_of_who_starts_it_stays_open_in_it(bed: SlowBed, replays: Replays) -> None:
    replays.of(*start_of(bed))
    os.kill(bed.pid, signal.SIGSTOP)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with open(replays.result, "wb") as told:
        running = subprocess.Popen(replays.words(), stdin=told, close_fds=False)
    os.close(writer)
    assert os.read(reader, 1) == b""  # the end of the pipe, while it runs
    assert running.poll() is None
    own = [f"/proc/{running.pid}/fd/{fd}" for fd in range(3)]
    wait_until(lambda: {os.readlink(path) for path in own} == {"/dev/null"}, "its own descriptors")
    told_by = os.readlink(f"/proc/{running.pid}/fd/3")
    assert told_by == str(replays.result)
    assert os.readlink(f"/proc/{running.pid}/cwd") == "/"
    assert os.getpriority(os.PRIO_PROCESS, running.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    running.kill()
    running.wait()
    os.close(reader)
