"""Keeps the records of a run's last step, and writes them where they are wanted (`capture`)."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlmath.algorithms.dynamic_sampling import Selection
from rlmath.algorithms.types import ScoredGroup
from rlmath.checkpoint.capture import (
    Capture,
    CapturedMinibatch,
    CapturedUpdate,
    route_folder,
    write_capture,
)
from rlmath.checkpoint.directory import content_entry, remove
from rlmath.checkpoint.hf.weights import stream_hf_tensors
from rlmath.config.load import config_as_yaml
from rlmath.data.routes import places_of
from rlmath.distributed.collectives import first_error, gather_to_rank_zero
from rlmath.distributed.process import library_versions
from rlmath.models.learner import MinibatchResult
from rlmath.rollout.routes import RouteStore
from rlmath.trainer.metrics import UpdateRecord

if TYPE_CHECKING:
    from rlmath.trainer.policy_update import PolicyTrainer

logger = logging.getLogger(__name__)


class StepRecorder:
    """Keeps the records of a run's last step on this rank: references, no copies."""

    def __init__(self, trainer: PolicyTrainer, steps: Collection[int]) -> None:
        """`steps`, counted from 1, are written in any case."""
        self._trainer = trainer
        self._steps = steps
        self._last: Capture | None = None
        self._written = False
        self._began = 0.0
        """When the update of the last step began (seconds since 1970)."""

    def before_update(
        self,
        number: int,
        length_stage: int,
        selection: Selection,
        own_advantages: list[list[float]] | None,
        routes: RouteStore | None = None,
    ) -> None:
        """Keep what step `number` (from 0) will learn from.

        `own_advantages` are those of a function of the user's, if there is one; `routes` hold the
        experts of what this rank's engine has sampled, where they are replayed. Every rank
        writes those of the step where it is to be written, which is a collective."""
        trainer = self._trainer
        self._written = False
        self._began = time.time()
        self._last = Capture(
            step=number,
            reason="",
            settings_yaml="",
            total_steps=trainer.total_steps,
            length_stage=length_stage,
            sampling_seed=trainer.order.seed_at(number),
            rollbacks=len(trainer.rollbacks),
            layout=trainer.mesh.training_layout,
            world_size=trainer.mesh.world_size,
            groups=selection.sampled,
            chosen=[chosen.samples for chosen in selection.chosen],
            own_advantages=own_advantages,
        )
        if number + 1 in self._steps:
            self._last = replace(
                self._last,
                weights_before=weights_digest(trainer),
                route_files=self._write_routes(number, routes, selection.learned),
            )

    def after_update(self, update: UpdateRecord) -> None:
        """Keep the update of that step, which has ended.

        Writes it if wanted, a collective; what the disk refuses is a warning."""
        assert self._last is not None
        is_due = self._last.step + 1 in self._steps
        weights = weights_digest(self._trainer) if is_due else None
        captured = captured_update(update, weights)
        self._last = replace(self._last, update=captured)
        if is_due and self._trainer.mesh.rank == 0:
            self.write("telemetry.capture_steps")
        self._written |= is_due
        self._last = replace(self._last, route_files={})

    def write(self, reason: str) -> None:
        """Write the last step, if there is one and it is not written.

        Not a collective: any rank may."""
        if self._last is None or self._written:
            return
        config = self._trainer.config
        capture = replace(
            self._last,
            reason=reason,
            settings_yaml=config_as_yaml(config),
            versions=library_versions(),
        )
        try:
            folder = write_capture(Path(config.run.output_dir), capture, self._began)
        except (OSError, MemoryError, UnicodeError) as error:
            logger.warning(
                "The records of step %d could not be written: %r", capture.step + 1, error
            )
            return
        finally:
            if capture.route_files:
                remove(route_folder(Path(config.run.output_dir), capture.step))
        self._written = True
        if folder is not None:
            text = "The records of step %d are in %s; rlmath replay makes its update again"
            logger.info(text, capture.step + 1, folder)

    def _write_routes(
        self, step: int, routes: RouteStore | None, groups: Sequence[ScoredGroup]
    ) -> dict[str, str]:
        """Write this rank's file of the routes of these groups; `Capture.route_files` on rank 0.

        Empty on other ranks, and where a rank could not write its own, which is a warning. A
        collective where there are `routes`."""
        if routes is None:
            return {}
        folder = route_folder(Path(self._trainer.config.run.output_dir), step)
        rank = self._trainer.mesh.rank
        places = places_of(completion for group in groups for completion in group.completions)
        digests: dict[str, str] = {}
        problem = None
        try:
            for name, content in routes.files(places).items():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
                digests[name] = content_entry(content).sha256
        except (OSError, MemoryError) as error:
            problem = f"rank {rank}: {error!r}"
        problem = first_error(problem)
        if problem is not None and rank == 0:
            logger.warning("The routes of step %d could not be written: %s", step + 1, problem)
            remove(folder)
        if problem is not None:
            return {}
        route_files: dict[str, str] = {}
        for rank_digests in gather_to_rank_zero(digests) or ():
            route_files |= rank_digests
        return route_files


def captured_update(update: UpdateRecord, weights_after: str | None = None) -> CapturedUpdate:
    """What a capture keeps of an update."""
    minibatches, critic_minibatches = (
        [_captured(result) for result in results]
        for results in (update.results, update.critic_results)
    )
    return CapturedUpdate(
        minibatches, critic_minibatches, update.advantages, weights_after=weights_after
    )


def _captured(result: MinibatchResult) -> CapturedMinibatch:
    numbers = {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
    return CapturedMinibatch(numbers | result.sums | result.maxima, result.discarded)


def weights_digest(trainer: PolicyTrainer) -> str | None:
    """SHA-256 of the policy as it is now, whatever its layout, on rank 0; None elsewhere.

    A collective."""
    digest = hashlib.sha256()
    for name, tensor in stream_hf_tensors(trainer.actor.chunks, trainer.shape, trainer.mesh):
        if trainer.mesh.rank == 0:
            digest.update(name.encode())
            # A copy: a parameter that NumPy has seen cannot be offloaded any more.
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).clone().numpy().data)
    return digest.hexdigest() if trainer.mesh.rank == 0 else None
