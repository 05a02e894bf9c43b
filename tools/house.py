# SPDX-License-Identifier: Apache-2.0
"""How the code stands, counted: `python tools/house.py [CHECKOUT...]` prints a column for each.

What whoever maintains it has to keep in mind: circles of imports (those for types included) and of
calls between files of C, imports past the door of the service's core, classes with many fields,
attributes that others plug in after construction, class names borne twice, long decisions, and
numbers that decide what is read (docs/architecture.md). A number is one that a statement at the
top of a module gives a name in capitals; one of a unit (base/units.py) does not decide, nor do
names that are only told apart (_enumerates()).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE, CSRC = "uffdprefetch", "csrc"
#: Packages, and a module, whose numbers decide what is read, and when.
DECIDING = ("predict", "readers", "warm", "sense", "pool", "native.memory_limits")
#: What the service's core is made of, beside the service itself.
CORE = ("readers", "state", "warm", "pool", "sense")
SERVICE = "service"
#: Who comes in from outside, a module or a package, and by which door.
DOORS = {
    f"{PACKAGE}.cli.serve": f"{PACKAGE}.{SERVICE}.serve",
    f"{PACKAGE}.sim.replay": f"{PACKAGE}.{SERVICE}.door",
}
FIELDS_MOST, COMPLEXITY_MOST = 12, 25
_BRANCHES = (
    ast.If, ast.For, ast.While, ast.AsyncFor, ast.ExceptHandler, ast.Assert, ast.IfExp,
    ast.match_case,
)  # fmt: skip
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
#: What stands for one of a unit is a number, too (base/units.py).
_UNITS = frozenset({"KIB", "MIB", "GIB", "MS"})
#: Of C in the kernel's style: what is no code, what stands at the left margin, what a word names.
_NO_CODE = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'""", re.DOTALL)
_ATTRIBUTE = re.compile(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*")
_DIRECTIVE = re.compile(r"^#(?:.*\\\n)*.*$", re.MULTILINE)
_FUNCTION = re.compile(
    r"^([A-Za-z_][^;{}()=]*?)\b(\w+)\(([^;{}]*)\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
_VARIABLE = re.compile(r"^([A-Za-z_][\w \t*]*[ *])(\w+)\s*(?:\[[^\]]*\]\s*)*[=;]", re.MULTILINE)
_DECLARATION = re.compile(r"^[A-Za-z_][^;{}=]*;", re.MULTILINE)
_WORD = re.compile(r"(?<![\w.])(?<!->)(?<!struct )(?<!enum )(?<!union )[A-Za-z_]\w*")
#: Other files do not see it, it is defined elsewhere, or it is the job's (csrc/job/preload.h).
_NOT_SHARED = re.compile(r"\b(?:static|extern|typedef|UP_EXPORT)\b|^(?:struct|enum|union)\s*$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file of the package."""

    name: str
    tree: ast.Module
    lines: list[str]


def modules(checkout: Path) -> list[Module]:
    """All of the package. Raises ValueError where there is none."""
    found = []
    for path in sorted((checkout / PACKAGE).rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        try:
            found.append(Module(name, ast.parse(text), text.splitlines()))
        except SyntaxError as error:
            raise ValueError(f"{path}:{error.lineno}: {error.msg}: mend it first") from None
    if not found:
        raise ValueError(f"{checkout}: no Python file in {PACKAGE}/: name a checkout's folder")
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


def import_graph(all_: list[Module]) -> dict[str, set[str]]:
    """Which module imports which."""
    names = {module.name for module in all_}
    return {module.name: imports(module, names) for module in all_}


def past_the_door(graph: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """(who, what) for each import of the service or its core by somebody outside of them, but
    through DOORS."""
    found = []
    for name, others in graph.items():
        if _room(name) in (*CORE, SERVICE):
            continue
        open_to_it = {door for who, door in DOORS.items() if f"{name}.".startswith(f"{who}.")}
        inside = {other for other in others if _room(other) in (*CORE, SERVICE)}
        found += [(name, other) for other in inside - open_to_it]
    return sorted(found)


def _room(name: str) -> str:
    """The package of a module, by the first of its names after PACKAGE."""
    return name.split(".")[1] if "." in name else ""


@dataclass
class Source:
    """One file of C: the names that it shares with others, all that it defines, and its words."""

    shared: set[str]
    own: set[str]
    words: set[str]
    bodies: dict[str, set[str]]  # of functions: their words


def source(text: str) -> Source:
    """Of a file's text."""
    text = _ATTRIBUTE.sub("", _NO_CODE.sub(" ", text))
    code = _DIRECTIVE.sub("", text)
    bodies = {m[2]: set(_WORD.findall(m[4])) for m in _FUNCTION.finditer(code)}
    defined = {m[2]: m[1] for kind in (_FUNCTION, _VARIABLE) for m in kind.finditer(code)}
    shared = {name for name, head in defined.items() if not _NOT_SHARED.search(head)}
    own = {name for name, head in defined.items() if "extern" not in head}
    return Source(shared, own, set(_WORD.findall(_DECLARATION.sub("", text))), bodies)


def calls(checkout: Path) -> dict[str, dict[str, set[str]]]:
    """Of each file of C the others whose functions (also those that it hands on by pointer) and
    variables it uses, and which; through a header's inline functions as well."""
    paths = sorted((checkout / CSRC).rglob("*.[ch]"))
    files = {str(path.relative_to(checkout)): source(path.read_text()) for path in paths}
    inline = {
        name: words
        for path, one in files.items()
        for name, words in one.bodies.items()
        if path.endswith(".h")
    }
    files = {path: one for path, one in files.items() if path.endswith(".c")}
    places = defaultdict(set)
    for path, one in files.items():
        for name in one.shared:
            places[name].add(path)
    found: dict[str, dict[str, set[str]]] = {}
    for path, one in files.items():
        words, more = set(one.words), set(one.words)
        while more := set().union(*(inline[name] for name in more & inline.keys())) - words:
            words |= more
        found[path] = defaultdict(set)
        for name in words - one.own:
            for other in places.get(name, ()):
                found[path][other].add(name)
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Modules that import each other in the end, or files that call each other, largest circles
    first (Tarjan, SIAM J. Comput. 1972)."""
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


def borne_twice(all_: list[Module]) -> dict[str, list[str]]:
    """Class names that stand for several things, and the modules that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, node in classes(all_):
        found[node.name].append(module.name)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


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


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether nobody can change one once it is made, and it does nothing but follow from itself."""
    kinds = {ast.unparse(one) for one in (*node.bases, *node.decorator_list)}
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    follow = all("property" in map(ast.unparse, one.decorator_list) for one in methods)
    frozen = {"NamedTuple", "dataclass(frozen=True)", "record(frozen=True)"}
    return bool(kinds & frozen) and follow


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


def long_functions(all_: list[Module]) -> dict[str, int]:
    """Those with more than COMPLEXITY_MOST ways through them, by their module and name."""
    found: dict[str, int] = {}
    for module in all_:
        for node in ast.walk(module.tree):
            if isinstance(node, Function) and complexity(node) > COMPLEXITY_MOST:
                found[f"{module.name}.{node.name}"] = complexity(node)
    return found


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
        one_unit = isinstance(node.value, ast.Name) and node.value.id in _UNITS  # one MiB
        kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple)
        is_number = isinstance(node.value, kinds) and values and not _enumerates(names, values)
        if not one_unit and not is_number:
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
        if any(f"{module.name}.".startswith(f"{PACKAGE}.{one}.") for one in DECIDING):
            for name, said in numbers(module):
                yield module, name, said


def sizes_of(around: list[list[str]]) -> str:
    """How many circles, and of how many each."""
    return f"{len(around)} ({', '.join(str(len(one)) for one in around) or '-'})"


def count(checkout: Path) -> dict[str, str]:
    """What is counted: words for a column."""
    all_ = modules(checkout)
    imported = import_graph(all_)
    fields = [(len(attributes(node)), node.name) for _, node in classes(all_)]
    changed = [len(attributes(node)) for _, node in classes(all_) if not is_frozen(node)]
    most, largest = max(fields, default=(0, "-"))
    found = list(deciding(all_))
    return {
        "files; lines": f"{len(all_)}; {sum(len(module.lines) for module in all_):,}",
        "circles of imports": sizes_of(circles(imported)),
        "circles of calls in C": sizes_of(circles(calls(checkout))),
        "imports past the door": str(len(past_the_door(imported))),
        "largest class": f"{largest}: {most} fields",
        f"classes above {FIELDS_MOST} fields": str(sum(n > FIELDS_MOST for n, _ in fields)),
        "... that can be changed": str(sum(n > FIELDS_MOST for n in changed)),
        "hooks that others plug in": str(len(hooks(all_))),
        "class names borne twice": str(len(borne_twice(all_))),
        f"functions above {COMPLEXITY_MOST} ways": str(len(long_functions(all_))),
        "numbers that decide": str(len(found)),
        "... with a comment of their own": str(sum(said for *_, said in found)),
        "all numbers": str(sum(len(list(numbers(module))) for module in all_)),
    }


def main() -> int:
    """As a program."""
    parser = argparse.ArgumentParser(prog="house.py", description=(__doc__ or "").split("\n")[0])
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="*", type=Path, default=[here])
    checkouts: list[Path] = parser.parse_args().checkouts
    try:
        columns = [count(checkout) for checkout in checkouts]
    except (OSError, ValueError) as error:
        print(f"house.py: {error}", file=sys.stderr)
        return 2
    print(f"| | {' | '.join(checkout.resolve().name for checkout in checkouts)} |")
    print(f"|---|{'---:|' * len(checkouts)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
