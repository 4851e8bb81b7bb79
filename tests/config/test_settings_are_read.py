"""Every setting is read by code that does something with it; none is only parsed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import rlmath
from rlmath.config.help import section_classes
from rlmath.planning.memory_estimate import mesh_of
from tests.test_layers import last_name

PACKAGE = Path(rlmath.__file__).parent
ONLY_LOOK = (
    "config/schema",
    "config/help",
    "config/load",
    "planning/",
    "run/dry_run",
    "run/early_checks",
    "cli/plan",
)
"""Modules that declare settings, check them, or plan with them.

A setting that is read nowhere else does nothing."""
FOR_THE_CHECK_ALONE = [
    ("algorithm", "preset"),
    ("memory", "gpu"),
    ("memory", "gpu_gib"),
    ("parallel", "data"),
]
"""Settings that are only compared with, or that stand for others.

A preset is what it sets; a run must fit the GPU, and its ranks must make the replicas."""


def sections_of(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The section behind each name that a module has for one: {"save": "save", "how": "run"}.

    The names are those of variables, arguments and attributes. A section is what an argument is
    annotated with (`settings: RunConfig`) and what is taken out of the settings
    (`save = config.save`, also several at once)."""
    by_class = {
        kind.__name__: name
        for name, section in section_classes().items()
        for kind in section.__mro__[:-1]
    }
    sections = {name: name for name in by_class.values()}
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and isinstance(node.annotation, ast.Name):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            sections |= (
                {name: by_class[node.annotation.id]} if node.annotation.id in by_class else {}
            )
    for target, source in sorted(_assignments(nodes), key=lambda pair: len(pair[0])):
        section = sections.get(source)
        if section is not None:
            sections[target.rpartition(".")[2]] = section
    return sections


def _assignments(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """(target, last name of the value) of assignments of names and attributes."""
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs: Iterable[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
            yield from (
                (ast.unparse(left), last_name(right)) for left, right in pairs if last_name(right)
            )


def settings_read(source: str) -> set[tuple[str, str]]:
    """(section, field) of every field that a module reads."""
    nodes = list(ast.walk(ast.parse(source)))
    sections = sections_of(nodes)
    return {
        (sections[owner], node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and (owner := last_name(node.value)) in sections
    }


def test_every_setting_is_read_by_code_that_acts_on_it() -> None:
    settings = settings_read(inspect.getsource(mesh_of))  # checks and runs have the same one
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(part in name for part in ONLY_LOOK):
            settings |= settings_read(path.read_text(encoding="utf-8"))
    declared = {
        (name, field.name)
        for name, kind in section_classes().items()
        for field in dataclasses.fields(kind)
    }
    assert sorted(declared - settings) == FOR_THE_CHECK_ALONE
