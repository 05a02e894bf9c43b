# SPDX-License-Identifier: Apache-2.0
"""Latency of a touched checkpoint by the service's state: `python bench/faults.py --json F`.

``idle``: the service is idle otherwise. ``busy``: two other processes of the job read a warm file
at full speed. ``slow``: it is stopped nine tenths of the time (SIGSTOP for 45 ms, SIGCONT for 5).
``stopped``: SIGSTOP once the checkpoints are laid. ``dead``: SIGKILL then; the agent detaches the
mapping, so that a touch is an ordinary minor fault. For comparison, from the same run: a minor
fault of a cached page, and a word bounced to another thread and back: two wake-ups, as for a
checkpoint (of the responder, of the touching thread).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reports import ROOT, conditions, save
from slides import build, find_service

MIB = 1 << 20
STATES = ("idle", "busy", "slow", "stopped", "dead")


@contextlib.contextmanager
def slowed(rundir: str) -> Iterator[None]:
    """Let the service of a runtime directory run a tenth of the time, once it exists."""
    ended = threading.Event()

    def work() -> None:
        pid = None
        while pid is None and not ended.wait(0.005):
            pid = find_service(rundir)
        while pid is not None and not ended.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.005)):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    return
                time.sleep(seconds)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(state: str, program: Path, walk: Path, data: Path, rounds: int) -> dict[str, Any]:
    """One state: the lines of bench/faultcost.c by their names."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-faults-") as rundir:
        os.chmod(rundir, 0o700)
        env = {**os.environ, "UFFDPREFETCH_RUNDIR": rundir, "UFFDPREFETCH_RUN": "faults"}
        gate = Path(rundir) / "go"
        options = ["--policy", "none", "--distance", "4MiB"]
        wrap = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", f"{rundir}/out"]
        gated = state in ("stopped", "dead")
        words = [str(program), str(data), str(1 if gated else rounds), "1000", "100"]
        others = []
        if state == "busy":
            busy = [str(walk), str(data), "1", str(1 << 42), "65536"]
            others = [
                subprocess.Popen([*wrap, *options, "--", *busy], env=env, cwd=ROOT)
                for _ in range(2)
            ]
        job = subprocess.Popen(
            [*wrap, *options, "--", *words, *([str(gate)] if gated else [])],
            env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        lines: list[dict[str, Any]] = []
        service = None
        stack = contextlib.ExitStack()
        if state == "slow":
            stack.enter_context(slowed(rundir))
        for line in job.stdout:
            lines.append(json.loads(line))
            if lines[-1]["what"] == "ready":
                service = find_service(rundir)
                assert service is not None, "no service"
                os.kill(service, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
                gate.touch()
            elif state == "stopped" and lines[-1]["what"].startswith("eventfd"):
                assert service is not None
                os.kill(service, signal.SIGCONT)  # the last line: now wrap wants a summary
        stack.close()
        job.stdout.close()
        for other in others:
            other.send_signal(signal.SIGTERM)
        job.wait()
        for other in others:
            other.wait()
    return {line["what"]: line for line in lines}


def main() -> int:
    """Measure every state and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", required=True, metavar="F")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--work", default=None, help="where the file lies (not tmpfs)")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "schema": "uffdprefetch.bench/1",
        "suite": "faults",
        **conditions(),
        "states": {},
    }
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-faults-", dir=args.work) as work:
        program, walk = build("faultcost", Path(work)), build("walk", Path(work))
        data = Path(work) / "data"
        with open(data, "wb") as file:
            for _ in range(512):
                file.write(os.urandom(MIB))
        for state in STATES:
            report["states"][state] = measure(state, program, walk, data, args.rounds)
    save(Path(args.json), report)
    head = "| service | touches | p50 us | p99 us | minor fault p50 | futex p50 | futex p99 |"
    print(head + " p50 / futex p50 |")
    print("|---|" + "---:|" * 7)
    for state, by_name in report["states"].items():
        touch, futex = by_name["touch to continue"], by_name["futex, there and back"]
        cells = [touch["p50_ns"], touch["p99_ns"], by_name["minor fault"]["p50_ns"]]
        cells += [futex["p50_ns"], futex["p99_ns"]]
        shown = " | ".join(f"{cell / 1e3:.1f}" for cell in cells)
        ratio = touch["p50_ns"] / futex["p50_ns"]
        print(f"| {state} | {touch['count']} | {shown} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
