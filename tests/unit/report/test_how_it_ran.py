# SPDX-License-Identifier: Apache-2.0
"""report/how_it_ran.py: the lines with -v."""

from __future__ import annotations

from typing import Any

from fake_service import SUMMARY_JSON
from good_summary import SMALL, changed, job, unserved

from uffdprefetch.report.compare import of_summaries
from uffdprefetch.report.how_it_ran import (
    cluster_lines,
    decision_lines,
    how_it_ran,
    pool_line,
    start_line,
)
from uffdprefetch.report.summary import lines, short_lines


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


def test_the_time_of_a_run_is_the_jobs_and_not_from_its_services_start() -> None:
    summary = changed(wall_seconds=0.02, job={**job(["x"]), "seconds": 1.5})
    assert ", 1.5 s;" in how_it_ran(summary)[0]
    before = changed(wall_seconds=3.0, job={**job(["x"]), "seconds": None})
    time, *_ = of_summaries(before, summary, ("a", "b"))["figures"]
    assert (time["name"], time["before"], time["after"]) == ("time", 3.0, 1.5)


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


def test_the_first_start_of_a_name_had_no_profile() -> None:
    learn = {"key": "train", "state": "first run", "paths": 0, "skipped": {}}
    told = start_line({"learn": learn})
    assert told == "start train: nothing was read ahead of it (no profile yet)"
