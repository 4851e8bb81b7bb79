"""The bytes of routes that a plan counts, against those that the ranks hold."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlmath.algorithms.partial_rollouts import with_reserve
from rlmath.algorithms.types import RoutesAt, Sample
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.config.algorithm_schema import SelectionConfig
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    StagesConfig,
)
from rlmath.data.micro_batches import plan_minibatches
from rlmath.data.packing import pack
from rlmath.data.routes import expert_dtype, with_routes
from rlmath.planning.machine_room import GIB, PROCESS_GIB, Machine, room_problems
from rlmath.planning.memory_estimate import mesh_of, plan_routes, stage_work, step_sequences
from rlmath.planning.memory_fit import host_bytes
from rlmath.planning.memory_formulas import RouteBytes, StepSequences, replayed_route_bytes
from tests.planning.of_policy import lines_at_start, rank_plan
from tests.planning.test_memory_estimate import CPU, H100, QWEN_30B_A3B, config

ROOT = Path(__file__).parents[2]
ENGINE = PolicyConfig(routing_replay="engine")
OLD = PolicyConfig(routing_replay="old")
MIXTURE = replace(QWEN_30B_A3B, num_layers=3, experts_per_token=2, num_experts=8)
SMALL = config(
    policy=ENGINE,
    data=DataConfig(prompts_per_step=4, max_prompt_tokens=100),
    rollout=RolloutConfig(group_size=2, max_new_tokens=156, cpu_kv_cache_gib=0.25),
)
TOKEN = 3 * 2
"""Bytes of a token of MIXTURE: 3 layers, 2 experts."""


def routes_of(run: Config, parallel: ParallelConfig, world_size: int) -> RouteBytes:
    """The routes of the first rank of a run of Qwen3-30B-A3B with its layers shared evenly."""
    mesh = mesh_of(parallel, run.rollout, world_size, rank=0)
    layers = QWEN_30B_A3B.num_layers // parallel.pipeline
    work = stage_work(run.policy, parallel, run.lora, mesh=mesh, target=CPU, layers=layers)
    return plan_routes(
        "engine",
        QWEN_30B_A3B,
        [step_sequences(run)],
        mesh=mesh,
        work=work,
        layers=layers,
        kv_cache=0,
    )


def test_the_table_of_bytes_by_rank_in_the_docs_is_that_of_the_plan() -> None:
    lines = []
    for tensor, pipeline, engine in ((1, 1, 1), (2, 4, 1), (4, 2, 4), (8, 1, 8)):
        run = config(
            data=DataConfig(prompts_per_step=512, max_prompt_tokens=1024),
            rollout=RolloutConfig(group_size=16, max_new_tokens=7168, tensor_parallel=engine),
        )
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        routes = routes_of(run, parallel, world_size=128)
        sizes = (routes.sampled, routes.replayed, routes.sampled + routes.replayed)
        megabytes = [f"{size / 1e6:,.0f} MB" for size in sizes]
        lines.append(f"| {tensor} | {pipeline} | {engine} | {' | '.join(megabytes)} |")
    assert "\n".join(lines) in (ROOT / "docs/algorithm.md").read_text()


@pytest.mark.parametrize("longest", [True, False], ids=["all as long as may be", "any lengths"])
def test_a_rank_that_trains_holds_no_more_routes_than_planned(longest: bool) -> None:
    """They are as many where all sequences have the greatest length, padded to a multiple of 4."""
    draw = random.Random(0)
    lengths = [254 if longest else draw.randint(2, 254) for _ in range(21)]
    samples = [
        Sample(
            (3,), (5,) * (length - 1), (-1.0,) * (length - 1), 1.0, routes_at=(RoutesAt(0, n, 0),)
        )
        for n, length in enumerate(lengths)
    ]
    schedule = plan_minibatches(lengths, 2, data_size=3, max_tokens=600, seed=1)
    routes = {
        sample.routes_at[0]: torch.ones(sample.length - 1, 3, 2, dtype=expert_dtype(8))
        for sample in samples
    }
    held = [0, 0, 0]
    for minibatch in schedule:
        for rank, batches in enumerate(minibatch.microbatches_by_rank):
            for indices in batches:
                batch = with_routes(pack(samples, indices, pad_to_multiple=4), samples, routes)
                held[rank] += 0 if batch.experts_TLK is None else batch.experts_TLK.nbytes
    sequences = StepSequences(254, 21, learned=21, minibatches=2)
    planned = replayed_route_bytes(MIXTURE, sequences, 3, data=3, multiple=4)
    assert planned == 2 * 4 * 256 * TOKEN
    assert (max(held) <= planned) if not longest else (planned - max(held) < 8 * 4 * TOKEN)


def test_routes_are_in_the_host_s_memory_in_the_phases_that_have_them() -> None:
    mesh = mesh_of(SMALL.parallel, SMALL.rollout, 1, rank=0)
    plan = rank_plan(SMALL, MIXTURE, mesh, CPU)
    sampled = 8 * 255 * TOKEN
    replayed = 8 * 256 * TOKEN
    parts = ("sampled_routes", "replayed_routes")
    by_phase = {
        phase: tuple(sizes.get(part, 0) for part in parts) for phase, sizes in plan.phases.items()
    }
    assert list(by_phase) == ["sync", "generate", "pack", "logprobs", "update"]
    assert by_phase["generate"] == (sampled, 0)
    assert by_phase["pack"] == (sampled, replayed)
    assert by_phase["logprobs"] == by_phase["update"] == (0, replayed)
    token = 2 * 3 * 4 * 128 * 4
    """Bytes of the KV cache: keys and values of 3 layers, 4 heads of 128 float32 numbers."""
    slots = plan.phases["generate"]["kv_cache"] // token
    assert slots > 10_000
    assert {sizes["recorded_routes"] for sizes in plan.phases.values()} == {(slots + 1) * TOKEN}

    on_gpu = rank_plan(replace(SMALL, policy=OLD), MIXTURE, mesh, H100)
    assert on_gpu.routes == RouteBytes(0, 0, replayed)
    assert not any("routes" in part for sizes in on_gpu.phases.values() for part in sizes)


def test_extra_prompts_and_the_longest_length_stage_are_counted() -> None:
    staged = replace(
        SMALL,
        selection=SelectionConfig(dynamic_sampling="reward", max_extra_prompts=3, resample_to=1),
        stages=StagesConfig(steps=[2, 2], max_new_tokens=[156, 412]),
    )
    mesh = mesh_of(staged.parallel, staged.rollout, 1, rank=0)
    routes = rank_plan(staged, MIXTURE, mesh, CPU).routes
    assert (routes.sampled, routes.replayed) == (14 * 511 * TOKEN, 4 * 512 * TOKEN)


def test_groups_in_flight_and_those_of_short_rounds_are_counted() -> None:
    """A step has 4 groups; with "carry" 8 are in flight, and 4 stay.

    With "defer" a short round may have 31, whose completions have 100 + 39 of 256 tokens."""
    routes = []
    for tail in ("carry", "defer"):
        rollout = replace(SMALL.rollout, tail=tail, max_staleness=1, slice_tokens=39)
        run = replace(SMALL, rollout=rollout)
        mesh = mesh_of(run.parallel, rollout, 1, rank=0)
        plan = rank_plan(run, MIXTURE, mesh, CPU)
        routes.append(plan.routes)
        assert plan.phases["update"].get("sampled_routes", 0) == plan.routes.carried
    assert with_reserve(4, share=0.0) == 31
    short = -(-31 * 2 * 139 // 256)
    assert [stage.sampled for stage in routes] == [16 * 255 * TOKEN, (8 + short) * 255 * TOKEN]
    assert [stage.carried for stage in routes] == [8 * 255 * TOKEN, 0]


def test_under_sequence_parallelism_a_rank_records_its_own_tokens_alone() -> None:
    run = replace(SMALL, parallel=ParallelConfig(tensor=2, sequence=True))
    replayed = []
    for policy in (ENGINE, OLD):
        changed = replace(run, policy=policy, algorithm=AlgorithmConfig(n_minibatches=2))
        mesh = mesh_of(changed.parallel, changed.rollout, 2, rank=0)
        replayed.append(rank_plan(changed, MIXTURE, mesh, CPU).routes.replayed)
    assert replayed == [8 * 256 * TOKEN, 4 * 256 * TOKEN]


def test_a_run_is_refused_whose_routes_do_not_fit_the_machine() -> None:
    def needed(policy: PolicyConfig) -> int:
        run = replace(
            SMALL,
            policy=policy,
            data=DataConfig(prompts_per_step=4096, max_prompt_tokens=1024),
            rollout=replace(SMALL.rollout, group_size=64, max_new_tokens=7168),
        )
        return host_bytes(run, read_run_shapes(run, MIXTURE), 1)

    plain = needed(PolicyConfig())
    machine = Machine(gpus=0, cores=2, memory=plain + int((PROCESS_GIB + 1) * GIB))
    assert list(room_problems(1, machine, plain)) == []
    (problem,) = room_problems(1, machine, needed(ENGINE))
    assert "the kernel would kill the run" in problem


def test_the_start_says_what_routes_take() -> None:
    def told(policy: PolicyConfig) -> list[str]:
        run = replace(SMALL, policy=policy, data=replace(SMALL.data, prompts_per_step=4096))
        return [line for line in lines_at_start(run, MIXTURE, 1) if line.startswith("Routes")]

    assert told(ENGINE) == [
        "Routes of experts, in the host's memory: 11.95 MiB of what an engine samples, 0.12 MiB of "
        "its KV cache, 12.00 MiB of what a rank learns from (a rank at most)"
    ]
    assert told(OLD) == [
        "Routes of experts, in the host's memory: 12.00 MiB of what a rank learns from (a rank at "
        "most)"
    ]
    assert told(PolicyConfig()) == []
