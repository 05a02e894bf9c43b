# SPDX-License-Identifier: Apache-2.0
"""uffdprefetch.plan.announce() and what the service makes of it: the announced bytes are there
before the job touches them, and whatever is announced, the job reads what is in its file."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from harness import (
    MIB,
    Records,
    Start,
    auto,
    connect,
    fd_count,
    file_digest,
    python,
    service_socket,
    settle,
    snapshot,
)

from uffdprefetch.job import channel, messages
from uffdprefetch.orders import announcement
from uffdprefetch.plan import announce

pytest_plugins = ("harness_fixtures",)
pytestmark = auto

READER = """
import random
import numpy as np
from uffdprefetch.native import uffd
from uffdprefetch.plan import announce

path, what = sys.argv[1:3]
fd = os.open(path, os.O_RDONLY)
os.fsync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
size = os.fstat(fd).st_size
mapping = Mapping(path).followed()
places = random.Random(int(sys.argv[3])).sample(range(size // 65536), 60)
ranges = [(at * 65536, (at + 1) * 65536) for at in places]

def there(a, b):
    return uffd.resident_bytes(fd, a, b - a)[0] == b - a

def come(ranges, what="what was announced to be read ahead"):
    # one by one: what has come may be taken away again by the kernel
    left = list(ranges)
    def all_have():
        left[:] = [(a, b) for a, b in left if not there(a, b)]
        return not left
    until(all_have, what)

def announced(**order):
    return announce(path, **order)

def read(a, b):
    return hashlib.sha256(mapping.view[a:b]).hexdigest()
"""


def reader(code: str, path: Path, what: str = "", seed: int = 1) -> list[str]:
    _, option, *rest = python(READER + code, path, what, seed)
    assert option == "-S"  # these need the site's packages
    return [sys.executable, *rest]


def test_announced_ranges_are_there_before_they_are_touched(
    job: Start, own_records: Records
) -> None:
    run = job(reader("""
with announced(ranges=ranges) as order:
    come(ranges)
    far = [at for at in range(size // 65536) if all(abs(at - p) > 2 for p in places)]
    say(active=order.active, others=sum(there(at * 65536, (at + 1) * 65536) for at in far),
        far=len(far))
    for i, (a, b) in enumerate(ranges):
        read(a, b)
        order.said(i + 1)
    hear()
say(digest=mapping.digest())
""", own_records.path))  # fmt: skip
    said = run.line()
    assert said["active"]
    assert said["far"] > 20 and said["others"] <= 0.2 * said["far"]
    wait_until(lambda: snapshot(run.env).plans[0]["read_items"] == 60, "all to be known as read")
    run.tell()
    assert run.line()["digest"] == own_records.digest
    plan = run.finish().good().summary["plans"][0]
    assert plan["items"] == 60 and plan["read_items"] == 60 and plan["dropped"] is None
    assert plan["how"] == "plan: ranges announced"


def test_a_new_order_takes_the_place_of_the_readers_last_one(
    job: Start, own_records: Records
) -> None:
    run = job(reader("""
announced(ranges=ranges[:5])
order = announced(ranges=ranges[30:])
come(ranges[30:], "the new order to be read ahead")
order.said(30)
order.end()
say(digest=mapping.digest())
""", own_records.path))  # fmt: skip
    assert run.line()["digest"] == own_records.digest
    plans = run.finish().good().summary["plans"]
    assert [plan["items"] for plan in plans][-1] == 30
    assert len(plans) <= 2


@pytest.mark.parametrize("what", ["records", "keys"])
def test_records_and_keys_are_found_by_the_files_index(
    job: Start, tmp_path: Path, what: str
) -> None:
    import lmdb

    path = tmp_path / "some.lmdb"
    source = random.Random(3)
    with lmdb.open(str(path), map_size=64 * MIB) as database, database.begin(write=True) as write:
        for i in range(300):
            write.put(b"key-%05d" % i, source.randbytes(20_000))
    code = """
from uffdprefetch.formats.detect import open_index
index = open_index(path)
numbers = random.Random(5).sample(range(300), 40)
order = (announced(records=np.array(numbers)) if what == "records"
         else announced(keys=[b"key-%05d" % n for n in numbers]))
starts, ends = index.extents(numbers)
spans = list(zip(starts.tolist(), ends.tolist()))
come(spans, "the records to be read ahead")
say(items=order.active)
"""
    run = job(reader(code, path / "data.mdb", what))
    assert run.line()["items"]
    assert run.finish().good().summary["plans"][0]["how"] == f"plan: {what} announced"


def test_a_record_that_is_not_there_is_told_and_the_job_goes_on(
    job: Start, own_records: Records
) -> None:
    run = job(reader("""
announced(ranges=[(0, size + 5)])
say(ready=True)
hear()
say(digest=mapping.digest())
""", own_records.path))  # fmt: skip
    assert run.line()["ready"]
    wait_until(lambda: _degraded(run.env, f"the file has {own_records.size_bytes}"), "the finding")
    run.tell()
    assert run.line()["digest"] == own_records.digest
    run.finish().good()


def _degraded(env: dict[str, str], text: str) -> bool:
    return any(text in line for line in snapshot(env).degradations)


@pytest.mark.parametrize("whom", ["service", "helper"])
def test_death_of_the_service_or_its_helper_harms_no_byte(
    job: Start, own_records: Records, whom: str
) -> None:
    run = job(reader("""
order = announced(ranges=ranges)
come(ranges)
say(ready=True)
hear()
order.said(10)
again = announced(ranges=ranges[::-1])
say(active=again.active)
say(digest=mapping.digest())
""", own_records.path))  # fmt: skip
    assert run.line()["ready"]
    if whom == "service":
        run.kill_service()
        wait_until(lambda: _refused(run.env), "its last thread to end")
    else:
        [helper] = [
            int(pid)
            for pid in (Path("/proc") / f"{run.service()}/task/{run.service()}/children")
            .read_text()
            .split()
        ]
        os.kill(helper, signal.SIGKILL)
    run.tell()
    assert run.line()["active"] is (whom == "helper")
    assert run.line()["digest"] == own_records.digest
    assert run.finish().status == 0


def _refused(env: dict[str, str]) -> bool:
    try:
        connect(env).close()
    except OSError:
        return True
    return False


def test_without_a_service_nothing_is_announced_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UFFDPREFETCH_SOCKET", raising=False)
    monkeypatch.setattr("uffdprefetch.job.announce._warned", False)
    for _ in range(2):
        with announce(tmp_path / "x", records=[1, 2]) as order:
            assert not order.active
            order.said(1)
    assert capsys.readouterr().err.count("announced to nobody") == 1


@pytest.mark.parametrize(
    "order",
    [{}, {"records": [1], "keys": [b"a"]}, {"records": []}, {"records": ["a"]}, {"ranges": [1]},
     {"ranges": [(1, 2, 3)]}, {"records": [1 << 70]}],
)  # fmt: skip
def test_orders_that_cannot_be_are_refused(tmp_path: Path, order: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        announce(tmp_path / "x", **order)


# ---- strangers ----------------------------------------------------------------------------------


def test_damaged_announcements_neither_crash_nor_fill_the_service(
    job: Start, own_records: Records
) -> None:
    run = job(reader("""
say(ready=True)
hear()
order = announced(ranges=ranges)
come(ranges)
say(digest=mapping.digest())
""", own_records.path))  # fmt: skip
    assert run.line()["ready"]
    service = run.service()
    directory = Path(service_socket(run.env) + channel.SUFFIX)
    before = settle(lambda: fd_count(service), "the service's descriptors")
    good = {
        "schema": channel.SCHEMA, "pid": 7, "number": 1, "reader": "r", "slot": 1, "items": 4,
        "parts": [{"what": "ranges", "array": "a", "file": str(own_records.path)}],
    }  # fmt: skip
    source = random.Random(9)
    for number in range(1, 200):
        text = bytearray(json.dumps({**good, "number": number}).encode())
        for _ in range(source.choice((1, 1, 3))):
            text[source.randrange(len(text))] = source.choice((source.randrange(256), *b'{}[]",:0'))
        (directory / f"7-{number}.json").write_bytes(bytes(text))
        (directory / f"7-{number}.a").write_bytes(source.randbytes(source.choice((0, 7, 64))))
        (directory / "7.progress").write_bytes(bytes(source.choice((0, 8, 4096))))
        _announce(run.env, 7, number)
    run.tell()
    assert run.line()["digest"] == own_records.digest
    assert run.service() == service
    assert settle(lambda: fd_count(service), "the service's descriptors") <= before + 4
    run.finish().good()


def _connected(env: dict[str, str]) -> socket.socket:
    peers: list[socket.socket] = []

    def connected() -> bool:
        try:
            peers.append(connect(env))
        except BlockingIOError:  # as many wait as may
            return False
        return True

    wait_until(connected, "room in the service's backlog")
    return peers[0]


def _announce(env: dict[str, str], pid: int, number: int) -> None:
    hello = messages.HELLO_BODY.pack(messages.PLANNER, pid, 1, 0, 0, 0, 0)
    plan = messages.PLAN_BODY.pack(0, pid, number)
    with _connected(env) as peer:
        for kind, body in ((messages.HELLO, hello), (messages.PLAN, plan)):
            try:
                peer.send(messages.pack(kind, body), socket.MSG_NOSIGNAL)
            except OSError:
                return  # hung up on


def test_links_pipes_and_others_files_are_no_announcements(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-1.json")
    (tmp_path / "1-2.json").symlink_to("/etc/passwd")
    (tmp_path / "1-3.json").mkdir()
    (tmp_path / "1-4.json").write_bytes(b" " * (announcement.JSON_MAX_BYTES + 1))
    for number in range(1, 6):
        with pytest.raises(announcement.AnnounceError):
            announcement.load(str(tmp_path), 1, number)


def test_the_channel_leaves_no_descriptor_in_the_job(job: Start, own_records: Records) -> None:
    run = job(reader("""
before = len(os.listdir("/proc/self/fd"))
for _ in range(5):
    announced(ranges=ranges)
say(more=len(os.listdir("/proc/self/fd")) - before)
""", own_records.path))  # fmt: skip
    assert run.line()["more"] == 0
    run.finish().good()
    assert file_digest(own_records.path) == own_records.digest
