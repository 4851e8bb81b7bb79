"""What LoRA changes in a run's plan, and what is refused and told before it starts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.peft import other_base_warnings
from rlmath.checkpoint.hf.run_shapes import inspect_run_shapes, read_run_shapes
from rlmath.config.load import load_config
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    Kind,
    LoraConfig,
    MemoryConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
)
from rlmath.planning.checks import only_used, shape_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import (
    RESERVE_GIB,
    RESERVE_SHARE,
    all_plans,
    keeps_base,
    usable_bytes,
)
from rlmath.planning.memory_formulas import layer_elements
from rlmath.planning.planner.rollout import plan_rollout
from rlmath.planning.planner.step import sync_seconds
from rlmath.planning.planner.training import gradient_seconds, update_seconds
from rlmath.planning.setting_warnings import config_warnings
from tests.planning.of_policy import lines_at_start, problems_of_shapes, rank_plans
from tests.planning.planner.shapes import (
    BATCH,
    CONFIG,
    GPU,
    HEAD_FLOPS,
    LAYER_FLOPS,
    PAIR_FLOPS,
    inputs,
)
from tests.planning.test_memory_estimate import (
    CPU,
    GIB,
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


def engine_weights(lora: LoraConfig, engine: int = 1) -> int:
    settings = config(lora=lora, rollout=RolloutConfig(tensor_parallel=engine))
    return rank_plans(settings, QWEN_7B, engine, H100)[0].part("engine_weights")


def test_an_engine_holds_adapters_filled_up_to_the_next_rank_of_vllm():
    base = engine_weights(LoraConfig())
    assert engine_weights(LoraConfig(rank=32)) == base + 2 * ADAPTERS
    assert engine_weights(LoraConfig(rank=17)) == base + 2 * ADAPTERS
    assert engine_weights(LoraConfig(rank=257)) == base + 2 * 10 * ADAPTERS
    assert engine_weights(LoraConfig(rank=32, engine="merged")) == base


def test_ranks_of_an_engine_have_all_of_a_where_rows_are_split_and_all_of_b_where_columns_are():
    eighth = engine_weights(LoraConfig(), 8)
    # A of gate and up, whole, and their B; A of down, and its B, whole.
    mlp = 2 * 3584 + 2 * 18944 // 8 + 18944 // 8 + 3584
    assert engine_weights(LoraConfig(rank=32, target="mlp"), 8) == eighth + 2 * 28 * 32 * mlp
    # Each of 28 ranks has one of the 28 heads, and a copy of one of the four key-value heads.
    base = engine_weights(LoraConfig(), 28)
    attention = 3 * 3584 + 3 * 128 + 128 + 3584
    adapted = engine_weights(LoraConfig(rank=32, target="attention"), 28)
    assert adapted == base + 2 * 28 * 32 * attention


RECOMPUTED = PolicyConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
LORA = config(lora=LoraConfig(rank=32), policy=RECOMPUTED)


def keeps(settings: Config, target: Target, ranks: int = 1) -> bool:
    return keeps_base(settings, read_run_shapes(settings, QWEN_7B), ranks, target=target)


def gpu_with(usable: int) -> Target:
    """A GPU of which a run may fill so many bytes, or up to one more."""
    total = math.ceil((usable + RESERVE_GIB * GIB) / (1 - RESERVE_SHARE))
    assert 0 <= usable_bytes(replace(H100, total_bytes=total)) - usable <= 1
    return replace(H100, total_bytes=total)


def test_the_base_stays_in_the_engine_where_every_phase_has_room_for_it():
    settings = replace(LORA, rollout=RolloutConfig(kv_cache_gib=1.0))
    (without,) = rank_plans(settings, QWEN_7B, 1, H100)
    shapes = read_run_shapes(settings, QWEN_7B)
    (kept,) = all_plans(settings, shapes, 1, target=H100)
    for phase in ("logprobs", "update"):
        engine = without.part("engine_weights")
        assert kept.held(phase) == without.held(phase) + engine, phase
        assert kept.phases[phase]["engine_weights"] == engine
    fullest = kept.held(kept.worst)
    assert kept.worst == "update"
    assert keeps(settings, gpu_with(fullest))
    small = gpu_with(fullest - 2)
    assert not keeps(settings, small)
    (asleep,) = all_plans(settings, shapes, 1, target=small)
    assert asleep.phases["update"] == without.phases["update"]


def test_the_base_stays_on_cpu_and_on_ranks_of_the_engines_and_never_where_weights_are_merged():
    tiny = replace(H100, total_bytes=4 * GIB)
    assert keeps(LORA, CPU)
    assert keeps(replace(LORA, rollout=RolloutConfig(ranks=1)), tiny, ranks=2)
    for lora in (LoraConfig(), LoraConfig(rank=32, engine="merged")):
        assert not keeps(config(lora=lora), H100) and not keeps(config(lora=lora), CPU)


def test_a_sync_of_adapters_merges_nothing_and_sends_only_them_where_the_base_stays():
    shapes = read_run_shapes(LORA, QWEN_7B)
    (plan,) = all_plans(LORA, shapes, 1, target=H100)
    assert plan.part("sync_buffers") == 2 * 2 * 18944 * 32  # B of gate and up times its scale
    merged = config(lora=LoraConfig(rank=32, engine="merged"))
    assert rank_plans(merged, QWEN_7B, 1, H100)[0].part("sync_buffers") > 0.3 * GIB
    # Two stages exchange what an engine lacks, in buckets of 64 MiB and, for adapters, of theirs.
    attention = LoraConfig(rank=8, target="attention")
    staged = replace(LORA, lora=attention, parallel=ParallelConfig(pipeline=2))
    adapters = 2 * 28 * 8 * (4 * 3584 + (3584 + 2 * 512) + 3584)
    scaled = 2 * (3584 + 2 * 512) * 8
    plan, _ = all_plans(staged, read_run_shapes(staged, QWEN_7B), 2, target=H100)
    assert plan.part("sync_buffers") == scaled + 4 * adapters
    plan, _ = rank_plans(staged, QWEN_7B, 2, H100)
    assert plan.part("sync_buffers") == scaled + 4 * 64 * 2**20


def test_the_start_tells_whether_the_weights_stay_on_the_device():
    large = replace(LORA, memory=MemoryConfig(gpu="H200-141GB"))
    assert lines_at_start(large, QWEN_7B, 1)[-1] == (
        "Engines sample with LoRA's adapters, 0.15 GiB a rank; the model's weights stay on the "
        "device, 14.20 GiB a rank, and are sent once"
    )
    small = replace(LORA, memory=MemoryConfig(gpu="A100-40GB"))
    assert lines_at_start(small, QWEN_7B, 1)[-1].endswith(
        "sent again at each rollout: 14.20 GiB a rank"
    )
    for settings, kind in (
        (config(lora=LoraConfig(rank=32, engine="merged")), "grpo"),
        (config(), "grpo"),
        (LORA, "sft"),
    ):
        lines = lines_at_start(settings, QWEN_7B, 1, kind)
        assert not any("Engines sample" in line for line in lines)


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


def test_an_engine_multiplies_by_adapters_and_a_sync_sends_only_them_where_the_base_stays():
    lora = replace(CONFIG, lora=LoraConfig(rank=2))
    merged = replace(CONFIG, lora=LoraConfig(rank=2, engine="merged"))
    # Filled up to rank 8: four square matrices of 8 and three of 8 x 16 in each of 4 layers.
    adapters = 2 * 4 * 8 * (4 * 16 + 3 * 24)
    assert sync_seconds(inputs(lora, 1, memory=1.0)) == 2 * adapters
    base = sync_seconds(inputs(merged, 1, memory=1.0))
    full = replace(inputs(lora, 1, memory=1.0), target=replace(GPU, total_bytes=3 * 2**30))
    assert sync_seconds(full) == base + 2 * adapters
    plain, adapted = (plan_rollout(inputs(run, 1, flops=1.0)) for run in (merged, lora))
    # 80 sampled tokens, and the prompts of 6 tokens of all 8 samples.
    assert adapted.seconds - plain.seconds == pytest.approx(128 * adapters, rel=0.01)
    done = inputs(lora, 1)
    slow = replace(done.cluster.coefficients, adapter_seconds=1.0)
    cluster = replace(done.cluster, coefficients=slow)
    plan = plan_rollout(replace(done, cluster=cluster))
    # Two linear layers of attention and two of the feed-forward network in each of 4 layers.
    assert plan.seconds == pytest.approx(16 * plan.steps, rel=0.05)
    assert plan_rollout(replace(done, cluster=cluster, config=merged)).seconds == 0


@pytest.mark.parametrize(
    ("rank", "engine", "kind", "refused"),
    [
        (512, "adapters", "grpo", False),
        (513, "adapters", "grpo", True),
        (513, "merged", "grpo", False),
        (513, "adapters", "sft", False),
    ],
)
def test_ranks_that_vllm_has_no_buffers_for_are_refused(
    rank: int, engine: str, kind: Kind, refused: bool
) -> None:
    settings = config(lora=LoraConfig(rank=rank, engine=engine))
    problems = shape_problems(settings, inspect_run_shapes(settings, QWEN_7B, kind), kind)
    about_rank = [problem for problem in problems if problem.startswith("lora.rank is 513")]
    assert len(about_rank) == refused
    assert not refused or "or set lora.engine=merged" in about_rank[0]


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


def test_engines_that_round_small_updates_are_told():
    rank, lr, merged = "lora.rank=8", "optimizer.lr=1e-5", "lora.engine=merged"
    (warning,) = warnings(rank, lr, merged, "policy.dtype=bfloat16")
    assert warning.startswith('lora.engine="merged" rounds the engines\' weights to bfloat16')
    assert "lora.engine=adapters keeps them" in warning
    assert warnings(rank, lr, merged, "policy.dtype=float32") == []
    assert warnings(rank, lr, "policy.dtype=bfloat16") == []


def test_settings_without_effect_beside_lora_and_without_it_are_told():
    assert warnings("lora.engine=merged", "save.merged_dtype=float32") == [
        "lora.engine, save.merged_dtype: no effect with lora.rank=0: all weights learn."
    ]
    (unmerged,) = warnings(
        "lora.rank=8", "optimizer.lr=1e-5", "save.merged=false", "save.merged_dtype=float32"
    )
    assert unmerged.startswith("save.merged_dtype: no effect with lora.rank")
    assert warnings("lora.alpha=16") == [
        "lora.alpha: no effect with lora.rank=0: all weights learn."
    ]
    (warning,) = warnings(
        "lora.rank=8", "optimizer.lr=1e-5", "algorithm.kl_coef=0.1", "memory.offload_reference=true"
    )
    assert warning.startswith("memory.offload_reference: no effect with lora.rank")


def test_supervised_training_has_adapters():
    settings = Config(lora=LoraConfig(rank=8, alpha=16.0, target="attention"))
    assert only_used(settings) == (settings, [])
    sampling = replace(settings, lora=replace(settings.lora, engine="merged"))
    assert only_used(sampling) == (settings, ["lora.engine"])


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
