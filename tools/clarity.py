"""How plain is the text of the code?

Counts of what makes a reader stop, by folder.

    python tools/clarity.py                       # rlmath, megatron_patches, launch, tools and tests
    python tools/clarity.py rlmath/rollout        # one line a folder

The counts show where to look; that a text is understood at once is for a reader to say.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

FOLDERS = ("rlmath", "megatron_patches", "launch", "tools", "tests")
FILLERS = frozenset(
    "again alone found given held here it item kept made mine more most now of one others ours "
    "own rest same said shown such taken that theirs them then there these they thing things "
    "this those told wanted what when where which who why".split()
)
"""Pronouns, fillers and participles that do not say what a local variable holds."""
FRAGMENTS = ("Of ", "By ", "As ", "For ", "In ", "And ", "Where ", "That of ", "Those of ", "Like ")
"""How a docstring begins that has no noun or verb."""
WIDTH = 100
MOST_POSITIONAL = 4


@dataclass
class Clarity:
    """Counts over some files."""

    statements: int = 0
    """Without docstrings."""
    assigned_names: int = 0
    """Assignments to a local name, loop variables included."""
    filler_names: int = 0
    """Those to one of FILLERS."""
    lines: int = 0
    wide_lines: int = 0
    positional_calls: int = 0
    """Calls with more than 4 positional arguments."""
    splatted_calls: int = 0
    """Calls that splat a name or an expression in brackets: *values, *(first, second)."""
    tuple_assignments: int = 0
    """Assignments of a written tuple to a tuple of names."""
    functions: int = 0
    undocumented_functions: int = 0
    docstrings: int = 0
    fragments: int = 0
    """Docstrings that begin with one of FRAGMENTS."""

    def add(self, source: str) -> None:
        """Count a file's text."""
        lines = source.splitlines()
        self.lines += len(lines)
        self.wide_lines += sum(len(line) > WIDTH for line in lines)
        for node in ast.walk(ast.parse(source)):
            self.statements += isinstance(node, ast.stmt) and not is_text(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned_names += 1
                self.filler_names += node.id in FILLERS
            elif isinstance(node, ast.Call):
                self._add_call(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                self.tuple_assignments += any(
                    isinstance(target, ast.Tuple) for target in node.targets
                )
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions += 1
                self.undocumented_functions += ast.get_docstring(node) is None
            for docstring in docstrings_of(node):
                self.docstrings += 1
                self.fragments += docstring.startswith(FRAGMENTS)

    def _add_call(self, call: ast.Call) -> None:
        splatted = [argument.value for argument in call.args if isinstance(argument, ast.Starred)]
        self.positional_calls += len(call.args) > MOST_POSITIONAL
        self.splatted_calls += any(isinstance(value, (ast.Name, ast.Tuple)) for value in splatted)

    def row(self) -> list[str]:
        """The cells of a table, as ROWS names them."""
        return [
            f"{self.statements}",
            share(self.filler_names, self.assigned_names),
            share(self.wide_lines, self.lines),
            f"{self.positional_calls}",
            f"{self.splatted_calls}",
            f"{self.tuple_assignments}",
            f"{self.undocumented_functions} of {self.functions}",
            f"{self.fragments} of {self.docstrings}",
        ]


ROWS = (
    "statements",
    "local names that are fillers",
    f"lines over {WIDTH} columns",
    f"calls with over {MOST_POSITIONAL} positional arguments",
    "calls that splat a name or a tuple",
    "assignments of a tuple to a tuple",
    "functions without a docstring",
    "docstrings that begin with a fragment",
)


def is_text(node: ast.AST) -> TypeGuard[Any]:
    """Whether this statement is a text alone: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def docstrings_of(node: ast.AST) -> Iterator[str]:
    """The docstring of a module, class or function, and those below fields and module names."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for statement, following in pairwise(node.body):
            is_name = isinstance(statement, (ast.Assign, ast.AnnAssign))
            if is_name and is_text(following):
                yield inspect.cleandoc(following.value.value)


def share(count: int, total: int) -> str:
    return f"{100 * count / max(total, 1):.1f}%"


def clarity_of(folder: Path) -> Clarity:
    """The counts of all files below a folder, or of one file."""
    counts = Clarity()
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    for path in paths:
        counts.add(path.read_text(encoding="utf-8"))
    return counts


def table(folders: Sequence[str]) -> str:
    """A Markdown table with a column for each folder."""
    columns = [clarity_of(Path(folder)).row() for folder in folders]
    lines = [f"| | {' | '.join(folders)} |", "|---" * (len(folders) + 1) + "|"]
    for name, *cells in zip(ROWS, *columns, strict=True):
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders and files")
    folders = parser.parse_args().folders
    missing = [folder for folder in folders if not Path(folder).exists()]
    if missing:
        sys.exit(
            f"{', '.join(missing)}: no such file or folder; needed: folders or files below "
            f"{Path.cwd()}"
        )
    print(table(folders))


if __name__ == "__main__":
    main()
