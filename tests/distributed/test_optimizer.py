"""Learning rates of every update against tables and formulas written by hand; weights after several updates against
torch's optimizers; and what the settings make of the models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import LossSettings
from rlmath.config.load import load_config
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    TelemetryConfig,
)
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.models.logprobs import MinTokensMask
from rlmath.run.recovery.save_schedule import Frequency
from tests.distinct_settings import DISTINCT
from tests.distributed import optimizer_cases, oracle
from tests.distributed.optimizer_cases import STOPS, Schedule
from tests.distributed.rank_pool import RankPool
from tests.distributed.sft_cases import make_sequences
from tests.distributed.test_parity import assert_close
from tests.distributed.update_cases import make_groups
from tests.tiny_models import VOCAB, make_samples

pytestmark = pytest.mark.distributed

GROUPS = make_groups((2, 2, 2))
LR, LEAST = 0.012, 0.002


def rates_of(**settings: object) -> OptimizerConfig:
    return OptimizerConfig(kind="sgd", distributed=False, lr=LR, min_lr=LEAST, **settings)  # type: ignore[arg-type]


def cosine(part: float) -> float:
    return LEAST + (LR - LEAST) * (1 + math.cos(math.pi * part)) / 2


SCHEDULES: dict[str, tuple[Schedule, list[float]]] = {
    "a constant rate": (Schedule(rates_of(), steps=3), [LR] * 4),
    "a warm-up starts above 0": (
        Schedule(rates_of(warmup_steps=3), steps=6),
        [0.003, 0.006, 0.009, 0.012, 0.012, 0.012, 0.012],
    ),
    "a linear decay ends with the run": (
        Schedule(rates_of(decay="linear"), steps=5),
        [0.012, 0.010, 0.008, 0.006, 0.004, 0.002],
    ),
    "after a warm-up, too": (
        Schedule(rates_of(decay="linear", warmup_steps=2), steps=7),
        [0.004, 0.008, 0.012, 0.010, 0.008, 0.006, 0.004, 0.002],
    ),
    "a cosine": (
        Schedule(rates_of(decay="cosine", warmup_steps=1), steps=5),
        [0.006, *(cosine(part / 4) for part in range(5))],
    ),
    "minibatches and epochs are updates": (
        Schedule(rates_of(decay="linear", warmup_steps=2), steps=2, n_minibatches=3, epochs=2),
        [0.004, 0.008, *(LEAST + (LR - LEAST) * (10 - n) / 10 for n in range(11))],
    ),
}


@pytest.fixture(scope="module")
def found_rates(ranks: RankPool, tied_model: Path) -> dict[str, list[float]]:
    schedules = [schedule for schedule, _ in SCHEDULES.values()]
    (found,) = ranks.run(1, optimizer_cases.rates, tied_model, schedules, GROUPS)
    return dict(zip(SCHEDULES, found, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_every_update(found_rates: dict[str, list[float]], name: str) -> None:
    assert found_rates[name] == pytest.approx(SCHEDULES[name][1], rel=1e-9)


@pytest.mark.parametrize(("updates", "rate"), [(0, 0.004), (1, 0.008), (2, 0.012), (4, 0.008), (6, 0.004)])
def test_a_resumed_run_has_the_rate_of_its_next_update(
    ranks: RankPool, tied_model: Path, updates: int, rate: float
) -> None:
    optimizer = rates_of(decay="linear", warmup_steps=2)
    assert ranks.run(1, optimizer_cases.resumed, tied_model, optimizer, updates, 7) == [pytest.approx(rate)]


LEARNED_WITH: list[tuple[AlgorithmConfig, int, tuple[bool, bool, bool], tuple[int, int], bool]] = [
    (AlgorithmConfig(), 1, (False, False, True), (0, 0), False),
    (AlgorithmConfig(epochs=2), 2, (True, False, False), (1, 0), False),
    (AlgorithmConfig(n_minibatches=3), 3, (True, False, False), (1, 0), False),
    (AlgorithmConfig(recompute_logprobs=False), 1, (False, False, False), (0, 0), False),
    (AlgorithmConfig(kl_coef=0.1), 1, (False, True, True), (0, 1), False),
    (AlgorithmConfig(kl_coef=0.1, kl_in="reward"), 1, (True, False, False), (1, 1), True),
]
"""Minibatches of a step; whether each has log-probs of the policy before, of the reference, and whether it counts as
on-policy; passes of policy and reference for log-probs; whether KL is part of the reward."""


def test_log_probs_are_computed_once_and_where_they_are_needed(ranks: RankPool, tied_model: Path) -> None:
    algorithms = [replace(one, early_stop_ratio=None, early_stop_ratio_low=None) for one, *_ in LEARNED_WITH]
    (found,) = ranks.run(1, optimizer_cases.learned_with, tied_model, algorithms, GROUPS)
    for ours, (_, count, given, (policy, reference), in_reward) in zip(found, LEARNED_WITH, strict=True):
        assert ours == ([given] * count, {"policy": policy, "reference": reference}, in_reward)


OPTIMIZERS = {
    "adam with decay and a large epsilon": OptimizerConfig(
        lr=0.05, weight_decay=0.4, adam_beta1=0.6, adam_beta2=0.83, adam_eps=0.03, clip_grad=0.0
    ),
    "adam with clipped gradients": OptimizerConfig(
        lr=0.05, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.01, clip_grad=0.1
    ),
    "adam whose rate moves": OptimizerConfig(
        lr=0.05,
        min_lr=0.01,
        warmup_steps=1,
        decay="linear",
        weight_decay=0.4,
        adam_beta1=0.7,
        adam_beta2=0.9,
        adam_eps=0.02,
        clip_grad=0.3,
    ),
    "sgd with decay": OptimizerConfig(kind="sgd", lr=0.5, weight_decay=0.3, clip_grad=0.0, distributed=False),
    "sgd with clipped gradients": OptimizerConfig(
        kind="sgd", lr=0.5, weight_decay=0.0, clip_grad=0.2, distributed=False
    ),
}
MINIBATCHES = [make_samples(6, seed=seed) for seed in (21, 22, 23)]
RATES = {"adam whose rate moves": [0.025, 0.05, 0.03]}
"""With 3 updates in all; the others stay where they are."""


@pytest.fixture(scope="module")
def updates(ranks: RankPool, tied_model: Path) -> dict[str, tuple[list[dict[str, Tensor]], list[float]]]:
    optimizers = list(OPTIMIZERS.values())
    (found,) = ranks.run(1, optimizer_cases.updates, tied_model, optimizers, MINIBATCHES, len(MINIBATCHES))
    return dict(zip(OPTIMIZERS, found, strict=True))


def torch_updates(
    folder: Path, settings: OptimizerConfig, rates: list[float]
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The same updates in plain torch. As Megatron has it, matrices decay; biases and norms do not."""
    torch.set_num_threads(1)
    model = oracle.load(folder)
    named = dict(model.named_parameters())
    groups = [
        {"params": [one for one in named.values() if one.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [one for one in named.values() if one.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=settings.adam_eps)
        if settings.kind == "adam"
        else torch.optim.SGD(groups, lr=1.0)
    )
    weights, norms = [], []
    for samples, rate in zip(MINIBATCHES, rates, strict=True):
        optimizer.zero_grad()
        oracle.loss(model, samples).backward()
        most = settings.clip_grad or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), most)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        weights.append({name: one.detach().clone() for name, one in named.items()})
    return weights, norms


def moves(folder: Path, weights: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each update added to the weights."""
    start = {name: one.detach() for name, one in oracle.load(folder).named_parameters()}
    return [
        {name: after[name] - before[name] for name in start}
        for before, after in zip([start, *weights], weights, strict=False)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_updates_are_those_of_torch(
    tied_model: Path, updates: dict[str, tuple[list[dict[str, Tensor]], list[float]]], name: str
) -> None:
    settings = OPTIMIZERS[name]
    weights, norms = updates[name]
    wanted, wanted_norms = torch_updates(tied_model, settings, RATES.get(name, [settings.lr] * 3))
    assert norms == pytest.approx(wanted_norms, rel=1e-4)
    if settings.clip_grad:
        assert min(norms) > 1.2 * settings.clip_grad, "the clip has to be at work"
    for ours, theirs in zip(moves(tied_model, weights), moves(tied_model, wanted), strict=True):
        assert_close(ours, theirs, 2e-3)


def test_the_settings_reach_models_optimizer_and_store(ranks: RankPool, tied_model: Path) -> None:
    config = replace(
        DISTINCT,
        model=ModelConfig(path=str(tied_model)),
        parallel=ParallelConfig(),
        policy=PolicyConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
        optimizer=replace(DISTINCT.optimizer, kind="adam", distributed=True, warmup_steps=9),
    )
    (found,) = ranks.run(1, optimizer_cases.built, tied_model, config)
    assert found["loss"] == LossSettings(
        kind="cispo",
        clip_low=0.166,
        clip_high=0.267,
        dual_clip=3.68,
        correction=Correction("sequence", 1.69, 0.17, 4.71, 0.972, 1.028, 0.0283),
        kl_coef=0.0,
        kl_kind="k2",
        entropy_coef=0.00173,
        teacher_coef=0.271,
    )
    assert found["bounds"] == EarlyStop(ratio_high=1.74, ratio_low=0.775, kl=0.0176)
    sampled = (0.64, VOCAB, MinTokensMask(STOPS, 139))
    assert found["models"] == {
        "actor": sampled,
        "reference": sampled,
        "supervised": (1.0, VOCAB, MinTokensMask()),
    }
    recomputed = ("full", "block", 3)
    assert found["recompute"] == {
        "actor": recomputed,
        "reference": (None, None, None),
        "supervised": recomputed,
    }
    assert found["trains"] == [True, False]
    assert found["optimizer"] == {
        "optimizer": "adam",
        "lr": 0.128,
        "min_lr": 0.0129,
        "weight_decay": 0.131,
        "adam_beta1": 0.732,
        "adam_beta2": 0.833,
        "adam_eps": 0.00134,
        "sgd_momentum": 0.0,
        "clip_grad": 0.535,
        "use_distributed_optimizer": True,
    }
    for group in found["groups"]:
        assert group == (pytest.approx(0.0128), (0.732, 0.833), 0.00134, True)
    assert found["decays"] == [0.0, 0.131]
    assert found["schedule"] == (pytest.approx(0.0128), 0.128, 0.0129, 9, 37, "linear", 0.131, 0.131)
    assert found["total_of_supervised"] == 41
    assert found["retention"] == (198, 199, [2188, 2189]), "checkpoints before captures stay"
    assert found["root"] == Path("outputs/distinct/checkpoints")
    points, models = Frequency(195, 196, 197.5), Frequency(192, 193, 194.5)
    assert found["times"] == (points, models, 10 // 3, 2, None)


def test_limits_of_time_and_what_a_run_writes(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    run = RunConfig(
        output_dir=str(tmp_path / "run"),
        seed=7,
        device="cpu",
        distributed_timeout_seconds=130.0,
        start_timeout_seconds=50.0,
        stop_grace_seconds=60.0,
        heartbeat_timeout_seconds=70.0,
        hang_timeout_seconds=80.0,
    )
    config = Config(
        run=run,
        model=ModelConfig(path=str(tied_model)),
        data=DataConfig(train_path="nowhere"),
        optimizer=OptimizerConfig(lr=0.25, warmup_steps=3),
        sft=SftConfig(eval_every_steps=1),
        telemetry=TelemetryConfig(tensorboard=False),
    )
    (found,) = ranks.run(1, optimizer_cases.whole_run, tied_model, config)
    assert found == {
        "heartbeat": run,
        "grace": 60.0,
        "timeouts": (130.0, 180.0),  # Megatron's are whole minutes
        "status": 0,
    }
    assert load_config([tmp_path / "run" / "config.yaml"], []) == config
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("held_out/loss" in row for row in rows)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "hf_model" / "config.json").is_file()


def test_a_supervised_run_by_hand(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    """Settings of RL have no effect; rates count steps; the loss is per token, at temperature 1."""
    config = Config(
        run=RunConfig(output_dir=str(tmp_path), seed=3),
        model=ModelConfig(path=str(tied_model)),
        optimizer=rates_of(decay="linear", warmup_steps=1),
        algorithm=AlgorithmConfig(n_minibatches=3, epochs=2, loss_normalisation="sequence"),
        rollout=RolloutConfig(temperature=0.5, min_new_tokens=5),
        sft=SftConfig(eval_every_steps=3),
        policy=PolicyConfig(max_tokens_per_microbatch=50),
    )
    (found,) = ranks.run(1, optimizer_cases.supervised, tied_model, config, 4)
    before, *steps = found
    wanted_rates = [LR / 2, LR, LEAST + (LR - LEAST) * 2 / 3, LEAST + (LR - LEAST) / 3]
    assert [step["train/learning_rate"] for step in steps] == pytest.approx(wanted_rates, rel=1e-9)
    sequences = make_sequences(12, seed=5)
    held_out, train = sequences[:4], sequences[4:]
    torch.set_num_threads(1)
    model, where = oracle.load(tied_model), 0
    assert before == pytest.approx(by_hand(model, held_out), rel=1e-4)
    for number, (metrics, rate) in enumerate(zip(steps, wanted_rates, strict=True)):
        batch, where = train[where : where + 4], (where + 4) % 8
        assert metrics["train/loss"] == pytest.approx(by_hand(model, batch)["held_out/loss"], rel=1e-4)
        assert metrics["n_valid_tokens"] == sum(len(one.completion_ids) for one in batch)
        model.zero_grad()
        mean_loss(model, batch).backward()
        assert metrics["train/grad_norm"] == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), rel=1e-3
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        if number in (2, 3):  # the third, as asked, and the last
            reported = {name: value for name, value in metrics.items() if name.startswith("held_out/")}
            assert reported == pytest.approx(by_hand(model, held_out), rel=1e-3)
        else:
            assert not any(name.startswith("held_out/") for name in metrics)


def mean_loss(model: torch.nn.Module, sequences: list[WrittenSequence]) -> Tensor:
    """Mean over the tokens of all completions, at temperature 1."""
    total, count = torch.zeros(()), 0
    for one in sequences:
        ids = torch.tensor(one.prompt_ids + one.completion_ids)
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
        total = total - logprobs.gather(1, ids[1:, None])[len(one.prompt_ids) - 1 :].sum()
        count += len(one.completion_ids)
    return total / count


@torch.no_grad()
def by_hand(model: torch.nn.Module, sequences: list[WrittenSequence]) -> dict[str, float]:
    loss, hits, count = float(mean_loss(model, sequences)), 0, 0
    for one in sequences:
        ids = torch.tensor(one.prompt_ids + one.completion_ids)
        likeliest = model(ids[None]).logits[0, :-1].argmax(-1)
        hits += int((likeliest == ids[1:])[len(one.prompt_ids) - 1 :].sum())
        count += len(one.completion_ids)
    return {
        "held_out/loss": loss,
        "held_out/perplexity": math.exp(loss),
        "held_out/token_accuracy": hits / count,
    }
