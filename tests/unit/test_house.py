# SPDX-License-Identifier: Apache-2.0
"""The figures of tools/house.py, of a package that is made for it; and what they must be here."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from uffdprefetch import _uffd  # type: ignore[attr-defined]

MODULES = {
    "__init__": "",
    "predict/__init__": "",
    "predict/a": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from uffdprefetch.predict import b
#: What it is for.
LIMIT = 7
OTHER = 1.5 * 3
NEW, SEEN, READ = 0, 1, 2
SOME, OTHERS, LAST = 1, 2, 4
NAME = "no number"
class Reader:
    when: "Callable[[], int] | None" = None
    def __init__(self):
        self.x, self.y = 1, 2
        self.x += 1
""",
    "predict/b": """
import uffdprefetch.predict.c
class Reader:
    pass
def plug(reader):
    reader.when = plug
""",
    "predict/c": "from uffdprefetch.predict.a import Reader\n",
    "sim": "def long(x):\n    return " + " or ".join(["x"] * 40) + "\n",
}
#: a calls b and hands c's loop on by pointer, b uses a's variable, and c by a header's function, c
#: calls a by a macro: the three make a circle. d is called by a, and calls nobody: what looks so is
#: a field, a tag, in a comment or a string, d's own, or declared only. What d gives the job e has
#: of libc.
SOURCES = {
    "common/part.h": """
struct part { int (*alone)(void); };
static inline void by_header(void)
{
\tgo_on();
}
""",
    "job/a.c": """
#include "c_loop.h" /* declares only_seen() */
struct part shared = {
\t.alone = 0,
};
_Atomic int __attribute__((visibility("hidden"))) words[8];

void start_all(int n)
{
\tif (b_step(n) && d_last())
\t\tspawn(c_loop);
}
""",
    "job/b.c": """
extern struct part shared;
int b_step(int n);

__attribute__((visibility("hidden"), used)) int b_step(int n)
{
\tby_header();
\treturn n + shared.n;
}
""",
    "job/c.c": """
#define AGAIN(n) \\
\tstart_all(n)

void *c_loop(void *arg)
{
\tAGAIN(1);
\treturn arg;
}

void go_on(void)
{
}
""",
    "service/d.c": """
struct words { int n; };
extern int b_step(int n);
static int go_on(void);

UP_EXPORT int mmap(void)
{
\treturn 0;
}

/* start_all() is for others. */
int d_last(void)
{
\tstruct words w = { .n = 1 };

\tputs("b_step");
\treturn w.c_loop + go_on();
}

static int go_on(void)
{
\treturn 'c';
}
""",
    "service/e.c": "int e_maps(void)\n{\n\treturn mmap();\n}\n",
}
HOUSE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "house.py"))


def write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def counted(tmp_path: Path) -> dict[str, str]:
    write(tmp_path / "uffdprefetch", {f"{name}.py": text for name, text in MODULES.items()})
    write(tmp_path / "csrc", SOURCES)
    return dict(HOUSE["count"](tmp_path))


def test_what_is_counted(counted: dict[str, str]) -> None:
    assert counted["circles of imports"] == "1 (3)", "one of them is for types"
    assert counted["circles of calls in C"] == "1 (3)"
    assert counted["largest class"] == "Reader: 3 fields"
    assert counted["hooks that others plug in"] == "1"
    assert counted["class names borne twice"] == "1"
    assert counted["functions above 25 ways"] == "1"
    decide = counted["numbers that decide"], counted["all numbers"]
    assert decide == ("2", "2"), "names that are only told apart are none"
    assert counted["... with a comment of their own"] == "1"


def test_which_names_of_c_are_used_by_which_file(tmp_path: Path) -> None:
    write(tmp_path / "csrc", SOURCES)
    calls = {path: dict(others) for path, others in HOUSE["calls"](tmp_path).items()}
    assert calls == {
        "csrc/job/a.c": {
            "csrc/job/b.c": {"b_step"},
            "csrc/job/c.c": {"c_loop"},
            "csrc/service/d.c": {"d_last"},
        },
        "csrc/job/b.c": {"csrc/job/a.c": {"shared"}, "csrc/job/c.c": {"go_on"}},
        "csrc/job/c.c": {"csrc/job/a.c": {"start_all"}},
        "csrc/service/d.c": {},
        "csrc/service/e.c": {},
    }


#: By whom and what: cli.serve and the simulator come in by their doors, doctor and cli.wrap do not.
#: The core is free inside, and so are names that only begin alike.
DOORS = {
    "cli/serve": "from uffdprefetch.service.serve import serve\n",
    "cli/wrap": "from uffdprefetch.service import serve\n",
    "doctor/__init__": "",
    "doctor/pool": "def late():\n    from uffdprefetch.warm.limits import allowed\n",
    "doctor/types": "if False:\n    from uffdprefetch.state import files\n",
    "service/__init__": "",
    "service/door": "import uffdprefetch.service.serve\n",
    "service/serve": "from uffdprefetch.warm.limits import allowed\n",
    "sim/replay/node": "from uffdprefetch.service.door import build\n",
    "sim/replay/auto": "import uffdprefetch.service.door\nimport uffdprefetch.state.files\n",
    "sim/replayed": "from uffdprefetch.service import door\n",
    "state/__init__": "",
    "state/files": "",
    "statement": "",
    "view": "from uffdprefetch import statement\n",
    "warm/__init__": "from uffdprefetch.state.files import Key\n",
    "warm/limits": "",
}


def test_who_comes_past_the_door_is_told(tmp_path: Path) -> None:
    write(tmp_path / "uffdprefetch", {f"{name}.py": text for name, text in DOORS.items()})
    found = HOUSE["past_the_door"](HOUSE["import_graph"](HOUSE["modules"](tmp_path)))
    assert found == [
        (f"uffdprefetch.{who}", f"uffdprefetch.{what}")
        for who, what in (
            ("cli.wrap", "service.serve"),
            ("doctor.pool", "warm.limits"),
            ("doctor.types", "state.files"),
            ("sim.replay.auto", "state.files"),
            ("sim.replayed", "service.door"),
        )
    ]
    assert HOUSE["count"](tmp_path)["imports past the door"] == "5"


def test_circles_are_told_largest_first() -> None:
    graph = {"a": "b", "b": "ca", "c": "", "d": "e", "e": "f", "f": "dc", "g": "g"}
    assert HOUSE["circles"](graph) == [["d", "e", "f"], ["a", "b"]]


@pytest.mark.parametrize(
    "words, status, out, err",
    [
        (["--help"], 0, "usage: house.py", ""),
        (["{}/none"], 2, "", "house.py: {}/none: no Python file in uffdprefetch/: name a"),
        (["{}"], 2, "", "house.py: {}/uffdprefetch/wrong.py:2: "),
        (["--what"], 2, "", "unrecognized arguments: --what"),
    ],
)
def test_what_cannot_be_counted_is_told_in_a_line(
    tmp_path: Path, words: list[str], status: int, out: str, err: str
) -> None:
    write(tmp_path / "uffdprefetch", {"wrong.py": "x = 1\ndef\n"})
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "house.py", *(w.format(tmp_path) for w in words)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == status
    assert out in done.stdout and err.format(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Who imports whom here."""
    found: dict[str, set[str]] = HOUSE["import_graph"](HOUSE["modules"](ROOT))
    assert "uffdprefetch.service.door" in found["uffdprefetch.sim.replay.node"], "it sees nothing"
    return found


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    arrows = [
        f"{one} imports {other}"
        for circle in HOUSE["circles"](graph)
        for one in circle
        for other in sorted(graph[one] & set(circle))
    ]
    assert not arrows, (
        "modules import each other in a circle, be it for types. Move what both need to a module "
        "below them; or have the lower one say by a Protocol what it asks of the other (Process in "
        "state/reader.py is one), or keep the field with whom it belongs to:\n" + "\n".join(arrows)
    )


def test_nobody_comes_past_the_door_of_the_services_core(graph: dict[str, set[str]]) -> None:
    past = [f"{who} imports {what}" for who, what in HOUSE["past_the_door"](graph)]
    assert not past, (
        "the service's core (its packages: CORE in tools/house.py) is entered from outside by "
        "cli/serve.py, and by sim/replay/ through service/door.py. Move what others need as well "
        "to base/, native/ or protocol/; what a run tells of itself is in its snapshot and summary "
        '(docs/architecture.md, "The door"):\n' + "\n".join(past)
    )


def test_no_files_of_c_call_each_other_in_a_circle() -> None:
    calls = HOUSE["calls"](ROOT)
    assert "up_job" in calls["csrc/job/agent.c"]["csrc/job/base.c"], "the count sees nothing"
    arrows = [
        f"{one} uses {', '.join(sorted(calls[one][other]))} of {other}"
        for circle in HOUSE["circles"](calls)
        for one in circle
        for other in circle
        if other in calls[one]
    ]
    assert not arrows, (
        "files of C call each other in a circle. Move what both need to a file below them (base.c, "
        "pool.c and net.c are such), what acts on a message apart from what sends it, or hand the "
        "one a callback of the other (struct pool_calls):\n" + "\n".join(arrows)
    )


#: Class names that stand for several things: `Command` is what each module of cli/ is.
BORNE_TWICE = {"Command"}


def test_a_class_name_stands_for_one_thing() -> None:
    found = HOUSE["borne_twice"](HOUSE["modules"](ROOT))
    assert len(found["Command"]) > 10, "it sees nothing"
    told = [f"{name}: {', '.join(where)}" for name, where in found.items()]
    assert set(found) <= BORNE_TWICE, (
        "a class name is borne by several classes. Call one of them by what it is in its package "
        "(TracedFile, ReplayPool, RecordPlaces), by the terms of docs/glossary.md:\n"
        + "\n".join(told)
    )


HOOKS_MOST = 4


def test_few_callables_are_plugged_in_from_outside() -> None:
    found = HOUSE["hooks"](HOUSE["modules"](ROOT))
    assert "Scheduler.on_sent" in found, "the count sees nothing"
    assert len(found) <= HOOKS_MOST, (
        "callables of a class are assigned by others, after it was made. Hand them to its "
        "constructor, have the other ask (RangeSource), or return what it is to be told of; a "
        "field of another class that only has the same name is called by what it is there:\n"
        + "\n".join(found)
    )


#: A flat dispatch.
LONG = {"uffdprefetch.formats.arrow.layout_of"}


def test_no_function_is_too_long_a_decision() -> None:
    long = HOUSE["long_functions"](HOUSE["modules"](ROOT))
    assert "uffdprefetch.formats.arrow.layout_of" in long, "the count sees nothing"
    more = [f"{name}: {ways} ways" for name, ways in long.items() if name not in LONG]
    assert not more, (
        f"more than {HOUSE['COMPLEXITY_MOST']} ways go through a function. Split it by what it "
        "decides, each part with a name: what is gathered before, what follows from it, how it is "
        "told. One that only tells cases apart, a line each, may stand in LONG:\n" + "\n".join(more)
    )
    assert not LONG - long.keys(), f"no longer: {LONG - long.keys()}, take it out of LONG"


#: Whose documents are described, key by key, and where.
DOCUMENTS = {
    "uffdprefetch.protocol.summary": "summary-schema.md",
    "uffdprefetch.protocol.snapshot": "summary-schema.md",
    "uffdprefetch.compare.figures": "summary-schema.md",
}


def mirrored(module: str, node: ast.ClassDef) -> set[str] | None:
    """The names that a class has of what another side lays out: of the struct of C that its
    docstring names, or of a JSON object whose keys are described. None: it mirrors nothing."""
    fields = set(HOUSE["attributes"](node))
    struct = re.search(r"struct (up_\w+)", ast.get_docstring(node) or "")
    if struct is not None:
        return {name for name, _ in _uffd.ffi.typeof(struct[0]).fields}
    if module in DOCUMENTS:
        code = re.findall(r"`[^`]+`", (ROOT / "docs" / DOCUMENTS[module]).read_text())
        return fields & set(re.findall(r"\w+", " ".join(code)))
    return None


def is_mirror(module: str, node: ast.ClassDef) -> bool:
    """Whether a class is only what another side lays out."""
    return HOUSE["is_frozen"](node) and mirrored(module, node) == set(HOUSE["attributes"](node))


def test_what_is_a_mirror_is_found() -> None:
    classes = {
        node.name: (module.name, node)
        for module, node in HOUSE["classes"](HOUSE["modules"](ROOT))
        if node.name in ("PoolCounts", "Summary", "Pool", "PoolHit")
    }
    assert mirrored(*classes["PoolCounts"]) == set(HOUSE["attributes"](classes["PoolCounts"][1]))
    assert mirrored(*classes["Summary"]) == set(HOUSE["attributes"](classes["Summary"][1]))
    assert mirrored(*classes["Pool"]) is None and not HOUSE["is_frozen"](classes["Pool"][1])
    other = ast.parse('class One(NamedTuple):\n    """Of struct up_hello."""\n    none: int').body[
        0
    ]
    assert isinstance(other, ast.ClassDef) and HOUSE["is_frozen"](other)
    assert mirrored("x", other) != set(HOUSE["attributes"](other))


def test_a_class_has_few_fields() -> None:
    found = {
        f"{module.name.removeprefix('uffdprefetch.')}.{node.name}": len(HOUSE["attributes"](node))
        for module, node in HOUSE["classes"](HOUSE["modules"](ROOT))
        if not is_mirror(module.name, node)
    }
    wide = {name: fields for name, fields in found.items() if fields > HOUSE["FIELDS_MOST"]}
    more = [f"{name}: {n} fields" for name, n in wide.items()]
    assert not more, (
        f"a class has more than {HOUSE['FIELDS_MOST']} fields. Split it by owner: a part with a "
        "name from the field, which one module writes, and with it the methods that work on it. "
        "Data without its methods is no part:\n" + "\n".join(more)
    )


#: Of all packages whose numbers decide what is read; 242 before most were found to say the same.
NUMBERS_MOST = 134


def test_numbers_that_decide_are_few_and_each_says_what_it_is_for() -> None:
    found = list(HOUSE["deciding"](HOUSE["modules"](ROOT)))
    assert len(found) > NUMBERS_MOST // 2, "the count sees nothing"
    mute = [f"{module.name}.{name}" for module, name, said in found if not said]
    assert not mute, (
        "a number decides what is read and has no comment of its own. Say above it what it is for, "
        "and where it comes from:\n" + "\n".join(mute)
    )
    assert len(found) <= NUMBERS_MOST, (
        f"{len(found)} numbers decide what is read. Ask what holds the new one (python -m "
        "tests.net.mutate NAME), and whether another one says the same: how much is remembered and "
        "for how long it holds (predict/bounds.py), what a request brings, what may be lost for "
        "nothing. Or delete one that nothing holds (docs/constants.md)"
    )


def test_what_holds_each_number_is_told() -> None:
    told = (ROOT / "docs" / "constants.md").read_text()
    lacking = [
        f"{module.name}.{name}"
        for module, name, _ in HOUSE["deciding"](HOUSE["modules"](ROOT))
        if f"| `{module.name.partition('.')[2]}` | `{name}` |" not in told
    ]
    assert not lacking, "run python -m tests.net.mutate NAME --write for:\n" + "\n".join(lacking)
