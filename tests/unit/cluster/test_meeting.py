# SPDX-License-Identifier: Apache-2.0
"""cluster/meeting.py: nodes that see one directory find each other, and read nothing half."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cluster.meeting import KEY_BYTES, Meeting


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
    meeting.make_key()
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


def test_the_key_is_made_once_and_is_the_same_for_all(tmp_path: Path) -> None:
    one, two = (Meeting(tmp_path, "run", node) for node in (0, 1))
    assert two.key() is None
    key = one.make_key()
    assert len(key) == KEY_BYTES and key == two.key() == one.make_key()
    (one.path / "key").write_bytes(b"short")
    assert two.key() is None


def test_nothing_is_left(tmp_path: Path) -> None:
    one, two = (Meeting(tmp_path, "run", node) for node in (0, 1))
    for meeting in (one, two):
        meeting.arrive({})
    one.make_key()
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


def test_what_a_run_that_was_killed_has_left_is_removed_after_two_days(tmp_path: Path) -> None:
    old, new = (Meeting(tmp_path, name, 0) for name in ("old", "new"))
    (tmp_path / "other").mkdir()
    for path in (old.path, tmp_path / "other"):
        os.utime(path, (1, 1))
    old.post("node-0", {})
    os.utime(old.path, (1, 1))
    new.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", new.path.name]
    new.clear()
    new.sweep()  # it has gone itself


def test_a_summary_that_nobody_has_taken_keeps_the_directory(tmp_path: Path) -> None:
    one = Meeting(tmp_path, "run", 0)
    one.post("summary-1", {"nodes": 2})
    one.clear()
    assert one.take("summary-1") == {"nodes": 2}
    one.clear()
    assert not one.path.exists()
