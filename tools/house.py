# SPDX-License-Identifier: Apache-2.0
"""How the code stands, counted: `python tools/house.py [CHECKOUT...]` prints a column for each.

What whoever maintains it has to keep in mind: circles of imports (those for types included),
classes with many fields, attributes that others plug in after construction, class names borne
twice, long decisions, and numbers that decide what is read (docs/architecture.md). A number is one
that a statement at the top of a module gives a name in capitals; one of a unit (base/units.py) does
not decide, nor do names that are only told apart (_enumerates()).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "uffdprefetch"
#: Packages whose numbers decide what is read, and when.
DECIDING = ("predict", "readers", "warm", "sense", "pool")
FIELDS_MOST, COMPLEXITY_MOST = 12, 25
_BRANCHES = (
    ast.If, ast.For, ast.While, ast.AsyncFor, ast.ExceptHandler, ast.Assert, ast.IfExp,
    ast.match_case,
)  # fmt: skip
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file of the package."""

    name: str
    tree: ast.Module
    lines: list[str]


def modules(checkout: Path) -> list[Module]:
    """All of the package."""
    found = []
    for path in sorted((checkout / PACKAGE).rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(Module(name, ast.parse(text), text.splitlines()))
    return found


def imports(module: Module, names: set[str]) -> set[str]:
    """Modules of the package that it imports anywhere, be it for types only."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & names) or {node.module}
    return (found & names) - {module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in the end, largest circles first (Tarjan, SIAM J. Comput.
    1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


def classes(all_: list[Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Of all modules, those at the top."""
    for module in all_:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                yield module, node


def attributes(node: ast.ClassDef) -> dict[str, str]:
    """The fields of a class and their types: of a dataclass, and what methods set on self."""
    found = {
        one.target.id: ast.unparse(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    for one in ast.walk(node):
        annotation = ast.unparse(one.annotation) if isinstance(one, ast.AnnAssign) else ""
        targets = [one.target] if isinstance(one, ast.AnnAssign | ast.AugAssign) else []
        targets += one.targets if isinstance(one, ast.Assign) else []
        targets = [
            t for top in targets for t in (top.elts if isinstance(top, ast.Tuple) else [top])
        ]
        for target in targets:
            of_self = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            if isinstance(target, ast.Attribute) and of_self:
                found[target.attr] = found.get(target.attr) or annotation
    return found


def hooks(all_: list[Module]) -> list[str]:
    """Callables of a class that others assign."""
    plugs = {
        name: node.name
        for _, node in classes(all_)
        for name, kind in attributes(node).items()
        if "Callable[" in kind
    }
    found = set()
    for module in all_:
        for node in ast.walk(module.tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if not isinstance(target, ast.Attribute) or target.attr not in plugs:
                    continue
                if ast.unparse(target.value) != "self":
                    found.add(f"{plugs[target.attr]}.{target.attr}")
    return sorted(found)


def complexity(function: Function) -> int:
    """Ways through it, nested functions included (McCabe, IEEE TSE 1976)."""
    ways = 1
    for node in ast.walk(function):
        ways += isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            ways += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            ways += 1 + len(node.ifs)
    return ways


def _enumerates(names: list[str], values: list[object]) -> bool:
    """Whether a statement numbers things, or gives each a bit: 0, 1, 2 or 1, 2, 4."""
    counted, bits = list(range(len(names))), [1 << k for k in range(len(names))]
    return len(names) > 2 and values in (counted, bits)


def numbers(module: Module) -> Iterator[tuple[str, bool]]:
    """Constants that are numbers: (name, whether a comment of its own says what it is for)."""
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        values = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
        kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple)
        if not isinstance(node.value, kinds) or not values or _enumerates(names, values):
            continue
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            continue
        said = (
            module.lines[node.lineno - 2].startswith("#") or "  # " in module.lines[node.lineno - 1]
        )
        for name in names:
            if _CONSTANT.fullmatch(name):
                yield name, said


def deciding(all_: list[Module]) -> Iterator[tuple[Module, str, bool]]:
    """Those that decide what is read, and when: (module, name, see numbers())."""
    for module in all_:
        if module.name.split(".")[1:2] and module.name.split(".")[1] in DECIDING:
            for name, said in numbers(module):
                yield module, name, said


def count(checkout: Path) -> dict[str, str]:
    """What is counted: words for a column."""
    all_ = modules(checkout)
    names = {module.name for module in all_}
    around = circles({module.name: imports(module, names) for module in all_})
    sizes = [str(len(one)) for one in around]
    fields = [(len(attributes(node)), node.name) for _, node in classes(all_)]
    most, largest = max(fields)
    borne = Counter(node.name for _, node in classes(all_))
    ways: dict[str, int] = defaultdict(int)
    for module in all_:
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                ways[f"{module.name}.{node.name}"] = complexity(node)
    found = list(deciding(all_))
    return {
        "files; lines": f"{len(all_)}; {sum(len(module.lines) for module in all_):,}",
        "circles of imports": f"{len(around)} ({', '.join(sizes) or '-'})",
        "largest class": f"{largest}: {most} fields",
        f"classes above {FIELDS_MOST} fields": str(sum(n > FIELDS_MOST for n, _ in fields)),
        "hooks that others plug in": str(len(hooks(all_))),
        "class names borne twice": str(sum(n > 1 for n in borne.values())),
        f"functions above {COMPLEXITY_MOST} ways": str(
            sum(n > COMPLEXITY_MOST for n in ways.values())
        ),
        "numbers that decide": str(len(found)),
        "... with a comment of their own": str(sum(said for *_, said in found)),
        "all numbers": str(sum(len(list(numbers(module))) for module in all_)),
    }


def main() -> int:
    """As a program."""
    checkouts = [Path(word) for word in sys.argv[1:]] or [Path(__file__).resolve().parents[1]]
    columns = [count(checkout) for checkout in checkouts]
    print(f"| | {' | '.join(checkout.resolve().name for checkout in checkouts)} |")
    print(f"|---|{'---:|' * len(checkouts)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
