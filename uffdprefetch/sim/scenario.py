# SPDX-License-Identifier: Apache-2.0
"""Parses scenario files (TOML) to System, Training, data set and policies.

Every size and rate carries its unit ("50GiB", "66MB/s"); a plain number where a unit belongs, an
unknown key, a curve without points or a policy that does not exist is one error line that names
the file and the place (docs/simulate.md lists all keys).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.sources import load_toml
from uffdprefetch.sim import quantities as q
from uffdprefetch.sim.model import RATES, WRITES, Readings, StorageClass, System, Training
from uffdprefetch.sim.policies import POLICIES
from uffdprefetch.sim.policies.base import LoadingPolicy
from uffdprefetch.sim.samples import DataSet
from uffdprefetch.sim.table import TomlTable
from uffdprefetch.sim.workload import SCHEMES

#: Nodes at most: more is a typing error.
N_MAX = 1_000_000


@dataclass(frozen=True)
class NamedPolicy:
    """A policy of a scenario."""

    name: str
    policy: LoadingPolicy
    #: Published seconds to compare with, or None.
    published: float | None = None
    #: This policy's own interpretation of the model, and storage classes.
    readings: Readings | None = None
    classes: Sequence[StorageClass] | None = None


@dataclass(frozen=True)
class Scenario:
    """The input of a simulation."""

    title: str
    system: System
    dataset: DataSet
    training: Training
    policies: Sequence[NamedPolicy]
    readings: Readings = field(default_factory=Readings)
    source: str = ""  # of its figures
    #: From calibrate: request bytes -> threads -> bytes/s of one node.
    storage_rates: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


def _classes(values: Any, where: str, place: str) -> list[StorageClass]:
    classes = []
    for number, each in enumerate(values):
        one = TomlTable(each, where, f"{place}[{number}]")
        reads = one.take("r", q.curve)
        classes.append(
            StorageClass(
                one.take("name", q.text),
                one.take("d", q.size_mb),
                one.take("p", q.whole(1)),
                reads,
                one.take("w", q.curve, reads),
            )
        )
        one.done()
    if not classes:
        raise usage_error(f"{where}: {place}: the first one, the staging buffer, is missing")
    names = [one.name for one in classes]
    for name in names:
        if names.count(name) > 1:
            raise usage_error(f"{where}: {place}: two are called {name!r}")
    return classes


_LIST = q.kind(list, "a list of tables")


def _system(table: TomlTable) -> System:
    system = System(
        N=table.take("N", q.whole(1, N_MAX)),
        c=table.take("c", q.rate_mb),
        beta=table.take("beta", q.rate_mb),
        b_c=table.take("b_c", q.rate_mb),
        b_fs=table.take("b_fs", q.rate_mb),
        t=table.take("t", q.curve),
        classes=_classes(table.take("classes", _LIST), table.where, "system.classes"),
        t_demand=table.take("t_demand", q.curve, None),
        rates=table.take("rates", q.one_of(RATES), "thread"),
    )
    table.done()
    return system


def _training(table: TomlTable) -> Training:
    training = Training(
        E=table.take("E", q.whole(1)),
        B=table.take("B", q.whole(1)),
        drop_last=table.take("drop_last", q.boolean, True),
        scheme=table.take("scheme", q.one_of(sorted(SCHEMES)), "uniform"),
        order=table.take("order", q.one_of(["shuffled", "sequential"]), "shuffled"),
        seed=table.take("seed", q.whole(0), 0),
    )
    table.done()
    return training


def _option(default: Any, name: str) -> Any:
    """The converter of a policy's option, by its name's unit and its default's type."""
    if isinstance(default, bool):
        return q.boolean
    return q.size_mb if name.endswith("_mb") else q.text


def _policy(table: TomlTable, place: str) -> NamedPolicy:
    kind = table.take("policy", q.one_of(sorted(POLICIES)))
    made = POLICIES[kind]
    name = table.take("name", q.text, kind)
    published = table.take("published", q.seconds, None)
    write = table.take("write", q.one_of(WRITES), None)
    classes = table.take("classes", _LIST, None)
    options = {
        each.name: table.take(each.name, _option(each.default, each.name), each.default)
        for each in fields(made)
    }
    table.done()
    try:
        policy = made(**options)
    except ValueError as error:
        raise usage_error(f"{table.where}: {place}: {error}") from None
    return NamedPolicy(
        name,
        policy,
        published,
        write and Readings(write),
        None if classes is None else _classes(classes, table.where, f"{place}.classes"),
    )


def _policies(values: Any, where: str) -> list[NamedPolicy]:
    if not isinstance(values, list) or not values:
        raise usage_error(f"{where}: policies: at least one [[policies]] is needed")
    named = []
    for number, one in enumerate(values):
        place = f"policies[{number}]"
        named.append(_policy(TomlTable(one, where, place), place))
    names = [one.name for one in named]
    for name in names:
        if names.count(name) > 1:
            raise usage_error(f"{where}: policies: two are called {name!r}: give each a name")
    return named


def parse(values: Mapping[str, Any], where: str) -> Scenario:
    """A scenario from a TOML file's values; raises UffdPrefetchError (exit 2)."""
    table = TomlTable(values, where)
    title = table.take("title", q.text, where)
    source = table.take("source", q.text, "")
    measured = table.take("measured", q.kind(dict, "a table"), {})
    readings = Readings(table.take("write", q.one_of(WRITES), "overlapped"))
    system = _system(table.table("system"))
    dataset = DataSet.parse(table.table("dataset"))
    training = _training(table.table("training"))
    policies = _policies(table.take("policies", lambda given: given, None), where)
    table.done()
    return Scenario(
        title, system, dataset, training, policies, readings, source, _rates(measured, where)
    )


def _rates(measured: Mapping[str, Any], where: str) -> dict[int, dict[int, float]]:
    """calibrate's measurements of the file system; "87.1 [86, 88] (n=10)" is MB/s."""
    try:
        rates = {
            int(request): {
                int(threads): float(text.split()[0]) * 1e6 for threads, text in curve.items()
            }
            for request, curve in measured.get("file_system", {}).items()
        }
        every = [rate for curve in rates.values() for rate in curve.values()]
        if all(rates.values()) and all(0 < rate < float("inf") for rate in every):
            return rates
    except (AttributeError, ValueError, IndexError):
        pass
    raise usage_error(f"{where}: measured.file_system: not as calibrate writes it")


def shipped() -> dict[str, str]:
    """Name -> title of the scenarios that come with the package."""
    folder = resources.files("uffdprefetch.sim") / "scenarios"
    return {
        Path(entry.name).stem: str(load_toml(str(entry), "scenario").get("title", ""))
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load(name: str) -> Scenario:
    """The scenario of a file, or one that comes with the package by its name ("paper5-1")."""
    path = Path(name)
    if "/" not in name and not name.endswith(".toml") and not path.exists():
        path = Path(str(resources.files("uffdprefetch.sim") / "scenarios" / f"{name}.toml"))
        if not path.exists():
            raise usage_error(
                f"no scenario {name!r}: give a TOML file or one of {', '.join(shipped())}"
            )
    return parse(load_toml(str(path), "scenario"), name)
