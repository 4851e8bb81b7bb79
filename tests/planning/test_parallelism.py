"""What is told of layouts before a run starts, and that it is what Megatron can run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlmath.config.model_shape import LongRopeScaling, ModelShape
from rlmath.config.schema import Config, ParallelConfig, PolicyConfig, RolloutConfig
from rlmath.planning.checks import device_problems
from rlmath.planning.parallelism import (
    chunk_sizes,
    context_problems,
    expert_problems,
    expert_tensor_problems,
    layout_problems,
    planned_ranks,
    rank_problems,
    ranks_or_least,
    roles,
    rotary_problems,
    split_problems,
    stage_problems,
)
from rlmath.planning.setting_tables import conflicts


def told(layers: int, policy: PolicyConfig | None = None, **parallel: int) -> str:
    """The one problem of a layout."""
    (problem,) = stage_problems(ParallelConfig(**parallel), policy or PolicyConfig(), layers)
    return problem


def recompute(method: str, number: int) -> PolicyConfig:
    return PolicyConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=number
    )


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (
            {"pipeline": 5},
            "parallel.pipeline is 5; it must divide the 12 layers of the model. Possible: 1, 2, "
            "3, 4, 6, 12. Or let "
            "parallel.first_stage_layers or parallel.last_stage_layers differ.",
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 4},
            "parallel.virtual_pipeline is 4; it must divide the 6 layers of a pipeline stage. "
            "Possible: 1, 2, 3, 6.",
        ),
        (
            {"pipeline": 3, "first_stage_layers": 3},
            "parallel.first_stage_layers is 3, which leaves 9 of the model's 12 layers to 2 other "
            "pipeline stages; "
            "needed: the same number for each of these, and for every stage a multiple of "
            "parallel.virtual_pipeline 1.",
        ),
        (
            {"pipeline": 4, "first_stage_layers": 6, "last_stage_layers": 6},
            "parallel.first_stage_layers + parallel.last_stage_layers is 12, which leaves 0 of "
            "the model's 12 layers "
            "to 2 other pipeline stages; needed",
        ),
        ({"pipeline": 2, "last_stage_layers": 20}, "leaves 0 of the model's 12 layers to 1 other"),
        (
            {"pipeline": 2, "first_stage_layers": 5, "last_stage_layers": 5},
            "parallel.first_stage_layers + parallel.last_stage_layers is 10, which leaves 2 of "
            "the model's 12 layers "
            "to 0 other pipeline stages; needed",
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3},
            "parallel.first_stage_layers is 3, which leaves 9 of the model's 12 layers to 1 other",
        ),
        (
            {"pipeline": 3, "virtual_pipeline": 2, "first_stage_layers": 2},
            "leaves 10 of the model's 12 layers to 2 other pipeline stages; needed: the same "
            "number for each of these, "
            "and for every stage a multiple of parallel.virtual_pipeline 2",
        ),
    ],
)
def test_layouts_of_twelve_layers_that_do_not_fit(parallel: dict[str, int], problem: str):
    assert problem in told(12, **parallel)


@pytest.mark.parametrize(
    ("parallel", "key"),
    [
        ({"virtual_pipeline": 2}, "parallel.virtual_pipeline is 2"),
        ({"first_stage_layers": 2}, "parallel.first_stage_layers is 2"),
        ({"last_stage_layers": 3}, "parallel.last_stage_layers is 3"),
    ],
)
def test_one_stage_has_no_chunks_and_all_layers(parallel: dict[str, int], key: str):
    (problem,) = conflicts(Config(parallel=ParallelConfig(**parallel)))
    assert (
        problem.startswith(f"{key}; with parallel.pipeline=1 ")
        and "or raise parallel.pipeline." in problem
    )
    assert not list(conflicts(Config(parallel=ParallelConfig(pipeline=2, **parallel))))


def test_context_parallel_ranks_need_transformer_engine():
    parallel = ParallelConfig(context=2)
    local = PolicyConfig(transformer_impl="local")
    (problem,) = context_problems(parallel, PolicyConfig(), on_gpu=False)
    assert problem.startswith(
        "parallel.context is 2; context parallelism needs a GPU with Transformer Engine. Set it "
        "to 1, and fit long"
    )
    (problem,) = context_problems(parallel, local, on_gpu=True)
    assert "needs policy.transformer_impl=transformer_engine. Set it to 1" in problem
    assert not list(context_problems(parallel, PolicyConfig(), on_gpu=True))
    assert not list(context_problems(ParallelConfig(), local, on_gpu=False))


def test_what_transformer_engine_does_not_compute_of_positions():
    window = replace(DENSE, sliding_window=7)
    (problem,) = layout_problems(ParallelConfig(context=2), 1, PolicyConfig(), window)
    assert problem.startswith("parallel.context is 2, of a model with a sliding window of 7 tokens")
    assert not list(layout_problems(ParallelConfig(), 1, PolicyConfig(), window))
    scaling = LongRopeScaling((1.0,), 1.5, 8)
    part = replace(DENSE, rope_scaling=scaling, rotary_dim=2)
    (problem,) = rotary_problems(PolicyConfig(), part, on_gpu=True)
    assert (
        "multiplies by 1.5 what it rotates" in problem
        and "policy.transformer_impl=local" in problem
    )
    assert not list(rotary_problems(PolicyConfig(transformer_impl="local"), part, on_gpu=True))
    assert not list(rotary_problems(PolicyConfig(), part, on_gpu=False))
    whole = replace(part, rotary_dim=None)
    assert not list(rotary_problems(PolicyConfig(), whole, on_gpu=True))
    (problem,) = rotary_problems(PolicyConfig(), replace(whole, no_rope_layers=(3,)), on_gpu=True)
    assert "or not in all layers" in problem


def test_context_parallel_ranks_are_part_of_a_replica():
    (problem,) = rank_problems(ParallelConfig(tensor=2, context=2), 1, world_size=6)
    assert problem.startswith(
        "parallel.tensor x parallel.pipeline x parallel.context is 2 x 1 x 2 = 4, which does not "
        "divide the 6 ranks"
    )
    assert not list(rank_problems(ParallelConfig(tensor=2, context=2), 1, world_size=8))


def test_recomputed_layers_against_those_of_a_chunk():
    uneven = {"pipeline": 3, "first_stage_layers": 2, "last_stage_layers": 4}
    assert told(12, recompute("uniform", 4), **uneven) == (
        'policy.recompute_num_layers is 4; with policy.recompute_method="uniform" it must divide '
        "the layers of every "
        "pipeline stage or model chunk, 2, 4, 6. Possible: 1, 2."
    )
    assert not list(stage_problems(ParallelConfig(**uneven), recompute("uniform", 2), 12))
    assert not list(stage_problems(ParallelConfig(**uneven), recompute("block", 6), 12))
    assert "has more than 6 layers. Lower it." in told(12, recompute("block", 7), **uneven)
    assert "has more than 3 layers" in told(
        12, recompute("block", 4), pipeline=2, virtual_pipeline=2
    )
    assert "2, 4, 6" not in told(12, recompute("uniform", 5), pipeline=2)


def megatron_chunks(layers: int, parallel: ParallelConfig) -> list[list[int]] | None:
    """Layers of every model chunk, by Megatron, in the order in which activations pass.

    None where Megatron refuses the layout."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from rlmath.distributed.device import Device
    from rlmath.distributed.mesh import Mesh
    from rlmath.models.megatron import Recompute, transformer_config

    mesh = Mesh(
        0, parallel.pipeline, 1, parallel.pipeline, 1, virtual_pipeline=parallel.virtual_pipeline
    )
    shape = ModelShape(
        "Qwen2ForCausalLM", layers, 64, 2, 2, 32, 64, 10, False, 64, 1e4, 1e-6, True, "float32"
    )
    device = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
    try:
        config = transformer_config(shape, mesh, device, parallel, Recompute())
        stages = range(parallel.pipeline)
        numbers = range(parallel.virtual_pipeline) if parallel.virtual_pipeline > 1 else [None]
        chunks = []
        for number, stage in itertools.product(numbers, stages):
            count = get_num_layers_to_build(config, vp_stage=number, pp_rank=stage)
            first = get_transformer_layer_offset(config, vp_stage=number, pp_rank=stage)
            chunks.append(list(range(first, first + count)))
        return chunks
    except (ValueError, AssertionError, ZeroDivisionError):
        return None


def test_what_passes_is_what_megatron_lays_out_whole():
    sizes = (None, 1, 2, 3)
    passed = 0
    for layers, pipeline, virtual, first, last in itertools.product(
        (6, 8), (2, 3, 4), (1, 2), sizes, sizes
    ):
        parallel = ParallelConfig(
            pipeline=pipeline,
            virtual_pipeline=virtual,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        if pipeline == 2 and first and last and first + last != layers:
            continue  # Megatron is told of the first stage only
        chunks = megatron_chunks(layers, parallel)
        whole = (
            chunks is not None and all(chunks) and [*itertools.chain(*chunks)] == [*range(layers)]
        )
        assert whole == (not list(stage_problems(parallel, PolicyConfig(), layers))), parallel
        if whole:
            passed += 1
            assert sorted({len(chunk) for chunk in chunks}) == chunk_sizes(parallel, layers)
    assert passed > 20


EXPERTS = ModelShape(
    "Qwen3MoeForCausalLM",
    4,
    128,
    4,
    2,
    64,
    48,
    101,
    False,
    256,
    10000.0,
    1e-6,
    False,
    "float32",
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    norm_topk_prob=True,
)
DENSE = replace(EXPERTS, architecture="Qwen3ForCausalLM", num_experts=0)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"expert": 8},
        {"tensor": 2, "sequence": True, "expert": 2},
        {"tensor": 2, "sequence": True, "expert_tensor": 2},
        {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 2},
    ],
    ids=str,
)
def test_layouts_of_eight_experts_that_fit(parallel: dict[str, Any]):
    assert list(expert_problems(ParallelConfig(**parallel), EXPERTS)) == []


@pytest.mark.parametrize(
    ("shape", "parallel", "problem"),
    [
        (
            DENSE,
            {"expert": 2},
            "parallel.expert is 2; a Qwen3ForCausalLM has no experts. Set it to 1.",
        ),
        (
            DENSE,
            {"expert_tensor": 2},
            "parallel.expert_tensor is 2; a Qwen3ForCausalLM has no experts. Set it to 1.",
        ),
        (
            EXPERTS,
            {"expert": 3},
            "parallel.expert is 3; it must divide the 8 experts of a layer. Possible: 1, 2, 4, 8.",
        ),
        (
            EXPERTS,
            {"expert": 2, "expert_tensor": 5},
            "parallel.expert_tensor is 5; it must divide the 48 feed-forward units of an expert. "
            "Possible: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48.",
        ),
        (
            EXPERTS,
            {"tensor": 2, "expert": 2},
            "parallel.tensor is 2, of a model with experts; Megatron then trains with sequence "
            "parallelism only. "
            "Set parallel.sequence=true.",
        ),
        (
            EXPERTS,
            {"tensor": 2, "sequence": True},
            "parallel.tensor is 2 and parallel.expert_tensor 1, with parallel.expert=1: Megatron "
            "would not add up the "
            "experts' gradients of the tensor-parallel ranks. Raise parallel.expert above 1, or "
            "set parallel.tensor "
            "to 1.",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_experts_is_told(
    shape: ModelShape, parallel: dict[str, Any], problem: str
):
    assert list(expert_problems(ParallelConfig(**parallel), shape)) == [problem]


def test_experts_are_shared_within_a_pipeline_stage():
    (problem,) = rank_problems(ParallelConfig(pipeline=2, expert=4), 1, 4)
    assert problem == (
        "parallel.expert x parallel.expert_tensor is 4 x 1 = 4, which does not divide the 2 ranks "
        "of a pipeline stage. "
        "Possible: 1, 2."
    )
    assert list(rank_problems(ParallelConfig(pipeline=2, expert=2), 1, 4)) == []


def test_the_matrices_of_an_expert_are_shared_on_gpus_only():
    parallel = ParallelConfig(expert_tensor=2)
    assert list(expert_tensor_problems(parallel, on_gpu=True)) == []
    (problem,) = expert_tensor_problems(parallel, on_gpu=False)
    assert problem.startswith(
        "parallel.expert_tensor is 2; on CPU it must be 1, because gloo cannot gather"
    )


def test_float32_is_for_the_cpu():
    exact = Config(policy=PolicyConfig(dtype="float32"))
    (problem,) = device_problems(exact, None, on_gpu=True)
    assert problem.startswith(
        "policy.dtype is float32; the attention of Transformer Engine and vLLM on GPU takes"
    )
    assert device_problems(exact, None, on_gpu=False) == []


def test_experts_need_not_divide_by_the_tensor_parallel_size_of_training_but_by_the_engines():
    odd = replace(EXPERTS, ffn_size=49)
    assert list(split_problems(ParallelConfig(tensor=2), 1, odd)) == []
    (problem,) = split_problems(ParallelConfig(), 2, odd)
    assert (
        problem
        == "rollout.tensor_parallel is 2; it must divide the model's 49 feed-forward units. "
        "Possible: 1."
    )


# ---------------------------------------------------------------- engines on ranks of their own


def own_ranks(world_size: int, ranks: int, engine: int = 1, **parallel: int | None) -> list[str]:
    return list(rank_problems(ParallelConfig(**parallel), engine, world_size, ranks))


def test_training_is_laid_over_the_ranks_that_the_engines_leave():
    assert own_ranks(8, 2, engine=2, tensor=3, data=2) == []
    assert own_ranks(6, 2, pipeline=2, expert=2) == []
    (problem,) = own_ranks(8, 2, tensor=4)
    assert "= 4, which does not divide the 6 ranks that train, beside rollout.ranks 2." in problem
    assert "Start a multiple of 4 and 2 for rollout.ranks, or change them." in problem
    (problem,) = own_ranks(8, 2, tensor=2, data=4)
    assert (
        "it makes 8 ranks, and this run has 6 to train, beside rollout.ranks 2. Start 10, or set"
        in problem
    )
    (problem,) = own_ranks(8, 2, pipeline=2, expert=2)
    assert "does not divide the 3 ranks of a pipeline stage. Possible: 1, 3." in problem


@pytest.mark.parametrize(("world_size", "ranks"), [(1, 1), (4, 4), (4, 5)])
def test_engines_leave_a_rank_to_train(world_size: int, ranks: int):
    (problem,) = own_ranks(world_size, ranks)
    assert problem.startswith(f"rollout.ranks is {ranks}, and the run has {world_size} rank")
    assert f"none is left to train. Start more than {ranks}, or lower rollout.ranks" in problem


def test_engines_divide_their_own_ranks_and_not_those_of_the_run():
    assert own_ranks(7, 6, engine=3) == []
    (problem,) = own_ranks(8, 6, engine=4)
    assert problem.startswith(
        "rollout.tensor_parallel is 4, which does not divide rollout.ranks 6; possible: 1, 2, 3, 6."
    )


def test_the_ranks_of_a_run_are_those_of_both_kinds(monkeypatch: pytest.MonkeyPatch):
    rollout = RolloutConfig(ranks=24, tensor_parallel=2)
    fixed = ParallelConfig(data=4, tensor=2)
    least = ParallelConfig(tensor=2)
    assert ranks_or_least(fixed, rollout, None) == 32
    assert ranks_or_least(least, rollout, None) == 26
    assert ranks_or_least(fixed, rollout, 40) == 40
    assert roles(32, engine_ranks=24) == "ranks 0-7 train, ranks 8-31 generate"
    assert roles(32, engine_ranks=0) == ""
    monkeypatch.setenv("WORLD_SIZE", "48")
    assert planned_ranks(fixed, rollout, None) == 32
    assert planned_ranks(least, rollout, None) == 48
