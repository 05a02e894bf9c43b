# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of `--engine pool`: found by doing it, the consequence, the command."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool_hammer
import pytest
from conftest import require
from nobody import Nobody
from suite import own_name

from uffdprefetch import doctor
from uffdprefetch.base.config import Config, PoolOptions
from uffdprefetch.doctor import faults, pool, site
from uffdprefetch.doctor.check import LIMIT, NOTE, OK, Check, run_isolated
from uffdprefetch.native import memory_limits as limits
from uffdprefetch.native import syscalls as sc
from uffdprefetch.native.memory_limits import Limit

pytestmark = pytest.mark.root

POOL = Config(engine="pool")


@pytest.fixture
def able() -> None:
    require(pool.mechanism().status == OK, "no userfaultfd with kernel faults for this user")


def refused(number: int) -> Any:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


# ---- the mechanism ------------------------------------------------------------------------------


def test_a_hole_is_filled_punched_and_filled_again(able: None) -> None:
    found = run_isolated("pool", pool.mechanism)
    assert found.status == OK and "punched, filled again" in found.found
    assert "--engine pool can be used" in found.follows


def test_it_bears_on_the_verdict_only_where_the_pool_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "open_uffd", refused(errno.EPERM))
    monkeypatch.setattr(faults, "DEVICE", "/dev/none")
    assert pool.mechanism().status == NOTE
    found = pool.mechanism(wanted=True)
    assert (found.status, found.remedy) == (LIMIT, faults.cure()) and found.remedy
    assert "EPERM" in found.found and "runs as --engine cache" in found.follows


def test_a_memfd_that_is_refused_names_the_setting(
    able: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "noexec").write_text("2\n")
    monkeypatch.setattr(pool, "NOEXEC", tmp_path / "noexec")
    monkeypatch.setattr(os, "memfd_create", refused(errno.EACCES))
    found = pool.mechanism()
    assert (found.status, found.remedy) == (NOTE, "sudo sysctl -w vm.memfd_noexec=1")
    (tmp_path / "noexec").write_text("1\n")
    assert pool.mechanism().remedy is None


def fail_ioctl(monkeypatch: pytest.MonkeyPatch, which: int, result: Any) -> None:
    real = fcntl.ioctl

    def ioctl(fd: int, request: int, *rest: Any) -> Any:
        return result(*rest) if request == which else real(fd, request, *rest)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)


def test_a_kernel_that_does_not_register_the_modes_is_named(
    able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_ioctl(monkeypatch, sc.UFFDIO_REGISTER, refused(errno.EINVAL))
    found = pool.mechanism()
    assert found.status == NOTE and "registering a memfd for MISSING faults failed" in found.found


def test_a_kernel_without_the_features_is_named(
    able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def api(answer: bytearray) -> int:
        answer[8:16] = (sc.UFFD_FEATURE_MINOR_SHMEM).to_bytes(8, "little")
        return 0

    fail_ioctl(monkeypatch, sc.UFFDIO_API, api)
    assert "need Linux 5.14" in pool.mechanism().found


def test_a_touch_that_nobody_wakes_does_not_hang_the_doctor(
    able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ANSWER_SECONDS", 0.05)
    fail_ioctl(monkeypatch, sc.UFFDIO_CONTINUE, lambda *_: 0)
    found = run_isolated("pool", pool.mechanism)
    assert "was not woken" in found.found


def test_wrong_bytes_are_told(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(len(data)), at))
    assert "wrong bytes" in pool.mechanism().found


def test_a_mapping_that_a_child_inherits_is_told(
    able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sc, "keep_from_children", lambda *_: None)
    assert "MADV_DONTFORK" in pool.mechanism().found


# ---- memory -------------------------------------------------------------------------------------


def test_a_budget_below_the_least_is_told_with_what_follows() -> None:
    found = pool.memory(Config(engine="pool", budget_bytes=4096))
    assert found.status == LIMIT and "1 MiB at least" in found.follows
    assert found.remedy is not None and "leave --budget out (4 GiB)" in found.remedy


def test_a_small_machine_bounds_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def bounded(budget_bytes: int, *_: int) -> tuple[int, Limit]:
        if budget_bytes <= 48 << 20:
            return budget_bytes, Limit.BUDGET
        return 48 << 20, Limit.CGROUP

    monkeypatch.setattr(limits, "pool_bytes", bounded)
    found = pool.memory(POOL)
    assert (found.status, found.values["allowed_bytes"]) == (LIMIT, 48 << 20)
    assert "48 MiB of --budget 4 GiB (cgroup memory limit, and an eighth of it" in found.found
    assert found.remedy == f"run it {Limit.CGROUP.raised_to(0)}"
    assert pool.memory(Config()).status == NOTE
    assert pool.memory(Config(engine="pool", budget_bytes=32 << 20)).status == OK


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_file_sizes_holds_for_the_memfd_too(file_limit: None) -> None:
    small = Config(engine="pool", budget_bytes=4 << 20)
    found = pool.memory(small, size_bytes=16 << 20)
    assert found.status == LIMIT and "RLIMIT_FSIZE is 8 MiB, less than the file" in found.found
    assert found.remedy in ("ulimit -f unlimited", None)
    assert pool.memory(small, size_bytes=4 << 20).status == OK


@pytest.mark.parametrize("chosen", ["never", "deny"])
def test_huge_pages_that_are_off_have_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(f"always within_size advise [{chosen}] x")
    monkeypatch.setattr(pool, "SHMEM_HUGE", setting)
    found = pool.huge_pages()
    assert found.status == NOTE and chosen in found.found
    assert found.remedy == site.COMMAND


@pytest.mark.alone
def test_huge_pages_are_tried_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting says so, the kernel does as before."""
    real = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    require(real.exists() and "[never]" in real.read_text(), "shmem_enabled is not never here")
    (tmp_path / "shmem_enabled").write_text("always [advise] never")
    monkeypatch.setattr(pool, "SHMEM_HUGE", tmp_path / "shmem_enabled")
    found = pool.huge_pages()
    assert found.status == NOTE and "but a memfd got pages of 4 KiB" in found.found


@pytest.mark.alone
@pytest.mark.parametrize("no_right", [False, True])
def test_a_huge_page_is_put_into_a_page_table(
    monkeypatch: pytest.MonkeyPatch, no_right: bool
) -> None:
    require(os.access(pool.SHMEM_HUGE, os.W_OK), f"{pool.SHMEM_HUGE}: root only")
    if no_right:  # as of a user without CAP_SYS_NICE
        monkeypatch.setattr(sc, "syscall", refused(errno.EPERM))
    with pool_hammer.huge_pages():
        found = pool.huge_pages()
    if no_right:
        assert found.status == NOTE and "page table did not: process_madvise: EPERM" in found.found
        assert found.remedy is not None and "cap_sys_nice" in found.remedy
    else:
        assert found.status == OK and found.found.endswith("and a page table")


def test_a_file_system_without_direct_reads_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(os, "preadv", refused(errno.EINVAL))
    found = pool.direct(str(path))
    assert found.status == NOTE and "not on this file system" in found.found
    assert "page cache" in found.follows


# ---- whole runs ---------------------------------------------------------------------------------


def test_doctor_has_the_checks_of_the_pool_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    found = {check.name: check for check in doctor.examine(str(path), POOL).checks}
    for name in ("pool", "pool memory", "pool huge pages", "O_DIRECT"):
        assert found[name].found and found[name].follows
        assert "the probe" not in found[name].found


def test_what_another_user_lacks_is_named_with_its_command(env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix=own_name(""), dir="/tmp") as directory:
        nobody = Nobody(Path(directory))
        code = (
            "import dataclasses, json; from uffdprefetch.doctor import pool;"
            " print(json.dumps(dataclasses.asdict(pool.mechanism())))"
        )
        done = subprocess.run(
            [*nobody.prefix, nobody.python, "-c", code], cwd="/", text=True, capture_output=True,
            env=nobody.environment(env),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Check(**json.loads(done.stdout))
    open_to_all = Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() == "1"
    device = Path("/dev/userfaultfd")
    if open_to_all or (device.exists() and device.stat().st_mode & 0o006):
        assert found.status == OK
    else:
        assert found.status == NOTE and found.remedy


def test_the_disk_that_an_option_names_is_tried() -> None:
    asked = Config(engine="pool", pool=PoolOptions(spill="/dev/shm:2GiB"))
    found = {check.name: check for check in doctor.examine(None, asked).checks}["pool disk"]
    assert found.status == NOTE and found.found.startswith("/dev/shm: ")
