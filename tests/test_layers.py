"""Imports point one way; megatron, vllm and torch.distributed stay in their places."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

OF_TRAINER = ("rlmath/trainer/", "rlmath/run/", "rlmath/replay/", "rlmath/cli/")
"""Only files there import rlmath.trainer."""
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
    f"rlmath/{name}" for name in ("config", "algorithms", "answers", "workers", "sandbox", "data", "rewards")
)
"""They import neither, nor torch.distributed."""


def test_no_circle_of_files_and_only_what_runs_imports_the_trainer() -> None:
    """Answers import nothing of rlmath but themselves; nothing in rlmath/ imports programs or tests."""
    imports, wrong = {}, []
    for path in sorted((ROOT / "rlmath").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        names = [name for _, name in imported_names(ROOT, path)]
        imports[file] = {found for name in names for found in [file_of(name)] if found not in (None, file)}
        wrong += [f"{file}: {name}" for name in names if name.split(".")[0] in ("launch", "tools", "tests")]
        if not file.startswith(OF_TRAINER):
            wrong += [f"{file}: {name}" for name in names if f"{name}.".startswith("rlmath.trainer.")]
        if file.startswith("rlmath/answers/"):
            wrong += [
                f"{file}: {other}" for other in imports[file] if not other.startswith("rlmath/answers/")
            ]
    assert wrong == []
    assert sorted(path.name for path in (ROOT / "rlmath").glob("*.py")) == ["__init__.py"]
    while leaves := [file for file, others in imports.items() if not others & imports.keys()]:
        for file in leaves:
            del imports[file]
    assert imports == {}, "these files, or what they import, import each other"


def test_the_sandbox_imports_the_standard_library_alone() -> None:
    """Its server starts in a moment, in any interpreter, and what it loads is in the memory of a model's code."""
    names = {
        name for path in (ROOT / "rlmath/sandbox").glob("*.py") for _, name in imported_names(ROOT, path)
    }
    ours = {name for name in names if name.startswith("rlmath.") and not name.startswith("rlmath.sandbox")}
    assert {".".join(name.split(".")[:3]) for name in ours} == {"rlmath.workers.process_tree"}
    tree = (ROOT / "rlmath/workers/process_tree.py", ROOT / "rlmath/workers/__init__.py")
    names |= {name for path in tree for _, name in imported_names(ROOT, path)}
    others = {name.split(".")[0] for name in names} - {"rlmath"}
    assert others <= sys.stdlib_module_names


def file_of(name: str) -> str | None:
    """The file of rlmath/ that an imported name is in, without the packages above it."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1) if parts[0] == "rlmath" else ():
        for path in ("/".join(parts[:end]) + ".py", "/".join([*parts[:end], "__init__.py"])):
            if (ROOT / path).is_file():
                return path
    return None


def test_libraries_stay_in_their_places() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("rlmath/rollout/engine.py", "import megatron.core as m", "may not import megatron"),
        ("rlmath/trainer/grpo.py", "from vllm import LLM", "may not import vllm"),
        ("tools/bench.py", "import importlib\nimportlib.import_module('vllm.envs')", "may not import vllm"),
        ("rlmath/data/packing.py", "import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("rlmath/data/loader.py", "def f():\n    from torch import distributed", "torch.distributed"),
        ("rlmath/workers/worker_pool.py", "import torch.distributed as dist", "torch.distributed"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, found: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source, encoding="utf-8")
    (violation,) = violations(tmp_path)
    assert violation.startswith(file) and found in violation


def test_programs_find_the_modules_beside_them() -> None:
    """Python looks in the folder of a program, not in the one that it was started from; only rlmath is installed."""
    lost = []
    for path in [*ROOT.glob("tools/*.py"), *ROOT.glob("launch/**/*.py")]:
        source = path.read_text(encoding="utf-8")
        beside = re.compile(r"^from (?:tools|launch)\b", flags=re.MULTILINE).search(source)
        is_program = '__name__ == "__main__"' in source
        if is_program and beside and "sys.path.insert(0, " not in source[: beside.start()]:
            lost.append(path.name)
    assert lost == []


# ---------------------------------------------------------------- the check


def violations(root: Path) -> list[str]:
    """Every import of a library where the design does not allow it, as "file:line: what"."""
    found = []
    for folder in ("rlmath", "launch", "tools", "megatron_patches"):
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            for line, name in imported_names(root, path):
                for library, places in MAY_IMPORT.items():
                    if f"{name}.".startswith(f"{library}.") and not file.startswith(places):
                        found.append(f"{file}:{line}: may not import {library}")
                if f"{name}.".startswith("torch.distributed.") and file.startswith(PURE):
                    found.append(f"{file}:{line}: may not import torch.distributed")
    return found


def imported_names(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) of what a file imports, at its top, inside functions, or by importlib; `torch.distributed`
    written out counts as its import."""
    package = path.relative_to(root).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # for readers and type checkers only
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            constants = [name for name in node.args[:1] if isinstance(name, ast.Constant)]
            yield from ((node.lineno, str(name.value)) for name in constants)
