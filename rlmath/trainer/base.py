"""What the life cycle (`rlmath.run.loop`) asks of a training program on one rank.

GRPO (`grpo`), supervised training (`sft`) and the replay of a step are three of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.hf.weight_map import adapter_rules, placed_tensors
from rlmath.checkpoint.sharded_state import POLICY, SavedModel
from rlmath.config.schema import Config, Kind
from rlmath.data.order import Rollback
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.peak_flops import peak_flops
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor
from rlmath.models.megatron import start_megatron
from rlmath.telemetry.reporter import StepRecord, ValidationResult
from rlmath.trainer.context import RankContext


class Export(Protocol):
    """Writes the model as it is in Hugging Face form into a folder, with `further_files`.

    A collective. OSError on rank 0 where the disk refuses."""

    def __call__(self, folder: Path, further_files: Mapping[str, bytes] | None = None) -> None: ...


@dataclass(frozen=True)
class Interrupted:
    """A step that was not made: the run was asked to stop while it validated."""

    reason: str
    """One of `preemption.REASONS`."""


class Trainer(ABC):
    """One training program on this rank: its models, its data and its step."""

    kind: ClassVar[Kind]
    rollbacks: tuple[Rollback, ...] = ()
    weight_syncs_per_step: ClassVar[int] = 0
    """1 where there are engines."""
    actor: Actor

    def __init__(self, context: RankContext[Any]) -> None:
        """Start Megatron's process groups; torch's process group must exist.

        A subclass builds models, among them `actor`."""
        self.config = context.config
        self.shapes = context.shapes
        self.shape = context.shapes.policy
        self.mesh = context.mesh
        self.device = context.device
        self.stop_token_ids = context.inputs.stop_token_ids
        self.chat_template = context.inputs.chat_template
        self.order = context.inputs.order
        self.total_steps: int = context.inputs.total_steps
        self.timers = PhaseTimers(context.on_phase)
        start_megatron(
            self.mesh,
            self.device,
            self.config.run.seed,
            timeout_seconds=self.config.run.distributed_timeout_seconds,
        )
        self.peak_flops = peak_flops(self.shape, self.mesh, self.device)

    @staticmethod
    def open_workers(
        config: Config, mesh: Mesh, inputs: Any = None, validation: Sequence[Any] = ()
    ) -> AbstractContextManager[Any]:
        """Processes that this rank needs beside it for `inputs` and the files of `validation`.

        They are opened before process groups and engines, whose threads they must not inherit.
        `RankContext.workers` is what the context manager gives."""
        return nullcontext()

    @property
    @abstractmethod
    def layout(self) -> str:
        """The layout as the summary shows it: "TP2 x PP1 x DP1, ..."."""

    def begin(  # noqa: B027
        self, steps_done: int, export: Export, asked_to_stop: Callable[[], str | None]
    ) -> None:
        """Called once before the first step, with the weights and the optimizer restored.

        `export` writes the model as it is; `asked_to_stop` gives the reason if any rank was asked
        to. Both are collectives."""

    @property
    def models(self) -> list[SavedModel]:
        """The models whose weights a checkpoint may have; each that it has is loaded from it."""
        lora = self.config.lora
        actor = self.actor
        rules = adapter_rules(self.shape.architecture, lora.rank, lora.target)
        placed = tuple(placed_tensors(self.shape, rules))
        return [SavedModel(POLICY, actor.chunks, actor.learner.optimizer, adapters=placed)]

    def saved_models(self) -> list[SavedModel]:
        """The models, some of `models`, that a checkpoint written now must have."""
        return self.models

    def models_on_device(self, models: Sequence[SavedModel]) -> AbstractContextManager[Any]:
        """Keep these models on the device, though they may be offloaded between steps.

        Not to be nested."""
        return nullcontext()

    def complete_progress(self, progress: Progress) -> Progress:
        """The progress with the fields that not every program has."""
        return progress

    def checkpoint_files(self) -> dict[str, bytes]:
        """Files of a checkpoint beside tensors and `Progress`, by name; rank 0 writes them."""
        return {}

    def resume(self, folder: Path, progress: Progress) -> None:  # noqa: B027
        """Continue with the files of `checkpoint_files` in a checkpoint's folder.

        ValueError where one is damaged."""

    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        """Apply the rollbacks that the run has made so far.

        Later prompts and samples have other seeds; the learning rate is lower."""
        self.rollbacks = tuple(rollbacks)
        self.order.roll_back(rollbacks)
        self.actor.learner.lr_scale = self.config.algorithm.rollback_lr_factor ** len(rollbacks)

    def next_draw_step(self, steps_done: int) -> int:
        """The first step for which nothing is drawn yet, with so many steps done."""
        return steps_done

    def evaluate_before_training(self) -> dict[str, float]:
        """Metrics of the model as it came; asked for before step 0 only."""
        return {}

    @abstractmethod
    def step(self, number: int) -> StepRecord | Interrupted:
        """Make step `number`, counted from 0 over the whole run."""

    def validate_at_end(self) -> ValidationResult | None:
        """The validation of the weights after the last step, if one is due."""
        return None

    def at_end(self) -> dict[str, Any]:
        """Called once after the last step, before the summary, to which it adds."""
        return {}

    def busy_seconds(self) -> float:
        """Seconds since the last call in which this rank's models computed.

        Time that they waited for other replicas is not counted."""
        return self.actor.forward_backward.pop_busy_seconds()

    def write_last_step(self, reason: str) -> None:  # noqa: B027
        """Write what the last step's update was made of, if kept, as the run fails or diverges.

        Not a collective."""

    def close(self, status: int) -> None:  # noqa: B027
        """End what the constructor started, when the run ends with this exit status.

        Not called after an error."""
