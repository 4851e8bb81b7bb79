"""A policy that can no longer be trained, and what a run keeps of the time before.

Two signs end a run, alike on all ranks, with the exit status `exit_codes.DIVERGED`:

- parameters or optimizer state that are not finite. All ranks look at theirs before each save and export, and after a
  step that discarded a minibatch;
- `run.max_discarded_steps` steps in a row that had minibatches and discarded all of them.

No checkpoint is written of weights that are not finite. Those of the steps that discarded everything are, and count
among the newest that stay, but the newest one after which something was learned stays beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.hf.weights import all_finite
from rlmath.checkpoint.sharded_state import SavedModel, held_by
from rlmath.distributed.collectives import first_error
from rlmath.models.learner import MinibatchResult

if TYPE_CHECKING:
    from rlmath.trainer.loop import Trainer

ADVICE = (
    "Lower optimizer.lr, raise optimizer.warmup_steps, or lower optimizer.clip_grad, algorithm.n_minibatches or "
    "algorithm.epochs, and start a new run.output_dir"
)


class DivergedError(Exception):
    """The run ends; raised on all ranks alike. The message says why, in one line."""


class DivergenceCheck:
    """Looks for the signs. All ranks call it alike."""

    def __init__(self, trainer: Trainer, max_discarded_steps: int, progress: Progress | None) -> None:
        """`progress` is where a resumed run stands."""
        self._trainer = trainer
        self._max_discarded_steps = max_discarded_steps
        self.discarded_steps = 0 if progress is None else progress.discarded_steps
        """Steps up to now in which all minibatches were discarded; steps without any minibatch do not count."""
        self.learned_step = 0 if progress is None else progress.learned_step
        """Steps done when a minibatch was last learned from."""

    def after_step(self, step: int, results: Sequence[MinibatchResult]) -> None:
        """`step` steps are done; `results` are those of the last one's minibatches. A collective. DivergedError where
        the run must end."""
        discarded = [result.discarded for result in results if result.discarded is not None]
        if len(discarded) < len(results):
            self.discarded_steps, self.learned_step = 0, step
        elif discarded:
            self.discarded_steps += 1
        if not discarded:
            return
        self.raise_if_not_finite()
        if self.discarded_steps >= self._max_discarded_steps:
            raise DivergedError(
                f"every minibatch of {self.discarded_steps} steps in a row was discarded (run.max_discarded_steps is "
                f"{self._max_discarded_steps}), the last one because {discarded[-1]}"
            )

    def raise_if_not_finite(self) -> None:
        """DivergedError, on all ranks, where any rank's parameters or optimizer state are not finite. A collective."""
        with self._trainer.models_on_device():
            mine = next(filter(None, map(self._not_finite, self._trainer.saved_models())), None)
        found = first_error(mine and f"{mine} on rank {dist.get_rank()}")
        if found is not None:
            raise DivergedError(f"there are values that are not finite in {found}")

    @staticmethod
    def _not_finite(model: SavedModel) -> str | None:
        found = first_not_finite(model.chunks, model.optimizer)
        return f"{found} of the {model.name}" if found and model.name else found


@torch.no_grad()
def first_not_finite(chunks: Sequence[Any], optimizer: Any) -> str | None:
    """The first parameter, or tensor of the optimizer's state, of this rank that has a NaN or an infinity, in words;
    None where all are finite. One pass over the memory, without a copy."""
    names: dict[int, str] = {}
    tensors: list[tuple[str, Tensor]] = []
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            # The chunks of a virtual pipeline have the same names.
            names[id(parameter)] = f"{name} of chunk {number}" if len(chunks) > 1 else name
            tensors.append((f"the parameter {names[id(parameter)]}", parameter))
    for held in held_by(optimizer) if optimizer is not None else ():
        for kind, tensor in held.tensors().items():
            tensors.append((f'the optimizer\'s "{kind}" of {names[id(held.parameter)]}', tensor))
    found = torch.stack([all_finite(tensor) for _, tensor in tensors]).tolist()
    return next((name for (name, _), finite in zip(tensors, found, strict=True) if not finite), None)
