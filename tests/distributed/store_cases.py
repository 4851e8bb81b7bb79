"""What the ranks do in the tests of checkpoints.

They learn, save and learn on; or load in some layout and learn on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    microbatches,
    policy_state,
    whole_tensors,
)

SETTINGS = "run: {}\n"


@dataclass(frozen=True)
class Outcome:
    """Results of one rank."""

    state: dict[str, Tensor]
    """Parameters, optimizer and schedule of this rank where the checkpoint was made, or loaded."""
    weights: dict[str, Tensor]
    """Whole, at the same place."""
    later: dict[str, Tensor]
    """Whole, after one more update."""
    numbers: list[float]
    """What torch, numpy and Python draw next."""


def progress(step: int, updates: int, world_size: int) -> Any:
    from rlmath.checkpoint.directory import Progress

    fields = step, 0, 8 * step, updates, step, "", world_size, (), (), "model", "data", {}
    return Progress(*fields, learned_step=step, good_step=3)


def open_store(stage: Stage, root: Path, keep_last: int = 2) -> Any:
    from rlmath.checkpoint.manager import CheckpointManager
    from rlmath.checkpoint.retention import Retention

    metadata_files = {"config.json": b"{}"}
    return CheckpointManager(
        root, lambda: [policy_of(stage)], stage.device, metadata_files, Retention(keep_last, None)
    )


def policy_of(stage: Stage) -> Any:
    from rlmath.checkpoint.hf.weight_map import adapter_rules, placed_tensors
    from rlmath.checkpoint.sharded_state import POLICY, SavedModel

    lora = stage.config.lora
    actor = stage.actor
    rules = adapter_rules(stage.shape.architecture, lora.rank, lora.target)
    placed = tuple(placed_tensors(stage.shape, rules))
    return SavedModel(POLICY, actor.chunks, actor.learner.optimizer, adapters=placed)


def learn(stage: Stage, samples: list[Sample]) -> None:
    result = stage.actor.learner.learn(microbatches(stage, samples), None, None)
    assert result.discarded is None


def draws() -> list[float]:
    return torch.rand(4).tolist()


def save(folder: Path, case: Case, samples: list[Sample], root: Path) -> Outcome:
    """Two updates, a checkpoint, and a third update while it is being written."""
    stage = build(folder, case)
    for _ in range(2):
        learn(stage, samples)
    draws()
    store = open_store(stage, root)
    try:
        state = policy_state(stage)
        weights = whole_tensors(stage)
        failed = store.start(progress(2, 2, stage.mesh.world_size), False, SETTINGS)
        assert failed is None, failed
        numbers = draws()
        learn(stage, samples)
        saved = store.finish()
        assert not isinstance(saved, str), saved
    finally:
        store.close()
    return Outcome(state, weights, whole_tensors(stage), numbers)


def load(folder: Path, case: Case, samples: list[Sample], root: Path) -> Outcome:
    """The newest checkpoint in this layout, and one more update."""
    from rlmath.checkpoint.directory import complete_checkpoints, read_progress
    from rlmath.checkpoint.manager import load_checkpoint

    stage = build(folder, case)
    checkpoints, problems = complete_checkpoints(root)
    assert not problems, problems
    progress = read_progress(checkpoints[0].folder)
    load_checkpoint([policy_of(stage)], stage.device, checkpoints[0], progress)
    stage.actor.learner.restore_schedule(progress.updates)
    numbers = draws()
    state = policy_state(stage)
    weights = whole_tensors(stage)
    learn(stage, samples)
    return Outcome(state, weights, whole_tensors(stage), numbers)


def save_often(
    folder: Path, case: Case, root: Path, steps: list[tuple[int, bool]], keep_last: int
) -> None:
    """Checkpoints of the given (step, kept)."""
    stage = build(folder, case)
    store = open_store(stage, root, keep_last)
    try:
        for step, is_kept in steps:
            assert store.start(progress(step, 0, stage.mesh.world_size), is_kept, SETTINGS) is None
            assert not isinstance(store.finish(), str)
    finally:
        store.close()


def signal_the_writers(folder: Path, case: Case, root: Path) -> list[str | None]:
    """Send the writers what Slurm sends to all processes of a job.

    It arrives when they have just been started, and when they are at work."""
    from rlmath.distributed.fault_tolerance.preemption import SIGNALS

    stage = build(folder, case)
    store = open_store(stage, root)
    errors = []
    try:
        for step in (1, 2):
            writer = store._running_writer()._process
            for number in SIGNALS:
                writer.send_signal(number)
            refused = store.start(progress(step, 0, stage.mesh.world_size), False, SETTINGS)
            for number in SIGNALS:
                writer.send_signal(number)
            errors.append(refused or error_of(store.finish()))
            assert store._writer._process is writer
    finally:
        store.close()
    return errors


def error_of(saved: Any) -> str | None:
    return saved if isinstance(saved, str) else None


def lose_a_writer(folder: Path, case: Case, root: Path) -> list[str | None]:
    """Rank 1's writer is killed at work; the save fails everywhere, and the next one succeeds."""
    stage = build(folder, case)
    store = open_store(stage, root)
    errors = []
    try:
        writer = store._running_writer()._process
        writer.send_signal(signal.SIGSTOP if stage.mesh.rank == 1 else signal.SIGCONT)
        assert store.start(progress(1, 0, stage.mesh.world_size), False, SETTINGS) is None
        if stage.mesh.rank == 1:
            writer.kill()
        errors.append(error_of(store.finish()))
        refused = store.start(progress(2, 0, stage.mesh.world_size), False, SETTINGS)
        errors.append(refused or error_of(store.finish()))
    finally:
        store.close()
    return errors


def save_beside(folder: Path, case: Case, root: Path, lost: int | None = None) -> str | None:
    """Each rank writes a file beside its part; the disk loses that of rank `lost` meanwhile."""
    stage = build(folder, case)
    store = open_store(stage, root)
    rank = stage.mesh.rank
    name = f"routes-{rank:05d}"
    try:
        files = {name: b"%d" % rank * 1000}
        assert store.start(progress(1, 0, stage.mesh.world_size), False, SETTINGS, files) is None
        written = root / "step-000001.partial" / name
        assert written.read_bytes() == files[name]
        written.write_bytes(b"x" * 1000)
        if rank == lost:
            written.unlink()
        return error_of(store.finish())
    finally:
        store.close()
