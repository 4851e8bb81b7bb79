"""Imports point one way; megatron, vllm and torch.distributed stay in their places."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ORDER = (
    "answers",
    "config",
    "algorithms",
    "distributed",
    "workers",
    "sandbox",
    "rewards",
    "data",
    "checkpoint",
    "models",
    "telemetry",
    "rollout",
    "planning",
    "trainer",
    "report",
    "run",
    "replay",
    "evals",
    "cli",
)
"""The packages of rlmath/, low to high. A file imports of its own package and of those below, also
for type checkers, inside functions and by importlib: then no packages import each other. A
`__main__.py` is a program: it starts what it will, and nothing imports it. rlmath/__init__.py is
the face for users, of which our files read the version."""
OF_TRAINER = ("rlmath/trainer/", "rlmath/run/", "rlmath/replay/", "rlmath/cli/")
"""Only files there import rlmath.trainer."""
FOLDERS = ("rlmath", "launch", "tools", "megatron_patches")
"""The folders of our code, without the tests."""
FAKE_RANK = ("tools/fake_rank.py", "tools/fake_cuda.py")
"""They replace what of Megatron needs a GPU."""
MAY_IMPORT = {
    "megatron": (
        "rlmath/models",
        "rlmath/checkpoint",
        "rlmath/rollout/weight_sync",
        "megatron_patches",
        *FAKE_RANK,
    ),
    "vllm": ("rlmath/rollout", "tools/bench_rollout.py"),  # which runs vLLM's own beside ours
}
PURE = tuple(
    f"rlmath/{name}"
    for name in ("config", "algorithms", "answers", "workers", "sandbox", "data", "rewards")
)
"""They import neither, nor torch.distributed."""


def test_packages_have_one_order_and_no_import_goes_up() -> None:
    assert sorted(ORDER) == sorted(
        path.parent.name for path in (ROOT / "rlmath").glob("*/__init__.py")
    )
    assert sorted(path.name for path in (ROOT / "rlmath").glob("*.py")) == ["__init__.py"]
    assert imports_up(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("rlmath/config/load.py", "from rlmath.data.rows import Row", "may not import rlmath.data"),
        ("rlmath/answers/lexer.py", "import rlmath.config", "may not import rlmath.config"),
        ("rlmath/models/build.py", "from ..run import loop", "may not import rlmath.run"),
        (
            "rlmath/models/build.py",
            "def f():\n    from rlmath import run",
            "may not import rlmath.run",
        ),
        (
            "rlmath/trainer/recorder.py",
            "if TYPE_CHECKING:\n    from rlmath.run.recovery.restore import restore",
            "may not import rlmath.run",
        ),
        (
            "rlmath/distributed/device_kind.py",
            "importlib.import_module(f'rlmath.models.{module}')",
            "may not import rlmath.models",
        ),
        (
            "rlmath/cli/program.py",
            "from rlmath.trainer import __main__",
            "may not import a program",
        ),
        ("rlmath/cli/train.py", "from rlmath import verify", "may not import rlmath.verify"),
    ],
)
def test_an_import_that_goes_up_is_found(
    tmp_path: Path, file: str, source: str, expected: str
) -> None:
    for package in ORDER:
        (tmp_path / "rlmath" / package).mkdir(parents=True)
    (tmp_path / file).write_text(source, encoding="utf-8")
    (message,) = imports_up(tmp_path)
    assert message.startswith(f"{file}:") and message.endswith(expected)


def test_no_files_import_each_other() -> None:
    assert files_in_circles(ROOT) == []


def test_files_that_import_each_other_are_found(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/stages.py").write_text(
        "def main():\n    from tools import runs", encoding="utf-8"
    )
    (tmp_path / "tools/runs.py").write_text("from tools.stages import tell", encoding="utf-8")
    (tmp_path / "tools/alone.py").write_text(
        "import json\nfrom tools.lowest import rounded", encoding="utf-8"
    )
    (tmp_path / "tools/lowest.py").write_text("import math", encoding="utf-8")
    assert files_in_circles(tmp_path) == ["tools/runs.py", "tools/stages.py"]


def test_only_what_runs_imports_the_trainer_and_nothing_programs_or_tests() -> None:
    messages = []
    for path in sorted((ROOT / "rlmath").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        names = [name for _, name in imported_names(ROOT, path)]
        messages += [
            f"{file}: {name}"
            for name in names
            if name.split(".")[0] in ("launch", "tools", "tests")
        ]
        if not file.startswith(OF_TRAINER):
            messages += [
                f"{file}: {name}" for name in names if f"{name}.".startswith("rlmath.trainer.")
            ]
    assert messages == []


def test_the_sandbox_imports_the_standard_library_alone() -> None:
    """Its server starts in a moment, in any interpreter.

    What it loads is in the memory of a model's code."""
    names = {
        name
        for path in (ROOT / "rlmath/sandbox").glob("*.py")
        for _, name in imported_names(ROOT, path)
    }
    project_names = {
        name
        for name in names
        if name.startswith("rlmath.") and not name.startswith("rlmath.sandbox")
    }
    assert {".".join(name.split(".")[:3]) for name in project_names} == {
        "rlmath.workers.process_tree"
    }
    tree = (ROOT / "rlmath/workers/process_tree.py", ROOT / "rlmath/workers/__init__.py")
    names |= {name for path in tree for _, name in imported_names(ROOT, path)}
    outside_names = {name.split(".")[0] for name in names} - {"rlmath"}
    assert outside_names <= sys.stdlib_module_names


def test_libraries_stay_in_their_places() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("rlmath/rollout/engine.py", "import megatron.core as m", "may not import megatron"),
        ("rlmath/trainer/grpo.py", "from vllm import LLM", "may not import vllm"),
        (
            "tools/bench.py",
            "import importlib\nimportlib.import_module('vllm.envs')",
            "may not import vllm",
        ),
        (
            "rlmath/data/packing.py",
            "import torch\ntorch.distributed.barrier()",
            "torch.distributed",
        ),
        (
            "rlmath/data/loader.py",
            "def f():\n    from torch import distributed",
            "torch.distributed",
        ),
        ("rlmath/workers/worker_pool.py", "import torch.distributed as dist", "torch.distributed"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, found: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source, encoding="utf-8")
    (violation,) = violations(tmp_path)
    assert violation.startswith(file) and found in violation


def test_programs_find_the_modules_beside_them() -> None:
    """Python looks in the folder of a program, not in the one that it was started from.

    Only rlmath is installed."""
    lost_imports = []
    for path in [*ROOT.glob("tools/*.py"), *ROOT.glob("launch/**/*.py")]:
        source = path.read_text(encoding="utf-8")
        beside = re.compile(r"^from (?:tools|launch)\b", flags=re.MULTILINE).search(source)
        is_program = '__name__ == "__main__"' in source
        if is_program and beside and "sys.path.insert(0, " not in source[: beside.start()]:
            lost_imports.append(path.name)
    assert lost_imports == []


# ---------------------------------------------------------------- the check


def imports_up(root: Path) -> list[str]:
    """Every import of rlmath/ that goes up in ORDER, as "file:line: what"."""
    messages = []
    for path in sorted((root / "rlmath").glob("*/**/*.py")):
        if path.name == "__main__.py":
            continue
        file = path.relative_to(root).as_posix()
        may = ORDER[: ORDER.index(file.split("/")[1]) + 1]
        for line, name in imported_names(root, path):
            parts = name.split(".")
            if "__main__" in parts and parts[0] == "rlmath":
                messages.append(f"{file}:{line}: may not import a program")
            elif (
                parts[0] == "rlmath"
                and parts[1:] not in ([], ["__version__"])
                and parts[1] not in may
            ):
                messages.append(f"{file}:{line}: may not import rlmath.{parts[1]}")
    return messages


def files_in_circles(root: Path) -> list[str]:
    """The files of ours that import each other, and those between two circles."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    imports = {}
    for path in paths:
        files = {file_of(root, name) for _, name in imported_names(root, path)}
        imports[path.relative_to(root).as_posix()] = files - {
            None,
            path.relative_to(root).as_posix(),
        }
    while ends := imports.keys() - {file for file in imports if imports[file] & imports.keys()}:
        for file in ends:
            del imports[file]
    while ends := imports.keys() - set().union(*imports.values()):
        for file in ends:
            del imports[file]
    return sorted(imports)


@cache
def file_of(root: Path, name: str) -> str | None:
    """The file of ours that an imported name is in, without the packages above it."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1) if parts[0] in FOLDERS else ():
        for path in ("/".join(parts[:end]) + ".py", "/".join([*parts[:end], "__init__.py"])):
            if (root / path).is_file():
                return path
    return None


def violations(root: Path) -> list[str]:
    """Every import of a library where the design does not allow it, as "file:line: what"."""
    messages = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            for line, name in imported_names(root, path):
                for library, places in MAY_IMPORT.items():
                    if f"{name}.".startswith(f"{library}.") and not file.startswith(places):
                        messages.append(f"{file}:{line}: may not import {library}")
                if f"{name}.".startswith("torch.distributed.") and file.startswith(PURE):
                    messages.append(f"{file}:{line}: may not import torch.distributed")
    return messages


@cache
def imported_names(root: Path, path: Path) -> list[tuple[int, str]]:
    """Lines and full names of what a file imports, at its top, inside functions, or by importlib.

    `torch.distributed` written out counts as its import."""
    return list(_imported_names(root, path))


def _imported_names(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    package = path.relative_to(root).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and last_name(node.func).endswith(
            ("import_module", "__import__")
        ):
            for name in node.args[:1]:
                start = name.values[0] if isinstance(name, ast.JoinedStr) else name
                if isinstance(start, ast.Constant):
                    yield node.lineno, str(start.value).rstrip(".")


def last_name(expression: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`; "" for what is neither."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""
