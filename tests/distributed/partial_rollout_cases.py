"""What the ranks do in the tests of partial rollouts.

A real trainer samples and learns, step by step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rlmath.algorithms.types import PartialCompletion, ScoredGroup
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
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
)
from rlmath.data.dataset import load_inputs, load_validation
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.resume import Origin
from tests.tiny_models import shape_of

PROMPTS = 90
PER_STEP = 3
GROUP = 2
LONGEST = 96
NO_CHANGE = 1e-30
"""A learning rate that changes no weight."""
CARRY = RolloutConfig(
    tail="carry",
    slice_tokens=12,
    max_staleness=3,
    max_groups_in_flight=8,
    group_size=GROUP,
    max_new_tokens=LONGEST,
    temperature=1.0,
    max_num_seqs=6,
    cpu_kv_cache_gib=0.1,
    progress_bar=False,
)
DEFER = replace(CARRY, tail="defer", slice_tokens=40)


@dataclass(frozen=True)
class Run:
    """What a run did."""

    groups: list[list[ScoredGroup]]
    """The groups that it learned from, by step."""
    metrics: list[dict[str, float]]
    in_flight: list[list[int]]
    """The draws that a step left in flight, by step."""
    scored: list[tuple[list[float], list[float]]]
    """Log-probs of new tokens, as sampled and as the engine gives them when it only reads the
    tokens, right after the rollout that sampled them."""
    validated: list[dict[str, float]]
    """Metrics of validation by step, empty where there is no validation."""


def uniform_model(source: Path, folder: Path) -> Path:
    """A model to which all tokens are nearly equally likely, the end among them.

    Lengths fall off geometrically."""
    return with_scaled_logits(source, folder, 0.1)


def with_scaled_logits(source: Path, folder: Path, factor: float) -> Path:
    """The model with logits that are so many times as large."""
    shutil.copytree(source, folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= factor
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def config_of(
    folder: Path, place: Path, steps: int, rollout: RolloutConfig, more: Mapping[str, Any]
) -> Config:
    config = Config(
        run=RunConfig(
            output_dir=str(place / "run"),
            total_steps=steps,
            total_epochs=steps,
            seed=7,
            device="cpu",
        ),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train_path=_prompts(place), prompts_per_step=PER_STEP, max_prompt_tokens=8),
        policy=PolicyConfig(max_tokens_per_microbatch=128),
        optimizer=OptimizerConfig(kind="sgd", lr=NO_CHANGE, distributed=False),
        rollout=rollout,
        reward=RewardConfig(function="tests.reward_by_hash:reward"),
        algorithm=AlgorithmConfig(
            importance_correction="token", importance_mask_high=5.0, early_stop_ratio=None
        ),
        save=SaveConfig(ckpt_freq_secs=None),
    )
    return replace(config, **more)


def _prompts(place: Path) -> str:
    rows = [
        {"prompt": f"{n}+{n}=", "solutions": [str(2 * n)], "query_id": f"q{n}", "task": "math"}
        for n in range(PROMPTS)
    ]
    path = place / f"train-{environment_rank()}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared_run(config: Config) -> PreparedRun[Any]:
    """What a start reads."""
    shape = shape_of(Path(config.model.path))
    inputs = load_inputs(config, shape)
    validation = load_validation(config, inputs.tokenizer, shape.vocab_size)
    shapes = read_run_shapes(config, shape).with_total_steps(config, inputs.total_steps)
    return PreparedRun(config, shapes, inputs, Origin("", ""), None, validation=validation)


def begin(trainer: Any) -> None:
    """Begin as the loop of a run does, from its first step on."""
    from rlmath.run.divergence import DivergenceCheck
    from rlmath.run.recovery.checkpointing import Checkpointer

    stop = StopRequest(trainer.config.run.stop_grace_seconds, trainer.config.run.output_dir, 0)
    check = DivergenceCheck(trainer, 3, None)
    checkpointer = Checkpointer(trainer, Origin("", ""), stop, check, lambda: None)
    trainer.begin(0, checkpointer.export, checkpointer.asked_to_stop)


def run(
    folder: Path, place: Path, steps: int, rollout: RolloutConfig, more: Mapping[str, Any]
) -> Run:
    """All steps of a small run, without the life cycle around them.

    `more` has sections of its settings. With "stop_after" the rollouts begin anew after that many
    steps, from what a checkpoint would hold of them; with "reward_changed" they do so with another
    reward function."""
    from rlmath.trainer.grpo import GrpoTrainer
    from rlmath.trainer.rollouts.synchronous import PartialRollouts

    sections = {
        name: value for name, value in more.items() if name not in ("stop_after", "reward_changed")
    }
    prepared = prepared_run(config := config_of(folder, place, steps, rollout, sections))
    world = environment_world_size()
    parallel = config.parallel
    mesh = Mesh(environment_rank(), world, parallel.tensor, 1, rollout.tensor_parallel)
    device = open_device("cpu")
    history = Run([], [], [], [], [])
    with GrpoTrainer.open_workers(config, mesh, prepared.inputs, prepared.validation) as workers:
        init_process_group(device, 120.0)
        trainer = GrpoTrainer(prepared.on_rank(mesh, device, workers=workers))
        begin(trainer)
        if config.optimizer.lr > NO_CHANGE:
            _score_new_tokens(trainer, history)
        for number in range(steps):
            if number == more.get("stop_after"):
                _restart_rollouts(trainer, place, number, bool(more.get("reward_changed")))
            record = trainer.step(number)
            history.groups.append(list(record.groups))
            history.metrics.append(record.metrics)
            history.validated.append({} if record.validation is None else record.validation.metrics)
            rollouts = trainer.rollouts
            unfinished = (
                rollouts._unfinished.groups if isinstance(rollouts, PartialRollouts) else []
            )
            history.in_flight.append([group.draw for group in unfinished])
        trainer.close(0)
    return history


def _restart_rollouts(trainer: Any, place: Path, steps_done: int, reward_changed: bool) -> None:
    """Replace the rollouts as a resumed run would."""
    files = trainer.rollouts.files()
    folder = place / f"checkpoint-{environment_rank()}"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    trainer.rollouts = type(trainer.rollouts)(
        trainer.config, trainer.inputs, trainer.engines.collector, shapes=trainer.shapes
    )
    trainer.rollouts.resume(folder, steps_done, reward_changed)


def _score_new_tokens(trainer: Any, found: Run) -> None:
    """Let the engine read what it has sampled after every rollout."""
    collector = trainer.engines.collector
    sample = collector.sample

    def sample_and_score(rows: Any, *arguments: Any, **options: Any) -> Any:
        sampled, usages = sample(rows, *arguments, **options)
        for work in (work for row in rows for work in row):
            part = sampled[work.request.key]
            part = part if isinstance(part, PartialCompletion) else part.completion
            start = len(work.request.so_far.token_ids)
            (scored,) = trainer.engines.engine.score([[*work.prompt.token_ids, *part.token_ids]])
            found.scored.append(
                (
                    list(part.logprobs[start:]),
                    scored[len(work.prompt.token_ids) - 1 + start :],
                )
            )
        return sampled, usages

    collector.sample = sample_and_score
