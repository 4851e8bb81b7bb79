"""What our code uses of the GPU lock's packages is listed.

A package that has changed is found by reading its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gpu_lock
from tools.gpu_lock import LIST, MISSING, Sources, Use, listed, names_used, uses_of_repository

ENGINE = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm.llm import LLM
"""
LLM = """
from vllm.mixin import Sleeps

class LLM(Sleeps):
    kind: str = "llm"

    def __init__(self, model: str, *, seed: int = 0, **kwargs) -> None:
        self.llm_engine = make(model)
"""
MIXIN = """
from dataclasses import dataclass

@dataclass
class Base:
    size: int
    shape: tuple = ()

@dataclass
class Fields(Base):
    seed: int = 1

class Sleeps:
    def sleep(self, level: int = 1) -> None:
        self.asleep = level
"""
FILES = {"vllm/__init__.py": ENGINE, "vllm/llm.py": LLM, "vllm/mixin.py": MIXIN}


def sources(**changes: tuple[str, str]) -> Sources:
    """The source files of a package like vLLM, with one text of a file replaced by another."""
    files = dict(FILES)
    for module, (old, new) in changes.items():
        path = f"vllm/{module}.py"
        assert old in files[path]
        files[path] = files[path].replace(old, new)
    return Sources({path: text.encode() for path, text in files.items()})


USES = [
    Use("vllm.LLM", "a.py"),
    Use("vllm.LLM.llm_engine", "a.py"),
    Use("vllm.LLM.sleep", "a.py"),
    Use("vllm.LLM.sleep", "b.py"),
    Use("vllm.mixin.Fields", "a.py"),
]
EXPECTED = """vllm.LLM  (a.py)
    model
    *
    seed = 0
    **kwargs
vllm.LLM.llm_engine  (a.py)
    self.llm_engine = make(model)
vllm.LLM.sleep  (a.py, b.py)
    level = 1
vllm.mixin.Fields  (a.py)
    size: int
    shape: tuple = ()
    seed: int = 1
"""


def test_signatures_are_found_behind_imports_and_in_base_classes() -> None:
    assert listed(USES, sources()) == EXPECTED


@pytest.mark.parametrize(
    ("module", "old", "new", "line"),
    [
        ("mixin", "level: int = 1", "level: int = 2", "    level = 2"),
        ("mixin", "level: int = 1", "depth: int = 1", "    depth = 1"),
        ("mixin", "def sleep", "def rest", f"vllm.LLM.sleep  (a.py, b.py){MISSING}"),
        ("llm", "self.llm_engine", "self.engine", f"vllm.LLM.llm_engine  (a.py){MISSING}"),
        ("mixin", "seed: int = 1", "seed: int = 2", "    seed: int = 2"),
    ],
)
def test_another_name_or_default_changes_the_list(
    module: str, old: str, new: str, line: str
) -> None:
    lines = listed(USES, sources(**{module: (old, new)})).splitlines()
    assert [use for use in lines if use not in EXPECTED.splitlines()] == [line]


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    """All of this repository."""
    return uses_of_repository()


def test_what_our_code_uses_is_listed(
    uses: list[Use], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_lock, "uses_of_repository", lambda: uses)
    assert gpu_lock.main(["--only-names"]) == 0, capsys.readouterr().out
    assert MISSING not in LIST.read_text("utf-8")


def test_a_use_that_is_not_listed_is_told(
    uses: list[Use],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "rlmath" / "rollout").mkdir(parents=True)
    (tmp_path / "rlmath" / "rollout" / "engine.py").write_text(
        "def f(llm): llm.pause_generation()\n"
    )
    all_uses = [*uses, *uses_of_repository(tmp_path)]
    monkeypatch.setattr(gpu_lock, "uses_of_repository", lambda: all_uses)
    assert gpu_lock.main(["--only-names"]) == 1
    assert "+vllm.LLM.pause_generation  (rlmath/rollout/engine.py)" in capsys.readouterr().out


def test_uses_of_a_module() -> None:
    source = (
        "import megatron.core.utils as utils\n"
        "from vllm import LLM as Engine\n"
        "utils.get_model_config\n"
        "def _gpu_arguments(): return {'enforce_eager': True, 'compilation_config': {'level': 3}}\n"
        "def start(llm): llm.llm_engine.step(); os.environ['VLLM_USE_V2_MODEL_RUNNER'] = '0'\n"
    )
    assert names_used(source, "rlmath/rollout/engine.py") == {
        "megatron.core.utils",
        "megatron.core.utils.get_model_config",
        "vllm.LLM",
        "vllm.LLM.llm_engine",
        "vllm.engine.arg_utils.EngineArgs.compilation_config",
        "vllm.engine.arg_utils.EngineArgs.enforce_eager",
        "vllm.envs.VLLM_USE_V2_MODEL_RUNNER",
        "vllm.v1.engine.llm_engine.LLMEngine.step",
    }
