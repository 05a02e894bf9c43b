# SPDX-License-Identifier: Apache-2.0
"""Mappings, descriptors and memory used with checkpoints: `python bench/slides.py --json F`.

Two cases, each with the real service and preload:

* ``sparse``: a sparse 240 GiB file read by 64 threads at once;
* ``epochs``: one warm file read in several epochs, its checkpoints rearmed behind the reader.

The counts are sampled from /proc during the run: mappings of the job, descriptors of the job and of
the agent (which has its own table), resident memory of the job (anonymous part) and of the service.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reports import ROOT, conditions, save

GIB = 1 << 30
MIB = 1 << 20


def build(name: str, work: Path) -> Path:
    """Compile bench/NAME.c."""
    program = work / name
    subprocess.run(
        ["cc", "-O2", "-o", program, ROOT / "bench" / f"{name}.c", "-lpthread"], check=True
    )
    return program


def find_process(parent: int, name: str) -> int | None:
    """The child of ``parent`` that runs ``name``."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        try:
            for pid in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    return pid
        except OSError:
            continue
    return None


def find_service(rundir: str) -> int | None:
    """The serve process of a runtime directory."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and any(rundir.encode() in word for word in words):
            return int(entry.name)
    return None


def memory_kib(pid: int, field: str) -> int:
    """A field of /proc/PID/status in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def sample(job: int, service: int) -> dict[str, int]:
    """One sample of both processes. Raises OSError when one has ended."""
    agent = next(
        t
        for t in Path(f"/proc/{job}/task").iterdir()
        if (t / "comm").read_text().strip() == "uffdprefetch"
    )
    return {
        "job_mappings": Path(f"/proc/{job}/maps").read_text().count("\n"),
        "job_descriptors": len(os.listdir(f"/proc/{job}/fd")),
        "agent_descriptors": len(os.listdir(agent / "fd")),
        "job_anonymous_kib": memory_kib(job, "RssAnon"),
        "service_rss_kib": memory_kib(service, "RssAnon"),
        "service_shmem_kib": memory_kib(service, "RssShmem"),
        "service_descriptors": len(os.listdir(f"/proc/{service}/fd")),
    }


def run(program: Path, words: list[str], options: list[str], interval: float) -> dict[str, Any]:
    """Run bench/walk.c under wrap and sample until it ends."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-slides-") as rundir:
        os.chmod(rundir, 0o700)
        out = Path(rundir) / "run"
        wrap = subprocess.Popen(
            [
                *(sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", str(out)),
                *(*options, "--", str(program), *words),
            ],
            env={**os.environ, "UFFDPREFETCH_RUNDIR": rundir},
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        samples: list[dict[str, int]] = []
        started = time.monotonic()
        while wrap.poll() is None:
            job, service = find_process(wrap.pid, program.name), find_service(rundir)
            if job and service:
                try:
                    samples.append(sample(job, service))
                except (OSError, StopIteration):
                    pass
            time.sleep(interval)
        seconds = time.monotonic() - started
        assert wrap.stdout is not None
        printed = json.loads(wrap.stdout.read() or "{}")
        summary = json.loads(Path(f"{out}.summary.json").read_text())
    steady = samples[len(samples) // 4 :]
    return {
        "command": ["walk", *words[1:]],
        "options": options,
        "seconds": round(seconds, 1),
        "exit": wrap.returncode,
        "mmap_microseconds": round(printed.get("mmap_ns", 0) / 1e3, 1),
        "checkpoints": summary["totals"]["checkpoints"],
        "touches": summary["totals"]["fault_wait_ns"]["count"],
        "service_cpu_seconds": summary["service"]["cpu_seconds"],
        "degradations": summary["degradations"],
        "samples": len(samples),
        "first": samples[0] if samples else None,
        "steady_min": {k: min(s[k] for s in steady) for k in steady[0]} if steady else None,
        "steady_max": {k: max(s[k] for s in steady) for k in steady[0]} if steady else None,
    }


def main() -> int:
    """Run both cases and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", required=True, metavar="F")
    parser.add_argument("--epochs", type=int, default=64)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--work", default=None, help="where the files lie (not tmpfs)")
    args = parser.parse_args()
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    report: dict[str, Any] = {
        "schema": "uffdprefetch.bench/1",
        "suite": "slides",
        **conditions(),
        "max_map_count": limit,
    }
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-slides-", dir=args.work) as work:
        program = build("walk", Path(work))
        sparse = Path(work) / "sparse"
        with open(sparse, "wb") as file:
            file.truncate(240 * GIB)
        # holes cost no I/O; a pause per MiB keeps all streams alive for a while
        words = [str(sparse), str(args.streams), str(96 * MIB), "16384", "2000"]
        report["sparse"] = run(program, words, ["--policy", "none"], 0.1)
        sparse.unlink()
        dense = Path(work) / "dense"
        with open(dense, "wb") as file:
            for _ in range(512):
                file.write(os.urandom(MIB))
        words = [str(dense), "1", str(args.epochs * 512 * MIB), "65536", "2000"]
        options = ["--policy", "none", "--distance", "256KiB"]
        report["epochs"] = run(program, words, options, 0.5)
    save(Path(args.json), report)
    print(json.dumps(report, indent=1))
    quarter = limit // 4
    most = report["sparse"]["steady_max"]["job_mappings"]
    return 0 if most <= quarter else 1


if __name__ == "__main__":
    sys.exit(main())
