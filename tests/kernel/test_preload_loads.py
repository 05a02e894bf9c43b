# SPDX-License-Identifier: Apache-2.0
"""The preload object loads beside any C library, old or of another make, and asks none for more
than it has: a program of the job must start."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from components import Runner
from conftest import require
from harness import Records, programs
from paths import PROGRAMS, ROOT

from uffdprefetch.native.preload import preload_object

pytest_plugins = ("harness_fixtures",)

CSRC = ROOT / "csrc"
SMALL = ("--min-size", "1MiB")
#: A musl program's own loader, by its program header.
MUSL_LOADER = "/lib/ld-musl-"


def tool(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def undefined(objdump: str, path: Path | str) -> list[list[str]]:
    """The lines of `objdump -T` on what an object asks of others, in words."""
    text = tool(objdump, "-T", path)
    return [line.split() for line in text.splitlines() if "*UND*" in line]


def build_preload(compiler: str, out: Path) -> Path:
    """The preload object by another compiler, with the flags that setup.py has."""
    setup = (ROOT / "setup.py").read_text()
    flags = re.findall(r'^        "(-[^"]+)"', setup, re.M)
    links = re.findall(r'"(-[^"]+)"', re.search(r"extra_link_args=\[(.*?)\]", setup)[1])  # type: ignore[index]
    sources = [*sorted(CSRC.glob("job/*.c")), CSRC / "common" / "vma.c"]
    words = [compiler, "-shared", "-fPIC", f"-I{CSRC}", *flags, "-Werror", *sources, "-o", out]
    subprocess.run([*words, *links], check=True)
    return out


def test_it_needs_no_library_and_no_version_of_any() -> None:
    require(shutil.which("objdump"), "no binutils")
    path = preload_object()
    headers = tool("objdump", "-p", path)
    assert "NEEDED" not in headers and "Version References" not in headers
    asked = undefined("objdump", path)
    assert [words for words in asked if "(" in " ".join(words)] == []
    assert [words[-1] for words in asked if "w" not in words[:2]] == [], "not weak"
    assert "__errno_location" in {words[-1] for words in asked}, "else nothing is read here"


def test_it_is_built_for_aarch64_alike(tmp_path: Path) -> None:
    compiler = "gcc" if platform.machine() == "aarch64" else "aarch64-linux-gnu-gcc"
    require(shutil.which(compiler), f"no {compiler}: apt-get install gcc-aarch64-linux-gnu")
    path = build_preload(compiler, tmp_path / "preload.so")
    asked = undefined(compiler.replace("gcc", "objdump"), path)
    assert asked and all(words[1] == "w" and "(" not in " ".join(words) for words in asked)


def test_it_runs_on_aarch64(tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
    require(shutil.which(compiler) and shutil.which(emulator), f"no {compiler} or no {emulator}")
    preload = build_preload(compiler, tmp_path / "preload.so")
    program = tmp_path / "alone"
    source = PROGRAMS / "alone.c"
    subprocess.run([compiler, "-std=gnu11", "-O1", source, "-o", program], check=True)
    words = [emulator, "-L", "/usr/aarch64-linux-gnu", str(program), str(source)]
    variable = ["-E", f"LD_PRELOAD={preload}"]
    assert tool(*words[:3], *variable, *words[3:]) == tool(*words)


def older_libc(tmp_path: Path, version: str) -> tuple[Path, Path]:
    """A library that asks for a version which no libc.so.6 here has, and a program to load it."""
    (tmp_path / "map").write_text(f"{version} {{ global: from_the_future; }};\n")
    (tmp_path / "stub.c").write_text("void from_the_future(void) {}\n")
    (tmp_path / "asks.c").write_text(
        "void from_the_future(void);\nvoid asks(void) { from_the_future(); }\n"
    )
    stub, asks = tmp_path / "libc.so.6", tmp_path / "asks.so"
    shared = ["cc", "-shared", "-fPIC", "-nostdlib"]
    subprocess.run(
        [*shared, "-Wl,-soname,libc.so.6", f"-Wl,--version-script,{tmp_path / 'map'}",
         tmp_path / "stub.c", "-o", stub], check=True,
    )  # fmt: skip
    subprocess.run([*shared, tmp_path / "asks.c", "-o", asks, stub], check=True)
    return asks, Path("/bin/true")


def test_a_program_does_not_start_with_what_asks_for_more_than_its_libc_has(
    tmp_path: Path,
) -> None:
    """Why the first test here is as strict as it is."""
    asks, program = older_libc(tmp_path, "GLIBC_2.99")
    ended = subprocess.run([program], env={"LD_PRELOAD": str(asks)}, capture_output=True, text=True)
    assert ended.returncode != 0 and "GLIBC_2.99" in ended.stderr
    ended = subprocess.run(
        [program], env={"LD_PRELOAD": preload_object()}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_of_another_c_library_runs_and_is_left_alone(
    env: dict[str, str], records: Records, tmp_path: Path
) -> None:
    require(shutil.which("musl-gcc"), "no musl-gcc: apt-get install musl-tools")
    program = tmp_path / "alone-musl"
    source = PROGRAMS / "alone.c"
    subprocess.run(["musl-gcc", "-std=gnu11", "-O1", source, "-o", program], check=True)
    if shutil.which("readelf"):
        assert MUSL_LOADER in tool("readelf", "-l", program)
    runner = Runner(env, tmp_path)
    plain = runner.plain(program, records.path)
    run = runner.wrapped(program, records.path, options=SMALL)
    assert (run.status, run.stdout, run.stderr) == (0, plain, "")
    assert run.summary["refused"] == {"program alone-musl": "its C library is not glibc"}


@pytest.mark.parametrize("name", ["mmap", "munmap", "open64", "setuid", "syscall"])
def test_the_next_definition_is_the_one_that_dlsym_finds(
    env: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Another library's between ours and libc's, as tools have them, is called."""
    source = tmp_path / "between.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdarg.h>
        #include <stdlib.h>
        long write(int, const void *, unsigned long);
        long NAME(long a, long b, long c, long d, long e, long f, long g)
        {
            long (*next)(long, long, long, long, long, long, long) = dlsym(RTLD_NEXT, TEXT);
            static int told;
            if (!told++ && write(1, "between\\n", 8) != 8)
                abort();
            return next(a, b, c, d, e, f, g);
        }
        """
    )
    between = tmp_path / "between.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-DNAME={name}", f'-DTEXT="{name}"', source, "-o", between],
        check=True,
    )  # fmt: skip
    program = programs(tmp_path, "calls_all")
    words = ["sh", "-c", f'LD_PRELOAD="$LD_PRELOAD:{between}" exec {program}']
    plain = Runner(env, tmp_path).plain(*words)
    assert plain == b"between\ndone\n"
    run = Runner(env, tmp_path).wrapped(*words)
    assert (run.status, run.stdout) == (0, plain)
