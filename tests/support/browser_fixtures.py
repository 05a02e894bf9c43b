# SPDX-License-Identifier: Apache-2.0
"""A trace's page in a headless Chromium: a test module says
``pytest_plugins = ("browser_fixtures",)``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
from browser import Browser, Open, why_none
from conftest import require

from uffdprefetch.report.html import render
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.trace_file import Trace


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = why_none()
    require(reason is None, str(reason))
    with Browser.start(1200, 1000) as one:
        yield one


@pytest.fixture(scope="module")
def cold_trace() -> Trace:
    return synthetic.make("skip", records=1200)


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Render a trace, open it from disk, and wait until it is drawn. Whatever a test then does to
    the page: an error or a warning in the browser's console fails it."""

    def open_it(trace: Trace, report: dict[str, Any] | None = None) -> Browser:
        path = tmp_path / "trace.html"
        path.write_text(render(trace, analyse(trace) if report is None else report), "utf-8")
        browser.open(path.as_uri())
        browser.run("return uffdprefetch.idle()")
        return browser

    browser.console()
    yield open_it
    assert browser.console() == []
