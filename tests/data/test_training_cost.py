import pytest

from rlmath.config.model_shape import ModelShape
from rlmath.data.batch_schedule import TOKENS, Cost, training_cost


def shape(**changes) -> ModelShape:
    """DeepSeek-R1-Distill-Qwen-1.5B."""
    values = {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": 28,
        "hidden_size": 1536,
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 128,
        "ffn_size": 8960,
        "vocab_size": 151936,
        "tied_embeddings": False,
        "max_positions": 131072,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "torch_dtype": "bfloat16",
    }
    return ModelShape(**values | changes)


def test_cost_is_linear_and_quadratic_in_length():
    assert Cost(2.0, 3.0).of(4) == 2 * 4 + 3 * 16
    assert Cost(2.0, 3.0).of(0) == 0


def test_tokens_count_alike():
    assert TOKENS.of(7) == 7


def test_training_cost_of_a_model_small_enough_to_count():
    # Attention 4*6 + 2 * 4*3 + 6*4 = 72, MLP 3 * 4*5 = 60, twice; output 4*10 = 40: 304 parameters, 6 FLOPs each.
    # Scores and values: 2 layers * 6 wide * 12 / 2.
    tiny = shape(
        num_layers=2, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=3, ffn_size=5, vocab_size=10
    )
    assert training_cost(tiny) == Cost(6.0 * 304, 72.0)


def test_training_cost_of_a_published_model():
    # Per layer 1536 * (2*1536 + 2*256) + 3 * 1536*8960 = 46,792,704; 28 of them and 1536*151936 of the output layer.
    cost = training_cost(shape())
    assert cost.linear == 6 * 1_543_569_408
    assert cost.quadratic == 28 * 1536 * 6


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_costs_the_same_whether_or_not_it_is_the_embedding(tied: bool):
    assert training_cost(shape(tied_embeddings=tied)) == training_cost(shape())
