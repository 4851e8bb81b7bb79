"""What is refused and told of `policy.routing_replay` before a run starts."""

from __future__ import annotations

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import PolicyConfig
from rlmath.planning.checks import device_problems
from rlmath.planning.model_checks import routing_warnings
from rlmath.planning.setting_tables import conflicts
from tests.planning.of_policy import problems_of_shapes
from tests.planning.test_memory_estimate import QWEN_7B, QWEN_30B_A3B, config

ENGINE = "policy.routing_replay=engine"
OLD = "policy.routing_replay=old"
TWO_UPDATES = "algorithm.n_minibatches=2"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([ENGINE, "rollout.ranks=2"], "Set rollout.ranks=0, or policy.routing_replay=old."),
        ([ENGINE, "rollout.tail=carry"], "Set rollout.tail=wait, or policy.routing_replay=old."),
        ([ENGINE, "tools.format=fence"], "Set tools.format=null, or policy.routing_replay=old."),
        (
            [ENGINE, "parallel.context=2"],
            "Set parallel.context=1, or policy.routing_replay=none.",
        ),
        (
            [
                OLD,
                TWO_UPDATES,
                "parallel.pipeline=2",
                "policy.recompute_granularity=selective",
            ],
            "Set policy.recompute_granularity=full, parallel.pipeline=1, or",
        ),
        ([OLD], "several updates a step (algorithm.n_minibatches or algorithm.epochs above 1)"),
        (
            [OLD, TWO_UPDATES, "algorithm.recompute_logprobs=false"],
            "Needed are algorithm.recompute_logprobs=true",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_what_can(overrides: list[str], told: str) -> None:
    paths = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    (problem,) = conflicts(load_config([], [*paths, *overrides]))
    assert problem.startswith("policy.") and told in problem
    others = [override for override in overrides if "routing_replay" not in override]
    assert list(conflicts(load_config([], [*paths, *others]))) == []


def test_replay_needs_experts_and_an_engine_that_records_them() -> None:
    replaying = config(policy=PolicyConfig(routing_replay="engine"))
    assert problems_of_shapes(replaying, QWEN_30B_A3B) == []
    (problem,) = problems_of_shapes(replaying, QWEN_7B)
    assert "a Qwen2ForCausalLM has no experts to replay. Set policy.routing_replay=none" in problem
    (problem,) = device_problems(replaying, QWEN_30B_A3B, on_gpu=True)
    assert "engines on GPU record no routes yet. Set policy.routing_replay=old" in problem
    assert device_problems(replaying, QWEN_30B_A3B, on_gpu=True, kind="sft") == []


def test_a_mixture_without_replay_is_told_what_it_risks() -> None:
    (warning,) = routing_warnings(PolicyConfig(), QWEN_30B_A3B)
    assert "have collapsed so. policy.routing_replay=engine" in warning
    assert routing_warnings(PolicyConfig(routing_replay="old"), QWEN_30B_A3B) == []
    assert routing_warnings(PolicyConfig(), QWEN_7B) == []
