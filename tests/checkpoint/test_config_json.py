"""What config.json may ask for, architecture by architecture.

`test_preflight` has what all architectures have in common."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlmath.checkpoint.hf.config_json import PUBLISHED, inspect_model_folder, read_model_shape
from rlmath.checkpoint.hf.weights import HFReader
from rlmath.config.model_shape import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelShape,
    RopeScaling,
    YarnScaling,
)
from rlmath.models.rotary import rotary_frequencies
from tests.tiny_models import LLAMA3_ROPE, make_model_folder

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_3_2_1B: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_size": 2048,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3_0_6B: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_NEMO: dict[str, Any] = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN3_30B_A3B: dict[str, Any] = json.loads((PUBLISHED / "Qwen3-30B-A3B.json").read_text()) | COMMON
LONG_ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
PHI_4_MINI: dict[str, Any] = COMMON | {
    "auto_map": {"AutoConfig": "own.Phi3Config", "AutoModelForCausalLM": "own.Phi3ForCausalLM"},
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": LONG_ROPE,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
"""The fields as the Hub's releases have them, with fewer and smaller layers."""


def shape(folder: Path, release: dict[str, Any], **changes: Any) -> ModelShape:
    """The shape of a release; a value of ... takes the key out."""
    values = {
        name: setting for name, setting in {**release, **changes}.items() if setting is not ...
    }
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_shape(folder)


def problem(folder: Path, release: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ValueError, match="problem") as error:
        shape(folder, release, **changes)
    (only,) = str(error.value).split("\n  - ")[1:]
    return only


def rope(**changes: Any) -> dict[str, Any]:
    """Llama 3.2's rotary settings with changes."""
    return {
        key: number
        for key, number in {**LLAMA_3_2_1B["rope_scaling"], **changes}.items()
        if number is not ...
    }


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool", "float8_e4m3fn", "float64"])
def test_numbers_that_are_no_plain_floats_are_told_from_the_headers(tmp_path: Path, dtype: str):
    """The bytes of a tensor under another tag, too: int32 has the size of float32."""
    folder = make_model_folder(tmp_path / "model")
    name = "model.norm.weight"
    tensors = load_file(folder / "model.safetensors")
    kind = getattr(torch, dtype)
    tensors[name] = tensors[name].view(kind) if dtype == "int32" else tensors[name].to(kind)
    save_file(tensors, folder / "model.safetensors")
    (problem,) = inspect_model_folder(folder)[1]
    assert problem.startswith(f"{name} in {folder / 'model.safetensors'} has numbers in ")
    assert "needed: float32, bfloat16 or float16" in problem
    with pytest.raises(ValueError, match="needed: float32"):
        HFReader(folder).tensor(name)


def test_a_fifo_in_the_place_of_weights_is_not_waited_for(tmp_path: Path):
    folder = make_model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "weights.safetensors")
    index = {"weight_map": {"model.norm.weight": "weights.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any(
        "are not there: weights.safetensors" in problem
        for problem in inspect_model_folder(folder)[1]
    )
    with pytest.raises(ValueError, match="1 are not there"):
        HFReader(folder).tensor("model.norm.weight")


def test_a_number_beyond_all_measure_is_told(tmp_path: Path):
    assert '"rope_theta" is 1000' in problem(tmp_path, QWEN3_0_6B, rope_theta=10**350)


def test_a_llama_has_stretched_rotary_embeddings_and_no_biases(tmp_path: Path):
    model_shape = shape(tmp_path, LLAMA_3_2_1B)
    assert model_shape.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert (model_shape.rope_theta, model_shape.max_positions, model_shape.tied_embeddings) == (
        500000.0,
        131072,
        True,
    )
    assert not model_shape.attention_bias and not model_shape.qk_norm


def test_a_qwen3_has_norms_of_query_and_key_and_heads_of_its_own_size(tmp_path: Path):
    model_shape = shape(tmp_path, QWEN3_0_6B)
    assert (
        model_shape.qk_norm and not model_shape.attention_bias and model_shape.rope_scaling is None
    )
    assert (model_shape.head_dim, model_shape.hidden_size // model_shape.num_heads) == (128, 64)


def test_a_mistrals_heads_need_not_add_up_to_the_hidden_size(tmp_path: Path):
    model_shape = shape(tmp_path, MISTRAL_NEMO)
    assert (model_shape.head_dim, model_shape.hidden_size // model_shape.num_heads) == (128, 160)
    assert not model_shape.qk_norm and not model_shape.attention_bias
    assert shape(tmp_path, MISTRAL_NEMO, head_dim=...).head_dim == 160


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "SmolLM3ForCausalLM",
        "Phi3ForCausalLM",
    ],
)
def test_a_folder_that_transformers_5_wrote_is_read_as_transformers_reads_it(
    tmp_path: Path, architecture: str
):
    model_shape, problems = inspect_model_folder(
        make_model_folder(tmp_path / "model", architecture=architecture)
    )
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert model_shape is not None and not problems
    assert model_shape.architecture == architecture
    assert model_shape.head_dim == getattr(config, "head_dim", 32)
    assert model_shape.rope_theta == config.rope_parameters["rope_theta"]
    assert (model_shape.rope_scaling is not None) == (
        config.rope_parameters["rope_type"] == "llama3"
    )
    if isinstance(model_shape.rope_scaling, Llama3Scaling):
        assert (
            model_shape.rope_scaling.original_max_positions
            == LLAMA3_ROPE["original_max_position_embeddings"]
        )


@pytest.mark.parametrize("newer", [{"rope_theta": 1.0}, {"rope_type": "llama3", "factor": 2.0}])
def test_the_older_name_of_rotary_settings_hides_the_newer_as_in_transformers(
    tmp_path: Path, newer: dict[str, Any]
):
    model_shape = shape(tmp_path, LLAMA_3_2_1B, rope_parameters=newer)
    rope_parameters = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert isinstance(model_shape.rope_scaling, Llama3Scaling)
    assert (model_shape.rope_theta, model_shape.rope_scaling.factor) == (
        rope_parameters["rope_theta"],
        rope_parameters["factor"],
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": rope(factor=0)}, '"factor" is 0; needed: a number above 0'),
        (
            {"rope_scaling": rope(low_freq_factor=...)},
            '"low_freq_factor" is missing; needed: a number above 0',
        ),
        (
            {"rope_scaling": rope(high_freq_factor=1.0)},
            '"high_freq_factor" is 1.0; needed: more than',
        ),
        (
            {"rope_scaling": rope(original_max_position_embeddings="8k")},
            "\"original_max_position_embeddings\" is '8k'; needed: a whole number",
        ),
        ({"rope_scaling": "llama3"}, "\"rope_scaling\" asks for 'llama3'"),
        (
            {"rope_scaling": rope(rope_type="yarn", factor=...)},
            '"factor" is missing; needed: a number above 0',
        ),
        (
            {"rope_scaling": rope(rope_type="yarn", factor=4.0)},
            'YaRN reaches "factor" 4 x 8192 original',
        ),
        (
            {"rope_scaling": rope(rope_type="yarn", beta_fast=0)},
            '"beta_fast" is 0; needed: a number above 0',
        ),
        (
            {"rope_scaling": rope(rope_type="yarn"), "rope_theta": 1},
            '"rope_theta" is 1.0; YaRN needs more than 1',
        ),
        (
            {"rope_scaling": rope(rope_type="yarn", truncate=1)},
            '"truncate" is 1; needed: true or false',
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            '"factor" is 2; vLLM takes it with a point only: 2.0',
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "angles of all its tokens, and vLLM never does",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "asks for 'longrope'; supported of a llama: settings of the type",
        ),
        (
            {"rope_scaling": {"full_attention": rope()}},
            '"rope_scaling" differs from layer to layer',
        ),
        (
            {"partial_rotary_factor": 0.5},
            '"partial_rotary_factor" is 0.5; of a llama, all of a head is rotated',
        ),
        (
            {"attention_bias": True},
            '"attention_bias" is True; a LlamaForCausalLM is supported without',
        ),
        ({"mlp_bias": True}, '"mlp_bias" is True'),
        ({"hidden_act": "gelu"}, '"hidden_act" is \'gelu\'; supported: "silu"'),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.MyForCausalLM"}},
            "code of the model's own",
        ),
        ({"auto_map": "modeling.MyForCausalLM"}, "code of the model's own"),
        ({"sliding_window": 4096}, '"sliding_window" is 4096; a llama of transformers has none'),
        ({"layer_types": ["sliding_attention"] * 4}, "and there is no sliding window in use"),
        (
            {"layer_types": ["chunked_attention"] * 4},
            'needed: "full_attention" or "sliding_attention" for each of 4',
        ),
        (
            {"layer_types": ["full_attention"]},
            'needed: "full_attention" or "sliding_attention" for each of 4',
        ),
        ({"model_type": "mistral"}, 'LlamaForCausalLM needs "llama"'),
    ],
)
def test_what_a_llama_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], told: str):
    assert told in problem(tmp_path, LLAMA_3_2_1B, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"head_dim": ...}, '"head_dim" is missing; needed: a whole number'),
        (
            {"use_sliding_window": True, "sliding_window": 0},
            '"sliding_window" is 0; needed: a whole number from 1',
        ),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": -1},
            "a whole number from 0 to",
        ),
        (
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            "asks for 'ntk'; supported of a qwen3: settings of",
        ),
    ],
)
def test_what_a_qwen3_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], told: str):
    assert told in problem(tmp_path, QWEN3_0_6B, **changes)


def test_a_qwen3_with_experts_tells_how_many_and_how_large_they_are(tmp_path: Path):
    model_shape = shape(tmp_path, QWEN3_30B_A3B)
    assert (model_shape.num_experts, model_shape.experts_per_token, model_shape.ffn_size) == (
        128,
        8,
        768,
    )
    assert model_shape.norm_topk_prob and model_shape.qk_norm
    # transformers 5 writes the number of experts under another name, and leaves nothing unsaid
    renamed = shape(
        tmp_path, QWEN3_30B_A3B, num_experts=..., num_local_experts=64, norm_topk_prob=...
    )
    assert renamed.num_experts == 64 and not renamed.norm_topk_prob
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_experts == 64 and not config.norm_topk_prob


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"mlp_only_layers": [0]},
            '"mlp_only_layers" is [0]; supported are models whose layers all have experts',
        ),
        (
            {"decoder_sparse_step": 2},
            '"decoder_sparse_step" is 2; supported are models whose layers all have experts',
        ),
        ({"num_experts_per_tok": 1}, '"num_experts_per_tok" is 1 and "norm_topk_prob" true'),
        ({"moe_intermediate_size": ...}, '"moe_intermediate_size" is missing'),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention"] * 4,
            },
            "a qwen3_moe of transformers has the window in all layers, one of vLLM's not",
        ),
    ],
    ids=str,
)
def test_what_a_qwen3_with_experts_may_not_ask_for(
    tmp_path: Path, changes: dict[str, Any], told: str
):
    assert told in problem(tmp_path, QWEN3_30B_A3B, **changes)


@pytest.mark.parametrize("window", [131072, 200000])
def test_a_window_over_all_positions_is_none(tmp_path: Path, window: int):
    assert shape(tmp_path, MISTRAL_NEMO, sliding_window=window).sliding_window is None


IN_TURNS = ["sliding_attention", "full_attention"] * 2
SWITCHED = {"use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize(
    ("release", "changes", "window", "full"),
    [
        (MISTRAL_NEMO, {"sliding_window": 4096}, 4096, ()),
        (MISTRAL_NEMO, {"sliding_window": ...}, 4096, ()),
        (MISTRAL_NEMO, {"sliding_window": ..., "max_position_embeddings": 4096}, None, ()),
        (PHI_4_MINI, {"sliding_window": 2047}, 2047, ()),
        (PHI_4_MINI, {"sliding_window": ...}, None, ()),
        (QWEN3_0_6B, {"use_sliding_window": False, "sliding_window": 9}, None, ()),
        (QWEN3_0_6B, {**SWITCHED, "max_window_layers": 0}, 9, ()),
        (QWEN3_0_6B, {**SWITCHED, "max_window_layers": 3}, 9, (0, 1, 2)),
        (QWEN3_0_6B, SWITCHED, None, ()),
        (QWEN3_0_6B, {**SWITCHED, "layer_types": IN_TURNS}, 9, (1, 3)),
        (QWEN3_0_6B, {**SWITCHED, "layer_types": IN_TURNS, "sliding_window": 40960}, None, (1, 3)),
        (QWEN3_30B_A3B, SWITCHED, 9, ()),
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path,
    release: dict[str, Any],
    changes: dict[str, Any],
    window: int | None,
    full: tuple[int, ...],
):
    model_shape = shape(tmp_path, release, **changes)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (model_shape.sliding_window, model_shape.full_attention_layers) == (window, full)
    if window is not None:
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
        assert config.sliding_window == window
        assert full == tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


@pytest.mark.parametrize(
    ("release", "rope", "wanted"),
    [
        (QWEN3_0_6B, {"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        (
            QWEN3_0_6B,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            YarnScaling(4.0, 32.0, 1.0, 32768, pytest.approx(0.1 * math.log(4.0) + 1.0), True),
        ),
        (
            QWEN3_0_6B,
            {"type": "yarn", "factor": 2.0, "mscale": 2.0, "mscale_all_dim": 1.0, "beta_fast": 16},
            YarnScaling(
                2.0,
                16.0,
                1.0,
                40960,
                pytest.approx((0.2 * math.log(2.0) + 1) / (0.1 * math.log(2.0) + 1)),
                True,
            ),
        ),
        (
            QWEN3_0_6B,
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False},
            YarnScaling(4.0, 32.0, 1.0, 40960, 1.5, False),
        ),
        (
            PHI_4_MINI,
            LONG_ROPE,
            LongRopeScaling((1.0,) * 48, pytest.approx(math.sqrt(1 + 5 / 12)), 131072),
        ),
    ],
    ids=["linear", "yarn", "yarn with mscale", "yarn with factor", "longrope"],
)
def test_both_forms_of_rotary_settings_are_read_alike(
    tmp_path: Path, release: dict[str, Any], rope: dict[str, Any], wanted: RopeScaling
):
    """transformers 4 has the base beside the settings, transformers 5 among them."""
    older = shape(tmp_path, release, rope_scaling=rope)
    newer = rope | {
        key: release[key] for key in ("rope_theta", "partial_rotary_factor") if key in release
    }
    changes = {
        "rope_theta": ...,
        "partial_rotary_factor": ...,
        "rope_scaling": ...,
        "rope_parameters": newer,
    }
    assert shape(tmp_path, release, **changes) == older
    assert older.rope_scaling == wanted
    config = AutoConfig.from_pretrained(tmp_path)
    theirs_F, magnitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    torch.testing.assert_close(rotary_frequencies(older), theirs_F, rtol=5e-7, atol=0)
    assert older.rotary_magnitude == pytest.approx(magnitude)


def test_a_phi_4_mini_rotates_a_part_of_every_head_within_its_original_positions(tmp_path: Path):
    model_shape = shape(tmp_path, PHI_4_MINI)
    assert (model_shape.head_dim, model_shape.rotary_dim, model_shape.max_positions) == (
        128,
        96,
        4096,
    )
    plain = shape(tmp_path, PHI_4_MINI, rope_scaling=None, partial_rotary_factor=1.0)
    assert (plain.rotary_dim, plain.max_positions) == (None, 131072)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "supported of a phi3: settings of the type",
        ),
        (
            {"rope_scaling": {**LONG_ROPE, "short_factor": [1.0]}},
            '"short_factor" is [1.0]; needed: a list of 48',
        ),
        (
            {"rope_scaling": {**LONG_ROPE, "short_factor": [0] * 48}},
            '"short_factor" is 0; needed: a number above 0',
        ),
        (
            {"rope_scaling": {**LONG_ROPE, "factor": 8.0}},
            '"factor" of longrope is 8.0; vLLM computes 32',
        ),
        (
            {"rope_scaling": {**LONG_ROPE, "short_mscale": 1.1}},
            '"short_mscale" of longrope is read by vLLM',
        ),
        ({"partial_rotary_factor": 0.7}, "needed: an even number of the 128 dims of a head"),
    ],
    ids=str,
)
def test_what_a_phi_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], told: str):
    assert told in problem(tmp_path, PHI_4_MINI, **changes)


def test_every_fourth_layer_of_a_smollm3_does_not_rotate(tmp_path: Path):
    release = {
        **LLAMA_3_2_1B,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "rope_scaling": None,
    }
    assert shape(tmp_path, release, tie_word_embeddings=...).no_rope_layers == (3,)
    assert shape(tmp_path, release, tie_word_embeddings=...).tied_embeddings, (
        "transformers' default"
    )
    assert AutoConfig.from_pretrained(tmp_path).no_rope_layers == [1, 1, 1, 0]
    assert shape(tmp_path, release, no_rope_layers=[0, 1, 0, 1]).no_rope_layers == (0, 2)
    assert '"no_rope_layers" is [1]; needed: 1 or 0' in problem(
        tmp_path, release, no_rope_layers=[1]
    )
    windows = {"use_sliding_window": True, "sliding_window": 9}
    assert "a smollm3 of transformers has none" in problem(tmp_path, release, **windows)
