#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/img/top-80x24 and top-160x50 (SVG and PNG) from a real run.

The demonstration's job with 4 ranks reads from the slow bed under `wrap`; `uffdprefetch top` runs
in two tmux windows of these sizes, whose screens are captured with colours.

    python tools/screenshots.py [--out docs/img] [--size 1GiB] [--bandwidth 60MB] [--ranks 4]

Needs root, tmux, the bed (FUSE), and for the PNGs chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from uffdprefetch.base.units import parse_rate, parse_size  # noqa: E402
from uffdprefetch.demo.jobrun import job_command, job_environment  # noqa: E402
from uffdprefetch.demo.storage import Wanted, open_storage  # noqa: E402

SIZES = ((80, 24), (160, 50))
SERVER = f"uffdprefetch-screenshots-{os.getpid()}"
THEME = TerminalTheme(
    (16, 20, 26),
    (214, 220, 228),
    [(16, 20, 26), (213, 94, 0), (0, 158, 115), (230, 159, 0), (0, 114, 178), (204, 121, 167),
     (86, 180, 233), (214, 220, 228)],
)  # fmt: skip


def tmux(*words: str) -> str:
    """Run a tmux command on a server of our own."""
    done = subprocess.run(
        ["tmux", "-L", SERVER, *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout


def to_svg(captured: str, width: int, height: int, title: str) -> str:
    """A captured screen as SVG that names no font from elsewhere."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", legacy_windows=False, _environ={},
    )  # fmt: skip
    lines = captured.split("\n")[:height]
    for line in lines + [""] * (height - len(lines)):
        text = Text.from_ansi(line)
        text.no_wrap = True
        console.print(text, soft_wrap=True)
    svg = console.export_svg(title=title, theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they come from a CDN
    return svg.replace("Fira Code", "DejaVu Sans Mono")


def to_png(svg: Path, png: Path) -> None:
    """Have chromium draw an SVG."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print(f"no chromium: {png.name} is not made", file=sys.stderr)
        return
    match = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text())
    assert match is not None
    width, height = (int(float(number)) + 1 for number in match.groups())
    with tempfile.TemporaryDirectory() as profile:
        page = Path(profile) / "page.html"
        page.write_text(
            f'<body style="margin:0;background:#fff"><img src="{svg.resolve().as_uri()}"'
            f' width="{width}" height="{height}"></body>'
        )
        subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--allow-file-access-from-files", f"--user-data-dir={profile}"),
                *(f"--window-size={width},{height}", f"--screenshot={png.resolve()}"),
                page.as_uri(),
            ],
            check=True, timeout=90, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def shares(screen: str) -> list[int]:
    """The ranks' positions in per cent, as the screen shows them."""
    return [int(m) for m in re.findall(r"^ +\d+ .*? (\d+)%", screen, re.MULTILINE)]


def main() -> int:
    """Run the job, take the pictures, end everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--bandwidth", default="60MB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pattern", default="contiguous")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the run, then the picture")
    parser.add_argument("--name", default="top", help="beginning of the file names")
    parser.add_argument("--wrap", default="", help="options of wrap, as one word")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bandwidth = parse_rate(options.bandwidth)
    wanted = Wanted(size_bytes=parse_size(options.size), bandwidth=bandwidth)
    environment = job_environment()
    with (
        tempfile.TemporaryDirectory(prefix="uffdprefetch-shots-") as work,
        open_storage(wanted, lambda text: print(text, file=sys.stderr)) as storage,
    ):
        environment["UFFDPREFETCH_RUNDIR"] = str(Path(work) / "run")
        environment["UFFDPREFETCH_RUN"] = "demo-4-ranks"
        environment["TERM"] = "xterm-256color"
        per_byte = 0.95 * options.ranks / storage.bandwidth
        storage.make_cold()
        database = Path("/mnt") / storage.database.name
        job = subprocess.Popen(
            [
                # in a mount namespace: the data set has the same name in each picture
                *("unshare", "-m", "sh", "-c", 'mount --bind "$0" /mnt && exec "$@"'),
                str(storage.database.parent),
                *(sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", "shot"),
                *options.wrap.split(), "--",
                *job_command(database, "--spawn", f"--ranks={options.ranks}"),
                *(f"--pattern={options.pattern}", "--epochs=2"),
                f"--compute-seconds-per-byte={per_byte!r}",
            ],
            env=environment, cwd=work, start_new_session=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            time.sleep(3)  # until the ranks have started; what follows waits for states
            top = f"{sys.executable} -m uffdprefetch top; sleep 600"
            for width, height in SIZES:
                tmux(
                    *("new-session", "-d", "-s", f"s{width}", "-x", str(width), "-y", str(height)),
                    *(f"-ePYTHONPATH={ROOT}", "-eCOLORTERM=truecolor", "-eTERM=xterm-256color"),
                    f"-eUFFDPREFETCH_RUNDIR={environment['UFFDPREFETCH_RUNDIR']}",
                    *("-eLANG=C.UTF-8", top),
                )
                tmux("set", "-g", "status", "off")
                tmux("resize-window", "-t", f"s{width}", "-x", str(width), "-y", str(height))
            deadline = time.monotonic() + options.seconds
            while time.monotonic() < deadline and job.poll() is None:
                time.sleep(0.5)
            for width, height in SIZES:
                captured = tmux("capture-pane", "-e", "-p", "-t", f"s{width}")
                print(re.sub(r"\x1b\[[0-9;]*m", "", captured))
                stem = options.out / f"{options.name}-{width}x{height}"
                svg = stem.with_suffix(".svg")
                svg.write_text(to_svg(captured, width, height, "uffdprefetch top"))
                to_png(svg, stem.with_suffix(".png"))
        finally:
            subprocess.run(["tmux", "-L", SERVER, "kill-server"], capture_output=True, check=False)
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
            job.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
