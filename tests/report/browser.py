"""A headless Chromium that shows a page in real time, controlled through the DevTools protocol."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from websockets.sync.client import ClientConnection, connect

from rlmath.distributed.process import end_with_parent

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_SECONDS = 120.0
"""For a browser to start and for a page to be ready, on a machine that is busy with other tests."""


@dataclass(frozen=True)
class Shown:
    """A page as the browser had it when it was ready."""

    dom: str
    image: Image.Image
    console: list[str]
    """What its scripts wrote to the console, what the browser reported of it, and exceptions nobody caught."""


@contextmanager
def browser(profile: Path) -> Iterator[ClientConnection]:
    """A browser with a profile folder of its own; it ends with the context, or with this process."""
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ]
    log, ours = profile / "stderr.txt", os.getpid()
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={profile}"],
            stderr=stderr,
            preexec_fn=lambda: end_with_parent(ours),
        )
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while not (found := re.search(r"DevTools listening on (ws://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        limits = {"max_size": None, "max_queue": None, "ping_interval": None, "proxy": None}
        with connect(found.group(1), open_timeout=DEADLINE_SECONDS, **limits) as connection:
            yield connection
    finally:
        process.kill()
        process.wait()


class Tab:
    """One page of a browser: commands to it, and what it reports meanwhile."""

    _numbers = itertools.count(1)
    """Of the commands of all tabs."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._session: str | None = None
        self.console: list[str] = []
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=DEADLINE_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("sessionId") == self._session:
                self._note_console(answer)

    def _note_console(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.console.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(parameters["args"]))

    def evaluate(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page, or what its promise becomes."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


SETTLED = "new Promise((then) => setTimeout(() => requestIdleCallback(() => then(true)), 1500))"


def shown(connection: ClientConnection, page: Path, ready: str, dark: bool, height: int) -> Shown:
    """A page in a window of 1280 x `height` pixels, once the expression `ready` was true in it and its scripts have had
    1.5 s more, and nothing to do."""
    tab = Tab(connection)
    try:
        for domain in ("Page", "Log", "Runtime"):
            tab.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + DEADLINE_SECONDS
        while not tab.evaluate(f"document.readyState === 'complete' && ({ready})"):
            assert time.monotonic() < until, (
                f"{ready} was not true within {DEADLINE_SECONDS:.0f} s; {tab.console}"
            )
            time.sleep(0.1)
        tab.evaluate(SETTLED)
        dom = tab.evaluate("document.documentElement.outerHTML")
        image = base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])
    finally:
        tab.call("Target.closeTarget", targetId=tab.target)
    return Shown(dom, Image.open(io.BytesIO(image)).convert("RGB"), tab.console)
