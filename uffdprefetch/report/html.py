# SPDX-License-Identifier: Apache-2.0
"""A trace as one HTML file: opens from disk, asks no network, and can be zoomed to single accesses.

page/ holds what is the same in every file. What differs is one JSON document and the packed marks
(report/pack.py), in script elements that no browser runs. Strings of a trace (paths, commands) are
hostile: the document holds no '<', '>' or '&', the page makes text nodes only, and its policy lets
run nothing but the script whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any

import numpy as np

from uffdprefetch.report import captions, pack
from uffdprefetch.report.text import printable
from uffdprefetch.trace.analyse.marks import KINDS, LAYER_OF
from uffdprefetch.trace.analyse.pictures import pictures
from uffdprefetch.trace.file.trace_file import Trace

_SCRIPTS = (
    "base.js", "data.js", "plot.js", "raster.js", "shapes.js", "map.js", "tell.js",
    "charts.js", "timelines.js", "main.js",
)  # fmt: skip
#: Most readers, and findings, that a page lists: it must open with thousands of ranks, too.
_READERS_MAX = 512
_FINDINGS_MAX = 100


def _page(name: str) -> str:
    return resources.files("uffdprefetch.report").joinpath(f"page/{name}").read_text("utf-8")


def _hash_of(text: str) -> str:
    """Hash of a script or style as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _plain(value: Any) -> Any:
    """JSON's types, of numpy's as well; what is no number becomes null, floats keep 7 digits."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set)):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.9g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
    return value


def json_for_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _report_for_page(report: dict[str, Any]) -> dict[str, Any]:
    """The page's part of a report: without the long lists, which the pictures hold."""
    readers = [
        {key: one for key, one in reader.items() if key != "iterations"}
        for reader in (report.get("readers") or [])[:_READERS_MAX]
    ]
    kept = ("schema", "trace", "ranks", "files", "phases", "service", "block")
    return {
        **{key: report.get(key) for key in kept if report.get(key) is not None},
        "readers": readers,
        "findings": (report.get("findings") or [])[:_FINDINGS_MAX],
    }


def _record_bytes(report: dict[str, Any], file_id: int) -> float | None:
    """The mean size of a file's records, where the report knows of records."""
    entry = captions.file_of(report, file_id)
    index = entry.get("lmdb") or entry.get("records") or {}
    records, size = index.get("records"), entry.get("size_bytes")
    return size / records if records and size else None


def _head(report: dict[str, Any], drawn: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    grid = drawn["grid"]
    kinds = {s.kind for s in drawn["streams"]} | {c.kind for c in (grid.cells if grid else ())}
    kept = (
        "seconds", "page_bytes", "raw_until_seconds", "ranks", "files_left_out", "series",
        "calls", "iterations", "epochs", "phases",
    )  # fmt: skip
    return {
        "report": _report_for_page(report),
        "title": captions.short_command((report.get("trace") or {}).get("command") or []),
        "pictures": {
            **{name: drawn[name] for name in kept},
            "files": [
                {**file, "record_bytes": _record_bytes(report, file["id"])}
                for file in drawn["files"]
            ],
            "grid": None if grid is None else {"columns": grid.columns, "rows": grid.rows},
            "kinds": KINDS,
            "kinds_present": sorted(kinds),
            "kind_texts": captions.KIND_TEXTS,
            "layer_of": LAYER_OF,
            "step_ns": packed["step_ns"],
            "exact": packed["exact"],
            "windows": [
                [start, end, marks, text is not None]
                for start, end, marks, text in packed["windows"]
            ],
        },
        "captions": captions.captions(report, drawn),
        "map_captions": captions.map_captions(report, drawn),
        "lacks": captions.lacks_of_trace(report),
    }


def _say_what_is_left_out(head: dict[str, Any], packed: dict[str, Any]) -> None:
    windows = packed["windows"]
    absent = sum(1 for w in windows if w[3] is None)
    if absent:
        text = (
            f" Single accesses are in this file for {len(windows) - absent} of {len(windows)}"
            " stretches of time (the line under the picture); the others had no room in it."
        )
        for caption in head["map_captions"].values():
            caption["text"] += text
    if head["pictures"]["files_left_out"]:
        left_out = head["pictures"]["files_left_out"]
        last = list(head["map_captions"].values())[-1]
        last["text"] += f" {left_out} more files with fewer accesses have no map."


def render(trace: Trace, report: dict[str, Any]) -> str:
    """The page of a trace and its report (trace/analyse/report.py), to be written as UTF-8.

    Below 20 MB for any trace: what single accesses have no room are shown as densities. Pure but
    for reading the page's own parts.
    """
    drawn = pictures(trace, report)
    packed = pack.windows(drawn["streams"], int(drawn["seconds"] * 1e9))
    head = _head(report, drawn, packed)
    _say_what_is_left_out(head, packed)
    script = "\n".join(['"use strict";', *(_page(name) for name in _SCRIPTS)])
    style = _page("page.css")
    blobs = [
        f'<script type="text/plain" id="w{i}">{text}</script>'
        for i, (_, _, _, text) in enumerate(packed["windows"])
        if text is not None
    ]
    cells = ""
    if drawn["grid"] is not None:
        cells = f'<script type="text/plain" id="cells">{pack.cells(drawn["grid"])}</script>'
    about = report.get("trace") or {}
    command = " ".join(map(str, about.get("command") or [])) or about.get("path") or ""
    parts = {
        "POLICY": (
            f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}';"
            " img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "TITLE": html.escape(printable(f"Trace of {command}" if command else "Trace")),
        "STYLE": style,
        "HEAD": json_for_script(head),
        "CELLS": cells,
        "SCRIPT": script,
        "BLOBS": "\n".join(blobs),
    }
    page = _page("page.html")
    # One pass over the template's own marks: what is filled in is not searched for marks again.
    pieces = page.split("@@")
    for i in range(1, len(pieces), 2):
        pieces[i] = parts[pieces[i]]
    return "".join(pieces)
