# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium by WebDriver (W3C), as far as the report's tests need it: no package for it.

`with Browser.start() as browser:` gives a session; its process group ends with it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

#: Only there so that a hang fails instead of hanging.
HANG_SECONDS = 120.0
_PORT = re.compile(rb"started successfully on port (\d+)")


def drawn(page: Browser) -> dict[str, Any]:
    """What the first access map of a trace's page shows, once it is drawn."""
    page.run("return uffdprefetch.idle()")
    found: dict[str, Any] = page.run("return uffdprefetch.drawn[0]")
    return found


def why_none() -> str | None:
    """Why no browser can be driven here; None if one can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


class Browser:
    """One window. Methods raise AssertionError with the browser's words where it refuses."""

    def __init__(self, driver: subprocess.Popen[bytes], port: int, directory: str) -> None:
        self._driver, self._port, self._directory = driver, port, directory
        self._session = ""

    @classmethod
    def start(cls, width: int = 1200, height: int = 1000, dark: bool = False) -> Browser:
        """Start a driver and a browser; raises AssertionError when they do not come up."""
        directory = tempfile.mkdtemp(prefix="uffdprefetch-browser.")
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts ends with it
            env={**os.environ, "HOME": directory},
        )
        assert driver.stdout is not None
        port = None
        for line in driver.stdout:
            if found := _PORT.search(line):
                port = int(found.group(1))
                break
        browser = cls(driver, port or 0, directory)
        try:
            assert port is not None, "chromedriver did not start"
            browser._begin(width, height, dark)
        except BaseException:
            browser.close()
            raise
        return browser

    def _begin(self, width: int, height: int, dark: bool) -> None:
        words = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={self._directory}/profile", f"--window-size={width},{height}",
        ]  # fmt: skip
        if dark:
            words.append("--blink-settings=preferredColorScheme=0")
        options = {"args": words, "binary": shutil.which("chromium")}
        patience = dict.fromkeys(("script", "pageLoad"), round(HANG_SECONDS * 900))  # ms; else 30 s
        wanted = {
            "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": patience,
        }  # fmt: skip
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANG_SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        refused = isinstance(value, dict) and "error" in value
        assert not refused, f"{path}: {value.get('error')}: {value.get('message')}"
        return value

    def open(self, url: str) -> None:
        """Load a page; returns once it is loaded."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns, called with `arguments`; a promise is waited for."""
        body = {"script": script, "args": list(arguments)}
        return self._ask("POST", f"{self._session}/execute/sync", body)

    def console(self) -> list[str]:
        """Warnings and errors that the page left since the last call."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def act(self, *sources: dict[str, Any]) -> None:
        """Perform input actions (W3C WebDriver, section 15)."""
        self._ask("POST", f"{self._session}/actions", {"actions": list(sources)})

    def mouse(self, *steps: Sequence[Any]) -> None:
        """Steps of the mouse: ("move", x, y), ("down",), ("up",); CSS pixels of the window."""
        kinds = {"move": "pointerMove", "down": "pointerDown", "up": "pointerUp"}
        actions: list[dict[str, Any]] = []
        for name, *place in steps:
            action: dict[str, Any] = {"type": kinds[name], "button": 0}
            if place:
                action |= {"x": round(place[0]), "y": round(place[1]), "duration": 20}
            actions.append(action)
        self.act({"type": "pointer", "id": "mouse", "actions": actions})

    def wheel(self, x: float, y: float, delta: int) -> None:
        """Turn the wheel over a place; negative: away from the user."""
        action = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": delta}
        self.act({"type": "wheel", "id": "wheel", "actions": [action]})

    def keys(self, text: str) -> None:
        """Press and release keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.act({"type": "key", "id": "keyboard", "actions": actions})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        body = {"cmd": name, "params": parameters}
        return self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def picture(self, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """End browser and driver."""
        try:
            if self._session:
                self._ask("DELETE", self._session)
        except (OSError, AssertionError, http.client.HTTPException):
            pass
        try:
            os.killpg(self._driver.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Opens the page of a trace and its report, and gives the browser
#: (tests/support/browser_fixtures.py).
Open = Callable[..., Browser]
