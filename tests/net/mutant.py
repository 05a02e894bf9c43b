# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest (`-p tests.net.mutant`): one number of the package is another in this run, and
what its module works out of it. tests/net/mutate.py starts such runs; nothing of the package may
be imported here."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

#: Which number is another, MODULE.NAME=FACTOR.
MUTANT = "UFFDPREFETCH_TEST_MUTANT"
PACKAGE = Path(__file__).resolve().parents[2] / "uffdprefetch"


def mutated(source: bytes, constant: str, factor: str) -> ast.Module:
    """A module's code, with the constant another one directly behind where it gets its value."""
    tree = ast.parse(source)
    again = ast.parse(f"{constant} = type({constant})({constant} * {factor})").body
    for at, node in enumerate(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if constant in names:
            tree.body[at + 1 : at + 1] = again
            return ast.fix_missing_locations(tree)
    raise ValueError(f"no {constant} here")


class Loader(importlib.machinery.SourceFileLoader):
    """Of the module, from its source each time."""

    def get_code(self, fullname: str) -> CodeType:
        """See importlib.abc.InspectLoader."""
        _, constant, factor = told()
        tree = mutated(self.get_data(self.path), constant, factor)
        return compile(tree, self.path, "exec", dont_inherit=True)


class Finder:
    """Of the module and nothing else."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if name != f"uffdprefetch.{told()[0]}":
            return None
        where = str(PACKAGE.joinpath(*told()[0].split(".")).with_suffix(".py"))
        return importlib.util.spec_from_file_location(name, where, loader=Loader(name, where))


def told() -> tuple[str, str, str]:
    """(module, constant, factor)."""
    where, _, factor = os.environ[MUTANT].partition("=")
    module, _, constant = where.rpartition(".")
    return module, constant, factor


if MUTANT in os.environ:  # before any conftest imports something
    assert not any(name.startswith("uffdprefetch.") for name in sys.modules), "it is too late"
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
