"""What a rank does in the tests of the GRPO step: a real trainer makes steps; what the learner is given is noted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmath.algorithms.types import ScoredGroup
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SaveConfig,
    SelectionConfig,
)
from rlmath.data.dataset import load_inputs
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.mesh import Mesh
from rlmath.run.recovery.resume import Origin
from rlmath.run.startup import PreparedRun
from tests.tiny_models import shape_of

STEPS, PROMPTS, PER_STEP, GROUP = 3, 5, 4, 3
MINIBATCHES, EPOCHS, WARMUP, LR, MIN_LR = 3, 2, 4, 1e-2, 1e-3


@dataclass(frozen=True)
class Learned:
    """One call of the learner: what it was given, by sample of the step, and the learning rate that it had."""

    samples: tuple[int, ...]
    tokens: dict[int, list[int]]
    """Prompt and completion."""
    advantages: dict[int, list[float]]
    """Of the completion's tokens, as are all that follow."""
    behaviour: dict[int, list[float]]
    old: dict[int, list[float]]
    reference: dict[int, list[float]]
    on_policy: bool
    learning_rate: float


@dataclass(frozen=True)
class Step:
    """What a step did."""

    groups: list[ScoredGroup]
    advantages: list[list[float]]
    metrics: dict[str, float]
    learned: list[Learned]
    epoch: int


def config_of(folder: Path, place: Path) -> Config:
    return Config(
        run=RunConfig(
            output_dir=str(place / "run"), total_steps=STEPS, total_epochs=STEPS, seed=7, device="cpu"
        ),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(
            train_path=str(place / "train.jsonl"), prompts_per_step=PER_STEP, max_prompt_tokens=8
        ),
        policy=PolicyConfig(max_tokens_per_microbatch=64),
        optimizer=OptimizerConfig(
            kind="sgd", lr=LR, min_lr=MIN_LR, decay="cosine", warmup_steps=WARMUP, distributed=False
        ),
        rollout=RolloutConfig(
            group_size=GROUP, max_new_tokens=12, temperature=0.9, cpu_kv_cache_gib=0.1, progress_bar=False
        ),
        reward=RewardConfig(function="tests.reward_by_hash:reward"),
        algorithm=AlgorithmConfig(
            n_minibatches=MINIBATCHES, epochs=EPOCHS, kl_coef=0.1, early_stop_ratio=None
        ),
        save=SaveConfig(ckpt_freq_secs=None),
    )


def steps(folder: Path, place: Path, drop_truncated: bool = False) -> list[Step]:
    """All steps of a small run by one rank, without the life cycle around them."""
    from rlmath.run.divergence import DivergenceCheck
    from rlmath.run.recovery.checkpointing import Checkpointer
    from rlmath.trainer.grpo import GrpoTrainer

    rows = [
        {"prompt": f"{n}+{n}=", "solutions": [str(2 * n)], "query_id": f"q{n}", "task": "math"}
        for n in range(PROMPTS)
    ]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, shape = config_of(folder, place), shape_of(folder)
    config = replace(config, selection=SelectionConfig(drop_truncated=drop_truncated))
    prepared = PreparedRun(config, shape, load_inputs(config, shape), Origin("", ""), None)
    device, mesh, made = open_device("cpu"), Mesh(0, 1, 1, 1, 1), []
    with GrpoTrainer.open_workers(config, mesh) as workers:
        init_process_group(device, 120.0)
        trainer = GrpoTrainer(
            prepared, mesh, device, workers=workers, on_phase=lambda name: None, on_progress=lambda: None
        )
        stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, 0)
        divergence = DivergenceCheck(trainer, 3, None)
        trainer.begin(None, Checkpointer(trainer, prepared.origin, stop, divergence, lambda: None))
        learned = _noted(trainer.actor.learner)
        for number in range(STEPS):
            record = trainer.step(number)
            made.append(Step(record.groups, record.advantages, record.metrics, list(learned), record.epoch))
            learned.clear()
        trainer.close(0)
    return made


def _noted(learner: Any) -> list[Learned]:
    """What the learner is given from now on; it learns as before."""
    calls: list[Learned] = []
    learn = learner.learn

    def recording(batches: Any, old: Any, reference: Any, on_policy: bool = False, *more: Any) -> Any:
        result = learn(batches, old, reference, on_policy, *more)
        calls.append(
            Learned(
                tuple(index for batch in batches for index in batch.sample_indices),
                _of_samples(batches, [batch.token_ids_T for batch in batches], whole=True),
                _of_samples(batches, [batch.advantages_T for batch in batches]),
                _of_samples(batches, [batch.behaviour_logprobs_T for batch in batches]),
                {} if old is None else _of_samples(batches, [one.logprobs_T for one in old]),
                {} if reference is None else _of_samples(batches, [one.logprobs_T for one in reference]),
                on_policy,
                result.learning_rate,
            )
        )
        return result

    learner.learn = recording
    return calls


def _of_samples(batches: Any, per_token: list[Any], whole: bool = False) -> dict[int, list[Any]]:
    found = {}
    for batch, values_T in zip(batches, per_token, strict=True):
        starts = batch.cu_seqlens_S1.tolist()
        for segment, index in enumerate(batch.sample_indices):
            mine = slice(starts[segment], starts[segment + 1])
            kept = batch.completion_index_T[mine] >= 0
            found[index] = values_T[mine].tolist() if whole else values_T[mine][kept].tolist()
    return found
