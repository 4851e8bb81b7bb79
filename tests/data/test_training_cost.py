from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rlmath.checkpoint.hf.config_json import required_shape
from rlmath.data.micro_batches import training_cost
from tests.tiny_models import make_model_folder, shape_of

QWEN3_30B_A3B, _ = required_shape("/nowhere/Qwen3-30B-A3B")


def test_a_token_of_a_mixture_of_experts_passes_through_its_experts_and_the_router():
    # Per layer: attention 2048 * (2*4096 + 2*512) = 18,874,368; 8 experts 8 * 3 * 2048*768 =
    # 37,748,736; router 2048*128 = 262,144; together 56,885,248. 48 of them, and 2048*151936 =
    # 311,164,928 of the output layer.
    cost = training_cost(QWEN3_30B_A3B)
    assert cost.linear == 6 * (48 * 56_885_248 + 311_164_928) == 6 * 3_041_656_832
    assert cost.quadratic == 48 * 4096 * 6
    # "A3B": about 3 billion parameters are active, the embedding (which costs no multiplication)
    # left out.
    assert cost.linear / 6 == pytest.approx(3.0e9, rel=0.02)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
)
def test_training_cost_is_what_torch_counts_on_the_same_pass(
    tmp_path: Path, architecture: str, frozen: bool
) -> None:
    """Matrix products agree within 2%.

    Attention is counted by torch over all pairs of tokens, and by us over those of causal
    attention."""
    folder = make_model_folder(tmp_path / "model", architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.requires_grad_(not frozen).enable_input_require_grads()
    ids = torch.randint(
        3, model.config.vocab_size, (1, 96), generator=torch.Generator().manual_seed(1)
    )
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counts = {
        str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()
    }
    products = sum(count for name, count in counts.items() if name in ("aten.mm", "aten.addmm"))
    cost = training_cost(shape_of(folder), frozen)
    assert cost.linear * 96 == pytest.approx(products, rel=0.02)
    assert 2 * cost.quadratic * 96**2 == pytest.approx(counts["aten.bmm"], rel=0.02)
    assert set(counts) <= {"aten.mm", "aten.addmm", "aten.bmm"}
