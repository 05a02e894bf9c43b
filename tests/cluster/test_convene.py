# SPDX-License-Identifier: Apache-2.0
"""cluster/convene.py, lead.py, rsh.py and mpi_start.py: who leads, what is started where, and that
nothing is left."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from uffdprefetch.base.config import Config
from uffdprefetch.cluster import convene, mpi_start, rsh
from uffdprefetch.cluster.compare_files import COMPARE_SECONDS
from uffdprefetch.cluster.convene import Convener, ConvenerOptions
from uffdprefetch.cluster.lead import TRIES, agent_script
from uffdprefetch.cluster.liveness import GATHER_SECONDS
from uffdprefetch.cluster.meeting import GONE_SECONDS, Meeting, node_of, socket_of
from uffdprefetch.cluster.mpi_start import (
    Host,
    LaunchMethod,
    Mpi,
    NoMpiError,
    command,
    find,
    kind_of,
)
from uffdprefetch.launch import on_nodes

OPEN_MPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4"
SAYS = {
    OPEN_MPI_4: ("Open MPI", (4, 1, 4)),
    "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://": ("Open MPI", (4, 1, 4)),
    "mpirun (Open MPI) 5.0.11": ("Open MPI", (5, 0, 11)),
    "MPICH Version:      5.0.2\nMPICH Release date: x": ("MPICH", (5, 0, 2)),
    "HYDRA build details:\n    Version:                                 5.0.2\n": (
        "MPICH",
        (5, 0, 2),
    ),
    "Intel(R) MPI Library 2021.18 for Linux* OS": ("MPICH", (2021, 18)),
    "srun: 22.05": None,
    "": None,
}

HOSTS = ["node0", "node1", "node2"]


@pytest.mark.parametrize("text", SAYS)
def test_an_mpi_is_known_by_what_it_says(text: str) -> None:
    assert kind_of(text) == SAYS[text]


def test_the_launcher_is_that_of_mpi4pys_mpi() -> None:
    def output(argv: Sequence[str]) -> str:
        if argv[0] == sys.executable:
            return "MPICH Version:      5.0.2"
        return OPEN_MPI_4 if argv[1] == "--version" else ""

    with pytest.raises(NoMpiError, match=r"no launcher of MPICH 5\.0\.2"):
        find(output)
    with pytest.raises(NoMpiError, match="pip install"):
        find(lambda argv: "")


@pytest.mark.parametrize(
    ("mpi", "agent"),
    [
        (Mpi("Open MPI", (4, 1, 4), "/usr/bin/mpirun"), "plm_rsh_agent"),
        (Mpi("Open MPI", (5, 0, 11), "/usr/bin/mpirun"), "plm_ssh_agent"),
        (Mpi("MPICH", (5, 0, 2), "/usr/bin/mpiexec"), "-launcher-exec"),
    ],
)
def test_each_launcher_starts_one_on_each_host_through_our_agent(mpi: Mpi, agent: str) -> None:
    words = command(mpi, ["a", "b", "c"], "/meet/rsh", ["program", "-x"])
    assert words[0] == mpi.launcher and words[-2:] == ["program", "-x"]
    assert words[words.index(agent) + 1] == "/meet/rsh" and "a,b,c" in words
    assert "none" in words, "bound to no core"


def test_the_batch_system_s_steps_come_first_with_each_pmi_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    srun.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mpi_start.slurm, "is_here", lambda environ: "SLURM_JOB_ID" in environ)
    monkeypatch.setattr(mpi_start.slurm, "known_types", lambda environ: ["pmix", "pmi2"])
    monkeypatch.setattr(mpi_start.slurm, "output", lambda argv, environ: "")
    monkeypatch.setattr(mpi_start, "find", lambda: Mpi("Open MPI", (4, 1, 4), "/usr/bin/mpirun"))
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "HOME": "/h"}
    ways = mpi_start.ways(job)
    assert [way.name for way in ways] == ["srun", "srun --mpi=pmix", "srun --mpi=pmi2", "Open MPI"]
    assert ways[0].environ == {"SLURM_JOB_ID": "7", "HOME": "/h"}, "not the step that we are in"
    hosts = [Host("a", "n1"), Host("b", "")]
    words = ways[1].command(hosts, "/meet/rsh", ["program"])
    assert words[0] == "srun" and words[words.index("-w") + 1] == "n1,b"
    assert ways[3].command(hosts, "/meet/rsh", ["program"])[0] == "/usr/bin/mpirun"
    assert [way.name for way in mpi_start.ways({})] == ["Open MPI"]
    (chosen,) = mpi_start.ways(job, "srun --mpi=cray_shasta --network=x")
    assert chosen.command(hosts, "/meet/rsh", ["p"])[-3:] == [
        "--mpi=cray_shasta", "--network=x", "p"
    ]  # fmt: skip


def test_an_srun_of_the_site_s_own_starts_services_and_transports(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho --overlap\n")
    srun.chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    launcher = f"{srun} --mpi=cray_shasta"
    services = on_nodes.plan(Config.of(launcher=launcher), job).words
    assert (services[0], "--mpi=none" in services) == (str(srun), True)
    assert "--mpi=cray_shasta" not in services
    (way,) = mpi_start.ways(job, launcher)
    transports = way.command([Host("a"), Host("b")], "", ["program"])
    assert transports[0] == str(srun) and transports[-2:] == ["--mpi=cray_shasta", "program"]


@pytest.mark.parametrize("words", ["", "/no/such/mpirun", "true", "'mpirun"])
def test_a_launcher_that_is_none_is_said(words: str) -> None:
    with pytest.raises(NoMpiError, match="--launcher"):
        mpi_start.ways({}, words)


class Nodes:
    """Conveners of several nodes that are asked for one turn after the other. ``ways``: how many
    ways there are to start MPI; ``jobs``: (which of them, the hosts) of each start."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> None:
        self.jobs: list[tuple[str, list[str]]] = []
        self.job = ["/bin/sleep", "60"]
        self.ways = 1

        def way(name: str) -> LaunchMethod:
            def begin(hosts: Sequence[Host], agent: str, words: Sequence[str]) -> list[str]:
                self.jobs.append((name, [host.name for host in hosts]))
                return self.job

            return LaunchMethod(name, begin, dict(os.environ))

        def ways(environ: Mapping[str, str], launcher: str | None) -> list[LaunchMethod]:
            return [way(f"way{i}") for i in range(self.ways)]

        monkeypatch.setattr(mpi_start, "ways", ways)
        self.now = 100.0
        self.out = [io.StringIO() for _ in range(count)]
        self.all = [
            Convener(
                ConvenerOptions(str(path), "run.0", i, count, f"/run/{i}", host=f"node{i}"),
                self.out[i],
            )
            for i in range(count)
        ]
        for one in self.all:
            one.presence.arrive()

    def turn(self, *numbers: int, seconds: float = 0.1) -> None:
        self.now += seconds
        for number in numbers or range(len(self.all)):
            self.all[number].turn(self.now)

    def hear(self, *numbers: int, **said: Any) -> None:
        for number in numbers or range(len(self.all)):
            self.all[number].hear(said, self.now)

    def said(self, number: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out[number].getvalue().splitlines()]

    def end_job(self, number: int = 0) -> None:
        """The MPI that a node has started ends, and with it all transports."""
        job = self.all[number].started.launcher
        assert job is not None
        job.kill()
        job.wait()
        self.hear(left=self.all[number].presence.joined)

    def end(self) -> None:
        for one in self.all:
            one.end()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Nodes(tmp_path, monkeypatch)
    yield found
    found.end()
    assert os.listdir(tmp_path) == []


def until(condition: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        turn()
        time.sleep(0.01)


def test_the_first_node_leads_makes_the_key_and_starts_mpi_once(nodes: Nodes) -> None:
    nodes.turn()
    nodes.turn()
    assert nodes.jobs == [("way0", HOSTS)]
    (key,) = {said["key"] for i in range(3) for said in nodes.said(i) if "key" in said}
    assert len(bytes.fromhex(key)) == 32
    files = [path.read_bytes() for path in nodes.all[0].meeting.path.iterdir()]
    assert not any(word in data for data in files for word in (key.encode(), bytes.fromhex(key)))
    assert not any(name.startswith("key") for name in nodes.all[0].meeting.names()), "taken"
    assert [said for said in nodes.said(0) if "started" in said] == [
        {"started": 1, "nodes": [0, 1, 2], "mpi": "way0"}
    ]


def test_a_job_that_ends_is_followed_by_the_next_generation_a_few_times(nodes: Nodes) -> None:
    nodes.job = ["/bin/false"]
    for _ in range(200):
        nodes.turn(seconds=1.0)
        time.sleep(0.005)
    assert len(nodes.jobs) == TRIES
    started = [said["started"] for said in nodes.said(0) if "started" in said]
    assert started == list(range(1, TRIES + 1))


def test_what_makes_no_world_is_followed_by_the_next_way_at_once(nodes: Nodes) -> None:
    nodes.ways, nodes.job = 3, ["/bin/false"]
    until(lambda: len(nodes.jobs) == 2, nodes.turn)
    nodes.job = ["/bin/sleep", "60"]
    until(lambda: len(nodes.jobs) == 3, nodes.turn)
    assert [name for name, _ in nodes.jobs] == ["way0", "way1", "way2"]
    nodes.hear(joined=3)
    nodes.end_job()
    until(lambda: len(nodes.jobs) == 4, nodes.turn)
    assert nodes.jobs[3] == ("way2", HOSTS), "it has been one"


def test_what_brings_up_no_mpi_at_all_is_said_once(nodes: Nodes) -> None:
    nodes.ways, nodes.job = 2, ["/bin/false"]
    until(lambda: len(nodes.jobs) == 4, lambda: nodes.turn(seconds=1.0))
    assert [said["failed"] for said in nodes.said(0) if "failed" in said] == [
        "way1 has brought up no MPI between them (its status is 1); it is tried again"
    ]


def test_a_meeting_that_somebody_has_removed_is_said_once(nodes: Nodes) -> None:
    nodes.turn()
    shutil.rmtree(nodes.all[0].meeting.path)
    nodes.turn()
    nodes.turn()
    for number in range(3):
        (failed,) = [said["failed"] for said in nodes.said(number) if "failed" in said]
        assert failed.startswith("the directory in which they meet is gone: ")


def test_a_launcher_is_given_an_agent_without_a_blank_in_its_path(tmp_path: Path) -> None:
    meet, beside = tmp_path / "My $HOME", tmp_path / "run"
    for path in (meet, beside):
        path.mkdir()
    one = Convener(ConvenerOptions(str(meet), "run", 0, 2, str(beside / "socket")), io.StringIO())
    agent = agent_script(one.meeting.path, str(beside / "socket"))
    assert agent.parent == beside
    done = subprocess.run([agent], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "uffdprefetch rsh: DIRECTORY HOST WORD...\n")
    assert shlex.split(agent.read_text().splitlines()[1])[-2] == str(one.meeting.path)
    one.end()
    assert not list(beside.iterdir()) and not list(meet.iterdir())
    no = Convener(ConvenerOptions(str(meet), "run", 0, 2, str(meet / "socket")), io.StringIO())
    with pytest.raises(NoMpiError, match="--meet"):
        agent_script(no.meeting.path, str(meet / "socket"))
    no.end()


def test_nobody_leads_while_the_others_share(nodes: Nodes) -> None:
    """A node that comes late waits for the next generation, whatever its number."""
    nodes.turn(1, 2)
    for _ in range(8):
        nodes.turn(1, 2, seconds=GONE_SECONDS / 4)
    assert nodes.jobs == [("way0", HOSTS[1:])], "node 0 is not alive"
    nodes.hear(1, 2, joined=1)
    for _ in range(20):
        nodes.turn(seconds=GONE_SECONDS / 4)
    assert len(nodes.jobs) == 1
    nodes.end_job(1)
    until(lambda: len(nodes.jobs) == 2, nodes.turn)
    assert nodes.jobs[1] == ("way0", HOSTS)


def test_a_lost_leader_is_followed_by_the_next_one_without_the_dead(nodes: Nodes) -> None:
    nodes.turn()
    nodes.hear(joined=1)
    nodes.hear(1, 2, left=1)  # node 0 says nothing any more
    for _ in range(4):
        nodes.turn(1, 2)
    assert len(nodes.jobs) == 1, "the others may not know of it yet"
    nodes.turn(1, 2, seconds=GATHER_SECONDS)
    assert nodes.jobs[1] == ("way0", HOSTS[1:])
    assert {said["started"] for said in nodes.said(1) if "started" in said} == {2}


def test_a_generation_whose_nodes_are_dead_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of the same name, of which a node was killed: nothing takes its note away."""
    old = Nodes(tmp_path, monkeypatch)
    old.turn()
    old.hear(joined=1)
    for number in (0, 1):
        old.all[number].end()
    assert old.all[0].meeting.numbers() == [2], "for all that is known it shares"
    new = Nodes(tmp_path, monkeypatch, 2)
    new.turn()
    assert new.jobs == [], "node 2 may live"
    new.turn(seconds=GATHER_SECONDS)
    assert new.jobs == [("way0", HOSTS[:2])]
    new.hear(joined=2)
    new.end()
    assert os.listdir(tmp_path) == []


def test_an_mpi_that_outlives_its_transports_is_asked_to_end_and_then_killed(
    nodes: Nodes, tmp_path: Path
) -> None:
    mark = tmp_path.parent / f"{tmp_path.name}-asked"
    nodes.job = ["/bin/sh", "-c", f"trap ': > {mark}' TERM; while :; do sleep 0.1; done"]
    nodes.turn()
    nodes.hear(joined=1)
    job = nodes.all[0].started.launcher
    assert job is not None
    until(lambda: nodes.all[0].started.brood.alive())
    time.sleep(0.2)  # for the trap
    nodes.hear(left=1)
    nodes.turn()
    until(mark.exists)
    assert job.poll() is None
    nodes.job = ["/bin/sleep", "60"]
    until(lambda: len(nodes.jobs) == 2, lambda: nodes.turn(seconds=1.0))
    assert job.poll() == -9


def test_a_node_that_shares_answers_who_asks_for_it(nodes: Nodes) -> None:
    nodes.turn(1, 2)
    for _ in range(8):
        nodes.turn(1, 2, seconds=GONE_SECONDS / 4)
    nodes.hear(1, 2, joined=1)
    beats = [nodes.all[1].meeting.said(n)["beat"] for n in (1, 2)]  # type: ignore[index]
    for _ in range(6):
        nodes.turn(1, 2)
    assert beats == [nodes.all[1].meeting.said(n)["beat"] for n in (1, 2)], "nobody asks"  # type: ignore[index]
    for _ in range(4):
        nodes.turn(seconds=1.0)
    assert all(
        now > before
        for now, before in zip(
            [nodes.all[1].meeting.said(n)["beat"] for n in (1, 2)], beats, strict=True
        )
    )  # type: ignore[index]
    assert len(nodes.jobs) == 1


def test_who_comes_to_what_a_run_of_the_same_name_has_left_counts_only_who_lives(
    nodes: Nodes,
) -> None:
    nodes.turn()
    nodes.hear(joined=1)
    for number in (1, 2):
        path = nodes.all[0].meeting.path / f"node-{number}.json"
        os.utime(path, (time.time() - 60,) * 2)
    nodes.all[0].others._is_again = True
    nodes.all[0].presence.arrive()
    assert nodes.all[0].here(nodes.now) == [0]
    nodes.turn(1)
    assert nodes.all[0].here(nodes.now) == [0, 1], "it has answered"


def test_one_that_has_lost_its_transport_has_all_begin_anew(nodes: Nodes) -> None:
    nodes.turn()
    nodes.hear(joined=1)
    nodes.hear(2, left=1)
    until(lambda: nodes.all[0].started.launcher is None, nodes.turn)
    nodes.hear(0, 1, left=1)
    until(lambda: len(nodes.jobs) == 2, nodes.turn)
    assert nodes.jobs[1] == ("way0", HOSTS)
    for _ in range(5):  # nobody asks that of the new one
        nodes.turn()
    assert nodes.all[0].started.launcher is not None


def test_a_count_that_stands_still_is_a_node_that_is_gone(nodes: Nodes) -> None:
    nodes.turn()
    first = nodes.all[0]
    for _ in range(10):
        nodes.turn(0, seconds=GONE_SECONDS / 4)
        first.others.waiting(1, first.presence.over, nodes.now)
    assert first.others.waiting(1, first.presence.over, nodes.now) is None
    nodes.turn(1, seconds=2.0)
    assert first.others.waiting(1, first.presence.over, nodes.now) is not None


def test_another_file_of_the_same_path_is_said_once_with_what_differs(nodes: Nodes) -> None:
    nodes.hear(0, 1, file="/far/same", fields={"size": 1})
    nodes.hear(0, file="/far/data", fields={"size": 1, "mtime": 5, "bytes": "a"})
    nodes.hear(1, file="/far/data", fields={"size": 1, "mtime": 6, "bytes": "b"})
    for _ in range(4):
        nodes.turn(seconds=COMPARE_SECONDS + 1)
    told = [said for i in range(3) for said in nodes.said(i) if "differs" in said]
    assert told == [{"differs": "/far/data", "node": 1, "fields": "bytes, mtime"}]


def test_a_command_is_run_by_the_node_that_it_is_for_and_its_status_comes_back(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.turn()
    path, marks = nodes.all[0].meeting.path, tmp_path.parent / f"{tmp_path.name}-marks"
    marks.mkdir()
    status = list[int]()
    words = [str(path), "node1", f"echo here > {marks}/mark;", "exit", "7"]
    thread = threading.Thread(target=lambda: status.append(rsh.main(words)))
    thread.start()
    until(lambda: not thread.is_alive(), lambda: nodes.turn())
    assert status == [7] and (marks / "mark").read_text() == "here\n"
    assert rsh.main([str(path), "node9", "true"]) == 125
    assert rsh.main([str(path), "node1"]) == 2
    assert rsh.main([]) == 2


def test_what_was_started_ends_with_the_node(nodes: Nodes) -> None:
    nodes.turn()
    job = nodes.all[0].started.launcher
    assert job is not None and job.poll() is None
    nodes.all[0].end()
    assert job.poll() is not None


def test_a_node_is_found_by_its_host_name(nodes: Nodes) -> None:
    nodes.turn()
    path = nodes.all[0].meeting.path
    assert (node_of(path, "node1"), node_of(path, "x")) == (1, None)
    assert socket_of(path, "node0") == "/run/0"
    with pytest.raises(FileNotFoundError):
        socket_of(path, "x")


def test_without_an_mpi_it_is_said_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> list[LaunchMethod]:
        raise NoMpiError("no MPI here")

    monkeypatch.setattr(mpi_start, "ways", none)
    for _ in range(5):
        nodes.turn(seconds=10.0)
    assert [said for said in nodes.said(0) if "failed" in said] == [{"failed": "no MPI here"}]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"meet": "/x"}', '{"unknown": 1}'])
def test_options_that_cannot_be_are_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, text.encode() + b"\nwhat comes next")
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(convene, "goes_first", lambda: None)  # this process is not the convener
        assert convene.main([]) == 1
        assert os.read(reading, 99) == b"what comes next", "it is for who listens from now on"
    os.close(writing)
    (line,) = capsys.readouterr().out.splitlines()
    assert "failed" in json.loads(line)


def test_an_end_of_input_ends_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    out = io.StringIO()
    one = Convener(ConvenerOptions(str(tmp_path), "run", 0, 1, "/run/0", host="node0"), out)
    thread = threading.Thread(target=lambda: one.run(reading))
    thread.start()
    until(lambda: "present" in out.getvalue())
    os.close(writing)
    thread.join(10)
    assert not thread.is_alive() and os.listdir(tmp_path) == []
    os.close(reading)
    assert Meeting(tmp_path, "run", 0).present() == {}
