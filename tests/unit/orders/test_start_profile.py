# SPDX-License-Identifier: Apache-2.0
"""What is kept of a program's start: format, merging, keys, files."""

from __future__ import annotations

import os
import random
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.start_key import (
    described,
    profile_directory,
    profile_path,
    start_key,
    started,
)
from uffdprefetch.native.net import checksum
from uffdprefetch.native.profiles import (
    PROFILE_ALL_PATHS_MAX,
    PROFILE_ALL_RANGES_MAX,
    PROFILE_BYTES_MAX,
    PROFILE_ENTRIES_MAX,
    PROFILE_RANGES_MAX,
    EntryKind,
)
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry, StartProfile, decode, encode, united

BLOCK = 64 << 10
HEADER = 64


def file(path: str, size: int = 5 * BLOCK, blocks: tuple[tuple[int, int], ...] = ()) -> StartEntry:
    return StartEntry(EntryKind.FILE, path, 0xEF53, size, 1_700_000_000_000_000_001, blocks)


def drawn(seed: int, entries: int) -> StartProfile:
    """Any that may be, with names of all kinds."""
    draw = random.Random(seed)
    found = []
    for _ in range(entries):
        depth = draw.randint(1, 6)
        path = "".join(
            "/" + draw.choice(["a", "lib", "é" * 40, "\udcff", "x y"]) for _ in range(depth)
        )
        path += f"/{draw.randrange(1 << 30)}"
        kind = draw.choice(list(EntryKind))
        if kind is not EntryKind.FILE:
            found.append(StartEntry(kind, path, seen=draw.randint(1, 255)))
            continue
        size = draw.choice([1, BLOCK, BLOCK + 1, 1 << 40, draw.randrange(1, 1 << 30)])
        blocks = -(-size // BLOCK)
        runs = united((draw.randrange(blocks), 1) for _ in range(draw.randint(0, 9)))
        mtime = draw.choice([0, -1, 1 << 60, draw.randrange(1 << 62)])
        seen = draw.randint(1, 255)
        found.append(StartEntry(kind, path, draw.randrange(1 << 32), size, mtime, runs, seen))
    return StartProfile(tuple(found), draw.randrange(1 << 20))


# ---- the format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [0, 1, 300])
def test_what_is_written_is_read(entries: int) -> None:
    for seed in range(20):
        profile = drawn(seed, entries)
        assert decode(encode(profile), "it") == profile


def test_paths_that_have_much_in_common_take_little() -> None:
    long = "/opt/site/software/python/3.11/lib/python3.11/site-packages/scipy"
    profile = StartProfile(tuple(file(f"{long}/module{i:04}.py") for i in range(1000)))
    assert len(encode(profile)) < 1000 * 32


def test_what_cannot_be_said_is_left_out() -> None:
    bad = [file("relative"), file("/with\0nul"), file("/" + "x" * 5000), file("/empty", 0)]
    good = [file("/good"), StartEntry(EntryKind.STAT, "/asked")]
    found = decode(encode(StartProfile((*bad[:2], good[0], *bad[2:], good[1]), 1)), "it")
    assert found.entries == tuple(good)


def test_no_more_is_written_than_may_be_read() -> None:
    many = StartProfile(tuple(file(f"/{i}") for i in range(PROFILE_ENTRIES_MAX + 10)), 1)
    assert len(decode(encode(many), "it").entries) == PROFILE_ENTRIES_MAX
    name = "/" + "n" * 4000
    large = StartProfile(tuple(file(f"/{i}" + name) for i in range(6000)), 1)
    data = encode(large)
    assert PROFILE_BYTES_MAX - 5000 < len(data) <= PROFILE_BYTES_MAX
    assert 3000 < len(decode(data, "it").entries) < 6000


def test_what_a_small_file_stands_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB of ranges took 7 s and 0.9 GiB of the job's memory."""
    blocks = tuple((2 * number, 1) for number in range(PROFILE_RANGES_MAX))
    most = PROFILE_ALL_RANGES_MAX // PROFILE_RANGES_MAX
    ranges = [file(f"/{number}", 2 * PROFILE_RANGES_MAX * BLOCK, blocks) for number in range(6)]
    long = "/" + "n" * 4000
    most_paths = PROFILE_ALL_PATHS_MAX // (len(long) + 5)
    names = [StartEntry(EntryKind.STAT, f"{long}{number:05}") for number in range(most_paths + 9)]
    for entries, count in ((ranges, most), (names, most_paths)):
        found = decode(encode(StartProfile(tuple(entries), 1)), "it").entries
        assert found == tuple(entries[:count])
    monkeypatch.setattr("uffdprefetch.orders.start_profile.PROFILE_ALL_RANGES_MAX", 1 << 30)
    monkeypatch.setattr("uffdprefetch.orders.start_profile.PROFILE_ALL_PATHS_MAX", 1 << 30)
    for entries in (ranges, names):
        with pytest.raises(UffdPrefetchError, match="damaged"):
            decode(encode(StartProfile(tuple(entries), 1)), "it")


def test_what_was_cut_or_changed_is_told_in_one_line() -> None:
    data = encode(drawn(1, 50))
    assert data[:8] == b"UPLEARN1" and len(data) > HEADER
    for cut in range(len(data)):
        with pytest.raises(UffdPrefetchError, match=r"^it: it is [^\n]*$"):
            decode(data[:cut], "it")
    draw = random.Random(2)
    for _ in range(2000):
        at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        with pytest.raises(UffdPrefetchError, match=r"^it: it is [^\n]*$"):
            decode(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :], "it")
    with pytest.raises(UffdPrefetchError, match="damaged"):
        decode(data + b"\0", "it")
    with pytest.raises(UffdPrefetchError, match="no start profile"):
        decode(b"", "it")


def sealed(body: bytes, entries: int, version: int = 1, reserved: bytes = bytes(20)) -> bytes:
    """A file whose checksums are right, whatever is in it."""
    header = struct.pack(
        "<8sIIQQII20s", b"UPLEARN1", version, entries, len(body), 0, 1, checksum(body), reserved
    )
    return header + struct.pack("<I", checksum(header)) + body


@pytest.mark.parametrize(
    ("body", "entries"),
    [
        (b"\x03\x01\x00\x02/a", 2),  # fewer than it says
        (b"\x03\x01\x00\x02/a", 0),  # and more
        (b"\x00\x01\x00\x02/a", 1),  # no such kind
        (b"\x04\x01\x00\x02/a", 1),
        (b"\x03\x00\x00\x02/a", 1),  # seen by none
        (b"\x03\x01\x00\x02a/", 1),  # relative
        (b"\x03\x01\x00\x00", 1),
        (b"\x03\x01\x01\x02/a", 1),  # more in common than there was
        (b"\x03\x01\x00\x03/\0a", 1),
        (b"\x03\x01\x00\x7f/a", 1),  # longer than the file
        (b"\x03\x01\x00\x80\x80\x80\x80\x80\x80\x80\x80\x80\x02/a", 1),  # 2**64
        (b"\x03\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01/a", 1),  # 2**64 - 1
        (b"\x01\x01\x00\x02/a" + bytes(11), 1),  # no status
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x00\x00", 1),  # of 0 bytes
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\xff" * 8 + b"\x7f\x00", 1),  # of 2**63 - 1
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x01\x01\x00\x02", 1),  # a block beyond its end
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x01\x01\x01\x01", 1),
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x01\x01\x00\x00", 1),  # none
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x80\x80\x08\x02\x00\x01\x00\x01", 1),  # that touch
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x01\x01\x00" + b"\xff" * 9 + b"\x01", 1),
        (b"\x01\x01\x00\x02/a" + bytes(12) + b"\x01\x81\x80\x04", 1),  # 65,537 of them
    ],
)
def test_who_lies_with_the_right_checksum_is_found_out(body: bytes, entries: int) -> None:
    assert decode(sealed(b"\x03\x01\x00\x02/a", 1), "it").entries[0].path == "/a"
    with pytest.raises(UffdPrefetchError, match="damaged"):
        decode(sealed(body, entries), "it")


def test_another_version_is_told_as_such() -> None:
    for data in sealed(b"", 0, version=2), sealed(b"", 0, reserved=bytes(19) + b"\x01"):
        with pytest.raises(UffdPrefetchError, match="another version"):
            decode(data, "it")
    with pytest.raises(UffdPrefetchError, match="larger"):
        decode(sealed(b"", PROFILE_ENTRIES_MAX + 1), "it")


# ---- several runs -------------------------------------------------------------------------------


def test_the_last_run_gives_the_order_and_each_run_its_blocks() -> None:
    first = StartProfile().merged([file("/a", blocks=((0, 1),)), file("/b"), file("/a")])
    assert [entry.path for entry in first.entries] == ["/a", "/b"] and first.runs == 1
    second = first.merged([file("/b", blocks=((1, 1),)), file("/a", blocks=((1, 1), (4, 1)))])
    assert [entry.path for entry in second.entries] == ["/b", "/a"] and second.runs == 2
    b, a = second.entries
    assert b.blocks == (), "it was wanted whole once"
    assert a.blocks == ((0, 2), (4, 1)) and a.seen == b.seen == 0b11
    assert a.wanted_bytes == 3 * BLOCK and b.wanted_bytes == 5 * BLOCK
    assert second.wanted_bytes == 8 * BLOCK


def test_a_file_that_was_changed_is_as_the_last_run_has_found_it() -> None:
    before = StartProfile().merged([file("/a", blocks=((0, 1),))])
    for other in (
        file("/a", 6 * BLOCK, ((2, 1),)),
        replace(file("/a", blocks=((2, 1),)), mtime_ns=5),
        replace(file("/a", blocks=((2, 1),)), f_type=6),
    ):
        (entry,) = before.merged([other]).entries
        assert entry == replace(other, seen=1)


def test_what_three_runs_have_not_seen_goes() -> None:
    profile = StartProfile().merged([file("/once"), file("/always")])
    for seen in (0b10, 0b100):
        profile = profile.merged([file("/always")])
        assert [entry.path for entry in profile.entries] == ["/always", "/once"]
        assert profile.entries[1].seen == seen
    profile = profile.merged([file("/always")])
    assert [entry.path for entry in profile.entries] == ["/always"]
    for _ in range(10):
        profile = profile.merged([file("/always")])
    assert profile.entries[0].seen == 0xFF and decode(encode(profile), "it") == profile


def test_the_last_block_is_no_longer_than_its_file() -> None:
    assert file("/a", BLOCK + 1, ((0, 2),)).wanted_bytes == BLOCK + 1
    assert file("/a", BLOCK + 1, ((1, 1),)).wanted_bytes == 1
    assert file("/a", 3 * BLOCK, ((1, 1),)).wanted_bytes == BLOCK


def test_runs_that_touch_are_one() -> None:
    assert united([(4, 2), (0, 1), (1, 1), (5, 4), (20, 1)]) == ((0, 2), (4, 5), (20, 1))
    assert united([(0, 9), (2, 1)]) == ((0, 9),)
    assert united([]) == ()


# ---- keys ---------------------------------------------------------------------------------------


def key_of(command: list[str], environ: dict[str, str], program: str) -> str:
    return start_key(started(command, program), environ)


def test_for_a_key_no_more_than_some_arguments_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100,000 the job waited 0.8 s longer, on slow storage a minute."""
    asked: list[str] = []

    def isfile(path: str) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr("os.path.isfile", isfile)
    key_of(["echo", *map(str, range(1000))], {}, "/bin/echo")
    assert asked == [str(number) for number in range(32)]


def test_a_key_is_of_the_program_what_it_runs_and_its_environment(tmp_path: Path) -> None:
    script, data = tmp_path / "train.py", tmp_path / "data.bin"
    script.touch()
    data.touch()
    python = "/usr/bin/python3"
    key = key_of(["python3", str(script), "--lr", "0.1"], {}, python)
    assert len(key) == 24 and set(key) <= set("0123456789abcdef")
    (tmp_path / "link.py").symlink_to(script)
    for same in (
        key_of(["python3", str(script), "--lr", "0.2", str(data)], {"RANK": "3"}, python),
        key_of(
            ["/usr/bin/python3", "-u", str(tmp_path / "link.py")], {"SLURM_PROCID": "1"}, python
        ),
    ):
        assert same == key
    others = [
        key_of(["python3", str(data)], {}, python),
        key_of(["python3", str(script)], {}, "/bin/sh"),
        key_of(["python3", "-m", "train"], {}, python),
        key_of(["python3", "-m", "train.eval"], {}, python),
        key_of(["python3", "-c", "import torch"], {}, python),
        key_of(["python3", "-c", "import numpy"], {}, python),
        key_of(["python3"], {}, python),
        *(
            key_of(["python3", str(script)], {name: "x"}, python)
            for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "LOADEDMODULES")
        ),
    ]
    assert len({key, *others}) == 1 + len(others)
    assert key_of(["python3", "-m"], {}, python) == key_of(["python3"], {}, python)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-u", "SCRIPT", "--password", "x"], "SCRIPT"), (["-m", "train", "--lr", "1"], "-m train"),
        (["-c", "\nimport torch\nprint('x')"], "-c import torch"),
        (["-c", "x" * 99], f"-c {'x' * 60}"), ([], ""),
    ],
)  # fmt: skip
def test_for_people_a_start_is_of_what_its_key_is_of(
    tmp_path: Path, words: list[str], said: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = ["python3", *(word.replace("SCRIPT", str(script)) for word in words)]
    line = described(started(command, "/bin/python3-none"))
    program = os.path.realpath("/bin/python3-none")
    assert line == f"{program} {said.replace('SCRIPT', str(script))}".strip()


def test_profiles_lie_where_a_users_caches_do() -> None:
    assert profile_directory({"HOME": "/home/a"}) == "/home/a/.cache/uffdprefetch/profiles"
    found = profile_directory({"HOME": "/home/a", "XDG_CACHE_HOME": "/scratch/a"})
    assert found == "/scratch/a/uffdprefetch/profiles"
    assert profile_directory({}) is None and profile_directory({"XDG_CACHE_HOME": "rel"}) is None
    assert profile_path("/p", "train") == "/p/train.upl"
    assert os.path.dirname(profile_path("/p", "../../etc/passwd")) == "/p"


# ---- files --------------------------------------------------------------------------------------


def test_a_profile_is_kept_whole_for_its_user_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "cache" / "profiles" / "key.upl")
    profile = drawn(3, 20)
    profile_store.store(path, profile)
    assert profile_store.load(path) == profile
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    profile_store.store(path, drawn(4, 20))
    assert profile_store.load(path) == drawn(4, 20)
    assert os.listdir(os.path.dirname(path)) == ["key.upl"]
    profile_store.remove(path)
    assert os.listdir(os.path.dirname(path)) == []


def test_what_a_profile_is_of_lies_beside_it(tmp_path: Path) -> None:
    path = str(tmp_path / "key.upl")
    profile_store.store(path, drawn(3, 5))
    assert profile_store.described(path) == "", "of a release before there was any"
    profile_store.store(path, drawn(3, 5), "/usr/bin/python3 /home/a/b\udcff.py")
    assert profile_store.described(path) == "/usr/bin/python3 /home/a/b\udcff.py"
    assert os.stat(tmp_path / "key.txt").st_mode & 0o777 == 0o600
    (one,) = profile_store.stored(str(tmp_path))
    assert one.of == "/usr/bin/python3 /home/a/b\udcff.py" and one.profile == drawn(3, 5)
    profile_store.remove(path)
    assert os.listdir(tmp_path) == []
    profile_store.store(path, drawn(3, 5))
    os.mkfifo(tmp_path / "key.txt")
    assert profile_store.described(path) == ""
    os.unlink(tmp_path / "key.txt")
    (tmp_path / "key.txt").write_bytes(b"x" * 10_000 + b"\nmore\n")
    assert profile_store.described(path) == "x" * 4096


def test_a_profile_is_kept_where_what_it_is_of_cannot_be(tmp_path: Path) -> None:
    path = str(tmp_path / "key.upl")
    (tmp_path / "key.txt").mkdir()
    profile_store.store(path, drawn(3, 5), "/usr/bin/python3")
    assert profile_store.load(path) == drawn(3, 5) and profile_store.described(path) == ""
    assert sorted(os.listdir(tmp_path)) == ["key.txt", "key.upl"]


def test_to_be_listed_is_no_use(tmp_path: Path) -> None:
    """What a replay reads has a later time of access, but for that it is looked at."""
    path = str(tmp_path / "key.upl")
    profile_store.store(path, drawn(3, 5))
    os.utime(path, ns=(10**9, 2 * 10**9))
    assert [one.used_ns for one in profile_store.stored(str(tmp_path))] == [2 * 10**9]
    assert os.stat(path).st_atime_ns == 10**9
    os.utime(path, ns=(3 * 10**9, 2 * 10**9))
    assert [one.used_ns for one in profile_store.stored(str(tmp_path))] == [3 * 10**9]


def test_what_killed_writers_have_left_goes(tmp_path: Path) -> None:
    old, new, other = tmp_path / ".1.tmp", tmp_path / ".2.tmp", tmp_path / "notes.tmp"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    profile_store.store(str(tmp_path / "key.upl"), StartProfile())
    assert sorted(os.listdir(tmp_path)) == [".2.tmp", "key.upl", "notes.tmp"]


def test_what_is_no_profile_is_listed_with_what_is_wrong(tmp_path: Path) -> None:
    assert list(profile_store.stored(str(tmp_path / "none"))) == []
    profile_store.store(str(tmp_path / "good.upl"), drawn(5, 3))
    (tmp_path / "bad.upl").write_bytes(b"x" * 100)
    (tmp_path / "large.upl").write_bytes(b"x" * (PROFILE_BYTES_MAX + 100))
    os.mkfifo(tmp_path / "fifo.upl")
    (tmp_path / "loop.upl").symlink_to("loop.upl")
    (tmp_path / "else").touch()
    found = {one.key: one for one in profile_store.stored(str(tmp_path))}
    assert list(found) == ["bad", "fifo", "good", "large", "loop"]
    assert found["good"].profile == drawn(5, 3) and not found["good"].flaw
    assert found["bad"].profile is None and found["bad"].flaw == "it is no start profile"
    assert found["fifo"].flaw == "it is no file"
    assert found["large"].flaw == "it is no start profile" and found["large"].bytes > 1 << 24
    assert "symbolic links" in found["loop"].flaw
    with pytest.raises(UffdPrefetchError, match=r"bad\.upl: it is no start profile$"):
        profile_store.load(str(tmp_path / "bad.upl"))
    with pytest.raises(FileNotFoundError):
        profile_store.load(str(tmp_path / "nothing.upl"))


def test_a_store_that_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_store.store(str(tmp_path / "key.upl"), drawn(6, 3))

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="space"):
        profile_store.store(str(tmp_path / "key.upl"), drawn(7, 3))
    assert os.listdir(tmp_path) == ["key.upl"]
    assert profile_store.load(str(tmp_path / "key.upl")) == drawn(6, 3)
