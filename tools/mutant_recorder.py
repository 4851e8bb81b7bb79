"""Which tests see a line: a tracer for every process of the tests, and a plugin for pytest that says where they are.

`tools/mutants.py` puts this file into a copy of the project as `sitecustomize.py`, which Python imports when it starts:
so do the ranks, programs and workers that tests start, whose PYTHONPATH begins with the copy. The test that runs is
named in a page of memory that all of them share: ranks live on from test to test, and an environment that was copied
before a test does not name it. A line is written down the first time a test sees it: processes that are killed, or that
end with os._exit, lose nothing.

The package `coverage` is not used: it keeps what a process saw until its end, which reward workers, fork servers and
ranks that are killed never reach, and it asks for the test's name when a process starts.

Where the folder has no page, nothing is traced, and the plugin alone works.
"""

import contextlib
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
NOT_TRACED = (f"{ROOT}tests{os.sep}", __file__)
PAGE = ".mutants/page"
"""Of the root: the name of the test that runs, and zeros."""
LINES = ".mutants/lines"
PROGRESS = ".mutants/progress"
PAGE_BYTES = 1024


class LineTracer:
    """`call` is what sys.settrace takes. A function whose lines a test has all seen is no longer traced."""

    def __init__(self) -> None:
        with open(ROOT + PAGE, "r+b") as file:
            self.page = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._test = b""
        self._unseen: dict[int, set[int]] = {}
        """By the id of a function's code, the lines that the test has not seen; a code's hash takes microseconds."""
        self._codes: dict[int, Any] = {}
        """All that were called, so that no other code gets an id; those that are not traced as None."""

    def call(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        key = id(code)
        if key not in self._codes:
            file = code.co_filename
            is_traced = file.startswith(ROOT) and not file.startswith(NOT_TRACED)
            self._codes[key] = (code, is_traced)
        if not self._codes[key][1]:
            return None
        if self.page[:] != self._test:
            self._test = self.page[:]
            self._unseen = {}
        if key not in self._unseen:
            self._unseen[key] = lines_of(code)
        return self._line if self._unseen[key] else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        lines = self._unseen.get(id(frame.f_code), set())
        if event == "line" and frame.f_lineno in lines:
            lines.discard(frame.f_lineno)
            test = self._test.rstrip(b"\0").decode(errors="replace")
            append(LINES, f"{frame.f_lineno}\t{frame.f_code.co_filename.removeprefix(ROOT)}\t{test}\n")
        return self._line


def lines_of(code: Any) -> set[int]:
    """The lines that a tracer hears of. The first range is that of `def`, which is called and not executed, unless all
    stands on one line."""
    lines = [line for _, _, line in code.co_lines() if line]
    return set(lines[1:] or lines)


def append(name: str, row: str) -> None:
    """Add a short row at once, beside other processes that do so. The file is opened each time: workers close what they
    have open, and its number is given to something else. A worker that may open or write nothing adds none."""
    with contextlib.suppress(OSError), open(ROOT + name, "ab", buffering=0) as file:
        file.write(row.encode())


tracer = LineTracer() if os.path.exists(ROOT + PAGE) else None
if tracer is not None:
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)


# ---------------------------------------------------------------- the plugin: pytest -p sitecustomize

reports: dict[str, list[Any]] = {}
"""By test: those of its set-up, call and teardown."""


def pytest_runtest_logstart(nodeid: str) -> None:
    if tracer is not None:
        tracer.page[:] = nodeid.encode()[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
    append(PROGRESS, json.dumps({"test": nodeid, "outcome": "running", "clock": time.monotonic()}) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    reports.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    row = {
        "test": nodeid,
        "outcome": next((part.outcome for part in reports[nodeid] if part.outcome != "passed"), "passed"),
        "seconds": round(sum(part.duration for part in reports[nodeid]), 3),
        "ranks": any("distributed" in part.keywords for part in reports[nodeid]),
    }
    append(PROGRESS, json.dumps(row) + "\n")
