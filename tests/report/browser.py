"""A headless Chromium that shows a page in real time, spoken to by its DevTools protocol."""

from __future__ import annotations

import base64
import io
import json
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
    """A browser with a profile folder of its own; it ends with the context."""
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ]
    with subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={profile}"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            address = next(
                found.group(1)
                for found in (re.search(r"DevTools listening on (ws://\S+)", line) for line in process.stderr)
                if found
            )
            with connect(address, max_size=None, open_timeout=DEADLINE_SECONDS) as connection:
                yield connection
        finally:
            process.kill()


class Tab:
    """One page of a browser: commands to it, and what it reports meanwhile."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._sent = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=DEADLINE_SECONDS))
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]
            self._keep(answer)

    def _keep(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.console.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(parameters["args"]))

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


def shown(connection: ClientConnection, page: Path, ready: str, dark: bool, height: int) -> Shown:
    """A page in a window of 1280 x `height` pixels, as soon as the expression `ready` is true in it."""
    tab = Tab(connection)
    for domain in ("Page", "Log", "Runtime"):
        tab.call(f"{domain}.enable")
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tab.call("Emulation.setEmulatedMedia", features=[scheme])
    tab.call(
        "Emulation.setDeviceMetricsOverride", width=1280, height=height, deviceScaleFactor=1, mobile=False
    )
    tab.call("Page.navigate", url=page.as_uri())
    until = time.monotonic() + DEADLINE_SECONDS
    while not tab.value(f"document.readyState === 'complete' && ({ready})"):
        assert time.monotonic() < until, (
            f"{ready} was not true within {DEADLINE_SECONDS:.0f} s; {tab.console}"
        )
        time.sleep(0.1)
    dom = tab.value("document.documentElement.outerHTML")
    image = base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])
    return Shown(dom, Image.open(io.BytesIO(image)).convert("RGB"), tab.console)
