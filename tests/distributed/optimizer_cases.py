"""What one rank does in the tests of optimizer, schedule and models as the settings ask for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, Config, OptimizerConfig
from rlmath.data.dataset import SftInputs
from rlmath.data.order import PromptOrder
from rlmath.data.seqlen_balancing import training_cost
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.fault_tolerance.preemption import SIGNALS
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.process import end_with_parent
from rlmath.run.recovery.resume import Origin
from rlmath.run.startup import PreparedRun
from tests.distributed.policy_cases import Case, Stage, settings, whole_tensors
from tests.distributed.sft_cases import make_sequences
from tests.tiny_models import shape_of

if TYPE_CHECKING:
    from rlmath.run.loop import Trainer

ALONE = Mesh(0, 1, 1, 1, 1)
STOPS = (1, 7)


def start() -> Device:
    """A process group of one rank, and Megatron's groups on it."""
    from rlmath.models.megatron import start_megatron

    device = open_device("cpu")
    init_process_group(device, 120.0)
    start_megatron(ALONE, device, seed=1, timeout_seconds=120.0)
    return device


def actor_of(config: Config, folder: Path, device: Device, total_updates: int) -> Any:
    from rlmath.models.build import build_actor

    return build_actor(config, shape_of(folder), ALONE, device, total_updates, STOPS)


@dataclass(frozen=True)
class Schedule:
    """An optimizer, and how often a step uses it."""

    optimizer: OptimizerConfig
    steps: int
    n_minibatches: int = 1
    epochs: int = 1


def rates(folder: Path, schedules: Sequence[Schedule], groups: list[ScoredGroup]) -> list[list[float]]:
    """By schedule the learning rate of every update of a run, as its steps report them, and the one that would come
    next."""
    device = start()
    return [_rates(folder, one, groups, device) for one in schedules]


def _rates(folder: Path, schedule: Schedule, groups: list[ScoredGroup], device: Device) -> list[float]:
    from rlmath.data.dataset import most_updates
    from rlmath.models.offload import training_sets
    from rlmath.models.optimizer import learning_rate
    from rlmath.trainer.policy_update import PolicyUpdater

    algorithm = AlgorithmConfig(
        n_minibatches=schedule.n_minibatches, epochs=schedule.epochs, early_stop_ratio=None
    )
    config = replace(settings(folder, Case()), optimizer=schedule.optimizer, algorithm=algorithm)
    actor = actor_of(config, folder, device, most_updates(config, schedule.steps))
    offload = training_sets(actor, None, config.memory, device)
    updater = PolicyUpdater(config, shape_of(folder), ALONE, actor, None, offload, PhaseTimers())
    records = [updater.update(groups, number) for number in range(schedule.steps)]
    found = [result.learning_rate for record in records for result in record.results]
    return [*found, learning_rate(actor.learner.optimizer)]


def learned_with(
    folder: Path, algorithms: Sequence[AlgorithmConfig], groups: list[ScoredGroup]
) -> list[tuple[Any, ...]]:
    """By algorithm, of every minibatch of a step: whether it has log-probs of the policy and of the reference, whether
    it counts as on-policy; and how often the policy and the reference were asked for log-probs."""
    from rlmath.models.build import build_reference
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    device, shape, found = start(), shape_of(folder), []
    for algorithm in algorithms:
        config = replace(settings(folder, Case()), algorithm=algorithm)
        actor = actor_of(config, folder, device, 10)
        reference = build_reference(config, shape, ALONE, device, STOPS) if algorithm.kl_coef else None
        given: list[tuple[bool, bool, bool]] = []
        passes = {"policy": 0, "reference": 0}
        learn = actor.learner.learn

        def learning(
            batches: Any,
            old: Any,
            reference: Any,
            on_policy: bool,
            teacher: Any,
            learn: Any = learn,
            given: Any = given,
        ) -> Any:
            given.append((old is not None, reference is not None, on_policy))
            return learn(batches, old, reference, on_policy, teacher)

        def counted(model: Any, name: str, passes: dict[str, int] = passes) -> None:
            logprobs = model.logprobs

            def counting(batches: Any) -> Any:
                passes[name] += 1
                return logprobs(batches)

            model.logprobs = counting

        actor.learner.learn = learning
        counted(actor.forward_backward, "policy")
        if reference is not None:
            counted(reference, "reference")
        offload = training_sets(actor, reference, config.memory, device)
        updater = PolicyUpdater(config, shape, ALONE, actor, reference, offload, PhaseTimers())
        record = updater.update(groups, 0)
        found.append((given, passes, record.reward_kl is not None))
    return found


def resumed(folder: Path, optimizer: OptimizerConfig, updates: int, total: int) -> float:
    """The learning rate of the next update of a run that is resumed after so many."""
    from rlmath.models.optimizer import learning_rate

    config = replace(settings(folder, Case()), optimizer=optimizer)
    actor = actor_of(config, folder, start(), total)
    actor.learner.restore_schedule(updates)
    return learning_rate(actor.learner.optimizer)


def updates(
    folder: Path, optimizers: Sequence[OptimizerConfig], minibatches: list[list[Sample]], total: int
) -> list[tuple[list[dict[str, Tensor]], list[float]]]:
    """By optimizer the weights after each minibatch, by Hugging Face names, and the gradient norms before clipping."""
    from rlmath.data.packing import pack

    device, found = start(), []
    for optimizer in optimizers:
        config = replace(settings(folder, Case()), optimizer=optimizer)
        config = replace(config, rollout=replace(config.rollout, min_new_tokens=0))
        actor = actor_of(config, folder, device, total)
        stage, weights, norms = Stage(actor, ALONE, shape_of(folder), config, device), [], []
        for samples in minibatches:
            result = actor.learner.learn([pack(samples, range(len(samples)), 1)], None, None)
            assert result.discarded is None
            weights.append(whole_tensors(stage))
            norms.append(result.grad_norm)
        found.append((weights, norms))
    return found


def sft_trainer(
    model: Path, config: Config, device: Device, inputs: SftInputs, on_progress: Callable[[], None]
) -> Any:
    """As `loop.run_training` builds it; needs the process group."""
    from rlmath.trainer.sft import SftTrainer

    prepared = PreparedRun(config, shape_of(model), inputs, Origin("", ""), None)
    return SftTrainer(prepared, ALONE, device, on_progress=on_progress)


def supervised(model: Path, config: Config, held_out: int) -> list[dict[str, float]]:
    """The metrics before a supervised run and of its steps; the first sequences are held out."""
    sequences = make_sequences(12, seed=5)
    train = sequences[held_out:]
    order = PromptOrder(len(train), 4, config.run.seed, shuffle=False)
    inputs = SftInputs(train, sequences[:held_out], order, 4, (), ())
    device = open_device("cpu")
    init_process_group(device, 120.0)
    calls: list[None] = []
    trainer = sft_trainer(model, config, device, inputs, lambda: calls.append(None))
    assert trainer.cost == training_cost(shape_of(model))
    found = [trainer.evaluate_before_training()]
    found += [trainer.step(number).metrics for number in range(inputs.total_steps)]
    assert len(calls) > inputs.total_steps, "every micro-batch is progress"
    return found


def whole_run(model: Path, config: Config) -> dict[str, Any]:
    """What a supervised run of two steps makes of the settings of `run`: limits of time, and what it writes."""
    from megatron.core import parallel_state

    from rlmath.trainer.sft import SftTrainer

    found: dict[str, Any] = {}

    def seconds(group: Any) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    class Observed(SftTrainer):
        """A trainer that notes what is there once it is built."""

        def __init__(self, *given: Any, on_progress: Any, **others: Any) -> None:
            super().__init__(*given, on_progress=on_progress, **others)
            heartbeat = on_progress.__self__
            groups = (dist.group.WORLD, parallel_state.get_data_parallel_group())
            found["heartbeat"], found["grace"] = heartbeat._settings, heartbeat._stop._grace
            found["timeouts"] = tuple(seconds(group) for group in groups)

    sequences = make_sequences(6, seed=5)
    inputs = SftInputs(sequences[2:], sequences[:2], PromptOrder(4, 2, 0, shuffle=False), 2, (), ())
    prepared = PreparedRun(config, shape_of(model), inputs, Origin("", ""), None)
    found["status"] = run_here(Observed, prepared)
    return found


def run_here(trainer_class: type[Trainer], prepared: PreparedRun[Any]) -> int:
    """`run_training`; afterwards signals and the bond to the parent are as they were: this process runs other tests,
    too."""
    from rlmath.run.loop import run_training

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return run_training(trainer_class, prepared, None)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        end_with_parent(os.getppid())


def built(folder: Path, config: Config) -> dict[str, Any]:
    """What the settings made of actor, reference, supervised actor and checkpoints."""
    from rlmath.distributed.fault_tolerance.preemption import StopRequest
    from rlmath.models.build import build_reference
    from rlmath.run.divergence import DivergenceCheck
    from rlmath.run.recovery.checkpointing import Checkpointer

    device, shape = open_device("cpu"), shape_of(folder)
    init_process_group(device, 120.0)
    inputs = SftInputs(make_sequences(10, seed=5), [], PromptOrder(10, 3, 0, shuffle=False), 41, (), ())
    supervised = sft_trainer(folder, config, device, inputs, lambda: None)
    actor = actor_of(config, folder, device, 37)
    reference = build_reference(config, shape, ALONE, device, STOPS)
    saver = Checkpointer(
        supervised,
        Origin("", ""),
        StopRequest(1.0, "", 0),
        DivergenceCheck(supervised, 3, None),
        lambda: None,
    )
    saver.close()
    supervised, store = supervised.actor, saver._store
    learner, scheduler = actor.learner, actor.learner.scheduler
    part = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])[0]
    group_keys = ("lr", "betas", "eps", "fused")
    return {
        "loss": learner.settings,
        "bounds": learner.bounds,
        "models": {
            name: (one.temperature, one.vocab_size, one.min_tokens_mask)
            for name, one in (
                ("actor", actor.forward_backward),
                ("reference", reference),
                ("supervised", supervised.forward_backward),
            )
        },
        "recompute": {
            name: (
                chunk.config.recompute_granularity,
                chunk.config.recompute_method,
                chunk.config.recompute_num_layers,
            )
            for name, chunk in (
                ("actor", actor.chunks[0]),
                ("reference", reference.chunks[0]),
                ("supervised", supervised.chunks[0]),
            )
        },
        "trains": [
            any(one.requires_grad for one in model.parameters())
            for model in (actor.chunks[0], reference.chunks[0])
        ],
        "optimizer": {
            name: getattr(part.config, name)
            for name in (
                "optimizer",
                "lr",
                "min_lr",
                "weight_decay",
                "adam_beta1",
                "adam_beta2",
                "adam_eps",
                "sgd_momentum",
                "clip_grad",
                "use_distributed_optimizer",
            )
        },
        "groups": [tuple(group[key] for key in group_keys) for group in part.optimizer.param_groups],
        "decays": sorted({group["weight_decay"] for group in part.optimizer.param_groups}),
        "schedule": (
            scheduler.init_lr,
            scheduler.max_lr,
            scheduler.min_lr,
            scheduler.lr_warmup_steps,
            scheduler.lr_decay_steps,
            scheduler.lr_decay_style,
            scheduler.start_wd,
            scheduler.end_wd,
        ),
        "total_of_supervised": supervised.learner.scheduler.lr_decay_steps,
        "retention": (
            store._retention.keep_last,
            store._retention.keep_models,
            sorted(store._retention.always),
        ),
        "root": store._root,
        "times": (
            saver._points._frequency,
            saver._models._frequency,
            saver._points._steps_per_epoch,
            saver._points._first,
            saver._models._first,
        ),
    }
