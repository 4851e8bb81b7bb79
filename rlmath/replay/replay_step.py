"""Makes a captured step again on the ranks of a replay (`replay`), and compares the two."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmath.algorithms.types import ScoredGroup
from rlmath.checkpoint.capture import Capture, CapturedMinibatch, CapturedUpdate
from rlmath.checkpoint.convert.convert import (
    adapters_to_hf,
    begun_model_to_hf,
    megatron_to_hf,
)
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.config import length_curriculum
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import write_whole
from rlmath.data.dataset import Inputs
from rlmath.data.routes import places_of
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.device import Device, run_device
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.planning.memory_estimate import mesh_of
from rlmath.rewards.reward_manager import RewardWorkers
from rlmath.rollout.collector import CollectGroups, Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.routes import RouteStore, load_on_all_ranks
from rlmath.rollout.sampling import RolloutSeed, training_sampling
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters, engine_shapes
from rlmath.run.join import join_run
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.checkpoint_choice import choose_checkpoint
from rlmath.run.recovery.restore import restore
from rlmath.run.recovery.resume import CheckpointToResume, Recovery
from rlmath.telemetry.reporter import StepRecord
from rlmath.trainer.metrics import UpdateRecord
from rlmath.trainer.policy_update import PolicyTrainer
from rlmath.trainer.recorder import captured_update, weights_digest
from rlmath.trainer.rollouts.engines import open_engine_workers

logger = logging.getLogger(__name__)

REPLAY_FILE = "replay.json"
MODEL_FOLDER = "model"
PLAIN = ("grad_norm", "learning_rate")
MAXIMA = ("mismatch_max",)
"""Numbers of a minibatch that are no sums over its tokens; the second are of one token (nats)."""
SHOWN = ("loss", "tokens", "ratio", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Difference:
    """A number of a minibatch, captured and replayed."""

    minibatch: str
    name: str
    captured: float
    replayed: float
    relative: float
    """Share of the larger value that both differ by.

    Where a value of a token, or its mean over tokens, is less than 1, it is a share of 1."""


@dataclass(frozen=True)
class Comparison:
    """What a replayed update differs in."""

    differences: tuple[Difference, ...]
    """All numbers of all minibatches."""
    start: str
    """Whether it began with the captured weights: "equal", "other" or "not captured"."""
    weights: str
    """Whether the weights afterwards are the captured ones to the bit, in the same words."""
    minibatches: int = 0
    """Number of minibatches of policy and critic that were compared."""
    mistakes: tuple[str, ...] = ()
    """Why the two cannot be compared number by number."""

    def counted(self, tolerance: float) -> list[Difference]:
        """The numbers that the tolerance is for.

        What a single token has, the largest mismatch, is rounded more than means are: it counts
        only where all bits must be the same."""
        return [
            difference
            for difference in self.differences
            if tolerance == 0 or difference.name not in MAXIMA
        ]

    def same(self, tolerance: float) -> bool:
        """Whether minibatches were compared and all numbers that count are within the tolerance."""
        return self.minibatches > 0 and not self._differs(tolerance)

    def status(self, tolerance: float) -> int:
        """The exit status.

        FINISHED where both are the same, FAILURE where they differ, else NOTHING_COMPARED."""
        if self._differs(tolerance):
            return exit_codes.FAILURE
        return exit_codes.FINISHED if self.minibatches else exit_codes.NOTHING_COMPARED

    def _differs(self, tolerance: float) -> bool:
        is_near = all(difference.relative <= tolerance for difference in self.counted(tolerance))
        return bool(self.mistakes) or self.start == "other" or not is_near

    @property
    def bit_equal(self) -> bool:
        return self.same(0.0) and self.weights == "equal"


# ---------------------------------------------------------------- update


class ReplayTrainer(PolicyTrainer):
    """The models of the run as they were before the step, and its update, without engines."""

    capture: Capture
    last: UpdateRecord

    @property
    def layout(self) -> str:
        return self.mesh.training_layout

    def step(self, number: int) -> StepRecord:
        """Make the update of the captured step."""
        learned = self.capture.learned
        routes = None
        if self.config.policy.routing_replay == "engine":
            routes = RouteStore(self.mesh.rank)
            learned = load_captured_routes(routes, self.capture, self.mesh, self.shape)
        updater = self.updaters[self.capture.length_stage]
        self.last = updater.update(learned, number, self.capture.own_advantages, routes=routes)
        return StepRecord(
            {},
            groups=learned,
            advantages=self.last.advantages,
            validation=None,
            results=self.last.results,
        )

    def scale_learning_rate(self) -> None:
        """Lower the learning rate as the run's rollbacks before the step did."""
        rate = self.config.algorithm.rollback_lr_factor**self.capture.rollbacks
        for model in filter(None, (self.actor, self.critic)):
            model.learner.lr_scale = rate


def load_captured_routes(
    routes: RouteStore, capture: Capture, mesh: Mesh, shape: ModelShape
) -> list[ScoredGroup]:
    """Hold this rank's part of a capture's routes; returns its learned groups with their places.

    A collective. ValueError on all ranks where one cannot read its part."""
    assert capture.folder is not None, "it was read"
    learned = capture.learned
    places = places_of(completion for group in learned for completion in group.completions)
    try:
        moved = load_on_all_ranks(
            routes, capture.folder, places, world_size=mesh.world_size, shape=shape
        )
    except ValueError as error:
        raise ValueError(f'the capture "{capture.folder}" is damaged: {error}') from error
    return [
        replace(
            group,
            completions=tuple(
                replace(completion, routes_at=tuple(moved[place] for place in completion.routes_at))
                for completion in group.completions
            ),
        )
        for group in learned
    ]


def replay_update(
    capture: Capture,
    state: CheckpointToResume | None,
    tolerance: float,
    prepared: PreparedRun[Inputs],
    rendezvous: Rendezvous | None,
) -> int:
    """Make the update of a captured step again; the exit status: `Comparison.status`."""
    with ExitStack() as stack:
        mesh, device, heartbeat = begin(stack, prepared, rendezvous)
        heartbeat.enter_phase("build model")
        context = prepared.on_rank(
            mesh, device, on_phase=heartbeat.enter_phase, on_progress=heartbeat.report_progress
        )
        trainer = ReplayTrainer(context)
        trainer.capture = capture
        trainer.build_models(context)
        trainer.scale_learning_rate()
        restore(trainer, _whole(state, heartbeat), heartbeat)
        before = weights_digest(trainer)  # on rank 0
        trainer.step(capture.step)
        replayed = captured_update(trainer.last, weights_digest(trainer))
        status = exit_codes.FINISHED
        if before is not None:
            comparison = compare(capture, before, replayed)
            is_same = comparison.same(tolerance)
            content = {"part": "update", "same": is_same, "bit_equal": comparison.bit_equal}
            content |= asdict(comparison)
            lines = comparison_lines(capture, comparison, replayed, tolerance=tolerance)
            status = _end(prepared, comparison.status(tolerance), content, lines=lines)
        status = broadcast_from_rank_zero(status)
    dist.destroy_process_group()
    return status


def compare(capture: Capture, before: str, replayed: CapturedUpdate) -> Comparison:
    """Compare what the replay of an update gave with what the run's gave.

    `before` is the digest of the replay's weights."""
    start = _compared(capture.weights_before, before)
    captured = capture.update
    if captured is None:
        return Comparison((), start, "not captured")
    mistakes = []
    differences = []
    minibatches = 0
    for kind in ("minibatches", "critic_minibatches"):
        rows = getattr(captured, kind)
        other_rows = getattr(replayed, kind)
        if len(rows) != len(other_rows):
            mistakes.append(f"{kind}: {len(rows)} captured, {len(other_rows)} replayed")
        word = "critic " if kind.startswith("critic") else ""
        for number, (row, other_row) in enumerate(zip(rows, other_rows, strict=False), start=1):
            if row.discarded != other_row.discarded and None in (
                row.discarded,
                other_row.discarded,
            ):
                mistakes.append(f"{word}minibatch {number}: discarded in one of the two only")
            differences += _differences(f"{word}{number}", row, other_row)
            minibatches += 1
    captured_sizes, replayed_sizes = ([*map(len, part.advantages)] for part in (captured, replayed))
    if captured_sizes == replayed_sizes:
        differences += _advantage_differences(captured.advantages, replayed.advantages)
    else:
        mistakes.append(
            f"advantages: groups of {captured_sizes} captured, of {replayed_sizes} replayed"
        )
    weights = _compared(captured.weights_after, replayed.weights_after)
    return Comparison(
        tuple(differences), start, weights, minibatches=minibatches, mistakes=tuple(mistakes)
    )


def _compared(captured: str | None, replayed: str | None) -> str:
    if captured is None:
        return "not captured"
    return "equal" if captured == replayed else "other"


def _differences(
    label: str, captured: CapturedMinibatch, replayed: CapturedMinibatch
) -> Iterator[Difference]:
    tokens = abs(captured.numbers.get("tokens", 1.0))
    for name, captured_value in captured.numbers.items():
        replayed_value = replayed.numbers.get(name, math.nan)
        floor = 0.0 if name in PLAIN else 1.0 if name in MAXIMA else tokens
        yield Difference(
            label,
            name,
            captured=captured_value,
            replayed=replayed_value,
            relative=relative_difference(captured_value, replayed_value, floor),
        )


def _advantage_differences(
    captured: Sequence[Sequence[float]], replayed: Sequence[Sequence[float]]
) -> Iterator[Difference]:
    pairs = [
        pair
        for captured_row, replayed_row in zip(captured, replayed, strict=True)
        for pair in zip(captured_row, replayed_row, strict=True)
    ]
    differences = [
        Difference(
            "all",
            "advantage",
            captured=captured_value,
            replayed=replayed_value,
            relative=relative_difference(captured_value, replayed_value, floor=1.0),
        )
        for captured_value, replayed_value in pairs
    ]
    yield from sorted(differences, key=lambda difference: difference.relative)[-1:]


def relative_difference(value: float, other: float, floor: float) -> float:
    """The difference as a share of the larger of both and the floor.

    It is 0 for the same value or two NaN, and infinite where only one is finite.

    >>> relative_difference(2.0, 1.0, 0.0), relative_difference(2.0, 1.0, 10.0)
    (0.5, 0.1)
    >>> relative_difference(1.0, math.nan, 0.0)
    inf
    """
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    difference = abs(value - other)
    return (
        difference / max(abs(value), abs(other), floor) if math.isfinite(difference) else math.inf
    )


def comparison_lines(
    capture: Capture, comparison: Comparison, replayed: CapturedUpdate, tolerance: float
) -> list[str]:
    """Lines for the console on the comparison of two updates."""
    lines = [f"The weights before the step, beside the captured ones: {comparison.start}"]
    for difference in comparison.differences:
        if difference.name in SHOWN:
            lines.append(
                f"  minibatch {difference.minibatch:<3} {difference.name:<14} "
                f"{difference.captured:>15.8g} {difference.replayed:>15.8g} "
                f"{difference.relative:.1e}"
            )
    lines += [f"  {mistake}" for mistake in comparison.mistakes]
    if capture.update is None:
        results = [asdict(minibatch) for minibatch in replayed.minibatches]
        ended = f"the run ended in the update ({capture.reason}); the replay gave {results}"
        has_differences = comparison.status(tolerance) == exit_codes.FAILURE
        return [*lines, f"{'NOT the same' if has_differences else 'Nothing was compared'}: {ended}"]
    if comparison.status(tolerance) == exit_codes.NOTHING_COMPARED:
        made_none = f"step {capture.step + 1} made no update, neither in the run nor here"
        return [*lines, f"Nothing was compared: {made_none}"]
    word = (
        "The same to the bit"
        if comparison.bit_equal
        else "The same"
        if comparison.same(tolerance)
        else "NOT the same"
    )
    if counted := comparison.counted(tolerance):
        difference = max(counted, key=lambda difference: difference.relative)
        word += (
            f": the largest relative difference is {difference.relative:.1e}, {difference.name} of "
            f"minibatch {difference.minibatch}"
        )
    lines.append(f"{word}; allowed: {tolerance:g}; weights afterwards: {comparison.weights}")
    return lines


# ---------------------------------------------------------------- rollout


def replay_rollout(
    capture: Capture,
    state: CheckpointToResume | None,
    tolerance: float,
    prepared: PreparedRun[Inputs],
    rendezvous: Rendezvous | None,
) -> int:
    """Sample and score a captured step again; the exit status: `RolloutComparison.status`."""
    config = prepared.config
    shape = prepared.shapes.policy
    mesh = mesh_of(
        config.parallel, config.rollout, environment_world_size(), rank=environment_rank()
    )
    with ExitStack() as stack:
        workers = stack.enter_context(open_engine_workers(config, mesh))
        mesh, device, heartbeat = begin(stack, prepared, rendezvous)
        heartbeat.enter_phase("load checkpoint")
        policy = _policy_folders(prepared, _whole(state, heartbeat), mesh, device=device)
        heartbeat.enter_phase("build engine")
        adapters = engine_adapters(shape, config.lora)
        engine = Engine(
            str(policy.model),
            config.rollout,
            max_sequence=length_curriculum.engine_length(config),
            mesh=mesh,
            device=device,
            weight_shapes=engine_shapes(shape, mesh.engine_size, adapters),
            load_weights=True,
            stop_token_ids=prepared.inputs.stop_token_ids,
            adapter=policy.adapter,
        )
        engine.on_step = heartbeat.report_progress
        heartbeat.enter_phase("rollout")
        groups = _sample_again(capture, prepared, engine, mesh=mesh, workers=workers)
        status = exit_codes.FINISHED
        if mesh.rank == 0:
            comparison = compare_groups(capture.groups, groups)
            content = {"part": "rollout", "same": comparison.same} | asdict(comparison)
            status = _end(prepared, comparison.status, content, lines=[rollout_line(comparison)])
            shutil.rmtree(Path(config.run.output_dir) / MODEL_FOLDER, ignore_errors=True)
        status = broadcast_from_rank_zero(status)
        engine.close()
    return status


@dataclass(frozen=True)
class PolicyFolders:
    """The policy that a step began with, on disk."""

    model: Path
    """A Hugging Face folder."""
    adapter: Path | None
    """A PEFT folder of the adapters that the engine holds beside it; None: they change nothing."""


def _policy_folders(
    prepared: PreparedRun[Inputs], state: CheckpointToResume | None, mesh: Mesh, device: Device
) -> PolicyFolders:
    """The policy that the step began with, on disk.

    Rank 0 converts a checkpoint, or merges the adapters that the run began with where the run's
    engines had them merged. A collective."""
    config = prepared.config
    base = Path(config.model.path)
    holds_adapters = bool(engine_adapters(prepared.shapes.policy, config.lora))
    adapter = config.model.adapter_path
    if state is None and (holds_adapters or adapter is None):
        return PolicyFolders(base, None if adapter is None else Path(adapter))
    folder = Path(config.run.output_dir) / MODEL_FOLDER
    mistake = None
    if mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _convert(prepared, state, folder, holds_adapters, dtype=device.params_dtype)
        except (OSError, ValueError) as error:
            mistake = str(error)
    mistake = broadcast_from_rank_zero(mistake)
    if mistake is not None:
        raise ValueError(mistake)
    return PolicyFolders(base, folder) if holds_adapters else PolicyFolders(folder, None)


def _convert(
    prepared: PreparedRun[Inputs],
    state: CheckpointToResume | None,
    folder: Path,
    adapters_alone: bool,
    dtype: torch.dtype,
) -> None:
    """Write the policy's whole model into `folder`, or its adapters."""
    config = prepared.config
    shape = prepared.shapes.policy
    base = Path(config.model.path)
    if state is None:
        begun_model_to_hf(config, shape, folder, dtype=dtype)
    elif adapters_alone:
        adapters_to_hf(state[0].state, shape, folder, dtype=None, card={})
    else:
        megatron_to_hf(
            state[0].state,
            shape,
            metadata_files=read_metadata_files(base),
            output=folder,
            dtype=None,
            base=base if config.lora.rank else None,
        )


def _sample_again(
    capture: Capture,
    prepared: PreparedRun[Inputs],
    engine: Engine,
    mesh: Mesh,
    workers: RewardWorkers | None,
) -> list[ScoredGroup]:
    """The groups of the step, sampled and scored again."""
    sampling = training_sampling(prepared.shapes.length_stages[capture.length_stage].config.rollout)
    config = prepared.config
    tokenizer = prepared.inputs.tokenizer
    collector = Collector(
        engine,
        mesh,
        tokenizer=tokenizer,
        rollout=config.rollout,
        reward=config.reward,
        pool=workers,
    )
    seed = RolloutSeed(capture.sampling_seed, capture.step)
    title = f"replay of step {capture.step + 1}"
    return collector.collect(
        CollectGroups(prepared.inputs.prompts, sampling, seed, title=title)
    ).groups


@dataclass(frozen=True)
class RolloutComparison:
    """What a replayed rollout differs in."""

    completions: int
    same_tokens: int
    """Completions with the same tokens."""
    same_rewards: int
    """Completions with the same reward."""
    logprobs_apart: float
    """Largest distance between log-probs of the same tokens (nats)."""

    @property
    def same(self) -> bool:
        """Whether completions were compared, and all have the same tokens and rewards."""
        return self.status == exit_codes.FINISHED

    @property
    def status(self) -> int:
        """The exit status.

        FINISHED where both are the same, FAILURE where they differ, else NOTHING_COMPARED."""
        if not self.completions:
            return exit_codes.NOTHING_COMPARED
        is_same = self.same_tokens == self.same_rewards == self.completions
        return exit_codes.FINISHED if is_same else exit_codes.FAILURE


def compare_groups(
    captured: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]
) -> RolloutComparison:
    """The completions of a replayed rollout beside the captured ones."""
    same_tokens = same_rewards = total = 0
    apart = 0.0
    for group, other_group in zip(captured, replayed, strict=True):
        for completion, other_completion, score, other_score in zip(
            group.completions,
            other_group.completions,
            group.scores,
            other_group.scores,
            strict=True,
        ):
            total += 1
            same_rewards += score.reward == other_score.reward
            if list(completion.token_ids) == list(other_completion.token_ids):
                same_tokens += 1
                apart = max(
                    [
                        apart,
                        *(
                            abs(a - b)
                            for a, b in zip(
                                completion.logprobs, other_completion.logprobs, strict=True
                            )
                        ),
                    ]
                )
    return RolloutComparison(
        completions=total, same_tokens=same_tokens, same_rewards=same_rewards, logprobs_apart=apart
    )


def rollout_line(comparison: RolloutComparison) -> str:
    """Line for the console on the comparison of two rollouts."""
    if not comparison.completions:
        return "Nothing was compared: the step has no completion"
    return (
        f"{comparison.same_tokens} of {comparison.completions} completions have the same tokens, "
        f"{comparison.same_rewards} the same reward; log-probs of the same tokens are apart by at "
        "most "
        f"{comparison.logprobs_apart:.1e} nats"
    )


# ---------------------------------------------------------------- both


def begin(
    stack: ExitStack, prepared: PreparedRun[Inputs], rendezvous: Rendezvous | None
) -> tuple[Mesh, Device, Heartbeat]:
    """Join the process group and the heartbeat, and log what is replayed.

    A collective."""
    config = prepared.config
    mesh = mesh_of(
        config.parallel, config.rollout, environment_world_size(), rank=environment_rank()
    )
    device = run_device(config)
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, mesh.rank)
    _, heartbeat = join_run(stack, config, device, rendezvous=rendezvous, stop=stop)
    if mesh.rank == 0:
        for line in prepared.lines:
            logger.info("%s", line)
        for line in prepared.warnings:
            logger.warning("%s", line)
    return mesh, device, heartbeat


def _whole(state: CheckpointToResume | None, heartbeat: Heartbeat) -> CheckpointToResume | None:
    """The checkpoint, whose files are read; ValueError where they are not as they were written.

    A collective."""
    heartbeat.enter_phase("check checkpoint")
    return choose_checkpoint(
        None if state is None else Recovery([state], []), heartbeat.report_progress
    )


_ENDINGS = {
    exit_codes.FINISHED: "the replay is the same",
    exit_codes.FAILURE: "the replay is not the same",
    exit_codes.NOTHING_COMPARED: "nothing was compared",
}
"""What the status of a replay's folder says, by the exit status."""


def _end(
    prepared: PreparedRun[Inputs], status: int, content: Mapping[str, Any], lines: Sequence[str]
) -> int:
    """Log the lines, write the content; the exit status, which the replay's folder gets, too."""
    for line in lines:
        logger.info("%s", line)
    output = Path(prepared.config.run.output_dir)
    write_whole(output / REPLAY_FILE, json.dumps(content, indent=1) + "\n")
    logger.info("%s", output / REPLAY_FILE)
    exit_codes.write_exit_status(str(output), status, _ENDINGS[status])
    return status
