# SPDX-License-Identifier: Apache-2.0
"""The lines on stderr, and the name and writing of the JSON."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import SUMMARY_JSON

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.messages import PREFIX
from uffdprefetch.report import output
from uffdprefetch.report import summary as summary_of
from uffdprefetch.report.summary import (
    TELL_ORDER,
    cluster_lines,
    deaths,
    decision_lines,
    how_it_ran,
    lines,
    pool_line,
    short_lines,
)
from uffdprefetch.state.unserved import Coarse, Reason


def unserved(remedy: str | None, mapped_bytes: int) -> dict[str, Any]:
    return {"path": "/data/w", "mapped_bytes": mapped_bytes, "why": "shared", "remedy": remedy}


TERMINAL = 80


def changed(**values: Any) -> dict[str, Any]:
    """The good summary with top-level values, or with totals_NAME= in its totals, replaced."""
    summary = copy.deepcopy(SUMMARY_JSON)
    for name, value in values.items():
        if name.startswith("totals_"):
            summary["totals"][name.removeprefix("totals_")] = value
        else:
            summary[name] = value
    return summary


def note(text: str, path: str = "") -> dict[str, str]:
    return {"path": path, "text": text}


KEPT = "kept ahead of the job: 1014 MiB of 1 GiB (10.2 MiB missed, 200 ms waited)"


def test_a_good_run_says_what_was_kept_ahead_and_what_it_saved_and_no_more() -> None:
    assert short_lines(SUMMARY_JSON) == [f"{KEPT}; saved at least 2.35 s"]
    assert short_lines(SUMMARY_JSON, TERMINAL) == [
        "kept ahead: 1014 MiB of 1 GiB; saved at least 2.35 s"
    ]


NODES = {"nodes": 2, "present": [0, 1], "from_bytes": 0, "why_not": None, "not_shared": []}


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"from_bytes": 3 << 20}, "2 nodes shared: 1 MiB from storage, 3 MiB from each other"),
        ({"why_not": "there is no MPI"}, "nodes shared nothing: there is no MPI"),
        (
            {"not_shared": [{"path": "/data/a", "why": "ext4 is a local file system"}]},
            "nodes shared nothing: /data/a: ext4 is a local file system",
        ),
        ({}, "nodes shared nothing: none had what another one read"),
    ],
)
def test_a_run_of_many_nodes_says_what_they_shared_or_why_nothing(
    cluster: dict[str, Any], said: str
) -> None:
    summary = changed(cluster={**NODES, **cluster}, pool={"read_bytes": 1 << 20})
    assert short_lines(summary)[1] == said
    first = short_lines({**summary, "totals": {**summary["totals"], "gain": "even"}})[0]
    assert first == said if cluster.get("from_bytes") else first.startswith("kept ahead of the job")


def test_with_v_it_says_how_it_ran() -> None:
    gained, how, came, served, where = lines(SUMMARY_JSON, "out.summary.json", verbose=True)
    assert [gained] == short_lines(SUMMARY_JSON)
    assert how == (
        "engine cache, policy auto, userfaultfd: 1 file (1 GiB), 1 rank, 12.5 s;"
        " our CPU 0.8 % of a core"
    )
    assert came == (
        "3 demand misses; prefetched 1 GiB (accuracy 100 %, coverage 99 %, on time 98 %);"
        " 256 checkpoints answered, half of them within 3.3 us, 99 % within 9 us; read 1 GiB by the"
        " kernel's count"
    )
    assert (
        served
        == "/data/train.mdb: followed by checkpoints, warmed by posix_fadvise; rank 0: random"
    )
    assert where == "all figures: out.summary.json"


def test_with_v_each_decision_is_explained() -> None:
    streams = [
        {"file": "/data/a", "rank": rank, "pattern": pattern}
        for rank, pattern in ((0, "forward"), (1, "forward"), (2, "forward"), (5, "random"))
    ]
    files = [
        {"path": "/data/a", "size_bytes": 1, "served_by": "page_tables", "warmed_by": "readahead"},
        {"path": "/data/b", "size_bytes": 1, "served_by": "pool", "warmed_by": "the pool"},
    ]
    summary = changed(files=files, streams=streams, unserved=[unserved(None, 1 << 20)])
    assert decision_lines(summary) == [
        "/data/a: followed by page tables, warmed by readahead; ranks 0-2: forward; rank 5: random",
        "/data/b: followed by the pool's faults, warmed by the pool",
        "/data/w: not served: shared",
    ]
    (nobody,) = decision_lines(changed(files=[{**files[0], "served_by": None}], streams=[]))
    assert nobody == "/data/a: followed by nobody, warmed by readahead"
    many = changed(files=[{**files[0], "path": f"/{i}"} for i in range(30)])
    assert len(decision_lines(many)) == 21 and decision_lines(many)[-1] == "and 10 files more"


def test_no_line_of_a_summary_contradicts_another_one() -> None:
    """A rank goes one way through a file, and a file that is served is not called unserved."""
    way = {"file": "/data/a", "rank": 0}
    streams = [
        {**way, "pattern": "consecutive", "start_bytes": 0, "position_bytes": 1 << 20},
        {**way, "pattern": "consecutive backward", "start_bytes": 1 << 30, "position_bytes": 0},
        {**way, "pattern": "strided", "start_bytes": 5 << 20, "position_bytes": 7 << 20},
    ]
    one = {"path": "/data/a", "size_bytes": 1 << 30, "served_by": "pool", "warmed_by": None}
    written = {**unserved("mode='r'", 1 << 30), "path": "/data/a"}
    told = changed(files=[one], streams=streams, unserved=[written])
    assert decision_lines(told) == [
        "/data/a: followed by the pool's faults; rank 0: consecutive backward",
        "/data/a: another mapping of it is not served: shared",
    ]
    assert short_lines(told)[1] == (
        "not served: 1 GiB of /data/a: shared; other mappings of it are"
    )


def test_what_is_null_is_said_with_its_reason_and_never_as_zero() -> None:
    summary = changed(
        totals_demand_misses=None,
        totals_demand_misses_sensor="the ranks ended before they were looked at",
        totals_storage_read_bytes=None,
        totals_storage_read_reason="FUSE does not count",
        totals_accuracy=None,
        totals_fault_wait_ns=None,
        service={"cpu_seconds": None, "cpu_share": None},
    )
    how, came, _ = how_it_ran(summary)
    assert "demand misses n/a (the ranks ended before they were looked at)" in came
    assert "read n/a (FUSE does not count)" in came
    assert "accuracy n/a" in came and "checkpoints" not in came
    assert "our CPU n/a" in how
    assert not any(figure in came for figure in (" 0 demand", "read 0"))


def test_one_miss_is_singular_and_none_is_a_figure() -> None:
    assert how_it_ran(changed(totals_demand_misses=1))[1].startswith("1 demand miss;")
    assert how_it_ran(changed(totals_demand_misses=0))[1].startswith("0 demand misses;")


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (changed(totals_saved_at_least_seconds=0.05), KEPT),
        (changed(totals_gain="even", totals_saved_at_least_seconds=0.0), KEPT),
        (changed(totals_gain="unknown", totals_saved_at_least_seconds=None), KEPT),
        (
            changed(totals_gain="unknown", totals_coverage=None, totals_prefetched_bytes=1 << 20),
            "read 1 MiB ahead",
        ),
        (
            changed(totals_coverage=1.0, totals_waited_seconds=None, totals_gain="even"),
            "kept ahead of the job: 1 of 1 GiB",
        ),
        (
            changed(totals_coverage=1.0, totals_waited_seconds=0.0, totals_gain="even"),
            "kept ahead of the job: 1 of 1 GiB (nobody was seen to wait)",
        ),
        (changed(totals_gain="in-memory"), "nothing to gain: the data was in memory"),
        (
            changed(totals_gain="nothing-read"),
            "nothing to gain: nothing of the mapped files was read",
        ),
        (
            changed(totals_gain="just-read", totals_job_storage_bytes=1 << 20),
            "the data was in memory when it was mapped: the job had read 1 MiB itself",
        ),
        (changed(files=[]), "served nothing: no mapping was served"),
        (changed(files=[], totals_gain="unknown", rung_reason="too early"),
         "served nothing: too early"),
        (changed(files=[], totals_gain="unknown", rung_reason="no mapping was managed",
                 unserved=[unserved(None, 1 << 27)]), "served nothing: no mapping was served"),
        (changed(policy="none"), "read nothing ahead: --policy none only watches"),
    ],
)  # fmt: skip
def test_the_first_line_is_what_the_run_gained(summary: dict[str, Any], line: str) -> None:
    assert short_lines(summary)[0] == line


def job(*command: str, status: int = 0, written_bytes: int | None = None) -> dict[str, Any]:
    return {
        "command": list(command), "status": status, "min_size_bytes": 16 << 20,
        "written_bytes": written_bytes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (
            changed(files=[], job=job("cat")),
            ["served nothing: no mapping of 16 MiB or more was seen"],
        ),
        (
            changed(files=[], job=job("cat"), wall_seconds=0.011),
            ["served nothing: the job ended before it was looked at"],
        ),
        (
            changed(files=[], job=job("mpirun", "x", status=1), totals_unserved_read_bytes=1 << 30),
            ["served nothing: mpirun failed (exit status 1) and mapped no file"],
        ),
        (
            changed(files=[], job=job("/bin/cat", status=-9)),
            ["served nothing: cat was ended by signal 9 and mapped no file"],
        ),
        (
            changed(files=[], job=job("srun", "-N2", "-n", "4", "sh", "-c", "a b")),
            [
                "served nothing: srun runs its programs outside of this wrap",
                "try: srun -N2 -n 4 uffdprefetch wrap -- sh -c 'a b'",
            ],
        ),
        (
            changed(files=[], job=job("srun", "sh", *(["word"] * 20))),
            [
                "served nothing: srun runs its programs outside of this wrap",
                "try: srun ... uffdprefetch wrap -- sh ...",
            ],
        ),
        (changed(job=job("cat", status=3)), short_lines(SUMMARY_JSON, TERMINAL)),
    ],
)
def test_where_nothing_was_served_it_says_why(summary: dict[str, Any], said: list[str]) -> None:
    assert short_lines(summary, TERMINAL) == said


COST = {"totals_gain": "cost", "totals_cost_seconds": 0.51, "totals_saved_at_least_seconds": 0.0}
UNUSED = {"totals_prefetched_bytes": 491 << 20, "totals_wasted_bytes": 337 << 20}


def test_a_loss_is_told_first_and_by_what() -> None:
    assert short_lines(changed(**COST, **UNUSED)) == [
        "cost about 510 ms: 337 of 491 MiB read ahead were not used", KEPT
    ]  # fmt: skip
    assert short_lines(changed(**{**COST, **UNUSED, "totals_cost_seconds": 0.05})) == [
        KEPT, "read for nothing: 337 of 491 MiB read ahead were not used"
    ]  # fmt: skip


@pytest.mark.parametrize("gain", ["saved", "even", "unknown", "in-memory", "just-read"])
def test_what_was_read_for_nothing_is_always_told_above_a_tenth(gain: str) -> None:
    told = short_lines(changed(totals_gain=gain, **UNUSED))
    assert told[1:] == ["read for nothing: 337 of 491 MiB read ahead were not used"]
    less = {**UNUSED, "totals_wasted_bytes": 49 << 20}
    assert len(short_lines(changed(totals_gain=gain, **less))) == 1


BY_READ = {"files": [], "totals_unserved_read_bytes": 1 << 30}
NAMED = [{"path": "/data/a", "bytes": 1 << 29}]
NOT_FOLLOWED = (
    "not followed: 1 GiB by read(2): in no order, or from memory; small files, pipes, sockets"
)


@pytest.mark.parametrize(
    ("summary", "following"),
    [
        (changed(files=[]), []),
        (
            changed(**BY_READ),  # as of `zcat data | program`
            [NOT_FOLLOWED],
        ),
        (
            changed(**BY_READ, reads={"small_files": {"read": 0, "used": 0}}),
            [NOT_FOLLOWED, TELL_ORDER],
        ),
        (
            changed(**BY_READ, reads={"small_files": {"used_bytes": 1 << 31}}),
            [NOT_FOLLOWED],  # their order is known
        ),
        (
            changed(**BY_READ, reads={"left_alone": [{"path": "/data/a", "why": "O_DIRECT"}]}),
            ["not followed: 1 GiB by read(2); /data/a: O_DIRECT"],
        ),
        (
            changed(**BY_READ, totals_unserved_read_files=NAMED, reads={}),
            [
                "not served: 512 MiB of /data/a by read(2)"
            ],  # it is followed where that brings something
        ),
        (
            changed(**BY_READ, job=job("cat data | program", written_bytes=1 << 30)),
            [],
        ),
        (changed(totals_unserved_read_bytes=1 << 28), []),
        (
            changed(**BY_READ, totals_unserved_read_files=NAMED),
            [
                "not served: 512 MiB of /data/a by read(2)",
                "try: a format that is mapped (LMDB, Arrow, numpy.memmap)",
            ],
        ),
        (
            changed(
                **BY_READ, totals_unserved_read_files=[*NAMED, {"path": "b", "bytes": 3 << 27}]
            ),
            [
                "not served: 896 MiB by read(2), 512 MiB of /data/a",
                "try: a format that is mapped (LMDB, Arrow, numpy.memmap)",
            ],
        ),
        (
            changed(files=[], unserved=[{**unserved(None, 1 << 27), "reason": "library"}]),
            [],
        ),
        (
            changed(totals_unserved_read_bytes=1 << 29, totals_unserved_read_files=NAMED),
            [
                "of 1.5 GiB: 1 GiB served, 512 MiB of /data/a by read(2)",
                "try: a format that is mapped (LMDB, Arrow, numpy.memmap)",
            ],
        ),
        (changed(totals_unserved_read_bytes=1 << 25, totals_unserved_read_files=NAMED), []),
        (
            changed(unserved=[unserved("mode='r'", 1 << 40)]),
            ["not served: 1 TiB of /data/w: shared", "try: mode='r'"],
        ),
        (changed(unserved=[unserved("mode='r'", 1 << 20)]), []),
        (changed(unserved=[unserved(None, 1 << 40)]), []),
        (changed(files=[], unserved=[unserved(None, 0)]), ["not served: /data/w: shared"]),
        (
            changed(files=[], unserved=[unserved(None, 1 << 40), unserved("mode='r'", 1 << 20)]),
            ["not served: 1 MiB of /data/w: shared (and 1 more)", "try: mode='r'"],
        ),
        (changed(degradations=["/a: nothing better is to be had"], notes=[]), []),
        (
            changed(rung=2, rung_reason="no userfaultfd", rung_remedy="doctor"),
            ["seen less closely than it could be: no userfaultfd", "try: doctor"],
        ),
        (changed(notes=[note("budget cut"), note("x")]), ["note: budget cut"]),
        (changed(notes=None, degradations=["of before: so"]), ["note: of before: so"]),
        (changed(notes=[note("cut", f"/{'d/' * 30}f")]), ["note: f: cut"]),
        (changed(plans=[{"dropped": "not read"}]), ["the known order was given up: not read"]),
        (changed(plans=[{"dropped": None}]), []),
    ],
)
def test_the_others_are_what_was_not_served_and_the_remedy(
    summary: dict[str, Any], following: list[str]
) -> None:
    assert short_lines(summary, TERMINAL)[1:] == following


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/d/a.npy", " of /d/a.npy"),
        ("/data/run-2/a.npy", " of .../a.npy"),
        ("/data/run-2/some.npy", " of some.npy"),
        ("/data/tensors.npy", ""),
    ],
)
def test_a_file_is_told_by_the_folders_that_fit(path: str, end: str) -> None:
    read = [{"path": path, "bytes": 1 << 28}, {"path": "/data/b", "bytes": 1 << 28}]
    summary = changed(totals_unserved_read_bytes=1 << 29, totals_unserved_read_files=read)
    told = f", 256 MiB{end}" if end else ""
    assert short_lines(summary, TERMINAL)[1] == (
        f"of 1.5 GiB: 1 GiB served, 512 MiB by read(2){told}"
    )
    assert short_lines(summary)[1].endswith(f", 256 MiB of {path}")


@pytest.mark.parametrize("columns", [40, TERMINAL, 160, None])
@pytest.mark.parametrize("length", [5, 40, 200])
@pytest.mark.parametrize("why", ["short", "w" * 40, "w" * 200])
def test_a_line_loses_folders_on_a_terminal_and_never_why(
    columns: int | None, length: int, why: str
) -> None:
    path = f"/{'p' * length}/name"
    one = {**unserved("r" * length, 1 << 40), "path": path, "why": why}
    _, line, remedy = short_lines(changed(files=[], unserved=[one]), columns)
    assert line.endswith(f"name: {why}") and remedy == f"try: {'r' * length}"
    fits = columns is None or len(f"{PREFIX}not served: 1 TiB of {path}: {why}") <= columns
    assert (path in line) == fits
    if columns is not None and not fits and len(why) < 40 < columns:
        assert len(PREFIX + line) <= columns
    (said,) = short_lines(changed(notes=[note(why, path)]), columns)[1:]
    assert said.endswith(f"name: {why}")
    assert columns is not None or said == f"note: {path}: {why}"


@pytest.mark.parametrize(("columns", "told"), [(None, None), (0, None), (57, 57), (200, 200)])
def test_only_a_terminal_has_columns(columns: int | None, told: int | None) -> None:
    """Of its own, and not those of a variable."""
    ours, theirs = os.pipe() if columns is None else os.openpty()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    code = "import sys; from uffdprefetch.base.messages import columns; print(columns())"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True,
        env={**os.environ, "COLUMNS": "33"},
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.stdout.strip() == str(told)


def test_what_is_of_programs_is_the_reason_of_that_name() -> None:
    """The launcher loads no more for a word."""
    assert {Reason.LIBRARY.value[0]} == summary_of.OF_PROGRAMS


@pytest.mark.parametrize("reason", list(Reason))
def test_a_remedy_fits_on_its_line(reason: Reason) -> None:
    if reason.remedy is not None:
        one = unserved(reason.remedy, 1 << 40)
        assert short_lines(changed(unserved=[one]))[2] == f"try: {reason.remedy}"


@pytest.mark.parametrize("coarse", list(Coarse))
def test_so_does_that_of_who_is_seen_less_closely(coarse: Coarse) -> None:
    told = short_lines(changed(rung=2, rung_reason=coarse.words, rung_remedy=coarse.remedy))
    assert told[2:] == ([] if coarse.remedy is None else [f"try: {coarse.remedy}"])
    assert len(told) == (1 if coarse.remedy is None else 3)


def test_a_sparse_summary_has_a_line() -> None:
    sparse = {"engine": "off", "policy": "none", "wall_seconds": 0.01, "totals": {}}
    assert short_lines(sparse) == ["read nothing ahead: --policy none only watches"]
    assert not any("\n" in line for line in lines(sparse, verbose=True))


# ---- the pool's line ----------------------------------------------------------------------------

TIMES = {"count": 3, "p50": 820_000, "p99": 2_000_000, "max": 3_000_000, "sum": 4_000_000}
POOL: dict[str, Any] = {
    "budget_bytes": 4 << 30, "limited_by": None, "resident_peak_bytes": 1 << 30,
    "read_bytes": 3 << 30, "reread_bytes": 2 << 30, "evicted_bytes": 2 << 30, "evict": "cyclic",
    "source": "O_DIRECT", "faults": 900, "missing_faults": 3, "demand_wait_ns": TIMES,
}  # fmt: skip


def with_pool(**values: Any) -> dict[str, Any]:
    return changed(engine="pool", pool={**POOL, **values})


def test_a_pool_has_a_line_of_its_own_with_v() -> None:
    pool, _, where = lines(with_pool(), "out.json", verbose=True)[-3:]
    assert where == "all figures: out.json"
    assert pool == (
        "pool: 1 GiB of 4 GiB; read 3 GiB, 2 GiB of it again (O_DIRECT); evicted 2 GiB (cyclic);"
        " 3 of 900 faults waited, half of them within 820 us, 99 % within 2 ms"
    )
    for without in (changed(), changed(pool=None)):
        assert pool_line(without) is None and len(how_it_ran(without)) == 3


def test_a_pool_that_had_room_read_nothing_twice_and_says_what_bound_it() -> None:
    assert "read 3 GiB, nothing twice (O_DIRECT);" in str(pool_line(with_pool(reread_bytes=0)))
    assert "evicted" not in str(pool_line(with_pool(evicted_bytes=0)))
    bound = pool_line(with_pool(limited_by="cgroup memory limit"))
    assert "1 GiB of 4 GiB (bounded by cgroup memory limit)" in str(bound)
    idle = with_pool(limited_by="cgroup memory limit", evicted_bytes=0)
    assert "bounded" not in str(pool_line(idle)), "it made no difference"
    shrunk = pool_line(with_pool(limited_by="free memory", budget_bytes=1 << 29))
    assert "1 GiB at the most, 512 MiB at the end (bounded by free memory);" in str(shrunk)


def test_a_pool_that_nobody_waited_for_or_touched_tells_no_times() -> None:
    none = {"count": 0, "p50": None, "p99": None, "max": None, "sum": 0}
    quiet = pool_line(with_pool(demand_wait_ns=none, missing_faults=0))
    assert str(quiet).endswith("nobody waited in 900 faults")
    assert "(O_DIRECT) and 5 MiB from other nodes, nothing twice;" in str(
        pool_line(with_pool(reread_bytes=0, others_bytes=5 << 20))
    )
    unused = pool_line(with_pool(demand_wait_ns=none, faults=0, source=None, read_bytes=0))
    assert unused == "pool: nothing was mapped from it"


def test_an_engine_that_was_not_asked_for_is_named_with_the_one_that_was() -> None:
    asked = how_it_ran(changed(engine_asked="pool"))[0]
    assert asked.startswith("engine cache (pool was asked for),")
    assert how_it_ran(changed(engine_asked="cache"))[0].startswith("engine cache, policy")


# ---- the file -----------------------------------------------------------------------------------


def expand(pattern: str, rank: int | None = 3) -> str:
    return output.expand(pattern, "job-7", rank, {"VAR": "a/b c"}, host="node1", pid=42)


def test_tokens() -> None:
    assert expand("uffdprefetch.%j.%r") == "uffdprefetch.job-7.3"
    assert expand("d/%h-%p-%%") == "d/node1-42-%"
    assert expand("%r", rank=None) == "0"
    assert "/" not in expand("%q{VAR}") and expand("%q{VAR}").startswith("a_b_c")
    assert expand("x%q{UNSET}y") == "xy"


@pytest.mark.parametrize("pattern", ["%z", "%", "%q", "%q{VAR", "a%"])
def test_an_unknown_token_is_an_error_that_lists_the_known(pattern: str) -> None:
    with pytest.raises(UffdPrefetchError, match="%h %p %j %r") as caught:
        expand(pattern)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "file"),
    [("a", "a.summary.json"), ("a.summary.json", "a.summary.json"), ("a.json", "a.json")],
)
def test_the_suffix(tmp_path: Path, name: str, file: str) -> None:
    assert output.write(str(tmp_path / name), {"x": 1}, force=False) == str(tmp_path / file)
    assert json.loads((tmp_path / file).read_text()) == {"x": 1}


def test_numbers_instead_of_overwriting(tmp_path: Path) -> None:
    paths = [output.write(str(tmp_path / "a"), {"n": n}, force=False) for n in range(3)]
    assert [Path(p).name for p in paths] == [
        "a.summary.json", "a-2.summary.json", "a-3.summary.json",
    ]  # fmt: skip
    assert [json.loads(Path(p).read_text())["n"] for p in paths] == [0, 1, 2]


def test_force_replaces_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for n in range(2):
        output.write(str(tmp_path / "a"), {"n": n}, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.summary.json"]
    with pytest.raises(OSError):
        output.write(str(tmp_path / "no" / "dir"), {}, force=True)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"HOME": "{tmp}/home"}, "{tmp}/home/.local/state/uffdprefetch"),
        ({"HOME": "{tmp}/home", "XDG_STATE_HOME": "{tmp}/s"}, "{tmp}/s/uffdprefetch"),
        ({"XDG_STATE_HOME": "not/absolute"}, None),
        ({"HOME": "/dev/null"}, None),
        ({}, None),
    ],
)
def test_where_summaries_go_that_nobody_has_named(
    tmp_path: Path, environ: dict[str, str], directory: str | None
) -> None:
    told = {name: value.replace("{tmp}", str(tmp_path)) for name, value in environ.items()}
    pattern = output.default_pattern(told)
    if directory is None:
        assert pattern == "uffdprefetch.%j.%r"
        return
    made = directory.replace("{tmp}", str(tmp_path))
    assert pattern == f"{made}/%h.%j.%r"
    assert os.stat(made).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("force", [False, True])
def test_what_cannot_be_written_whole_is_not_there(tmp_path: Path, force: bool) -> None:
    """A full disk: half a file of JSON would be taken for a whole one by nobody, or by somebody."""
    (tmp_path / "a.summary.json").write_text("{}")
    limit = 1 << 12
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            output.write(str(tmp_path / "a"), {"n": "x" * 3 * limit}, force=force)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [p.name for p in tmp_path.iterdir()] == ["a.summary.json"]
    assert (tmp_path / "a.summary.json").read_text() == "{}"


def test_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"/data/caf\xe9.mdb")
    path = output.write(str(tmp_path / "a"), {"path": name}, force=False)
    assert json.loads(Path(path).read_bytes().decode("utf-8", "surrogateescape"))["path"] == name


# ---- in a directory where others write ----------------------------------------------------------


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    tmp_path: Path, dangling: bool
) -> None:
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("precious")
    (tmp_path / "a.summary.json").symlink_to(victim)
    path = output.write(str(tmp_path / "a"), {"n": 1}, force=True)
    assert not os.path.islink(path) and json.loads(Path(path).read_text()) == {"n": 1}
    assert not victim.exists() if dangling else victim.read_text() == "precious"


def test_without_force_a_dangling_symbolic_link_is_not_followed_either(tmp_path: Path) -> None:
    (tmp_path / "a.summary.json").symlink_to(tmp_path / "victim")
    assert output.write(str(tmp_path / "a"), {}, force=False).endswith("/a-2.summary.json")
    assert not (tmp_path / "victim").exists()


def test_the_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = output.write(str(tmp_path / "a"), {}, force=True)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o640


#: Whatever appears in the directory becomes, as soon as it can be seen, a link to the victim; so
#: does every name that the program's number would tell.
ATTACKER = """
import os, sys
directory, victim, pid = sys.argv[1:]
os.chdir(directory)
def link(name):
    try: os.unlink(name)
    except OSError: pass
    try: os.symlink(victim, name)
    except OSError: pass
foretold = ["a.summary.json", *(f"a.summary.json.{pid}{end}" for end in (".tmp", ".new", "~", ""))]
rounds = 0
while True:
    for name in {*foretold, *os.listdir(".")}:
        link(name)
    rounds += 1
    if rounds == 1:
        print("ready", flush=True)
"""


def test_whoever_races_in_the_directory_never_has_us_write_elsewhere(
    tmp_path: Path, children: Callable[..., subprocess.Popen[bytes]]
) -> None:
    directory, victim = tmp_path / "shared", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("precious")
    words = [sys.executable, "-c", ATTACKER, str(directory), str(victim), str(os.getpid())]
    attacker = children(words, stdout=subprocess.PIPE)
    assert attacker.stdout is not None and attacker.stdout.readline() == b"ready\n"
    refused = 0
    for n in range(2000):
        try:
            output.write(str(directory / "a"), {"n": n}, force=True)
        except OSError:  # our file was taken away before it was moved
            refused += 1
        assert victim.read_text() == "precious", n
    attacker.kill()
    attacker.wait()
    assert attacker.poll() == -9 and refused < 2000
    path = output.write(str(directory / "a"), {"n": "last"}, force=True)
    assert not os.path.islink(path) and json.loads(Path(path).read_text()) == {"n": "last"}


def test_what_went_between_nodes_and_who_keeps_what_is_said() -> None:
    assert cluster_lines({}) == [] == cluster_lines({"cluster": {"generations": 0}})
    cluster = {
        "present": [0, 1, 40], "mpi": "Open MPI", "generations": 1, "from_bytes": 2 << 30,
        "to_bytes": 1 << 30, "network_bytes_per_second": 2_000_000, "transport_cpu_seconds": 4.0,
        "file_system_bytes_per_second": None,
        "keepers": {"/far/a": [0, 1, None, 40], "/far/b": [None] * 4},
    }  # fmt: skip
    said, kept = cluster_lines({"cluster": cluster})
    assert said == (
        "cluster: 3 nodes (Open MPI); 2 GiB from other nodes; 1 GiB to them; network 2 MB/s;"
        " transport 4.0 s of CPU, 1.9 a GB"
    )
    assert kept == "kept by: 01.4 /far/a"


def test_a_link_that_comes_in_between_gets_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a pipe's when it is looked at, and another file's when it is opened."""
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_text("precious")
    path.symlink_to(victim)
    really = output._is_special
    monkeypatch.setattr(output, "_is_special", lambda one: isinstance(one, str) or really(one))
    output.replace_text(str(path), "ours")
    assert victim.read_text() == "precious"
    assert path.read_text() == "ours" and not path.is_symlink()


def test_what_is_no_regular_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    """`trace -f -o /dev/null` as root made a file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.replace(str(pipe), lambda path: output.overwrite_text(path, "text"))
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    output.replace(os.devnull, lambda path: output.overwrite_text(path, "text"))
    assert not os.path.isfile(os.devnull)
    os.close(reader)


# ---- killed for want of memory ------------------------------------------------------------------


def oom(kills: int | None = 1, **whom: bool | None) -> dict[str, Any]:
    why_not = "no file" if kills is None else None
    return {"kills": kills, "job": False, "service": False, "why_not": why_not, **whom}


def test_a_job_that_was_killed_for_want_of_memory_is_told_first() -> None:
    killed = {"job": job("/bin/cat", status=-9), "oom": oom(job=True)}
    first, *rest = short_lines(changed(**killed))
    assert first == ("cat was killed for want of memory (OOM): give it more memory (Slurm: --mem)")
    assert rest == short_lines(SUMMARY_JSON)
    of_pool = short_lines(changed(**killed, engine="pool"))[0]
    assert of_pool.endswith(": give it more memory (Slurm: --mem), or a smaller --budget")
    assert short_lines(changed(**killed, files=[])) == [f"served nothing: {first}"]
    by_hand = changed(job=job("/bin/cat", status=-9), oom=oom(0), files=[])
    assert "ended by signal 9" in short_lines(by_hand)[0]


def test_processes_of_the_job_that_were_killed_for_want_of_memory_are_told() -> None:
    assert short_lines(changed(oom=oom(1)))[0].startswith("a process of this control group killed")
    first, second, *_ = short_lines(changed(job=job("cat", status=-9), oom=oom(3, job=True)))
    assert first.startswith("cat was killed") and second.startswith("2 processes of")
    spared = changed(oom=oom(2), pool={"oom_canaries": 2})  # processes of ours, in their place
    assert not any("killed" in line for line in short_lines(spared))
    assert short_lines(changed(oom=oom(0))) == short_lines(SUMMARY_JSON)
    assert short_lines(changed(oom=oom(None, job=None))) == short_lines(SUMMARY_JSON)


@pytest.mark.parametrize(
    ("status", "verdict", "said"),
    [
        (0, oom(0), "gone; the job went on without it"),
        (3, oom(1, service=True), "(killed for want of memory, OOM); the job went on without it"),
        (-9, oom(2, job=True, service=True), "killed for want of memory, OOM); nothing is known"),
        (-9, oom(1, job=None, service=None), "gone; the job was killed, too; one of them for want"),
        (-9, oom(None, job=None, service=None), "too; by whom is not known (no file)"),
        (-9, oom(0), "gone; the job was killed, too (signal 9)"),
        (-11, oom(0), "gone; the job went on without it"),
    ],
)
def test_a_service_that_died_tells_what_became_of_the_job(
    status: int, verdict: dict[str, Any], said: str
) -> None:
    summary = changed(
        job=job("cat", status=status), oom=verdict, service={"died": True}, files=[],
        rung_reason="the service died during the run: gone",
    )  # fmt: skip
    *first, told = [line for line in deaths(summary, "; see log") if not line.startswith("try: ")]
    assert said in told and told.startswith("the service died during the run")
    killed = "cat was killed for want of memory (OOM): give it more memory (Slurm: --mem)"
    assert first == ([killed] if verdict["job"] else [])
    assert told.endswith("; see log") == (not verdict["kills"]), "an error of ours, perhaps"
    only_it = verdict["service"] and not verdict["job"]
    remedy = ["try: more memory (Slurm: --mem)"] if only_it else []
    assert deaths(summary)[len(first) + 1 :] == remedy
    assert any(line.startswith("what was gained is not known") for line in lines(summary))


def test_a_service_that_does_not_answer_leaves_what_is_not_known() -> None:
    why = "the service did not answer within 5 s, for it stood still (SIGSTOP)"
    silent = changed(service={"died": False, "silent": True}, files=[], rung_reason=why)
    assert short_lines(silent) == [f"what was gained is not known: {why}"]


def test_how_long_the_service_stood_still_is_said() -> None:
    first, *rest = short_lines(changed(service={"died": False, "stood_still_seconds": 12.3}))
    assert first == (
        "the service stood still for 12.3 s (SIGSTOP, or no CPU): nothing was read ahead meanwhile"
    )
    assert rest == short_lines(SUMMARY_JSON)
    assert short_lines(changed(service={"died": False, "stood_still_seconds": 0.0})) == rest


SMALL = {
    "read_bytes": 182 << 20,
    "small_files": {
        "read": 1900, "read_bytes": 184 << 20, "used": 1849, "used_bytes": 182 << 20, "there": 3,
    },
}  # fmt: skip


def test_small_files_have_a_line_of_their_own() -> None:
    line = "small files: 1,849 of 1,900 read ahead were opened (182 MiB)"
    assert line in short_lines(changed(reads=SMALL))
    alone = changed(files=[], rung=None, reads=SMALL)
    assert short_lines(alone)[0] == line, "no file was mapped: it has served these"
    told = how_it_ran(alone)
    assert "watched from outside" in told[0] and "nothing prefetched" not in told[1]
    none = {"read_bytes": 0, "small_files": {"read": 0, "used": 0, "used_bytes": 0, "there": 9}}
    assert not any("small" in one for one in short_lines(changed(reads=none)))


LOOKED = {"read_bytes": 0, "processes": 3, "small_files": None, "left_alone": []}
NO_MAPPING = "served nothing: no mapping of 16 MiB or more was seen"


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (LOOKED, "; nobody was seen to wait for the 2 MiB by read(2)"),
        (
            {**LOOKED, "small_files": {"read": 0, "used": 0}},
            "; of the 2 MiB by read(2) no order was seen",
        ),
        ({**LOOKED, "left_alone": [{"path": "/a", "why": "O_DIRECT"}]}, "; /a: O_DIRECT"),
        (None, "; 2 MiB by read(2) were left to the kernel (--reads off)"),
    ],
)
def test_where_nothing_was_mapped_what_calls_have_read_is_said(
    reads: dict[str, Any] | None, said: str
) -> None:
    plain = {"files": [], "ranks": [], "job": job("cat"), "rung": None, "reads": reads}
    assert short_lines(changed(**plain, totals_unserved_read_bytes=2 << 20)) == [NO_MAPPING + said]
    start = changed(**plain, totals_unserved_read_bytes=200 << 10)
    assert short_lines(start) == [NO_MAPPING], "programs are read, too"


def test_with_v_a_run_that_maps_nothing_says_who_was_seen_and_what_they_have_read() -> None:
    how, came, *_ = how_it_ran(
        changed(
            files=[], ranks=[], job=job("cat"), rung=None, reads={**SMALL, "processes": 3},
            totals_prefetched_bytes=0, totals_demand_misses=None, totals_fault_wait_ns=None,
            totals_unserved_read_bytes=8 << 20, totals_storage_read_bytes=None,
            totals_storage_read_reason="FUSE does not count",
        )
    )  # fmt: skip
    assert "watched from outside: no large file, 3 processes, 12.5 s" in how
    assert came == (
        "prefetched 1900 small files (184 MiB, 182 MiB used); the job read 190 MiB by calls;"
        " read n/a (FUSE does not count)"
    )


def test_a_start_that_was_read_ahead_or_recorded_is_not_nothing() -> None:
    learn = {
        "key": "k", "state": "done", "paths": 1200, "bytes": 31 << 20, "seconds": 0.1, "used": 640,
        "skipped": {}, "recorded": None,
    }  # fmt: skip
    plain = {"files": [], "job": job("python"), "reads": LOOKED}
    read = "start read ahead: 1,200 paths (31 MiB), of which 640 files were opened"
    assert short_lines(changed(**plain, learn=learn)) == [read]
    failed = {**plain, "job": job("python", status=3)}
    assert short_lines(changed(**failed, learn=learn)) == [
        f"{read}; python failed (exit status 3) and mapped no file"
    ]
    assert short_lines(changed(**plain, learn={**learn, "used": None})) == [
        read.removesuffix(", of which 640 files were opened")
    ]
    first = {**learn, "paths": 0, "bytes": 0, "recorded": {"record": "written", "bytes": 19 << 20}}
    assert short_lines(changed(**plain, learn=first)) == [
        "start recorded (19 MiB): the next one is read ahead"
    ]
    none = {**first, "recorded": {"record": "nothing to record", "bytes": 0}}
    assert short_lines(changed(**plain, learn=none)) == [NO_MAPPING]


def test_what_was_left_to_the_kernel_says_by_which_option() -> None:
    """It was "small files, pipes, sockets, or what was in memory"."""
    read = {"totals_unserved_read_bytes": 1 << 30, "files": [], "job": job("cat"), "reads": None}
    left = "not followed: 1 GiB by read(2): left to the kernel"
    assert short_lines(changed(**read))[1] == f"{left} (--reads off)"
    assert short_lines(changed(**read, policy="plan"))[1] == f"{left} (--policy plan)"
    assert short_lines(changed(**read, engine="off"))[1] == f"{left} (--engine off)"
    assert short_lines(changed(**read, totals_gain="unknown"))[1] == left
    only_watches = ["read nothing ahead: --policy none only watches"]
    assert short_lines(changed(**read, policy="none")) == only_watches


def test_what_was_asked_for_and_not_done_is_said_whatever_else_there_is_to_say() -> None:
    asked = {**note("--plan: of its 9 files none was seen to be opened"), "asked": True}
    line = f"note: {asked['text']}"
    notes = [note("less is read ahead than --budget allows"), asked]
    assert short_lines(changed(notes=notes))[1:] == [line, f"note: {notes[0]['text']}"]
    small = {**LOOKED, "small_files": {"read": 0, "used": 0}}
    read = changed(
        files=[], job=job("cat"), reads=small, notes=notes, totals_unserved_read_bytes=1 << 30
    )
    first, told, not_followed = short_lines(read)
    assert told == line and "not followed: 1 GiB" in not_followed, "to tell an order was tried"
    assert TELL_ORDER in short_lines({**read, "notes": []})
    assert line in short_lines(changed(notes=notes, policy="none"))
    assert first == NO_MAPPING
