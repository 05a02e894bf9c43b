# SPDX-License-Identifier: Apache-2.0
"""What a watcher looks up by itself: block-I/O delay, births, processes that cannot be served."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require, wait_until
from snapshots import rank, snapshot

from uffdprefetch.base import procfs
from uffdprefetch.protocol.snapshot import UnservedProcess
from uffdprefetch.view import births, sensors, taskstats
from uffdprefetch.view.births import Birth, ProcessEvents
from uffdprefetch.view.sensors import Sensors
from uffdprefetch.view.taskstats import BlockDelays, Delay


def capable() -> bool:
    """Whether this process has CAP_NET_ADMIN (bit 12)."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> 12 & 1)


@pytest.fixture
def on(tmp_path: Path) -> Path:
    """A sysctl that says 1: what the kernel counts then may be zero, but is asked for."""
    path = tmp_path / "task_delayacct"
    path.write_text("1\n")
    return path


# ---- parsers ------------------------------------------------------------------------------------


def test_field_42_of_stat_whatever_the_command_is_called() -> None:
    fields = " ".join(str(n) for n in range(3, 53))
    assert taskstats.parse_stat(f"77 (a) b ) {fields}\n") == 42
    own = Path("/proc/self/stat").read_text()
    assert taskstats.parse_stat(own) >= 0


class Message(dict[str, Any]):
    """As pyroute2 decodes one: attributes by name."""

    def get_attr(self, name: str) -> Any:
        return self.get(name)


def test_a_reply_gives_time_and_count_of_the_process() -> None:
    stats = {"blkio_delay_total": 37_103_243, "blkio_count": 11, "version": 16}
    group = Message(TASKSTATS_TYPE_STATS=stats)
    assert taskstats.parse_reply(Message(TASKSTATS_TYPE_AGGR_TGID=group)) == Delay(37_103_243, 11)
    for wrong in (Message(), Message(TASKSTATS_TYPE_AGGR_TGID=Message())):
        with pytest.raises(ValueError):
            taskstats.parse_reply(wrong)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("some avg10=12.50 avg60=1.00 avg300=0.10 total=1\nfull avg10=3 total=2\n", 0.125),
        ("full avg10=3.00\n", None),
        ("", None),
    ],
)
def test_pressure_is_the_share_of_some(text: str, share: float | None) -> None:
    assert sensors.parse_pressure(text) == share


def test_a_missing_pressure_file_is_null_and_why(tmp_path: Path) -> None:
    found = sensors.io_pressure(tmp_path / "io")
    assert found.share is None and found.why is not None and "No such file" in found.why


MAPS = "7f0000000000-7f0000001000 r--s 00000000 08:01 5 /data/records.mdb\n"
LOADER = "7f1000000000-7f1000001000 r-xp 00000000 08:01 6 /lib64/ld-linux-x86-64.so.2\n"


def test_the_preload_object_is_known_by_name_or_by_our_link() -> None:
    for name in ("/x/uffdprefetch/_preload.abi3.so", "/run/u/preload-1f.so", "/b/asan/preload.so"):
        assert procfs.preloaded(f"{MAPS}7f2-7f3 r-xp 0 08:01 7 {name}\n"), name
    assert not procfs.preloaded(MAPS + LOADER)
    assert sensors.loading(MAPS + LOADER) and not sensors.loading(MAPS)
    assert not sensors.loading(MAPS + LOADER + "7f4-7f5 r-xp 0 08:01 8 /lib/libc.so.6\n")
    assert sensors.why_not_preloaded(MAPS) == "statically linked"
    assert "LD_PRELOAD did not reach it" in sensors.why_not_preloaded(MAPS + LOADER)


def event(what: int, *numbers: int) -> bytes:
    """A datagram of cn_proc, as the kernel lays it out (linux/cn_proc.h)."""
    body = struct.pack("=IIQ", what, 0, 12345) + struct.pack(f"={len(numbers)}I", *numbers)
    body = body.ljust(40, b"\0")
    connector = struct.pack("=IIIIHH", 1, 1, 7, 0, len(body), 0)
    length = 16 + len(connector) + len(body)
    return struct.pack("=IHHII", length, 3, 0, 7, 0) + connector + body


def test_forks_and_execs_are_read_threads_and_the_rest_are_not() -> None:
    marshal = pytest.importorskip("pyroute2.netlink.connector.cn_proc").ProcEventMarshal()
    assert births.parse(event(1, 10, 10, 20, 20), marshal) == Birth(20, 10)
    assert births.parse(event(1, 10, 10, 21, 20), marshal) is None  # a thread of 20
    assert births.parse(event(2, 20, 20), marshal) == Birth(20, 0)
    assert births.parse(event(0x80000000, 20, 20, 0, 17), marshal) is None
    for garbage in (b"", b"x" * 10, event(1, 10)[:40], b"\xff" * 76):
        assert births.parse(garbage, marshal) is None


# ---- block-I/O delay ----------------------------------------------------------------------------


def test_without_accounting_it_says_so_and_how_to_lift_it(tmp_path: Path) -> None:
    sysctl = tmp_path / "task_delayacct"
    for text, words in (("0\n", "is 0: set it to 1 by sysctl"), (None, "has no kernel.task_dela")):
        if text is not None:
            sysctl.write_text(text)
        else:
            sysctl.unlink()
        found, why = BlockDelays(sysctl).read([os.getpid()])
        assert found == {} and why is not None and words in why


def test_a_process_from_before_the_accounting_is_not_believed(on: Path) -> None:
    on.write_text("0\n")
    delays = BlockDelays(on)
    delays.read([os.getpid()])
    on.write_text("1\n")
    found, why = delays.read([os.getpid()])
    assert found == {} and why == "it began before kernel.task_delayacct was 1"
    delays.close()


def test_taskstats_is_asked_where_permitted(on: Path) -> None:
    require(capable(), "taskstats needs CAP_NET_ADMIN")
    delays = BlockDelays(on)
    found, why = delays.read([os.getpid(), 2**22 - 1])
    assert (delays.sensor, delays.why_not_taskstats, why) == (taskstats.TASKSTATS, None, None)
    assert set(found) == {os.getpid()} and found[os.getpid()].count is not None
    delays.close()


def test_without_the_privilege_the_other_door_is_taken(on: Path) -> None:
    require(os.geteuid() == 0 and shutil.which("setpriv"), "only root can give up CAP_NET_ADMIN")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from uffdprefetch.view.taskstats import BlockDelays\n"
        "d = BlockDelays(Path(sys.argv[1])); found, why = d.read([os.getpid()])\n"
        "print(len(found), found[os.getpid()].count, why); print(d.sensor)\n"
        "print(d.why_not_taskstats)\n"
    )
    drop = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", code, str(on)],
        capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    counted, sensor, why = done.stdout.splitlines()
    assert counted == "1 None None" and "/proc/PID/task/TID/stat" in sensor
    assert why == "taskstats: Operation not permitted (needs CAP_NET_ADMIN)"


def test_without_pyroute2_the_other_door_is_taken(on: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    delays = BlockDelays(on)
    found, _ = delays.read([os.getpid()])
    assert os.getpid() in found and delays.sensor == taskstats.STAT
    delays.close()


class Counted(BlockDelays):
    """Delays that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[int, int] = {}

    def read(self, pids: list[int]) -> tuple[dict[int, Delay], str | None]:
        return {p: Delay(ns, 1) for p, ns in self.now.items() if p in pids}, None


def test_stall_is_the_delay_over_the_time_of_all_processes_of_a_rank(monkeypatch: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr(sensors.time, "monotonic", lambda: clock[0])
    delays = Counted()
    looks = Sensors(delays, ProcessEvents())
    looks._walked = 1e9  # no tree
    made = snapshot(1, ranks=[rank(0, 1, pids=[11, 12])]).snapshot
    delays.now = {11: 5_000_000_000, 12: 0}
    stall = looks.add(made).ranks[0].stall
    assert stall.share is None and "half a second" in stall.why
    assert looks.watches_too_shortly, "so that `top --once` looks once more"
    clock[0], delays.now = 104.0, {11: 6_000_000_000, 12: 3_000_000_000}
    stall = looks.add(made).ranks[0].stall
    assert stall.share == pytest.approx(1.0) and stall.seconds == 4.0
    assert not looks.watches_too_shortly
    for second in range(105, 125):  # ... and it is of the last 10 s, not of all time
        clock[0] = float(second)
        stall = looks.add(made).ranks[0].stall
    assert stall.share == 0.0 and 10.0 <= stall.seconds <= 11.0


def test_no_wait_in_spite_of_major_faults_is_not_called_zero(monkeypatch: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr(sensors.time, "monotonic", lambda: clock[0])
    delays = Counted()
    delays.now = {4000: 0}
    looks = Sensors(delays, ProcessEvents())
    looks._walked = 1e9
    looks.add(snapshot(1).snapshot)
    clock[0] += 5
    stall = looks.add(snapshot(1).snapshot).ranks[0].stall
    assert stall.share is None and "FUSE" in stall.why
    stall = looks.add(snapshot(1, ranks=[rank(0, 1, demand_misses=0)]).snapshot).ranks[0].stall
    assert stall.share == 0.0


# ---- births and processes that cannot be served --------------------------------------------------


def test_births_are_heard_where_permitted_or_the_reason_is_told() -> None:
    heard = ProcessEvents()
    heard.open()
    try:
        if heard.why is not None:
            assert heard.why.startswith("cn_proc: ") and heard.read() == []
            return

        born: list[int] = []
        seen: list[Birth] = []

        def both() -> bool:  # of one of them: beside a busy machine some births are lost
            child = subprocess.Popen(["true"])
            child.wait()
            born.append(child.pid)
            seen.extend(heard.read())
            return any({Birth(pid, os.getpid()), Birth(pid, 0)} <= set(seen) for pid in born)

        wait_until(both, "fork and exec of a child")
    finally:
        heard.close()
    assert heard.fileno() == -1 and heard.read() == []


def test_a_network_namespace_of_its_own_is_named_as_the_reason() -> None:
    require(os.geteuid() == 0 and shutil.which("unshare"), "only root can unshare")
    code = (
        "from uffdprefetch.view.births import ProcessEvents\n"
        "b = ProcessEvents(); b.open(); print(b.why)"
    )
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.stdout.strip() == "cn_proc: not in this network namespace (a container's)"


def test_without_pyroute2_births_say_why(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2.netlink.connector.cn_proc", None)
    heard = ProcessEvents()
    heard.open()
    assert heard.why is not None and heard.why.startswith("cn_proc: ")


def test_more_births_than_are_read_are_counted_as_lost() -> None:
    class Full:
        """A socket whose buffer has overflowed once."""

        def __init__(self) -> None:
            self.left = [OSError(105, "No buffer space"), BlockingIOError()]

        def recv(self, _: int) -> bytes:
            raise self.left.pop(0)

        def send(self, data: bytes) -> int:
            return len(data)

        def close(self) -> None: ...

    heard = ProcessEvents()
    heard._socket = Full()  # type: ignore[assignment]
    assert heard.read() == [] and heard.lost == 1
    heard.close()


STATIC = """
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	int fd = open(argv[argc - 1], O_RDONLY);
	mmap(0, 16 << 20, PROT_READ, MAP_SHARED, fd, 0);
	pause();
	return 0;
}
"""


def test_a_static_program_in_the_jobs_tree_is_listed_and_others_are_not(tmp_path: Path) -> None:
    """The tree is that of a shell of ours without any preload object: both its children are not
    managed, for different reasons; an agent's process is."""
    source = tmp_path / "static.c"
    source.write_text(STATIC)
    (tmp_path / "records").write_bytes(bytes(sensors.LARGE_BYTES))
    static = tmp_path / "static"
    built = subprocess.run(["cc", "-static", str(source), "-o", str(static)], capture_output=True)
    require(built.returncode == 0, "no static libc to link with")
    command = f"{static} {tmp_path}/records & sleep 1000 & wait"
    shell = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    looks = Sensors(Counted(), ProcessEvents())
    try:
        made = snapshot(1, job_pids=[shell.pid], ranks=[rank(0, 1, pids=[shell.pid])]).snapshot

        def listed() -> dict[str, UnservedProcess]:
            looks._walked = 0.0
            found = looks.add(made).not_managed.processes
            return {p.command: p for p in found or ()}

        wait_until(lambda: set(listed()) == {"static", "sleep"}, "both children to be listed")
        wait_until(lambda: listed()["static"].maps_bytes, "its mapping to be seen")
        found = listed()
        assert found["static"].why == "statically linked"
        assert found["static"].maps_bytes == sensors.LARGE_BYTES
        assert "LD_PRELOAD did not" in found["sleep"].why
        assert found["sleep"].maps_bytes == 0 and found["sleep"].parent_pid == shell.pid
        assert looks.add(replace(made, engine="off")).not_managed.processes is None
    finally:
        os.killpg(shell.pid, 9)
        shell.wait()
        looks.close()


def test_nothing_of_it_is_imported_with_the_service() -> None:
    """pyroute2 costs 0.12 s: the service and `wrap` without --live must not pay for it."""
    code = (
        "import sys; import uffdprefetch.cli.serve, uffdprefetch.cli.wrap\n"
        "import uffdprefetch.launch.launcher\n"
        "print([m for m in sys.modules if m.startswith(('pyroute2', 'rich', 'asyncio'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.stdout.strip() == "[]", done.stderr
