"""Megatron's tensors, by name and value, against mbridge, another program's way from Hugging Face to Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmath.checkpoint.hf.weights import HFReader
from tests.distributed import architectures_cases
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix
from tests.tiny_models import make_model_folder

pytestmark = pytest.mark.full

TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""mbridge knows Transformer Engine's layers only, which have these norms inside of the projections behind them."""


def bridge_of(architecture: str, folder: Path) -> Any:
    """mbridge's, of one rank in float32. It has none of its own for Mistral, whose tensors are named as Llama's."""
    models = pytest.importorskip("mbridge.models", reason="mbridge is not installed")
    from mbridge.core.parallel_states import ParallelStates
    from transformers import AutoConfig

    bridge_class = {
        "Qwen2ForCausalLM": models.Qwen2Bridge,
        "Qwen3ForCausalLM": models.Qwen3Bridge,
        "LlamaForCausalLM": models.LLaMABridge,
        "MistralForCausalLM": models.LLaMABridge,
    }[architecture]
    # A bridge of a tied model writes into its class's table: give each a class of its own.
    table = {"_DIRECT_MAPPING": dict(bridge_class._DIRECT_MAPPING)}
    return type("Bridge", (bridge_class,), table)(
        AutoConfig.from_pretrained(folder), torch.float32, ParallelStates()
    )


@matrix
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("Qwen2ForCausalLM", False),
        ("Qwen2ForCausalLM", True),
        ("Qwen3ForCausalLM", False),
        ("Qwen3ForCausalLM", True),
        ("LlamaForCausalLM", False),
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", False),
    ],
)
def test_every_parameter_is_what_mbridge_makes_of_the_same_folder(
    ranks: RankPool, tmp_path: Path, architecture: str, tied: bool
) -> None:
    folder = make_model_folder(tmp_path / "model", tied, architecture=architecture)
    bridge, reader = bridge_of(architecture, folder), HFReader(folder)
    used = set()
    for name, found in ranks.run(1, architectures_cases.parameters, folder)[0].items():
        for local, inside in TE_NAMES.items():
            name = name.replace(local, inside)
        hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
        wanted = bridge._weight_to_mcore_format(name, [reader.tensor(hf_name) for hf_name in hf_names])
        assert torch.equal(found, wanted), name
        used.update(hf_names)
    assert used == reader.files.keys()
