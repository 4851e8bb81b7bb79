"""Small mistakes in a project of two files, and what its tests make of them."""

from __future__ import annotations

import ast
import builtins
import fcntl
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import matrix
from tools import mutants
from tools.mutant_judge import (
    COUNTED,
    Judge,
    Record,
    affordable,
    applied,
    record_tests,
    write_source,
)
from tools.mutant_recorder import MAKE_PROBES, module_with_probes
from tools.mutant_sessions import VARIABLE, Sessions, make_copy
from tools.mutants import attributes_beside, candidates_of

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


def in_fixture(low: int, high: int) -> list[int]:
    return [low]


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
    assert wiring.negate(False) == "few"


def test_attributes_that_are_equal():
    assert wiring.attribute(wiring.Message(version=1, step=1)) == 1


def test_endless():
    assert wiring.endless(3) == "done"


@pytest.mark.distributed
def test_in_child():
    assert wiring.in_child(1, 2) == 1


@pytest.fixture(scope="module", params=[0, 1])
def shared(request):
    return wiring.in_fixture(1, request.param)


def test_the_first_that_shares_a_fixture(shared):
    assert shared


def test_the_second(shared):
    assert shared[0] == 1


@pytest.mark.parametrize("shared", [[1]])
def test_of_the_name_alone(shared):
    assert shared


def test_without_it():
    assert wiring.joined("a", "b") == "a,b"
"""
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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
"""Outcomes of mutants that only one function has, by kind and old text."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a package and its tests.

    Its sessions import none of the pytest plugins that are installed."""
    for name, setting in NO_PLUGINS.items():
        monkeypatch.setenv(name, setting)
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
    for command in (
        ("init", "--quiet"),
        ("add", "."),
        (*author, "commit", "--quiet", "--message", "Made"),
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def changes(source: str) -> set[tuple[str, str, str]]:
    """Kind, old and new text of the candidates of a file, whatever their types are."""
    attributes = attributes_beside([source])
    groups = candidates_of("made/wiring.py", ast.parse(source), attributes)
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


def test_a_probe_says_which_lines_are_executed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''"""Text"""
from __future__ import annotations
import os

class Rule:
    """Text"""
    name: str = "a"

    def value(
        self, number
    ):
        """Text"""
        total = 0
        if number:
            return 1
        elif total:
            total = 2
        for _ in range(number):
            total += 1
        match number:
            case 5:
                total = 5
        try:
            return total
        finally:
            os.sync()

RULES = [
    lambda number: (
        number
        + 1
    ),
]
'''
    seen: list[list[tuple[int, int]]] = []

    class Seen:
        def __init__(self, lines: list[list[tuple[int, int]]]) -> None:
            self.lines = lines

        def __getitem__(self, index: int) -> int:
            seen.append(self.lines[index])
            return 0

    def probes_of(file: str, lines: list[list[tuple[int, int]]]) -> tuple[Any, ...]:
        assert file == "made/rule.py"
        return Seen(lines), [0], None

    code = compile(module_with_probes(ast.parse(source), "made/rule.py"), "made/rule.py", "exec")
    without_recorder: dict[str, Any] = {}
    exec(code, without_recorder)
    assert without_recorder["Rule"]().value(1) == 1 and without_recorder["RULES"][0](1) == 2

    monkeypatch.setattr(builtins, MAKE_PROBES, probes_of, raising=False)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["__doc__"] == "Text" and names["Rule"].value.__doc__ == "Text"
    assert seen == [[(3, 3), (5, 7), (9, 11), (28, 29), (33, 33)]]
    seen.clear()
    assert names["Rule"]().value(0) == 0
    assert seen == [
        [(13, 14)],
        [(16, 16)],
        [(18, 18)],
        [(20, 20)],
        [(23, 23)],
        [(24, 24)],
        [(26, 26)],
    ]
    seen.clear()
    assert names["RULES"][0](1) == 2
    assert seen == [[(30, 31)]]


@pytest.fixture
def recorded(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the record of all tests of the project."""
    monkeypatch.chdir(project)
    work = project / "build/mutants/now"
    work.mkdir(parents=True)
    record_tests(work, COUNTED, [])
    return work


def mutant_of(function: str, new: str) -> dict[str, Any]:
    groups = candidates_of("made/wiring.py", ast.parse(WIRING), {})
    rows = [candidate[0] for group in groups for candidate in group]
    (row,) = [row for row in rows if row["function"] == function and row["new"] == new]
    return row


def test_a_mutant_meets_the_tests_that_see_its_line_also_in_a_process_that_ends_at_once(
    recorded: Path,
) -> None:
    record = Record(recorded, ["made/wiring.py"])
    folder = make_copy(recorded / "copy-0")
    both = record.tests_of(mutant_of("negate", "not is_many"))
    assert {row["test"].split("::")[1] for row in both} == {"test_all", "test_bound_far_away"}

    with Sessions(folder) as sessions:
        judge = Judge(sessions, set(), set())

        def outcome(function: str, new: str) -> tuple[str, str | None]:
            mutant = mutant_of(function, new)
            row = judge.judge(mutant, record.tests_of(mutant), 100.0)
            return row["outcome"], row.get("test")

        assert outcome("wired_in_child", "high") == (
            "noticed",
            "tests/test_wiring.py::test_in_child",
        )
        assert outcome("name", "high") == ("noticed", "tests/test_wiring.py::test_all")
        assert outcome("bound", "count >= 3") == ("survived", None)
        assert outcome("nobody_asks", "high") == ("not covered", None)
        assert outcome("in_fixture", "high") == (
            "noticed",
            "tests/test_wiring.py::test_the_second[0]",
        )
    sharing = record.tests_of(mutant_of("in_fixture", "high"))
    assert {row["test"].split("::")[1] for row in sharing} == {
        f"test_the_{name}[{number}]"
        for name in ("first_that_shares_a_fixture", "second")
        for number in (0, 1)
    }
    assert (folder / "made/wiring.py").read_text() == WIRING


CONFTEST = """import os, sys
with open("at-start", "a") as file:
    print(*(name in sys.modules for name in ("yaml", "made.wiring")), file=file)
WITH_PARENT = "yaml" in sys.modules
import yaml
from made import wiring
"""
PICKY = """import subprocess, sys, time
import conftest
from made import wiring


def test_name_in_a_new_process():
    assert not conftest.WITH_PARENT and wiring.name(1, 2) == 1


def test_endless():
    sleep = "import time; open('begun', 'w'); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    time.sleep(1000)
"""


@pytest.fixture
def sessions(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    """Sessions of tests that notice what their process had imported before it."""
    monkeypatch.chdir(project)
    folder = make_copy(project / "build/mutants/copy")
    (folder / "tests/conftest.py").write_text(CONFTEST)
    (folder / "tests/test_picky.py").write_text(PICKY)
    with Sessions(folder) as test_sessions:
        yield test_sessions


NEW = "tests/test_picky.py::test_name_in_a_new_process"


def test_a_forked_session_has_the_libraries_of_the_one_before_and_no_module_of_the_project(
    sessions: Sessions,
) -> None:
    statuses = [sessions.run([NEW], forked) for forked in (True, True, False)]
    assert (sessions.folder / "at-start").read_text().split("\n")[:-1] == [
        "False False",
        "True False",
        "False False",
    ]
    assert statuses == [0, 1, 0], "the second one is told by the test itself"


def test_a_test_that_does_not_bear_to_be_forked_gets_a_new_process(sessions: Sessions) -> None:
    tests = [
        {"test": NEW, "seconds": 0.1, "ranks": False, "other": False},
        {"test": "tests/test_wiring.py::test_all", "seconds": 0.1, "ranks": False, "other": True},
    ]
    tests = [test | {"fixtures": {}} for test in tests]
    judge = Judge(sessions, set(), set())
    bound = mutant_of("bound", "count >= 3")
    name = mutant_of("name", "high")
    rows = [judge.judge(mutant, tests, 100.0) for mutant in (bound, bound, name)]
    assert [row["outcome"] for row in rows] == ["survived", "survived", "noticed"]
    assert rows[1]["tests"] == 2 and rows[1]["left"] == 0
    assert rows[2]["test"] == "tests/test_wiring.py::test_all", "forked tests come first"


@pytest.mark.parametrize("forked", [True, False])
def test_no_process_is_left_of_a_session_that_hangs(sessions: Sessions, forked: bool) -> None:
    begun = sessions.folder / "begun"
    status = sessions.run(["tests/test_picky.py::test_endless"], forked, hangs=begun.exists)
    assert status is None and begun.exists()
    marked = {VARIABLE: str(sessions.folder)}.items()
    pids = [
        process.pid
        for process in psutil.process_iter(["environ"])
        if marked <= (process.info["environ"] or {}).items()
    ]
    assert len(pids) == 1, "the server alone"
    assert sessions.run(["tests/test_wiring.py::test_all"], forked) == 0


def test_tests_come_in_the_order_in_which_they_are_worth_their_time(tmp_path: Path) -> None:
    other_tests = "tests/test_run.py::"
    own_tests = "tests/a/test_x.py::"
    tests = {
        f"{own_tests}slow": (9.0, False),
        f"{own_tests}ranks": (1.0, True),
        f"{own_tests}quick": (2.0, False),
        f"{own_tests}failed": (1.0, False),
        f"{other_tests}quick": (1.0, False),
        f"{other_tests}sees_much": (1.0, False),
        f"{other_tests}alone": (30.0, False),
        f"{other_tests}shares": (0.0, False),
        f"{other_tests}shares_too": (0.0, False),
        "tests/b/test_y.py::same_name": (3.0, False),
    }
    rows = [
        {
            "test": name,
            "seconds": seconds,
            "ranks": ranks,
            "fixtures": ["fixture"] if "shares" in name else [],
            "outcome": "passed" if "failed" not in name else "failed",
        }
        for name, (seconds, ranks) in tests.items()
    ]
    rows.append({"fixture": "fixture", "seconds": 40.0})
    (tmp_path / "progress").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = "rlmath/a/y.py"
    lines = [f"7\t7\t{file}\t{name}\n" for name in tests]
    lines += [f"0\t8\tb.py\t{other_tests}sees_much\n"]
    lines += ["garbage\n", f"9\t9\t{file}\xff\n"]  # a test that writes into every open file
    (tmp_path / "lines").write_text(
        "".join([*lines, f"3\t3\t{file}\t{own_tests}quick\n", f"5\t5\t{file}\t\n"]),
        encoding="latin-1",
    )
    record = Record(tmp_path, [file])

    def names(line: int, end_line: int, statement_line: int) -> list[str]:
        mutant = {
            "file": file,
            "line": line,
            "end_line": end_line,
            "statement_line": statement_line,
        }
        return [row["test"] for row in record.tests_of(mutant)]

    all_tests = [
        "tests/b/test_y.py::same_name",
        f"{own_tests}quick",
        f"{own_tests}slow",
        f"{own_tests}ranks",
        f"{other_tests}quick",
        f"{other_tests}sees_much",
        f"{other_tests}shares",
        f"{other_tests}shares_too",
        f"{other_tests}alone",
    ]
    assert names(7, 7, 7) == all_tests
    assert names(2, 3, 1) == [f"{own_tests}quick"]
    assert names(8, 8, 7) == all_tests
    assert names(5, 5, 5) == all_tests, "a line that runs as modules are imported"
    assert names(9, 9, 9) == []


def test_no_bytecode_of_a_mutant_is_left(tmp_path: Path) -> None:
    file = tmp_path / "wiring.py"
    write_source(file, "x = 1\n")
    compiled = Path(py_compile.compile(str(file)))
    neighbour = compiled.with_name("wiring_two.cpython-311.pyc")
    neighbour.write_bytes(compiled.read_bytes())
    write_source(file, "x = 2\n")
    assert list(compiled.parent.iterdir()) == [neighbour], "of one size, and perhaps of one second"


def test_a_test_that_is_too_long_leaves_the_time_to_others() -> None:
    tests = [
        {"test": name, "seconds": seconds, "fixtures": {}}
        for name, seconds in (("a", 3.0), ("b", 9.0), ("c", 7.0), ("d", 1.0))
    ]
    assert [row["test"] for row in affordable(tests, 10.0)] == ["a", "c"]
    assert [row["test"] for row in affordable(tests, 1.0)] == ["a"]


def test_a_shared_fixture_takes_its_time_once() -> None:
    tests = [
        {"test": name, "seconds": 1.0, "fixtures": {f"fixture {fixture}": 5.0}}
        for name, fixture in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    assert [row["test"] for row in affordable(tests, 8.0)] == ["a", "c"]


def run_tool(project: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines that it prints, and the table."""
    command = [sys.executable, str(REPOSITORY / "tools/mutants.py"), *arguments]
    process = subprocess.run(
        command, cwd=project, env=ENVIRONMENT | NO_PLUGINS, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return rows, process.stdout[process.stdout.find("| package") :]


@pytest.fixture
def refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that runs the tool with arguments that it refuses, and returns what it says."""
    monkeypatch.chdir(project)

    def refuse(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mutants.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            mutants.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refuse


def test_a_name_without_python_files_is_refused_in_a_line(
    refused: Callable[..., str], project: Path
) -> None:
    (project / "made/new.py").write_text("")
    for name in ("made/nofile.py", "made/new.py", "build"):
        line = f'mutants.py: "{name}" is no Python file of HEAD, and no folder with one\n'
        assert refused("made", name) == line


def test_a_second_one_beside_it_is_refused(refused: Callable[..., str], project: Path) -> None:
    """It would remove the copies in which the first one works."""
    head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip()
    work = project / "build/mutants" / head
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expected = f"mutants.py: another one works in {work}: wait for it, or stop it\n"
        assert refused("made") == expected


def test_records_of_other_clones_are_merged(refused: Callable[..., str], project: Path) -> None:
    head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip()
    parts = [project / name / head for name in ("one", "two")]
    for part in parts:
        part.mkdir(parents=True)
        (part / "lines").write_text(f"7\t7\tmade/wiring.py\t{part}::test\n")
        row = {"test": f"{part}::test", "seconds": 1.0, "fixtures": []}
        row |= {"ranks": False, "outcome": "passed"}
        (part / "progress").write_text(json.dumps(row) + "\n")
    foreign = shutil.copytree(parts[0], project / "one/0123456789ab")
    assert refused("--merge", *map(str, parts), str(foreign)) == (
        f'mutants.py: --merge needs a folder "{head}" with a record, got "{foreign}"\n'
    )
    rows, _ = run_tool(project, "--merge", *map(str, parts))
    assert rows == []
    record = Record(project / "build/mutants" / head, ["made/wiring.py"])
    mutant = {"file": "made/wiring.py", "line": 7, "end_line": 7, "statement_line": 7}
    assert [row["test"] for row in record.tests_of(mutant)] == [f"{part}::test" for part in parts]


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
    remaining_rows = rows[:-3]
    removed_rows = rows[-3:]
    results.write_text("".join(json.dumps(row) + "\n" for row in remaining_rows))
    survivor = next(row for row in remaining_rows if row["outcome"] == "survived")
    (project / "tools").mkdir()
    equal = {name: survivor[name] for name in ("file", "function", "kind", "old", "new")}
    (project / mutants.EQUAL).write_text(
        json.dumps(equal | {"reason": "the bound is never met"}) + "\n"
    )
    new_rows, table = run_tool(project, *arguments)
    unclocked = [
        {name: cell for name, cell in row.items() if name != "seconds"}
        for row in (*new_rows, *removed_rows)
    ]
    assert sorted(unclocked[:3], key=str) == sorted(unclocked[3:], key=str)
    noticed = sum(row["outcome"] in ("noticed", "limit") for row in rows)
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")]
    assert (
        cells[1] == "made/wiring.py"
        and cells[-6] == f"{noticed}/{len(rows) - 1}"
        and cells[-2] == "1"
    )
