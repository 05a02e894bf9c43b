# SPDX-License-Identifier: Apache-2.0
"""packaging/modulefiles: what `module load` brings."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import require
from paths import ROOT

FILE = ROOT / "packaging" / "modulefiles" / "uffdprefetch" / "0.1.0"
INIT = Path("/usr/share/modules/init/bash")


def test_the_program_comes_on_path_and_no_other_python(tmp_path: Path) -> None:
    require(INIT.exists(), "no environment modules here (environment-modules)")
    prefix = tmp_path / "prefix"
    (prefix / "only").mkdir(parents=True)
    (prefix / "bin").mkdir()
    for name in ("uffdprefetch", "python3"):
        (prefix / "bin" / name).write_text("#!/bin/sh\necho ours\n")
        (prefix / "bin" / name).chmod(0o755)
    (prefix / "only" / "uffdprefetch").symlink_to("../bin/uffdprefetch")
    files = tmp_path / "files" / "uffdprefetch"
    files.mkdir(parents=True)
    text = FILE.read_text().replace("set prefix /opt/uffdprefetch", f"set prefix {prefix}")
    (files / FILE.name).write_text(text)
    script = (
        f". {INIT}; module use {files.parent}; before=$(command -v python3);"
        " module load uffdprefetch || exit 1; uffdprefetch;"
        ' test "$(command -v python3)" = "$before" && echo same; echo "$MANPATH"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    ours, same, manpath = done.stdout.splitlines()
    assert (ours, same) == ("ours", "same"), done.stderr
    assert f"{prefix}/share/man" in manpath
