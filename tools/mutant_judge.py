"""Which tests see a line, and what they make of a mutant in it: for `tools/mutants.py`."""

import json
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools import mutant_recorder
from tools.mutant_sessions import Sessions, make_copy

COUNTED = "not full and not gpu and not slurm"
"""Marks of the tests of `make test` and `make test-matrix`."""
COLLECTION = "(collection)"
"""Name in the place of a test's, where a session ends before the first one."""
FIXED_SECONDS = 0.05
"""Added to a test's when it is compared with others."""
RECORD = ("lines", "progress")
"""Files of the record."""
RECORDED_ROW = re.compile(r"(\d+)\t(\d+)\t([^\t]+)\t([^\t]*)\n")
"""First line, last line, file and test."""
HANGS_SECONDS = 20.0
"""A test hangs that runs so much longer than three times what it took when it was recorded."""
Row = Mapping[str, Any]
"""A mutant: file, function, line and column (in bytes) where the old text begins and ends, the
statement's line, kind, old and new text; later with its outcome."""


# ---------------------------------------------------------------- which tests see a line


def record_tests(work: Path, marks: str, paths: Sequence[str]) -> None:
    """Run tests with probes in the project's modules, and add what they saw to the record.

    Tests with ranks run beside the others."""
    copies = [make_copy(work / name) for name in ("record-0", "record-1")]
    for folder in copies:
        (folder / mutant_recorder.PAGE).write_bytes(bytes(mutant_recorder.PAGE_BYTES))
    selections = [
        ["-m", f"{COUNTED} and ({marks}) and {ranks}", *paths]
        for ranks in ("not distributed", "distributed")
    ]

    def run_in(folder: Path, selection: Sequence[str]) -> int | None:
        with Sessions(folder) as sessions:
            return sessions.run(selection)

    with ThreadPoolExecutor() as pool:
        print("pytest ended with status", *pool.map(run_in, copies, selections), flush=True)
    for folder in copies:
        add_record(work, folder / ".mutants")


def add_record(work: Path, part: Path) -> None:
    """Add a part's files to those of the record; a part in which no test ran has none."""
    for name in RECORD:
        if (part / name).exists():
            with open(work / name, "ab") as record_file:
                record_file.write((part / name).read_bytes())


class Record:
    """The record of which tests see a line of files."""

    def __init__(self, work: Path, files: Collection[str]) -> None:
        progress = read_rows(work / "progress")
        seconds = {row["fixture"]: row["seconds"] for row in progress if "fixture" in row}
        self._tests = {
            row["test"]: row | {"fixtures": {name: seconds[name] for name in row["fixtures"]}}
            for row in progress
            if row.get("outcome") == "passed"
        }
        self._lines: dict[str, dict[int, set[str]]] = {file: {} for file in files}
        self._lines_seen: Counter[str] = Counter()
        with open(work / "lines", errors="replace") as lines:
            for row in lines:
                if not (match := RECORDED_ROW.fullmatch(row)):
                    continue  # of a hostile test, which writes into every file that is open
                first, last, file, test = match.groups()
                seen = range(int(first), int(last) + 1)
                self._lines_seen[test] += len(seen)
                for line in seen if file in files else ():
                    self._lines[file].setdefault(line, set()).add(test)

    def tests_of(self, mutant: Row) -> list[Row]:
        """The tests that see a mutant's lines, else its statement's, the most promising first.

        Those of its package come first, those without ranks before those with ranks, and cheap ones
        that see few lines before the others; tests that share a fixture share its time. A line
        that runs while modules are imported, for no test, is seen by all tests that see its
        file."""
        lines = self._lines[mutant["file"]]
        names = set().union(
            *(lines.get(line, ()) for line in range(mutant["line"], mutant["end_line"] + 1))
        )
        names = names or lines.get(mutant["statement_line"], set())
        names = set().union(*lines.values()) if "" in names else names
        rows = [
            row | {"other": not is_of_package(name, mutant["file"])}
            for name, row in self._tests.items()
            if name in names or not names.isdisjoint(row["fixtures"])
        ]
        users = Counter(name for row in rows for name in row["fixtures"])

        def price(row: Row) -> float:
            shares = (seconds / users[name] for name, seconds in row["fixtures"].items())
            seconds = FIXED_SECONDS + row["seconds"] + sum(shares)
            return seconds * self._lines_seen_with_fixtures(row)

        return sorted(rows, key=lambda row: (row["other"], row["ranks"], price(row), row["test"]))

    def _lines_seen_with_fixtures(self, test: Row) -> int:
        return sum(self._lines_seen[name] for name in (test["test"], *test["fixtures"]))


def seconds_alone(test: Row) -> float:
    """The seconds of a test that runs without those that share its fixtures."""
    return test["seconds"] + sum(test["fixtures"].values())


def is_of_package(test: str, file: str) -> bool:
    """Whether a test is in the folder of a file's package, or in a module named after the file."""
    module = Path(test.split("::")[0])
    packages = set(Path(file).parts[1:-1])
    return not packages.isdisjoint(module.parts[1:-1]) or module.stem == f"test_{Path(file).stem}"


# ---------------------------------------------------------------- mutants


def affordable(tests: Iterable[Row], limit: float) -> list[Row]:
    """The first tests that there is time for, and one in any case.

    A fixture that several of them share is set up once."""
    chosen: list[Row] = []
    fixtures: dict[str, float] = {}
    seconds = 0.0
    for test in tests:
        all_fixtures = fixtures | test["fixtures"]
        total = seconds + test["seconds"] + sum(all_fixtures.values())
        if not chosen or total <= limit:
            chosen.append(test)
            fixtures = all_fixtures
            seconds += test["seconds"]
    return chosen


class Judge:
    """Runs tests in a copy of the project with mutants.

    `sound` has the arguments of forked sessions that pass without a mutant, and `unsound` the tests
    that do not and need a new process."""

    def __init__(self, sessions: Sessions, sound: set[tuple[str, ...]], unsound: set[str]) -> None:
        self._sessions = sessions
        self._progress = sessions.folder / mutant_recorder.PROGRESS
        self._sound = sound
        self._unsound = unsound

    def judge(self, mutant: Row, tests: Sequence[Row], limit: float) -> dict[str, Any]:
        """A mutant's row with what its tests make of it."""
        if not tests:
            return {**mutant, "outcome": "not covered"}
        started = time.monotonic()
        pending = affordable(tests, limit)
        passed = 0
        verdict: Row = {}
        while pending and not verdict and (seconds := limit - (time.monotonic() - started)) > 0:
            turn = min(map(self._turn, pending))
            stage = [test for test in pending if self._turn(test) == turn]
            outcome, test = self._outcome(mutant, stage, seconds)
            if outcome == "passed":
                pending = [test for test in pending if test not in stage]
                passed += len(stage)
            elif outcome == "time":
                passed += sum(
                    "outcome" in row and "seconds" in row for row in read_rows(self._progress)
                )
                break
            elif turn[0] or self._is_sound(test, stage):
                verdict = {"outcome": outcome, "test": test}
        verdict = verdict or {"outcome": "survived", "tests": passed, "left": len(tests) - passed}
        return {**mutant, **verdict, "seconds": round(time.monotonic() - started, 1)}

    def _turn(self, test: Row) -> tuple[bool, bool]:
        """Whether a test needs a new process, and whether it is of another package.

        Tests that have both in common run together."""
        return test["ranks"] or test["test"] in self._unsound, test["other"]

    def _outcome(self, mutant: Row, tests: Sequence[Row], seconds: float) -> tuple[str, str]:
        """The outcome of a session with a mutant, and the last test that began.

        It is "time" where `seconds` did not suffice."""
        file = self._sessions.folder / mutant["file"]
        source = file.read_text()
        write_source(file, applied(source, mutant))
        status = self._run(tests, seconds)
        write_source(file, source)
        test = self._last_row()["test"]
        if status is None:
            return "limit" if self._hangs(tests) else "time", test
        return "noticed" if status else "passed", test

    def _run(self, tests: Sequence[Row], seconds: float, options: Sequence[str] = ()) -> int | None:
        """The status of a session, forked if its tests can be.

        A forked one ends at once where a test hangs; others start ranks, which may take their time.
        """
        self._progress.write_text("")
        arguments = ["-x", *options, *(test["test"] for test in tests)]
        if self._turn(tests[0])[0]:
            return self._sessions.run(arguments, False, seconds)
        return self._sessions.run(arguments, True, seconds, hangs=lambda: self._hangs(tests))

    def _last_row(self) -> Row:
        """What is said last of the session's tests."""
        rows = [row for row in read_rows(self._progress) if "test" in row]
        return (rows or [{"test": COLLECTION}])[-1]

    def _hangs(self, tests: Sequence[Row]) -> bool:
        """Whether a test runs for much longer than it should."""
        row = self._last_row()
        usual = sum(seconds_alone(test) for test in tests if test["test"] == row["test"])
        return time.monotonic() - row.get("clock", float("inf")) > HANGS_SECONDS + 3 * usual

    def _is_sound(self, name: str, tests: Sequence[Row]) -> bool:
        """Whether a test, or the collection of all, passes in a forked session without a mutant."""
        named = [test for test in tests if name in (test["test"], COLLECTION)]
        options = ["--collect-only"] if name == COLLECTION else []
        key = (*options, *(test["test"] for test in named))
        if key not in self._sound and self._run(named, float("inf"), options) == 0:
            self._sound.add(key)
        if key not in self._sound:
            self._unsound.update(test["test"] for test in named)
        return key in self._sound


def write_source(file: Path, text: str) -> None:
    """Write a source file, and remove what Python has compiled of it.

    Python knows the compiled file by the second of the change and the size, which may be the
    same."""
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def applied(source: str, row: Mapping[str, Any]) -> str:
    """A file's text with a mutant's mistake."""
    lines = source.encode().splitlines(keepends=True)
    text_before = b"".join(lines[: row["line"] - 1]) + lines[row["line"] - 1][: row["column"]]
    text_after = lines[row["end_line"] - 1][row["end_column"] :] + b"".join(
        lines[row["end_line"] :]
    )
    return f"{text_before.decode()}({row['new']}){text_after.decode()}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
