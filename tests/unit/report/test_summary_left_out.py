# SPDX-License-Identifier: Apache-2.0
"""report/left_out.py: the lines that say what was not served, why, and what would change that."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import SUMMARY_JSON
from good_summary import LOOKED, NO_MAPPING, TERMINAL, changed, job, note, unserved

from uffdprefetch.report.left_out import OF_PROGRAMS, TELL_ORDER
from uffdprefetch.report.summary import short_lines
from uffdprefetch.state.unserved import Coarse, Reason


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
            ["served nothing: cat was ended by signal 9 (SIGKILL) and mapped no file"],
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


def test_what_is_of_programs_is_the_reason_of_that_name() -> None:
    """The launcher loads no more for a word."""
    assert {Reason.LIBRARY.value[0]} == OF_PROGRAMS


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
