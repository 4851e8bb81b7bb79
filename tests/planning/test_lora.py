"""What LoRA changes in a run's plan, and what is refused and told before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.peft import other_base_warnings
from rlmath.config.load import load_config
from rlmath.config.schema import AlgorithmConfig, Config, LoraConfig, ParallelConfig
from rlmath.planning.checks import only_used
from rlmath.planning.memory_formulas import layer_elements
from rlmath.planning.planner.training import gradient_seconds, update_seconds
from rlmath.planning.setting_warnings import config_warnings
from tests.planning.of_policy import problems_of_shapes, rank_plans
from tests.planning.planner.shapes import BATCH, CONFIG, HEAD_FLOPS, LAYER_FLOPS, PAIR_FLOPS, inputs
from tests.planning.test_memory_estimate import (
    H100,
    ONE_LAYER,
    PARAMETERS,
    QWEN_7B,
    QWEN_30B_A3B,
    config,
    work,
)

ADAPTERS = 28 * 32 * (2 * 3584 + 2 * (3584 + 512) + 2 * 3584 + 3 * (3584 + 18944))
"""Parameters of Qwen2.5-7B's adapters at rank 32.

Query and output, key and value, and the three matrices of the feed-forward network."""


def test_adapters_alone_have_gradients_and_an_optimizer_and_the_reference_is_the_policy():
    lora = config(lora=LoraConfig(rank=32), algorithm=AlgorithmConfig(kl_coef=0.1))
    (plan,) = rank_plans(lora, QWEN_7B, 1, H100)
    assert plan.part("parameters") == 2 * (PARAMETERS + ADAPTERS)
    assert (plan.part("gradients"), plan.part("optimizer")) == (4 * ADAPTERS, 12 * ADAPTERS)
    assert plan.part("reference") == plan.part("dummy_gradients") == 0
    assert (
        plan.phases["reference"] == plan.phases["logprobs"]
    )  # it takes time, and no memory of its own
    # Four tensor-parallel ranks: A of qkv and fc1, and B of proj and fc2, are on all of them.
    whole = 28 * 32 * (3 * 3584 + 3584 + 2 * 3584 + 3584)
    (plan, *_) = rank_plans(replace(lora, parallel=ParallelConfig(tensor=4)), QWEN_7B, 4, H100)
    assert plan.part("gradients") == 4 * (whole + (ADAPTERS - whole) // 4)


def test_a_critic_has_no_adapters():
    sections = config(algorithm=AlgorithmConfig(advantage="gae"))
    full, lora = (
        rank_plans(replace(sections, lora=LoraConfig(rank=rank)), QWEN_7B, 1, H100)[0]
        for rank in (0, 8)
    )
    for part in ("critic_parameters", "critic_gradients", "critic_optimizer"):
        assert lora.part(part) == full.part(part) > 0


def test_what_enters_layers_without_adapters_is_not_kept():
    # 64 wide, 4 heads of 16 with keys of their own, 256 feed-forward units, 10 tokens.
    full = layer_elements(ONE_LAYER, work())
    elements = {
        target: layer_elements(ONE_LAYER, work(lora=LoraConfig(rank=2, target=target)))
        for target in ("all", "attention", "mlp")
    }
    # Products with A: of query, key and value, and of the projection; of gate and up, and of fc2.
    # The rows of B among zeros are shared out to 10 tokens: 3 x 64 rows of 3 x 2, 512 rows of 2 x
    # 2.
    attention = (3 + 1) * 2 + -(-192 * 6 // 10)
    mlp = (2 + 1) * 2 + -(-512 * 4 // 10)
    assert elements["all"] == full + attention + mlp
    assert elements["attention"] == full + attention - 64 - 256
    assert elements["mlp"] == full + mlp - 64


def test_the_backward_pass_has_half_of_the_products_and_adapters_alone_are_exchanged():
    lora = replace(CONFIG, lora=LoraConfig(rank=2))
    matrices = BATCH.tokens * (4 * LAYER_FLOPS + HEAD_FLOPS)
    attention = BATCH.squares * PAIR_FLOPS
    assert update_seconds(inputs(lora, 1, flops=1.0)) == pytest.approx(2 * matrices + 3 * attention)
    done = inputs(lora, 8, node=1.0)
    # Each of 4 layers has 4 square matrices of 8 and 3 of 8 x 16; scattered in float32, gathered in
    # bfloat16.
    sent = 4 * 2 * (4 * 16 + 3 * 24) * 6 * 7 / 8
    assert gradient_seconds(done, done.mesh, 4) == pytest.approx(sent)


@pytest.mark.parametrize(
    ("target", "refused"), [("all", True), ("mlp", True), ("attention", False)]
)
def test_experts_get_no_adapters(target: str, refused: bool):
    settings = config(lora=LoraConfig(rank=8, target=target))
    problems = [
        problem
        for problem in problems_of_shapes(settings, QWEN_30B_A3B)
        if problem.startswith("lora.target")
    ]
    assert bool(problems) == refused
    assert (
        not refused
        or "has experts, which get no adapters. Set lora.target=attention" in problems[0]
    )
    assert not [
        problem for problem in problems_of_shapes(settings, QWEN_7B) if problem.startswith("lora.")
    ]


def warnings(*overrides: str) -> list[str]:
    all_overrides = ["run.output_dir=o", "model.path=m", "data.train_path=t", *overrides]
    return config_warnings(load_config([], all_overrides))


def test_a_learning_rate_of_full_training_is_told():
    (warning,) = warnings("lora.rank=8", "optimizer.lr=1e-6")
    assert warning.startswith("optimizer.lr=1e-06 is a learning rate of full training")
    critic = ("lora.rank=8", "optimizer.lr=2e-5", "algorithm.advantage=gae")
    (warning,) = warnings(*critic)
    assert warning.startswith("critic.lr is twice optimizer.lr=2e-05, a learning rate of adapters")
    assert (
        warnings(*critic, "critic.lr=2e-6")
        == warnings("lora.rank=8", "optimizer.lr=2e-5")
        == warnings("optimizer.lr=1e-6")
        == []
    )


def test_settings_without_effect_beside_lora_and_without_it_are_told():
    assert warnings("lora.alpha=16") == [
        "lora.alpha: no effect with lora.rank=0: all weights learn."
    ]
    assert warnings("save.merged_dtype=float32", "lora.engine=merged") == [
        "lora.engine, save.merged_dtype: no effect with lora.rank=0: there are no adapters."
    ]
    alone = ("lora.rank=8", "optimizer.lr=1e-5", "save.merged_dtype=float32")
    (warning,) = warnings(*alone, "save.merged=false")
    assert warning.startswith("save.merged_dtype: no effect with lora.rank and with save.merged=")
    assert warnings(*alone, "lora.engine=merged") == []
    (warning,) = warnings(
        "lora.rank=8", "optimizer.lr=1e-5", "algorithm.kl_coef=0.1", "memory.offload_reference=true"
    )
    assert warning.startswith("memory.offload_reference: no effect with lora.rank")


def test_supervised_training_has_adapters():
    settings = Config(lora=LoraConfig(rank=8, alpha=16.0, target="attention"))
    assert only_used(settings) == (settings, [])


@pytest.mark.parametrize(
    ("named", "warns"),
    [
        ("Qwen/Qwen2.5-1.5B", True),
        ("/home/me/models/other", True),
        ("acme/Base", False),
        ("/home/me/base/", False),
        ("/cache/models--acme--base/snapshots/0123abc", False),
        ("COPY", False),
        ("", False),
        (None, False),
    ],
)
def test_adapters_of_another_base_model_are_told_with_both_names(
    tmp_path: Path, named: str | None, warns: bool
) -> None:
    base = tmp_path / "base"
    copy = tmp_path / "a copy"
    adapter = tmp_path / "adapter"
    for folder in (base, copy, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    named = str(copy) if named == "COPY" else named
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    warnings = list(other_base_warnings(str(adapter), str(base)))
    assert len(warnings) == warns
    assert not warns or (
        f"trained on {named!r}" in warnings[0] and f'model.path is "{base}"' in warnings[0]
    )


def test_no_adapter_has_no_other_base() -> None:
    assert list(other_base_warnings(None, "base")) == []
