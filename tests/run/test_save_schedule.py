"""When checkpoints are due, and how much disk a run asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.manager import CheckpointManager
from rlmath.config.schema import Config, RunConfig, SaveConfig, StagesConfig, ValidationConfig
from rlmath.data.order import PromptOrder, Rollback
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.process import library_versions
from rlmath.rollout.sampling import CPU_SAMPLER_VERSION
from rlmath.run.recovery.checkpointing import Checkpointer
from rlmath.run.recovery.resume import Origin
from rlmath.run.recovery.save_schedule import (
    FIRST_POINT,
    Frequency,
    SaveTimes,
    export_bytes,
    most_models,
    output_bytes,
)
from tests.tiny_models import shape_of

NEVER = Frequency(None, None, None)


def due(times: SaveTimes, steps: int, seconds_per_step: float = 1.0) -> list[int]:
    return [step for step in range(1, steps + 1) if times.due(step, step * seconds_per_step)]


def test_by_steps_and_by_epochs() -> None:
    assert due(SaveTimes(Frequency(None, 4, None), 10, 0.0), 12) == [4, 8, 12]
    assert due(SaveTimes(Frequency(2, None, None), 3, 0.0), 13) == [6, 12]
    assert due(SaveTimes(Frequency(1, 4, None), 3, 0.0), 9) == [3, 4, 6, 8, 9]


def test_by_seconds_since_the_last_time() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0), 10, 250.0) == [3, 6, 9]


def test_a_first_one_is_due_whatever_the_frequency() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0, FIRST_POINT), 8, 250.0) == [2, 5, 8]


def test_never_is_never() -> None:
    assert NEVER.never
    assert due(SaveTimes(NEVER, 3, 0.0, FIRST_POINT), 100, 1e6) == []


def test_a_checkpoint_says_where_the_run_stands() -> None:
    """Every number is another one: none is taken for another."""
    trainer = SimpleNamespace(
        order=PromptOrder(20, 4, seed=1, shuffle=False),
        actor=SimpleNamespace(learner=SimpleNamespace(updates=31)),
        weight_syncs_per_step=1,
        mesh=Mesh(3, 8, 2, 2, 1),
        critic_updates=32,
        rollbacks=(Rollback(1, 33, 34), Rollback(2, 35, 36)),
    )
    divergence = SimpleNamespace(discarded_steps=37, learned_step=38, good_step=39, rewards=[0.4, 0.5])
    checkpointer = object.__new__(Checkpointer)
    vars(checkpointer).update(
        _trainer=trainer, _divergence=divergence, _origin=Origin("model", "data", "reward", "hooks")
    )
    assert checkpointer._progress(13) == Progress(
        step=13,
        epoch=2,
        position=3 * 4,
        updates=31,
        syncs=13,
        layout="TP2 x PP2 x DP2",
        world_size=8,
        optimizer_tensors=(),
        random_states=(),
        model_fingerprint="model",
        data_fingerprint="data",
        reward_fingerprint="reward",
        hooks_fingerprint="hooks",
        versions=library_versions(),
        discarded_steps=37,
        learned_step=38,
        critic_updates=32,
        cpu_sampler=CPU_SAMPLER_VERSION,
        good_step=39,
        rewards=(0.4, 0.5),
        rollback_steps=(33, 35),
        rollback_draw_steps=(34, 36),
    )


def test_what_a_save_keeps_follows_from_the_best_rewards_too(tmp_path: Path) -> None:
    """The policy learned in step 9, and its best rewards were those up to step 4: checkpoints before 5 are sound."""
    progress = Progress(
        13, 0, 0, 31, 13, "", 1, (), (), "", "", {}, discarded_steps=2, learned_step=9, good_step=4
    )
    manager = object.__new__(CheckpointManager)
    vars(manager).update(
        _root=tmp_path,
        _unfinished=None,
        _state=lambda progress: ({}, progress),
        _room_for=lambda state, beside: "no room",
        _give_up=lambda error: manager._unfinished,
    )
    save: Any = manager.start(progress, True, "")
    assert (save.partial.name, save.step, save.kept, save.learned_step) == (
        "step-000013.partial",
        13,
        True,
        5,
    )


def test_models_of_stages_and_the_best_one_count_until_they_are_there(
    tied_model: Path, tmp_path: Path
) -> None:
    shape = shape_of(tied_model)
    plain = Config(
        run=RunConfig(output_dir=str(tmp_path), device="cpu"), save=SaveConfig(ckpt_freq_secs=None)
    )
    model = export_bytes(plain, shape)
    assert output_bytes(plain, shape) == model and most_models(plain) == 1
    staged = replace(plain, stages=StagesConfig(steps=[1, 1, 1]), validation=ValidationConfig(keep_best=True))
    assert output_bytes(staged, shape) == 6 * model and most_models(staged) == 6
    for name in ("models/stage-1", "best_model"):
        (tmp_path / name).mkdir(parents=True)
    assert output_bytes(staged, shape) == 4 * model and most_models(staged) == 6
