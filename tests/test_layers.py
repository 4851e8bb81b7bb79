"""Imports only point down the design's layers; megatron, vllm and torch.distributed stay in their places."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rlmath", "launch", "tools", "megatron_patches")

LAYERS = (
    ("launch", "tools"),
    (
        "rlmath.start",
        "rlmath.run",
        "rlmath.run_steps",
        "rlmath.node_checks",
        "rlmath.slow_ranks",
        "rlmath.sft",
        "rlmath.account",
        "rlmath.reporter",
        "rlmath.trainer",
        "rlmath.parts",
        "rlmath.stages",
        "rlmath.stage_checks",
        "rlmath.stage_models",
        "rlmath.validation",
        "rlmath.validation_files",
        "rlmath.update",
        "rlmath.step_metrics",
        "rlmath.inputs",
        "rlmath.export_format",
        "rlmath.evaluate",
        "rlmath.preflight",
        "rlmath.algorithm_checks",
        "rlmath.layout_checks",
        "rlmath.memory_checks",
        "rlmath.memory_plan",
        "rlmath.activation_bytes",
        "rlmath.engine_bytes",
        "rlmath.model_config",
        "rlmath.model_folder",
        "rlmath.run_folder",
        "rlmath.planning",
        "rlmath.timing",
        "rlmath.dry_run",
        "rlmath.prepared",
        "rlmath.recovery",
        "rlmath.fingerprints",
        "rlmath.save_times",
        "rlmath.saver",
        "rlmath.assembly",
    ),
    ("rlmath.policy", "rlmath.rollout", "rlmath.sync", "rlmath.checkpoint"),
    ("rlmath.guard",),
    ("rlmath.parallel",),
    (
        "rlmath.algo",
        "rlmath.packing",
        "rlmath.rewards",
        "rlmath.data",
        "rlmath.telemetry",
        "megatron_patches",
    ),
    (
        "rlmath.types",
        "rlmath.config",
        "rlmath.model_shape",
        "rlmath.settings",
        "rlmath.setting_ranges",
        "rlmath.gpus",
        "rlmath.config_files",
        "rlmath.compact_layout",
        "rlmath.parent_death",
        "rlmath.versions",
        "rlmath.garbage",
        "rlmath",
    ),
)
"""From the top down; whoever adds a module or package to `rlmath/` gives it a place here."""

LAYER_OF = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
PURE = ("rlmath.algo", "rlmath.packing", "rlmath.rewards", "rlmath.data", *LAYERS[-1])
MAY_IMPORT = {
    "megatron": {"rlmath.policy", "rlmath.checkpoint", "rlmath.sync", "megatron_patches"},
    "vllm": {"rlmath.rollout", "rlmath.sync"},
    "torch.distributed": set(LAYER_OF) - set(PURE),
}


def test_imports_point_down_the_layers():
    assert violations(ROOT) == []


def test_every_rule_is_about_something_that_exists():
    units = {unit_of(module_name(ROOT, path)) for path in python_files(ROOT)}
    assert {"rlmath.policy", "rlmath.rollout", "rlmath.sync", "rlmath.checkpoint", *PURE} <= units


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        ("rlmath/algo/losses.py", "from rlmath.parallel import mesh", "rlmath.parallel is above"),
        ("rlmath/algo/losses.py", "from ..policy.learner import run", "rlmath.policy is above"),
        ("rlmath/algo/losses.py", "def f():\n    import rlmath.trainer", "rlmath.trainer is above"),
        ("rlmath/types.py", "from rlmath import data", "rlmath.data is above"),
        ("rlmath/config.py", "import launch.train_grpo", "launch is above"),
        ("rlmath/rollout/engine.py", "import megatron.core as m", "may not import megatron"),
        ("rlmath/trainer.py", "from vllm import LLM", "may not import vllm"),
        (
            "tools/bench_engine.py",
            "import importlib\nimportlib.import_module('vllm.envs')",
            "may not import vllm",
        ),
        (
            "rlmath/packing/pack.py",
            "import torch\ntorch.distributed.barrier()",
            "may not import torch.distributed",
        ),
        ("rlmath/data/loader.py", "from torch import distributed", "may not import torch.distributed"),
        ("rlmath/rewards/pool.py", "import torch.distributed as dist", "may not import torch.distributed"),
        ("rlmath/helpers.py", "", "has no layer"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, told: str):
    write(tmp_path, {file: source})
    (found,) = violations(tmp_path)
    assert found.startswith(file) and told in found


def test_right_imports_are_not_reported(tmp_path: Path):
    write(
        tmp_path,
        {
            "launch/train.py": "import rlmath.trainer\nfrom rlmath.policy import step",
            "rlmath/sync/plan.py": "import megatron.core, vllm\nfrom ..checkpoint.hf_tables import TABLES",
            "rlmath/parallel/mesh.py": "import torch.distributed\nfrom rlmath import types",
            "megatron_patches/clip.py": "from megatron.core import optimizer",
        },
    )
    assert violations(tmp_path) == []


def test_packages_of_one_layer_that_import_each_other_are_found(tmp_path: Path):
    write(
        tmp_path,
        {"rlmath/policy/a.py": "import rlmath.rollout.b", "rlmath/rollout/b.py": "import rlmath.policy.a"},
    )
    (found,) = violations(tmp_path)
    assert "in a circle" in found and "rlmath.policy" in found and "rlmath.rollout" in found


# ---------------------------------------------------------------- the check


def violations(root: Path) -> list[str]:
    """Every import under `root` that the design does not allow, as "file:line: what"."""
    found, graph = [], {}
    for path in python_files(root):
        module, file = module_name(root, path), path.relative_to(root).as_posix()
        unit = unit_of(module)
        if unit not in LAYER_OF:
            found.append(f"{file}: {unit} has no layer; add it to LAYERS in tests/test_layers.py")
            continue
        for line, name in imported_names(path, module):
            where, other = f"{file}:{line}", unit_of(name)
            if other in LAYER_OF and LAYER_OF[other] < LAYER_OF[unit]:
                found.append(f"{where}: {other} is above {unit}")
            elif other in LAYER_OF and other != unit:
                graph.setdefault(unit, set()).add(other)
            for package, importers in MAY_IMPORT.items():
                if (name + ".").startswith(package + ".") and unit not in importers:
                    found.append(f"{where}: {unit} may not import {package}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"packages import each other in a circle: {error.args[1]}")
    return found


def python_files(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(name: str) -> str:
    """The part of the house that a module belongs to: "rlmath.policy", "tools"."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "rlmath" else parts[0]


def imported_names(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of what a file imports, at its top, inside functions, or by importlib.

    `from rlmath import data` gives "rlmath.data"; `torch.distributed` written out counts as its import.
    """
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *(node.module or "").split(".")]).rstrip(".")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                (node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant)
            )


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_programs_find_the_modules_beside_them():
    """Python looks in the folder of a program, not in the one that it was started from; only rlmath is installed."""
    lost = []
    for path in [*ROOT.glob("tools/*.py"), *ROOT.glob("launch/**/*.py")]:
        source = path.read_text(encoding="utf-8")
        beside = re.compile(r"^from (?:tools|launch)\b", flags=re.MULTILINE).search(source)
        is_program = '__name__ == "__main__"' in source
        if is_program and beside and "sys.path.insert(0, " not in source[: beside.start()]:
            lost.append(path.name)
    assert lost == []
