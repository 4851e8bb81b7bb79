"""Recorder of the tests that see a line: probes in the project's modules, and a plugin for pytest.

The plugin says which test runs, or which fixture that tests share; the probes which statements.

`tools/mutants.py` puts this file into a copy of the project as `sitecustomize.py`, which Python
imports when it starts: so do the ranks, programs and workers that tests start, whose PYTHONPATH
begins with the copy. There every module of the project is compiled with a probe before each run of
statements that are executed together. Libraries stay as they are, so that a recorded session takes
hardly longer than any other. The test that runs is named in a page of memory that all processes
share: ranks live on from test to test, and an environment that was copied before a test does not
name it. Lines are written down the first time a process sees them in a test: processes that are
killed, or that end with os._exit, lose nothing.

The package `coverage` is not used: it keeps what a process saw until its end, which reward workers,
fork servers and ranks that are killed never reach, and it asks for the test's name when a process
starts. A trace function (`sys.settrace`) would be asked for every function of every library.

Where the folder has no page, there are no probes, and the plugin alone works.
"""

import ast
import builtins
import contextlib
import json
import mmap
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
WITHOUT_PROBES = (f"{ROOT}tests{os.sep}", f"{ROOT}.", __file__)
"""Beginnings of paths whose modules get no probes: tests, environments, this file."""
PAGE = ".mutants/page"
"""File below the root: the number of the test that runs, its name, and zeros."""
LINES = ".mutants/lines"
PROGRESS = ".mutants/progress"
PAGE_BYTES = 1024
NUMBER_BYTES = 8
LIBRARIES = ".mutants/libraries"
SITE_PACKAGES = sysconfig.get_path("purelib") + os.sep
MAKE_PROBES = "_mutant_probes"
"""Name of `Recorder.probes_of` among the builtins."""
SETUP = """
import builtins as _builtins
_no_probes = lambda file, lines: ([0] * len(lines), [0], None)
_last_test_of_probe, _running_test, _pass_probe = getattr(
    _builtins, {make_probes!r}, _no_probes
)({file!r}, {lines!r})
"""
"""First statements of a module with probes.

A process whose environment was built from nothing has no recorder, but finds what was compiled."""
PROBE = "_last_test_of_probe[{index}] == _running_test[0] or _pass_probe({index})"
"""True, and quick where the running test has passed it before."""
Range = tuple[int, int]
"""The first and the last of consecutive lines."""
COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
BLOCKS = ("body", "orelse", "finalbody")
compile_as_before = compile


# ---------------------------------------------------------------- probes in a module


class Probes:
    """Puts probes into the syntax tree of a module."""

    def __init__(self) -> None:
        self.lines: list[set[int]] = []
        """The lines that are executed with each probe."""

    def with_probes(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A block with a probe before each run of statements that are executed together.

        A run ends with the head of a compound statement, which may leave the block."""
        block: list[ast.stmt] = []
        index: int | None = None
        for statement in statements:
            if index is None and not stands_first(statement):
                index = self._add()
                block.append(ast.copy_location(ast.Expr(probe(index)), statement))
            if index is not None:
                self.lines[index] |= executed_lines(statement)
            self._visit(statement)
            block.append(statement)
            if isinstance(statement, COMPOUND):
                index = None
        return block

    def _add(self) -> int:
        self.lines.append(set())
        return len(self.lines) - 1

    def _visit(self, node: ast.AST) -> None:
        """Put probes into the blocks and lambdas below a node; a class's own block gets none."""
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            if name in BLOCKS and children is value and not isinstance(node, ast.ClassDef):
                setattr(node, name, self.with_probes(children))
            else:
                for child in children:
                    if isinstance(child, ast.AST):
                        self._visit(child)
        if isinstance(node, ast.Lambda):
            index = self._add()
            self.lines[index] |= lines_of(node.body)
            both = ast.BoolOp(ast.And(), [probe(index), node.body])
            node.body = ast.copy_location(both, node.body)


def probe(index: int) -> ast.expr:
    return ast.parse(PROBE.format(index=index), mode="eval").body


def stands_first(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring or has to stand before all others."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def executed_lines(statement: ast.stmt) -> set[int]:
    """The lines of a statement without its blocks and the later lines of its lambdas.

    Lines between two blocks, of `except` and `case`, are nobody's."""
    if isinstance(statement, ast.ClassDef):
        lines = head_lines(statement)
        return lines.union(*(executed_lines(child) for child in statement.body))
    if isinstance(statement, ast.Match):
        return set(range(statement.lineno, statement.cases[0].pattern.lineno))
    if hasattr(statement, "body"):
        return head_lines(statement)
    lambdas = [node for node in ast.walk(statement) if isinstance(node, ast.Lambda)]
    return lines_of(statement).difference(*(lines_of(node) - {node.lineno} for node in lambdas))


def head_lines(statement: Any) -> set[int]:
    """The lines of a compound statement before its first block, decorators included."""
    first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))
    return set(range(first, max(statement.body[0].lineno, first + 1)))


def ranges(lines: Iterable[int]) -> list[Range]:
    """The ranges that hold these lines and no others."""
    line_ranges: list[Range] = []
    for line in sorted(lines):
        if line_ranges and line_ranges[-1][1] == line - 1:
            line_ranges[-1] = (line_ranges[-1][0], line)
        else:
            line_ranges.append((line, line))
    return line_ranges


def module_with_probes(tree: ast.Module, file: str) -> ast.Module:
    """The tree of a module of the project with probes."""
    probes = Probes()
    body = probes.with_probes(tree.body)
    lines = list(map(ranges, probes.lines))
    setup = ast.parse(SETUP.format(make_probes=MAKE_PROBES, file=file, lines=lines)).body
    first = next((i for i, statement in enumerate(body) if not stands_first(statement)), len(body))
    tree.body = [*body[:first], *setup, *body[first:]]
    return ast.fix_missing_locations(tree)


def compile_with_probes(
    source: Any, filename: Any, mode: str, flags: int = 0, *options: Any, **named: Any
) -> Any:
    """`compile`, which puts probes into modules of the project, whatever loader reads them."""
    path = os.fsdecode(filename)
    is_project = path.startswith(ROOT) and not path.startswith(WITHOUT_PROBES)
    if is_project and mode == "exec" and not flags & ast.PyCF_ONLY_AST:
        if not isinstance(source, ast.AST):
            source = compile_as_before(
                source, path, mode, flags=ast.PyCF_ONLY_AST, dont_inherit=True
            )
        source = module_with_probes(source, path.removeprefix(ROOT))
    return compile_as_before(source, filename, mode, flags, *options, **named)


# ---------------------------------------------------------------- what the probes say


class Recorder:
    """Writes down which test passes a probe."""

    def __init__(self) -> None:
        with open(ROOT + PAGE, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._number = memoryview(self._page)[:NUMBER_BYTES].cast("Q")
        """How many tests have begun."""

    def probes_of(
        self, file: str, lines: Sequence[Sequence[Range]]
    ) -> tuple[list[int], memoryview, Callable[[int], bool]]:
        """What the probes of a module use.

        These are, by probe, the number of the last test that passed it; the number of the running
        test; and what to call where the two differ."""
        seen = [-1] * len(lines)

        def passed(index: int) -> bool:
            seen[index] = self._number[0]
            test = self._page[NUMBER_BYTES:].rstrip(b"\0").decode(errors="replace")
            rows = (f"{first}\t{last}\t{file}\t{test}\n" for first, last in lines[index])
            append(LINES, "".join(rows))
            return True

        return seen, self._number, passed

    def begin(self, name: str) -> None:
        """Tell all processes which test runs, or which fixture is set up."""
        self._page[NUMBER_BYTES:] = name.encode()[: PAGE_BYTES - NUMBER_BYTES].ljust(
            PAGE_BYTES - NUMBER_BYTES, b"\0"
        )
        self._number[0] += 1


def append(name: str, row: str) -> None:
    """Add short rows at once, beside other processes that do so.

    The file is opened each time: workers close what they have open, and its number is given to
    something else. A worker that may open or write nothing adds none."""
    with contextlib.suppress(OSError), open(ROOT + name, "ab", buffering=0) as file:
        file.write(row.encode())


recorder = Recorder() if os.path.exists(ROOT + PAGE) else None
if recorder is not None:
    setattr(builtins, MAKE_PROBES, recorder.probes_of)
    builtins.compile = compile_with_probes


# -------------------------------------------------------------- the plugin: pytest -p sitecustomize

reports: dict[str, list[Any]] = {}
"""Reports by test: those of its set-up, call and teardown."""
shared_fixtures: dict[Any, str] = {}
"""The last set-up of each fixture that tests share, by its definition."""
fixtures_of: dict[str, set[str]] = {}
"""The set-ups of shared fixtures that a test uses."""
running: list[str] = []
"""The test that runs, and the shared fixtures that are being set up for it."""
setup_seconds: list[float] = []
"""Seconds of the set-ups of shared fixtures since the running test began."""


def pytest_collection_finish() -> None:
    """Write down the imported libraries for the next session's parent, `tools/mutant_server.py`."""
    files = {
        name: getattr(module, "__dict__", {}).get("__file__")
        for name, module in sys.modules.items()
    }
    names = [name for name, file in files.items() if str(file).startswith(SITE_PACKAGES)]
    with open(ROOT + LIBRARIES, "w") as libraries:
        libraries.write("\n".join(names))


def begin(names: Sequence[str]) -> None:
    """What runs now is the last of these names."""
    running[:] = names
    if recorder is not None:
        recorder.begin(running[-1])


def pytest_runtest_logstart(nodeid: str) -> None:
    begin([nodeid])
    setup_seconds.clear()
    append(
        PROGRESS,
        json.dumps({"test": nodeid, "outcome": "running", "clock": time.monotonic()}) + "\n",
    )


class SharedFixtures:
    """What the set-up of a shared fixture runs is seen by every test that uses the fixture.

    The first of them alone would see it otherwise."""

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function" or not running:
            return (yield)
        parameter = getattr(request, "param", "")
        name = f"fixture {request.node.nodeid}::{fixturedef.argname}[{parameter!r}]"
        shared_fixtures[fixturedef] = name
        fixtures_of.setdefault(running[0], set()).add(name)
        begin([*running, name])
        started = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = round(time.monotonic() - started, 3)
            setup_seconds.append(seconds)
            begin(running[:-1])
            append(PROGRESS, json.dumps({"fixture": name, "seconds": seconds}) + "\n")


def pytest_configure(config: Any) -> None:
    import pytest  # not above: every process of the project imports this file

    wrapper = pytest.hookimpl(wrapper=True)
    wrapper(SharedFixtures.pytest_fixture_setup)
    config.pluginmanager.register(SharedFixtures())


def pytest_runtest_teardown(item: Any) -> None:
    """Keep which set-ups a test has used, those included that it has asked for by name."""
    definitions = item._request._fixture_defs.values()
    names = [shared_fixtures[fixture] for fixture in definitions if fixture in shared_fixtures]
    fixtures_of.setdefault(item.nodeid, set()).update(names)


def pytest_runtest_logreport(report: Any) -> None:
    reports.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    row = {
        "test": nodeid,
        "outcome": next(
            (part.outcome for part in reports[nodeid] if part.outcome != "passed"), "passed"
        ),
        "seconds": round(
            max(0.0, sum(part.duration for part in reports[nodeid]) - sum(setup_seconds)), 3
        ),
        "fixtures": sorted(fixtures_of.pop(nodeid, ())),
        "ranks": any("distributed" in part.keywords for part in reports[nodeid]),
    }
    append(PROGRESS, json.dumps(row) + "\n")
