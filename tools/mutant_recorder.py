"""Recorder of the tests that see a line: a tracer for every process, and a plugin for pytest.

The plugin says which test runs, the tracer which lines.

`tools/mutants.py` puts this file into a copy of the project as `sitecustomize.py`, which Python
imports when it starts: so do the ranks, programs and workers that tests start, whose PYTHONPATH
begins with the copy. The test that runs is named in a page of memory that all of them share: ranks
live on from test to test, and an environment that was copied before a test does not name it. A line
is written down the first time a test sees it: processes that are killed, or that end with os._exit,
lose nothing.

The package `coverage` is not used: it keeps what a process saw until its end, which reward workers,
fork servers and ranks that are killed never reach, and it asks for the test's name when a process
starts.

Where the folder has no page, nothing is traced, and the plugin alone works.
"""

import contextlib
import json
import mmap
import os
import sys
import sysconfig
import threading
import time
from typing import Any

ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
NOT_TRACED = (f"{ROOT}tests{os.sep}", __file__)
PAGE = ".mutants/page"
"""File below the root: the number of the test that runs, its name, and zeros."""
LINES = ".mutants/lines"
PROGRESS = ".mutants/progress"
PAGE_BYTES = 1024
NUMBER_BYTES = 8
LIBRARIES = ".mutants/libraries"
SITE_PACKAGES = sysconfig.get_path("purelib") + os.sep


class LineTracer:
    """`call` is what sys.settrace takes.

    A function whose lines a test has all seen is no longer traced. Python calls it for every
    function of every library: what is no function of the project costs it one look into a set."""

    def __init__(self) -> None:
        with open(ROOT + PAGE, "r+b") as file:
            self.page = mmap.mmap(file.fileno(), PAGE_BYTES)
        self.number = memoryview(self.page)[:NUMBER_BYTES].cast("Q")
        """How many tests have begun."""
        codes: list[Any] = []  # all that were called, so that no other code gets the id of one
        not_traced: set[int] = set()
        lines: dict[
            int, tuple[set[int], Any]
        ] = {}  # by the id of a code, whose hash takes microseconds
        number = self.number
        seen_by = -1

        def call(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen_by
            key = id(frame.f_code)
            if key in not_traced:
                return None
            if number[0] != seen_by:
                seen_by = number[0]
                lines.clear()
            if key not in lines:
                code = frame.f_code
                codes.append(code)
                if not code.co_filename.startswith(ROOT) or code.co_filename.startswith(NOT_TRACED):
                    not_traced.add(key)
                    return None
                lines[key] = self._lines(code)
            unseen, line = lines[key]
            return line if unseen else None

        self.call = call

    def _lines(self, code: Any) -> tuple[set[int], Any]:
        """Lines of a code object that the running test has not seen, and their trace function."""
        unseen = lines_of(code)
        file = code.co_filename.removeprefix(ROOT)

        def line(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_lineno in unseen and event == "line":
                unseen.discard(frame.f_lineno)
                test = self.page[NUMBER_BYTES:].rstrip(b"\0").decode(errors="replace")
                append(LINES, f"{frame.f_lineno}\t{file}\t{test}\n")
            return line

        return unseen, line

    def begin_test(self, name: str) -> None:
        """Tell all processes which test runs."""
        self.page[NUMBER_BYTES:] = name.encode()[: PAGE_BYTES - NUMBER_BYTES].ljust(
            PAGE_BYTES - NUMBER_BYTES, b"\0"
        )
        self.number[0] += 1


def lines_of(code: Any) -> set[int]:
    """The lines that a tracer hears of.

    The first range is that of `def`, which is called and not executed, unless all stands on one
    line."""
    lines = [line for _, _, line in code.co_lines() if line]
    return set(lines[1:] or lines)


def append(name: str, row: str) -> None:
    """Add a short row at once, beside other processes that do so.

    The file is opened each time: workers close what they have open, and its number is given to
    something else. A worker that may open or write nothing adds none."""
    with contextlib.suppress(OSError), open(ROOT + name, "ab", buffering=0) as file:
        file.write(row.encode())


tracer = LineTracer() if os.path.exists(ROOT + PAGE) else None
if tracer is not None:
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)


# -------------------------------------------------------------- the plugin: pytest -p sitecustomize

reports: dict[str, list[Any]] = {}
"""Reports by test: those of its set-up, call and teardown."""


def pytest_collection_finish() -> None:
    """Write down the imported libraries for the next session's parent, `tools/mutant_server.py`."""
    files = {
        name: getattr(module, "__dict__", {}).get("__file__")
        for name, module in sys.modules.items()
    }
    names = [name for name, file in files.items() if str(file).startswith(SITE_PACKAGES)]
    with open(ROOT + LIBRARIES, "w") as libraries:
        libraries.write("\n".join(names))


def pytest_runtest_logstart(nodeid: str) -> None:
    if tracer is not None:
        tracer.begin_test(nodeid)
    append(
        PROGRESS,
        json.dumps({"test": nodeid, "outcome": "running", "clock": time.monotonic()}) + "\n",
    )


def pytest_runtest_logreport(report: Any) -> None:
    reports.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    row = {
        "test": nodeid,
        "outcome": next(
            (part.outcome for part in reports[nodeid] if part.outcome != "passed"), "passed"
        ),
        "seconds": round(sum(part.duration for part in reports[nodeid]), 3),
        "ranks": any("distributed" in part.keywords for part in reports[nodeid]),
    }
    append(PROGRESS, json.dumps(row) + "\n")
