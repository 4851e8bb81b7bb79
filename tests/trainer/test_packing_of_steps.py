"""How the two trainers pack their samples.

Budget, padding, number of micro-batches, seed, order, and normalisation."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.algorithms.losses import TOKEN_MEAN, Normalisation
from rlmath.algorithms.types import Completion, Prompt, Sample, ScoredGroup, Segment
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
)
from rlmath.data.micro_batches import MinibatchPlan, plan_minibatches, training_cost
from rlmath.data.packing import MicroBatch, pack
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.trainer.policy_update import PolicyUpdater
from rlmath.trainer.sft import SftTrainer
from rlmath.trainer.token_advantages import PackedStep, ScoredStep
from tests.tiny_models import make_samples, shape_of

SEED = 11
BUDGET = 700
# Some are so long that FLOPs balance them otherwise than tokens would.
SAMPLES = make_samples(12, seed=6, longest=60) + make_samples(5, seed=7, longest=600)
TWO_STAGES = {"world_size": 8, "tensor": 2, "pipeline": 2, "engine_size": 1, "virtual_pipeline": 2}
"""Two data-parallel replicas; the interleaved schedule takes micro-batches in pairs."""
ALONE = Mesh(0, 1, 1, 1, 1)
SEQUENCES = [
    WrittenSequence(tuple(sample.prompt_ids), tuple(sample.completion_ids)) for sample in SAMPLES
]
NOTHING: Any = None


def settings(sequence: bool = True, **algorithm: Any) -> Config:
    return Config(
        run=RunConfig(seed=SEED),
        parallel=ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, sequence=sequence),
        policy=PolicyConfig(max_tokens_per_microbatch=BUDGET),
        rollout=RolloutConfig(max_new_tokens=603),
        algorithm=AlgorithmConfig(n_minibatches=2, epochs=3, **algorithm),
        sft=SftConfig(eval_every_steps=3),
    )


def rl_packs(folder: Path, rank: int, number: int, config: Config) -> list[list[MicroBatch]]:
    mesh = Mesh(rank, **TWO_STAGES)
    return updater(folder, mesh, config).pack_minibatches(SAMPLES, number)


def updater(folder: Path, mesh: Mesh, config: Config) -> PolicyUpdater:
    """An updater without models, which packing does not need."""
    return PolicyUpdater(
        config,
        shape_of(folder),
        mesh,
        actor=NOTHING,
        reference=None,
        offload=NOTHING,
        timers=PhaseTimers(),
    )


def sft_trainer(folder: Path, mesh: Mesh, config: Config) -> SftTrainer:
    """A trainer without a model: its constructor would build that, which needs a process group."""
    trainer = SftTrainer.__new__(SftTrainer)
    trainer.config = config
    trainer.mesh = mesh
    trainer.total_steps = 7
    trainer.cost = training_cost(shape_of(folder))
    return trainer


def assert_same(found: list[MicroBatch], wanted: list[MicroBatch]) -> None:
    assert len(found) == len(wanted)
    for batch, other in zip(found, wanted, strict=True):
        for field in fields(MicroBatch):
            left, right = getattr(batch, field.name), getattr(other, field.name)
            equal = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert equal, field.name


def plan(
    folder: Path, samples: list[Sample], minibatches: int, seed: int, **how: Any
) -> list[MinibatchPlan]:
    lengths = [sample.length for sample in samples]
    arguments = {
        "cost": training_cost(shape_of(folder)),
        "count_multiple": 2,
        "shuffle": True,
    } | how
    return plan_minibatches(
        lengths, minibatches, data_size=2, max_tokens=BUDGET, seed=seed, **arguments
    )


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("data_rank", [0, 1])
def test_a_step_of_rl_is_packed_as_the_settings_say(
    tied_model: Path, data_rank: int, number: int
) -> None:
    packs = rl_packs(tied_model, 2 * data_rank, number, settings(loss_normalisation="constant"))
    step_seed = SEED * 1_000_003 + number
    for batches, planned in zip(packs, plan(tied_model, SAMPLES, 2, step_seed), strict=True):
        rank_microbatches = planned.microbatches_by_rank[data_rank]
        assert_same(
            batches,
            [
                pack(SAMPLES, indices, 2, Normalisation("constant", 603))
                for indices in rank_microbatches
            ],
        )


@pytest.mark.parametrize(
    ("proximal", "recompute", "lag"),
    [("recompute", True, None), ("interpolate", True, [0, 3, 1]), ("compare", False, None)],
)
def test_only_log_probs_between_two_versions_need_the_versions_of_tokens(
    tied_model: Path, proximal: Any, recompute: bool, lag: list[int] | None
) -> None:
    config = replace(
        settings(proximal_logprobs=proximal, recompute_logprobs=recompute),
        parallel=ParallelConfig(),
    )
    actor: Any = SimpleNamespace(learner=SimpleNamespace(updates=5))
    segments = Segment(1, 2, 0), Segment(1, 4, 1)
    completion = Completion(0, (7, 8), (-1.0, -1.0), "", "stop", 4, segments)
    group = ScoredGroup(Prompt("q", "?", (3,), ("2",), "math"), (completion,), ())
    lone_updater = replace(updater(tied_model, ALONE, config), actor=actor)
    (batch,) = lone_updater.pack(ScoredStep(0, [group], [[1.0]], [[2]]), [[1.0]]).batches
    assert (None if batch.lag_T is None else batch.lag_T.tolist()) == lag


def _lengths(batches: list[MicroBatch]) -> list[tuple[int, int]]:
    """(tokens, tokens of the samples) of those that are not empty."""
    return [
        (len(batch.token_ids_T), sum(SAMPLES[index].length for index in batch.sample_indices))
        for batch in batches
        if batch.sample_indices
    ]


def test_packs_are_padded_under_sequence_parallelism_alone(tied_model: Path) -> None:
    padded = settings()
    plain = settings(sequence=False)
    of_rl = [_lengths(half) for half in rl_packs(tied_model, 0, 0, padded)]
    for lengths in (*of_rl, _lengths(sft_packs(tied_model, 0, padded))):
        assert all(tokens == length + length % 2 for tokens, length in lengths)
    of_rl = [pair for half in rl_packs(tied_model, 0, 0, plain) for pair in _lengths(half)]
    for lengths in (of_rl, _lengths(sft_packs(tied_model, 0, plain))):
        assert all(tokens == length for tokens, length in lengths)
        assert any(tokens % 2 for tokens, _ in lengths)


def test_minibatches_in_the_order_of_prompts_are_the_same_every_step(tied_model: Path) -> None:
    in_order = settings(shuffle=False)
    steps = [rl_packs(tied_model, 0, number, in_order) for number in (0, 1)]
    other_packs = [rl_packs(tied_model, 2, number, in_order) for number in (0, 1)]
    for first, second in zip(steps[0], steps[1], strict=True):
        assert_same(first, second)
    for half, expected in enumerate((set(range(9)), set(range(9, 17)))):
        packs = (*steps[0][half], *other_packs[0][half])
        assert {index for batch in packs for index in batch.sample_indices} == expected


def test_every_epoch_but_the_first_has_an_order_of_its_own() -> None:
    scored = ScoredStep(0, [], [], [])
    step = PackedStep(scored, [], tuple(slice(n, n + 1) for n in range(9)), seed=5)
    in_order = list(range(9))
    first, *others = step.orders(4, shuffle=True)
    assert first == in_order
    assert all(sorted(order) == in_order for order in others)
    assert len({tuple(order) for order in (first, *others)}) == 4
    assert step.orders(4, shuffle=True) == [first, *others]
    assert step.orders(3, shuffle=False) == [in_order] * 3


def test_fewer_samples_than_minibatches_are_one_each(tied_model: Path) -> None:
    packed = updater(tied_model, ALONE, settings(sequence=False)).pack_minibatches(SAMPLES[:1], 0)
    assert [[batch.sample_indices for batch in batches] for batches in packed] == [[(0,)]]


def sft_packs(folder: Path, rank: int, config: Config) -> list[MicroBatch]:
    return sft_trainer(folder, Mesh(rank, **TWO_STAGES), config).pack(SEQUENCES)


@pytest.mark.parametrize("data_rank", [0, 1])
def test_a_supervised_step_is_one_minibatch_with_a_loss_per_token(
    tied_model: Path, data_rank: int
) -> None:
    samples = [
        replace(sample, behaviour_logprobs=(0.0,) * len(sample.completion_ids), advantage=0.0)
        for sample in SAMPLES
    ]
    (planned,) = plan(tied_model, samples, 1, seed=0, shuffle=False)
    # Settings of RL have no effect here.
    config = settings(loss_normalisation="sequence")
    rank_microbatches = planned.microbatches_by_rank[data_rank]
    expected = [pack(samples, indices, 2, TOKEN_MEAN) for indices in rank_microbatches]
    assert_same(sft_packs(tied_model, 2 * data_rank, config), expected)
    assert {float(w) for batch in expected for w in batch.loss_weights_T} == {0.0, 1.0}


@pytest.mark.parametrize(("budget", "fewest"), [(530, 3), (640, 2), (1300, 1)])
def test_micro_batches_are_as_full_as_the_budget_lets_them(
    tied_model: Path, budget: int, fewest: int
) -> None:
    """All samples have 1262 tokens, the longest one 523."""
    config = replace(
        settings(sequence=False), policy=PolicyConfig(max_tokens_per_microbatch=budget)
    )
    config = replace(config, algorithm=AlgorithmConfig(n_minibatches=1))
    (packed,) = updater(tied_model, ALONE, config).pack_minibatches(SAMPLES, 0)
    for batches in (packed, sft_trainer(tied_model, ALONE, config).pack(SEQUENCES)):
        assert max(len(batch.token_ids_T) for batch in batches) <= budget
        assert len(batches) == fewest


def test_when_the_held_out_loss_is_due(tied_model: Path) -> None:
    config = settings()
    trainer = sft_trainer(tied_model, ALONE, config)
    assert [step for step in range(1, 8) if trainer.is_due(step)] == [3, 6, 7]
    never = sft_trainer(tied_model, ALONE, replace(config, sft=SftConfig(eval_every_steps=None)))
    assert not any(never.is_due(step) for step in range(1, 8))
