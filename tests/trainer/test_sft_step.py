"""A step of supervised training, and what it tells, with a learner that only keeps it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.config.schema import Config, LoraConfig, SftConfig
from rlmath.data.micro_batches import training_cost
from rlmath.data.order import PromptOrder
from rlmath.data.packing import MicroBatch
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.learner import MinibatchResult
from rlmath.trainer import sft
from rlmath.trainer.base import Trainer
from rlmath.trainer.sft import SftTrainer
from tests.tiny_models import shape_of

SEQUENCES = [WrittenSequence((5,) * (n + 1), (7,) * (n + 2)) for n in range(6)]
HELD_OUT = [WrittenSequence((5, 6), (8, 9))]
RESULT = MinibatchResult(
    {"loss": 3.0, "tokens": 4.0}, {}, 0.5, learning_rate=0.25, discarded=None, loss_scale=8.0
)


class Learner:
    def __init__(self, held_out_loss: float) -> None:
        self.learned: list[list[MicroBatch]] = []
        self.result = RESULT
        self._loss = held_out_loss

    def learn(self, batches: list[MicroBatch]) -> MinibatchResult:
        self.learned.append(batches)
        return self.result

    def evaluate(self, batches: list[MicroBatch]) -> dict[str, float]:
        (batch,) = batches
        assert batch.token_ids_T.tolist() == [5, 6, 8, 9]
        return {"loss": self._loss, "tokens": 2.0, "hits": 1.0}


def trainer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, held_out_loss: float = 1.0, rank: int = 0
) -> tuple[SftTrainer, Learner, dict[str, Any]]:
    """A trainer of two sequences a step, its learner, and what its model was built from."""
    learner = Learner(held_out_loss)
    origin: dict[str, Any] = {}
    shape = shape_of(folder)

    def init(self: Any, context: Any) -> None:
        self.config = context.config
        self.shape = shape
        self.mesh = Mesh(rank, 1, 1, pipeline=1, engine_size=1)
        self.device = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
        self.total_steps = 3
        self.order = PromptOrder(len(SEQUENCES), 2, seed=1, shuffle=False)
        self.timers = PhaseTimers()
        self.peak_flops = None

    def build(config: Config, shape: Any, mesh: Mesh, **more: Any) -> Any:
        origin.update(more, shape=shape)
        return SimpleNamespace(learner=learner, forward_backward=SimpleNamespace())

    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(sft, "build_sft_actor", build)
    context: Any = SimpleNamespace(
        config=Config(sft=SftConfig(eval_every_steps=2)),
        inputs=SimpleNamespace(sequences=SEQUENCES, held_out=HELD_OUT),
        on_phase=lambda name: None,
        on_progress="progress",
    )
    run = SftTrainer(context)
    origin["progress"] = run.actor.forward_backward.on_microbatch
    return run, learner, origin


def test_a_supervised_step_learns_from_its_sequences_and_tells_of_them(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step has the sequences of 7 and 9 tokens; the held-out loss is due after it."""
    run, learner, origin = trainer(tied_model, monkeypatch)
    assert origin["total_updates"] == 3 and origin["progress"] == "progress"
    first = run.step(0)
    assert not any(name.startswith("held_out/") for name in first.metrics)
    with run.timers.phase("an earlier step's"):
        pass
    record = run.step(1)
    lengths = [len(batch.token_ids_T) for batch in learner.learned[1]]
    assert sum(lengths) == 7 + 9 and record.results == [RESULT]
    expected = {
        "train/loss": 0.75,
        "train/grad_norm": 0.5,
        "train/learning_rate": 0.25,
        "train/skipped_updates": 0.0,
        "train/loss_scale": 8.0,
        "n_seqs": 2.0,
        "n_tokens": 16.0,
        "n_valid_tokens": 4.0 + 5.0,
        "avg_seq_len": 8.0,
        "held_out/loss": 0.5,
        "held_out/perplexity": math.exp(0.5),
        "held_out/token_accuracy": 0.5,
    }
    assert {name: record.metrics[name] for name in expected} == pytest.approx(expected)
    phases = {f"seconds/{name}" for name in ("pack", "update", "evaluate", "step")}
    assert {name for name in record.metrics if name.startswith("seconds/")} == phases
    for phase in ("update", "step"):
        paced = record.metrics[f"tokens_per_second/{phase}"]
        assert paced == pytest.approx(16 / record.metrics[f"seconds/{phase}"])
    assert "train/mfu" not in record.metrics
    run.peak_flops = 1e3
    learner.result = MinibatchResult(
        RESULT.sums, {}, math.inf, learning_rate=0.25, discarded="not finite"
    )
    metrics = run.step(1).metrics
    trained = sum(run.cost.of(length) for length in (7, 9))
    assert metrics["train/mfu"] == pytest.approx(trained / (metrics["seconds/update"] * 1e3))
    assert metrics["train/skipped_updates"] == 1.0


def test_the_held_out_loss_before_training_is_told_also_where_it_is_huge(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = trainer(tied_model, monkeypatch, held_out_loss=4e3)
    metrics = run.evaluate_before_training()
    assert metrics["held_out/loss"] == 2e3
    assert metrics["held_out/perplexity"] == math.exp(700.0)
    run.held_out = []
    assert run.evaluate_before_training() == {}


def test_a_models_own_weights_cost_more_to_train_than_adapters(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = trainer(tied_model, monkeypatch)
    shape = shape_of(tied_model)
    assert run.cost == training_cost(shape) != training_cost(shape, frozen=True)
    context: Any = SimpleNamespace(
        config=Config(lora=LoraConfig(rank=1)),
        inputs=SimpleNamespace(sequences=SEQUENCES, held_out=[]),
        on_phase=lambda name: None,
        on_progress=None,
    )
    assert SftTrainer(context).cost == training_cost(shape, frozen=True)
