"""Which models a GRPO run has, what each is built from, saved with and restored to.

Building takes seconds: the models are named stand-ins that know what they were built from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.algorithms.entropy import EntropyControl
from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    RolloutConfig,
    StagesConfig,
    TeacherConfig,
)
from rlmath.data.order import PromptOrder, Rollback
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.trainer import policy_update
from rlmath.trainer.context import RankContext
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.policy_update import PolicyTrainer
from tests.tiny_models import shape_of

CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
STOPS = (1, 2)
STEPS = 5


class Model:
    """A model of one chunk, and what it was built from."""

    def __init__(self, name: str, **origin: Any) -> None:
        self.name = name
        self.origin = origin
        self.chunks = [torch.nn.Linear(1, 1, bias=False)]
        self.weight = self.chunks[0].weight
        self.weight.requires_grad_(False)
        self.learner = SimpleNamespace(
            optimizer=SimpleNamespace(chained_optimizers=[]),
            updates=3,
            lr_scale=1.0,
            loss_scale_state=(8.0, 2.0),
        )
        self.seconds = {"actor": 1.0, "reference": 2.0, "critic": 4.0, "teacher": 8.0}[name]
        self.on_microbatch: Any = None
        self.forward_backward = self

    def pop_busy_seconds(self) -> float:
        return self.seconds

    def head_parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the place of the builders of models."""

    def build_actor(config: Config, shape: Any, **origin: Any) -> Model:
        return Model("actor", config=config, shape=shape, **origin)

    def build_others(name: str) -> Any:
        def build(config: Config, shape: Any, mesh: Any = None, **origin: Any) -> Model:
            return Model(name, config=config, shape=shape, mesh=mesh, **origin)

        return build

    monkeypatch.setattr(policy_update, "build_actor", build_actor)
    for name in ("reference", "critic", "teacher"):
        monkeypatch.setattr(policy_update, f"build_{name}", build_others(name))


def trainer(config: Config, folder: Path, progress: Any = None) -> PolicyTrainer:
    """A trainer with the models that the settings ask for, whose steps are not made."""
    shape = shape_of(folder)
    config = replace(config, model=ModelConfig(path=str(folder)))
    shapes = RunShapes(
        shape,
        replace(shape, hidden_size=64) if config.algorithm.advantage == "gae" else None,
        replace(shape, hidden_size=32) if config.teacher.path else None,
        tuple(length_stages(config, STEPS)),
    )
    inputs: Any = SimpleNamespace(total_steps=STEPS, stop_token_ids=STOPS)
    context = RankContext(
        config,
        shapes,
        inputs,
        mesh=Mesh(0, 1, 1, pipeline=1, engine_size=1),
        device=CPU,
        on_progress=progress or (lambda: None),
    )
    policy_trainer = object.__new__(GrpoTrainer)
    policy_trainer.config = config
    policy_trainer.shapes = shapes
    policy_trainer.shape = shape
    policy_trainer.mesh = context.mesh
    policy_trainer.device = CPU
    policy_trainer.timers = PhaseTimers()
    policy_trainer.order = PromptOrder(20, 4, seed=1, shuffle=False)
    policy_trainer.build_models(context)
    return policy_trainer


ALL_MODELS = Config(
    algorithm=AlgorithmConfig(advantage="gae", kl_coef=0.1, entropy_coef=0.01, epochs=2),
    critic=CriticConfig(epochs=3, pretrain_steps=1),
    teacher=TeacherConfig(path="t", loss="full"),
    memory=MemoryConfig(offload_reference=True, offload_critic=True, offload_teacher=True),
)
PROGRESS = Progress(
    1,
    0,
    4,
    updates=2,
    syncs=1,
    layout="TP1",
    world_size=1,
    optimizer_tensors=(),
    random_states=(),
    model_fingerprint="m",
    data_fingerprint="d",
    versions={},
)


def test_a_run_has_the_models_that_its_settings_ask_for(tied_model: Path) -> None:
    """Each has its shape and updates, stops where the engine does, and tells of its progress."""
    progress: Any = object()
    run = trainer(ALL_MODELS, tied_model, progress)
    actor: Any = run.actor
    reference: Any = run.reference
    critic: Any = run.critic
    teacher: Any = run.teacher
    assert actor.origin["total_updates"] == (STEPS - 1) * 2, "the critic learns alone at first"
    assert critic.origin["total_updates"] == STEPS * 3
    assert (actor.origin["shape"], critic.origin["shape"], teacher.origin["teacher_shape"]) == (
        run.shapes.policy,
        run.shapes.critic,
        run.shapes.teacher,
    )
    assert reference.origin["actor"] is actor and teacher.origin["shape"] is run.shapes.policy
    assert [model.origin["stop_token_ids"] for model in (actor, reference, teacher)] == [STOPS] * 3
    assert [model.on_microbatch for model in (actor, critic, teacher)] == [progress] * 3
    for updater in run.updaters:
        assert (updater.actor, updater.reference) == (actor, reference)
        assert (updater.critic, updater.teacher, updater.offload) == (critic, teacher, run.offload)
        assert updater.timers is run.timers
    assert not run.reference_moved
    assert run.entropy == EntropyControl(0.01, 0.01)
    assert set(run.offload.names) >= {"reference", "critic", "teacher", "teacher_head"}
    assert b'"value"' in run.critic_config
    bare = trainer(Config(), tied_model)
    assert bare.reference is bare.critic is bare.teacher is None
    assert bare.busy_seconds() == 1.0 and run.busy_seconds() == 1.0 + 2.0 + 4.0 + 8.0
    in_advantage = replace(ALL_MODELS, teacher=TeacherConfig(path="t", loss="advantage"))
    assert "teacher_head" not in trainer(in_advantage, tied_model).offload.names


def test_a_critic_of_its_own_path_has_that_models_description(
    tied_model: Path, untied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_update, "critic_config_file", lambda folder, shape: (folder, shape))
    with_critic_path = replace(ALL_MODELS, critic=CriticConfig(path=str(untied_model)))
    for config, folder in ((with_critic_path, untied_model), (ALL_MODELS, tied_model)):
        run = trainer(config, tied_model)
        assert run.critic_config == (folder, run.shapes.critic)


def test_each_length_stage_has_an_updater_with_its_lengths(tied_model: Path) -> None:
    config = replace(
        Config(stages=StagesConfig(steps=[2, 3], max_new_tokens=[16, 32])),
        rollout=RolloutConfig(max_new_tokens=64),
    )
    run = trainer(config, tied_model)
    lengths = [updater.config.rollout.max_new_tokens for updater in run.updaters]
    assert lengths == [16, 32]


def test_a_checkpoint_has_the_critic_and_a_reference_that_has_moved(tied_model: Path) -> None:
    run = trainer(ALL_MODELS, tied_model)
    run.config = replace(
        run.config, algorithm=replace(ALL_MODELS.algorithm, reference_every_steps=3)
    )
    models: list[Any] = run.models
    assert [model.name for model in models] == ["", "critic", "reference"]
    built: list[Any] = [run.actor, run.critic, run.reference]
    assert [model.chunks for model in models] == [model.chunks for model in built]
    actor, critic, reference = built
    optimizers = [actor.learner.optimizer, critic.learner.optimizer, None]
    assert [model.optimizer for model in models] == optimizers
    assert [model.name for model in run.saved_models()] == ["", "critic"]
    for steps_done in (1, 2, 3):
        with run.offload.on_device("reference"):
            assert not run.reference_moved and not torch.equal(reference.weight, actor.weight)
        run.move_reference(steps_done)
    with run.offload.on_device("reference"):
        assert torch.equal(reference.weight, actor.weight)
    assert [model.name for model in run.saved_models()] == ["", "critic", "reference"]
    progress = run.complete_progress(PROGRESS)
    assert (progress.critic_updates, progress.critic_loss_scale) == (3, (8.0, 2.0))
    assert progress.entropy == ()


def test_the_adapters_that_learn_are_what_a_checkpoint_has_of_the_policy(tied_model: Path) -> None:
    lora = LoraConfig(rank=2, target="attention")
    (policy,) = trainer(Config(lora=lora), tied_model).models
    names = {name for placed in policy.adapters for name in placed.hf_names}
    assert names and all("lora" in name and "self_attn" in name for name in names)
    (whole,) = trainer(Config(), tied_model).models
    assert tuple(whole.adapters) == ()


def test_the_models_that_are_saved_are_on_the_device_meanwhile(tied_model: Path) -> None:
    run = trainer(ALL_MODELS, tied_model)
    run.offload.offload("reference", "critic", "teacher")
    models = run.models
    with run.models_on_device(models):
        assert run.offload.offloaded == ("teacher",)
    with run.models_on_device([model for model in models if model.name != "reference"]):
        assert set(run.offload.offloaded) == {"reference", "teacher"}
    assert set(run.offload.offloaded) == {"reference", "critic", "teacher"}


@pytest.mark.parametrize(
    ("moved", "saved", "reads"),
    [(False, False, 0), (True, False, 1), (True, True, 0), (False, True, 0)],
)
def test_a_reference_that_has_moved_is_read_again_where_the_checkpoint_has_none(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch, moved: bool, saved: bool, reads: int
) -> None:
    """After a rollback to a step before its first move."""
    run = trainer(ALL_MODELS, tied_model)
    critic: Any = run.critic
    restored: list[tuple[Any, ...]] = []
    critic.learner.restore_schedule = lambda *schedule: restored.append(schedule)
    run.offload.offload("reference")
    read: list[tuple[Any, ...]] = []

    def load_hf_weights(chunks: Any, folder: str, shape: Any, mesh: Mesh) -> None:
        assert "reference" not in run.offload.offloaded
        read.append((chunks, folder, shape))

    monkeypatch.setattr(policy_update, "load_hf_weights", load_hf_weights)
    run.reference_moved = moved
    progress = replace(
        PROGRESS,
        models=("critic", "reference") if saved else ("critic",),
        critic_updates=6,
        critic_loss_scale=(4.0, 1.0),
        entropy=(0.5, 0.5),
    )
    PolicyTrainer.resume(run, tied_model, progress)
    reference: Any = run.reference
    assert read == [(reference.chunks, str(tied_model), run.shape)] * reads
    assert run.reference_moved is saved and restored == [(6, (4.0, 1.0))]
    assert run.entropy == EntropyControl(0.01, 0.01), "there is no target"


def test_every_rollback_lowers_the_rates_of_policy_and_critic(tied_model: Path) -> None:
    config = replace(ALL_MODELS, algorithm=replace(ALL_MODELS.algorithm, rollback_lr_factor=0.5))
    run = trainer(config, tied_model)
    critic: Any = run.critic
    rollbacks = [Rollback(1, 1, 2), Rollback(2, 2, 3)]
    run.roll_back(rollbacks)
    assert run.actor.learner.lr_scale == critic.learner.lr_scale == 0.25
    assert run.rollbacks == tuple(rollbacks)
    assert run.order.seed_at(3) not in (run.order.seed_at(2), run.order.seed_at(1))
