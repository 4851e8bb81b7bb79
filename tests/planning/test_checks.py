"""What is told before a run starts: every problem of settings, model folder and training file."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.config.help import all_settings, schema_problems
from rlmath.config.load import load_config
from rlmath.config.model_shape import ModelShape
from rlmath.config.setting_types import Range
from rlmath.distributed.device_kind import CUDA_DEFAULTS
from rlmath.distributed.memory import total_bytes
from rlmath.planning.checks import check_config, transformer_engine_problems
from rlmath.planning.setting_warnings import config_warnings
from rlmath.sandbox import kernel

LAYERS = 6
HIDDEN = 384
HEADS = 12
KV_HEADS = 4
FFN = 24
VOCAB = 11
POSITIONS = 64
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "max_window_layers": 4,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
with torch.device("meta"):
    MODEL = Qwen2ForCausalLM(Qwen2Config(**MODEL_CONFIG))
TENSORS = {name: tuple(parameter.shape) for name, parameter in MODEL.named_parameters()}
SMALL = [
    "data.max_prompt_tokens=16",
    "rollout.max_new_tokens=32",
    "policy.max_tokens_per_microbatch=64",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with `model/` and `train.jsonl`, on which nothing is wrong."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (model / "tokenizer.json").write_text("{}")
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in TENSORS.items()},
        model / "model.safetensors",
    )
    (tmp_path / "train.jsonl").write_text("{}\n")
    return tmp_path


def check(place: Path, *overrides: str, world_size: int = 1) -> ModelShape:
    paths = [
        "run.output_dir=out",
        f"model.path={place / 'model'}",
        f"data.train_path={place / 'train.jsonl'}",
    ]
    return check_config(load_config([], [*paths, *SMALL, *overrides]), world_size).policy


def problems(place: Path, *overrides: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ValueError, match="problem") as error:
        check(place, *overrides, world_size=world_size)
    return str(error.value).split("\n  - ")[1:]


def problem(place: Path, *overrides: str, world_size: int = 1) -> str:
    (only,) = problems(place, *overrides, world_size=world_size)
    return only


def change_model(place: Path, **changes: Any) -> None:
    """Rewrite config.json; a value of ... takes the key out."""
    values = {
        name: value for name, value in {**MODEL_CONFIG, **changes}.items() if value is not ...
    }
    (place / "model" / "config.json").write_text(json.dumps(values))


# ---------------------------------------------------------------- what is right


def test_the_shape_is_what_config_json_says(place: Path):
    assert check(place) == ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=6,
        hidden_size=384,
        num_heads=12,
        num_kv_heads=4,
        head_dim=32,
        ffn_size=24,
        vocab_size=11,
        tied_embeddings=False,
        max_positions=64,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=True,
        torch_dtype="bfloat16",
    )


def test_fields_that_may_be_left_out(place: Path):
    change_model(place, tie_word_embeddings=..., torch_dtype=..., rope_scaling=None, head_dim=None)
    shape = check(place)
    assert (shape.tied_embeddings, shape.torch_dtype, shape.head_dim) == (False, "float32", 32)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["parallel.tensor=4", "parallel.pipeline=2", "rollout.tensor_parallel=2"], 8),
        (["parallel.tensor=2", "parallel.pipeline=3", "parallel.sequence=true"], 12),
        (["rollout.tensor_parallel=4"], 12),
        (["policy.recompute_granularity=selective"], 1),
        (
            [
                "policy.recompute_granularity=full",
                "policy.recompute_method=block",
                "policy.recompute_num_layers=6",
            ],
            1,
        ),
        (["optimizer.decay=cosine", "optimizer.warmup_steps=100"], 1),
        (["run.total_steps=10", "optimizer.warmup_steps=9"], 1),
        (["algorithm.early_stop_ratio=null", "algorithm.early_stop_ratio_low=0.5"], 1),
        (["rollout.max_new_tokens=48"], 1),
    ],
)
def test_runs_that_can_start(place: Path, overrides: list[str], world_size: int):
    assert check(place, *overrides, world_size=world_size).num_layers == LAYERS


def test_values_that_cannot_mean_anything_are_told_of() -> None:
    absurd_values = {
        "rollout.max_new_tokens": "1",
        "rollout.temperature": "1e30",
        "optimizer.lr": "1e30",
        "optimizer.weight_decay": "1e30",
        "reward.timeout_seconds": "1e-9",
        "save.ckpt_freq_secs": "1e-9",
    }
    overrides = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    warnings = config_warnings(
        load_config([], [*overrides, *(f"{key}={value}" for key, value in absurd_values.items())])
    )
    warned_keys = {
        warning.partition("=")[0] for warning in warnings if "hardly what you mean" in warning
    }
    assert warned_keys == set(absurd_values) and config_warnings(load_config([], overrides)) == []


def test_settings_without_effect_are_noted_and_no_error(place: Path):
    overrides = ["run.output_dir=o", "model.path=m", "data.train_path=t", "parallel.sequence=true"]
    (note,) = config_warnings(load_config([], overrides))
    assert note == "parallel.sequence: no effect with parallel.tensor=1."
    (note,) = config_warnings(
        load_config([], [*overrides, "parallel.tensor=2", "optimizer.min_lr=1e-7"])
    )
    assert "optimizer.min_lr" in note
    assert check(place, "parallel.sequence=true")


# ---------------------------------------------------------------- single values


@pytest.mark.parametrize("key", [key for key, setting in all_settings().items() if setting.range])
def test_a_number_out_of_its_range_is_told_with_the_range(key: str):
    limits = all_settings()[key].range
    kind = all_settings()[key].type_name
    assert limits is not None
    paths = ["run.output_dir=out", "model.path=model", "data.train_path=train.jsonl"]
    for value in just_outside(limits, whole=kind.removeprefix("list of ").startswith("int")):
        override = f"{key}=[1,{value}]" if kind.startswith("list") else f"{key}={value}"
        messages = schema_problems(load_config([], [*paths, override]))
        finite = (
            "" if value[-1].isdigit() or str(limits) == "a finite number" else "a finite number, "
        )
        needed = f"needed: {finite}{limits}.{_why(limits)}"
        assert any(text.startswith(f"{key} is ") and needed in text for text in messages), value


def just_outside(limits: Range, whole: bool) -> list[str]:
    """Values that a range does not hold, as one writes them on the command line."""
    step = 1 if whole else 1e-3
    below = limits.low if limits.open_low else limits.low - step
    above = limits.high if limits.open_high else limits.high + step
    finite = [value for value in (below, above) if math.isfinite(value)]
    return (
        [f"{value:.0f}" for value in finite]
        if whole
        else [*map(str, finite), ".inf", "-.inf", ".nan"]
    )


def _why(limits: Range) -> str:
    return f" {limits.why}" if limits.why else ""


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "rollout.top_p=0.9",
            "rollout.top_p is 0.9; needed: 1. The trainer computes the whole distribution",
        ),
        (
            "rollout.top_k=50",
            "rollout.top_k is 50; needed: -1. The trainer computes the whole distribution",
        ),
        (
            "algorithm.early_stop_ratio=1",
            "needed: above 1. Before the first update the ratio is 1.",
        ),
        (
            "optimizer.kind=adamw",
            'optimizer.kind is "adamw"; needed: one of "adam", "sgd". Did you mean "adam"?',
        ),
    ],
)
def test_a_single_wrong_value(place: Path, override: str, told: str):
    assert told in problems(place, override)[0]


# ---------------------------------------------------------------- values together


@pytest.mark.parametrize(
    ("overrides", "world_size", "told"),
    [
        (
            ["parallel.tensor=3"],
            3,
            "parallel.tensor is 3; it must divide the model's 4 key-value heads. Possible: 1, 2, "
            "4.",
        ),
        (
            ["rollout.tensor_parallel=8"],
            8,
            "rollout.tensor_parallel is 8; it must divide the model's 12 attention heads.",
        ),
        (["rollout.tensor_parallel=6"], 6, "needed: a divisor or a multiple of 4"),
        (
            ["rollout.tensor_parallel=12"],
            12,
            f"the model's vocabulary of {VOCAB} up to 64 rows and must split them evenly. "
            "Possible: 1, 2, 4.",
        ),
        (
            ["rollout.min_new_tokens=33"],
            1,
            "rollout.min_new_tokens is 33, above rollout.max_new_tokens 32",
        ),
        (["policy.max_tokens_per_microbatch=47"], 1, "has 16 + 32 = 48 tokens and must fit"),
        (
            ["rollout.max_new_tokens=50", "policy.max_tokens_per_microbatch=100"],
            1,
            "data.max_prompt_tokens + rollout.max_new_tokens is 16 + 50 = 66; the model has 64 "
            "positions "
            "(max_position_embeddings). Lower the sum by 2.",
        ),
        (["rollout.max_num_batched_tokens=100"], 1, "is 100, below rollout.max_num_seqs 256"),
        (
            ["rollout.max_num_batched_tokens=47", "rollout.max_num_seqs=4"],
            1,
            "is 47; on CPU vLLM does not split prompts and needs at least the longest sequence, "
            "48 tokens",
        ),
        (
            [
                "rollout.max_num_batched_tokens=40",
                "rollout.max_num_seqs=4",
                "rollout.chunked_prefill=false",
            ],
            1,
            "without rollout.chunked_prefill vLLM needs at least the longest sequence, 48 tokens",
        ),
        (
            ["optimizer.lr=1e-6", "optimizer.min_lr=1e-5"],
            1,
            "optimizer.min_lr is 1e-05, above optimizer.lr 1e-06",
        ),
        (
            ["reward.overlong_buffer=33"],
            1,
            "reward.overlong_buffer is 33, above rollout.max_new_tokens 32",
        ),
        (
            ["reward.scheme=mix", "reward.format_penalty=1"],
            1,
            "reward.format_penalty is 1.0; a right answer",
        ),
        (
            ["policy.recompute_granularity=full", "policy.recompute_method=uniform"],
            1,
            "policy.recompute_num_layers is null; ",
        ),
        (
            ["policy.recompute_granularity=full", "policy.recompute_num_layers=1"],
            1,
            'policy.recompute_method is null; policy.recompute_granularity="full" needs it. '
            "Set, say, policy.recompute_method=uniform.",
        ),
        (
            ["policy.recompute_method=block"],
            1,
            'policy.recompute_method is block; only policy.recompute_granularity="full"',
        ),
        (
            ["policy.recompute_granularity=selective", "policy.recompute_num_layers=1"],
            1,
            "Set policy.recompute_num_layers=null.",
        ),
    ],
)
def test_values_that_do_not_fit_together(
    place: Path, overrides: list[str], world_size: int, told: str
):
    assert told in problem(place, *overrides, world_size=world_size)


def test_cuda_without_a_gpu(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device. Use run.device=cpu" in problem(place, "run.device=cuda")


def test_transformer_engine_that_cannot_be_imported(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The check goes by the import, as the choice of the layers does, not by what is installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in CUDA_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    broken = package / "pytorch.py"
    broken.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    message = problem(place, "run.device=auto")
    assert (
        'policy.transformer_impl is "transformer_engine", which cannot be imported here '
        "(ImportError: " in message
    )
    assert (
        "libcudart.so.13" in message
        and "set policy.transformer_impl=local, which is slower." in message
    )
    broken.write_text("assert False, 'versions differ'")
    assert "(AssertionError: versions differ). Install it" in problem(place, "run.device=auto")
    assert not list(transformer_engine_problems("local"))
    broken.write_text("")
    assert not list(transformer_engine_problems("transformer_engine"))


def test_all_problems_are_told_at_once(place: Path):
    (place / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="problem") as error:
        check(
            place,
            "rollout.group_size=1",
            "optimizer.decay=x",
            "parallel.tensor=0",
            f"data.train_path={place}/t",
        )
    message = str(error.value)
    assert message.startswith("5 problems with this run:")
    for part in ("group_size", "decay", "parallel.tensor is 0", "no tokenizer", "no file"):
        assert part in message


# ---------------------------------------------------------------- files


def test_a_training_file_that_is_not_there_names_the_nearest(place: Path):
    message = problem(place, f"data.train_path={place}/trian.jsonl")
    assert f'there is no file "{place}/trian.jsonl". There is "{place}/train.jsonl".' in message
    for name, near in {
        "boba.jsonl": "",
        "Train.json": ' There is "{}".',
        "train.parquet": ' There is "{}".',
    }.items():
        message = problem(place, f"data.train_path={place}/{name}")
        assert message.endswith(
            f'there is no file "{place}/{name}".{near.format(place / "train.jsonl")}'
        )


def test_training_files_that_are_missing_or_empty(place: Path):
    message = problem(place, f"data.more_train_paths=[{place}/trian.jsonl]")
    assert (
        message.startswith("data.more_train_paths: there is no file") and "train.jsonl" in message
    )
    odd = " is neither a file nor a folder, nor a link to one. Give one."
    assert problem(place, "data.more_train_paths=[/dev/null]").endswith(f'"/dev/null"{odd}')
    (place / "link.jsonl").symlink_to(place / "unmounted")
    assert problem(place, f"data.more_train_paths=[{place}/link.jsonl]").endswith(
        f'/link.jsonl"{odd}'
    )
    (place / "train.jsonl").write_text("")
    assert "is empty" in problem(place)


def test_a_model_folder_that_is_not_there_names_the_nearest(place: Path):
    message = problem(place, f"model.path={place}/models")
    assert f'there is no folder "{place}/models". There is "{place}/model".' in message
    assert "is not a folder" in problem(place, f"model.path={place}/train.jsonl")
    assert "not expanded" in problem(place, "model.path=~/no/such/model")


def test_the_model_in_the_folder_of_a_run_is_named(place: Path):
    shutil.copytree(place / "model", place / "sft" / "hf_model")
    assert (
        f'It is the folder of a run: give "{place}/sft/hf_model".'
        in problems(place, f"model.path={place}/sft")[0]
    )


def test_a_folder_without_the_files_of_a_model(place: Path):
    (place / "empty").mkdir()
    messages = problems(place, f"model.path={place}/empty")
    assert "has no config.json" in messages[0]
    assert "neither model.safetensors nor model.safetensors.index.json" in messages[1]
    assert "no tokenizer: neither tokenizer.json nor vocab.json with merges.txt" in messages[2]


def test_a_tokenizer_may_be_a_vocabulary_with_merges(place: Path):
    (place / "model" / "tokenizer.json").rename(place / "model" / "vocab.json")
    assert "no tokenizer" in problem(place)
    (place / "model" / "merges.txt").write_text("")
    check(place)


def split_weights(place: Path) -> Path:
    """Two shards with an index in place of the one file; returns the index."""
    model = place / "model"
    (model / "model.safetensors").unlink()
    names = sorted(TENSORS)
    weight_map = {}
    for shard, part in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        save_file({name: np.zeros(TENSORS[name], np.float16) for name in part}, model / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_an_index_and_its_files(place: Path):
    index = split_weights(place)
    check(place)
    (place / "model" / "b.safetensors").unlink()
    assert "names 2 files, 1 are not there: b.safetensors" in problem(place)
    index.write_text(index.read_text().replace("b.safetensors", "x" * 300))
    assert "1 are not there: xxx" in problem(place)
    index.write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    assert "names files outside of its folder" in problem(place)
    deep = '{"weight_map": ' + "[" * 5000
    long = '{"weight_map": {"a": 1' + "0" * 6000 + "}}"
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": 3}', "\xff", deep, long):
        index.write_bytes(text.encode("latin-1"))
        assert "model.safetensors.index.json" in problem(place)


def test_an_index_that_looks_into_the_wrong_file(place: Path):
    index = split_weights(place)
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "a.safetensors"
    values["weight_map"]["lm_head.weight"] = "b.safetensors"
    index.write_text(json.dumps(values))
    messages = problems(place)
    assert any(
        'a.safetensors" lacks 1 tensors that the index looks for there: model.norm' in t
        for t in messages
    )


def test_an_index_that_leaves_a_tensor_out(place: Path):
    index = split_weights(place)
    values = json.loads(index.read_text())
    del values["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(values))
    assert problem(place).endswith("tensors are not in the weights: model.norm.weight.")


def test_weights_that_are_cut_off(place: Path):
    path = place / "model" / "model.safetensors"
    for end in (-10, 4, 0):
        path.write_bytes(path.read_bytes()[:end])
        assert "is not a whole safetensors file" in problem(place)


def test_weights_that_do_not_belong_to_config_json(place: Path):
    change_model(place, intermediate_size=12, num_hidden_layers=7)
    absent, first, *_ = problems(place)
    assert "12 of 87 tensors are not in the weights: model.layers.6." in absent
    assert (
        "model.layers.0.mlp.gate_proj.weight has shape (24, 384), config.json makes it (12, 384)"
        in first
    )


def test_tied_embeddings_need_no_output_layer(place: Path):
    part = {
        name: np.zeros(shape, np.float16)
        for name, shape in TENSORS.items()
        if name != "lm_head.weight"
    }
    save_file(part, place / "model" / "model.safetensors")
    assert "lm_head.weight" in problem(place)
    change_model(place, tie_word_embeddings=True)
    assert check(place).tied_embeddings


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '"\ud800"'])
def test_a_config_json_that_is_no_object(place: Path, text: str):
    (place / "model" / "config.json").write_text(text, errors="surrogatepass")
    assert "config.json" in problem(place)


def test_an_architecture_that_is_not_supported(place: Path):
    change_model(place, architectures=["Qwen2ForCausalLMs"])
    message = problem(place)
    assert '"Qwen2ForCausalLMs" is not supported; supported: ' in message
    assert 'Did you mean "Qwen2ForCausalLM"?' in message
    change_model(place, architectures=["Gemma2ForCausalLM"])
    assert '"Gemma2ForCausalLM" is not supported (no layer of Megatron\'s has its norms' in problem(
        place
    )
    for odd in (..., None, [], "Qwen2ForCausalLM", [3]):
        change_model(place, architectures=odd)
        assert '"architectures" is ' in problem(place)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_sizes_that_are_missing_or_odd(place: Path, key: str):
    for odd, shown in (
        (..., "missing"),
        ("48", "'48'"),
        (4.5, "4.5"),
        (0, "0"),
        (-1, "-1"),
        (True, "True"),
        (2**40, "1099"),
    ):
        change_model(place, **{key: odd})
        messages = [text for text in problems(place) if f'"{key}" is {shown}' in text]
        assert len(messages) == 1 and "needed: a whole number from 1 to " in messages[0]


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_numbers_that_are_missing_or_odd(place: Path, key: str):
    for odd in (..., None, "1", 0, -1.0, float("nan"), float("inf"), True):
        change_model(place, **{key: odd})
        assert f'"{key}" is ' in problem(place) and "needed: a number above 0" in problem(place)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"num_key_value_heads": 5},
            '"num_attention_heads" 12 is not a multiple of "num_key_value_heads" 5',
        ),
        ({"tie_word_embeddings": "no"}, "\"tie_word_embeddings\" is 'no'; needed: true or false"),
        (
            {"torch_dtype": "float8"},
            "\"torch_dtype\" is 'float8'; needed: one of float32, bfloat16, float16",
        ),
        ({"dtype": ["float32"]}, "\"dtype\" is ['float32']"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "the weights are quantized; training needs plain ones",
        ),
    ],
)
def test_what_is_not_supported_or_does_not_fit(place: Path, changes: dict[str, Any], told: str):
    change_model(place, **changes)
    assert told in problem(place)


def test_a_sliding_window_out_of_use_is_fine(place: Path):
    change_model(place, use_sliding_window=True, layer_types=["full_attention"] * LAYERS)
    check(place)


def test_key_value_heads_of_null_are_as_many_as_heads(place: Path):
    change_model(place, num_key_value_heads=None)
    assert read_model_shape(place / "model").num_kv_heads == HEADS


def test_the_shape_alone_needs_config_json_only(place: Path):
    for name in ("model.safetensors", "tokenizer.json"):
        (place / "model" / name).unlink()
    assert read_model_shape(place / "model").num_layers == LAYERS
    change_model(place, vocab_size=..., rope_theta=0)
    with pytest.raises(ValueError, match="2 problems with the model"):
        read_model_shape(place / "model")


def test_sgd_has_no_state_to_share(place: Path):
    message = problem(place, "optimizer.kind=sgd")
    assert "optimizer.distributed" in message and 'With kind "sgd" set it to false' in message
    check(place, "optimizer.kind=sgd", "optimizer.distributed=false")


def test_a_head_dim_that_the_engine_cannot_run_on_cpu(place: Path):
    change_model(place, num_attention_heads=24, num_key_value_heads=8)
    messages = problems(place, "run.device=cpu")
    assert any(
        "head dim is 16; vLLM's attention on CPU has only 32, 64" in text for text in messages
    )


def test_a_kv_cache_that_cannot_hold_one_sequence(place: Path):
    # 48 tokens: 1 block and one to spare, 6 layers x 2 x 4 heads x 32 x 4 bytes x 256 tokens = 1.5
    # MiB
    message = problem(place, "rollout.cpu_kv_cache_gib=0.0014")
    assert "one sequence of 48 tokens" in message and "needs 0.00146 GiB" in message
    check(place, "rollout.cpu_kv_cache_gib=0.0015")


def test_a_kv_cache_larger_than_the_memory_of_the_machine(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    total = total_bytes() / 2**30
    message = problem(place, "rollout.cpu_kv_cache_gib=5000")
    assert message.startswith(
        f"rollout.cpu_kv_cache_gib is 5000; this machine has {total:.1f} GiB of memory, of which"
    )
    # One such cache has room, all of them together have not.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "200")
    message = problem(place, f"rollout.cpu_kv_cache_gib={total / 100:.3f}", world_size=200)
    assert "for each of the 200 ranks on this machine" in message
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check(place, f"rollout.cpu_kv_cache_gib={total / 100:.3f}")


def test_a_reward_function_is_imported_once_for_all_stages(place: Path):
    file = place / "mine.py"
    file.write_text(
        "from pathlib import Path\nwith Path(__file__).with_name('imports').open('a') as f:\n    "
        "f.write('x')\n"
    )
    stages = ("stages.steps=[2,3,4]", "stages.max_new_tokens=[8,12,16]")
    (message,) = problems(place, f"reward.function={file}:reward", *stages)
    assert "has no function 'reward'" in message
    assert (place / "imports").read_text() == "x"


def test_a_name_of_the_hub_is_told_how_to_be_downloaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(place)
    message = problem(place, "model.path=Qwen/Qwen2.5-0.5B")
    assert "which is written hf://Qwen/Qwen2.5-0.5B. Give that, or run" in message
    assert 'run "hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B"' in message
    assert message.endswith("and give model.path models/Qwen2.5-0.5B.")
    (place / "Qwen").mkdir()  # a folder of one's own
    for path in ("Qwen/Qwen2.5-0.5B", "models/mine", "/Qwen/Qwen2.5-0.5B", "a/b/c", "tiny"):
        assert "hf download" not in problem(place, f"model.path={path}")


def test_a_tool_needs_a_machine_that_isolates_it(place: Path, monkeypatch: pytest.MonkeyPatch):
    change_model(place, max_position_embeddings=128)
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    lengths = "policy.max_tokens_per_microbatch=128"
    tools = ["tools.max_calls=1", "tools.max_output_tokens=64", "tools.format=fence"]
    check(place, lengths, "tools.format=null")
    told = problem(place, lengths, *tools)
    assert told.startswith("tools.isolation: ") and "kernel with Landlock" in told
