"""How many small mistakes in a package's wiring do its tests notice?

    make mutants FILES=rlmath/rollout N=100 SEED=1
    python tools/mutants.py rlmath/rollout --number 100 --seed 1
    python tools/mutants.py --record tests/rollout --marks "not distributed"    # only these tests see lines so far
    python tools/mutants.py --merge ../other/build/mutants/0123456789ab         # what another clone has recorded

A mutant replaces a node of a function's syntax tree. Whether its types let it pass is asked of
pyright: in a copy of the file that nobody runs, calls of `reveal_type` with the old and the new
expression stand before the node's statement. What is of another type or of an unknown one, has an
error or is never reached is no mutant. Neither mutmut nor cosmic-ray is used: they change
operators, constants and texts, and neither exchanges arguments, attributes or names of one type.

`tools/mutant_recorder.py` records which tests see a line: once for a commit, of all tests of `make
test` and `make test-matrix`, or of those that --record names, which adds to the record. A mutant
runs the tests that see its line until one fails: those of its package's folder before others, among
them first the cheap ones that see few lines, in forked sessions of pytest
(`tools/mutant_sessions.py`), and those with ranks last, in a new process. A test that fails in a
forked session has to pass there without the mistake. All happens in copies of HEAD in
build/mutants; what is not committed is not looked at. Results are a JSON line each; the same
command goes on where it was stopped.

Outcomes: "noticed" by a test; "limit", noticed by a test that does not end; "survived"; "not
covered", which no test sees; "equal", which tools/mutants_equal.jsonl lists with a reason. Where
the tests that see a line take longer than the limit, those of the package and the cheap ones run,
and "left" says how many did not.
"""

import argparse
import ast
import fcntl
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.mutant_judge import COUNTED, Judge, Record, Row, add_record, read_rows, record_tests
from tools.mutant_sessions import Sessions, end_processes, make_copy

PYRIGHT = Path(__file__).parents[1] / ".venv-lint/bin/basedpyright"
EQUAL = Path("tools/mutants_equal.jsonl")
RESULTS = "results.jsonl"
OUTCOMES = ("limit", "survived", "not covered", "equal")
KINDS = ("default", "exchange", "attribute", "name", "part", "carried", "bound", "negate")
"""An argument with a default left out; two arguments exchanged; an attribute, a local name replaced
by another; a part of a sum, union, chain, list or condition left out; a variable's new value not
kept; a comparison's bound moved by one; a condition negated."""
CHOICES = 12
"""Most replacements of one node that pyright is asked about."""
ASKED = 5
"""Nodes of each kind that pyright is asked about, for each mutant wanted: most nodes have no other
of their type."""
CHECKS = ("strict", "encoding")
"""Arguments that refuse what does not happen, or say what is so on every machine of ours."""
TELLING = re.compile(
    r"^(logger|logging|log|warnings)\.|_logger\.\w+$|\.add_argument$", re.IGNORECASE
)
"""What is called only to say something."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = (*FUNCTIONS, ast.ClassDef, ast.JoinedStr, ast.Raise, ast.Assert)
"""Nodes of a function's body that are left out: own bodies, texts, what only checks."""
NOT_TWICE = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)
"""What cannot be written a second time before its statement."""
WITH_NAMES = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)
"""Expressions with names of their own."""
STRICT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NO_VALUES = re.compile(
    r"Unknown|Unbound|^Any$|^Module\(|^type\[|^\(|^Overload\[|^Never$|^NoReturn$"
)
"""Types that pyright does not know, and those of what is no value."""

Probe = tuple[int, str]
"""An expression, and the id of the node where its type is asked: a statement, or an expression
inside it with names of its own."""
Candidate = tuple[Row, list[Probe]]
"""A mutant, if the expressions have one type."""


# ---------------------------------------------------------------- candidates of a file


def candidates_of(
    file: str, tree: ast.Module, others: Mapping[str, set[str]]
) -> Iterator[list[Candidate]]:
    """The candidates of a node and kind together, of all functions.

    `others` is from `attributes_beside`."""
    nodes = list(ast.walk(tree))
    callees = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    conditions = {
        id(test) for node in nodes for test in (getattr(node, "test", 0), *getattr(node, "ifs", ()))
    }
    for function in (node for node in nodes if isinstance(node, FUNCTIONS)):
        inner = [child for statement in function.body for child in ast.walk(statement)]
        names = {child.arg for child in ast.walk(function.args) if isinstance(child, ast.arg)}
        names |= {
            child.id
            for child in inner
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
        }
        chains = {
            ast.unparse(child)
            for child in inner
            if is_chain(child) and isinstance(child.ctx, ast.Load)
        }
        for node, place, statement in nodes_below(function, function, function):
            changes = list(
                changed_calls(node) if isinstance(node, ast.Call) else changed_operators(node)
            )
            if id(node) not in callees and isinstance(getattr(node, "ctx", None), ast.Load):
                changes += changed_names(node, names, chains, others)
            if isinstance(node, (ast.Assign, ast.AugAssign)) and function.name != "__init__":
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                changes.append(("carried", node.value, *targets, node.value))
            if id(node) in conditions:
                changes.append(
                    ("negate", ast.UnaryOp(ast.Not(), node), ast.Call(ast.Name("bool"), [node], []))
                )
            row = {
                "file": file,
                "function": function.name,
                "line": node.lineno,
                "column": node.col_offset,
                "end_line": node.end_lineno,
                "end_column": node.end_col_offset,
                "statement_line": statement.lineno,
                "old": ast.unparse(node),
            }
            for kind, group in itertools.groupby(changes, lambda change: change[0]):
                yield [
                    (
                        row | {"kind": kind, "new": ast.unparse(replacement)},
                        [
                            (id(place), ast.unparse(part))
                            for part in same_types or (node, replacement)
                        ],
                    )
                    for _, replacement, *same_types in group
                ]


def nodes_below(
    node: ast.AST, place: ast.AST, statement: ast.AST
) -> Iterator[tuple[Any, ast.AST, Any]]:
    """The nodes of a function's body that are wiring.

    Each has with it the place where types are asked, and its statement."""
    for child in node.body if isinstance(node, FUNCTIONS) else ast.iter_child_nodes(node):
        is_said = isinstance(child, ast.Call) and TELLING.search(ast.unparse(child.func))
        if is_said or isinstance(child, LEFT_OUT) or child is getattr(node, "annotation", None):
            continue
        is_statement = isinstance(child, ast.stmt)
        is_element = isinstance(node, WITH_NAMES) and isinstance(child, ast.expr)
        is_place = is_statement or is_element or child in getattr(node, "ifs", ())
        child_place = child if is_place else place
        child_statement = child if is_statement else statement
        if hasattr(child, "lineno") and not any(
            isinstance(part, NOT_TWICE) for part in ast.walk(child)
        ):
            yield child, child_place, child_statement
        yield from nodes_below(child, child_place, child_statement)


def is_chain(node: ast.AST) -> bool:
    """Whether this is a name with attributes: a.b.c."""
    return isinstance(node, ast.Attribute) and (
        is_chain(node.value) or isinstance(node.value, ast.Name)
    )


def attributes_beside(sources: Iterable[str]) -> dict[str, set[str]]:
    """The other attributes of the classes that have an attribute, by its name.

    They are the annotated ones and those of self."""
    neighbours: dict[str, set[str]] = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ClassDef):
            chains = (child for child in ast.walk(node) if is_chain(child))
            fields = {chain.attr for chain in chains if ast.unparse(chain.value) == "self"}
            fields |= {
                ast.unparse(child.target) for child in node.body if isinstance(child, ast.AnnAssign)
            }
            for name in fields:
                neighbours.setdefault(name, set()).update(fields - {name})
    return neighbours


# ---------------------------------------------------------------- changes of a node
# Kind, new expression, and the expressions that must have one type, where they are not the old and
# the new one.


def changed_calls(node: ast.Call) -> Iterator[tuple[Any, ...]]:
    """Arguments left out and exchanged."""
    names = [keyword.arg for keyword in node.keywords]
    kind = "part" if ast.unparse(node.func).endswith("chain") else "default"
    yield from ((kind, call) for call in without_each(node, "args"))
    shorter = zip(names, without_each(node, "keywords"), strict=True)
    yield from (("default", call) for name, call in shorter if name not in CHECKS)
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    for first, second in itertools.combinations(range(len(values)), 2):
        exchanged = list(values)
        exchanged[first], exchanged[second] = values[second], values[first]
        keywords = list(map(ast.keyword, names, exchanged[len(node.args) :]))
        call = ast.Call(node.func, exchanged[: len(node.args)], keywords)
        if ast.unparse(call) != ast.unparse(node) and ast.unparse(node.func) not in ("max", "min"):
            yield "exchange", call, values[first], values[second]


def changed_operators(node: ast.AST) -> Iterator[tuple[Any, ...]]:
    """Parts left out, and bounds moved."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.BitOr)):
        yield from (("part", node.left), ("part", node.right))
    elif isinstance(node, (ast.BoolOp, ast.List, ast.Set)):
        yield from (
            ("part", replacement)
            for replacement in without_each(node, node._fields[isinstance(node, ast.BoolOp)])
        )
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in STRICT:
        replacement = ast.Compare(
            node.left, [STRICT[type(node.ops[0])](), *node.ops[1:]], node.comparators
        )
        yield "bound", replacement, node.left, node.comparators[0], ast.Constant(0)


def changed_names(
    node: ast.AST, names: set[str], chains: set[str], others: Mapping[str, set[str]]
) -> Iterator[tuple[Any, ...]]:
    """Names and attributes replaced by others of their function or of the same record.

    `names` and `chains` are the function's, `others` the record's by attribute."""
    text = ast.unparse(node)
    if text in names:
        yield from (("name", ast.Name(replacement)) for replacement in sorted(names - {text, "_"}))
    elif is_chain(node):
        fields = {
            f"{ast.unparse(node.value)}.{attribute}" for attribute in others.get(node.attr, ())
        }
        yield from (
            ("attribute", ast.Name(replacement))
            for replacement in sorted((fields | chains) - {text})
        )


def without_each(node: ast.AST, name: str) -> list[Any]:
    """The node as often as a field has parts, each time without another one.

    The only one is left out where it has a name alone: nobody writes `str()` for `str(number)`."""
    fields = dict(ast.iter_fields(node))
    rests = itertools.combinations(fields[name], len(fields[name]) - 1) if fields[name] else ()
    return [
        type(node)(**{**fields, name: remaining_parts})
        for remaining_parts in rests
        if remaining_parts or name == "keywords"
    ][::-1]


# ---------------------------------------------------------------- types, and the sample


class WithCalls(ast.NodeTransformer):
    """Puts calls before the statements and expressions whose ids `calls` has.

    The expressions are inside of those that have names of their own."""

    def __init__(self, calls: Mapping[int, list[ast.expr]]) -> None:
        self._calls = calls

    def visit(self, node: ast.AST) -> Any:
        calls = self._calls.get(id(node), [])
        changed = self.generic_visit(node)
        if isinstance(node, ast.stmt):
            return [*map(ast.Expr, calls), changed]
        return ast.Subscript(ast.Tuple([*calls, changed]), ast.Constant(-1)) if calls else changed


def types_of(
    probes: Sequence[Probe], trees: Mapping[str, ast.Module], folder: Path
) -> dict[Probe, str]:
    """The types of expressions; "Unknown" of one with an error.

    The trees and the files are changed: `folder` is a copy of the project."""
    calls: dict[int, list[ast.expr]] = {}
    for number, (place, text) in enumerate(probes):  # an element of a list has no literal type
        call = ast.parse(f"reveal_type([{text}][0], expected_text='{number}')", mode="eval").body
        calls.setdefault(place, []).append(call)
    for file, tree in trees.items():
        (folder / file).write_text(
            ast.unparse(ast.fix_missing_locations(WithCalls(calls).visit(tree)))
        )
    answer = subprocess.run(
        [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", *trees],
        cwd=folder,
        stdout=subprocess.PIPE,
        check=False,
    ).stdout
    types: dict[Probe, str] = {}
    wrong: tuple[str, int] | None = None
    for file, line, _, severity, message in sorted(
        (row["file"], *row["range"]["start"].values(), row["severity"], row["message"])
        for row in json.loads(answer)["generalDiagnostics"]
    ):
        revealed = re.search(r'expected "(\d+)" but received "(.*)"', message, re.DOTALL)
        if revealed:  # comes after all else that is wrong with the expression
            types[probes[int(revealed[1])]] = "Unknown" if wrong == (file, line) else revealed[2]
        if severity == "error":
            wrong = None if revealed else (file, line)
    return types


def passes(candidate: Candidate, types: Mapping[Probe, str]) -> bool:
    """Whether the types let the mistake pass.

    A sum of texts is a text."""
    first_type, *other_types = (types.get(probe, "Unknown") for probe in candidate[1])
    is_excluded = NO_VALUES.search(first_type) or (
        candidate[0]["kind"] == "part" and first_type == "str"
    )
    return not is_excluded and other_types.count(first_type) == len(other_types)


def sampled_mutants(folder: Path, files: Sequence[str], number: int, seed: int) -> list[Row]:
    """Sample mutants of files of a copy of the project, evenly of every kind as far as it has some.

    A larger `number` begins with the same ones. The files are changed."""
    neighbours = attributes_beside(path.read_text() for path in sorted(folder.rglob("*.py")))
    trees = {file: ast.parse((folder / file).read_text()) for file in files}
    groups = [
        group for file, tree in trees.items() for group in candidates_of(file, tree, neighbours)
    ]
    by_kind: list[list[list[Candidate]]] = []
    for kind in KINDS:
        generator = random.Random(f"{seed} {kind}")
        of_kind = [group for group in groups if group[0][0]["kind"] == kind]
        drawn = generator.sample(of_kind, len(of_kind))[: number * ASKED]
        by_kind.append([generator.sample(group, min(CHOICES, len(group))) for group in drawn])
    asked = itertools.chain.from_iterable(itertools.chain.from_iterable(by_kind))
    types = types_of(list({probe: None for _, probes in asked for probe in probes}), trees, folder)
    rows = [
        [[candidate[0] for candidate in group if passes(candidate, types)][:1] for group in of_kind]
        for of_kind in by_kind
    ]
    turns = itertools.zip_longest(*map(itertools.chain.from_iterable, rows))
    return [row for turn in turns for row in turn if row is not None][:number]


def python_files(names: Sequence[str]) -> list[str]:
    """The Python files of HEAD that names of files and folders stand for.

    ValueError for a name that stands for none."""
    tracked = subprocess.check_output(
        ["git", "ls-tree", "-r", "--name-only", "HEAD"], text=True
    ).splitlines()
    files: list[str] = []
    for name in names:
        path = Path(os.path.relpath(name))
        inside = [
            file for file in tracked if file.endswith(".py") and Path(file).is_relative_to(path)
        ]
        if not inside:
            raise ValueError(f'"{name}" is no Python file of HEAD, and no folder with one')
        files += inside
    return files


# ---------------------------------------------------------------- outcomes


def judge_all(mutants: Iterator[Row], record: Record, work: Path, limit: float) -> None:
    """Judge mutants, two beside each other, and add a JSON line of each to the results."""
    copies = [make_copy(work / name) for name in ("copy-0", "copy-1")]
    sound: set[tuple[str, ...]] = set()
    unsound: set[str] = set()

    def judge_in_turn(folder: Path) -> None:
        with Sessions(folder) as sessions:
            judge = Judge(sessions, sound, unsound)
            for mutant in mutants:
                # With its end: `print` writes that by itself, and another thread's line may come
                # between.
                line = json.dumps(judge.judge(mutant, record.tests_of(mutant), limit)) + "\n"
                print(line, end="", file=results, flush=True)
                print(line, end="", flush=True)

    with ThreadPoolExecutor() as pool, open(work / RESULTS, "a") as results:
        try:
            list(pool.map(judge_in_turn, copies))
        finally:
            # of an interrupted mutant, whose processes are killed, nothing is written
            results.close()
            for folder in copies:
                end_processes(folder)


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a mutant from others, also where lines have moved."""
    return tuple(row[name] for name in ("file", "function", "kind", "old", "new"))


def table(rows: Iterable[Row]) -> str:
    """How many mutants are noticed of those that are not equal, by package and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        package = "/".join(row["file"].split("/")[:2])
        counts[package, row["outcome"]] += 1
        for kind in (row["kind"], "all") if row["outcome"] != "equal" else ():
            counts[package, kind] += 1
            counts[package, f"{kind} noticed"] += row["outcome"] in ("noticed", "limit")
    lines = [
        f"| package | {' | '.join((*KINDS, 'all', *OUTCOMES))} |",
        "|---" * (len(KINDS) + 6) + "|",
    ]
    for package in sorted({package for package, _ in counts}):
        cells = [
            f"{counts[package, f'{kind} noticed']}/{counts[package, kind]}"
            for kind in (*KINDS, "all")
        ]
        cells += [str(counts[package, outcome]) for outcome in OUTCOMES]
        lines.append(f"| {package} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="files and folders to make mistakes in")
    parser.add_argument(
        "--number", type=int, default=40, help="mutants; a larger number begins with the same ones"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="most seconds of one mutant's tests"
    )
    parser.add_argument(
        "--record", nargs="*", metavar="PATH", help="record these tests, without a name all"
    )
    parser.add_argument(
        "--marks",
        default=COUNTED,
        help="record only tests with these marks, as pytest's -m takes them",
    )
    parser.add_argument(
        "--merge",
        nargs="*",
        default=(),
        metavar="FOLDER",
        help="add records of HEAD made in other clones",
    )
    command_line = parser.parse_args()
    try:
        files = python_files(command_line.files)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True)
    work = Path("build/mutants", head.strip()).absolute()
    work.mkdir(parents=True, exist_ok=True)
    parts = [Path(name) for name in command_line.merge]
    for part in parts:
        if part.name != work.name or not (part / "lines").exists():
            parser.exit(
                2,
                f'{parser.prog}: --merge needs a folder "{work.name}" with a record, got '
                f'"{part}"\n',
            )
    lock = (work / "lock").open("w")  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.exit(2, f"{parser.prog}: another one works in {work}: wait for it, or stop it\n")
    for part in parts:
        add_record(work, part)
    if command_line.record is not None or not (work / "lines").exists():
        record_tests(work, command_line.marks, command_line.record or ())
    sample = (
        sampled_mutants(make_copy(work / "types"), files, command_line.number, command_line.seed)
        if files
        else []
    )
    verdicts = {key_of(row): row for row in read_rows(work / RESULTS)}
    verdicts |= {key_of(row): row | {"outcome": "equal"} for row in read_rows(EQUAL)}
    pending = iter([row for row in sample if key_of(row) not in verdicts])
    judge_all(pending, Record(work, files), work, command_line.limit)
    verdicts = {key_of(row): row for row in read_rows(work / RESULTS)} | verdicts
    print(table(verdicts[key_of(row)] for row in sample))


if __name__ == "__main__":
    main()
