"""What an engine on ranks of its own makes of the trainers' messages, with a vLLM that samples what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rlmath.algorithms.partial_rollouts import UnfinishedGroup
from rlmath.algorithms.types import NOTHING_SAMPLED, Completion, PartialCompletion, Prompt, Segment
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.data.order import PromptOrder
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.generation import Continue, GenerationLoop, NewWeights, SamplingPlan
from rlmath.rollout.sampling import Request, RequestResult, SamplingSettings, request_seed


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Running:
    """The requests of a vLLM, which has sampled `so_far` of each of them when it is asked to end them."""

    new_tokens = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.so_far: dict[Any, list[int]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self) -> list[RequestResult]:
        found = [
            RequestResult(
                one.key, self.so_far.get(one.key, []), [-0.5] * len(self.so_far.get(one.key, [])), ""
            )
            for one in self.requests
        ]
        self.requests = []
        return found


class Engine:
    def __init__(self) -> None:
        self.running, self.version = Running(), 0

    def running_requests(self) -> Running:
        return self.running

    def set_weight_version(self, version: int, reset_prefixes: bool = True) -> None:
        self.version = version


def test_every_token_has_the_version_and_the_step_of_the_weights_that_sampled_it(alone: None) -> None:
    """Two updates a step: versions 6 and 8 are those of the steps 3 and 4. The group is of an earlier start."""
    prompts = [Prompt(f"q{n}", "?", (n, 1), ("2",), "math") for n in range(6)]
    inputs: Any = SimpleNamespace(prompts=prompts, order=PromptOrder(6, 2, seed=5, shuffle=False))
    lengths = [SamplingSettings(2, 0.9, 0.8, 0, most) for most in (7, 9)]
    engine: Any = Engine()
    taking: Any = SimpleNamespace(take=lambda: 0.25)
    collector: Any = SimpleNamespace(tokenizer=None)
    loop = GenerationLoop(
        engine,
        Mesh(0, 1, 1, 1, 1),
        receiver=taking,
        collector=collector,
        plan=SamplingPlan(inputs, RolloutConfig(group_size=2), RewardConfig(), lengths, run_seed=11),
        leader=None,
    )
    steps: list[int] = []
    loop._on_weights = steps.append
    early = PartialCompletion((4,), (-0.5,), (Segment(1, 4, 2),))
    group = UnfinishedGroup(5, 2, (early, NOTHING_SAMPLED))

    def told(*messages: object) -> None:
        loop._queue += messages
        loop._handle_messages()
        loop._begin_groups()

    told(Continue([group], 1), NewWeights(6, 3, 100.0))
    first, second = engine.running.requests
    assert (first.so_far, first.max_new_tokens, first.token_ids) == ((4,), 8, (5, 1))
    assert (second.so_far, second.max_new_tokens, second.key) == ((), 9, (5, 1))
    assert [one.seed for one in (first, second)] == [request_seed(11, 2, "q5", g) for g in range(2)]
    engine.running.so_far = {(5, 0): [7, 8], (5, 1): [9]}
    told(NewWeights(8, 4, 101.0))
    assert [len(one.so_far) for one in engine.running.requests] == [3, 1]
    loop._finish(RequestResult((5, 0), [1], [-0.5], "stop"))
    done, waiting = loop._groups[5].samples
    assert isinstance(done, Completion) and isinstance(waiting, PartialCompletion)
    assert done.segments == (Segment(1, 4, 2), Segment(2, 6, 3), Segment(1, 8, 4))
    assert (done.policy_version, list(done.token_ids)) == (8, [4, 7, 8, 1])
    assert waiting.segments == (Segment(1, 6, 3),)
    assert steps == [3, 4] and engine.version == 8
