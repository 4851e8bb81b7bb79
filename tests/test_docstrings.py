"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.programs import REPOSITORY

WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for folder in ("rlmath", "tools", "launch", "megatron_patches")
    for path in (REPOSITORY / folder).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_they_say(name: str) -> None:
    counts = doctest.testmod(importlib.import_module(name))
    assert counts.attempted and not counts.failed
