# SPDX-License-Identifier: Apache-2.0
"""Each class that base/record.py makes is what the standard module makes of it: nothing of that is
used which ours does not know (a ClassVar, an __init__ of one's own, a list as default, two bases
with fields)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SHOWS = """
import dataclasses, importlib, inspect, json, pkgutil, re, sys, types
import uffdprefetch.base.record as own

made = []

def noting(cls=None, /, **options):
    if cls is None:
        return lambda it: noting(it, **options)
    made.append(make(cls, **options))
    return made[-1]

is_standard = sys.argv[1] == "standard"
make = dataclasses.dataclass if is_standard else own.dataclass
own.dataclass = own.record = noting
if is_standard:
    own.field, own.replace = dataclasses.field, dataclasses.replace
import uffdprefetch
for one in pkgutil.walk_packages(uffdprefetch.__path__, "uffdprefetch."):
    if not one.name.rpartition(".")[2].startswith("_"):
        try:
            importlib.import_module(one.name)
        except ModuleNotFoundError as error:  # of a package that is not needed here
            if error.name.startswith("uffdprefetch"):
                raise

def default(parameter):
    given = parameter.default
    if given is parameter.empty:
        return None
    if type(given) is object or "factory" in repr(given):
        return "made"
    return re.sub(" at 0x[0-9a-f]+", "", repr(given))

def shown(cls):
    if not is_standard:
        try:  # __init__ is compiled with the first of a class
            cls.__init__(object.__new__(cls), no_such_field=1)
        except TypeError:
            pass
    parameters = inspect.signature(cls.__init__).parameters.values()
    methods = ("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__")
    return {
        "parameters": [[p.name, str(p.kind), default(p)] for p in parameters],
        "methods": {name: vars(cls)[name] is not None for name in methods if name in vars(cls)},
        "names": sorted(name for name in vars(cls) if not name.startswith("_")),
    }

print(json.dumps({f"{cls.__module__}.{cls.__qualname__}": shown(cls) for cls in made}))
"""


def shown(whose: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SHOWS, whose], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_record_of_the_package_is_what_the_standard_module_makes_of_it() -> None:
    own, standard = shown("own"), shown("standard")
    assert len(own) > 100, "all are seen"
    assert own.keys() == standard.keys()
    assert {name: own[name] for name in own if own[name] != standard[name]} == {}
