# SPDX-License-Identifier: Apache-2.0
"""What works on this machine for this user: probes that do the thing, and what follows.

Nothing on the machine is changed: no sysctl, no bdi file, no mount outside a namespace of the
probe's own; the one trace is some MiB of PATH in the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from uffdprefetch import __version__
from uffdprefetch.base import spill_place
from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import usage_error
from uffdprefetch.doctor import faults, machine, pool, read_ahead, reads, storage
from uffdprefetch.doctor.check import CANNOT, LIMIT, OK, SKIPPED, Check, run_isolated

SCHEMA = "uffdprefetch.doctor/1"
READY, CANNOT_RUN, WORKS_WITH_LIMITS = 0, 1, 2
DEFAULTS = Config()

#: Not tried on what is no regular file, or cannot be read.
_OF_A_FILE = ("read lease", "O_DIRECT", "cachestat", "warm 4 MiB")
#: Without these there is no agent in the job: only what /proc shows of its mappings is followed.
AGENT = ("preload object", "pidfd_getfd", "close_range")
#: Without these nothing of ours can lie over a mapping: no checkpoints (--policy fixed), no pool.
USERFAULTFD = ("lay a checkpoint", "kernel-mode fault")


@dataclass(frozen=True)
class Report:
    """All findings, the rung that wrap would choose and why."""

    checks: tuple[Check, ...]
    rung: int | None
    rung_reason: str
    exit_status: int

    @property
    def verdict(self) -> str:
        return {READY: "ready", CANNOT_RUN: "cannot", WORKS_WITH_LIMITS: "works with limits"}[
            self.exit_status
        ]

    def as_dict(self) -> dict[str, Any]:
        """The JSON document (schema uffdprefetch.doctor/1)."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "rung": self.rung,
            "rung_reason": self.rung_reason,
            "checks": [check.as_dict() for check in self.checks],
        }


def _probes(path: str | None, config: Config) -> list[tuple[str, Callable[[], Check]]]:
    probes: list[tuple[str, Callable[[], Check]]] = [
        ("user", machine.user),
        ("userfaultfd(2)", faults.by_syscall),
        ("/dev/userfaultfd", faults.by_device),
        ("vm.unprivileged_userfaultfd", faults.unprivileged_sysctl),
        ("lay a checkpoint", partial(faults.register_minor, config.keeps_copies)),
        ("kernel-mode fault", partial(faults.kernel_fault, config.keeps_copies)),
        ("pidfd_getfd", faults.pidfd_getfd),
        ("close_range", faults.close_range),
        ("page tables", faults.page_tables),
        ("kernel.yama.ptrace_scope", faults.ptrace_scope),
        (reads.CALLS, reads.calls),
        (reads.NAMES, reads.names),
        ("preload object", machine.preload),
        ("helper", machine.helper),
        ("runtime directory", machine.runtime_directory),
        ("vm.max_map_count", partial(machine.map_count, config.lays_checkpoints)),
        ("memory", partial(machine.memory, config.budget_bytes)),
        (pool.NAME, partial(pool.mechanism, config.engine == "pool")),
        ("pool memory", partial(pool.memory, config, _size_bytes(path))),
        ("pool huge pages", pool.huge_pages),
        ("pool disk", partial(pool.disk, _disk_asked(config))),
        ("eBPF (bcc)", machine.bpf),
    ]
    if path is not None:
        probes += [
            ("path", partial(storage.readable, path)),
            ("file system", partial(storage.file_system, path)),
            ("read lease", partial(storage.lease, path, config.keeps_copies)),
            ("O_DIRECT", partial(pool.direct, path)),
            ("cachestat", partial(storage.residency, path)),
            ("warm 4 MiB", partial(storage.warm, path)),
            (read_ahead.NAME, partial(read_ahead.read_ahead, path)),
        ]
    return probes


def _disk_asked(config: Config) -> str | None:
    """The directory of `--spill`; None where no option names one."""
    return None if config.pool.spill is None else spill_place.parse(config.pool.spill)[0]


def check_path(path: str | None) -> None:
    """Raises UffdPrefetchError (exit 2) where there is nothing of this name."""
    if path is not None and not os.path.exists(path):
        raise usage_error(f"doctor {path}: there is no such file or directory")


def _size_bytes(path: str | None) -> int | None:
    """Of a file that there is."""
    try:
        return os.stat(path).st_size if path is not None and os.path.isfile(path) else None
    except OSError:
        return None


def choose_rung(checks: Sequence[Check], config: Config) -> tuple[int | None, str]:
    """(rung, why): 1, userfaultfd, where a run of these options needs one, or 2, page tables."""
    by_name = {check.name: check for check in checks}

    def broken(*names: str) -> Check | None:
        return next((by_name[n] for n in names if n in by_name and by_name[n].status != OK), None)

    fatal = broken("helper", "runtime directory")
    if fatal:
        return None, f"no service: {fatal.name}: {fatal.found}"
    obstacle = broken(*AGENT, *(USERFAULTFD if config.keeps_copies else ()))
    if config.keeps_copies and obstacle is None:
        return 1, "userfaultfd with kernel faults works"
    tables = broken("page tables")
    if obstacle is None:
        ready = 2, "readers can be followed by page tables"
        return ready if tables is None else (None, f"page tables: {tables.found}")
    if tables is None:
        return 2, f"page tables only, for want of: {obstacle.name} ({obstacle.found})"
    return None, f"neither {obstacle.name} ({obstacle.found}) nor page tables ({tables.found})"


def assess(checks: Sequence[Check], config: Config = DEFAULTS) -> Report:
    """The verdict on a list of findings, for a run of these options; pure."""
    rung, reason = choose_rung(checks, config)
    statuses = {check.status for check in checks}
    if rung is None or CANNOT in statuses:
        exit_status = CANNOT_RUN
    elif rung != (1 if config.keeps_copies else 2) or LIMIT in statuses:
        exit_status = WORKS_WITH_LIMITS
    else:
        exit_status = READY
    return Report(tuple(checks), rung, reason, exit_status)


def examine(path: str | None, config: Config, cluster: bool = False) -> Report:
    """Run every probe, each in a child process of its own, and assess what they found. ``cluster``:
    on the other nodes of this allocation, too."""
    target, refusal = path, None
    if path is not None:
        try:
            target = storage.record_file(path)
        except OSError as error:
            refusal = str(error.strerror)
    checks = []
    unusable: Check | None = None
    for name, probe in _probes(target, config):
        if unusable is not None and name in _OF_A_FILE:
            checks.append(Check(name, SKIPPED, "not a file that can be read", "not tried"))
            continue
        if unusable is not None and unusable.status == CANNOT and name != "path":
            checks.append(Check(name, SKIPPED, "the path cannot be read", "not tried"))
            continue
        check = run_isolated(name, probe)
        if name == "path":
            if refusal is not None:
                check = Check(name, CANNOT, f"{path}: {refusal}", "nothing can be said about it")
            if check.status != OK:
                unusable = check
        checks.append(check)
    if cluster:
        from uffdprefetch.doctor import cluster as nodes

        checks += nodes.examine(config, os.environ)
    return assess(checks, config)
