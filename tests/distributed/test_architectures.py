"""Every supported architecture against transformers: in, over every layout, and out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.checkpoint.hf.weights import HFReader
from tests.distributed import architectures_cases, oracle
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_engine import check_engines
from tests.distributed.test_parity import assert_close
from tests.selection import keeping, matrix
from tests.tiny_models import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONG_ROPE,
    YARN_ROPE,
    make_model_folder,
    make_samples,
)

pytestmark = pytest.mark.distributed

WINDOW = 12
IN_TURNS = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", False, {}),
    "qwen3-tied": ("Qwen3ForCausalLM", True, {}),
    "qwen3-windows": (
        "Qwen3ForCausalLM",
        False,
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": IN_TURNS},
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", False, {"rope_parameters": YARN_ROPE}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        False,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "llama": ("LlamaForCausalLM", False, {}),
    "llama-tied": ("LlamaForCausalLM", True, {}),
    "llama-linear": ("LlamaForCausalLM", False, {"rope_parameters": LINEAR_ROPE}),
    "mistral": ("MistralForCausalLM", False, {}),
    "mistral-window": ("MistralForCausalLM", False, {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3ForCausalLM", False, {}),
    "phi3": ("Phi3ForCausalLM", False, {"sliding_window": WINDOW}),
    "phi4-mini": (
        "Phi3ForCausalLM",
        True,
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128},
    ),
}
"""Architecture, whether its embeddings are tied, and its own settings. Qwen2 has its own tests
(`test_parity`)."""
LAYOUTS = [
    Case(max_tokens=128),
    Case(tensor=2, max_tokens=128),
    Case(tensor=2, pipeline=2, max_tokens=128),
    pytest.param(
        Case(tensor=2, pipeline=2, sequence=True, recompute=True, max_tokens=128),
        marks=pytest.mark.full,
    ),
    pytest.param(Case(pipeline=2, virtual_pipeline=2, max_tokens=128), marks=pytest.mark.full),
]
SAMPLES = make_samples(8, longest=100)
assert (
    max(sample.length for sample in SAMPLES) > 2 * LLAMA3_ROPE["original_max_position_embeddings"]
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("architectures")
    return {
        name: make_model_folder(place / name, tied, architecture=architecture, **changes)
        for name, (architecture, tied, changes) in MODELS.items()
    }


@pytest.fixture(scope="session")
def wanted(folders: dict[str, Path]) -> dict[str, tuple[list[Tensor], dict[str, Tensor]]]:
    """Logits by sample, and gradients, of transformers."""
    expected = {}
    for name, folder in folders.items():
        model = oracle.load(folder)
        with torch.no_grad():
            logits = [
                model(torch.tensor([s.prompt_ids + s.completion_ids])).logits[0] for s in SAMPLES
            ]
        oracle.loss(model, SAMPLES).backward()
        expected[name] = (logits, oracle.gradients(model))
    return expected


@matrix
@pytest.mark.parity
@pytest.mark.parametrize("case", keeping(LAYOUTS, LAYOUTS[2], others=0), ids=str)
def test_a_model_answers_learns_and_leaves_as_in_transformers(
    ranks: RankPool,
    folders: dict[str, Path],
    wanted: dict[str, tuple[list[Tensor], dict[str, Tensor]]],
    tmp_path: Path,
    case: Case,
) -> None:
    outputs = [tmp_path / name for name in folders]
    by_rank = ranks.run(
        case.ranks, architectures_cases.round_trips, list(folders.values()), case, SAMPLES, outputs
    )
    for name, *outcomes in zip(folders, *by_rank, strict=True):
        logits, gradients = wanted[name]
        on_last_stage = [outcome.logits for outcome in outcomes if outcome.logits]
        assert len(on_last_stage) == case.tensor, name
        for logits_by_index in on_last_stage:
            distances = [
                float((logits_by_index[index] - expected).abs().max())
                for index, expected in enumerate(logits)
            ]
            assert max(distances) <= 1e-4, f"{name}: the logits are off by {max(distances):.2e}"
        for outcome in outcomes:
            assert_close(outcome.gradients, gradients, 1e-5)
        assert_same_weights(folders[name], tmp_path / name)


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit by bit, in the files."""
    before, after = HFReader(one), HFReader(other)
    assert before.files.keys() == after.files.keys()
    for name in before.files:
        assert torch.equal(before.tensor(name), after.tensor(name)), name


ENGINES = [
    ("qwen3", [Case()], 1),
    *((name, [Case(tensor=2), Case(pipeline=2)], 2) for name in MODELS),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cases", "engine_size"),
    ENGINES,
    ids=lambda parameter: (
        f"{parameter[0].ranks}-ranks" if isinstance(parameter, list) else parameter
    ),
)
def test_engine_logprobs_equal_the_policys_after_every_update(
    ranks: RankPool, folders: dict[str, Path], name: str, cases: list[Case], engine_size: int
) -> None:
    check_engines(ranks, folders[name], cases, engine_size, updates=2)
