"""Small mistakes in a project of two files, and what its tests make of them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import matrix
from tools import mutants
from tools.mutants import applied, attributes_beside, candidates_of

WIRING = '''"""Wiring of every kind."""

import logging
import os
from dataclasses import dataclass
from itertools import chain

logger = logging.getLogger(__name__)


@dataclass
class Message:
    version: int
    step: int


def joined(first: str, second: str, by: str = ",") -> str:
    return f"{first}{by}{second}"


def default() -> str:
    return joined("a", "b", by="-")


def exchange(first: str, second: str) -> str:
    return joined(first, second)


def attribute(message: Message) -> int:
    return message.version


def name(low: int, high: int) -> int:
    return low


def part(low: list[int], high: list[int]) -> list[int]:
    return list(chain(low, high))


def carried(numbers: list[int]) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


def bound(count: int) -> bool:
    return count > 3


def negate(is_many: bool) -> str:
    return "many" if is_many else "few"


def endless(count: int) -> str:
    while count:
        count = count - 1
    return "done"


def in_child(low: int, high: int) -> int:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, bytes([wired_in_child(low, high)]))
        os._exit(0)
    os.wait()
    return os.read(reading, 1)[0]


def wired_in_child(low: int, high: int) -> int:
    return low


def nobody_asks(low: int, high: int) -> int:
    return low


def only_told(low: int, high: int) -> None:
    logger.info("%d of %d", low, high)
    if high < 0:
        raise ValueError(f"{high} is below 0", low)
'''
TESTS = """import pytest
from made import wiring


def test_all():
    assert wiring.default() == "a-b"
    assert wiring.exchange("a", "b") == "a,b"
    assert wiring.name(1, 2) == 1
    assert wiring.part([1], [2]) == [1, 2]
    assert wiring.carried([1, 2]) == 3
    assert wiring.negate(True) == "many"


def test_bound_far_away():
    assert wiring.bound(9) and not wiring.bound(0)


def test_attributes_that_are_equal():
    assert wiring.attribute(wiring.Message(version=1, step=1)) == 1


def test_endless():
    assert wiring.endless(3) == "done"


@pytest.mark.distributed
def test_in_child():
    assert wiring.in_child(1, 2) == 1
"""
OUTCOMES = {
    ("default", "joined('a', 'b', by='-')"): "noticed",
    ("exchange", "joined(first, second)"): "noticed",
    ("attribute", "message.version"): "survived",
    ("part", "chain(low, high)"): "noticed",
    ("carried", "total += number"): "noticed",
    ("bound", "count > 3"): "survived",
    ("negate", "is_many"): "noticed",
    ("carried", "count = count - 1"): "limit",
}
"""Of mutants that one function alone has, by kind and old text."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a package and its tests."""
    for name, text in (
        ("made/__init__.py", ""),
        ("made/wiring.py", WIRING),
        ("tests/test_wiring.py", TESTS),
        ("pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["distributed"]\n'),
        (".gitignore", "build/\n__pycache__/\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    author = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    for command in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "--message", "Made")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def changes(source: str) -> set[tuple[str, str, str]]:
    """Kind, old and new text of the candidates of a file, whatever their types are."""
    others = attributes_beside([source])
    groups = candidates_of("made/wiring.py", ast.parse(source), others)
    rows = [candidate[0] for group in groups for candidate in group]
    return {(row["kind"], row["old"], row["new"]) for row in rows}


def test_wiring_is_changed_in_every_kind_of_way() -> None:
    assert changes(WIRING) >= {
        ("default", "joined('a', 'b', by='-')", "joined('a', 'b')"),
        ("exchange", "joined('a', 'b', by='-')", "joined('-', 'b', by='a')"),
        ("exchange", "joined(first, second)", "joined(second, first)"),
        ("attribute", "message.version", "message.step"),
        ("name", "low", "high"),
        ("part", "chain(low, high)", "chain(high)"),
        ("carried", "total += number", "number"),
        ("bound", "count > 3", "count >= 3"),
        ("negate", "is_many", "not is_many"),
        ("negate", "count", "not count"),
    }


def test_sums_conditions_and_lists_lose_a_part() -> None:
    source = "def f(a, b, c):\n    return a + [b, c] if a and b or not c else a | b\n"
    assert {change[1:] for change in changes(source) if change[0] == "part"} == {
        ("a + [b, c]", "a"),
        ("a + [b, c]", "[b, c]"),
        ("[b, c]", "[b]"),
        ("[b, c]", "[c]"),
        ("a and b", "a"),
        ("a and b", "b"),
        ("a and b or not c", "a and b"),
        ("a and b or not c", "not c"),
        ("a | b", "a"),
        ("a | b", "b"),
    }


def test_no_call_loses_its_only_argument_unless_that_has_a_name() -> None:
    source = "def f(a):\n    return str(a), int(a, 8), open(mode=a)\n"
    assert {change[1:] for change in changes(source) if change[0] == "default"} == {
        ("int(a, 8)", "int(a)"),
        ("int(a, 8)", "int(8)"),
        ("open(mode=a)", "open()"),
    }


def test_what_is_only_told_checked_or_declared_is_not_changed() -> None:
    source = """def f(a: x.y, b: x.z) -> x.y:
    "a.b"
    logger.info("%s %s", a, b)
    self._logger.info(a, b)
    assert a.b == b.a, a
    c: x.z = f"{a.b}"
    raise ValueError(a, b)
"""
    assert changes(source) == set()


def test_a_mutant_replaces_its_text_alone() -> None:
    source = 'def f(a, b):\n    return g("ä", a,  # first\n             b.c), a\n'
    (row,) = [
        candidate[0]
        for group in candidates_of("f.py", ast.parse(source), {"c": {"d"}})
        for candidate in group
        if candidate[0]["new"] == "b.d"
    ]
    assert applied(source, row) == source.replace("b.c", "(b.d)")


@pytest.fixture
def recorded(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the record of all tests of the project."""
    monkeypatch.chdir(project)
    work = project / "build/mutants/now"
    work.mkdir(parents=True)
    mutants.record_tests(work, mutants.COUNTED, [])
    return work


def mutant_of(function: str, new: str) -> dict[str, Any]:
    groups = candidates_of("made/wiring.py", ast.parse(WIRING), {})
    rows = [candidate[0] for group in groups for candidate in group]
    (row,) = [row for row in rows if row["function"] == function and row["new"] == new]
    return row


def test_a_mutant_meets_the_tests_that_see_its_line_also_in_a_process_that_ends_at_once(
    recorded: Path,
) -> None:
    record = mutants.Record(recorded, ["made/wiring.py"])
    folder = mutants.make_copy(recorded / "copy-0")

    def outcome(function: str, new: str) -> tuple[str, str | None]:
        mutant = mutant_of(function, new)
        row = mutants.judge(folder, mutant, record.tests_of(mutant), 100.0)
        return row["outcome"], row.get("test")

    assert outcome("wired_in_child", "high") == ("noticed", "tests/test_wiring.py::test_in_child")
    assert outcome("name", "high") == ("noticed", "tests/test_wiring.py::test_all")
    assert outcome("bound", "count >= 3") == ("survived", None)
    assert outcome("nobody_asks", "high") == ("not covered", None)
    assert (folder / "made/wiring.py").read_text() == WIRING


def test_cheap_tests_come_first_and_those_with_ranks_last(tmp_path: Path) -> None:
    tests = {"slow": (9.0, False), "ranks": (1.0, True), "quick": (2.0, False), "failed": (1.0, False)}
    rows = [
        {"test": name, "seconds": seconds, "ranks": ranks, "outcome": "passed" if name != "failed" else name}
        for name, (seconds, ranks) in tests.items()
    ]
    (tmp_path / "progress").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"7\ta.py\t{name}\n" for name in ("slow", "quick", "ranks", "failed")]
    (tmp_path / "lines").write_text("".join([*lines, "3\ta.py\tquick\n", "5\ta.py\t\n"]))
    record = mutants.Record(tmp_path, ["a.py"])

    def names(line: int, end_line: int, statement_line: int) -> list[str]:
        mutant = {"file": "a.py", "line": line, "end_line": end_line, "statement_line": statement_line}
        return [row["test"] for row in record.tests_of(mutant)]

    assert names(7, 7, 7) == ["quick", "slow", "ranks"]
    assert names(2, 3, 1) == ["quick"]
    assert names(8, 8, 7) == ["quick", "slow", "ranks"]
    assert names(5, 5, 5) == ["quick", "slow", "ranks"], "a line that runs as modules are imported"
    assert names(9, 9, 9) == []


def run_tool(project: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines that it prints, and the table."""
    command = [sys.executable, str(REPOSITORY / "tools/mutants.py"), *arguments]
    done = subprocess.run(command, cwd=project, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows, done.stdout[done.stdout.find("| package") :]


def test_a_name_without_python_files_is_refused_in_a_line(project: Path) -> None:
    (project / "made/new.py").write_text("")
    for name in ("made/nofile.py", "made/new.py", "build"):
        ended = subprocess.run(
            [sys.executable, str(REPOSITORY / "tools/mutants.py"), "made", name],
            cwd=project,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr == f'mutants.py: "{name}" is no Python file of HEAD, and no folder with one\n'


@matrix
def test_the_tool_tells_what_is_noticed_and_goes_on_where_it_was_stopped(project: Path) -> None:
    if not mutants.PYRIGHT.exists():
        assert "CI" not in os.environ, "CI installs pyright: make venv-lint"
        pytest.skip("needs pyright: make venv-lint")
    arguments = ("made", "--number", "100", "--seed", "3", "--limit", "60")
    rows, _ = run_tool(project, *arguments)
    outcomes = {(row["kind"], row["old"]): row["outcome"] for row in rows}
    assert {key: outcomes[key] for key in OUTCOMES} == OUTCOMES
    assert {row["outcome"] for row in rows if row["function"] == "nobody_asks"} == {"not covered"}
    (child,) = [row for row in rows if row["function"] == "wired_in_child"]
    assert child["test"] == "tests/test_wiring.py::test_in_child"
    assert {row["old"] for row in rows if row["function"] == "only_told"} <= {"high", "high < 0"}

    (results,) = project.glob("build/mutants/*/results.jsonl")
    kept, stopped = rows[:-3], rows[-3:]
    results.write_text("".join(json.dumps(row) + "\n" for row in kept))
    survivor = next(row for row in kept if row["outcome"] == "survived")
    (project / "tools").mkdir()
    equal = {name: survivor[name] for name in ("file", "function", "kind", "old", "new")}
    (project / mutants.EQUAL).write_text(json.dumps(equal | {"reason": "the bound is never met"}) + "\n")
    again, table = run_tool(project, *arguments)
    unclocked = [
        {name: cell for name, cell in row.items() if name != "seconds"} for row in (*again, *stopped)
    ]
    assert sorted(unclocked[:3], key=str) == sorted(unclocked[3:], key=str)
    noticed = sum(row["outcome"] in ("noticed", "limit") for row in rows)
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")]
    assert cells[1] == "made/wiring.py" and cells[-6] == f"{noticed}/{len(rows) - 1}" and cells[-2] == "1"
