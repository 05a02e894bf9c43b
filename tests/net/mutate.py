# SPDX-License-Identifier: Apache-2.0
"""Which thresholds of the predictors does the net hold? `python -m tests.net.mutate [NAME...]`

Each constant of predict/ is doubled, then halved, and the drawn scenarios and the tapes are played
until a decision differs. A constant that nothing holds is printed, and status is 1; NAME: those
only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.net import drawn, seams, tape
from tests.net.replay import compare, replay

PACKAGE = Path(__file__).resolve().parents[2] / "uffdprefetch"
#: What decides, by the rule that it asks nobody (docs/architecture.md).
PREDICTORS = [
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in sorted((PACKAGE / "predict").rglob("*.py"))
    if path.name != "__init__.py"
]


#: Bounds of memory and of what arithmetic holds: no decision hangs on them before a file is larger
#: than any that can be played.
BOUNDS = {
    "PIECES_MAX", "_PAIRS", "_BLOCKS_MAX", "_TOTAL_MAX", "STRAYS_MAX", "EMPTY_MAX", "_OCTAVES",
    "BINS", "_LARGE", "_CERTAIN", "_LITTLE",
}  # fmt: skip
#: Names of states, not numbers; and what another number is made of when the module is imported.
STATES = {"_NEW", "_TOUCHED", "_READ", "TOUCHED", "ASKED", "USED", "LOST", "MEMORY"}


def constants(module_name: str) -> Iterator[str]:
    """The numbers that a module gives names at its top."""
    module = importlib.import_module(f"uffdprefetch.{module_name}")
    with open(str(module.__file__), encoding="utf-8") as source:
        tree = ast.parse(source.read())
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                value = getattr(module, one.id, None) if isinstance(one, ast.Name) else None
                if (
                    type(value) in (int, float)
                    and value
                    and one.id not in BOUNDS | STATES | {"MIB", "MS"}
                ):
                    yield one.id  # type: ignore[union-attr]


@contextlib.contextmanager
def mutated(module_name: str, constant: str, factor: float) -> Iterator[None]:
    """The constant has another value, also where it was imported, or is a default."""
    module = importlib.import_module(f"uffdprefetch.{module_name}")
    before = getattr(module, constant)
    value = type(before)(before * factor)
    with contextlib.ExitStack() as undo:
        for name, each in list(sys.modules.items()):
            if name.startswith("uffdprefetch.") and vars(each).get(constant) is before:
                setattr(each, constant, value)
                undo.callback(setattr, each, constant, before)
        yield


def caught(module_name: str, constant: str, names: list[str]) -> str | None:
    """The first scenario or tape that tells a mutant from the original; None: none does."""
    for factor in (2, 0.5):
        for name in drawn.BY_MODULE.get(module_name.split(".")[1], []):
            with mutated(module_name, constant, factor):
                try:
                    if drawn.differs(name) is not None:
                        return name
                except Exception as error:  # a mutant may do anything
                    return f"{name} ({type(error).__name__})"
    for name in names:
        for factor in (2, 0.5):
            with mutated(module_name, constant, factor):
                try:
                    differs = compare(name, replay(name))
                except Exception as error:  # a mutant may do anything
                    return f"{name} ({type(error).__name__})"
                if differs is not None:
                    return name
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of constants; all of them")
    wanted = parser.parse_args().names
    for name in seams.MODULES:
        importlib.import_module(f"uffdprefetch.{name}")
    alive, total = 0, 0
    # the tapes of the most decisions first: they tell most mutants
    tapes = sorted(tape.scenarios(), key=lambda n: -(tape.TAPES / f"{n}.tape.gz").stat().st_size)
    tapes.sort(key=lambda n: n in ("pool-hook", "shuffled-plan"))  # ... but the slow ones last
    for module_name in PREDICTORS:
        for constant in constants(module_name):
            if wanted and constant not in wanted:
                continue
            total += 1
            by = caught(module_name, constant, tapes)
            alive += by is None
            print(f"{module_name}.{constant}: {by or 'NOTHING'}", flush=True)
    print(f"{alive} of {total} are held by no tape")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
