# SPDX-License-Identifier: Apache-2.0
"""report/endings.py: the lines about a job or service that did not end well."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import SUMMARY_JSON
from good_summary import changed, job

from uffdprefetch.report.endings import deaths
from uffdprefetch.report.summary import lines, short_lines


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


@pytest.mark.parametrize("status", [-1, 129])
def test_a_run_that_was_cut_off_says_so_and_nothing_of_what_was_to_come(status: int) -> None:
    """One whose terminal was closed had "nothing to gain"."""
    ended = changed(job=job("/bin/cat", status=status), totals_gain="nothing-read")
    first, second, *_ = short_lines(ended)
    assert first.startswith("cat was ended by signal 1 (SIGHUP) after ")
    assert second == "until then nothing of the mapped files was read"
    in_memory = changed(job=job("/bin/cat", status=status), totals_gain="in-memory")
    assert short_lines(in_memory)[1] == "until then the data was in memory"
    kept = changed(job=job("/bin/cat", status=status))
    assert short_lines(kept)[1:] == short_lines(SUMMARY_JSON)
    assert not any("ended by" in line for line in short_lines(changed(job=job("cat", status=3))))
    nothing = short_lines(changed(job=job("/bin/cat", status=status), files=[]))
    assert nothing[0].startswith("served nothing: cat was ended by signal 1 (SIGHUP)")
    assert len(nothing) == 1


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
