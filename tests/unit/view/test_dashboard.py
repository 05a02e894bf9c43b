# SPDX-License-Identifier: Apache-2.0
"""The dashboard's pictures, without a terminal, a service or a clock: what fits, what is said."""

from __future__ import annotations

import io
import random
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text
from snapshots import MIB, document, pool, pooled, rank, small_files, snapshot, view

from uffdprefetch.protocol.snapshot import ADDED_BY_WATCHER, Rank, decode
from uffdprefetch.view import glyphs, model, panel, ranks, render, words
from uffdprefetch.view.glyphs import ASCII, UNICODE
from uffdprefetch.view.small_files import small_lines

SIZES = [(80, 24), (160, 50), (40, 6), (53, 11), (100, 30), (79, 20), (300, 90), (80, 12)]


def plain(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def busy(count: int) -> model.View:
    """Many ranks, files, alerts, and numbers of every length."""
    source = random.Random(count)
    made = document(count)
    for r in made["ranks"]:
        r["read_bytes_per_second"] = source.choice([0, 3, 5e3, 9.99e6, 123.4e6, 98.7e9])
        r["hit"]["share"] = source.choice([0.0, 0.0001, 0.5, 0.9999, 1.0])
        r["stall"].update(share=source.choice([None, 0.0, 0.034, 1.8]), why="n/a")
        for name in ("window_bytes", "in_flight_bytes", "wasted_bytes"):
            r[name] = source.choice([0, 1023, 5 * MIB, 999 * MIB, 40 << 30, 3 << 50])
        r["pattern"] = source.choice(["consecutive backward", "strided", "random", "no mapping"])
        r["stride_bytes"] = source.choice([None, 3 * MIB])
    made["files"] = [
        {**made["files"][0], "path": f"/data/{'deep/' * i}shard-{i:05}.mdb"} for i in range(30)
    ]
    made["degradations"] = ["less is read ahead than --budget allows: so", "x " * 200]
    process = {
        "pid": 77, "parent_pid": 1, "command": "static", "why": "static", "maps_bytes": MIB,
    }  # fmt: skip
    made["not_managed"]["processes"] = [process] * 3
    if count % 2:
        made["engine"], made["pool"] = "pool", pool()
    if count % 3 == 0:
        made["small_files"] = small_files()
    return view(made)


# ---- fitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 7, 40, 256])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_line_is_longer_and_no_picture_higher_than_the_screen(
    width: int, height: int, count: int
) -> None:
    for shown in (snapshot(count), busy(count), view(pooled(count))):
        for characters in (UNICODE, ASCII):
            lines = render.picture(shown, width, height, characters, "q quits")
            assert 0 < len(lines) <= height
            assert max(line.cell_len for line in lines) <= width
            assert not any("\n" in line.plain for line in lines)


@pytest.mark.parametrize("width", range(40, 200, 7))
def test_no_number_is_cut(width: int) -> None:
    """Each number of a narrow picture is one of a wide picture, or a shorter spelling of it."""
    shown = busy(9)
    known = set()
    for wide in (400, 120, 90):
        known |= set(re.findall(r"[\d.]+", plain(render.picture(shown, wide, 120))))
    known |= {number for r in shown.snapshot.ranks for number in _numbers_of(r)}
    found = set(re.findall(r"[\d.]+", plain(render.picture(shown, width, 24))))
    unknown = {n for n in found - known if not re.fullmatch(r"\.+", n)}
    # counts of what has no line of its own differ with the height
    assert all(re.fullmatch(r"\d{1,3}", n) for n in unknown), unknown


def _numbers_of(r: Rank) -> set[str]:
    texts = [
        words.percent(model.share(r)), words.percent(r.hit.share), words.percent(r.stall.share),
        words.megabytes(r.read_bytes_per_second), words.short_size(r.wasted_bytes),
        words.short_size(r.window_bytes), words.short_size(r.in_flight_bytes),
    ]  # fmt: skip
    return {number for text in texts for number in re.findall(r"[\d.]+", text)}


def test_ranks_beyond_the_height_are_folded_and_the_worst_of_them_named() -> None:
    made = document(40)
    made["ranks"][37]["read_bytes_per_second"] = 1e6
    made["ranks"][38]["hit"]["share"] = 0.25
    lines = plain(render.picture(view(made), 80, 24)).splitlines()
    rows = [line for line in lines if re.match(r" +\d+ ", line)]
    (folded,) = [line for line in lines if "more ranks" in line]
    assert folded.startswith(f"… {40 - len(rows)} more ranks")
    assert "slowest 37: 1.00 MB/s" in folded and "worst hit 38: 25%" in folded
    assert len(rows) >= 5
    assert "more ranks" not in plain(render.picture(snapshot(4), 80, 24))


def test_a_wide_screen_has_more_columns_and_a_narrow_one_keeps_the_first() -> None:
    wide, narrow = (
        [c.title for c, _ in ranks.rank_columns(width)] for width in (160, render.WIDTH_MIN)
    )
    assert wide == [c.title for c in ranks.RANK_COLUMNS]
    assert set(narrow) >= {"rank", "", "at"} and len(narrow) < len(wide)
    for width in range(40, 250):
        columns = ranks.rank_columns(width)
        assert sum(w + 1 for _, w in columns) - 1 <= width


def test_all_columns_of_the_contract_are_there_at_80() -> None:
    titles = {column.title for column, _ in ranks.rank_columns(80)}
    assert titles >= {
        *("rank", "", "at", "pattern", "MB/s", "hit", "stall", "window", "flight", "wasted"),
    }


def test_a_screen_that_is_too_small_says_so() -> None:
    lines = render.picture(snapshot(), 30, 5)
    assert len(lines) <= 5 and all(line.cell_len <= 30 for line in lines)
    assert "needs 40x6" in plain(render.picture(snapshot(), 30, 9))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8])
def test_the_panel_has_exactly_its_rows(rows: int) -> None:
    for shown in (snapshot(1), snapshot(4), busy(40)):
        lines = panel.panel(shown, 80, rows)
        assert len(lines) == rows and max(line.cell_len for line in lines) <= 80


def test_the_panel_takes_a_third_of_the_screen_at_most_and_nothing_of_a_tiny_one() -> None:
    assert panel.rows_for(snapshot(4), 80, 24) == 7
    assert panel.rows_for(snapshot(40), 80, 24) == 8
    assert panel.rows_for(snapshot(4), 80, 12) == 4
    assert panel.rows_for(snapshot(4), 80, 8) == panel.rows_for(snapshot(4), 30, 24) == 0


# ---- what is said -------------------------------------------------------------------------------


def test_what_is_not_known_is_na_with_its_reason_and_never_zero() -> None:
    made = document(1)
    made["ranks"][0]["hit"] = {
        "share": None, "misses": 3, "blocks": 1, "seconds": 10.0, "why": "less than 16 blocks",
    }  # fmt: skip
    made["ranks"][0]["wasted_bytes"] = None
    made["node"]["bandwidth_bytes_per_second"] = None
    made["files"][0].update(resident_bytes=None, resident_why="Operation not permitted")
    text = plain(render.picture(view(made), 100, 40))
    (row,) = [line for line in text.splitlines() if line.startswith("   0 ")]
    assert row.split().count("n/a") == 3  # hit, stall, wasted
    assert "stall n/a: kernel.task_delayacct is 0: set it to 1 by sysctl before the job" in text
    assert "bandwidth n/a (nothing large was read yet)" in text
    assert "n/a (Operation…" in text


def test_who_jumps_about_has_no_rate_of_its_own() -> None:
    """It was 0, and the slowest."""
    made = document(4)
    made["ranks"][1].update(pattern="random", read_bytes_per_second=0, streams=[])
    text = plain(render.picture(view(made), 80, 24))
    (row,) = [line for line in text.splitlines() if line.startswith("   1 ")]
    assert row.split()[-7:-4] == ["random", "n/a", "99.8%"]
    assert "slowest 1" not in plain(render.picture(view(made), 80, 8))


def test_the_reason_for_no_stall_fits_80_columns_whole() -> None:
    text = plain(render.picture(snapshot(), 80, 24))
    assert "stall n/a: kernel.task_delayacct is 0: set it to 1 by sysctl before the job\n" in text
    assert "hit: 1 - misses (exact: majflt) / 64 KiB blocks (sampled: page tables), 10 s" in text


def test_a_degradation_has_a_line_at_every_size() -> None:
    shown = snapshot(40, degradations=["less is read ahead than --budget allows: so"])
    for width, height in SIZES:
        text = plain(render.picture(shown, width, height))
        assert "! less is read ahead" in text, (width, height)
    assert "! less is read ahead" in plain(panel.panel(shown, 80, 5))


def test_an_alert_is_folded_where_there_are_rows_and_says_why() -> None:
    why = "progress comes from page tables: opened for writing (O_RDWR), said at such length"
    shown = snapshot(2, degradations=[f"/{'folder/' * 20}data.mdb: {why} that it takes two lines"])
    lines = plain(render.picture(shown, 80, 30)).splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("! data.mdb: ")]
    told = f"{lines[at]} {lines[at + 1].strip()}"
    assert told == f"! data.mdb: {why} that it takes two lines"
    assert max(map(len, lines)) <= 80
    (cut,) = [line for line in plain(render.picture(shown, 80, 12)).splitlines() if "! " in line]
    assert cut.startswith("! data.mdb: progress comes from page tables") and cut.endswith("…")


def test_several_alerts_are_counted_gravest_first() -> None:
    made = document(4, degradations=[f"degradation {i}" for i in range(5)])
    made["files"][0]["changed"] = "modified"
    shown = replace(view(made), state=model.LOST)
    found = words.alerts(shown)
    assert found[0] == "the service died; the job goes on without prefetching"
    assert found[1] == "records.mdb: modified"
    text = plain(render.picture(shown, 80, 24))
    assert "! the service died" in text and "(and 4 more)" in text
    assert "the service died" in plain(panel.panel(shown, 80, 6))
    assert "the service died" in words.one_line(shown)


def test_processes_without_the_preload_object_that_map_large_files_are_named() -> None:
    process = {
        "pid": 812, "parent_pid": 1, "command": "go-loader", "why": "statically linked",
        "maps_bytes": 1,
    }  # fmt: skip
    harmless = {**process, "pid": 811, "command": "busybox", "maps_bytes": 0}
    shown = snapshot(2, not_managed={"processes": [harmless, process, process], "why": None})
    text = plain(render.picture(shown, 80, 24))
    assert "! not managed: 812 go-loader (statically linked) and 1 more" in text


def test_a_silent_service_is_told_with_the_time() -> None:
    shown = replace(snapshot(), state=model.SILENT, silent_seconds=12)
    assert "has not answered for 12 s" in plain(render.picture(shown, 80, 24))


def test_what_only_the_watcher_can_fill_in_is_no_remark_before_it_has_looked() -> None:
    made = document(2)
    for r in made["ranks"]:
        r["stall"]["why"] = ADDED_BY_WATCHER
    assert "not sampled" not in plain(render.picture(view(made), 160, 50))


def test_before_a_mapping_there_is_a_word_instead_of_a_table() -> None:
    empty = snapshot(0, files=[], history=document()["history"] | {
        "prefetch_bytes_per_second": [], "reader_bytes_per_second": [], "misses_per_second": [],
    })  # fmt: skip
    assert "no process of the job has mapped a file yet" in plain(render.picture(empty, 80, 24))
    assert words.one_line(empty).startswith("resnet50-7731 2 min 34 s: 0 ranks")


@pytest.mark.parametrize(("seconds", "told"), [(2.0, ""), (40.4, " (40 s ago)")])
def test_what_is_cached_is_of_now_or_says_of_when(seconds: float, told: str) -> None:
    found = busy(2).snapshot
    files = [
        replace(file, counted_seconds_ago=seconds, resident_bytes=file.size_bytes // 2)
        for file in found.files
    ]
    shown = model.View(replace(found, files=tuple(files)))
    assert re.search(rf"cached 50%{re.escape(told)}(;|$)", words.one_line(shown))


def test_one_line_is_one_line_of_words_and_numbers() -> None:
    line = words.one_line(busy(9))
    assert "\n" not in line and "\x1b" not in line
    assert "9 ranks" in line and "reading 284 MB/s" in line and "storage 298 MB/s" in line


# ---- small files --------------------------------------------------------------------------------


def test_what_is_recorded_of_a_start_is_a_note() -> None:
    start = {"record": "recording", "paths": 3112, "bytes": 125 * MIB}
    text = plain(render.picture(view(document(2, start=start)), 80, 24))
    assert "start recording: 3,112 paths (125 MiB)" in text
    assert "start" not in plain(render.picture(view(document(2)), 80, 24))


def test_small_files_have_a_table_of_trees_and_told_orders() -> None:
    text = plain(render.picture(view(document(0, files=[], small_files=small_files())), 80, 24))
    assert "no process of the job has mapped or read a large file yet" in text
    titles, told, tree, unknown, total = text.splitlines()[-6:-1]
    assert re.search(r"^small files in .* order +folders read ahead then opened left out$", titles)
    assert re.search(r"^process 77, at 510.* known +600 +510$", told)
    assert re.search(r"^/data/train +by name +11 +1,583 +1,524 +0$", tree)
    assert re.search(r"^/data/val +not found yet +1 +0 +0 +0$", unknown)
    assert total == "in all: 2,034 of 2,183 read ahead were opened (190 MiB); 3 more not shown"
    assert words.one_line(view(document(0, small_files=small_files()))).endswith(
        "small files read ahead 2183, of these opened 2034"
    )


def test_an_older_service_s_document_has_no_small_files() -> None:
    assert snapshot().snapshot.small_files is None
    assert "small files" not in plain(render.picture(snapshot(), 160, 50))


@pytest.mark.parametrize("width", [40, 53, 80, 160])
@pytest.mark.parametrize("rows", range(1, 8))
def test_the_table_of_small_files_fits(width: int, rows: int) -> None:
    small = decode(document(0, small_files=small_files())).small_files
    assert small is not None
    lines = small_lines(small, width, rows, ASCII)
    assert len(lines) <= rows and all(line.cell_len <= width for line in lines)
    assert all(line.plain.isascii() for line in lines)


# ---- the pool -----------------------------------------------------------------------------------


def test_a_pool_has_two_lines_on_a_common_terminal_and_nobody_else_has() -> None:
    text = plain(render.picture(view(pooled()), 80, 24))
    (full,) = [line for line in text.splitlines() if line.startswith("pool ")]
    (waits,) = [line for line in text.splitlines() if line.startswith("waiting ")]
    assert "510 MiB of 512 MiB" in full and "hit 91% of 4711" in full
    assert "evicting 280 MB/s" in full
    assert "2 now, 7 at most, 1203 so far" in waits and "p99 8.39 ms" in waits
    others = plain(render.picture(snapshot(), 80, 24))
    assert "pool" not in others and "waiting" not in others


def test_a_wide_screen_tells_all_of_the_pool() -> None:
    text = plain(render.picture(view(pooled()), 160, 50))
    for part in ("read again 1 GiB", "evicted 1.5 GiB (cyclic)", "held 128 KiB", "a chunk takes"):
        assert part in text


def test_a_pool_that_something_else_bounds_says_what() -> None:
    made = pooled()
    made["pool"].update(limited_by="cgroup memory limit", evicted_bytes=0)
    text = plain(render.picture(view(made), 100, 30))
    assert "of 512 MiB (cgroup memory limit)" in text and "evict" not in text


CLUSTER = {
    "node": 2, "nodes": 4, "present": [0, 1, 2], "generations": 1, "from_bytes": 3 << 30,
    "to_bytes": 1 << 30, "network_bytes_per_second": 240_000_000,
    "keepers": {"/data/train/records.mdb": [0, 0, 1, None]},
}  # fmt: skip


def test_the_run_s_other_nodes_have_a_line_where_there_are_any() -> None:
    def nodes(cluster: dict[str, object] | None) -> list[str]:
        made = {**pooled(), "cluster": cluster}
        lines = plain(render.picture(view(made), 120, 40)).splitlines()
        return [line for line in lines if line.startswith("nodes ")]

    (line,) = nodes(CLUSTER)
    for part in ("3 of 4 here", "3 GiB came, 1 GiB went", "network 240 MB/s", "kept by 001."):
        assert part in line
    assert nodes(None) == []
    for cells in (64, 1000):
        many = {**CLUSTER, "keepers": {"/far": [i * 4 // cells for i in range(cells)]}}
        (line,) = nodes(many)
        assert len(line) <= 120
        shown = line.rpartition("kept by ")[2].rstrip()
        assert len(shown) >= 16 and sorted(shown) == list(shown) and set(shown) == set("0123")
    (alone,) = nodes({"node": 0, "nodes": 4, "present": [0], "generations": 0})
    assert "1 of 4 here" in alone and "came" not in alone


def test_a_file_is_in_the_pool_or_in_the_page_cache() -> None:
    def title(made: dict[str, object]) -> str:
        lines = plain(render.picture(view(made), 100, 30)).splitlines()
        return next(line for line in lines if line.startswith("file "))

    made = pooled()
    assert "in the pool" in title(made)
    made["files"].append({**document()["files"][0], "path": "/data/private.mdb"})
    assert "in pool or cache" in title(made)
    assert "in the page cache" in title(document())
    row = plain(render.picture(view(pooled()), 100, 30))
    assert re.search(r"records\.mdb .* 50%", row)  # 510 MiB of it in the pool, none in the cache


def test_the_panel_and_the_line_name_the_pool() -> None:
    shown = view(pooled())
    assert "pool 510M of 512M" in plain(panel.panel(shown, 80, 7))
    line = words.one_line(shown)
    assert "pool 510M of 512M" in line and "cached" not in line


def test_a_pool_that_reads_tells_how_fast_where_nothing_large_was_measured() -> None:
    made = pooled()
    made["node"]["bandwidth_bytes_per_second"] = None
    text = plain(render.picture(view(made), 80, 24))
    assert "the pool reads 298 MB/s" in text


# ---- bars, gauges, curves -----------------------------------------------------------------------


def bar(width: int = 20, characters: glyphs.Glyphs = ASCII, **changes: object) -> str:
    (one,) = snapshot(1, ranks=[rank(0, 1, **changes)]).snapshot.ranks
    return glyphs.position_bar(one, width, characters).plain


def stream(start: int, position: int, frontier: int) -> dict[str, object]:
    return {
        **document()["ranks"][0]["streams"][0], "start_bytes": start * MIB,
        "position_bytes": position * MIB, "frontier_bytes": frontier * MIB,
    }  # fmt: skip


def test_the_bar_shows_walked_position_and_ahead_in_their_places() -> None:
    assert bar(streams=[stream(0, 512, 700)]) == "##########>+++......"
    assert bar(streams=[stream(512, 1024, 1024)]) == "..........#########>"
    assert bar(streams=[]) == "." * 20
    assert bar(size_bytes=None) == "." * 20


def test_a_backward_reader_looks_the_other_way() -> None:
    assert bar(direction=-1, streams=[stream(1000, 512, 400)]) == ".......+++<#########"


def test_two_readers_of_one_rank_are_two_marks() -> None:
    assert bar(streams=[stream(0, 256, 256), stream(512, 768, 768)]) == "#####>....#####>...."


def test_offsets_beyond_the_file_stay_in_the_bar() -> None:
    assert len(bar(streams=[stream(0, 5000, 9000)])) == 20
    assert bar(streams=[stream(0, 5000, 9000)]).endswith(">")


def test_a_gauge_is_never_empty_for_something_nor_longer_than_full() -> None:
    assert glyphs.gauge(0.0, 10, ASCII).plain == ".........."
    assert glyphs.gauge(0.001, 10, ASCII).plain == "#........."
    assert glyphs.gauge(1.0, 10, ASCII).plain == "##########"
    assert glyphs.gauge(7.0, 10, ASCII).plain == "##########"


def test_a_curve_fills_its_cells_whatever_it_is_given() -> None:
    for count in (0, 1, 5, 20, 21, 59, 180):
        for cells in (1, 7, 20, 180):
            means = glyphs.resample([float(i) for i in range(count)], cells)
            assert len(means) == (cells if count else 0) and means == sorted(means)
            assert not count or means[-1] >= count - 1 - count / cells
            for rows in (1, 4):
                lines = glyphs.chart(means, cells, rows, UNICODE, "")
                assert len(lines) == rows and all(line.cell_len == cells for line in lines)


def test_what_is_not_nothing_shows_in_a_curve() -> None:
    (line,) = glyphs.chart([0.0, 0.001, 50.0, 100.0], 4, 1, UNICODE, "")
    assert line.plain == " ▁▄█"
    top, bottom = glyphs.chart([0.0, 0.001, 50.0, 100.0], 4, 2, UNICODE, "")
    assert (top.plain, bottom.plain) == ("   █", " ▁██")


# ---- characters and colours ---------------------------------------------------------------------


def test_ascii_is_ascii_all_over() -> None:
    shown = replace(busy(40), state=model.SILENT, silent_seconds=3)
    for width, height in SIZES:
        render_text = plain(render.picture(shown, width, height, ASCII, "q quits"))
        assert render_text.isascii(), [c for c in render_text if not c.isascii()]
        assert plain(panel.panel(shown, width, 8, ASCII)).isascii()


@pytest.mark.parametrize(
    ("encoding", "environ", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, UNICODE),
        ("UTF-8", {"LC_ALL": "C.UTF-8"}, UNICODE),
        ("ascii", {"LANG": "en_US.UTF-8"}, ASCII),
        ("latin-1", {"LANG": "de_DE"}, ASCII),
        ("utf-8", {"LC_ALL": "C", "LANG": "en_US.UTF-8"}, ASCII),
        ("utf-8", {"LC_ALL": "", "LANG": "POSIX"}, ASCII),
        ("utf-8", {}, ASCII),
        (None, {"LANG": "en_US.UTF-8"}, ASCII),
    ],
)
def test_the_characters_follow_encoding_and_locale(
    encoding: str | None, environ: dict[str, str], expected: glyphs.Glyphs
) -> None:
    assert glyphs.choose(encoding, environ) is expected


def test_no_color_leaves_no_colour_and_all_characters() -> None:
    def printed(environ: dict[str, str]) -> str:
        out = io.StringIO()
        console = Console(
            file=out, width=80, force_terminal=True, color_system="truecolor", _environ=environ
        )
        console.print(render.renderable(busy(4), 80, 24))
        return out.getvalue()

    colour = re.compile(r"\x1b\[[\d;]*(?:3[0-8]|4[0-8]|9\d)[;m]")
    assert colour.search(printed({})) and not colour.search(printed({"NO_COLOR": "1"}))
    strip = re.compile(r"\x1b\[[\d;]*m")
    assert strip.sub("", printed({})) == strip.sub("", printed({"NO_COLOR": "1"}))
    lines = panel.panel(busy(4), 80, 8)
    assert not any(colour.search(line) for line in panel.to_ansi(lines, 80, colour=False))
    assert any(colour.search(line) for line in panel.to_ansi(lines, 80, colour=True))


def test_lines_of_the_panel_move_no_cursor() -> None:
    for line in panel.to_ansi(panel.panel(busy(40), 80, 8), 80, colour=True):
        assert "\n" not in line and "\r" not in line
        assert re.sub(r"\x1b\[[\d;]*m", "", line).count("\x1b") == 0


def test_each_sequence_gives_the_cursor_back() -> None:
    for text in (
        panel.enter(24, 7), panel.drawing(["a", "b"], 24), panel.leave(24, 7),
        panel.leave_after_resize(),
    ):  # fmt: skip
        assert text.count("\x1b7") == text.count("\x1b8") == 1
        inside = text.split("\x1b7")[1]
        assert re.search(r"\x1b\[[\d;]*r", inside)  # DECSTBM homes the cursor: only in between
        assert "\x1b[r" not in text.split("\x1b8")[1]


# ---- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "n/a"), (0, "0"), (1, "1"), (999, "999"), (1000, "1K"), (1536, "1.5K"),
        (28 * MIB, "28M"), (2.35 * MIB, "2.4M"), (999.6 * MIB, "0.98G"), (1280 * MIB, "1.25G"),
        (40 << 30, "40G"), (3 << 50, "3P"),
    ],
)  # fmt: skip
def test_short_sizes(size: float | None, text: str) -> None:
    assert words.short_size(size) == text


def test_short_sizes_and_rates_are_short() -> None:
    source = random.Random(3)
    for _ in range(5000):
        value = 10 ** source.uniform(0, 17)
        assert len(words.short_size(value)) <= 5, value
        assert len(words.megabytes(value / 1e4)) <= 6, value


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "n/a"), (0.0, "0%"), (1e-6, "0.1%"), (0.5, "50%"), (0.995, "99.5%"),
        (0.99999, "99.9%"), (1.0, "100%"), (1.8, "180%"), (float("nan"), "n/a"),
    ],
)  # fmt: skip
def test_percent_rounds_neither_to_all_nor_to_nothing(share: float | None, text: str) -> None:
    assert words.percent(share) == text


def test_text_is_cut_between_words_only() -> None:
    sentence = "progress comes from page tables: 12345 of 67890 (see doctor)"
    for width in range(1, 70):
        cut = words.fit(sentence, width)
        assert len(cut) <= width
        if cut and cut != sentence:
            head = cut.removesuffix("…")
            assert sentence.startswith(head) and sentence[len(head)] in " ,;:("
    assert words.fit("x" * 50, 20) == ""


def test_a_path_keeps_its_end() -> None:
    path = "/lustre/project/train/part-00017.mdb"
    assert words.short_path(path, 100) == path
    assert words.short_path(path, 24) == "train/part-00017.mdb"
    assert words.short_path(path, 14) == "part-00017.mdb"
    assert words.short_path(path, 10) == "…00017.mdb"
