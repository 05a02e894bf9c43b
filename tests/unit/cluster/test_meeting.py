# SPDX-License-Identifier: Apache-2.0
"""cluster/meeting.py: nodes that see one directory find each other, and read nothing half."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cluster.meeting import LEFT_SECONDS, OVER, Meeting, Sweep
from uffdprefetch.cluster.sealed import KEY_BYTES, Pair, _prime


def test_those_who_have_arrived_are_there_with_what_they_say(tmp_path: Path) -> None:
    one, two = (Meeting(tmp_path, "slurm-7.0", node) for node in (0, 3))
    one.arrive({"host": "a"})
    assert two.present() == {0: {"host": "a"}}
    two.arrive({"host": "b"})
    assert one.present() == two.present() == {0: {"host": "a"}, 3: {"host": "b"}}
    one.leave()
    one.leave()
    assert two.present() == {3: {"host": "b"}}


def test_runs_do_not_meet_each_other(tmp_path: Path) -> None:
    """A job that is started again is another run."""
    Meeting(tmp_path, "slurm-7.0", 0).arrive({})
    assert Meeting(tmp_path, "slurm-7.1", 1).present() == {}
    assert Meeting(tmp_path, "../slurm-7.0", 1).path.parent == tmp_path


def test_what_is_there_is_nobody_elses(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "run", 0)
    meeting.arrive({})
    meeting.post("generation", {})
    assert stat.S_IMODE(meeting.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in meeting.path.iterdir()} == {0o600}


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    Meeting(tmp_path, "run", 0).path.chmod(0o770)
    with pytest.raises(UffdPrefetchError, match="refused"):
        Meeting(tmp_path, "run", 1)


def test_where_nobody_can_meet_the_option_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UffdPrefetchError, match="--meet"):
        Meeting(tmp_path / "file", "run", 0)


def test_notes_come_whole_or_not_at_all(tmp_path: Path) -> None:
    """A reader and a writer at once, of files that are larger than a page."""
    writer, reader = Meeting(tmp_path, "run", 0), Meeting(tmp_path, "run", 1)
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            writer.post("generation", {"turn": turn, "text": str(turn % 10) * 20_000})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        while seen < 200:
            values = reader.note("generation")
            if values is not None:
                seen += 1
                assert set(values["text"]) == {str(values["turn"] % 10)}
    finally:
        stop.set()
        thread.join()
    assert reader.names() == ["generation"], "nothing half is named"


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b'"word"'])
def test_what_we_could_not_have_written_is_no_note(tmp_path: Path, text: bytes) -> None:
    meeting = Meeting(tmp_path, "run", 0)
    (meeting.path / "node-1.json").write_bytes(text)
    (meeting.path / "node-1x.json").write_bytes(b"{}")
    assert meeting.note("node-1") is None and meeting.present() == {}


def test_a_note_is_taken_once(tmp_path: Path) -> None:
    one, two = (Meeting(tmp_path, "run", node) for node in (0, 1))
    one.post("start-1", {"argv": ["orted"]})
    assert two.take("start-1") == {"argv": ["orted"]}
    assert two.take("start-1") is None and one.note("start-1") is None


def test_what_is_sealed_is_opened_by_who_it_is_for_and_by_nobody_else() -> None:
    leader, node, stranger = Pair(), Pair(), Pair()
    key = bytes(range(KEY_BYTES))
    sealed = leader.seal(key, node.public, "1 2")
    assert key.hex() not in sealed and node.open(sealed, leader.public, "1 2") == key
    assert (
        stranger.open(sealed, leader.public, "1 2")
        != key
        != node.open(sealed, stranger.public, "1 2")
    )
    assert node.open(sealed, leader.public, "1 3") != key, "of another generation"
    for public in ("0", "1", f"{_prime() - 1:x}", f"{_prime():x}", "None", ""):
        with pytest.raises(ValueError):
            leader.seal(key, public, "")


def test_the_group_is_that_of_rfc_3526() -> None:
    prime = _prime()
    assert (prime.bit_length(), f"{prime:X}"[:32]) == (2048, "FFFFFFFFFFFFFFFFC90FDAA22168C234")
    assert all(pow(2, p - 1, p) == 1 for p in (prime, (prime - 1) // 2)), "a safe prime"


def test_nothing_is_left(tmp_path: Path) -> None:
    one, two = (Meeting(tmp_path, "run", node) for node in (0, 1))
    for meeting in (one, two):
        meeting.arrive({})
    one.post("generation", {})
    one.clear()
    two.clear()
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(tmp_path, "run", 0)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        meeting.post("node-0", {})
    assert os.listdir(meeting.path) == []


def test_what_a_dead_run_has_left_is_removed_and_nothing_of_one_that_lives(tmp_path: Path) -> None:
    own = Meeting(tmp_path, "own", 0)
    own.post("node-0", {})
    dead, alive, held, moving = (Meeting(tmp_path, name, 1) for name in ("a", "b", "c", "d"))
    for meeting in (dead, alive, moving):
        meeting.arrive({"joined": 3})
        meeting.post("generation", {"generation": 3})
    held.post("held-1", {})
    begins, ends = Meeting(tmp_path, "begins", 0), Meeting(tmp_path, "ends", 0)
    ends.post("held-0", {})
    ends.post(OVER, {})
    (tmp_path / "other").mkdir()
    sweep = Sweep(own)
    sweep.turn(100.0)
    for meeting in (alive, held):
        assert meeting.is_asked(meeting.names())
    moving.arrive({"joined": 0})
    sweep.turn(103.0)
    assert dead.path.exists(), "it may still answer"
    sweep.turn(105.0)
    left = {path for path in tmp_path.iterdir()} - {tmp_path / "other", own.path}
    assert left == {one.path for one in (alive, held, moving, begins, ends)}
    for meeting in (begins, ends):
        os.utime(meeting.path, (time.time() - LEFT_SECONDS - 60,) * 2)
    sweep = Sweep(own)
    sweep.turn(110.0)
    alive.is_asked(alive.names())
    sweep.turn(115.0)
    assert not begins.path.exists() and not ends.path.exists() and not moving.path.exists()
    assert alive.names() == ["generation", "node-1"], "what was asked is gone"


def test_what_another_run_of_the_same_name_said_of_a_node_is_forgotten(tmp_path: Path) -> None:
    one, two = Meeting(tmp_path, "run", 1), Meeting(tmp_path, "run", 11)
    notes = ("node-%d", "again-%d", "files-%d", "key-%d", "start-%d-ab", "summary-%d", "who-3-%d")
    for number in (1, 11):
        for note in notes:
            one.post(note % number, {})
    one.post("who-1-3", {})
    one.begin()
    assert two.names() == sorted([*(note % 11 for note in notes), "who-1-3"])


def test_a_summary_that_nobody_has_taken_keeps_the_directory(tmp_path: Path) -> None:
    one = Meeting(tmp_path, "run", 0)
    one.post("summary-1", {"nodes": 2})
    one.clear()
    assert one.take("summary-1") == {"nodes": 2}
    one.clear()
    assert not one.path.exists()
