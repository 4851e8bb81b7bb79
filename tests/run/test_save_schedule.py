"""When checkpoints are due, and how much disk a run asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from rlmath.config.schema import Config, RunConfig, SaveConfig, StagesConfig, ValidationConfig
from rlmath.data.order import PromptOrder, Rollback
from rlmath.distributed.mesh import Mesh
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
        actor=SimpleNamespace(learner=SimpleNamespace(updates=31, loss_scale_state=(8.0, 40))),
        weight_syncs_per_step=1,
        mesh=Mesh(3, 8, 2, 2, 1),
        own_progress=lambda: {"critic_updates": 32, "critic_loss_scale": (16.0, 41), "entropy": (0.42, 43.0)},
        rollbacks=(Rollback(1, 33, 34), Rollback(2, 35, 36)),
    )
    divergence = SimpleNamespace(discarded_steps=37, learned_step=38, good_step=39, rewards=[0.4, 0.5])
    checkpointer = object.__new__(Checkpointer)
    vars(checkpointer).update(
        _trainer=trainer,
        _divergence=divergence,
        _origin=Origin("model", "data", "reward", "hooks", adapter="adapter"),
    )
    found = checkpointer._progress(13)
    assert (found.step, found.epoch, found.position, found.updates, found.syncs) == (13, 2, 12, 31, 13)
    assert (found.critic_updates, found.discarded_steps) == (32, 37)
    assert (found.loss_scale, found.critic_loss_scale, found.entropy) == ((8.0, 40), (16.0, 41), (0.42, 43.0))
    assert (found.learned_step, found.good_step, found.rewards) == (38, 39, (0.4, 0.5))
    assert (found.rollback_steps, found.rollback_draw_steps) == ((33, 35), (34, 36))
    assert (found.layout, found.world_size) == ("TP2 x PP2 x DP2", 8)
    of = found.model_fingerprint, found.data_fingerprint, found.reward_fingerprint, found.hooks_fingerprint
    assert (*of, found.adapter_fingerprint) == ("model", "data", "reward", "hooks", "adapter")


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
