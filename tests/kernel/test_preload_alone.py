# SPDX-License-Identifier: Apache-2.0
"""Programs that threads and mappings of ours would break run as without us, and the summary says
why nothing of theirs was served."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from components import Runner
from conftest import require
from harness import Records, programs
from paths import PROGRAMS

from uffdprefetch.launch.environment import ASAN_NO_ORDER_CHECK, without_order_check
from uffdprefetch.protocol import wire

pytest_plugins = ("harness_fixtures",)

SMALL = ("--min-size", "1MiB")
ASAN, TSAN, MSAN, LSAN = (wire.LEFT_ALONE[n] for n in (1, 2, 3, 4))
LINKED, VALGRIND = wire.LEFT_ALONE[5], wire.LEFT_ALONE[6]


def build(directory: Path, compiler: str, *flags: str) -> Path:
    """tests/programs/alone.c by this compiler; skips where that cannot be."""
    require(shutil.which(compiler), f"no {compiler}")
    program = directory / "alone"
    done = subprocess.run(
        [compiler, "-O1", "-g", *flags, PROGRAMS / "alone.c", "-o", program],
        capture_output=True, text=True,
    )  # fmt: skip
    require(done.returncode == 0, f"{compiler} {' '.join(flags)}: {done.stderr[-200:]}")
    return program


@pytest.mark.parametrize(
    ("compiler", "flags", "why"),
    [
        ("gcc", ["-fsanitize=address"], ASAN),
        ("gcc", ["-fsanitize=thread"], TSAN),
        ("gcc", ["-fsanitize=leak"], LSAN),
        ("gcc", ["-fsanitize=address", "-static-libasan"], LINKED),
        ("gcc", ["-fsanitize=thread", "-static-libtsan"], LINKED),
        ("clang", ["-fsanitize=address"], ASAN),
        ("clang", ["-fsanitize=thread"], TSAN),
        ("clang", ["-fsanitize=memory"], MSAN),
    ],
)
def test_a_sanitizer_s_program_runs_as_without_us(
    env: dict[str, str], records: Records, tmp_path: Path,
    compiler: str, flags: list[str], why: str,
) -> None:  # fmt: skip
    program = build(tmp_path, compiler, *flags)
    runner = Runner(env, tmp_path)
    plain = runner.plain(program, records.path)
    run = runner.wrapped(program, records.path, options=SMALL)
    assert (run.status, run.stdout, run.stderr) == (0, plain, "")
    refused = run.summary["refused"]
    # while it starts, TSan maps a file of its own that it has deleted, which may be seen in /proc
    assert {path: said for path, said in refused.items() if "/tsan.rodata." not in path} == {
        "program alone": why
    }
    assert run.summary["files"] == []


@pytest.mark.parametrize(("compiler", "flags"), [("gcc", []), ("gcc", ["-fsanitize=undefined"])])
def test_any_other_program_is_served(
    env: dict[str, str], records: Records, tmp_path: Path, compiler: str, flags: list[str]
) -> None:
    """Else the tests above would pass with nothing ever served."""
    program = build(tmp_path, compiler, *flags)
    runner = Runner(env, tmp_path)
    plain = runner.plain(program, records.path)
    run = runner.wrapped(program, records.path, options=SMALL)
    ours = (b"threads 2", b"threads 3")  # the second where checkpoints were laid in time
    assert run.stdout in [plain.replace(b"threads 1", count) for count in ours]
    assert run.summary["refused"] == {}


def test_a_program_under_valgrind_runs_as_without_us(
    env: dict[str, str], records: Records, tmp_path: Path
) -> None:
    require(shutil.which("valgrind"), "no valgrind: apt-get install valgrind")
    words = ["valgrind", "-q", "--error-exitcode=9", programs(tmp_path, "alone"), records.path]
    runner = Runner(env, tmp_path)
    plain = runner.plain(*words)
    run = runner.wrapped(*words, options=SMALL)
    assert (run.status, run.stdout, run.stderr) == (0, plain, "")
    [(program, why)] = run.summary["refused"].items()
    assert program.startswith("program memcheck") and why == VALGRIND


@pytest.mark.parametrize("mistake", ["heap", "leak"])
def test_what_a_sanitizer_finds_it_finds_under_wrap(
    env: dict[str, str], tmp_path: Path, mistake: str
) -> None:
    source = tmp_path / "mistake.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "static void *volatile kept;\n"
        "int main(int argc, char **argv) { (void)argv; kept = malloc(10);\n"
        + (
            "return ((volatile char *)kept)[9 + argc]; }"
            if mistake == "heap"
            else "kept = 0; return 0; }"
        )
    )
    program = tmp_path / "mistake"
    subprocess.run(["gcc", "-fsanitize=address", "-O0", source, "-o", program], check=True)
    plain = subprocess.run([program], env=env, capture_output=True, text=True)
    wrapped = Runner(env, tmp_path).wrapped(program)
    assert plain.returncode != 0 and wrapped.status == plain.returncode
    kinds = [
        text.split("AddressSanitizer: ")[-1].split()[0] for text in (plain.stderr, wrapped.stderr)
    ]
    assert kinds[0] == kinds[1]


def test_the_users_own_options_for_a_sanitizer_hold() -> None:
    assert without_order_check(None) == ASAN_NO_ORDER_CHECK
    assert without_order_check("a=1:b=2") == f"{ASAN_NO_ORDER_CHECK}:a=1:b=2"
    theirs = "verify_asan_link_order=1"
    assert without_order_check(theirs).endswith(f":{theirs}"), "the last one counts"
    assert without_order_check(without_order_check("a=1")) == without_order_check("a=1")
