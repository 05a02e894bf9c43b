# SPDX-License-Identifier: Apache-2.0
"""The slow-storage bed: its bytes, its counters, its live settings, and the cold and warm checks.

Nothing here asserts a time: how slow the bed is belongs to the benches.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, wait_until
from suite import own_name

from uffdprefetch.demo import bed as bed_module
from uffdprefetch.demo.bed import (
    BedError,
    SlowBed,
    drop_cache,
    find_slowfs,
    resident_bytes,
    warm_fully,
    why_no_bed,
)
from uffdprefetch.native.syscalls import mincore_pages

pytestmark = pytest.mark.root

SIZE_BYTES = 5 * (1 << 20) + 4321  # no multiple of a page
PACKAGE_PARENT = Path(bed_module.__file__).resolve().parents[2]


def skip_or_fail(reason: str | None) -> None:
    """Skip for `reason` (None: go on); UFFDPREFETCH_TEST_FORCE=1 makes the skip a failure."""
    if reason is None:
        return
    if os.environ.get("UFFDPREFETCH_TEST_FORCE", "") not in ("", "0"):
        pytest.fail(f"UFFDPREFETCH_TEST_FORCE is set, and: {reason}")
    pytest.skip(f"{reason} (UFFDPREFETCH_TEST_FORCE=1 makes this a failure)")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory to show: `a.bin`, nested directories, a symbolic link."""
    root = tmp_path / "source"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "a.bin").write_bytes(os.urandom(SIZE_BYTES))
    for number in range(30):
        (root / "deep" / "er" / f"a file with a longer name {number}").write_text(str(number))
    (root / "deep" / "link").symlink_to("../a.bin")
    return root


@pytest.fixture
def bed(source: Path) -> Iterator[SlowBed]:
    """The source behind a fast link: only its counters matter here."""
    skip_or_fail(why_no_bed())
    with SlowBed(source, bandwidth=0, latency_us=0) as mounted:
        yield mounted


# ---- what is read -----------------------------------------------------------------------------


def test_bytes_and_names_are_those_of_the_source(bed: SlowBed, source: Path) -> None:
    expected = (source / "a.bin").read_bytes()
    assert bed.path("a.bin").read_bytes() == expected
    assert bed.path("deep/link").read_bytes() == expected
    assert bed.path("a.bin").stat().st_size == SIZE_BYTES
    names = sorted(path.name for path in bed.path("deep/er").iterdir())
    assert names == sorted(path.name for path in (source / "deep" / "er").iterdir())
    assert bed.path("deep/er/a file with a longer name 17").read_text() == "17"
    assert sorted(os.listdir(bed.mountpoint)) == ["a.bin", "deep"]
    with pytest.raises(FileNotFoundError):
        bed.path("absent").stat()


def test_a_listing_that_takes_many_requests_is_whole(bed: SlowBed, source: Path) -> None:
    directory = source / "wide"
    directory.mkdir()
    names = [f"{number:05d}-{'long' * 50}" for number in range(5000)]
    for name in names:
        (directory / name).touch()
    assert sorted(os.listdir(bed.path("wide"))) == names


def test_a_shared_mapping_shows_the_source(bed: SlowBed, source: Path) -> None:
    with (
        open(bed.path("a.bin"), "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == (source / "a.bin").read_bytes()


def test_nothing_can_be_written(bed: SlowBed) -> None:
    for name in ("a.bin", "new"):
        with pytest.raises(OSError) as caught:
            os.open(bed.path(name), os.O_RDWR | os.O_CREAT, 0o644)
        assert caught.value.errno == errno.EROFS


def test_a_file_that_changed_is_noticed_when_it_is_opened(bed: SlowBed, source: Path) -> None:
    def head() -> bytes:
        # no stat(2), which would make the kernel ask for the time of the last change
        fd = os.open(bed.path("a.bin"), os.O_RDONLY)
        try:
            return os.pread(fd, 8192, 0)
        finally:
            os.close(fd)

    old = head()
    bed.reset()
    assert head() == old
    assert bed.counters()["requests"] == 0
    (source / "a.bin").write_bytes(bytes(SIZE_BYTES))
    assert head() == bytes(8192)


# ---- counters and settings --------------------------------------------------------------------


def test_counters_agree_with_the_bytes_that_were_read(bed: SlowBed) -> None:
    path = bed.path("a.bin")
    drop_cache(path)
    bed.reset()
    assert bed.counters()["bytes"] == bed.counters()["requests"] == 0
    path.read_bytes()
    first = bed.counters()
    assert first["bytes"] == SIZE_BYTES
    assert first["errors"] == first["in_flight"] == 0
    assert 4096 <= first["largest_request_bytes"] <= SIZE_BYTES
    assert first["requests"] >= SIZE_BYTES / first["largest_request_bytes"]
    assert 1 <= first["most_in_flight"] <= first["requests"]


def test_a_page_in_the_cache_makes_no_request(bed: SlowBed) -> None:
    with open(bed.path("a.bin"), "rb") as file:
        head = os.pread(file.fileno(), 4096, 0)
        bed.reset()
        assert os.pread(file.fileno(), 4096, 0) == head
        assert bed.counters()["requests"] == 0


def test_many_requests_are_in_flight_at_once(bed: SlowBed) -> None:
    wanted = 16
    path = bed.path("a.bin")
    drop_cache(path)
    bed.set(latency_us=2_000_000)
    bed.reset()
    fd = os.open(path, os.O_RDONLY)
    # Without readahead each page is a request of its own.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    threads = [
        threading.Thread(target=os.pread, args=(fd, 4096, number * 65536))
        for number in range(wanted)
    ]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: bed.counters()["most_in_flight"] >= wanted, "16 requests in flight")
    finally:
        for thread in threads:
            thread.join()
        os.close(fd)
    counters = bed.counters()
    assert counters["in_flight"] == 0
    assert counters["requests"] == wanted


def test_settings_change_live_and_one_by_one(bed: SlowBed) -> None:
    bed.set(bandwidth=1_000_000_000)
    assert bed.counters()["bandwidth_bytes_per_second"] == 1_000_000_000
    assert bed.counters()["latency_us"] == 0
    bed.set(latency_us=5000)
    assert bed.counters()["bandwidth_bytes_per_second"] == 1_000_000_000
    assert bed.counters()["latency_us"] == 5000
    bed.set(bandwidth=1, latency_us=0)
    bed.set(bandwidth=0)
    assert bed.settings()["bandwidth_bytes_per_second"] == 0
    assert bed.settings()["max_background"] == 64


@pytest.mark.parametrize(
    "line", ["bandwidth=-1", "latency_us=", "latency_us=1ms", "lookup_us=-1", "colour=red"]
)
def test_a_wrong_setting_is_refused_and_changes_nothing(bed: SlowBed, line: str) -> None:
    before = bed.counters()
    with pytest.raises(OSError) as caught:
        fd = os.open(bed.path(".slowfs"), os.O_WRONLY)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    assert caught.value.errno == errno.EINVAL
    assert bed.counters() == before


def test_read_ahead_is_the_kernels_default_until_root_sets_it(bed: SlowBed) -> None:
    assert bed.read_ahead_kb == 128
    if os.geteuid() != 0:
        with pytest.raises(BedError, match="only root"):
            bed.read_ahead_kb = 256
        return
    bed.read_ahead_kb = 256
    assert bed.settings()["read_ahead_kb"] == 256


# ---- names and attributes ---------------------------------------------------------------------


def test_each_kind_of_request_is_counted(bed: SlowBed) -> None:
    bed.reset()
    names = sorted(os.listdir(bed.path("deep/er")))
    listed = bed.counters()
    assert (listed["lookups"], listed["opendirs"], listed["opens"]) == (2, 1, 0)
    assert listed["readdirs"] >= 2  # the last one is empty
    for name in names:
        bed.path(f"deep/er/{name}").read_bytes()
    read = bed.counters()
    assert read["lookups"] - listed["lookups"] == len(names)
    assert read["opens"] == len(names)
    assert read["requests"] == len(names)
    bed.path("deep/er/absent").exists()
    bed.path("deep/er/absent").exists()
    assert bed.counters()["lookups"] == read["lookups"] + 2  # nobody remembers that it is missing
    bed.reset()
    assert bed.counters()["lookups"] == 0


def test_requests_for_names_overlap_and_keep_no_read_waiting(bed: SlowBed) -> None:
    names = sorted(os.listdir(bed.path("deep/er")))[:8]
    with open(bed.path("a.bin"), "rb", buffering=0) as file:
        drop_cache(bed.path("a.bin"))
        bed.set(lookup_us=3_000_000)
        bed.reset()
        threads = [threading.Thread(target=bed.path(f"deep/er/{name}").stat) for name in names]
        try:
            for thread in threads:
                thread.start()
            wait_until(lambda: bed.counters()["lookups"] == len(names), "eight lookups at once")
            assert os.pread(file.fileno(), 4096, 0)
            assert all(thread.is_alive() for thread in threads)
        finally:
            for thread in threads:
                thread.join()
    assert bed.counters()["lookup_us"] == 3_000_000


def test_answers_that_are_late_are_right(bed: SlowBed, source: Path) -> None:
    bed.set(lookup_us=500)
    assert bed.path("deep/er/a file with a longer name 3").read_text() == "3"
    assert len(os.listdir(bed.path("deep/er"))) == 30
    assert bed.path("a.bin").stat().st_size == SIZE_BYTES
    with pytest.raises(FileNotFoundError):
        bed.path("deep/absent").stat()
    with pytest.raises(OSError) as caught:
        os.open(bed.path("a.bin"), os.O_RDWR)
    assert caught.value.errno == errno.EROFS


def test_names_and_their_absence_are_cached_as_long_as_it_says(source: Path) -> None:
    skip_or_fail(why_no_bed())
    with SlowBed(
        source, bandwidth=0, latency_us=0, entry_seconds=0, missing_seconds=3600
    ) as mounted:
        for path in (mounted.path("a.bin"), mounted.path("absent")):
            mounted.reset()
            path.exists()
            path.exists()
            assert mounted.counters()["lookups"] == (2 if path.name == "a.bin" else 1)


@pytest.mark.parametrize("options", [{"keep_cache": False}, {"direct_io": True}])
def test_a_mount_that_keeps_nothing_reads_a_file_anew(
    source: Path, options: dict[str, bool]
) -> None:
    skip_or_fail(why_no_bed())
    with SlowBed(source, bandwidth=0, latency_us=0, **options) as mounted:
        for _ in range(2):
            mounted.reset()
            with open(mounted.path("a.bin"), "rb", buffering=0) as file:
                first = os.pread(file.fileno(), 4096, 0)
                assert os.pread(file.fileno(), 4096, 0) == first
            # within one open the page cache serves the second, unless no page is kept at all
            expected = 2 if "direct_io" in options else 1
            assert mounted.counters()["requests"] == expected


# ---- writers behind the client ----------------------------------------------------------------


@pytest.fixture
def shared_bed(source: Path) -> Iterator[SlowBed]:
    """The source, which another client may write."""
    skip_or_fail(why_no_bed())
    with SlowBed(source, bandwidth=0, latency_us=0, writers_behind=True) as mounted:
        yield mounted


@contextlib.contextmanager
def mapping(path: Path) -> Iterator[mmap.mmap]:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped,
    ):
        yield mapped


def test_a_write_behind_takes_the_written_pages_from_every_mapping_and_no_others(
    shared_bed: SlowBed,
) -> None:
    page = mmap.PAGESIZE
    with mapping(shared_bed.path("a.bin")) as mapped:
        before = mapped[: 64 * page]
        held = resident_bytes(shared_bed.path("a.bin"))
        shared_bed.freeze_times(True)  # else a look at the attributes drops all of the file
        shared_bed.reset()
        shared_bed.write_behind("a.bin", 5 * page + 7, b"new")
        assert resident_bytes(shared_bed.path("a.bin")) == held - page
        assert mapped[5 * page + 7 : 5 * page + 10] == b"new"
        assert shared_bed.counters()["requests"] == 1
        changed = before[: 5 * page + 7] + b"new" + before[5 * page + 10 :]
        assert mapped[: 64 * page] == changed


def test_a_write_behind_that_tells_nobody_shows_when_the_attributes_are_asked_for(
    shared_bed: SlowBed,
) -> None:
    path = shared_bed.path("a.bin")
    with mapping(path) as mapped:
        old = mapped[:3]
        shared_bed.write_behind("a.bin", 0, bytes(byte ^ 255 for byte in old), pages_go=False)
        assert mapped[:3] == old
        path.stat()
        assert mapped[:3] == bytes(byte ^ 255 for byte in old)


def test_attributes_are_those_of_the_source_at_once(shared_bed: SlowBed, source: Path) -> None:
    path = shared_bed.path("a.bin")
    before = path.stat()
    shared_bed.write_behind("a.bin", SIZE_BYTES, b"longer")
    assert path.stat().st_size == SIZE_BYTES + 6
    assert path.stat().st_mtime_ns > before.st_mtime_ns
    (source / "late").write_bytes(b"x")
    assert shared_bed.path("late").read_bytes() == b"x"
    (source / "late").unlink()
    assert not shared_bed.path("late").exists()


def test_times_can_be_frozen_and_the_mtime_alone_kept(shared_bed: SlowBed) -> None:
    path = shared_bed.path("a.bin")
    before = path.stat()
    shared_bed.write_behind("a.bin", 1, b"1", keep_mtime=True)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ctime_ns > before.st_ctime_ns
    shared_bed.freeze_times(True)
    shared_bed.write_behind("a.bin", 1, b"2")
    frozen = path.stat()
    assert (frozen.st_mtime_ns, frozen.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert path.read_bytes()[1:2] == b"2"
    shared_bed.freeze_times(False)
    assert path.stat().st_mtime_ns > before.st_mtime_ns


def test_writes_behind_and_readers_of_the_same_pages_do_not_wait_for_each_other(
    shared_bed: SlowBed, source: Path
) -> None:
    """The answer that a reader waits for and the taking away of its page meet."""
    shared_bed.set(latency_us=500)
    done = threading.Event()
    mapped_by_all = threading.Barrier(4)  # a file that nobody has looked up is refused

    def read() -> None:
        with mapping(shared_bed.path("a.bin")) as mapped:
            mapped_by_all.wait(HANG_SECONDS)
            while not done.is_set():
                mapped[: 16 * mmap.PAGESIZE]

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        mapped_by_all.wait(HANG_SECONDS)
        for number in range(300):
            shared_bed.write_behind("a.bin", number % 16 * mmap.PAGESIZE, b"%06d" % number)
    finally:
        done.set()
        for reader in readers:
            reader.join(30)
    assert not any(reader.is_alive() for reader in readers)
    assert shared_bed.path("a.bin").read_bytes() == (source / "a.bin").read_bytes()


@pytest.mark.parametrize("line", ["invalidate=0 1 nowhere", "invalidate=0 x a.bin", "invalidate="])
def test_a_wrong_invalidation_is_refused(shared_bed: SlowBed, line: str) -> None:
    with pytest.raises(BedError, match="refused"):
        shared_bed._command(line)


def test_a_bed_without_writers_behind_refuses_their_lines(bed: SlowBed) -> None:
    with pytest.raises(BedError, match="refused"):
        bed.freeze_times(True)
    bed.path("a.bin").stat()
    with pytest.raises(BedError, match="refused"):
        bed._command("invalidate=0 1 a.bin")


# ---- cold and warm ----------------------------------------------------------------------------


def test_cold_is_empty_and_warm_is_whole_by_both_counts(bed: SlowBed) -> None:
    path = bed.path("a.bin")
    fd = os.open(path, os.O_RDONLY)
    try:
        warm_fully(path)
        assert resident_bytes(path) >= SIZE_BYTES
        pages = mincore_pages(fd, 0, SIZE_BYTES)
        assert pages * mmap.PAGESIZE >= SIZE_BYTES
        drop_cache(path)
        assert resident_bytes(path) == 0
        assert mincore_pages(fd, 0, SIZE_BYTES) == 0
    finally:
        os.close(fd)
    bed.reset()
    path.read_bytes()
    assert bed.counters()["bytes"] == SIZE_BYTES


def test_a_file_that_is_mapped_does_not_become_cold_and_the_error_says_so(bed: SlowBed) -> None:
    path = bed.path("a.bin")
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert len(mapped[: 1 << 20]) == 1 << 20
        with pytest.raises(BedError, match=r"does not become cold: \d+ bytes stay"):
            drop_cache(path, patience_seconds=0.0)
    drop_cache(path)


def test_tmpfs_cannot_be_made_cold() -> None:
    if not os.path.isdir("/dev/shm"):
        skip_or_fail("there is no /dev/shm")
    with tempfile.NamedTemporaryFile(prefix=own_name(""), dir="/dev/shm") as file:
        file.write(bytes(65536))
        file.flush()
        with pytest.raises(BedError, match="tmpfs"):
            drop_cache(file.name, patience_seconds=0.0)


def test_an_empty_file_is_cold_and_warm(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    drop_cache(path)
    warm_fully(path)
    assert resident_bytes(path) == 0


def test_proactive_reclaim_is_read_from_sysfs(tmp_path: Path) -> None:
    assert bed_module.proactive_reclaim(tmp_path) is None
    scheme = tmp_path / "0" / "contexts" / "0" / "schemes" / "0"
    scheme.mkdir(parents=True)
    (scheme / "action").write_text("pageout\n")
    (tmp_path / "0" / "state").write_text("off\n")
    assert bed_module.proactive_reclaim(tmp_path) is None
    (tmp_path / "0" / "state").write_text("on\n")
    assert "DAMON" in str(bed_module.proactive_reclaim(tmp_path))


# ---- coming and going -------------------------------------------------------------------------


def test_unmounts_although_a_file_of_it_is_mapped(source: Path) -> None:
    skip_or_fail(why_no_bed())
    bed = SlowBed(source, bandwidth=0, latency_us=0)
    bed.mount()
    where, pid = bed.mountpoint, bed.pid
    with (
        open(bed.path("a.bin"), "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[0] == (source / "a.bin").read_bytes()[0]
        bed.unmount()
        assert not os.path.ismount(where)
        assert not where.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    bed.unmount()  # twice is once
    with pytest.raises(BedError, match="not mounted"):
        bed.counters()


def test_the_mount_goes_when_its_owner_is_killed(source: Path, tmp_path: Path) -> None:
    skip_or_fail(why_no_bed())
    where = tmp_path / "mountpoint"
    where.mkdir()
    program = (
        "import sys, time\n"
        "from uffdprefetch.demo.bed import SlowBed\n"
        "SlowBed(sys.argv[1], sys.argv[2]).mount()\n"
        "print('mounted', flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(source), str(where)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PACKAGE_PARENT)},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"mounted\n"
    assert os.path.ismount(where)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not os.path.ismount(where), "the mount vanishes")


def test_a_given_mountpoint_stays_and_may_be_mounted_again(source: Path, tmp_path: Path) -> None:
    skip_or_fail(why_no_bed())
    where = tmp_path / "mountpoint"
    where.mkdir()
    for _ in range(2):
        with SlowBed(source, where, bandwidth=0, latency_us=0) as bed:
            assert bed.path("deep/er/a file with a longer name 3").read_text() == "3"
    assert where.is_dir()
    assert not any(where.iterdir())


def test_a_source_that_is_missing_is_named(tmp_path: Path) -> None:
    skip_or_fail(why_no_bed())
    with pytest.raises(BedError, match="nowhere"), SlowBed(tmp_path / "nowhere"):
        pass


def test_a_missing_program_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UFFDPREFETCH_SLOWFS", "/nonexistent/slowfs")
    with pytest.raises(BedError, match=r"/nonexistent/slowfs.*make build/slowfs"):
        find_slowfs()
    assert "/nonexistent/slowfs" in str(why_no_bed())


@pytest.mark.parametrize(
    "words",
    [[], ["only-one"], ["--bandwidth=much", "a", "b"], ["--latency-us=-1", "a", "b"], ["--odd"]],
)
def test_the_program_refuses_wrong_usage(words: list[str]) -> None:
    skip_or_fail(why_no_bed())
    ended = subprocess.run([str(find_slowfs()), *words], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "usage: slowfs" in ended.stderr


UNPRIVILEGED = r"""
set -e
mknod "$1/fuse" c 10 229 && chmod 666 "$1/fuse" && mount --bind "$1/fuse" /dev/fuse || exit 77
exec setpriv --reuid 65534 --regid 65534 --clear-groups -- sh -ec '
  cd "$1"
  ./slowfs --bandwidth 0 --latency-us 0 source mountpoint > ready &
  until grep -q ready ready; do kill -0 $!; sleep 0.01; done
  cmp source/a.bin mountpoint/a.bin
  echo latency_us=7 > mountpoint/.slowfs
  cat mountpoint/.slowfs
  fusermount3 -u mountpoint
  wait
' sh "$1"
"""


def test_an_unprivileged_user_can_mount_through_fusermount(source: Path) -> None:
    """In a mount namespace of its own, where /dev/fuse is open to all as udev makes it."""
    skip_or_fail(why_no_bed())
    for program in ("unshare", "setpriv", "fusermount3"):
        if shutil.which(program) is None:
            skip_or_fail(f"{program} is missing")
    if os.geteuid() != 0:
        skip_or_fail("not root: the other tests of this file are this one")
    root = Path(tempfile.mkdtemp(prefix="uffdprefetch-test-"))
    try:
        root.chmod(0o755)
        shutil.copytree(source, root / "source", symlinks=True)
        shutil.copy(find_slowfs(), root / "slowfs")
        (root / "mountpoint").mkdir()
        os.chown(root / "mountpoint", 65534, 65534)
        (root / "ready").touch()
        os.chown(root / "ready", 65534, 65534)
        ended = subprocess.run(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                UNPRIVILEGED,
                "sh",
                root,
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if ended.returncode == 77:
            skip_or_fail(f"no mount namespace with its own /dev/fuse here: {ended.stderr.strip()}")
        assert ended.returncode == 0, ended.stderr
        assert f'"bytes": {SIZE_BYTES}' in ended.stdout
        assert '"latency_us": 7' in ended.stdout
    finally:
        shutil.rmtree(root, ignore_errors=True)
