# SPDX-License-Identifier: Apache-2.0
"""The runtime directory is ours alone, or refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from conftest import require

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.rundir import is_of_node, runtime_directory, socket_path


def refused(environ: dict[str, str]) -> str:
    with pytest.raises(UffdPrefetchError) as caught:
        runtime_directory(environ)
    assert caught.value.exit_code == 125
    assert "\n" not in caught.value.message
    assert "UFFDPREFETCH_RUNDIR" in caught.value.message
    return caught.value.message


def test_it_is_made_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    old = os.umask(0)
    try:
        assert runtime_directory({"UFFDPREFETCH_RUNDIR": str(path)}) == str(path)
    finally:
        os.umask(old)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert status.st_uid == os.geteuid()
    assert runtime_directory({"UFFDPREFETCH_RUNDIR": str(path)}) == str(path)  # again


def test_a_symbolic_link_is_refused_even_to_a_good_directory(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(0o700)
    (tmp_path / "hub").symlink_to(good)
    assert "symbolic link" in refused({"UFFDPREFETCH_RUNDIR": str(tmp_path / "hub")})
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "symbolic link" in refused({"UFFDPREFETCH_RUNDIR": str(tmp_path / "dangling")})
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "hub"
    path.mkdir()
    path.chmod(mode)
    assert "others may enter" in refused({"UFFDPREFETCH_RUNDIR": str(path)})
    assert stat.S_IMODE(path.stat().st_mode) == mode  # refused, not repaired


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("")
    assert "not a directory" in refused({"UFFDPREFETCH_RUNDIR": str(tmp_path / "hub")})


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root can make a directory of another user")
    path = tmp_path / "hub"
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)
    assert "belongs to uid 65534" in refused({"UFFDPREFETCH_RUNDIR": str(path)})


def test_where_it_lies(tmp_path: Path) -> None:
    uid = os.geteuid()
    runtime, temporary = tmp_path / "user", tmp_path / "tmp"
    runtime.mkdir(0o700)
    temporary.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    assert runtime_directory(environ) == str(runtime / "uffdprefetch")
    # The login node's XDG_RUNTIME_DIR does not exist on a compute node.
    environ["XDG_RUNTIME_DIR"] = str(tmp_path / "elsewhere")
    assert runtime_directory(environ) == str(temporary / f"uffdprefetch-{uid}")
    # Neither need TMPDIR.
    environ["TMPDIR"] = str(tmp_path / "nowhere")
    assert runtime_directory(environ) == f"/tmp/uffdprefetch-{uid}"


def test_another_users_xdg_directory_is_passed_over(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root can make a directory of another user")
    runtime = tmp_path / "user"
    runtime.mkdir(0o700)
    os.chown(runtime, 65534, 65534)
    environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(tmp_path)}
    assert runtime_directory(environ).startswith(str(tmp_path / "uffdprefetch-"))


def test_where_one_is_refused_the_next_is_taken(tmp_path: Path) -> None:
    runtime, temporary = tmp_path / "user", tmp_path / "tmp"
    (runtime / "uffdprefetch").mkdir(parents=True)
    runtime.chmod(0o700)
    (runtime / "uffdprefetch").chmod(0o755)
    temporary.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    assert runtime_directory(environ) == str(temporary / f"uffdprefetch-{os.geteuid()}")
    assert "0755" in refused({"UFFDPREFETCH_RUNDIR": str(runtime / "uffdprefetch")})


def test_one_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    message = refused({"UFFDPREFETCH_RUNDIR": str(tmp_path / "no" / "parent")})
    assert "No such file or directory" in message


def test_a_socket_path_names_job_node_and_group_and_fits() -> None:
    path = socket_path("/run/x", "job-1", "node7", "a1")
    assert path == "/run/x/job-1@node7+a1.sock"
    assert path != socket_path("/run/x", "job-1", "node8", "a1")
    assert path != socket_path("/run/x", "job-1", "node7", "a2")
    long = [socket_path("/run/x", f"{'k' * 63}{i}", "n" * 64, "a1") for i in range(2)]
    assert long[0] != long[1]
    assert all(len(path) <= 107 and path.endswith(".sock") for path in long)
    with pytest.raises(UffdPrefetchError, match="too long for a socket path"):
        socket_path("/" + "d" * 100, "key", "node")


@pytest.mark.parametrize("key", ["job-1", "k" * 64])
def test_a_sockets_name_tells_its_node(key: str) -> None:
    name = os.path.basename(socket_path("/run/x", key, "n" * 40, "a1"))
    assert is_of_node(name, "n" * 40)
    assert not is_of_node(name, "m" * 40)
    assert not is_of_node(name[: -len(".sock")], "n" * 40)
    assert not is_of_node("other.sock", "n" * 40)
