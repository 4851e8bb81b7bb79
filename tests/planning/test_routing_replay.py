"""What is refused and told of `policy.routing_replay` before a run starts."""

from __future__ import annotations

from typing import Literal

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import ParallelConfig, PolicyConfig
from rlmath.planning.checks import device_problems
from rlmath.planning.model_checks import routing_warnings
from rlmath.planning.setting_tables import conflicts
from tests.planning.of_policy import problems_of_shapes
from tests.planning.test_memory_estimate import QWEN_7B, QWEN_30B_A3B, config

PATHS = ("run.output_dir=o", "model.path=m", "data.train_path=t")
ENGINE = "policy.routing_replay=engine"
OLD = "policy.routing_replay=old"
TWO_UPDATES = "algorithm.n_minibatches=2"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            [ENGINE, "rollout.ranks=2"],
            "Set rollout.ranks=0, or policy.routing_replay=none (or old, with",
        ),
        (
            [ENGINE, "parallel.context=2"],
            "Set parallel.context=1, or policy.routing_replay=none.",
        ),
        ([OLD], "and algorithm.n_minibatches or algorithm.epochs above 1, or policy"),
        (
            [OLD, TWO_UPDATES, "algorithm.recompute_logprobs=false"],
            "Set algorithm.recompute_logprobs=true",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_what_can(overrides: list[str], told: str) -> None:
    (problem,) = conflicts(load_config([], [*PATHS, *overrides]))
    assert problem.startswith("policy.") and told in problem
    others = [override for override in overrides if "routing_replay" not in override]
    assert list(conflicts(load_config([], [*PATHS, *others]))) == []


def test_replay_needs_experts_and_an_engine_that_records_them() -> None:
    replaying = config(policy=PolicyConfig(routing_replay="engine"))
    assert problems_of_shapes(replaying, QWEN_30B_A3B) == []
    (problem,) = problems_of_shapes(replaying, QWEN_7B)
    assert "a Qwen2ForCausalLM has no experts to replay. Set policy.routing_replay=none" in problem
    (problem,) = device_problems(replaying, QWEN_30B_A3B, on_gpu=True)
    assert "engines on GPU record no routes yet. Set policy.routing_replay=none" in problem
    assert device_problems(replaying, QWEN_30B_A3B, on_gpu=True, kind="sft") == []


def test_experts_that_are_computed_again_alone_in_a_pipeline_cannot_replay() -> None:
    def problems(impl: Literal["transformer_engine", "local"], on_gpu: bool = True) -> list[str]:
        policy = PolicyConfig(
            routing_replay="old", recompute_granularity="selective", transformer_impl=impl
        )
        replaying = config(policy=policy, parallel=ParallelConfig(pipeline=2))
        told = device_problems(replaying, QWEN_30B_A3B, on_gpu)
        return [problem for problem in told if "computed again alone" in problem]

    (problem,) = problems("transformer_engine")
    assert "Set policy.recompute_granularity=full, policy.transformer_impl=local" in problem
    assert problems("local") == problems("transformer_engine", on_gpu=False) == []


def test_a_mixture_without_replay_is_told_what_it_risks() -> None:
    (warning,) = routing_warnings(PolicyConfig(), QWEN_30B_A3B)
    assert "have collapsed so. policy.routing_replay=engine" in warning
    assert routing_warnings(PolicyConfig(routing_replay="old"), QWEN_30B_A3B) == []
    assert routing_warnings(PolicyConfig(), QWEN_7B) == []
