"""What the settings make of the parts of a run.

Whole objects are compared, from settings of which no two are alike."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmath.algorithms.advantages import advantages, gdpo_advantages
from rlmath.algorithms.dynamic_sampling import SelectionRules
from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import LossSettings, Normalisation
from rlmath.algorithms.partial_rollouts import UnfinishedRules
from rlmath.algorithms.prompt_history import CurriculumRules
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.answers.verifier import Rules
from rlmath.checkpoint.hf.weight_map import adapter_weight
from rlmath.checkpoint.save_schedule import Frequency, kept_frequency, recovery_frequency
from rlmath.config.model_shape import ModelShape, YarnScaling
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LoraConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SelectionConfig,
    TeacherConfig,
    ValidationConfig,
)
from rlmath.data.dataset import (
    Inputs,
    ValidationFile,
    critic_epochs,
    load_prompt_files,
    most_critic_updates,
    most_updates,
)
from rlmath.data.order import PromptOrder
from rlmath.data.prompt_curriculum import rules_of
from rlmath.distributed.device import Device, run_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import build_loss_scale, critic_optimizer, early_stop, loss_settings
from rlmath.models.megatron import Recompute, selective_modules, transformer_config
from rlmath.models.optimizer import LossScale
from rlmath.planning.memory_estimate import engine_mesh_of, mesh_of
from rlmath.rewards.reward_manager import open_reward_workers, open_scorer, scorer_settings
from rlmath.rewards.several_rewards import (
    MeasuredRows,
    NamedReward,
    compared_rewards,
    named_rewards,
    reward_hooks,
    takes_groups,
)
from rlmath.rollout.engine import _device_arguments, _shared_gpu_arguments
from rlmath.rollout.sampling import SamplingSettings, training_sampling
from rlmath.rollout.unfinished_rules import slice_tokens, unfinished_rules
from rlmath.run.recovery.resume import origin_of
from rlmath.trainer.critic import CriticInAdvantages
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.policy_update import PolicyUpdater
from rlmath.trainer.rollouts.engines import offer_plans, validation_scorer
from rlmath.trainer.rollouts.synchronous import selection_rules
from rlmath.trainer.token_advantages import TeacherInAdvantages, TokensThatCount
from rlmath.trainer.validation import _measure
from rlmath.workers.hooks import Hook, hooks_fingerprint
from rlmath.workers.user_functions import group_for_hooks, scorer_hook
from tests.distinct_settings import DISTINCT
from tests.tiny_models import make_samples, shape_of

CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
SHAPE = ModelShape(
    "Qwen2ForCausalLM", 2, 64, 2, 2, 32, 64, 10, False, 64, 1e4, 1e-6, True, "float32"
)
GPU = Device(
    "cuda", torch.device("cuda", 0), "cpu:gloo,cuda:nccl", torch.bfloat16, local_layers=False
)


def values(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, default) of every setting, but of sections that are as by default."""
    plain = Config()
    for section in dataclasses.fields(Config):
        if getattr(config, section.name) == getattr(plain, section.name):
            continue
        for field in dataclasses.fields(getattr(config, section.name)):
            section_values = (
                getattr(getattr(settings, section.name), field.name) for settings in (config, plain)
            )
            yield f"{section.name}.{field.name}", *section_values


def test_no_two_settings_of_these_tests_are_alike() -> None:
    assert [key for key, value, default in values(DISTINCT) if value == default] == []
    numbers = [
        number
        for _, value, _ in values(DISTINCT)
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, (int, float)) and not isinstance(number, bool)
    ]
    assert len(numbers) > 100
    assert [number for number, count in Counter(numbers).items() if count > 1] == []


def test_what_is_in_flight() -> None:
    own_ranks = unfinished_rules(DISTINCT)
    assert own_ranks.max_groups == 109 * 2704, "what max_staleness allows"
    colocated = replace(DISTINCT, rollout=replace(DISTINCT.rollout, ranks=0))
    assert unfinished_rules(colocated) == UnfinishedRules(
        groups_per_step=109,
        max_groups=2702,
        max_staleness=2703,
        max_dropped=DISTINCT.selection.max_extra_prompts,
    )
    assert slice_tokens(DISTINCT.rollout) == 2701
    default = replace(
        DISTINCT, rollout=RolloutConfig(max_new_tokens=10), selection=SelectionConfig()
    )
    assert unfinished_rules(default) == UnfinishedRules(109, 218, 1, 0)
    assert slice_tokens(default.rollout) == 5
    older = replace(default, rollout=replace(default.rollout, max_staleness=3))
    assert unfinished_rules(older) == UnfinishedRules(109, 436, 3, 0)
    assert slice_tokens(older.rollout) == 3, "a quarter, rounded up"
    deferring = replace(older, rollout=replace(older.rollout, tail="defer"))
    assert unfinished_rules(deferring) == UnfinishedRules(109, sys.maxsize, 0, 0)
    assert slice_tokens(deferring.rollout) == 5, "half"
    selecting = replace(deferring, selection=DISTINCT.selection)
    assert unfinished_rules(selecting).max_dropped == DISTINCT.selection.max_extra_prompts
    assert unfinished_rules(selecting).groups_per_step == 109


def test_the_loss() -> None:
    in_loss = replace(DISTINCT.algorithm, kl_in="loss")
    assert loss_settings(in_loss) == LossSettings(
        objective=in_loss,
        correction=Correction("sequence", 1.69, 0.17, 4.71, 0.972, 1.028, 0.0283),
        kl_coef=0.0172,
        kl_kind="k2",
        kl_ratio="sequence",
        off_policy_mask=0.685,
        entropy_coef=0.00173,
    )


def test_the_loss_without_what_is_optional() -> None:
    plain = replace(
        DISTINCT.algorithm,
        clip_ratio_high=None,
        dual_clip=None,
        importance_correction=None,
        importance_mask_geometric_low=None,
        importance_mask_geometric_high=None,
        importance_mask_binary_kl=None,
        off_policy_mask=None,
        entropy_coef=0.0,
    )
    correction = loss_settings(replace(plain, importance_mask_binary_kl=0.0283)).correction
    assert correction == Correction(None, 1.69, 0.17, 4.71, binary_kl=0.0283)
    assert loss_settings(plain) == LossSettings(
        objective=plain,
        correction=None,
        kl_coef=0.0,  # it is part of the reward
        kl_kind="k2",
        kl_ratio="sequence",
        entropy_coef=0.0,
    )
    assert loss_settings(AlgorithmConfig()) == LossSettings(objective=AlgorithmConfig())


def test_early_stop() -> None:
    assert early_stop(DISTINCT.algorithm) == EarlyStop(ratio_high=1.74, ratio_low=0.775, kl=0.0176)


def test_selection() -> None:
    assert selection_rules(DISTINCT) == SelectionRules(
        dynamic="reward",
        min_tokens=161,
        max_tokens=162,
        drop_truncated=True,
        parts=(0, 1, 2),
        resample_to=1631,
        seed=101,
    )


def test_sampling_of_training() -> None:
    assert training_sampling(DISTINCT.rollout) == SamplingSettings(
        samples=137, temperature=0.64, top_p=0.941, min_new_tokens=139, max_new_tokens=138
    )


ONE_REWARD = replace(DISTINCT.reward, rewards=[], weights=[], combine="sum")


def test_the_list_of_rewards() -> None:
    assert named_rewards(DISTINCT.reward) == (
        NamedReward("correctness", 1.571),
        NamedReward("length", -0.572),
        NamedReward("steps", 0.573, "package.other:steps"),
    )
    assert compared_rewards(DISTINCT.reward) == (0, 1, 2) and compared_rewards(ONE_REWARD) == ()


def test_the_reward_workers() -> None:
    with open_reward_workers(replace(ONE_REWARD, function=None)) as workers:
        (pool,) = workers.by_name.values()
        assert (pool._size, pool.timeout_seconds) == (2, 15.8)
        assert pool._settings.rules == Rules(answer_from="phrase", protocol=True)
    with open_reward_workers(RewardConfig(workers=1)) as workers:
        (pool,) = workers.by_name.values()
        assert pool._settings.rules == Rules(answer_from="boxed", protocol=False)


def test_what_the_functions_of_rewards_take() -> None:
    assert [hook.takes for hook in reward_hooks(DISTINCT.reward)] == ["group"]
    assert [
        hook.takes for hook in reward_hooks(replace(DISTINCT.reward, function_takes="completion"))
    ] == ["completion"]
    assert takes_groups(ONE_REWARD) and not takes_groups(replace(ONE_REWARD, function=None))


def test_a_scorer_has_the_workers_and_limits_of_rewards() -> None:
    with open_scorer(Hook("scorer", "math:isnan", "validation.scorer"), DISTINCT.reward) as workers:
        (pool,) = workers.by_name.values()
        assert (pool._size, pool.timeout_seconds) == (2, 15.8)
    settings = scorer_settings(DISTINCT.reward)
    assert settings == RewardConfig(function="scorer", workers=2, timeout_seconds=15.8)


def test_what_functions_of_the_users_see_of_a_group() -> None:
    prompt = Prompt("q", "1+1=", (1,), ("2",), "math", '{"level": 3}')
    completions = tuple(
        Completion(g, (5,) * tokens, (0.0,) * tokens, text, reason, 0)  # type: ignore[arg-type]
        for g, (tokens, text, reason) in enumerate(((2, "two", "stop"), (7, "cut off", "length")))
    )
    scores = (Score(0.5, True, "", "string"), Score(-0.25, False, "", "string"))
    assert group_for_hooks(ScoredGroup(prompt, completions, scores)) == {
        "row": prompt.row,
        "texts": ["two", "cut off"],
        "tokens": [2, 7],
        "rewards": [0.5, -0.25],
        "correct": [True, False],
        "truncated": [False, True],
    }


def test_a_run_knows_the_code_of_functions_that_plugins_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code of a reward is another reward.

    Other code of a selection or an advantage makes other hooks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{n}+1", "answer": n, "id": f"q{n}"}) + "\n" for n in range(4)
        )
    )
    source = "from rlmath.workers import hooks\n" + "".join(
        f"@hooks.{kind}('own_{kind}')\ndef {kind}(*given): return {kind!r}\n"
        for kind in ("reward", "selection", "advantage")
    )
    (tmp_path / "own.py").write_text(source)
    config = Config(
        run=RunConfig(plugins=["own.py"]),
        data=DataConfig(train_path="train.jsonl", template="raw", prompts_per_step=2),
        reward=RewardConfig(function="own_reward"),
        selection=SelectionConfig(dynamic_sampling="own_selection", max_extra_prompts=0),
        algorithm=AlgorithmConfig(advantage="own_advantage"),
    )
    inputs = load_prompt_files(config, None)

    def origin(one: Config = config) -> tuple[str, str]:
        origins = origin_of(one, inputs, has_weights=False)
        return origins.reward, origins.hooks

    first = origin()
    assert all(first)
    plain = replace(config, selection=SelectionConfig(), algorithm=AlgorithmConfig())
    assert origin(plain)[1] != first[1] and origin(plain)[0] == first[0]
    listed = origin(replace(config, reward=RewardConfig(rewards=["own_reward"])))
    (tmp_path / "own.py").write_text(source + "# another\n")
    assert all(changed != before for changed, before in zip(origin(), first, strict=True))
    assert origin(replace(config, reward=RewardConfig(rewards=["own_reward"])))[0] != listed[0]


def test_which_prompts_are_drawn() -> None:
    assert rules_of(DISTINCT.data) == CurriculumRules("skip_solved", 1102, 0.1103, 0.9104, 0.1105)


def test_when_checkpoints_are_made() -> None:
    assert recovery_frequency(DISTINCT.save) == Frequency(epochs=195, steps=196, secs=197.5)
    assert kept_frequency(DISTINCT.save) == Frequency(epochs=192, steps=193, secs=194.5)


def test_the_layout() -> None:
    assert mesh_of(DISTINCT.parallel, DISTINCT.rollout, world_size=1000, rank=7) == Mesh(
        rank=7,
        world_size=728,
        tensor=118,
        pipeline=119,
        engine_size=136,
        virtual_pipeline=120,
        context=123,
        expert=124,
        expert_tensor=125,
        engine_ranks=272,
    )
    assert engine_mesh_of(DISTINCT.rollout, world_size=1000, rank=729) == Mesh(
        rank=1, world_size=272, tensor=1, pipeline=1, engine_size=136
    )


def test_what_megatron_is_given_of_the_layout(tied_model: Path) -> None:
    shape = replace(shape_of(tied_model), num_layers=11)
    parallel = ParallelConfig(
        tensor=2, pipeline=4, first_stage_layers=4, last_stage_layers=3, sequence=True
    )
    mesh = Mesh(0, 8, 2, 4, 1)
    recompute = Recompute("full", "block", 5)

    def given(parallel: ParallelConfig, mesh: Mesh = mesh) -> dict[str, Any]:
        transformer = transformer_config(shape, mesh, CPU, parallel, recompute)
        return {name: getattr(transformer, name) for name in expected}

    expected = {
        "num_layers": 11,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": 4,
        "num_layers_in_last_pipeline_stage": 3,
        "context_parallel_size": 1,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 5,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": shape.rms_norm_eps,
        "variable_seq_lengths": True,
        "batch_p2p_sync": False,
        "gradient_accumulation_fusion": False,
        "recompute_modules": ["core_attn"],
    }
    assert given(parallel) == expected
    plain = replace(parallel, sequence=False)
    assert given(plain) == expected | {"sequence_parallel": False}
    two = given(replace(parallel, pipeline=2), Mesh(0, 4, 2, 2, 1))
    assert two["num_layers_in_first_pipeline_stage"] == 4
    assert two["num_layers_in_last_pipeline_stage"] is None, "the rest"


def test_what_selective_recomputes() -> None:
    dense = SHAPE
    experts = replace(SHAPE, num_experts=8, experts_per_token=2)
    assert selective_modules(dense, local_layers=True) == ["core_attn"]
    assert selective_modules(dense, local_layers=False) == ["mlp"]
    assert selective_modules(experts, local_layers=False) == ["moe"]


def test_windows_layers_that_do_not_rotate_and_yarns_factor_as_megatron_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.utils import is_layer_window_attention

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())

    def given(device: Device, **changes: Any) -> Any:
        shape = replace(SHAPE, num_layers=4, **changes)
        return transformer_config(shape, Mesh(0, 1, 1, 1, 1), device, ParallelConfig(), Recompute())

    yarn = YarnScaling(4.0, 32.0, 1.0, 64, attention_factor=1.5, truncate=True)
    for device in (CPU, GPU):
        plain = given(device)
        assert (plain.window_size, plain.no_rope_freq, plain.softmax_scale) == (None, None, None)
        sliding = given(device, sliding_window=7, full_attention_layers=(1, 3), no_rope_layers=(2,))
        windows = [
            is_layer_window_attention(sliding.window_size, sliding.window_attn_skip_freq, layer + 1)
            for layer in range(4)
        ]
        assert sliding.window_size == (6, 0) and windows == [True, False, True, False]
        assert sliding.no_rope_freq == [0, 0, 1, 0]
        scale = given(device, head_dim=4, rope_scaling=yarn).softmax_scale
        assert scale == (None if device is CPU else 1.5**2 / 2), (
            "query and key are multiplied by it"
        )


def test_what_is_one_function_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's rotation is there, as far as Megatron can tell."""
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())

    def given(device: Device) -> tuple[bool, ...]:
        transformer = transformer_config(
            SHAPE, Mesh(0, 1, 1, 1, 1), device, ParallelConfig(), Recompute()
        )
        swiglu = transformer.bias_activation_fusion, transformer.use_te_activation_func
        return *swiglu, transformer.apply_rope_fusion, transformer.gradient_accumulation_fusion

    assert given(GPU) == (True, False, True, True)
    assert given(replace(GPU, local_layers=True)) == (False, True, False, True)
    assert given(CPU) == (False, True, False, False)


def test_what_an_engine_is_given_for_the_device() -> None:
    assert _device_arguments(DISTINCT.rollout, CPU) == {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": 2**28,
        "worker_cls": "rlmath.rollout.cpu_worker.RlmathCPUWorker",
    }
    on_gpu = _device_arguments(DISTINCT.rollout, GPU)
    assert on_gpu == {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": int(2.707 * 2**30),
        "worker_cls": "rlmath.rollout.shared_gpu_worker.SharedGPUWorker",
        "enable_sleep_mode": True,
        "moe_backend": "triton",
        "compilation_config": {
            "pass_config": {"fuse_allreduce_rms": False},
            "cudagraph_specialize_lora": False,
        },
    }
    exact = replace(GPU, params_dtype=torch.float16, head_dtype=torch.float32)
    formats = {"dtype": "float16", "hf_overrides": {"head_dtype": "float32"}}
    assert _device_arguments(DISTINCT.rollout, exact) == on_gpu | formats
    graphs = _device_arguments(replace(DISTINCT.rollout, cuda_graphs=True), GPU)
    assert graphs == on_gpu | {"enforce_eager": False}
    measured = replace(DISTINCT.rollout, kv_cache_gib=None)
    as_found = _device_arguments(measured, GPU)
    assert as_found | {"worker_cls": on_gpu["worker_cls"]} == on_gpu | {
        "gpu_memory_utilization": 0.443,
        "kv_cache_memory_bytes": None,
    }
    assert "worker_cls" not in as_found
    assert _shared_gpu_arguments(DISTINCT.rollout) == {"disable_custom_all_reduce": True}
    with pytest.raises(ValueError, match="Set it to the size of one rank's KV cache"):
        _shared_gpu_arguments(measured)
    split = _device_arguments(replace(DISTINCT.rollout, chunked_prefill=True), GPU)
    assert split == on_gpu | {"enable_chunked_prefill": True}


def test_the_formats_of_a_run_and_its_loss_scale() -> None:
    """The loss scale is a power of two under 65,536 over a micro-batch's weight.

    That weight is what its tokens weigh together, in the longest stage."""
    device = run_device(DISTINCT)
    assert (device.params_dtype, device.head_dtype) == (torch.float16, torch.float32)
    assert build_loss_scale(DISTINCT, device) == LossScale(0.273, 274)
    assert build_loss_scale(DISTINCT, CPU) is None
    derived = replace(DISTINCT, optimizer=replace(DISTINCT.optimizer, initial_loss_scale=None))
    by_completion = replace(derived.rollout, max_new_tokens=29)
    algorithm = replace(derived.algorithm, loss_normalisation="token")
    for config, scale in (
        (replace(derived, algorithm=algorithm), 512.0),  # 65,536 / 116 is 565
        (replace(derived, rollout=by_completion), 16384.0),  # 116 tokens are 4 completions
    ):
        assert build_loss_scale(config, device) == LossScale(scale, 274)


def test_the_critic_has_a_rate_a_warm_up_and_epochs_of_its_own() -> None:
    optimizer = critic_optimizer(DISTINCT)
    critic_settings = {
        "lr": 0.02001,
        "warmup_steps": 2002,
        "min_lr": pytest.approx(0.0129 / 0.128 * 0.02001),
    }
    assert dataclasses.asdict(optimizer) == dataclasses.asdict(DISTINCT.optimizer) | critic_settings
    plain = replace(DISTINCT, critic=replace(DISTINCT.critic, lr=None, epochs=None))
    assert critic_optimizer(plain).lr == 2 * 0.128
    gae = replace(DISTINCT, algorithm=replace(DISTINCT.algorithm, advantage="gae"))
    assert (critic_epochs(gae), critic_epochs(plain)) == (2009, 165)
    assert most_critic_updates(gae, total_steps=3000) == 3000 * 164 * 2009
    assert most_updates(gae, total_steps=3000) == (3000 - 2003) * 164 * 165, (
        "the critic learns alone at first"
    )


def test_what_two_validations_must_have_in_common() -> None:
    expected = {
        "scorer": "package.scorers:name",
        "scorer_code": hooks_fingerprint([scorer_hook(DISTINCT)]),
        "paths": ["data/third.jsonl", "data/fourth.jsonl"],
        "template": "raw",
        "samples": 179,
        "temperature": 0.18,
        "top_p": 0.981,
        "max_new_tokens": 182,
    }
    assert _measure(DISTINCT) == expected
    as_training = replace(DISTINCT.validation, template=None, max_new_tokens=None)
    assert _measure(replace(DISTINCT, validation=as_training)) == expected | {
        "template": "orz",
        "max_new_tokens": 114,
    }


def updater(config: Config, folder: Path, reference: Any = None) -> PolicyUpdater:
    """An updater that is only asked how it would learn."""
    nothing: Any = None
    return PolicyUpdater(
        config, shape_of(folder), Mesh(0, 1, 1, 1, 1), nothing, reference, nothing, PhaseTimers()
    )


def test_normalisation_and_place_of_the_kl_of_the_updates(tied_model: Path) -> None:
    any_reference: Any = object()
    policy_updater = updater(DISTINCT, tied_model, any_reference)
    assert policy_updater.normalisation == Normalisation(kind="constant", constant=138)
    assert policy_updater.kl_in_reward and not updater(DISTINCT, tied_model).kl_in_reward
    in_loss = replace(DISTINCT, algorithm=replace(DISTINCT.algorithm, kl_in="loss"))
    assert not updater(in_loss, tied_model, any_reference).kl_in_reward


@pytest.mark.parametrize("engine", ["adapters", "merged"])
@pytest.mark.parametrize(
    ("target", "learned"),
    [
        ("attention", {"q_proj", "o_proj"}),
        ("mlp", {"gate_proj", "down_proj"}),
        ("all", {"q_proj", "o_proj", "gate_proj", "down_proj"}),
    ],
)
def test_engines_get_all_weights_first_and_later_what_learns(
    target: Any, learned: set[str], engine: Any
) -> None:
    """The adapters, or the matrices that these are merged into.

    The first matrix of each of Megatron's is compared: q stands for k and v, gate for up."""
    config = Config(
        lora=LoraConfig(rank=4, target=target, engine=engine), rollout=RolloutConfig(ranks=1)
    )
    plans = offer_plans(config, SHAPE, Mesh(0, 1, 1, 1, 1, engine_ranks=1), CPU)
    first, later = (
        {copy.source_parameter for copy in chain(*plan.rounds, *plan.local.values())}
        for plan in (plans.first, plans.later)
    )
    weights = [adapter_weight(name)[0] if "lora" in name else name for name in later]
    assert {name.split(".")[-2] for name in weights} == learned and later < first
    assert len(later) == (2 if engine == "adapters" else 1) * len(learned) * SHAPE.num_layers
    assert "model.embed_tokens.weight" in first


def test_weights_travel_from_the_pipeline_stage_that_has_them() -> None:
    """The first stage has one of three layers."""
    config = Config(
        parallel=ParallelConfig(pipeline=2, first_stage_layers=1), rollout=RolloutConfig(ranks=1)
    )
    shape = replace(SHAPE, num_layers=3)
    plan = offer_plans(
        config, shape, Mesh(0, 2, tensor=1, pipeline=2, engine_size=1, engine_ranks=1), CPU
    ).first
    copies = list(chain.from_iterable([*plan.rounds, *plan.local.values()]))
    sources = {
        layer: {copy.source for copy in copies if f".layers.{layer}." in copy.tensor}
        for layer in range(3)
    }
    assert sources == {0: {0}, 1: {1}, 2: {1}}
    assert {copy.source for copy in copies if "embed_tokens" in copy.tensor} == {0}


CHECKED = Prompt("q1", "1+1=", (1,), solutions=("2",), task="math")
UNCHECKED = Prompt("q2", "Prove it.", (1,), solutions=(), task="math")
FIRST_RANK, SECOND_RANK = (Mesh(rank, 2, tensor=2, pipeline=1, engine_size=2) for rank in range(2))
"""The two ranks of an engine."""


@pytest.mark.parametrize(
    ("prompts", "problems", "measured"),
    [
        ([CHECKED], [], MeasuredRows(training=True)),
        ([UNCHECKED], [CHECKED], MeasuredRows(validation=True)),
        ([CHECKED, UNCHECKED], [UNCHECKED], MeasuredRows()),
    ],
)
def test_the_workers_of_a_run_measure_the_rows_whose_solutions_can_be_compared(
    prompts: list[Prompt], problems: list[Prompt], measured: MeasuredRows
) -> None:
    config = Config(reward=RewardConfig(function="math:isnan", workers=1))
    no_tokenizer: Any = None
    inputs = Inputs(
        prompts,
        PromptOrder(len(prompts), 1, seed=1, shuffle=False),
        total_steps=1,
        reports=(),
        history={},
        history_line="",
        tokenizer=no_tokenizer,
        stop_token_ids=(1,),
    )
    files = [ValidationFile("sums", problems, 0, ())] if problems else []
    with GrpoTrainer.open_workers(config, FIRST_RANK, inputs, files) as workers:
        assert workers is not None and workers.measured == measured
    with GrpoTrainer.open_workers(config, SECOND_RANK, inputs, files) as workers:
        assert workers is None, "the engine's first rank has them"


def test_a_scorer_is_opened_on_an_engines_first_rank_in_a_run_that_validates() -> None:
    validating = ValidationConfig(scorer="math:isnan", every_steps=2, paths=["v.jsonl"])
    config = Config(validation=validating, reward=RewardConfig(workers=1))
    workers = validation_scorer(config, FIRST_RANK)
    assert workers is not None
    workers.close()
    assert validation_scorer(config, SECOND_RANK) is None
    for changed in (replace(validating, every_steps=None), replace(validating, scorer=None)):
        assert validation_scorer(replace(config, validation=changed), FIRST_RANK) is None


def groups_of(*parts_PGK: list[tuple[float, ...]]) -> list[ScoredGroup]:
    """Groups whose completions have these rewards.

    A completion has as many tokens as it has places in the group."""
    return [
        ScoredGroup(
            Prompt(f"q{number}", "?", (1,), ("2",), "math"),
            tuple(
                Completion(g, (5,) * (g + 1), (0.0,) * (g + 1), "", "stop", 0)
                for g in range(len(rows))
            ),
            tuple(Score(sum(row), True, "", "string", parts=row) for row in rows),
        )
        for number, rows in enumerate(parts_PGK)
    ]


def test_advantages_are_of_the_kind_the_weights_and_the_eps_that_are_set(tied_model: Path) -> None:
    """The first reward is right where the second is wrong: their weights decide."""
    groups = groups_of([(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], [(1.0, 0.0), (0.0, 1.0)])
    reward = RewardConfig(
        rewards=["a=package.one:f", "b=package.two:f"], weights=[1.0, 3.0], combine="gdpo"
    )
    config = replace(DISTINCT, reward=reward, teacher=TeacherConfig())

    def given(config: Config, teacher: Any = None) -> list[list[float]]:
        policy_updater = replace(updater(config, tied_model), teacher=teacher)
        return policy_updater.reward_advantages(
            groups, [group.rewards for group in groups], [[1, 2, 3], [1, 2]]
        )

    assert given(config) == gdpo_advantages(
        [[score.parts for score in group.scores] for group in groups], [1.0, 3.0], 0.00163
    )
    (first, second, _), (third, fourth) = given(config)
    assert second > 0 > first and fourth > 0 > third
    summed = replace(config, reward=replace(reward, combine="sum"))
    for kind in ("rloo", "ppo"):
        variant = replace(summed, algorithm=replace(DISTINCT.algorithm, advantage=kind))
        assert given(variant) == advantages(
            [group.rewards for group in groups], [[1, 2, 3], [1, 2]], kind, 0.00163
        )
    nothing = [[0.0] * 3, [0.0] * 2]
    assert given(replace(config, algorithm=replace(DISTINCT.algorithm, advantage="gae"))) == nothing
    any_teacher: Any = object()
    for with_rewards in (False, True):
        taught = replace(summed, teacher=replace(DISTINCT.teacher, with_rewards=with_rewards))
        assert (given(taught, any_teacher) == nothing) is not with_rewards


def test_what_the_updates_take_from_the_settings(tied_model: Path) -> None:
    """Seeds come from the run's seed, and each epoch has an order of minibatches.

    The whole budget of tokens is used, and packs are padded where sequences are cut; the critic's
    numbers come from its section, the others from the algorithm's."""
    any_part: Any = object()
    gae = replace(DISTINCT, algorithm=replace(DISTINCT.algorithm, advantage="gae"))
    policy_updater = PolicyUpdater(
        gae,
        shape_of(tied_model),
        Mesh(0, 1, 1, 1, 1),
        any_part,
        any_part,
        any_part,
        PhaseTimers(),
        any_part,
    )
    (of_critic,) = policy_updater.parts(0)
    assert (of_critic.critic, of_critic.config, of_critic.kl_in_reward) == (any_part, gae, True)
    parallel = replace(DISTINCT.parallel, sequence=True)
    policy = replace(DISTINCT.policy, max_tokens_per_microbatch=24)
    small_config = replace(
        DISTINCT, parallel=parallel, policy=policy, algorithm=AlgorithmConfig(n_minibatches=3)
    )
    cut = replace(updater(small_config, tied_model), mesh=Mesh(0, 4, 4, 1, 1))
    samples = make_samples(12, seed=1)
    packed = cut.pack_minibatches(samples, number=5)
    indices = [[batch.sample_indices for batch in minibatch] for minibatch in packed]
    assert len(indices) == 3 and sorted(
        i for row in indices for batch in row for i in batch
    ) == list(range(12))
    for batch in (batch for minibatch in packed for batch in minibatch):
        assert (
            sum(samples[i].length for i in batch.sample_indices) <= 24
            and len(batch.token_ids_T) % 4 == 0
        )
    repeated = [cut.pack_minibatches(samples, number=n) for n in (5, 6)]
    other = replace(cut, config=replace(small_config, run=replace(small_config.run, seed=102)))
    dealt = [
        [sorted(i for batch in minibatch for i in batch.sample_indices) for minibatch in batches]
        for batches in (packed, *repeated, other.pack_minibatches(samples, number=5))
    ]
    assert dealt[0] == dealt[1] != dealt[2] and dealt[0] != dealt[3]


def test_the_critic_learns_alone_for_exactly_the_steps_that_are_set(tied_model: Path) -> None:
    """Nothing but the critic changes advantages then; a KL in the reward is the critic's to see."""
    any_part: Any = object()
    gae = replace(
        DISTINCT,
        algorithm=replace(DISTINCT.algorithm, advantage="gae"),
        teacher=replace(DISTINCT.teacher, loss="advantage"),
    )
    with_critic = replace(updater(gae, tied_model), critic=any_part, teacher=any_part)
    last = DISTINCT.critic.pretrain_steps - 1
    by_step = {
        step: [type(part) for part in with_critic.parts(step)] for step in (0, last, last + 1)
    }
    assert by_step == {
        0: [CriticInAdvantages],
        last: [CriticInAdvantages],
        last + 1: [CriticInAdvantages, TeacherInAdvantages, TokensThatCount],
    }
    assert [with_critic.pretrains(step) for step in (last, last + 1)] == [True, False]
    without_critic = replace(with_critic, critic=None)
    assert [type(part) for part in without_critic.parts(0)] == [
        TeacherInAdvantages,
        TokensThatCount,
    ]


@pytest.mark.parametrize(
    ("changed", "shortcut"),
    [
        ({}, True),
        ({"epochs": 2}, False),
        ({"n_minibatches": 2}, False),
        ({"recompute_logprobs": False}, False),
    ],
    ids=str,
)
def test_the_pass_for_log_probs_is_spared_only_where_one_minibatch_is_learned_from_once(
    changed: dict[str, Any], shortcut: bool
) -> None:
    plain = Config(algorithm=AlgorithmConfig(**changed))
    assert plain.on_policy is shortcut
    for part in (
        {"kl_in": "reward", "kl_coef": 0.1},
        {"top_entropy_share": 0.5},
        {"kl_cov_ratio": 0.1},
    ):
        assert not Config(algorithm=AlgorithmConfig(**part, **changed)).on_policy
    assert not replace(plain, teacher=TeacherConfig(path="t", loss="advantage")).on_policy
    assert replace(plain, teacher=TeacherConfig(path="t", loss="full")).on_policy is shortcut
    assert Config(algorithm=AlgorithmConfig(kl_coef=0.1, **changed)).on_policy is shortcut
