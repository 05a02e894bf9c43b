# SPDX-License-Identifier: Apache-2.0
"""Which numbers that decide are held? `python -m tests.net.mutate [NAME...] [--write]`

Each number that tools/house.py counts is doubled, then halved: the drawn scenarios and the tapes
are played until a decision differs, and where none does the unit tests of its package, and of
those that import it, run until one fails. A number that nothing holds is printed so, and status is
1. NAME: those only, numbers (``SHY``, ``predict.storage.SHY``) or modules (``predict.storage``).
--write: docs/constants.md says it from now on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.net import drawn, mutant, seams, tape
from tests.net.replay import compare, replay
from tools import house

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
RECORD = ROOT / "docs" / "constants.md"
FACTORS = (2, 0.5)
NOTHING = "nothing"


def constants() -> Iterator[tuple[str, str]]:
    """(module, name) of each number that can be doubled: 0 is none."""
    for module, name, _ in house.deciding(house.modules(ROOT)):
        short = module.name.partition(".")[2]
        value = getattr(importlib.import_module(module.name), name)
        if type(value) in (int, float) and value:
            yield short, name


@contextlib.contextmanager
def mutated(module_name: str, constant: str, factor: float) -> Iterator[None]:
    """The constant has another value, also where it was imported, by whatever name; not what was
    worked out of it when its module was imported, defaults included: see mutant.py."""
    full = f"uffdprefetch.{module_name}"
    before = getattr(importlib.import_module(full), constant)
    value = type(before)(before * factor)
    with contextlib.ExitStack() as undo:
        for name, called in {(full, constant), *imported(full, constant)}:
            if (each := sys.modules.get(name)) is not None:
                setattr(each, called, value)
                undo.callback(setattr, each, called, before)
        yield


@functools.cache
def imported(module_name: str, constant: str) -> frozenset[tuple[str, str]]:
    """Who imports a constant, and by which name."""
    return frozenset(
        (module.name, alias.asname or alias.name)
        for module in house.modules(ROOT)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module == module_name
        for alias in node.names
        if alias.name == constant
    )


def scenarios(module_name: str) -> list[str]:
    """The drawn ones that ask a module; beside predict/ that is the simulated service."""
    package, _, rest = module_name.partition(".")
    return drawn.BY_MODULE.get(rest.split(".")[0], []) if package == "predict" else ["replayed"]


def caught(module_name: str, constant: str, names: list[str]) -> str | None:
    """The first scenario or tape that tells a mutant from the original; None: none does."""
    slow = [name for name in scenarios(module_name) if name == "replayed"]
    quick = [name for name in scenarios(module_name) if name != "replayed"]
    for name in (*quick, *names, *slow):
        for factor in FACTORS:
            with mutated(module_name, constant, factor):
                try:
                    differs = compare(name, replay(name)) if name in names else drawn.differs(name)
                except Exception as error:  # a mutant may do anything
                    return f"{name} ({type(error).__name__})"
                if differs is not None:
                    return name
    return None


def failed(module_name: str, constant: str) -> str | None:
    """The first unit test that fails, of its package and those that import it; None: none does."""
    users = {name for name, _ in imported(f"uffdprefetch.{module_name}", constant)}
    rooms = [module_name.split(".")[0], *sorted(name.split(".")[1] for name in users)]
    where = [str(one) for room in dict.fromkeys(rooms) if (one := UNIT / room).is_dir()]
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", mutant.__name__, *where]
    for factor in FACTORS:
        told = {mutant.MUTANT: f"{module_name}.{constant}={factor}"}
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **told}
        )
        if done.returncode:
            found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+)", done.stdout, re.MULTILINE)
            return found[1].partition("[")[0] if found else "its unit tests"
    return None


def record(found: dict[tuple[str, str], str]) -> None:
    """In docs/constants.md, below what people say there: what was found, and of the others that
    are still there what was found before."""
    said, _, table = RECORD.read_text().partition("\n| module")
    row = re.compile(r"\| `(.*?)` \| `(.*?)` \| (.*?) \|")
    before = {(module, name): by for module, name, by in row.findall(table)}
    rows = ["| module | number | held by |", "|---|---|---|"]
    for one in constants():
        rows.append(
            f"| `{one[0]}` | `{one[1]}` | {found.get(one) or before.get(one, 'not asked')} |"
        )
    RECORD.write_text("\n".join([said.rstrip(), "", *rows, ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of numbers or modules; all of them")
    parser.add_argument("--write", action="store_true", help="record it in docs/constants.md")
    args = parser.parse_args()
    for name in seams.MODULES:
        importlib.import_module(f"uffdprefetch.{name}")
    # the tapes of the most decisions first: they tell most mutants
    tapes = sorted(tape.scenarios(), key=lambda n: -(tape.TAPES / f"{n}.tape.gz").stat().st_size)
    tapes.sort(key=lambda n: n in ("pool-hook", "shuffled-plan"))  # ... but the slow ones last
    found: dict[tuple[str, str], str] = {}
    for module_name, constant in constants():
        full = f"{module_name}.{constant}"
        if args.names and not {module_name, constant, full} & set(args.names):
            continue
        by = caught(module_name, constant, tapes) or failed(module_name, constant) or NOTHING
        found[module_name, constant] = by
        print(f"{full}: {by}", flush=True)
        if args.write:
            record(found)
    answers = list(found.values())
    print(f"{answers.count(NOTHING)} of {len(answers)} are held by nothing")
    return NOTHING in answers


if __name__ == "__main__":
    sys.exit(main())
